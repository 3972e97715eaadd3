"""What travels to a task and what comes out of it."""

from __future__ import annotations

import pickle

import pytest
from pyspark import cloudpickle

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS
from rocketmq_spark.errors import ConnectionLost, DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.reading import SingleMessageReader
from rocketmq_spark.spark.source import partition_reader, stream
from rocketmq_spark.spark.source.partition_reader import RangePartition
from tests.harness import store
from tests.helpers import raising
from tests.mockbroker import MockBroker, ok, topic_config
from tests.reading import bodies, feed, stream_reader
from tests.source.scripted import route


def options(mq, topic, **given):
    return options_table.parse({"nameServer": mq.name_server, "subscribe": topic, **given}).for_role("batch source")


def read(found, *ranges, addresses=()):
    partition = pickle.loads(pickle.dumps(RangePartition(tuple(ranges), addresses)))
    return [
        row for batch in partition_reader.read_partition(found, BASIC_COLUMNS, partition) for row in batch.to_pylist()
    ]


@pytest.fixture
def filled(rocketmq, make_topic):
    topic = make_topic(queues=3)
    return topic, feed(rocketmq, topic, 30)


def test_ranges_come_in_the_order_of_queues_and_offsets(rocketmq, filled):
    topic, _ = filled
    wanted = [OffsetRange(MessageQueue(topic, "broker-a", i), a, b) for i, a, b in ((2, 0, 4), (0, 5, 10), (1, 3, 3))]
    found = read(options(rocketmq, topic), *wanted)
    assert [(row["queueId"], row["queueOffset"]) for row in found] == [
        *((0, offset) for offset in range(5, 10)),
        *((2, offset) for offset in range(4)),
    ]


def test_two_parts_of_one_queue(rocketmq, filled):
    topic, _ = filled
    queue = MessageQueue(topic, "broker-a", 0)
    found = read(options(rocketmq, topic), OffsetRange(queue, 7, 9), OffsetRange(queue, 0, 2))
    assert [row["queueOffset"] for row in found] == [0, 1, 7, 8]


@pytest.mark.parametrize("known", ["right", "wrong", "none"])
def test_addresses_are_a_hint(rocketmq, filled, known):
    topic, sent = filled
    addresses = {"right": rocketmq.address("broker-a"), "wrong": "127.0.0.1:1"}
    hint = (("broker-a", addresses[known]),) if known in addresses else ()
    ranges = [OffsetRange(MessageQueue(topic, "broker-a", i), 0, 10) for i in range(3)]
    assert sorted(bodies(read(options(rocketmq, topic), *ranges, addresses=hint))) == sorted(sent)


def test_a_partition_has_the_addresses_that_it_needs(rocketmq, filled):
    topic, _ = filled
    routes = session.routes(options(rocketmq, topic))
    routes.get(topic)
    known, away = (
        OffsetRange(MessageQueue(topic, "broker-a", 0), 0, 1),
        OffsetRange(MessageQueue(topic, "broker-z", 0), 0, 1),
    )
    first, second, both = partition_reader.input_partitions(routes, [[known], [away], [known, away]])
    here = (("broker-a", rocketmq.address("broker-a")),)
    assert (first.addresses, second.addresses, both.addresses) == (here, (), here)
    assert first.value == (known,)


def test_topics_with_different_filters_in_one_task(rocketmq, make_topic):
    one, two = make_topic(queues=1), make_topic(queues=1)
    feed(rocketmq, one, 3, tags="a")
    wanted = feed(rocketmq, one, 3, tags="b") + feed(rocketmq, two, 3, tags="a")
    found = options(rocketmq, f"{one},{two}", tags=f'{{"{one}":"b"}}')
    ranges = [OffsetRange(MessageQueue(topic, "broker-a", 0), 0, end) for topic, end in ((one, 6), (two, 3))]
    assert sorted(bodies(read(found, *ranges))) == sorted(wanted)


def test_each_broker_of_a_task_is_asked_at_its_own_address():
    """Brokers have queues of the same topic and number: at another one's address a task would read that one's messages twice."""

    def of(body):
        stored = store("t", body, "")
        return {Request.PULL_MESSAGE: ok(stored, nextBeginOffset=1, minOffset=0, maxOffset=1, suggestWhichBrokerId=0)}

    with MockBroker(of(b"of a")) as a, MockBroker(of(b"of b")) as b:
        a.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: a.address}, "broker-b": {0: b.address}}))
        found = options_table.parse({"nameServer": a.address, "subscribe": "t"}).for_role("batch source")
        ranges = [OffsetRange(MessageQueue("t", name, 0), 0, 1) for name in ("broker-a", "broker-b")]
        rows = read(found, *ranges, addresses=(("broker-a", a.address), ("broker-b", b.address)))
    session.close_all()
    assert [(row["brokerName"], row["body"]) for row in rows] == [("broker-a", b"of a"), ("broker-b", b"of b")]


