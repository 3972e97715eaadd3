"""Reads of ranges over queues in memory, which tests look at and disturb."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator, Sequence

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from tests.mockbroker import WAIT_S

COUNT = 4


class Run:
    """A read over the fake's queues, ``COUNT`` offsets at once in two answers; ``odd`` offsets end it."""

    def __init__(self, reads: Reads, ranges: Sequence[OffsetRange]) -> None:
        self.reads, self.ranges, self.had_only_plain_answers = reads, ranges, True
        self.resets: dict[MessageQueue, int] = {}
        self.closed = False
        self.stopped = threading.Event()

    def fetch(self) -> Generator[list[tuple[MessageQueue, int, list[tuple[int, int]], bytes]], None, None]:
        try:
            for r in self.ranges:
                for at in range(r.start, r.end, COUNT):
                    if self.stopped.is_set():
                        return
                    end = min(r.end, at + COUNT)
                    if self.reads.hangs:
                        self.stopped.wait(10 * WAIT_S)  # longer than a test waits for its end
                        return
                    if self.reads.reset is not None and at >= self.reads.reset_from:
                        self.had_only_plain_answers, self.resets = (
                            False,
                            {each.queue: self.reads.reset for each in self.ranges},
                        )
                        self.reads.reset = None
                        return
                    if self.reads.odd in range(at, end):
                        self.had_only_plain_answers = False
                        return
                    if self.reads.error is not None:
                        raise self.reads.error
                    self.reads.given += 1
                    self.reads.given_of[r.queue] += 1
                    self.reads.reached[r.queue] = end
                    middle = (at + end) // 2
                    yield [(r.queue, at, [(middle, middle - at), (end, end - at)][middle == at :], b"x" * (end - at))]
        finally:
            self.closed = True

    def stop(self) -> None:
        self.stopped.set()


class Reads:
    """All of them."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.bounds: list[tuple[int, int]] = []
        self.odd: int | None = None
        self.reset: int | None = (
            None  # where an operator moves the group, which one pull of each queue from there on is told
        )
        self.reset_from = 0
        self.error: RocketMQError | None = None
        self.hangs = False
        self.given = 0
        self.given_of: Counter[MessageQueue] = Counter()
        self.reached: Counter[MessageQueue] = Counter()  # behind the last offset that was given

    def begin(self, ranges: Sequence[OffsetRange], offsets: int, size: int) -> Run:
        self.bounds.append((offsets, size))
        self.runs.append(Run(self, ranges))
        return self.runs[-1]
