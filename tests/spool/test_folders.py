"""Worker folders below one spoolDir: claimed when their process is dead, and drained into one's own."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.options import Options
from rocketmq_spark.producer.routing import queues_of_environment
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session.spools import (
    adopt_records,
    claim_store,
    open_drainer,
    open_send_spool,
    open_store,
    owner_of,
    spools_in,
    worker_spool,
)
from rocketmq_spark.spool import recovery
from rocketmq_spark.spool import store as store_module
from rocketmq_spark.spool.database import is_in_use
from rocketmq_spark.spool.records import LASTING_PREFIX, OWNER, RECORD, TOTALS, Done, RetryLater, SpoolOwner, record_key
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.spool.bench import database, record

ROOT = Path(__file__).parents[2]
make = functools.partial(Store, sync="never")
NOW_MS = 10**13


def fill(path: Path, count: int) -> None:
    command = [sys.executable, "-m", "tests.spool.filler", str(path), str(count), "die"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)


def everything(store: Store) -> list[int]:
    found = []
    while works := store.take(10**9, 1000):
        found += [int(work.record.payload.rstrip(b"x")) for work in works]
        store.settle([(work, Done()) for work in works], 10**9)
    return found


def test_process_creates_folder_and_next_process_takes_it_over(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert spools_in(folder) == []
    store = claim_store(folder, make)
    store.add([(record(b"1"), 1)])
    assert spools_in(folder) == [store.path]
    assert spools_in(store.path) == [store.path]
    store.close()
    again = claim_store(folder, make)
    assert (again.path, everything(again)) == (store.path, [1])
    again.close()


def test_relative_folder_stays_when_process_changes_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    mine = make(Path("spool"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert is_in_use(tmp_path / "spool")
    mine.add([(record(b"1"), 1)])
    assert everything(mine) == [1]
    mine.close()


def test_records_behind_unreadable_record_are_taken_over(tmp_path: Path) -> None:
    """All of a page may be such records, as the first of the only lane is."""
    other, mine = make(tmp_path / "worker-1"), make(tmp_path / "mine")
    other.add([(record(b"%d" % n, lane=b"q", at_ms=1), 1) for n in range(3)])
    database(other).write([(record_key(RECORD, 1), b"damaged")])
    other.close()
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 2
    assert everything(mine) == [1, 2]
    mine.close()


def test_a_living_process_keeps_its_own(tmp_path: Path) -> None:
    first = claim_store(tmp_path, make)
    second = claim_store(tmp_path, make)
    assert first.path != second.path
    assert adopt_records(tmp_path, second, make, NOW_MS) == 0
    assert len(spools_in(tmp_path)) == 2
    first.close()
    second.close()


@pytest.mark.parametrize("damaged", [False, True], ids=["opened anew", "put together again"])
def test_a_folder_whose_store_is_being_opened_again_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """After a full disk, or damage, its database is closed for a moment, while a task of the same process looks for folders."""
    mine = make(tmp_path / "worker-1")
    mine.add([(record(b"1"), 1)])
    others: list[Store] = []
    where, name = (recovery, "_copy_readable") if damaged else (store_module, "finish_repair")
    step = getattr(where, name)

    def look(path: Path, *more: Any) -> Any:
        if path == mine.path:
            others.append(claim_store(tmp_path, make))
            with pytest.raises(SpoolError, match="in use by another process, or by another producer of this one"):
                make(path)
            assert adopt_records(tmp_path, others[-1], make, NOW_MS) == 0
        return step(path, *more)

    monkeypatch.setattr(where, name, look)
    mine._has_failed, mine._is_damaged = True, damaged
    assert (everything(mine), len(others)) == ([1], 1)
    mine.close()
    make(mine.path).close()
    others[0].close()


def test_what_dead_processes_left_is_moved_and_their_folders_go(tmp_path: Path) -> None:
    for name in ("worker-1", "worker-2"):
        fill(tmp_path / name, 1200)
    mine = make(tmp_path / "worker-3")
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 2400
    assert spools_in(tmp_path) == [mine.path]
    found = everything(mine)
    assert sorted(found) == sorted([*range(1200), *range(1200)])
    lane = [number for number in found if number % 3 == 0]
    assert lane == [*range(0, 1200, 3)] * 2  # of a lane in its order, one process after the other
    mine.close()


def test_records_of_one_lane_are_moved_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task waits for it, and each page is flushed."""
    left = make(tmp_path / "worker-1")
    left.add([(record(b"%d" % number, lane=b"l"), 0) for number in range(1000)])
    left.close()
    mine = make(tmp_path / "worker-2")
    add, pages = mine.add, []
    monkeypatch.setattr(mine, "add", lambda records, *more: (pages.append(len(records)), add(records, *more)))
    assert adopt_records(tmp_path, mine, make, NOW_MS) == sum(pages) == 1000
    assert len(pages) == 4
    assert everything(mine) == list(range(1000))
    mine.close()


