"""Ordered listeners of record batches: a batch is what a message is to others, until brokers take only a part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.columnar.decode.rows import batch_of_messages
from rocketmq_spark.consumer import rows
from rocketmq_spark.consumer.rows import RowsDecoder
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model.membership import ResetOffsets
from tests.consumer.group import GroupBench
from tests.consumer.test_arrow import A, bodies, by_columns, numbers
from tests.helpers import raising


@pytest.fixture(params=["columns", "messages"])
def arrow(group: GroupBench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GroupBench:
    monkeypatch.setattr(rows, "MIN_COLUMNAR_ROWS", 1)
    how = by_columns if request.param == "columns" else lambda parts: None
    group.rows = RowsDecoder(3, how, batch_of_messages)
    return group


def started(group: GroupBench, listener: Any = None, **how: Any) -> Any:
    """A member that has its locks and pulls already."""
    consumer, port = group.start(listener, ordered=True, **how)
    group.time.advance(3)
    return consumer, port


def test_batches_of_a_queue_come_one_after_the_other(arrow: GroupBench) -> None:
    """Also of what comes while the listener has a batch, and threads are free for it."""
    calls: list[list[bytes]] = []
    running, most = [0], [0]

    def listener(batch: Any, context: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        calls.append(bodies(batch))
        if len(calls) == 1:
            arrow.brokers.send(A, *numbers(2, 7))
        arrow.time.run_due()
        running[0] -= 1

    consumer, _ = started(arrow, listener)
    arrow.brokers.send(A, *numbers(7))
    arrow.time.advance(1)
    assert calls == [numbers(3), numbers(3, 3), numbers(1, 6), numbers(2, 7)]
    assert most == [1]
    assert (consumer.stats().consumed, consumer.stats().cached) == (9, 0)
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 9


@pytest.mark.parametrize("how", ["suspend", "raise"])
def test_failed_batch_comes_again_after_a_pause_before_others(arrow: GroupBench, how: str) -> None:
    def listener(batch: Any, context: Any) -> Any:
        if b"0" in bodies(batch) and len(arrow.got) < 9:
            return context.suspend() if how == "suspend" else raising(RuntimeError("no"))()
        return None

    consumer, port = started(arrow, listener, suspend_time_s=2.0)
    arrow.brokers.send(A, *numbers(4))
    arrow.time.advance(1.9)
    assert arrow.bodies() == numbers(3)
    arrow.time.advance(0.2)
    assert arrow.bodies() == 2 * numbers(3)
    arrow.time.advance(2)
    assert arrow.bodies() == [*(3 * numbers(3)), b"3"]
    assert (consumer.stats().failed, consumer.stats().consumed, port.seen("send_back")) == (6, 4, [])
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 4


def test_rows_become_dead_letters_after_their_last_attempt(arrow: GroupBench) -> None:
    consumer, _ = started(
        arrow, lambda batch, context: context.suspend() if b"0" in bodies(batch) else None, max_retries=2
    )
    arrow.brokers.send(A, *numbers(4))
    arrow.time.advance(10)
    assert arrow.bodies() == [*(3 * numbers(3)), b"3"]
    assert [(dead.body, dead.reconsume_times) for dead in arrow.brokers.dead] == [(body, 2) for body in numbers(3)]
    assert consumer.stats().cached == 0
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 4


def test_rows_refused_as_dead_letters_repeat_before_later_ones(arrow: GroupBench) -> None:
    consumer, port = started(
        arrow, lambda batch, context: context.suspend() if b"3" not in bodies(batch) else None, max_retries=0
    )
    refused = [b"0", b"2"]
    to_retry = port.send_to_retry

    def copied(group: str, message: Any, *rest: Any) -> None:
        if message.body in refused:
            raise CallTimeout("late")
        to_retry(group, message, *rest)

    port.send_to_retry, port.send_back = copied, raising(CallTimeout("late"))
    arrow.brokers.send(A, *numbers(4))
    arrow.time.advance(0.5)
    held = consumer._running.state.queues[A]
    assert [dead.body for dead in arrow.brokers.dead] == [b"1"]
    assert (held.count, held.offsets) == (3, (0, 3))
    arrow.time.advance(2)
    assert arrow.bodies()[3:] == [b"0"] * (len(arrow.bodies()) - 3)
    refused.remove(b"0")
    arrow.time.advance(2)
    assert [dead.body for dead in arrow.brokers.dead] == [b"1", b"0"]
    assert arrow.bodies()[-1] == b"2"
    refused.remove(b"2")
    arrow.time.advance(2)
    assert [dead.body for dead in arrow.brokers.dead] == [b"1", b"0", b"2"]
    assert arrow.bodies()[-1] == b"3"
    arrow.time.advance(10)
    assert (held.count, held.bytes, arrow.brokers.offsets[A]) == (0, 0, 4)


@pytest.mark.parametrize("word", ["commit", "rollback"])
def test_manual_commit_ends_batches_and_rollback_repeats_them(arrow: GroupBench, word: str) -> None:
    def listener(batch: Any, context: Any) -> Any:
        if b"6" in bodies(batch):
            return getattr(context, word if arrow.bodies().count(b"6") == 1 else "commit")()
        return None

    started(arrow, listener, auto_commit=False)
    arrow.brokers.send(A, *numbers(7))
    arrow.time.advance(0.5)
    arrow.time.advance(20)
    assert arrow.bodies() == numbers(7) * (1 if word == "commit" else 2)
    assert arrow.brokers.offsets[A] == 7


def test_dead_rows_are_not_repeated_by_a_rollback(arrow: GroupBench) -> None:
    def listener(batch: Any, context: Any) -> Any:
        if b"0" in bodies(batch):
            return context.suspend()
        return context.rollback() if arrow.bodies().count(b"3") == 1 else context.commit()

    started(arrow, listener, auto_commit=False, max_retries=0)
    arrow.brokers.send(A, *numbers(4))
    arrow.time.advance(20)
    assert arrow.bodies() == [*numbers(4), b"3"]
    assert [dead.body for dead in arrow.brokers.dead] == numbers(3)
    assert arrow.brokers.offsets[A] == 4


def test_a_reset_during_a_call_forgets_the_batch(arrow: GroupBench) -> None:
    def listener(batch: Any, context: Any) -> Any:
        if len(arrow.got) == 3:
            port.asked("a:1", ResetOffsets("T", {A: 5}))
        return context.suspend() if b"0" in bodies(batch) else None

    consumer, port = started(arrow, listener, max_retries=0)
    port.send_to_retry = port.send_back = raising(CallTimeout("late"))
    arrow.brokers.send(A, *numbers(7))
    arrow.time.advance(30)
    assert arrow.bodies() == [*numbers(3), b"5", b"6"]
    assert (consumer.stats().cached, arrow.brokers.offsets[A]) == (0, 7)


def test_ordered_broadcasting_drops_a_batch_after_last_attempt(
    arrow: GroupBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    consumer, _ = started(
        arrow, lambda batch, context: context.suspend(), clustering=False, max_retries=1, offsets_folder=tmp_path / "o"
    )
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(10)
    assert (arrow.bodies(), consumer.stats().cached) == (2 * numbers(3), 0)
    assert caplog.text.count("failed and is dropped") == 3
