"""``send_many``: as ``send_arrow`` (``test_bulk``), of messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.java import Long
from rocketmq_spark.columnar.encode import columns
from rocketmq_spark.columnar.encode.columns import message_batch
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import (
    ClosedError,
    MessageIllegal,
    MessageRefused,
    OptionError,
    RouteNotFound,
    SendFailed,
)
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer.encoding import batch_request, prepare
from rocketmq_spark.producer.outgoing import OutgoingSend
from rocketmq_spark.producer.rows import inputs
from rocketmq_spark.producer.rows.sent import OutcomeCollector
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.selection import select
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ok
from tests.producer.test_bulk import LOST, Bulk, bulk
from tests.queues import q, qs

__all__ = ["bulk"]


def message(body: Any = b"x", topic: str = "T", **more: Any) -> Message:
    return Message(topic, body, **more)


def test_messages_go_as_one_batch_whatever_their_tags_are(bulk: Bulk) -> None:
    given = [
        message(b"a", tags="t", keys=["k", "l"], properties={"p": "v", "q": None}),
        message(bytearray(b"b"), flag=7),
        message(memoryview(b"cdc")[::2], tags="u", keys="k"),
    ]
    sent = bulk.producer().send_many(given)
    ((queue, found),) = bulk.sent
    own = [{name: value for name, value in properties.items() if name != "UNIQ_KEY"} for _, properties in found]
    assert [body for body, _ in found] == ["a", "b", "cc"]
    assert own == [{"TAGS": "t", "KEYS": "k l", "p": "v"}, {}, {"TAGS": "u", "KEYS": "k"}]
    assert [(each.queue, each.queue_offset) for each in sent if isinstance(each, SendResult)] == [
        (queue, 100 + i) for i in range(3)
    ]
    assert [each.msg_id for each in sent if isinstance(each, SendResult)] == [p["UNIQ_KEY"] for _, p in found]


def test_each_topic_has_its_batches_and_results_are_in_order(bulk: Bulk) -> None:
    bulk.sender.routes["U"] = tuple(qs("c:0", topic="U"))
    given = [message(str(i).encode(), "TU"[i % 2]) for i in range(9)]
    sent = bulk.producer().send_many(given)
    assert [each.queue.topic for each in sent if isinstance(each, SendResult) and each.queue] == list("TUTUTUTUT")
    assert sorted(bulk.bodies) == [["0", "2", "4", "6", "8"], ["1", "3", "5", "7"]]
    with pytest.raises(RouteNotFound):
        bulk.producer(auto_create_topics=False).send_many([message(), message(topic="missing")])
    assert len(bulk.sender.calls) == 2


def test_a_key_chooses_the_queue(bulk: Bulk) -> None:
    given = [message(str(i).encode(), properties={"user": f"u{i % 5}"}) for i in range(20)]
    sent = bulk.producer().send_many(given, key=lambda each: each.properties["user"])
    for each, outcome in zip(given, sent, strict=True):
        assert isinstance(outcome, SendResult)
        assert outcome.queue == select("hash", qs("a:0-1 b:0-1"), each, each.properties["user"])  # type: ignore[index]
    for _, found in bulk.sent:
        assert [int(body) for body, _ in found] == sorted(int(body) for body, _ in found)
    with pytest.raises(MessageRefused, match=r"message 0: KeyError: b'x'($|\. Mess)"):
        bulk.producer().send_many([message()], key=lambda each: {}[each.body])


@pytest.mark.parametrize("none", [None, ""])
@pytest.mark.parametrize("as_key", [str, int], ids=["texts", "numbers"])
def test_messages_without_a_key_go_to_queues_in_turn(
    bulk: Bulk, as_key: Callable[[int], object], none: str | None
) -> None:
    """A batch of them stays together; those with a key go where they always go, with the key as their sharding key."""
    given = [message(str(i).encode()) for i in range(20)]
    keys = {each.body: none if i % 2 else as_key(i % 3) for i, each in enumerate(given)}
    producer = bulk.producer()
    for _ in range(4):
        sent = producer.send_many(given, key=lambda each: keys[each.body])
        assert all(isinstance(outcome, SendResult) for outcome in sent)
    assert {q for q, found in bulk.sent if [b for b, _ in found] == [str(i) for i in range(1, 20, 2)]} == {
        *qs("a:0-1 b:0-1")
    }
    for queue, found in bulk.sent:
        for body, properties in found:
            key = keys[body.encode()]
            assert properties.get("__SHARDINGKEY") == (None if key == none else str(key))
            if key != none:
                assert queue == select("hash", qs("a:0-1 b:0-1"), None, key)


def test_a_queue_takes_all(bulk: Bulk) -> None:
    sent = bulk.producer().send_many([message(), message()], queue=q("b:1"))
    assert [each.queue for each in sent if isinstance(each, SendResult)] == [q("b:1")] * 2
    with pytest.raises(MessageRefused, match="topic 'T' has no queue 8 on broker 'b'"):
        bulk.producer().send_many([message()], queue=q("b:8"))
    with pytest.raises(MessageRefused, match="message 1: its topic is not that of T/b/1"):
        bulk.producer().send_many([message(), message(topic="U")], queue=q("b:1"))
    with pytest.raises(OptionError, match="a queue and a key"):
        bulk.producer().send_many([message()], queue=q("b:1"), key=str)
    with pytest.raises(MessageRefused, match="over gRPC the Proxy chooses the queue"):
        bulk.producer(features=FEATURES[GRPC]).send_many([message()], queue=q("b:1"))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"body": b""}, "body is empty, which brokers refuse"),
        ({"body": "text"}, "TypeError: the message body is str; expected bytes"),
        ({"body": None}, "TypeError: the message body is NoneType; expected bytes"),
        ({"topic": ""}, "topic is null or empty; expected the name of a topic"),
        ({"topic": "a b"}, "topic 'a b': .*"),
        ({"tags": "a\x01"}, "tags contains the separator 0x01 or 0x02"),
        ({"tags": "\ud800"}, "UnicodeEncodeError: .*"),
        ({"keys": ["a b"]}, "key 'a b' has a blank, and RocketMQ splits keys at blanks"),
        ({"properties": {"TAGS": "x"}}, "a property has a name that is RocketMQ's own, such as TAGS"),
        ({"properties": {"p": ""}}, "property 'p' is empty; .*"),
        (
            {"flag": 2**31},
            "the message's flag is 2147483648; expected a signed 32-bit int|flag takes more than 32 bits",
        ),
        ({"flag": 1.5}, "the message's flag is 1.5; expected a signed 32-bit int"),
        ({"tags": b"a"}, "the message's tags are b'a'; expected a str with one tag, or None"),
        ({"keys": [1]}, ".*keys are .1.; expected a str, or a list of str"),
        ({"properties": {"p": b"v"}}, "property 'p' is b'v'; expected a str"),
        ({"properties": {1: "v"}}, "the name of property 1 is int; expected a str"),
        ({"wait_store_ok": "no"}, "the message's wait_store_ok is 'no'; expected True or False"),
        ({"priority": "1"}, "TypeError: flag and priority are whole numbers"),
        ({"priority": 1}, ".* has a priority, which only gRPC supports|it has no priority.*"),
        ({"wait_store_ok": False}, "its wait_store_ok is False: send it with send"),
    ],
)
def test_a_bad_message_is_named_and_nothing_is_sent(bulk: Bulk, bad: dict[str, Any], why: str) -> None:
    given = [message(), message(**bad)]
    with pytest.raises(MessageRefused, match=rf"nothing of this call was sent: .*message 1: ({why})") as e:
        bulk.producer().send_many(given)
    assert e.value.remedy == "Messages are counted from 0 within the call"
    assert bulk.sender.calls == []


@pytest.mark.parametrize(
    ("bad", "why"), [({"body": b""}, "body is empty"), ({"wait_store_ok": False}, "its wait_store_ok is False")]
)
def test_send_many_checks_a_whole_sequence_before_sending_any(
    bulk: Bulk, monkeypatch: pytest.MonkeyPatch, bad: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(inputs, "PORTION_MESSAGES", 2)
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 1)
    given = [*(message() for _ in range(4)), message(**bad)]
    with pytest.raises(MessageRefused, match=f"nothing of this call was sent: message 4: {why}"):
        bulk.producer().send_many(given)
    assert bulk.sender.calls == []


def test_priorities_are_those_of_all_or_of_none() -> None:
    bad_rows = BadRows()
    batch = message_batch([message(priority=3), message(), message(priority=0)], bad_rows)
    assert batch["priority"].to_pylist() == [3, 0, 0]
    assert bad_rows.reasons_by_row() == [(1, "it has no priority, and others have one: send it with another call")]


def test_an_iterator_is_sent_by_portions(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PORTION_MESSAGES", 2)
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 2)
    taken: list[int] = []

    def messages() -> Iterator[Message]:
        for i in range(5):
            taken.append(len(bulk.sender.calls))
            yield message(b"" if i == 4 else str(i).encode())

    with pytest.raises(MessageRefused, match="nothing of their portion was sent: message 4: body is empty") as e:
        bulk.producer().send_many(messages())
    assert bulk.bodies == [["0", "1"], ["2", "3"]]
    assert taken == [0, 0, 1, 1, 2]
    assert e.value.__notes__ == ["Before that: SentRows(4 rows, 0 of them failed)"]
    assert list(bulk.producer().send_many(iter([]))) == []
    assert [each.status.value for each in bulk.producer().send_many(message() for _ in range(2))] == ["SEND_OK"] * 2  # type: ignore[union-attr]


def test_a_few_messages_at_a_time_become_columns(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "PORTION_MESSAGES", 6)
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 2)
    given = [message(str(i).encode(), tags="t" if i in (8, 9) else None) for i in range(12)]
    sent = bulk.producer().send_many(iter(given))
    assert bulk.bodies == [[*"012345"], [*"67"], [*"89"], ["10", "11"]], "the columns of a portion are the same"
    assert [found[0][1].get("TAGS") for _, found in bulk.sent] == [None, None, "t", None]
    assert [each.queue_offset for each in sent[6:10] if isinstance(each, SendResult)] == [200, 201, 300, 301]
    monkeypatch.setattr(inputs, "PORTION_BYTES", 100)
    bulk.producer().send_many(message(b"x" * 60) for _ in range(6))
    assert [len(bodies) for bodies in bulk.bodies[4:]] == [2, 2, 2]


def test_few_large_messages_are_taken_at_a_time(bulk: Bulk) -> None:
    taken: list[int] = []

    def messages() -> Iterator[Message]:
        body = bytes(1 << 20)
        for _ in range(40):
            taken.append(len(bulk.sender.calls))
            yield message(body)

    assert len(bulk.producer().send_many(messages())) == 40
    assert 8 <= taken.count(0) <= 32


def test_key_keeps_its_queue_while_route_and_columns_change(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 2)

    def messages() -> Iterator[Message]:
        for i in range(20):
            yield message(b"%d" % i, tags="t" if i >= 10 else None)
            if bulk.sender.calls:
                bulk.sender.routes["T"] = tuple(qs("a:0-7 b:0-7"))
                producer._engine.routes.queues("T", Deadline.after(1), refresh=True)

    producer = bulk.producer()
    producer.send_many(messages(), key=lambda each: f"key {int(each.body) % 5}")
    of_key: dict[str, set[Any]] = {}
    for queue, found in bulk.sent:
        for body, _ in found:
            of_key.setdefault(f"key {int(body) % 5}", set()).add(queue)
    assert {key: len(queues) for key, queues in of_key.items()} == {f"key {i}": 1 for i in range(5)}


def test_send_many_sends_nothing_to_a_queue_after_it_failed(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 1)
    given = [message(b"a"), message(b"b", tags="t"), message(b"c", flag=1), message(b"d")]
    bulk.sender.script = [ok, LOST]
    sent = bulk.producer().send_many(iter(given), queue=q("b:1"))
    assert bulk.bodies == [["a"], ["b"]]
    assert sent.failed.tolist() == [1, 2, 3]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02 "), min_size=1, max_size=5)
MESSAGES = st.builds(
    Message,
    st.just("T"),
    st.binary(min_size=1, max_size=9),
    st.none() | TEXT,
    st.lists(TEXT, max_size=2),
    st.none() | st.dictionaries(TEXT.map("u".__add__), TEXT | st.none(), max_size=3),
    st.sampled_from([0, 0, 5, -1]),
)


@given(st.lists(MESSAGES, min_size=1, max_size=8))
def test_they_have_the_properties_of_send(given: list[Message]) -> None:
    from rocketmq_spark.columnar.encode.encoder import Encoder
    from rocketmq_spark.columnar.encode.ids import RecordingIds
    from rocketmq_spark.wire.messages import decode_batch

    batch = message_batch(given, bad_rows := BadRows())
    assert bad_rows.reasons_by_row() == []
    encoder = Encoder({name: name for name in batch.schema.names}, 1 << 20, RecordingIds(bytes(8), lambda: 0))
    (chunk,) = encoder(batch).chunks(1 << 20)
    settings = ProducerSettings(group="g")
    for item, each in zip(decode_batch(chunk.body), given, strict=True):  # type: ignore[arg-type]
        expected = {**decode_properties(prepare(each, "x", settings).properties), "UNIQ_KEY": "", "WAIT": ""}
        assert {**decode_properties(item.properties), "UNIQ_KEY": "", "WAIT": ""} == expected
        assert (bytes(item.body), item.flag) == (each.body, each.flag)


def test_messages_taken_from_iterator_have_outcomes_after_close(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 2)
    producer = bulk.producer()
    taken: list[int] = []

    def messages() -> Iterator[Message]:
        for i in range(99):
            taken.append(i)
            yield message(b"%d" % i, tags="t" if 4 <= i < 8 else None)

    def closes(queue: MessageQueue, request: SendRequest) -> SendResult:
        producer._close_lock.acquire()
        return ok(queue, request)

    bulk.sender.script = [closes]
    sent = producer.send_many(messages())
    producer._close_lock.release()
    assert bulk.bodies == [[*"0123"]]
    assert taken == [*range(6)], "the last of them before it was seen that their columns are others"
    assert sent.failed.tolist() == taken[4:]
    assert {str(each) for each in sent[4:]} == {str(ClosedError("the producer was closed before the row was sent"))}


def test_a_result_says_that_an_iterator_was_not_read_to_its_end(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "CHUNK_MESSAGES", 2)
    monkeypatch.setattr(inputs, "PORTION_MESSAGES", 2)
    producer = bulk.producer()

    def closes(queue: MessageQueue, request: SendRequest) -> SendResult:
        producer._close_lock.acquire()
        return ok(queue, request)

    bulk.sender.script = [closes]
    sent = producer.send_many(message() for _ in range(99))
    producer._close_lock.release()
    assert 2 < len(sent) < 9
    assert sent.failed.tolist() == [*range(2, len(sent))]


def test_a_key_is_hashed_as_by_send(bulk: Bulk) -> None:
    keys: list[Any] = [5, -7, 2**40, True, Long(-7), "k", "5", *range(100, 130)]
    given = [message(b"%d" % i) for i in range(len(keys))]
    sent = bulk.producer().send_many(iter(given), key=lambda each: keys[int(each.body)])
    for each, key, outcome in zip(given, keys, sent, strict=True):
        assert isinstance(outcome, SendResult)
        assert outcome.queue == select("hash", qs("a:0-1 b:0-1"), each, key), key
    groups = {int(body): properties["__SHARDINGKEY"] for _, found in bulk.sent for body, properties in found}
    assert groups == {i: str(key) for i, key in enumerate(keys)}
    for key, why in ((b"k", "a bytes"), (1.5, "a float"), (2**70, str(2**70))):
        with pytest.raises(MessageRefused, match=f"message 1: its key: cannot hash {why}: expected"):
            bulk.producer().send_many(
                [message(), message(b"y")], key=lambda each, of={b"x": "x", b"y": key}: of[each.body]
            )  # type: ignore[misc]


def test_what_others_send_before_may_take_longer_than_the_call(bulk: Bulk) -> None:
    producer = bulk.producer(max_in_flight=1)
    engine, timer = producer._engine, bulk.bench.timers["send"]

    def others(queue: MessageQueue) -> None:
        bulk.sender.script = [None]
        engine.submit(OutgoingSend("T", batch_request(b"", {}, producer.settings, 0), 600.0, queue, ordered=True))
        timer.call_later(500, bulk.sender.answer)

    for queue in (q("b:1"), q("a:0")):  # its own, and another while no more may be out
        others(queue)
        sent = producer.send_many([message(), message()], queue=q("b:1"), timeout_s=1)
        assert sent.failed.tolist() == []
    others(q("a:0"))
    bulk.sender.script = []
    wide = bulk.producer()
    bulk.sender.script = [None]
    with pytest.raises(SendFailed, match=r"1 batches have had no outcome .*bug of rocketmq-spark"):
        wide.send_many([message()], queue=q("b:1"), timeout_s=1)


def test_more_than_a_column_takes_is_refused(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_COLUMN_BYTES", 100)
    with pytest.raises(MessageRefused, match="3 messages have 121 bytes together, but at most 100 can be sent at once"):
        bulk.producer().send_many([message(), *[message(b"x" * 60)] * 2])
    with pytest.raises(MessageRefused, match=r"nothing of this call was sent: message 1: .* 1 messages have 101 bytes"):
        bulk.producer().send_many([message(), message(b"x" * 101)])
    assert bulk.sender.calls == []


def test_messages_behind_a_refused_first_message_were_not_sent() -> None:
    """Nothing of it is stored, and what is behind it may be sent again without a thought."""
    error, ends = MessageIllegal("too large"), OutcomeCollector()
    error.skipped_ids = ("b" * 32,)
    ends.add_rows(np.frombuffer(b"a" * 32 + b"b" * 32, np.uint8).reshape(2, 32))
    ends.add_outcome(np.arange(2), error)
    refused, behind = ends.result()
    assert refused is error
    assert isinstance(behind, SendFailed)
    assert "not sent, because an earlier message of its group was rejected: too large" in behind.message
