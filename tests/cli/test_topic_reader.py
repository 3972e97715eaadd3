import json
import time
import zlib
from itertools import islice

import numpy as np
import pytest

from rocketmq_spark import Message, Producer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, SysFlag
from rocketmq_spark.cli import topic_reader
from rocketmq_spark.cli.topic_reader import TopicReader, at_offset, earliest, latest
from rocketmq_spark.errors import NotReadable, RouteNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.messages import decode_leniently
from tests.admin.test_times import FIRST, SEARCH, Queues
from tests.harness import peak_bytes
from tests.helpers import total
from tests.mockbroker import MockBroker, ok, route


@pytest.fixture
def producer(rocketmq):
    with Producer(name_server=rocketmq.name_server, group="cli-reading") as made:
        yield made


@pytest.fixture
def reader(rocketmq, topic):
    def make(tags=None, start=earliest):
        parsed = options.parse({"name_server": rocketmq.name_server}).for_role("batch source")
        made = TopicReader(parsed, topic, lambda part, cause: pytest.fail(f"lost {part}: {cause}"), tags)
        made.seek(start)
        return made

    return make


@pytest.fixture
def stored(rocketmq, topic):
    """Waits until the broker shows so many messages."""

    def wait(count):
        assert total(rocketmq, topic, count) == count

    return wait


def test_messages_of_all_queues_in_the_order_of_storing(producer, reader, topic, stored, monkeypatch):
    monkeypatch.setattr(topic_reader, "_READ_AHEAD", 3)
    for i in range(60):
        producer.send(Message(topic, str(i).encode()))
    stored(60)
    found = list(reader().messages())
    times = [message.store_timestamp for message in found]
    assert times == sorted(times)
    assert sorted(int(message.body) for message in found) == list(range(60))


def test_buffers_are_limited_and_decompression_is_one_by_one(producer, reader, topic, stored, monkeypatch):
    """A few kilobytes may become megabytes: of each queue only the next message is."""
    monkeypatch.setattr(topic_reader, "_MAX_BUFFERED_BYTES", 8 * 2000)
    for i in range(120):
        producer.send(Message(topic, b"%03d" % i + bytes(100_000)))
    stored(120)
    decoded, held = [], []

    def counted(data, broker_name, **how):
        for message in decode_leniently(data, broker_name, **how):
            decoded.append(message.queue_offset)
            yield message

    class Watched(topic_reader.BufferedAnswers):
        def add(self, fetched, answer):
            super().add(fetched, answer)
            held.append((self._buffered_bytes, len(self._answers)))

    monkeypatch.setattr(topic_reader, "decode_leniently", counted)
    monkeypatch.setattr(topic_reader, "BufferedAnswers", Watched)
    shown, queues = [], 8
    for message in reader().messages():
        shown.append(int(message.body[:3]))
        assert len(decoded) - len(shown) <= queues
    assert sorted(shown) == list(range(120))
    assert all(size <= 2000 for size, answers in held if answers > 1)


def test_a_look_that_was_broken_off_goes_on_with_what_was_held(producer, reader, topic, stored, monkeypatch):
    monkeypatch.setattr(topic_reader, "_READ_AHEAD", 3)
    for i in range(40):
        producer.send(Message(topic, str(i).encode()))
    stored(40)
    one = reader()
    found = [*islice(one.messages(), 7), *islice(one.messages(), 7), *one.messages()]
    assert sorted(int(message.body) for message in found) == list(range(40))


@pytest.mark.parametrize(
    ("answers", "went"),
    [
        ([], (100, 256)),
        ([(0, 50, 600), (50, 100, 400)], (100, 100)),
        ([(0, 50, 600), (50, 100, 401)], (50, 83)),
        ([(0, 1, 5000), (1, 2, 1)], (1, 1)),
        ([(0, 50, 600), (50, 60, 500), (60, 100, 1)], (50, 83)),
    ],
)
def test_how_far_the_next_look_goes(answers, went):
    held = topic_reader.BufferedAnswers(1000)
    for start, end, size in answers:
        held.add(FetchedAnswers(np.zeros(size, np.uint8), []), FetchedAnswer(0, start, end, end, 0, size))
    assert held.next_read(OffsetRange(MessageQueue("t", "b", 0), 0, 100), 256) == went
    assert [answer.start for answer, _ in held.answers()] == [start for start, *_ in answers if start < went[0]]


