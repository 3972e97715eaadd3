"""The offsets of a source, and their JSON in Spark's offset log.

An entry is ``{"topics":{"t":{"broker-a":{"0":12}}},"v":1}``: for each queue, the offset after the last message read. Keys are
sorted, because Spark compares entries as strings. Further keys hold what else a restart needs:

* ``start``: the start offsets of queues that the previous entry does not name, or whose topic was created again. For batch 0,
  Spark itself logs no starts. Without the key ``start``, a restart before the first commit would resolve "latest" a second time,
  and skip messages.
* ``marks``: the newest store time (epoch ms) of the messages of each queue. This time shows that a topic was deleted and created
  again, even if the new topic has grown past the old position.
* ``plan``: the values that, with the ranges, determine the tasks of the batch that ends here (``partitioning``). A repeated batch
  has the same tasks, whatever the options are now. Entries of earlier releases have no ``plan``.
* ``partitions``: with ``kafkaColumns``, the numbers of queues as Kafka's partitions (``kafka_partitions``).
* ``environment``: the queues of a topic that an environment owns by its number, with the number. Without this record, an
  environment would get queues of another environment while a broker is down.
* ``reads``: the identity of the source (``checkpoint_identity``): clusters, namespace, environment and filter, by which the
  source detects a checkpoint of another query; ``subscribe`` or ``assign``, by which the source distinguishes a deleted
  topic without positions from a misspelt name; and the group to which the query commits its offsets. For commands, the identity
  also has the pattern of topics, and ``newQueues``, which is false if queues that are created later stay unread. Entries of
  earlier releases may lack ``namespace`` or ``clusters``, and then match any namespace or cluster. Entries of earlier releases
  also lack ``subscribe`` and ``assign``. The earliest releases call the key ``filter`` instead of ``reads``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.options.parsing import QUEUE_ID, json_document
from rocketmq_spark.spark.source import kafka_partitions

VERSION = 1

Positions = Mapping[MessageQueue, int]
Bounds = Mapping[MessageQueue, QueueBounds]


@dataclass(frozen=True, slots=True)
class Offsets:
    """The positions of the queues, and what else a restart needs. The docstring of this module describes the keys of a log
    entry.
    """

    positions: Positions
    new_queue_starts: Positions = field(default_factory=dict)
    newest_store_ms: Positions = field(default_factory=dict)
    source_identity: Mapping[str, Any] = field(default_factory=dict)
    environment_numbers: Mapping[MessageQueue, int] = field(default_factory=dict)
    partitioning_json: Mapping[str, Any] = field(default_factory=dict)
    queue_runs: kafka_partitions.QueueRuns = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the log entry. The order of its keys is canonical."""
        log_entry: dict[str, Any] = {}
        if self.environment_numbers:
            log_entry["environment"] = _to_nested_json(self.environment_numbers)
        if self.newest_store_ms:
            log_entry["marks"] = _to_nested_json(self.newest_store_ms)
        if self.queue_runs:
            log_entry["partitions"] = {topic: list(map(list, runs)) for topic, runs in self.queue_runs.items()}
        if self.partitioning_json:
            log_entry["plan"] = dict(self.partitioning_json)
        if self.source_identity:
            log_entry["reads"] = json.loads(json.dumps(self.source_identity, sort_keys=True))
        if self.new_queue_starts:
            log_entry["start"] = _to_nested_json(self.new_queue_starts)
        log_entry["topics"] = _to_nested_json(self.positions)
        log_entry["v"] = VERSION
        return log_entry

    @classmethod
    def from_json(cls, log_entry: object) -> Offsets:
        """Parse a log entry, or JSON text of a user. Raises ``OffsetError``, which names the problem and the key that has it."""
        if isinstance(log_entry, str):
            try:
                log_entry = json_document(log_entry)
            except ValueError as e:
                raise OffsetError(f"an offset must be JSON: {e}", remedy=_REMEDY) from e
        if not isinstance(log_entry, Mapping) or not isinstance(log_entry.get("topics"), Mapping):
            raise OffsetError('an offset must be a JSON object with "topics"', remedy=_REMEDY)
        version = log_entry.get("v", VERSION)
        if type(version) is not int or not 1 <= version <= VERSION:
            is_newer = type(version) is int and version > VERSION
            raise OffsetError(
                f"the offset has version {version!r}; this package reads version {VERSION}",
                remedy="The checkpoint was written by a newer rocketmq-spark: upgrade this one"
                if is_newer
                else _REMEDY,
            )
        return cls(
            _from_nested_json(log_entry["topics"]),
            _from_nested_json(log_entry.get("start") or {}),
            _from_nested_json(log_entry.get("marks") or {}),
            dict(_json_items(log_entry.get("reads", log_entry.get("filter")) or {}, "reads")),
            _from_nested_json(log_entry.get("environment") or {}),
            dict(_json_items(log_entry.get("plan") or {}, "plan")),
            _partitions_from_json(log_entry.get("partitions", {})),
        )


