"""pytest plug-in, active once the package is installed: a real RocketMQ for the tests of users.

``rocketmq`` is one LocalBroker for the whole session, ``rocketmq_topic`` a new topic on it for one test. Nothing is
started, fetched or imported before the first test asks for it. When a test that used them fails, the end of the
broker's log is added to the report.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rocketmq_spark.localbroker import LocalBroker

_LOG_LINES = 40


@pytest.fixture(scope="session")
def rocketmq() -> Iterator[LocalBroker]:
    """A name server and a broker, shared by all tests: use topics and groups of your own."""
    from rocketmq_spark.localbroker import LocalBroker

    with LocalBroker() as broker:
        yield broker


@pytest.fixture
def make_rocketmq_topic(rocketmq: LocalBroker) -> Callable[..., str]:
    """A function that creates a topic with a new name; ``queues`` and ``attributes`` as in ``create_topic``."""

    def make(**how: Any) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        rocketmq.create_topic(name, **how)
        return name

    return make


@pytest.fixture
def rocketmq_topic(make_rocketmq_topic: Callable[..., str]) -> str:
    """The name of a new topic."""
    return make_rocketmq_topic()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the broker's log to the report of a failed test."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("rocketmq")
    # After the teardown of the last test there is no broker any more.
    if report.failed and report.when == "call" and cluster is not None:
        for name in cluster.brokers:
            lines = cluster.logs(name).splitlines()[-_LOG_LINES:]
            report.sections.append((f"RocketMQ log of {name}", "\n".join(lines)))
    return report