def test_it_goes_on_where_it_was_left(producer, reader, topic, stored):
    one = reader()
    assert list(one.messages()) == []
    for i in range(3):
        producer.send(Message(topic, str(i).encode()))
    stored(3)
    assert len(list(one.messages())) == 3
    assert list(one.messages()) == []


def test_following_waits_for_what_comes(producer, reader, topic):
    messages = reader(start=latest).messages(follow=True)
    producer.send(Message(topic, b"new"))
    assert next(messages).body == b"new"
    producer.send(Message(topic, b"newer"))
    assert next(messages).body == b"newer"


def test_tags_are_compared_as_texts(producer, reader, topic, stored):
    # "Aa" and "BB" have the same Java hash, so the broker's filter passes both.
    for tags in ("Aa", "BB", "c", None):
        producer.send(Message(topic, str(tags).encode(), tags=tags))
    stored(4)
    assert [message.body for message in reader("Aa").messages()] == [b"Aa"]
    assert sorted(message.body for message in reader("c || BB").messages()) == [b"BB", b"c"]


def test_a_moment(producer, reader, topic, stored):
    producer.send(Message(topic, b"old"))
    stored(1)
    (old,) = reader().messages()
    moment = old.store_timestamp + 1
    while time.time_ns() // 1_000_000 <= moment:
        time.sleep(0.001)
    producer.send(Message(topic, b"new"))
    stored(2)
    one = reader()
    one.seek_time(moment)
    assert [message.body for message in one.messages()] == [b"new"]
    one.seek_time(0)
    assert len(list(one.messages())) == 2


def test_positions():
    queue = MessageQueue("t", "b", 0)
    bounds = {queue: QueueBounds(5, 9, 0)}
    assert (earliest(bounds), latest(bounds)) == ({queue: 5}, {queue: 9})
    assert [at_offset(at)(bounds)[queue] for at in (0, 7, 100)] == [5, 7, 9]


def test_a_topic_that_does_not_exist_is_told_at_once(rocketmq, topic):
    parsed = options.parse({"name_server": rocketmq.name_server, "retry_interval": "2m"}).for_role("batch source")
    deadline = Deadline.after(60.0)  # the first pause takes longer
    with pytest.raises(RouteNotFound, match=f"Did you mean {topic}"):
        TopicReader(parsed, topic + "x", print).seek(earliest)
    assert not deadline.expired


def test_messages_of_one_millisecond_are_in_commit_log_order():
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
        queues = Queues(broker, {0: [7, 7, 9], 1: [7, 9]}, most=32)
        queues.odd = {
            (n, at): {"log_offset": log} for n, at, log in [(0, 5, 20), (0, 6, 40), (1, 5, 30), (1, 6, 50), (0, 7, 60)]
        }
        reader = TopicReader(options.parse({"name_server": broker.address}).for_role("batch source"), "t", print)
        reader.seek(earliest)
        assert [message.commit_log_offset for message in reader.messages()] == [20, 30, 40, 50, 60]
    session.close_all()


def test_what_a_closed_broker_has_is_said_to_be_left_out(caplog):
    """And where all are closed, it is no topic without messages."""
    with MockBroker() as first, MockBroker() as second:
        first.on(Request.GET_ROUTEINFO_BY_TOPIC, half_closed(first, second))
        first.on(Request.GET_TOPIC_STATS_INFO, ok(b'{"offsetTable":{}}'))
        reader = TopicReader(options.parse({"name_server": first.address}).for_role("batch source"), "t", print)
        reader.seek(earliest)
        assert [record.getMessage() for record in caplog.records if record.name == topic_reader.__name__] == [
            "topic t has no read permission on broker-b: the messages on these brokers are omitted"
        ]
        first.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": first.address}, perm=2))
        with pytest.raises(NotReadable, match=r"t has no read permission on broker-a.*topic update t --permission RW"):
            reader.seek(earliest)
    session.close_all()


