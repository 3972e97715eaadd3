"""Where a consumer asks for the messages of a topic, and by which names."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.grpc_proxy import member as grpc_member
from rocketmq_spark.grpc_proxy.facts import Code
from rocketmq_spark.grpc_proxy.protos import proto
from tests.grpc_proxy.scripted import status
from tests.grpc_proxy.test_member import giving


def test_a_broker_that_a_topic_gets_later_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a consumer would have its messages after a restart only."""
    brokers = ["broker-a"]

    def assigned(request: Any, context: Any) -> Any:
        made = proto("QueryAssignmentResponse")(status=status(Code.OK))
        for name in brokers:
            made.assignments.add().message_queue.broker.name = name
        return made

    monkeypatch.setattr(grpc_member, "_PLACES_S", 0.0)
    with giving(b"x", QueryAssignment=assigned) as member:
        assert member.places("t", Deadline.after(30)) == 1
        brokers.append("broker-b")
        assert member.places("t", Deadline.after(30)) == 2
        (found,) = member.receive(("t", 1), 1, 30.0, 1.0, Deadline.after(30))
        assert found.queue.broker_name == "broker-b"