def test_attempts_count_on_when_one_process_after_the_other_dies(tmp_path: Path) -> None:
    """Otherwise a message that fails for ever never becomes a dead letter where processes live for minutes."""
    mine = make(tmp_path / "worker-0")
    mine.add([(record(b"1"), 1)])
    for tries in range(4):
        (work,) = mine.take(NOW_MS, 1)
        assert (work.state.tries, work.state.reason) == (tries, "no" if tries else "")
        mine.settle([(work, RetryLater(tries + 1, "no"))], tries + 1)
        mine.close()
        mine = make(tmp_path / f"worker-{tries + 1}")
        assert adopt_records(tmp_path, mine, make, NOW_MS) == 1
    mine.close()


def test_record_taken_over_behind_others_keeps_its_attempts(tmp_path: Path) -> None:
    left, mine, last = (make(tmp_path / f"worker-{n}") for n in range(3))
    left.add([(record(b"%d" % n, lane=b"l"), 1) for n in (1, 2)])
    left.settle([(work, RetryLater(2, "no")) for work in left.take(NOW_MS, 1)], 2)
    left.close()
    mine.add([(record(b"0", lane=b"l"), 1)])
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 2
    mine.close()
    assert adopt_records(tmp_path, last, make, NOW_MS) == 3
    tries = {}
    while works := last.take(NOW_MS, 1):
        tries[works[0].record.payload] = works[0].state.tries
        last.settle([(works[0], Done())], NOW_MS)
    assert tries == {b"0": 0, b"1": 1, b"2": 0}
    last.close()


def test_a_spool_with_workers_below_it_is_one_of_them(tmp_path: Path) -> None:
    """A producer's folder that became a sink's ``spoolDir``."""
    fill(tmp_path, 5)
    fill(tmp_path / "worker-1", 7)
    assert spools_in(tmp_path) == [tmp_path, tmp_path / "worker-1"]
    mine = make(tmp_path / "worker-2")
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 12
    assert spools_in(tmp_path) == [tmp_path, mine.path], "what is below it is not removed with it"
    assert sorted(everything(mine)) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6]
    mine.close()


def test_what_one_has_no_room_for_stays_and_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(tmp_path / "worker-1", 1000)
    mine = Store(tmp_path / "worker-2", "never", 130_000)
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 500
    assert "the records of the spool in" in caplog.text
    rest = make(tmp_path / "worker-1")
    assert (len(mine), len(rest)) == (500, 500)
    rest.close()
    mine.close()


def test_large_records_are_moved_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = make(tmp_path / "worker-1")
    left.add([(record(b"%2d" % i + bytes(1 << 20)), i) for i in range(30)])
    left.close()
    mine, added = make(tmp_path / "worker-2"), []
    add = mine.add
    monkeypatch.setattr(mine, "add", lambda records, *more: (added.append(len(records)), add(records, *more)))
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 30
    assert added == [4] * 7 + [2]
    mine.close()


def test_emptied_folder_is_closed_then_removed_under_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB's close deletes what it finds in a folder of that name; and what is written without the lock is removed, too."""
    fill(tmp_path / "worker-1", 3)
    (tmp_path / "emptied-1").mkdir()  # of who was killed here
    mine = make(tmp_path / "worker-2")
    there: list[bool] = []
    locked: list[str] = []
    close, rename = Store.close, Path.rename
    monkeypatch.setattr(Store, "close", lambda self: (there.append(self.path.exists()), close(self)))

    def renamed(self: Path, target: Path) -> Path:
        look = f"from rocketmq_spark.spool.database import is_in_use, Path; print(is_in_use(Path({str(self)!r})))"
        locked.append(subprocess.check_output([sys.executable, "-c", look], cwd=ROOT, text=True, timeout=60).strip())
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 3
    assert (there, locked) == ([True], ["True"])
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.close()


