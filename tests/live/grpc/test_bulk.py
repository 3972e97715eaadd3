"""``send_arrow`` and ``send_many`` over gRPC through a real Proxy; brokers are read directly."""

from __future__ import annotations

from collections import defaultdict

import pyarrow as pa
import pytest

from rocketmq_spark import Message, SendResult
from rocketmq_spark.errors import MessageIllegal, MessageRefused, OptionError, SendFailed
from tests.helpers import stored
from tests.live.grpc.proxied import forgotten, new_topic, producer, stored_rows

__all__ = ["forgotten"]


def test_rows_and_messages_are_where_the_results_say_they_are(proxied):
    topic = new_topic(proxied)
    rows = pa.table(
        {"body": [f"{i}" for i in range(500)], "tags": ["t"] * 500, "keys": [[f"k{i}"] for i in range(500)]}
    )
    with producer(proxied, batch_max_bytes="8k") as sends:
        sent = [*sends.send_arrow(rows, topic), *sends.send_many([Message(topic, b"x", keys=["k"])] * 50)]
        with pytest.raises(
            OptionError, match="column 'queueId' names a queue, but over gRPC the Proxy chooses the queue"
        ):
            sends.send_arrow(pa.table({"body": ["x"], "queueId": [1]}), topic)
        with pytest.raises(MessageRefused, match="row 1: body is empty"):
            sends.send_arrow(pa.table({"body": ["x", ""], "tags": ["a", "b"]}), topic)
    found = {row["msgId"]: row for row in stored_rows(proxied, topic, 550)}
    assert {msg_id: row["queueOffset"] for msg_id, row in found.items()} == {
        each.msg_id: each.queue_offset for each in sent if isinstance(each, SendResult)
    }
    assert [found[each.msg_id]["body"] for each in sent[:500]] == [f"{i}".encode() for i in range(500)]


def test_fifo_topic_error_names_rows_without_key(proxied):
    topic, keys = new_topic(proxied, "FIFO"), ["a", None, "", "b"]
    rows = pa.table({"body": list("wxyz"), "shardingKey": keys})
    with producer(proxied) as sends:
        with pytest.raises(
            MessageRefused, match=r"row 1: there is no shardingKey, and topic .* \(message.type=FIFO\)"
        ) as e:
            sends.send_arrow(rows, topic)
        assert "2 rows" in str(e.value)
        with pytest.raises(MessageRefused, match="message 1: there is no shardingKey"):
            sends.send_many([Message(topic, b"k"), Message(topic, b"n")], key=lambda each: {b"k": "k"}.get(each.body))
        sends.send_arrow(rows.take([0, 3]), topic).raise_for_failed()
    assert {row["body"] for row in stored_rows(proxied, topic, 2)} == {b"w", b"z"}


def test_rows_without_a_key_are_sent_where_the_topic_takes_them(make_cluster):
    """A Proxy that does not compare types takes rows with a group and rows without one."""
    mq = make_cluster(proxy={"enableTopicMessageTypeCheck": False})
    topic = new_topic(mq)
    with producer(mq) as sends:
        sends.send_arrow(pa.table({"body": ["x", "y"], "shardingKey": ["a", None]}), topic).raise_for_failed()
    found = {each.body: each.properties.get("__SHARDINGKEY") for each in stored(mq, topic, 2)}
    assert found == {b"x": "a", b"y": None}


def test_groups_keep_order_and_refusal_fails_only_later_ones(proxied):
    topic = new_topic(proxied, "FIFO")
    keys = [f"k{i % 5}" for i in range(100)]
    keys[7] = "k" * 70  # the Proxy takes none of that length
    messages = [Message(topic, f"{i:03}".encode(), properties={"key": key}) for i, key in enumerate(keys)]
    with producer(proxied) as sends:
        sent = sends.send_many(messages, key=lambda each: each.properties["key"])
    assert 7 in sent.failed
    assert isinstance(sent[7], MessageIllegal)
    assert all(isinstance(sent[i], SendFailed | MessageIllegal) for i in sent.failed)
    assert len(sent.failed) < 20, "of its own request and chain"
    of_key = defaultdict(list)
    stored = stored_rows(proxied, topic, 100 - len(sent.failed))
    for row in stored:
        of_key[row["properties"]["key"]].append(row["body"])
    assert all(bodies == sorted(bodies) for bodies in of_key.values())
    assert {row["msgId"] for row in stored} == {each.msg_id for each in sent if isinstance(each, SendResult)}
