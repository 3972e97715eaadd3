"""Which offsets a broadcasting member continues with: those of its cluster, also after an upgrade or with other name servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import Consumer, aio
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.offsets import FILE_NAME, FileOffsets, LocalOffsets, cluster_folder, offsets_path
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.errors import OffsetError, OptionError
from rocketmq_spark.model import MessageQueue
from tests.consumer.group import GroupBench
from tests.fakes.group_member import GROUP
from tests.queues import q, qs

SOON = Deadline(1e9)
T = qs("a:0-1 b:0-1")
HOST = "host@DEFAULT"


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "host")


@pytest.fixture
def earlier(tmp_path: Path) -> LocalOffsets:
    """The file that earlier releases used for all clusters."""
    return LocalOffsets(tmp_path / HOST / GROUP / FILE_NAME)


def start(group: GroupBench, folder: Path, *servers: str, **how: Any) -> BaseConsumer:
    how = {"consume_from": ConsumeFrom(ConsumeFromWhere.EARLIEST), **how}
    return group.start(clustering=False, offsets_folder=folder, name_servers=servers, **how)[0]


def read(group: GroupBench, folder: Path, *servers: str, **how: Any) -> list[bytes]:
    """What a member gets from its start until it stops."""
    group.got.clear()
    consumer = start(group, folder, *servers, **how)
    group.time.advance(2)
    consumer.stop()
    return sorted(group.bodies())


@pytest.mark.parametrize("ordered", [False, True])
def test_members_of_two_clusters_have_their_own_offsets(group: GroupBench, tmp_path: Path, ordered: bool) -> None:
    """Their brokers and topics have the same names."""
    group.brokers.send(q("a:0"), b"1", b"2")
    assert read(group, tmp_path, "a:1", ordered=ordered) == [b"1", b"2"]
    assert read(group, tmp_path, "b:1", ordered=ordered) == [b"1", b"2"]
    assert read(group, tmp_path, "a:1", ordered=ordered) == []


def test_members_of_two_clusters_run_at_once(group: GroupBench, tmp_path: Path) -> None:
    both = [start(group, tmp_path, server) for server in ("a:1", "b:1")]
    group.time.advance(2)
    assert [group.owned_queues(consumer) for consumer in both] == [T, T]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["a:1", "b:1"], ["b:1", "a:1"]),
        (["NS.example:1"], ["ns.example:1"]),
        (["a:1", "b:1"], ["a:1"]),
        (["b:1"], ["a:1", "b:1"]),
        (["a:1", "b:1"], ["c:1", "b:1"]),
        (["[::1]:1", "a:1"], ["[::1]:1"]),
    ],
)
def test_a_changed_list_of_name_servers_keeps_the_offsets(
    group: GroupBench, tmp_path: Path, before: list[str], after: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    group.brokers.send(q("a:0"), b"1")
    assert read(group, tmp_path, *before) == [b"1"]
    group.brokers.send(q("a:0"), b"2")
    assert read(group, tmp_path, *after) == [b"2"]
    assert "without offsets" not in caplog.text
    assert len(list(tmp_path.rglob(FILE_NAME))) == 1


def test_of_two_former_lists_the_newest_file_is_used(tmp_path: Path) -> None:
    files = [LocalOffsets(offsets_path(tmp_path, HOST, GROUP, [server])) for server in ("a:1", "b:1", "c:1")]
    for number, file in enumerate(files):
        file.store({T[0]: number})
        os.utime(str(file), (0, 10 if number == 0 else number))
    new = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1", "b:1"]))
    new.adopt_renamed_file()
    new.adopt_renamed_file()
    assert (new.load(), files[1].load()) == ({T[0]: 0}, {T[0]: 1})


@pytest.mark.parametrize("after", [["a:1", "b:1"], ["a:1"]])
def test_a_crash_while_a_file_moves_loses_no_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: list[str]
) -> None:
    """Between file and backup. The next list is the new one, or the old one again."""
    former = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1"]))
    former.store({T[0]: 5})
    os.utime(str(former), (0, 1))
    former.store({T[0]: 500, T[1]: 300})
    real, moved = Path.replace, []

    def replace(path: Path, target: Path) -> Path:
        if moved:
            raise KeyboardInterrupt
        moved.append(target)
        return real(path, target)

    grown = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1", "b:1"]))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            grown.adopt_renamed_file()
    new = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, after))
    new.adopt_renamed_file()
    assert new.load() == {T[0]: 500, T[1]: 300}


def test_a_clock_that_is_set_back_brings_no_old_backup_back(tmp_path: Path) -> None:
    """A crash left the backup of the former file, and the clock was ahead then."""
    former = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1"]))
    former.store({T[0]: 5})
    former.store({T[0]: 9})
    grown = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1", "b:1"]))
    Path(str(grown)).parent.mkdir()
    Path(str(former)).replace(str(grown))
    grown.store({T[0]: 200})
    for path in Path(str(grown)).parent.glob(f"{FILE_NAME}*"):
        os.utime(path, (0, 1))
    former.adopt_renamed_file()
    assert former.load() == {T[0]: 200}


def test_a_folder_that_may_not_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1"])).store({T[0]: 5})
    closed = offsets_path(tmp_path, HOST, GROUP, ["a:1", "z:1"]).parent
    closed.mkdir()
    real = Path.stat

    def stat(path: Path, **how: Any) -> os.stat_result:
        if path.parent == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **how)

    monkeypatch.setattr(Path, "stat", stat)
    new = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1", "b:1"]))
    new.adopt_renamed_file()
    assert new.load() == {T[0]: 5}
    assert f"{closed / FILE_NAME} may have offsets of the group, but cannot be read" in caplog.text


def test_a_backup_alone_moves_with_the_list_of_name_servers(tmp_path: Path) -> None:
    former = offsets_path(tmp_path, HOST, GROUP, ["a:1"])
    LocalOffsets(former).store({T[0]: 1})
    former.rename(former.with_name(f"{FILE_NAME}.bak"))
    new = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1", "b:1"]))
    new.adopt_renamed_file()
    assert new.load() == {T[0]: 1}


def test_a_file_that_a_member_with_another_list_uses_is_refused(group: GroupBench, tmp_path: Path) -> None:
    first = start(group, tmp_path, "a:1", "b:1")
    group.time.advance(2)
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(10)
    with pytest.raises(OptionError, match="localOffsetsDir"):
        start(group, tmp_path, "a:1")
    first.stop()
    assert read(group, tmp_path, "a:1") == []


def test_a_member_with_another_list_is_refused_before_it_stores(tmp_path: Path) -> None:
    first = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1", "b:1"]))
    first.lock()
    second = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1"]))
    with pytest.raises(OptionError, match="localOffsetsDir"):
        second.adopt_renamed_file()
    first.unlock()
    second.adopt_renamed_file()


@given(st.lists(st.from_regex(r"[a-z]{1,63}\.[a-zA-Z]{1,63}:[1-9][0-9]{0,4}", fullmatch=True), min_size=1, max_size=9))
def test_cluster_folder_name_is_valid_and_ignores_server_order(servers: list[str]) -> None:
    name = cluster_folder(servers)
    assert 0 < len(name.encode()) <= 255
    assert name == cluster_folder(servers[::-1] + servers)
    assert set(name.split(",")) <= {server.lower() for server in servers}


# --- the file of earlier releases


@pytest.mark.parametrize("ordered", [False, True])
def test_the_file_of_an_earlier_release_is_adopted_once(
    group: GroupBench, tmp_path: Path, earlier: LocalOffsets, ordered: bool
) -> None:
    group.brokers.send(q("a:0"), b"1", b"2", b"3")
    earlier.store(dict.fromkeys(T, 0) | {q("a:0"): 1})
    earlier.store(dict.fromkeys(T, 0) | {q("a:0"): 2})
    how = {"ordered": ordered, "consume_from": ConsumeFrom(ConsumeFromWhere.LATEST)}
    assert read(group, tmp_path, "a:1", **how) == [b"3"]
    assert not earlier.exists
    assert read(group, tmp_path, "b:1", consume_from=ConsumeFrom(ConsumeFromWhere.EARLIEST)) == [b"1", b"2", b"3"]


def test_each_cluster_adopts_the_queues_of_its_brokers(
    group: GroupBench, tmp_path: Path, earlier: LocalOffsets
) -> None:
    """Members of two clusters, which ran one after the other, shared the file; their brokers have different names."""
    others = qs("c:0-1")
    earlier.store(dict.fromkeys([*T, *others], 1))
    for queue in (*T, *others):
        group.brokers.send(queue, b"1", str(queue).encode())
    first = group.brokers.topics["T"]
    assert len(read(group, tmp_path, "a:1", consume_from=ConsumeFrom(ConsumeFromWhere.LATEST))) == len(first) == 4
    assert earlier.load() == dict.fromkeys(others, 1)
    group.brokers.topics["T"] = others
    assert len(read(group, tmp_path, "b:1", consume_from=ConsumeFrom(ConsumeFromWhere.LATEST))) == 2
    assert not earlier.exists


def test_offset_half_adopted_at_a_crash_goes_to_no_other_cluster(
    group: GroupBench, tmp_path: Path, earlier: LocalOffsets
) -> None:
    group.brokers.send(q("a:0"), b"1", b"2")
    earlier.store({q("a:0"): 1, q("a:1"): 0})
    LocalOffsets(offsets_path(tmp_path, HOST, GROUP, ["a:1"])).store({q("a:0"): 1})
    assert read(group, tmp_path, "a:1") == [b"2"]
    assert not earlier.exists
    assert read(group, tmp_path, "b:1") == [b"1", b"2"]


def test_offset_beyond_the_queue_end_is_not_adopted(
    group: GroupBench, tmp_path: Path, earlier: LocalOffsets, caplog: pytest.LogCaptureFixture
) -> None:
    group.brokers.send(q("a:0"), b"1")
    earlier.store({q("a:0"): 7, q("a:1"): 0})
    assert read(group, tmp_path, "a:1") == [b"1"]
    assert earlier.load() == {q("a:0"): 7}
    assert caplog.text.count(f"offset 7 of {q('a:0')} in {earlier} is greater than the end of the queue, 1") == 1
    group.brokers.send(q("a:0"), *(b"x",) * 9)
    assert len(read(group, tmp_path, "a:1")) == 9, "an adopted file is not looked at again"
    assert earlier.load() == {q("a:0"): 7}


def test_a_queue_waits_while_an_earlier_release_uses_the_file(
    group: GroupBench, tmp_path: Path, earlier: LocalOffsets, caplog: pytest.LogCaptureFixture
) -> None:
    """As while members of two releases are exchanged: what it stores last counts."""
    group.brokers.send(q("a:0"), b"1", b"2", b"3")
    earlier.store({q("a:0"): 1})
    earlier.lock()
    consumer = start(group, tmp_path, "a:1")
    group.time.advance(5)
    assert group.owned_queues(consumer) == qs("a:1 b:0-1")
    assert f"offsets in {earlier}" in caplog.text
    earlier.store({q("a:0"): 2})
    earlier.unlock()
    group.time.advance(5)
    assert (group.owned_queues(consumer), group.bodies()) == (T, [b"3"])


def test_a_queue_waits_while_its_broker_does_not_report_its_end(
    group: GroupBench, tmp_path: Path, earlier: LocalOffsets
) -> None:
    group.brokers.send(q("a:0"), b"1", b"2")
    earlier.store({q("a:0"): 1})
    group.brokers.failing["bounds"] = OffsetError("no answer")
    consumer = start(group, tmp_path, "a:1")
    group.time.advance(3)
    assert q("a:0") not in group.owned_queues(consumer)
    assert earlier.load() == {q("a:0"): 1}
    del group.brokers.failing["bounds"]
    group.time.advance(5)
    assert group.bodies() == [b"2"]


def test_two_clusters_adopting_at_once_get_each_offset_once(tmp_path: Path, earlier: LocalOffsets) -> None:
    """The brokers have the same names: each offset has one new owner. A member that finds the file in use tries again."""
    queues = qs("a:0-9")
    earlier.store({queue: number for number, queue in enumerate(queues)})
    ready = threading.Barrier(2)

    def adopt(server: str) -> dict[MessageQueue, int | None]:
        file = LocalOffsets(offsets_path(tmp_path, HOST, GROUP, [server]))
        store = FileOffsets(file, MemberState(Thresholds()), lambda queue, _: 100)
        ready.wait(60)
        offsets = dict[MessageQueue, int | None]()
        while len(offsets) < len(queues):
            for queue in set(queues) - offsets.keys():
                with contextlib.suppress(OptionError):
                    offsets[queue] = store.read(queue, SOON)
        assert file.load() == {queue: offset for queue, offset in offsets.items() if offset is not None}
        return offsets

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(adopt, ["a:1", "b:1"])
    adopted = [(queue, offset) for offsets in (one, other) for queue, offset in offsets.items() if offset is not None]
    assert sorted(adopted) == list(zip(queues, range(10), strict=True))
    assert not earlier.exists


OFFSETS = st.dictionaries(st.sampled_from(T), st.integers(0, 20), min_size=1)


@given(OFFSETS, OFFSETS, st.integers(0, 40))
def test_a_crash_while_a_file_is_adopted_loses_no_offset(
    tmp_path_factory: pytest.TempPathFactory, stored: dict[MessageQueue, int], ends: dict[MessageQueue, int], steps: int
) -> None:
    """Whatever the step at which the disk or the process fails, another start reads the same offsets."""
    folder = tmp_path_factory.mktemp("offsets")
    earlier, path = LocalOffsets(folder / HOST / GROUP / FILE_NAME), offsets_path(folder, HOST, GROUP, ["a:1"])
    earlier.store(stored)
    expected = {queue: offset for queue, offset in stored.items() if offset <= ends.get(queue, 0)}
    left = [steps]

    def adopt() -> dict[MessageQueue, int | None]:
        file = LocalOffsets(path)
        store = FileOffsets(file, MemberState(Thresholds()), lambda queue, _: ends.get(queue, 0))
        store.open()
        try:
            return {queue: store.read(queue, SOON) for queue in T}
        finally:
            store.close()

    def failing(name: str) -> Any:
        real = getattr(os, name)

        def step(*arguments: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise OSError("the disk is gone")
            return real(*arguments, **more)

        return step

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "replace", "unlink"):
            patch.setattr(os, name, failing(name))
        try:
            adopt()
        except OffsetError:
            assert left[0] < 0
    assert adopt() == {queue: expected.get(queue) for queue in T}
    rest = stored.keys() - expected.keys()
    assert rest <= earlier.load().keys() <= stored.keys()


# --- damaged files


@pytest.mark.parametrize("of_cluster", [True, False])
@pytest.mark.parametrize("damage", ["nonsense", "", "[]", '{"topics":{"T":{"a":{"0":"x"}}}}', "[" * 100_000])
def test_a_start_with_damaged_offset_files_is_an_error(
    group: GroupBench, tmp_path: Path, damage: str, of_cluster: bool
) -> None:
    path = offsets_path(tmp_path, HOST, GROUP, ["a:1"]) if of_cluster else tmp_path / HOST / GROUP / FILE_NAME
    path.parent.mkdir(parents=True)
    for name in (FILE_NAME, f"{FILE_NAME}.bak"):
        path.with_name(name).write_text(damage)
    with pytest.raises(OffsetError, match="cannot be read") as raised:
        start(group, tmp_path, "a:1")
    assert str(path) in str(raised.value)
    assert not group.brokers.members
    assert path.read_text() == damage
    LocalOffsets(path).remove()
    group.brokers.send(q("a:0"), b"1")
    assert read(group, tmp_path, "a:1") == [b"1"], "the failed start gave the file free"


def test_a_start_with_a_damaged_file_uses_its_backup(group: GroupBench, tmp_path: Path) -> None:
    group.brokers.send(q("a:0"), b"1", b"2")
    path = offsets_path(tmp_path, HOST, GROUP, ["a:1"])
    LocalOffsets(path).store(dict.fromkeys(T, 0) | {q("a:0"): 1})
    path.rename(path.with_name(f"{FILE_NAME}.bak"))
    path.write_text(json.dumps({"topics": 1}))
    assert read(group, tmp_path, "a:1") == [b"2"]


@pytest.mark.parametrize("awaited", [False, True])
def test_a_users_start_with_damaged_offset_files_is_an_error(tmp_path: Path, awaited: bool) -> None:
    """Before it asks a server: none listens here."""
    path = offsets_path(tmp_path, HOST, GROUP, ["127.0.0.1:1"])
    path.parent.mkdir(parents=True)
    path.write_text("nonsense")
    given: dict[str, Any] = {"model": "broadcasting", "local_offsets_dir": str(tmp_path)}

    async def start_awaited() -> None:
        async with aio.Consumer(name_server="127.0.0.1:1", group=GROUP, **given) as consumer:
            await consumer.subscribe("T")

            async def listener(messages: Any, context: Any) -> None: ...

            await consumer.start(listener)

    def start_on_threads() -> None:
        with Consumer(name_server="127.0.0.1:1", group=GROUP, **given) as consumer:
            consumer.subscribe("T")
            consumer.start(lambda messages, context: None)

    with pytest.raises(OffsetError, match=r"offsets\.json.*Repair"):
        asyncio.run(start_awaited()) if awaited else start_on_threads()
