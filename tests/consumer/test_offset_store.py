from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.flow import Thresholds
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.local_offsets import LocalOffsets
from rocketmq_spark.consumer.offset_store import BrokerOffsets, FileOffsets
from rocketmq_spark.errors import CallTimeout
from tests.consumer.group import FakeMember, GroupBench
from tests.queues import q

A, B, SOON = q("a:0"), q("b:0"), Deadline(1e12)


@pytest.fixture
def held() -> Held:
    return Held(Thresholds())


def test_1_9_brokers_are_told_what_changed_and_told_again_what_failed(group: GroupBench, held: Held, caplog) -> None:
    port = FakeMember(group.brokers, "me")
    store = BrokerOffsets(port, "g", held)
    store.persist(SOON)
    held.offsets.put(A, 1)
    held.offsets.put(B, 2)
    group.brokers.failing["commit b"] = CallTimeout("late")
    store.persist(SOON)
    assert "offset 2 of T/b/0 is not stored yet" in caplog.text
    del group.brokers.failing["commit b"]
    store.persist(SOON)
    store.persist(SOON)
    assert port.seen("commit") == [{A: 1, B: 2}, {B: 2}]
    store.persist(SOON, [A, q("z:9")])
    assert port.seen("commit")[-1] == {A: 1}
    assert store.read(A, SOON) == 1
    assert store.read(q("c:0"), SOON) is None


def test_a_file_keeps_what_is_not_here_now(held: Held, tmp_path: Path) -> None:
    file = LocalOffsets(tmp_path / "g" / "offsets.json")
    file.store({B: 7})
    store = FileOffsets(file, held)
    store.persist(SOON)
    held.offsets.put(A, 1)
    store.persist(SOON)
    assert file.load() == {A: 1, B: 7}
    assert (store.read(B, SOON), store.read(q("c:0"), SOON)) == (7, None)


def test_a_file_that_cannot_be_written_is_told_and_tried_again(held: Held, tmp_path: Path, caplog) -> None:
    (tmp_path / "g").write_text("a file where a folder should be")
    store = FileOffsets(LocalOffsets(tmp_path / "g" / "offsets.json"), held)
    held.offsets.put(A, 1)
    store.persist(SOON)
    assert "offsets are not stored yet" in caplog.text
    (tmp_path / "g").unlink()
    store.persist(SOON)
    assert store.read(A, SOON) == 1
