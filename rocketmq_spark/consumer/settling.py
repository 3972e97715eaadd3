"""What a Proxy is told of the messages in hand: that they are done, that they come again later, or that more time is needed.

What cannot be told is no loss: the message is handed out again when its time is over.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.in_hand import InHand, Lent
from rocketmq_spark.consumer.pop_settings import PopSettings
from rocketmq_spark.errors import ClosedError, NotFound, RocketMQError
from rocketmq_spark.failures import start_thread
from rocketmq_spark.popped import PoppedMessage
from rocketmq_spark.ports import PopMember
from rocketmq_spark.timer import Timer
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)

# For how long messages are asked for, and how often those in hand get as much again: two looks may fail.
INVISIBLE_S, LOOK_S = 30.0, 10.0


class Settling:
    """Of one consumer."""

    def __init__(self, port: PopMember, settings: PopSettings, in_hand: InHand, timer: Timer) -> None:
        self._port = port
        self._settings = settings
        self._in_hand = in_hand
        self._timer = timer
        self._closed = False
        self._renewing: set[Hashable] = set()  # ways on which a thread asks for more time: an endpoint and a broker

    def close(self) -> None:
        """What becomes of messages from now on, nobody is told."""
        self._closed = True

    def done(self, lent: Lent) -> bool:
        """Whether the Proxy knows: only then may the next message of its group be consumed."""
        return self._settle(lent, self._port.ack, "acknowledged")

    def dead(self, lent: Lent) -> bool:
        """It goes to the dead letters; whether the Proxy knows."""
        told = self._settle(lent, self._port.forward_to_dlq, "given up")
        return told and self._log_dead(lent)

    def later(self, lent: Lent, pause_s: float, last: bool = False) -> bool:
        """It is handed out again after so long, or is a dead letter then if this was its ``last`` attempt; whether the Proxy
        knows.
        """

        def change(message: PoppedMessage, deadline: Deadline) -> None:
            self._port.change_invisible(message, pause_s, deadline)

        told = self._settle(lent, change, "sent back", True)
        return told and (not last or self._log_dead(lent))

    def _log_dead(self, lent: Lent) -> bool:
        message, topic = lent.message, dlq_topic(self._settings.group)
        text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
        logger.warning(text, message.msg_id, message.queue, topic, message.delivery_attempt)
        return True

    def renew(self) -> None:
        """More time for what is in hand, but for what a listener has had for too long. A broker that hangs, or an endpoint,
        keeps nobody else's from being put off.
        """
        now_ms = self._timer.now_ms()
        due: defaultdict[Hashable, list[Lent]] = defaultdict(list)
        for lent in self._in_hand.all():
            if now_ms - lent.since_ms > 1000 * self._settings.consume_timeout_s and lent.caller is not None:
                logger.warning("the listener has had message %s for too long: others may get it", lent.message.msg_id)
            elif lent.until_ms - now_ms <= 1000 * (INVISIBLE_S - LOOK_S):
                due[lent.message.endpoint, lent.message.queue.broker_name].append(lent)
        if len(due) == 1 and not self._renewing:
            self._renew_each(*due.values())
            return
        for way in due.keys() - self._renewing:
            self._renewing.add(way)
            ended = partial(self._renewing.discard, way)
            try:
                start_thread(
                    f"rocketmq-{self._settings.group}-renew", partial(self._renew_each, due[way]), ended, False
                )
            except RuntimeError as e:
                ended()
                logger.warning("messages in hand have no more time yet: no thread to ask for it: %s", e)

    def _renew_each(self, due: Sequence[Lent]) -> None:
        for lent in due:
            self._renew(lent)

    def _renew(self, lent: Lent) -> None:
        with lent.asking:
            now_ms = self._timer.now_ms()
            if lent.settled or self._closed:
                return
            try:
                self._port.change_invisible(lent.message, INVISIBLE_S, self._soon())
                lent.until_ms = now_ms + round(1000 * INVISIBLE_S)
            except NotFound as e:
                lent.until_ms = now_ms
                logger.warning("message %s is not ours any more: %s", lent.message.msg_id, e)
            except RocketMQError as e:
                logger.info("message %s has no more time yet: %s", lent.message.msg_id, e)

    def _settle(
        self, lent: Lent, verb: Callable[[PoppedMessage, Deadline], None], what: str, sent_back: bool = False
    ) -> bool:
        told = True
        with lent.asking:
            lent.settled = True
            try:
                if self._closed:
                    raise ClosedError("the consumer was stopped")
                verb(lent.message, self._soon())
            except RocketMQError as e:
                told = False
                logger.warning("message %s could not be %s, it comes again: %s", lent.message.msg_id, what, e)
        self._in_hand.end(lent, sent_back and told)
        return told

    def _soon(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)