def test_only_a_folder_that_is_marked_as_emptied_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others may rename folders in a ``spoolDir`` with mode 0777, or in one that they own."""
    fill(tmp_path / "worker-1", 3)
    (tmp_path / "worker-1").rename(tmp_path / "emptied-1")
    live = make(tmp_path / "worker-3")
    live.add([(record(b"7"), 1)])
    live.path.rename(tmp_path / "emptied-3")
    killed = tmp_path / "emptied-2"
    (killed / "lost").mkdir(parents=True)
    for name in ("CURRENT", "emptied", "lost/000004.sst"):
        (killed / name).touch()
    mine = make(tmp_path / "worker-2")
    for _ in range(2):
        assert adopt_records(tmp_path, mine, make, NOW_MS) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["emptied-1", "emptied-3", "worker-2"]
    for name in ("emptied-1", "emptied-3"):
        [_] = [line for line in caplog.messages if line.startswith(f"{tmp_path / name} is left alone: ")]
    live.close()
    for name in ("1", "3"):
        (tmp_path / f"emptied-{name}").rename(tmp_path / f"worker-{name}")
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 4
    mine.close()


def test_a_folder_that_is_used_again_loses_a_stale_mark(tmp_path: Path) -> None:
    """After a power cut, the mark may be there and the new name may not. Who may rename the folder could have it removed."""
    fill(tmp_path / "worker-1", 3)
    (tmp_path / "worker-1" / "emptied").touch()
    mine = claim_store(tmp_path, make)
    assert mine.path == tmp_path / "worker-1"
    mine.close()
    mine.path.rename(tmp_path / "emptied-1")
    other = make(tmp_path / "worker-2")
    assert adopt_records(tmp_path, other, make, NOW_MS) == 0
    (tmp_path / "emptied-1").rename(tmp_path / "worker-1")
    (tmp_path / "worker-1" / "emptied").touch()
    assert adopt_records(tmp_path, other, make, NOW_MS) == 3
    other.close()


def test_a_mark_that_cannot_be_removed_leaves_the_folder_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path / "worker-1", 3)
    (tmp_path / "worker-1" / "emptied").mkdir()
    mine = claim_store(tmp_path, make)
    assert mine.path != tmp_path / "worker-1"
    assert f"skipping the spool in {tmp_path / 'worker-1'}" in caplog.text
    assert "worker-1/emptied cannot be removed: " in caplog.text
    mine.close()


def test_the_mark_of_an_emptied_folder_goes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "worker-1", 3)
    mine = make(tmp_path / "worker-2")
    unlink, left = os.unlink, []

    def killed(name: str, *, dir_fd: int) -> None:
        left.append(set(os.listdir(dir_fd)))
        unlink(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", killed)
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 3
    assert len(left) > 3
    assert all("emptied" in names for names in left)
    assert left[-1] == {"emptied"}
    mine.close()


def test_a_folder_in_which_another_process_was_in_between_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "worker-1", 3)
    mine = make(tmp_path / "worker-2")
    close = Store.close
    monkeypatch.setattr(Store, "close", lambda self: (close(self), fill(self.path, 2)))
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 3
    monkeypatch.undo()
    rest = make(tmp_path / "worker-1")
    assert len(rest) == 2
    rest.close()
    mine.close()


def test_what_was_damaged_is_kept_when_all_else_has_gone(tmp_path: Path) -> None:
    fill(tmp_path / "worker-1", 3)
    (tmp_path / "worker-1" / "damaged-1").mkdir()
    mine = make(tmp_path / "worker-2")
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 3
    assert (tmp_path / "worker-1" / "damaged-1").is_dir()
    mine.close()


def test_clock_put_back_delays_no_record_that_is_taken_over(tmp_path: Path) -> None:
    left = make(tmp_path / "worker-1")
    ahead_ms, hours_ms = NOW_MS + 48 * 3_600_000, 2 * 3_600_000
    left.add([(record(b"1", at_ms=ahead_ms), ahead_ms + 3000), (record(b"2", at_ms=ahead_ms), ahead_ms + hours_ms)])
    left.close()
    mine = make(tmp_path / "worker-2")
    assert adopt_records(tmp_path, mine, make, NOW_MS) == 2
    assert mine.next_due_ms() == NOW_MS + 3000
    assert [work.due.due_ms for work in mine.take(NOW_MS + hours_ms, 5)] == [NOW_MS + 3000, NOW_MS + hours_ms]
    mine.close()


def test_queues_of_numbered_environment_are_kept_with_records(tmp_path: Path) -> None:
    """Whoever takes a folder over has them too, unless it counted others; an empty spool says nothing of them."""
    parsed = options.parse({"nameServer": "127.0.0.1:1", "environment": "1"}).for_role("producer")
    settings, sender = ProducerSettings.of(parsed), session.sender(parsed)
    assert settings.environment is not None
    known = queues_of_environment(sender, settings.environment)
    known["t"] = (MessageQueue("t", "a", 0),)
    spool = open_send_spool(open_store(tmp_path / "worker-1", parsed), sender, settings)
    spool.keep([SpooledSend(topic, SendRequest("g", b"x"), None, ("id",)) for topic in ("t", "unknown")])
    spool.finish()
    known["t"] = (MessageQueue("t", "b", 0),)
    mine = open_store(tmp_path / "worker-2", parsed)
    with pytest.raises(SpoolError, match=r"are for t/a/0, but this process uses t/b/0 as the queues of the same env"):
        open_store(tmp_path / "worker-1", parsed)
    assert adopt_records(tmp_path, mine, functools.partial(open_store, options=parsed), NOW_MS) == 0
    known.clear()
    assert adopt_records(tmp_path, mine, functools.partial(open_store, options=parsed), NOW_MS) == 2
    assert known == {"t": (MessageQueue("t", "a", 0),)}
    mine.close()
    known.clear()
    mine = open_store(mine.path, parsed)
    assert known == {"t": (MessageQueue("t", "a", 0),)}
    for _ in range(2):
        mine.settle([(work, Done()) for work in mine.take(10**15, 10)], NOW_MS)
        mine.close()
        known.clear()
        mine = open_store(mine.path, parsed)
        assert known == {}
    mine.close()
    session.close_all()


def test_traced_producer_knows_environment_queues_from_spool(
    tmp_path: Path,
) -> None:
    """What sends its records is another object, and counted anew: while a broker was away, another environment's queue."""
    given = {"environment": "1", "enable_trace": True, "on_send_failure": "spool", "spool_dir": str(tmp_path)}
    parsed = options.parse({"nameServer": "127.0.0.1:1", **given}).for_role("producer")
    settings, sender = ProducerSettings.of(parsed), session.sender(parsed)
    assert settings.environment is not None
    known = queues_of_environment(sender, settings.environment)
    known["t"] = (MessageQueue("t", "a", 0),)
    spool = open_send_spool(open_store(tmp_path, parsed), sender, settings)
    spool.keep([SpooledSend("t", SendRequest("g", b"x"), None, ("id",))])
    spool.finish()
    known.clear()
    for _ in range(2):
        with contextlib.closing(Producer("127.0.0.1:1", "g", **given)) as producer:  # type: ignore[arg-type]
            assert producer._sender is not sender
            assert queues_of_environment(producer._sender, settings.environment) is known
    assert known == {"t": (MessageQueue("t", "a", 0),)}
    session.close_all()


