"""Delays of any length as a Spark stream, on a real broker; and what is said where something is missing."""

from __future__ import annotations

import functools
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo

from rocketmq_spark import Message, MessageQueue, Producer
from rocketmq_spark.delay import delayed
from rocketmq_spark.delay import portions as portions_module
from rocketmq_spark.delay import stream as stream_module
from rocketmq_spark.delay.release import PROBLEM_PROPERTY
from rocketmq_spark.delay.stream import _WaitingEnvelopes, protobuf_problem
from rocketmq_spark.errors import OptionError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope, cancel_envelope
from tests.delay.nodes import START_MS, envelope
from tests.fix_spark import wait_until
from tests.helpers import stored, total
from tests.spark.pipelines import read, read_stream

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@pytest.fixture
def on_rocksdb(spark: SparkSession) -> Any:
    before = spark.conf.get(PROVIDER, None)
    spark.conf.set(PROVIDER, ROCKSDB)
    yield spark
    spark.conf.unset(PROVIDER) if before is None else spark.conf.set(PROVIDER, before)


def test_originals_come_when_they_are_due_once_and_whole(
    on_rocksdb: SparkSession, rocketmq: LocalBroker, make_topic: Any, tmp_path: Path
) -> None:
    inner, target, dead = make_topic(queues=2), make_topic(queues=2), make_topic(queues=1)
    query = (
        delayed(read_stream(on_rocksdb, rocketmq.name_server, inner, startingOffsets="earliest", columns="body"), dead)
        .writeStream.format("rocketmq").option("nameServer", rocketmq.name_server).option("messageId", "msgId")
        .option("checkpointLocation", str(tmp_path)).trigger(processingTime="1 second").start()
    )  # fmt: skip
    with Producer(name_server=rocketmq.name_server, group="delays") as producer:
        try:
            # Python workers and RocksDB take their time to start.
            producer.send(Message(inner, b"no envelope"))
            wait_until(query, lambda: total(rocketmq, dead), 120.0)
            taken_back = _send_and_take_back(producer, inner, target)
            due = _send(producer, inner, target)
            for cancel in taken_back:
                producer.send(Message(inner, cancel), queue=MessageQueue(inner, "broker-a", 0))
            wait_until(query, lambda: total(rocketmq, target) >= len(due), 120.0)
        finally:
            query.stop()
    found = read(on_rocksdb, rocketmq.name_server, target, metadata="full").collect()
    (refused,) = read(on_rocksdb, rocketmq.name_server, dead).collect()
    assert Counter(row.body.decode() for row in found) == Counter(due.keys())
    assert not [row.body for row in found if row.storeTimestamp.timestamp() * 1000 < due[row.body.decode()]]
    for row in found:
        name = row.body.decode()
        assert (row.tags, row["keys"], row.flag) == ("t", [name, "k"], 3)
        assert row.properties == {"region": "eu", "SPARK_ROW_ID": name}
    assert refused.body == b"no envelope"
    assert "no envelope" in refused.properties[PROBLEM_PROPERTY]


