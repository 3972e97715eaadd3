from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.errors import OptionError
from rocketmq_spark.producer.accumulator import (
    MAX_KEYWORD_BYTES,
    Accumulator,
    BatchEntry,
    BatchKey,
    BatchLimits,
    MessageBatch,
)
from tests.models import SteppingMachine, model_test, step
from tests.queues import q


def key(
    topic: str = "T", queue: Any = None, wait: bool = True, tag: str | None = None, waits: bool = False
) -> BatchKey:
    return BatchKey(topic, queue, wait, tag, waits)


def entry(body: int = 5, name: str = "m", keys: tuple[str, ...] = (), overhead: int = 0) -> BatchEntry:
    return BatchEntry(b"x" * (body + overhead), body, name, keys, name)


def ids(batches: list[MessageBatch]) -> list[list[str]]:
    return [[e.msg_id for e in batch.entries] for batch in batches]


def test_the_size_must_be_exceeded_not_just_reached() -> None:
    accumulator = Accumulator(BatchLimits(max_bytes=10))
    for name in "ab":
        accumulator.add(key(), entry(5, name), None, 0)
        assert not accumulator.has_ready_batch(0)
    accumulator.add(key(), entry(5, "c"), None, 0)
    assert accumulator.has_ready_batch(0)
    assert ids(accumulator.take_ready(0)) == [["a", "b", "c"]]


def test_and_2_13_a_batch_is_due_at_its_age() -> None:
    accumulator = Accumulator(BatchLimits(max_delay_ms=10))
    accumulator.add(key(), entry(name="a"), None, 100)
    accumulator.add(key(), entry(name="b"), None, 105)
    assert not accumulator.has_ready_batch(109)
    assert accumulator.take_ready(109) == []
    assert accumulator.has_ready_batch(110)
    assert ids(accumulator.take_ready(110)) == [["a", "b"]]
    assert accumulator.take_ready(10**6) == []


def test_messages_above_total_limit_go_directly_and_uncounted() -> None:
    accumulator = Accumulator(BatchLimits(total_max_bytes=1000))
    first = accumulator.add(key(), entry(1000), None, 0)
    assert first is not None
    for _ in range(5):
        assert accumulator.add(key(tag="other"), entry(10), None, 0) is None
    assert accumulator.buffered_bytes == 1000
    for batch in accumulator.take_ready(10):
        assert accumulator.buffered_bytes == 1000  # until the answer is there
        accumulator.release(batch)
        accumulator.release(batch)
    assert accumulator.buffered_bytes == 0
    assert accumulator.add(key(), entry(10), None, 20) is not None


def test_sync_and_async_sends_have_separate_batches() -> None:
    accumulator = Accumulator()
    accumulator.add(key(waits=True), entry(name="sync"), None, 0)
    accumulator.add(key(waits=False), entry(name="async"), None, 0)
    assert ids(accumulator.take_ready(10)) == [["sync"], ["async"]]


def test_an_explicit_queue_is_part_of_the_key() -> None:
    accumulator = Accumulator()
    for queue in (None, q("a:0"), q("a:1"), q("a:0")):
        accumulator.add(key(queue=queue), entry(name=str(queue)), None, 0)
    assert [len(batch.entries) for batch in accumulator.take_ready(10)] == [1, 2, 1]


def test_what_is_sent_one_by_one_has_few_in_a_batch() -> None:
    accumulator = Accumulator(BatchLimits(max_messages_per_queue=3))
    for queue in (None, q("a:0")):
        for _ in range(7):
            accumulator.add(key(queue=queue), entry(), None, 0)
    assert [len(batch.entries) for batch in accumulator.take_ready(0)] == [3, 3]
    assert [len(batch.entries) for batch in accumulator.take_ready(10)] == [7, 1]


def test_the_number_of_open_batches_is_bounded() -> None:
    accumulator = Accumulator(BatchLimits(max_open_batches=100))
    taken = [accumulator.add(key(tag=f"tag-{i}"), entry(), None, 0) is not None for i in range(10_000)]
    assert sum(taken) == 100
    assert accumulator.open_count == 100
    assert accumulator.buffered_bytes == 500
    assert accumulator.add(key(tag="tag-3"), entry(), None, 0) is not None  # joins one that is open
    assert len(accumulator.take_ready(10)) == 100
    assert accumulator.open_count == 0


