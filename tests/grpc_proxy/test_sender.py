"""The sender against a scripted Proxy: what a real one answers seldom. With a real one: tests/live/grpc."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, cast

import pytest

from rocketmq_spark import errors
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response, SysFlag
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.sender import QUEUES_PER_ENDPOINT, UNKNOWN_QUEUE_ID, ProxySender, _ParallelSend
from rocketmq_spark.grpc_proxy.tables import Code, MessageType, Permission
from rocketmq_spark.model import MessageQueue, SendRequest, SendStatus
from rocketmq_spark.model.send import SentMessage, TransactionState
from rocketmq_spark.producer.spool_bridge import is_transient
from tests.grpc_proxy.scripted import THREADS, acknowledge, client, route, serving, serving_bytes, status
from tests.helpers import raising

REQUEST = SendRequest("g", b"", born_timestamp_ms=5)


@contextmanager
def sending(*parts: SentMessage, **answers: Any) -> Iterator[tuple[ProxySender, MessageQueue]]:
    """A sender of requests of these parts."""
    with serving({"QueryRoute": route(MessageType.NORMAL), "SendMessage": acknowledge, **answers}) as address:
        proxy = client(address)
        yield ProxySender(proxy, lambda request: list(parts)), MessageQueue("t", address, 0)
        proxy.close()


def part(msg_id: str, **properties: str) -> SentMessage:
    return SentMessage(b"x", {Property.UNIQ_KEY: msg_id, **properties})


def soon() -> Deadline:
    return Deadline.after(10)


def test_a_topic_has_lanes_at_each_endpoint_and_keeps_them():
    with sending() as (sender, queue):
        lanes = sender.publish_queues("t", soon())
        assert len(lanes) == QUEUES_PER_ENDPOINT
        assert {lane.broker_name for lane in lanes} == {queue.broker_name}
        assert sender.publish_queues("t", soon(), refresh=True) is lanes
        assert sender.message_types("t", soon()) == {"NORMAL"}


def test_a_topic_that_is_missing_or_takes_no_writes():
    def missing(request: Any, context: Any) -> Any:
        return proto("QueryRouteResponse")(status=status(Code.TOPIC_NOT_FOUND))

    with sending(QueryRoute=missing) as (sender, _), pytest.raises(errors.RouteNotFound) as caught:
        sender.publish_queues("t", soon())
    assert caught.value.broker_code == Response.TOPIC_NOT_EXIST
    with (
        sending(QueryRoute=route(permission=Permission.READ)) as (sender, _),
        pytest.raises(errors.RouteNotFound) as caught,
    ):
        sender.publish_queues("t", soon())
    assert caught.value.broker_code is None


def test_missing_topic_is_transient_while_all_known_are_missing():
    """As where their only broker is away: a spool would take nothing, and give up what it has."""
    there = dict.fromkeys(("t", "u"), Permission.READ_WRITE)

    def answer(request: Any, context: Any) -> Any:
        may = there.get(request.topic.name)
        known = route(permission=may) if may else None
        return known(request, context) if known else proto("QueryRouteResponse")(status=status(Code.TOPIC_NOT_FOUND))

    def away(topic: str) -> bool:
        return is_transient(errors.RouteNotFound("no", broker_code=Response.TOPIC_NOT_EXIST, topic=topic), sender)

    with sending(QueryRoute=answer) as (sender, _):
        assert not away("a name that is wrong")
        for topic in sorted(there):
            sender.publish_queues(topic, soon())
        del there["t"]
        assert (sender.has_broker(), sender.has_master(), away("t")) == (True, True, False)
        there["u"] = Permission.READ  # its broker is there all the same
        assert (sender.has_broker(), sender.has_master(), away("t")) == (True, True, False)
        there.clear()
        assert (sender.has_broker(), sender.has_master(), away("t")) == (False, False, True)


def test_one_answer_for_all_messages():
    with sending(part("A"), part("B"), part("C")) as (sender, queue):
        result = sender.send(queue, REQUEST, soon())
    assert (result.status, result.queue_offset, result.msg_id) == (SendStatus.SEND_OK, 7, "")
    assert result.queue == MessageQueue("t", queue.broker_name, UNKNOWN_QUEUE_ID)
    assert result.offset_msg_id is None


def test_an_answer_about_other_messages_is_no_acknowledgement():
    def other(request: Any, context: Any) -> Any:
        made = proto("SendMessageResponse")(status=status(Code.OK))
        made.entries.add(status=status(Code.OK), message_id="A,Z")
        return made

    with (
        sending(part("A"), part("B"), SendMessage=other) as (sender, queue),
        pytest.raises(errors.RemoteProtocolError, match="A,Z; expected A,B"),
    ):
        sender.send(queue, REQUEST, soon())


def test_an_empty_answer_is_no_acknowledgement():
    def empty(request: Any, context: Any) -> Any:
        return proto("SendMessageResponse")(status=status(Code.OK))

    with sending(part("A"), SendMessage=empty) as (sender, queue), pytest.raises(errors.RemoteProtocolError):
        sender.send(queue, REQUEST, soon())


@pytest.mark.parametrize(
    ("code", "stored"),
    [
        (Code.MASTER_PERSISTENCE_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT),
        (Code.SLAVE_PERSISTENCE_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT),
        (Code.HA_NOT_AVAILABLE, SendStatus.SLAVE_NOT_AVAILABLE),
    ],
)
def test_stored_but_not_as_safely(code, stored):
    """A Proxy says the status then, and neither the id nor the offset."""

    def answer(request: Any, context: Any) -> Any:
        made = proto("SendMessageResponse")(status=status(code))
        made.entries.add(status=status(code))
        return made

    for parts in ((part("A"),), (part("A"), part("B"))):
        with sending(*parts, SendMessage=answer) as (sender, queue):
            result = sender.send(queue, REQUEST, soon())
        assert (result.status, result.queue_offset) == (stored, None)


@pytest.mark.parametrize("worse", ["a", "b", "c"])
def test_of_several_requests_the_least_safe_counts(worse):
    """Whichever has its answer first: who wants all stored well sends again."""

    def answer(request: Any, context: Any) -> Any:
        (one,) = request.messages
        if one.system_properties.message_group != worse:
            return acknowledge(request, context)
        made = proto("SendMessageResponse")(status=status(Code.HA_NOT_AVAILABLE))
        made.entries.add(status=status(Code.HA_NOT_AVAILABLE))
        return made

    parts = [part(group, **{Property.SHARDING_KEY: group}) for group in "abc"]
    with sending(*parts, SendMessage=answer) as (sender, queue):
        assert sender.send(queue, REQUEST, soon()).status is SendStatus.SLAVE_NOT_AVAILABLE


def test_where_a_delayed_message_will_lie_is_not_known():
    """The offset of an answer is that among the delayed ones."""
    with sending(part("A", **{Property.TIMER_DELIVER_MS: "99"})) as (sender, queue):
        assert sender.send(queue, REQUEST, soon()).queue_offset is None


def test_of_several_entries_those_that_are_named_must_be_ours():
    def answer(request: Any, context: Any) -> Any:
        made = proto("SendMessageResponse")(status=status(Code.MULTIPLE_RESULTS))
        made.entries.add(status=status(Code.MASTER_PERSISTENCE_TIMEOUT))
        made.entries.add(status=status(Code.OK), message_id=named)
        return made

    with sending(part("A"), part("B"), SendMessage=answer) as (sender, queue):
        named = "B"
        assert sender.send(queue, REQUEST, soon()).status is SendStatus.FLUSH_DISK_TIMEOUT
        named = "Z"
        with pytest.raises(errors.RemoteProtocolError, match="acknowledged messages Z"):
            sender.send(queue, REQUEST, soon())


def test_messages_of_group_are_sent_in_turn_with_one_outcome():
    seen: defaultdict[str, list[str]] = defaultdict(list)
    under_way: list[str] = []
    together = threading.Barrier(THREADS)
    numbers = itertools.count()

    def answer(request: Any, context: Any) -> Any:
        """The first ones have their answers when so many are here as can be."""
        (one,) = request.messages
        group = one.system_properties.message_group
        assert group not in under_way
        under_way.append(group)
        if next(numbers) < THREADS:
            together.wait(60)
        seen[group].append(one.system_properties.message_id)
        under_way.remove(group)
        return acknowledge(request, context)

    # Those of a group come one after the other, so that whoever does not wait has them under way together.
    parts = [part(f"{n}", **{Property.SHARDING_KEY: f"g{n // 3}"}) for n in range(150)]
    with sending(*parts, SendMessage=answer) as (sender, queue):
        result = sender.send(queue, REQUEST, soon())
    assert (result.status, result.queue_offset) == (SendStatus.SEND_OK, None)
    assert seen == {f"g{n // 3}": [f"{n}", f"{n + 1}", f"{n + 2}"] for n in range(0, 150, 3)}


def test_first_failure_of_many_requests_is_reported_once():
    def answer(request: Any, context: Any) -> Any:
        if request.messages[0].system_properties.message_group == "g3":
            return proto("SendMessageResponse")(status=status(Code.TOO_MANY_REQUESTS, "busy"))
        return acknowledge(request, context)

    outcomes: SimpleQueue[Any] = SimpleQueue()
    parts = [part(f"{n}", **{Property.SHARDING_KEY: f"g{n}"}) for n in range(100)]
    with sending(*parts, SendMessage=answer) as (sender, queue):
        sender.send_async(queue, REQUEST, soon(), outcomes.put)
        outcome = outcomes.get(timeout=60)
        assert isinstance(outcome, errors.BrokerBusy)
        assert outcome.retriable
    assert outcomes.empty()


def test_refused_message_does_not_block_other_groups():
    """The error names what was stored, so that nobody is told that it was refused."""

    def answer(request: Any, context: Any) -> Any:
        (one,) = request.messages
        seen.append(one.system_properties.message_id)
        if one.system_properties.message_group == "g3":
            return proto("SendMessageResponse")(status=status(Code.BAD_REQUEST, "the group is too long"))
        return acknowledge(request, context)

    seen: list[str] = []
    outcomes: SimpleQueue[Any] = SimpleQueue()
    parts = [part(f"{n}", **{Property.SHARDING_KEY: f"g{n % 50}"}) for n in range(100)]
    with sending(*parts, SendMessage=answer) as (sender, queue):
        sender.send_async(queue, REQUEST, soon(), outcomes.put)
        outcome = outcomes.get(timeout=60)
    assert isinstance(outcome, errors.MessageIllegal)
    assert outcome.stored.keys() == {f"{n}" for n in range(100) if n % 50 != 3}
    assert "53" not in seen, "nothing of its group goes behind it"
    assert outcome.skipped_ids == ("53",)
    one = outcome.stored["7"]
    assert (one.status, one.msg_id, one.queue_offset) == (SendStatus.SEND_OK, "7", 7)


def test_transient_error_outranks_permanent_refusal_as_outcome():
    codes = {"a": Code.BAD_REQUEST, "b": Code.TOO_MANY_REQUESTS, "c": Code.BAD_REQUEST}

    def answer(request: Any, context: Any) -> Any:
        (one,) = request.messages
        return proto("SendMessageResponse")(status=status(codes[one.system_properties.message_group]))

    parts = [part(group, **{Property.SHARDING_KEY: group}) for group in codes]
    with sending(*parts, SendMessage=answer) as (sender, queue), pytest.raises(errors.BrokerBusy):
        sender.send(queue, REQUEST, soon())


@pytest.mark.parametrize("first", [0, 1])
def test_transient_error_is_outcome_whichever_error_came_first(first):
    """Else all that a passing failure kept from being sent would count as refused for good."""
    outcomes: list[Any] = []
    refused, busy = errors.MessageIllegal("too large"), errors.BrokerBusy("later")
    requests = _ParallelSend(cast(Any, None), MessageQueue("t", "a", 0), soon(), outcomes.append)
    requests._open_chain_count = 2
    for error in (refused, busy) if first else (busy, refused):
        requests._on_outcome(deque(), cast(Any, None), error)
    assert outcomes == [busy]


def test_what_waits_behind_a_passing_failure_is_not_sent():
    """All of it is sent again: what went out after the failure would be there twice."""
    outcomes: list[Any] = []
    busy = errors.BrokerBusy("later")
    requests = _ParallelSend(cast(Any, None), MessageQueue("t", "a", 0), soon(), outcomes.append)
    requests._open_chain_count = 1
    requests._waiting_chains.append(deque([cast(Any, "not sent")]))
    requests._on_outcome(deque(), cast(Any, None), busy)
    assert outcomes == [busy]


def test_the_messages_of_a_request_lie_one_behind_the_other():
    def answer(request: Any, context: Any) -> Any:
        if len(request.messages) == 1:
            return proto("SendMessageResponse")(status=status(Code.BAD_REQUEST))
        return acknowledge(request, context)

    with (
        sending(part("A"), part("B"), part("C", **{Property.SHARDING_KEY: "g"}), SendMessage=answer) as (sender, queue),
        pytest.raises(errors.MessageIllegal) as caught,
    ):
        sender.send(queue, REQUEST, soon())
    assert {msg_id: one.queue_offset for msg_id, one in caught.value.stored.items()} == {"A": 7, "B": 8}


def test_after_a_failure_nothing_more_of_its_group_is_sent():
    seen = []

    def answer(request: Any, context: Any) -> Any:
        seen.append(request.messages[0].system_properties.message_id)
        return proto("SendMessageResponse")(status=status(Code.TOO_MANY_REQUESTS, "busy"))

    parts = [part(f"{n}", **{Property.SHARDING_KEY: "g"}) for n in range(3)]
    with sending(*parts, SendMessage=answer) as (sender, queue), pytest.raises(errors.BrokerBusy):
        sender.send(queue, REQUEST, soon())
    assert seen == ["0"]


def test_what_cannot_be_sent_is_an_outcome_too():
    outcomes: SimpleQueue[Any] = SimpleQueue()
    with sending(SentMessage(b"x", {}, flag=1)) as (sender, queue):
        sender.send_async(queue, REQUEST, soon(), outcomes.put)
    assert isinstance(outcomes.get(timeout=60), errors.MessageRefused)


@pytest.mark.parametrize("count", [1, 2])
def test_endpoint_that_acknowledges_nothing_in_time_is_avoided(count):
    over = threading.Event()

    def hang(request: Any, context: Any) -> Any:
        over.wait(60)
        return acknowledge(request, context)

    with serving({"SendMessage": hang}) as one, serving({"SendMessage": acknowledge}) as other:
        proxy = client(one, other, connect_timeout_s=30.0)
        parts = [part(f"{n}", **{Property.SHARDING_KEY: f"{n}"}) for n in range(count)]
        sender = ProxySender(proxy, lambda request: parts)
        with pytest.raises(errors.CallTimeout):
            sender.send(MessageQueue("t", one, 0), REQUEST, Deadline.after(0.5))
        assert sender.send(MessageQueue("t", one, 0), REQUEST, Deadline.after(30)).queue.broker_name == other
        over.set()
        proxy.close()


def test_whether_an_endpoint_answers(nobody):
    with sending() as (sender, queue):
        assert sender.probe(queue.broker_name, "t", soon())
    proxy = client(nobody, connect_timeout_s=30.0)
    assert not ProxySender(proxy, lambda request: []).probe(nobody, "t", soon())
    proxy.close()


def whole(code: Code, *entries: Code) -> Callable[[Any, Any], Any]:
    """Acknowledges all messages in one entry for each code, and as a whole with that one."""

    def answer(request: Any, context: Any) -> Any:
        made = proto("SendMessageResponse")(status=status(code))
        for one, message in zip(entries, request.messages, strict=True):
            made.entries.add(status=status(one), message_id=message.system_properties.message_id)
        return made

    return answer


def test_every_status_of_an_answer_counts():
    two = (part("A"), part("B"))
    for code, entries, expected in (
        (Code.OK, (Code.OK, Code.MASTER_PERSISTENCE_TIMEOUT), SendStatus.FLUSH_DISK_TIMEOUT),
        (Code.MULTIPLE_RESULTS, (Code.OK, Code.HA_NOT_AVAILABLE), SendStatus.SLAVE_NOT_AVAILABLE),
        (Code.SLAVE_PERSISTENCE_TIMEOUT, (Code.OK, Code.OK), SendStatus.FLUSH_SLAVE_TIMEOUT),
    ):
        with sending(*two, SendMessage=whole(code, *entries)) as (sender, queue):
            assert sender.send(queue, REQUEST, soon()).status is expected
    for code, entries, refusal in (
        (Code.OK, (Code.OK, Code.TOO_MANY_REQUESTS), errors.BrokerBusy),
        (Code.MULTIPLE_RESULTS, (Code.OK, Code.FORBIDDEN), errors.AccessDenied),
        (Code.FORBIDDEN, (Code.OK, Code.OK), errors.AccessDenied),
    ):
        outcomes: SimpleQueue[Any] = SimpleQueue()
        with sending(*two, SendMessage=whole(code, *entries)) as (sender, queue):
            with pytest.raises(refusal):
                sender.send(queue, REQUEST, soon())
            sender.send_async(queue, REQUEST, soon(), outcomes.put)
            assert isinstance(outcomes.get(timeout=60), refusal)


def test_a_send_ends_whatever_its_answer_holds(monkeypatch):
    """Text that is not UTF-8 in a protocol where all text is, and what no one has thought of."""

    outcomes: SimpleQueue[Any] = SimpleQueue()
    two = [part("A", **{Property.SHARDING_KEY: "g"}), part("B", **{Property.SHARDING_KEY: "h"})]
    with serving_bytes("SendMessage", b"\x12\x04\x12\x02\xff\xfe") as address:
        proxy = client(address)
        sender, queue = ProxySender(proxy, lambda request: list(two)), MessageQueue("t", address, 0)
        with pytest.raises(errors.RemoteProtocolError):
            sender.send(queue, REQUEST, soon())
        sender.send_async(queue, REQUEST, soon(), outcomes.put)
        assert isinstance(outcomes.get(timeout=60), errors.RemoteProtocolError)
        proxy.close()
    monkeypatch.setattr("rocketmq_spark.grpc_proxy.sender._result", lambda *_: {}["no such status"])
    with sending(*two) as (sender, queue):
        with pytest.raises(errors.RemoteProtocolError, match="no such status"):
            sender.send(queue, REQUEST, soon())
        sender.send_async(queue, REQUEST, soon(), outcomes.put)
        assert "no such status" in str(outcomes.get(timeout=60))


def test_a_route_ages(monkeypatch):
    monkeypatch.setattr("rocketmq_spark.grpc_proxy.sender.ROUTE_MAX_AGE_S", 0.0)
    kinds = [MessageType.NORMAL, MessageType.FIFO]

    def answer(request: Any, context: Any) -> Any:
        return route(kinds[0])(request, context)

    with sending(QueryRoute=answer) as (sender, _):
        assert sender.message_types("t", soon()) == {"NORMAL"}
        del kinds[0]
        assert sender.message_types("t", soon()) == {"FIFO"}
        monkeypatch.setattr("rocketmq_spark.grpc_proxy.sender.ROUTE_MAX_AGE_S", 60.0)
        sender.publish_queues("t", soon(), refresh=True)
        kinds[0] = MessageType.DELAY
        assert sender.message_types("t", soon()) == {"FIFO"}, "not asked for each message"


def test_producer_interrupted_while_leaving_gets_no_more_checks(monkeypatch):
    with serving({"Telemetry": lambda commands, context: commands, "SendMessage": acknowledge}) as address:
        proxy = client(address)
        sender = ProxySender(proxy, lambda request: [SentMessage(b"x", {Property.UNIQ_KEY: "ID"})])
        leave = sender.join("g", 0, lambda message, place: TransactionState.COMMIT)
        half = SendRequest("g", b"", sys_flag=int(SysFlag.TRANSACTION_PREPARED))
        sender.send(MessageQueue("t", address, 0), half, Deadline.after(30))
        (stream,) = sender._transactions._streams.values()
        monkeypatch.setattr(sender._transactions._timer, "close", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            leave(Deadline.after(30))
        assert not stream._thread.is_alive()
        proxy.close()
