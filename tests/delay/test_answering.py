"""One broker that does not answer holds up the queues of no other."""

from __future__ import annotations

import pytest

from rocketmq_spark.delay.envelope_records import Answering
from rocketmq_spark.errors import AccessDenied, CallTimeout, RocketMQError, SpoolError
from rocketmq_spark.model import MessageQueue

QUEUES = [MessageQueue("t", broker, i) for broker in ("a", "b") for i in range(2)]


def stepped(brokers: Answering, error: RocketMQError | None) -> list[str]:
    """Which queues had their step; those of broker a raise."""
    seen = []

    def step(queue: MessageQueue) -> None:
        seen.append(f"{queue.broker_name}{queue.queue_id}")
        if error is not None and queue.broker_name == "a":
            raise error

    brokers.each(QUEUES, step)
    return seen


def test_a_broker_that_does_not_answer_is_asked_once_and_again_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    brokers = Answering(60.0)
    assert stepped(brokers, CallTimeout("no answer")) == ["a0", "b0", "b1"]
    assert stepped(brokers, None) == ["b0", "b1"]
    assert len(caplog.records) == 1
    at_once = Answering(0.0)
    stepped(at_once, CallTimeout("no answer"))
    assert stepped(at_once, None) == ["a0", "a1", "b0", "b1"]


@pytest.mark.parametrize("error", [AccessDenied("no"), SpoolError("the disk is full")])
def test_what_will_not_pass_is_raised(error: RocketMQError) -> None:
    with pytest.raises(type(error)):
        stepped(Answering(60.0), error)
