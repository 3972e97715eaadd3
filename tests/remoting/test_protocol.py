"""The conversation with values alone: numbers, dispatch, loss. Rules 2 and 3 of the protocol reference."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.budget import ReceiveBudget
from rocketmq_spark.base.codes import Flag, Request, Response, SerializeType
from rocketmq_spark.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError
from rocketmq_spark.remoting import protocol
from rocketmq_spark.remoting.protocol import (
    MAX_PUSHED_BYTES,
    OPAQUE_MASK,
    SMALL_BODY_BYTES,
    WRITE_BYTES,
    RemotingProtocol,
    RequestReceived,
    ResponseDropped,
    ResponseReceived,
    max_pushed_frame_bytes,
    peer_after_answer,
)
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command, FrameSplitter, Peer
from tests import strategies
from tests.harness import pieces_of

PING = Request.GET_BROKER_RUNTIME_INFO
MAX_FRAME = 1 << 20


def conversation() -> RemotingProtocol[str]:
    return RemotingProtocol(MAX_FRAME)


def answer(opaque: int, body: bytes = b"", kind: int = SerializeType.JSON) -> bytes:
    return header.encode(Command(0, {}, body, opaque, Flag.RESPONSE), kind)


def request(opaque: int, code: int = 9999, flag: int = 0) -> bytes:
    return header.encode(Command(code, {}, b"", opaque, flag))


def sent(talk: RemotingProtocol[str]) -> list[Command]:
    """What is on its way out, as the peer would read it."""
    data = b"".join(bytes(chunk) for chunk in talk.take_outgoing())
    return [header.decode(frame) for frame in FrameSplitter(MAX_FRAME).feed(data)]


SETTINGS = bytes.fromhex("000012 04 00 00000000 0003 7fffffff 0004 00100000 0006 00002000".replace(" ", ""))


@pytest.mark.parametrize("size", [1, 4, 9, len(SETTINGS)])
def test_a_grpc_server_is_recognised_by_its_first_bytes(size: int) -> None:
    talk = conversation()

    def receive() -> None:
        for at in range(0, len(SETTINGS), size):
            talk.receive(SETTINGS[at : at + size])

    with pytest.raises(RemoteProtocolError, match="the server speaks gRPC") as caught:
        receive()
    assert all(words in (caught.value.remedy or "") for words in ("9876", "transport=grpc", "LOCAL"))


def test_later_bytes_are_no_sign_of_grpc() -> None:
    talk = conversation()
    talk.send(Command(PING), "a")
    (event,) = talk.receive(answer(0, SETTINGS))
    assert isinstance(event, ResponseReceived)


@pytest.mark.parametrize("asked", [Request.GET_BROKER_CLUSTER_INFO, Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER])
def test_lists_show_a_name_server(asked: Request) -> None:
    assert peer_after_answer(Peer.UNKNOWN, asked, Command(Response.SUCCESS)) is Peer.NAME_SERVER
    assert peer_after_answer(Peer.UNKNOWN, asked, Command(Response.REQUEST_CODE_NOT_SUPPORTED)) is Peer.UNKNOWN


@pytest.mark.parametrize("before", Peer)
def test_a_route_shows_a_name_server_and_its_fields_a_proxy(before: Peer) -> None:
    asked = Request.GET_ROUTEINFO_BY_TOPIC
    of_proxy = {"MSG_REGION": "r", "TRACE_ON": "true"}
    no_route = Command(Response.TOPIC_NOT_EXIST)
    known = Peer.PROXY if before is Peer.PROXY else Peer.NAME_SERVER
    assert peer_after_answer(before, asked, Command(Response.SUCCESS)) is known
    assert peer_after_answer(before, asked, no_route) is known
    assert peer_after_answer(before, asked, Command(Response.REQUEST_CODE_NOT_SUPPORTED)) is before
    assert peer_after_answer(before, PING, Command(Response.SUCCESS)) is before
    assert peer_after_answer(before, asked, Command(Response.TOPIC_NOT_EXIST, of_proxy)) is Peer.PROXY


def test_each_request_has_its_own_number_and_gets_its_own_answer() -> None:
    talk = conversation()
    first, second = talk.send(Command(PING), "first"), talk.send(Command(PING), "second")
    assert [command.opaque for command in sent(talk)] == [first, second]
    (event,) = talk.receive(answer(second, b"x"))
    assert isinstance(event, ResponseReceived)
    assert (event.waiter, bytes(event.command.body)) == ("second", b"x")
    assert talk.waiting_count == 1


def test_numbers_wrap_and_pass_over_those_that_wait() -> None:
    talk = conversation()
    assert talk.send(Command(PING), "old") == 0
    talk._next_opaque = OPAQUE_MASK
    assert talk.send(Command(PING), "last") == OPAQUE_MASK
    assert talk.send(Command(PING), "after") == 1  # 0 still waits
    (event,) = talk.receive(answer(0))
    assert isinstance(event, ResponseReceived)
    assert event.waiter == "old"
    talk._next_opaque = OPAQUE_MASK
    talk.cancel(OPAQUE_MASK)
    assert [talk.send(Command(PING), "a"), talk.send(Command(PING), "b")] == [OPAQUE_MASK, 0]


@given(st.integers(0, OPAQUE_MASK), st.integers(1, 40))
def test_numbers_fit_the_wire_and_never_collide(start: int, count: int) -> None:
    talk = conversation()
    talk._next_opaque = start
    numbers = [talk.send(Command(PING), "w") for _ in range(count)]
    assert len(set(numbers)) == count
    assert all(0 <= number <= OPAQUE_MASK for number in numbers)
    assert [command.opaque for command in sent(talk)] == numbers


def test_server_request_with_our_number_is_not_our_answer() -> None:
    talk = conversation()
    opaque = talk.send(Command(PING), "mine")
    events = talk.receive(request(opaque) + answer(opaque, b"real"))
    assert isinstance(events[0], RequestReceived)
    assert isinstance(events[1], ResponseReceived)
    assert (events[1].waiter, bytes(events[1].command.body)) == ("mine", b"real")


def test_unknown_server_request_is_answered_with_code_3() -> None:
    talk = conversation()
    (event,) = talk.receive(request(42, 307))
    assert isinstance(event, RequestReceived)
    assert event.reply is not None
    assert (event.reply.code, event.reply.opaque, event.reply.flag) == (
        Response.REQUEST_CODE_NOT_SUPPORTED,
        42,
        Flag.RESPONSE,
    )
    assert "307" in str(event.reply.remark)


def test_a_one_way_request_of_the_server_is_not_answered() -> None:
    (event,) = conversation().receive(request(42, 40, Flag.ONEWAY))
    assert isinstance(event, RequestReceived)
    assert event.reply is None


def test_a_frame_with_both_flags_is_a_response() -> None:
    assert conversation().receive(request(5, 0, Flag.ONEWAY | Flag.RESPONSE)) == []


def test_late_answer_to_a_cancelled_request_is_ignored() -> None:
    talk = conversation()
    opaque = talk.send(Command(PING), "gone")
    assert talk.cancel(opaque) == "gone"
    assert talk.cancel(opaque) is None
    assert talk.receive(answer(opaque)) == []


def test_what_expired_is_forgotten_and_returned() -> None:
    talk = conversation()
    for waiter in ("late", "fine", "late too"):
        talk.send(Command(PING), waiter)
    assert talk.remove_expired(lambda waiter: "late" in waiter) == ["late", "late too"]
    assert talk.waiting_count == 1


def test_every_waiter_gets_its_own_copy_of_error_with_its_cause() -> None:
    talk = conversation()
    for waiter in "abc":
        talk.send(Command(PING), waiter)
    error = ConnectionLost("broke", "host:1")
    error.__cause__ = ConnectionResetError("by peer")
    lost = talk.connection_lost(error)
    assert [waiter for waiter, _ in lost] == ["a", "b", "c"]
    assert len({id(own) for _, own in lost} | {id(error)}) == 4
    assert {str(own) for _, own in lost} == {str(error)}
    assert all(own.__cause__ is error.__cause__ for _, own in lost)
    assert talk.connection_lost(error) == []


@pytest.mark.parametrize("bad", [b"\x00\x00\x00\x04\x07\x00\x00\x00", b"\x7f\xff\xff\xff", b"HTTP/1.1 400 "])
def test_bad_bytes_behind_a_good_answer_leave_no_waiter_behind(bad: bytes) -> None:
    talk = conversation()
    opaque = talk.send(Command(PING), "answered")
    talk.send(Command(PING), "waiting")
    with pytest.raises(RemoteProtocolError) as caught:
        talk.receive(answer(opaque) + bad)
    assert {waiter for waiter, _ in talk.connection_lost(caught.value)} == {"answered", "waiting"}


def test_both_header_types_are_read_and_requests_are_python_json() -> None:
    talk = conversation()
    opaque = talk.send(Command(PING, {"k": "v"}), "w")
    (out,) = talk.take_outgoing()
    assert out[4] == SerializeType.JSON
    assert b'"language":"PYTHON"' in bytes(out)
    assert header.decode(bytes(out)[4:]).version >= 477
    assert len(talk.receive(answer(opaque, kind=SerializeType.ROCKETMQ))) == 1


def test_inbound_frames_have_a_limit_of_their_own() -> None:
    talk: RemotingProtocol[str] = RemotingProtocol(100)
    with pytest.raises(RemoteProtocolError, match="limit"):
        talk.receive(b"\x00\x00\x00\x65")


def test_a_request_that_cannot_be_encoded_waits_for_nothing() -> None:
    talk = conversation()
    with pytest.raises(LocalProtocolError):
        talk.send(Command(PING, {"k": "\ud800"}), "w")
    assert talk.waiting_count == 0
    assert not talk.has_outgoing


def test_large_bodies_are_not_copied_and_small_share_one_write() -> None:
    talk = conversation()
    large = memoryview(bytes(SMALL_BODY_BYTES))
    talk.send(Command(PING, body=large), "w")
    chunks = talk.take_outgoing()
    assert chunks[1] is large
    talk.send(Command(PING, body=b"small"), "w")
    talk.send(Command(PING, body=b"small"), "w")
    assert len(talk.take_outgoing()) == 1


def test_small_requests_are_written_together_around_large_ones() -> None:
    talk = conversation()
    sent = [b"a", bytes(SMALL_BODY_BYTES), b"b", *[bytes([i]) * (SMALL_BODY_BYTES - 1) for i in range(12)], b"c"]
    for body in sent:
        talk.send(Command(PING, body=body), "w")
    chunks = talk.take_outgoing()
    assert 5 < len(chunks) < len(sent)
    assert max(map(len, chunks)) < WRITE_BYTES + 2 * SMALL_BODY_BYTES
    frames = FrameSplitter(MAX_FRAME).feed(b"".join(bytes(chunk) for chunk in chunks))
    assert [bytes(header.decode(frame).body) for frame in frames] == sent


@given(st.data(), st.integers(1, 12))
def test_any_order_of_answers_in_any_pieces(data: st.DataObject, count: int) -> None:
    talk: RemotingProtocol[int] = RemotingProtocol(MAX_FRAME)
    numbers = {talk.send(Command(PING), i): i for i in range(count)}
    stream, expected = b"", []
    for opaque in data.draw(st.permutations(sorted(numbers))):
        if data.draw(st.booleans()):
            stream += request(data.draw(st.integers(0, 50)))
        stream += answer(opaque, str(numbers[opaque]).encode(), data.draw(st.sampled_from(SerializeType)))
        expected.append(numbers[opaque])
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=10))
    events = [event for piece in pieces_of(stream, cuts) for event in talk.receive(piece)]
    answered = [event for event in events if isinstance(event, ResponseReceived)]
    assert [event.waiter for event in answered] == expected
    assert [int(bytes(event.command.body)) for event in answered] == expected
    assert talk.waiting_count == 0


@given(strategies.commands)
def test_any_command_of_a_server_is_dispatched_by_its_flag(command: Command) -> None:
    talk = conversation()
    events = talk.receive(header.encode(command, max_frame=None))
    if command.is_response:
        assert events == []
    else:
        (event,) = events
        assert isinstance(event, RequestReceived)
        assert (event.reply is None) == command.is_oneway


@pytest.mark.parametrize("size", [100, 1 << 20, 64 << 20])
@pytest.mark.parametrize(
    ("request_code", "most"),
    [
        (Request.GET_MAX_OFFSET, 64 << 10),
        (Request.SEND_MESSAGE_V2, 64 << 10),
        (Request.GET_ROUTEINFO_BY_TOPIC, 8 << 20),
        (Request.GET_TOPIC_STATS_INFO, 64 << 20),
        (Request.PULL_MESSAGE, None),
    ],
)
def test_an_answer_is_no_longer_than_its_request_allows(request_code: int, most: int | None, size: int) -> None:
    """Of a longer one only the beginning is kept, and the conversation goes on."""
    body = bytes(most + 1 if most else 65 << 20)
    talk: RemotingProtocol[str] = RemotingProtocol(256 << 20)
    number, after = talk.send(Command(request_code), "a"), talk.send(Command(PING), "b")
    large, peak = answer(number, body), 0
    events = list(talk.receive(large[: 2 << 20]))
    for at in range(2 << 20, len(large), size << 10):
        events += talk.receive(large[at : at + (size << 10)])
        peak = max(peak, talk._splitter.buffered_bytes)
    events += talk.receive(answer(after, b"x"))
    first, second = events
    assert isinstance(second, ResponseReceived)
    if most is None:
        assert isinstance(first, ResponseReceived)
        assert len(first.command.body) == len(body)
        return
    assert isinstance(first, ResponseDropped)
    assert f"an answer has {len(body)} bytes; expected at most {most}" in str(first.error)
    assert peak < 1 << 20
    exact = talk.send(Command(request_code), "c")
    (event,) = talk.receive(answer(exact, bytes(most)))
    assert isinstance(event, ResponseReceived)
    assert talk._max_body_bytes == {}


# --- large frames that answer no request


def pushed(body_bytes: int, flag: int = 0, opaque: int = 7) -> bytes:
    return header.encode(Command(326, {"a": "b"}, bytes(body_bytes), opaque, flag), max_frame=None)


def in_pieces(
    talk: RemotingProtocol[str], data: bytes, size: int = 100
) -> list[ResponseReceived[str] | RequestReceived | ResponseDropped[str]]:
    return [event for at in range(0, len(data), size) for event in talk.receive(data[at : at + size])]


@pytest.mark.parametrize("flag", [0, Flag.ONEWAY])
def test_a_request_that_is_too_large_is_not_kept(flag: int) -> None:
    talk: RemotingProtocol[str] = RemotingProtocol(MAX_FRAME, 1000)
    talk.send(Command(PING), "a")
    large = pushed(100_000, flag)
    began = in_pieces(talk, large[:300])
    assert talk._splitter.buffered_bytes == 0
    events = [*began, *in_pieces(talk, large[300:] + request(8) + answer(0))]
    assert [type(event) for event in events] == [RequestReceived, RequestReceived, ResponseReceived]
    first, second = events[:2]
    assert isinstance(first, RequestReceived)
    assert isinstance(second, RequestReceived)
    assert (first.held_bytes, bytes(first.command.body), first.command.ext) == (None, b"", {"a": "b"})
    assert (first.reply is None) == bool(flag)
    assert second.held_bytes is not None


def test_a_request_that_is_too_large_in_one_piece_is_rejected() -> None:
    (event,) = RemotingProtocol[str](MAX_FRAME, 1000).receive(pushed(2000))
    assert isinstance(event, RequestReceived)
    assert event.held_bytes is None


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_a_large_answer_is_kept_if_it_is_awaited(size: int) -> None:
    talk: RemotingProtocol[str] = RemotingProtocol(MAX_FRAME, 1000)
    talk.send(Command(PING), "a")
    talk.send(Command(PING), "b")
    late = answer(9, bytes(5000))
    events = in_pieces(talk, answer(0, bytes(5000)) + late + answer(1, bytes(3000)), size)
    assert [isinstance(event, ResponseReceived) and len(event.command.body) for event in events] == [5000, 3000]


def test_a_request_behind_a_large_answer_is_judged_too() -> None:
    talk: RemotingProtocol[str] = RemotingProtocol(MAX_FRAME, 1000)
    talk.send(Command(PING), "a")
    events = in_pieces(talk, answer(0, bytes(5000)) + pushed(5000), 1500)
    assert [type(event) for event in events] == [ResponseReceived, RequestReceived]
    assert talk._splitter.buffered_bytes == 0


@pytest.mark.parametrize("how", ["give up", "expired", "lost"])
def test_an_answer_for_which_nobody_waits_any_more_is_dropped(how: str) -> None:
    """What has arrived of it, and what still arrives: a slow server would have the client hold it for ever."""
    room = ReceiveBudget(10_000)
    talk: RemotingProtocol[str] = RemotingProtocol(MAX_FRAME, 1000, room.account(0))
    number = talk.send(Command(PING), "a")
    talk.send(Command(PING), "b")
    large = answer(0, bytes(5000))
    assert in_pieces(talk, large[:3000]) == []
    assert (talk._splitter.buffered_bytes, room.used_bytes) == (3000, 3000)
    if how == "give up":
        assert talk.cancel(number) == "a"
    elif how == "expired":
        assert talk.remove_expired(lambda waiter: waiter == "a") == ["a"]
    else:
        talk.connection_lost(RemoteProtocolError("gone"))
    assert (talk._splitter.buffered_bytes, room.used_bytes) == (0, 0)
    if how != "lost":
        (event,) = in_pieces(talk, large[3000:] + answer(1, bytes(10)))
        assert isinstance(event, ResponseReceived)
        assert event.waiter == "b"


def test_only_what_has_arrived_of_a_large_answer_counts() -> None:
    room = ReceiveBudget(12_000)
    talks = [RemotingProtocol[str](MAX_FRAME, 1000, room.account(number)) for number in range(4)]
    large = answer(0, bytes(50_000))
    for talk in talks[:3]:  # servers that announce more than there is, and send little of it
        talk.send(Command(PING), "a")
        assert in_pieces(talk, large[:1500]) == []
    assert room.used_bytes == 4500
    talks[3].send(Command(PING), "b")
    (event,) = in_pieces(talks[3], answer(0, bytes(3000)))
    assert isinstance(event, ResponseReceived)
    assert room.used_bytes == 4500


def test_a_server_that_sends_much_takes_no_answer_of_others() -> None:
    room = ReceiveBudget(12_000)
    greedy, other = (RemotingProtocol[str](MAX_FRAME, 1000, room.account(number)) for number in range(2))
    greedy.send(Command(PING), "a")
    assert in_pieces(greedy, answer(0, bytes(50_000))[:11_900]) == []
    other.send(Command(PING), "b")
    (event,) = in_pieces(other, answer(0, bytes(5800)))
    assert isinstance(event, ResponseReceived)
    assert room.used_bytes == 0
    (dropped,) = greedy.tick()
    assert isinstance(dropped, ResponseDropped)
    assert (dropped.waiter, dropped.error.retriable, greedy._splitter.buffered_bytes) == ("a", True, 0)
    assert in_pieces(greedy, answer(0, bytes(50_000))[11_900:]) == []
    greedy.send(Command(PING), "c")
    (event,) = in_pieces(greedy, answer(1, bytes(20_000)))
    assert isinstance(event, ResponseReceived)


def test_a_large_request_of_a_server_has_the_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LARGE_FRAME_BYTES", 1000)
    room = ReceiveBudget(12_000)
    assert room.account("other").resize(6000)
    talk: RemotingProtocol[str] = RemotingProtocol(MAX_FRAME, 8000, room.account("mine"))
    (event,) = in_pieces(talk, pushed(7000))
    assert isinstance(event, RequestReceived)
    assert (event.held_bytes, event.drop_reason, talk._splitter.buffered_bytes) == (None, protocol._NO_ROOM_REASON, 0)


@pytest.mark.parametrize("is_push", [False, True], ids=["answer", "request"])
def test_a_large_frame_that_does_not_get_on_is_dropped(is_push: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LARGE_FRAME_BYTES", 1000)
    room = ReceiveBudget(100_000)
    talk: RemotingProtocol[str] = RemotingProtocol(MAX_FRAME, 9000, room.account(0))
    talk.send(Command(PING), "a")
    large = pushed(8000) if is_push else answer(0, bytes(8000))
    in_pieces(talk, large[:1500])
    at = 1500
    for _ in range(4):  # it gets on, just fast enough
        assert [talk.tick() for _ in range(protocol.QUIET_TICKS)] == [[]] * protocol.QUIET_TICKS
        assert in_pieces(talk, large[at : at + 1000]) == []
        at += 1000
        assert talk.tick() == []
    in_pieces(talk, large[at : at + 500])
    assert [talk.tick() for _ in range(protocol.QUIET_TICKS)] == [[]] * protocol.QUIET_TICKS
    (event,) = talk.tick()
    if isinstance(event, RequestReceived):
        assert (is_push, event.held_bytes, event.drop_reason) == (True, None, protocol._TOO_SLOW_REASON)
    else:
        assert (is_push, event.waiter, event.error.retriable) == (False, "a", True)
    assert (talk._splitter.buffered_bytes, room.used_bytes, talk.tick()) == (0, 0, [])
    number = talk.send(Command(PING), "b")
    (behind,) = in_pieces(talk, large[at + 500 :] + answer(number, b""))
    assert isinstance(behind, ResponseReceived)


def test_a_header_that_no_server_sends_is_not_collected() -> None:
    frame = (4 << 20).to_bytes(4, "big") + (2 << 20).to_bytes(4, "big") + bytes(1000)
    talk: RemotingProtocol[str] = RemotingProtocol(16 << 20)
    with pytest.raises(RemoteProtocolError, match="header"):
        talk.receive(frame)


@given(st.lists(st.tuples(st.sampled_from("arlp"), st.integers(0, 3000)), max_size=8), st.integers(1, 2000))
def test_large_frames_change_no_other_event(parts: list[tuple[str, int]], size: int) -> None:
    """Answers, requests, late answers and too large requests, in any order and in any pieces."""
    talk: RemotingProtocol[int] = RemotingProtocol(MAX_FRAME, 1000)
    data = b""
    expected: list[tuple[str, int, int]] = []
    for number, (kind, body_bytes) in enumerate(parts):
        if kind == "a":
            opaque = talk.send(Command(PING), number)
            data += answer(opaque, bytes(body_bytes))
            expected.append(("answer", number, body_bytes))
        elif kind == "l":
            data += answer(OPAQUE_MASK, bytes(body_bytes))
        else:
            large = 1000 + body_bytes if kind == "p" else body_bytes % 500
            data += pushed(large)
            expected.append(("request", 0, 0 if kind == "p" else large))
    events: list[tuple[str, int, int]] = []
    for at in range(0, len(data), size):
        for event in talk.receive(data[at : at + size]):
            if isinstance(event, ResponseReceived):
                events.append(("answer", event.waiter, len(event.command.body)))
            elif isinstance(event, RequestReceived):
                events.append(("request", 0, 0 if event.held_bytes is None else len(event.command.body)))
    assert events == expected


def test_a_request_counts_with_its_body_and_its_fields() -> None:
    many = Command(326, {f"{i}": "" for i in range(1000)}, bytes(500), flag=Flag.ONEWAY)
    (event,) = conversation().receive(header.encode(many))
    assert isinstance(event, RequestReceived)
    assert event.held_bytes is not None
    assert event.held_bytes > 200_000


@pytest.mark.parametrize(("message", "limit"), [(4 << 20, 16 << 20), (32 << 20, 33 << 20)])
def test_the_limit_is_never_less_than_a_message(message: int, limit: int) -> None:
    assert message < max_pushed_frame_bytes(message) <= limit
    assert max_pushed_frame_bytes(message) >= MAX_PUSHED_BYTES
