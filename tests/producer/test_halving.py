"""A batch of the accumulator of which one message is refused for good."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.errors import ConnectionLost, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, Resent, SendRequest, SendResult
from rocketmq_spark.producer.resender import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ok, refused
from tests.fakes.timer import ManualTimer
from tests.producer.bench import Bench
from tests.producer.test_batching import batcher_of, bodies, sent
from tests.producer.test_resender import bodies_of, kept_batch


def refuses_three(queue: MessageQueue, request: SendRequest) -> SendResult:
    if "3" in bodies(request):
        raise refused(Response.MESSAGE_ILLEGAL)
    return ok(queue, request)


@pytest.mark.parametrize("closing", [False, True])
def test_one_that_is_refused_for_good_does_not_take_others_along(bench: Bench, closing: bool) -> None:
    producer = bench.producer(auto_batch=True)
    bench.sender.script = [refuses_three] * 9
    results = [producer.send_async(Message("T", b"%d" % i, keys=[f"{i}"])) for i in range(8)]
    accumulator = batcher_of(producer).accumulator
    if closing:
        producer.close()
    else:
        bench.time.advance(0.01)
    failed: dict[int, Any] = {i: result.exception(0) for i, result in enumerate(results) if result.exception(0)}
    assert {i: type(error).__name__ for i, error in failed.items()} == {3: "MessageIllegal"}
    assert sent(bench)[1:] == [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["0", "1"], ["2", "3"], ["2"], ["3"]]
    assert (accumulator.buffered_bytes, accumulator._taken_batches) == (0, set())


def test_of_a_batch_that_is_stored_in_part_nothing_is_sent_again(bench: Bench) -> None:
    """A Proxy takes some requests of a batch and refuses one: halves of all would store the others twice."""
    producer = bench.producer(auto_batch=True)
    results = [producer.send_async(Message("T", b"%d" % i)) for i in range(4)]

    def in_part(queue: MessageQueue, request: SendRequest) -> RocketMQError:
        error = refused(Response.MESSAGE_ILLEGAL)
        first, *_ = decode_batch(bytes(request.body))
        error.stored = {decode_properties(first.properties)[Property.UNIQ_KEY]: ok(queue, request)}
        return error

    bench.sender.script = [in_part]
    bench.time.advance(0.01)
    assert sent(bench) == [["0", "1", "2", "3"]]
    assert [type(result.exception(0)).__name__ for result in results] == ["NoneType", *["MessageIllegal"] * 3]


def test_transient_failure_ends_halving_of_spooled_batch(bench: Bench) -> None:
    """All is tried again: what went out behind the failure would be there twice."""
    settings = ProducerSettings(group="g", retries=None, pinned_retries=None)
    resender = EngineResender(bench.sender, settings, ManualTimer(bench.time))
    bench.sender.script = [refused(Response.MESSAGE_ILLEGAL), ConnectionLost("down")]
    found: list[Resent] = []
    resender.resend(kept_batch(b"abcd"), found.append)
    bench.time.advance(4)
    (one,) = found
    assert (one.is_temporary, [bodies_of(request) for request in bench.sender.requests]) == (True, [b"abcd", b"ab"])
