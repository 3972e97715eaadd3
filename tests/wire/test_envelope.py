"""The envelope of delayed messages: its bytes are a promise to services that were started before the next version."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import DecodeError, LocalProtocolError
from rocketmq_spark.wire.envelope import (
    CANCEL,
    DIGEST_AT,
    DIGEST_END,
    DUE_AT,
    KIND_AT,
    MESSAGE,
    DelayHandle,
    Envelope,
    cancel_envelope,
    digest,
    unpack,
)
from rocketmq_spark.wire.identifiers import RecallHandle

ORDER = Envelope("orders", 1_800_000_000_000, "ID", 1_700_000_000_000, 7, "UNIQ_KEY\x01ID\x02TAGS\x01a\x02", b"body")
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBER = st.integers(-(1 << 63), (1 << 63) - 1)
ENVELOPES = st.builds(
    Envelope,
    TEXT.filter(bool),
    NUMBER,
    TEXT,
    NUMBER,
    st.integers(-(1 << 31), (1 << 31) - 1),
    TEXT,
    st.binary(),
    st.sampled_from((MESSAGE, CANCEL)),
)


def test_its_bytes() -> None:
    assert ORDER.pack().hex(" ") == (
        "52 44 4d 51 01 00 00 00 01 a3 18 5c 50 00 21 fa bf ee 18 5b 3b f6 f7 83 f1 08 ae 1d c3 3e "
        "00 00 01 8b cf e5 68 00 00 00 00 07 00 06 00 00 00 13 "
        "6f 72 64 65 72 73 55 4e 49 51 5f 4b 45 59 01 49 44 02 54 41 47 53 01 61 02 62 6f 64 79"
    )


@given(ENVELOPES)
def test_everything_is_carried(envelope: Envelope) -> None:
    data = envelope.pack()
    found = unpack(data)
    for name in set(found._fields) & set(envelope._fields):
        assert getattr(found, name) == getattr(envelope, name)
    assert found.identity == data[DUE_AT:DIGEST_END]
    assert (data[KIND_AT], data[DIGEST_AT:DIGEST_END]) == (envelope.kind, digest(envelope.msg_id.encode()))


def test_resent_envelope_has_the_same_identity_and_others_differ() -> None:
    def identity(**changed: object) -> bytes:
        return unpack(ORDER._replace(**changed).pack()).identity  # type: ignore[arg-type]

    assert identity(born_ms=5, body=b"x") == identity()
    assert len({identity(), identity(due_ms=1), identity(msg_id="ID2")}) == 3


def test_what_takes_a_message_back_names_it() -> None:
    cancel = unpack(cancel_envelope("orders", ORDER.due_ms, "ID", 5))
    assert (cancel.kind, cancel.identity, cancel.topic) == (CANCEL, unpack(ORDER.pack()).identity, "orders")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "0 bytes that begin with '' are no envelope"),
        (b"hello world", "begin with '68 65 6c 6c' are no envelope"),
        (b"HELLO" + ORDER.pack()[5:], "are no envelope"),
        (ORDER.pack()[:4] + b"\2" + ORDER.pack()[5:], "has version 2 and kind 0; expected version 1"),
        (ORDER.pack()[:5] + b"\2" + ORDER.pack()[6:], "kind 2"),
        (ORDER.pack()[:47], "are no envelope"),
        (ORDER.pack()[:60], "has 60 bytes, a topic of 6 and properties of 19"),
        (ORDER.pack().replace(b"orders", b"order\xff"), "a topic or properties that are not UTF-8"),
        (ORDER._replace(topic="").pack(), "a topic of 0"),
    ],
    ids=["empty", "short", "magic", "version", "kind", "head", "cut", "text", "topic"],
)
def test_what_is_no_envelope_is_reported(data: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        unpack(data)


@given(st.binary(max_size=60), st.integers(0, 80))
def test_any_bytes_are_an_envelope_or_told(noise: bytes, kept: int) -> None:
    for data in (noise, ORDER.pack()[:kept] + noise):
        try:
            found = unpack(data)
        except DecodeError:
            continue
        assert data.endswith(found.topic.encode() + found.properties.encode() + found.body)


def test_a_handle_is_told_from_a_brokers() -> None:
    handle = DelayHandle("orders", "broker-a", 3, ORDER.due_ms, "ID")
    assert DelayHandle.parse(str(handle)) == handle
    for other in (str(RecallHandle("orders", "broker-a", 1, "ID")), "no base64 ñ", base64.b64encode(b"\xff").decode()):
        assert DelayHandle.parse(other) is None
    with pytest.raises(LocalProtocolError, match="not a recall handle"):
        DelayHandle.parse(base64.urlsafe_b64encode(b"dmq1 orders broker-a 3").decode())
