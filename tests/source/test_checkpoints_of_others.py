"""A query does not start with a checkpoint that another user of the machine may change: its logs decide what is read."""

from __future__ import annotations

import logging
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from rocketmq_spark import foreach_batch_writer
from rocketmq_spark.base import folders, process
from rocketmq_spark.errors import OffsetError, RocketMQError
from rocketmq_spark.spark.checkpoints import owners
from rocketmq_spark.spark.datasource import RocketMQDataSource
from tests import users


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    process.entries(owners._WARNED_CHECKPOINTS_KEY).clear()
    path = tmp_path / "folder" / "checkpoint"
    (path / "rocketmq").mkdir(parents=True, mode=0o755)
    (path / "rocketmq" / "epoch").write_text("1")
    for name in ("offsets", "commits", "state/0/0", "rocketmq/5"):
        (path / name).mkdir(parents=True, mode=0o755)
        (path / name / ("w" if name == "rocketmq/5" else "0")).write_text("v1")
    return path


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    if not users.IS_ROOT:
        users.of_root(monkeypatch, os.getuid())


def planted(path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user has made this part of the checkpoint, or may write to it."""
    place, _, how = place.partition(" ")
    if how:
        (path / place).chmod(0o777)
    elif users.IS_ROOT:
        os.chown(path / place, users.OTHER, users.OTHER)
    else:  # of this user, while another one starts the query as root
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        users.of_root(monkeypatch, os.getuid() + 1)


PLACES = [
    ".",
    "..",
    "offsets",
    "offsets/0",
    "commits/0",
    ". written",
    ".. written",
    "offsets written",
    "offsets/0 written",
    "rocketmq/5",
    "rocketmq/5/w",
    "rocketmq/epoch written",
]


@pytest.mark.parametrize("place", PLACES)
def test_root_starts_no_query_that_others_may_lead(
    checkpoint: Path, place: str, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners.check_owner(str(checkpoint))
    planted(checkpoint, place, monkeypatch)
    for location in (str(checkpoint), f"file:{checkpoint}", f"File://{checkpoint}", os.path.relpath(checkpoint)):
        with pytest.raises(
            OffsetError, match=r"root does not use the checkpoint .* may change .*what the query reads"
        ) as caught:
            owners.check_owner(location)
    _, _, remedy = str(caught.value).partition("writes again. ")
    new = "name a new folder, in one that only you and root may change"
    assert remedy.lower().endswith(new)
    assert "chown -R" not in remedy
    theirs = f"Let uid {users.OTHER if users.IS_ROOT else os.getuid()}"
    starts = {".": "Name a new", "..": "Use a folder for the checkpoint", "o": theirs, "c": theirs, "r": theirs}
    assert remedy.startswith("Run: chmod go-w " if "written" in place else starts.get(place, starts.get(place[0], "")))


@pytest.mark.parametrize("place", [".", ". written", "offsets/0 written"])
def test_other_users_get_one_warning(
    checkpoint: Path, place: str, as_root: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted(checkpoint, place, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: users.OTHER + 1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            owners.check_owner(str(checkpoint))
    (line,) = caplog.messages
    assert line.startswith(f"the checkpoint {checkpoint}: ")
    assert ("run, not root: chmod go-w" if "written" in place else "Name a new folder") in line


def test_folders_that_nobody_else_may_change_are_used(
    checkpoint: Path, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new folder is Spark's to create; links are followed to what is used."""
    shared = checkpoint.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    checkpoint.rename(shared / "mine")
    (shared / "link").symlink_to("mine")
    for path in (shared / "mine", shared / "link", checkpoint.parent / "new" / "one"):
        owners.check_owner(str(path))
    owners.check_owner("s3a://bucket/checkpoint")
    planted(shared / "mine", ".", monkeypatch)
    with pytest.raises(OffsetError):
        owners.check_owner(str(shared / "link"))


def test_the_state_of_a_query_is_not_listed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a million files, and each start would take minutes."""
    seen: list[Path] = []
    of = folders.exposures_of
    monkeypatch.setattr(
        folders, "exposures_of", lambda path, entries, *owner: of(path, (seen.append(e) or e for e in entries), *owner)
    )
    owners.check_owner(str(checkpoint))
    assert {path.relative_to(checkpoint).as_posix() for path in seen} == {
        *("offsets", "commits", "state", "rocketmq"),
        *("offsets/0", "commits/0", "rocketmq/epoch", "rocketmq/5", "rocketmq/5/w"),
    }


def test_sinks_look_when_their_query_starts(checkpoint: Path, as_root: None, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(checkpoint, ".", monkeypatch)
    schema = StructType([StructField("body", BinaryType())])
    sink = {"nameServer": "127.0.0.1:1", "topic": "t"}
    with pytest.raises(OffsetError, match="root does not use the checkpoint"):
        RocketMQDataSource({**sink, "checkpointLocation": str(checkpoint)}).streamWriter(schema, False)
    for guarantee in ("exactly-once", "at-least-once"):
        with pytest.raises(RocketMQError, match="root does not use the checkpoint"):
            foreach_batch_writer(
                "127.0.0.1:1", checkpoint_location=str(checkpoint), topic="t", delivery_guarantee=guarantee
            )


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/inner"])
def test_a_folder_that_is_away_for_a_moment_is_not_a_new_one(checkpoint: Path, name: str, as_root: None) -> None:
    """Its owner renames it in a folder of all users while it is looked at, and back before Spark reads it."""
    (shared := checkpoint.parent).chmod(0o1777)
    owners.check_owner(str(checkpoint))
    checkpoint.rename(shared / "away")
    with pytest.raises(OffsetError, match=rf"others \(mode 1777\) may change {shared}") as caught:
        owners.check_owner(str(shared / name))
    assert caught.value.remedy is not None
    (command,) = re.findall(r"Run: (.*?), or", caught.value.remedy)
    assert command == f"mkdir -m 700 {checkpoint}"
    subprocess.run(shlex.split(command), check=True)
    owners.check_owner(str(shared / name))
