"""Whatever an envelope has in it ends neither a node nor a query, and holds up no other message."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import session
from rocketmq_spark.base import codes
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.delay import envelope_records, release
from rocketmq_spark.delay.release import DEAD_TOPIC, PROBLEM_PROPERTY, SINK_SCHEMA, SinkRow, sink_row
from rocketmq_spark.delay.stream import _COLUMNS, _WaitingEnvelopes
from rocketmq_spark.errors import CallTimeout, MessageRefused, OptionError, RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.options import Options
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spark.sink.row_checks import SinkChecks
from rocketmq_spark.wire.envelope import INNER_TOPIC, QUEUE, Envelope
from rocketmq_spark.wire.properties import decode_properties
from tests.delay.nodes import QUEUES, World
from tests.helpers import raising

INNER = QUEUES[0]
RULES = envelope_records.DeliveryRules(ProducerSettings(group="g"), DEAD_TOPIC)
SEND = envelope_records.send_decoder(RULES)
NAMES = st.sampled_from(
    [*sorted(codes.RESERVED_PROPERTIES), QUEUE, codes.ROW_ID, codes.TRANSIENT_PROPERTY_PREFIX + "x", "a", "é", ""]
)
VALUES = st.one_of(
    st.text(max_size=5), st.sampled_from(["b:1", "x" * 300 + ":1", "x" * 32_000, "b" * 70_000 + ":1", "é" * 20_000])
)
PROPERTIES = st.lists(st.tuples(NAMES, VALUES), max_size=4).map(
    lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs)
)


def pack(properties: str = "", body: bytes = b"x", topic: str = "orders", due_ms: int = 5) -> bytes:
    head = Envelope(topic, due_ms, "ID", 1, 0, "", b"").pack()
    text = properties.encode("utf-8", "replace")[:65_000]
    try:
        return Envelope(topic, due_ms, "ID", 1, 0, text.decode("utf-8", "ignore"), body).pack()
    except struct.error:  # more than an envelope has room for
        return head + body


def rows(found: list[SinkRow]) -> pa.RecordBatch:
    kinds = {
        "binary": pa.binary(),
        "string": pa.string(),
        "int": pa.int32(),
        "map<string,string>": pa.map_(pa.string(), pa.string()),
    }
    fields = [part.split() for part in SINK_SCHEMA.split(", ")]
    columns = [
        pa.array([list(one[i].items()) if name == "properties" else one[i] for one in found], kinds[kind])
        for i, (name, kind) in enumerate(fields)
    ]
    return pa.RecordBatch.from_arrays(columns, names=[name for name, _ in fields])


def encoder() -> Encoder:
    names = (part.split()[0] for part in SINK_SCHEMA.split(", "))
    return Encoder({name.lower(): name for name in names} | {"messageid": "msgId"},
                   4 << 20, UniqueIds(b"12345678", lambda: 1))  # fmt: skip


@given(
    PROPERTIES,
    st.sampled_from([b"x", b"", b"x" * (5 << 20)]),
    st.sampled_from(["orders", "t" * 127, "a b", "%RETRY%g"]),
)
def test_any_content_can_be_stored_sent_and_written_by_the_sink(properties: str, body: bytes, topic: str) -> None:
    data = pack(properties, body, topic)
    found = envelope_records.effect_of(RULES, INNER, 7, data, 1)
    assert found.record is not None
    assert found.record.encode()
    send = SEND(found.record)
    assert len(send.request.properties.encode()) <= codes.SINGLE_MAX_PROPERTIES_BYTES
    row = sink_row(data)
    assert len(row.body) <= codes.MAX_BODY_BYTES
    assert encoder()(rows([row, sink_row(pack())]))


@pytest.mark.parametrize("size", [255, 256, 65_000])
def test_a_longer_name_than_brokers_have_is_no_queue(size: int) -> None:
    found = envelope_records.effect_of(RULES, INNER, 7, pack(f"{QUEUE}\x01{'b' * size}:1\x02"), 1)
    assert found.record is not None
    assert found.record.target == (f"broker {'b' * 255}" if size == 255 else "topic orders")


def test_an_error_of_any_kind_in_an_envelope_makes_a_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

    monkeypatch.setattr(release, "original", broken)
    found = envelope_records.effect_of(RULES, INNER, 7, pack(), 1)
    assert found.record is not None
    assert (found.due_ms, SEND(found.record).topic) == (0, DEAD_TOPIC)
    assert "surrogates" in decode_properties(SEND(found.record).request.properties)[PROBLEM_PROPERTY]
    assert sink_row(pack()).topic == DEAD_TOPIC


def test_dead_letter_cuts_body_beyond_message_size_limit() -> None:
    data = pack(body=b"x" * (5 << 20))
    row = sink_row(data)
    assert (row.topic, row.body) == (DEAD_TOPIC, data[: 4 << 20])
    assert "its first 4194304 bytes" in row.properties[PROBLEM_PROPERTY]
    larger = envelope_records.send_decoder(
        envelope_records.DeliveryRules(ProducerSettings(group="g", max_message_size=6 << 20), DEAD_TOPIC)
    )
    found = envelope_records.effect_of(RULES, INNER, 7, data, 1)
    assert found.record is not None
    assert larger(found.record).topic == "orders"


def test_the_sinks_own_properties_are_not_taken_from_an_envelope() -> None:
    text = f"UNIQ_KEY\x01A\x02{codes.ROW_ID}\x01z\x02{codes.TRANSIENT_PROPERTY_PREFIX}x\x01y\x02a\x01b\x02"
    assert (sink_row(pack(text)).properties, sink_row(pack(text)).msg_id) == ({"a": "b"}, "A")
    found = envelope_records.effect_of(RULES, INNER, 7, pack(text), 1)
    assert found.record is not None  # a user's property where no sink adds its own
    assert decode_properties(SEND(found.record).request.properties)[codes.ROW_ID] == "z"


def test_there_is_room_for_the_properties_that_the_sink_adds() -> None:
    text = f"UNIQ_KEY\x01A\x02a\x01{'b' * (codes.SINGLE_MAX_PROPERTIES_BYTES - 20)}\x02"
    row = sink_row(pack(text))
    assert row.topic == DEAD_TOPIC
    assert encoder()(rows([row]))
    found = envelope_records.effect_of(RULES, INNER, 7, pack(text), 1)
    assert found.record is not None
    assert SEND(found.record).topic == "orders"


def test_a_node_runs_on_after_an_error_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node, over, calls = world.node("a"), threading.Event(), []
    monkeypatch.setattr("rocketmq_spark.delay.service.PAUSE_S", 0.0)
    monkeypatch.setattr("rocketmq_spark.delay.service.RETRY_S", 0.0)

    def turn() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("of a single message")
        over.set()

    monkeypatch.setattr(node.service, "_run_turn", turn)
    node.service.run(over)  # type: ignore[arg-type]
    assert len(calls) == 2


class Queues:
    """A sender that knows topic ``orders``."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def publish_queues(self, topic: str, *args: object) -> list[MessageQueue]:
        self.asked.append(topic)
        if topic == "slow":
            raise CallTimeout("no answer", "b:1")
        if topic != "orders":
            raise RouteNotFound("there is no such topic", "n:1", codes.Response.TOPIC_NOT_EXIST, topic)
        return [MessageQueue(topic, "b", 0)]

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        return error


