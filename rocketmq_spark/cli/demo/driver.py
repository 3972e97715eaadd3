"""The processes of Spark's driver, as the demo sees them: their reports, and their end by SIGKILL.

Python, the JVM and Spark's Python workers form one session of processes. These processes end with the demo. If the demo is
killed while the processes are stopped, a watcher kills them (``process_session``). Driver and watcher hold the lock of the
run's folder, so the folder is in use until they have ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import rocketmq_spark
from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import python_call
from rocketmq_spark.cli.demo import process_session
from rocketmq_spark.cli.demo.environment import FINISH, DemoEnvironment
from rocketmq_spark.errors import RocketMQError

_END_TIMEOUT_S, _POLL_S = 30.0, 0.05
_STOP_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 16


class SparkDriver:
    """Starts the driver on entry and kills it on exit. In the block, ``kill`` and then ``start`` replace the driver.

    Args:
        environment: The environment of the run.
        program: The arguments with which Python runs the driver.
    """

    def __init__(
        self, environment: DemoEnvironment, program: Sequence[str] = ("-m", "rocketmq_spark.cli.demo.job")
    ) -> None:
        self._environment = environment
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._reports_fd = -1
        self._unread_bytes = b""
        self._has_last_report = False

    def __enter__(self) -> SparkDriver:
        self._watcher = subprocess.Popen(
            **python_call("-I", "-S", process_session.__file__), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=self._lock_descriptors, start_new_session=True,
        )  # fmt: skip
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        assert self._watcher is not None
        self._watcher.communicate()

    def start(self) -> None:
        """Start Spark and the query. The query continues from its checkpoint, if there is one. Spark's output goes to the run's
        log."""
        self._reports_fd, write_fd = os.pipe()
        os.set_blocking(self._reports_fd, False)
        self._unread_bytes, self._has_last_report = b"", False
        package_root = str(Path(rocketmq_spark.__file__).parent.parent)
        call_arguments = python_call("-P", *self._program, str(write_fd), first_import_folders=[package_root])
        call_arguments["env"] = {"PYSPARK_PYTHON": sys.executable, **call_arguments["env"]}
        call_arguments["cwd"] = str(self._environment.folder)  # Spark writes files to its current folder
        with open(
            folders.open_regular(self._environment.spark_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab"
        ) as log:
            # The driver gets its own session, so that only the demo gets Ctrl-C, and ``kill`` finds all processes of the driver.
            self._process = subprocess.Popen(
                **call_arguments, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[write_fd, *self._lock_descriptors],
                start_new_session=True,
            )  # fmt: skip
        os.close(write_fd)
        self._write_session_id(self._process.pid)
        self._send(self._environment.to_json())

    @property
    def _lock_descriptors(self) -> list[int]:
        return [] if self._environment.lock is None else [self._environment.lock]

    def _write_session_id(self, session_id: int) -> None:
        assert self._watcher is not None
        assert self._watcher.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the watcher was killed: the demo continues without it
            self._watcher.stdin.write(f"{session_id}\n".encode())
            self._watcher.stdin.flush()

    def finish(self) -> None:
        """Tell the driver that all orders are written. When the query has read the orders, the driver ends the query, and reads
        the totals back.
        """
        self._send(FINISH + b"\n")

    def _send(self, line: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # if the driver has ended, ``reports`` raises an error
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def reports(self) -> Iterator[Mapping[str, object]]:
        """Yield the reports since the last call. Raises ``RocketMQError`` if the driver has ended without its last report."""
        # This check comes before the read, so that the read gets everything that an ended driver has written.
        has_ended = self._exit_code() is not None
        while received_bytes := self._read():
            self._unread_bytes += received_bytes
        *lines, self._unread_bytes = self._unread_bytes.split(b"\n")
        for line in lines:
            report = json.loads(line)
            self._has_last_report = "totals" in report or "failed" in report
            yield report
        if has_ended and not self._has_last_report:
            raise RocketMQError(
                f"Spark's driver ended with exit code {self._exit_code()}",
                remedy=self._environment.remedy,
            )

    def _read(self) -> bytes:
        try:
            return os.read(self._reports_fd, _READ_BYTES)
        except BlockingIOError:
            return b""

    def stop(self) -> bool:
        """Stop all processes of the driver with SIGSTOP. Returns False if there is no process, or if a process still runs."""
        assert self._process is not None
        return process_session.stop(self._process.pid, _STOP_TIMEOUT_S)

    def resume(self) -> None:
        """Let the processes continue after ``stop``."""
        assert self._process is not None
        process_session.resume(self._process.pid)

    def kill(self) -> None:
        """Kill all processes of the driver with SIGKILL. Returns when no process lives."""
        if self._process is None:
            return
        process_session.kill(self._process.pid)
        self._process.wait()
        self._write_session_id(0)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._reports_fd)
        self._process = None

    def wait(self) -> None:
        """Wait until the driver has ended, for half a minute at most."""
        deadline = Deadline.after(_END_TIMEOUT_S)
        while self._exit_code() is None and not deadline.expired:
            deadline.pause(_POLL_S)

    def _exit_code(self) -> int | None:
        """The exit code; None while the process lives. Only ``kill`` reaps the process. Until the process is reaped, no other
        process can have its process id, which is also the id of its session.
        """
        assert self._process is not None
        if sys.platform == "darwin":  # without ``os.waitid``
            return self._process.poll()
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
