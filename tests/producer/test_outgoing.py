"""What a caller hands in says by itself."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import SendRequest
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion, ignore_completion
from tests.producer.bench import Bench
from tests.queues import q

REQUEST = SendRequest("g", b"12345", "a\x01b")


def test_nobody_changes_what_was_handed_in() -> None:
    one = OutgoingSend("T", REQUEST, 3.0)
    with pytest.raises(AttributeError):
        one.queue = q("a:0")  # type: ignore[misc]
    assert one.done is ignore_completion
    one.done(SendCompletion(one, ClosedError()))


def test_only_those_of_a_queue_have_an_order() -> None:
    queue = q("a:0")
    assert OutgoingSend("T", REQUEST, 3.0, queue, ordered=True).ordered_queue == queue
    assert OutgoingSend("T", REQUEST, 3.0, queue).ordered_queue is None
    assert OutgoingSend("T", REQUEST, 3.0, ordered=True).ordered_queue is None


def test_body_and_properties_are_what_it_weighs() -> None:
    assert OutgoingSend("T", REQUEST, 3.0).size == 8
    assert OutgoingSend("T", SendRequest("g", memoryview(b"12345")), 3.0).size == 5


def test_timeout_in_seconds_starts_when_asked_unlike_a_deadline(bench: Bench) -> None:
    seconds, deadline = OutgoingSend("T", REQUEST, 3.0), OutgoingSend("T", REQUEST, Deadline.after(3.0))
    bench.time.advance(1.0)
    assert seconds.deadline_from_now.remaining() == 3.0
    assert deadline.deadline_from_now.remaining() == 2.0
