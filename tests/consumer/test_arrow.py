"""Listeners of record batches: what a listener of messages is promised holds of rows, however they were decoded."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocketmq_spark.columnar.decode.rows import batch_of_messages
from rocketmq_spark.consumer import rows
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.rows import RowsDecoder
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model.membership import ConsumeDirectly, ResetOffsets
from rocketmq_spark.session.telemetry import Instrumentation
from rocketmq_spark.wire import messages
from tests.consumer.group import GroupBench
from tests.consumer.messages import message
from tests.consumer.test_tracing import FAILED, SUCCESS, Traces
from tests.fakes.group_member import RETRY
from tests.helpers import raising
from tests.mockbroker import eventually
from tests.queues import q
from tests.test_telemetry import Seen, seen

__all__ = ["seen"]

A = q("a:0")
TIMED_OUT = {"send_back": CallTimeout("late"), "send_to_retry": CallTimeout("late")}


def by_columns(parts: Sequence[FetchedPart]) -> Any:
    return batch_of_messages([message for part in parts for message in part.read()])


@pytest.fixture(params=["columns", "messages"])
def arrow(group: GroupBench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GroupBench:
    """Rows are made of columns, or of messages, as those of small answers are."""
    monkeypatch.setattr(rows, "MIN_COLUMNAR_ROWS", 1)
    how = by_columns if request.param == "columns" else lambda parts: None
    group.rows = RowsDecoder(1024, how, batch_of_messages)
    return group


def at_most(group: GroupBench, count: int) -> None:
    """So many rows in a call."""
    assert group.rows is not None
    group.rows._max_rows = count


def started(group: GroupBench, listener: Any = None, **how: Any) -> Any:
    """A member that pulls already."""
    consumer, port = group.start(listener, **how)
    group.time.advance(1)
    return consumer, port


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % i for i in range(start, start + count)]


def bodies(batch: Any) -> list[bytes]:
    found: list[bytes] = batch.column("body").to_pylist()
    return found


def test_listener_gets_answers_as_rows_and_offset_passes_them(arrow: GroupBench) -> None:
    calls: list[tuple[Any, list[int]]] = []

    def listener(batch: Any, context: Any) -> None:
        assert set(batch.column("queueId").to_pylist()) == {context.queue.queue_id}
        assert set(batch.column("brokerName").to_pylist()) == {context.queue.broker_name}
        calls.append((context.queue, batch.column("queueOffset").to_pylist()))

    consumer, _ = started(arrow, listener)
    arrow.workers[0].held = True
    arrow.brokers.send(A, *numbers(100))
    arrow.time.advance(0.1)
    assert consumer.stats().cached == 100
    arrow.workers[0].let_go()
    arrow.time.advance(0.1)
    assert calls == [(A, [*range(start, min(start + 32, 100))]) for start in range(0, 100, 32)]
    assert arrow.bodies() == numbers(100)
    assert (consumer.stats().cached, consumer.stats().consumed) == (0, 100)
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 100
    topic = consumer.stats().topics["T"]
    assert topic.pulled_per_s == topic.consumed_per_s > 0


def test_an_option_bounds_the_rows_of_a_call(arrow: GroupBench) -> None:
    at_most(arrow, 10)
    sizes: list[int] = []
    consumer, _ = started(arrow, lambda batch, context: sizes.append(batch.num_rows))
    arrow.brokers.send(A, *numbers(33))
    arrow.time.advance(1)
    assert sizes == [10, 10, 10, 2, 1]
    assert arrow.bodies() == numbers(33)
    assert consumer.stats().cached == 0


def test_offset_waits_for_the_first_of_calls_ending_in_any_order(arrow: GroupBench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def listener(batch: Any, context: Any) -> None:
        if b"0" in bodies(batch):
            inside.set()
            assert go_on.wait(60)

    consumer, _ = started(arrow, listener)
    arrow.workers[0].threads = []
    arrow.brokers.send(A, b"0")
    arrow.brokers.send(A, *numbers(40, 1))
    arrow.time.advance(0.1)
    assert inside.wait(60)
    held = consumer._running.state.queues[A]
    eventually(lambda: held.count == 1)
    assert (held.offsets, held.span, consumer._running.state.offsets.get(A)) == ((0, 0), 0, 0)
    go_on.set()
    eventually(lambda: held.count == 0)
    assert consumer._running.state.offsets.get(A) == 41


def test_rows_of_a_failed_call_come_again_under_their_own_topic(arrow: GroupBench) -> None:
    topics: list[str] = []

    def listener(batch: Any, context: Any) -> Any:
        topics.extend(batch.column("topic").to_pylist())
        return raising(RuntimeError("no"))() if context.queue.topic != RETRY else None

    consumer, port = started(arrow, listener)
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(0.1)
    assert Counter(port.seen("send_back")) == Counter((body, 0, 16) for body in numbers(3))
    stats = consumer.stats()
    assert (stats.failed, stats.sent_back, stats.cached) == (3, 3, 0)
    arrow.time.advance(60)
    assert Counter(arrow.bodies()) == Counter(2 * numbers(3))
    assert topics == ["T"] * 6
    assert arrow.brokers.offsets[A] == 3
    assert consumer.stats().consumed == 3


def test_only_the_rows_after_the_ack_index_fail(arrow: GroupBench) -> None:
    def listener(batch: Any, context: Any) -> None:
        context.ack_index, context.delay_level = np.int64(1), 7  # as computed from a column
        assert type(context.ack_index) is int

    consumer, port = started(arrow, listener)
    arrow.workers[0].held = True
    arrow.brokers.send(A, b"first")
    arrow.brokers.send(A, *numbers(4))
    arrow.time.advance(0.1)
    arrow.workers[0].let_go()
    arrow.time.advance(0.1)
    assert port.seen("send_back") == [(b"2", 7, 16), (b"3", 7, 16)]
    assert (consumer.stats().consumed, consumer.stats().failed) == (3, 2)


def test_a_row_that_failed_too_often_is_a_dead_letter(arrow: GroupBench) -> None:
    started(arrow, lambda batch, context: context.retry(), max_retries=2)
    arrow.brokers.send(A, *numbers(2))
    arrow.time.advance(120)
    assert Counter(arrow.bodies()) == Counter(3 * numbers(2))
    assert sorted(dead.body for dead in arrow.brokers.dead) == numbers(2)


def test_rows_not_sent_back_come_again_alone_and_hold_the_offset(arrow: GroupBench) -> None:
    def listener(batch: Any, context: Any) -> None:
        if b"bad" in bodies(batch):
            context.ack_index = bodies(batch).index(b"bad") - 1

    consumer, _ = started(arrow, listener)
    arrow.workers[0].held = True
    arrow.brokers.send(A, b"0")
    arrow.brokers.send(A, b"1", b"2", b"bad", b"worse")
    arrow.time.advance(0.1)
    arrow.brokers.failing |= TIMED_OUT
    arrow.workers[0].let_go()
    arrow.time.advance(5.1)
    assert arrow.bodies() == [b"0", b"1", b"2", b"bad", b"worse", b"bad", b"worse"]
    held = consumer._running.state.queues[A]
    assert (held.count, held.offsets) == (2, (1, 4))
    arrow.time.advance(10)
    assert arrow.brokers.offsets.get(A, 0) == 1
    arrow.brokers.failing.clear()
    arrow.time.advance(60)
    assert (held.count, held.bytes, arrow.brokers.offsets[A]) == (0, 0, 5)
    assert arrow.bodies()[-2:] == [b"bad", b"worse"]


def test_after_its_last_attempt_here_a_row_is_a_dead_letter_too(arrow: GroupBench) -> None:
    """Brokers do not count attempts after which they could not be reached."""
    arrow.brokers.failing |= TIMED_OUT
    started(arrow, lambda batch, context: context.retry(), max_retries=1)
    arrow.brokers.send(A, b"0")
    arrow.time.advance(4)
    arrow.brokers.failing.clear()
    arrow.time.advance(60)
    assert arrow.bodies() == [b"0", b"0"]
    assert [dead.body for dead in arrow.brokers.dead] == [b"0"]


@pytest.mark.parametrize("fails", [False, True])
def test_rows_of_a_hanging_listener_go_to_the_retry_topic_once(arrow: GroupBench, fails: bool) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def listener(batch: Any, context: Any) -> Any:
        if context.queue == A:
            inside.set()
            assert go_on.wait(60)
            return context.retry() if fails else None
        return None

    consumer, port = started(arrow, listener, consume_timeout_s=60.0)
    arrow.workers[0].threads = []
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(0.1)
    assert inside.wait(60)
    arrow.time.advance(200)
    assert Counter(body for body, _, _ in port.seen("send_back")) == Counter(numbers(3))
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 3
    go_on.set()
    for thread in arrow.workers[0].threads:
        thread.join(60)
    arrow.time.advance(60)
    assert len(port.seen("send_back")) == 3
    assert consumer.stats().cached == 0


@pytest.mark.parametrize("fails", [False, True])
def test_only_late_rows_that_were_refused_are_sent_back_again(arrow: GroupBench, fails: bool) -> None:
    inside, go_on, taken = threading.Event(), threading.Event(), list[bytes]()

    def listener(batch: Any, context: Any) -> Any:
        if context.queue == A:
            inside.set()
            assert go_on.wait(60)
            return context.retry() if fails else None
        return None

    consumer, port = started(arrow, listener, consume_timeout_s=60.0)
    send_back = port.send_back

    def some(group: str, message: Any, *rest: Any) -> None:
        if message.body in refused:
            raise CallTimeout("late")
        send_back(group, message, *rest)
        taken.append(message.body)

    refused = [b"1", b"2"]
    port.send_back, port.send_to_retry = some, raising(CallTimeout("late"))
    arrow.workers[0].threads = []
    arrow.brokers.send(A, *numbers(4))  # the first answer has all of them
    arrow.time.advance(0.1)
    assert inside.wait(60)
    held = consumer._running.state.queues[A]
    arrow.time.advance(121)
    assert (taken, held.count, held.offsets) == ([b"0", b"3"], 2, (0, 3))
    refused.pop()
    arrow.time.advance(60)
    assert (taken, held.count) == ([b"0", b"3", b"2"], 1)
    if fails:
        refused.clear()
    go_on.set()
    for thread in arrow.workers[0].threads:
        thread.join(60)
    arrow.time.advance(10)
    assert taken == [b"0", b"3", b"2", *([b"1"] if fails else [])]
    assert (held.count, held.bytes, arrow.brokers.offsets[A]) == (0, 0, 4)


def test_late_rows_of_a_hanging_broker_do_not_block_other_work(arrow: GroupBench) -> None:
    """Offsets are stored on the same thread."""
    inside, go_on = threading.Event(), threading.Event()

    def listener(batch: Any, context: Any) -> None:
        if context.queue == A:
            inside.set()
            assert go_on.wait(60)

    consumer, port = started(arrow, listener, consume_timeout_s=60.0)
    arrow.workers[0].threads = []
    arrow.brokers.send(A, *numbers(32))
    arrow.time.advance(0.1)
    assert inside.wait(60)
    tries: list[bytes] = []

    def hangs(group: str, message: Any, *rest: Any) -> None:
        tries.append(message.body)
        arrow.time.now += 4
        raise CallTimeout("late")

    send_back, copy, port.send_back, port.send_to_retry = port.send_back, port.send_to_retry, hangs, hangs
    arrow.time.advance(121)
    assert set(tries) == {b"0", b"1"}
    assert consumer._running.state.queues[A].count == 32
    port.send_back, port.send_to_retry = send_back, copy
    arrow.time.advance(100)
    assert Counter(body for body, _, _ in port.seen("send_back")) == Counter(numbers(32))
    assert consumer._running.state.queues[A].count == 0
    go_on.set()
    for thread in arrow.workers[0].threads:
        thread.join(60)


def test_broadcasting_members_drop_rows_that_fail(
    arrow: GroupBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, port = started(
        arrow, lambda batch, context: context.retry(), clustering=False, offsets_folder=tmp_path / "offsets"
    )
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(1)
    assert (arrow.bodies(), port.seen("send_back"), consumer.stats().cached) == (numbers(3), [], 0)
    assert caplog.text.count("failed and is dropped") == 3


def test_limits_of_the_cache_count_rows(arrow: GroupBench) -> None:
    consumer, port = started(arrow)
    arrow.workers[0].held = True
    arrow.brokers.send(A, *numbers(3000))
    arrow.time.advance(5)
    assert 1000 < consumer.stats().cached <= 1000 + 32
    pulls = len(port.seen("pull"))
    arrow.time.advance(2)
    assert len([request for request in port.seen("pull")[pulls:] if request.queue == A]) == 0
    arrow.workers[0].let_go()
    arrow.time.advance(60)
    assert arrow.bodies() == numbers(3000)


def test_limits_of_the_cache_count_bytes(arrow: GroupBench) -> None:
    consumer, _ = started(arrow, thresholds=Thresholds(max_bytes=50_000))
    arrow.workers[0].held = True
    arrow.brokers.send(A, *(b"x" * 10_000 for _ in range(200)))
    arrow.time.advance(5)
    assert consumer.stats().cached < 70
    arrow.workers[0].let_go()
    arrow.time.advance(60)
    assert len(arrow.bodies()) == 200
    assert consumer._running.state.queues[A].bytes == 0


def test_members_get_every_row_once_while_one_joins_and_leaves(arrow: GroupBench) -> None:
    first, _ = started(arrow)
    sent: list[bytes] = []
    for round in range(4):
        for queue in arrow.brokers.topics["T"]:
            some = [b"%d %s" % (i, str(queue).encode()) for i in range(100 * round, 100 * round + 100)]
            arrow.brokers.send(queue, *some)
            sent += some
        arrow.time.advance(30)
        if round == 0:
            second, _ = arrow.start()
        if round == 2:
            second.stop(1)
    assert Counter(arrow.bodies()) == Counter(sent)
    assert {who for who, _, _ in arrow.got} == {"m1", "m2"}
    assert first.stats().cached == 0


def test_a_reset_forgets_rows(arrow: GroupBench) -> None:
    _, port = started(arrow)
    arrow.workers[0].held = True
    arrow.brokers.send(A, *numbers(10))
    arrow.time.advance(0.1)
    port.asked("a:1", ResetOffsets("T", {A: 8}))
    arrow.workers[0].let_go()
    arrow.time.advance(10)
    assert arrow.bodies() == [b"8", b"9"]
    assert arrow.brokers.offsets[A] == 10


def test_stop_returns_the_messages_of_rows_that_a_listener_has(arrow: GroupBench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def listener(batch: Any, context: Any) -> None:
        inside.set()
        assert go_on.wait(60)

    consumer, _ = started(arrow, listener)
    arrow.workers[0].threads, arrow.workers[0].unfinished_messages = [], True
    arrow.brokers.send(A, b"0")
    arrow.time.advance(0.1)
    assert inside.wait(60)
    assert [each.body for each in consumer.stop(0)] == [b"0"]
    go_on.set()


@pytest.mark.parametrize("ordered", [False, True])
def test_an_operators_single_message_is_a_batch(arrow: GroupBench, ordered: bool) -> None:
    _, port = arrow.start(ordered=ordered)
    port.asked("a:1", ConsumeDirectly(message(7, b"direct")))
    assert arrow.bodies() == [b"direct"]


def test_a_call_with_one_row_may_be_answered(arrow: GroupBench) -> None:
    started(arrow, lambda batch, context: context.reply(b"re"))
    arrow.brokers.send(A, b"request")
    arrow.time.advance(0.1)
    assert [(to.body, body) for to, body, _ in arrow.replies] == [(b"request", b"re")]


def test_settling_that_fails_lets_the_whole_call_come_again(arrow: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.Rows, "__getitem__", raising(MemoryError("no")))
    consumer, _ = started(arrow, lambda batch, context: context.retry() if len(arrow.got) < 3 else None)
    arrow.brokers.send(A, *numbers(1))
    arrow.brokers.send(A, *numbers(2, 1))
    arrow.time.advance(30)
    assert Counter(arrow.bodies())[b"0"] >= 2
    assert (consumer.stats().cached, arrow.brokers.offsets[A]) == (0, 3)


def test_each_row_is_traced(arrow: GroupBench) -> None:
    seen = Traces()
    arrow.traces = lambda: seen.traces

    def listener(batch: Any, context: Any) -> None:
        context.ack_index = 1

    started(arrow, listener)
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(0.1)
    assert [record[0] for record in seen.records] == ["SubBefore"] * 3 + ["SubAfter"] * 3
    assert seen.after == [("true", SUCCESS), ("true", SUCCESS), ("false", FAILED)]


def test_calls_have_no_spans_and_the_cache_is_observed(seen: Seen, arrow: GroupBench) -> None:
    consumer, _ = arrow.consumer(arrow=True)
    Instrumentation("g", "me", None).instrument_consumer(consumer, "_new_running")
    assert "_new_running" not in vars(consumer), "what has no context of a trace is not wrapped"
    consumer.subscribe("T")
    consumer.start(lambda batch, context: arrow.got.append(("me", bodies(batch)[0], -1)))
    arrow.time.advance(3)
    arrow.brokers.send(A, b"x")
    arrow.time.advance(1)
    assert (arrow.bodies(), seen.spans) == ([b"x"], ())
    assert [point.value for point in seen.points("rocketmq_consumer_cached_messages")] == [0]


def test_what_becomes_too_large_for_one_call_comes_in_several(
    arrow: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    assert arrow.rows is not None
    monkeypatch.setattr(arrow.rows, "_decode_columns", lambda parts: None)  # as it does when something is too large
    consumer, _ = started(arrow)
    arrow.brokers.send(A, *numbers(5))
    arrow.time.advance(1)
    assert arrow.bodies() == numbers(5)
    assert consumer.stats().cached == 0


def test_an_answer_that_cannot_be_decoded_now_is_pulled_again(
    arrow: GroupBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    errors, decoded = [MemoryError("no"), MemoryError("no")], RowsDecoder.__call__

    def decoding(self: RowsDecoder, parts: Sequence[FetchedPart]) -> Any:
        if errors:
            raise errors.pop()
        return decoded(self, parts)

    monkeypatch.setattr(RowsDecoder, "__call__", decoding)
    started(arrow)
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(10)
    assert (Counter(arrow.bodies()), errors) == (Counter(numbers(3)), [])
    assert "could not be decoded" in caplog.text


def test_closing_drops_what_waits(arrow: GroupBench) -> None:
    consumer, _ = started(arrow)
    arrow.workers[0].held = True
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(0.1)
    assert arrow.workers[0].waiting
    consumer.stop(0.1)
    for work in arrow.workers[0].waiting:  # a thread that had it in hand already
        work()
    assert arrow.bodies() == []
    assert arrow.brokers.offsets.get(A, 0) == 0


def test_the_first_call_with_a_batch_imports_nothing() -> None:
    """pandas, which pyarrow imports, takes a second: the listener would seem too slow for reads ahead."""
    script = (
        "import sys\n"
        "from rocketmq_spark import Consumer\n"
        "from rocketmq_spark.columnar.decode.rows import batch_of_messages\n"
        "from tests.consumer.messages import messages\n"
        "consumer = Consumer('127.0.0.1:1', 'g', arrow=True)\n"
        "before = set(sys.modules)\n"
        "batch = batch_of_messages(messages(0, 1))\n"
        "print(batch.num_rows, {name.partition('.')[0] for name in set(sys.modules) - before})\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2 set()\n", done.stderr
