"""A consumer's share of all queues of a topic, by the name of a strategy or by a callable.

Mirrors ``AllocateMessageQueueStrategy`` and its classes: members of a group compute the same result independently, because all
of them sort the same lists and apply the same function. The docstring of a strategy says how it differs from its Java class.

A callable is called as ``strategy(consumer, queues, consumers, **config)``, with sorted lists, and returns the queues of
``consumer``. A strategy in this module is called once for all consumers, so that it does the common work once. It returns a
function from a consumer to its queues.

The option ``allocationConfig`` fixes queues by hand, as a Python value or as JSON. The value has one of three forms: a list of
queues (``MessageQueue`` or ``"topic/broker/0"``); a mapping as in the option ``assign`` (``{"topic": {"broker": [0, 1]}}``); or a
mapping from a consumer to a value of the first or second form.
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
    """Return a function from a consumer to the queues that ``config`` fixes for this consumer, in the order of ``config``."""
    value = _parsed(config)
    if isinstance(value, Mapping) and not _is_assignment(value):
        queues_by_consumer = {str(consumer): _queues_from(queues, config) for consumer, queues in value.items()}
        return lambda consumer: queues_by_consumer.get(consumer, [])
    queues_for_all = _queues_from(value, config)
    return lambda consumer: queues_for_all


def _parsed(config: Any) -> Any:
    if not isinstance(config, str):
        return config
    try:
        return json_document(config)
    except ValueError as e:
        raise _config_error(config, f" ({e})") from e


def _is_assignment(value: Mapping[Any, Any]) -> bool:
    """Whether a mapping has the form topic -> broker -> queue ids, and not the form consumer -> queues."""
    mappings = [v for v in value.values() if isinstance(v, Mapping)]
    return len(mappings) == len(value) and all(not isinstance(ids, Mapping) for v in mappings for ids in v.values())


def _queues_from(value: Any, config: Any) -> list[MessageQueue]:
    if isinstance(value, Mapping):
        if not _is_assignment(value):
            raise _config_error(config)
        return [
            MessageQueue(str(topic), str(broker), _queue_id(i, config))
            for topic, ids_by_broker in value.items()
            for broker, ids in ids_by_broker.items()
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

# Names that ``**config`` may contain; each strategy uses the names that it knows.
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
        The share of ``consumer``; empty if the consumer is not in ``consumers`` and ``strategy="config"`` fixes no queues for
        it.
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
    requested_consumers: Iterable[str],
    queues: Sequence[MessageQueue],
    consumers: Sequence[str],
    config: Config,
) -> dict[str, Queues]:
    for name in config:
        if name not in CONFIG_NAMES and isinstance(strategy, str) and ":" not in strategy:
            raise OptionError(unknown_value("allocation configuration", name, CONFIG_NAMES))
    queues_of = _allocation(strategy, queues, consumers, config)
    return {consumer: queues_of(consumer) for consumer in requested_consumers}


def _allocation(
    strategy: str | Callable[..., Sequence[MessageQueue]],
    queues: Sequence[MessageQueue],
    consumers: Sequence[str],
    config: Config,
) -> QueuesOf:
    """Call ``strategy`` with sorted lists. All strategies except ``config`` make the checks of the Java classes first, in the
    same order.
    """
    strategies_by_name = {name.lower(): f for name, f in STRATEGIES.items()}
    queue_list, client_ids = sorted_queues(queues or ()), sorted_texts(consumers or ())
    if isinstance(strategy, str) and strategy.lower() == "config":
        return _by_config(queue_list, client_ids, config)
    if isinstance(strategy, str) and strategy.lower() in strategies_by_name:
        return _with_checks(strategies_by_name[strategy.lower()], queue_list, client_ids, config)
    if isinstance(strategy, str) and ":" not in strategy:
        raise OptionError(unknown_value("allocationStrategy", strategy, (*STRATEGIES, "config", "module:callable")))
    return _with_checks(_from_callable(resolve(strategy, "allocationStrategy")), queue_list, client_ids, config)


def _with_checks(strategy: Strategy, queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    cached_queues_of: list[QueuesOf] = []
    members = set(consumers)

    def queues_of(consumer: str) -> Queues:
        if not consumer:
            raise OptionError("currentCID is empty: a consumer needs an id to get its share")
        if not queues:
            raise OptionError("mqAll is null or mqAll empty: there are no queues to assign")
        if not consumers:
            raise OptionError("cidAll is null or cidAll empty: there are no consumers to share the queues")
        if consumer not in members:
            return []
        if not cached_queues_of:
            cached_queues_of.append(strategy(queues, consumers, config))
        return cached_queues_of[0](consumer)

    return queues_of


def _averagely(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Each consumer gets a contiguous block of queues. If queues are left over, the first blocks have one more queue
    (``AllocateMessageQueueAveragely``).
    """
    block_size, larger_block_count = divmod(len(queues), len(consumers))
    positions = _positions(consumers)

    def queues_of(consumer: str) -> Queues:
        i = positions[consumer]
        start = i * block_size + min(i, larger_block_count)
        return queues[start : start + block_size + (i < larger_block_count)]

    return queues_of


