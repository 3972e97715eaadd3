"""Numbers queues as Kafka's partitions in one run of a stream (option ``kafkaColumns``)."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.source.bounds_reader import BoundsReader
from rocketmq_spark.spark.source.kafka_partitions import QueueRuns, partition_numbers, with_new_queues
from rocketmq_spark.spark.source.offsets import Offsets, Positions


class PartitionNumbers:
    """Numbers the queues of a stream. The numbers in the checkpoint never change, and new queues get the next numbers."""

    def __init__(self, options: Options, reader: BoundsReader) -> None:
        self._is_enabled = options.kafka_columns
        self._reader = reader
        # The newest numbers of this run, and the queues of a repeated batch whose numbers are in no log entry yet.
        self._queue_runs: QueueRuns = {}
        self._unlogged_queues: frozenset[MessageQueue] = frozenset()

    def has_unlogged_queues(self, start: Offsets) -> bool:
        """Whether some queues have a number that the logged offsets ``start`` do not record."""
        if self._unlogged_queues:
            self._unlogged_queues -= partition_numbers(start.queue_runs).keys()
        return bool(self._unlogged_queues)

    def queue_runs_between(self, start: Offsets, end: Positions) -> QueueRuns:
        """Return the numbered runs of queues of the checkpoint and of this stream, with new queues appended. Without option
        ``kafkaColumns``, return the runs of the checkpoint unchanged.
        """
        if not (self._is_enabled or start.queue_runs or self._queue_runs):
            return {}
        topics = {queue.topic for queue in (*start.positions, *end)}
        logged_runs = {
            topic: runs for topic, runs in {**start.queue_runs, **self._queue_runs}.items() if topic in topics
        }
        if not self._is_enabled:
            return logged_runs
        routed_queues = self._reader.partition_queues(topics, numbered_topics=logged_runs)
        self._queue_runs = with_new_queues(logged_runs, (*routed_queues, *start.positions, *end))
        return self._queue_runs

    def numbers_of_batch(self, end: Offsets, queues: set[MessageQueue]) -> Mapping[MessageQueue, int]:
        """Return the numbers that the log entry of a batch has for its queues. ``queues`` are the queues that the batch reads.

        A batch that was logged without ``kafkaColumns`` gets numbers now, and the next log entry records them.
        """
        if not self._is_enabled:
            return {}
        numbers = partition_numbers(end.queue_runs)
        if not (unnumbered_queues := queues - numbers.keys()):
            return numbers
        self._unlogged_queues |= unnumbered_queues
        return partition_numbers(self.queue_runs_between(end, end.positions))
