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
    request: PullRequest, stored_bytes: Bytes, scope: Scope, end_offset: int, budget: DecodeBudget | None = None
) -> Iterable[ReceivedMessage]:
    """Return the requested messages of an answer, with the user's names. ``end_offset`` is the next offset according to the
    broker.

    Brokers compare only hashes of tags, and return whole inner batches. So this function compares the tags again. Messages that
    cannot be decoded are returned with their stored bytes, so that they stop no reader.

    Messages get distinct, increasing offsets between the requested offset and ``end_offset``, because commits and the next pull
    depend on these offsets. The stored offset may be wrong if a message is damaged, or if the offsets of the queue were
    shifted.
    """
    queue = request.queue
    tags = parse_subscription(request.filter.expression) if request.filter.kind == "TAG" and request.filter else None
    is_retry_topic = queue.topic.startswith(RETRY_PREFIX)
    data, settings = bytes(stored_bytes), DecodeSettings(queue.broker_name, queue=queue, budget=budget)
    undamaged_messages = usual_messages(data, request.offset, end_offset, queue)
    messages = undamaged_messages or _with_valid_offsets(
        data, find_messages(data), request.offset, end_offset, settings
    )
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
    data: bytes, message_bounds: Sequence[MessageBounds], start_offset: int, end_offset: int, settings: DecodeSettings
) -> Iterator[ReceivedMessage]:
    """Yield the messages from ``start_offset`` on. Replaces an impossible offset by the first possible offset."""
    message_bounds = _merge_damaged(data, message_bounds, end_offset - start_offset, settings)
    next_offset, remaining_count = start_offset, len(message_bounds)
    for bounds, max_offset in zip(message_bounds, _max_offsets(message_bounds, next_offset, end_offset), strict=True):
        remaining_count -= 1
        *_, is_batch = bounds
        if is_batch:
            settings = settings._replace(
                window=OffsetWindow(
                    start_offset,
                    end_offset,
                    next_offset if next_offset > start_offset else None,
                    end_offset - remaining_count,
                )
            )
        for message in decode_one(data, bounds, settings):
            is_decoded_batch = is_batch and message.decode_error is None
            if is_decoded_batch and message.queue_offset < start_offset:
                continue
            # ``next_offset`` replaces an impossible offset. With a later offset, a commit could skip messages not yet consumed.
            if not is_decoded_batch and not next_offset <= message.queue_offset <= max_offset:
                message = replace(message, queue_offset=next_offset)
            next_offset = message.queue_offset + 1
            yield message


def _merge_damaged(
    data: bytes, message_bounds: Sequence[MessageBounds], max_count: int, settings: DecodeSettings
) -> Sequence[MessageBounds]:
    """Merge parts of damaged messages until there are at most ``max_count`` messages. A damaged size splits a message in two,
    and the second part would get the offset of another message.
    """
    if not 0 < max_count < len(message_bounds):
        return message_bounds
    merged_bounds, was_broken = list(message_bounds[:1]), _is_broken(data, message_bounds[0], settings)
    for number, bounds in enumerate(message_bounds[1:], 1):
        is_broken = _is_broken(data, bounds, settings)
        if is_broken and was_broken and len(merged_bounds) + len(message_bounds) - number > max_count:
            merged_bounds[-1] = (merged_bounds[-1][0], bounds[1], None, False)
        else:
            merged_bounds.append(bounds)
        was_broken = is_broken
    last_bounds = merged_bounds[max_count - 1 :]
    return (
        [*merged_bounds[: max_count - 1], (last_bounds[0][0], last_bounds[-1][1], None, False)]
        if len(last_bounds) > 1
        else merged_bounds
    )


def _is_broken(data: bytes, bounds: MessageBounds, settings: DecodeSettings) -> bool:
    """Whether a message is so damaged that its fields cannot be located."""
    first_message = next(
        iter(decode_one(data, bounds, settings._replace(queue=None, max_body_bytes=None, budget=None))), None
    )
    return first_message is not None and first_message.decode_error is not None and not first_message.topic


def _max_offsets(message_bounds: Sequence[MessageBounds], start_offset: int, end_offset: int) -> list[int]:
    """Return the highest possible offset of each message.

    An offset is possible if it leaves an offset below ``end_offset`` for each later message. Later messages keep their stored
    offsets where they can.
    """
    max_offsets: list[int] = []
    for number in range(len(message_bounds) - 1, -1, -1):
        end_offset -= 1
        stored_offset = message_bounds[number][2]
        if stored_offset is not None and start_offset + number <= stored_offset < end_offset:
            end_offset = stored_offset
        max_offsets.append(end_offset)
    return max_offsets[::-1]