def _averagely_by_circle(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Queues are dealt out one by one (``AllocateMessageQueueAveragelyByCircle``)."""
    positions = _positions(consumers)
    return lambda consumer: queues[positions[consumer] :: len(consumers)]


def _positions(consumers: list[str]) -> dict[str, int]:
    """The first index of each consumer in the list, as Java's ``List.indexOf`` returns it."""
    return {consumer: i for i, consumer in reversed(list(enumerate(consumers)))}


def md5_hash(key: str) -> int:
    """The first four bytes of the key's MD5 as an unsigned number."""
    digest = hashlib.md5(key.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


class Ring:
    """The ring of consistent hashing. Each consumer has several virtual nodes on the ring. A key belongs to the first virtual
    node at or after the hash of the key.
    """

    def __init__(self, consumers: Sequence[str], virtual_nodes: int, hash_of: Callable[[str], int]) -> None:
        self.hash_of = hash_of
        ring: dict[int, str] = {}
        occurrences = Counter(consumers)
        for consumer in consumers:
            # If a consumer is listed twice, the second entry continues the numbers of the consumer's virtual nodes. If two
            # virtual nodes have the same hash, the later node replaces the earlier node.
            place_count = sum(owner == consumer for owner in ring.values()) if occurrences[consumer] > 1 else 0
            for place_number in range(place_count, place_count + virtual_nodes):
                ring[hash_of(f"{consumer}-{place_number}")] = consumer
        self.places = sorted(ring)
        self.owners = [ring[place] for place in self.places]

    def owner(self, key: str) -> str | None:
        """The consumer of ``key``; None on an empty ring."""
        return self.owners[bisect_left(self.places, self.hash_of(key)) % len(self.places)] if self.places else None


def queue_key(queue: MessageQueue) -> str:
    """The text by which a queue is hashed, as Java's ``MessageQueue.toString`` returns it."""
    return f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name}, queueId={queue.queue_id}]"