def test_message_to_missing_topic_becomes_dead_letter() -> None:
    queues = Queues()
    known = SinkChecks({"nameServer": "n:1"}, _COLUMNS, lambda options: queues)  # type: ignore[arg-type, return-value]
    for _ in range(2):
        assert sink_row(pack(), refusal=known.refusal).topic == "orders"
        gone = sink_row(pack(topic="gone"), refusal=known.refusal)
        assert gone.topic == DEAD_TOPIC
        assert "no message can go to topic gone" in gone.properties[PROBLEM_PROPERTY]
    assert queues.asked.count("orders") == 1
    with pytest.raises(CallTimeout):
        sink_row(pack(topic="slow"), refusal=known.refusal)


COMPACTED, FIFO = "latest", "grouped"


class AllTopics:
    """A sender that knows all topics; one is a compaction topic."""

    def publish_queues(self, topic: str, *args: object) -> list[MessageQueue]:
        return [MessageQueue(topic, "b", 0)]

    def batch_storage(self, topic: str, deadline: object) -> BatchStorage:
        return BatchStorage(is_compacted=topic == COMPACTED, needs_group=topic == FIFO)


def given_out(bodies: list[bytes], options: dict[str, object]) -> list[SinkRow]:
    checks = SinkChecks(options, _COLUMNS, lambda parsed: AllTopics())  # type: ignore[arg-type, return-value]
    return [SinkRow(*row) for row in _WaitingEnvelopes(DEAD_TOPIC)._checked_rows(iter(bodies), checks)]


