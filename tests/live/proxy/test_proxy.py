"""Source and sink through the Remoting port of a Proxy in cluster mode, given as name server: no broker is ever dialled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from rocketmq_spark import Producer, PullConsumer, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import OffsetError, OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from rocketmq_spark.remoting import transport
from tests.helpers import told
from tests.mockbroker import eventually
from tests.reading import Run, bodies, data_source, feed, names, post, read


@pytest.fixture
def topic(proxied: LocalBroker) -> str:
    (name,) = names(1, "through")
    proxied.create_topic(name, 4)
    eventually(lambda: len(known(proxied, name)) == 4, 60)
    return name


def known(mq: LocalBroker, topic: str) -> list[object]:
    """The queues of a topic as the Proxy tells them: it keeps routes for a while."""
    try:
        return list(Run(mq.proxy_server, subscribe=topic, numRetries=0, startingOffsets="earliest").positions)
    except RocketMQError:
        return []


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Every address that is connected to while the test runs; there is at least one."""
    session.close_all()
    found: set[str] = set()
    connect = transport._connect_any

    def noted(host: str, port: int, deadline: Deadline) -> object:
        found.add(f"{host}:{port}")
        return connect(host, port, deadline)

    monkeypatch.setattr(transport, "_connect_any", noted)
    yield found
    session.close_all()


@pytest.fixture
def only_the_proxy(proxied: LocalBroker, dialled: set[str]) -> Callable[[], None]:
    def check() -> None:
        assert dialled == {proxied.proxy_server}
        assert proxied.address("broker-a") not in dialled

    return check


def test_batches(proxied, topic, only_the_proxy):
    sent = feed(proxied.proxy_server, topic, 400)
    found = read(proxied.proxy_server, subscribe=topic)
    assert sorted(bodies(found)) == sorted(sent)
    assert {row["brokerName"] for row in found} == {"broker-a"}
    assert {row["queueId"] for row in found} == {0, 1, 2, 3}
    only_the_proxy()


def test_recreated_topic_is_noticed_without_store_times(proxied, topic):
    """A Proxy does not tell when the newest message of a queue was stored."""
    given = {"subscribe": topic, "startingOffsets": "earliest"}
    run = Run(proxied.proxy_server, failOnDataLoss="warn", **given)
    for _ in range(2):
        run.drain(feed(proxied.proxy_server, topic, 40))
    strict = Run(proxied.proxy_server, run.offset, **given)
    assert strict.batch() == []
    proxied.admin.delete_topic(topic)
    eventually(lambda: topic not in proxied.admin.topics(), 60)
    proxied.create_topic(topic, 4)
    fresh = feed(proxied.name_server, topic, 200)
    with pytest.raises(RocketMQError, match="offset went back"):
        strict.until(lambda: False, 60)
    run.read.clear()
    run.drain(fresh)
    assert Counter(run.read) == Counter(fresh)


def test_streams_and_their_group(proxied, topic, only_the_proxy):
    group = f"g-{topic}"  # new: a Proxy forwards no request to create it
    ends = proxied.proxy_server
    run = Run(ends, subscribe=topic, startingOffsets="earliest", group=group, maxOffsetsPerTrigger=60)
    sent = feed(ends, topic, 200)
    run.drain(sent)
    run.latest()
    sent += feed(ends, topic, 20)
    again = Run(ends, run.offset, subscribe=topic, group=group)
    again.drain(sent[200:])
    assert sorted(run.read + again.read) == sorted(sent)
    again.latest()
    only_the_proxy()
    stored = proxied.admin.offset_reader.committed(group, list(again.positions), Deadline.after(10))
    assert stored == again.positions


def test_positions(proxied, topic, only_the_proxy):
    sent = feed(proxied.proxy_server, topic, 20)
    ends = proxied.proxy_server
    assert Counter(bodies(read(ends, subscribe=topic, startingTimestamp=0))) == Counter(sent)
    with pytest.raises(OffsetError):
        read(ends, subscribe=topic, startingTimestamp="2100-01-01")
    run = Run(ends, available_now=True, subscribe=topic, startingOffsets="earliest")
    run.batch()
    assert sorted(run.read) == sorted(sent)
    only_the_proxy()


def test_tags_are_filtered_exactly(proxied, topic, only_the_proxy):
    made = dict(zip(names(4), ("Aa", "BB", "c", None), strict=True))
    post(proxied.proxy_server, [Message(topic, body.encode(), tags=tag) for body, tag in made.items()])
    found = read(proxied.proxy_server, subscribe=topic, tags="Aa || c")
    assert Counter(bodies(found)) == Counter({body for body, tag in made.items() if tag in ("Aa", "c")})
    only_the_proxy()


def test_nothing_of_a_batch_topic_is_left_out_by_tags(proxied):
    """A Proxy does not tell what kind a topic is; its brokers would drop batches that have no tag of their own."""
    (topic,) = names(1, "through")
    proxied.create_topic(topic, 1, batch=True)
    with Producer(name_server=proxied.name_server, group="p_tags") as producer:
        producer.send_batch([Message(topic, tag.encode(), tags=tag) for tag in "abc"])
    session.close_all()  # else the broker is known, and asked
    eventually(lambda: len(known(proxied, topic)) == 1, 60)
    eventually(lambda: len(read(proxied.proxy_server, subscribe=topic)) == 3, 60)
    assert bodies(read(proxied.proxy_server, subscribe=topic, tags="a || c")) == ["a", "c"]
    with PullConsumer(name_server=proxied.proxy_server, group="g_tags", consume_from_where="earliest") as consumer:
        consumer.subscribe(topic, tags="b")
        assert [message.body for message in consumer.poll(20.0)] == [b"b"]


def test_the_sink(proxied, topic, only_the_proxy):
    source, _ = data_source({"nameServer": proxied.proxy_server, "topic": topic})
    made = names(50)
    schema = StructType([StructField("body", BinaryType()), StructField("tags", StringType())])
    writer = source.writer(schema, overwrite=False)
    batch = pa.RecordBatch.from_pydict({"body": [body.encode() for body in made], "tags": ["t"] * 50})
    writer.commit([writer.write(iter([batch]))])
    eventually(lambda: len(read(proxied.proxy_server, subscribe=topic)) >= 50, 60)  # the index follows the answers
    found = read(proxied.proxy_server, subscribe=topic)
    assert sorted(bodies(found)) == sorted(made)
    assert {row["tags"] for row in found} == {"t"}
    only_the_proxy()


def test_a_proxy_wants_no_traces_of_sends_by_default(proxied, topic):
    with told("are not traced, because the server has traceOn=false") as warned:
        with Producer(proxied.proxy_server, "shop", enable_trace=True) as producer:
            producer.send(Message(topic, b"x"))
        assert warned.is_set()


def test_what_a_proxy_does_not_pass_is_refused_with_the_reason(proxied, topic, only_the_proxy):
    ends = proxied.proxy_server
    with pytest.raises(OptionError, match="'subscribePattern' cannot be used here") as e:
        read(ends, subscribePattern="t.*")
    assert "Proxy" in str(e.value)
    with pytest.raises(OptionError, match="'sql' cannot be used here") as e:
        read(ends, subscribe=topic, sql="a = 1")
    assert "Proxy" in str(e.value)
    with pytest.raises(RouteNotFound, match="no-such-topic"):
        read(ends, subscribe="no-such-topic", numRetries=0)
    only_the_proxy()
