"""A message that a group could not consume, given back: by the broker, or as a copy that goes to the retry topic.

Mirrors ``DefaultMQPushConsumerImpl.sendMessageBack``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rocketmq_spark.client.questions import BrokerQuestions, Question
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import FIRST_RETRY_LEVEL, MAX_BODY_BYTES, RETRY_PREFIX, Property, SysFlag
from rocketmq_spark.errors import CallTimeout, DecodeError, RocketMQError
from rocketmq_spark.model import ReceivedMessage, SendRequest
from rocketmq_spark.wire import compression, rpc
from rocketmq_spark.wire.properties import encode_properties

INNER_GROUP = "CLIENT_INNER_PRODUCER"
ATTEMPTS = 3
COMPRESS_ABOVE = 4096

# What the broker that stores the copy writes itself, or what holds for the original only.
_OF_THE_STORED = (Property.MIN_OFFSET, Property.MAX_OFFSET, Property.TRANSACTION_PREPARED)


class RemotingSendBack:
    """Gives messages back over the connections of a client."""

    def __init__(self, questions: BrokerQuestions, sender: RemotingSender) -> None:
        self._questions = questions
        self._sender = sender

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        """Asks the master that has the message to move it."""
        name = self._questions.calls.on_wire
        command = rpc.CONSUMER_SEND_MSG_BACK.request(
            offset=message.commit_log_offset,
            group=name(group),
            delayLevel=delay_level,
            originMsgId=message.msg_id,
            originTopic=name(message.topic),
            unitMode=False,
            maxReconsumeTimes=max_reconsume_times,
            bname=message.broker_name,
        )
        question = Question(message.broker_name, command, message.queue.topic, message.queue)
        self._questions.ask_all([question], deadline)

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        """Tries several brokers, where there are several."""
        request = copy_of(
            group, message, max_reconsume_times, self._questions.calls.on_wire, time.time_ns() // 1_000_000
        )
        queues = list(self._sender.publish_queues(RETRY_PREFIX + group, deadline))
        start = message.queue_offset % len(queues)
        turns = [queues[(start + i) % len(queues)] for i in range(len(queues))]
        others = sorted(turns, key=lambda queue: queue.broker_name == message.broker_name)
        last: RocketMQError = CallTimeout("there was no time to send the message back", topic=message.topic)
        for queue in (others * ATTEMPTS)[:ATTEMPTS]:
            if deadline.expired:
                break
            try:
                self._sender.send(queue, request, deadline)
            except RocketMQError as e:
                last = e
            else:
                return
        raise last


def copy_of(
    group: str, message: ReceivedMessage, max_reconsume_times: int, on_wire: Callable[[str], str], now_ms: int
) -> SendRequest:
    """The message once more, to be delivered to ``group`` after the delay of its next level."""
    if message.decode_error is not None:
        raise DecodeError(
            f"a message that cannot be decoded can only be sent back by its broker: {message.decode_error}",
            queue=str(message.queue),
        )
    kept = {name: value for name, value in message.properties.items() if name not in _OF_THE_STORED}
    properties: dict[str, str | None] = {
        **kept,
        Property.ORIGIN_MESSAGE_ID: kept.get(Property.ORIGIN_MESSAGE_ID) or message.msg_id,
        Property.RETRY_TOPIC: on_wire(message.topic),
        Property.RECONSUME_TIME: str(message.reconsume_times + 1),
        Property.MAX_RECONSUME_TIMES: str(max_reconsume_times),
        Property.DELAY: str(FIRST_RETRY_LEVEL + message.reconsume_times),
    }
    body, sys_flag = message.body, 0
    if len(body) > COMPRESS_ABOVE and (packed := compression.smaller(body)) is not None:
        body, sys_flag = packed, int(SysFlag.COMPRESSED | SysFlag.ZLIB)
    if len(body) > MAX_BODY_BYTES:
        raise RocketMQError(f"its {len(body)} bytes are more than a broker takes", queue=str(message.queue))
    return SendRequest(
        INNER_GROUP,
        body,
        encode_properties(properties),
        sys_flag,
        message.flag,
        now_ms,
        reconsume_times=message.reconsume_times + 1,
        max_reconsume_times=max_reconsume_times,
    )
