"""Two Proxies in cluster mode behind one address, as a Service of Kubernetes has them: each new connection leads to the next one.

They advertise an address that cannot be reached, so everything goes through the shared address (addressMap=nameServer).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyspark.sql.types import BinaryType, StructField, StructType

from rocketmq_spark import Admin, Consumer, Message, Producer, PullConsumer, ReceivedMessage, session
from rocketmq_spark import options as options_table
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.localbroker import LocalBroker, processes, servers
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import rpc
from tests.fix_clusters import POD, WITHOUT_TIMERS
from tests.fix_proxy import FaultyProxy
from tests.helpers import stored
from tests.live.grpc.proxied import new_topic
from tests.mockbroker import eventually
from tests.reading import Run, bodies, data_source, names, read

MAPPED = {"addressMap": "nameServer"}
KEYWORD = {"address_map": "nameServer"}
PROXIES = ("proxy", "proxy-2")
QUEUES = 4


class Balancer(FaultyProxy):
    """Leads each new connection to the next server that accepts one. ``served`` lists these servers."""

    def __init__(self, targets: Sequence[str]) -> None:
        super().__init__(targets[0])
        self.served: list[str] = []
        self._targets = itertools.cycle(targets)
        self._count = len(targets)

    def connect(self) -> socket.socket:
        for target in itertools.islice(self._targets, self._count):
            self.target = target
            with contextlib.suppress(OSError):
                server = super().connect()
                self.served.append(target)
                return server
        raise ConnectionRefusedError("no server accepts connections")


@dataclass(frozen=True, slots=True)
class TwoProxies:
    """A broker, two Proxies, and the address that they share."""

    mq: LocalBroker
    balancer: Balancer

    @property
    def address(self) -> str:
        return self.balancer.address

    @property
    def all(self) -> set[str]:
        return {self.mq.address(name) for name in PROXIES}

    def kill(self, address: str) -> str:
        """Kill the Proxy at this address. Returns the address of the other one."""
        (name,) = [name for name in PROXIES if self.mq.address(name) == address]
        self.mq.kill(name)
        (other,) = self.all - {address}
        return other


def bring_up_another_proxy(mq: LocalBroker) -> None:
    members = mq._servers
    assert members is not None

    def make(port: int) -> processes.Program:
        jars, conf = members.start_settings.proxy_jars, members.start_settings.proxy_conf
        return members._with_flags(
            servers.prepare_proxy(members.workspace.data / "second", jars, port, members.name_server, conf)
        )

    members.workspace.bring_up(
        PROXIES[1], processes.PROXY_PORT_DISTANCES, make, members._readiness_check(None), Deadline.after(180.0)
    )


@pytest.fixture(scope="module")
def two_proxies() -> Iterator[TwoProxies]:
    with LocalBroker(conf=WITHOUT_TIMERS, proxy={"remotingAccessAddr": POD}, quiet=True) as mq:
        bring_up_another_proxy(mq)
        with Balancer([mq.address(name) for name in PROXIES]) as balancer:
            yield TwoProxies(mq, balancer)


@pytest.fixture
def both(two_proxies: TwoProxies) -> Iterator[TwoProxies]:
    """Both Proxies run when a test begins."""
    for name in PROXIES:
        if two_proxies.mq.pid(name) is None:
            two_proxies.mq.restart(name)
    session.close_all()
    two_proxies.balancer.served.clear()
    yield two_proxies
    session.close_all()


@pytest.fixture
def topic(both: TwoProxies) -> str:
    return new_topic(both.mq, queues=QUEUES)


def send(producer: Producer, topic: str, count: int) -> list[str]:
    """Send as many messages to each queue. Sends that fail are repeated: a Proxy that was killed before has stored nothing."""
    made = names(count)
    for body, queue in zip(made, itertools.cycle(range(QUEUES))):
        message, chosen = Message(topic, body.encode()), MessageQueue(topic, "broker-a", queue)
        try:
            producer.send(message, queue=chosen)
        except ConnectionLost:  # a send to a chosen queue has one attempt
            producer.send(message, queue=chosen)
    return made


def sink(address: str, topic: str, made: list[str]) -> None:
    source, _ = data_source({"nameServer": address, "topic": topic, **MAPPED})
    writer = source.writer(StructType([StructField("body", BinaryType())]), overwrite=False)
    writer.commit([writer.write(iter([pa.RecordBatch.from_pydict({"body": [body.encode() for body in made]})]))])


def test_spark_writes_at_one_proxy_and_reads_at_the_other(both, topic):
    made = names(100)
    sink(both.address, topic, made[:50])
    session.close_all()
    sink(both.address, topic, made[50:])
    assert Counter(message.body.decode() for message in stored(both.mq, topic, 100)) == Counter(made)
    given = {"subscribe": topic, "startingOffsets": "earliest", **MAPPED}
    first = Run(both.address, **given)
    first.drain(made)
    session.close_all()
    assert Counter(bodies(read(both.address, subscribe=topic, **MAPPED))) == Counter(made)
    session.close_all()
    again = Run(both.address, first.offset, **given)
    with Producer(both.address, "p", **KEYWORD) as producer:
        again.drain(send(producer, topic, 20))
    assert set(both.balancer.served) == both.all


def test_offsets_committed_at_one_proxy_are_read_at_the_other(both, topic):
    group = f"g-{topic}"
    with Producer(both.address, "p", **KEYWORD) as producer:
        made = send(producer, topic, 20)
        found: list[str] = []
        with PullConsumer(both.address, group, consume_from_where="earliest", **KEYWORD) as consumer:
            consumer.subscribe(topic)
            eventually(lambda: len(found.extend(m.body.decode() for m in consumer.poll(1.0)) or found) >= 20, 60)
            consumer.commit()
        assert Counter(found) == Counter(made)
        send(producer, topic, 5)
    for address in both.all:
        with Admin(address, **KEYWORD) as admin:
            assert sum(offset or 0 for offset in admin.offsets(group, [topic]).values()) == 20
    lag = ["lag", "--group", group, "--topic", topic, "--json", "-n", both.address, "-o", "addressMap=nameServer"]
    done = CliRunner().invoke(app, lag)
    assert '"lag":5' in done.output.replace(" ", ""), done.output


class Received:
    """What a group receives: bodies, with the member and the queue of each."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, int]] = []
        self.lists: dict[str, list[list[str]]] = defaultdict(list)  # of members, for each assignment that a member made

    def start(self, name: str, address: str, topic: str, **more: object) -> Consumer:
        """Start a member. It has its own connections, because no other member has the same options in ``more``."""

        def listener(messages: Sequence[ReceivedMessage], context: object) -> None:
            self.messages += [(message.body.decode(), name, message.queue_id) for message in messages]

        def averagely(me: str, queues: list[MessageQueue], members: list[str]) -> list[MessageQueue]:
            if queues[0].topic == topic:
                self.lists[name].append(members)
            return queues[members.index(me) :: len(members)]

        consumer = Consumer(
            address, f"g-{topic}", consume_from_where="earliest", rebalance_interval="1s", allocation_strategy=averagely,
            **KEYWORD, **more,
        )  # fmt: skip
        consumer.subscribe(topic)
        consumer.start(listener)
        return consumer

    def settled(self, members: int) -> None:
        """Wait until each member has made two more assignments, the last one among this number of members."""
        before = {name: len(lists) for name, lists in self.lists.items()}
        eventually(lambda: all(len(self.lists[name]) >= count + 2 for name, count in before.items()), 60)
        eventually(lambda: all(len(lists[-1]) == members for lists in self.lists.values()), 60)

    def complete(self, made: Sequence[str]) -> dict[str, set[int]]:
        """Wait until all of these messages were received, each exactly once. Returns the queues of each member."""
        eventually(lambda: {body for body, _, _ in self.messages} >= set(made), 60)
        assert Counter(body for body, _, _ in self.messages if body in made) == Counter(made)
        queues: dict[str, set[int]] = defaultdict(set)
        for body, name, queue in self.messages:
            if body in made:
                queues[name].add(queue)
        return dict(queues)