def alone_is_dead(found: list[SinkRow], place: int, why: str) -> None:
    assert [row.topic == DEAD_TOPIC for row in found] == [number == place for number in range(len(found))]
    assert why in found[place].properties[PROBLEM_PROPERTY]


REMOTING: dict[str, object] = {"nameServer": "n:1"}
GRPC: dict[str, object] = {"transport": "grpc", "proxyEndpoint": "p:8081"}
ID = "UNIQ_KEY\x01A\x02"


@pytest.mark.parametrize(
    ("options", "bad", "why"),
    [
        (REMOTING, pack(topic=COMPACTED), "no key, but 'latest' is a compaction topic"),
        ({**REMOTING, "autoBatch": "false"}, pack(topic=COMPACTED), "no key, but 'latest' is a compaction topic"),
        ({**REMOTING, "allowedTopics": "orders"}, pack(topic="bills"), "is not in option 'allowedTopics'"),
        (GRPC, Envelope("orders", 5, "ID", 1, 1, ID, b"x").pack(), "its flag is 1, which gRPC cannot transport"),
        (GRPC, pack(f"{ID}TAGS\x01a|b\x02"), "TAGS has a '|'"),
        (GRPC, pack(f"{ID}a\x01\x07\x02"), "has a control character"),
        (GRPC, pack(f"{ID}a\x07\x01b\x02"), "has a control character"),
        (GRPC, pack(topic=FIFO), "accepts only messages with a shardingKey"),
        (GRPC, pack(f"{ID}__SHARDINGKEY\x01b\x02"), "topic orders takes no FIFO messages"),
    ],
)
def test_what_the_sink_refuses_is_a_dead_letter_and_stops_nobody(
    options: dict[str, object], bad: bytes, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checks decide, row by row: one error of the sink would end the query, again after each restart."""

    def types(options: Options, topic: str, deadline: object) -> set[str] | None:
        return {FIFO: {"FIFO"}}.get(topic, {"NORMAL"}) if options.proxy_endpoint else None

    monkeypatch.setattr(session, "message_types", types)
    good = [pack(f"UNIQ_KEY\x01{number}\x02KEYS\x01k\x02") for number in range(300)]
    found = given_out([*good[:7], bad, *good[7:]], options)
    alone_is_dead(found, 7, why)
    assert all(c.isprintable() for c in found[7].properties[PROBLEM_PROPERTY])


@pytest.mark.parametrize("error", [OptionError("no"), ValueError("no"), OverflowError("no"), MessageRefused("no")])
def test_an_error_of_the_sink_that_names_no_row_is_found(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: SinkChecks, rows: list[SinkRow], bad_rows: object) -> None:
        if any(row.body == b"bad" for row in rows):
            raise error

    monkeypatch.setattr(SinkChecks, "_check_rows", look)
    good = [pack(f"UNIQ_KEY\x01{number}\x02") for number in range(9)]
    alone_is_dead(given_out([*good[:4], pack(body=b"bad"), *good[4:]], REMOTING), 4, "no")


def test_an_error_that_may_pass_makes_no_dead_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SinkChecks, "_check_rows", raising(CallTimeout("no answer", "b:1")))
    with pytest.raises(CallTimeout):
        given_out([pack()], REMOTING)


@pytest.mark.parametrize("topic", [INNER_TOPIC, f"space%{INNER_TOPIC}", f"{INNER_TOPIC}_dev"])
def test_an_envelope_within_another_is_not_delivered(topic: str) -> None:
    """Thousands within each other are one message, and would be written again at each level."""
    data = pack(topic=topic, body=pack())
    assert sink_row(data).topic == DEAD_TOPIC
    found = envelope_records.effect_of(RULES, INNER, 7, data, 1)
    assert (found.due_ms, found.record is not None and SEND(found.record).topic) == (0, DEAD_TOPIC)


def test_an_unknown_option_of_the_sink_is_an_error() -> None:
    with pytest.raises(OptionError, match="nameServe"):
        SinkChecks({"nameServe": "n:1"}, _COLUMNS)