@pytest.mark.parametrize("batched", ["t", "u"])
def test_batch_topic_is_not_filtered_by_brokers_beside_others(batched):
    """They would drop its batches, whose tags are not those of their messages; of the other topic they send what is wanted."""

    def pulled(call):
        stored = store(call.ext("topic"), b"x", "TAGS\x01a\x02")
        return ok(stored, nextBeginOffset=1, minOffset=0, maxOffset=1, suggestWhichBrokerId=0)

    def config(call):
        return topic_config(queue_type="BatchCQ") if call.ext("topic") == batched else topic_config()

    script = {Request.GET_TOPIC_CONFIG: config, Request.PULL_MESSAGE: pulled}
    with MockBroker(script) as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: broker.address}}))
        given = {"nameServer": broker.address, "subscribe": "t,u", "tags": "a"}
        ranges = [OffsetRange(MessageQueue(topic, "broker-a", 0), 0, 1) for topic in "tu"]
        found = read(options_table.parse(given).for_role("batch source"), *ranges)
        filtered = {pull.ext["topic"] for pull in broker.seen(Request.PULL_MESSAGE) if pull.ext["subscription"] == "a"}
    session.close_all()
    assert sorted(row["topic"] for row in found) == ["t", "u"]
    assert filtered == {"t", "u"} - {batched}


@pytest.mark.parametrize(("policy", "fails"), [("fail", True), ("warn", False)])
def test_what_is_not_there_is_loss(rocketmq, filled, policy, fails):
    topic, _ = filled
    found = options(rocketmq, topic, failOnDataLoss=policy, readDeadline="2s")
    wanted = OffsetRange(MessageQueue(topic, "broker-a", 0), 5, 15)
    if fails:
        with pytest.raises(
            DataLossError, match=f"5 offsets cannot be read any more: {topic}/broker-a/0 offsets 10 to 15"
        ):
            read(found, wanted)
    else:
        assert [row["queueOffset"] for row in read(found, wanted)] == list(range(5, 10))


def test_what_is_said_of_a_broker_that_did_not_come():
    batch, stream = (partition_reader.waiting_advice("broker b", streaming) for streaming in (False, True))
    assert batch.startswith("Nothing is lost: a task waits for broker b as long as option 'readDeadline' says")
    assert stream.startswith(batch)
    assert ("checkpoint rewind" in batch, "checkpoint rewind" in stream) == (False, True)


@pytest.mark.parametrize("known", ["Set option 'addressMap'", None])
def test_an_error_keeps_its_remedy_before_the_advice_to_wait(known):
    advice = partition_reader.waiting_advice("broker b", is_streaming=True)
    with pytest.raises(ConnectionLost) as task, partition_reader._with_waiting_advice("b", is_streaming=True):
        raise ConnectionLost("cannot connect", "pod:8080", remedy=known)
    assert task.value.remedy == f"{known or 'Start broker b'}. {advice}"


def test_a_plan_keeps_the_remedy_before_the_advice_to_wait(monkeypatch):
    lost = ConnectionLost("cannot connect", "pod:8080", queue="t/b/0", remedy="Set option 'addressMap'")
    monkeypatch.setattr(stream, "retry_until", raising(lost))
    begin, end = ({"topics": {"t": {"b": {"0": position}}}, "v": 1} for position in (5, 9))
    with pytest.raises(ConnectionLost) as plan:
        stream_reader("127.0.0.1:1", subscribe="t").partitions(begin, end)
    advice = partition_reader.waiting_advice("its broker", is_streaming=True)
    assert plan.value.remedy == f"Set option 'addressMap'. {advice}"


def test_no_partition_no_rows(rocketmq, filled):
    assert list(partition_reader.read_partition(options(rocketmq, filled[0]), BASIC_COLUMNS, None)) == []


def test_filtered_read_checks_that_its_first_message_exists(rocketmq, make_topic, monkeypatch):
    """A broker whose minimum lags behind jumps over what is gone as if the filter had skipped it."""
    topic = make_topic(queues=1)
    feed(rocketmq, topic, 3, tags="a")
    wanted = feed(rocketmq, topic, 3, tags="b")
    whole = OffsetRange(MessageQueue(topic, "broker-a", 0), 0, 6)
    assert sorted(bodies(read(options(rocketmq, topic, tags="b"), whole))) == sorted(wanted)
    monkeypatch.setattr(SingleMessageReader, "__call__", lambda self, places: [None] * len(places))
    with pytest.raises(DataLossError, match=f"{topic}/broker-a/0 offsets 0 to 3 \\(truncated by retention\\)"):
        read(options(rocketmq, topic, tags="b"), whole)
    assert sorted(bodies(read(options(rocketmq, topic), whole)))


def test_a_partition_travels_as_columns_and_is_the_same():
    """In any order, and with what goes with it."""
    a, b = MessageQueue("t", "broker-b", 7), MessageQueue("s", "broker-a", 0)
    whole = RangePartition((OffsetRange(a, 5, 9), OffsetRange(b, 0, 1 << 40)), (("broker-a", "h:1"),), frozenset({b}))
    for partition in (whole, RangePartition(())):
        for dumps in (pickle.dumps, cloudpickle.dumps):
            again = pickle.loads(dumps(partition))
            assert again == partition
            assert all(type(r) is OffsetRange and type(r.queue) is MessageQueue for r in again.ranges)
