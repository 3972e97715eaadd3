"""A consumer that a real Proxy hands out messages to."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from rocketmq_spark import SimpleConsumer, errors
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import simple
from rocketmq_spark.grpc_proxy import member as grpc_member
from rocketmq_spark.grpc_proxy import proxy as grpc_proxy
from rocketmq_spark.grpc_proxy.channel import Endpoints
from rocketmq_spark.grpc_proxy.member import ProxyMember
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.tables import Code, Encoding
from rocketmq_spark.model import NO_FILTER, Message
from rocketmq_spark.model.message import PoppedMessage
from tests.grpc_proxy.scripted import client, serving, status
from tests.helpers import no_more_threads, raising
from tests.live.grpc.proxied import forgotten, new_topic, producer, stored_rows
from tests.mockbroker import eventually
from tests.witness import java_send

__all__ = ["forgotten"]


def all_of(consumer: SimpleConsumer, count: int) -> list[PoppedMessage]:
    """So many messages, each once it is there."""
    found: list[PoppedMessage] = []

    def there() -> bool:
        found.extend(consumer.receive(invisible="60s"))
        return len(found) >= count

    eventually(there, 60)
    return found


def test_received_acknowledged_and_handed_out_again(proxied, monkeypatch):
    topic = new_topic(proxied)
    with SimpleConsumer(proxy_endpoint=proxied.proxy_grpc, group=f"pop-{topic}") as consumer:
        consumer.subscribe(topic)
        monkeypatch.setattr(simple, "MIN_INVISIBLE_S", 0.0)
        with pytest.raises(errors.MessageIllegal, match="min is 10000"):  # what the constant says
            consumer.receive(invisible="9999ms")
        with producer(proxied) as sends:
            sent = [
                sends.send(Message(topic, f"{n}".encode(), tags="a", keys=["k", "l"], properties={"p": f"{n}"})).msg_id
                for n in range(8)
            ]
        found = {message.msg_id: message for message in all_of(consumer, 8)}
        assert found.keys() == set(sent)
        for n, msg_id in enumerate(sent):
            message = found[msg_id]
            assert (message.body, message.tags, message.keys) == (f"{n}".encode(), "a", ["k", "l"])
            assert (message.properties, message.reconsume_times) == ({"p": f"{n}"}, 0)
            assert (message.topic, message.queue.broker_name) == (topic, "broker-a")
        late, dead, *done = found.values()
        for message in done:
            consumer.ack(message)
        receipt = late.receipt
        consumer.change_invisible(late, "0s")
        assert late.receipt != receipt
        consumer.forward_to_dlq(dead)
        (again,) = all_of(consumer, 1)
        assert (again.msg_id, again.body, again.reconsume_times) == (late.msg_id, late.body, 1)
        with pytest.raises(errors.NotFound):
            consumer.ack(late)
        consumer.ack(again)
    assert [row["msgId"] for row in stored_rows(proxied, f"%DLQ%pop-{topic}", 1)] == [dead.msg_id]


def test_java_compressed_bodies_are_opened_and_brokers_filter(proxied):
    topic, tagged = new_topic(proxied), new_topic(proxied)
    with SimpleConsumer(proxy_endpoint=proxied.proxy_grpc, group=f"pop-{topic}") as consumer:
        consumer.subscribe(topic)
        consumer.subscribe(tagged, tags="a || b")
        sent = java_send(proxied.name_server, topic, 4, size=6000, kinds=("plain", "zlib", "lz4", "zstd"))
        with producer(proxied) as sends:
            tags = {sends.send(Message(tagged, b"x", tags=tag)).msg_id: tag for tag in "abcab"}
        found = {message.msg_id: message for message in all_of(consumer, 8)}
        wanted = {msg_id for msg_id, tag in tags.items() if tag != "c"}
        assert found.keys() == {one.id for one in sent} | wanted
        assert {one.id: hashlib.md5(found[one.id].body).hexdigest() for one in sent} == {
            one.id: one.md5 for one in sent
        }
        for message in found.values():
            consumer.ack(message)


@contextmanager
def giving(
    *bodies: bytes, end: Callable[[Any], Iterator[Any]] = lambda context: iter(()), **more: Any
) -> Iterator[ProxyMember]:
    """Of a Proxy that gives all these, whatever it was asked for; each is opened to a hundred times its bytes."""

    def assigned(request: Any, context: Any) -> Any:
        made = proto("QueryAssignmentResponse")(status=status(Code.OK))
        made.assignments.add().message_queue.broker.name = "broker-a"
        return made

    def give(request: Any, context: Any) -> Any:
        for n, body in enumerate(bodies):
            answer = proto("ReceiveMessageResponse")()
            answer.message.body = body
            answer.message.system_properties.message_id = f"{n}"
            answer.message.system_properties.body_encoding = Encoding.GZIP
            yield answer
        yield from end(context)

    answers = {"QueryAssignment": assigned, "ReceiveMessage": give, "Telemetry": Forgetful().telemetry, **more}
    with serving(answers) as address:
        member = ProxyMember(client(address, connect_timeout_s=30.0), "g", lambda body: 100 * body)
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        yield member
        member.close(Deadline.after(10))


def ids(member: ProxyMember, count: int) -> list[str]:
    return [message.msg_id for message in member.receive(("t", 0), count, 30.0, 1.0, Deadline.after(30))]


def test_no_more_is_taken_than_was_asked_for():
    with giving(*[b"x"] * 40) as member:
        assert ids(member, 40) == [f"{n}" for n in range(40)]
        assert ids(member, 32) == [f"{n}" for n in range(32)]


def test_what_an_answer_becomes_has_a_limit(monkeypatch):
    monkeypatch.setattr(grpc_member, "_MIN_ANSWER_BYTES", 1500)
    monkeypatch.setattr(grpc_member, "_ANSWER_BYTES_PER_MESSAGE", 1)
    with giving(*[b"x"] * 5) as member:
        assert ids(member, 5) == ["0", "1", "2"]
        monkeypatch.setattr(grpc_member, "_ANSWER_BYTES_PER_MESSAGE", 600)
        assert ids(member, 5) == ["0", "1", "2", "3", "4"], "what so many messages may have"


def test_ok_answer_with_failed_entry_acknowledges_nothing():
    def answer(request: Any, context: Any) -> Any:
        made = proto("AckMessageResponse")(status=status(Code.OK))
        made.entries.add(status=status(Code.INVALID_RECEIPT_HANDLE, "its time is over"))
        return made

    with giving(b"x", AckMessage=answer) as member:
        (message,) = member.receive(("t", 0), 1, 30.0, 1.0, Deadline.after(30))
        with pytest.raises(errors.NotFound, match="its time is over"):
            member.ack(message, Deadline.after(30))


def test_renewing_lease_replaces_receipt_of_message():
    """Which the Proxy does not take any more: the message would come again though it was acknowledged."""
    new = proto("ChangeInvisibleDurationResponse")(status=status(Code.OK), receipt_handle="new")
    with giving(b"x", ChangeInvisibleDuration=lambda request, context: new) as member:
        (message,) = member.receive(("t", 0), 1, 30.0, 1.0, Deadline.after(30))
        member.change_invisible(message, 30.0, Deadline.after(30))
        assert message.receipt == "new"


def test_a_topic_that_is_not_subscribed_to_is_not_asked_for():
    """By which filter it would be is known no more."""
    with giving(b"x") as member:
        member.subscribe({"u": NO_FILTER}, Deadline.after(30))
        with pytest.raises(errors.LocalProtocolError, match="not subscribed"):
            ids(member, 1)


def breaks(context: Any) -> Iterator[Any]:
    context.abort(grpc.StatusCode.UNAVAILABLE, "it ends")
    yield


def hangs(context: Any) -> Iterator[Any]:
    over = threading.Event()
    context.add_callback(over.set)
    over.wait(60)
    yield proto("ReceiveMessageResponse")(status=status(Code.OK))


def refuses(context: Any) -> Iterator[Any]:
    yield proto("ReceiveMessageResponse")(status=status(Code.INTERNAL_SERVER_ERROR))


@pytest.mark.parametrize("end", [breaks, hangs, refuses])
def test_what_came_of_an_answer_that_does_not_end_well_is_kept(end):
    """Else it comes again later, with one attempt more, and at last is a dead letter that no listener has seen."""
    with giving(*[b"x"] * 3, end=end) as member:
        # Of one that hangs all of the time is waited for.
        found = member.receive(("t", 0), 9, 30.0, 1.0, Deadline.after(4 if end is hangs else 60))
        assert [one.msg_id for one in found] == ["0", "1", "2"]
    with giving(end=end) as member, pytest.raises(errors.RocketMQError):
        member.receive(("t", 0), 9, 30.0, 1.0, Deadline.after(0.5 if end is hangs else 60))


class Forgetful:
    """A Proxy that may refuse the first settings, and refuses heartbeats of a member whose settings it does not know."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.known = False
        self.beats: SimpleQueue[bool] = SimpleQueue()

    def telemetry(self, commands: Any, context: Any) -> Any:
        for command in commands:
            if self.refuses:
                self.refuses = False
                yield proto("TelemetryCommand")(status=status(Code.UNAUTHORIZED))
                return
            self.known = True
            yield command

    def beat(self, request: Any, context: Any) -> Any:
        self.beats.put(self.known)
        return proto("HeartbeatResponse")(status=status(Code.OK if self.known else Code.INTERNAL_SERVER_ERROR))

    @contextmanager
    def member(self) -> Iterator[ProxyMember]:
        with serving({"Telemetry": self.telemetry, "Heartbeat": self.beat}) as address:
            member = ProxyMember(client(address, connect_timeout_s=30.0), "g", bytes)
            try:
                yield member
            finally:
                member.close(Deadline.after(10))

    def wait_for_beat(self, known: bool) -> None:
        eventually(lambda: self.beats.get(timeout=30) is known, 30)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_proxy_hears_whether_its_member_wants_the_order(ordered):
    """By which it goes while it cannot ask brokers about the group."""
    heard: SimpleQueue[bool] = SimpleQueue()

    def telemetry(commands: Any, context: Any) -> Any:
        for command in commands:
            heard.put(command.settings.subscription.fifo)
            yield command

    with serving({"Telemetry": telemetry}) as address:
        member = ProxyMember(client(address, connect_timeout_s=30.0), "g", bytes, ordered)
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        assert heard.get(timeout=30) is ordered
        member.close(Deadline.after(10))


