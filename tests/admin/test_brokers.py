"""What brokers report of themselves, their settings, and topics as each of them keeps them."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark.admin import brokers, topics
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import OptionError
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, cluster, ok, refuse, route, topic_config

FACTS, CONFIG, UPDATE = Request.GET_BROKER_RUNTIME_INFO, Request.GET_BROKER_CONFIG, Request.UPDATE_BROKER_CONFIG


def facts(**texts: str) -> object:
    return ok(json.dumps({"table": texts}).encode())


def test_states_list_brokers_that_answer_and_errors_of_others(broker: MockBroker, tools: Parts) -> None:
    with MockBroker({FACTS: refuse(Response.SYSTEM_ERROR, "just started")}) as slave:
        both = {"broker-a": {"1": slave.address, "0": broker.address}}
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(both))
        broker.on(
            FACTS,
            facts(
                brokerVersionDesc="V5_5_0",
                bootTimestamp="77",
                putTps="1.5 2.0 3.0",
                getTransferedTps="4.0 5.0 6.0",
                commitLogDiskRatio="0.25",
            ),
        )
        master, other = brokers.states(tools)
    assert (master.broker_name, master.cluster, master.broker_id, master.address) == (
        "broker-a", "c", 0, broker.address,
    )  # fmt: skip
    assert (master.version, master.started_ms, master.error) == ("V5_5_0", 77, None)
    assert (master.put_per_s, master.get_per_s, master.disk_used) == (1.5, 4.0, 0.25)
    assert (other.broker_id, other.version, other.facts) == (1, None, None)
    assert "just started" in str(other.error)


def test_a_broker_that_has_counted_nothing_yet_is_asked_again(broker: MockBroker, tools: Parts) -> None:
    young = refuse(Response.SYSTEM_ERROR, "java.util.NoSuchElementException, java.base/java.util.LinkedList.getLast")
    broker.on(FACTS, [young, young, facts(brokerVersionDesc="V5_5_0")])
    (state,) = brokers.states(tools)
    assert (state.version, state.error) == ("V5_5_0", None)


def test_a_broker_that_has_just_started_has_no_rates(broker: MockBroker, tools: Parts) -> None:
    broker.on(FACTS, facts(putTps="  ", getTransferredTps="", commitLogDiskRatio="-1.0", bootTimestamp="null"))
    (state,) = brokers.states(tools)
    assert (state.put_per_s, state.get_per_s, state.disk_used, state.started_ms) == (None, None, None, None)
    assert state.error is None


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 19, "-1", "²"])
def test_a_number_that_no_broker_reports_hides_nothing(broker: MockBroker, tools: Parts, number: str) -> None:
    """Of this broker, nor of others, whose states come with it."""
    broker.on(FACTS, facts(bootTimestamp=number, putTps=number, brokerVersionDesc="V5_5_0"))
    (state,) = brokers.states(tools)
    assert (state.version, state.started_ms, state.error) == ("V5_5_0", None, None)


def test_a_setting_that_there_is_not_changes_nothing(broker: MockBroker, tools: Parts) -> None:
    """Brokers say success to any name."""
    broker.on(CONFIG, ok(b"fileReservedTime=72\n"))
    with pytest.raises(OptionError, match=r"no setting 'fileReserveTime'.*Did you mean fileReservedTime\?"):
        brokers.update_config(tools, "broker-a", {"fileReserveTime": "1"})
    assert broker.seen(UPDATE) == []


def test_a_value_that_a_broker_does_not_take(broker: MockBroker, tools: Parts) -> None:
    broker.on(CONFIG, ok(b"fileReservedTime=72\ntraceOn=true\n"))
    broker.on(UPDATE, ok())
    with pytest.raises(OptionError, match="kept its value of fileReservedTime and rejected"):
        brokers.update_config(tools, "broker-a", {"fileReservedTime": "x"})
    assert brokers.update_config(tools, "broker-a", {"traceOn": "TRUE"})["fileReservedTime"] == "72"


def test_a_topic_as_each_broker_keeps_it(broker: MockBroker, tools: Parts) -> None:
    """One that has no attributes is of the type NORMAL; one from before 5.0, which knows no types, by its route."""
    old = refuse(Response.REQUEST_CODE_NOT_SUPPORTED)
    stats = b'{"offsetTable":{}}'
    with MockBroker({Request.GET_TOPIC_CONFIG: old, Request.GET_TOPIC_STATS_INFO: ok(stats)}) as second:
        both = {"broker-a": broker.address, "broker-b": second.address}
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, both, perm=4))
        broker.on(Request.GET_TOPIC_STATS_INFO, ok(stats))
        broker.on(Request.GET_TOPIC_CONFIG, [topic_config(message_type="FIFO"), topic_config()])
        found = topics.describe(tools, "t")
        assert (found.brokers["broker-a"].message_type, found.message_type) == ("FIFO", "FIFO")
        assert (found.brokers["broker-b"].message_type, found.brokers["broker-b"].permission) == (None, "R")
        assert (found.permission, found.messages) == ("R, RW", 0)
        assert topics.describe(tools, "t").message_type == "NORMAL"
