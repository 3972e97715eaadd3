"""Reading ahead beside long polls, over queues in memory: each message once, in order, whoever read it."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from rocketmq_spark.base import threads
from rocketmq_spark.base.clock import Clock
from rocketmq_spark.consumer import prefetch
from rocketmq_spark.consumer.prefetch import BacklogReader, Prefetcher
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from tests.consumer.pull_bench import as_rows, bodies
from tests.consumer.reads import COUNT, Reads
from tests.fakes.group_member import QueueMember, numbered
from tests.helpers import unlike_ctrl_c
from tests.mockbroker import WAIT_S, eventually

A, B = (MessageQueue("t", "b", i) for i in range(2))


@pytest.fixture
def reads() -> Reads:
    return Reads()


@pytest.fixture
def fake() -> QueueMember:
    return QueueMember([A, B])


@pytest.fixture
def consumer(fake: QueueMember, reads: Reads) -> Iterator[BasePullConsumer]:
    with made(fake, reads) as one:
        yield one


def made(fake: QueueMember, reads: Reads, **settings: Any) -> BasePullConsumer:
    wanted = ConsumerSettings(
        group="g",
        consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST),
        **{"pull_batch_size": COUNT, "thresholds": Thresholds(40), **settings},
    )
    how = BacklogReader(
        reads.begin, lambda queue, start, end, stored: [numbered(queue, start + i) for i in range(len(stored))]
    )
    return BasePullConsumer(fake, wanted, as_rows, Clock(), how)  # type: ignore[arg-type]


def all_of(consumer: BasePullConsumer, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count and (some := consumer.poll(WAIT_S)):
        found += bodies(some)
    return found


def test_a_backlog_is_read_ahead_and_the_rest_is_polled(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer
) -> None:
    fake.add(A, 1000)
    consumer.assign([A])
    assert all_of(consumer, 1000) == list(range(1000))
    assert len(fake.pulls) < 100
    assert reads.given > 200
    fake.add(A, 3)
    assert all_of(consumer, 3) == [1000, 1001, 1002]
    assert all(run.closed for run in reads.runs)


def test_a_poll_is_never_more_than_an_answer(fake: QueueMember, consumer: BasePullConsumer) -> None:
    fake.add(A, 500)
    consumer.assign([A])
    assert {len(consumer.poll(WAIT_S)) for _ in range(100)} <= {COUNT, COUNT // 2}


def test_rows_are_of_everything_that_has_come(fake: QueueMember, reads: Reads, consumer: BasePullConsumer) -> None:
    fake.add(A, 1000)
    consumer.assign([A])
    eventually(lambda: reads.given >= 5)
    found: list[int] = []
    sizes = []
    while len(found) < 1000:
        rows = consumer.poll_arrow(WAIT_S)
        sizes.append(rows.num_rows)
        found += bodies(rows.messages)
    assert found == list(range(1000))
    assert max(sizes) > COUNT


def test_no_more_is_read_than_may_wait(fake: QueueMember, reads: Reads) -> None:
    fake.add(A, 1000)
    with made(fake, reads) as consumer:
        consumer.assign([A])
        at = 0
        for _ in range(100):
            eventually(lambda at=at: reads.reached[A] - at > 20)  # type: ignore[misc]
            assert reads.reached[A] - at <= 20 + COUNT
            at = consumer.poll(WAIT_S)[-1].queue_offset + 1
        assert reads.bounds[0] == (20, 50 << 20)


def test_a_seek_drops_what_was_read_ahead(fake: QueueMember, reads: Reads, consumer: BasePullConsumer) -> None:
    fake.add(A, 2000)
    consumer.assign([A])
    eventually(lambda: reads.given >= 3)
    consumer.seek(A, 1500)
    assert all_of(consumer, 500) == list(range(1500, 2000))
    consumer.seek_to_beginning(A)
    assert all_of(consumer, 2000) == list(range(2000))


def test_a_reset_that_a_read_ahead_is_told_of_is_followed(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    fake.add(A, 2000)
    reads.reset, reads.reset_from = 1990, 20
    consumer.assign([A])
    eventually(lambda: reads.reset is None)
    eventually(lambda: "continuing at 1990" in caplog.text)
    assert all_of(consumer, 10) == list(range(1990, 2000))
    consumer.commit()
    assert fake.stored[A] == 2000
    assert f"the broker reset the offset of {A}" in caplog.text


def test_reset_of_all_queues_read_ahead_is_followed_by_each(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer
) -> None:
    fake.add(A, 2000)
    fake.add(B, 2000)
    reads.hangs = True
    consumer.assign([A, B])

    def both_are_read() -> bool:
        for run in reads.runs[-1:]:
            run.stop()
            return {r.queue for r in run.ranges} == {A, B}
        return False

    eventually(both_are_read)
    reads.reset, reads.hangs = 1990, False
    eventually(lambda: reads.reset is None)
    found: list[ReceivedMessage] = []
    while len(found) < 1000 and {(A, 1999), (B, 1999)} - {(one.queue, one.queue_offset) for one in found}:
        found += consumer.poll(WAIT_S)
    assert not [one for one in found if 1000 <= one.queue_offset < 1990]
    consumer.commit()
    assert fake.stored == {A: 2000, B: 2000}


def test_a_read_ends_when_only_some_of_the_topic_is_wanted(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer
) -> None:
    fake.add(A, 1000)
    consumer.subscribe("t")
    found = bodies(consumer.poll(WAIT_S))
    eventually(lambda: reads.given >= 3)
    consumer.subscribe("t", tags="x")
    found += all_of(consumer, 1000 - len(found))
    assert found == list(range(1000))
    (run,) = reads.runs
    assert run.closed
    assert reads.given < 50
    assert fake.pulls[-1].filter.expression == "x"


def test_a_paused_queue_holds_up_no_other(fake: QueueMember, reads: Reads, consumer: BasePullConsumer) -> None:
    fake.add(A, 1000)
    fake.add(B, 1000)
    consumer.assign([A, B])
    consumer.pause(A)
    found: list[int] = []
    while len(found) < 1000:
        some = consumer.poll(WAIT_S)
        assert {one.queue for one in some} == {B}
        found += bodies(some)
    assert found == list(range(1000))
    consumer.resume(A)
    assert all_of(consumer, 1000) == list(range(1000))


def test_queues_that_come_later_are_read_with_the_others(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer
) -> None:
    fake.add(A, 1000)
    fake.add(B, 1000)
    consumer.assign([A])
    eventually(lambda: reads.given >= 3)
    consumer.assign([A, B])
    by_queue: dict[MessageQueue, list[int]] = {A: [], B: []}
    while sum(map(len, by_queue.values())) < 2000:
        for one in consumer.poll(WAIT_S):
            by_queue[one.queue].append(one.queue_offset)
    assert by_queue == {A: list(range(1000)), B: list(range(1000))}
    assert any({r.queue for r in run.ranges} == {A, B} for run in reads.runs)


def test_what_is_odd_is_left_to_long_polls(fake: QueueMember, reads: Reads, consumer: BasePullConsumer) -> None:
    """The queue is polled for a while then."""
    reads.odd = 300
    fake.add(A, 1000)
    consumer.assign([A])
    assert all_of(consumer, 1000) == list(range(1000))
    assert len(reads.runs) == 1
    assert len(fake.pulls) >= 170


def test_an_illegal_offset_is_repaired_by_long_polls(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer
) -> None:
    reads.odd = 100
    fake.add(A, 1000)
    consumer.assign([A])
    eventually(lambda: reads.given >= 5)
    fake.low[A] = 600
    found: list[int] = []
    while found[-1:] != [999]:
        found += bodies(consumer.poll(WAIT_S))
    assert found[-400:] == list(range(600, 1000))
    assert found[:-400] == list(range(len(found) - 400))


def test_a_read_that_fails_is_no_end(
    fake: QueueMember, reads: Reads, consumer: BasePullConsumer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    reads.error = ConnectionLost("gone")
    fake.add(A, 400)
    consumer.assign([A])
    assert all_of(consumer, 400) == list(range(400))
    assert "continuing with long polls: [ROCKETMQ_CONNECTION_LOST] gone" in caplog.text


def test_what_is_committed_is_what_was_given(fake: QueueMember, reads: Reads) -> None:
    fake.add(A, 1000)
    with made(fake, reads) as consumer:
        consumer.assign([A])
        eventually(lambda: reads.given >= 5)
        given = sum(len(consumer.poll(WAIT_S)) for _ in range(3))
        consumer.poll(WAIT_S)
    assert fake.stored == {A: given}


def test_the_close_ends_the_thread(fake: QueueMember, reads: Reads) -> None:
    fake.add(A, 1000)
    with made(fake, reads) as consumer:
        consumer.assign([A])
        eventually(lambda: reads.given >= 5)
    assert all(run.closed for run in reads.runs)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rocketmq-ahead")]


def test_the_close_stops_a_read_that_hangs(fake: QueueMember, reads: Reads) -> None:
    reads.hangs = True
    fake.add(A, 1000)
    with made(fake, reads) as consumer:
        consumer.assign([A])
        eventually(lambda: reads.runs)
    assert [run.stopped.is_set() for run in reads.runs] == [True]


class StartInterrupted:
    """Raises Ctrl-C at the n-th line of the start of a thread that reads ahead."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: object) -> StartInterrupted | None:
        path, caller = frame.f_code.co_filename, frame
        if path not in (threading.__file__, threads.__file__):
            return self if path == prefetch.__file__ else None
        while caller is not None and caller.f_code is not Prefetcher._start_reader.__code__:
            caller = caller.f_back  # type: ignore[assignment]
        # Its end is no place for Ctrl-C.
        parted = not linecache.getline(path, frame.f_lineno).lstrip().startswith("with ")
        if caller is not None and event == "line" and parted and not unlike_ctrl_c(frame):
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self


def test_ctrl_c_while_a_read_ahead_starts_strands_no_queue() -> None:
    for at in itertools.count():
        fake = QueueMember([A, B])
        fake.add(A, 400)
        with made(fake, Reads()) as consumer:
            interrupted, before = StartInterrupted(at), sys.gettrace()
            sys.settrace(interrupted)
            try:
                consumer.assign([A])
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            consumer.assign([A])
            assert all_of(consumer, 400) == list(range(400)), at
        if interrupted.left >= 0:
            assert at > 20
            return
