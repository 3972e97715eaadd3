"""What the Proxy hands out as messages, and what it says of a consumer group as values. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rocketmq_spark.errors import DecodeError, LocalProtocolError
from rocketmq_spark.grpc_proxy.facts import Encoding
from rocketmq_spark.grpc_proxy.protos import get_ms, get_seconds
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.popped import GroupPolicy, PoppedMessage

# Of a group of which the Proxy says nothing: RocketMQ's own.
_ATTEMPTS, _PAUSES_S = 17, (10.0,)
# Nobody tries a message more often: the last pause is that of all which follow.
_MAX_PAUSES = 100


def popped(message: Any, topic: str, place: tuple[str, str], unpack: Callable[[bytes], bytes]) -> PoppedMessage:
    """A message of ``topic``, by its name for users; ``place`` is its broker's name and the endpoint that gave it.

    One whose body cannot be opened comes raw, with the reason, as over remoting: its neighbours are not lost with it.
    """
    broker_name, endpoint = place
    system = message.system_properties
    body, why = bytes(message.body), None
    if system.body_encoding == Encoding.GZIP:
        try:
            body = unpack(body)
        except (DecodeError, LocalProtocolError) as e:  # damaged, or of a codec that is not installed here
            why = str(e)
    return PoppedMessage(
        topic=topic,
        queue=MessageQueue(topic, broker_name, system.queue_id),
        queue_offset=system.queue_offset,
        body=body,
        tags=system.tag or None,
        keys=list(system.keys),
        properties=dict(message.user_properties),
        born_timestamp=get_ms(system.born_timestamp),
        store_timestamp=get_ms(system.store_timestamp) if system.HasField("store_timestamp") else None,
        msg_id=system.message_id,
        delivery_attempt=max(1, system.delivery_attempt),
        message_group=system.message_group or None,
        receipt=system.receipt_handle,
        endpoint=endpoint,
        decode_error=why,
    )


def policy(settings: Any) -> GroupPolicy:
    """What the settings say with which a Proxy answers those of a consumer."""
    retry = settings.backoff_policy
    if retry.HasField("customized_backoff"):
        pauses = [get_seconds(pause) for pause in retry.customized_backoff.next[:_MAX_PAUSES]]
    elif retry.HasField("exponential_backoff"):
        grown = retry.exponential_backoff
        longest, pause = get_seconds(grown.max), get_seconds(grown.initial)
        pauses = [pause]
        while grown.multiplier > 1 and pause < longest and len(pauses) < _MAX_PAUSES:
            pause = min(longest, pause * grown.multiplier)
            pauses.append(pause)
    else:
        pauses = []
    attempts = retry.max_attempts if retry.max_attempts > 0 else _ATTEMPTS
    return GroupPolicy(attempts, settings.subscription.fifo, tuple(pauses) or _PAUSES_S)
