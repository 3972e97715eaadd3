"""A consumer's share of all queues of a topic, by the name of a strategy or by a callable.

Mirrors ``AllocateMessageQueueStrategy`` and its classes: members of a group compute the same result independently, because all
of them sort the same lists and apply the same function. Where a strategy differs from its Java class, its docstring says how.

A callable is called as ``strategy(consumer, queues, consumers, **config)``, with sorted lists, and returns the queues of
``consumer``. A strategy in this module is called once for all consumers, so that it does the common work once. It returns a
function from a consumer to its queues.

``allocationConfig`` fixes queues by hand. Accepted, in Python or as JSON text: a list of queues (``MessageQueue`` or
``"topic/broker/0"``), the form of the option ``assign`` (``{"topic": {"broker": [0, 1]}}``), or a mapping from consumer to
one of these.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rocketmq_spark.base import codes
from rocketmq_spark.base.java import sorted_texts
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options.names import resolve, unknown_value
from rocketmq_spark.options.parsing import json_document
from rocketmq_spark.queues.environment import Environment, sorted_queues
from rocketmq_spark.queues.selection import ROOM_SEPARATOR, room_of


def fixed_queues(config: Any) -> Callable[[str], list[MessageQueue]]:
    """Return a function from a consumer to the list of queues that ``config`` fixes for it, in their order."""
    value = _parsed(config)
    if isinstance(value, Mapping) and not _is_assignment(value):
        by_consumer = {str(name): _queues_from(owns, config) for name, owns in value.items()}
        return lambda consumer: by_consumer.get(consumer, [])
    for_all = _queues_from(value, config)
    return lambda consumer: for_all


def _parsed(config: Any) -> Any:
    if not isinstance(config, str):
        return config
    try:
        return json_document(config)
    except ValueError as e:
        raise _config_error(config, f" ({e})") from e


def _is_assignment(value: Mapping[Any, Any]) -> bool:
    """Whether this is topic -> broker -> ids, rather than consumer -> something."""
    inner = [v for v in value.values() if isinstance(v, Mapping)]
    return len(inner) == len(value) and all(not isinstance(ids, Mapping) for v in inner for ids in v.values())


def _queues_from(value: Any, config: Any) -> list[MessageQueue]:
    if isinstance(value, Mapping):
        if not _is_assignment(value):
            raise _config_error(config)
        return [
            MessageQueue(str(topic), str(broker), _queue_id(i, config))
            for topic, by_broker in value.items()
            for broker, ids in by_broker.items()
            for i in _list(ids, config)
        ]
    return [_queue(item, config) for item in _list(value, config)]


def _queue(item: Any, config: Any) -> MessageQueue:
    if isinstance(item, MessageQueue):
        return item
    parts = item.rsplit("/", 2) if isinstance(item, str) else []
    if len(parts) != 3 or not parts[2].isdecimal():
        raise _config_error(config)
    return MessageQueue(parts[0], parts[1], int(parts[2]))


def _queue_id(value: Any, config: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _config_error(config)
    return value


def _list(value: Any, config: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _config_error(config)
    return value


def _config_error(config: Any, why: str = "") -> OptionError:
    shapes = 'a list of queues, {"topic": {"broker": [0, 1]}}, or {"consumer": one of these}'
    return OptionError(f"option 'allocationConfig' is {config!r}; expected {shapes}{why}")


Queues = list[MessageQueue]
QueuesOf = Callable[[str], Queues]
Config = Mapping[str, Any]
Strategy = Callable[[Queues, list[str], Config], QueuesOf]

# Names that ``**config`` may contain; each strategy uses those that it knows.
CONFIG_NAMES = (
    "allocationConfig", "machineRooms", "virtualNodes", "hash", "inner", "room", "partitionRooms", "environment",
    "environments", "environmentOf", "onWire",
)  # fmt: skip


def allocate(
    strategy: str | Callable[..., Sequence[MessageQueue]],
    consumer: str,
    queues: Sequence[MessageQueue],
    consumers: Sequence[str],
    **config: Any,
) -> Queues:
    """Return the queues of one consumer.

    Args:
        strategy: The name of a strategy (``averagely``, ``averagelyByCircle``, ``consistentHash``, …) or a callable, which is
            called with ``consumer``, the sorted lists and ``config``, and returns the queues of ``consumer``.
        consumer: The client id of the consumer.
        queues: All queues of the topic, in any order.
        consumers: The client ids of the group, in any order.
        config: Settings of the strategy, such as ``machineRooms`` (docs/options.md). Unlike the option of that name,
            ``partitionRooms`` is a mapping here, from client ids of consumers to their rooms.

    Returns:
        The share of ``consumer``; empty if it is not in ``consumers`` and ``strategy="config"`` fixes no queues for it.
    """
    return _allocations(strategy, [consumer], queues, consumers, config)[consumer]


def allocate_all(
    strategy: str | Callable[..., Sequence[MessageQueue]],
    queues: Sequence[MessageQueue],
    consumers: Sequence[str],
    **config: Any,
) -> dict[str, Queues]:
    """Return the share of every consumer, sorted by consumer. A strategy may assign a queue twice, or to no consumer."""
    return _allocations(strategy, sorted_texts(set(consumers)), queues, consumers, config)


def _allocations(
    strategy: str | Callable[..., Sequence[MessageQueue]],
    requested: Iterable[str],
    queues: Sequence[MessageQueue],
    consumers: Sequence[str],
    config: Config,
) -> dict[str, Queues]:
    for name in config:
        if name not in CONFIG_NAMES and isinstance(strategy, str) and ":" not in strategy:
            raise OptionError(unknown_value("allocation configuration", name, CONFIG_NAMES))
    share = _allocation(strategy, queues, consumers, config)
    return {consumer: share(consumer) for consumer in requested}


def _allocation(
    strategy: str | Callable[..., Sequence[MessageQueue]],
    queues: Sequence[MessageQueue],
    consumers: Sequence[str],
    config: Config,
) -> QueuesOf:
    """Call ``strategy`` with sorted lists, after the checks that all strategies but ``config`` make (Java's, in its order)."""
    by_name = {name.lower(): f for name, f in STRATEGIES.items()}
    ordered, ids = sorted_queues(queues or ()), sorted_texts(consumers or ())
    if isinstance(strategy, str) and strategy.lower() == "config":
        return _configured(ordered, ids, config)
    if isinstance(strategy, str) and strategy.lower() in by_name:
        return _checked(by_name[strategy.lower()], ordered, ids, config)
    if isinstance(strategy, str) and ":" not in strategy:
        raise OptionError(unknown_value("allocationStrategy", strategy, (*STRATEGIES, "config", "module:callable")))
    return _checked(_from_callable(resolve(strategy, "allocationStrategy")), ordered, ids, config)


def _checked(strategy: Strategy, queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    planned: list[QueuesOf] = []
    members = set(consumers)

    def share(consumer: str) -> Queues:
        if not consumer:
            raise OptionError("currentCID is empty: a consumer needs an id to get its share")
        if not queues:
            raise OptionError("mqAll is null or mqAll empty: there are no queues to assign")
        if not consumers:
            raise OptionError("cidAll is null or cidAll empty: there are no consumers to share the queues")
        if consumer not in members:
            return []
        if not planned:
            planned.append(strategy(queues, consumers, config))
        return planned[0](consumer)

    return share


def _averagely(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Contiguous blocks, the first ones larger by one (``AllocateMessageQueueAveragely``)."""
    size, larger = divmod(len(queues), len(consumers))
    position = _positions(consumers)

    def share(consumer: str) -> Queues:
        i = position[consumer]
        start = i * size + min(i, larger)
        return queues[start : start + size + (i < larger)]

    return share


def _by_circle(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Dealt out one by one (``AllocateMessageQueueAveragelyByCircle``)."""
    position = _positions(consumers)
    return lambda consumer: queues[position[consumer] :: len(consumers)]


def _positions(consumers: list[str]) -> dict[str, int]:
    """The first index of each consumer in the list, as Java's ``List.indexOf`` returns it."""
    return {consumer: i for i, consumer in reversed(list(enumerate(consumers)))}


def md5_hash(key: str) -> int:
    """The first four bytes of the key's MD5 as an unsigned number."""
    digest = hashlib.md5(key.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class Ring:
    """The ring of consistent hashing. Each consumer has several places; a key belongs to the first place at or after its hash."""

    def __init__(self, consumers: Sequence[str], virtual_nodes: int, hash_of: Callable[[str], int]) -> None:
        self.hash_of = hash_of
        ring: dict[int, str] = {}
        times = Counter(consumers)
        for consumer in consumers:
            # A consumer that is listed twice continues its numbering, and a later place takes over an equal hash.
            placed = sum(owner == consumer for owner in ring.values()) if times[consumer] > 1 else 0
            for k in range(placed, placed + virtual_nodes):
                ring[hash_of(f"{consumer}-{k}")] = consumer
        self.places = sorted(ring)
        self.owners = [ring[place] for place in self.places]

    def owner(self, key: str) -> str | None:
        """The consumer of ``key``; None on an empty ring."""
        return self.owners[bisect_left(self.places, self.hash_of(key)) % len(self.places)] if self.places else None


def queue_key(queue: MessageQueue) -> str:
    """The text by which a queue is hashed: that of Java's ``MessageQueue.toString``."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _consistent_hash(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """``AllocateMessageQueueConsistentHash`` with ``virtualNodes`` (10) places per consumer and an optional ``hash``.

    Java hashes the topic's name with its namespace, as brokers know it: ``onWire`` converts the user's name to it.
    """
    nodes = config.get("virtualNodes", 10)
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 0:
        raise OptionError(f"illegal virtualNodeCnt :{nodes}: expected a whole number of at least 0")
    ring, on_wire = Ring(consumers, nodes, config.get("hash") or md5_hash), config.get("onWire") or str
    shares: dict[str | None, Queues] = {}
    for queue in queues:
        key = queue_key(queue._replace(topic=on_wire(queue.topic)))
        shares.setdefault(ring.owner(key), []).append(queue)
    return lambda consumer: shares.get(consumer, [])


def _machine_room(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Queues of brokers named ``room@name`` in ``machineRooms``; the remainder is dealt from the tail.

    ``AllocateMessageQueueByMachineRoom``. Java's split drops empty parts at the end, so ``room@`` is no room. Copies of failed
    messages may lie in any room: the other queues of a retry topic are shared averagely, as nothing else would read them.
    """
    rooms_option = config.get("machineRooms")
    rooms = set(rooms_option.split(",") if isinstance(rooms_option, str) else rooms_option or ())
    if not rooms:
        raise OptionError("option 'machineRooms' is missing; expected the rooms whose queues are shared")
    inside = [q for q in queues if _java_parts(q.broker_name) == 2 and room_of(q.broker_name) in rooms]
    retries = sorted_queues({q for q in queues if q.topic.startswith(codes.RETRY_PREFIX)} - set(inside))
    outside = _averagely(retries, consumers, config)
    size, rest = divmod(len(inside), len(consumers))
    position = _positions(consumers)

    def share(consumer: str) -> Queues:
        i = position[consumer]
        tail = size * len(consumers) + i
        return inside[i * size : (i + 1) * size] + (inside[tail : tail + 1] if i < rest else []) + outside(consumer)

    return share


def _java_parts(broker_name: str) -> int:
    return len(broker_name.rstrip(ROOM_SEPARATOR).split(ROOM_SEPARATOR))


def _machine_room_nearby(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """The ``inner`` strategy within each room; rooms without consumers are shared by all.

    ``AllocateMachineRoomNearby``. ``room`` returns the room of a broker name or of a consumer; ``partitionRooms`` maps
    consumers to rooms instead, and brokers are then named ``room@name``.
    """
    room = _room_resolver(config)
    queues_in: dict[str, Queues] = {}
    for queue in queues:
        queues_in.setdefault(_room(room, queue.broker_name, f"mq {queue}"), []).append(queue)
    consumers_in: dict[str, list[str]] = {}
    for consumer in consumers:
        consumers_in.setdefault(_room(room, consumer, f"consumer id {consumer}"), []).append(consumer)
    inner = config.get("inner", "averagely")
    inner_config = {name: value for name, value in config.items() if name != "inner"}
    shares = {
        name: _allocation(inner, queues_in[name], consumers_in.get(name, consumers), inner_config)
        for name in sorted_texts(queues_in)
    }

    def share(consumer: str) -> Queues:
        own = room(consumer)
        own_queues = shares[own](consumer) if own in shares else []
        return own_queues + [q for name in shares if name not in consumers_in for q in shares[name](consumer)]

    return share


def _room_resolver(config: Config) -> Callable[[str], str]:
    if config.get("room") is not None:
        return resolve(config["room"], "room")
    rooms = config.get("partitionRooms")
    if not isinstance(rooms, Mapping):
        raise OptionError("option 'partitionRooms' is missing; expected the room of each partition")
    return lambda name: rooms[name] if name in rooms else room_of(name) if ROOM_SEPARATOR in name else ""


def _room(room: Callable[[str], str], name: str, what: str) -> str:
    if not (found := room(name)):
        raise OptionError(f"Machine room is null for {what}: expected every broker and consumer to have a room")
    return found


def _environment(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """The queues of one environment, shared by its consumers; ``queues.environment`` describes the layouts.

    If every consumer of the environment had all of its queues, each would read every message. So the strategy ``inner``
    (averagely by default) shares them. If ``consumers`` lists those of all environments, ``environmentOf`` returns the
    environment of a consumer. Retry topics have none: their queues are shared by all, as nothing else would read them.
    """
    inner = config.get("inner", "averagely")
    inner_config = {name: value for name, value in config.items() if name != "inner"}
    environment_of = config.get("environmentOf")
    environment = Environment.of(config.get("environment"), config.get("environments"))
    retries = [q for q in queues if q.topic.startswith(codes.RETRY_PREFIX)]
    owned = environment.owned(q for q in queues if not q.topic.startswith(codes.RETRY_PREFIX))
    members = [c for c in consumers if environment_of is None or str(environment_of(c)) == environment.name]
    parts = [
        _allocation(inner, part, who, inner_config)
        for part, who in ((owned, members), (retries, consumers))
        if part and who
    ]
    return lambda consumer: [queue for part in parts for queue in part(consumer)]


def _configured(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Queues fixed by ``allocationConfig``, for every consumer or by consumer.

    ``AllocateMessageQueueByConfig`` returns its list for every topic, whether its queues exist or not. Here only queues
    that exist are given, and a retry topic, which no configuration lists, is shared averagely.
    """
    if config.get("allocationConfig") is None:
        raise OptionError("option 'allocationConfig' is missing; expected the queues that a consumer gets")
    fixed = fixed_queues(config["allocationConfig"])
    existing = set(queues)
    retries = [q for q in queues if q.topic.startswith(codes.RETRY_PREFIX)]

    def share(consumer: str) -> Queues:
        fixed_for_consumer = fixed(consumer)
        existing_queues = [queue for queue in fixed_for_consumer if queue in existing]
        missing = [queue for queue in retries if queue not in fixed_for_consumer]
        return (
            existing_queues + _averagely(missing, consumers, config)(consumer)
            if missing and consumer in consumers
            else existing_queues
        )

    return share


def _from_callable(strategy: Callable[..., Sequence[MessageQueue]]) -> Strategy:
    """A user's own strategy: called as ``strategy(consumer, queues, consumers, **config)`` with copies of the lists."""

    def planned(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
        existing = set(queues)

        def share(consumer: str) -> Queues:
            chosen = list(strategy(consumer, list(queues), list(consumers), **config))
            if unknown_queue := next((queue for queue in chosen if queue not in existing), None):
                raise OptionError(
                    f"allocation strategy {strategy!r} gave {unknown_queue!r}, which is not among the queues"
                )
            return chosen

        return share

    return planned


STRATEGIES: dict[str, Strategy] = {
    "averagely": _averagely,
    "averagelyByCircle": _by_circle,
    "consistentHash": _consistent_hash,
    "machineRoom": _machine_room,
    "machineRoomNearby": _machine_room_nearby,
    "environment": _environment,
}
