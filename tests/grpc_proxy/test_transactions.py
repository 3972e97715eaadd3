"""Half messages through a scripted Proxy: what it must know before, what a decision says, and what its questions do."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.errors import (
    ClosedError,
    ConnectionLost,
    MessageIllegal,
    MessageRefused,
    RocketMQError,
)
from rocketmq_spark.grpc_proxy.channel import Endpoints
from rocketmq_spark.grpc_proxy.encoder import RequestEncoder, TopicName
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.sender import ProxySender
from rocketmq_spark.grpc_proxy.tables import ClientType, Code, MessageType, TransactionResolution, TransactionSource
from rocketmq_spark.model import Message, MessageQueue, SendRequest
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.model.send import (
    HalfCheck,
    HalfPlace,
    HalfState,
    SentMessage,
    TransactionState,
    stored_content_digest,
)
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.transactions import TransactionProducer
from tests.grpc_proxy.scripted import acknowledge, client, route, serving, status
from tests.helpers import no_more_threads
from tests.mockbroker import eventually

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
HALF = SendRequest("g", b"", sys_flag=int(SysFlag.TRANSACTION_PREPARED), born_timestamp_ms=5)
PLACE = HalfPlace("t", "", "g", "ID", "")
PART = SentMessage(b"x", {Property.UNIQ_KEY: "ID", Property.TRANSACTION_PREPARED: "true"})


class Scripted:
    """A Proxy that keeps what it is told, and asks what it is given to ask."""

    def __init__(self) -> None:
        self.settings, self.sent, self.ended = list[Any](), list[Any](), list[Any]()
        self.end_code = Code.OK
        self.breaks = False
        self.may_end = threading.Event()
        self.may_end.set()
        # What each stream that stands has to say, the newest last.
        self.streams: list[SimpleQueue[Any]] = []
        self.beats: list[Any] = []
        self.refused: set[str] = set()  # topics for which the user has no right

    def telemetry(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        said: SimpleQueue[Any] = SimpleQueue()

        def ended() -> None:
            self.streams.remove(said)
            said.put(None)

        def hear() -> None:
            with contextlib.suppress(grpc.RpcError):  # the client has gone
                for command in requests:
                    self.settings.append(command.settings)
                    said.put(self._answer(command))
            said.put(None)

        self.streams.append(said)
        if not context.add_callback(ended):  # it is over already
            ended()
        threading.Thread(target=hear, daemon=True).start()
        yield from iter(said.get, None)

    def _answer(self, command: Any) -> Any:
        """A Proxy refuses all topics because of one."""
        if self.refused.isdisjoint(topic.name for topic in command.settings.publishing.topics):
            return proto("TelemetryCommand")(settings=command.settings)
        return proto("TelemetryCommand")(status=status(Code.FORBIDDEN))

    def topics(self) -> set[str]:
        return {topic.name for topic in self.settings[-1].publishing.topics}

    def send(self, request: Any, context: Any) -> Any:
        self.sent.append(([topic.name for one in self.settings for topic in one.publishing.topics], request))
        return acknowledge(request, context)

    def end(self, request: Any, context: Any) -> Any:
        assert self.may_end.wait(60)
        if self.breaks:
            context.abort(grpc.StatusCode.UNAVAILABLE, "it goes away")
        self.ended.append(request)
        return proto("EndTransactionResponse")(status=status(self.end_code))

    def beat(self, request: Any, context: Any) -> Any:
        self.beats.append(request)
        return proto("HeartbeatResponse")(status=status(Code.OK))

    def ask(self, topic: str = "t", transaction_id: str = "TX", msg_id: str = "ID") -> None:
        command = proto("TelemetryCommand")()
        orphan = command.recover_orphaned_transaction_command
        orphan.transaction_id = transaction_id
        orphan.message.topic.resource_namespace, _, orphan.message.topic.name = topic.rpartition("%")  # as a Proxy does
        orphan.message.body = b"order 7"
        orphan.message.system_properties.message_id = msg_id
        orphan.message.system_properties.keys.append("7")
        self.streams[-1].put(command)

    def answers(self) -> dict[str, Any]:
        return {
            "QueryRoute": route(MessageType.TRANSACTION), "SendMessage": self.send, "Telemetry": self.telemetry,
            "EndTransaction": self.end, "Heartbeat": self.beat,
        }  # fmt: skip


@contextmanager
def talking(**access: Any) -> Iterator[tuple[Scripted, ProxySender, MessageQueue]]:
    scripted = Scripted()
    given = {"request_timeout_s": 60.0, **access}
    with serving(scripted.answers()) as address, contextlib.closing(client(address, **given)) as proxy:
        yield scripted, ProxySender(proxy, lambda request: [PART]), MessageQueue("t", address, 0)


def soon() -> Deadline:
    return Deadline.after(60)


def test_proxy_knows_producer_before_it_gets_half_message() -> None:
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        assert scripted.settings == []
        result = sender.send(queue, HALF, soon())
        sender.send(queue, HALF, soon())
        ((topics, request), _) = scripted.sent
        assert topics == ["t"]
        assert request.messages[0].system_properties.message_type == MessageType.TRANSACTION
        assert "TRAN_MSG" not in request.messages[0].user_properties
        assert scripted.settings[0].client_type == ClientType.PRODUCER
        assert len(scripted.settings) == 1, "once is enough"
        assert result.queue is not None
        sender.send(queue._replace(topic="u"), HALF, soon())
        assert [topic.name for topic in scripted.settings[-1].publishing.topics] == ["t", "u"]
        leave(soon())


def test_what_goes_with_other_messages_is_not_said() -> None:
    with talking() as (scripted, sender, queue):
        sender.send(queue, HALF._replace(sys_flag=0), soon())
        assert scripted.settings == []


@pytest.mark.parametrize(
    ("decision", "resolution"), [(COMMIT, TransactionResolution.COMMIT), (ROLLBACK, TransactionResolution.ROLLBACK)]
)
def test_a_decision_proves_nothing_of_the_broker(decision: TransactionState, resolution: int) -> None:
    with talking(name_on_wire=lambda name: f"ns%{name}") as (scripted, sender, queue):
        place = HalfPlace("t", queue.broker_name, "g", "ID", "TX")
        assert sender.end_transaction(place, decision, soon()) is False
        (request,) = scripted.ended
        assert (request.topic.name, request.message_id, request.transaction_id) == ("ns%t", "ID", "TX")
        assert (request.resolution, request.source) == (resolution, TransactionSource.SOURCE_CLIENT)
        scripted.end_code = Code.BAD_REQUEST
        with pytest.raises(MessageIllegal):
            sender.end_transaction(place, decision, soon())


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK, UNKNOWN])
def test_a_question_is_answered_where_it_came_from(
    decision: TransactionState, caplog: pytest.LogCaptureFixture
) -> None:
    with talking(name_on_wire=lambda name: f"ns%{name}") as (scripted, sender, queue):
        asked: list[tuple[PoppedMessage, HalfPlace]] = []

        def check(message: Any, place: HalfPlace) -> TransactionState:
            asked.append((message, place))
            return decision

        leave = sender.join("g", 0, check)
        sender.send(queue, HALF, soon())
        assert [topic.name for topic in scripted.settings[-1].publishing.topics] == ["ns%t"], "or nobody would be asked"
        scripted.ask("of others")
        scripted.ask("ns%t")
        eventually(lambda: bool(asked))
        ((message, place),) = asked
        assert (message.topic, message.body, message.msg_id, message.keys) == ("t", b"order 7", "ID", ["7"])
        assert place == HalfPlace("t", queue.broker_name, "g", "ID", "TX", digest=stored_content_digest(message))
        if decision is not UNKNOWN:
            eventually(lambda: bool(scripted.ended))
            assert scripted.ended[0].source == TransactionSource.SOURCE_SERVER_CHECK
            assert scripted.ended[0].resolution == {COMMIT: 1, ROLLBACK: 2}[decision]
        leave(soon())
        assert len(scripted.ended) == (decision is not UNKNOWN)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_transaction_check_asks_only_last_group_of_topic() -> None:
    """The function of another one would find nothing that was saved, and have the message rolled back."""
    with talking() as (scripted, sender, queue):
        asked: list[str] = []

        def check(group: str) -> HalfCheck:
            return lambda message, place: (asked.append(f"{group} {place.group}"), UNKNOWN)[1]

        leaves = [sender.join(group, 0, check(group)) for group in ("other", "g", "h")]
        for number, group in enumerate("gh", 1):
            sender.send(queue, HALF._replace(group=group), soon())
            scripted.ask()
            eventually(lambda number=number: len(asked) == number)
        assert asked == ["g g", "h h"]
        for leave in leaves:
            leave(soon())


def test_rejected_decision_is_logged_and_blocks_no_other_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with talking(request_timeout_s=60.0) as (scripted, sender, queue):  # else the first answer may be late here
        asked: list[object] = []
        leave = sender.join("g", 0, lambda message, place: (asked.append(place), COMMIT)[1])
        sender.send(queue, HALF, soon())
        scripted.end_code = Code.BAD_REQUEST
        scripted.may_end.clear()
        for number in range(2):
            scripted.ask(transaction_id=f"TX{number}")
        eventually(lambda: len(asked) == 2)
        assert "did not arrive" not in caplog.text
        scripted.may_end.set()
        eventually(lambda: caplog.text.count("will check half message ID again, because COMMIT did not arrive") == 2)
        leave(soon())


def test_lost_decision_of_slow_check_is_given_again(caplog: pytest.LogCaptureFixture) -> None:
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: lambda: COMMIT)
        sender.send(queue, HALF, soon())
        scripted.breaks = True
        scripted.ask()
        eventually(lambda: "COMMIT did not arrive" in caplog.text)
        scripted.breaks = False
        scripted.ended.clear()
        copies = next(iter(sender._transactions._checks.values()))[2]
        eventually(lambda: not copies._newest_places)
        scripted.ask()
        eventually(lambda: len(scripted.ended) == 1)
        leave(soon())


def test_queued_check_is_not_run_after_its_producer_left() -> None:
    with talking() as (scripted, sender, queue):
        called, may_end, calls = threading.Event(), threading.Event(), []

        def slow(name: str) -> TransactionState:
            calls.append(name)
            called.set()
            assert may_end.wait(30)
            return COMMIT

        leave = sender.join("g", 0, lambda message, place: lambda: slow(message.msg_id))
        sender.send(queue, HALF, soon())
        copies = next(iter(sender._transactions._checks.values()))[2]
        scripted.ask(msg_id="A")
        assert called.wait(30)
        scripted.ask(msg_id="B")
        eventually(lambda: any(what.startswith("B ") for what in copies._newest_places))
        leave(soon())
        may_end.set()
        eventually(lambda: not copies._newest_places)
        assert calls == ["A"]


def test_slow_check_runs_once_for_all_copies_that_arrive() -> None:
    with talking() as (scripted, sender, queue):
        may_end, calls = threading.Event(), []

        def slow() -> TransactionState:
            calls.append(1)
            assert may_end.wait(30)
            return COMMIT

        leave = sender.join("g", 0, lambda message, place: slow)
        sender.send(queue, HALF, soon())
        for number in range(3):
            scripted.ask("t", f"TX{number}")
        copies = next(iter(sender._transactions._checks.values()))[2]
        eventually(lambda: [place.transaction_id for place in copies._newest_places.values()] == ["TX2"])
        may_end.set()
        eventually(lambda: not copies._newest_places)
        assert (len(calls), [request.transaction_id for request in scripted.ended]) == (1, ["TX2"])
        leave(soon())


def test_answers_that_need_no_function_wait_in_a_limited_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile Proxy may check without end, and answer nothing."""
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        sender.send(queue, HALF, soon())
        copies = next(iter(sender._transactions._checks.values()))[2]
        works: list[Callable[[], None]] = []
        monkeypatch.setattr(copies._send_executor, "run", lambda key, work: works.append(work))
        for number in range(3):
            scripted.ask("t", f"TX{number}")
        eventually(lambda: len(works) == 3)
        assert scripted.ended == []
        for work in works:
            work()
        assert [request.transaction_id for request in scripted.ended] == ["TX0", "TX1", "TX2"]
        leave(soon())