class OffsetLogCache:
    """Converts offsets to log entries and back. Caches the offsets of the last two entries, so that equal entries get the same
    ``Offsets`` object, which is fast to compare with itself.

    An idle query passes the same entry many times a second, and a batch starts at the end of the previous batch. Callers must not
    change an entry.
    """

    def __init__(self) -> None:
        self._recent_entries: tuple[tuple[dict[str, Any], Offsets], ...] = ()

    def to_log(self, offsets: Offsets) -> dict[str, Any]:
        log_entry = offsets.to_json()
        cached_offsets = replace(offsets, source_identity=log_entry.get("reads", {}))
        self._recent_entries = ((log_entry, cached_offsets), *self._recent_entries[:1])
        return log_entry

    def from_log(self, log_entry: dict[str, Any]) -> Offsets:
        for age, (entry, cached_offsets) in enumerate(self._recent_entries):
            if entry == log_entry:
                if age:  # the newer entry comes first
                    self._recent_entries = self._recent_entries[::-1]
                return cached_offsets
        offsets = Offsets.from_json(log_entry)
        self._recent_entries = ((log_entry, offsets), *self._recent_entries[:1])
        return offsets


_REMEDY_OF_PARTITIONS = (
    'Expected {"orders":[["broker-a",0,4],["broker-b",0,4]]}: broker, first queue id, number of queues. Restore the file, or '
    'delete the key "partitions": queues are then numbered again, perhaps differently'
)
_REMEDY = 'It looks like {"topics":{"orders":{"broker-a":{"0":12,"1":9}}},"v":1}'


# Log entries of 100,000 queues are kept in memory. The strings of queue ids are cached, so that equal ids share one string.
_queue_id_text = lru_cache(4096)(str)


def _to_nested_json(positions: Positions) -> dict[str, dict[str, dict[str, int]]]:
    nested_positions: dict[str, dict[str, dict[str, int]]] = {}
    for (topic, broker_name), queues in groupby(sorted(positions), key=itemgetter(0, 1)):
        nested_positions.setdefault(topic, {})[broker_name] = {
            _queue_id_text(queue.queue_id): positions[queue] for queue in queues
        }
    return nested_positions


def _from_nested_json(topics: object) -> dict[MessageQueue, int]:
    positions = {}
    for topic, brokers in _json_items(topics, "topics"):
        for broker, queues in _json_items(brokers, topic):
            for queue_id, offset in _json_items(queues, f"{topic}/{broker}"):
                if (
                    not QUEUE_ID.fullmatch(queue_id)
                    or not isinstance(offset, int)
                    or isinstance(offset, bool)
                    or offset < 0
                ):
                    raise OffsetError(f"{topic}/{broker}/{queue_id}: {offset!r} is not an offset", remedy=_REMEDY)
                positions[MessageQueue(topic, broker, int(queue_id))] = offset
    return positions


def _partitions_from_json(logged_runs: object) -> kafka_partitions.QueueRuns:
    try:
        return kafka_partitions.runs_of_log(logged_runs)
    except ValueError as e:
        raise OffsetError(f'"partitions" of an offset: {e}', remedy=_REMEDY_OF_PARTITIONS) from e


def _json_items(value: object, json_path: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        raise OffsetError(f"{json_path}: {value!r} is not a JSON object", remedy=_REMEDY)
    return [(str(name), item) for name, item in value.items()]


def queues_text(queues: Iterable[MessageQueue]) -> str:
    """Return the names of the first ten queues, and the number of the other queues, as text."""
    names = [str(queue) for queue in sorted(queues)]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
