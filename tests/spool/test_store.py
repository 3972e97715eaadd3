"""The store against a model of ten lines, and the cases that the model does not have. Real RocksDB."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import options
from rocketmq_spark.errors import DecodeError, SpoolError, SpoolFull
from rocketmq_spark.session.spools import owner_of
from rocketmq_spark.spool import files
from rocketmq_spark.spool import store as store_module
from rocketmq_spark.spool.changes import AddRequest
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lanes import LeasedRecord
from rocketmq_spark.spool.records import (
    IDENTITY,
    OWNER,
    RECORD,
    Dead,
    Done,
    Record,
    RecordState,
    RetryLater,
    SpoolOwner,
    Verdict,
    record_key,
)
from rocketmq_spark.spool.recovery import dead_records
from rocketmq_spark.spool.spool import SEND_VERSION, send_of
from rocketmq_spark.spool.store import Store
from tests.helpers import raising
from tests.spool.bench import database, record


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "not" / "yet" / "there"


def test_what_went_with_a_head_that_is_given_up_waits_on(path: Path) -> None:
    """Only what was delivered takes those behind it along."""
    store = Store(path, "never")
    store.add([(record(body, lane=b"l"), 0) for body in (b"1", b"2", b"3")])
    (work,) = store.take(1000, 10, predicate=lambda first: lambda other: True)
    assert [each.record.payload for each in work.followers] == [b"2", b"3"]
    store.settle([(work, Dead("too often"))], 1000)
    assert (len(store), store.totals.dead) == (2, 1)
    (work,) = store.take(1000, 10, predicate=lambda first: lambda other: True)
    assert [work.record.payload, *(each.record.payload for each in work.followers)] == [b"2", b"3"]
    store.settle([(work, Done())], 1000)
    assert (len(store), store.totals.dead, store.holds_lane(b"l")) == (0, 1, False)
    store.close()


def test_additions_written_together_obey_size_limit_together(path: Path) -> None:
    tickets = [AddRequest([(record(b"x" * 100), 0)]) for _ in range(4)]
    store = Store(path, "batch", max_bytes=2 * tickets[0].size + tickets[0].size // 2)
    store._add(tickets)
    assert [type(each.error) for each in tickets] == [type(None)] * 2 + [SpoolFull] * 2
    assert len(store) == 2
    store.close()


def payloads(works: list[LeasedRecord]) -> list[bytes]:
    return [work.record.payload for work in works]


def test_what_is_added_is_there_after_a_restart_in_a_new_folder(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"x"), 5)])
    store.close()
    again = Store(path)
    assert payloads(again.take(5, 10)) == [b"x"]
    again.close()


def test_record_due_in_60_seconds_is_not_taken_earlier(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"later"), 60_000), (record(b"now"), 0)])
    assert payloads(store.take(59_999, 10)) == [b"now"]
    assert payloads(store.take(60_000, 10)) == [b"later"]
    store.close()


def test_what_was_settled_is_not_on_the_disk_any_more(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"x", lane=b"l"), 0)])
    store.settle([(work, Done()) for work in store.take(0, 10)], 0)
    store.close()
    assert [key for key, _ in _all(path)] == [b"m"]


def test_overdue_records_of_earlier_process_come_in_key_order(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"b"), 2), (record(b"c"), 10**13), (record(b"a"), 1)])
    store.take(10**12, 1)
    store.close()
    again = Store(path)
    assert payloads(again.take(10**12, 10)) == [b"a", b"b"]
    again.close()


def test_record_that_is_due_before_what_was_read_is_seen(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"x"), 100)])
    store.settle([(work, Done()) for work in store.take(200, 10)], 200)
    store.add([(record(b"late"), 7)])
    assert payloads(store.take(200, 10)) == [b"late"]
    store.close()


def test_failed_record_is_replaced_and_lease_ends_with_store(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"x"), 0)])
    (work,) = store.take(0, 10)
    assert store.take(0, 10) == []
    store.settle([(work, RetryLater(50, "down"))], 0)
    assert store.take(49, 10) == []
    (again,) = store.take(50, 10)
    assert (again.state.tries, again.state.reason, again.record) == (1, "down", work.record)
    store.close()
    other = Store(path)
    assert payloads(other.take(50, 10)) == [b"x"]
    other.close()


def test_a_page_of_records_that_are_made_due_leaves_no_scan_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open iterator keeps RocksDB's lock, so that the database could not be opened again after a failed write."""
    store = Store(path)
    store.add([(record(b"%d" % n), 10**6) for n in range(5)])
    scans, scan = [], Database.scan
    monkeypatch.setattr(Database, "scan", lambda *given: scans.append(scan(*given)) or scans[-1])
    assert store.make_due(None, None, 2, 50) is not None
    assert scans
    assert all(inspect.getgeneratorstate(one) == inspect.GEN_CLOSED for one in scans)
    store.close()


