"""Messages that are encoded when their batch leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import MAX_PROPERTIES_BYTES, TRANSIENT_PROPERTY_PREFIX
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer import batching, encoding
from rocketmq_spark.producer.batching import encode_plain_properties, plain_template
from rocketmq_spark.producer.encoding import prepare
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender
from tests.producer.bench import Bench
from tests.producer.test_batching import batcher_of, message, sent

SETTINGS = ProducerSettings(group="g")
ENCODER = ScriptedSender.encoder


def test_message_that_is_refused_leaves_no_promise_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer(auto_batch=True)

    def refuse(*args: Any) -> bytes:
        raise MessageRefused("no")

    for place, body in (
        ("encoding.batch_item", bytearray(b"x")),
        ("accumulator.Accumulator.add", bytearray(b"x")),
        ("accumulator.Accumulator.add_plain_message", b"x"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"rocketmq_spark.producer.{place}", refuse)
            with pytest.raises(MessageRefused):
                producer.send_async(Message("T", body))  # type: ignore[arg-type]
    assert producer.flush(0.1)
    producer.send_async(message())
    assert producer.flush(0.1)


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that were prepared one by one."""
    found: list[Message] = []

    def noted(message: Message, *args: Any) -> Any:
        found.append(message)
        return prepare(message, *args)

    monkeypatch.setattr(encoding, "prepare", noted)
    return found


def test_a_plain_message_is_encoded_when_its_batch_leaves(bench: Bench, long_way: list[Message]) -> None:
    producer = bench.producer(auto_batch=True)
    producer.send_async(message("first"))  # asks what kind the topic is
    encoded = []
    bench.sender.encoder.encode_item = lambda *args: (
        encoded.append(args[1]) or ENCODER.__class__.encode_item(ENCODER, *args)
    )  # type: ignore[method-assign,func-returns-value]
    try:
        given = message("a", tags="t", keys=["k"], properties={"p": "v"}, flag=3)
        future = producer.send_async(given)
        given.body, given.tags, given.keys, given.properties = b"changed", "u", ["l"], {}
        waiting = [each for each in encoded if each]
        producer.send_async(message("b", tags="t"))
        bench.time.advance(0.01)
    finally:
        del bench.sender.encoder.encode_item
    assert waiting == []
    (item, _) = decode_batch(bytes(bench.sender.requests[1].body))
    found = decode_properties(item.properties)
    assert {name: found[name] for name in ("TAGS", "KEYS", "p")} == {"TAGS": "t", "KEYS": "k", "p": "v"}
    assert (bytes(item.body), item.flag) == (b"a", 3)
    assert future.result(0).msg_id == found["UNIQ_KEY"]
    assert [each.body for each in long_way] == [b"first"]


@pytest.mark.parametrize(
    "more",
    [
        {"body": b""},
        {"body": b"x" * 101},
        {"body": "text"},
        {"topic": "a b"},
        {"tags": "a\x01"},
        {"tags": "\ud800"},
        {"keys": ["a b"]},
        {"keys": ["a\x02"]},
        {"keys": ["k" * MAX_PROPERTIES_BYTES]},
        {"properties": {"TAGS": "x"}},
        {"properties": {f"{TRANSIENT_PROPERTY_PREFIX}p": "x"}},
        {"properties": {"p": ""}},
        {"properties": {"p": "\x01"}},
        {"priority": 1},
    ],
)
def test_what_is_refused_is_refused_at_once_and_as_ever(bench: Bench, more: dict[str, Any]) -> None:
    producer = bench.producer(auto_batch=True, max_message_size=100)
    producer.send_async(message("first"))
    given = Message(**{"topic": "T", "body": b"x", **more})
    with pytest.raises(MessageRefused) as expected:
        prepare(given, "0" * 32, ProducerSettings(group="g", max_message_size=100))
    with pytest.raises(MessageRefused) as e:
        producer.send_async(given)
    assert str(e.value) == str(expected.value)
    assert producer.flush(1)
    assert sent(bench) == [["first"]]


def test_what_is_not_plain_goes_the_long_way(bench: Bench, long_way: list[Message]) -> None:
    producer = bench.producer(auto_batch=True)
    for each in (message("a"), message("b")):
        producer.send_async(each)
    assert [each.body for each in long_way] == [b"a"]
    bench.sender.batch_topics["T"] = True
    producer._engine.routes.fetch_storage("T", producer._deadline(1))
    for more in ({}, {"delay_level": 1}, {"timeout_s": 1.0}, {"selector": "random"}):
        producer.send_async(message("c"), **more)  # type: ignore[arg-type]
    assert len(long_way) == 5
    assert plain_template("T", None, True, ENCODER) is not None
    assert plain_template("%RETRY%g", None, True, ENCODER) is None
    over_grpc = bench.producer(auto_batch=True, features=FEATURES[GRPC])
    for _ in range(2):
        over_grpc.send_async(message("d"))
    assert len(long_way) == 7


