"""Which columns a source has, and what is in them."""

from __future__ import annotations

import socket
from datetime import UTC, date, datetime

import pytest
from pyspark.sql.types import LongType, StringType, StructField

from rocketmq_spark import Producer, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, FULL_COLUMNS
from rocketmq_spark.errors import DecodeError, OptionError
from rocketmq_spark.model import Message, SendRequest
from rocketmq_spark.options import parse
from tests.mockbroker import eventually
from tests.reading import data_source, names, post, read

BASIC_NAMES = [column.name for column in BASIC_COLUMNS]


@pytest.fixture
def rich(rocketmq, make_topic):
    """A topic with one message that has everything."""
    topic = make_topic(queues=1)
    properties = {"amount": "17", "region": "eu"}
    post(rocketmq, [Message(topic, b"body", tags="t", keys=["k1", "k2"], properties=properties, flag=7)])
    return topic


def test_columns__are_built_in_schema_order_and_no_others(rocketmq, rich):
    (row,) = read(rocketmq, subscribe=rich, columns="body,queueId,TAGS")
    assert list(row) == ["queueId", "body", "tags"]
    assert row == {"queueId": 0, "body": b"body", "tags": "t"}
    (row,) = read(rocketmq, subscribe=rich, columns=["storeSize", "amount"], propertyColumns="amount:int")
    assert list(row) == ["storeSize", "amount"]
    assert list(read(rocketmq, subscribe=rich)[0]) == BASIC_NAMES
    with pytest.raises(OptionError, match="'bdy'"):
        read(rocketmq, subscribe=rich, columns="bdy")


def test_columns__may_also_be_chosen_by_a_schema(rocketmq, rich):
    source, schema = data_source({"nameServer": rocketmq.name_server, "subscribe": rich})
    wanted = type(schema)([schema["tags"], schema["queueOffset"]])
    reader = source.reader(wanted)
    (batch,) = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert batch.to_pylist() == [{"tags": "t", "queueOffset": 0}]
    wrong = type(schema)([StructField("tags", LongType()), StructField("nothing", StringType())])
    with pytest.raises(OptionError, match="'nothing'") as e:
        source.reader(wrong)
    assert "tags" in str(e.value)


def test_include_properties__none_the_user_s_or_all(rocketmq, rich):
    users = {"amount": "17", "region": "eu"}

    def properties(**options):
        (row,) = read(rocketmq, subscribe=rich, **options)
        return None if row["properties"] is None else dict(row["properties"])

    assert properties() == properties(includeProperties="user") == users
    assert properties(includeProperties="none") is None
    everything = properties(includeProperties="all")
    assert everything.items() > users.items()
    assert everything["TAGS"] == "t"
    assert {"KEYS", "UNIQ_KEY"} <= everything.keys()


def test_property_columns__have_types_and_a_bad_value_is_null(rocketmq, make_topic):
    topic = make_topic(queues=1)
    kinds = "s:string, b:boolean, i:int, l:bigint, f:float, d:double, day:date, at:timestamp, raw:binary"
    good = {
        "s": "x", "b": "true", "i": "-5", "l": str(2**40), "f": "0.5", "d": "1e300", "day": "2026-02-03",
        "at": "2026-02-03T04:05:06Z", "raw": "é",
    }  # fmt: skip
    bad = {name: "no such value" for name in good if name not in ("s", "raw")}
    overflow = {"i": str(2**31), "l": str(2**63), "day": "2026-02-30", "at": "yesterday", "f": "0x1p3", "b": "2"}
    post(rocketmq, [Message(topic, b"x", properties=p) for p in (good, bad, overflow)])
    empty = dict.fromkeys(good)
    found = read(rocketmq, subscribe=topic, propertyColumns=kinds, columns=list(good))
    assert found[0] == {
        "s": "x", "b": True, "i": -5, "l": 2**40, "f": 0.5, "d": 1e300, "day": date(2026, 2, 3),
        "at": datetime(2026, 2, 3, 4, 5, 6, tzinfo=UTC), "raw": "é".encode(),
    }  # fmt: skip
    assert found[1:] == [empty, empty]


def test_property_columns__come_last_with_case_sensitive_names(rocketmq, rich):
    (row,) = read(rocketmq, subscribe=rich, propertyColumns={"amount": "bigint", "Region": "string"})
    assert list(row) == [*BASIC_NAMES, "amount", "Region"]
    assert (row["amount"], row["Region"]) == (17, None)
    with pytest.raises(OptionError, match="'tags'"):
        read(rocketmq, subscribe=rich, propertyColumns="tags:string")


