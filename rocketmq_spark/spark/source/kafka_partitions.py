"""Numbers queues as Kafka's partitions (option ``kafkaColumns``). Pure.

A topic's queues are numbered from 0 in order of broker name and queue id. All queues of the route get a number, also queues that
the query does not read. The sink numbers queues in the same way (``TopicRoute.partition_queues``). A stream stores its numbers in
the offset log under ``partitions``. New queues get the next numbers, so a new broker does not change the numbers of other queues.
The log holds runs of queues, each as broker, first queue id, and number of queues:
``{"orders":[["broker-a",0,4],["broker-b",0,4]]}``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from rocketmq_spark.base.arguments import is_integer, short_repr
from rocketmq_spark.base.codes import MAX_INT
from rocketmq_spark.model import MessageQueue

# Runs of queues by topic, in the order of their numbers.
QueueRuns = Mapping[str, Sequence[Sequence[str | int]]]
# The maximum number of queues in a log entry. A client accepts no more queues than this in all of its routes together.
MAX_QUEUES = 1 << 20


def runs_of_log(logged_runs: object) -> QueueRuns:
    """Return the runs of queues that an entry of the offset log has under ``partitions``.

    Raises ``ValueError`` if the entry has another form, or if a queue is in two runs and would have two numbers. Also raises
    ``ValueError`` for more than ``MAX_QUEUES`` queues, because they would take all memory.
    """
    if not isinstance(logged_runs, Mapping):
        raise ValueError(f"{short_repr(logged_runs)} is not a JSON object")
    remaining_queue_count = MAX_QUEUES
    for topic, runs_of_topic in logged_runs.items():
        if not isinstance(runs_of_topic, list | tuple):
            raise ValueError(f"{topic}: {short_repr(runs_of_topic)} is not a list of runs")
        for run in runs_of_topic:
            if not _is_run(run):
                raise ValueError(
                    f"{topic}: {short_repr(run)} is not a run; expected [broker, first queue id, number of queues]"
                )
            remaining_queue_count -= run[2]
            if remaining_queue_count < 0:
                raise ValueError(f"{topic}: {short_repr(run)} makes more than {MAX_QUEUES} queues in all")
        for (broker, first_id, queue_count), (next_broker, next_first_id, _) in pairwise(sorted(runs_of_topic)):
            if broker == next_broker and next_first_id < first_id + queue_count:
                raise ValueError(f"{topic}: queue {next_first_id} of {broker} is in two runs")
    return {str(topic): runs_of_topic for topic, runs_of_topic in logged_runs.items()}


def _is_run(run: object) -> bool:
    if not isinstance(run, list | tuple) or len(run) != 3:
        return False
    broker, first_id, queue_count = run
    if not isinstance(broker, str) or not broker or not is_integer(first_id) or not is_integer(queue_count):
        return False
    return bool(first_id >= 0 and queue_count >= 1 and first_id + queue_count <= MAX_INT + 1)


def partition_numbers(runs: QueueRuns) -> dict[MessageQueue, int]:
    """Return the partition number of each queue."""
    return {
        queue: number
        for topic, runs_of_topic in runs.items()
        for number, queue in enumerate(queue for run in runs_of_topic for queue in _queues_of_run(topic, run))
    }


def with_new_queues(runs: QueueRuns, queues: Iterable[MessageQueue]) -> QueueRuns:
    """Return ``runs`` with the queues that have no number yet, each after the numbered queues of its topic. Returns ``runs``
    itself if all queues have numbers.
    """
    known_numbers = partition_numbers(runs)
    new_queues = sorted({*queues} - known_numbers.keys())
    if not new_queues:
        return runs
    new_runs = {
        topic: list(_runs_of_queues(queues_of_topic))
        for topic, queues_of_topic in groupby(new_queues, key=lambda queue: queue.topic)
    }
    return {topic: [*runs.get(topic, ()), *new_runs.get(topic, ())] for topic in sorted({*runs, *new_runs})}


def _queues_of_run(topic: str, run: Sequence[str | int]) -> Iterator[MessageQueue]:
    broker, first_id, queue_count = run
    return (
        MessageQueue(topic, str(broker), queue_id)
        for queue_id in range(int(first_id), int(first_id) + int(queue_count))
    )


def _runs_of_queues(queues: Iterable[MessageQueue]) -> Iterator[list[str | int]]:
    run: list[str | int] = []
    for queue in queues:
        if run and run[0] == queue.broker_name and queue.queue_id == int(run[1]) + int(run[2]):
            run[2] = int(run[2]) + 1
            continue
        if run:
            yield run
        run = [queue.broker_name, queue.queue_id, 1]
    if run:
        yield run
