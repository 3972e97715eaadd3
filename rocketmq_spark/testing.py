"""pytest plug-in with fixtures for a real RocketMQ. The plug-in is active when this package is installed.

``rocketmq`` is one ``LocalBroker`` for the whole session. ``rocketmq_topic`` is a new topic on this broker for one test, and
``make_rocketmq_topic`` creates more topics. Nothing is downloaded, started or imported before the first test uses a fixture. If a
test with a ``LocalBroker`` from a fixture fails, its report has the last 40 relevant lines of the log of each master: warnings,
errors, and lines that name the test's topics.
"""

from __future__ import annotations

import logging
import re
import sys
import uuid
from collections.abc import Callable, Collection, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rocketmq_spark.localbroker import LocalBroker

_MAX_LOG_LINES = 40
_PROBLEM_LINE = re.compile(r"\b(?:WARN|ERROR|FATAL)\b|\b\w+(?:Exception|Error)\b")
_topics_key = pytest.StashKey[list[str]]()
_logger = logging.getLogger(__name__)


@pytest.fixture(scope="session")
def rocketmq() -> Iterator[LocalBroker]:
    """A name server and a broker, shared by all tests: use different topics and groups in each test."""
    from rocketmq_spark.localbroker import LocalBroker

    with LocalBroker() as broker:
        yield broker


@pytest.fixture
def make_rocketmq_topic(rocketmq: LocalBroker, request: pytest.FixtureRequest) -> Callable[..., str]:
    """A function that creates a topic with a new name, and returns the name. The function takes the arguments of
    ``LocalBroker.create_topic`` except ``name``.
    """

    def make(**arguments: Any) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        request.node.stash.setdefault(_topics_key, []).append(name)
        rocketmq.create_topic(name, **arguments)
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
    """Adds the brokers' logs to the report of a failed test."""
    report = yield
    # An error in this hook must not end a user's test run, because the logs are only an addition to the report.
    try:
        if report.failed:
            report.sections += _log_sections(item)
    except Exception as e:
        _logger.exception("The logs of a failed test could not be added")
        report.sections.append(("RocketMQ log", f"not added, {type(e).__name__}: {e}"))
    return report


def _log_sections(item: pytest.Item) -> list[tuple[str, str]]:
    """The last relevant lines of the log of each running broker that a fixture gave to the test."""
    # While ``localbroker.cluster`` is not imported, no ``LocalBroker`` exists.
    module = sys.modules.get("rocketmq_spark.localbroker.cluster")
    fixtures = getattr(item, "funcargs", None)
    if module is None or not isinstance(fixtures, dict):
        return []
    # Compare types, because a mock may pass ``isinstance``.
    clusters = {id(value): value for value in fixtures.values() if issubclass(type(value), module.LocalBroker)}
    sections = []
    topics = [
        *item.stash.get(_topics_key, []),
        *(value for value in fixtures.values() if type(value) is str and len(value) > 3),
    ]
    for cluster in clusters.values():
        # After the last test, the cluster may be closed. A closed cluster has no logs.
        for name in cluster.brokers if cluster.running else ():
            lines = [line for line in cluster.logs(name).splitlines() if _is_relevant_line(line, topics)][
                -_MAX_LOG_LINES:
            ]
            sections.append((f"RocketMQ log of {name}", "\n".join(lines)))
    return sections


def _is_relevant_line(line: str, topics: Collection[str]) -> bool:
    """Whether a line of a broker's log is a warning or an error, or names a topic."""
    return _PROBLEM_LINE.search(line) is not None or any(topic in line for topic in topics)
