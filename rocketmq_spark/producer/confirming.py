"""How a send ended, as a table: stored, refused before the store, or unknown. What is unknown is looked up.

A driver in so far as looks run on a thread for each broker: one look serves all that became uncertain there meanwhile.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import (
    BrokerNotFound,
    ClosedError,
    LocalProtocolError,
    MessageRefused,
    OptionError,
    RocketMQError,
    RouteNotFound,
    SendFailed,
    UnprovedError,
)
from rocketmq_spark.model import MessageQueue, QueueEnd, SendRequest, SendResult, SendStatus
from rocketmq_spark.producer.attempts import OutOfTime
from rocketmq_spark.producer.outgoing import Outcome, Outgoing, at_rest
from rocketmq_spark.wire.messages import decode_batch, encode_item
from rocketmq_spark.wire.properties import decode_properties

logger = logging.getLogger(__name__)


class StoredIds(Protocol):
    """Finds out which messages are stored, for a producer that does not repeat what may be stored."""

    def end(self, queue: MessageQueue) -> QueueEnd:
        """Where a queue ended at some time before now. Raises ``RocketMQError`` where that is not known, or cannot be asked."""

    def among(
        self, since: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline
    ) -> set[str]:
        """Which of ``ids`` are stored behind offsets of queues of one broker, when what is not there will not come any more.

        Raises ``RocketMQError`` where that cannot be proved in time, or ``master`` is not the broker's master any more.
        """

    def stop(self) -> None:
        """Have ``among`` end soon, from another thread."""


class EndKind(enum.Enum):
    """What is known of a request that ended."""

    STORED = "stored"
    REFUSED = "refused before the store"
    AMBIGUOUS = "may be stored"


# With one of these a message lies elsewhere until it is due.
_DELAYS = frozenset((Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS))
# Nothing left this process.
_OURS = (LocalProtocolError, MessageRefused, OptionError, ClosedError, OutOfTime, RouteNotFound, BrokerNotFound)
# Codes that a broker gives before it stores anything, whatever it says with them.
_BEFORE = frozenset(
    {
        Response.REQUEST_CODE_NOT_SUPPORTED,
        Response.MESSAGE_ILLEGAL,
        Response.SERVICE_NOT_AVAILABLE,
        Response.NO_PERMISSION,
        Response.TOPIC_NOT_EXIST,
        Response.INVALID_PARAMETER,
        Response.FLOW_CONTROL,
        Response.GO_AWAY,
    }
)
# Codes that are given on several paths: the words of those that lie before the store. "[PC_SYNCHRONIZED]" and "in-sync replicas
# not enough" are not among them: a broker with a DLedger log says so, too, when followers did not confirm in time what it stored.
_WORDS: Mapping[int, tuple[str, ...]] = {
    Response.SYSTEM_BUSY: (
        "[TIMEOUT_CLEAN_QUEUE]",
        "[PCBUSY_CLEAN_QUEUE]",
        "[REJECTREQUEST]",
        "[OVERLOAD]",
    ),
    Response.SYSTEM_ERROR: (
        "broker unable to service",
        "create mapped file failed",
    ),
}


def end_of(outcome: SendResult | RocketMQError, chosen: bool = True) -> EndKind:
    """What is known after one attempt; ``chosen`` is whether it had a queue, without which nothing was sent."""
    if isinstance(outcome, SendResult):
        return EndKind.STORED
    if not chosen or outcome.unsent or isinstance(outcome, _OURS):
        return EndKind.REFUSED
    code = outcome.broker_code
    if code in _BEFORE or (outcome.remark or "").startswith(_WORDS.get(code or 0, ("\0",))):
        return EndKind.REFUSED
    return EndKind.AMBIGUOUS


# Which ids are stored, or why that cannot be found out.
Found = set[str] | RocketMQError


class Confirmed(NamedTuple):
    """What a look found of a request: how many of its messages are stored, and a request of the others, if there are any."""

    stored: int
    rest: SendRequest | None


class Doubt(NamedTuple):
    """A request that may be stored in ``queue``, behind the offset ``since``."""

    request: SendRequest
    queue: MessageQueue
    since: QueueEnd
    deadline: Deadline
    done: Callable[[Found], None]


class Confirming:
    """The looks of an engine, and from where on they must look."""

    def __init__(self, stored: StoredIds, timer: Timer) -> None:
        self._stored = stored
        self._timer = timer
        self._threads: dict[str, Timer] = {}
        self._lock = threading.Lock()
        # Of each queue an end that was noted, and one that was seen since.
        self._ends: dict[tuple[MessageQueue, str], tuple[int, int]] = {}
        self._waiting: dict[str, deque[Doubt]] = {}
        self._closed = False

    def begin(self, outgoing: Outgoing, queue: MessageQueue) -> None:
        """An attempt begins: note an offset before all that it sends. Raises ``RocketMQError`` where none is known."""
        try:
            end = self._stored.end(queue)
        except RocketMQError as e:
            e.unsent = True
            raise
        key = queue, end.master
        with self._lock:
            noted, seen = self._ends.get(key, (-1, -1))
            if noted != end.offset:  # asked anew: what was seen before may be of a topic that was made again
                self._ends[key] = end.offset, (seen := end.offset)
        outgoing.since = QueueEnd(max(end.offset, seen), end.master)

    def knows(
        self,
        outgoing: Outgoing,
        queue: MessageQueue | None,
        outcome: Outcome,
        again: Callable[[MessageQueue | None, Outcome], None],
    ) -> bool:
        """Whether the end of an attempt is known. If not it is looked up, and ``again`` gets it, once, on any thread."""
        if isinstance(outcome, SendResult):
            self._landed(outgoing, outcome)
            return True
        number = outgoing.attempts.count
        if queue is None or outgoing.since is None or outgoing.looked == number or _is_definite(outcome):
            return True

        def done(found: Found) -> None:
            outgoing.looked = number
            again(queue, _settled(outgoing, queue, outcome, found))

        return not self._later(Doubt(outgoing.remaining, queue, outgoing.since, outgoing.until, done))

    def known(self, outgoing: Outgoing, queue: MessageQueue | None, outcome: Outcome) -> Outcome:
        """The end of an attempt on the calling thread, which looks it up where it is not known."""
        if isinstance(outcome, SendResult):
            self._landed(outgoing, outcome)
            return outcome
        if queue is None or outgoing.since is None or _is_definite(outcome):
            return outcome
        ids = frozenset(each for each, _ in _items(outgoing.remaining))
        logger.info("checking on %s which of %d messages are stored", queue.broker_name, len(ids))
        offset, master = outgoing.since
        return _settled(outgoing, queue, outcome, self._found({queue: offset}, master, ids, outgoing.until))

    def _landed(self, outgoing: Outgoing, result: SendResult) -> None:
        """What is sent later lies behind it. One before the offset that was noted for it is in a queue that was made again."""
        if outgoing.since is None or result.queue is None or result.queue_offset is None:
            return
        key = result.queue, outgoing.since.master
        with self._lock:
            noted, seen = self._ends.get(key, (-1, -1))
            if result.queue_offset > seen or result.queue_offset < outgoing.since.offset:
                self._ends[key] = noted, result.queue_offset

    def _later(self, doubt: Doubt) -> bool:
        """Whether there will be a look. None after ``close``: the request has its outcome, and the look's thread would stay."""
        name = doubt.queue.broker_name
        with self._lock:
            if self._closed:
                return False
            self._waiting.setdefault(name, deque()).append(doubt)
            thread = self._threads.get(name)
            if thread is None:
                thread = self._threads[name] = self._timer.beside(f"confirm-{name}")
        logger.info("checking on %s which of %d messages are stored", name, len(_items(doubt.request)))
        try:
            thread.later(0, lambda: self._look(name))
        except RuntimeError as e:  # there can be no more threads
            self._in_vain(doubt, SendFailed(f"there is no thread for a look: {e}"))
        return True

    def _in_vain(self, doubt: Doubt, error: RocketMQError) -> None:
        """No look will take it, unless one of an earlier doubt has done so."""
        with self._lock:
            waiting = self._waiting[doubt.queue.broker_name]
            left = [each for each in waiting if each is not doubt]
            if len(left) == len(waiting):
                return
            self._waiting[doubt.queue.broker_name] = deque(left)
        doubt.done(error)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._stored.stop()
        for thread in self._threads.values():
            thread.close(wait_s=0)

    def _look(self, name: str) -> None:
        with self._lock:
            doubts = list(self._waiting.get(name, ()))
            self._waiting[name] = deque()
        if not doubts:  # an earlier look took them
            return
        for master in {doubt.since.master for doubt in doubts}:
            self._look_at(master, [doubt for doubt in doubts if doubt.since.master == master])

    def _look_at(self, master: str, doubts: Sequence[Doubt]) -> None:
        since: dict[MessageQueue, int] = {}
        for doubt in doubts:
            since[doubt.queue] = min(doubt.since.offset, since.get(doubt.queue, doubt.since.offset))
        ids = frozenset(each for doubt in doubts for each, _ in _items(doubt.request))
        found = self._found(since, master, ids, Deadline(max(doubt.deadline.at for doubt in doubts)))
        for doubt in doubts:
            doubt.done(found)

    def _found(self, since: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline) -> Found:
        name = next(iter(since)).broker_name
        try:
            found = self._stored.among(since, master, ids, deadline)
        except RocketMQError as e:
            return e
        except Exception as e:
            logger.exception("could not check which messages %s has stored", name)
            return SendFailed(f"looking up what is stored failed: {type(e).__name__}: {e}")
        logger.warning("%s has stored %d of %d messages that got no answer", name, len(found), len(ids))
        return found


