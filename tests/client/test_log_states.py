"""How far a broker has come with its log, and what its copies must confirm."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import BrokerBusy, BrokerNotFound, NotSupported, ServiceNotAvailable
from rocketmq_spark.model import LogState
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts, elsewhere
from tests.client.test_broker import routed
from tests.mockbroker import MockBroker, ok, refuse

__all__ = ["routed"]

RUNTIME, CONFIG = Request.GET_BROKER_RUNTIME_INFO, Request.GET_BROKER_CONFIG


class TestLogStates:
    def test_where_the_log_ends_and_how_far_it_is_indexed(self, broker: MockBroker, routed: Parts) -> None:
        told = {"commitLogMaxOffset": "70", "dispatchBehindBytes": "20", "sendThreadPoolQueueHeadWaitTimeMills": "5"}
        broker.on(RUNTIME, ok(json.dumps({"table": {**told, "pageCacheLockTimeMills": "9"}}).encode()))
        states = routed.offset_reader.log_states(["broker-a", "nobody"], routed.soon)
        state = states["broker-a"]
        assert isinstance(state, LogState)
        assert (state.max_offset, state.index_lag, state.head_wait_ms, state.lock_ms) == (70, 20, 5, 9)
        assert LogState(70, 20, 5, 0.0).indexed_end == 50
        assert isinstance(states["nobody"], BrokerNotFound)

    def test_a_broker_that_has_just_started_is_asked_again(self, broker: MockBroker, routed: Parts) -> None:
        """Seen on 5.5.0: code 1, java.util.NoSuchElementException, in its first seconds."""
        broker.on(RUNTIME, refuse(Response.SYSTEM_ERROR, "java.util.NoSuchElementException"))
        (error,) = routed.offset_reader.log_states(["broker-a"], routed.soon).values()
        assert isinstance(error, ServiceNotAvailable)

    def test_a_broker_without_these_figures_is_not_guessed_at(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(RUNTIME, ok(b'{"table":{"commitLogMaxOffset":"70"}}'))
        (error,) = routed.offset_reader.log_states(["broker-a"], routed.soon).values()
        assert isinstance(error, NotSupported)

    @pytest.mark.parametrize(
        ("answer", "late"),
        [
            (ok(b"duplicationEnable=true\n"), True),
            (ok(b"enableControllerMode=true\n"), True),
            (ok(b"duplicationEnable=false\n"), False),
            (refuse(Response.NO_PERMISSION), True),
        ],
    )
    def test_what_copies_must_confirm(self, broker: MockBroker, routed: Parts, answer: Command, late: bool) -> None:
        broker.on(CONFIG, answer)
        assert routed.offset_reader.broker_indexes_after_replication("broker-a", routed.soon) is late


def test_busy_broker_leaves_late_confirmation_unknown(broker: MockBroker, routed: Parts) -> None:
    """The answer is kept for good by those who ask."""
    broker.on(CONFIG, refuse(Response.SYSTEM_BUSY))
    with pytest.raises(BrokerBusy):
        routed.offset_reader.broker_indexes_after_replication("broker-a", routed.soon)


def test_broker_config_with_passwords_is_not_read_in_clear_text(broker: MockBroker, routed: Parts) -> None:
    """A broker that is not asked counts as one that may confirm late."""
    broker.on(CONFIG, ok(b"duplicationEnable=false\n"))
    routed.pool.connect_options = replace(routed.pool.connect_options, address_map=elsewhere(broker))
    assert routed.offset_reader.broker_indexes_after_replication("broker-a", routed.soon)
    assert broker.seen(CONFIG) == []
