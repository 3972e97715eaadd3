"""Returns messages that a listener failed on. The broker moves a message, or the client sends a copy to the retry topic."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import (
    COMPRESSION_MASK,
    FIRST_RETRY_LEVEL,
    MAX_BODY_BYTES,
    MAX_INT,
    MAX_PROPERTIES_BYTES,
    RETRY_PREFIX,
    Property,
    SysFlag,
)
from rocketmq_spark.client.broker_client import BrokerClient, BrokerCommand
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.errors import (
    CallTimeout,
    MessageRefused,
    RocketMQError,
)
from rocketmq_spark.model import ReceivedMessage, SendRequest
from rocketmq_spark.wire import compression, rpc
from rocketmq_spark.wire.properties import encode_properties, is_reserved

logger = logging.getLogger(__name__)

INNER_GROUP = "CLIENT_INNER_PRODUCER"


SEND_BACK_ATTEMPTS, COMPRESS_ABOVE_BYTES = 3, 4096


# RocketMQ's own properties that a copy keeps. RocketMQ's other properties describe the original message, or make a broker act.
# Brokers do not check the properties of messages in a batch. So a sender could set properties in a batch that make every broker
# reject the copy.
_COPIED_PROPERTIES = frozenset({
    Property.TAGS, Property.KEYS, Property.UNIQ_KEY, Property.WAIT, Property.SHARDING_KEY, Property.INSTANCE_ID,
    Property.ORIGIN_MESSAGE_ID, Property.ORIGIN_GROUP, Property.MSG_REGION, Property.TRACE_ON, Property.TRACE_CONTEXT,
    Property.BORN_HOST, Property.BORN_TIMESTAMP, Property.CLUSTER, Property.MESSAGE_TYPE, Property.CORRELATION_ID,
    Property.REPLY_TO_CLIENT, Property.TTL, Property.BUYER_ID, Property.TRANSACTION_ID,
    Property.DLQ_ORIGIN_TOPIC, Property.DLQ_ORIGIN_MESSAGE_ID,
})  # fmt: skip


# Senders may set any number of attempts. Above this maximum, values that are computed from the number of attempts would exceed
# Java's largest int.
_MAX_RECONSUME_TIMES = MAX_INT - FIRST_RETRY_LEVEL - 1


class RemotingSendBack:
    """Returns messages to their brokers, or to the retry topic."""

    def __init__(self, broker_client: BrokerClient, sender: RemotingSender) -> None:
        self._broker_client = broker_client
        self._sender = sender

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        """See ``ports.GroupMember``."""
        name_on_wire = self._broker_client.rpc_client.name_on_wire
        command = rpc.CONSUMER_SEND_MSG_BACK.request(
            offset=message.commit_log_offset,
            group=name_on_wire(group),
            delayLevel=delay_level,
            originMsgId=message.msg_id,
            originTopic=name_on_wire(message.topic),
            unitMode=False,
            maxReconsumeTimes=max_reconsume_times,
            bname=message.broker_name,
        )
        broker_command = BrokerCommand(message.broker_name, command, message.queue.topic, message.queue)
        self._broker_client.request_all([broker_command], deadline)

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        """See ``ports.GroupMember``. Tries up to ``SEND_BACK_ATTEMPTS`` queues, first the queues of other brokers."""
        request = retry_copy(
            group,
            message,
            max_reconsume_times,
            self._broker_client.rpc_client.name_on_wire,
            time.time_ns() // 1_000_000,
        )
        queues = list(self._sender.publish_queues(RETRY_PREFIX + group, deadline))
        start = message.queue_offset % len(queues)
        queues_in_order = [queues[(start + i) % len(queues)] for i in range(len(queues))]
        sorted_queues = sorted(queues_in_order, key=lambda queue: queue.broker_name == message.broker_name)
        last_error: RocketMQError = CallTimeout("there was no time to send the message back", topic=message.topic)
        for queue in (sorted_queues * SEND_BACK_ATTEMPTS)[:SEND_BACK_ATTEMPTS]:
            if deadline.expired:
                break
            try:
                self._sender.send(queue, request, deadline)
            except RocketMQError as e:
                last_error = e
            else:
                return
        raise last_error


# ``_MAX_ADDED_BYTES`` is room for the properties that are added to a copy. If the properties do not fit, only RocketMQ's own
# properties are kept, each with at most ``_MAX_PROPERTY_BYTES``.
_MAX_ADDED_BYTES, _MAX_PROPERTY_BYTES = 1024, 1024


def _acceptable_properties(properties: dict[str, str], message: ReceivedMessage) -> dict[str, str]:
    """Return properties that a broker accepts. The properties of a message in a batch may have separators in values, and may
    have more bytes than brokers allow for a single message. A message with such properties must not block its queue for ever.
    """
    clean_properties = {name: value.replace("\x01", "?").replace("\x02", "?") for name, value in properties.items()}
    size = sum(len(name.encode()) + len(value.encode()) + 2 for name, value in clean_properties.items())
    if size <= MAX_PROPERTIES_BYTES - _MAX_ADDED_BYTES:
        return clean_properties
    logger.warning(
        "%s: the properties of the message at offset %d have %d bytes; its copy has only RocketMQ's own properties",
        message.queue, message.queue_offset, size,
    )  # fmt: skip
    return {n: v for n, v in clean_properties.items() if is_reserved(n) and len(v.encode()) <= _MAX_PROPERTY_BYTES}


def retry_copy(
    group: str, message: ReceivedMessage, max_reconsume_times: int, name_on_wire: Callable[[str], str], now_ms: int
) -> SendRequest:
    """Return a copy of the message for the retry topic of ``group``, with the delay level of its next attempt. A message that
    cannot be decoded is copied with its stored bytes. Raises ``MessageRefused`` if no broker would accept the copy.
    """
    properties_to_copy = {
        name: value for name, value in message.properties.items() if name in _COPIED_PROPERTIES or not is_reserved(name)
    }
    copied_properties = _acceptable_properties(properties_to_copy, message)
    reconsume_times = min(max(0, message.reconsume_times), _MAX_RECONSUME_TIMES)
    max_times = min(max_reconsume_times, _MAX_RECONSUME_TIMES)
    properties: dict[str, str | None] = {
        **copied_properties,
        Property.ORIGIN_MESSAGE_ID: copied_properties.get(Property.ORIGIN_MESSAGE_ID) or message.msg_id,
        Property.RETRY_TOPIC: name_on_wire(message.topic),
        Property.RECONSUME_TIME: str(reconsume_times + 1),
        Property.MAX_RECONSUME_TIMES: str(max_times),
        Property.DELAY: str(FIRST_RETRY_LEVEL + reconsume_times),
    }
    body, sys_flag = message.body, message.sys_flag & int(SysFlag.COMPRESSED | COMPRESSION_MASK)
    if not sys_flag & SysFlag.COMPRESSED:
        sys_flag = 0
        if len(body) > COMPRESS_ABOVE_BYTES and (compressed_body := compression.compress_if_smaller(body)) is not None:
            body, sys_flag = compressed_body, int(SysFlag.COMPRESSED | SysFlag.ZLIB)
    if not 0 < len(body) <= MAX_BODY_BYTES:
        raise MessageRefused(
            f"the message has {len(body)} bytes; expected 1 to {MAX_BODY_BYTES}", queue=str(message.queue)
        )
    return SendRequest(
        INNER_GROUP,
        body,
        encode_properties(properties),
        sys_flag,
        message.flag,
        now_ms,
        reconsume_times=reconsume_times + 1,
        max_reconsume_times=max_times,
    )
