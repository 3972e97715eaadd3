"""Columns of the fixed fields, against what Java's decoder found in the same bytes."""

from __future__ import annotations

import pytest

from rocketmq_spark.columnar.decode import properties as props
from rocketmq_spark.columnar.decode import stored_messages
from rocketmq_spark.columnar.decode.rows import ColumnBuilder, offset_message_ids
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, FULL_COLUMNS
from rocketmq_spark.wire.identifiers import host_text
from tests.decode.fetching import QUEUES, one
from tests.harness import unhex, vectors

CASES = vectors("stored_messages")
COLUMNS = {column.name: column for column in (*BASIC_COLUMNS, *FULL_COLUMNS)}


def values(messages, name):
    fetched = one(*messages)
    located = ColumnBuilder(stored_messages.locate(fetched.buffer, fetched.answers), props.PropertyColumns(), QUEUES)
    made = COLUMNS[name].from_rows(located, COLUMNS[name].arrow_type)
    made.validate(full=True)
    assert made.type == COLUMNS[name].arrow_type
    return made.to_pylist()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("queueId", "queue_id"),
        ("queueOffset", "queue_offset"),
        ("flag", "flag"),
        ("reconsumeTimes", "reconsume_times"),
        ("commitLogOffset", "physical_offset"),
        ("storeSize", "store_size"),
        ("offsetMsgId", "offset_msg_id"),
    ],
)
def test_as_java_says(name, field):
    messages = [unhex(case["stored"]) for case in CASES]
    assert values(messages, name) == [case["decoded"][field] for case in CASES]


def test_system_flags_equal_javas_for_decompressed_bodies():
    shown = values([unhex(case["stored"]) for case in CASES], "sysFlag")
    assert shown == [case["decoded"]["sys_flag_after_decode"] for case in CASES]


@pytest.mark.parametrize("kind", ["born", "store"])
def test_hosts(kind):
    expected = [host_text(unhex(case["decoded"][f"{kind}_host"]), case["decoded"][f"{kind}_port"]) for case in CASES]
    assert values([unhex(case["stored"]) for case in CASES], f"{kind}Host") == expected


@pytest.mark.parametrize("kind", ["born", "store"])
def test_times(kind):
    found = values([unhex(case["stored"]) for case in CASES], f"{kind}Timestamp")
    assert [round(time.timestamp() * 1000) for time in found] == [
        case["decoded"][f"{kind}_timestamp"] for case in CASES
    ]


def test_no_messages():
    fetched = one()
    assert offset_message_ids(stored_messages.locate(fetched.buffer, fetched.answers)).to_pylist() == []
    assert values([], "bornHost") == []
