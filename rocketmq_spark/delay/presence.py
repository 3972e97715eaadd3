"""A Spark job that reads envelopes is no member of a consumer group; producers see it while its driver joins one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.clock import Deadline
from rocketmq_spark.membership import Membership, Question
from rocketmq_spark.model import NO_FILTER
from rocketmq_spark.wire.envelope import INNER_TOPIC

GROUP = "rocketmq_delay_job"
_REQUEST_S, _HEARTBEAT_S = 3.0, 30.0


def _say_nothing(broker: str, question: Question) -> None:
    """It has no queues to tell of."""


@contextlib.contextmanager
def present(topic: str = INNER_TOPIC, **options: object) -> Iterator[None]:
    """In its block brokers know a member of a group (option ``group``) that subscribes to ``topic``; it reads nothing."""
    parsed = options_table.parse({"group": GROUP, **options}).for_role("pull consumer")
    member = session.member(parsed)
    told = Membership({topic: NO_FILTER}, {topic: time.time_ns() // 1_000_000}, "CONSUME_ACTIVELY")
    member.queues(topic, Deadline.after(_REQUEST_S))  # whose brokers are the ones to be told
    leave = member.join(parsed.group, lambda: told, _say_nothing, _HEARTBEAT_S)
    try:
        member.heartbeat(Deadline.after(_REQUEST_S))
        yield
    finally:
        leave(Deadline.after(_REQUEST_S))
