"""Requests: what ends them, and what a producer leaves when it closes."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.errors import (
    CallTimeout,
    ClosedError,
    ConnectionLost,
    MessageIllegal,
    MessageRefused,
    NotSupported,
    OptionError,
    ReplyTimeout,
    RocketMQError,
)
from rocketmq_spark.model import Message, MessageQueue, Reply, SendRequest, SendResult, SpooledSend
from rocketmq_spark.ports import Replies
from rocketmq_spark.producer.request_reply import RequestProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.properties import decode_properties
from tests.consumer.messages import message
from tests.fakes.replies import YES, FakeReplies
from tests.fakes.sender import ScriptedSender, ok, refused
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import Time
from tests.helpers import raising
from tests.producer.bench import Bench
from tests.queues import q

ASK = Message("T", b"how much?")


class Office:
    """A producer, what it hears, and time."""

    def __init__(self, bench: Bench, spool: FakeSpool | None = None) -> None:
        self.time, self.sender = bench.time, bench.sender
        self.replies = FakeReplies()
        settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)
        self.producer = RequestProducer(
            self.sender, settings, replies=self.replies, make_timer=bench.timer, spool=spool
        )

    def ask(self, timeout_s: float | None = None) -> Future[Reply]:
        return self.producer.request_async(ASK, timeout_s=timeout_s)

    def sent(self, index: int = -1) -> dict[str, str]:
        return decode_properties(self.sender.requests[index].properties)

    def arrive(self, index: int = -1, reply: Reply | RocketMQError = YES) -> None:
        self.replies.arrive(self.sent(index)[Property.CORRELATION_ID], reply)


@pytest.fixture
def office(bench: Bench) -> Iterator[Office]:
    made = Office(bench)
    yield made
    made.producer.close(0)


def test_request_carries_reply_address_and_ttl_and_reply_ends_it(office: Office) -> None:
    first, second = office.ask(), office.ask(timeout_s=10)
    assert not first.done()
    office.arrive(0)
    office.arrive(1, Reply(b"no", {"a": "b"}))
    assert (first.result(0), second.result(0)) == (YES, Reply(b"no", {"a": "b"}))
    sent = [office.sent(0), office.sent(1)]
    assert [(one[Property.REPLY_TO_CLIENT], one[Property.TTL]) for one in sent] == [("me", "3000"), ("me", "10000")]
    assert sent[0][Property.CORRELATION_ID] != sent[1][Property.CORRELATION_ID]
    assert {mode for mode, _, _ in office.sender.calls} == {"async"}


def test_reply_address_is_announced_once_and_after_a_timeout(office: Office) -> None:
    assert office.replies.events == []
    for _ in range(3):
        office.ask()
    assert office.replies.events == [("join", "g"), "announce"]
    for index in range(2):
        office.arrive(index)
    office.ask()
    office.time.advance(3)
    office.ask()
    assert office.replies.events == [("join", "g"), "announce", "announce"]


def test_request_without_reply_times_out_and_says_it_was_stored(office: Office) -> None:
    asked = office.ask()
    office.time.advance(2.9)
    assert not asked.done()
    office.time.advance(0.2)
    with pytest.raises(
        ReplyTimeout, match=r"was stored, but no reply arrived in time.*topic T.*Check that its consumers"
    ):
        asked.result(0)
    assert office.sent()[Property.UNIQ_KEY] in str(asked.exception(0))
    assert office.replies.expected == {}


def test_the_reply_may_come_before_the_acknowledgement(office: Office) -> None:
    office.sender.script = [None]
    asked = office.ask()
    office.arrive()
    assert asked.result(0) == YES
    office.sender.answer()
    office.time.advance(5)
    assert asked.result(0) == YES


def test_a_send_that_fails_says_why(office: Office) -> None:
    office.sender.script = [refused(Response.MESSAGE_ILLEGAL)]
    asked = office.ask()
    with pytest.raises(MessageIllegal):
        asked.result(0)
    assert office.replies.expected == {}
    office.sender.script = [None]
    silent = office.ask()
    office.time.advance(4)
    office.sender.answer(0, CallTimeout("no answer in time"))
    with pytest.raises(RocketMQError) as raised:
        silent.result(0)
    assert not isinstance(raised.value, ReplyTimeout)


def test_late_acknowledgement_ends_request_with_reply_timeout(office: Office) -> None:
    office.sender.script = [None]
    asked = office.ask()
    office.time.advance(3)
    assert not asked.done()
    office.sender.answer()
    with pytest.raises(ReplyTimeout):
        asked.result(0)
    office.ask()
    assert office.replies.events == [("join", "g"), "announce", "announce"]


def test_a_reply_is_kept_by_who_asked_only(office: Office) -> None:
    """Not until the time of its request is over, which may be hours."""
    asked = office.ask(timeout_s=3600)
    office.arrive()
    kept = weakref.ref(asked)
    del asked
    gc.disable()
    try:
        office.ask()
        assert kept() is None
    finally:
        gc.enable()


def test_a_reply_that_cannot_be_read_is_an_error(office: Office) -> None:
    asked = office.ask()
    office.arrive(reply=CallTimeout("unreadable"))
    with pytest.raises(CallTimeout, match="unreadable"):
        asked.result(0)


def test_the_waiting_form_waits_and_chooses_a_queue(office: Office) -> None:
    def answered(queue: MessageQueue, request: SendRequest) -> SendResult:
        office.arrive()
        return ok(queue, request)

    office.sender.script = [answered]
    queue = MessageQueue("T", "b", 1)
    assert office.producer.request(ASK, queue=queue) == YES
    assert office.sender.calls[-1][1] == queue


def test_a_selector_chooses_the_queue(office: Office) -> None:
    asked = office.producer.request_async(ASK, selector=lambda queues, message, arg: queues[arg], arg=2)
    assert office.sender.calls[-1][1] == office.sender.routes["T"][2]
    office.arrive()
    assert asked.result(0) == YES


def test_a_request_for_which_there_is_no_room_is_not_waited_for(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(outgoing: object) -> None:
        raise CallTimeout("no room")

    monkeypatch.setattr(office.producer._engine, "submit", full)
    with pytest.raises(CallTimeout):
        office.ask(timeout_s=60)
    assert office.replies.expected == {}
    before = office.time.now
    office.producer.close()
    assert office.time.now == before


def test_a_close_does_not_wait_for_what_was_answered(office: Office) -> None:
    asked = office.ask(timeout_s=60)
    office.arrive()
    before = office.time.now
    office.producer.close()
    assert office.time.now == before
    assert asked.result(0) == YES


def test_what_cannot_be_sent_leaves_nothing_behind(office: Office) -> None:
    with pytest.raises(MessageRefused):
        office.producer.request(Message("T", b""))
    with pytest.raises(MessageRefused, match="that a request may carry"):
        office.producer.request(Message("T", b"x", properties={"a": "b" * 32_400}))
    assert office.replies.events == []
    assert office.sender.calls == []
    assert office.replies.expected == {}


def test_a_close_waits_for_replies_and_ends_the_others(office: Office) -> None:
    first, second = office.ask(timeout_s=60), office.ask(timeout_s=60)
    office.producer._request_timer.call_later(1.0, lambda: office.arrive(0))
    office.producer.close(2.0)
    assert office.time.now == pytest.approx(1002.0)
    assert first.result(0) == YES
    with pytest.raises(ClosedError):
        second.result(0)
    assert office.replies.expected == {}
    assert office.replies.events[-1] == ("leave", "g")
    with pytest.raises(ClosedError):
        office.ask()
    assert office.producer.close() == []
    assert office.replies.events.count(("leave", "g")) == 1


def test_a_callback_that_raises_costs_no_other_request_its_end(office: Office) -> None:
    first, second, third = (office.ask(timeout_s=60) for _ in range(3))
    first.add_done_callback(raising(SystemExit()))
    third.add_done_callback(raising(SystemExit()))
    office.arrive(2)
    office.producer.close(0)
    for ended in (first, second):
        with pytest.raises(ClosedError):
            ended.result(0)
    assert third.result(0) == YES
    assert office.replies.events[-1] == ("leave", "g")


def test_a_request_that_is_late_for_a_close_joins_nothing(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came before the close, and was slow: no one would leave the group again."""
    announce = office.producer._announce

    def slow(replies: Replies, deadline: Deadline) -> None:
        office.producer.close(0)
        announce(replies, deadline)

    monkeypatch.setattr(office.producer, "_announce", slow)
    with pytest.raises(ClosedError):
        office.ask()
    assert office.replies.events == []


