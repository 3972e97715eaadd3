"""A producer on a scripted sender, with time that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.model import SendRequest, SpooledSend
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.resender import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import ManualTimer, Time


class Bench:
    """A producer on a scripted sender; ``timers`` are send, callback, housekeeping, and batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = Time()
        monkeypatch.setattr(
            "rocketmq_spark.base.clock.time",
            SimpleNamespace(
                monotonic=self.time.monotonic,
            ),
        )
        self.sender = ScriptedSender(self.time)
        self.timers: dict[str, ManualTimer] = {}
        self.producers: list[BaseProducer] = []

    def producer(self, sharing_key: str | None = None, **settings: Any) -> BaseProducer:
        chosen = {"group": "g", "heartbeat_s": 0, "route_refresh_s": 0, **settings}
        producer = BaseProducer(self.sender, ProducerSettings(**chosen), sharing_key, self.timer)
        self.producers.append(producer)
        return producer

    def timer(self, name: str) -> ManualTimer:
        found = self.timers[name.rsplit("-", 1)[1]] = ManualTimer(self.time)
        return found

    def close(self) -> None:
        for producer in self.producers:
            producer.close(0.01)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(monkeypatch)
    yield made
    made.close()


def told_storage(bench: Bench, resender: EngineResender) -> EngineResender:
    """``resender``, which has asked how topic T stores batches."""
    resender.batch_predicate(SpooledSend("T", SendRequest("g", b"x")))
    bench.time.advance(0.01)
    return resender
