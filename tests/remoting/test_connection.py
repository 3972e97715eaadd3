"""The blocking driver against a scripted broker over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from rocketmq_spark.base.budget import ReceiveBudget
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Flag, Request, Response, SerializeType
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError
from rocketmq_spark.remoting import connection as connection_module
from rocketmq_spark.remoting import protocol
from rocketmq_spark.remoting.connection import TICK_S, Connection, ServerRequest, batch_writes
from rocketmq_spark.remoting.protocol import RemotingProtocol
from rocketmq_spark.remoting.transport import SocketChannel
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command, Peer
from tests import mockbroker as mb
from tests.fix_proxy import FaultyProxy
from tests.helpers import RAISED, raising
from tests.mockbroker import OF_PROXY, PING, MockBroker, eventually, ok, ping, refuse

Connect = Callable[..., Connection]


class Outcomes:
    """Receives what asynchronous calls end with."""

    def __init__(self) -> None:
        self.results: list[Command | RocketMQError] = []
        self._more = threading.Semaphore(0)

    def __call__(self, result: Command | RocketMQError) -> None:
        self.results.append(result)
        self._more.release()

    def wait(self, count: int = 1) -> list[Command | RocketMQError]:
        for _ in range(count):
            assert self._more.acquire(timeout=60)
        return self.results


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds)


def test_an_answer_whatever_its_code(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, [ok(b"body", a="1"), refuse(2, "busy")])
    connection = connect(broker.address)
    answer = connection.call(ping(), soon())
    assert (bytes(answer.body), answer.ext) == (b"body", {"a": "1"})
    refused = connection.call(ping(), soon())
    assert (refused.code, refused.remark) == (2, "busy")
    assert connection.waiting_count == 0


def test_answers_say_whether_they_came_from_a_proxy(broker: MockBroker, connect: Connect) -> None:
    """From the first one that shows it: some answers of a Proxy have no such fields."""
    sent = Request.SEND_MESSAGE_V2
    broker.on(sent, ok(**OF_PROXY))
    broker.on(PING, [ok(MSG_REGION="r"), ok(**OF_PROXY), refuse(3)])
    connection = connect(broker.address)
    answers = [
        connection.call(one, soon()).is_from_proxy for one in (Command(sent), ping(), ping(), ping(), Command(sent))
    ]
    assert answers == [False, False, True, True, True]
    assert connect(broker.address).peer is Peer.UNKNOWN


def test_a_proxy_that_does_not_answer_is_explained(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, mb.never)
    of_proxy, of_broker = connect(broker.address, peer=Peer.PROXY), connect(broker.address)
    remedies = []
    for connection in (of_proxy, of_broker):
        with pytest.raises(CallTimeout) as caught:
            connection.call(ping(), soon(0.05))
        got = Outcomes()
        connection.call_each([(ping(), got)], soon(0.05))
        (later,) = got.wait()
        assert isinstance(later, CallTimeout)
        assert later.remedy == caught.value.remedy
        remedies.append(later.remedy)
    assert remedies[1] is None
    assert all(words in (remedies[0] or "") for words in ("LOCAL", "9876", "transport=grpc"))


@pytest.mark.parametrize("kind", SerializeType)
def test_answers_in_either_header_type(kind: SerializeType, connect: Connect) -> None:
    with MockBroker({PING: ok(b"x", a="1")}, kind) as broker:
        assert connect(broker.address).call(ping(), soon()).ext == {"a": "1"}


def test_threads_share_a_connection_with_answers_in_any_order(broker: MockBroker, connect: Connect) -> None:
    held = mb.Held()
    broker.on(PING, held)
    connection = connect(broker.address)
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(connection.call, ping(n=str(i)), soon()) for i in range(16)]
        for call in sorted(held.wait(16), key=lambda call: hash(call.ext("n"))):
            call.answer(ok(n=call.ext("n")))
        assert [future.result().ext["n"] for future in answers] == [str(i) for i in range(16)]


def test_asynchronous_calls_and_their_answers(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, lambda call: ok(n=call.ext("n")))
    connection, outcomes = connect(broker.address), Outcomes()
    for i in range(200):
        connection.call_each([(ping(n=str(i)), outcomes)], soon())
    results = outcomes.wait(200)
    assert sorted(int(r.ext["n"]) for r in results if isinstance(r, Command)) == list(range(200))


def test_one_way_requests_arrive_and_wait_for_nothing(broker: MockBroker, connect: Connect) -> None:
    connection = connect(broker.address)
    connection.send_oneway(Command(PING, {"x": "1"}, flag=2), soon())
    broker.wait_for(lambda: len(broker.requests) == 1)
    assert (broker.requests[0].is_oneway, connection.waiting_count) == (True, 0)


def test_a_request_from_within_an_answer(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, ok())
    connection, outcomes = connect(broker.address), Outcomes()
    connection.call_each([(ping(), lambda _: connection.call_each([(ping(), outcomes)], soon()))], soon())
    assert isinstance(outcomes.wait()[0], Command)


# --- time


def test_a_call_times_out_and_its_late_answer_disturbs_nobody(broker: MockBroker, connect: Connect) -> None:
    event = threading.Event()
    broker.on(PING, [mb.late(event, ok(late="1")), ok(late="0")])
    connection = connect(broker.address)
    with pytest.raises(CallTimeout, match="no answer to request") as caught:
        connection.call(ping(), soon(0.05))
    assert caught.value.addr == broker.address
    event.set()
    assert connection.call(ping(), soon()).ext["late"] == "0"
    assert not connection.closed


def test_answer_being_handed_over_at_the_timeout_is_waited_for(
    broker: MockBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = mb.Held()
    broker.on(PING, held)
    connection = connect(broker.address)

    def too_late(opaque: int) -> None:
        held.wait(1)[0].answer(ok(a="1"))

    monkeypatch.setattr(connection._protocol, "cancel", too_late)
    assert connection.call(ping(), soon(0.05)).ext == {"a": "1"}


def test_an_asynchronous_call_times_out(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, mb.never)
    connection, outcomes = connect(broker.address), Outcomes()
    connection.call_each([(ping(), outcomes)], soon(0.05))
    connection.call_each([(ping(), outcomes)], soon(60))
    (late,) = outcomes.wait()
    assert isinstance(late, CallTimeout)
    assert (connection.waiting_count, connection.closed) == (1, False)


def test_a_server_that_stays_silent_is_left(
    broker: MockBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketmq_spark.remoting.connection.SILENCE_S", 0.02)
    broker.on(PING, mb.never)
    connection, outcomes = connect(broker.address), Outcomes()
    connection.call_each([(ping(), outcomes)], soon(60))
    with pytest.raises(CallTimeout):
        connection.call(ping(), soon(0.1))
    (other,) = outcomes.wait()
    assert isinstance(other, ConnectionLost)
    assert "sent nothing" in str(other)


def test_a_slow_request_alone_does_not_cost_the_connection(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, mb.never)
    connection = connect(broker.address)
    with pytest.raises(CallTimeout):
        connection.call(ping(), soon(0.05))
    assert not connection.closed


def test_a_server_that_answers_others_is_not_silent(
    broker: MockBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long one request waits beside them: the time counts from the last byte, not from the first request."""
    broker.on(PING, [mb.never, ok(), mb.never])
    connection, outcomes, later_s = connect(broker.address), Outcomes(), 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr("rocketmq_spark.remoting.connection.time", clock)
    connection.call_each([(ping(), outcomes)], soon(600))
    later_s = 100.0
    connection.call(ping(), soon())
    with pytest.raises(CallTimeout):
        connection.call(ping(), soon(0.05))
    assert (outcomes.results, connection.closed) == ([], False)