def test_offsets_that_are_no_longer_kept_are_reported():
    lost = []
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
        broker.on(Request.GET_MIN_OFFSET, ok(offset=5))
        broker.on(Request.GET_MAX_OFFSET, ok(offset=9))
        parsed = options.parse({"name_server": broker.address, "num_retries": "0", "request_timeout": "5s"}).for_role(
            "batch source"
        )
        reader = TopicReader(parsed, "t", lambda part, cause: lost.append((part, cause)))
        first, second = (MessageQueue("t", "broker-a", number) for number in (0, 1))
        reader.seek_offsets({first: 2, second: 9}, {first: 4})
        assert lost == [(OffsetRange(first, 2, 4), Cause.TRUNCATED)]
        assert list(reader.messages()) == []
    session.close_all()


def test_a_topic_that_is_made_again_is_followed_from_its_begin():
    """Not only from where the old one ended."""
    lost = []
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        Queues(broker, {0: [1, 2, 3]})
        parsed = options.parse({"name_server": broker.address}).for_role("batch source")
        reader = TopicReader(parsed, "t", lambda part, cause: lost.append((part, cause)))
        reader.seek(earliest)
        assert [message.store_timestamp for message in reader.messages()] == [1, 2, 3]
        Queues(broker, {0: [7, 8]})
        assert [message.store_timestamp for message in reader.messages()] == [7, 8]
        assert lost == [(OffsetRange(MessageQueue("t", "broker-a", 0), 7, 8), Cause.WENT_BACK)]
    session.close_all()


def test_a_queue_added_while_following_is_read_from_its_start(monkeypatch):
    monkeypatch.setattr(topic_reader, "_MAX_ROUTE_AGE_S", 0.0)
    lost = []
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        Queues(broker, {0: [1, 2]})
        parsed = options.parse({"name_server": broker.address}).for_role("batch source")
        reader = TopicReader(parsed, "t", lambda part, cause: lost.append((part, cause)))
        reader.seek(latest)
        assert list(reader.messages()) == []
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
        Queues(broker, {0: [1, 2, 9], 1: [7, 8]})
        assert [(m.queue_id, m.store_timestamp) for m in reader.messages()] == [(1, 7), (1, 8), (0, 9)]
        assert lost == []
    session.close_all()


def test_a_time_before_the_first_message_reports_no_loss():
    """Brokers that deleted old files answer with an offset that they do not keep any more."""
    lost = []
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        Queues(broker, {0: [7, 8]})
        broker.on(SEARCH, lambda call: rpc.SEARCH_OFFSET_BY_TIMESTAMP.reply(call.command, offset=2))
        parsed = options.parse({"name_server": broker.address}).for_role("batch source")
        reader = TopicReader(parsed, "t", lambda part, cause: lost.append((part, cause)))
        reader.seek_time(3)
        assert ([message.store_timestamp for message in reader.messages()], lost) == ([7, 8], [])
    session.close_all()


def half_closed(first, second):
    servers = {"broker-a": first, "broker-b": second}
    return ok(json.dumps({
        "brokerDatas": [
            {"brokerName": name, "cluster": "c", "brokerAddrs": {"0": server.address}} for name, server in servers.items()
        ],
        "queueDatas": [
            {"brokerName": name, "readQueueNums": 1, "writeQueueNums": 1, "perm": perm}
            for name, perm in zip(servers, (6, 2), strict=True)
        ],
    }).encode())  # fmt: skip


def test_the_next_messages_of_many_queues_stay_compressed():
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(12, {"broker-a": broker.address}))
        queues = Queues(broker, {number: [number] for number in range(12)})
        packed = {"body": zlib.compress(bytes(8 << 20)), "sys_flag": int(SysFlag.COMPRESSED)}
        queues.odd = {(number, FIRST): packed for number in range(12)}
        parsed = options.parse({"name_server": broker.address}).for_role("batch source")
        reader = TopicReader(parsed, "t", lambda part, cause: pytest.fail(f"lost {part}: {cause}"))
        reader.seek(earliest)
        assert peak_bytes(lambda: [len(m.body) for m in reader.messages()]) < 30 << 20
        reader.seek(earliest)
        assert [len(m.body) for m in reader.messages()] == [8 << 20] * 12
    session.close_all()