def test_adopter_keeps_queue_notes_that_adopted_folder_lacks(tmp_path: Path) -> None:
    """One that was empty when it was opened says nothing of topics that it had once; who takes it over has records of them."""
    parsed = options.parse({"nameServer": "127.0.0.1:1", "environment": "1"}).for_role("producer")
    settings, sender = ProducerSettings.of(parsed), session.sender(parsed)
    assert settings.environment is not None
    known = queues_of_environment(sender, settings.environment)
    known |= {topic: (MessageQueue(topic, "a", 0),) for topic in ("t", "u")}

    def kept(name: str, topic: str) -> SendSpool:
        spool = open_send_spool(open_store(tmp_path / name, parsed), sender, settings)
        spool.keep([SpooledSend(topic, SendRequest("g", b"x"), None, ("id",))])
        return spool

    spool = kept("worker-1", "t")
    spool.store.settle([(work, Done()) for work in spool.store.take(10**15, 10)], NOW_MS)
    spool.finish()
    kept("worker-1", "u").finish()
    kept("worker-2", "t").finish()
    mine = open_store(tmp_path / "worker-2", parsed)
    assert adopt_records(tmp_path, mine, functools.partial(open_store, options=parsed), NOW_MS) == 1
    mine.close()
    known.clear()
    open_store(mine.path, parsed).close()
    assert known == {topic: (MessageQueue(topic, "a", 0),) for topic in ("t", "u")}
    session.close_all()


