"""The ports are what upper rooms ask for, all of it: each of them works with a fake, and no client is reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import options as options_table
from rocketmq_spark import ports, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.committer import RemotingCommitter
from rocketmq_spark.client.member import RemotingMember
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.client.pull_source import RemotingPulls
from rocketmq_spark.client.replies import RemotingReplies
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.errors import MessageRefused, OffsetError
from rocketmq_spark.grpc_proxy.member import ProxyMember
from rocketmq_spark.grpc_proxy.sender import ProxySender
from rocketmq_spark.model import (
    Message,
    MessageQueue,
    OffsetRange,
    SendRequest,
)
from rocketmq_spark.options import Options, transport
from rocketmq_spark.producer.encoding import How, prepare
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.resender import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.pull import replica
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.remoting.pool import ConnectOptions
from rocketmq_spark.spark.compat import EqualTo
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.spark.source.batch_reader import PushdownReader, RocketMQReader
from rocketmq_spark.spark.source.group_offsets import GroupOffsets
from rocketmq_spark.spark.source.stream_reader import RocketMQStreamReader
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.wire.messages import decode_batch
from tests.fakes.group_member import FakeMember
from tests.fakes.offset_committer import offset_committer
from tests.fakes.offset_reader import offset_reader
from tests.fakes.pop_member import FakeProxy
from tests.fakes.ports import Fake, arguments, verbs
from tests.fakes.pull_source import pull_source
from tests.fakes.replies import FakeReplies
from tests.fakes.resender import FakeResender
from tests.fakes.route_reader import QUEUES, route_reader
from tests.fakes.sender import ScriptedSender, ok
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import Time

PORTS = {
    ports.Sender: RemotingSender,
    ports.RouteReader: Routes,
    ports.OffsetReader: RemotingOffsetReader,
    ports.OffsetCommitter: RemotingCommitter,
    ports.PullSource: RemotingPulls,
    ports.GroupMember: RemotingMember,
    ports.Replies: RemotingReplies,
    ports.Spool: SendSpool,
    ports.Resender: EngineResender,
}
FAKES = {
    ports.Sender: ScriptedSender,
    ports.Replies: FakeReplies,
    ports.Resender: FakeResender,
    ports.Spool: FakeSpool,
    ports.GroupMember: FakeMember,
    ports.PopMember: FakeProxy,
}


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.__name__)
def test_each_implementation_has_methods_and_arguments_of_port(port: type) -> None:
    for name in verbs(port):
        asked, given = getattr(port, name), getattr(PORTS[port], name)
        if isinstance(asked, property):
            assert isinstance(given, property)
        else:
            assert arguments(asked) == arguments(given), name


@pytest.mark.parametrize(("port", "kind"), [(ports.Sender, ProxySender), (ports.PopMember, ProxyMember)])
def test_proxy_client_has_methods_and_arguments_of_port(port: type, kind: type) -> None:
    assert isinstance(vars(kind)["client_id"], property)
    for name in verbs(port):
        asked, given = getattr(port, name), getattr(kind, name)
        if isinstance(asked, property):
            assert isinstance(given, property)
        else:
            assert arguments(asked) == arguments(given), name


@pytest.mark.parametrize("port", FAKES, ids=lambda port: port.__name__)
def test_each_fake_has_the_verbs_and_arguments_of_its_port(port: type) -> None:
    """``tests/contracts`` compares what the fakes do."""
    for name in verbs(port):
        asked, given = getattr(port, name), getattr(FAKES[port], name, None)
        if not callable(asked):
            continue
        assert given is not None, name
        assert arguments(asked) == arguments(given), name


def test_a_fake_of_any_port_rejects_what_the_port_lacks() -> None:
    fake: Any = Fake(ports.PullSource, stores_batches=lambda *given, **named: True)
    assert fake.stores_batches(QUEUES[0], deadline=Deadline.after(1))
    for given, named in (((), {}), ((QUEUES[0],), {"timeout_s": 1})):
        with pytest.raises(TypeError):
            fake.stores_batches(*given, **named)
    assert fake.asked == ["stores_batches"]
    assert not hasattr(fake, "send")
    with pytest.raises(pytest.fail.Exception, match=r"is_compacted.* was not expected"):
        fake.is_compacted(QUEUES[0])
    with pytest.raises(AssertionError):
        Fake(ports.PullSource, send=print)


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The session gives out these ports, and no client."""

    def wire(**given: Fake) -> None:
        monkeypatch.setattr(session, "client", lambda options: pytest.fail("a client was reached"))
        for name, fake in given.items():
            monkeypatch.setattr(session, name, lambda options, fake=fake: fake)

    return wire


def options(role: str, **given: object) -> Options:
    subscribed = {} if role in ("sink", "producer") else {"subscribe": "t"}
    return options_table.parse({"nameServer": "h:1", **subscribed, **given}).for_role(role)


def sender() -> Fake:
    scripted = ScriptedSender(Time())
    scripted.routes["t"] = tuple(QUEUES)
    scripted.longest_timers = {"broker-a": 259_200_000}
    return Fake(ports.Sender, scripted)