def test_waiting_messages_are_sent_after_restart_without_input(
    on_rocksdb: SparkSession, rocketmq: LocalBroker, make_topic: Any, tmp_path: Path
) -> None:
    """Spark alone would look at timers again when the next message arrives. What takes messages back meets them, though the
    session shuffles otherwise now.
    """
    inner, target = make_topic(queues=1), make_topic(queues=1)

    def start() -> Any:
        messages = read_stream(on_rocksdb, rocketmq.name_server, inner, startingOffsets="earliest", columns="body")
        return (
            delayed(messages).writeStream.format("rocketmq").option("nameServer", rocketmq.name_server)
            .option("messageId", "msgId").option("checkpointLocation", str(tmp_path))
            .trigger(processingTime="1 second").start()
        )  # fmt: skip

    query = start()
    try:
        with Producer(name_server=rocketmq.name_server, group="delays") as producer:
            # A query takes long to start on a busy machine: only when it sends, times mean what they say.
            producer.send(Message(inner, Envelope(target, 1, "first", 1, 0, "", b"first").pack()))
            wait_until(query, lambda: total(rocketmq, target), 120.0)
            due_ms = int(time.time() * 1000) + 20_000
            for name in ("", *"abcde"):
                producer.send(Message(inner, Envelope(target, due_ms, name, 1, 0, "", name.encode() or b"x").pack()))
        wait_until(query, lambda: _held(query) and query.lastProgress["numInputRows"] < 2, 120.0)
    finally:
        query.stop()
    assert total(rocketmq, target) == 1
    with Producer(name_server=rocketmq.name_server, group="delays") as producer:
        for name in "abcde":
            producer.send(Message(inner, cancel_envelope(target, due_ms, name, 1)))
    shuffled = on_rocksdb.conf.get("spark.sql.shuffle.partitions")
    try:
        on_rocksdb.conf.set("spark.sql.shuffle.partitions", "7")
        query = start()
    finally:
        on_rocksdb.conf.set("spark.sql.shuffle.partitions", shuffled)
    try:
        wait_until(query, lambda: total(rocketmq, target) > 1, 120.0)
        wait_until(query, lambda: not _held(query), 120.0)
    finally:
        query.stop()
    assert [message.body for message in stored(rocketmq, target, 2)] == [b"first", b"x"]


def _held(query: Any) -> int:
    """Lists that wait, as the last micro-batch left them."""
    progress = query.lastProgress
    return sum(state["numRowsTotal"] for state in progress["stateOperators"]) if progress else 0


def _send(producer: Producer, inner: str, target: str) -> dict[str, int]:
    """300 messages, from five seconds late to fifteen early, and five of those that wait once more."""
    now_ms = int(time.time() * 1000)
    due = {f"ID{i}": now_ms + 1000 * (i % 20 - 5) + i for i in range(300)}
    for name in [*due, "ID19", "ID39", "ID59", "ID79", "ID99"]:
        properties = f"UNIQ_KEY\x01{name}\x02TAGS\x01t\x02KEYS\x01{name} k\x02region\x01eu\x02"
        producer.send(Message(inner, Envelope(target, due[name], name, now_ms, 3, properties, name.encode()).pack()))
    return due


def _send_and_take_back(producer: Producer, inner: str, target: str) -> list[bytes]:
    """Messages that fall due before the last of the others does, and what takes them back: of some in the same micro-batch,
    of the others later.
    """
    now_ms, queue = int(time.time() * 1000), MessageQueue(inner, "broker-a", 0)
    names = [f"GONE{i}" for i in range(6)]
    for name in names:
        envelope = Envelope(target, now_ms + 12_000, name, now_ms, 0, f"UNIQ_KEY\x01{name}\x02", name.encode())
        producer.send(Message(inner, envelope.pack()), queue=queue)
    cancels = [cancel_envelope(target, now_ms + 12_000, name, now_ms) for name in names]
    for cancel in cancels[:3]:
        producer.send(Message(inner, cancel), queue=queue)
    return cancels[3:]


def test_body_longer_than_any_envelope_is_cut_before_python(spark: SparkSession) -> None:
    """And all of one with as large a body, and as many properties, as messages have."""
    most = 5000
    largest = Envelope("t" * 255, 1, "ID", 0, 0, "p" * 32767, b"x" * most).pack()
    rows = spark.createDataFrame([(largest,), (largest * 3,)], "body binary").select(
        stream_module._truncated_column("body", most)
    )
    whole, cut = (bytes(row.body) for row in rows.collect())
    assert whole == largest
    assert (cut, len(cut)) == ((largest * 3)[: len(cut)], most + stream_module._ENVELOPE_BYTES)


