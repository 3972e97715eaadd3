"""What is still missing: every offset stands in one place, is given out in order, and is lost or received once."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.pending import PendingOffsets, PendingRange
from tests.models import SteppingMachine, model_test, step


def ranges(*bounds: tuple[int, int]) -> list[OffsetRange]:
    return [OffsetRange(MessageQueue("t", "b", i), start, end) for i, (start, end) in enumerate(bounds)]


def test_lowest_first_and_cut_to_the_count() -> None:
    missing = PendingOffsets(ranges((5, 20), (0, 3), (7, 7)))
    assert missing.start_pulls(0, 8, 2) == [PendingRange(0, 5, 13), PendingRange(0, 13, 20)]
    assert missing.start_pulls(2, 8, 5) == [PendingRange(1, 0, 3)]
    assert (missing.has_unrequested_offsets, missing.pulls_in_flight, bool(missing)) == (False, 3, True)
    assert missing.finish_pull(0) == PendingRange(0, 5, 13)
    assert missing.finish_pull(0) is None
    assert missing.first_pending_position() == (0, 13)


def test_nothing_to_read_is_nothing_missing() -> None:
    missing = PendingOffsets(ranges((7, 7), (9, 3)))
    assert not missing
    assert missing.first_pending_position() == (2, 0)


def test_parked_slots_come_back_when_they_are_due() -> None:
    missing = PendingOffsets(ranges((0, 20)))
    late, soon = missing.start_pulls(1, 10, 2)
    for opaque in (1, 2):
        missing.finish_pull(opaque)
    missing.retry_at(late, 5.0)
    missing.retry_at(soon, 3.0)
    assert (missing.next_retry_at, missing.has_unrequested_offsets) == (3.0, False)
    missing.release_due_ranges(4.0)
    assert (missing.next_retry_at, missing.start_pulls(3, 10)) == (5.0, [soon])
    missing.release_due_ranges(5.0)
    assert (missing.next_retry_at, missing.start_pulls(4, 10)) == (None, [late])


def test_what_is_cut_is_what_was_missing_with_neighbours_joined() -> None:
    missing = PendingOffsets(ranges((0, 100), (0, 100)))
    for i in range(4):
        missing.start_pulls(i, 10)  # 0-40 under way, 40-100 to do
    missing.finish_pull(1)  # 10-20 is there
    parked = missing.finish_pull(2)
    assert parked is not None
    missing.retry_at(parked, 9.0)
    assert missing.remove(PendingRange(0, 5, 60)) == [PendingRange(0, 5, 10), PendingRange(0, 20, 60)]
    assert missing.finish_pull(0) is None  # was cut: its answer is of no use
    assert missing.finish_pull(3) is None
    assert missing.start_pulls(9, 1000, 3) == [PendingRange(0, 0, 5), PendingRange(0, 60, 100), PendingRange(1, 0, 100)]
    assert missing.next_retry_at is None
    assert missing.remove(PendingRange(0, 5, 60)) == []


def test_waiting_ranges_return_soonest_first_after_others_go() -> None:
    missing = PendingOffsets(ranges((0, 30)))
    missing.start_pulls(0, 10, 3)
    for opaque, due in enumerate((1.0, 9.0, 3.0)):
        slot = missing.finish_pull(opaque)
        assert slot is not None
        missing.retry_at(slot, due)
    assert missing.remove(PendingRange(0, 0, 10)) == [PendingRange(0, 0, 10)]
    assert missing.next_retry_at == 3.0
    missing.release_due_ranges(3.0)
    assert (missing.next_retry_at, missing.start_pulls(3, 10)) == (9.0, [PendingRange(0, 20, 30)])


def test_what_is_claimed_ends_before_what_is_not_missing() -> None:
    missing = PendingOffsets(ranges((0, 40)))
    slots = missing.start_pulls(0, 10, 4)
    for opaque in (0, 2):
        missing.finish_pull(opaque)  # 20 to 30 is there already
    assert missing.extend(slots[0], 40) == PendingRange(0, 0, 20)
    assert missing.start_pulls(9, 100) == [PendingRange(0, 30, 40)]
    assert missing.finish_pull(3) is None


class AgainstASet(SteppingMachine):
    """Against a set of (range, offset) pairs."""

    @initialize(bounds=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), min_size=1, max_size=3))
    def start(self, bounds: list[tuple[int, int]]) -> None:
        self.missing = PendingOffsets(ranges(*bounds))
        self.wanted = {(i, n) for i, (start, end) in enumerate(bounds) for n in range(start, end)}
        self.opaque = 0
        self.out: dict[int, PendingRange] = {}
        self.due: dict[tuple[int, int], float] = {}
        self.now = 0.0

    @step(count=st.integers(1, 20), max_slots=st.integers(1, 4))
    def send(self, count: int, max_slots: int) -> None:
        if not self.missing.has_unrequested_offsets:
            return
        slots = self.missing.start_pulls(self.opaque + 1, count, max_slots)
        assert 1 <= len(slots) <= max_slots
        for slot in slots:
            assert 0 < slot.end - slot.start <= count
            for other in self.out.values():
                assert slot[0] != other[0] or slot.end <= other.start or other.end <= slot.start
            self.opaque += 1
            self.out[self.opaque] = slot

    def pick(self, data: st.DataObject) -> PendingRange | None:
        """One that is out, or else of what may be asked for now."""
        if not self.out:
            self.send(10, 2)
        if not self.out:
            return None
        opaque = data.draw(st.sampled_from(sorted(self.out)))
        slot = self.missing.finish_pull(opaque)
        assert slot == self.out.pop(opaque)
        return slot

    @step(data=st.data(), share=st.floats(0, 1))
    def receive(self, data: st.DataObject, share: float) -> None:
        if (slot := self.pick(data)) is None:
            return
        self.did["receive"] += 1
        until = slot.start + int((slot.end - slot.start) * share)
        received = {(slot[0], n) for n in range(slot.start, until)}
        assert received <= self.wanted
        self.wanted -= received
        self.missing.add(slot._replace(start=until))

    @step(data=st.data(), behind=st.integers(0, 20))
    def receive_more(self, data: st.DataObject, behind: int) -> None:
        if (slot := self.pick(data)) is None:
            return
        self.did["receive_more"] += 1
        got = self.missing.extend(slot, slot.end + behind)
        assert got.start == slot.start
        assert slot.end <= got.end <= slot.end + behind
        claimed = {(got[0], n) for n in range(got.start, got.end)}
        assert claimed <= self.wanted
        # All that is missing next to it.
        assert got.end == slot.end + behind or (slot[0], got.end) not in self.wanted
        self.wanted -= claimed
        came = range(slot.start, slot.end + behind)
        self.due = {place: due for place, due in self.due.items() if place[0] != slot[0] or place[1] not in came}
        for opaque, other in list(self.out.items()):
            if other[0] == slot[0] and (other.start in came or other.end - 1 in came):
                assert self.missing.finish_pull(opaque) is None
                del self.out[opaque]

    @step(data=st.data(), pause=st.floats(0, 5))
    def refuse(self, data: st.DataObject, pause: float) -> None:
        if (slot := self.pick(data)) is None:
            return
        self.did["refuse"] += 1
        self.missing.retry_at(slot, self.now + pause)
        self.due.update(dict.fromkeys(((slot[0], n) for n in range(slot.start, slot.end)), self.now + pause))

    @step(step=st.floats(0, 5))
    def time_goes_on(self, step: float) -> None:
        self.now += step
        self.missing.release_due_ranges(self.now)
        self.due = {place: due for place, due in self.due.items() if due > self.now}

    @step()
    def connection_breaks(self) -> None:
        self.missing.on_connection_lost()
        self.out.clear()

    @step(number=st.integers(0, 2), start=st.integers(0, 60), size=st.integers(0, 60))
    def lose(self, number: int, start: int, size: int) -> None:
        cut = self.missing.remove(PendingRange(number, start, start + size))
        gone = {(slot[0], n) for slot in cut for n in range(slot.start, slot.end)}
        assert gone == {(i, n) for i, n in self.wanted if i == number and start <= n < start + size}
        assert all(a.end < b.start for a, b in itertools.pairwise(cut))
        self.wanted -= gone
        self.due = {place: due for place, due in self.due.items() if place not in gone}
        self.out = {
            opaque: slot
            for opaque, slot in self.out.items()
            if slot[0] != number or slot.end <= start or start + size <= slot.start
        }

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not hasattr(self, "missing"):
            return
        assert bool(self.missing) == bool(self.wanted)
        assert self.missing.pulls_in_flight == len(self.out)
        assert self.missing.offsets_in_flight == sum(slot.end - slot.start for slot in self.out.values()), (
            "else reads slow down"
        )
        assert self.missing.next_retry_at == min(self.due.values(), default=None)
        if self.wanted:
            assert self.missing.first_pending_position() == min(self.wanted)


TestMissing = model_test(
    AgainstASet,
    settings(max_examples=60, stateful_step_count=30, deadline=None),
    receive=20,
    receive_more=20,
    refuse=20,
)