def test_streams_end_with_last_producer_and_restart_with_next() -> None:
    with talking() as (scripted, sender, queue):
        first, second = (sender.join("g", 0, lambda message, place: COMMIT) for _ in range(2))
        sender.send(queue, HALF, soon())
        first(soon())
        streams = list(sender._transactions._streams.values())
        assert len(streams) == 1
        second(soon())
        assert sender._transactions._streams == {}
        assert all(stream._closed_event.is_set() for stream in streams)
        again = sender.join("g", 0, lambda message, place: COMMIT)
        sender.send(queue, HALF, soon())
        assert len(scripted.settings) == 2
        again(soon())


def test_of_groups_that_share_a_topic_one_that_is_there_is_asked() -> None:
    """A Proxy takes the topic for the group, and does not say whose message it is."""
    with talking() as (scripted, sender, queue):
        asked: SimpleQueue[str] = SimpleQueue()
        leave_a, leave_b = (sender.join(group, 0, lambda m, place: asked.put(place.group) or COMMIT) for group in "ab")
        for group in "aab":
            sender.send(queue, HALF._replace(group=group), soon())
        sender.send(queue._replace(topic="u"), HALF._replace(group="b"), soon())
        scripted.ask("t")
        assert asked.get(timeout=10) == "b", "the last one that sent to it"
        leave_b(soon())
        scripted.ask("t")
        assert asked.get(timeout=10) == "a"
        sender._transactions._send_heartbeats()
        eventually(lambda: [topic.name for topic in scripted.settings[-1].publishing.topics] == ["t"])
        leave_a(soon())


