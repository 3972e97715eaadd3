"""What the options of a spool must say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import options
from rocketmq_spark.base import extras
from rocketmq_spark.errors import OptionError
from rocketmq_spark.session.spools import SpoolSettings, owner_of


def of(**given: Any) -> SpoolSettings | None:
    return SpoolSettings.of(options.parse({"name_server": "h:1", **given}).for_role("producer"))


def test_without_a_word_sends_fail() -> None:
    assert of() is None
    assert of(on_send_failure="fail") is None


def test_a_spool_needs_a_folder_and_has_defaults() -> None:
    assert of(on_send_failure="spool", spool_dir="/s") == SpoolSettings(Path("/s"), "always", 1 << 30)
    chosen = of(on_send_failure="spool", spool_dir="~/s", spool_sync="batch", spool_max_bytes="5m")
    assert chosen == SpoolSettings(Path.home() / "s", "batch", 5 << 20)
    with pytest.raises(OptionError, match="which needs option 'spoolDir'"):
        of(on_send_failure="spool")


@pytest.mark.parametrize("given", [{"spool_dir": "/s"}, {"spool_sync": "never"}, {"spool_max_bytes": "1m"}])
def test_its_options_alone_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="has no effect without 'onSendFailure' spool"):
        of(**given)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'rocksdict>=0.3.29'"):
        of(on_send_failure="spool", spool_dir="/s")


def test_each_cluster_namespace_and_environment_is_own_owner() -> None:
    """Or a folder that one left would be sent to the topics of another."""
    dev, proxy = {"environment": "dev"}, {"transport": "grpc"}
    each: list[dict[str, str]] = [
        {"name_server": "h:1"},
        {"name_server": "i:1"},
        {"name_server": "h:1", "namespace": "ns"},
        {"name_server": "h:1", "environment": "1"},
        {"name_server": "h:1", "environment": "2"},
        {"name_server": "h:1", "environment_mode": "suffix", **dev},
        {"name_server": "h:1", "environment_mode": "suffix", "namespace": "ns", **dev},
        {"proxy_endpoint": "h:2", **proxy},
        {"proxy_endpoint": "i:2", **proxy},
        {"proxy_endpoint": "i:2", "namespace": "ns", **proxy},
        {"proxy_endpoint": "i:2", "environment_mode": "suffix", **dev, **proxy},
    ]
    owners = [owner_of(options.parse(given).for_role("producer")) for given in each]
    assert [(a, b) for i, a in enumerate(owners) for b in owners[:i] if a.may_use(b)] == []
