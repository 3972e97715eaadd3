"""What nodes say of a queue is true whatever happens, and nothing is lost that another one leaves out."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.delay.release import (
    Progress,
    QueueCheckpoint,
    advanced_progress,
    newest_store_ms_before,
    resumed_checkpoint,
)
from tests.cli.test_tail import MESSAGE
from tests.models import SteppingMachine, model_test, step
from tests.scale import examples


class QueueMachine(SteppingMachine):
    """One queue of envelopes; its node may lose its disk, stop and come back to it, or give the queue to another one. Its clock
    may be ahead or behind for a while.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000
        self.ahead = 0
        self.due: list[int] = []  # of each envelope by offset
        self.sent: list[int] = []
        self.committed: Progress | None = None
        self.begin_with(None)

    def begin_with(self, seen: QueueCheckpoint | None, held: set[int] | None = None) -> None:
        self.held = set(held or ())
        if self.committed is not None and (seen is None or seen.committed != self.committed):
            left = {offset for offset in self.held if not self.committed.is_done(offset, self.due[offset])}
            self.did["left_out"] += len(self.held) - len(left)
            self.held = left
        self.seen = resumed_checkpoint(seen, self.committed, 0)
        self.proven_progress, self.ended = self.seen.committed, 0

    @property
    def clock(self) -> int:
        return max(1, self.now + self.ahead)

    @step(delays=st.lists(st.integers(-30, 60), min_size=1, max_size=5))
    def send(self, delays: list[int]) -> None:
        """Some come late: they were due before they are there."""
        self.due += [self.now + delay for delay in delays]

    @step(count=st.integers(1, 4))
    def read(self, count: int) -> None:
        for offset in range(self.seen.read_end, min(len(self.due), self.seen.read_end + count)):
            if not self.proven_progress.is_done(offset, self.due[offset]):
                self.held.add(offset)
            self.seen = self.seen._replace(read_end=offset + 1)

    @step(seconds=st.integers(0, 40), most=st.integers(0, 3))
    def pass_time(self, seconds: int, most: int) -> None:
        """What is due is sent, or not all of it yet."""
        self.now += seconds
        for offset in sorted((o for o in self.held if self.due[o] <= self.clock), key=lambda o: self.due[o])[:most]:
            self.held.remove(offset)
            self.ended = max(self.ended, self.due[offset])
            self.sent.append(offset)
            self.did["sent"] += 1

    @step()
    def tell(self) -> None:
        oldest, clock = min(self.held, default=self.seen.read_end), self.clock
        first, ended = (
            min((self.due[o] for o in self.held), default=None),
            max(self.ended, self.proven_progress.done_ms),
        )
        lowered, has_caught_up = self.seen.committed.done_ms > clock, self.seen.read_end >= self.seen.committed.read_end
        self.committed = advanced_progress(self.seen.committed, oldest, self.seen.read_end, first, ended, clock)
        self.seen = self.seen._replace(committed=self.committed)
        self.did["told_of_some"] += bool(self.held)
        assert self.committed.done_ms <= clock
        if has_caught_up and (first is None or first > clock):
            self.did["lowered"] += lowered
            left = [o for o in self.sent if o < self.seen.read_end and self.due[o] <= min(clock, self.ended)]
            assert all(self.committed.is_done(offset, self.due[offset]) for offset in left), "a next owner repeats them"

    @step()
    def be_ahead_for_a_turn(self) -> None:
        self.ahead = 500
        self.read(4)
        self.pass_time(0, 2)
        self.tell()
        self.ahead = 0
        self.tell()

    @step(ahead=st.sampled_from((0, -50, 30, 500)))
    def set_the_clock(self, ahead: int) -> None:
        self.ahead = ahead

    @step()
    def lose_the_disk(self) -> None:
        self.did["disks"] += bool(self.held)
        self.begin_with(None)

    @step()
    def restart(self) -> None:
        self.begin_with(self.seen, self.held)

    @step(data=st.data())
    def go_to_another_and_come_back(self, data: st.DataObject) -> None:
        """The other one does some of the work meanwhile, and this one still has its disk."""
        mine, held = self.seen, self.held
        self.begin_with(None)
        self.read(data.draw(st.integers(1, 4)))
        self.pass_time(data.draw(st.integers(0, 40)), 3)
        if data.draw(st.booleans()):
            self.tell()
        self.begin_with(mine, held)

    @invariant()
    def what_is_told_is_true(self) -> None:
        if self.committed is not None:
            said = {offset for offset, due in enumerate(self.due) if self.committed.is_done(offset, due)}
            assert said <= set(self.sent)

    def teardown(self) -> None:
        self.read(len(self.due))
        self.ahead = 0
        self.pass_time(1000, len(self.due))
        assert set(self.sent) == set(range(len(self.due)))


