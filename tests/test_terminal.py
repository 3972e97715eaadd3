"""A process gives its terminal up, writes on, and still ends with Ctrl-C; also if it leads the session of the terminal."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest

from rocketmq_spark.base import terminal

ROOT = Path(__file__).parents[1]
PROGRAM = """
import os, signal, sys, time
from rocketmq_spark.base import terminal

def has_terminal():
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
    except OSError:
        return False
    return True

had = has_terminal()
for step in sys.argv[1:]:
    getattr(terminal, step)()
    print(f"{step}: {had} {has_terminal()}")
try:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # not ``pause``: a signal just before it would not end it
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(7)
"""


class OnTerminal:
    """A program that leads the session of a new terminal, and what it has written there."""

    def __init__(self, *command: str) -> None:
        self.pid, self._terminal = pty.fork()
        if not self.pid:
            with contextlib.suppress(BaseException):
                os.chdir(ROOT)
                os.execvp(command[0], command)
            os._exit(99)
        self.text = ""
        self._late = threading.Timer(60, os.kill, (self.pid, signal.SIGKILL))
        self._late.start()

    def until(self, text: str) -> OnTerminal:
        while text not in self.text and self._read():
            pass
        assert text in self.text, self.text
        return self

    def type(self, keys: bytes) -> OnTerminal:
        os.write(self._terminal, keys)
        return self

    def end(self) -> int:
        """The exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self._late.cancel()
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        try:
            more = os.read(self._terminal, 1 << 16).decode()
        except OSError:  # all processes have closed it
            return False
        self.text += more
        return bool(more)


def program(*steps: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, *steps]


def test_a_process_without_its_terminal_still_ends_with_ctrl_c() -> None:
    """As a shell starts it, which keeps the terminal."""
    script = 'trap : INT; "$@"; echo "code $?"; : </dev/tty && echo kept'
    shell = OnTerminal("sh", "-c", script, "sh", *program("detach")).until("ready").type(b"\x03")
    assert shell.end() == 0
    for text in ("detach: True False", "interrupted", "code 7", "kept"):
        assert text in shell.text


def test_a_leader_is_not_ended_when_it_gives_the_terminal_up() -> None:
    leader = OnTerminal(*program("detach")).until("ready")
    os.kill(leader.pid, signal.SIGTERM)
    assert leader.end() == 5
    assert "detach: True False" in leader.text


@pytest.mark.parametrize(("by", "code"), [("\x03", 7), ("SIGTERM", 5)])
def test_a_leader_continues_in_a_child_and_ends_as_it_does(by: str, code: int) -> None:
    leader = OnTerminal(*program("continue_in_child", "detach")).until("ready")
    if by == "SIGTERM":
        os.kill(leader.pid, signal.SIGTERM)
    else:
        leader.type(by.encode())
    assert leader.end() == code
    assert "detach: True False" in leader.text
    assert leader.text.count("ready") == 1


@pytest.mark.parametrize("by", ["\x03", "SIGTERM", "before"])
def test_a_leader_whose_child_was_stopped_can_be_ended(by: str) -> None:
    """By the user whose rights the child has."""
    leader = OnTerminal(*program("continue_in_child", "detach")).until("ready")
    (child,) = (int(pid) for pid in Path(f"/proc/{leader.pid}/task/{leader.pid}/children").read_text().split())
    if by == "before":  # the child is stopped before it sees the signal
        os.kill(leader.pid, signal.SIGSTOP)
        os.kill(child, signal.SIGSTOP)
        os.kill(leader.pid, signal.SIGTERM)
        os.kill(leader.pid, signal.SIGCONT)
    else:
        os.kill(child, signal.SIGSTOP)
    if by == "SIGTERM":
        os.kill(leader.pid, signal.SIGTERM)
    elif by == "\x03":
        leader.type(b"\x03")
    assert leader.end() == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_terminal_that_may_not_be_opened_is_none(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """As by the rules for devices of a container."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    terminal.detach()
    terminal.continue_in_child()


def test_a_process_without_a_terminal_stays_as_it_is() -> None:
    """As in a service, or a container without one."""
    script = "import os, subprocess, sys; sys.exit(subprocess.run(sys.argv[1:], start_new_session=True).returncode)"
    outer = OnTerminal(sys.executable, "-c", script, *program("continue_in_child", "detach")).until("ready")
    pids = [int(pid) for pid in Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()]
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGTERM)
    assert outer.end() == 5
    assert "continue_in_child: False False" in outer.text
    assert "detach: False False" in outer.text