def _is_definite(outcome: Outcome) -> bool:
    return end_of(outcome) is not EndKind.AMBIGUOUS


def _settled(outgoing: Outgoing, queue: MessageQueue, outcome: RocketMQError, found: Found) -> Outcome:
    """What a look makes of the outcome of an attempt, and what is left to send of its request."""
    if isinstance(found, RocketMQError):
        return unproved(outcome, found)
    request = outgoing.remaining
    stored, outgoing.rest = without(request, found)
    outgoing.confirmed += stored
    if outgoing.rest is None:
        return SendResult(SendStatus.SEND_OK, "", queue, None)
    if not request.batch and not decode_properties(request.properties).keys().isdisjoint(_DELAYS):
        return unproved(outcome, SendFailed("a delayed message is not in its topic before it is due"))
    return outcome


def unproved(error: RocketMQError, cause: RocketMQError) -> UnprovedError:
    """The error of a send whose end could not be found out: ``cause`` is why."""
    failed = UnprovedError(
        f"the message may be stored, and its broker did not confirm whether it is: {error.message}; {cause.message}",
        error.addr,
        error.broker_code,
        error.topic,
        error.queue,
        error.remark,
        cause.remedy,
    )
    failed.__cause__ = error
    return failed


def without(request: SendRequest, stored: set[str]) -> Confirmed:
    """The request without the messages that are stored."""
    items = _items(request := at_rest(request))
    rest = [(each, item) for each, item in items if each not in stored]
    count = len(items) - len(rest)
    if not rest:
        return Confirmed(count, None)
    if not count:
        return Confirmed(0, request)
    return Confirmed(count, request._replace(body=b"".join(item for _, item in rest)))


def _items(request: SendRequest) -> list[tuple[str, bytes]]:
    """The id of each message, and of a batch its item."""
    request = at_rest(request)
    if not request.batch:
        return [(decode_properties(request.properties)[Property.UNIQ_KEY], b"")]
    return [
        (decode_properties(item.properties)[Property.UNIQ_KEY], encode_item(item.body, item.properties, item.flag))
        for item in decode_batch(request.data)
    ]