def test_nothing_of_a_batch_stays_behind() -> None:
    accumulator = Accumulator()
    for round_ in range(50):
        for i in range(20):
            accumulator.add(key(tag=f"{round_}-{i}"), entry(), None, round_ * 100)
        for batch in accumulator.take_ready(round_ * 100 + 10):
            accumulator.release(batch)
    assert (accumulator.open_count, accumulator.buffered_bytes) == (0, 0)
    assert not accumulator.has_ready_batch(10**9)
    assert [len(getattr(accumulator, name)) for name in ("_batches_by_age", "closed_batches", "_taken_batches")] == [
        0,
        0,
        0,
    ]


def test_batch_keeps_its_key_its_time_and_who_started_it() -> None:
    accumulator = Accumulator()
    accumulator.add(key(wait=False), entry(), "first", 7)
    accumulator.add(key(wait=False), entry(), "second", 9)
    (batch,) = accumulator.take_ready(17)
    assert (batch.owner, batch.created_ms, batch.key.topic, batch.key.wait_store_ok) == ("first", 7, "T", False)


def test_one_tag_per_batch_and_none_is_a_tag_of_its_own() -> None:
    accumulator = Accumulator()
    for name, tag in (("1", "A"), ("2", None), ("3", "B"), ("4", "A")):
        accumulator.add(key(tag=tag), entry(name=name), None, 0)
    assert ids(accumulator.take_ready(10)) == [["1", "4"], ["2"], ["3"]]


@pytest.mark.parametrize("waits", [True, False])
def test_keys_are_united_in_both_modes_in_the_order_seen(waits: bool) -> None:
    accumulator = Accumulator()
    for keys in (("k2", "k1"), (), ("k1", "k3 k2"), ("k4",)):
        accumulator.add(key(waits=waits), entry(keys=keys), None, 0)
    (batch,) = accumulator.take_ready(10)
    assert list(batch.keywords) == ["k2", "k1", "k3", "k4"]


def test_waiting_for_the_store_is_part_of_the_key() -> None:
    accumulator = Accumulator()
    for wait in (True, False, True):
        accumulator.add(key(wait=wait), entry(), None, 0)
    assert [len(batch.entries) for batch in accumulator.take_ready(10)] == [2, 1]


def test_the_encoded_size_is_bounded_although_bodies_are_tiny() -> None:
    accumulator = Accumulator(BatchLimits(max_encoded_bytes=100))
    for name in "abc":
        accumulator.add(key(), entry(1, name, overhead=39), None, 0)
    assert ids(accumulator.take_ready(0)) == [["a", "b"]]
    assert accumulator.add(key(), entry(1, "huge", overhead=100), None, 0) is None
    assert ids(accumulator.take_ready(10)) == [["c"]]


