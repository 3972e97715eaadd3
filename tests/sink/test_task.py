"""A task's rows on a real broker: every option by its effect, every column by what is stored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import options
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response, SysFlag
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.errors import MessageRefused, OptionError, RouteNotFound, SelectorError
from rocketmq_spark.grpc_proxy.tables import MessageType
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest
from rocketmq_spark.producer.outgoing import Outcome
from rocketmq_spark.queues.selection import select_by_hash
from rocketmq_spark.spark.sink.task import TaskWriter
from tests.grpc_proxy.scripted import acknowledge, route, serving
from tests.helpers import stored, total
from tests.live.producer.recording import RecordingSender
from tests.live.writes import Make, Writes, bodies, by_queue, frame, numbered, writes
from tests.witness import JavaPeer

__all__ = ["writes"]


def test_round_robin_spreads_batches_evenly(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    done = writes(frame(body=numbered(800)), topic=topic, batchMaxBytes=1_000)
    queues = [queue.queue_id for queue, _ in writes.requests]
    assert done.batches == len(queues) > 16
    assert max(map(queues.count, range(8))) - min(map(queues.count, range(8))) <= 1
    assert sorted(bodies(stored(rocketmq, topic, 800))) == numbered(800)


def test_random_does_not_go_round(topic: str, writes: Writes) -> None:
    writes(frame(body=numbered(400)), topic=topic, batchMaxBytes=100, queueSelector="random")
    queues = [queue.queue_id for queue, _ in writes.requests]
    assert set(queues) == set(range(8))
    steps = {(after - before) % 8 for before, after in itertools.pairwise(queues)}
    assert steps == set(range(8)), "round robin knows one step only"


def test_hash_through_the_sink_is_the_java_clients_queue(
    rocketmq: LocalBroker, make_topic: Make, writes: Writes, java_peer: JavaPeer
) -> None:
    java_topic, topic = make_topic(queues=7), make_topic(queues=7)
    rng = random.Random(7)
    alphabets = ("abcXYZ0189-_:/ ", "äßéñ€", "中文日本語한국", "\U0001f600\U0001f680\U00020000")
    keys = ["".join(rng.choices(rng.choice(alphabets), k=rng.randrange(1, 24))) for _ in range(1_998)]
    keys += ["polygenelubricants", "GydZG_"]
    writes(frame(body=[f"{i}" for i in range(2000)], shardingKey=keys), topic=topic, queueSelector="hash")
    java = java_peer.hash_queues(java_topic, keys)
    ours = {int(message.body): message for message in stored(rocketmq, topic, 2000)}
    assert len(ours) == total(rocketmq, topic) == 2000
    assert [ours[i].queue_id for i in range(2000)] == java
    assert [ours[i].properties["__SHARDINGKEY"] for i in range(2000)] == keys


@pytest.mark.parametrize("selector", [{}, {"queueSelector": "hash"}])
def test_the_order_of_every_key_is_kept_over_many_batches(
    rocketmq: LocalBroker, make_topic: Make, writes: Writes, selector: dict[str, str]
) -> None:
    topic = make_topic(queues=3)
    batches = [
        frame(body=numbered(500, at), shardingKey=[f"k{i % 11}" for i in range(at, at + 500)])
        for at in range(0, 5000, 500)
    ]
    writes(*batches, topic=topic, **selector, batchMaxBytes=2_000, maxInFlight=16)
    found = by_queue(stored(rocketmq, topic, 5000))
    assert sum(map(len, found.values())) == 5000
    assert all(rows == sorted(rows) for rows in found.values())
    keys = [{int(body) % 11 for body in rows} for rows in found.values()]
    assert sum(map(len, keys)) == 11


def test_column_names_queue_and_broker(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    ids = [i * 5 % 8 for i in range(64)]
    broker = rocketmq.brokers[0]
    writes(frame(body=numbered(64), queueId=ids, brokerName=[broker] * 64), topic=topic)
    writes(frame(body=numbered(64, 64), queueId=ids), topic=topic, queueSelector="column")
    found = by_queue(stored(rocketmq, topic, 128))
    rows = list(zip(numbered(64), ids, strict=True)) + list(zip(numbered(64, 64), ids, strict=True))
    assert found == {queue: [body for body, i in rows if i == queue] for queue in range(8)}


def test_column_refuses_queues_that_are_not_there(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    rows = frame(
        body=list("abcde"), queueId=[0, 8, None, 1, 2], brokerName=["broker-a", "broker-a", "broker-a", "x", None]
    )
    with pytest.raises(MessageRefused, match="4 rows cannot be sent, and nothing") as e:
        writes(rows, topic=topic)
    for reason in ("row 1: topic .* has no queue 8 on broker 'broker-a'", "row 2: queueId is null", "row 3: .*'x'",
                   "row 4: brokerName is null"):  # fmt: skip
        assert e.match(reason)
    assert writes.requests == []


def test_environment_is_never_left(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    given = {"topic": topic, "environment": "2", "environments": "4", "batchMaxBytes": 200}
    writes(frame(body=numbered(50)), queueSelector="environment", **given)
    writes(frame(body=numbered(50), shardingKey=numbered(50)), queueSelector="hash", **given)
    assert {queue.queue_id for queue, _ in writes.requests} == {1, 5}
    assert set(by_queue(stored(rocketmq, topic, 100))) == {1, 5}


def test_an_environment_counts_read_only_queues_too(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    rocketmq.admin.create_topic(topic, read_queues=8, write_queues=4)
    with pytest.raises(OptionError, match=r"owns .*/5, none of which takes messages now"):
        writes(frame(body=["x"]), topic=topic, environment="6")
    writes(frame(body=["x"]), topic=topic, environment="3")
    assert [queue.queue_id for queue, _ in writes.requests] == [2]


def choose(queues: list[MessageQueue], message: object, arg: object) -> MessageQueue:
    assert (message.tags, list(message.keys), message.properties) == ("t", ["k"], {"p": "v"})  # type: ignore[attr-defined]
    return queues[int(message.body) % 3 + (1 if arg == "odd" else 0)]  # type: ignore[attr-defined]


def test_a_callable_sees_message_and_key(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    rows = frame(
        body=list("012345"), tags=["t"] * 6, keys=[["k"]] * 6, properties=[[("p", "v")]] * 6,
        shardingKey=["odd", "even"] * 3,
    )  # fmt: skip
    writes(rows, topic=topic, queueSelector="tests.sink.test_task:choose")
    assert by_queue(stored(rocketmq, topic, 6)) == {0: ["3"], 1: ["0", "1"], 2: ["4", "5"], 3: ["2"]}


def lost(queues: list[MessageQueue], message: object, arg: object) -> MessageQueue | None:
    if message.body == b"2":  # type: ignore[attr-defined]
        raise ValueError("no idea")
    return queues[0]


def test_a_selector_that_fails_names_the_row_and_nothing_is_sent(topic: str, writes: Writes) -> None:
    with pytest.raises(SelectorError, match=r"row 2: .*ValueError: no idea; nothing of its Arrow batch was sent"):
        writes(frame(body=list("0123")), topic=topic, queueSelector=lost)
    assert writes.requests == []


class InRooms(RecordingSender):
    """As if the broker were called ``north@…``, and another of the same address ``south@…``."""

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        found = super().publish_queues(topic, deadline, refresh)
        return [
            MessageQueue(topic, f"{room}@{q.broker_name}", q.queue_id) for room in ("north", "south") for q in found
        ]

    def send_async(
        self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[[Outcome], None]
    ) -> None:
        self._note(queue, request)
        real = MessageQueue(queue.topic, queue.broker_name.partition("@")[2], queue.queue_id)
        RemotingSender.send_async(self, real, request, deadline, done)


def test_machine_room_uses_the_brokers_of_the_room(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    writes.kind = InRooms
    rows = frame(body=numbered(300))
    writes(rows, topic=topic, queueSelector="machineRoom", machineRooms="south,west", batchMaxBytes=200)
    assert {queue.broker_name for queue, _ in writes.requests} == {f"south@{rocketmq.brokers[0]}"}
    assert {queue.queue_id for queue, _ in writes.requests} == set(range(8))
    with pytest.raises(SelectorError, match=r"no broker is in west; rooms of topic .* are north, south"):
        writes(rows, topic=topic, queueSelector="machineRoom", machineRooms="west")


def test_auto_batch_off_sends_every_row_alone(topic: str, writes: Writes) -> None:
    assert writes(frame(body=numbered(30)), topic=topic).batches == 1
    assert writes(frame(body=numbered(30)), topic=topic, autoBatch="false").batches == 30
    assert not any(request.batch for _, request in writes.requests)


def test_rows_alone_keep_the_order_of_their_queue(rocketmq: LocalBroker, make_topic: Make, writes: Writes) -> None:
    topic = make_topic(queues=2)
    rows = frame(body=numbered(300), shardingKey=[f"k{i % 5}" for i in range(300)])
    writes(rows, topic=topic, autoBatch="false", queueSelector="hash", maxInFlight=32)
    assert all(found == sorted(found) for found in by_queue(stored(rocketmq, topic, 300)).values())


def test_batch_max_bytes_bounds_batches_and_larger_row_is_alone(topic: str, writes: Writes) -> None:
    writes(frame(body=["x" * 20] * 50 + ["y" * 2000] + ["z"]), topic=topic, batchMaxBytes=900)
    batches = [request for _, request in writes.requests if request.batch]
    assert max(len(request.body) for request in batches) <= 900 < 3 * len(batches[0].body)
    (alone,) = [request for _, request in writes.requests if not request.batch]
    assert alone.body == b"y" * 2000


def test_row_of_batch_size_is_a_batch_and_a_larger_one_is_alone(topic: str, writes: Writes) -> None:
    overhead = 22 + len("UNIQ_KEY") + 34
    for room, batch in ((0, True), (1, False)):
        writes(frame(body=["x" * (500 - overhead + room)]), topic=topic, batchMaxBytes=500)
        ((_, request),) = writes.requests
        assert (request.batch, len(request.body)) == (batch, 500 if batch else 501 - overhead)


def test_body_of_four_mebibytes_is_sent_and_one_byte_more_is_not(
    rocketmq: LocalBroker, topic: str, writes: Writes
) -> None:
    max_bytes = 4 * 1024 * 1024
    writes(frame(body=["x" * max_bytes]), topic=topic, compression="none")
    assert len(stored(rocketmq, topic, 1)[0].body) == max_bytes
    with pytest.raises(
        MessageRefused, match=f"row 1: body of {max_bytes + 1} bytes, option 'maxMessageSize' is {max_bytes}"
    ):
        writes(frame(body=["x", "x" * (max_bytes + 1)]), topic=topic)
    assert writes.requests == []


def test_max_message_size_bounds_batches_too(topic: str, writes: Writes) -> None:
    writes(frame(body=["x" * 400] * 10), topic=topic, maxMessageSize=1000)
    assert max(len(request.body) for _, request in writes.requests) <= 1000
    with pytest.raises(OptionError, match="option 'batchMaxBytes' is 2000, more than 'maxMessageSize' 1000"):
        writes(frame(body=["x"]), topic=topic, maxMessageSize=1000, batchMaxBytes=2000)


@pytest.mark.parametrize(("name", "bit"), [("zlib", SysFlag.ZLIB), ("lz4", SysFlag.LZ4), ("zstd", SysFlag.ZSTD)])
def test_what_travels_alone_is_compressed(
    rocketmq: LocalBroker, topic: str, writes: Writes, name: str, bit: SysFlag
) -> None:
    rows = frame(body=["packs well " * 200, "short"])
    writes(rows, topic=topic, autoBatch="false", compression=name, compressAbove=1000)
    assert [request.sys_flag for _, request in writes.requests] == [SysFlag.COMPRESSED | bit, 0]
    assert len(writes.requests[0][1].body) < 500
    assert sorted(bodies(stored(rocketmq, topic, 2))) == ["packs well " * 200, "short"]


def test_compression_none_and_batches_are_not_compressed(topic: str, writes: Writes) -> None:
    rows = frame(body=["packs well " * 200])
    for given in ({"compression": "none", "autoBatch": "false"}, {"compressAbove": 10}, {"autoBatch": "false"}):
        writes(rows, topic=topic, **given)
        assert writes.requests[0][1].sys_flag == 0, given


def test_delays_of_every_kind_fire_and_travel_alone(rocketmq: LocalBroker, make_topic: Make, writes: Writes) -> None:
    topic = make_topic(queues=2)
    begin = datetime.now(UTC)
    moment = begin + timedelta(seconds=2)
    rows = frame(
        body=["at once", "level", "timer", "moment", "past", "none"],
        delayLevel=[None, 1, None, None, None, 0],
        delayMs=[0, None, 1500, None, None, None],
        deliverAt=[None, None, None, moment, datetime(2020, 1, 1, tzinfo=UTC), None],
    )
    done = writes(rows, topic=topic)
    assert (done.rows, sum(request.batch for _, request in writes.requests), len(writes.requests)) == (6, 1, 5)
    begin_ms = begin.timestamp() * 1000
    came = {message.body.decode(): message.store_timestamp - begin_ms for message in stored(rocketmq, topic, 6)}
    assert came.keys() == {"at once", "level", "timer", "moment", "past", "none"}
    # Timers have steps of a tenth of a second here.
    assert came["level"] > 900
    assert came["timer"] > 1350
    assert came["moment"] > 1850


def test_java_reads_delayed_rows_at_their_time_and_not_before(
    make_topic: Make, writes: Writes, java_peer: JavaPeer
) -> None:
    """A broker on a slow machine may be late with each kind of delay, and never is early."""
    topic = make_topic(queues=1)
    begin = datetime.now(UTC)
    begin_ms = int(begin.timestamp() * 1000)
    waits = {b"level 2": 5000, b"timer": 4000, b"moment": 3000, b"level 1": 1000, b"now": 0}
    rows = frame(
        body=[body.decode() for body in waits],
        delayLevel=[2, None, None, 1, None],
        delayMs=[None, 4000, None, None, None],
        deliverAt=[None, None, begin + timedelta(seconds=3), None, None],
    )
    assert writes(rows, topic=topic).rows == 5
    read = java_peer.read(topic, 5)
    assert sorted(record.body for record in read) == sorted(waits)
    for record in read:
        # Timers have steps of a tenth of a second here.
        assert record.seen >= record.stored >= begin_ms + waits[record.body] - 150, record


def test_delays_of_a_hashed_row_stay_on_its_queue(rocketmq: LocalBroker, topic: str, writes: Writes) -> None:
    rows = frame(body=list("ab"), shardingKey=["k", "k"], delayMs=[100, None])
    writes(rows, topic=topic, queueSelector="hash")
    queues = [MessageQueue(topic, rocketmq.brokers[0], i) for i in range(8)]
    assert {queue for queue, _ in writes.requests} == {select_by_hash(queues, "k")}
    assert set(by_queue(stored(rocketmq, topic, 2))) == {select_by_hash(queues, "k").queue_id}


def test_flags_keys_tags_and_row_ids_are_stored(rocketmq: LocalBroker, make_topic: Make, writes: Writes) -> None:
    topic = make_topic(queues=1)
    rows = frame(
        body=["0", "1"], flag=[7, None], tags=["t", None], keys=[["k1", "k2"], []],
        properties=[[("region", "eu")], None], id=["a-1", "a-2"],
    )  # fmt: skip
    writes(rows, topic=topic, messageId="id")
    first, second = stored(rocketmq, topic, 2)
    assert (first.flag, first.tags, first.keys, second.flag, second.tags, second.keys) == (
        7,
        "t",
        ["k1", "k2"],
        0,
        None,
        [],
    )
    assert (first.properties["region"], first.properties["SPARK_ROW_ID"]) == ("eu", "a-1")
    assert second.properties["SPARK_ROW_ID"] == "a-2"


def test_rows_without_a_body_are_marked_if_wanted(rocketmq: LocalBroker, make_topic: Make, writes: Writes) -> None:
    topic = make_topic(queues=1)
    rows = frame(body=["0", None, ""], tags=["t", "u", None])
    with pytest.raises(MessageRefused, match="row 1: body is null; row 2: body is empty"):
        writes(rows, topic=topic)
    writes(rows, topic=topic, emptyBodies="mark")
    found = [(m.body, m.tags, m.properties.get("deleted")) for m in stored(rocketmq, topic, 3)]
    assert found == [(b"0", "t", None), (b"\0", "u", "null"), (b"\0", None, "empty")]


def test_topics_come_from_the_column_unless_the_option_names_one(
    rocketmq: LocalBroker, make_topic: Make, writes: Writes
) -> None:
    one, two, three = (make_topic(queues=1) for _ in range(3))
    rows = frame(body=numbered(9), topic=[one, two, two] * 3)
    writes(rows)
    assert bodies(stored(rocketmq, one, 3)) == numbered(9)[::3]
    assert len(stored(rocketmq, two, 6)) == 6
    writes(rows, topic=three)
    assert bodies(stored(rocketmq, three, 9)) == numbered(9)


def test_all_faults_of_an_arrow_batch_are_reported_in_one_error(
    rocketmq: LocalBroker, topic: str, writes: Writes
) -> None:
    bad = frame(
        body=["x", None, "", "x", "x", "x", "x", "fine"],
        topic=[topic, topic, topic, None, "bad topic!", "SCHEDULE_TOPIC_XXXX", topic, topic],
        tags=["t"] * 6 + ["a\x01b", "t"],
    )
    good = frame(body=["0", "1"], topic=[topic, topic], tags=["t", "t"])
    with pytest.raises(MessageRefused, match=r"^\[ROCKETMQ_MESSAGE_REFUSED\] 6 rows cannot be sent") as e:
        writes(good, bad)
    for reason in ("row 3: body is null", "row 4: body is empty", "row 5: topic is null or empty", "row 6: topic 'bad topic!'",
                   "row 7: topic 'SCHEDULE_TOPIC_XXXX'.*forbidden", "row 8: tags contains the separator"):  # fmt: skip
        assert e.match(reason)
    assert sorted(bodies(stored(rocketmq, topic, 2))) == ["0", "1"]
    assert len(writes.requests) == 1


def test_missing_topic_is_refused_with_the_nearest_name(topic: str, writes: Writes) -> None:
    with pytest.raises(RouteNotFound, match=f"Did you mean .*{topic}"):
        writes(frame(body=["x", "y"], topic=[topic, f"{topic}s"]), sendTimeout="5s")
    assert writes.requests == []


@pytest.mark.parametrize(("column", "batches"), [("shardingKey", 7), ("priority", 7), ("keys", 1)])
def test_grpc_rows_sent_as_single_requests_have_small_batches(column: str, batches: int) -> None:
    """All requests of a batch must end within one attempt."""
    kinds = {"shardingKey": MessageType.FIFO, "priority": MessageType.PRIORITY, "keys": MessageType.NORMAL}
    values = {"shardingKey": ["one group"] * 100, "priority": [1] * 100, "keys": [["a"]] * 100}
    rows = pa.RecordBatch.from_pydict({"body": [b"x"] * 100, column: values[column]})
    with serving({"SendMessage": acknowledge, "QueryRoute": route(kinds[column])}) as address:
        given = options.parse({"transport": "grpc", "proxyEndpoint": address, "topic": "t"}).for_role("sink")
        done = TaskWriter(given, {"body": "body", column.lower(): column}).write([rows])
    assert (done.rows, done.batches) == (100, batches)


def test_grpc_batch_of_small_rows_leaves_room_for_proxy_overhead() -> None:
    """Brokers count that, too: a batch that is too large with it would be sent again and again, in vain."""
    sent: list[int] = []

    def store(request: Any, context: Any) -> Any:
        sent.append(len(request.messages))
        return acknowledge(request, context)

    with serving({"SendMessage": store, "QueryRoute": route(MessageType.NORMAL)}) as address:
        given = {"transport": "grpc", "proxyEndpoint": address, "topic": "t", "batchMaxBytes": "2m"}
        writer = TaskWriter(options.parse(given).for_role("sink"), {"body": "body"})
        writer.write([pa.RecordBatch.from_pydict({"body": [b"x"] * 20_000})])
    assert sum(sent) == 20_000
    assert 7_000 < max(sent) <= (4 << 20) / (65 + 448)


def test_what_travels_alone_has_less_room_for_properties(topic: str, writes: Writes) -> None:
    long = frame(body=["x"], properties=[[("p", "v" * 32_600)]])
    assert writes(long, topic=topic).rows == 1
    with pytest.raises(MessageRefused, match="at most in a message that travels alone"):
        writes(long, topic=topic, autoBatch="false")


def test_a_fixed_number_and_the_total_bound_what_is_under_way(
    topic: str, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    under_way: set[int] = set()
    held: list[Callable[[], None]] = []
    numbers = itertools.count()
    # How many answers are kept back until all of them are there, one number after the other.
    holds: list[int] = []
    original = RecordingSender.send_async

    def counted(self, queue, request, deadline, done):  # type: ignore[no-untyped-def]
        number = next(numbers)
        under_way.add(number)
        seen.append(len(under_way))

        def finished(outcome):  # type: ignore[no-untyped-def]
            def told() -> None:
                under_way.discard(number)
                done(outcome)

            held.append(told)
            if holds and len(held) < holds[0]:
                return
            del holds[:1]
            while held:
                held.pop(0)()

        original(self, queue, request, deadline, finished)

    monkeypatch.setattr(RecordingSender, "send_async", counted)
    rows = frame(body=["x" * 500] * 390)
    writes(rows, topic=topic, batchMaxBytes=2000, maxInFlight=1)
    assert set(seen) == {1}
    seen.clear()
    writes(rows, topic=topic, batchMaxBytes=2000, maxInFlight=64, totalBatchMaxBytes=4100)
    assert set(seen) <= {1, 2}
    seen.clear()
    # The first four are the bound of a start. Once they are answered, more than four go out together.
    holds += [4, 6]
    writes(rows, topic=topic, batchMaxBytes=2000)
    assert not holds, "the bound grows"
    assert max(seen[:4]) == 4
    assert max(seen) >= 6


def test_permanent_broker_refusal_fails_the_task_with_its_error(
    make_cluster: Callable[..., LocalBroker], writes: Writes
) -> None:
    mq = make_cluster(conf={"maxMessageSize": 500})
    mq.create_topic("small", queues=1)
    small = Writes(mq.name_server, writes.monkeypatch)
    with pytest.raises(Exception, match="message") as e:
        small(frame(body=["x" * 600]), topic="small", autoBatch="false", sendTimeout="20s")
    assert e.value.broker_code == Response.MESSAGE_ILLEGAL  # type: ignore[attr-defined]
