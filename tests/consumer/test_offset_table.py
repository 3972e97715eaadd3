from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.consumer.member_state import OffsetTable
from tests.models import SteppingMachine, model_test, step
from tests.queues import q
from tests.scale import examples

A, B = q("a:0"), q("a:1")


def test_an_offset_only_grows_unless_somebody_knows_better() -> None:
    table = OffsetTable()
    assert table.get(A) is None
    table.force(A, 1024)
    table.force(A, 1023)
    assert table.get(A) == 1023
    table.raise_to(A, 1022)
    assert table.get(A) == 1023
    table.raise_to(A, 1024)
    assert table.get(A) == 1024


def test_no_offset_is_below_zero() -> None:
    with pytest.raises(ValueError, match="is -1; expected a number of at least 0"):
        OffsetTable().force(A, -1)


def test_what_was_told_is_told_again_only_when_it_changed() -> None:
    table = OffsetTable()
    table.force(A, 1)
    table.force(B, 2)
    assert table.changed_offsets() == {A: 1, B: 2}
    table.mark_committed({A: 1})
    assert table.changed_offsets() == {B: 2}
    table.force(A, 0)
    assert table.changed_offsets() == {A: 0, B: 2}
    table.mark_committed({A: 1, B: 2})  # the one that was under way before
    assert table.changed_offsets() == {A: 0}
    table.mark_committed({q("z:0"): 1})
    assert table.all_offsets() == {A: 0, B: 2}


def test_queues_of_others_are_forgotten() -> None:
    table = OffsetTable()
    table.force(A, 1)
    table.force(B, 2)
    table.retain({B})
    assert table.all_offsets() == {B: 2}


class TableMachine(SteppingMachine):
    """Against two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OffsetTable()
        self.values: dict[object, int] = {}
        self.reported: dict[object, int] = {}

    queues = st.sampled_from([A, B])
    numbers = st.integers(0, 9)

    @step(queue=queues, offset=numbers)
    def raise_to(self, queue, offset):
        self.did["raised"] += offset > self.values.get(queue, 99)
        self.did["kept"] += offset < self.values.get(queue, 0)
        self.table.raise_to(queue, offset)
        self.values[queue] = max(offset, self.values.get(queue, 0))

    @step(queue=queues, offset=numbers)
    def put(self, queue, offset):
        self.table.force(queue, offset)
        self.values[queue] = offset
        self.reported.pop(queue, None)

    @step(queue=queues)
    def forget(self, queue):
        self.table.forget(queue)
        self.values.pop(queue, None)
        self.reported.pop(queue, None)

    @step()
    def tell(self):
        self.did["told"] += bool(self.table.changed_offsets())
        self.table.mark_committed(self.table.changed_offsets())
        self.reported = dict(self.values)

    @invariant()
    def agrees(self):
        assert self.table.all_offsets() == self.values
        assert self.table.changed_offsets() == {q: v for q, v in self.values.items() if self.reported.get(q) != v}


TestTable = model_test(
    TableMachine,
    settings(max_examples=examples(300), stateful_step_count=30, deadline=None),
    raised=50,
    kept=50,
    told=50,
)
