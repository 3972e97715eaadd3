"""The envelope of delayed messages: its bytes are a promise to services that were started before the next version."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.wire.envelope import Envelope, unpack

ORDER = Envelope("orders", 1_800_000_000_000, 1_700_000_000_000, 7, "UNIQ_KEY\x01ID\x02TAGS\x01a\x02", b"body")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)
ENVELOPES = st.builds(
    Envelope, TEXT.filter(bool), NUMBER, NUMBER, st.integers(-(1 << 31), (1 << 31) - 1), TEXT, st.binary()
)


def test_3_30_its_bytes() -> None:
    assert ORDER.pack().hex(" ") == (
        "52 44 4d 51 01 00 00 01 a3 18 5c 50 00 00 00 01 8b cf e5 68 00 00 00 00 07 00 06 00 00 00 13 "
        "6f 72 64 65 72 73 55 4e 49 51 5f 4b 45 59 01 49 44 02 54 41 47 53 01 61 02 62 6f 64 79"
    )


@given(ENVELOPES)
def test_3_30_everything_is_carried(envelope: Envelope) -> None:
    assert unpack(envelope.pack()) == envelope


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that begin with '' are no envelope"),
        (b"hello world", "begin with '68 65 6c 6c' are no envelope"),
        (b"HELLO" + ORDER.pack()[5:], "are no envelope"),
        (ORDER.pack()[:4] + b"\2" + ORDER.pack()[5:], "has version 2; expected 1"),
        (ORDER.pack()[:30], "are no envelope"),
        (ORDER.pack()[:50], "has 50 bytes, a topic of 6 and properties of 19"),
        (ORDER.pack().replace(b"orders", b"order\xff"), "a name that is no text"),
        (Envelope("", 1, 1, 0, "", b"x").pack(), "a topic of 0"),
    ],
    ids=["empty", "short", "magic", "version", "head", "cut", "text", "topic"],
)
def test_3_i_what_is_no_envelope_is_told(data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        unpack(data)


@given(st.binary(max_size=60), st.integers(0, 60))
def test_3_i_any_bytes_are_an_envelope_or_told(noise: bytes, kept: int) -> None:
    for data in (noise, ORDER.pack()[:kept] + noise):
        try:
            again = unpack(data).pack()
        except DecodeError:
            continue
        assert again == data
