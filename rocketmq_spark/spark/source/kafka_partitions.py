"""The numbers of queues as Kafka's partitions (option ``kafkaColumns``). Pure.

The queues of a topic have the numbers from 0 on, in order of broker name and queue id: all queues of its route, as for the sink
(``TopicRoute.numbered``), also those that the source does not read. A stream keeps the numbers of its checkpoint, under the key
``partitions`` of the offset log, and appends queues that are new: the numbers of a running query do not change when a broker is
added. The log has runs of queues, ``{"orders":[["broker-a",0,4],["broker-b",0,4]]}``: a broker, the first queue id, and how many
follow each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rocketmq_spark.model import MessageQueue

# Runs of queues by topic, in the order of their numbers.
Runs = Mapping[str, Sequence[Sequence[str | int]]]


def numbers(runs: Runs) -> dict[MessageQueue, int]:
    """The number of each queue."""
    return {
        queue: number
        for topic, of_topic in runs.items()
        for number, queue in enumerate(queue for run in of_topic for queue in _queues(topic, run))
    }


def extended(runs: Runs, queues: Iterable[MessageQueue]) -> Runs:
    """``runs`` with the queues that have no number yet, after the others of their topics; ``runs`` itself if there are none."""
    known = numbers(runs)
    new = sorted({*queues} - known.keys())
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
