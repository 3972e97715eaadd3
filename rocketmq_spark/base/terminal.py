"""The controlling terminal of a process. The process can open it as ``/dev/tty``, whatever owner and mode the terminal has.

A process that takes the rights of another user gives up its terminal. If the process kept the terminal, the other user could
make links to ``/dev/tty``, through which the process would write to the terminal. Open files, such as the standard output, stay
open, and Ctrl-C still ends the process, because the process stays in the foreground group of the terminal.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import termios

from rocketmq_spark.base.process import on_signals

_TERMINAL_PATH = "/dev/tty"
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_AWAITED_SIGNALS = {signal.SIGCHLD, signal.SIGINT, *_FORWARDED_SIGNALS}


def detach() -> None:
    """Give up the controlling terminal of this process, if it has one. Raises ``OSError`` if that fails.

    If this process leads the session, all processes of the session lose the terminal, and Ctrl-C no longer ends them. See
    ``continue_in_child``.
    """
    if (terminal := _open_terminal()) is None:
        return
    # If the leader of the session gives up the terminal, the system sends SIGHUP to the foreground group.
    ignored_signals = [signal.SIGHUP] if _leads_session() else []
    try:
        with on_signals(lambda: None, *ignored_signals):
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
    finally:
        os.close(terminal)


def continue_in_child() -> None:
    """If this process leads the session of a terminal, continue in a child process. When the child has ended, this process ends
    with the exit code of the child. A child can give up the terminal, while the other processes of the session keep it. Call
    this before the process has other threads.

    The command in ``ssh -t HOST COMMAND``, ``docker run -it IMAGE COMMAND`` and ``script -c COMMAND`` leads the session.
    """
    if not _leads_session() or (terminal := _open_terminal()) is None:
        return
    os.close(terminal)
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED_SIGNALS)
    child = os.fork()
    if not child:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        return
    try:
        with on_signals(
            lambda: None, signal.SIGCHLD
        ):  # a handler is necessary, because macOS drops blocked signals that have no handler
            exit_code = _exit_code_of_child(child)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    raise SystemExit(exit_code if exit_code >= 0 else 128 - exit_code)


def _exit_code_of_child(child: int) -> int:
    """Wait for a child, and return its exit code. This process passes signals on to the child. The signals are blocked, so that
    this process never sends one to a new process that has the number of the ended child.

    The user whose rights the child has may stop the child for ever. If the child is stopped, a signal that ends this process
    kills the child.
    """
    is_stopped = must_end = False
    while True:
        number = signal.sigwait(_AWAITED_SIGNALS)
        if number == signal.SIGCHLD:
            while (child_change := os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED))[0]:
                is_stopped = os.WIFSTOPPED(child_change[1])
                if not is_stopped and not os.WIFCONTINUED(child_change[1]):
                    return os.waitstatus_to_exitcode(child_change[1])
        elif signal.getsignal(number) != signal.SIG_IGN:  # nohup makes a program ignore SIGHUP
            must_end = True
            if number in _FORWARDED_SIGNALS:  # Ctrl-C is not forwarded, because it also reaches the child
                os.kill(child, number)
        if is_stopped and must_end:
            os.kill(child, signal.SIGKILL)


def _leads_session() -> bool:
    return os.getsid(0) == os.getpid()


def _open_terminal() -> int | None:
    """Open the terminal and return its descriptor. Returns None if this process has no terminal, or cannot open the device. In
    some containers the device cannot be opened, and links to the device are harmless there.
    """
    try:
        return os.open(_TERMINAL_PATH, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENXIO, errno.ENODEV, errno.ENOENT, errno.EPERM, errno.EACCES):
            return None
        raise
