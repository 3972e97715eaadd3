from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.consumer.local_offsets import LocalOffsets, file_of
from rocketmq_spark.errors import OffsetError
from tests.queues import q
from tests.strategies import queues

A, B = q("a:0"), q("b:7", "U")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return file_of(tmp_path, "host@DEFAULT", "g")


def test_what_is_stored_is_there_after_a_restart_and_readable(path: Path) -> None:
    assert path.parts[-3:] == ("host@DEFAULT", "g", "offsets.json")
    assert LocalOffsets(path).load() == {}
    LocalOffsets(path).store({B: 2, A: 1})
    assert LocalOffsets(path).load() == {A: 1, B: 2}
    assert path.read_text() == '{"topics":{"T":{"a":{"0":1}},"U":{"b":{"7":2}}},"v":1}'


@given(st.dictionaries(queues, st.integers(0, (1 << 63) - 1), max_size=9))
def test_any_queues_come_back(tmp_path_factory: pytest.TempPathFactory, offsets: dict[object, int]) -> None:
    store = LocalOffsets(tmp_path_factory.mktemp("offsets") / "offsets.json")
    store.store(offsets)
    assert store.load() == offsets


@pytest.mark.parametrize(
    "damage", ["", '{"topics":{"T":{"a":{"0":1', "[]", '{"topics":{"T":{"a":{"0":-1}}}}', '{"v":1}']
)
def test_a_damaged_file_is_replaced_by_the_one_before_and_never_becomes_it(path: Path, damage: str) -> None:
    store = LocalOffsets(path)
    store.store({A: 1})
    store.store({A: 2})
    path.write_text(damage)
    assert store.load() == {A: 1}
    store.store({A: 3})
    path.write_text(damage)
    assert store.load() == {A: 1}


def test_when_both_are_damaged_it_is_said_and_nothing_begins_anew(path: Path) -> None:
    store = LocalOffsets(path)
    store.store({A: 1})
    store.store({A: 2})
    path.write_text("nonsense")
    backup = path.with_name("offsets.json.bak")
    backup.write_text(json.dumps({"topics": 1}))
    with pytest.raises(OffsetError) as raised:
        store.load()
    assert str(path) in str(raised.value)
    assert str(backup) in str(raised.value)
    assert "begin anew" in str(raised.value)


def test_a_damaged_only_file_is_no_empty_one(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("nonsense")
    with pytest.raises(OffsetError, match="cannot be read"):
        LocalOffsets(path).load()


def test_two_processes_that_store_at_once_mix_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other, real = LocalOffsets(path), LocalOffsets(path), os.fsync
    store.store({A: 0})
    turns = [lambda: other.store({A: 2, B: 2})]

    def beside(descriptor: int) -> None:
        if turns:
            turns.pop()()  # while the first one has written, and not replaced anything yet
        real(descriptor)

    monkeypatch.setattr(os, "fsync", beside)
    store.store({A: 1})
    assert store.load() == {A: 1}
    assert sorted(each.name for each in path.parent.iterdir()) == ["offsets.json", "offsets.json.bak"]
    path.unlink()
    assert store.load() in ({A: 0}, {A: 2, B: 2})


def test_a_process_that_dies_while_it_writes_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalOffsets(path)
    store.store({A: 1})

    def dies(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(OffsetError, match=r"cannot be stored in .*the disk is full"):
        store.store({A: 2})
    assert store.load() == {A: 1}
