"""The controlling terminal of a process, which opens as ``/dev/tty`` whatever its owner and mode are.

A process that takes the rights of another user gives its terminal up: a link of that user to ``/dev/tty`` would otherwise lead
what the process writes to the terminal of the user who runs the command. Open files, such as the standard output, stay open, and
Ctrl-C still ends the process, because it stays in the foreground group of the terminal.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import signal
import termios

from rocketmq_spark.base.process import on_signals

_NAME = "/dev/tty"
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def leave() -> None:
    """Give up the controlling terminal of this process, if it has one. Raises ``OSError`` if that fails.

    If this process leads the session, all processes of the session lose the terminal, and Ctrl-C no longer ends them: see
    ``in_follower``.
    """
    if (opened := _opened()) is None:
        return
    # The system hangs up on the group in the foreground if its leader leaves.
    ignored = [signal.SIGHUP] if _is_leader() else []
    try:
        with on_signals(lambda: None, *ignored):
            fcntl.ioctl(opened, termios.TIOCNOTTY)
    finally:
        os.close(opened)


def in_follower() -> None:
    """If this process leads the session of a terminal, continue in a child, and end this process when the child has ended, with
    its exit code. A child can give up the terminal alone. Call this before the process has other threads.

    The command in ``ssh -t HOST COMMAND``, ``docker run -it IMAGE COMMAND`` and ``script -c COMMAND`` leads the session.
    """
    if not _is_leader() or (opened := _opened()) is None:
        return
    os.close(opened)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_PASSED_ON})
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    with contextlib.ExitStack() as handlers:
        handlers.enter_context(on_signals(lambda: None, signal.SIGINT))  # Ctrl-C reaches the child, too
        for number in _PASSED_ON:
            handlers.enter_context(on_signals(functools.partial(os.kill, child, number), number))
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    raise SystemExit(ended if ended >= 0 else 128 - ended)


def _is_leader() -> bool:
    return os.getsid(0) == os.getpid()


def _opened() -> int | None:
    """The terminal; None if this process has none, or if there is no device of this name, as in some containers."""
    try:
        return os.open(_NAME, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENXIO, errno.ENODEV, errno.ENOENT):
            return None
        raise
