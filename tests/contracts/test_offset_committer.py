"""``ports.OffsetCommitter``: the remoting client on a real broker, and the fake of the source's tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import GroupNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.fakes.offset_committer import offset_committer
from tests.fakes.route_reader import QUEUES


class Case(NamedTuple):
    """A committer, a group that does not exist, and the queues of a topic."""

    committer: Any
    group: str
    queues: list[MessageQueue]
    committed: Callable[[], Mapping[MessageQueue, int | None]]
    """Returns the offset of each queue that the broker has stored for the group."""


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture(params=[pytest.param("real", marks=pytest.mark.needs("rocketmq")), "in memory"])
def case(request: pytest.FixtureRequest) -> Case:
    if request.param != "real":
        stored: dict[tuple[str, MessageQueue], int] = {}
        return Case(
            offset_committer(stored), "g", QUEUES, lambda: {queue: stored.get(("g", queue)) for queue in QUEUES}
        )
    mq: LocalBroker = request.getfixturevalue("rocketmq")
    make_topic: Callable[..., str] = request.getfixturevalue("make_topic")
    topic = make_topic(queues=2)
    queues = [MessageQueue(topic, mq.brokers[0], i) for i in range(2)]
    client = session.client(options.parse({"nameServer": mq.name_server}).for_role("producer"))
    client.routes.get(topic)  # the committer sends to the brokers of known routes
    group = f"g-{topic}"
    return Case(client.committer, group, queues, lambda: client.offset_reader.committed(group, queues, soon()))


def test_each_queue_of_an_unknown_group_gets_an_error(case: Case) -> None:
    """A commit creates no group, even if the broker creates groups at their first pull."""
    errors = case.committer.commit_each(case.group, dict.fromkeys(case.queues, 5), soon())
    assert {queue: type(error) for queue, error in errors.items()} == dict.fromkeys(case.queues, GroupNotFound)
    assert case.committed() == dict.fromkeys(case.queues)


def test_offsets_of_a_created_group_are_committed(case: Case) -> None:
    first, second = case.queues
    case.committer.create_group(case.group, dict.fromkeys(case.queues, 0))
    assert case.committer.commit_each(case.group, {first: 5, second: 6}, soon()) == {}
    assert case.committed() == {first: 5, second: 6}
    assert case.committer.commit_each(case.group, {first: 4}, soon()) == {}
    assert case.committed() == {first: 4, second: 6}


def test_a_group_without_members_has_an_empty_list(case: Case) -> None:
    broker_name = case.queues[0].broker_name
    assert case.committer.members(case.group, broker_name, soon()) == []
    case.committer.create_group(case.group, dict.fromkeys(case.queues, 0))
    assert case.committer.members(case.group, broker_name, soon()) == []


def test_without_a_proxy_all_members_are_listed(case: Case) -> None:
    broker_name = case.queues[0].broker_name
    case.committer.members(case.group, broker_name, soon())  # connects to the broker
    assert case.committer.lists_all_members(broker_name) is True