test_3_f_3_g_nothing_is_lost_and_no_claim_is_false = model_test(
    QueueMachine,
    settings(max_examples=examples(300), stateful_step_count=30, deadline=None),
    sent=100,
    told_of_some=10,
    left_out=5,
    disks=5,
    lowered=5,
)


def test_a_node_that_takes_over_leaves_out_what_was_sent() -> None:
    """Of a queue whose first message waits for ten days, everything behind it was sent."""
    told = Progress(0, 0, 0).followed_by(Progress(0, 1000, 5000))
    assert resumed_checkpoint(None, told, 0) == QueueCheckpoint(0, 0, told)
    assert [told.is_done(999, 5000), told.is_done(999, 5001), told.is_done(1000, 5000)] == [True, False, False]
    assert not Progress(0, 1000, 0).is_done(5, 0), "a body that is no envelope is due at 0, and may still wait"


def test_what_is_said_never_goes_back() -> None:
    """An envelope that came late put the time back for a moment; the next telling says more than both."""
    before = Progress(3, 10, 5000)
    assert before.followed_by(Progress(3, 12, 4000)) == before
    assert before.followed_by(Progress(5, 9, 6000)) == Progress(5, 10, 5000)
    assert before.followed_by(Progress(5, 12, 6000)) == Progress(5, 12, 6000)


def test_done_time_from_clock_ahead_is_dropped_once_all_is_done() -> None:
    """A next owner would send again everything that the wrong moment keeps from being told, for as long as it lies ahead."""
    ahead = Progress(10, 10, 9_000_000)
    now = ahead.followed_by(Progress(10, 500, 5000))
    assert now == Progress(10, 500, 5000)
    assert ahead.followed_by(Progress(11, 500, 5000)) == Progress(11, 500, 5000)
    assert [now.is_done(300, 5000), now.is_done(300, 5001)] == [True, False]
    assert Progress(8, 10, 9_000_000).followed_by(Progress(9, 500, 5000)) == Progress(9, 10, 9_000_000), (
        "8 and 9 waited then"
    )


def test_a_clock_that_was_ahead_for_a_moment_hides_no_progress() -> None:
    """One message waits for a month, so that the offset before which all are done stands still."""
    day, month = 86_400_000, 30 * 86_400_000
    ahead = advanced_progress(Progress(0, 1, 0), 0, 10, month, 5000 + day, 5000 + day)
    assert ahead == Progress(0, 10, 5000 + day)
    now = advanced_progress(ahead, 0, 20, month, 5500, 6000)
    assert now == Progress(0, 20, 6000), "that of another node, too"
    assert advanced_progress(Progress(0, 10, 5000), 0, 20, month, 5500, 6000) == Progress(0, 20, 5500), (
        "the latest one that is done"
    )
    assert advanced_progress(Progress(0, 10, 5000), 0, 20, 5300, 5500, 6000) == Progress(0, 20, 5299)
    assert advanced_progress(Progress(0, 10, 5000), 0, 20, 4000, 5500, 6000) == Progress(0, 10, 5000), "one came late"
    assert advanced_progress(Progress(0, 10, 5000), 0, 20, 0, 5500, 6000) == Progress(0, 10, 5000)


