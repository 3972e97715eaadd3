"""The messages of an answer to a pull, with the user's names and with offsets that a consumer can commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rocketmq_spark.base.codes import RETRY_PREFIX, SysFlag
from rocketmq_spark.client.broker_requests import with_user_names
from rocketmq_spark.model import (
    PullRequest,
    ReceivedMessage,
)
from rocketmq_spark.model.pull import OffsetWindow
from rocketmq_spark.wire.header import Bytes
from rocketmq_spark.wire.messages import DecodeBudget, DecodeSettings, MessageBounds, decode_one, find_messages
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import parse_subscription
from rocketmq_spark.wire.stored_fields import usual_messages


def requested_messages(
    request: PullRequest, stored: Bytes, scope: Scope, end: int, budget: DecodeBudget | None = None
) -> Iterable[ReceivedMessage]:
    """Return the requested messages of an answer, with the user's names. ``end`` is the next offset according to the broker.

    Brokers compare tags by their hashes and return whole inner batches, so tags are compared again. Messages that cannot be
    decoded are returned with their stored bytes, so that they stop no reader.

    Messages get distinct, increasing offsets between the requested one and ``end``, because commits and the next pull depend on
    them. The stored offset may be wrong if a message is damaged, or if the offsets of the queue were shifted.
    """
    queue = request.queue
    tags = parse_subscription(request.filter.expression) if request.filter.kind == "TAG" and request.filter else None
    is_retry_topic = queue.topic.startswith(RETRY_PREFIX)
    data, settings = bytes(stored), DecodeSettings(queue.broker_name, queue=queue, budget=budget)
    undamaged = usual_messages(data, request.offset, end, queue)
    messages = undamaged or _with_valid_offsets(data, find_messages(data), request.offset, end, settings)
    if tags is None and not is_retry_topic:
        return messages
    return (
        with_user_names(message, scope) if is_retry_topic else message
        for message in messages
        if tags is None or tags.accepts(message.tags) or (message.decode_error is not None and _has_no_tag(message))
    )


def _has_no_tag(message: ReceivedMessage) -> bool:
    """Whether the tag is unknown, perhaps because of damage, or the message is a batch, whose messages have their own tags."""
    return message.tags is None or bool(message.sys_flag & SysFlag.INNER_BATCH)


def _with_valid_offsets(
    data: bytes, stored: Sequence[MessageBounds], start: int, end: int, settings: DecodeSettings
) -> Iterator[ReceivedMessage]:
    """Yield the messages from ``start`` on. Replaces an impossible offset by the first possible one."""
    stored = _merge_damaged(data, stored, end - start, settings)
    next_offset, remaining = start, len(stored)
    for stored_message, max_offset in zip(stored, _max_offsets(stored, next_offset, end), strict=True):
        remaining -= 1
        *_, is_batch = stored_message
        if is_batch:
            settings = settings._replace(
                window=OffsetWindow(start, end, next_offset if next_offset > start else None, end - remaining)
            )
        for message in decode_one(data, stored_message, settings):
            is_decoded_batch = is_batch and message.decode_error is None
            if is_decoded_batch and message.queue_offset < start:
                continue
            # With a later offset, a commit would skip messages that were not consumed.
            if not is_decoded_batch and not next_offset <= message.queue_offset <= max_offset:
                message = replace(message, queue_offset=next_offset)
            next_offset = message.queue_offset + 1
            yield message


def _merge_damaged(
    data: bytes, stored: Sequence[MessageBounds], max_count: int, settings: DecodeSettings
) -> Sequence[MessageBounds]:
    """Merge parts of damaged messages until there are at most ``max_count``: a damaged size splits a message in two, and the
    second part would take the offset of another message.
    """
    if not 0 < max_count < len(stored):
        return stored
    merged, was_broken = list(stored[:1]), _is_broken(data, stored[0], settings)
    for number, stored_message in enumerate(stored[1:], 1):
        broken = _is_broken(data, stored_message, settings)
        if broken and was_broken and len(merged) + len(stored) - number > max_count:
            merged[-1] = (merged[-1][0], stored_message[1], None, False)
        else:
            merged.append(stored_message)
        was_broken = broken
    last = merged[max_count - 1 :]
    return [*merged[: max_count - 1], (last[0][0], last[-1][1], None, False)] if len(last) > 1 else merged


def _is_broken(data: bytes, stored_message: MessageBounds, settings: DecodeSettings) -> bool:
    """Whether a message is so damaged that its fields cannot be located."""
    first = next(
        iter(decode_one(data, stored_message, settings._replace(queue=None, max_body_bytes=None, budget=None))), None
    )
    return first is not None and first.decode_error is not None and not first.topic


def _max_offsets(stored: Sequence[MessageBounds], start: int, end: int) -> list[int]:
    """Return the highest possible offset of each message. Messages after it need offsets, their stored ones if possible."""
    max_offsets: list[int] = []
    for number in range(len(stored) - 1, -1, -1):
        end -= 1
        stored_offset = stored[number][2]
        if stored_offset is not None and start + number <= stored_offset < end:
            end = stored_offset
        max_offsets.append(end)
    return max_offsets[::-1]
