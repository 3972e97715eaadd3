"""Cutting a stream into frames: any cut gives the same frames, and no announcement makes us keep more than allowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire.header import FrameSplitter
from tests.harness import MAX_FRAME, check_stream, peak_bytes, unhex, vectors

GOLDEN = [unhex(case["frame_json"]) for case in vectors("remoting_frames")]


def test_golden_frames_in_one_stream():
    check_stream(lambda: FrameSplitter(MAX_FRAME), b"".join(GOLDEN), [frame[4:] for frame in GOLDEN], range(0, 9999, 7))


@given(st.lists(st.binary(max_size=40), max_size=6), st.binary(max_size=3), st.lists(st.integers(0, 300), max_size=9))
def test_any_cuts_and_a_kept_tail(frames, tail, cuts):
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames) + tail
    check_stream(lambda: FrameSplitter(MAX_FRAME), stream, frames, cuts)


def test_a_large_frame_in_small_pieces():
    body = bytes(range(256)) * 4000
    check_stream(
        lambda: FrameSplitter(2 * MAX_FRAME), len(body).to_bytes(4, "big") + body, [body], range(0, 1 << 20, 8192)
    )


@pytest.mark.parametrize("head", [b"\x00\x10\x00\x01", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"HTTP"])
def test_an_announcement_beyond_the_limit_is_refused_at_once(head):
    splitter = FrameSplitter(MAX_FRAME)
    assert splitter.feed(head[:3]) == []
    with pytest.raises(RemoteProtocolError, match="limit"):
        splitter.feed(head[3:])


def test_the_limit_itself_is_allowed():
    splitter = FrameSplitter(5)
    assert splitter.feed(b"\x00\x00\x00\x05hello") == [b"hello"]


def test_a_broken_stream_stays_broken_and_keeps_nothing():
    splitter = FrameSplitter(5)
    with pytest.raises(RemoteProtocolError):
        splitter.feed(b"\x00\x00\x00\x02ok\x00\x00\x00\x06")
    with pytest.raises(RemoteProtocolError):
        splitter.feed(b"\x00\x00\x00\x02ok")
    assert splitter.buffered_bytes == 0


def test_an_announced_length_allocates_nothing():
    assert peak_bytes(lambda: FrameSplitter(1 << 30).feed(b"\x3f\xff\xff\xffabc")) < 10_000


def test_frames_do_not_share_the_buffer():
    splitter = FrameSplitter(100)
    chunk = bytearray(b"\x00\x00\x00\x02ab\x00")
    (frame,) = splitter.feed(chunk)
    chunk[4] = 0
    splitter.feed(b"\x00\x00\x02cd")
    assert frame == b"ab"