# --- writing


def test_slowly_reading_server_costs_deadlines_but_no_frames(connect: Connect) -> None:
    with MockBroker({PING: lambda call: ok(n=call.ext("n"))}, receive_buffer=4096) as broker:
        connection, outcomes = connect(broker.address), Outcomes()
        broker.may_read.clear()
        body = bytes(1 << 20)
        for i in range(12):  # more than all buffers on the way hold
            connection.call_each([(Command(PING, {"n": str(i)}, body), lambda _: None)], Deadline.after(0.0))
        with pytest.raises(CallTimeout):
            connection.call(ping(n="impatient"), soon(0.1))
        assert not connection.closed
        broker.may_read.set()
        broker.wait_for(lambda: len(broker.requests) == 13)  # the reader writes what is left, without another request
        assert connection.call(ping(n="patient"), soon(10)).ext["n"] == "patient"
        assert [command.ext["n"] for command in broker.requests] == [str(i) for i in range(12)] + [
            "impatient",
            "patient",
        ]
        assert all(len(command.body) == len(body) for command in broker.requests[:12])
        connection.call_each([(ping(n="last"), outcomes)], soon())
        assert isinstance(outcomes.wait()[0], Command)


def test_request_blocked_by_another_writer_is_written_soon_after(broker: MockBroker, connect: Connect) -> None:
    """The reader, which asks from within an answer, waits for no writer; and that one may have looked for the last time."""
    broker.on(PING, ok())
    connection, outcomes = connect(broker.address), Outcomes()

    def asks_again(_: object) -> None:
        with ThreadPoolExecutor(1) as writer:
            assert writer.submit(connection._write_lock.acquire).result(60)
            connection.call_each([(ping(), outcomes)], soon())
            writer.submit(connection._write_lock.release).result(60)

    connection.call_each([(ping(), asks_again)], soon())
    assert isinstance(outcomes.wait()[0], Command)


