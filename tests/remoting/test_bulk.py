"""Pipelined pulls: frames from a template, answers noted in a buffer, buffers that turn."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.budget import ReceiveBudget
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Flag, PullSysFlag, Response, SerializeType
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RemoteProtocolError
from rocketmq_spark.remoting import bulk
from rocketmq_spark.remoting.bulk import BulkStream, PullTemplate
from rocketmq_spark.wire import header, rpc
from rocketmq_spark.wire.header import Command, FrameSplitter
from tests import strategies
from tests.harness import pieces_of

texts = st.one_of(strategies.filled_texts, st.sampled_from(["%", "%d%%s", '"', "\\", "тег || 标签", "a'b", "\u2028"]))
int31 = st.integers(0, (1 << 31) - 1)
int63 = st.integers(0, (1 << 63) - 1)


def pull(topic: str = "t", group: str = "g", subscription: str = "*", broker: str = "b") -> Command:
    return rpc.PULL_MESSAGE.request(
        consumerGroup=group,
        topic=topic,
        queueId=3,
        queueOffset=0,
        maxMsgNums=1,
        sysFlag=PullSysFlag.SUBSCRIPTION,
        commitOffset=0,
        suspendTimeoutMillis=0,
        subscription=subscription,
        subVersion=0,
        expressionType="TAG",
        bname=broker,
    )


def expected(command: Command, opaque: int, offset: int, count: int) -> Command:
    ext = {**command.ext, "queueOffset": str(offset), "maxMsgNums": str(count)}
    return replace(command, ext=ext, opaque=opaque)


class TestTemplate:
    @given(texts, texts, texts, int31, int63, int31)
    def test_frames_mean_what_the_table_of_requests_makes(
        self, topic: str, group: str, subscription: str, opaque: int, offset: int, count: int
    ) -> None:
        command = pull(topic, group, subscription)
        frame = PullTemplate(command).frame(opaque, offset, count)
        assert int.from_bytes(frame[:4], "big") == len(frame) - 4
        assert header.decode(frame[4:]) == expected(command, opaque, offset, count)

    @given(texts, texts, st.none() | texts, int31, int63, int31)
    def test_signatures_are_those_of_the_signing_module(
        self, topic: str, secret: str, token: str | None, opaque: int, offset: int, count: int
    ) -> None:
        command = pull(topic)
        got = header.decode(PullTemplate(command, ("key%", secret, token)).frame(opaque, offset, count)[4:])
        assert got == header.sign(expected(command, opaque, offset, count), "key%", secret, token)

    def test_frames_are_json_from_python_of_a_recent_version(self) -> None:
        frame = PullTemplate(pull()).frame(1, 2, 3)
        fields = json.loads(frame[8:])
        assert frame[4] == SerializeType.JSON
        assert (fields["language"], fields["flag"]) == ("PYTHON", 0)
        assert fields["version"] >= 477

    def test_reads_are_stateless(self) -> None:
        ext = header.decode(PullTemplate(pull(broker="broker-a")).frame(1, 2, 3)[4:]).ext
        assert (ext["sysFlag"], ext["bname"]) == ("4", "broker-a")


# --- the stream


class Wire:
    """A stream under test and the other end of its socket."""

    def __init__(self, buffer_bytes: int = 4096) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            self.stream = BulkStream(address, Deadline.after(30.0), None, buffer_bytes)
            self.sock, _ = server.accept()
        self.found: list[bulk.FoundAnswer] = []
        self.others: list[tuple[int, bulk.EmptyAnswer]] = []

    def feed(self, data: bytes) -> None:
        """Send ``data`` and take it in; the buffer must have room."""
        self.sock.sendall(data)
        until = self.stream.received_bytes + len(data)
        while self.stream.received_bytes < until:
            assert self.stream.receive(5.0)
            self.scan()

    def scan(self) -> None:
        found, others = self.stream.scan()
        self.found += found
        self.others += others

    def body(self, found: bulk.FoundAnswer) -> bytes:
        return self.stream.buffer[found[3] : found[4]].tobytes()

    def close(self) -> None:
        self.stream.close()
        self.sock.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    one = Wire()
    yield one
    one.close()


def answer(opaque: int, body: bytes, next_offset: int = 7, kind: int = SerializeType.JSON) -> bytes:
    """An answer with messages, from our own encoder: not the layout that is recognised at sight."""
    fields = {"suggestWhichBrokerId": 1, "nextBeginOffset": next_offset, "minOffset": 0, "maxOffset": 99}
    ext = {name: str(value) for name, value in fields.items()}
    return header.encode(Command(0, ext, body, opaque, Flag.RESPONSE, "FOUND"), kind)


def java_answer(opaque: int, body: bytes, next_offset: int = 7) -> bytes:
    """The same as a broker writes it."""
    text = (
        b'{"code":0,"extFields":{"suggestWhichBrokerId":"1","groupSysFlag":"0","nextBeginOffset":"%d",'
        b'"maxOffset":"99","minOffset":"0","topicSysFlag":"0"},"flag":1,"language":"JAVA","opaque":%d,'
        b'"remark":"FOUND","serializeTypeCurrentRPC":"JSON","version":513}' % (next_offset, opaque)
    )
    return (len(text) + 4 + len(body)).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text + body


def with_digits(frame: bytes, digits: int) -> bytes:
    """An answer without messages whose number 77777 has so many digits."""
    text = frame[8:].replace(b"77777", b"7" * digits)
    return (len(text) + 4).to_bytes(4, "big") + len(text).to_bytes(4, "big") + text


def rejection(opaque: int, code: int, remark: str, **ext: int) -> bytes:
    fields = {name: str(value) for name, value in ext.items()}
    return header.encode(Command(code, fields, b"", opaque, Flag.RESPONSE, remark))


@pytest.mark.parametrize("make", [answer, java_answer])
def test_byte_by_byte(make: object, wire: Wire) -> None:
    assert callable(make)
    data = make(5, b"messages", 12) + make(6, b"")
    for i in range(len(data)):
        wire.feed(data[i : i + 1])
    assert [(f[0], f[1], f[2], wire.body(f)) for f in wire.found] == [(5, 12, 1, b"messages"), (6, 7, 1, b"")]


def test_the_usual_answer_is_recognised_at_sight(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "decode", None)
    wire.feed(java_answer(5, b"x"))
    assert wire.body(wire.found[0]) == b"x"


def test_a_header_is_not_continued_in_its_body(wire: Wire) -> None:
    """A body may hold the very text that is looked for."""
    inner = java_answer(9, b"")[8:]
    wire.feed(answer(5, inner))
    assert [(f[0], wire.body(f)) for f in wire.found] == [(5, inner)]


def test_binary_answers(wire: Wire) -> None:
    wire.feed(answer(5, b"body", 12, SerializeType.ROCKETMQ) + java_answer(6, b"x"))
    assert [(f[0], f[1], wire.body(f)) for f in wire.found] == [(5, 12, b"body"), (6, 7, b"x")]


def test_answers_without_messages(wire: Wire) -> None:
    wire.feed(
        rejection(5, 21, "OFFSET_TOO_SMALL", nextBeginOffset=4, minOffset=4, maxOffset=9) + rejection(6, 2, "busy")
    )
    (first, told), (second, busy) = wire.others
    assert (first, told.code, told.remark, told.next_offset, told.min_offset, told.max_offset) == (
        5, 21, "OFFSET_TOO_SMALL", 4, 4, 9,
    )  # fmt: skip
    assert (second, busy.code, busy.next_offset, busy.suggested_broker) == (6, Response.SYSTEM_BUSY, None, None)


def test_requests_of_the_broker_are_passed_over(wire: Wire) -> None:
    wire.feed(header.encode(Command(40, {"consumerGroup": "g"}, b"", 5)) + java_answer(5, b"x"))
    assert [wire.body(f) for f in wire.found] == [b"x"]
    assert wire.others == []


def test_a_success_that_does_not_say_where_to_go_on(wire: Wire) -> None:
    wire.feed(header.encode(Command(0, {}, b"body", 5, Flag.RESPONSE)))
    assert wire.others[0][1].code == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x08\x07\x00\x00\x00abcd",
        b"\x00\x00\x00\x00\x00\x00\x00\x00",
        b"\x00\x00\x00\x08\x00\x00\x00\x09{}{}",
        b"\x00\x00\x00\x2c\x00\x00\x00\x28" + b"{" * 40,
        header.encode(Command(19, {"nextBeginOffset": "x"}, b"", 5, Flag.RESPONSE)),
    ],
)
def test_bytes_of_another_protocol_raise_error_naming_the_server(data: bytes, wire: Wire) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        wire.feed(data + bytes(200))
    assert caught.value.addr == wire.stream.address


@pytest.mark.parametrize("digits", [20, 5000])
@pytest.mark.parametrize("frame", [java_answer(5, b"", 77777), java_answer(77777, b"")], ids=["offset", "number"])
def test_numbers_beyond_all_bounds(frame: bytes, digits: int) -> None:
    wire = Wire(1 << 16)
    with pytest.raises(RemoteProtocolError):
        wire.feed(with_digits(frame, digits))
    wire.close()


def test_the_limit_itself_is_waited_for(wire: Wire) -> None:
    wire.feed((256 << 20).to_bytes(4, "big") + bytes(4))
    assert not wire.stream.is_full
    assert (wire.found, wire.others) == ([], [])


def test_memory_is_taken_for_arrived_bytes_not_announced_ones(wire: Wire) -> None:
    wire.feed((256 << 20).to_bytes(4, "big") + bytes(wire.stream.free_bytes - 4))
    for _ in range(3):
        assert wire.stream.is_full
        wire.stream.compact(())
        assert len(wire.stream.buffer) < 3 * wire.stream.filled_bytes
        while wire.stream.free_bytes:
            wire.feed(bytes(min(1000, wire.stream.free_bytes)))


def test_an_answer_to_a_pull_must_find_room_among_what_arrives(wire: Wire) -> None:
    others = ReceiveBudget(100_000)
    wire.stream._account = others.account("mine")
    other = others.account("other")
    assert other.resize(50_000)
    wire.feed((256 << 20).to_bytes(4, "big") + bytes(wire.stream.free_bytes - 4))
    while wire.stream.is_full:
        wire.stream.compact(())
        while wire.stream.free_bytes and not wire.stream._is_out_of_memory:
            wire.feed(bytes(min(1000, wire.stream.free_bytes)))
    with pytest.raises(ConnectionLost, match="other arriving frames"):
        wire.stream.receive(1.0)
    assert not other.is_revoked
    wire.stream.close()
    assert (others.used_bytes, len(wire.stream.buffer)) == (50_000, bulk.SLACK_BYTES)


def test_a_stream_whose_room_others_need_ends(wire: Wire) -> None:
    others = ReceiveBudget(100_000)
    wire.stream._account = others.account("mine")
    wire.feed((256 << 20).to_bytes(4, "big") + bytes(wire.stream.free_bytes - 4))
    wire.stream.compact(())
    assert others.used_bytes > 0
    assert others.account("other").resize(99_000) is False
    assert wire.stream._account.resize(90_000)
    assert others.account("other").resize(20_000)
    with pytest.raises(ConnectionLost, match="other arriving frames"):
        wire.stream.receive(1.0)


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 400", b"\xff\xff\xff\xff\x00\x00\x00\x00", b"\x10\x00\x00\x01\x00\x00\x00\x00"]
)
def test_no_frame_above_the_limit_is_waited_for(head: bytes, wire: Wire) -> None:
    with pytest.raises(RemoteProtocolError, match="announced a frame of"):
        wire.feed(head)


def test_large_frame_grows_the_buffer_which_shrinks_again(wire: Wire) -> None:
    large, usual = bytes(range(256)) * 200, len(wire.stream.buffer)
    data = java_answer(1, b"first") + java_answer(2, large) + java_answer(3, b"last")
    sent = 0
    bodies = []
    while len(bodies) < 3:
        if wire.stream.is_full:
            wire.stream.compact([])
            continue
        sent += wire.sock.send(data[sent : sent + 3000])
        wire.stream.receive(5.0)
        wire.scan()
        bodies += [wire.body(f) for f in wire.found]
        wire.found.clear()
    assert bodies == [b"first", large, b"last"]
    assert len(wire.stream.buffer) > len(large)
    wire.stream.compact([])
    wire.stream.compact([])
    assert len(wire.stream.buffer) == usual


def test_the_buffer_has_slack_behind_the_last_body(wire: Wire) -> None:
    room = len(wire.stream.buffer) - bulk.SLACK_BYTES - len(java_answer(1, b""))
    wire.feed(java_answer(1, bytes(room)))
    assert wire.stream.is_full
    assert wire.found[0][4] == len(wire.stream.buffer) - bulk.SLACK_BYTES


class Taken:
    """What a reader does: keeps some bodies, takes others, each once and intact."""

    def __init__(self, wire: Wire, rng: random.Random) -> None:
        self.wire = wire
        self.rng = rng
        self.held: dict[int, tuple[int, int]] = {}
        self.bodies: dict[int, bytes] = {}

    def compact(self) -> None:
        for i in [i for i in self.held if self.rng.random() < 0.5]:
            self.take(i)
        moved = self.wire.stream.compact(self.held.values())
        self.held = {i: (moved[start], moved[start] + end - start) for i, (start, end) in self.held.items()}

    def take(self, i: int) -> None:
        start, end = self.held.pop(i)
        assert i not in self.bodies
        self.bodies[i] = self.wire.stream.buffer[start:end].tobytes()

    def receive(self, piece: bytes) -> None:
        self.wire.sock.sendall(piece)
        until = self.wire.stream.received_bytes + len(piece)
        while self.wire.stream.received_bytes < until:
            if self.wire.stream.is_full or self.rng.random() < 0.2:
                self.compact()
                continue
            assert self.wire.stream.receive(5.0)
            found, others = self.wire.stream.scan()
            assert all(opaque == 1000 for opaque, _ in others)
            self.held.update({f[0]: (f[3], f[4]) for f in found})


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=25), st.integers(0, 1 << 32))
def test_every_body_arrives_once_however_the_stream_is_cut(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    bodies = {i: rng.randbytes(size) for i, size in enumerate(sizes)}
    kinds = [answer, java_answer, lambda *a: answer(*a, SerializeType.ROCKETMQ)]
    frames = [rng.choice(kinds)(i, body, i + 1) for i, body in bodies.items()]
    for _ in range(rng.randrange(3)):
        frames.insert(rng.randrange(len(frames) + 1), rejection(1000, 19, "NO_MESSAGE_IN_QUEUE"))
    data = b"".join(frames)
    wire = Wire(buffer_bytes=512)
    taken = Taken(wire, rng)
    try:
        for piece in pieces_of(data, [rng.randrange(len(data)) for _ in range(rng.randrange(30))]):
            taken.receive(piece)
        for i in list(taken.held):
            taken.take(i)
        assert taken.bodies == bodies
    finally:
        wire.close()


def test_nothing_comes_in_time(wire: Wire) -> None:
    assert wire.stream.receive(0.01) is False


def test_the_end_of_the_stream(wire: Wire) -> None:
    wire.sock.close()
    with pytest.raises(ConnectionLost, match="option 'tls'"):
        wire.stream.receive(5.0)


def test_requests_arrive_in_order(wire: Wire) -> None:
    template = PullTemplate(pull())
    wire.stream.send([template.frame(i, i * 10, 10) for i in range(3)], 5.0)
    splitter, commands = FrameSplitter(1 << 20), []
    while len(commands) < 3:
        commands += [header.decode(frame) for frame in splitter.feed(wire.sock.recv(1 << 16))]
    assert [(command.opaque, command.ext["queueOffset"]) for command in commands] == [(0, "0"), (1, "10"), (2, "20")]


def test_a_broker_that_takes_no_requests_costs_the_time_given(wire: Wire) -> None:
    with pytest.raises(CallTimeout, match="pulls cannot be sent"):
        wire.stream.send([bytes(64 << 20)], 0.1)