def test_heartbeats_keep_the_proxy_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.grpc_proxy.transactions.HEARTBEAT_S", 0.02)
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        sender.send(queue, HALF, soon())
        eventually(lambda: len(scripted.beats) > 1 and len(scripted.settings) > 1)
        assert {beat.client_type for beat in scripted.beats} == {ClientType.PRODUCER}
        leave(soon())
        again = sender.join("g", 0, lambda message, place: COMMIT)
        sender.send(queue, HALF, soon())
        before = len(scripted.beats)
        eventually(lambda: len(scripted.beats) > before + 1)  # one may have been under way
        again(soon())


def test_a_half_message_is_not_sent_to_a_proxy_that_cannot_ask() -> None:
    with serving({"SendMessage": acknowledge}) as address:
        proxy = client(address)
        sender = ProxySender(proxy, lambda request: [PART])
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        for _ in range(2):
            with pytest.raises(RocketMQError) as caught:
                sender.send(MessageQueue("t", address, 0), HALF, Deadline.after(1))
            assert caught.value.unsent, "another attempt may be made"
        leave(soon())
        proxy.close()


def test_half_message_does_not_wait_for_absent_endpoint() -> None:
    scripted = Scripted()
    answers = {"SendMessage": scripted.send, "Telemetry": scripted.telemetry, "Heartbeat": scripted.beat}
    with socket.create_server(("127.0.0.1", 0)) as silent, serving(answers) as address:
        away = f"127.0.0.1:{silent.getsockname()[1]}"
        proxy = client(away, address)
        sender = ProxySender(proxy, lambda request: [PART])
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        result = sender.send(MessageQueue("t", address, 0), HALF, soon())
        assert result.queue is not None
        assert result.queue.broker_name == address
        assert scripted.sent[0][0] == ["t"]
        streams = sender._transactions._streams
        assert streams[away].wait(Deadline.after(0)) is not None, "it does not know us"
        leave(soon())
        proxy.close()