def listed(address: str, group: str) -> list[str]:
    """The members of a group as a Proxy lists them."""
    calls = session.client(options_table.parse({"nameServer": address}).for_role("sink")).rpc_client
    request = rpc.GET_CONSUMER_LIST_BY_GROUP.request(consumerGroup=group, bname="broker-a")
    return json.loads(calls.request(address, request, Deadline.after(10.0)).body)["consumerIdList"]


def test_members_at_different_proxies_share_the_queues(both, topic):
    received = Received()
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(Producer(both.mq.name_server, "p"))
        one = stack.enter_context(received.start("one", both.address, topic))
        at_one = both.balancer.served[-1]
        other = stack.enter_context(received.start("other", both.address, topic, connect_timeout="4s"))
        at_other = both.balancer.served[-1]
        assert {at_one, at_other} == both.all
        received.settled(2)
        assert received.lists["one"][-1] == sorted([one.client_id, other.client_id])
        shares = received.complete(send(producer, topic, 40))
        assert sorted(map(len, shares.values())) == [2, 2]
        # The Proxy that still runs lists the other member twice, until that member's old connection expires two minutes later.
        left = both.kill(at_other)
        other.subscribe(topic)  # sends a heartbeat now instead of within 30 seconds
        eventually(lambda: sorted(Counter(listed(left, f"g-{topic}")).values()) == [1, 2], 60)
        received.settled(2)
        assert received.complete(send(producer, topic, 40)) == shares


def test_a_killed_proxy_interrupts_nothing(both, topic):
    """A producer, a stream and a PullConsumer that were connected to the killed Proxy continue at the other one."""
    given = {"subscribe": topic, "startingOffsets": "earliest", **MAPPED}
    pulled: list[str] = []
    with (
        Producer(both.address, "p", **KEYWORD) as producer,
        PullConsumer(
            both.address, f"g-{topic}", consume_from_where="earliest", connect_timeout="4s", **KEYWORD
        ) as consumer,
    ):
        consumer.subscribe(topic)

        def pull(made: Sequence[str]) -> None:
            eventually(
                lambda: set(pulled.extend(m.body.decode() for m in consumer.poll(1.0)) or pulled) >= set(made), 60
            )
            consumer.commit()

        made = send(producer, topic, 20)
        run = Run(both.address, **given)
        run.drain(made)
        pull(made)
        assert set(both.balancer.served) == both.all
        for name in PROXIES:
            both.mq.kill(name)
            more = send(producer, topic, 20)
            run.drain(more)
            pull(more)
            made += more
            both.mq.restart(name)
    assert Counter(pulled) == Counter(made)
    assert Counter(message.body.decode() for message in stored(both.mq, topic, len(made))) == Counter(made)