class Saying(Forgetful):
    """A Proxy that says of every group whether its brokers keep the order."""

    def __init__(self, ordered: bool) -> None:
        super().__init__()
        self.ordered = ordered
        self.answers = 0

    def telemetry(self, commands: Any, context: Any) -> Any:
        for command in commands:
            command.settings.subscription.fifo = self.ordered
            command.settings.backoff_policy.max_attempts = 17
            self.known = True  # a heartbeat that is refused takes back what was said
            yield command
            self.answers += 1

    def again(self) -> None:
        """Wait until it has said so again, and the member has heard what it said before."""
        before = self.answers
        eventually(lambda: self.answers > before + 1, 30)


def test_member_notices_when_brokers_stop_and_resume_ordering(monkeypatch):
    """While its streams stand: a Proxy says nothing by itself, and goes by what it learns with each question."""
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    one, two = Saying(ordered=True), Saying(ordered=True)
    with (
        serving({"Telemetry": one.telemetry, "Heartbeat": one.beat}) as first,
        serving({"Telemetry": two.telemetry, "Heartbeat": two.beat}) as second,
    ):
        member = ProxyMember(client(first, second, connect_timeout_s=30.0), "g", bytes, ordered=True)
        try:
            member.subscribe({"t": NO_FILTER}, Deadline.after(30))
            assert member.policy().ordered
            for proxy in (one, two):
                proxy.ordered = False
                eventually(lambda: not member.policy().ordered, 30)
                one.again()
                two.again()
                assert not member.policy().ordered, "one of them is enough"
                proxy.ordered = True
                eventually(lambda: member.policy().ordered, 30)
        finally:
            member.close(Deadline.after(10))


