"""Messages that are sent to older brokers and read back, each once, and found by their names, tags, properties and times."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Admin, Message, Producer, PullConsumer
from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import GroupNotFound, NotFound, NotSupported, OffsetError, RouteNotFound
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import SendRequest, SpooledSend
from rocketmq_spark.wire.properties import encode_properties
from tests.compat.features import runs
from tests.helpers import awaited, stored, total
from tests.live.writes import Writes, frame, numbered
from tests.reading import Run, bodies, feed, read
from tests.witness import java_read, java_send, mqadmin

Make = Callable[..., str]


def ids(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row["msgId"] for row in rows)


def polled(consumer: PullConsumer, count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        found += [message.body.decode() for message in consumer.poll(20.0)]
    return found


@runs('send, and read with `format("rocketmq")`, Java\'s client on the other side')
def test_what_was_sent_is_read_by_us_and_by_java(older: LocalBroker, make: Make) -> None:
    topic = make(4)
    with Producer(older.name_server, "p") as producer:
        sent = [
            producer.send(Message(topic, body, tags="a", keys=["k", f"k{n}"], properties={"ü": "ß"}))
            for n, body in enumerate((b"plain", "ü€😀".encode(), b"0123456789" * 2000, b"\0"))
        ]
        producer.send_oneway(Message(topic, b"oneway"))
    total(older, topic, 5)
    rows = [row for row in read(older, subscribe=topic) if row["body"] != b"oneway"]
    assert ids(rows) == Counter(result.msg_id for result in sent)
    of_java = {record.id: record for record in java_read(older.name_server, topic, 5, bodies=True)}
    for row in rows:
        record = of_java[row["msgId"]]
        assert (record.body, record.tags, record.keys) == (row["body"], row["tags"], row["keys"])
        assert record.user_properties["ü"] == "ß" == dict(row["properties"])["ü"]
        assert record.place == (row["brokerName"], row["queueId"], row["queueOffset"])
    theirs = make(2)
    written = java_send(older.name_server, theirs, 40, kinds=("plain", "unicode", "big", "zlib"))
    assert ids(read(older, subscribe=theirs)) == Counter(record.id for record in written)


@runs("a stream, and its restart from the checkpoint")
def test_a_stream_goes_on_where_it_stopped(older: LocalBroker, make: Make) -> None:
    topic, group = make(4), f"g-{time.time_ns()}"
    options = {"subscribe": topic, "startingOffsets": "earliest", "group": group, "maxOffsetsPerTrigger": 30}
    first = Run(older, **options)
    first.drain(feed(older, topic, 100))
    first.reader.commit(json.loads(first.offset))
    more = feed(older, topic, 50)
    second = Run(older, first.offset, **options)
    second.drain(more)
    assert sorted(second.read) == sorted(more)


@runs("batches: `send_batch`, `autoBatch`, rows of the sink")
def test_batches_are_stored_message_by_message(older: LocalBroker, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = make(4)
    with Producer(older.name_server, "p", auto_batch=True) as producer:
        producer.send_batch([Message(topic, f"b{n}".encode(), tags="b") for n in range(200)])
        futures = [producer.send_async(Message(topic, f"a{n}".encode(), keys=[f"k{n}"])) for n in range(500)]
        answers = {future.result(60).msg_id for future in futures}
    assert len(answers) == 500
    writes = Writes(older.name_server, monkeypatch)
    rows = frame(body=numbered(1000), tags=["s"] * 1000, properties=[[("n", f"{n}")] for n in range(1000)])
    assert writes(rows, topic=topic).rows == 1000
    assert len(writes.requests) < 100
    expected = Counter([*(f"b{n}" for n in range(200)), *(f"a{n}" for n in range(500)), *numbered(1000)])
    total(older, topic, 1700)
    found = read(older, subscribe=topic)
    assert Counter(bodies(found)) == expected
    of_java = java_read(older.name_server, topic, 1700)
    assert Counter((r.id, r.queue, r.offset) for r in of_java) == Counter(
        (row["msgId"], row["queueId"], row["queueOffset"]) for row in found
    )
    assert answers <= set(ids(found))


@runs("batches: `send_batch`, `autoBatch`, rows of the sink")
def test_what_a_spool_sends_in_a_batch_has_its_own_ids_and_keys(older: LocalBroker, make: Make, tmp_path: Path) -> None:
    topic, ids = make(1), [f"{n:032d}" for n in range(20)]
    with Producer(older.name_server, "p", on_send_failure="spool", spool_dir=str(tmp_path)) as producer:
        queue = producer.send(Message(topic, b"first")).queue
        requests = [
            SendRequest("p", b"x", encode_properties({Property.UNIQ_KEY: msg_id, Property.KEYS: f"k{msg_id}"}))
            for msg_id in ids
        ]
        sends = [SpooledSend(topic, each, queue, (i,)) for each, i in zip(requests, ids, strict=True)]
        producer._spool.keep(sends)
        assert producer._spool.send_all(30.0) == 0
    rows = [row for row in read(older, subscribe=topic) if row["body"] == b"x"]
    assert [(row["msgId"], row["keys"]) for row in sorted(rows, key=itemgetter("queueOffset"))] == [
        (msg_id, [f"k{msg_id}"]) for msg_id in ids
    ]


@runs("tags and SQL filters")
def test_tags_and_sql_choose_messages(older: LocalBroker, make: Make) -> None:
    topic = make(2)
    with Producer(older.name_server, "p") as producer:
        for n in range(30):
            producer.send(Message(topic, b"%d" % n, tags="abc"[n % 3], properties={"n": str(n)}))
    total(older, topic, 30)
    of_tags = {str(n) for n in range(30) if n % 3 != 1}
    of_sql = {str(n) for n in range(21, 30) if n % 3 == 1}
    sql = "n > 20 AND TAGS = 'b'"
    assert Counter(bodies(read(older, subscribe=topic, tags="a || c"))) == Counter(of_tags)
    assert Counter(bodies(read(older, subscribe=topic, sql=sql))) == Counter(of_sql)
    for given, expected in (({"tags": "a || c"}, of_tags), ({"sql": sql}, of_sql)):
        group = f"g-{time.time_ns()}"
        with PullConsumer(older.name_server, group, consume_from_where="earliest") as consumer:
            consumer.subscribe(topic, **given)
            assert sorted(polled(consumer, len(expected))) == sorted(expected)


@runs("read from a start time, and up to an end time")
def test_times_are_exact_where_several_messages_have_one(older: LocalBroker, make: Make) -> None:
    topic = make(1)
    with Producer(older.name_server, "p") as producer:
        for _ in range(6):
            producer.send_batch([Message(topic, b"x") for _ in range(40)])
    sent = stored(older, topic, 240)
    times = sorted({message.store_timestamp for message in sent})
    with PullConsumer(older.name_server, f"g-{topic}", auto_commit=False) as consumer:
        (queue,) = consumer.queues(topic)
        consumer.assign([queue])
        for moment in (times[0] - 1, *times, times[-1] - 1):
            first = next(m.queue_offset for m in sent if m.store_timestamp >= moment)
            later = [row["queueOffset"] for row in read(older, subscribe=topic, startingTimestamp=moment)]
            earlier = [row["queueOffset"] for row in read(older, subscribe=topic, endingTimestamp=moment)]
            assert (later, earlier) == (list(range(first, 240)), list(range(first)))
            consumer.seek_to_timestamp(moment)
            assert consumer.poll(20.0)[0].queue_offset == first
    assert (
        read(older, subscribe=topic, startingTimestamp=times[-1] + 1, startingOffsetsByTimestampStrategy="latest") == []
    )


@runs("`PullConsumer`: seek, commit, pause")
def test_a_pull_consumer_seeks_and_commits(older: LocalBroker, make: Make) -> None:
    topic = make(1)
    sent = feed(older, topic, 20)
    with PullConsumer(older.name_server, f"g-{topic}", consume_from_where="earliest", auto_commit=False) as consumer:
        consumer.subscribe(topic)
        assert polled(consumer, 20) == sent
        (queue,) = consumer.assignment()
        consumer.seek(queue, 15)
        assert polled(consumer, 5) == sent[15:]
        consumer.seek_to_beginning()
        assert polled(consumer, 20) == sent
        consumer.commit({queue: 12})
        assert consumer.committed(queue) == 12
        consumer.seek_to_end()
        consumer.pause(queue)
        more = feed(older, topic, 3)
        consumer.resume(queue)
        assert polled(consumer, 3) == more
    with PullConsumer(older.name_server, f"g-{topic}", consume_from_where="earliest") as consumer:
        consumer.subscribe(topic)
        assert polled(consumer, 11) == [*sent[12:], *more]


ADMIN = "`Admin`: topics, groups, offsets, `message get` and `find`"


@runs(ADMIN)
def test_a_topic_is_changed_and_its_messages_found_by_time(older: LocalBroker, make: Callable[..., str]) -> None:
    name = make(3)
    with Admin(older.name_server) as admin, Producer(older.name_server, "p") as producer:
        for n in range(10):
            producer.send(Message(name, b"body %d" % n, keys=["same"]))
        found = awaited(lambda: admin.find_messages(name, "same"), lambda messages: len(messages) == 10)
        in_order = sorted(found, key=lambda message: (message.store_timestamp, message.commit_log_offset))
        assert admin.find_messages(name) == in_order
        begin_ms, end_ms = in_order[3].store_timestamp, in_order[6].store_timestamp
        of_time = [message for message in in_order if begin_ms <= message.store_timestamp <= end_ms]
        assert admin.find_messages(name, begin_ms=begin_ms, end_ms=end_ms) == of_time
        there = admin.update_topic(name, 4, permission="R").brokers["broker-a"]
        assert (there.read_queues, there.write_queues, there.permission) == (4, 4, "R")
        if older.version >= "5":
            changed = admin.update_topic(name, order=True, attributes={"message.type": "FIFO"})
            assert (changed.message_type, changed.brokers["broker-a"].order) == ("FIFO", True)
        else:
            with pytest.raises(NotSupported, match="has no attributes; nothing was changed"):
                admin.update_topic(name, attributes={"message.type": "FIFO"})
            with pytest.raises(NotSupported, match="reads the order from name servers; nothing was changed"):
                admin.update_topic(name, order=True)
        assert admin.update_topic(name, permission="RW").permission == "RW"


@runs(ADMIN)
def test_admin(older: LocalBroker) -> None:
    name = f"adm-{time.time_ns()}"
    with Admin(older.name_server) as admin, Producer(older.name_server, "p") as producer:
        (state,) = admin.brokers()
        assert (state.version, state.error) == (f"V{older.version.replace('.', '_')}", None)
        assert admin.create_topic(name, 2).write_queues == 2
        sent = [producer.send(Message(name, b"body %d" % n, keys=["same", f"k{n}"])) for n in range(10)]
        total(older, name, 10)
        assert (admin.describe_topic(name).messages, name in admin.topics()) == (10, True)
        found = awaited(lambda: admin.find_messages(name, "same"), lambda messages: len(messages) == 10)
        assert Counter(message.msg_id for message in found) == Counter(result.msg_id for result in sent)
        assert [message.body for message in admin.find_messages(name, "k1")] == [b"body 1"]
        by_place = admin.message(found[2].offset_msg_id)
        assert admin.message(found[2].msg_id, name) == by_place == found[2]
        with pytest.raises(NotFound):
            admin.message(sent[2].msg_id[:-4] + "0000", name)
        with PullConsumer(older.name_server, name, consume_from_where="earliest", auto_commit=False) as consumer:
            consumer.subscribe(name, "a || b")
            consumer.poll(0.1)
            awaited(lambda: name in admin.groups())
            there = awaited(lambda: admin.describe_group(name), lambda group: len(group.members) == 1)
            assert (there.members[0].client_id, there.filters[name].expression) == (consumer.client_id, "a || b")
            with pytest.raises(OffsetError, match="has 1 members"):
                admin.reset_offsets(name, "latest", [name])
        changed = admin.reset_offsets(name, "earliest", [name])
        assert [change.after for change in changed] == [0, 0]
        admin.set_offsets(name, {changed[0].queue: 3})
        assert list(admin.offsets(name).values()) == [3, 0]
        assert awaited(lambda: admin.describe_group(name).lag) == 7
        assert admin.shrink_topic(name, 1).write_queues == 1
        assert admin.widen_topic(name, 3).write_queues == 3
        assert admin.update_broker_config("broker-a", {"traceTopicEnable": "true"})["traceTopicEnable"] == "true"
        admin.delete_group(name)
        assert name not in admin.groups()
        with pytest.raises(GroupNotFound):  # its offsets are gone, too
            admin.delete_group(name)
        admin.delete_topic(name)
        with pytest.raises(RouteNotFound):
            admin.describe_topic(name)
    assert f"\n{name}" not in mqadmin("topicList", "-n", older.name_server)
