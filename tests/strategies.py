"""Hypothesis strategies for what goes over the wire."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import BatchItem
from rocketmq_spark.wire.rpc import RequestRow

int16 = st.integers(-(1 << 15), (1 << 15) - 1)
int32 = st.integers(-(1 << 31), (1 << 31) - 1)
int64 = st.integers(-(1 << 63), (1 << 63) - 1)

# Anything that UTF-8 can carry.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
filled_texts = texts.filter(bool)

# Names a broker accepts.
names = st.from_regex(r"[%|a-zA-Z0-9_-]{1,40}", fullmatch=True)
queues = st.builds(MessageQueue, names, names, st.integers(0, 1023))

# Parts of properties: no separators, not empty.
property_parts = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=20
)
properties = st.dictionaries(property_parts, property_parts, max_size=8)

commands = st.builds(
    Command,
    code=int16,
    ext=st.dictionaries(filled_texts, filled_texts, max_size=8),
    body=st.binary(max_size=100),
    opaque=int32,
    flag=int32,
    remark=st.none() | filled_texts,
    language=st.integers(0, 13),
    version=int16,
)


@st.composite
def batch_items(draw: st.DrawFn) -> BatchItem:
    pairs = draw(properties)
    text = "".join(f"{name}\x01{value}\x02" for name, value in pairs.items())
    return BatchItem(draw(st.binary(max_size=100)), text, draw(int32))


def arguments(row: RequestRow, answer: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Keyword arguments that a row of ``rpc`` accepts: all required fields, some of the others."""
    kinds: dict[str, st.SearchStrategy[Any]] = {"int": int64, "bool": st.booleans(), "str": filled_texts}
    fields = row.answer_fields if answer else row.fields
    return st.fixed_dictionaries(
        {name: kinds[field.kind] for name, field in fields.items() if field.is_required},
        optional={name: kinds[field.kind] for name, field in fields.items() if not field.is_required},
    )
