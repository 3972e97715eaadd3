"""From the broker's one answer to each message's own result (``ProduceAccumulator.splitSendResults``)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from rocketmq_spark.errors import SendFailed
from rocketmq_spark.model import SendResult, SendStatus

_SEPARATOR = ","


def with_ids(result: SendResult, ids: Sequence[str], batch_id: str | None = None) -> SendResult:
    """``result`` with the client's ids: all of a batch, joined, or ``batch_id`` where the batch is stored as one.

    A topic of the kind BatchCQ stores a batch as one message and answers with one offset id.
    """
    stored_as_one = len(ids) > 1 and bool(
        result.msg_id or (result.offset_msg_id and _SEPARATOR not in result.offset_msg_id)
    )
    msg_id = (result.msg_id or batch_id or "") if stored_as_one else _SEPARATOR.join(ids)
    return result._replace(msg_id=msg_id)


def split(result: SendResult, count: int) -> list[SendResult]:
    """The result of each of ``count`` messages; the same one for all of a batch that is stored as one.

    A Proxy tells no offset ids, and of no queue.

    Raises ``SendFailed`` when the ids do not fit: the batch is stored, but which message is where is unknown.
    """
    if _SEPARATOR not in result.msg_id:
        return [result] * count
    ids = result.msg_id.split(_SEPARATOR)
    if result.status is SendStatus.SPOOLED:
        return [result._replace(msg_id=msg_id) for msg_id in ids]
    proxied = result.queue is not None and result.queue.queue_id < 0
    offset_ids = [None] * len(ids) if proxied else (result.offset_msg_id or "").split(_SEPARATOR)
    if len(ids) != count or len(offset_ids) != count:
        raise SendFailed(
            f"sendResult is illegal: {len(ids)} ids and {len(offset_ids)} offset ids for {count} messages; the batch "
            "was acknowledged, its messages' places are unknown",
            topic=result.queue.topic if result.queue is not None else None,
            queue=str(result.queue),
        )
    status, _, queue, first, _, transaction_id, _ = result
    offsets: Iterable[int | None] = itertools.repeat(None) if first is None else itertools.count(first)
    return [
        SendResult(status, msg_id, queue, offset, offset_id, transaction_id)
        for msg_id, offset, offset_id in zip(ids, offsets, offset_ids, strict=False)
    ]
