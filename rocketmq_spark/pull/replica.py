"""Which replica of a broker a read pulls from, and how long the read waits for a broker.

``Replica`` starts at the master that the plan knew, then follows the route, then the broker's own suggestions (``Hints``).
``Patience`` bounds the waits: for the next bytes, for a new connection, and for any progress. It logs a wait at once when
something failed, and every ten seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import Trouble
from rocketmq_spark.errors import BrokerNotFound, CallTimeout, RocketMQError, RouteNotFound
from rocketmq_spark.model import MASTER_ID
from rocketmq_spark.ports import PullSource
from rocketmq_spark.pull.missing import Trials
from rocketmq_spark.remoting.bulk import BulkStream
from rocketmq_spark.remoting.pool import Dialling

logger = logging.getLogger(__name__)

# Receives the replica that a broker suggests, or None if its suggestion is in doubt; returns whether to reconnect.
OnHint = Callable[[int | None], bool]


class Hints:
    """``moving``: the address may be another one by now, which is to be looked at when nothing is under way."""

    def __init__(self, on_hint: OnHint | None) -> None:
        self._on_hint = on_hint
        self.last: int | None = None
        self.moving = False

    def follow(self, suggested: int, trials: Trials) -> None:
        """Go where the broker suggests; but while something looks like loss, the master has to say first what is lost."""
        if suggested != MASTER_ID and trials.suspicious:
            return
        self.last = suggested
        if self._on_hint is not None and self._on_hint(suggested):
            self.moving = True

    def doubt(self) -> bool:
        """A slave may just not have it: whether the master is to be asked before anything is called lost."""
        if self._on_hint is None or not self._on_hint(None):
            return False
        self.last, self.moving = MASTER_ID, True
        return True


# A broker answers these pulls within its queueing time of 5 s; one that says nothing for so long is gone.
SILENCE_S = 20.0
# A receipt ends by then, so that what became due meanwhile is looked after.
_LONGEST_WAIT_S = 1.0
_SHORTEST_WAIT_S = 0.001
_TOLD_EVERY_S = 10.0


class Patience:
    """Begins anew whenever something was read; what went wrong since then explains its end."""

    def __init__(self, read_deadline_s: float, clock: Clock) -> None:
        self._read_deadline_s = read_deadline_s
        self._clock = clock
        self._trouble = Trouble()
        self._pauses = clock.pauses()
        self._heard_at = self._begun_at = 0.0
        self._told_at: float | None = None
        self._refusal: str | None = None
        self.renew()

    def renew(self) -> None:
        """Begin anew: something was read, or the caller took its time."""
        self._heard_at = self._begun_at = self._clock.now()

    def hope(self) -> None:
        """The broker gives something: errors and pauses begin anew, too."""
        if self._told_at is not None:
            waited_s = self._clock.now() - self._begun_at
            long = waited_s >= _TOLD_EVERY_S
            logger.log(logging.WARNING if long else logging.INFO, "the read continues after %.0f s", waited_s)
            self._told_at = None
        self.renew()
        self._trouble.clear()
        self._pauses = self._clock.pauses()

    def heard(self) -> None:
        """The broker spoke, or is expected to from now on."""
        self._heard_at = self._clock.now()

    def refused(self, text: str) -> None:
        """What the broker said instead of messages, for the error at the end."""
        self._refusal = text

    @property
    def silent(self) -> bool:
        """Whether a broker that owes an answer is taken for gone."""
        return self._clock.now() - self._heard_at > SILENCE_S

    def left(self) -> float:
        return max(0.0, self._begun_at + self._read_deadline_s - self._clock.now())

    def deadline(self, max_s: float | None = None) -> Deadline:
        """By when a connection must stand."""
        return Deadline.after(self.left() if max_s is None else min(max_s, self.left()))

    def wait_s(self, due: float | None) -> float:
        """How long to wait for an answer while something else is ``due``."""
        wait = min(_LONGEST_WAIT_S, self.left())
        return wait if due is None else min(wait, max(_SHORTEST_WAIT_S, due - self._clock.now()))

    def pause(self, error: RocketMQError, place: Callable[[], str]) -> None:
        """Sleep before the next connection is tried; ``place`` says what is waited for.

        Raises ``error`` when no waiting heals it; when patience is over, what went wrong first.
        """
        over = self.left() <= 0
        self._trouble.note(error, self._clock.now(), cut_short=over)
        if not error.retriable or over:
            self._trouble.give_up(error, self._clock.now())
        if self._told_at is None:
            self._tell(place, str(error))
        self.tell(place)
        self._clock.sleep(min(next(self._pauses), self.left()))

    def tell(self, place: Callable[[], str]) -> None:
        """Say that the read waits, and for what, where it has waited for long and that was not said a moment ago."""
        since = self._begun_at if self._told_at is None else self._told_at
        if self._clock.now() - since >= _TOLD_EVERY_S:
            last = self._trouble.last
            self._tell(place, str(last) if last is not None else self._refusal or "it does not answer")

    def _tell(self, place: Callable[[], str], why: str) -> None:
        self._told_at = self._clock.now()
        waited_s = self._told_at - self._begun_at
        logger.warning(
            "the read waits for %s, for %.0f s of %g s (option 'readDeadline'): %s",
            place(),
            waited_s,
            self._read_deadline_s,
            why,
        )

    def timeout(self, address: str) -> CallTimeout:
        return CallTimeout(f"no message came within {self._read_deadline_s:g} s", address, remark=self._refusal)


@dataclass(slots=True)
class Replica:
    """Opens streams to a replica of a broker; follows what brokers suggest when it may.

    ``known`` was the master's address when the read was planned. ``at_master`` is None while no route was asked whether it
    still is.
    """

    source: PullSource
    dialling: Dialling
    broker_name: str
    topic: str
    read_from: str = "master"
    known: str | None = None
    suggested: int = MASTER_ID
    doubted: bool = False
    at_master: bool | None = False

    def __call__(self, deadline: Deadline) -> BulkStream:
        address, self.known = self.known if self.read_from != "slave" else None, None
        at_master: bool | None = None
        if address is None:
            address, at_master = self._from_route(deadline)
        stream = BulkStream(
            self.dialling.reachable(address),
            deadline.within(self.dialling.connect_timeout_s),
            self.dialling.tls,
        )
        self.at_master = at_master
        return stream

    def hint(self, broker_id: int | None) -> bool:
        """A broker suggests a replica, or (None) a replica's word is doubted; whether to connect anew."""
        if broker_id is None:
            self.suggested, self.doubted = MASTER_ID, True
            return not self.at_master
        if self.read_from != "hint" or broker_id == self.suggested:
            return False
        self.suggested, self.doubted = broker_id, False
        return True

    def _from_route(self, deadline: Deadline) -> tuple[str, bool]:
        """An address, and whether it is the master's."""
        try:
            route = self.source.route(self.topic, deadline)
        except RouteNotFound:
            self.at_master = self.at_master is not False  # the topic is gone: nothing contradicts the plan any more
            raise
        data = route.brokers.get(self.broker_name)
        address = data.replica(self.read_from, self.suggested) if data is not None else None
        if data is None or address is None:
            raise BrokerNotFound(f"no address of broker {self.broker_name!r} is registered", topic=self.topic)
        if self.doubted and data.master is not None:
            address = data.master
        return address, address == data.own_master
