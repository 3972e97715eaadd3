"""A consumer of a Proxy's messages between its start and its stop: parts put together, and time told to them."""

from __future__ import annotations

import itertools
import logging

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.held import Stats
from rocketmq_spark.consumer.in_hand import InHand
from rocketmq_spark.consumer.pop_listening import InAnyOrder, InOrder, Listening
from rocketmq_spark.consumer.pop_settings import PopSettings
from rocketmq_spark.consumer.popping import LOOK_S, Popping
from rocketmq_spark.consumer.result import Listener
from rocketmq_spark.consumer.running import HANGS_S, STATS_S, TIMEOUT_S, ConsumerTools
from rocketmq_spark.consumer.settling import LOOK_S as RENEW_S
from rocketmq_spark.consumer.settling import Settling
from rocketmq_spark.consumer.subscriptions import Subscriptions
from rocketmq_spark.errors import OptionError
from rocketmq_spark.membership import TopicFigures
from rocketmq_spark.popped import PoppedMessage
from rocketmq_spark.ports import PopMember

logger = logging.getLogger(__name__)

START_S = 10.0

_numbers = itertools.count()


class PopRunning:
    """One started consumer; ``listener`` is ordered where the settings are."""

    def __init__(
        self,
        port: PopMember,
        settings: PopSettings,
        subscriptions: Subscriptions,
        listener: Listener,
        make: ConsumerTools,
    ) -> None:
        name = f"rocketmq-{settings.group}-{next(_numbers)}"
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._looks, self._renewals = make.timer(f"{name}-look"), make.timer(f"{name}-renew")
        self._workers = make.workers(f"{name}-listener", settings.threads)
        self._in_hand = InHand()
        self._settling = Settling(port, settings, self._in_hand, self._renewals)
        self._listening = self._listening_of(listener)
        self._popping = Popping(port, settings, self._in_hand, self._renewals, self._listening.submit)

    def begin(self) -> None:
        """Join the group and ask for messages.

        Raises ``RocketMQError`` where no Proxy answers, ``OptionError`` where an order is wanted that the group does not keep.
        """
        self._port.subscribe(self._subscriptions.all(), Deadline.after(START_S))
        self._check_order()
        self._looks.every(LOOK_S, self._look, 0.0)
        self._renewals.every(RENEW_S, self._settling.renew, RENEW_S)
        self._looks.every(STATS_S, self._log_stats, STATS_S)

    def changed(self) -> None:
        """The subscriptions are other ones."""
        self._port.subscribe(self._subscriptions.all(), Deadline.after(START_S))
        self._looks.later(0.0, self._look)

    def end(self, deadline: Deadline) -> list[PoppedMessage]:
        """Finish what is in hand and leave; the messages that listeners still had at ``deadline``. May be repeated."""
        try:
            self._popping.close()
            self._listening.close()
            unfinished = self._in_hand.finish(deadline)
            if unfinished:
                logger.warning("group %s: listeners did not come to their end in time", self._settings.group)
            self._workers.close(deadline)
            for timer in (self._looks, self._renewals):
                timer.close(HANGS_S)
            return unfinished
        finally:  # where Ctrl-C ends the wait, too
            self._settling.close()
            last_words = Deadline.after(max(TIMEOUT_S, deadline.remaining()))
            self._port.close(last_words)
            self._popping.join(last_words)

    def stats(self) -> Stats:
        return self._in_hand.stats()

    def figures(self) -> dict[str, TopicFigures]:
        """What became of each topic's messages lately."""
        return self._in_hand.figures(self._subscriptions.all(), self._renewals.now_ms())

    def _listening_of(self, listener: Listener) -> Listening:
        port, in_hand, settling, workers = self._port, self._in_hand, self._settling, self._workers
        if not self._settings.ordered:
            return InAnyOrder(listener, port, in_hand, settling, workers, self._renewals)
        return InOrder(listener, port, self._settings, in_hand, settling, (workers, self._looks))

    def _check_order(self) -> None:
        if self._settings.ordered and not self._port.policy().ordered:
            raise OptionError(
                f"option 'ordered' is true, but brokers hand out messages of group {self._settings.group!r} in any order; "
                "expected a group with consumeMessageOrderly",
                remedy="mqadmin updateSubGroup -o true makes it one",
            )

    def _look(self) -> None:
        self._workers.start_missing()  # where the system had no threads to give, work waits for them
        self._popping.look(self._subscriptions.all())

    def _log_stats(self) -> None:
        logger.info("group %s: %s", self._settings.group, self.stats())