def test_truncated_checkpoint_keeps_progress_before_its_end() -> None:
    seen = QueueCheckpoint(3, 20, Progress(5, 20, 9), 7)
    assert seen.truncated_at(10) == QueueCheckpoint(3, 10, Progress(5, 10, 9), 7)
    assert seen.truncated_at(2) == QueueCheckpoint(2, 2, Progress(2, 2, 9), 7)


@pytest.mark.parametrize(
    ("newest_store_ms", "offset", "stored_ms", "another"),
    [(7, 19, 8, True), (7, 19, 7, False), (7, 20, 8, False), (0, 19, 8, False)],
)
def test_younger_message_at_read_offset_shows_recreated_topic(
    newest_store_ms: int, offset: int, stored_ms: int, another: bool
) -> None:
    message = replace(MESSAGE, queue_offset=offset, store_timestamp=stored_ms)
    assert QueueCheckpoint(3, 20, Progress(5, 20, 9), newest_store_ms).shows_recreation(message) is another


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9), st.data())
def test_store_time_before_offset_is_found_by_searching(times_ms: list[int], data: st.DataObject) -> None:
    times_ms = sorted(times_ms)
    offset = data.draw(st.integers(1, len(times_ms) + 1))

    def search(epoch_ms: int) -> int:
        return next((at for at, each in enumerate(times_ms) if each >= epoch_ms), len(times_ms))

    found = newest_store_ms_before(offset, 10**6, search)
    assert found == (times_ms[offset - 1] if offset <= len(times_ms) else 0)


NUMBER = st.integers(0, 2**63 - 1)


@given(st.builds(QueueCheckpoint, NUMBER, NUMBER, st.builds(Progress, NUMBER, NUMBER, NUMBER), NUMBER))
def test_what_is_written_down_comes_back(seen: QueueCheckpoint) -> None:
    assert QueueCheckpoint.decode(seen.encode()) == seen
    assert len(seen.encode()) not in (40, 48), "releases up to 0.1 would take its progress for theirs"
    assert (
        QueueCheckpoint.decode(b"")
        is QueueCheckpoint.decode(None)
        is QueueCheckpoint.decode(seen.encode()[1:-1])
        is None
    )


@pytest.mark.parametrize("newest_store_ms", [[], [7]], ids=["5Q", "6Q"])
def test_only_oldest_offset_of_earlier_release_note_is_trusted(newest_store_ms: list[int]) -> None:
    """It may have the progress of two nodes, which it got from brokers."""
    data = struct.pack(f">{5 + len(newest_store_ms)}Q", 3, 9, 5, 20, 1_700_000_000_000, *newest_store_ms)
    assert QueueCheckpoint.decode(data) == QueueCheckpoint(3, 9, Progress(5, 5, 0), *newest_store_ms)


def test_node_resumes_if_its_checkpoint_covers_oldest_offset() -> None:
    told = Progress(5, 20, 1)
    assert resumed_checkpoint(QueueCheckpoint(3, 9, told), Progress(5, 20, 1), 0) == QueueCheckpoint(3, 9, told)
    assert resumed_checkpoint(QueueCheckpoint(6, 9, told), told, 0) == QueueCheckpoint(5, 5, told), (
        "what lies before its beginning it has not"
    )
    assert resumed_checkpoint(QueueCheckpoint(0, 4, told), told, 0) == QueueCheckpoint(5, 5, told), "others were faster"
    assert resumed_checkpoint(QueueCheckpoint(3, 9, told), None, 0) == QueueCheckpoint(3, 9, told), "the broker forgot"
    assert resumed_checkpoint(None, None, 7) == QueueCheckpoint(7, 7, Progress(7, 7, 0))
