"""A producer's choice of one queue for one message, by the name of a selector or by a callable.

Mirrors ``MessageQueueSelector`` and its classes, and ``TopicPublishInfo`` with ``ThreadLocalIndex`` for round robin.
A selector never changes the list that it is given. Java keeps the state of round robin per thread; here it is an object
(``RoundRobin``) that a producer keeps. Calls of ``select`` without ``round_robin`` share a ``RoundRobin`` per thread and topic.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from typing import Any

from rocketmq_spark.base.java import java_hash
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.errors import OptionError, RocketMQError, SelectorError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options.names import resolve, unknown_value
from rocketmq_spark.queues.environment import Environment

Selector = Callable[[list[MessageQueue], Any, Any], MessageQueue | None]
SELECTORS = ("roundRobin", "random", "hash", "machineRoom", "environment", "column")
ROOM_SEPARATOR = "@"

# Threads and forked processes may share a ``SystemRandom``, because it has no state.
_SYSTEM_RANDOM = random.SystemRandom()


class RoundRobin:
    """The index of round robin into a list of queues. As in Java, the index starts at random, counts up, and wraps at 32 bits.

    Because of the random start, single sends of many new threads spread evenly.
    """

    __slots__ = ("counter", "rng")

    def __init__(self, rng: random.Random | None = None, counter: int | None = None) -> None:
        self.rng = rng or _SYSTEM_RANDOM
        self.counter = counter

    def next(self) -> int:
        """The next index; callers take it modulo the length of their list."""
        counter = self.rng.getrandbits(32) if self.counter is None else self.counter
        counter = (counter + 1) & 0xFFFFFFFF
        self.counter = counter - (1 << 32) if counter >> 31 else counter
        return counter & 0x7FFFFFFF

    def reset(self) -> None:
        """Continue at a random index. A retry resets the index, so that threads do not all try the queues in the same order."""
        self.counter = self.rng.randrange((1 << 31) - 1)

    def pick(self, queues: Sequence[MessageQueue], last_broker: str | None = None) -> MessageQueue:
        """The next queue that is not on ``last_broker``, or simply the next queue if there is no other broker."""
        queue = self.next_fitting(queues, lambda queue: queue.broker_name != last_broker)
        return queues[self.next() % len(queues)] if queue is None else queue

    def next_fitting(self, queues: Sequence[MessageQueue], fits: Callable[[MessageQueue], bool]) -> MessageQueue | None:
        """The next queue that ``fits``, or None after one round. Every tested queue advances the index, as in Java."""
        for _ in queues:
            queue = queues[self.next() % len(queues)]
            if fits(queue):
                return queue
        return None


_SAMPLE_QUEUE = MessageQueue("", "", 0)
_round_robins: ContextVar[dict[str, RoundRobin]] = ContextVar("indexes")  # a thread starts with an empty context


def select(
    selector: str | Selector,
    queues: Sequence[MessageQueue],
    message: Any,
    arg: Any = None,
    *,
    rng: random.Random | None = None,
    round_robin: RoundRobin | None = None,
) -> MessageQueue:
    """Return the queue that ``selector`` chooses for ``message``.

    ``arg`` is the argument of the send: the key to hash, the room, the number of the environment, or the queue as ``(brokerName,
    queueId)``. Raises ``OptionError`` if no selector has this name. If the selector fails or chooses no queue, raises
    ``SelectorError``; but a ``RocketMQError`` of a callable is raised unchanged.
    """
    if not queues:
        raise SelectorError("there is no queue to select from")
    name = selector_name(selector) if isinstance(selector, str) else ""
    rng = rng or _SYSTEM_RANDOM
    match name:
        case "roundRobin":
            return (round_robin or _thread_round_robin(queues[0].topic)).pick(queues)
        case "random":
            return rng.choice(queues)
        case "hash":
            return select_by_hash(queues, arg)
        case "machineRoom":
            return select_from_rooms(queues, arg, rng)
        case "environment":
            return select_from_environment(queues, arg, rng)
        case "column":
            return select_by_column(queues, arg)
    return select_by_callable(resolve(selector, "queueSelector"), queues, message, arg)


def is_built_in(selector: str) -> bool:
    """Whether a selector is one of ``SELECTORS``, in upper or lower case."""
    return selector.lower() in map(str.lower, SELECTORS)


def selector_name(selector: str) -> str:
    """Return the option name of a built-in selector, which is given in upper or lower case; "" for the name of a callable."""
    for name in SELECTORS:
        if selector.lower() == name.lower():
            return name
    if ":" in selector:
        return ""
    raise OptionError(unknown_value("queueSelector", selector, (*SELECTORS, "module:callable")))


def check_arg(selector: str, arg: object) -> None:
    """Check the argument of a selector without knowing the queues.

    Raises ``SelectorError`` if ``arg`` is wrong, ``OptionError`` if there is no such ``selector``.
    """
    match selector_name(selector):
        case "hash":
            select_by_hash([_SAMPLE_QUEUE], arg)
        case "machineRoom":
            rooms_of(arg)
        case "environment":
            environment_named(arg)
        case "":
            resolve(selector, "queueSelector")


def select_by_hash(queues: Sequence[MessageQueue], arg: object) -> MessageQueue:
    """The queue at the absolute value of the hash of ``arg``, modulo the number of queues, as in ``SelectMessageQueueByHash``."""
    try:
        return queues[abs(java_hash(arg)) % len(queues)]
    except OptionError as e:
        raise SelectorError(f"queue selector 'hash': {e.message}; pass the key as arg") from e


def select_from_rooms(queues: Sequence[MessageQueue], arg: object, rng: random.Random) -> MessageQueue:
    """A random queue on the brokers of room ``arg``, or of several rooms. Brokers are named ``room@name``.

    Java's class of this name always returns null, so every send with it fails. This function fails only if ``arg`` names no
    room, or if no broker is in a named room.
    """
    return rng.choice(queues_on_brokers_in_rooms(queues, rooms_of(arg)))


def rooms_of(arg: object) -> Collection[str]:
    """Return the rooms that ``arg`` names. Raises ``SelectorError`` if ``arg`` names no room."""
    rooms = {arg} if isinstance(arg, str) else set(arg) if isinstance(arg, Collection) else set()
    if not rooms - {""}:
        raise SelectorError(
            "queue selector 'machineRoom' chose no queue: pass a room, or several rooms, as arg (Java's selector "
            "SelectMessageQueueByMachineRoom never chooses a queue)"
        )
    return rooms - {""}


def queues_on_brokers_in_rooms(queues: Sequence[MessageQueue], rooms: Collection[str]) -> list[MessageQueue]:
    """Return the queues on brokers of ``rooms``. Raises ``SelectorError`` if no broker is in a room."""
    queues_in_rooms = [
        queue for queue in queues if ROOM_SEPARATOR in queue.broker_name and room_of(queue.broker_name) in rooms
    ]
    if not queues_in_rooms:
        rooms_of_topic = sorted({room_of(q.broker_name) for q in queues if ROOM_SEPARATOR in q.broker_name})
        raise SelectorError(
            f"queue selector 'machineRoom' chose no queue: no broker is in {', '.join(sorted(map(str, rooms)))}; "
            f"rooms of topic {queues[0].topic!r} are {', '.join(rooms_of_topic) or 'none (brokers are named room@name)'}"
        )
    return queues_in_rooms


def room_of(broker_name: str) -> str:
    """The room in a broker name ``room@name``; the whole broker name if it contains no ``@``."""
    return broker_name.split(ROOM_SEPARATOR, 1)[0]


def select_from_environment(queues: Sequence[MessageQueue], arg: object, rng: random.Random) -> MessageQueue:
    """A random queue of the ``Environment`` ``arg``; if ``arg`` is a number n, the n-th queue of the sorted list.

    The first queue has the number 1.
    """
    environment = environment_named(arg)
    try:
        return rng.choice(environment.owned(queues))
    except OptionError as e:
        raise SelectorError(f"queue selector 'environment': {e.message}") from e


def environment_named(arg: object) -> Environment:
    """Return ``arg`` if it is an ``Environment``, else the environment with this number."""
    try:
        return arg if isinstance(arg, Environment) else Environment.of(arg)
    except OptionError as e:
        raise SelectorError(f"queue selector 'environment': {e.message}") from e


def select_by_column(queues: Sequence[MessageQueue], arg: object) -> MessageQueue:
    """Return the queue that a row names. ``arg`` is ``(brokerName, queueId)``, or the queue id alone if only one broker has a
    queue with this id.
    """
    broker, queue_id = arg if isinstance(arg, tuple) and len(arg) == 2 else (None, arg)
    matching_queues = [q for q in queues if q.queue_id == queue_id and broker in (None, q.broker_name)]
    if isinstance(queue_id, bool) or not matching_queues:
        raise SelectorError(f"queue selector 'column': no queue of topic {queues[0].topic!r} is {arg!r}")
    if len(matching_queues) > 1:
        raise SelectorError(
            f"queue selector 'column': queue {queue_id} of topic {queues[0].topic!r} is on brokers "
            f"{', '.join(q.broker_name for q in matching_queues)}; name the broker too"
        )
    return matching_queues[0]


def select_by_callable(selector: Selector, queues: Sequence[MessageQueue], message: Any, arg: Any) -> MessageQueue:
    """Call a user's own selector with a copy of the list, and check the chosen queue. Errors of the selector become
    ``SelectorError``. A ``RocketMQError`` is raised as it is.
    """
    chosen_queue = capture(selector, list(queues), message, arg)
    if isinstance(chosen_queue, Failure):
        if isinstance(chosen_queue.error, RocketMQError):
            raise chosen_queue.error
        raise SelectorError(f"select message queue threw exception: {chosen_queue}") from chosen_queue.error
    if chosen_queue is None:
        raise SelectorError(f"select message queue return null: {_selector_text(selector)} chose no queue")
    if not isinstance(chosen_queue, MessageQueue) or chosen_queue not in queues:
        raise SelectorError(
            f"{_selector_text(selector)} chose {chosen_queue!r}; expected one of the {len(queues)} queues it was given"
        )
    return chosen_queue


def _thread_round_robin(topic: str) -> RoundRobin:
    try:
        round_robins = _round_robins.get()
    except LookupError:
        round_robins = {}
        _round_robins.set(round_robins)
    return round_robins.setdefault(topic, RoundRobin())


def _selector_text(selector: object) -> str:
    return f"the selector {getattr(selector, '__qualname__', type(selector).__name__)}"
