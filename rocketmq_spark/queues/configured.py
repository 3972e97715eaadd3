"""Reading ``allocationConfig``: queues fixed by hand, for every consumer or consumer by consumer.

Accepted, in Python or as JSON text: a list of queues (``MessageQueue`` or ``"topic/broker/0"``), the shape of the
option ``assign`` (``{"topic": {"broker": [0, 1]}}``), or a mapping from consumer to one of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue

_SHAPES = 'a list of queues, {"topic": {"broker": [0, 1]}}, or {"consumer": one of these}'


def fixed_queues(config: Any) -> Callable[[str], list[MessageQueue]]:
    """The queues that ``config`` fixes for a consumer, in the order given; none for a consumer it leaves out."""
    value = _parsed(config)
    if isinstance(value, Mapping) and not _is_assignment(value):
        by_consumer = {str(name): _flat(owns, config) for name, owns in value.items()}
        return lambda consumer: by_consumer.get(consumer, [])
    for_all = _flat(value, config)
    return lambda consumer: for_all


def _parsed(config: Any) -> Any:
    if not isinstance(config, str):
        return config
    try:
        return json.loads(config)
    except ValueError as e:
        raise _bad(config) from e


def _is_assignment(value: Mapping[Any, Any]) -> bool:
    """Whether this is topic -> broker -> ids, rather than consumer -> something."""
    inner = [v for v in value.values() if isinstance(v, Mapping)]
    return len(inner) == len(value) and all(not isinstance(ids, Mapping) for v in inner for ids in v.values())


def _flat(value: Any, config: Any) -> list[MessageQueue]:
    if isinstance(value, Mapping):
        if not _is_assignment(value):
            raise _bad(config)
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
    if len(parts) != 3 or not parts[2].isdigit():
        raise _bad(config)
    return MessageQueue(parts[0], parts[1], int(parts[2]))


def _queue_id(value: Any, config: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _bad(config)
    return value


def _list(value: Any, config: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _bad(config)
    return value


def _bad(config: Any) -> OptionError:
    return OptionError(f"option 'allocationConfig' is {config!r}; expected {_SHAPES}")