def test_a_time_without_end_has_none_and_leaves_nothing_behind(office: Office) -> None:
    before = len(office.time.due)
    asked = office.ask(timeout_s=math.inf)
    assert len(office.time.due) == before
    assert int(office.sent()[Property.TTL]) == 10**12
    office.arrive()
    assert asked.result(0) == YES
    with pytest.raises(OptionError, match="timeout_s is nan; expected a number of seconds"):
        office.ask(timeout_s=math.nan)


@pytest.mark.parametrize("timeout_s", [0, -1])
def test_without_time_a_request_is_not_sent(office: Office, timeout_s: float) -> None:
    with pytest.raises(RocketMQError):
        office.ask(timeout_s=timeout_s).result(0)
    assert office.sender.requests == []
    assert office.replies.expected == {}


def test_a_request_while_another_thread_closes_is_refused(office: Office) -> None:
    office.ask(timeout_s=60)
    seen: list[BaseException] = []

    def late() -> None:
        try:
            office.ask()
        except ClosedError as e:
            seen.append(e)

    def close_meanwhile() -> None:
        thread = threading.Thread(target=late)
        thread.start()
        # The closing thread holds the condition while this timer runs; the other one gets it when it waits again.
        seen.append(ClosedError(str(thread.is_alive())))
        threads.append(thread)

    threads: list[threading.Thread] = []
    office.producer._request_timer.call_later(0.5, close_meanwhile)
    office.producer.close(1.0)
    threads[0].join(10)
    assert [str(e) for e in seen[1:]] == ["[ROCKETMQ_CLOSED] the producer is closed"]