def test_half_message_is_not_sent_until_threads_are_available(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without heartbeats a Proxy asks for two minutes, and then no more."""
    monkeypatch.setattr("rocketmq_spark.grpc_proxy.transactions.HEARTBEAT_S", 0.02)
    with talking() as (scripted, sender, queue):
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        for name in ("rocketmq-transactions", "rocketmq-telemetry"):
            with monkeypatch.context() as lacking:
                no_more_threads(lacking, name)
                with pytest.raises(ConnectionLost, match="no thread") as failed:
                    sender.send(queue, HALF, soon())
            assert failed.value.unsent
        assert scripted.sent == []
        sender.send(queue, HALF, soon())
        eventually(lambda: len(scripted.beats) > 1 and [*scripted.settings[-1].publishing.topics] != [])
        leave(soon())


def test_a_send_that_outlasts_its_producer_begins_nothing() -> None:
    """A Proxy would go on asking here, where no one answers."""
    with talking() as (scripted, sender, queue):
        leave, leave_other = (sender.join(group, 0, lambda message, place: COMMIT) for group in ("g", "h"))
        for left in (leave, leave_other):
            left(soon())
            with pytest.raises(ClosedError):
                sender.send(queue, HALF, soon())
        assert (scripted.settings, scripted.sent, sender._transactions._streams) == ([], [], {})


def test_half_message_goes_to_other_endpoint_if_one_is_away() -> None:
    """The stream to it had its answer before."""
    with serving(Scripted().answers()) as stays, contextlib.ExitStack() as goes:
        away = goes.enter_context(serving(Scripted().answers()))
        proxy = client(away, stays)
        settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, features=FEATURES[GRPC])
        producer = TransactionProducer(ProxySender(proxy, lambda request: [PART]), settings, lambda message: COMMIT)
        prepared = [producer.send_half(Message("t", b"x")) for _ in range(2)]
        assert {half._fate._place.broker_name for half in prepared} == {away, stays}
        goes.close()
        for _ in range(3):
            proxy._endpoints = Endpoints(proxy.addresses)  # as if it had been left alone for long enough
            producer.send_half(Message("t", b"x")).commit()
        (lost,) = (half for half in prepared if half._fate._place.broker_name == away)
        with pytest.raises(ConnectionLost):
            lost.commit()
        assert lost.state is HalfState.PREPARED, "nothing was sent: it may be tried again"
        producer.close()
        proxy.close()


def test_of_two_endpoints_the_one_that_asked_is_answered() -> None:
    """The other one does not know the half message, and takes an answer without a word."""
    asks, other = Scripted(), Scripted()
    with serving(asks.answers()) as here, serving(other.answers()) as there:
        proxy = client(there, here)
        sender = ProxySender(proxy, lambda request: [PART])
        leave = sender.join("g", 0, lambda message, place: COMMIT)
        for address in (here, there):
            sender.send(MessageQueue("t", address, 0), HALF, soon())
        for number in range(4):
            asks.ask(msg_id=f"ID{number}", transaction_id=f"TX{number}")
        eventually(lambda: len(asks.ended) + len(other.ended) == 4)
        leave(soon())
        proxy.close()
    assert {request.message_id for request in asks.ended} == {"ID0", "ID1", "ID2", "ID3"}
    assert other.ended == []


def test_a_half_message_is_of_no_other_type() -> None:
    both = SentMessage(b"x", {**PART.properties, Property.SHARDING_KEY: "a"})
    with pytest.raises(MessageRefused, match="FIFO and TRANSACTION"):
        RequestEncoder(TopicName("t", "t"), 5, "h")(both)