def test_records_left_after_damage_keep_environment_queues(tmp_path: Path) -> None:
    parsed = options.parse({"nameServer": "127.0.0.1:1", "environment": "1"}).for_role("producer")
    settings, sender = ProducerSettings.of(parsed), session.sender(parsed)
    assert settings.environment is not None
    known = queues_of_environment(sender, settings.environment)
    known["t"] = (MessageQueue("t", "a", 0),)
    spool = open_send_spool(open_store(tmp_path, parsed), sender, settings)
    spool.keep([SpooledSend("t", SendRequest("g", b"x"), None, (name,)) for name in "ab"])
    database(spool.store).write([], [record_key(RECORD, 1), TOTALS])
    spool.finish()
    known.clear()
    store = open_store(tmp_path, parsed)
    assert (len(store), known) == (1, {"t": (MessageQueue("t", "a", 0),)})
    store.close()
    session.close_all()


@pytest.mark.parametrize("value", [b"x", b"5", b"[5]", b'[["a", null]]', b"[" * 100_000])
def test_a_note_about_queues_that_cannot_be_read_is_an_error(tmp_path: Path, value: bytes) -> None:
    store = make(tmp_path / "it's")
    store.add([(record(b"1"), 1)], {LASTING_PREFIX + b"queues of t": value})
    store.close()
    parsed = options.parse({"nameServer": "127.0.0.1:1", "environment": "1"}).for_role("producer")
    with pytest.raises(SpoolError, match=r"note about the queues .* spool export '") as error:
        open_store(store.path, parsed)
    assert shlex.quote(str(store.path)) in str(error.value)


def test_spool_kept_with_given_queues_is_refused_without_them(tmp_path: Path) -> None:
    """By the number alone it counts others, which are another environment's. What a command sends stays its owner's."""
    given = {"nameServer": "127.0.0.1:1", "environment": "2"}
    layout = {"environments": '{"1": [1], "2": [0]}'}
    alone, listed = (options.parse({**given, **more}).for_role("producer") for more in ({}, layout))

    def opened(parsed: Options) -> SendSpool:
        return open_send_spool(open_store(tmp_path, parsed), session.sender(parsed), ProducerSettings.of(parsed))

    def keep(spool: SendSpool) -> None:
        spool.keep([SpooledSend("t", SendRequest("g", b"x"), None, ("id",))])
        spool.finish()

    keep(opened(alone))
    open_drainer(tmp_path, listed).finish()
    opened(alone).finish()
    keep(opened(listed))
    with pytest.raises(
        SpoolError, match=r"holds records of .* environment '2' \(queues\), of .*, not of .* '2' \(queues\)\. "
    ):
        opened(alone)
    opened(listed).finish()
    session.close_all()