def test_a_message_is_answered_by_any_producer(office: Office) -> None:
    asked_by_another = {Property.CLUSTER: "c", Property.REPLY_TO_CLIENT: "another", Property.CORRELATION_ID: "1"}
    to = replace(message(0), properties=asked_by_another)
    office.producer.reply(to, b"yes", properties={"a": "b"})
    assert office.replies.events == [("reply", to.msg_id, b"yes", {"a": "b"}, "g")]
    office.producer.close()
    with pytest.raises(ClosedError):
        office.producer.reply(to, b"yes")


def test_without_replies_of_the_transport_nothing_is_sent() -> None:
    sender = ScriptedSender(Time())
    producer = RequestProducer(sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0))
    for call in (lambda: producer.request(ASK), lambda: producer.reply(message(0), b"yes")):
        with pytest.raises(NotSupported, match="need transport=remoting"):
            call()
    assert sender.calls == []
    producer.close()


@pytest.mark.parametrize("ends", ["it fails", "something waits before it", "the producer closes"])
def test_a_request_is_not_spooled(bench: Bench, ends: str) -> None:
    """Nobody would wait for its reply, and who answers it would do what its sender was told has failed."""
    bench.sender, spool = ScriptedSender(bench.time), FakeSpool()
    office = Office(bench, spool)
    if ends == "something waits before it":
        spool.keep([SpooledSend("T", SendRequest("g", b"x"), q("a:0"))])
    elif ends == "it fails":
        bench.sender.by_broker = {name: lambda: ConnectionLost("down") for name in "ab"}
    else:
        bench.sender.by_broker = {name: lambda: None for name in "ab"}
    waits = office.producer.request_async(ASK, queue=q("a:0"))
    bench.time.run_due()
    if ends == "something waits before it":
        office.arrive()
        assert waits.result(0) == YES
    else:
        office.producer.close(0)
        with pytest.raises((ConnectionLost, ClosedError)):
            waits.result(0)
    office.producer.close(0)
    assert [kept.request.body for kept in spool.kept] == [b"x"] * (ends == "something waits before it")


def test_requests_during_an_announcement_do_not_announce_again(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """One broker that hangs would take the same time from each of them, one after the other."""
    begun, may_end, announce = threading.Event(), threading.Event(), office.replies.announce

    def slow(deadline: Deadline) -> None:
        begun.set()
        assert may_end.wait(60)
        announce(deadline)

    monkeypatch.setattr(office.replies, "announce", slow)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(office.ask, 600)
        assert begun.wait(60)
        threads.submit(office.ask, 0.03).result(20)  # it has no time to wait
        others = [threads.submit(office.ask, 600) for _ in range(2)]
        may_end.set()
        for asked in (first, *others):
            assert not asked.result(60).done()
    assert office.replies.events == [("join", "g"), "announce"]


def test_a_close_that_is_interrupted_waits_for_nothing_more(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = office.ask(timeout_s=60)
    office.sender.script = [None]
    office.producer.send_async(ASK, timeout_s=60)
    monkeypatch.setattr(office.producer._request_timer, "wait_notified", raising(KeyboardInterrupt()))
    before = office.time.now
    with pytest.raises(KeyboardInterrupt):
        office.producer.close(30)
    assert office.time.now == before
    with pytest.raises(ClosedError):
        asked.result(0)
