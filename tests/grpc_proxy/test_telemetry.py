"""The stream by which a Proxy knows a consumer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from rocketmq_spark import errors
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.grpc_proxy.member import ProxyMember
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.proxy import TelemetryStream
from rocketmq_spark.grpc_proxy.tables import Code
from rocketmq_spark.model import NO_FILTER
from tests.grpc_proxy.scripted import client, serving, status
from tests.helpers import RAISED
from tests.mockbroker import eventually


def answer(commands: Any, context: grpc.ServicerContext) -> Any:
    for command in commands:
        command.settings.backoff_policy.max_attempts = 5
        yield command


class Listening:
    """Streams to an address; ``told`` has what came."""

    def __init__(self, address: str) -> None:
        self.proxy = client(address, connect_timeout_s=30.0)
        self.batch = 1
        self.told: SimpleQueue[Any] = SimpleQueue()
        self.stream = TelemetryStream(self.proxy.channel_of(address), self.settings, self.told.put)

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
        assert listening.told.get(timeout=60).backoff_policy.max_attempts == 5
        listening.batch = 2
        listening.stream.send_settings()
        assert listening.stream.wait(Deadline.after(10)) is None
        assert listening.told.get(timeout=60).subscription.receive_batch_size == 2
        listening.close()


def test_unencodable_settings_leave_no_answer_to_wait_for():
    with serving({"Telemetry": answer}) as address:
        listening = Listening(address)
        assert listening.stream.wait(Deadline.after(10)) is None
        listening.batch = 1 << 70
        with pytest.raises(ValueError, match="range"):
            listening.stream.send_settings()
        listening.batch = 2
        listening.stream.send_settings()
        assert listening.stream.wait(Deadline.after(10)) is None
        listening.close()


def test_a_stream_that_broke_is_made_anew_and_told_the_newest():
    with serving({"Telemetry": answer}) as address:
        listening = Listening(address)
        assert listening.stream.wait(Deadline.after(10)) is None
        listening.told.get(timeout=60)
        listening.batch = 3
    with serving({"Telemetry": answer}, address=address):
        assert listening.told.get(timeout=60).subscription.receive_batch_size == 3
        listening.close()


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_whatever_happens_on_a_stream_it_is_made_anew(error, caplog):
    with serving({"Telemetry": answer}) as address:
        proxy, told, fails = client(address, connect_timeout_s=30.0), SimpleQueue(), [1]

        def take(settings: Any) -> None:
            told.put(settings)
            if fails:
                raise fails.pop() and error

        stream = TelemetryStream(proxy.channel_of(address), proto("Settings"), take)
        for _ in range(2):
            assert told.get(timeout=60).backoff_policy.max_attempts == 5
        assert stream.wait(Deadline.after(30)) is None
        assert f"the stream of the Proxy at {address} failed" in caplog.text
        stream.close(Deadline.after(10))
        proxy.close()


def test_permanently_refused_settings_are_not_waited_for():
    asked = []

    def refuse(commands: Any, context: grpc.ServicerContext) -> Any:
        asked.append(next(commands))
        yield proto("TelemetryCommand")(status=status(Code.UNAUTHORIZED, "who is that"))

    with serving({"Telemetry": refuse}) as address:
        listening = Listening(address)
        deadline = Deadline.after(60)
        error = listening.stream.wait(deadline)
        assert isinstance(error, errors.AccessDenied)
        assert (error.addr, error.remark, "accessKey" in str(error)) == (address, "who is that", True)
        assert not deadline.expired
        listening.close()


def test_refusal_of_outdated_settings_does_not_count():
    begun, told, refusals = threading.Event(), threading.Event(), [Code.UNAUTHORIZED]

    def refuse_the_first_late(commands: Any, context: grpc.ServicerContext) -> Any:
        first = next(commands)
        if not refusals:
            yield from answer(itertools.chain([first], commands), context)
            return
        begun.set()
        told.wait(60)
        yield proto("TelemetryCommand")(status=status(refusals.pop(), "not this"))

    with serving({"Telemetry": refuse_the_first_late}) as address:
        listening = Listening(address)
        assert begun.wait(60)
        listening.batch = 2
        listening.stream.send_settings()
        told.set()
        assert listening.stream.wait(Deadline.after(60)) is None
        assert listening.told.get(timeout=60).subscription.receive_batch_size == 2
        listening.close()
    assert not refusals


def test_a_refusal_that_passes_is_forgotten():
    refusals = [Code.TOO_MANY_REQUESTS, Code.INTERNAL_SERVER_ERROR]

    def refuse_first(commands: Any, context: grpc.ServicerContext) -> Any:
        if not refusals:
            yield from answer(commands, context)
            return
        next(commands)
        yield proto("TelemetryCommand")(status=status(refusals.pop()))

    with serving({"Telemetry": refuse_first}) as address:
        listening = Listening(address)
        assert listening.stream.wait(Deadline.after(30)) is None
        assert not refusals
        listening.close()


@pytest.mark.parametrize("which", [1, 2])
def test_settings_dropped_by_proxy_do_not_silence_stream(monkeypatch, which):
    """As one that is overloaded does; without another stream it would hear nothing more, and answers be taken for others."""
    monkeypatch.setattr("rocketmq_spark.grpc_proxy.proxy._SETTINGS_TIMEOUT_S", 0.2)
    numbers = itertools.count(1)

    def drop_one(commands: Any, context: grpc.ServicerContext) -> Any:
        for command in commands:
            if next(numbers) != which:
                yield from answer([command], context)

    with serving({"Telemetry": drop_one}) as address:
        listening = Listening(address)
        if which == 2:
            assert listening.stream.wait(Deadline.after(10)) is None
            listening.stream.send_settings()

        def heard() -> bool:
            answered = listening.stream.wait(Deadline.after(0.2)) is None
            if not answered:
                listening.stream.resend_settings()
            return answered

        eventually(heard, 60)
        monkeypatch.undo()  # or answers that are late on a slow machine would be taken for dropped ones
        listening.batch = 7
        listening.stream.send_settings()
        assert listening.stream.wait(Deadline.after(10)) is None
        eventually(lambda: listening.told.get(timeout=10).subscription.receive_batch_size == 7, 60)
        listening.close()


def test_a_proxy_that_is_away_is_told_of_in_time(nobody):
    listening = Listening(nobody)
    assert isinstance(listening.stream.wait(Deadline.after(3.0)), errors.RocketMQError)
    listening.close()


def test_the_end_wakes_who_waits(nobody):
    listening, outcomes = Listening(nobody), SimpleQueue[Any]()
    waits = threading.Thread(target=lambda: outcomes.put(listening.stream.wait(Deadline.after(600))), daemon=True)
    waits.start()
    listening.close()
    assert isinstance(outcomes.get(timeout=30), errors.RocketMQError)
    waits.join()


def test_refused_settings_are_reverted_though_endpoint_is_away(nobody):
    heard: list[list[str]] = []

    def telemetry(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for command in requests:
            heard.append([entry.topic.name for entry in command.settings.subscription.subscriptions])
            if "bad" in heard[-1]:
                yield proto("TelemetryCommand")(status=status(Code.FORBIDDEN))
                return
            yield proto("TelemetryCommand")(settings=command.settings)

    with serving({"Telemetry": telemetry}) as address:
        member = ProxyMember(client(nobody, address), "g", bytes)
        member.subscribe({"good": NO_FILTER}, Deadline.after(10))
        with pytest.raises(errors.AccessDenied):
            member.subscribe({"good": NO_FILTER, "bad": NO_FILTER}, Deadline.after(3))
        eventually(lambda: heard[-1] == ["good"], 30)
        member.close(Deadline.after(3))
