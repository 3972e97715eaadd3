"""The numbers of queues as Kafka's partitions (option ``kafkaColumns``). Pure.

A topic's queues are numbered from 0 in order of broker name and queue id. All queues of the route count, as in the sink
(``TopicRoute.partition_queues``), also those that the query does not read. A stream stores its numbers in the offset log under
``partitions`` and appends new queues, so they do not change when a broker is added. The log holds runs of queues,
``{"orders":[["broker-a",0,4],["broker-b",0,4]]}``: broker, first queue id, number of queues.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from rocketmq_spark.base.arguments import is_integer, short_repr
from rocketmq_spark.base.codes import MAX_INT
from rocketmq_spark.model import MessageQueue

# Runs of queues by topic, in the order of their numbers.
QueueRuns = Mapping[str, Sequence[Sequence[str | int]]]
# The routes of a client have no more queues than this.
MOST_QUEUES = 1 << 20


def runs_of_log(entry: object) -> QueueRuns:
    """Returns the runs in an entry of the offset log.

    Raises ``ValueError`` for another form, for more than ``MOST_QUEUES`` queues, which would take all memory, and for a queue in
    two runs, which would have two numbers.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{short_repr(entry)} is not a JSON object")
    left = MOST_QUEUES
    for topic, of_topic in entry.items():
        if not isinstance(of_topic, list | tuple):
            raise ValueError(f"{topic}: {short_repr(of_topic)} is not a list of runs")
        for run in of_topic:
            if not _is_run(run):
                raise ValueError(
                    f"{topic}: {short_repr(run)} is not a run; expected [broker, first queue id, number of queues]"
                )
            left -= run[2]
            if left < 0:
                raise ValueError(f"{topic}: {short_repr(run)} makes more than {MOST_QUEUES} queues in all")
        for (broker, first, count), (other, other_first, _) in pairwise(sorted(of_topic)):
            if broker == other and other_first < first + count:
                raise ValueError(f"{topic}: queue {other_first} of {broker} is in two runs")
    return {str(topic): of_topic for topic, of_topic in entry.items()}


def _is_run(run: object) -> bool:
    if not isinstance(run, list | tuple) or len(run) != 3:
        return False
    broker, first, count = run
    if not isinstance(broker, str) or not broker or not is_integer(first) or not is_integer(count):
        return False
    return bool(first >= 0 and count >= 1 and first + count <= MAX_INT + 1)


def partition_numbers(runs: QueueRuns) -> dict[MessageQueue, int]:
    """The number of each queue."""
    return {
        queue: number
        for topic, of_topic in runs.items()
        for number, queue in enumerate(queue for run in of_topic for queue in _queues(topic, run))
    }


def with_new_queues(runs: QueueRuns, queues: Iterable[MessageQueue]) -> QueueRuns:
    """``runs`` with the queues that have no number yet, after the others of their topics; ``runs`` itself if there are none."""
    numbered = partition_numbers(runs)
    new = sorted({*queues} - numbered.keys())
    if not new:
        return runs
    added = {topic: list(_runs(of_topic)) for topic, of_topic in groupby(new, key=lambda queue: queue.topic)}
    return {topic: [*runs.get(topic, ()), *added.get(topic, ())] for topic in sorted({*runs, *added})}


def _queues(topic: str, run: Sequence[str | int]) -> Iterator[MessageQueue]:
    broker, first, count = run
    return (MessageQueue(topic, str(broker), queue_id) for queue_id in range(int(first), int(first) + int(count)))


def _runs(queues: Iterable[MessageQueue]) -> Iterator[list[str | int]]:
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