def test_tags_of_any_number_are_remembered_up_to_a_bound(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_MAX_TEMPLATES", 3)
    producer = bench.producer(auto_batch=True)
    for i in range(10):
        producer.send_async(message(str(i), tags=f"t{i}"))
    assert producer._batching is not None
    assert 0 < len(producer._batching._templates) <= 3
    with pytest.raises(MessageRefused, match="tags are"):
        producer.send_async(message("x", tags=["t"]))
    assert producer.flush(1)
    assert len(bench.sender.requests) == 10


def test_bounds_hold_for_plain_messages(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, max_message_size=300, total_batch_max_bytes=500)
    bodies = [f"{i}" * 60 for i in range(5)]
    bench.sender.script = [None]  # so that the bytes of the first batch stay with us
    for body in bodies:
        producer.send_async(message(body))
    assert sent(bench) == [bodies[:2], bodies[4:]], "a third does not fit into a batch, and the fifth exceeds the total"
    assert 500 < batcher_of(producer).accumulator.buffered_bytes < 600
    bench.sender.answer()
    assert producer.flush(1)
    assert sent(bench) == [bodies[:2], bodies[4:], bodies[2:4]]
    assert batcher_of(producer).accumulator.buffered_bytes == 0


def test_errors_at_the_exit_name_the_ids_of_plain_messages(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, retries=0)
    futures = [producer.send_async(message(body)) for body in ("a", "b")]
    bench.sender.by_broker = dict.fromkeys("ab", lambda: MessageRefused("no"))
    assert len(producer.at_exit(Deadline.after(1))) == 2
    assert all(isinstance(each.exception(0), MessageRefused) for each in futures)


TEXT = st.text(st.characters(exclude_characters="\x01\x02"), max_size=5)
WORDS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02 "), min_size=1), max_size=3
)


@given(
    st.none() | TEXT,
    WORDS,
    st.none() | st.dictionaries(TEXT, TEXT | st.none(), max_size=3),
    st.integers(-9, 9),
    st.booleans(),
)
def test_a_plain_message_has_the_properties_and_the_size_of_any(tags, keys, own, flag, waits):  # type: ignore[no-untyped-def]
    given_message = Message("T", b"body", tags, keys, own, flag, waits)
    try:
        expected = prepare(given_message, "I" * 32, SETTINGS).properties
    except MessageRefused:
        expected = None
    kind = plain_template("T", tags, waits, ENCODER)
    found = None if kind is None else encode_plain_properties(given_message, kind)
    if found is None:
        assert expected is None or None in (own or {}).values() or max(expected) >= "\ud800"
        return
    assert expected is not None
    assert kind is not None
    batch = batching.MessageBatch(
        kind.key,
        None,
        0,
        0,
        [SimpleNamespace(body=b"body", properties_text=found[0], flag=flag)],
        has_plain_messages=True,
    )  # type: ignore[list-item]
    batching.encode_batch_messages(batch, lambda count: ["I" * 32] * count, ENCODER, 0)
    (encoded,) = batch.items()
    (item,) = decode_batch(encoded)  # type: ignore[arg-type]
    assert decode_properties(item.properties) == decode_properties(expected)
    assert len(encoded) == kind.empty_item_bytes + found[1] + len(b"body")


@pytest.mark.parametrize("tag", [None, "t", "ü"])
def test_properties_may_be_as_long_as_those_of_any_message(tag: str | None) -> None:
    kind = plain_template("T", tag, True, ENCODER)
    assert kind is not None
    longest = kind.free_properties_bytes - len("KEYS\x01\x02")
    assert encode_plain_properties(message(tags=tag, keys=["k" * longest]), kind) is not None
    prepare(message(tags=tag, keys=["k" * longest]), "I" * 32, SETTINGS)
    assert encode_plain_properties(message(tags=tag, keys=["k" * (longest + 1)]), kind) is None
    with pytest.raises(MessageRefused, match="exceed"):
        prepare(message(tags=tag, keys=["k" * (longest + 1)]), "I" * 32, SETTINGS)
    assert plain_template("T", "t" * MAX_PROPERTIES_BYTES, True, ENCODER) is None
