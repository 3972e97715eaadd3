"""What a query's folder says, in files as Spark writes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.source.checkpoint import Batch, last_batch, read
from rocketmq_spark.source.offsets import Offsets

Q = MessageQueue("t", "broker-a", 3)


def entry(folder: Path, number: int, *sources: str, done: bool = True) -> None:
    for name in ("offsets", "commits"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "offsets" / str(number)).write_text("\n".join(("v1", "{}", *sources)))
    (folder / "offsets" / f".{number}.crc").write_bytes(b"crc")
    if done:
        (folder / "commits" / str(number)).write_text("v1\n{}")


def ours(offset: int) -> str:
    return json.dumps(Offsets({Q: offset}).to_json())


def test_the_last_batch_that_is_done_and_that_was_begun(tmp_path: Path) -> None:
    for number in (8, 9, 10):
        entry(tmp_path, number, ours(number), done=number < 10)
    assert last_batch(tmp_path) == Batch(9, {0: Offsets({Q: 9})})
    assert last_batch(tmp_path, committed=False) == Batch(10, {0: Offsets({Q: 10})})


def test_sources_of_others_and_those_without_an_offset_are_left_out(tmp_path: Path) -> None:
    entry(tmp_path, 0, '{"other":{"0":5}}', "-", ours(7), '"12"', '{"logOffset":1}')
    assert read(tmp_path, 0).sources == {2: Offsets({Q: 7})}


def test_a_query_without_a_batch_has_none(tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    assert last_batch(tmp_path) is None
    entry(tmp_path, 0, ours(1), done=False)
    assert last_batch(tmp_path) is None


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(OffsetError, match="is no checkpoint: it has no folder 'offsets'"):
        last_batch(tmp_path)
    entry(tmp_path, 0)
    (tmp_path / "offsets" / "0").write_text("something")
    with pytest.raises(OffsetError, match="is no entry of an offset log"):
        last_batch(tmp_path)
