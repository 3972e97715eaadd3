"""The process of Spark's driver, as the demo sees it: its reports, and its end by SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

import rocketmq_spark
from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import python
from rocketmq_spark.cli.demo.stage import FINISH, Stage
from rocketmq_spark.errors import RocketMQError

_END_WITHIN_S, _LOOK_S = 30.0, 0.05
_MOST_READ = 1 << 16


class SparkDriver:
    """Starts the driver when entered, and ends it when left. ``kill`` and ``start`` may follow each other."""

    def __init__(self, made: Stage) -> None:
        self._made = made
        self._process: subprocess.Popen[bytes] | None = None
        self._reading = -1
        self._unread = b""
        self._said_all = False

    def __enter__(self) -> SparkDriver:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start Spark and the query, from its checkpoint if there is one. What both print goes to the run's log."""
        self._reading, writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._unread, self._said_all = b"", False
        root = str(Path(rocketmq_spark.__file__).parent.parent)
        call = python("-P", "-m", "rocketmq_spark.cli.demo.job", str(writing), first=[root])
        call["env"] = {"PYSPARK_PYTHON": sys.executable, **call["env"]}
        call["cwd"] = str(self._made.folder)  # where Spark may write
        with open(folders.open_regular(self._made.spark_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as log:
            # A session of its own: Ctrl-C is the demo's, and ``kill`` ends both Python and the JVM.
            self._process = subprocess.Popen(
                **call, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing], start_new_session=True
            )  # fmt: skip
        os.close(writing)
        self._tell(self._made.to_json())

    def finish(self) -> None:
        """All orders are written: the query may end when it has read all, and its totals are read back."""
        self._tell(FINISH + b"\n")

    def _tell(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; ``reports`` says so
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def reports(self) -> Iterator[Mapping[str, object]]:
        """What it has reported since the last call. Raises ``RocketMQError`` if it ended by itself, without its last report."""
        # Its end is looked at first: what it wrote before it ended is then read below.
        ended = self._process is not None and self._exit_code() is not None
        while part := self._part():
            self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._said_all = "totals" in report or "failed" in report
            yield report
        if ended and not self._said_all:
            raise RocketMQError(
                f"Spark's driver ended with exit code {self._exit_code()}",
                remedy=f"Spark's messages are in {self._made.spark_log}",
            )

    def _part(self) -> bytes:
        try:
            return os.read(self._reading, _MOST_READ)
        except BlockingIOError:
            return b""

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the driver, Python and JVM."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._reading)
        self._process = None

    def wait(self) -> None:
        """Wait until it has ended, for half a minute at most."""
        deadline = Deadline.after(_END_WITHIN_S)
        while self._exit_code() is None and not deadline.expired:
            deadline.pause(_LOOK_S)

    def _exit_code(self) -> int | None:
        """The exit code; None while the process lives. Only ``kill`` reaps the process: until then no other process, to which
        ``_signal`` would go, can have its number, which is also that of its group.
        """
        assert self._process is not None
        if sys.platform == "darwin":  # without ``os.waitid``
            return self._process.poll()
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