def test_a_server_that_takes_nothing_is_left(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.remoting.connection.STALL_S", 0.2)
    with MockBroker({PING: mb.never}, receive_buffer=4096) as broker:
        connection, outcomes = connect(broker.address), Outcomes()
        connection.call_each([(ping(), outcomes)], soon())
        broker.wait_for(lambda: len(broker.requests) == 1)
        broker.may_read.clear()
        for _ in range(8):
            connection.call_each([(Command(PING, {}, bytes(1 << 20)), outcomes)], soon(0.01))
        eventually(lambda: connection.closed)
        assert any("does not read requests" in str(result) for result in outcomes.wait(9))


# --- the end


@pytest.mark.parametrize("how", [mb.close, mb.reset, mb.torn(ok(b"body"), 9)])
def test_broken_connection_fails_each_waiter_with_its_own_error(
    how: mb.Reply, broker: MockBroker, connect: Connect
) -> None:
    broker.on(PING, [ok(), mb.never, mb.never, how])
    connection, outcomes = connect(broker.address), Outcomes()
    connection.call(ping(), soon())
    for _ in range(3):
        connection.call_each([(ping(), outcomes)], soon())
    results = outcomes.wait(3)
    assert all(isinstance(result, ConnectionLost) and result.addr == broker.address for result in results)
    assert len({id(result) for result in results}) == 3
    if how is mb.reset:
        assert all(isinstance(r.__cause__, OSError) for r in results if isinstance(r, RocketMQError))
    with pytest.raises(ConnectionLost) as later:
        connection.call(ping(), soon())
    assert later.value is not results[0]
    assert connection.closed


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x08\x09\x00\x00\x00abcd"])
def test_bytes_of_another_protocol_end_the_connection(data: bytes, broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, mb.raw(data))
    connection = connect(broker.address)
    with pytest.raises(RemoteProtocolError) as caught:
        connection.call(ping(), soon())
    assert caught.value.addr == broker.address
    eventually(lambda: broker.peers[0].gone.is_set())


@pytest.mark.parametrize("error", [MemoryError("none is left"), SystemExit("mine")])
def test_unexpected_reader_failure_leaves_no_caller_waiting(
    error: BaseException, broker: MockBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(PING, ok())
    connection = connect(broker.address)
    monkeypatch.setattr(RemotingProtocol, "receive", raising(error))
    with pytest.raises(ConnectionLost, match=f"the reader failed: {type(error).__name__}"):
        connection.call(ping(), soon(60))
    assert connection.closed


def test_a_good_answer_before_bad_bytes_leaves_nobody_waiting(broker: MockBroker, connect: Connect) -> None:
    held = mb.Held()
    broker.on(PING, held)
    connection, outcomes = connect(broker.address), Outcomes()
    for _ in range(2):
        connection.call_each([(ping(), outcomes)], soon())
    first, _ = held.wait(2)
    first.peer.send(first.frame(ok()) + b"\xff\xff\xff\xff")
    assert any(isinstance(result, RemoteProtocolError) for result in outcomes.wait(2))


def test_a_frame_above_the_limit_ends_the_connection(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, ok(bytes(2000)))
    with pytest.raises(RemoteProtocolError, match="limit"):
        connect(broker.address, max_frame=1000).call(ping(), soon())


@pytest.mark.parametrize(("length", "error"), [(256 << 20, ConnectionLost), ((256 << 20) + 1, RemoteProtocolError)])
def test_the_largest_frame_is_256_mib(length: int, error: type, broker: MockBroker, connect: Connect) -> None:
    """It is waited for, until the broker hangs up; one byte more is refused."""

    def announce(call: mb.Call) -> None:
        call.peer.send(length.to_bytes(4, "big"))
        call.peer.close()

    broker.on(PING, announce)
    with pytest.raises(error):
        connect(broker.address).call(ping(), soon())


def test_the_cause_of_bad_bytes_is_kept(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, mb.raw(b"\x00\x00\x00\x0b\x00\x00\x00\x07{broken"))
    with pytest.raises(RemoteProtocolError) as caught:
        connect(broker.address).call(ping(), soon())
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("how", [mb.close, mb.reset])
def test_an_end_before_the_first_answer_hints_at_tls(how: mb.Reply, broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, how)
    with pytest.raises(ConnectionLost, match="option 'tls'"):
        connect(broker.address).call(ping(), soon())
    broker.on(PING, [ok(), how])
    connection = connect(broker.address)
    connection.call(ping(), soon())
    with pytest.raises(ConnectionLost) as caught:
        connection.call(ping(), soon())
    assert "tls" not in str(caught.value)


def test_close_wakes_everybody_and_closes_the_socket(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, mb.never)
    connection, outcomes = connect(broker.address), Outcomes()
    connection.call_each([(ping(), outcomes)], soon(60))
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(connection.call, ping(), soon(60)) for _ in range(4)]
        broker.wait_for(lambda: len(broker.requests) == 5)
        connection.close()
        assert all("closed on our side" in str(call.exception(5)) for call in calls)
    assert "closed on our side" in str(outcomes.wait()[0])
    broker.peers[0].thread.join(mb.WAIT_S)  # which ends with the connection
    assert not broker.peers[0].thread.is_alive()
    connection.close()
    later = Outcomes()
    connection.call_each([(ping(), later)], soon())
    assert isinstance(later.wait()[0], ConnectionLost)
    with pytest.raises(ConnectionLost):
        connection.send_oneway(ping(), soon())


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_receiver_that_fails_costs_others_nothing(error: BaseException, broker: MockBroker, connect: Connect) -> None:
    held = mb.Held()
    broker.on(PING, held)
    connection, outcomes = connect(broker.address), Outcomes()
    connection.call_each([(ping(), raising(error))], soon())
    connection.call_each([(ping(), outcomes)], soon())
    one, two = held.wait(2)
    one.peer.send(one.frame(ok()) + two.frame(ok()))  # both in the same piece
    assert isinstance(outcomes.wait()[0], Command)
    assert not connection.closed


# --- requests of the server


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_server_requests_are_answered_by_handler_or_with_code_3(
    error: BaseException, broker: MockBroker, connect: Connect
) -> None:
    asked_by = []

    def handle(request: ServerRequest) -> bool:
        asked_by.append(request.address)
        if request.command.code == 307:
            request.answer(Command(0, {"a": "1"}))
            return True
        if request.command.code == 309:
            raise error
        return False

    broker.on(PING, ok())
    connection = connect(broker.address, on_request=handle)
    connection.call(ping(), soon())
    for code, flag in ((309, 0), (307, 0), (40, 2), (999, 0)):
        broker.ask(Command(code, opaque=code, flag=flag))
    broker.wait_for(lambda: len(broker.replies) == 2)
    assert [(reply.code, reply.opaque) for reply in broker.replies] == [
        (0, 307),
        (Response.REQUEST_CODE_NOT_SUPPORTED, 999),
    ]
    assert connection.call(ping(), soon()).code == 0
    assert asked_by == [broker.address] * 4


def test_without_a_handler_requests_of_the_server_are_refused(broker: MockBroker, connect: Connect) -> None:
    connect(broker.address)
    broker.wait_for(lambda: bool(broker.peers))
    broker.ask(Command(307, opaque=0))
    broker.wait_for(lambda: bool(broker.replies))
    assert broker.replies[0].code == Response.REQUEST_CODE_NOT_SUPPORTED


# --- the network


def test_byte_by_byte(broker: MockBroker, connect: Connect, make_proxy: Callable[[str], FaultyProxy]) -> None:
    broker.on(PING, lambda call: ok(bytes(call.command.body)))
    proxy = make_proxy(broker.address)
    proxy.max_per_write = 1
    assert bytes(connect(proxy.address).call(Command(PING, {}, b"body"), soon()).body) == b"body"


def test_a_black_hole_costs_the_deadline(
    broker: MockBroker, connect: Connect, make_proxy: Callable[[str], FaultyProxy]
) -> None:
    broker.on(PING, ok())
    proxy = make_proxy(broker.address)
    connection = connect(proxy.address)
    connection.call(ping(), soon())
    proxy.black_hole()
    with pytest.raises(CallTimeout):
        connection.call(ping(), soon(0.05))
    proxy.heal()
    assert connection.call(ping(), soon()).code == 0


def test_a_half_closed_connection_is_over(
    broker: MockBroker, connect: Connect, make_proxy: Callable[[str], FaultyProxy]
) -> None:
    broker.on(PING, ok())
    proxy = make_proxy(broker.address)
    connection = connect(proxy.address)
    connection.call(ping(), soon())
    proxy.half_close()
    eventually(lambda: connection.closed)


def test_ten_thousand_waiters_cost_no_more_each_than_a_few(broker: MockBroker, connect: Connect) -> None:
    """Expiry once looked at every waiter at every piece that arrived."""
    broker.on(PING, mb.never)
    broker.on(1000, ok())
    connection = connect(broker.address)
    for _ in range(10_000):
        connection.call_each([(ping(), lambda _: None)], soon(60))
    looks = 0

    class Counted(Deadline):
        @property
        def expired(self) -> bool:
            nonlocal looks
            looks += 1
            return False

    connection.call_each([(ping(), lambda _: None)], Counted(soon(60).end_s))
    start = time.monotonic()
    for _ in range(1000):
        connection.call(Command(1000), soon())
    assert looks <= (time.monotonic() - start) / TICK_S + 5


def test_what_is_sent_together_is_one_write_at_the_end(
    broker: MockBroker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(PING, ok())
    outcomes, writes = Outcomes(), []
    first, other = connect(broker.address), connect(broker.address)
    write = SocketChannel.write
    monkeypatch.setattr(SocketChannel, "write", lambda self, deadline: writes.append(self) or write(self, deadline))
    with batch_writes():
        for connection in (first, other, first, first):
            with batch_writes():
                connection.call_each([(ping(), outcomes)], soon())
        assert writes == []
    outcomes.wait(4)
    assert len(writes) == 2
    first.call_each([(ping(), outcomes)], soon())
    assert len(writes) == 3, "at once, and not when the reader looks"
    outcomes.wait(1)


def test_who_waits_in_the_midst_of_it_takes_the_others_along(broker: MockBroker, connect: Connect) -> None:
    broker.on(PING, ok())
    outcomes, connection = Outcomes(), connect(broker.address)
    with batch_writes():
        connection.call_each([(ping(), outcomes)], soon())
        connection.call(ping(), soon())
        outcomes.wait(1)


def test_answers_a_server_does_not_read_are_bounded_in_memory(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "MAX_UNREAD_BYTES", 3 << 20)
    body, handled = bytes(1 << 20), threading.Semaphore(0)

    def answer(request: ServerRequest) -> bool:
        request.answer(ok(body))
        handled.release()
        return True

    with MockBroker({PING: ok()}) as server:
        connection = connect(server.address, on_request=answer)
        server.wait_for(lambda: bool(server.peers))
        server.may_read.clear()
        for number in range(40):
            server.ask(Command(9999, opaque=number))
        for _ in range(40):
            assert handled.acquire(timeout=60)
        queued: list[bytes | bytearray | memoryview] = [
            *connection._channel._unsent,
            *connection._protocol._outgoing,
        ]
        assert sum(map(len, queued)) < 6 << 20
        server.may_read.set()
        assert connection.call(ping(), soon(60)).code == 0


@contextlib.contextmanager
def unfinished(answers_bytes: int) -> Iterator[str]:
    """A server that begins one answer of 16 MiB, sends so much of it, and then a byte every moment. Yields its address."""
    done = threading.Event()

    def run(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer, contextlib.suppress(OSError):
            peer.recv(4096)
            whole = header.encode(Command(0, {}, bytes(8 << 20), 0, Flag.RESPONSE))
            peer.sendall(whole[:answers_bytes])
            while not done.wait(0.05):
                peer.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=run, args=(server,), daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join(60)


def test_an_answer_that_does_not_get_on_fails_its_call(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its caller would wait: options of a service's users say that, too."""
    monkeypatch.setattr(protocol, "QUIET_TICKS", 3)
    receive_budget = ReceiveBudget()
    with unfinished(2 << 20) as address:
        connection = connect(address, receive_budget=receive_budget)
        with pytest.raises(ConnectionLost, match=r"an answer of 8\d+ bytes was dropped: less than 1 MiB of it arrived"):
            connection.call(ping(), soon(1000.0))
    assert receive_budget.used_bytes == 0


def test_an_answer_whose_room_others_need_fails_its_call(broker: MockBroker, connect: Connect) -> None:
    """The servers of a client share its room, and none can take what others need."""
    broker.on(PING, ok(bytes(3 << 20)))
    receive_budget = ReceiveBudget(8 << 20)
    got = Outcomes()
    with unfinished(7 << 20) as address:
        connect(address, receive_budget=receive_budget).call_each([(ping(), got)], soon(1000.0))
        eventually(lambda: receive_budget.used_bytes > 6 << 20)
        assert len(connect(broker.address, receive_budget=receive_budget).call(ping(), soon(30.0)).body) == 3 << 20
        (lost,) = got.wait()
    assert isinstance(lost, ConnectionLost)
    assert "other arriving frames" in str(lost)
    eventually(lambda: receive_budget.used_bytes == 0)
