"""Runs a command so that it cannot outlive the parent process; run as a script, never imported.

Arguments: the process id of the parent, then the command. On Linux this script asks the kernel to kill it when the parent's
thread ends, and then replaces itself with the command (exec). On other systems it keeps running, and kills the command when the
parent has ended. The script imports very little, because each import delays every start.
"""

import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 0.2


def _become(parent_pid: int, command: list[str]) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() == parent_pid:  # if the parent died before ``prctl``, no signal will come
        os.execv(command[0], command)


def _watch(parent_pid: int, command: list[str]) -> int:
    # The signal gets a handler instead of SIG_IGN, because the child would inherit an ignored signal, and SIGTERM must end the
    # child.
    signal.signal(signal.SIGTERM, lambda *_: None)
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            if os.getppid() != parent_pid:
                child.kill()
            time.sleep(_WATCH_INTERVAL_S)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    _parent_pid, _command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux" and "ROCKETMQ_SPARK_GUARD_WATCHES" not in os.environ:
        _become(_parent_pid, _command)
        sys.exit(1)
    sys.exit(_watch(_parent_pid, _command))
