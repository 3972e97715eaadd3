"""Texts that are not UTF-8 in rows: Spark does not check ``cast(binary as string)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import session
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.wire.messages import decode_batch
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.live.writes import sink_options

GOOD = pa.array(["a", "b", "c"])
BAD = pa.array([b"a", b"\xff\xfe", b"T"], pa.binary()).view(pa.string())
EACH = pa.array(range(4), pa.int32())
LISTS = pa.ListArray.from_arrays(EACH, BAD)
VALUES, NAMES = pa.MapArray.from_arrays(EACH, GOOD, BAD), pa.MapArray.from_arrays(EACH, BAD, GOOD)
NO_BODIES = pa.array(["", None, ""])


def headers(names: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(EACH, pa.StructArray.from_arrays([names, GOOD.cast(pa.binary())], ["key", "value"]))


def first(queues: Sequence[MessageQueue], message: Message, key: object) -> MessageQueue:
    return queues[0]


def write(monkeypatch: pytest.MonkeyPatch, columns: Mapping[str, pa.Array], given: Mapping[str, object]) -> bytes:
    """The bytes of what a task sends."""
    sender = ScriptedSender(Time())
    sender.routes["a"] = sender.routes["T"]
    monkeypatch.setattr(session, "sender", lambda options: sender)
    batch = pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])
    options = sink_options("x:1", **({} if "topic" in columns else {"topic": "T"}), **given)
    names = checks.check_sink(options, from_arrow_schema(batch.schema))
    TaskWriter(options, names).write(iter([batch.slice(0, 1), batch.slice(1)]))
    return b"".join(bytes(request.body) for request in sender.requests)


@pytest.mark.parametrize(
    ("columns", "given", "reason"),
    [
        ({"topic": BAD}, {}, r"topic is not UTF-8: b'\xff\xfe'"),
        ({"topic": BAD}, {"topicNames": "dotsToUnderscores"}, r"topic is not UTF-8: b'\xff\xfe'"),
        ({"shardingKey": BAD}, {}, r"shardingKey is not UTF-8: b'\xff\xfe'"),
        ({"queueId": pa.array([0] * 3, pa.int32()), "brokerName": BAD}, {}, r"brokerName is not UTF-8: b'\xff\xfe'"),
        ({"id": BAD}, {"messageId": "id"}, "id is not UTF-8, and readers could not tell it from other ids"),
        *(
            ({name: column}, {"queueSelector": f"{__name__}:first"}, f"{name} is not UTF-8, and the queue selector is a f")
            for name, column in [
                ("tags", BAD), ("keys", BAD), ("keys", LISTS), ("properties", VALUES), ("properties", NAMES),
            ]
        ),
    ],
)  # fmt: skip
def test_a_bad_text_is_an_error_of_its_row(monkeypatch, columns, given, reason):
    if "brokerName" in columns:  # the other rows are right
        columns = {**columns, "brokerName": pa.array([b"a", b"\xff\xfe", b"b"], pa.binary()).view(pa.string())}
    with pytest.raises(MessageRefused) as caught:
        write(monkeypatch, {"body": GOOD, **columns}, given)
    assert caught.value.message.startswith("1 rows cannot be sent, and nothing of their Arrow batch was sent: row 1: ")
    assert reason in caught.value.message


KEYS = pa.array([b"a", b"\xff", b"", b"k"], pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    ("columns", "stored"),
    [
        ({"tags": BAD}, b"TAGS\x01\xff\xfe\x02"),
        ({"keys": BAD}, b"KEYS\x01\xff\xfe\x02"),
        ({"keys": LISTS}, b"KEYS\x01\xff\xfe\x02"),
        ({"keys": pa.ListArray.from_arrays(pa.array([0, 1, 4, 4], pa.int32()), KEYS)}, b"KEYS\x01\xff k\x02"),
        ({"properties": VALUES}, b"b\x01\xff\xfe\x02"),
        ({"properties": NAMES}, b"\xff\xfe\x01b\x02"),
    ],
)
@pytest.mark.parametrize("bodies", [GOOD, NO_BODIES])
def test_a_text_that_chooses_nothing_is_stored_as_it_is(monkeypatch, columns, stored, bodies):
    sent = write(monkeypatch, {"body": bodies, **columns}, {"emptyBodies": "mark"})
    assert len(decode_batch(sent)) == 3
    assert stored in sent
    assert sent.count(b"deleted\x01") == (3 if bodies is NO_BODIES else 0)


@pytest.mark.parametrize("bodies", [GOOD, NO_BODIES, BAD])
def test_a_header_with_a_bad_name_is_left_out(monkeypatch, caplog, bodies):
    given = {"kafkaColumns": True, "emptyBodies": "mark"}
    with caplog.at_level("INFO"):
        sent = write(monkeypatch, {"value": bodies, "key": BAD, "headers": headers(BAD)}, given)
    assert len(decode_batch(sent)) == 3
    assert all(header in sent for header in (b"a\x01a\x02", b"T\x01c\x02"))
    assert b"\x01b\x02" not in sent
    assert b"__SHARDINGKEY\x01base64://4=\x02" in sent
    assert "leaves out headers that cannot be stored; the first one is '\ufffd\ufffd'" in caplog.text
