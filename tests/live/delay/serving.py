"""Nodes of the delay service in this process, with a clock that a test puts forward; and as commands that may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_spark import ROOT
from tests.helpers import WAIT_S

DAYS_10 = 10 * 24 * 3600


class Node:
    """One that runs until the end of a ``with`` block; ``step_s`` is how far its clock is ahead."""

    def __init__(self, folder: Path, **options: object) -> None:
        self.step_s = 0.0
        place = NodeSettings(folder, now_ms=lambda: int(1000 * (time.time() + self.step_s)))
        self.service = open_node(place, **options)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self.service.run, args=(self._over,))
        self._thread.start()

    def holds(self, count: int) -> bool:
        return wait_until(lambda: self.service.waiting_count == count, Deadline.after(WAIT_S), 0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


class Command:
    """``rocketmq-spark delay serve`` as a process of its own."""

    def __init__(self, mq: LocalBroker, folder: Path, *arguments: str) -> None:
        self._command = [
            sys.executable, "-m", "rocketmq_spark", "delay", "serve", "--topic", "*", "--data", str(folder), "--json",
            "--name-server", mq.name_server, *arguments,
        ]  # fmt: skip
        self._log = folder.with_suffix(".log")
        self._begun = ""
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment
            )
        self._begun = ""

    def begun(self) -> str:
        """The line that it says when it serves, which is waited for."""
        assert self.process.stdout is not None
        self._begun = self._begun or self.process.stdout.readline()
        assert self._begun, self._log.read_text()[-3000:]
        return self._begun

    def kill(self) -> None:
        """Of one that serves until then."""
        self.begun()
        self.process.kill()
        self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL, self._log.read_text()[-3000:]

    def end(self, number: signal.Signals = signal.SIGTERM) -> str:
        """What it says at its end."""
        begun = self.begun()  # before that a signal ends it as any program
        self.process.send_signal(number)
        told: str = self.process.communicate(timeout=180)[0]
        assert self.process.returncode == 0, self._log.read_text()[-3000:]
        return begun + told
