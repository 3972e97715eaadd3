"""One request to one address: answers, refusals as errors, signatures."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocketmq_spark.base.budget import ReceiveBudget
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client import rpc
from rocketmq_spark.client.credentials import Credentials
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    BrokerError,
    CallTimeout,
    ClosedError,
    ConnectionLost,
    GoAway,
    NotReadable,
    RocketMQError,
    ServerFault,
    ServiceNotAvailable,
)
from rocketmq_spark.remoting.connection import Connection
from rocketmq_spark.remoting.pool import Pool
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.helpers import no_more_threads
from tests.mockbroker import PING, Held, MockBroker, eventually, never, ok, ping, refuse


def test_an_answer_or_the_error_of_its_code(broker: MockBroker, parts: Parts) -> None:
    broker.on(PING, [ok(a=1), refuse(22, "nothing"), refuse(22, "nothing")])
    assert parts.rpc_client.request(broker.address, ping()).ext == {"a": "1"}
    assert parts.rpc_client.request(broker.address, ping(), accepted_codes=(0, 22)).code == 22
    with pytest.raises(BrokerError, match="nothing") as caught:
        parts.rpc_client.request(broker.address, ping())
    assert (caught.value.broker_code, caught.value.addr) == (22, broker.address)


def test_only_codes_that_may_pass_are_retriable() -> None:
    def error(code: int) -> RocketMQError:
        return error_from_response(refuse(code), "h:1")

    assert error(Response.SYSTEM_BUSY).retriable
    assert error(Response.FLOW_CONTROL).retriable
    assert (error(Response.TOPIC_NOT_EXIST).retriable, error(Response.TOPIC_NOT_EXIST).refresh_route) == (True, True)
    for code in (Response.NO_PERMISSION, Response.MESSAGE_ILLEGAL, Response.REQUEST_CODE_NOT_SUPPORTED, 12345):
        assert not error(code).retriable


@pytest.mark.parametrize(
    "text",
    [
        "User:x has no permission to access Topic:t from 127.0.0.1, no matched policies.",
        "User:x is not found.",
        "User:x not found.",
        "check signature failed.",
        "username cannot be null.",
    ],
)
def test_a_proxy_denies_access_with_the_code_of_a_fault(text: str) -> None:
    assert isinstance(error_from_response(refuse(1, text), "h:1"), AccessDenied)
    assert not isinstance(
        error_from_response(refuse(1, f"java.lang.IllegalStateException: {text}"), "h:1"), AccessDenied
    )


def test_code_16_is_access_denied_with_what_to_grant() -> None:
    remark = "User:u has no permission to access Topic:t from 127.0.0.1, no matched policies."
    error = error_from_response(refuse(16, remark), "h:1", "t", "t/b/0")
    assert isinstance(error, AccessDenied)
    text = str(error)
    for part in ("access denied", "h:1", "topic t", "t/b/0", "16", remark, "accessKey", "Sub and Get", "Pub"):
        assert part in text
    acl_1 = error_from_response(
        refuse(1, "org.apache.rocketmq.acl.common.AclException: No default permission for topic:t"), "h:1"
    )
    assert (type(acl_1), acl_1.retriable, acl_1.remedy) == (AccessDenied, False, error.remedy)
    by_topic = error_from_response(refuse(16, "the topic[t] pulling message is forbidden", forbiddenType=3), "h:1")
    assert "access denied" not in str(by_topic)


@pytest.mark.parametrize(
    "answer", [refuse(2, "[TIMEOUT_CLEAN_QUEUE]broker busy\nFor more see https://x"), refuse(1, ""), refuse(99, " x ")]
)
def test_errors_are_one_line_and_travel(answer: Command) -> None:
    error = error_from_response(answer, "h:1", "t")
    assert "\n" not in str(error)
    assert "https" not in str(error)
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same)) == (type(error), str(error))


def test_asynchronously_answers_come_whatever_their_code(broker: MockBroker, parts: Parts) -> None:
    broker.on(PING, refuse(2, "busy"))
    results: list[Command | RocketMQError] = []
    got = threading.Semaphore(0)

    def done(result: Command | RocketMQError) -> None:
        results.append(result)
        got.release()

    parts.rpc_client.invoke_async(broker.address, ping(), parts.soon, done)
    parts.rpc_client.invoke_async("127.0.0.1:1", ping(), parts.soon, done)
    assert got.acquire(timeout=60)
    assert got.acquire(timeout=60)
    parts.pool.close()
    parts.rpc_client.invoke_async(broker.address, ping(), parts.soon, done)
    codes = [result.code if isinstance(result, Command) else type(result) for result in results]
    assert sorted(codes, key=str) == sorted([2, ConnectionLost, ClosedError], key=str)


def test_parallel_calls_return_answers_and_errors_in_order(broker: MockBroker, parts: Parts) -> None:
    broker.on(PING, lambda call: call.answer(ok(call.command.ext["n"].encode())))
    unwritable = Command(PING, {"n": "\ud800"})
    asked = [(broker.address, Command(PING, {"n": str(i)})) for i in range(200)]
    asked[7:7] = [("127.0.0.1:1", ping()), (broker.address, unwritable)]
    found = parts.rpc_client.invoke_each(asked, parts.soon)
    kinds = [bytes(r.body).decode() if isinstance(r, Command) else type(r).__name__ for r in found]
    expected = [str(i) for i in range(200)]
    expected[7:7] = ["ConnectionLost", "LocalProtocolError"]
    assert kinds == expected
    assert parts.rpc_client.invoke_each([], parts.soon) == []


def test_many_at_once_do_not_wait_longer_than_allowed(broker: MockBroker, parts: Parts) -> None:
    broker.on(PING, never)
    found = parts.rpc_client.invoke_each([(broker.address, ping())] * 3, Deadline.after(0.2))
    assert [type(result) for result in found] == [CallTimeout] * 3


def test_without_a_thread_for_each_they_are_asked_in_turn(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(PING, ok(b"here"))
    no_more_threads(monkeypatch, "rocketmq-dial")
    found = parts.rpc_client.invoke_each([("127.0.0.1:1", ping()), (broker.address, ping())], parts.soon)
    assert isinstance(found[0], ConnectionLost)
    assert isinstance(found[1], Command)


def test_so_many_addresses_are_dialled_at_a_time(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "_MAX_PARALLEL_CONNECTS", 3)
    broker.on(PING, ok(b"here"))
    connect_options, most, get = [0], [0], parts.rpc_client.pool.get

    def slow(address: str, deadline: Deadline, wait_for_backoff: bool = True) -> Connection:
        connect_options[0] += 1
        most[0] = max(most[0], connect_options[0])
        try:
            threading.Event().wait(0.005)
            return get(broker.address, deadline, wait_for_backoff)
        finally:
            connect_options[0] -= 1

    monkeypatch.setattr(parts.rpc_client.pool, "get", slow)
    found = parts.rpc_client.invoke_each([(f"127.0.0.1:{n}", ping()) for n in range(1, 41)], parts.soon)
    assert [bytes(answer.body) for answer in found if isinstance(answer, Command)] == [b"here"] * 40
    assert 1 < most[0] <= 3


def test_hanging_server_is_asked_once_and_its_late_answer_used(broker: MockBroker, parts: Parts) -> None:
    held, far_off = Held(), Deadline.after(60.0)
    broker.on(PING, ok(b"quick"))
    with MockBroker({PING: held}) as deaf:

        def first() -> list[tuple[str, Command]]:
            return [(deaf.address, ping(n="1")), (broker.address, ping()), (deaf.address, ping(n="2"))]

        def last() -> list[tuple[str, Command]]:
            return [(broker.address, ping()), (deaf.address, ping(n="3")), (deaf.address, ping(n="4"))]

        asked = first

        def bodies() -> list[bytes | None]:
            # Made anew each time, as by those who ask: a command that was sent has a number.
            found = parts.rpc_client.invoke_with_grace(asked(), far_off, 0.05)
            return [bytes(answer.body) if isinstance(answer, Command) else None for answer in found]

        assert bodies() == [None, b"quick", None]
        assert bodies() == [None, b"quick", None]
        assert len(held.wait(2)) == 2
        for call in held.calls:
            call.answer(ok(call.ext("n").encode()))
        eventually(lambda: bodies() == [b"1", b"quick", b"2"])  # it is asked anew, and late again
        assert bodies() == [None, b"quick", None]
        assert len(held.wait(4)) == 4
        for call in held.calls[2:]:
            call.answer(ok(b"old"))
        eventually(lambda: not parts.rpc_client._is_late(deaf.address))
        deaf.on(PING, ok(b"new"))
        found = parts.rpc_client.invoke_with_grace(first(), far_off, 60.0)
        assert [bytes(each.body) for each in found if isinstance(each, Command)] == [b"new", b"quick", b"new"]
        deaf.on(PING, held)
        assert bodies() == [None, b"quick", None], "what was answered in time is not kept"
        asked = last
        assert len(held.wait(6)) == 6
        for call in held.calls[4:]:
            call.answer(ok(b"to another question"))
        eventually(lambda: not parts.rpc_client._is_late(deaf.address))
        assert bodies() == [b"quick", None, None]
        deaf.on(PING, ok(b"3"))
        for call in held.wait(8)[6:]:
            call.answer(ok(b"3"))
        eventually(lambda: bodies() == [b"quick", b"3", b"3"])


@pytest.mark.parametrize(("lasted_s", "expected"), [(0.1, 0.2), (0.8, 0.2), (4.0, 1.0)])
def test_answers_that_took_long_are_waited_for_longer(monkeypatch: pytest.MonkeyPatch, lasted_s, expected) -> None:
    """Tens of thousands of them; a machine that is busy for a moment is not taken for a broker that hangs."""
    now_s = [100.0]
    monkeypatch.setattr(rpc.time, "monotonic", lambda: now_s[0])
    answers = rpc._PendingAnswers([("a", ping())], ReceiveBudget())
    now_s[0] += lasted_s
    assert answers._extended_grace_s(0.2) == pytest.approx(expected)
    assert answers._extended_grace_s(None) is None


def test_a_dead_one_does_not_hurry_the_others(broker: MockBroker, parts: Parts) -> None:
    """It refuses at once, and a broker that is busy needs a moment."""
    held = Held()
    broker.on(PING, held)

    def ask() -> list[Command | RocketMQError | None]:
        return parts.rpc_client.invoke_with_grace([("127.0.0.1:1", ping()), (broker.address, ping())], parts.soon, 0.02)

    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(ask)
        (call,) = held.wait(1)
        threading.Event().wait(0.2)  # ten times as long as it is waited for
        call.answer(ok(b"here"))
        dead, alive = found.result(60)
    assert isinstance(dead, ConnectionLost)
    assert isinstance(alive, Command)


def test_nobody_waits_while_another_is_dialled(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(PING, ok(b"quick"))
    get, may_go = parts.pool.get, threading.Event()

    def slow(address: str, deadline: Deadline, wait_for_backoff: bool = True) -> Connection:
        if address != broker.address:
            assert may_go.wait(60)
        return get(address, deadline, wait_for_backoff)

    monkeypatch.setattr(Pool, "get", lambda _, *given, **named: slow(*given, **named))
    asked = [("127.0.0.1:1", ping()), (broker.address, ping())]
    lost, quick = parts.rpc_client.invoke_with_grace(asked, parts.soon, 0.05)
    assert lost is None
    assert isinstance(quick, Command)
    may_go.set()


def roomy(broker: MockBroker, limit: int) -> Parts:
    parts = Parts(broker.address)
    parts.pool.connect_options.receive_budget.limit = limit
    return parts


def test_complete_answers_of_one_call_stay_in_the_account(broker: MockBroker) -> None:
    """Together they fill the memory, although each has arrived."""
    parts, held = roomy(broker, 250_000), Held()
    account = parts.pool.connect_options.receive_budget
    broker.on(PING, lambda call: held(call) if call.ext("n") == "9" else call.answer(ok(bytes(100_000))))
    with MockBroker({PING: ok(b"small")}) as other, ThreadPoolExecutor(1) as beside:
        asked = [(broker.address, ping(n=str(n))) for n in (0, 1, 9)] + [(other.address, ping())]
        found = beside.submit(parts.rpc_client.invoke_each, asked, parts.soon)
        (last,) = held.wait(1)
        eventually(lambda: 200_000 < account.used_bytes < 220_000)
        last.answer(ok(bytes(100_000)))
        first, second, third, small = found.result(60)
    assert [type(answer) for answer in (first, second)] == [Command, Command]
    assert isinstance(third, ConnectionLost)
    assert third.retriable
    assert isinstance(small, Command)
    assert account.used_bytes == 0
    parts.close()


def test_who_has_most_complete_answers_loses_them_for_others(broker: MockBroker) -> None:
    parts, held = roomy(broker, 250_000), Held()
    broker.on(PING, [ok(bytes(200_000)), ok(b"more")])
    with MockBroker({PING: held}) as other, ThreadPoolExecutor(1) as beside:
        asked = [(broker.address, ping()), (broker.address, ping()), (other.address, ping())]
        found = beside.submit(parts.rpc_client.invoke_each, asked, parts.soon)
        (last,) = held.wait(1)
        eventually(lambda: parts.pool.connect_options.receive_budget.used_bytes > 200_500)
        last.answer(ok(bytes(100_000)))
        first, second, third = found.result(60)
    assert [type(answer) for answer in (first, second, third)] == [ConnectionLost, ConnectionLost, Command]
    assert parts.pool.connect_options.receive_budget.used_bytes == 0
    parts.close()


def test_many_fields_of_an_answer_count(broker: MockBroker) -> None:
    parts = roomy(broker, 500_000)
    broker.on(PING, lambda call: call.answer(Command(0, {f"{n}": "v" for n in range(6000)})))
    found = parts.rpc_client.invoke_each([(broker.address, ping())] * 4, parts.soon)
    assert {type(answer) for answer in found} == {Command, ConnectionLost}
    parts.close()


def test_answers_after_an_interrupted_call_are_not_kept(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held()
    broker.on(PING, held)

    def interrupted(answers: rpc._PendingAnswers, *given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(rpc._PendingAnswers, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parts.rpc_client.invoke_each([(broker.address, ping())], parts.soon)
    held.wait(1)[0].answer(ok(bytes(1000)))
    broker.on(PING, ok(b""))
    parts.rpc_client.request(broker.address, ping())  # behind it
    assert parts.pool.connect_options.receive_budget.used_bytes == 0


def test_only_answers_of_those_who_are_late_are_kept(broker: MockBroker, parts: Parts) -> None:
    held, account = Held(), parts.pool.connect_options.receive_budget
    broker.on(PING, ok(bytes(100_000)))
    with MockBroker({PING: held}) as deaf:
        asked = [(deaf.address, ping()), (broker.address, ping())]
        late, quick = parts.rpc_client.invoke_with_grace(asked, parts.soon, 0.05)
        assert (late, isinstance(quick, Command), account.used_bytes) == (None, True, 0)
        held.wait(1)[0].answer(ok(bytes(50_000)))
        eventually(lambda: account.used_bytes > 50_000)
        kept = parts.rpc_client.late_answers[deaf.address]
        assert [isinstance(one, Command) for one in kept.outcomes] == [True, False]
        parts.rpc_client.invoke_with_grace([(broker.address, ping())], parts.soon, 60.0)
        assert parts.rpc_client.late_answers == {deaf.address: kept}
        kept.deadline = Deadline.after(-1.0)  # it has left the routes
        parts.rpc_client.invoke_with_grace([(broker.address, ping())], parts.soon, 60.0)
    assert (parts.rpc_client.late_answers, account.used_bytes) == ({}, 0)


def test_one_way(broker: MockBroker, parts: Parts) -> None:
    parts.rpc_client.invoke_oneway(broker.address, Command(PING, {"a": "1"}, flag=2))
    broker.wait_for(lambda: bool(broker.seen(PING)))
    assert broker.seen(PING)[0].is_oneway


def test_every_kind_of_request_is_signed(broker: MockBroker) -> None:
    parts = Parts(broker.address, credentials=Credentials("key", "secret", "token"))
    broker.on(PING, ok())
    done = threading.Event()
    parts.rpc_client.request(broker.address, Command(PING, {"a": "1"}, b"body"))
    parts.rpc_client.invoke_async(broker.address, ping(), parts.soon, lambda _: done.set())
    assert done.wait(60)
    parts.rpc_client.invoke_oneway(broker.address, Command(PING, flag=2))
    broker.wait_for(lambda: len(broker.seen(PING)) == 3)
    parts.pool.close()
    for command in broker.seen(PING):
        plain = Command(PING, {k: v for k, v in command.ext.items() if k == "a"}, command.body)
        assert command.ext == header.sign(plain, "key", "secret", "token").ext


def test_a_server_that_drains_is_left_for_a_new_connection(broker: MockBroker, parts: Parts) -> None:
    broker.on(PING, [refuse(Response.GO_AWAY, "bye"), ok()])
    with pytest.raises(GoAway) as caught:
        parts.rpc_client.request(broker.address, ping())
    assert caught.value.retriable
    assert parts.rpc_client.request(broker.address, ping()).code == 0
    broker.wait_for(lambda: len(broker.peers) == 2)


def test_calls_that_await_no_answer_reconnect_as_a_server_drains(broker: MockBroker, parts: Parts) -> None:
    """The sends of a producer, and questions that are asked together."""
    broker.on(PING, [refuse(Response.GO_AWAY, "bye"), ok()])
    codes = [
        answer.code if isinstance(answer, Command) else answer
        for _ in range(2)
        for answer in parts.rpc_client.invoke_each([(broker.address, ping())], parts.soon)
    ]
    assert codes == [Response.GO_AWAY, Response.SUCCESS]
    broker.wait_for(lambda: len(broker.peers) == 2)


@pytest.mark.parametrize(
    ("forbidden", "kind"), [(1, NotReadable), (3, NotReadable), (2, AccessDenied), (None, NotReadable)]
)
def test_a_read_permission_that_was_taken_may_be_given_back(broker: MockBroker, parts: Parts, forbidden, kind) -> None:
    ext = {} if forbidden is None else {"forbiddenType": forbidden}
    broker.on(PING, refuse(Response.NO_PERMISSION, "the topic[t] pulling message is forbidden", **ext))
    with pytest.raises(RocketMQError, match="pulling message is forbidden") as caught:
        parts.rpc_client.request(broker.address, ping())
    assert (type(caught.value), caught.value.retriable) == (kind, kind is NotReadable)
    of_group = error_from_response(refuse(Response.NO_PERMISSION, "subscription group no permission, g", **ext), "h:1")
    assert type(of_group) is (NotReadable if forbidden in (1, 3) else AccessDenied)


def test_the_default_deadline_is_the_request_timeout(broker: MockBroker) -> None:
    parts = Parts(broker.address, request_timeout_s=0.05)
    broker.on(PING, never)
    with pytest.raises(RocketMQError, match="in time"):
        parts.rpc_client.request(broker.address, ping())
    parts.pool.close()


def test_a_busy_server_is_told_apart(broker: MockBroker, parts: Parts) -> None:
    broker.on(PING, refuse(2, "[PCBUSY_CLEAN_QUEUE]broker busy"))
    with pytest.raises(BrokerBusy):
        parts.rpc_client.request(broker.address, ping(), Deadline.after(30.0))


def test_names_are_wrapped_on_the_way_to_brokers(broker: MockBroker, parts: Parts) -> None:
    calls = RpcClient(parts.pool, scope=Scope("ns"))
    assert (calls.name_on_wire("t"), calls.name_on_wire("%RETRY%g")) == ("ns%t", "%RETRY%ns%g")
    assert parts.rpc_client.name_on_wire("t") == "t"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("broker unable to service, until 2099-01-01", ServiceNotAvailable),
        ("in-sync replicas not enough", ServiceNotAvailable),
        ("create mapped file failed, server is busy or broken.", ServiceNotAvailable),
        ("timer message is under flow control, max num limit is 2 or the current value is greater than 1", BrokerBusy),
    ],
)
def test_what_passes_is_told_apart_from_a_brokers_exceptions(words: str, kind: type[RocketMQError]) -> None:
    """The same code 1; only the remark differs (broker-lab.md, 8, row 3b)."""
    soon = error_from_response(Command(Response.SYSTEM_ERROR, remark=words), "a:1")
    assert (type(soon), soon.retriable) == (kind, True)
    assert (
        type(error_from_response(Command(Response.SYSTEM_ERROR, remark=f"NullPointerException: {words}"), "a:1"))
        is ServerFault
    )