def test_leased_record_is_not_hastened_if_clock_is_put_back(path: Path) -> None:
    """Its result is of where it was when it was taken: what moved meanwhile would be there once more."""
    store = Store(path)
    store.add([(record(b"out"), 90), (record(b"waits"), 95)])
    (work,) = store.take(90, 1)
    assert store.make_due(None, None, 10, 50) is None
    assert store.next_due_ms() == 50, "the other one"
    store.settle([(work, Done())], 50)
    assert payloads(store.take(1000, 10)) == [b"waits"]
    assert (len(store), store.totals.dead, store.next_due_ms()) == (1, 0, None)
    store.close()


def test_dead_records_keep_payload_and_are_revived_on_request(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"first", lane=b"l"), 0), (record(b"second", lane=b"l"), 0)])
    store.settle([(work, Dead("no")) for work in store.take(0, 10)], 0)
    assert [one.payload for _, one, _ in dead_records(database(store)) if isinstance(one, Record)] == [b"first"]
    assert (store.totals.give_ups, store.totals.dead, len(store)) == (1, 1, 1)
    assert store.revive(9) == 1
    works = store.take(9, 10)
    assert payloads(works) == [b"second", b"first"]
    store.settle([(work, Done()) for work in works], 9)
    assert not store.holds_lane(b"l")
    assert (len(store), store.totals.dead, store.totals.all_bytes) == (0, 0, 0)
    store.close()


def test_size_limit_counts_dead_records_and_addition_is_atomic(path: Path) -> None:
    size = len(record(b"x" * 100).encode())
    store = Store(path, max_bytes=3 * size)
    store.add([(record(b"x" * 100), 0)])
    store.settle([(work, Dead("no")) for work in store.take(0, 10)], 0)
    store.add([(record(b"x" * 100), 0)])
    with pytest.raises(
        SpoolFull, match=rf"holds {2 * size} bytes, and {2 * size} more exceed the {3 * size} of option"
    ):
        store.add([(record(b"x" * 100), 0)] * 2)
    store.add([(record(b"x" * 100), 0)])
    store.settle([(work, Done()) for work in store.take(0, 10)], 0)
    store.add([(record(b"x" * 100), 0)])
    assert len(store) == 1
    store.close()


def test_nearly_full_disk_refuses_records_but_drains_old_ones(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SPACE_CHECK_S", 0.0)  # a spool that has filled its disk could not be opened any more
    store = Store(path, sync="never")
    store.add([(record(b"1"), 1)])
    left = files.RESERVE_BYTES - 1
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=left, f_frsize=1))
    with pytest.raises(SpoolFull, match=f"has {left} bytes left"):
        store.add([(record(b"2"), 1)])
    store.add([], {b"note": b"is no record"})
    (work,) = store.take(1, 10)
    store.settle([(work, RetryLater(2, "busy"))], 1)
    left += 1 + len(record(b"3").encode())
    store.add([(record(b"3"), 1)])
    monkeypatch.setattr(os, "statvfs", raising(OSError("Input/output error")))
    with pytest.raises(SpoolError, match="Input/output error"):
        store.add([(record(b"4"), 1)])
    assert payloads(store.take(2, 10)) == [b"3", b"1"]
    store.close()


def test_second_store_on_a_folder_is_refused_by_name(path: Path) -> None:
    store = Store(path)
    with pytest.raises(SpoolError, match="is in use by another process"):
        Store(path)
    store.close()
    Store(path).close()


def test_record_with_bad_checksum_becomes_dead_and_lane_goes_on(path: Path) -> None:
    store = Store(path)
    store.add([(record(b"first", lane=b"l"), 0), (record(b"second", lane=b"l"), 0)])
    damaged = bytearray(record(b"first", lane=b"l").encode())
    damaged[-1] ^= 1
    database(store).write([(record_key(RECORD, 1), bytes(damaged))])
    assert payloads(store.take(0, 10)) == [b"second"]
    assert store.totals.dead == 1
    store.close()