def test_metadata__full_adds_what_the_broker_and_the_network_say(rocketmq, rich):
    assert list(read(rocketmq, subscribe=rich)[0]) == BASIC_NAMES
    (row,) = read(rocketmq, subscribe=rich, metadata="full")
    assert list(row) == [*BASIC_NAMES, *(column.name for column in FULL_COLUMNS)]
    assert (row["flag"], row["reconsumeTimes"]) == (7, 0)
    assert row["storeHost"] == rocketmq.address("broker-a")
    assert row["bornHost"].startswith("127.0.0.1:")
    assert row["storeSize"] > len(b"body")
    assert row["offsetMsgId"] == _offset_id(row["storeHost"], row["commitLogOffset"])


def _offset_id(host: str, offset: int) -> str:
    name, port = host.rsplit(":", 1)
    return (socket.inet_aton(name) + int(port).to_bytes(4, "big") + offset.to_bytes(8, "big")).hex().upper()


def test_metadata__columns_hold_what_was_sent(rocketmq, make_topic):
    """The basic ones, beside what the broker acknowledged."""
    topic = make_topic(queues=2)
    (body,) = names(1)
    with Producer(name_server=rocketmq.name_server, group="g") as producer:
        sent = producer.send(Message(topic, body.encode(), keys=["a"]))
    (row,) = read(rocketmq, subscribe=topic)
    assert (row["topic"], row["brokerName"], row["queueId"]) == (topic, "broker-a", sent.queue.queue_id)
    assert (row["queueOffset"], row["msgId"], row["keys"], row["tags"]) == (0, sent.msg_id, ["a"], None)
    assert abs((row["storeTimestamp"] - row["bornTimestamp"]).total_seconds()) < 30


def poisoned(mq, topic: str) -> None:
    """One message, one whose flag says that its body is compressed, which it is not, and one more."""
    with Producer(name_server=mq.name_server, group="g") as producer:
        queue = producer.queues(topic)[0]
        for body, flag in ((b"before", 0), (b"no zlib", 1), (b"behind", 0)):
            request = SendRequest("g", body, "TAGS\x01t\x02", sys_flag=flag)
            session.client(parse({"nameServer": mq.name_server})).sender.send(queue, request, Deadline.after(10))
    eventually(lambda: len(read(mq, subscribe=topic, columns="queueOffset")) == 3)


def test_bad_message__fails_makes_a_row_or_is_skipped(rocketmq, make_topic, caplog):
    topic = make_topic(queues=1)
    poisoned(rocketmq, topic)
    with pytest.raises(DecodeError, match=f"the message at offset 1 .*{topic}/broker-a/0.*'badMessage' to 'null'"):
        read(rocketmq, subscribe=topic)
    found = read(rocketmq, subscribe=topic, badMessage="null", metadata="full")
    assert list(found[0])[-1] == "decodeError"
    assert [(row["body"], row["tags"], row["sysFlag"]) for row in found] == [
        (b"before", "t", 0), (None, "t", 1), (b"behind", "t", 0)
    ]  # fmt: skip
    assert [bool(row["decodeError"]) for row in found] == [False, True, False]
    assert "decodeError" not in read(rocketmq, subscribe=topic, badMessage="null")[1]
    caplog.clear()
    assert [row["body"] for row in read(rocketmq, subscribe=topic, badMessage="skip")] == [b"before", b"behind"]
    assert f"{topic}/broker-a/0: the message at offset 1 cannot be decoded, and is left out" in caplog.text


def test_kafka_columns__and_include_headers(rocketmq, rich):
    (row,) = read(rocketmq, subscribe=rich, kafkaColumns=True)
    assert list(row) == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    assert (row["key"], row["value"], row["partition"], row["offset"]) == (b"k1 k2", b"body", 0, 0)
    assert row["timestamp"] == read(rocketmq, subscribe=rich)[0]["bornTimestamp"]


def test_include_headers__are_the_properties_of_the_user(rocketmq, rich):
    headers = [{"key": "amount", "value": b"17"}, {"key": "region", "value": b"eu"}]
    (row,) = read(rocketmq, subscribe=rich, kafkaColumns=True, includeHeaders=True, columns="headers")
    assert row == {"headers": headers}
    with pytest.raises(OptionError, match="'includeProperties' is 'none', and 'includeHeaders' needs the properties"):
        read(rocketmq, subscribe=rich, kafkaColumns=True, includeHeaders=True, includeProperties="none")
    with pytest.raises(OptionError, match="'includeHeaders' needs 'kafkaColumns'"):
        read(rocketmq, subscribe=rich, includeHeaders=True)
