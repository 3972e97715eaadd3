"""Transactional messages: stored as half messages, which no consumer reads before they are committed.

Mirrors ``TransactionMQProducer``: a broker asks a producer of the group about a half message without a decision, every 30 s, 15
times at most (``checkTransactionState``). Deliberate differences:

* A decision is a request with an answer, so that the caller learns whether it has arrived; Java's is one-way.
* A half message that may be stored is not sent again. If it were stored twice, only a check could decide the second one.
* Before a broker asks, it stores a second copy of the half message; a decision about the first copy leaves the second copy
  undecided. So while this process has not decided, it answers ``UNKNOWN``, and records the broker and offset of the second copy.
  Copies have the same content. If a message of another client has the same id, its content differs, and its offset is not
  recorded. A check that arrives during a commit is about a second copy; the answer rolls the second copy back, because the commit
  delivers the first copy. The user's function decides about all other messages.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from rocketmq_spark.base.arguments import check_function, check_seconds
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.copies import RACE_WINDOW_S
from rocketmq_spark.base.threads import Failure, capture, defer_if_collecting
from rocketmq_spark.errors import (
    CallTimeout,
    ClosedError,
    LocalProtocolError,
    MessageRefused,
    OptionError,
    RocketMQError,
    SendFailed,
)
from rocketmq_spark.model import Message, ReceivedMessage, SendResult, SendStatus
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.model.send import HalfPlace, HalfState, TransactionState, content_digest
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.encoding import How
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.properties import check_message, decode_properties

logger = logging.getLogger(__name__)

# A user's function returns a state or its name. Over gRPC it gets the message in the form that a Proxy returns.
TransactionCheck = (
    Callable[[ReceivedMessage], TransactionState | str] | Callable[[PoppedMessage], TransactionState | str]
)
_CheckedMessage = ReceivedMessage | PoppedMessage

# With default settings brokers ask for seven and a half minutes; decisions are remembered for longer. If a send gets no answer,
# the broker may have died; after its restart, the broker still asks about messages of the last 72 hours (fileReservedTime).
REMEMBER_RECENT_S, REMEMBER_ABANDONED_S, MAX_REMEMBERED_FATES = 900.0, 72 * 3600.0, 100_000
# If only unreachable objects, such as the traceback of a failed attempt, still reference a half message, the user's function
# must decide. An idle process does not collect garbage. So a check starts a garbage collection, at most once in
# ``COLLECTION_INTERVAL_S``.
COLLECTION_INTERVAL_S = 20.0


SendDecision = Callable[[HalfPlace, TransactionState, Deadline], bool]

# How long a check waits at most for a decision that is being sent.
MAX_DECISION_S = 5.0

# The new state, by state and decision. There are no other transitions.
_TRANSITIONS = {
    (HalfState.PREPARED, TransactionState.COMMIT): HalfState.COMMITTED,
    (HalfState.PREPARED, TransactionState.ROLLBACK): HalfState.ROLLED_BACK,
}


class HalfFate:
    """The state of a half message in this process. A ``HalfFate`` does not reference the message or its producer, because many of
    these objects are kept for a long time.

    While the program references the half message, the program may decide. ``owner_ref`` is a weak reference to the half message.
    The decision names the broker and offset of the stored message, or of the last copy that the broker made. Another message with
    the same id has another ``digest`` (``model.send.content_digest``).
    """

    __slots__ = ("_crossing_until", "_lock", "_place", "digest", "last_decision", "owner_ref", "state")

    def __init__(self, place: HalfPlace, digest: bytes, state: HalfState = HalfState.PREPARED) -> None:
        self._place = place
        self.digest = digest
        self._lock = threading.Lock()
        self._crossing_until: Deadline | None = None
        self.state = state
        self.last_decision: TransactionState | None = None  # set even if the decision could not be sent
        self.owner_ref: Callable[[], object] = lambda: True  # ``HalfMessage`` sets a weak reference

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is being sent, so that the answer to a check follows soon."""
        return self._lock.locked()

    def on_check(self, place: HalfPlace, patience_s: float = 0.0) -> TransactionState | None:
        """Return the answer to a broker's check of the message at ``place``. Returns None if the user's function must decide,
        because the program can no longer decide, or because another message has the same id. While the program may decide, the
        answer is ``UNKNOWN``, also about another message with the same id.
        """
        if not self._lock.acquire(timeout=patience_s):
            return TransactionState.UNKNOWN
        try:
            if self.state is HalfState.PREPARED:
                if place.digest == self.digest:  # the broker checks a copy; brokers before 5.1 do not send their name
                    self._place = place._replace(broker_name=place.broker_name or self._place.broker_name)
                return None if self.owner_ref() is None else TransactionState.UNKNOWN
            if place.digest != self.digest:
                return None
            if self.state is HalfState.COMMITTED:
                is_crossing = self._crossing_until is not None and not self._crossing_until.expired
                return TransactionState.ROLLBACK if is_crossing else TransactionState.COMMIT
            return TransactionState.ROLLBACK if self.state is HalfState.ROLLED_BACK else None
        finally:
            self._lock.release()

    def record_place(self, place: HalfPlace) -> None:
        """Record where the send stored the message, unless a broker has already asked about a copy, which is stored elsewhere."""
        with self._lock:
            current_place = self._place
            was_checked = current_place.broker_name or current_place.half_offset is not None
            self._place = (
                current_place._replace(broker_name=current_place.broker_name or place.broker_name)
                if was_checked
                else place
            )

    def decide(self, decision: TransactionState, timeout_s: float, send: SendDecision) -> bool:
        """Send a decision. Returns False if the state does not allow the decision. Raises errors of the request."""
        deadline = Deadline.after(timeout_s)
        with self._decision_lock(deadline):
            next_state = _TRANSITIONS.get((self.state, decision))
            if next_state is None:
                return False
            self.last_decision = decision
            self.state = HalfState.UNKNOWN  # stays ``UNKNOWN`` if Ctrl-C interrupts the request
            try:
                is_confirmed = send(self._place._replace(digest=self.digest), decision, deadline)
            except RocketMQError as e:
                if e.unsent:
                    self.state = HalfState.PREPARED
                raise
            self.state = next_state
            self._crossing_until = Deadline.after(RACE_WINDOW_S) if is_confirmed else None
            return True

    def abandon(self) -> bool:
        """Leave an undecided message to the user's function, because the program can no longer decide. Returns False if a
        decision that is being sent takes longer than ``MAX_DECISION_S``.
        """
        with contextlib.suppress(CallTimeout), self._decision_lock(Deadline.after(MAX_DECISION_S)):
            if self.state is HalfState.PREPARED:
                self.state = HalfState.UNKNOWN
            return True
        return False

    @contextlib.contextmanager
    def _decision_lock(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock of decisions. The wait for the lock has a timeout, because after a fork a thread of the parent may own
        the lock forever.
        """
        if not self._lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            error = CallTimeout("another decision on the half message is on its way", topic=self._place.topic)
            error.unsent = True
            raise error
        try:
            yield
        finally:
            self._lock.release()


class HalfMessage:
    """A stored message that consumers cannot see until it is committed. Call ``commit`` or ``rollback`` once, from any thread.

    ``Producer.send_half`` and ``Producer.transaction`` create half messages. The broker checks an undecided half message: it asks
    a producer of the group for the decision. While your program references this object, the answer is ``UNKNOWN``; after that,
    ``transaction_check`` decides.

    Args:
        message: The message that was sent.
        result: The broker's acknowledgement. ``queue_offset`` is None, because a message has no offset before it is committed.
        fate: Internal: the state of the half message in this process.
        send: Internal: a function that sends a decision. The function references the producer, which stays open until this
            message is decided or dropped.
        timeout_s: Seconds that ``commit`` and ``rollback`` wait for the broker's answer.
    """

    def __init__(
        self, message: Message, result: SendResult, fate: HalfFate, send: SendDecision, timeout_s: float
    ) -> None:
        self.message = message
        self.result = result
        # ``_send`` becomes None when no further decision is possible, so that the producer can be collected.
        self._send: SendDecision | None = send
        self._timeout_s = timeout_s
        self._fate = fate
        self._fate.owner_ref = weakref.ref(self)

    @property
    def state(self) -> HalfState:
        """The state as this process knows it: ``PREPARED``, ``COMMITTED`` or ``ROLLED_BACK``; ``UNKNOWN`` if a decision was sent
        and the broker did not answer.
        """
        return self._fate.state

    def commit(self, timeout_s: float | None = None) -> None:
        """Deliver the message.

        Args:
            timeout_s: Seconds to wait for the broker's answer; the send timeout by default.

        Raises:
            RocketMQError: The broker did not answer, or rejected the decision. If the state is still ``PREPARED``, nothing was
                sent, and you may try again. If the state is ``UNKNOWN``, the broker calls ``transaction_check``.
            LocalProtocolError: The message was decided before.
        """
        self._decide(TransactionState.COMMIT, timeout_s)

    def rollback(self, timeout_s: float | None = None) -> None:
        """Drop the message. ``timeout_s`` and errors are those of ``commit``."""
        self._decide(TransactionState.ROLLBACK, timeout_s)

    def _decide(self, decision: TransactionState, timeout_s: float | None) -> None:
        if defer_if_collecting(functools.partial(self._decide, decision, timeout_s)):
            return
        wait_s = self._timeout_s if timeout_s is None else check_seconds("timeout_s", timeout_s)
        send = self._send
        try:
            is_decided = send is not None and self._fate.decide(decision, wait_s, send)
        except RocketMQError as e:
            if not e.unsent:
                self._send = None
            raise
        self._send = None
        if not is_decided:
            raise LocalProtocolError(
                f"{decision.value} is not possible: the state of half message {self.result.msg_id} is {self.state.value}",
                topic=self.message.topic,
                remedy="Decide each half message once",
            )
        # The decision is remembered from now on, because brokers may also ask about a message that was decided late.
        _registry.add(self.result.msg_id, self._fate, self)

    def _abandon(self) -> None:
        """Leave an undecided message to ``transaction_check``, because the program can no longer decide."""
        if self._fate.abandon():
            self._send = None


_FatesById = OrderedDict[str, tuple[Deadline, HalfFate]]


class _TransactionRegistry:
    """The half messages of this process by id, while the program references them or brokers may ask about them. A forked
    process starts with an empty registry, because only the parent decides about its messages.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        # The lock is reentrant, because a garbage collection in the thread that holds the lock may end a ``transaction`` block
        # or free a half message.
        self._lock = threading.RLock()
        self._recent_fates: _FatesById = OrderedDict()
        # Separate from ``_recent_fates``, so that many recent messages do not displace abandoned ones.
        self._abandoned_fates: _FatesById = OrderedDict()
        self._referenced_messages: weakref.WeakValueDictionary[str, HalfMessage] = weakref.WeakValueDictionary()

    def add(self, msg_id: str, fate: HalfFate, half_message: HalfMessage | None = None) -> None:
        with self._lock:
            if half_message is not None:
                self._referenced_messages[msg_id] = half_message
            self._remember(self._recent_fates, msg_id, fate, REMEMBER_RECENT_S)

    def abandon(self, msg_id: str, fate: HalfFate) -> None:
        """Remember a message that may be stored, although its send failed."""
        with self._lock:
            self._remember(self._abandoned_fates, msg_id, fate, REMEMBER_ABANDONED_S)

    def _remember(self, fates: _FatesById, msg_id: str, fate: HalfFate, seconds: float) -> None:
        fates[msg_id] = Deadline.after(seconds), fate
        fates.move_to_end(msg_id)
        with contextlib.suppress(RuntimeError):  # a garbage collection may change the dict during the iteration
            while len(fates) > MAX_REMEMBERED_FATES or next(iter(fates.values()))[0].expired:
                fates.popitem(last=False)

    def get(self, msg_id: str) -> HalfFate | None:
        with self._lock:
            entry, half_message = (
                self._recent_fates.get(msg_id) or self._abandoned_fates.get(msg_id),
                self._referenced_messages.get(msg_id),
            )
        if entry is not None:
            return entry[1]
        return None if half_message is None else half_message._fate


# The process has one registry for all producers, because a broker may ask any producer of the group. Message ids are unique.
_registry = _TransactionRegistry()
os.register_at_fork(after_in_child=_registry.clear)
_next_collection_deadline = Deadline.after(0)


def _collect_garbage() -> None:
    global _next_collection_deadline
    if _next_collection_deadline.expired:
        _next_collection_deadline = Deadline.after(COLLECTION_INTERVAL_S)
        gc.collect()


def answer_check(
    check: Callable[[Any], Any], message: _CheckedMessage, place: HalfPlace
) -> TransactionState | Callable[[], TransactionState]:
    """The answer to a broker's check of a half message, or a function that returns the answer."""
    fate = _registry.get(message.msg_id)
    if fate is not None and fate.is_deciding:
        return functools.partial(_answer_after_decision, fate, check, message, place)
    if fate is not None and fate.state is HalfState.PREPARED:
        _collect_garbage()
    decision = None if fate is None else fate.on_check(place)
    return functools.partial(_call_check, check, message) if decision is None else decision


def _answer_after_decision(
    fate: HalfFate, check: Callable[[Any], Any], message: _CheckedMessage, place: HalfPlace
) -> TransactionState:
    decision = fate.on_check(place, MAX_DECISION_S)
    return _call_check(check, message) if decision is None else decision


def _call_check(check: Callable[[Any], Any], message: _CheckedMessage) -> TransactionState:
    decision: Any = capture(check, message)
    if isinstance(decision, Failure):
        decision.log(logger, "transaction_check failed for message %s of %s", message.msg_id, message.topic)
        return TransactionState.UNKNOWN
    try:
        return decision if isinstance(decision, TransactionState) else TransactionState(decision)
    except ValueError:
        names = ", ".join(state.value for state in TransactionState)
        logger.error(
            "transaction_check returned %r for message %s of %s; expected %s. The broker will ask again",
            decision, message.msg_id, message.topic, names,
        )  # fmt: skip
        return TransactionState.UNKNOWN


def weakly_bound(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls ``check``. If ``check`` is a method, the function has only a weak reference to its object.

    The object often owns the producer. The client's table of producers has the returned function: with a strong reference, this
    table would keep the object and the producer alive after the program drops them. The producer has a strong reference to
    ``check``.
    """
    if not inspect.ismethod(check):
        return check
    try:
        method = weakref.WeakMethod(check)
    except TypeError:  # the class has ``__slots__`` without ``__weakref__``
        return check

    def call(message: Any) -> Any:
        bound_check = method()
        return TransactionState.UNKNOWN if bound_check is None else bound_check(message)

    return call


class TransactionProducer(BaseProducer):
    """A producer that can send transactional messages if it has a ``check``, which decides about undecided messages."""

    def __init__(
        self, sender: Sender, settings: ProducerSettings, check: TransactionCheck | None = None, **base_arguments: Any
    ) -> None:
        if check is not None:
            check_function("transaction_check", check, "message")
            # Environments that share a topic have different groups, so they do not decide about each other's messages.
            group = settings.group if settings.environment is None else settings.environment.group(settings.group)
            self._transaction_check = check  # the only strong reference: see ``weakly_bound``
            settings = replace(
                settings, group=group, transaction_check=functools.partial(answer_check, weakly_bound(check))
            )
        super().__init__(sender, settings, **base_arguments)

    def send_half(self, message: Message, *, timeout_s: float | None = None) -> HalfMessage:
        """Store a message that is delivered when you commit it.

        While you hold the returned object undecided, the broker's checks get ``UNKNOWN``. If you drop the object undecided, or
        the program ends, the broker calls ``transaction_check`` of a producer of the group, 15 times at most by default. Half
        messages are not batched, spooled or delayed.

        Args:
            message: What to send, without a priority.
            timeout_s: Seconds for all attempts together instead of the send timeout.

        Raises:
            OptionError: The producer has no ``transaction_check``.
            SendFailed: The broker stored the message less safely than it is configured to (``SendStatus``). The message is
                rolled back, now or when the broker asks.
            RocketMQError: The errors of ``send``. A message whose send failed may be stored nevertheless. The producer does not
                send this message again, and answers ``ROLLBACK`` if the broker checks it. So you may send the message again.
        """
        if self.settings.transaction_check is None:
            raise OptionError("transactional messages need transaction_check, which decides when a broker asks")
        check_message(message)
        if message.priority is not None:
            raise MessageRefused("a transactional message has no priority", topic=message.topic)
        prepared, destination, deadline = self._check_and_resolve(message, How(timeout_s=timeout_s))
        prepared = encoding.as_half(prepared)
        msg_id = prepared.msg_id
        scope = self.settings.scope
        topic = scope.user_name(scope.name_on_wire(message.topic))  # a check contains this name of the topic
        digest = content_digest(topic, prepared.message.body, decode_properties(prepared.properties))
        fate = HalfFate(HalfPlace(message.topic, "", self.settings.group, msg_id, msg_id), digest)
        _registry.add(msg_id, fate)  # the broker may ask before it acknowledges
        try:
            result = self._engine.send(
                self._outgoing(prepared, destination, deadline)._replace(spoolable=False, at_most_once=True)
            )
            assert result.queue is not None
            fate.record_place(HalfPlace.of(result, self.settings.group, message.topic, msg_id))
            half_result = result._replace(msg_id=msg_id, queue_offset=None)
            half_message = HalfMessage(
                prepared.message, half_result, fate, self._send_decision, self.settings.send_timeout_s
            )
            _registry.add(msg_id, fate, half_message)
            if result.status is not SendStatus.SEND_OK:
                self._reject_unsafe_store(half_message, result)
        except BaseException as e:  # the half message must not be delivered, because a new attempt sends another one
            if getattr(e, "unsent", False):
                fate.state = HalfState.UNKNOWN
            else:
                fate.state = HalfState.ROLLED_BACK
                _registry.abandon(msg_id, fate)
            raise
        return half_message

    def _reject_unsafe_store(self, half_message: HalfMessage, result: SendResult) -> None:
        self._decide_at_end(half_message, TransactionState.ROLLBACK)
        is_rolled_back = half_message.state is HalfState.ROLLED_BACK
        raise SendFailed(
            f"the half message was stored with {result.status.value}, and "
            + ("was rolled back" if is_rolled_back else "its rollback may not have arrived"),
            topic=half_message.message.topic,
            queue=str(result.queue),
            remedy="Check whether the broker's disk and slaves keep up",
        )

    @contextlib.contextmanager
    def transaction(self, message: Message, *, timeout_s: float | None = None) -> Iterator[HalfMessage]:
        """Store a half message, run the block, and commit; roll back if the block raises. You may decide in the block yourself.

        If the decision cannot be sent or is not answered, the error is logged and not raised, because the work of the block is
        done; the broker calls ``transaction_check`` later. ``message``, ``timeout_s`` and errors are those of ``send_half``.

        If your own decision in the block could not be sent, the end of the block sends it again. If the block raises after a
        ``commit`` that could not be sent, ``transaction_check`` decides.
        """
        half_message = self.send_half(message, timeout_s=timeout_s)
        try:
            yield half_message
        except BaseException:
            self._decide_at_end(half_message, TransactionState.ROLLBACK)
            raise
        self._decide_at_end(half_message, TransactionState.COMMIT)

    def _decide_at_end(self, half_message: HalfMessage, decision: TransactionState) -> None:
        """Apply the ``decision`` of the end of a block, unless the user has decided in the block."""
        if half_message.state is not HalfState.PREPARED or defer_if_collecting(
            functools.partial(self._decide_at_end, half_message, decision)
        ):
            return
        own_decision = half_message._fate.last_decision
        try:
            if own_decision is TransactionState.COMMIT is not decision:
                raise SendFailed("the commit could not be sent, and the block raised after the commit")
            half_message._decide(own_decision or decision, None)
        except RocketMQError as e:
            logger.warning(
                "the decision on half message %s of %s may not have arrived; its broker will ask for it: %s",
                half_message.result.msg_id, half_message.message.topic, e,
            )  # fmt: skip
        finally:
            half_message._abandon()

    def _send_decision(self, place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        try:
            self._owner.check(False)
        except ClosedError as e:
            e.unsent = True
            raise
        return self._sender.end_transaction(place, decision, deadline)