def test_what_is_missing_is_said_at_once(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    batch = read(spark, rocketmq.name_server, topic).selectExpr("cast(body as string) body")
    with pytest.raises(OptionError) as raised:
        delayed(batch)
    assert "delayed() got no stream whose column 'body' is string" in str(raised.value)
    assert f"expected {ROCKSDB}" in str(raised.value)


@pytest.mark.parametrize(
    ("version", "fine"),
    [("6.33.5", True), ("7.0.0", True), ("6.33.4", False), ("6.9", False), ("5.29.6", False), ("none", False)],
)
def test_protobuf_must_be_as_new_as_sparks_generated_code(version: str, fine: bool) -> None:
    problem = protobuf_problem(version)
    assert (problem is None) is fine
    assert fine or (problem and "pip install 'protobuf>=6.33.5'" in problem and version in problem)


class Waits:
    """Spark's state and timers of one shard and second. ``most_bytes`` is the most that one access has returned."""

    def __init__(self) -> None:
        self.earlier: list[tuple[bytes]] = []  # what earlier releases kept
        self.by_number: dict[tuple[int], tuple[bytes]] = {}
        self.ends: tuple[int, int, bool] | None = None
        self.timers: list[int] = []
        self.now_ms = 0
        self.most_bytes = 0

    # As a handle, and the values of its timers.

    def getListState(self, name: str, schema: object) -> Any:
        return SimpleNamespace(
            exists=lambda: bool(self.earlier), get=lambda: iter(list(self.earlier)), clear=self.earlier.clear
        )

    def getMapState(self, name: str, of_key: object, of_value: object) -> Any:
        def get(key: tuple[int]) -> tuple[bytes]:
            self.most_bytes = max(self.most_bytes, len(self.by_number[key][0]))
            return self.by_number[key]

        return SimpleNamespace(
            getValue=get, updateValue=self.by_number.__setitem__, removeKey=self.by_number.__delitem__
        )

    def getValueState(self, name: str, schema: object) -> Any:
        def update(ends: tuple[int, int, bool] | None = None) -> None:
            self.ends = ends

        return SimpleNamespace(exists=lambda: self.ends is not None, get=lambda: self.ends, update=update, clear=update)

    def registerTimer(self, at_ms: int) -> None:
        self.timers.append(at_ms)

    def getCurrentProcessingTimeInMs(self) -> int:
        return self.now_ms

    @property
    def is_empty(self) -> bool:
        return not (self.earlier or self.by_number or self.ends)


class Second:
    """A processor, and the shard of the second that is five seconds after ``START_MS``."""

    def __init__(self) -> None:
        self.state: Any = Waits()
        self.processor = _WaitingEnvelopes("dead")
        self.processor.init(self.state)
        self.at = START_MS // 1000 + 5

    def arrive(self, *bodies: bytes) -> list[bytes]:
        rows = iter([Row(body=body) for body in bodies])
        return [bytes(row.body) for row in self.processor.handleInputRows((0, self.at), rows, self.state)]

    def fire(self) -> list[list[bytes]]:
        """What each micro-batch gives until no timer is left."""
        given = []
        while self.state.timers:
            at_ms = self.state.timers.pop()
            self.state.now_ms = max(self.state.now_ms + 1, at_ms)
            assert not self.state.timers
            rows = self.processor.handleExpiredTimer((0, self.at), self.state, ExpiredTimerInfo(at_ms))
            given.append([bytes(row.body) for row in rows])
        return given


def test_a_second_is_given_in_portions_of_limited_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bodies as other clients like may be due at one second."""
    monkeypatch.setattr(stream_module, "_MAX_BYTES", 3000)
    monkeypatch.setattr(portions_module.portions, "__defaults__", (1000,))
    second = Second()
    bodies = {str(n): envelope(str(n), 5, body=bytes([n]) * 400) for n in range(20)}
    cancel = cancel_envelope("orders", START_MS + 5000, "3", START_MS)
    assert second.arrive(*list(bodies.values())[:10], *list(bodies.values())[:5]) == []
    assert second.arrive(cancel, *list(bodies.values())[5:]) == []
    given = second.fire()
    assert sorted(body[0] for part in given for body in part) == [n for n in range(20) if n != 3]
    assert len(given) > 2
    assert max(sum(map(len, part)) for part in given) <= 4000
    assert second.state.most_bytes <= 1100
    assert second.state.is_empty


class Task:
    """A task with many shards and seconds, whose states and timers Spark keeps by key."""

    def __init__(self) -> None:
        self.processor = _WaitingEnvelopes("dead")
        self.kept: dict[tuple[int, int], Waits] = {}
        self.timers: set[tuple[int, tuple[int, int]]] = set()

    def batch(self, now_ms: int, arrived: dict[tuple[int, int], list[bytes]]) -> list[bytes]:
        found = []
        for key, bodies in sorted(arrived.items()):
            found += self._call(key, now_ms, lambda key, bodies=bodies: ([Row(body=body) for body in bodies],))
        for at_ms, key in sorted(timer for timer in self.timers if timer[0] <= now_ms):
            found += self._call(key, now_ms, lambda key, at_ms=at_ms: (at_ms,), expired=at_ms)
        return found

    def _call(self, key: tuple[int, int], now_ms: int, more: Any, expired: int | None = None) -> list[bytes]:
        state = self.kept.setdefault(key, Waits())
        state.now_ms = now_ms
        self.processor.init(state)
        if expired is None:
            rows = list(self.processor.handleInputRows(key, iter(more(key)[0]), state))
        else:
            rows = list(self.processor.handleExpiredTimer(key, state, ExpiredTimerInfo(expired)))
        self.timers |= {(at_ms, key) for at_ms in state.timers}
        state.timers.clear()
        if expired is not None:
            self.timers.discard((expired, key))  # as Spark does after the call, also if it was registered again
        assert (key in {key for _, key in self.timers}) is not state.is_empty
        return [bytes(row.body) for row in rows]


@pytest.mark.parametrize(("keys", "since"), [(1, 1), (40, 4)], ids=["one key", "many keys"])
def test_what_comes_later_does_not_keep_a_message_waiting(
    monkeypatch: pytest.MonkeyPatch, keys: int, since: int
) -> None:
    """Others send more than a micro-batch can give, all the time."""
    monkeypatch.setattr(stream_module, "_MAX_BYTES", 4000)
    monkeypatch.setattr(portions_module.portions, "__defaults__", (1000,))
    task, sent = Task(), []
    assert task.batch(START_MS, {(9, START_MS // 1000 + 3): [envelope("m", 3, body=b"mine")]}) == []
    for n in range(1, 9):
        late = [(0, key * n) for key in range(keys) if n >= since]
        arrived = {key: [b"%d %d" % (n, at) + bytes(400) for at in range(80 // keys)] for key in late}
        given = task.batch(START_MS + 1000 * n - 500, arrived)
        assert sum(map(len, given)) <= 4000 + 1300
        sent += [n] * (b"mine" in given)
    assert sent == [4]


def test_a_second_with_much_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MAX_BYTES", 4000)
    monkeypatch.setattr(portions_module.portions, "__defaults__", (1000,))
    task, second = Task(), START_MS // 1000 + 1
    large = [envelope(str(n), 1, body=bytes([n]) * 400) for n in range(60)]
    task.batch(START_MS, {(0, second): large, (1, second): [envelope("m", 1, body=b"mine")]})
    first = task.batch(START_MS + 1000, {})
    assert b"mine" in first
    assert 1 < len(first) < 10
    rest = [body for n in range(2, 40) for body in task.batch(START_MS + 1000 * n, {})]
    assert sorted(body[0] for body in first + rest if body != b"mine") == list(range(60))
    assert not task.timers


def test_what_waits_is_not_read_again_for_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_MAX_BYTES", 1000)
    monkeypatch.setattr(portions_module.portions, "__defaults__", (1000,))
    task, key = Task(), (0, 0)
    task.batch(START_MS, {key: [b"%d" % n + bytes(400) for n in range(40)]})
    task.batch(START_MS + 1000, {})
    read: list[tuple[int]] = []
    found = Waits.getMapState

    def seen(state: Waits, name: str, of_key: object, of_value: object) -> Any:
        made = found(state, name, of_key, of_value)
        return SimpleNamespace(**{**vars(made), "getValue": lambda key: (read.append(key), made.getValue(key))[1]})

    monkeypatch.setattr(Waits, "getMapState", seen)
    task.batch(START_MS + 2000, {key: [b"more" + bytes(400)]})
    assert len(read) <= 2


def test_more_than_a_portion_that_is_due_waits_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions_module.portions, "__defaults__", (1000,))
    second = Second()
    second.state.now_ms = second.at * 1000 + 1
    assert second.arrive(envelope("a", 5), envelope("a", 5)) == [b"a"]
    assert second.state.is_empty
    many = [envelope(str(n), 5, body=bytes([n]) * 400) for n in range(9)]
    assert second.arrive(*many) == []
    assert sorted(body[0] for part in second.fire() for body in part) == list(range(9))
    assert second.state.is_empty


def test_what_an_earlier_release_kept_is_given_too() -> None:
    second = Second()
    second.state.earlier += [(envelope("a", 5),), (envelope("b", 5),)]
    second.state.timers = [second.at * 1000]
    assert (
        second.arrive(envelope("a", 5), envelope("c", 5), cancel_envelope("orders", START_MS + 5000, "b", START_MS))
        == []
    )
    assert [sorted(part) for part in second.fire()] == [[b"a", b"c"]]
    assert second.state.is_empty


@given(st.lists(st.binary(max_size=50)), st.integers(1, 200))
def test_portions_have_all_bodies_in_order(bodies: list[bytes], most_bytes: int) -> None:
    parts = list(portions_module.portions(bodies, most_bytes))
    assert [body for part in parts for body in part] == bodies
    assert all(len(part) == 1 or sum(map(len, part)) <= most_bytes for part in parts)
    assert [list(portions_module.unpack(portions_module.pack(part))) for part in parts] == parts


def test_what_is_taken_back_while_the_query_was_away_is_not_sent() -> None:
    """Its second is over when the cancel is read, and its timer is still to come."""
    second = Second()
    assert second.arrive(envelope("m", 5), envelope("n", 5)) == []
    assert second.state.timers == [second.at * 1000]
    second.state.now_ms = second.at * 1000 + 1
    assert second.arrive(cancel_envelope("orders", START_MS + 5000, "m", START_MS)) == []
    assert second.fire() == [[b"n"]]


def test_what_has_no_room_costs_one_call_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is a round trip, in every micro-batch, for as many keys as others like."""
    monkeypatch.setattr(stream_module, "_MAX_BYTES", 1000)
    task, second, calls = Task(), START_MS // 1000 + 1, 0
    task.batch(START_MS, {(0, second): [envelope("m", 1, body=bytes(2000))]})
    task.batch(START_MS, {(n, second + n): [envelope(str(n), 1, body=b"%d" % n)] for n in range(1, 30)})

    def counted(state: Waits, name: str, *given: object) -> Any:
        made = vars(found[name](state, name, *given))

        def call(method: Any, *given: object) -> Any:
            nonlocal calls
            calls += 1
            return method(*given)

        return SimpleNamespace(**{of: functools.partial(call, method) for of, method in made.items()})

    found: dict[str, Any] = {}
    for kind in ("getListState", "getMapState", "getValueState"):
        original = getattr(Waits, kind)

        def state(self: Waits, name: str, *given: object, original: Any = original) -> Any:
            found[name] = original
            return counted(self, name, *given)

        monkeypatch.setattr(Waits, kind, state)
    assert len(task.batch(START_MS + 60_000, {})) == 1
    assert calls < 10  # all for the one that was given
    given = [body for n in range(61, 66) for body in task.batch(START_MS + 1000 * n, {})]
    assert given == [b"%d" % n for n in range(1, 30)]
    assert not task.timers
