"""Messages as a broker would give them."""

from __future__ import annotations

from rocketmq_spark.model import MessageQueue, ReceivedMessage
from tests.queues import q

QUEUE = q("a:0")


def message(
    offset: int, body: bytes = b"body", queue: MessageQueue = QUEUE, times: int = 0, topic: str | None = None
) -> ReceivedMessage:
    """The message at ``offset``; of ``topic``, where that is another one than its queue's."""
    return ReceivedMessage(
        topic=topic or queue.topic,
        queue=queue,
        queue_offset=offset,
        commit_log_offset=1000 + offset,
        body=body,
        properties={"UNIQ_KEY": f"{queue}-{offset}"},
        flag=0,
        sys_flag=0,
        born_timestamp=1,
        store_timestamp=2,
        born_host="h:1",
        store_host="h:2",
        reconsume_times=times,
        prepared_transaction_offset=0,
        store_size=100,
        offset_msg_id=f"O{offset}",
    )


def messages(*offsets: int, queue: MessageQueue = QUEUE) -> list[ReceivedMessage]:
    return [message(offset, queue=queue) for offset in offsets]


def offsets(found: object) -> list[int]:
    return [each.queue_offset for each in found]  # type: ignore[attr-defined]