@pytest.mark.parametrize(
    ("port", "more", "wanted"),
    [(2, {}, "a"), (1, {"environments": '{"1": {"b": [0]}}'}, None)],
    ids=["by its number", "given"],
)
def test_assigned_records_keep_environment_queues_unless_given(
    tmp_path: Path, port: int, more: dict[str, str], wanted: str | None
) -> None:
    """Where addresses are others, and where their broker has gone for good: nothing else gets the records out."""
    old, new = (
        options.parse({"nameServer": f"127.0.0.1:{at}", "environment": "1", **given}).for_role("producer")
        for at, given in ((1, {}), (port, more))
    )
    settings, sender = ProducerSettings.of(old), session.sender(old)
    assert settings.environment is not None
    queues_of_environment(sender, settings.environment)["t"] = (MessageQueue("t", "a", 0),)
    spool = open_send_spool(open_store(tmp_path, old), sender, settings)
    spool.keep([SpooledSend("t", SendRequest("g", b"x"), None, ("id",))])
    spool.finish()
    with contextlib.closing(make(tmp_path)) as store:
        store.set_owner(owner_of(new), force=True)
    with contextlib.closing(open_store(tmp_path, new)):
        environment = ProducerSettings.of(new).environment
        assert environment is not None
        found = queues_of_environment(session.sender(new), environment)
        assert found == ({} if wanted is None else {"t": (MessageQueue("t", wanted, 0),)})
    session.close_all()


@pytest.mark.parametrize("given", ["5", '{"1": {"broker-a": [0]}}'])
def test_records_kept_by_number_keep_queues_if_layout_is_given(tmp_path: Path, given: str) -> None:
    """By a count it may have others too, which are another environment's by the number. Commands need a count, or a list."""
    a, b = (MessageQueue("t", f"broker-{name}", 0) for name in "ab")

    def opened(**more: str) -> SendSpool:
        parsed = options.parse({"nameServer": "127.0.0.1:1", "environment": "1", **more}).for_role("producer")
        settings, sender = ProducerSettings.of(parsed), ScriptedSender(Time(), "broker-a:0-3 broker-b:0-3")
        sender.routes["t"] = (a, b)
        if not more:
            assert settings.environment is not None
            queues_of_environment(sender, settings.environment)["t"] = (a,)
        return open_send_spool(open_store(tmp_path, parsed), sender, settings)

    spool = opened()
    spool.keep([SpooledSend("t", SendRequest("g", b"x"), None, ("id",))])
    spool.finish()
    with pytest.raises(
        SpoolError, match=r"for t/broker-a/0; their environment had these queues by its number"
    ) as caught:
        opened(environments='{"1": {"broker-b": [0]}}')
    assert 'such as {"1": {"broker-a": [0]}}' in str(caught.value)
    spool = opened(environments=given)
    resender: Any = spool._resender
    assert resender._engine.routes.queues("t", Deadline.after(1)) == (a,)
    spool.finish()
    session.close_all()


def test_worker_with_given_queues_skips_records_kept_by_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it sends of its own folder already knows nothing of them."""
    given = {"nameServer": "127.0.0.1:1", "environment": "1"}
    spooling = {"onSendFailure": "spool", "spoolDir": str(tmp_path)}
    by_number = options.parse(given).for_role("producer")
    settings, sender = ProducerSettings.of(by_number), session.sender(by_number)
    assert settings.environment is not None
    queues_of_environment(sender, settings.environment)["t"] = (MessageQueue("t", "a", 0),)
    make(tmp_path / "worker-1").close()
    spool = open_send_spool(open_store(tmp_path / "worker-2", by_number), sender, settings)
    spool.keep([SpooledSend("t", SendRequest("g", b"x"), None, ("id",))])
    spool.finish()
    counted = options.parse({**given, **spooling, "environments": "5"}).for_role("sink")
    worker_spool(counted, ProducerSettings.of(counted))
    assert "for queues that their environment had by its number" in caplog.text
    session.close_all()
    left = make(tmp_path / "worker-2")
    assert len(left) == 1
    left.close()


def test_a_folder_of_a_later_release_is_left_alone(tmp_path: Path) -> None:
    def mine(path: Path) -> Store:
        store = make(path)
        try:
            store.set_owner(SpoolOwner(("ns:1",), ""))
        except BaseException:
            store.close()
            raise
        return store

    left = claim_store(tmp_path, mine)
    left.add([(record(b"1"), 1)])
    database(left).write([(key, b'[2, "", [], "", "", "more"]') for key in OWNER])
    left.close()
    with pytest.raises(SpoolError, match=r"cannot be opened: an owner of .* cannot be read"):
        mine(left.path)
    store = claim_store(tmp_path, mine)
    assert store.path != left.path
    assert adopt_records(tmp_path, store, mine, NOW_MS) == 0
    store.close()
