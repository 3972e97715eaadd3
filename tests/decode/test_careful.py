"""The careful path against the messages themselves; that the fast path agrees is in test_decode.py."""

from __future__ import annotations

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import rows as careful
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, FULL_COLUMNS, Column, arrow_schema
from rocketmq_spark.model import Filter
from rocketmq_spark.wire.messages import BatchItem, decode_messages, encode_batch
from tests.decode.fetching import QUEUES, Answer, fetch, one, stored, text
from tests.harness import unhex, vectors

CASES = vectors("stored_messages")


def test_all_columns():
    columns = (*BASIC_COLUMNS, *FULL_COLUMNS)
    data = [unhex(case["stored"]) for case in CASES]
    found = careful.decode(fetch(Answer(data, start=0)), QUEUES, columns, "all")
    assert found.schema.equals(arrow_schema(columns))
    messages = [decode_messages(one)[0] for one in data]
    for row, message in zip(found.to_pylist(), messages, strict=True):
        assert (row["body"], row["msgId"], row["flag"]) == (message.body, message.msg_id, message.flag)
        assert (row["bornHost"], row["storeHost"]) == (message.born_host, message.store_host)
        assert dict(row["properties"]) == message.properties


def test_tag_filter_applies_to_messages_of_inner_batches():
    items = [BatchItem(b"%d" % i, text(TAGS="ab"[i % 2]).decode()) for i in range(4)]
    outer = stored(encode_batch(items), sys_flag=SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    found = careful.decode(one(outer), QUEUES, BASIC_COLUMNS, "none", Filter("b || c", "TAG"))
    assert found.column("body").to_pylist() == [b"1", b"3"]


def test_property_columns():
    columns = (Column("n", "bigint", arrow_schema(BASIC_COLUMNS).field("queueOffset").type, "n"),)
    found = careful.decode(one(stored(properties=text(n="7")), stored(properties=text(n="x"))), QUEUES, columns, "none")
    assert found.to_pylist() == [{"n": 7}, {"n": None}]
