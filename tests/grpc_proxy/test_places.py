"""Where a consumer asks for the messages of a topic, and by which names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.grpc_proxy import member as grpc_member
from rocketmq_spark.grpc_proxy.member import ProxyMember
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.sender import ProxySender
from rocketmq_spark.grpc_proxy.tables import Code, MessageType
from rocketmq_spark.model import NO_FILTER
from rocketmq_spark.session import proxy_clients
from tests.grpc_proxy.scripted import client, route, serving, status
from tests.grpc_proxy.test_member import giving
from tests.mockbroker import eventually


def test_a_broker_that_a_topic_gets_later_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a consumer would have its messages after a restart only."""
    brokers = ["broker-a"]

    def assigned(request: Any, context: Any) -> Any:
        made = proto("QueryAssignmentResponse")(status=status(Code.OK))
        for name in brokers:
            made.assignments.add().message_queue.broker.name = name
        return made

    monkeypatch.setattr(grpc_member, "_ASSIGNMENT_AGE_S", 0.0)
    with giving(b"x", QueryAssignment=assigned) as member:
        assert member.target_count("t", Deadline.after(30)) == 1
        brokers.append("broker-b")
        assert member.target_count("t", Deadline.after(30)) == 2
        (found,) = member.receive(("t", 1), 1, 30.0, 1.0, Deadline.after(30))
        assert found.queue.broker_name == "broker-b"


def test_a_proxy_does_not_decide_how_many_threads_there_are() -> None:
    """A consumer has one for each broker of a topic."""
    assigned = proto("QueryAssignmentResponse")(status=status(Code.OK))
    for number in range(1025):
        assigned.assignments.add().message_queue.broker.name = f"b{number}"
    with giving(b"x", QueryAssignment=lambda request, context: assigned) as member:
        with pytest.raises(RemoteProtocolError, match=r"lists 1025 brokers for the topic; expected at most 1024"):
            member.target_count("t", Deadline.after(30))
        del assigned.assignments[1024]
        assert member.target_count("t", Deadline.after(30)) == 1024


def _answers() -> dict[str, tuple[str, Any]]:
    """What a Proxy answers to all that a consumer asks; with a name for what was asked."""
    assigned = proto("QueryAssignmentResponse")(status=status(Code.OK))
    assigned.assignments.add().message_queue.broker.name = "broker-a"
    given = proto("ReceiveMessageResponse")()
    given.message.system_properties.message_id = "ID"
    found = {"QueryAssignment": ("assignment", assigned), "ReceiveMessage": ("receive", iter([given]))}
    found["Heartbeat"] = "beat", proto("HeartbeatResponse")(status=status(Code.OK))
    for rpc in ("AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue", "NotifyClientTermination"):
        found[rpc] = rpc, proto(f"{rpc}Response")(status=status(Code.OK))
    return found


def test_all_consumer_requests_use_wire_names_of_topic_and_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a plain name it would take, or finish, messages as a group outside its namespace."""
    seen: dict[str, Any] = {}

    def keep(name: str, answer: Any) -> Callable[[Any, Any], Any]:
        def kept(request: Any, context: Any) -> Any:
            seen[name] = request
            return answer

        return kept

    def settings(commands: Any, context: Any) -> Iterator[Any]:
        for command in commands:
            seen["settings"] = command.settings.subscription
            yield command

    answers = {"Telemetry": settings, **{rpc: keep(name, answer) for rpc, (name, answer) in _answers().items()}}
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.01)
    with serving(answers) as address:
        member = ProxyMember(
            client(address, connect_timeout_s=30.0, name_on_wire=lambda name: f"ns%{name}"), "g", bytes
        )
        soon = Deadline.after(30)
        member.subscribe({"t": NO_FILTER}, soon)
        (message,) = member.receive(("t", 0), 1, 30.0, 1.0, soon)
        assert message.topic == "t"
        member.ack(message, soon)
        member.change_invisible(message, 30.0, soon)
        member.forward_to_dlq(message, soon)
        eventually(lambda: "beat" in seen)
        member.close(soon)
    about = seen.pop("settings")
    assert (about.group.name, [one.topic.name for one in about.subscriptions]) == ("ns%g", ["ns%t"])
    assert {name: request.group.name for name, request in seen.items()} == dict.fromkeys(seen, "ns%g")
    with_topic = {
        name: request.topic.name for name, request in seen.items() if "topic" in request.DESCRIPTOR.fields_by_name
    }
    assert with_topic == dict.fromkeys(
        ("assignment", "AckMessage", "ChangeInvisibleDuration", "ForwardMessageToDeadLetterQueue"), "ns%t"
    )
    assert len(seen) == 7


def test_a_producer_asks_for_its_topics_by_the_names_of_the_wire() -> None:
    asked: list[str] = []

    def routed(request: Any, context: Any) -> Any:
        asked.append(request.topic.name)
        return route(MessageType.NORMAL)(request, context)

    def recalled(request: Any, context: Any) -> Any:
        asked.append(request.topic.name)
        return proto("RecallMessageResponse")(status=status(Code.OK), message_id="ID")

    with serving({"QueryRoute": routed, "RecallMessage": recalled}) as address:
        proxy = client(address, connect_timeout_s=30.0, name_on_wire=lambda name: f"ns%{name}")
        sender, soon = (
            ProxySender(proxy, proxy_clients.sent_messages, proxy_clients.decompress_body),
            Deadline.after(30),
        )
        (queue, *_) = sender.publish_queues("t", soon)
        assert queue.topic == "t"
        assert sender.probe(queue.broker_name, "t", soon)
        assert sender.recall("t", queue.broker_name, "handle", "g", soon) == "ID"
        proxy.close()
    assert asked == ["ns%t"] * 3