@pytest.mark.parametrize("limit", ["REVIVE_PAGE_SIZE", "REVIVE_PAGE_BYTES"])
def test_any_number_of_dead_comes_back_in_portions(path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(store_module, limit, 3)
    store = Store(path)
    bodies = [b"%d" % i for i in range(8)]
    store.add([(record(body), 0) for body in bodies])
    store.settle([(work, Dead("no")) for work in store.take(0, 10)], 0)
    assert (len(store), store.totals.dead) == (0, 8)
    assert store.revive(5) == 8
    assert (len(store), store.totals.dead, store.totals.dead_bytes) == (8, 0, 0)
    assert payloads(store.take(5, 10)) == bodies
    store.close()


A_CLUSTER = SpoolOwner(("a:1", "b:1"), "", "environment '1' (id)")
OTHERS = (
    dataclasses.replace(A_CLUSTER, environment="environment '2' (id)"),
    dataclasses.replace(A_CLUSTER, environment=""),
    dataclasses.replace(A_CLUSTER, namespace="n"),
    dataclasses.replace(A_CLUSTER, servers=("c:1",)),
    dataclasses.replace(A_CLUSTER, purpose="the delay service"),
)


def test_what_is_noted_of_a_cluster_is_not_believed_in_another(path: Path) -> None:
    with contextlib.closing(Store(path)) as store:
        store.set_owner(A_CLUSTER)
        store.add([], {b"broker-a": b"7"})
        store.set_owner(dataclasses.replace(A_CLUSTER, servers=(*A_CLUSTER.servers, "d:1"), purpose="another group"))
        assert store.notes() == {b"broker-a": b"7"}
        store.set_owner(dataclasses.replace(A_CLUSTER, servers=("c:1",)), force=True)
        assert store.notes() == {b"doubtful broker-a": b"7"}


def test_deeply_nested_json_in_a_spool_is_damaged() -> None:
    deep = b"[" * 100_000
    with pytest.raises(DecodeError, match="an owner of 100000 bytes cannot be read"):
        SpoolOwner.decode(deep)
    with pytest.raises(DecodeError, match="a send of 100005 bytes cannot be read"):
        send_of(Record("send", struct.pack(">BI", SEND_VERSION, len(deep)) + deep, 1))


def test_only_empty_spool_takes_another_owner(path: Path) -> None:
    store = Store(path)
    store.set_owner(A_CLUSTER)
    store.add([(record(b"x"), 0)])
    store.close()
    store = Store(path)
    store.set_owner(A_CLUSTER)
    for other in OTHERS:
        with pytest.raises(SpoolError, match="holds records of the cluster of a:1;b:1, environment '1'") as caught:
            store.set_owner(other)
        assert f"not of {other}" in str(caught.value)
    (work,) = store.take(0, 1)
    store.settle([(work, Dead("no"))], 0)
    for other in OTHERS:  # dead letters may be sent again, too
        with pytest.raises(SpoolError, match="holds records of"):
            store.set_owner(other)
    store.set_owner(A_CLUSTER)
    store.revive(0)
    store.settle([(work, Done()) for work in store.take(0, 1)], 0)
    store.set_owner(OTHERS[0])
    store.add([(record(b"y"), 0)])
    with pytest.raises(SpoolError, match=r"holds records of .*environment '2'"):
        store.set_owner(A_CLUSTER)
    store.set_owner(A_CLUSTER, force=True)
    with pytest.raises(SpoolError, match=r"holds records of .*environment '1'"):
        store.set_owner(OTHERS[0])
    store.close()


def test_a_cluster_is_the_same_while_one_of_its_servers_is(path: Path) -> None:
    store = Store(path)
    store.set_owner(A_CLUSTER)
    store.add([(record(b"x"), 0)])
    for servers in (("b:1", "c:1"), ("c:1",), ("c:1", "d:1")):
        store.set_owner(dataclasses.replace(A_CLUSTER, servers=servers))
    with pytest.raises(SpoolError):
        store.set_owner(A_CLUSTER)
    store.close()


def test_owners_compare_environment_queues_if_both_know_them() -> None:
    """Records name queues: with another layout they are those of another environment."""
    earlier, two, three = (
        owner_of(options.parse({"nameServer": "a:1", "environment": "eu", **more}).for_role("producer"))
        for more in ({}, {"environments": '{"eu": [0], "us": [1]}'}, {"environments": '{"us": [0], "eu": [1]}'})
    )
    same = owner_of(
        options.parse({"nameServer": "a:1", "environment": "eu", "environments": '{"us":[1], "eu":[0]}'}).for_role(
            "producer"
        )
    )
    assert two.may_use(same)
    assert not two.may_use(three)
    assert not three.may_use(two)
    assert two.may_use(earlier)
    assert not earlier.may_use(two), "it does not say that these are its queues"
    assert not dataclasses.replace(two, environment="").may_use(two)


@pytest.mark.parametrize(
    ("written", "owner"),
    [
        (b"", SpoolOwner(("a:1",), "n")),
        (b"environment '1' (id)", SpoolOwner(("a:1",), "n", "environment '1' (id)")),
        (b"the delay service, group 'g'", SpoolOwner(("a:1",), "n", "", "the delay service, group 'g'")),
    ],
)
def test_what_an_earlier_release_wrote_goes_on(path: Path, written: bytes, owner: SpoolOwner) -> None:
    """It said nothing of a cluster or a namespace; whoever opens it first says both."""
    store = Store(path)
    store.add([(record(b"x"), 0)])
    database(store).write([(OWNER[0], written)])
    for other in (
        dataclasses.replace(owner, environment="environment '2' (id)"),
        dataclasses.replace(owner, purpose="p"),
    ):
        with pytest.raises(SpoolError):
            store.set_owner(other)
    store.set_owner(owner)
    with pytest.raises(SpoolError):
        store.set_owner(dataclasses.replace(owner, servers=("b:1",)))
    store.close()


def test_latest_stored_moment_never_goes_back_with_clock(path: Path) -> None:
    """From it time goes on after a restart: with an earlier one nothing would be due for as long."""
    store = Store(path)
    store.add([(record(b"x", at_ms=500), 500), (record(b"y", at_ms=500), 500)])
    first, second = store.take(500, 2)
    store.settle([(first, Done())], 900)
    store.settle([(second, RetryLater(600, "down"))], 100)
    store.close()
    store = Store(path)
    assert store.totals.last_recorded_ms == 900
    store.close()


def test_a_retry_is_not_due_before_the_original_due_time(path: Path) -> None:
    """The clock by which the record was due may have been set back during the attempt."""
    store = Store(path)
    identity = (1000).to_bytes(8) + b"x"
    store.add([(Record("delayed", b"", 5, marks=((IDENTITY, identity),)), 1000)])
    (work,) = store.take(1000, 1)
    store.settle([(work, RetryLater(33, "down"))], 30)
    assert store.next_due_ms() == 1000
    store.close()


@pytest.mark.parametrize("sync", ["always", "batch"])
@pytest.mark.parametrize("written", [False, True])
def test_ctrl_c_in_a_write_gives_no_number_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, sync: str, written: bool
) -> None:
    """Whether it comes before or after the disk has the record: the next one does not take its place."""
    store = Store(path, sync)
    store.add([(record(b"1", lane=b"l"), 1)])
    write = Database.write

    def interrupted(self: Database, *args: Any, **kwargs: Any) -> None:
        if written:
            write(self, *args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.add([(record(b"2", lane=b"l"), 1)])
    store.add([(record(b"3", lane=b"l"), 1)])
    found = []
    while works := store.take(1, 10):
        found += payloads(works)
        store.settle([(work, Done()) for work in works], 1)
    assert found == ([b"1", b"2", b"3"] if written else [b"1", b"3"])
    assert (len(store), store.holds_lane(b"l")) == (0, False)
    store.close()


@pytest.mark.parametrize("verdict", [Done(), Dead("refused"), RetryLater(7, "busy")])
def test_settlement_written_despite_reported_error_counts_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Verdict
) -> None:
    """Counted twice the totals would fall below nothing, which no write takes: the store would settle nothing any more."""
    store = Store(path, "never")
    store.add([(record(b"1", lane=b"l"), 1), (record(b"2", lane=b"l"), 1)])
    works, write = store.take(1, 10), Database.write

    def failing(self: Database, *args: Any, **kwargs: Any) -> None:
        write(self, *args, **kwargs)
        raise SpoolError("an error of the disk")

    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", failing)
        with pytest.raises(SpoolError, match="of the disk"):
            store.settle([(work, verdict) for work in works], 1)
    store.settle([(work, verdict) for work in works], 1)
    left, dead = 2 - (not isinstance(verdict, RetryLater)), int(isinstance(verdict, Dead))
    assert (len(store), store.totals.dead, store.totals.give_ups) == (left, dead, dead)
    found = []
    while works := store.take(7, 10):
        found += payloads(works)
        store.settle([(work, Done()) for work in works], 7)
    assert found == ([b"2"] if left == 1 else [b"1", b"2"])
    assert (len(store), store.totals.size, store.holds_lane(b"l")) == (0, 0, False)
    store.close()


def _all(path: Path) -> list[tuple[bytes, bytes]]:
    store = Store(path)
    found = list(database(store).scan(b"\0", b"\xff"))
    store.close()
    return found


def test_a_record_with_the_most_tries_stops_no_other_one(tmp_path: Path) -> None:
    """A file may say that many. Others were sent, and would be sent again."""
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(record(b"sent"), 1), (record(b"tried"), 1)])
        sent, tried = store.take(1, 2)
        tried = tried._replace(state=RecordState(65535, 1))
        store.settle([(sent, Done()), (tried, RetryLater(1, "away"))], 1)
        (left,) = store.take(1, 2)
    assert (left.record.payload, left.state.tries) == (b"tried", 65535)
