"""Commands in this process against the shared broker, and commands as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark.cli.command import app
from rocketmq_spark.localbroker import LocalBroker, distribution

COMMAND = (sys.executable, "-m", "rocketmq_spark")


@pytest.fixture
def run(rocketmq: LocalBroker) -> Callable[..., Result]:
    """A command in this process; the name server of the shared broker comes from the environment."""

    def invoke(*arguments: str, **kwargs: Any) -> Result:
        return CliRunner(env={"ROCKETMQ_NAMESRV": rocketmq.name_server}).invoke(app, arguments, **kwargs)

    return invoke


@pytest.fixture
def no_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and no name server in the environment; the cache."""
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("ROCKETMQ_NAMESRV", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def as_found(rocketmq: LocalBroker) -> Iterator[None]:
    """Takes topics away that the demo made: other tests would be told of them as the nearest names."""
    before = set(rocketmq.admin.topics())
    yield
    for topic in set(rocketmq.admin.topics()) - before:
        if topic.startswith("demo-"):
            rocketmq.admin.delete_topic(topic)


class Process:
    """A command as a process of its own session, so that a signal reaches all of it, as Ctrl-C on a terminal does."""

    def __init__(self, *arguments: str, command: Sequence[str] = COMMAND, **how: Any) -> None:
        pipe = subprocess.PIPE
        self.child = subprocess.Popen(
            [*command, *arguments], stdout=pipe, stderr=pipe, text=True, start_new_session=True, **how
        )

    def lines(self) -> Iterator[str]:
        assert self.child.stdout is not None
        return iter(self.child.stdout)

    def until(self, text: str) -> list[str]:
        """What it prints, up to the line that holds ``text``."""
        seen = []
        for line in self.lines():
            seen.append(line)
            if text in line:
                return seen
        pytest.fail(f"it ended without {text!r}: {seen} {self.child.stderr.read() if self.child.stderr else ''}")

    def ctrl_c(self) -> tuple[str, str]:
        os.killpg(self.child.pid, signal.SIGINT)
        return self.end()

    def end(self) -> tuple[str, str]:
        """What it prints from now on. (``communicate`` would miss lines that ``until`` has read ahead.)"""
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        return self.child.stdout.read(), self.child.stderr.read()

    @property
    def code(self) -> int:
        return self.child.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def begin(*arguments: str, **how: Any) -> Process:
        started.append(Process(*arguments, **how))
        return started[-1]

    yield begin
    for process in started:
        if process.child.poll() is None:
            os.killpg(process.child.pid, signal.SIGKILL)
        process.child.communicate()


def documents(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]
