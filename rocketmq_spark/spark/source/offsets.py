"""Offsets as Spark's log keeps them: ``{"topics":{"t":{"broker-a":{"0":12}}},"v":1}``, one past the last message read.

Keys are sorted, so that equal positions are equal texts: Spark compares texts. What else a restart must know stands
under keys of its own:

* ``start``: where queues began that the previous offset does not name, or that were made again. Spark does not log where
  batch 0 began; a query that starts again before its first batch was committed would resolve "latest" anew and skip
  what came in between.
* ``marks``: store times (epoch ms) of what was the newest message, by which a topic is recognised that was deleted and
  made again although it has grown past the old position.
* ``environment``: the queues of a topic that an environment given by its number owns, with the number. A broker that is
  away would else shift it onto queues of another.
* ``reads``: what the positions are of, beside the names of topics: clusters, namespace, environment and filter, so that a
  checkpoint of another query is recognised, and the group whose offsets follow them. Offsets without a ``namespace`` or
  ``clusters`` there are older and of any; older ones call it ``filter``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue, QueueBounds

VERSION = 1

Positions = Mapping[MessageQueue, int]
Bounds = Mapping[MessageQueue, QueueBounds]


@dataclass(frozen=True, slots=True)
class Offsets:
    """Positions by queue, and what goes with them."""

    positions: Positions
    start: Positions = field(default_factory=dict)
    marks: Positions = field(default_factory=dict)
    reads: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[MessageQueue, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What a reader hands to Spark; key order is canonical."""
        log_entry: dict[str, Any] = {}
        if self.environment:
            log_entry["environment"] = _nested(self.environment)
        if self.marks:
            log_entry["marks"] = _nested(self.marks)
        if self.reads:
            log_entry["reads"] = json.loads(json.dumps(self.reads, sort_keys=True))
        if self.start:
            log_entry["start"] = _nested(self.start)
        log_entry["topics"] = _nested(self.positions)
        log_entry["v"] = VERSION
        return log_entry

    @classmethod
    def from_json(cls, logged: object) -> Offsets:
        """From Spark's log, or from a person's text. Raises ``OffsetError`` saying what is wrong and where."""
        if isinstance(logged, str):
            try:
                logged = json.loads(logged)
            except ValueError as e:
                raise OffsetError(f"an offset must be JSON: {e}", remedy=_REMEDY) from e
        if not isinstance(logged, Mapping) or not isinstance(logged.get("topics"), Mapping):
            raise OffsetError('an offset must be a JSON object with "topics"', remedy=_REMEDY)
        version = logged.get("v", VERSION)
        if type(version) is not int or not 1 <= version <= VERSION:
            newer = type(version) is int and version > VERSION
            raise OffsetError(
                f"the offset has version {version!r}; this package reads version {VERSION}",
                remedy="The checkpoint was written by a newer rocketmq-spark: upgrade this one" if newer else _REMEDY,
            )
        return cls(
            _flat(logged["topics"]),
            _flat(logged.get("start") or {}),
            _flat(logged.get("marks") or {}),
            dict(_items(logged.get("reads", logged.get("filter")) or {}, "reads")),
            _flat(logged.get("environment") or {}),
        )


# As it is written: "00" would be another name of a queue that has one.
_QUEUE_ID = re.compile("0|[1-9][0-9]{0,9}")
_REMEDY = 'It looks like {"topics":{"orders":{"broker-a":{"0":12,"1":9}}},"v":1}'


def _nested(positions: Positions) -> dict[str, dict[str, dict[str, int]]]:
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(positions):
        nested.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = positions[queue]
    return nested


def _flat(topics: object) -> dict[MessageQueue, int]:
    positions = {}
    for topic, brokers in _items(topics, "topics"):
        for broker, queues in _items(brokers, topic):
            for queue_id, offset in _items(queues, f"{topic}/{broker}"):
                if (
                    not _QUEUE_ID.fullmatch(queue_id)
                    or not isinstance(offset, int)
                    or isinstance(offset, bool)
                    or offset < 0
                ):
                    raise OffsetError(f"{topic}/{broker}/{queue_id}: {offset!r} is not an offset", remedy=_REMEDY)
                positions[MessageQueue(topic, broker, int(queue_id))] = offset
    return positions


def _items(value: object, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise OffsetError(f"{where}: {value!r} is not a JSON object", remedy=_REMEDY)
    return [(str(name), item) for name, item in value.items()]
