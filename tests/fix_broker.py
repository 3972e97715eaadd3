"""A real cluster for our own tests: the plug-in for users with shorter names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import LocalBroker, distro
from tests.witness import JavaPeer


@pytest.fixture(scope="session")
def broker_cluster(rocketmq: LocalBroker) -> LocalBroker:
    """One broker for the session. Tests that break brokers start a LocalBroker of their own."""
    return rocketmq


@pytest.fixture
def java_peer(rocketmq: LocalBroker) -> JavaPeer:
    """RocketMQ's own client at the shared broker."""
    return JavaPeer(rocketmq.name_server)


@pytest.fixture
def make_topic(make_rocketmq_topic: Callable[..., str]) -> Callable[..., str]:
    return make_rocketmq_topic


@pytest.fixture
def topic(rocketmq_topic: str) -> str:
    return rocketmq_topic


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of our own with the user's jars and archives, so that nothing is fetched and no local broker is met."""
    distro.fetch()
    shared = distro.cache_folder()
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("jars", "archives"):
        (shared / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    monkeypatch.setenv(distro.CACHE_VARIABLE, str(cache))
    monkeypatch.delenv("ROCKETMQ_NAMESRV", raising=False)
    return cache
