"""One broker that does not answer holds up the queues of no other."""

from __future__ import annotations

import pytest

from rocketmq_spark.delay.envelope_records import BrokerAvailability
from rocketmq_spark.errors import AccessDenied, CallTimeout, RemoteProtocolError, SpoolError
from rocketmq_spark.model import MessageQueue

QUEUES = [MessageQueue("t", broker, i) for broker in ("a", "b") for i in range(2)]


def stepped(brokers: BrokerAvailability, error: Exception | None) -> list[str]:
    """Which queues had their step; those of broker a raise."""
    seen = []

    def step(queue: MessageQueue) -> None:
        seen.append(f"{queue.broker_name}{queue.queue_id}")
        if error is not None and queue.broker_name == "a":
            raise error

    brokers.for_each(QUEUES, step)
    return seen


def test_unresponsive_broker_is_asked_again_only_after_pause(caplog: pytest.LogCaptureFixture) -> None:
    brokers = BrokerAvailability(60.0)
    assert stepped(brokers, CallTimeout("no answer")) == ["a0", "b0", "b1"]
    assert stepped(brokers, None) == ["b0", "b1"]
    assert len(caplog.records) == 1
    at_once = BrokerAvailability(0.0)
    stepped(at_once, CallTimeout("no answer"))
    assert stepped(at_once, None) == ["a0", "a1", "b0", "b1"]


def test_errors_of_the_spool_are_raised() -> None:
    with pytest.raises(SpoolError):
        stepped(BrokerAvailability(60.0), SpoolError("the disk is full"))


@pytest.mark.parametrize("error", [AccessDenied("no"), RemoteProtocolError("x"), ValueError("a bug")], ids=repr)
def test_what_one_broker_answers_stops_no_other(error: Exception) -> None:
    brokers = BrokerAvailability(60.0)
    assert stepped(brokers, error) == ["a0", "b0", "b1"]
    assert stepped(brokers, error) == ["b0", "b1"]


def test_a_permanent_error_is_raised_while_no_broker_answers() -> None:
    def denied(queue: MessageQueue) -> None:
        raise AccessDenied("no")

    with pytest.raises(AccessDenied):
        BrokerAvailability(60.0).for_each(QUEUES, denied)
