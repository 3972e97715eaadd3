"""Spark knows the names of the settings. It would accept a misspelt one without an error."""

from __future__ import annotations

import logging
import os
import uuid
from pathlib import Path

import pyspark.sql.datasource
import pytest

from rocketmq_spark import low_latency_conf
from rocketmq_spark.base import folders
from rocketmq_spark.spark.conf import private_socket_settings

SOCKETS = "spark.python.unix.domain.socket.enabled"
MANAGER = "spark.sql.streaming.checkpointFileManagerClass"


def test_spark_takes_the_checkpoint_manager(spark, tmp_path) -> None:
    hadoop = spark._jvm.org.apache.hadoop
    conf = hadoop.conf.Configuration(spark.sparkContext._jsc.hadoopConfiguration())
    conf.set(MANAGER, low_latency_conf()[MANAGER])
    package = low_latency_conf()[MANAGER].rpartition(".")[0]  # Spark 4.1 moved it
    made = getattr(spark._jvm, f"{package}.CheckpointFileManager").create(hadoop.fs.Path(str(tmp_path)), conf)
    assert made.getClass().getName() == low_latency_conf()[MANAGER]


def test_spark_knows_the_other_settings(spark) -> None:
    known = spark._jvm.org.apache.spark.internal.config.ConfigEntry
    settings = {**low_latency_conf(), SOCKETS: "true"}  # also where tests run with another umask
    unknown = [n for n in settings if n != MANAGER and known.findEntry(n) is None]
    # Spark 4.1 added Unix sockets; 4.0 ignores their setting.
    no_sockets = not hasattr(pyspark.sql.datasource, "DataSourceStreamArrowWriter")
    assert unknown == ([SOCKETS] if no_sockets else [])


def test_each_call_returns_a_new_dict() -> None:
    low_latency_conf().clear()
    assert low_latency_conf()


@pytest.mark.parametrize("mask", [0o000, 0o020, 0o002, 0o055])
def test_sockets_that_others_could_write_to_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mask: int
) -> None:
    """Spark checks nobody who connects to them, and unpickles what comes. A group of its own has only this user."""
    monkeypatch.setattr(folders, "_is_private_group", lambda gid, uid: False)
    before = os.umask(mask)
    try:
        with caplog.at_level(logging.WARNING):
            made = low_latency_conf()
    finally:
        os.umask(before)
    assert SOCKETS not in made
    assert f"the umask {mask:03o} lets other users write" in caplog.text


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_sockets_of_this_user_alone_are_used(monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    monkeypatch.setattr(folders, "_is_private_group", lambda gid, uid: True)
    before = os.umask(mask)
    try:
        assert low_latency_conf()[SOCKETS] == "true"
    finally:
        os.umask(before)


def test_the_umask_is_known_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    known = folders.creation_mask()
    monkeypatch.setattr(Path, "read_text", missing)
    assert folders.creation_mask() == folders.creation_mask() == known


def test_a_socket_fits_into_its_folder() -> None:
    folder = Path("/", "f" * 59)
    assert private_socket_settings(folder) == {SOCKETS: "true", "spark.python.unix.domain.socket.dir": str(folder)}
    assert len(f"{folder}/.{uuid.uuid4()}.sock") == 103
    assert private_socket_settings(Path("/", "f" * 60)) == private_socket_settings(Path("/", "ü" * 30)) == {}
