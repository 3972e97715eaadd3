"""Every row of the table of columns: both of its ways, on the same messages, alone."""

from __future__ import annotations

import pyarrow as pa
import pytest

from rocketmq_spark.columnar.decode import properties as props
from rocketmq_spark.columnar.decode import rows, stored_messages
from rocketmq_spark.columnar.decode.rows import ColumnBuilder
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, DECODE_ERROR, FULL_COLUMNS
from rocketmq_spark.wire.messages import decode_messages
from tests.decode.fetching import QUEUES, Answer, fetch, stored, text

ALL = (*BASIC_COLUMNS, *FULL_COLUMNS, DECODE_ERROR)
MESSAGES = [
    stored(b"one", text(TAGS="a", KEYS="k1 k2", UNIQ_KEY="7F", n="1"), queue_offset=5, log_offset=9, flag=3),
    stored(b"two", b"", queue_offset=6, sys_flag=4, born_ms=-(1 << 63), born=(bytes(range(16)), 1)),
]


@pytest.mark.parametrize("include", ["none", "user", "all"])
@pytest.mark.parametrize("column", ALL, ids=lambda column: column.name)
def test_both_ways_give_the_same(column, include):
    fetched = fetch(Answer(MESSAGES[:1], 0), Answer(MESSAGES[1:], 2))
    found = stored_messages.locate(fetched.buffer, fetched.answers)
    made = props.PropertyColumns()
    if found:
        pairs = props.locate(found.buffer, found.properties_start, found.properties_end)
        made = props.build_columns(pairs, props.PropertySelection(properties=include))
    pairs_of_objects = zip((QUEUES[0], QUEUES[2]), map(one_message, MESSAGES), strict=True)
    wanted = pa.array([column.from_message(queue, m, include) for queue, m in pairs_of_objects], column.arrow_type)
    if column.from_rows is None:
        assert column.name == "body"
        return
    assert column.from_rows(ColumnBuilder(found, made, QUEUES), column.arrow_type).to_pylist() == wanted.to_pylist()


def one_message(data):
    (message,) = decode_messages(data)
    return message


def test_queue_column_is_constant_where_all_queues_agree(monkeypatch):
    fetched = fetch(Answer(MESSAGES, 0))
    located = ColumnBuilder(
        stored_messages.locate(fetched.buffer, fetched.answers), props.PropertyColumns(), QUEUES[:2]
    )
    monkeypatch.setattr(rows.arrow, "integers", lambda *a: pytest.fail("looked at rows"))
    assert located.queue_text("topic").to_pylist() == ["t", "t"]