def test_the_joined_keys_are_bounded_too() -> None:
    accumulator = Accumulator()
    long = "k" * (MAX_KEYWORD_BYTES // 2 - 2)
    for name, word in (("a", "1"), ("b", "2"), ("c", "2"), ("d", "3")):
        accumulator.add(key(), entry(name=name, keys=(word + long,)), None, 0)
    assert ids(accumulator.take_ready(0)) == [["a", "b", "c"]]
    assert accumulator.add(key(), entry(keys=("k" * MAX_KEYWORD_BYTES,)), None, 0) is None
    assert accumulator.add(key(tag="t" * MAX_KEYWORD_BYTES), entry(keys=("k",)), None, 0) is None
    assert accumulator.open_count == 0
    assert ids(accumulator.take_ready(0)) == [["d"]]


def test_limits_may_change_while_batches_are_open() -> None:
    accumulator = Accumulator(BatchLimits(max_delay_ms=1000))
    accumulator.add(key(tag="slow"), entry(name="slow"), None, 0)
    accumulator.limits = BatchLimits(max_delay_ms=10)
    accumulator.add(key(tag="fast"), entry(name="fast"), None, 0)
    assert ids(accumulator.take_ready(10)) == [["fast"]]
    assert ids(accumulator.take_ready(1000)) == [["slow"]]


def test_close_all_lets_everything_leave_at_once() -> None:
    accumulator = Accumulator()
    accumulator.add(key(tag="a"), entry(name="a"), None, 0)
    accumulator.add(key(tag="b"), entry(name="b"), None, 1)
    accumulator.close_all()
    assert ids(accumulator.take_ready(1)) == [["a"], ["b"]]


def test_batches_of_one_key_leave_in_order_of_their_start() -> None:
    accumulator = Accumulator(BatchLimits(max_bytes=10))
    accumulator.add(key(), entry(20, "first"), None, 105)
    accumulator.add(key(), entry(20, "second"), None, 100)
    assert ids(accumulator.take_ready(105)) == [["first"], ["second"]]


def test_batches_taken_together_leave_oldest_first() -> None:
    accumulator = Accumulator(BatchLimits(max_bytes=10))
    accumulator.add(key(tag="old"), entry(1, "old"), None, 100)
    accumulator.add(key(tag="young"), entry(20, "young"), None, 105)
    accumulator.close_all()
    assert ids(accumulator.take_ready(105)) == [["old"], ["young"]]


def test_the_ranges_of_javas_setters() -> None:
    BatchLimits(1, 1, 1)
    BatchLimits(2 * 1024 * 1024, 30_000, 1)
    with pytest.raises(OptionError) as e:
        BatchLimits(2 * 1024 * 1024 + 1, 30_001, 0)
    for text in ("'batchMaxBytes' is 2097153; expected between 1B and 2MB",
                 "'batchMaxDelay' is 30001; expected between 1ms and 30s",
                 "'totalBatchMaxBytes' is 0; expected at least 1 byte"):  # fmt: skip
        assert text in str(e.value)


class AccumulatorModel(SteppingMachine):
    """Against a list of messages per key that leaves as a whole: nothing is lost, doubled, reordered or late."""

    LIMITS = BatchLimits(max_bytes=20, max_delay_ms=10, total_max_bytes=150, max_encoded_bytes=60, max_open_batches=3)

    def __init__(self) -> None:
        super().__init__()
        self.accumulator = Accumulator(self.LIMITS)
        self.now = 0
        self.number = 0
        self.open: dict[BatchKey, tuple[int, list[tuple[int, int, str]]]] = {}
        self.out: list[MessageBatch] = []
        self.left: dict[BatchKey, list[str]] = {}
        self.sent: dict[BatchKey, list[str]] = {}

    def close(self, k: BatchKey) -> None:
        self.sent.setdefault(k, []).extend(name for _, _, name in self.open.pop(k)[1])

    @step(tag=st.sampled_from([None, "a", "b", "c"]), body=st.integers(1, 25), overhead=st.integers(0, 40))
    def add(self, tag: str | None, body: int, overhead: int) -> None:
        self.number += 1
        k, name = key(tag=tag), f"m{self.number}"
        held = self.accumulator.buffered_bytes
        if self.accumulator.add(k, entry(body, name, overhead=overhead), None, self.now) is None:
            assert held >= 150 or body + overhead > 60 or (len(self.open) >= 3 and k not in self.open)
            return
        if k in self.open and sum(size for _, size, _ in self.open[k][1]) + body + overhead > 60:
            self.close(k)
        waiting = self.open.setdefault(k, (self.now, []))[1]
        waiting.append((body, body + overhead, name))
        if sum(b for b, _, _ in waiting) > 20:
            self.close(k)

    @step(ms=st.integers(0, 12))
    def wait(self, ms: int) -> None:
        self.now += ms

    @step()
    def take(self) -> None:
        for k in [k for k, (created, _) in self.open.items() if created + 10 <= self.now]:
            self.close(k)
        batches = self.accumulator.take_ready(self.now)
        for batch in batches:
            self.left.setdefault(batch.key, []).extend(e.msg_id for e in batch.entries)
            assert batch.encoded_bytes <= 60
        self.out += batches
        assert self.left == self.sent
        assert not self.accumulator.has_ready_batch(self.now)

    @step(which=st.integers(0, 9))
    def answer(self, which: int) -> None:
        """Of what has left, or else of what leaves now."""
        if not self.out:
            self.now += 10
            self.take()
        if self.out:
            self.did["answered"] += 1
            self.accumulator.release(self.out.pop(which % len(self.out)))

    @invariant()
    def bounded(self) -> None:
        assert self.accumulator.open_count <= 3
        assert self.accumulator.buffered_bytes < 150 + 65
        if not self.out and not self.open and self.left == self.sent:
            self.did["released"] += bool(self.left)
            assert self.accumulator.buffered_bytes == 0


TestAccumulatorModel = model_test(
    AccumulatorModel, settings(max_examples=60, stateful_step_count=40, deadline=None), answered=50, released=50
)
