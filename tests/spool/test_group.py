"""Additions of several threads: who waits goes with who writes."""

from __future__ import annotations

import threading

import pytest

from rocketmq_spark.errors import SpoolFull
from rocketmq_spark.spool.changes import AddRequest, GroupCommit
from tests.mockbroker import eventually
from tests.spool.bench import record


def ticket(payload: bytes = b"x") -> AddRequest:
    return AddRequest([(record(payload), 1)])


@pytest.mark.parametrize(("together", "sizes"), [(True, [1, 3]), (False, [1, 1, 1, 1])])
def test_those_that_wait_are_written_together_or_one_by_one(together: bool, sizes: list[int]) -> None:
    written: list[int] = []
    writing, go = threading.Event(), threading.Event()

    def write(tickets: list[AddRequest]) -> None:
        written.append(len(tickets))
        writing.set()
        assert go.wait(60)

    lock = threading.RLock()
    group = GroupCommit(lock, write, together)
    threads = [threading.Thread(target=group.submit, args=(ticket(),)) for _ in range(4)]
    threads[0].start()
    assert writing.wait(60)
    for each in threads[1:]:
        each.start()
    eventually(lambda: not together or len(group._waiting_requests) == 3)
    go.set()
    for each in threads:
        each.join(60)
    assert written == sizes


def test_each_caller_gets_its_own_error() -> None:
    def write(tickets: list[AddRequest]) -> None:
        tickets[0].error = SpoolFull("no")

    with pytest.raises(SpoolFull):
        GroupCommit(threading.RLock(), write, batched=True).submit(ticket())


def test_who_is_written_by_an_interrupted_one_hears_of_it() -> None:
    """Ctrl-C in the thread that writes for all: none of the others may take its message for kept."""
    writing, go = threading.Event(), threading.Event()
    outcomes: list[BaseException | None] = []
    turns = iter([None, KeyboardInterrupt()])

    def write(tickets: list[AddRequest]) -> None:
        writing.set()
        assert go.wait(60)
        if (error := next(turns)) is not None:
            raise error

    group = GroupCommit(threading.RLock(), write, batched=True)

    def put() -> None:
        try:
            group.submit(ticket())
            outcomes.append(None)
        except BaseException as e:  # noqa: BLE001 - it is what is looked at
            outcomes.append(e)

    threads = [threading.Thread(target=put) for _ in range(4)]
    threads[0].start()
    assert writing.wait(60)
    for each in threads[1:]:
        each.start()
    eventually(lambda: len(group._waiting_requests) == 3)
    go.set()
    for each in threads:
        each.join(60)
    kinds = [type(each).__name__ for each in outcomes]
    assert sorted(kinds) == ["KeyboardInterrupt", "NoneType", "SpoolError", "SpoolError"]


def test_interrupted_group_commit_loses_no_message() -> None:
    """Ctrl-C between the two: whose ticket it was writes it."""
    written: list[AddRequest] = []
    lock = threading.RLock()
    group, mine = GroupCommit(lock, written.extend, batched=True), ticket()
    with lock:
        other = threading.Thread(target=group.submit, args=(mine,))
        other.start()
        eventually(lambda: bool(group._waiting_requests))
        group._waiting_requests.clear()
    other.join(60)
    assert written == [mine]
