"""What may be given to ``send_arrow``, and what is refused before anything is sent."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from rocketmq_spark.base import extras
from rocketmq_spark.errors import (
    MessageRefused,
    OptionError,
    RouteNotFound,
)
from rocketmq_spark.producer.rows import inputs
from tests.producer.test_bulk import Bulk, bulk, table
from tests.queues import qs

__all__ = ["bulk"]


def test_arrow_types_of_other_tools_are_taken(bulk: Bulk) -> None:
    rows = pa.table(
        {
            "body": pa.array([b"a", b"b"], pa.large_binary()),
            "tags": pa.array(["t", None]).dictionary_encode(),
            "keys": pa.array([["k"], None], pa.large_list(pa.large_string())),
            "properties": pa.array([[("p", "v")], []], pa.map_(pa.string(), pa.large_string())),
            "flag": pa.array([7, None], pa.uint8()),
            "deliverAt": pa.array([None, datetime(2033, 1, 1, tzinfo=UTC)], pa.timestamp("ns", "UTC")),
            "shardingKey": pa.nulls(2),
        }
    )
    bulk.producer().send_arrow(rows, "T")
    found = {body: properties for _, batch in bulk.sent for body, properties in batch}
    assert {name: found["a"].get(name) for name in ("TAGS", "KEYS", "p")} == {"TAGS": "t", "KEYS": "k", "p": "v"}
    assert found["b"]["TIMER_DELIVER_MS"] == str(round(datetime(2033, 1, 1, tzinfo=UTC).timestamp() * 1000))
    assert "__SHARDINGKEY" not in found["a"]


def shared(text: str, count: int) -> pa.Array:
    """Views of the same bytes."""
    _, view, data = pa.array([text], pa.string_view()).buffers()
    return pa.Array.from_buffers(pa.string_view(), count, [None, pa.py_buffer(bytes(view)[:16] * count), data])


@pytest.mark.parametrize(
    "body",
    [
        pa.DictionaryArray.from_arrays(pa.array([0] * 100), pa.array(["x" * 200])),
        pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.uint8()), pa.array([b"x" * 200], pa.binary_view())),
        shared("x" * 200, 100),
        pa.array([*"y" * 900, *["x" * 200] * 100]),
    ],
    ids=["dictionary", "dictionary of views", "views", "large ones together"],
)
def test_a_portion_is_as_large_as_its_rows(bulk: Bulk, monkeypatch: pytest.MonkeyPatch, body: pa.Array) -> None:
    monkeypatch.setattr(inputs, "PORTION_BYTES", 1000)
    assert not len(bulk.producer().send_arrow(pa.record_batch({"body": body}), "T").failed)
    assert max(sum(map(len, bodies)) for bodies in bulk.bodies) <= 2000
    rows = [row for bodies in bulk.bodies for row in bodies]
    assert (len(rows), [row for row in rows if row != "y"]) == (len(body), ["x" * 200] * 100)


def test_a_time_that_no_microseconds_have_is_not_another_one(bulk: Bulk) -> None:
    never = pa.array([2**62], pa.timestamp("s", "UTC"))
    with pytest.raises(MessageRefused, match=r"column 'deliverAt' is timestamp.*out of bounds"):
        bulk.producer().send_arrow(table("a", deliverAt=never), "T")


@pytest.mark.parametrize(
    ("topic", "why"), [("a b", "illegal characters"), ("SCHEDULE_TOPIC_XXXX", "is forbidden"), ("", "is blank")]
)
def test_a_topic_is_checked_as_that_of_a_message(bulk: Bulk, topic: str, why: str) -> None:
    bulk.sender.routes[topic] = tuple(qs("a:0", topic=topic))
    with pytest.raises(MessageRefused, match=why):
        bulk.producer().send_arrow(table("a"), topic)
    assert bulk.sender.calls == []


def test_a_time_that_is_no_number_is_refused(bulk: Bulk) -> None:
    with pytest.raises(OptionError, match="timeout_s is nan; expected a number of seconds"):
        bulk.producer().send_arrow(table("a"), "T", timeout_s=float("nan"))


def test_selectors_are_named_in_any_case(bulk: Bulk) -> None:
    bulk.producer().send_arrow(table("a", "b", shardingKey=["k", "k"]), "T", selector="HASH")
    assert bulk.bodies == [["a", "b"]]
    bulk.producer().send_arrow(table("c"), "T", selector="roundrobin")


def test_whatever_exports_an_arrow_stream_is_read(bulk: Bulk) -> None:
    class Frame:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return table("a", "b").__arrow_c_stream__(requested_schema)

    assert len(bulk.producer().send_arrow(Frame(), "T")) == 2
    assert len(bulk.producer().send_arrow(pa.record_batch({"body": ["a"]}), "T")) == 1
    with pytest.raises(OptionError, match="send_arrow got list; expected a Table"):
        bulk.producer().send_arrow([b"a"], "T")


def test_all_that_is_wrong_is_named_at_once(bulk: Bulk) -> None:
    rows = pa.table({"valeu": ["a"], "tags": [1], "deliverAt": [datetime(2033, 1, 1)], "priority": [1]})
    with pytest.raises(OptionError) as e:
        bulk.producer().send_arrow(rows, selector="machineRoom")
    for problem in (
        "column 'valeu' is unknown",
        "column 'tags' is int64; expected string",
        r"column 'deliverAt' is timestamp\[us\]; expected timestamp",
        "column 'body' \\(or 'value'\\) is missing",
        "neither option 'topic' nor a column 'topic'",
        "'priority' is for messages over gRPC only",
        "selector is 'machineRoom'; expected one of roundRobin, random, hash, column, environment, or a function",
    ):
        e.match(problem)


def test_what_a_producer_cannot_do_is_said(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RouteNotFound):
        bulk.producer(auto_create_topics=False).send_arrow(table("a"), "missing")
    with pytest.raises(OptionError, match="selector 'environment' needs option 'environment'"):
        bulk.producer().send_arrow(table("a"), "T", selector="environment")
    monkeypatch.setattr(extras, "is_installed", lambda module: False)
    with pytest.raises(OptionError, match="send_arrow needs pyarrow, which is not installed"):
        bulk.producer().send_arrow(table("a"), "T")
