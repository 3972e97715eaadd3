"""A wait that found nothing fails: without that, whatever is compared afterwards is compared with nothing."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import AccessDenied, BrokerBusy, CallTimeout, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.wire.properties import decode_properties
from tests.helpers import _reached, _runs, _sent_last, _torn, awaited, counts, indexed, stored, stored_now, told, total
from tests.reading import feed


def test_the_first_good_answer_counts() -> None:
    answers = iter([1, 2, 3])
    assert awaited(lambda: next(answers), lambda found: found > 1) == 2
    assert next(answers) == 3


def test_a_wait_whose_time_is_up_fails_with_what_there_was() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"within 0 s; there was 2 of \[1, 2\]"):
        awaited(lambda: [1, 2], lambda found: len(found) == 3, 0)


def test_what_the_package_logs_is_told_while_somebody_listens() -> None:
    logger = logging.getLogger("rocketmq_spark.pull.progress_timeout")
    with told("the read waits for") as heard:
        logger.info("the read waits for %s", "broker-a")
        logger.warning("the read goes on")
        assert not heard.is_set()
        logger.warning("the read %s for broker-a", "waits")
        assert heard.is_set()
        heard.clear()
    logger.warning("the read waits for broker-a")
    assert not heard.is_set()


def test_what_the_package_logs_only_on_demand_is_told_too() -> None:
    logger, package = logging.getLogger("rocketmq_spark.consumer"), logging.getLogger("rocketmq_spark")
    before = package.level
    with told("is tried again", logging.INFO) as again, told("is tried again") as warned:
        logger.info("the pull is tried again")
        assert again.is_set()
        assert not warned.is_set()
    assert package.level == before
    assert not logger.isEnabledFor(logging.INFO)


def test_a_topic_with_fewer_messages_fails(rocketmq: LocalBroker, topic: str) -> None:
    feed(rocketmq, topic, 3)
    assert [len(stored(rocketmq, topic, 3)), total(rocketmq, topic, 3), len(stored_now(rocketmq, topic))] == [3] * 3
    for read in (stored, total, counts):
        with pytest.raises(pytest.fail.Exception, match="it did not happen within 0"):
            read(rocketmq, topic, 4, 0)
    with pytest.raises(AssertionError, match="stored_now"):
        stored(rocketmq, topic, 0)


def test_a_message_behind_all_others_is_waited_for(rocketmq: LocalBroker) -> None:
    queue, ends = MessageQueue("broker-a", "broker-a", 0), iter([6, 6, 7])

    def bounds(queues: list[MessageQueue], deadline: Deadline) -> dict[MessageQueue, QueueBounds]:
        assert queues == [queue]
        return {queue: QueueBounds(0, next(ends), 0)}

    client: Any = SimpleNamespace(offset_reader=SimpleNamespace(bounds=bounds))
    _reached(client, queue, 6, 60)
    assert list(ends) == []
    before = rocketmq.admin.describe_topic("broker-a")[queue].max_offset
    indexed(rocketmq)
    indexed(rocketmq.name_server)
    assert rocketmq.admin.describe_topic("broker-a")[queue].max_offset >= before + 2


@pytest.mark.parametrize(("end", "torn"), [("", False), ("\0\0", True), ("\1a\0", True)])
def test_a_message_that_a_killed_broker_wrote_in_part_is_none(end: str, torn: bool) -> None:
    properties = decode_properties(f"UNIQ_KEY\0016598{end}")
    assert _torn(SimpleNamespace(properties=properties)) is torn  # type: ignore[arg-type]


def test_slow_broker_is_retried_to_deadline_but_refusal_is_not() -> None:
    outcomes: list[RocketMQError | int] = [BrokerBusy("a moment"), CallTimeout("late"), 7, AccessDenied("who are you?")]

    def send(*request: Any) -> Any:
        outcome = outcomes.pop(0) if outcomes else CallTimeout("it hangs")
        if isinstance(outcome, RocketMQError):
            raise outcome
        return SimpleNamespace(queue_offset=outcome)

    client: Any = SimpleNamespace(sender=SimpleNamespace(send=send))
    later = BrokerBusy, CallTimeout
    queue = MessageQueue("broker-a", "broker-a", 0)
    assert [_sent_last(client, queue, later, Deadline.after(60)) for _ in range(2)] == [7, None]
    with pytest.raises(CallTimeout, match="it hangs"):
        _sent_last(client, queue, later, Deadline.after(0))


def test_a_process_that_stands_still_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            assert _runs(child.pid)
            os.kill(child.pid, signal.SIGSTOP)
            awaited(lambda: not _runs(child.pid))
            os.kill(child.pid, signal.SIGCONT)
            awaited(lambda: _runs(child.pid))
        finally:
            child.kill()
    assert not _runs(None)