def test_ordering_reported_by_lost_endpoint_counts_no_more(monkeypatch):
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    one, two = Saying(ordered=True), Saying(ordered=False)
    with serving({"Telemetry": one.telemetry, "Heartbeat": one.beat}) as first:
        with serving({"Telemetry": two.telemetry, "Heartbeat": two.beat}) as second:
            member = ProxyMember(client(first, second, connect_timeout_s=30.0), "g", bytes, ordered=True)
            member.subscribe({"t": NO_FILTER}, Deadline.after(30))
            eventually(lambda: not member.policy().ordered, 30)  # a slow endpoint is not waited for
        try:
            eventually(lambda: member.policy().ordered, 60)
        finally:
            member.close(Deadline.after(10))


def test_ordering_reported_before_failed_start_counts_no_more():
    one, two = Saying(ordered=True), Saying(ordered=False)
    left = {"NotifyClientTermination": lambda *_: proto("NotifyClientTerminationResponse")(status=status(Code.OK))}
    with serving({"Telemetry": one.telemetry} | left) as first:
        with serving({"Telemetry": two.telemetry} | left) as second:
            member = ProxyMember(client(first, second, connect_timeout_s=30.0), "g", bytes, ordered=True)
            member.subscribe({"t": NO_FILTER}, Deadline.after(30))
            eventually(lambda: not member.policy().ordered, 30)
            member.close(Deadline.after(10))
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        try:
            assert member.policy().ordered
        finally:
            member.close(Deadline.after(10))


