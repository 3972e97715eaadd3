"""Brokers of older versions, one cluster for all tests with each."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark.consumer import push
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_clusters import ASKS
from tests.live.consumer.members import Members

TRACES = {"traceTopicEnable": True}


@pytest.fixture(scope="session")
def older(request: pytest.FixtureRequest) -> Iterator[LocalBroker]:
    """A broker of the version that the mark of the test names (``features``): it asks soon about half messages, and traces."""
    with LocalBroker(version=request.param, conf={**ASKS, **TRACES}, quiet=True) as mq:
        yield mq


@pytest.fixture
def make(older: LocalBroker) -> Callable[..., str]:
    """A function that makes a topic."""

    def made(queues: int = 2, **how: bool) -> str:
        name = f"t-{uuid.uuid4().hex[:10]}"
        older.create_topic(name, queues, **how)
        return name

    return made


@pytest.fixture
def crew(older: LocalBroker, make: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    """A group of a topic with eight queues."""
    monkeypatch.setattr(push, "FIRST_COMMIT_DELAY_S", 1.0)
    made = Members(older, make(8))
    yield made
    for consumer in made.all:
        consumer.stop(5)
