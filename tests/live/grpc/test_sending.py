"""``Producer`` and sink over gRPC through a real Proxy; RocketMQ's own Java client reads what they wrote, from brokers."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from datetime import timedelta

import pyarrow as pa
import pytest

from rocketmq_spark import Message, errors
from rocketmq_spark.base.codes import RESERVED_PROPERTIES, Property
from rocketmq_spark.model import MessageQueue, SendStatus
from tests.live.grpc.proxied import forgotten, known, new_topic, producer, stored_rows, write
from tests.live.writes import frame, numbered
from tests.mockbroker import eventually
from tests.reading import read
from tests.witness import java_read

__all__ = ["forgotten"]


def test_messages_arrive_as_they_were_sent(proxied):
    topic = new_topic(proxied)
    with producer(proxied) as sends:
        one = sends.send(Message(topic, b"one", tags="a", keys=["k1", "k2"], properties={"color": "röt"}))
        later = sends.send_async(Message(topic, b"\x00\xff" * 4000)).result(60)
        batch = sends.send_batch([Message(topic, f"{n}".encode(), tags=f"t{n % 2}", keys=[f"k{n}"]) for n in range(20)])
        sends.send_oneway(Message(topic, b"oneway"))
        assert sends.queues(topic)
    found = {record.id: record for record in java_read(proxied.name_server, topic, 23, bodies=True)}
    ids = batch.msg_id.split(",")
    assert {one.msg_id, later.msg_id, *ids} < found.keys()
    assert len(found) == 23
    first = found[one.msg_id]
    own = {name: value for name, value in first.properties.items() if name not in RESERVED_PROPERTIES}
    assert (first.body, first.tags, first.keys, own) == (b"one", "a", ["k1", "k2"], {"color": "röt"})
    assert found[later.msg_id].body == b"\x00\xff" * 4000
    assert [(found[each].body, found[each].tags, found[each].keys) for each in ids] == [
        (f"{n}".encode(), f"t{n % 2}", [f"k{n}"]) for n in range(20)
    ]
    assert one.status is SendStatus.SEND_OK
    assert (one.queue_offset, one.offset_msg_id) == (first.offset, None)
    assert batch.queue_offset == found[ids[0]].offset
    assert one.queue == MessageQueue(topic, proxied.proxy_grpc, -1)


def test_automatic_batches_give_each_message_its_own_result(proxied):
    topic = new_topic(proxied)
    with producer(proxied, auto_batch=True) as sends:
        results = [
            future.result(60) for future in [sends.send_async(Message(topic, f"{n}".encode())) for n in range(200)]
        ]
    found = {row["msgId"]: row["queueOffset"] for row in stored_rows(proxied, topic, 200)}
    assert found == {result.msg_id: result.queue_offset for result in results}


def test_a_message_of_a_batch_that_the_proxy_refuses_fails_alone(proxied):
    """Its group is longer than the Proxy takes; only the Proxy knows how much that is."""
    topic = new_topic(proxied, "FIFO")
    with producer(proxied, auto_batch=True, batch_max_delay="200ms") as sends:
        keys = ["k" * 70 if n == 5 else f"customer-{n}" for n in range(16)]
        results = [sends.send_async(Message(topic, b"x"), selector="hash", arg=key) for key in keys]
        refused = [result.exception(30) for result in results]
        assert isinstance(refused[5], errors.MessageIllegal)
        assert [n for n, error in enumerate(refused) if error is not None] == [5]
        ids = {result.result().msg_id for n, result in enumerate(results) if n != 5}
    assert {row["msgId"] for row in stored_rows(proxied, topic, 15)} == ids


def test_batches_of_small_messages_fit_with_proxy_overhead(proxied):
    topic = new_topic(proxied)
    write(proxied, pa.RecordBatch.from_pydict({"body": [b"x"] * 30_000}), topic=topic, batchMaxBytes="2m")
    with producer(proxied, auto_batch=True, batch_max_bytes="2m", batch_max_delay="5s") as sends:
        for future in [sends.send_async(Message(topic, b"x")) for _ in range(35_000)]:
            future.result(60)
    assert len({row["msgId"] for row in stored_rows(proxied, topic, 65_000)}) == 65_000


def test_a_hash_key_is_a_message_group_and_keeps_its_order(proxied):
    topic = new_topic(proxied, "FIFO")
    with producer(proxied) as sends:
        sent = defaultdict(list)
        for n in range(60):
            key = f"customer-{n % 7}"
            sent[key].append(sends.send(Message(topic, f"{n}".encode()), selector="hash", arg=key).msg_id)
    found = defaultdict(list)
    for row in stored_rows(proxied, topic, 60):
        found[row["properties"][Property.SHARDING_KEY]].append((row["queueId"], row["msgId"]))
    assert {key: [each for _, each in placed] for key, placed in found.items()} == sent
    assert all(len({queue for queue, _ in placed}) == 1 for placed in found.values())


def test_delays_come_when_they_are_due_and_can_be_recalled(proxied):
    topic = new_topic(proxied, "DELAY")
    with producer(proxied) as sends:
        born = time.time() * 1000
        level = sends.send(Message(topic, b"level"), delay_level=1)
        soon = sends.send(Message(topic, b"soon"), delay=timedelta(seconds=2))
        gone = sends.send(Message(topic, b"gone"), delay=8)
        assert (soon.queue_offset, bool(gone.recall_handle)) == (None, True)
        assert sends.recall(topic, gone.recall_handle) == gone.msg_id
        with pytest.raises(errors.MessageIllegal, match=r"(?s)86400000.*maxDelayTimeMills"):
            sends.send(Message(topic, b"never"), delay=timedelta(days=2))
        last = sends.send(Message(topic, b"last"), delay=9)  # when it is there the recalled one was due before
        found = {row["msgId"]: row["storeTimestamp"].timestamp() * 1000 for row in stored_rows(proxied, topic, 3)}
    assert found.keys() == {level.msg_id, soon.msg_id, last.msg_id}
    assert found[soon.msg_id] >= born + 1900


def test_namespaced_delay_is_recalled_by_users_topic_name(proxied):
    topic = new_topic(proxied)
    proxied.create_topic(f"shop%{topic}", queues=1, attributes={"message.type": "DELAY"})
    eventually(lambda: bool(known(proxied, topic, namespace="shop")), 60)
    with producer(proxied, namespace="shop") as sends:
        gone = sends.send(Message(topic, b"gone"), delay=8)
        assert sends.recall(topic, gone.recall_handle) == gone.msg_id


def test_what_the_proxy_does_not_take_is_said(proxied):
    topic = new_topic(proxied)
    with producer(proxied) as sends:
        with pytest.raises(errors.RouteNotFound):
            sends.send(Message("no-such-topic", b"x"))
        with pytest.raises(errors.MessageIllegal, match=r"message\.type"):
            sends.send(Message(topic, b"x"), selector="hash", arg="k")
        with pytest.raises(errors.MessageIllegal, match=r"message\.type"):
            sends.send(Message(topic, b"x"), delay=1)
        with pytest.raises(errors.MessageRefused, match="chooses the queue"):
            sends.send(Message(topic, b"x"), queue=MessageQueue(topic, "broker-a", 0))
        with pytest.raises(errors.MessageRefused, match="chooses the queue"):
            sends.send(Message(topic, b"x"), selector="machineRoom", arg="room")
        with pytest.raises(errors.MessageRefused, match="flag is 3"):
            sends.send(Message(topic, b"x", flag=3))
        taken = sends.send(Message(topic, b"taken")).msg_id
    assert [row["msgId"] for row in stored_rows(proxied, topic, 1)] == [taken]


def test_rows_of_the_sink_arrive(proxied):
    topic = new_topic(proxied)
    count = 5000
    rows = [
        frame(
            body=numbered(count, first),
            tags=[f"t{n % 3}" for n in range(count)],
            keys=[[f"k{n}", "all"][: 1 if first else 2] for n in range(count)],  # those with one key go by columns
            properties=[[("n", str(n)), ("ü", "ö")] for n in range(count)],
        )
        for first in (0, count)
    ]
    written = write(proxied, *rows, topic=topic, batchMaxBytes="64k")
    assert (written.rows, list(written.brokers)) == (2 * count, [proxied.proxy_grpc])
    assert written.batches > 10
    found = stored_rows(proxied, topic, 2 * count)
    assert Counter(row["body"].decode() for row in found) == Counter(numbered(2 * count))
    assert len({row["msgId"] for row in found}) == 2 * count
    for row in found:
        which, n = divmod(int(row["body"]), count)
        own = {name: value for name, value in row["properties"].items() if name not in RESERVED_PROPERTIES}
        assert (row["tags"], row["keys"], own) == (f"t{n % 3}", [f"k{n}", "all"][: 2 - which], {"n": str(n), "ü": "ö"})


def test_rows_of_a_group_keep_their_order(proxied):
    topic = new_topic(proxied, "FIFO")
    keys = [f"customer-{n * n % 23}" for n in range(3000)]
    write(proxied, frame(body=numbered(3000), shardingKey=keys), topic=topic, batchMaxBytes="8k")
    found = defaultdict(list)
    for row in stored_rows(proxied, topic, 3000):
        found[row["properties"][Property.SHARDING_KEY]].append(row["body"].decode())
    expected = defaultdict(list)
    for body, key in zip(numbered(3000), keys, strict=True):
        expected[key].append(body)
    assert found == expected


def test_grouped_rows_go_in_batches_that_slow_proxy_can_take(proxied):
    """All of a batch must be there within one attempt, one row after the other: else all of it is sent again."""
    topic = new_topic(proxied, "FIFO")
    written = write(proxied, frame(body=numbered(600), shardingKey=["one"] * 600), topic=topic)
    assert (written.rows, written.batches) == (600, 38)
    assert len(stored_rows(proxied, topic, 600)) == 600


def test_rows_that_are_delayed_travel_alone(proxied):
    topic = new_topic(proxied, "DELAY")
    written = write(proxied, frame(body=numbered(30), delayMs=[1000] * 30), topic=topic)
    assert (written.rows, written.batches) == (30, 30)
    assert Counter(row["body"].decode() for row in stored_rows(proxied, topic, 30)) == Counter(numbered(30))


def test_a_priority_is_a_queue(proxied):
    """As the Proxy keeps it: the highest ones share the last queue. A producer's and the sink's."""
    topic = new_topic(proxied, "PRIORITY", queues=3)
    write(proxied, frame(body=numbered(40), priority=pa.array([n % 4 for n in range(40)], pa.int32())), topic=topic)
    with producer(proxied) as sends:
        for n in range(40, 44):
            sends.send(Message(topic, f"{n}".encode(), priority=n % 4))
    found = stored_rows(proxied, topic, 44)
    assert Counter((int(row["body"]), row["queueId"]) for row in found) == Counter(
        (n, min(n % 4, 2)) for n in range(44)
    )
    assert all(row["properties"][Property.PRIORITY] == str(int(row["body"]) % 4) for row in found)
    with pytest.raises(errors.OptionError, match=r"message\.type=PRIORITY"):
        write(proxied, frame(body=["x"], priority=pa.array([1], pa.int32())), topic=new_topic(proxied))


def test_the_type_of_a_topic_is_checked_before_the_first_row(proxied):
    normal, fifo = new_topic(proxied), new_topic(proxied, "FIFO")
    keyed = frame(body=["x"], shardingKey=["k"])
    with pytest.raises(errors.OptionError, match=r"NORMAL; column .shardingKey. .* makes FIFO"):
        write(proxied, keyed, topic=normal)
    with pytest.raises(errors.OptionError, match=r"FIFO; the columns .* make NORMAL"):
        write(proxied, frame(body=["x"]), topic=fifo)
    with pytest.raises(errors.OptionError, match=r"message\.type=DELAY"):
        write(proxied, frame(body=["x"], delayMs=[5]), topic=normal)
    with pytest.raises(errors.RouteNotFound):
        write(proxied, frame(body=["x"]), topic="no-such-topic", numRetries=1, retryInterval="100ms")
    for topic, taken in ((normal, frame(body=["taken"])), (fifo, frame(body=["taken"], shardingKey=["k"]))):
        write(proxied, taken, topic=topic)
        assert [row["body"] for row in stored_rows(proxied, topic, 1)] == [b"taken"]


def test_an_endpoint_that_is_away_costs_nothing(proxied, nobody):
    topic = new_topic(proxied)
    ends = f"{nobody};{proxied.proxy_grpc}"
    write(proxied, frame(body=numbered(500)), topic=topic, proxyEndpoint=ends, batchMaxBytes="1k", connectTimeout="1s")
    assert {row["body"].decode() for row in stored_rows(proxied, topic, 500)} == set(numbered(500))


def test_tls_with_a_proxy_of_plain_text_is_an_error(proxied, certs):
    with pytest.raises(errors.ConnectionLost, match=r"does not support TLS.*option 'tls'") as said:
        write(proxied, frame(body=["x"]), topic="t", sendTimeout="1s", numRetries=0, tls=True, tlsCaFile=certs.ca)
    assert proxied.proxy_grpc in str(said.value)


def test_an_endpoint_that_is_away_for_good_is_an_error(nobody):
    with pytest.raises(errors.ConnectionLost, match="gRPC port is reachable"):
        write(nobody, frame(body=["x"]), topic="t", sendTimeout="2s", connectTimeout="1s")


def test_kafka_keys_and_headers_refused_as_text_still_round_trip(proxied):
    odd = [b"two\nlines", b"\t", b" ", b"", b"\xff", "\x85".encode(), b"plain"]
    topic = new_topic(proxied, "FIFO")
    headers = [[{"key": "h", "value": each}] for each in odd]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = frame(value=numbered(len(odd)), key=pa.array(odd, pa.binary()), headers=pa.array(headers, kind))
    assert write(proxied, rows, topic=topic, kafkaColumns=True).rows == len(odd)
    stored_rows(proxied, topic, len(odd))
    found = read(proxied, subscribe=topic, kafkaColumns=True, includeHeaders=True)
    by_value = {row["value"].decode(): (row["key"], row["headers"]) for row in found}
    assert by_value == {value: (odd[n], headers[n]) for n, value in enumerate(numbered(len(odd)))}