def test_subscription_repeated_after_failure_keeps_member_alive(monkeypatch):
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    proxy = Forgetful(refuses=True)
    with proxy.member() as member:
        with pytest.raises(errors.AccessDenied):
            member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        eventually(lambda: proxy.known, 30)
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        proxy.wait_for_beat(known=True)


@pytest.mark.parametrize("which", [None, 0, 1])
def test_subscription_is_repeated_whole_after_thread_shortage(monkeypatch, which):
    """Where there was no thread for the heartbeats (None), or for the stream of an endpoint."""
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    proxies = [Forgetful(), Forgetful()]
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(serving({"Telemetry": proxy.telemetry, "Heartbeat": proxy.beat})) for proxy in proxies
        ]
        member = ProxyMember(client(*addresses, connect_timeout_s=30.0), "g", bytes)
        stack.callback(lambda: member.close(Deadline.after(10)))
        with monkeypatch.context() as exhausted:
            no_more_threads(
                exhausted, "rocketmq-g-heartbeat" if which is None else f"rocketmq-telemetry-{addresses[which]}"
            )
            with pytest.raises(RuntimeError):
                member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        for proxy in proxies:
            proxy.wait_for_beat(known=True)


def test_refused_topic_keeps_earlier_topics_subscribed():
    """A Proxy that starts anew, or a stream that ends, would never have the member again."""
    heard: list[list[str]] = []

    def telemetry(requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for command in requests:
            heard.append([entry.topic.name for entry in command.settings.subscription.subscriptions])
            if "bad" in heard[-1]:
                yield proto("TelemetryCommand")(status=status(Code.FORBIDDEN))
                return
            yield proto("TelemetryCommand")(settings=command.settings)

    with serving({"Telemetry": telemetry}) as address:
        member = ProxyMember(client(address), "g", bytes)
        member.subscribe({"good": NO_FILTER}, Deadline.after(10))
        for _ in range(2):
            with pytest.raises(errors.AccessDenied):
                member.subscribe({"good": NO_FILTER, "bad": NO_FILTER}, Deadline.after(10))
            eventually(lambda: heard[-1] == ["good"])
        member.subscribe({"good": NO_FILTER, "other": NO_FILTER}, Deadline.after(10))
        assert heard[-1] == ["good", "other"]
        member.close(Deadline.after(3))


def test_a_member_that_left_may_join_again(monkeypatch):
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    proxy = Forgetful(refuses=True)
    with proxy.member() as member:
        with pytest.raises(errors.AccessDenied):
            member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        member.close(Deadline.after(10))
        with pytest.raises(errors.ClosedError):
            member.target_count("t", Deadline.after(10))
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        proxy.wait_for_beat(known=True)


def test_a_proxy_that_forgot_a_member_gets_its_settings_again(monkeypatch):
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    proxy = Forgetful()
    with proxy.member() as member:
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        proxy.wait_for_beat(known=True)
        proxy.known = False
        eventually(lambda: proxy.known, 30)


def test_hanging_endpoint_does_not_delay_heartbeats_to_others(monkeypatch):
    monkeypatch.setattr(grpc_member, "HEARTBEAT_S", 0.05)
    held, proxy = threading.Event(), Forgetful()

    def hanging(request: Any, context: Any) -> Any:
        held.wait(60)
        return proxy.beat(request, context)

    with (
        serving({"Telemetry": proxy.telemetry, "Heartbeat": hanging}) as one,
        serving({"Telemetry": proxy.telemetry, "Heartbeat": proxy.beat}) as two,
    ):
        member = ProxyMember(client(one, two, connect_timeout_s=30.0, request_timeout_s=60.0), "g", bytes)
        try:
            member.subscribe({"t": NO_FILTER}, Deadline.after(30))
            proxy.beats.get(timeout=30)  # of the first round, which may come before its settings
        finally:
            held.set()
            member.close(Deadline.after(10))


@pytest.mark.parametrize("mute", [False, True])
def test_subscribe_does_not_wait_for_absent_or_hanging_endpoint(nobody, mute):
    proxy, hanging = Forgetful(), {"Telemetry": lambda commands, context: hangs(context)}
    with serving({"Telemetry": proxy.telemetry, "Heartbeat": proxy.beat}) as address, serving(hanging) as silent:
        member = ProxyMember(client(silent if mute else nobody, address, connect_timeout_s=30.0), "g", bytes)
        deadline = Deadline.after(60)
        member.subscribe({"t": NO_FILTER}, deadline)
        member.subscribe({"t": NO_FILTER, "u": NO_FILTER}, deadline)
        assert deadline.remaining() > 30
        member.close(Deadline.after(10))


@pytest.mark.parametrize("seconds", [60.0, 1.0])
def test_receive_tries_another_endpoint_if_time_suffices(nobody, seconds):
    def assigned(request: Any, context: Any) -> Any:
        answer = proto("QueryAssignmentResponse")(status=status(Code.OK))
        answer.assignments.add().message_queue.broker.name = "b"
        return answer

    def give(request: Any, context: Any) -> Any:
        yield proto("ReceiveMessageResponse")(message=proto("Message")(body=b"x"))

    with serving({"QueryAssignment": assigned, "ReceiveMessage": give}) as address:
        proxy = client(nobody, address)
        member = ProxyMember(proxy, "g", bytes)
        member._filters = {"t": NO_FILTER}
        assert member.target_count("t", Deadline.after(30)) == 1
        proxy._endpoints = Endpoints(proxy.addresses)  # the first one is tried again
        with pytest.raises(errors.ConnectionLost) if seconds < 5 else contextlib.nullcontext():
            assert len(member.receive(("t", 0), 1, 30.0, 5.0, Deadline.after(seconds))) == 1
        proxy.close()


def test_endpoint_is_avoided_as_long_as_its_receive_hung(monkeypatch):
    """Half of the questions went there, for 23 s each, while the other one had messages."""
    monkeypatch.setattr(grpc_proxy, "AVOID_S", 0.0)
    with giving(end=hangs) as member:
        proxy, _ = member._proxy, member.target_count("t", Deadline.after(30))
        proxy._endpoints, (hanging,) = Endpoints([*proxy.addresses, "other:1"]), proxy.addresses
        with pytest.raises(errors.CallTimeout):
            member.receive(("t", 0), 9, 30.0, 1.0, Deadline.after(2))
        assert proxy._endpoints.choose(hanging, time.monotonic() + 1) == "other:1"
        assert proxy._endpoints.choose(hanging, time.monotonic() + 60) == hanging


@pytest.mark.parametrize("where", ["_timer", "_leave"])
def test_a_close_that_is_interrupted_leaves_all_the_same(where, monkeypatch):
    proxy, left = Forgetful(), list[str]()

    def leave(request: Any, context: Any) -> Any:
        left.append(request.group.name)
        return proto("NotifyClientTerminationResponse")(status=status(Code.OK))

    answers = {"Telemetry": proxy.telemetry, "Heartbeat": proxy.beat, "NotifyClientTermination": leave}
    with serving(answers) as address:
        member = ProxyMember(client(address), "g", bytes)
        member.subscribe({"t": NO_FILTER}, Deadline.after(30))
        (stream,) = member._streams.values()
        if where == "_timer":
            monkeypatch.setattr(member._timer, "close", raising(KeyboardInterrupt()))
        else:
            monkeypatch.setattr(member, "_leave", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            member.close(Deadline.after(10))
        assert left == (["g"] if where == "_timer" else [])
        stream._thread.join(30)
        assert not stream._thread.is_alive()


def test_a_proxy_cannot_send_millions_of_keys() -> None:
    answer = proto("ReceiveMessageResponse")()
    answer.message.system_properties.keys.extend([""] * 100_000)
    answer.message.user_properties.update({str(i): "" for i in range(100_000)})
    found = grpc_member.to_popped_message(answer.message, "t", ("b", "p"), bytes)
    assert (len(found.keys), len(found.properties)) == (32_767, 32_767)
