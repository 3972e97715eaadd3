from __future__ import annotations

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.consumer import process_queue
from rocketmq_spark.consumer.process_queue import (
    ProcessQueue,
    PullDecision,
    Thresholds,
    decide_next_pull,
    divide_thresholds,
    pause_reason,
)
from rocketmq_spark.errors import BrokerBusy, CallTimeout
from rocketmq_spark.model import PullAnswer, PullStatus
from tests.consumer.messages import QUEUE, message, messages


def filled(*at: int, body: bytes = b"x") -> ProcessQueue:
    queue = ProcessQueue(QUEUE)
    queue.put([message(offset, body) for offset in at])
    return queue


def test_the_message_after_the_last_allowed_one_stops_the_pulls() -> None:
    assert pause_reason(filled(*range(1000)), Thresholds()) is None
    assert pause_reason(filled(*range(1001)), Thresholds()) == "1001 messages are cached, more than 1000"


@pytest.mark.parametrize(("bytes_", "is_full"), [(8, False), (9, True)])
def test_bytes_stop_the_pulls(bytes_: int, is_full: bool) -> None:
    found = pause_reason(filled(1, body=b"x" * bytes_), Thresholds(max_bytes=8))
    assert found == (f"{bytes_} bytes are cached, more than 8" if is_full else None)


def test_offset_span_pauses_pulls_of_concurrent_listeners_only() -> None:
    assert pause_reason(filled(0, 2000), Thresholds()) is None
    assert pause_reason(filled(0, 2001), Thresholds()) == "cached offsets span 2001, more than 2000"
    assert pause_reason(filled(0, 2001), Thresholds(max_span=None)) is None


def test_bounds_of_a_topic_are_divided_among_its_queues() -> None:
    assert divide_thresholds(Thresholds(), 1024, None, 2) == Thresholds(max_count=512)
    assert divide_thresholds(Thresholds(), 1024, None, 3) == Thresholds(max_count=341)
    assert divide_thresholds(Thresholds(), 2, 1, 5) == Thresholds(max_count=1, max_bytes=1)
    assert divide_thresholds(Thresholds(), 7, None, 0) == Thresholds(max_count=7)
    assert divide_thresholds(Thresholds(), None, None, 5) == Thresholds()


def answer(status: PullStatus, next_offset: int, *at: int) -> PullAnswer:
    return PullAnswer(status, next_offset, 0, 99, messages(*at))


@pytest.mark.parametrize(
    ("came", "then"),
    [
        (answer(PullStatus.FOUND, 12, 10, 11), PullDecision(12, 0.3, messages(10, 11))),
        (answer(PullStatus.FOUND, 12), PullDecision(12, finished_offset=12)),
        (answer(PullStatus.NO_NEW_MSG, 10), PullDecision(10, finished_offset=10)),
        (answer(PullStatus.NO_MATCHED_MSG, 42), PullDecision(42, finished_offset=42)),
        (answer(PullStatus.OFFSET_ILLEGAL, 40), PullDecision(10, corrected_offset=40)),
        (BrokerBusy("busy", broker_code=Response.FLOW_CONTROL), PullDecision(10, process_queue.BUSY_BROKER_PAUSE_S)),
        (BrokerBusy("busy", broker_code=Response.SYSTEM_BUSY), PullDecision(10, 1.5)),
        (CallTimeout("late"), PullDecision(10, 1.5)),
    ],
)
def test_the_answer_says_where_the_next_pull_goes_on(came: object, then: PullDecision) -> None:
    assert decide_next_pull(10, came, 0.3, 1.5) == then  # type: ignore[arg-type]
