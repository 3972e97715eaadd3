"""The return of failed messages to brokers.

``SendBack`` returns a failed message to its broker. If the broker does not accept the message, ``SendBack`` sends a copy to the
retry topic, or tries again later. A message that no broker accepts is skipped after its last attempt, with an error in the log.
``SendBack`` mirrors ``DefaultMQPushConsumerImpl.sendMessageBack`` and, for ordered messages,
``ConsumeMessageOrderlyService.sendMessageBack``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.errors import MessageIllegal, MessageRefused, RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0  # the timeout of a request to send a message back
COPY_TIMEOUT_S = 3.0  # the timeout of a copy to the retry topic
MAX_UNACCEPTED_S = 10.0  # a call sends no more messages back if no broker accepted a message for this time
DEAD_LETTER_LEVEL = -1  # the delay level that makes a message a dead letter
DROPPED_TEXT = "dropped: the group is broadcasting"  # the text of a log line for a message that is not sent back


class SendBack:
    """Returns failed messages of one group. After ``max_reconsume_times`` deliveries a message goes to the dead-letter topic."""

    def __init__(self, port: GroupMember, group: str, max_reconsume_times: int, state: MemberState) -> None:
        self._port = port
        self._group = group
        self._max_reconsume_times = max_reconsume_times
        self._member_state = state

    def __call__(self, message: ReceivedMessage, delay_level: int) -> bool:
        """Send a message back to a broker, and return whether the message is finished. If a copy is sent to the retry topic
        instead, the delay of ``delay_level`` is not used, as in Java.

        Usually, the broker counts the attempts. If a message can be neither sent back nor copied, this member calls the
        listener again, and the broker does not count this attempt. So after the last attempt, the request tells the broker to
        make the message a dead letter.
        """
        is_damaged = message.decode_error is not None
        # If its broker cannot move a damaged message, only a copy can be sent. The copy looks undamaged. So that no listener
        # gets the copy, it becomes a dead letter at once.
        is_last_attempt = (
            delay_level < 0
            or message.reconsume_times >= self._max_reconsume_times
            or (is_damaged and _cannot_be_moved(message))
        )
        if self._send_back(message, DEAD_LETTER_LEVEL if is_last_attempt else delay_level):
            return self._record_sent_back(message, is_last_attempt)
        return (is_last_attempt or not is_damaged) and self._copy_to_retry_topic(message, is_last_attempt)

    def make_dead_letter(self, message: ReceivedMessage) -> bool:
        """Make a message a dead letter after its last attempt in place, and return whether the message is finished.

        A copy contains the number of attempts. For damaged messages, and if the copy fails, the broker moves the message itself
        (request 36). The broker does not know the attempts in place, so this request has the delay level for dead letters.
        """
        if message.decode_error is None and self._copy_to_retry_topic(message, True, self._max_reconsume_times):
            return True
        if self._send_back(message, DEAD_LETTER_LEVEL):
            return self._record_sent_back(message, True)
        return message.decode_error is not None and self._copy_to_retry_topic(message, True)

    def _record_sent_back(self, message: ReceivedMessage, is_dead_letter: bool) -> bool:
        if is_dead_letter:
            text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
            attempt = message.reconsume_times + 1
            logger.warning(text, message.msg_id, message.queue, dlq_topic(self._group), attempt)
        with self._member_state.lock:
            self._member_state.counts["sent back"] += 1
        return True

    def _send_back(self, message: ReceivedMessage, delay_level: int) -> bool:
        if _cannot_be_moved(message):
            return False
        try:
            self._port.send_back(
                self._group, message, delay_level, self._max_reconsume_times, Deadline.after(TIMEOUT_S)
            )
        except RocketMQError as e:
            logger.warning("message %s could not be sent back by its broker: %s", message.msg_id, e)
            return False
        return True

    def _copy_to_retry_topic(
        self, message: ReceivedMessage, is_last_attempt: bool, max_reconsume_times: int | None = None
    ) -> bool:
        """Send a copy that allows ``max_reconsume_times`` attempts. After the last attempt, the copy goes to the dead-letter
        topic.

        After its last attempt, a message that can neither be copied nor moved is skipped, because it would otherwise block its
        queue for ever.
        """
        if max_reconsume_times is None:
            max_reconsume_times = 0 if is_last_attempt else self._max_reconsume_times
        try:
            self._port.send_to_retry(self._group, message, max_reconsume_times, Deadline.after(COPY_TIMEOUT_S))
        except RocketMQError as e:
            if is_last_attempt and _cannot_be_moved(message) and isinstance(e, (MessageRefused, MessageIllegal)):
                text = "the message at offset %d of %s failed and is skipped: no broker takes a copy of it: %s"
                logger.error(text, message.queue_offset, message.queue, e)
                return True
            logger.warning("message %s could not be copied to the retry topic: %s", message.msg_id, e)
            return False
        return self._record_sent_back(message, is_last_attempt)


def _cannot_be_moved(message: ReceivedMessage) -> bool:
    """Whether a message cannot be moved by its broker: the message is part of an inner batch, which cannot be split, or the
    position of the message in the log is unknown.
    """
    return bool(message.sys_flag & SysFlag.INNER_BATCH) or message.commit_log_offset < 0


def send_all_back(
    messages: Iterable[ReceivedMessage], send: Callable[[ReceivedMessage], bool], is_over: Callable[[], bool]
) -> list[ReceivedMessage]:
    """Send back the messages of a call one after the other. Returns the messages that no broker accepted.

    ``is_over`` returns True if another call has finished the messages, or if another member has the queue. Then no more
    messages are sent. If brokers accept no message for ``MAX_UNACCEPTED_S``, no more messages are sent either: otherwise, each
    of a thousand rows would wait for a broker that hangs.
    """
    unsent_messages = []
    accept_deadline = Deadline.after(MAX_UNACCEPTED_S)
    for message in messages:
        if accept_deadline.expired or is_over() or not send(message):
            unsent_messages.append(message)
        else:
            accept_deadline = Deadline.after(MAX_UNACCEPTED_S)
    return unsent_messages
