"""From options to a node, on a real broker: what it makes, and what it leaves as it was when it cannot begin."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Admin
from rocketmq_spark.delay import node as nodes
from rocketmq_spark.delay.commits import CommittedProgress, GroupNames
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.delay.release import Progress
from rocketmq_spark.errors import OptionError, RocketMQError, SpoolError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.session.spools import open_drainer, owner_of
from rocketmq_spark.spool.database import is_in_use
from tests.live.writes import sink_options


def test_topics_are_made_and_the_folder_is_the_services_own(rocketmq: LocalBroker, topic: str, tmp_path: Path) -> None:
    place = NodeSettings(tmp_path / "not" / "yet", f"{topic}-inner", f"{topic}-dead")
    node = open_node(place, name_server=rocketmq.name_server, group=f"g_{topic}")
    assert {place.topic, place.dead_topic} <= set(rocketmq.admin.topics())
    with pytest.raises(SpoolError, match="in use"):
        open_node(place, name_server=rocketmq.name_server, group=f"g_{topic}2")
    node.turn()
    node.close()
    assert not is_in_use(place.folder)


def test_node_creates_progress_groups_where_broker_does_not(
    make_cluster: Callable[..., LocalBroker], tmp_path: Path
) -> None:
    """Without them, a node on a new disk would send again what was sent."""
    mq = make_cluster(conf={"autoCreateSubscriptionGroup": False})
    mq.admin.create_group("g")
    node = open_node(NodeSettings(tmp_path / "d", "inner", "dead"), name_server=mq.name_server, group="g")
    queue = MessageQueue("inner", "broker-a", 0)
    assert node._commits.commit({queue: CommittedProgress(Progress(0, 0, 0))})
    node.close()
    with Admin(mq.name_server) as admin:
        assert set(GroupNames("g").all_groups) <= set(admin.groups())


def test_nodes_of_another_topic_do_not_join_a_group(rocketmq: LocalBroker, topic: str, tmp_path: Path) -> None:
    """Each would be given queues that it does not read, where messages stay without a word."""
    group, names = f"g_{topic}", (f"{topic}-one", f"{topic}-two")
    one, two = (NodeSettings(tmp_path / name, name, f"{topic}-dead") for name in names)
    first = open_node(one, name_server=rocketmq.name_server, group=group)
    with pytest.raises(
        OptionError, match=rf"'{group}' has members that read {names[0]}, and this node would read {names[1]}"
    ):
        open_node(two, name_server=rocketmq.name_server, group=group)
    assert not is_in_use(two.folder)
    more = NodeSettings(tmp_path / "more", names[0], f"{topic}-dead")
    open_node(more, name_server=rocketmq.name_server, group=group, request_timeout="4s").close()  # as another process
    first.close()
    open_node(two, name_server=rocketmq.name_server, group=group).close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"group": "a b"}, OptionError),
        ({"topic": "x"}, OptionError),
        ({"name_server": "127.0.0.1:1"}, RocketMQError),
        ({"environment": "2", "environments": "3"}, OptionError),
    ],
)
def test_a_node_that_cannot_begin_holds_nothing(
    rocketmq: LocalBroker, tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        open_node(NodeSettings(tmp_path / "d"), **{"name_server": rocketmq.name_server, **options})
    assert not is_in_use(tmp_path / "d")


def test_a_node_is_no_environments(rocketmq: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_ENVIRONMENT", "dev")
    with pytest.raises(
        OptionError, match="variable ROCKETMQ_ENVIRONMENT is 'dev', but with environmentMode=queues one delay"
    ):
        open_node(NodeSettings(tmp_path / "d"), name_server=rocketmq.name_server)
    node = open_node(NodeSettings(tmp_path / "d"), name_server=rocketmq.name_server, environment_mode="suffix")
    node.close()
    assert f"{NodeSettings(tmp_path).topic}_dev" in rocketmq.admin.topics()


def test_the_spools_command_leaves_its_folder_alone(rocketmq: LocalBroker, topic: str, tmp_path: Path) -> None:
    from rocketmq_spark.delay import envelope_records
    from rocketmq_spark.spool.store import Store
    from tests.delay.nodes import QUEUES, RULES, envelope

    store = Store(tmp_path / "d")
    store.set_owner(owner_of(sink_options(rocketmq.name_server), "the delay service, group 'g'"))
    found = envelope_records.effect_of(RULES, QUEUES[0], 0, envelope("m", 5), 1)
    assert found.record is not None
    store.add([(found.record, found.due_ms)])
    store.close()
    with pytest.raises(SpoolError, match="holds records of the delay service"):
        open_drainer(tmp_path / "d", sink_options(rocketmq.name_server))
    with pytest.raises(SpoolError, match="holds records of the delay service"):
        open_node(NodeSettings(tmp_path / "d"), name_server=rocketmq.name_server, group=f"g_{topic}")
    assert not is_in_use(tmp_path / "d")


def test_the_wall_clock_decides() -> None:
    assert abs(nodes.wall_clock_ms() - 1000 * time.time()) < 60_000
