"""Processes of a session: a child, and a grandchild in a group of its own, as Spark's daemon has one."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from rocketmq_spark.cli.demo import process_session
from tests.helpers import awaited

# A tree of three, of which the grandchild is in a group of its own and writes to a pipe without a pause.
TREE = """
import os, subprocess, sys
if len(sys.argv) == 2:
    os.set_inheritable(int(sys.argv[1]), True)
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child"], close_fds=False).wait()
elif len(sys.argv) == 3:
    subprocess.Popen([sys.executable, __file__, sys.argv[1], "child", "grandchild"], close_fds=False).wait()
else:
    os.setpgid(0, 0)
    while True:
        os.write(int(sys.argv[1]), b".")
"""


@pytest.fixture
def tree(tmp_path):
    """The session of such a tree, and the pipe that the grandchild writes to."""
    program = tmp_path / "tree.py"
    program.write_text(TREE)
    reading, writing = os.pipe()
    first = subprocess.Popen([sys.executable, str(program), str(writing)], pass_fds=[writing], start_new_session=True)
    os.close(writing)
    assert os.read(reading, 1) == b"."
    try:
        yield first.pid, reading
    finally:
        process_session.kill(first.pid)
        first.wait()
        os.close(reading)


def arrives(reading: int) -> bool:
    """Whether the grandchild writes more than the pipe held."""
    os.set_blocking(reading, False)
    try:
        while os.read(reading, 1 << 16):
            pass
    except BlockingIOError:
        pass
    try:
        return bool(os.read(reading, 1))
    except BlockingIOError:
        return False


def test_members_are_all_descendants_in_any_group(tree):
    session, _ = tree
    assert len(process_session.members(session)) == 3
    assert {os.getpgid(pid) for pid in process_session.members(session)} != {session}


def test_stopped_processes_run_again_only_when_resumed(tree):
    session, reading = tree
    assert process_session.stop(session, 10.0)
    assert not any(arrives(reading) for _ in range(1000))
    process_session.resume(session)
    assert awaited(lambda: arrives(reading))


def test_a_kill_ends_stopped_processes_of_every_group(tree):
    session, reading = tree
    assert process_session.stop(session, 10.0)
    process_session.kill(session)
    assert process_session.members(session) == {}
    os.set_blocking(reading, True)
    while os.read(reading, 1 << 16):
        pass  # it ends: no process has the pipe open for writing


def test_a_session_without_processes_cannot_be_stopped():
    ended = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ended.wait()
    assert not process_session.stop(ended.pid, 10.0)
    process_session.kill(ended.pid)


def test_processes_that_start_others_are_all_stopped(tmp_path):
    """Each process starts the next one and ends, so that a listing may miss one. A chain that is quicker than a listing cannot be
    stopped; Spark starts none."""
    program = "import os, time\nwhile True:\n    time.sleep(0.5)\n    if os.fork():\n        os._exit(0)\n"
    first = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    try:
        awaited(lambda: first.poll() is not None)
        assert process_session.stop(first.pid, 30.0)
        before = process_session.members(first.pid).keys()
        threading.Event().wait(0.7)
        assert process_session.members(first.pid).keys() == before
    finally:
        process_session.kill(first.pid)
    assert process_session.members(first.pid) == {}


@pytest.fixture
def watcher():
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", process_session.__file__], stdin=subprocess.PIPE, start_new_session=True
    )
    yield watcher
    watcher.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_watcher_kills_the_session_when_its_input_ends(tree, watcher, number):
    session, _ = tree
    watcher.stdin.write(b"0\n%d\n" % session)
    watcher.stdin.flush()
    assert process_session.stop(session, 10.0)
    awaited(lambda: "S" in process_session.members(watcher.pid).get(watcher.pid, ""))
    os.kill(watcher.pid, number)
    assert len(process_session.members(session)) == 3
    watcher.communicate()
    assert process_session.members(session) == {}


def test_the_watcher_kills_no_session_that_has_ended(tree, watcher):
    session, _ = tree
    watcher.communicate(b"%d\n0\n" % session)
    assert len(process_session.members(session)) == 3