def test_a_task_writes_through_a_sender(wired: Callable[..., None]) -> None:
    fake = sender()
    wired(sender=fake)
    batch = pa.record_batch({"body": [b"a", b"b"], "delayMs": pa.array([5, None], pa.int64())})
    made = options("sink", topic="t")
    names = checks.check_sink(made, from_arrow_schema(batch.schema))
    checks.check_brokers(made, names)
    assert TaskWriter(made, names).write([batch]).rows == 2
    assert {"publish_queues", "max_timer_delays_ms", "batch_storage", "send_async"} == set(fake.asked)


def test_sink_checks_features_of_transport_instead_of_name(
    wired: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One like no other: it chooses queues, takes few messages of groups at once, and has priorities."""
    features = transport.TransportFeatures(
        queue_choice_problem="it does", supports_priorities=True, max_single_requests=3
    )
    monkeypatch.setitem(transport.FEATURES, transport.REMOTING, features)
    fake, sent = sender(), []

    def send_async(queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[..., None]) -> None:
        sent.append((queue, decode_batch(bytes(request.body))))
        done(ok(queue, request))

    monkeypatch.setattr(fake, "send_async", send_async)
    wired(sender=fake)
    rows = {
        "body": [b"%d" % i for i in range(20)],
        "shardingKey": ["a"] * 20,
        "priority": pa.array([1] * 20, pa.int32()),
    }
    batch = pa.record_batch(rows)
    made = options("sink", topic="t")
    names = checks.check_sink(made, from_arrow_schema(batch.schema))
    assert TaskWriter(made, names).write([batch]).rows == 20
    assert len({queue for queue, _ in sent}) == 1
    assert [len(items) for _, items in sent] == [3] * 6 + [2]
    assert [item.body for _, items in sent for item in items] == rows["body"]
    with pytest.raises(MessageRefused, match=r"names .*, but it does"):
        prepare(Message("t", b"x"), "ID", ProducerSettings.of(options("producer")), How(queue=QUEUES[0]))


def test_a_producer_sends_through_a_sender() -> None:
    fake = sender()
    with BaseProducer(fake, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)) as producer:  # type: ignore[arg-type]
        assert producer.send(Message("t", b"x")).queue in QUEUES
    assert {"publish_queues", "send", "join"} == set(fake.asked)


def reading() -> dict[str, Any]:
    fakes = {"routes": route_reader(), "offsets": offset_reader(), "pulls": pull_source()}
    return {**fakes, "source_ports": ports.SourcePorts(fakes["routes"], fakes["offsets"])}  # type: ignore[arg-type]


def test_a_batch_is_planned_from_routes_and_offsets(wired: Callable[..., None]) -> None:
    fakes = reading()
    wired(**fakes)
    made = options("batch source", startingOffsets="committed", group="g", endingTimestamp=5, sql="a > 1")
    parts = RocketMQReader(made, ()).partitions()
    assert [part.value for part in parts] == []
    fakes["offsets"].committed = lambda group, queues, deadline: dict.fromkeys(queues, 10)
    with pytest.raises(
        OffsetError, match="the start is after the end in t/broker-a/0"
    ):  # of a topic that was made again
        RocketMQReader(made, ()).partitions()
    made = options("batch source", startingTimestamp=5)
    (part,) = RocketMQReader(made, ()).partitions()
    assert part.value == tuple(OffsetRange(queue, 3, 9) for queue in QUEUES)


def test_a_stream_is_planned_from_routes_and_offsets(wired: Callable[..., None]) -> None:
    fakes = reading()
    wired(**fakes)
    given = {"subscribePattern": ".", "maxBytesPerTrigger": "1m", "startingOffsets": "earliest", "numPartitions": 2}
    made = options_table.parse({"nameServer": "h:1", **given})
    stream = RocketMQStreamReader(made.for_role("stream source"), ())
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert {part.addresses for part in stream.partitions(start, end)} == {(("broker-a", "a:1"),)}  # type: ignore[attr-defined]
    assert "sample" in fakes["offsets"].asked


def test_predicates_ask_for_the_kind_of_a_topic(wired: Callable[..., None]) -> None:
    fakes = reading()
    wired(**fakes)
    reader = PushdownReader(options("batch source"), ())
    list(reader.pushFilters([EqualTo(("tags",), "a")]))
    assert fakes["pulls"].asked == ["stores_batches"]


def test_offsets_are_stored_by_a_committer(wired: Callable[..., None]) -> None:
    committer = offset_committer()
    wired(**reading(), committer=committer)
    GroupOffsets(options("stream source", group="g")).commit({QUEUES[0]: 5})
    assert committer.asked[:2] == ["members", "lists_all_members"]
    assert committer.asked[2:] == ["commit_each", "create_group", "create_retry_topic", "commit_each"]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    monkeypatch.setattr(replica, "BulkStream", lambda address, deadline, tls, **how: opened.append(address))
    return opened


def test_a_read_asks_a_pull_source(streams: list[str]) -> None:
    fake = pull_source(compacted=True)
    puller = Puller(fake, ConnectOptions(), "g", PullSettings())  # type: ignore[arg-type]
    assert b'"topic": "ns%t"' in puller.template(QUEUES[0]).frame(0, 0, 1)
    assert (puller.is_compacted(QUEUES[0]), puller.stores_batches(QUEUES[0])) == (True, False)
    puller.replica(QUEUES[0])(Deadline.after(1.0))
    assert streams == ["a:1"]
    assert {"name_on_wire", "signing_keys", "route", "is_compacted", "stores_batches"} == set(fake.asked)
