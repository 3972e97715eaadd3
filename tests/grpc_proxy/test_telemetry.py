"""The stream by which a Proxy knows a consumer."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import grpc

from rocketmq_spark import errors
from rocketmq_spark.clock import Deadline
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.telemetry import Telemetry
from tests.grpc_proxy.scripted import client, serving


def answer(commands: Any, context: grpc.ServicerContext) -> Any:
    for command in commands:
        command.settings.backoff_policy.max_attempts = 5
        yield command


class Listening:
    """Streams to an address; ``told`` has what came."""

    def __init__(self, address: str) -> None:
        self.proxy = client(address, connect_timeout_s=1.0)
        self.batch = 1
        self.told: SimpleQueue[Any] = SimpleQueue()
        self.stream = Telemetry(self.proxy.at(address), self.settings, self.told.put)

    def settings(self) -> Any:
        made = proto("Settings")()
        made.subscription.receive_batch_size = self.batch
        return made

    def close(self) -> None:
        self.stream.close(Deadline.after(10))
        self.proxy.close()


def test_settings_are_known_when_they_are_answered():
    with serving({"Telemetry": answer}) as address:
        listening = Listening(address)
        assert listening.stream.wait(Deadline.after(10)) is None
        assert listening.told.get(timeout=10).backoff_policy.max_attempts == 5
        listening.batch = 2
        listening.stream.tell()
        assert listening.stream.wait(Deadline.after(10)) is None
        assert listening.told.get(timeout=10).subscription.receive_batch_size == 2
        listening.close()


def test_a_stream_that_broke_is_made_anew_and_told_the_newest():
    with serving({"Telemetry": answer}) as address:
        listening = Listening(address)
        assert listening.stream.wait(Deadline.after(10)) is None
        listening.told.get(timeout=10)
        listening.batch = 3
    with serving({"Telemetry": answer}, address=address):
        assert listening.told.get(timeout=30).subscription.receive_batch_size == 3
        listening.close()


def test_a_proxy_that_is_away_is_told_of_in_time(nobody):
    listening = Listening(nobody)
    assert isinstance(listening.stream.wait(Deadline.after(3)), errors.RocketMQError)
    listening.close()


def test_the_end_wakes_who_waits(nobody):
    listening = Listening(nobody)
    listening.close()
    assert listening.stream.wait(Deadline.after(60)) is not None
