"""A broker that deletes old messages. Its first deletion comes a minute after its start, so it starts before it is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from tests.mockbroker import eventually
from tests.reading import names, post

RETENTION = {
    "fileReservedTime": 0,
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
    "cleanResourceInterval": 1000,
    "deleteCommitLogFilesInterval": 1,
    "mappedFileSizeCommitLog": 4 << 20,
    "maxMessageSize": 2 << 20,
}


# How many tests before the first one that needs the broker it starts. An idle broker costs a twentieth of a core.
AHEAD = 80


class Forgetful:
    """The broker, from some tests before the first one that wants it until the last one is over."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self._places = {item.nodeid: place for place, item in enumerate(items)}
        wanted = [place for place, item in enumerate(items) if "forgetful" in getattr(item, "fixturenames", ())]
        self._begin, self._end = min(wanted) - AHEAD, max(wanted)
        self._starting: Future[LocalBroker] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._starting is None and self._begin <= self._places[item.nodeid] <= self._end:
            self._starting = ThreadPoolExecutor(1).submit(_start)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
        yield
        if self._starting is not None and (nextitem is None or self._places[nextitem.nodeid] > self._end):
            self.running().close()

    def running(self) -> LocalBroker:
        assert self._starting is not None
        return self._starting.result()


def _start() -> LocalBroker:
    mq = LocalBroker(conf=RETENTION, quiet=True)
    mq.start()
    mq.create_topic("filler", 1)
    return mq


def pytest_collection_finish(session: pytest.Session) -> None:
    """The minute passes while other tests run."""
    if any("forgetful" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.pluginmanager.register(Forgetful(session.items), "forgetful")


@pytest.fixture
def forgetful(pytestconfig: pytest.Config) -> LocalBroker:
    plugin = pytestconfig.pluginmanager.get_plugin("forgetful")
    assert plugin is not None
    return plugin.running()  # not to be entered: it runs already


@pytest.fixture
def forget(forgetful: LocalBroker, rocketmq: LocalBroker) -> Callable[[str, int], None]:
    """Wait until retention has deleted everything of a topic; the next messages find their queues empty but not new."""

    def run(topic: str, at_least: int) -> None:
        for name in names(5):
            post(forgetful, [Message("filler", name.encode() + bytes(1_000_000))])
        eventually(lambda: sum(b.min_offset for b in forgetful.admin.describe_topic(topic).values()) >= at_least, 100)

    return run


@pytest.fixture
def lost_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said about loss so far."""
    caplog.set_level(logging.INFO, "rocketmq_spark")
    return lambda: [r.getMessage() for r in caplog.records if "cannot be read any more" in r.getMessage()]
