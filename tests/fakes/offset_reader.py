"""Offsets of queues with seven messages, of which the group has read two."""

from __future__ import annotations

from collections.abc import Iterable

from rocketmq_spark import ports
from rocketmq_spark.model import MessageQueue, QueueBounds
from tests.fakes.ports import Fake


def offset_reader() -> Fake:
    def bounds(queues: Iterable[MessageQueue], *how: object) -> dict[MessageQueue, QueueBounds]:
        return {queue: QueueBounds(2, 9, 7) for queue in queues}

    return Fake(
        ports.OffsetReader,
        late_brokers=frozenset(),
        connection=lambda broker: 1,
        bounds=bounds,
        first_kept_offsets=lambda group, queues, deadline, on_error: {},
        committed=lambda group, queues, deadline: dict.fromkeys(queues, 4),
        search_offsets=lambda times, deadline, *how, **more: dict.fromkeys(times, 3),
        store_time_ms=lambda group, queue, offset, deadline: 5,
        sample=lambda group, queue, offset, deadline: (100, 10),
        is_proxy=lambda topic, broker, deadline: False,
        check_filter=lambda broker, group, topic, sql, deadline: True,
    )
