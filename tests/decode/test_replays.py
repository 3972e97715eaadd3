"""What a message reads as is its own: not its neighbours', not that of the limits of its batch."""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, FULL_COLUMNS, BadMessages, Column
from rocketmq_spark.pull.fetched import FetchedAnswers
from tests.decode.fetching import QUEUES, Answer, Style, clean_properties, fetch, messages, odd_properties, stored
from tests.scale import examples

# Room for the messages of an inner batch.
STEP = 10
PROPERTY_TYPES = {"int": pa.int32(), "double": pa.float64(), "boolean": pa.bool_()}
COLUMNS = (
    *BASIC_COLUMNS,
    *FULL_COLUMNS,
    *(Column(f"p{kind}", kind, arrow, "region") for kind, arrow in PROPERTY_TYPES.items()),
)


@st.composite
def logs(draw: st.DrawFn) -> list[bytes]:
    """Messages of one queue, one after the other: plain, compressed, garbled, batches."""
    properties = draw(st.sampled_from([clean_properties([b"TAGS", b"region"]), odd_properties()])) | st.sampled_from(
        [b"region\x017\x02", b"region\x010x7\x02", b"region\x01true\x02", b"region\x01", b""]
    )
    style = Style(properties, plain=draw(st.booleans()), inner=draw(st.booleans()), beyond=0)
    bad = st.sampled_from([0, SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD])
    made = []
    for i in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 9)) == 0:
            flags = int(SysFlag.COMPRESSED | draw(bad))
            made.append(stored(b"garbled", draw(properties), queue_offset=i * STEP, sys_flag=flags))
        else:
            made.append(draw(messages(i * STEP, style)))
    return made


def answer(log: list[bytes], start: int, end: int) -> Answer:
    return Answer(log[start:end], 0, start * STEP, end * STEP, end * STEP)


def read(fetched: FetchedAnswers, portion_bytes: int | None) -> list[dict[str, Any]]:
    decoder = Decoder(QUEUES, COLUMNS, "all", bad_messages=BadMessages("null"))
    found = [row for batch in decoder.batches(fetched, portion_bytes) for row in batch.to_pylist()]
    for row in found:
        if row["properties"] is not None:
            row["properties"] = sorted(row["properties"])
    return found


@given(logs(), st.data())
@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])
def test_message_reads_alike_alone_among_others_and_in_replay(log, data):
    alone = [row for i in range(len(log)) for row in read(fetch(answer(log, i, i + 1)), None)]
    assert read(fetch(answer(log, 0, len(log))), None) == alone
    cuts = sorted(data.draw(st.sets(st.integers(1, len(log)), max_size=4), label="answers end at") | {0, len(log)})
    answers = [answer(log, a, b) for a, b in itertools.pairwise(cuts)]
    portion = data.draw(st.integers(1, 2000) | st.none(), label="bytes of a portion")
    first = data.draw(st.integers(1, len(answers)), label="answers in the first buffer")
    replayed = read(fetch(*answers[:first]), portion)
    replayed += read(fetch(*answers[first:]), portion) if answers[first:] else []
    assert replayed == alone
