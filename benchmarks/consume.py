"""Members of consumer groups and pull consumers next to Java's: one message after the other to a listener that does nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.table import Table

from benchmarks import harness, java, raw, read, targets, workload
from benchmarks.harness import Case, Found, Result
from rocketmq_spark import Consumer, Message, Producer, PullConsumer
from rocketmq_spark.localbroker import LocalBroker

# A message costs a call here, not a place in a column.
FEWER = 10
_WITHIN_S = 120.0
DELIVERED, RATE, LATE_OF = "delivered", 100, 1000
SETTLING_S = 2.0  # a new member gets its queues, and what lay in them, first; as in Bench.java


def run(broker: LocalBroker, options: Any, found: Found) -> None:
    for size in harness.SIZES:
        count = harness.count_of(options.messages, size) // FEWER
        topic = f"consume-{size}"
        workload.fill(broker, topic, count, size)
        cases = Consumes(broker, topic, count).cases()
        harness.rounds(cases, options.repeats)
        title = f"Consumption of {count:,} messages, {size} B (thousand messages a second)"
        found[f"consume {size}"] = harness.report(title, cases, size)
    found["delivery"] = _deliveries(broker)


def _deliveries(broker: LocalBroker) -> dict[str, dict[str, float]]:
    """How late messages are with a listener, at ``RATE`` a second, in ms; Java's first, for its JVM needs a while."""
    broker.create_topic(DELIVERED)
    with Producer(name_server=broker.name_server, group="bench") as producer, _sending(producer):
        java_found = java.run("deliver", broker.name_server, DELIVERED, LATE_OF, on_begin=lambda: None)
        figures = {
            targets.PUSH: {name: float(java_found[name]) for name in ("p50", "p99")},
            targets.MEMBER: _late(broker),
        }
    table = Table(title=f"From send to listener at {RATE} messages a second (ms)")
    for column in ("case", "p50", "p99"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, late in figures.items():
        table.add_row(case, *(f"{late[name]:.2f}" for name in ("p50", "p99")))
    harness.show(table)
    return figures


@contextlib.contextmanager
def _sending(producer: Producer) -> Iterator[None]:
    """Messages whose bodies are the times of their sending, by the clock that Java's ``nanoTime`` reads, too."""
    stop = threading.Event()

    def send() -> None:
        while not stop.wait(1 / RATE):
            producer.send(Message(DELIVERED, b"%d" % time.monotonic_ns()))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _late(broker: LocalBroker) -> dict[str, float]:
    late: list[int] = []
    done = threading.Event()
    settled = time.monotonic_ns() + int(SETTLING_S * 1e9)

    def listener(messages: Any, context: Any) -> None:
        now = time.monotonic_ns()
        late.extend(now - sent for sent in (int(message.body) for message in messages) if sent >= settled)
        if len(late) >= LATE_OF:
            done.set()

    with Consumer(name_server=broker.name_server, group=f"bench-{os.urandom(4).hex()}") as consumer:
        consumer.subscribe(DELIVERED)
        consumer.start(listener)
        done.wait(_WITHIN_S)
    counted = sorted(late[:LATE_OF])
    harness.expect("Consumer", len(counted), LATE_OF)
    return {"p50": counted[LATE_OF // 2] / 1e6, "p99": counted[LATE_OF * 99 // 100] / 1e6}


class Consumes:
    """Every way to consume one topic from its beginning, each time in a new group."""

    def __init__(self, broker: LocalBroker, topic: str, count: int) -> None:
        self.broker, self.topic, self.count = broker, topic, count
        self.pid = raw.pid_of(broker)

    def cases(self) -> list[Case]:
        return [
            Case(targets.MEMBER, self.listened),
            Case(targets.MEMBER_ARROW, self.listened_to_batches),
            Case(targets.POLL, lambda: self.polled(lambda consumer: len(consumer.poll(1.0)))),
            Case(targets.POLL_ARROW, lambda: self.polled(lambda consumer: consumer.poll_arrow(1.0).num_rows)),
            Case(targets.PUSH, lambda: self.peer("push"), warm_up=False),
            Case(targets.LITE_POLL, lambda: self.peer("lite", 32, 20), warm_up=False),
        ]

    def listened(self) -> Result:
        """Counted by calls: a message that came twice would end it early, so those after the last are counted, too."""
        done, calls = threading.Event(), itertools.count(1)

        def listener(messages: Any, context: Any) -> None:
            if next(calls) == self.count:
                done.set()

        with Consumer(**self._of_a_group()) as consumer:
            consumer.subscribe(self.topic)
            with harness.timed([self.pid], self.count) as result:
                consumer.start(listener)
                done.wait(_WITHIN_S)
        harness.expect("Consumer", next(calls) - 1, self.count)
        return result

    def listened_to_batches(self) -> Result:
        """Counted by rows."""
        done, lock, rows = threading.Event(), threading.Lock(), [0]

        def listener(batch: Any, context: Any) -> None:
            with lock:
                rows[0] += batch.num_rows
                if rows[0] >= self.count:
                    done.set()

        with Consumer(**self._of_a_group(), arrow=True) as consumer:
            consumer.subscribe(self.topic)
            with harness.timed([self.pid], self.count) as result:
                consumer.start(listener)
                done.wait(_WITHIN_S)
        harness.expect("Consumer with arrow", rows[0], self.count)
        return result

    def polled(self, poll: Callable[[PullConsumer], int]) -> Result:
        rows = 0
        with PullConsumer(**self._of_a_group()) as consumer, harness.timed([self.pid], self.count) as result:
            consumer.assign(self._queues())
            while rows < self.count and (got := poll(consumer)):
                rows += got
        harness.expect("PullConsumer", rows, self.count)
        return result

    def peer(self, mode: str, *arguments: int) -> Result:
        return read.java_run(self.broker, mode, self.topic, self.count, *arguments, at_least=True)

    def _of_a_group(self) -> dict[str, Any]:
        return {
            "name_server": self.broker.name_server,
            "group": f"bench-{os.urandom(4).hex()}",
            "consume_from_where": "earliest",
        }

    def _queues(self) -> list[Any]:
        return sorted(self.broker.admin.route(self.topic).readable_queues())
