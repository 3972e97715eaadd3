from __future__ import annotations

import itertools
import linecache
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rocketmq_spark.base import complaints
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import offsets
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.offsets import BrokerOffsets, FileOffsets, LocalOffsets
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model import MessageQueue
from tests.consumer.group import GroupBench
from tests.fakes.group_member import FakeMember
from tests.helpers import raising, unlike_ctrl_c, waits_in
from tests.queues import q

A, B, SOON = q("a:0"), q("b:0"), Deadline(1e9)
# Lines at which a tracer stops where Ctrl-C cannot, and those that give a queue free.
PARTED = (
    "with ",
    "try:",
    "finally:",
    "self._member_state.offsets.mark_committed",
    "self._queues_in_flight -=",
    "self._commit_ended.notify",
)


@pytest.fixture
def held() -> MemberState:
    return MemberState(Thresholds())


def test_only_changed_or_failed_offsets_are_committed_again(group: GroupBench, held: MemberState, caplog) -> None:
    port = FakeMember(group.brokers, "me")
    group.brokers.groups.add("g")
    store = BrokerOffsets(port, "g", held)
    store.persist(SOON)
    held.offsets.force(A, 1)
    held.offsets.force(B, 2)
    group.brokers.failing["commit b"] = CallTimeout("late")
    for _ in range(3):
        store.persist(SOON)
    del group.brokers.failing["commit b"]
    store.persist(SOON)
    store.persist(SOON)
    assert port.seen("commit") == [{A: 1, B: 2}, {B: 2}, {B: 2}, {B: 2}]
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("group g: offsets cannot be stored on broker b, they are sent again: ")
    assert second == "group g: broker b can store offsets again"
    store.persist(SOON, [A, q("z:9")])
    assert len(port.seen("commit")) == 4, "nothing has changed"
    held.offsets.force(A, 1)
    store.persist(SOON, [A, q("z:9")])
    assert port.seen("commit")[-1] == {A: 1}
    assert store.read(A, SOON) == 1
    assert store.read(q("c:0"), SOON) == 0  # as brokers say of a young queue
    group.brokers.queues[q("c:0")].first = 1
    assert store.read(q("c:0"), SOON) is None


def test_offsets_that_stay_unstored_are_warned_of_again(
    group: GroupBench, held: MemberState, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complaints, "WARNING_INTERVAL_S", 0.0)
    port = FakeMember(group.brokers, "me")
    group.brokers.groups.add("g")
    group.brokers.failing["commit b"] = CallTimeout("late")
    store = BrokerOffsets(port, "g", held)
    held.offsets.force(B, 2)
    for _ in range(3):
        store.persist(SOON)
    assert caplog.text.count("offsets cannot be stored on broker b, they are sent again") == 3


class Hanging:
    """A store whose first commit, of these offsets, is under way until ``go_on``."""

    def __init__(self, group: GroupBench, held: MemberState, offsets: dict[MessageQueue, int]) -> None:
        self.port = FakeMember(group.brokers, "me")
        group.brokers.groups.add("g")
        self.store, self._real = BrokerOffsets(self.port, "g", held), self.port.commit
        self._entered, self._free = threading.Event(), threading.Event()
        self.stored = threading.Semaphore(0)
        self.port.commit = self._commit  # type: ignore[method-assign]
        for queue, offset in offsets.items():
            held.offsets.force(queue, offset)
        self._first = self.beside()
        assert self._entered.wait(60)

    def _commit(self, *given: Any) -> Any:
        if not self._entered.is_set():
            self._entered.set()
            assert self._free.wait(60)
        found = self._real(*given)
        self.stored.release()
        return found

    def beside(self, *queues: MessageQueue) -> threading.Thread:
        """A run on a thread of its own."""
        thread = threading.Thread(target=self.store.persist, args=(SOON, queues or None), daemon=True)
        thread.start()
        return thread

    def go_on(self) -> None:
        self._free.set()
        self._first.join(60)


def test_reset_waits_for_the_running_commit_of_its_queue(group: GroupBench, held: MemberState) -> None:
    """An offset from before it must not come after it."""
    hanging = Hanging(group, held, {A: 50})
    held.offsets.force(A, 0)
    reset = hanging.beside(A)
    waits_in(reset, threading.Condition.wait)
    hanging.go_on()
    reset.join(60)
    assert hanging.port.seen("commit") == [{A: 50}, {A: 0}]
    assert group.brokers.offsets == {A: 0}


