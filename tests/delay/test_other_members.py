"""Who else is in a node's group, as several brokers say: whether a node may begin there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.errors import OptionError
from rocketmq_spark.spool.database import is_in_use
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.header import Command
from tests.mockbroker import MockBroker, ok, refuse, route

ASK = Request.GET_CONSUMER_CONNECTION_LIST
NOBODY = refuse(Response.CONSUMER_NOT_ONLINE, "the consumer group [g] not online")
DENIED = refuse(Response.NO_PERMISSION, "user has no permission")


def members(*topics: str) -> Command:
    table = {topic: {"subString": "*"} for topic in ("%RETRY%g", *topics)}
    return ok(json.dumps({"subscriptionTable": table, "connectionSet": [{"clientId": "a"}]}).encode())


Cluster = Callable[..., list[MockBroker]]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Brokers with the given answers about the group. The first one is the name server, too."""
    with ExitStack() as stack:

        def make(*answers: Command) -> list[MockBroker]:
            brokers = [
                stack.enter_context(
                    MockBroker({Request.HEART_BEAT: ok(), Request.UNREGISTER_CLIENT: ok(), ASK: answer})
                )
                for answer in answers
            ]
            named = {f"broker-{i}": broker.address for i, broker in enumerate(brokers)}
            brokers[0].on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, named))
            return brokers

        yield make


def begin(place: Path, brokers: list[MockBroker], inner: str = "inner", dead: bool = False, **options: object) -> None:
    settings = NodeSettings(place / "d", inner, "dead", resends_dead_letters=dead)
    open_node(settings, name_server=brokers[0].address, group="g", **options).close()


def test_members_of_other_topic_on_one_broker_of_many_are_found(cluster: Cluster, tmp_path: Path) -> None:
    """Heartbeats go to the brokers of a member's own topics, which need not be all of this one's."""
    brokers = cluster(*[NOBODY] * 4, members("other"))
    with pytest.raises(OptionError, match="'g' has members that read other, and this node would read inner"):
        begin(tmp_path, brokers)
    assert not is_in_use(tmp_path / "d")
    assert [len(broker.seen(ASK)) for broker in brokers] == [1] * 5


def test_a_broker_that_is_down_hides_nothing_that_others_say(cluster: Cluster, tmp_path: Path) -> None:
    brokers = cluster(*[members("other")] * 4)
    for broker in brokers[1:]:
        broker.refuse_connections()
    with pytest.raises(OptionError, match="read other"):
        begin(tmp_path, brokers)


def test_members_that_read_nothing_here_get_queues_too(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'g' has members that do not read inner: each would get queues"):
        begin(tmp_path, cluster(members()))


def test_members_that_also_read_another_topic_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'g' has members that read other, and this node would read inner"):
        begin(tmp_path, cluster(members("inner", "other")))


def test_dead_letters_of_a_node_that_does_not_begin_stay_dead(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    revived: list[Path] = []
    monkeypatch.setattr(Store, "revive", lambda store, *_: revived.append(store.path))
    brokers = cluster(members("other"))
    with pytest.raises(OptionError, match="read other"):
        begin(tmp_path, brokers, dead=True)
    assert not revived
    begin(tmp_path, brokers, "other", dead=True)
    assert revived == [tmp_path / "d"]


@pytest.mark.parametrize(
    ("answers", "warnings"), [([NOBODY, members("inner")], 0), ([DENIED, DENIED], 1), ([members("inner"), DENIED], 1)]
)
def test_who_cannot_be_asked_is_said_once(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, answers: list[Command], warnings: int
) -> None:
    begin(tmp_path, cluster(*answers))
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == warnings
    for line in said:
        assert "of the brokers whether group 'g' has members that do not read inner (with ACL 2.0" in line
        assert "user has no permission" in line


@pytest.mark.parametrize(
    ("inner", "group", "options"),
    [
        ("ns%inner", "ns%g", {"namespace": "ns"}),
        ("inner_dev", "g_dev", {"environment": "dev", "environment_mode": "suffix"}),
    ],
)
def test_a_topic_may_be_given_as_brokers_name_it(
    cluster: Cluster, tmp_path: Path, inner: str, group: str, options: dict[str, Any]
) -> None:
    brokers = cluster(members(inner))
    begin(tmp_path, brokers, inner, **options)
    begin(tmp_path, brokers, "inner", **options)
    assert {command.ext["consumerGroup"] for command in brokers[0].seen(ASK)} == {group}


def test_the_message_shows_some_of_many_topics(cluster: Cluster, tmp_path: Path) -> None:
    brokers = cluster(members(*(f"t{i:03}" for i in range(500))))
    with pytest.raises(OptionError, match="members that read t000, t001, t002 and 497 more, and this node"):
        begin(tmp_path, brokers)
