"""A batch of the accumulator of which one message is refused for good."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult
from tests.producer.scripted import Bench, ok, refused
from tests.producer.test_batching import batcher_of, bodies, sent


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
    assert (accumulator.held_bytes, accumulator._taken) == (0, set())
