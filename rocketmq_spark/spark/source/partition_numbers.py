"""The numbers of queues as Kafka's partitions in one run of a stream (option ``kafkaColumns``)."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.source.bounds_reader import BoundsReader
from rocketmq_spark.spark.source.kafka_partitions import QueueRuns, partition_numbers, with_new_queues
from rocketmq_spark.spark.source.offsets import Offsets, Positions


class PartitionNumbers:
    """Numbers the queues of a run. The numbers of the checkpoint never change, and new queues get the next ones."""

    def __init__(self, options: Options, reader: BoundsReader) -> None:
        self._is_on = options.kafka_columns
        self._reader = reader
        # The newest numbers of this run, and the queues of a repeated batch whose number is in no log entry yet.
        self._runs: QueueRuns = {}
        self._unlogged: frozenset[MessageQueue] = frozenset()

    def has_unlogged(self, start: Offsets) -> bool:
        """Whether queues have a number that is not in ``start``, which Spark has logged."""
        if self._unlogged:
            self._unlogged -= partition_numbers(start.partitions).keys()
        return bool(self._unlogged)

    def runs_between(self, start: Offsets, end: Positions) -> QueueRuns:
        """Return the runs of the checkpoint and of this run, with new queues appended. Without the option, the runs of the
        checkpoint are returned unchanged.
        """
        if not (self._is_on or start.partitions or self._runs):
            return {}
        topics = {queue.topic for queue in (*start.positions, *end)}
        logged_runs = {topic: runs for topic, runs in {**start.partitions, **self._runs}.items() if topic in topics}
        if not self._is_on:
            return logged_runs
        routed_queues = self._reader.partition_queues(topics, numbered_topics=logged_runs)
        self._runs = with_new_queues(logged_runs, (*routed_queues, *start.positions, *end))
        return self._runs

    def of_batch(self, end: Offsets, queues: set[MessageQueue]) -> Mapping[MessageQueue, int]:
        """Return the numbers for a batch that reads ``queues``, as its log entry has them.

        A batch that was logged without ``kafkaColumns`` gets numbers now, and the next log entry records them.
        """
        if not self._is_on:
            return {}
        numbers = partition_numbers(end.partitions)
        if not (unnumbered := queues - numbers.keys()):
            return numbers
        self._unlogged |= unnumbered
        return partition_numbers(self.runs_between(end, end.positions))
