"""A broker that deletes old messages. Its first deletion comes a minute after its start, so it starts before all tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
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


_starting: list[Future[LocalBroker]] = []


def _start() -> LocalBroker:
    mq = LocalBroker(conf=RETENTION, quiet=True)
    mq.start()
    mq.create_topic("filler", 1)
    return mq


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the minute now, while other tests run."""
    wanted = any("forgetful" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.getoption("collectonly"):
        _starting.append(ThreadPoolExecutor(1).submit(_start))


@pytest.fixture(scope="session")
def forgetful() -> Iterator[LocalBroker]:
    mq = _starting[0].result()  # running already, so not entered again
    try:
        yield mq
    finally:
        mq.close()


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
