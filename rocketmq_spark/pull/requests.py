"""What a read asks, and whom: the pulls that it sends, the replica of a broker that it asks, how long it waits for a broker.

``PullPacing`` learns from answers how much to ask for. A short answer shows the most that the broker gives; now and then one
pull asks for twice as much, in case an operator raised the limits or cold data became warm.

``Replica`` starts at the master that the plan knew, then follows the route, then the broker's own suggestions (``ReplicaHints``).
``ProgressTimeout`` bounds the waits: for the next bytes, for a new connection, and for any progress. It logs a wait at once when
something failed, and every ten seconds; at level INFO in reads that wait for a second at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import Trouble
from rocketmq_spark.errors import BrokerNotFound, CallTimeout, RocketMQError, RouteNotFound
from rocketmq_spark.model import MASTER_ID
from rocketmq_spark.options import Options
from rocketmq_spark.ports import PullSource
from rocketmq_spark.pull.pending import LossSuspicions, PendingOffsets
from rocketmq_spark.remoting.advertised import explained
from rocketmq_spark.remoting.bulk import BulkStream, PullTemplate
from rocketmq_spark.remoting.pool import Dialling

_MAX_OPAQUE = 0x7FFFFFFF


class PullRequests:
    """Frames from the templates of the ranges, in their order."""

    def __init__(self, templates: Sequence[PullTemplate]) -> None:
        self._templates = templates
        self._opaque = self._signed_from = 0
        self.sent = 0

    def take(self, missing: PendingOffsets, pacing: PullPacing, pulls: int, count: int) -> list[bytes]:
        """``pulls`` requests of ``count`` for the lowest missing offsets, which are under way from now on."""
        if self._opaque + pulls > _MAX_OPAQUE:
            self._opaque = 0
        first = self._opaque
        slots = missing.send(first, count, pulls)
        self._opaque += len(slots)
        self.sent += len(slots)
        pacing.asked(max(limit - start for _, start, limit in slots))
        templates = self._templates
        # A filtered pull scans as many offsets as it is asked for; the count never falls short of the slot.
        return [
            templates[number].frame(opaque, start, limit - start)
            for opaque, (number, start, limit) in enumerate(slots, first)
        ]

    def other_keys(self, opaque: int) -> bool:
        """Whether a request that was refused would have other keys by now."""
        if opaque < self._signed_from:
            return True
        changed = [template.renew() for template in self._templates]
        if any(changed):
            self._signed_from = self._opaque
        return any(changed)


FIRST_PULL_MESSAGES = 8
DEFAULT_ANSWER_MESSAGES = 32
DEFAULT_ANSWER_BYTES = 256 << 10
MAX_PULL_BYTES = 1 << 20
MAX_PULL_DEPTH = 256
ADAPTIVE_DEPTH_BYTES = 4 << 20
FILTERED_ANSWER_BYTES = 64 << 10
# How long a broker may contradict what it said when the batch was planned, before that is called loss.
LOSS_GRACE_S = 15.0
_PROBE_AFTER = 64
_INERTIA = 0.9


@dataclass(frozen=True, slots=True)
class PullSettings:
    """``depth`` None adapts the number of pulls to the size of the answers. With ``follows_resets`` an operator's reset of the
    group ends the read (``RangeReader.resets``).
    """

    max_bytes_in_flight: int = 8 << 20
    depth: int | None = None
    batch_size: int = 1024
    read_deadline_s: float = 120.0
    fetched_rows: int = 32_768
    filtered: bool = False
    grace_s: float = LOSS_GRACE_S
    follows_resets: bool = False

    @classmethod
    def of(cls, options: Options) -> PullSettings:
        """Those of a read with these options."""
        return cls(options.max_bytes_in_flight, options.pull_depth, options.pull_batch_size, options.read_deadline)


class PullPacing:
    """Messages to ask for in a pull, and pulls to keep under way."""

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self.count = settings.batch_size if settings.filtered else min(FIRST_PULL_MESSAGES, settings.batch_size)
        self._bytes_per_message = 0.0
        self._answer_bytes = 0.0
        self._full_answers = 0
        self._patience = 1
        self._probing = False
        self._seen = False

    def next_count(self) -> int:
        """Messages to ask for in the next pull, at most."""
        if self._settings.filtered:
            return self.count
        if self._probing or self._full_answers < self._patience:
            return min(self.count, self._max_pull())
        return min(max(self.count, min(self.count * 2, self._settings.batch_size)), self._max_pull())

    def asked(self, count: int) -> None:
        """A pull of ``count`` was sent: fewer than proposed where a range ends."""
        self._probing = self._probing or count > self.count

    def forget(self) -> None:
        """What was asked will not be answered."""
        self._probing = False

    def pulls(self, count: int, asked: int) -> int:
        """How many more pulls of ``count`` the bound of bytes allows while ``asked`` messages are under way, as far as
        their size is known; one when ``count`` is a probe."""
        max_messages = int(self._settings.max_bytes_in_flight / max(1.0, self._bytes_per_message))
        room = max(0, (max_messages - asked) // count)
        return min(1, room) if count > self.count else room

    def passed(self) -> None:
        """The broker looked through what was asked for and nothing matched."""
        self._seen = True
        self._bytes_per_message *= _INERTIA
        self._answer_bytes *= _INERTIA

    def depth(self) -> int:
        if not self._seen:
            return 1
        # The next filtered answer may be full although the last ones were empty.
        full = FILTERED_ANSWER_BYTES if self._settings.filtered else self._bytes_per_message * self.count
        answer = max(1.0, self._answer_bytes, full)
        max_depth = int(self._settings.max_bytes_in_flight / answer)
        if self._settings.depth:
            return max(1, min(self._settings.depth, max_depth))
        return max(1, min(MAX_PULL_DEPTH, max_depth, max(4, int(ADAPTIVE_DEPTH_BYTES / answer))))

    def learn(self, asked: int, offset_count: int, size: int, answers: int = 1) -> None:
        """An answer covered ``offset_count`` of the ``asked`` offsets with ``size`` bytes; of several like it the largest."""
        first = not self._bytes_per_message
        self._seen = True
        self._bytes_per_message = _follow(self._bytes_per_message, size / max(1, offset_count))
        self._answer_bytes = _follow(self._answer_bytes, size)
        if self._settings.filtered:
            return
        if first:
            stock = min(
                DEFAULT_ANSWER_MESSAGES,
                self._settings.batch_size,
                int(DEFAULT_ANSWER_BYTES / max(1.0, self._bytes_per_message)),
            )
            self.count = max(1, offset_count, stock)
            return
        probe = asked > self.count
        if probe:
            self._probing = False
        if offset_count < asked:
            self.count = max(self.count, offset_count) if probe else max(1, offset_count)
            self._full_answers, self._patience = 0, _PROBE_AFTER
        elif probe:
            self.count, self._full_answers, self._patience = asked, 1, 1
        elif asked == self.count:
            self._full_answers += answers

    def _max_pull(self) -> int:
        max_bytes = min(MAX_PULL_BYTES, self._settings.max_bytes_in_flight)
        return max(1, int(max_bytes / max(1.0, self._bytes_per_message)))


def _follow(estimate: float, seen: float) -> float:
    """Upwards at once, for the bound of bytes under way is a promise; downwards slowly."""
    return seen if seen >= estimate else _INERTIA * estimate + (1 - _INERTIA) * seen


logger = logging.getLogger(__name__)

# Receives the replica that a broker suggests, or None if its suggestion is in doubt; returns whether to reconnect.
OnHint = Callable[[int | None], bool]


class ReplicaHints:
    """``moving``: the address may be another one by now, which is to be looked at when nothing is under way."""

    def __init__(self, on_hint: OnHint | None) -> None:
        self._on_hint = on_hint
        self.last: int | None = None
        self.moving = False

    def follow(self, suggested: int, trials: LossSuspicions) -> None:
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
BROKER_SILENCE_S = 20.0
# A receipt ends by then, so that what became due meanwhile is looked after.
_LONGEST_WAIT_S = 1.0
_SHORTEST_WAIT_S = 0.001
_TOLD_EVERY_S = 10.0
# The driver waits no longer for a batch that a task can read as well.
_BRIEF_S = 1.0


class ProgressTimeout:
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
        return self._clock.now() - self._heard_at > BROKER_SILENCE_S

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
        # The error at the end of a short wait is enough.
        logger.log(
            logging.WARNING if self._read_deadline_s > _BRIEF_S else logging.INFO,
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
    still is. ``spare_bytes`` is what the user's options let a stream keep besides its buffer.
    """

    source: PullSource
    dialling: Dialling
    broker_name: str
    topic: str
    read_from: str = "master"
    known: str | None = None
    spare_bytes: int = 0
    suggested: int = MASTER_ID
    doubted: bool = False
    at_master: bool | None = False
    connected: bool = False

    def __call__(self, deadline: Deadline) -> BulkStream:
        address, self.known = self.known if self.read_from != "slave" else None, None
        at_master: bool | None = None
        if address is None:
            address, at_master = self._from_route(deadline)
        try:
            stream = BulkStream(
                self.dialling.reachable(address),
                deadline.within(self.dialling.connect_timeout_s),
                self.dialling.tls,
                spare_bytes=self.spare_bytes,
                arriving=self.dialling.arriving,
            )
        except RocketMQError as e:
            # The remedy assumes that the name server answers. That is known only if the address came from a route just now.
            if at_master is not None and not self.connected and not self.dialling.at_name_server:
                explained(e, [address])
            raise
        self.at_master, self.connected = at_master, True
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