def test_reset_does_not_overtake_a_commit_that_hangs(group: GroupBench, held: MemberState) -> None:
    hanging = Hanging(group, held, {A: 50})
    held.offsets.force(A, 0)
    hanging.store.persist(Deadline.after(0.02), [A])
    hanging.store.persist(SOON)
    assert (hanging.port.seen("commit"), held.offsets.changed_offsets()) == ([], {A: 0})
    hanging.go_on()
    assert (group.brokers.offsets, held.offsets.changed_offsets()) == ({A: 50}, {A: 0})
    hanging.store.persist(SOON)
    assert (group.brokers.offsets, held.offsets.changed_offsets()) == ({A: 0}, {})


def test_hanging_broker_keeps_no_other_from_its_last_offsets(group: GroupBench, held: MemberState) -> None:
    hanging = Hanging(group, held, {B: 1})
    held.offsets.force(A, 7)
    held.offsets.force(B, 2)
    last = hanging.beside(A, B)
    assert hanging.stored.acquire(timeout=60)
    assert group.brokers.offsets == {A: 7}
    hanging.go_on()
    last.join(60)
    assert hanging.port.seen("commit") == [{A: 7}, {B: 1}, {B: 2}]


def test_a_commit_that_raises_does_not_keep_its_queue(group: GroupBench, held: MemberState, monkeypatch) -> None:
    port = FakeMember(group.brokers, "me")
    group.brokers.groups.add("g")
    store = BrokerOffsets(port, "g", held)
    held.offsets.force(A, 1)
    with monkeypatch.context() as patch:
        patch.setattr(port, "commit", raising(ZeroDivisionError()))
        with pytest.raises(ZeroDivisionError):
            store.persist(SOON)
    store.persist(SOON)
    assert group.brokers.offsets == {A: 1}


def test_ctrl_c_during_a_commit_blocks_no_later_commit(group: GroupBench, held: MemberState) -> None:
    """A second ``stop`` waited for a commit that nobody made, and stored nothing."""
    port = FakeMember(group.brokers, "me")
    group.brokers.groups.add("g")
    for at in itertools.count():
        store, left = BrokerOffsets(port, "g", held), [at]
        held.offsets.force(A, at)

        def handler(frame: FrameType, event: str, arg: object, left: list[int] = left) -> Any:
            path = frame.f_code.co_filename
            parted = not linecache.getline(path, frame.f_lineno).lstrip().startswith(PARTED)
            if path == offsets.__file__ and event == "line" and parted and not unlike_ctrl_c(frame):
                left[0] -= 1
                if left[0] == -1:
                    raise KeyboardInterrupt
            return handler

        before = sys.gettrace()
        sys.settrace(handler)
        try:
            store.persist(SOON)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert not store._queues_in_flight, (at, left)
        if left[0] >= 0:
            assert at > 10
            return


def end(queue: MessageQueue, deadline: Deadline) -> int:
    return 100


def test_a_file_keeps_what_is_not_here_now(held: MemberState, tmp_path: Path) -> None:
    file = LocalOffsets(tmp_path / "g" / "offsets.json")
    file.store({B: 7})
    store = FileOffsets(file, held, end)
    store.persist(SOON)
    held.offsets.force(A, 1)
    store.persist(SOON)
    assert file.load() == {A: 1, B: 7}
    assert (store.read(B, SOON), store.read(q("c:0"), SOON)) == (7, None)


def test_a_file_that_cannot_be_written_is_told_and_tried_again(held: MemberState, tmp_path: Path, caplog) -> None:
    (tmp_path / "g").write_text("a file where a folder should be")
    store = FileOffsets(LocalOffsets(tmp_path / "g" / "offsets.json"), held, end)
    held.offsets.force(A, 1)
    for _ in range(3):
        store.persist(SOON)
    assert caplog.text.count("offsets are not stored yet") == 1
    (tmp_path / "g").unlink()
    store.persist(SOON)
    assert store.read(A, SOON) == 1
    held.offsets.force(A, 2)
    store.persist(SOON)
    assert caplog.text.count("offsets can be stored again") == 1


def test_concurrent_stores_leave_the_latest_offset_in_the_file(held: MemberState, tmp_path: Path) -> None:
    """As when a queue is reset, or given up at the end, while its turn to be stored has come."""
    file, inside, go_on = LocalOffsets(tmp_path / "g" / "offsets.json"), threading.Event(), threading.Event()
    store, load = FileOffsets(file, held, end), file.load

    def slowly() -> dict[MessageQueue, int]:
        if not inside.is_set():
            inside.set()
            assert go_on.wait(60)
        return load()

    file.load = slowly  # type: ignore[method-assign]
    held.offsets.force(A, 50)
    first, last = (threading.Thread(target=store.persist, args=(SOON,), daemon=True) for _ in range(2))
    first.start()
    assert inside.wait(60)
    held.offsets.force(A, 0)
    last.start()
    waits_in(last, FileOffsets.persist)
    go_on.set()
    for thread in (first, last):
        thread.join(60)
    assert load() == {A: 0}
    assert not held.offsets.changed_offsets()
