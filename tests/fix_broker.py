"""A real cluster for our own tests: the plug-in for users with shorter names, one for all processes that share the tests.

Each broker costs seconds to start, more until its code is compiled, and a part of a core while it does nothing. So the
process that wants it first starts it, the others ask and fill it from outside, and the first ends it when all are done.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.localbroker import LocalBroker, distribution
from rocketmq_spark.localbroker.java import Archive, find_java
from tests.helpers import awaited
from tests.witness import JavaPeer

USERS = "rocketmq.users"  # a file that is locked by each process that uses the broker

_started = pytest.StashKey[tuple[contextlib.ExitStack, Path]]()


# Longer than it takes on a busy machine; servers do without an archive that cannot be made.
_ARCHIVE_S = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("live") or item.get_closest_marker("slow"):
        _make_archives()


@functools.cache
def _make_archives() -> None:
    """Make the class-data archives of brokers and proxies, unless they exist: with them a start takes half the time.

    A cluster makes its own in what time others leave, and gives them up when it ends. Where all processors are busy that is too
    late for most clusters of a run.
    """
    core, folder, java = distribution.fetch(quiet=True), distribution.cache_folder() / "archives", find_java()
    class_paths = core, [*core, *distribution.fetch(["tls-test", "proxy"], quiet=True)]
    archives = [Archive(folder, java, jars).path for jars in class_paths]
    urgent = mock.patch("shutil.which", lambda name, which=shutil.which: None if name == "nice" else which(name))
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "tests"):
        if not all(map(Path.exists, archives)):
            with urgent, LocalBroker(quiet=True, proxy=True):
                deadline = Deadline.after(_ARCHIVE_S)
                awaited(lambda: deadline.expired or all(map(Path.exists, archives)), seconds=2 * _ARCHIVE_S)


@dataclass(frozen=True, slots=True)
class ElsewhereServer:
    """A server that another process started: nobody here can end it."""

    address: str
    pid: int
    home: str

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(Path(self.home).glob("*.log")))


class SharedAdmin(BaseAdmin):
    """Of a cluster that others use at the same time."""

    def update_broker_config(self, broker: str, values: Mapping[str, str]) -> None:
        raise AssertionError("this broker is shared by all processes: change the configuration of one of your own")


class ElsewhereBroker(LocalBroker):
    """A cluster that another process runs: it is asked and given topics here, and neither started nor broken."""

    def __init__(self, name_server: str, data: str, servers: dict[str, list[Any]]) -> None:
        super().__init__(brokers=len(servers) - 1, quiet=True)
        known = {name: ElsewhereServer(*facts) for name, facts in servers.items()}
        self._servers = SimpleNamespace(  # type: ignore[assignment]
            name_server=name_server,
            registration=SimpleNamespace(admin=SharedAdmin(name_server)),
            workspace=SimpleNamespace(data=Path(data), servers=known),
            server=known.__getitem__,
        )

    def start(self) -> None:
        """It runs."""

    def close(self) -> None:
        self.admin.close()


def facts_of(mq: LocalBroker) -> dict[str, Any]:
    """What ``ElsewhereBroker`` needs to know."""
    servers = {name: [mq.address(name), mq.pid(name), str(mq.data / name)] for name in ("namesrv", *mq.brokers)}
    return {"name_server": mq.name_server, "data": str(mq.data), "servers": servers}


@pytest.fixture(scope="session")
def rocketmq(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LocalBroker]:
    """A name server and a broker, shared by all tests of all processes: use topics and groups of your own."""
    if not hasattr(request.config, "workerinput"):
        with LocalBroker() as mq:
            yield mq
        return
    folder = tmp_path_factory.getbasetemp().parent
    state = folder / "rocketmq.json"
    with (folder / USERS).open("a") as users:
        with _locked(folder / "rocketmq.starts"):
            fcntl.flock(users, fcntl.LOCK_SH)  # until it is closed
            if not state.exists():
                _start_for_all(request.config, state)
        with ElsewhereBroker(**json.loads(state.read_text())) as mq:
            yield mq


def _start_for_all(config: pytest.Config, state: Path) -> None:
    with contextlib.ExitStack() as stack:
        mq = stack.enter_context(LocalBroker())
        part = state.with_suffix(".part")
        part.write_text(json.dumps(facts_of(mq)))
        part.replace(state)
        stack.callback(state.unlink)
        config.stash[_started] = stack.pop_all(), state.with_name(USERS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that started the broker for all has no test left. It waits until no other uses it."""
    if _started in session.config.stash:
        stack, users = session.config.stash[_started]
        with _locked(users), stack:
            pass


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def broker_cluster(rocketmq: LocalBroker) -> LocalBroker:
    """The same. Tests that break brokers start a LocalBroker of their own."""
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
    distribution.fetch()
    shared = distribution.cache_folder()
    cache = tmp_path / "cache"
    cache.mkdir()
    for name in ("jars", "archives"):
        (shared / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(cache))
    monkeypatch.delenv("ROCKETMQ_NAMESRV", raising=False)
    return cache