def _consistent_hash(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """``AllocateMessageQueueConsistentHash`` with ``virtualNodes`` virtual nodes per consumer (default: 10) and an optional
    function ``hash``.

    Java hashes the topic's name on the wire, which includes the namespace. ``onWire`` converts the user's name to this name.
    """
    virtual_nodes = config.get("virtualNodes", 10)
    if not isinstance(virtual_nodes, int) or isinstance(virtual_nodes, bool) or virtual_nodes < 0:
        raise OptionError(f"illegal virtualNodeCnt :{virtual_nodes}: expected a whole number of at least 0")
    ring, name_on_wire = Ring(consumers, virtual_nodes, config.get("hash") or md5_hash), config.get("onWire") or str
    shares: dict[str | None, Queues] = {}
    for queue in queues:
        key = queue_key(queue._replace(topic=name_on_wire(queue.topic)))
        shares.setdefault(ring.owner(key), []).append(queue)
    return lambda consumer: shares.get(consumer, [])


def _machine_room(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Shares the queues of the brokers whose room is in ``machineRooms``; brokers are named ``room@name``. Each consumer gets a
    block, and the queues that are left over at the end are dealt out one by one.

    ``AllocateMessageQueueByMachineRoom``. Java's split drops empty parts at the end, so a broker named ``room@`` is in no room.
    Copies of failed messages may be in any room. So the queues of a retry topic that are outside the rooms are shared averagely,
    too; without this rule, no consumer would read them.
    """
    rooms_option = config.get("machineRooms")
    rooms = set(rooms_option.split(",") if isinstance(rooms_option, str) else rooms_option or ())
    if not rooms:
        raise OptionError("option 'machineRooms' is missing; expected the rooms whose queues are shared")
    queues_in_rooms = [q for q in queues if _java_part_count(q.broker_name) == 2 and room_of(q.broker_name) in rooms]
    retry_queues = sorted_queues({q for q in queues if q.topic.startswith(codes.RETRY_PREFIX)} - set(queues_in_rooms))
    retry_queues_of = _averagely(retry_queues, consumers, config)
    block_size, leftover_count = divmod(len(queues_in_rooms), len(consumers))
    positions = _positions(consumers)

    def queues_of(consumer: str) -> Queues:
        i = positions[consumer]
        leftover_index = block_size * len(consumers) + i
        return (
            queues_in_rooms[i * block_size : (i + 1) * block_size]
            + (queues_in_rooms[leftover_index : leftover_index + 1] if i < leftover_count else [])
            + retry_queues_of(consumer)
        )

    return queues_of


def _java_part_count(broker_name: str) -> int:
    return len(broker_name.rstrip(ROOM_SEPARATOR).split(ROOM_SEPARATOR))


def _machine_room_nearby(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """The strategy ``inner`` within each room; all consumers share the queues of rooms without consumers.

    ``AllocateMachineRoomNearby``. ``room`` returns the room of a broker name or of a consumer; without ``room``,
    ``partitionRooms`` maps consumers to rooms, and brokers are named ``room@name``.
    """
    resolve_room = _room_resolver(config)
    queues_by_room: dict[str, Queues] = {}
    for queue in queues:
        queues_by_room.setdefault(_room(resolve_room, queue.broker_name, f"mq {queue}"), []).append(queue)
    consumers_by_room: dict[str, list[str]] = {}
    for consumer in consumers:
        consumers_by_room.setdefault(_room(resolve_room, consumer, f"consumer id {consumer}"), []).append(consumer)
    inner_strategy = config.get("inner", "averagely")
    inner_config = {name: value for name, value in config.items() if name != "inner"}
    allocations = {
        room: _allocation(inner_strategy, queues_by_room[room], consumers_by_room.get(room, consumers), inner_config)
        for room in sorted_texts(queues_by_room)
    }

    def queues_of(consumer: str) -> Queues:
        own_room = resolve_room(consumer)
        own_queues = allocations[own_room](consumer) if own_room in allocations else []
        return own_queues + [
            q for room in allocations if room not in consumers_by_room for q in allocations[room](consumer)
        ]

    return queues_of


def _room_resolver(config: Config) -> Callable[[str], str]:
    if config.get("room") is not None:
        return resolve(config["room"], "room")
    rooms = config.get("partitionRooms")
    if not isinstance(rooms, Mapping):
        raise OptionError("option 'partitionRooms' is missing; expected the room of each partition")
    return lambda name: rooms[name] if name in rooms else room_of(name) if ROOM_SEPARATOR in name else ""


def _room(resolve_room: Callable[[str], str], name: str, description: str) -> str:
    if not (room := resolve_room(name)):
        raise OptionError(f"Machine room is null for {description}: expected every broker and consumer to have a room")
    return room


def _environment(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """The queues of one environment, shared by its consumers; ``queues.environment`` describes the layouts.

    The strategy ``inner`` (by default ``averagely``) shares the environment's queues among its consumers, so that only one
    consumer reads each message. If ``consumers`` are the consumers of all environments, ``environmentOf`` returns the environment
    of a consumer. A retry topic belongs to no environment, so all consumers share the queues of a retry topic.
    """
    inner_strategy = config.get("inner", "averagely")
    inner_config = {name: value for name, value in config.items() if name != "inner"}
    environment_of = config.get("environmentOf")
    environment = Environment.of(config.get("environment"), config.get("environments"))
    retry_queues = [q for q in queues if q.topic.startswith(codes.RETRY_PREFIX)]
    owned_queues = environment.owned(q for q in queues if not q.topic.startswith(codes.RETRY_PREFIX))
    members = [c for c in consumers if environment_of is None or str(environment_of(c)) == environment.name]
    allocations = [
        _allocation(inner_strategy, shared_queues, sharing_consumers, inner_config)
        for shared_queues, sharing_consumers in ((owned_queues, members), (retry_queues, consumers))
        if shared_queues and sharing_consumers
    ]
    return lambda consumer: [queue for queues_of in allocations for queue in queues_of(consumer)]


def _by_config(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
    """Gives consumers the queues that ``allocationConfig`` fixes, for all consumers together or for each consumer.

    ``AllocateMessageQueueByConfig`` returns its list for every topic, even if the listed queues do not exist. This strategy
    returns only queues that exist. No configuration lists retry topics, so their queues are shared averagely.
    """
    if config.get("allocationConfig") is None:
        raise OptionError("option 'allocationConfig' is missing; expected the queues that a consumer gets")
    fixed_queues_of = fixed_queues(config["allocationConfig"])
    all_queues = set(queues)
    retry_queues = [q for q in queues if q.topic.startswith(codes.RETRY_PREFIX)]

    def queues_of(consumer: str) -> Queues:
        queues_of_consumer = fixed_queues_of(consumer)
        existing_queues = [queue for queue in queues_of_consumer if queue in all_queues]
        other_retry_queues = [queue for queue in retry_queues if queue not in queues_of_consumer]
        return (
            existing_queues + _averagely(other_retry_queues, consumers, config)(consumer)
            if other_retry_queues and consumer in consumers
            else existing_queues
        )

    return queues_of


def _from_callable(strategy: Callable[..., Sequence[MessageQueue]]) -> Strategy:
    """Make a ``Strategy`` of a user's function, which is called as ``strategy(consumer, queues, consumers, **config)``, with
    copies of the lists.
    """

    def checked_strategy(queues: Queues, consumers: list[str], config: Config) -> QueuesOf:
        all_queues = set(queues)

        def queues_of(consumer: str) -> Queues:
            chosen_queues = list(strategy(consumer, list(queues), list(consumers), **config))
            if unknown_queue := next((queue for queue in chosen_queues if queue not in all_queues), None):
                raise OptionError(
                    f"allocation strategy {strategy!r} gave {unknown_queue!r}, which is not among the queues"
                )
            return chosen_queues

        return queues_of

    return checked_strategy


STRATEGIES: dict[str, Strategy] = {
    "averagely": _averagely,
    "averagelyByCircle": _averagely_by_circle,
    "consistentHash": _consistent_hash,
    "machineRoom": _machine_room,
    "machineRoomNearby": _machine_room_nearby,
    "environment": _environment,
}
