"""Spark follows links in a checkpoint, so those who may change what an own link leads to count as others."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.spark.checkpoints.owners import describe_exposure


@pytest.mark.parametrize("name", ["offsets", "rocketmq", "offsets/3"])
def test_an_own_link_to_a_folder_of_others_is_named(tmp_path: Path, name: str) -> None:
    checkpoint, shared = tmp_path / "checkpoint", tmp_path / "shared"
    (checkpoint / name).parent.mkdir(parents=True)
    for folder in (tmp_path, checkpoint, (checkpoint / name).parent):
        folder.chmod(0o755)
    shared.mkdir(0o755)
    (shared / "file").touch(0o644)
    (checkpoint / name).symlink_to(shared / "file" if "/" in name else shared)
    assert describe_exposure(str(checkpoint)) is None
    shared.chmod(0o777)
    found = describe_exposure(str(checkpoint))
    assert found is not None
    assert f"others (mode 0777) may change {shared}" in found[0] or f"may change {checkpoint / name}" in found[0]
