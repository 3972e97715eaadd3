"""What a caller hands in says by itself."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import SendRequest
from rocketmq_spark.producer.outgoing import Ended, Outgoing, ignore
from tests.producer.scripted import Bench
from tests.queues import q

REQUEST = SendRequest("g", b"12345", "a\x01b")


def test_nobody_changes_what_was_handed_in() -> None:
    one = Outgoing("T", REQUEST, 3.0)
    with pytest.raises(AttributeError):
        one.queue = q("a:0")  # type: ignore[misc]
    assert one.done is ignore
    one.done(Ended(one, ClosedError()))


def test_only_those_of_a_queue_have_an_order() -> None:
    queue = q("a:0")
    assert Outgoing("T", REQUEST, 3.0, queue, ordered=True).ordered_queue == queue
    assert Outgoing("T", REQUEST, 3.0, queue).ordered_queue is None
    assert Outgoing("T", REQUEST, 3.0, ordered=True).ordered_queue is None


def test_body_and_properties_are_what_it_weighs() -> None:
    assert Outgoing("T", REQUEST, 3.0).size == 8
    assert Outgoing("T", SendRequest("g", memoryview(b"12345")), 3.0).size == 5


def test_seconds_begin_when_they_are_asked_for_and_a_deadline_has_begun(bench: Bench) -> None:
    seconds, deadline = Outgoing("T", REQUEST, 3.0), Outgoing("T", REQUEST, Deadline.after(3.0))
    bench.time.advance(1.0)
    assert seconds.deadline.remaining() == 3.0
    assert deadline.deadline.remaining() == 2.0
