"""Polls of a pull consumer that reaches no broker: they warn, and fail after a minute without one answer."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.consumer.reachability import Reachability
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    CallTimeout,
    CertificateRefused,
    ConnectionLost,
    NotSupported,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    ServerFault,
)
from rocketmq_spark.model import NO_FILTER, MessageQueue
from tests.consumer.test_upkeep import QUEUE, Kept
from tests.helpers import raising
from tests.mockbroker import WAIT_S

LOST = ConnectionLost("cannot connect: refused", "pod:8080", remedy="Set option 'addressMap'")


@pytest.fixture
def lost() -> Kept:
    """Each pull fails."""
    kept = Kept()
    kept.fake.errors = [ConnectionLost(*LOST.args) for _ in range(1000)]
    kept.one.apply_assignment({QUEUE: StartOffset(0)})
    return kept


def poll(kept: Kept) -> object:
    return kept.one.next_parts(kept.one.start_poll(0.0), 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_an_empty_poll_warns_with_cause_and_remedy(lost: Kept, caplog: pytest.LogCaptureFixture) -> None:
    for now in (0.0, 5.0):
        lost.now = now
        assert poll(lost) == []
    (text,) = warnings(caplog)
    assert all(words in text for words in ("no broker has answered yet", "refused (at pod:8080)", "'addressMap'"))


def test_a_minute_without_an_answer_is_an_error(lost: Kept) -> None:
    for now in (0.0, 30.0, 59.9):
        lost.now = now
        assert poll(lost) == []
    lost.now = 60.0
    with pytest.raises(ConnectionLost, match="no broker has answered for 60 s: cannot connect: refused") as caught:
        poll(lost)
    assert (caught.value.addr, caught.value.remedy) == (LOST.addr, LOST.remedy)
    for now in (61.0, 120.0):  # whoever polls again tries for another minute
        lost.now = now
        assert poll(lost) == []
    lost.now = 121.0
    with pytest.raises(ConnectionLost, match="for 60 s"):
        poll(lost)


def test_a_long_poll_ends_with_the_error(lost: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.consumer.reachability.MAX_UNREACHED_S", 0.05)
    lost.polls.reachability = Reachability("g", Clock())
    lost.polls.reachability.on_failure("b", LOST)
    with pytest.raises(ConnectionLost, match="no broker has answered"):
        lost.one.next_parts(Deadline.after(WAIT_S), 1)


def test_a_poll_for_a_topic_that_is_not_there_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.consumer.reachability.MAX_UNREACHED_S", 0.02)
    kept = Kept()
    kept.polls.reachability = Reachability("g", Clock())
    deadline = Deadline.after(0.3)
    assert kept.one.next_parts(deadline, 1) == []
    assert deadline.expired


def test_after_a_first_answer_polls_only_warn(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.one.apply_assignment({QUEUE: StartOffset(0)})
    assert poll(kept)
    kept.polls.reachability.on_failure("b", LOST)
    for now in (100.0, 1000.0):
        kept.now = now
        kept.polls.has_returned_all = True
        assert poll(kept) == []
    (text,) = warnings(caplog)
    assert "a broker does not answer" in text


def test_a_group_that_cannot_be_seen_counts(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)

    def members(*asked: object) -> None:
        raise CallTimeout("no answer in time", "pod:8080")

    monkeypatch.setattr(kept.fake, "members", members)
    assert poll(kept) == []
    assert "no answer in time" in caplog.text
    kept.now = 60.0
    with pytest.raises(ConnectionLost, match="for 60 s: no answer in time"):
        poll(kept)


def behind_proxy(monkeypatch: pytest.MonkeyPatch, *failing: str) -> Kept:
    """A member that has joined through a Proxy, which does not reach its broker: it fails in these requests."""
    kept = Kept()
    monkeypatch.setattr(kept.fake, "receives_notices", False)
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    for name in failing:
        monkeypatch.setattr(kept.fake, name, raising(ServerFault("no member") if name == "members" else LOST))
    return kept


@pytest.mark.parametrize("failing", ["members", "committed"])
def test_a_proxy_that_answers_by_itself_is_no_broker(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = behind_proxy(monkeypatch, failing)
    for kept.now in (0.0, 2.0, 40.0, 59.0):
        assert poll(kept) == []
    kept.now = 62.0
    with pytest.raises(ConnectionLost, match=r"no broker has answered for 60 s: (no member|cannot connect)"):
        poll(kept)


def test_a_member_without_queues_does_not_fail_at_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = behind_proxy(monkeypatch)
    kept.fake.has_members("a", "me")  # there is one queue
    for kept.now in (0.0, 30.0, 59.0):
        assert poll(kept) == []
    with monkeypatch.context() as patch:
        patch.setattr(kept.fake, "members", raising(CallTimeout("no answer")))
        for kept.now in (70.0, 80.0):  # for a moment
            assert poll(kept) == []
    for kept.now in (90.0, 150.0):
        assert poll(kept) == []


@pytest.mark.parametrize("error", [RemoteProtocolError("gRPC", "pod:8081"), CertificateRefused("no", "pod:8080")])
def test_a_server_that_cannot_be_used_is_an_error_at_once(
    error: RocketMQError, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    monkeypatch.setattr(kept.fake, "members", raising(error))
    with pytest.raises(type(error)) as caught:
        kept.one.next_parts(Deadline.after(WAIT_S), 1)
    assert caught.value.addr == error.addr
    kept.polls.reachability.on_answer("b")
    kept.now = 21.0
    assert poll(kept) == [], "one of several brokers"


@pytest.mark.parametrize("error", [AccessDenied("no right", "h:1"), NotSupported("a name server", "h:1")])
@pytest.mark.parametrize("request_name", ["members", "committed"])
def test_a_consumer_that_is_refused_raises(
    error: RocketMQError, request_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
    with monkeypatch.context() as patch:
        patch.setattr(kept.fake, request_name, raising(error))
        for kept.now in (0.0, 2.0):
            with pytest.raises(type(error), match=error.message) as caught:
                kept.one.next_parts(Deadline.after(WAIT_S), 1)
            assert caught.value.addr == error.addr
    kept.now = 4.0
    assert kept.one.next_parts(Deadline.after(WAIT_S), 1), "the right was granted"
    kept.polls.has_returned_all = True
    monkeypatch.setattr(kept.fake, request_name, raising(error))
    for kept.now in (30.0, 60.0):
        assert poll(kept) == [], "what can be read is read"


@pytest.mark.parametrize("read", ["an offset to begin at", "a pull that is retried"])
def test_a_refusal_is_no_error_while_a_queue_can_be_read(read: str) -> None:
    kept = Kept()
    if "pull" in read:
        kept.fake.pull = lambda request, deadline, done: done(BrokerBusy("busy"))  # type: ignore[method-assign]
        kept.one.apply_assignment({QUEUE: StartOffset(0)})
        assert poll(kept) == []
    else:
        kept.shared.set_subscription("t", NO_FILTER, lambda address, question: None)
        assert list(kept.shared.allocate([])) == [QUEUE]
    kept.polls.reachability.on_failure("t", AccessDenied("no right"))
    kept.polls.reachability.raise_permanent_failure()


def test_other_refusals_warn_with_each_empty_minute(contact: Reachability, caplog: pytest.LogCaptureFixture) -> None:
    contact.on_failure("t", ServerFault("no such group", remedy="Make the group"))
    contact.raise_permanent_failure()
    contact.check_empty_poll()
    (text,) = warnings(caplog)
    assert "a broker refuses: " in text
    assert "Make the group" in text


@pytest.fixture
def contact() -> Reachability:
    return Reachability("g", Clock(lambda: 0.0))


def test_a_refusal_that_may_heal_is_an_answer(contact: Reachability, caplog: pytest.LogCaptureFixture) -> None:
    contact.on_failure("b", LOST)
    contact.on_failure("b", BrokerBusy("busy"))
    contact.check_empty_poll()
    assert contact.remaining_s() == float("inf")
    assert not caplog.records


def test_a_topic_that_is_not_there_yet_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    contact = Reachability("g", Clock(lambda: now[0]))
    for now[0] in (0.0, 60.0, 61.0, 200.0):
        contact.remaining_s()
        contact.on_failure("t", RouteNotFound("none"))
        contact.check_empty_poll()
    assert contact.remaining_s() > 0
    assert not caplog.records


def test_a_topic_that_is_gone_ends_the_trouble_with_it(contact: Reachability, caplog: pytest.LogCaptureFixture) -> None:
    contact.on_failure("t", LOST)
    contact.on_failure("t", RouteNotFound("none"))
    contact.check_empty_poll()
    assert not caplog.records
    contact.on_failure("t", LOST)
    contact.on_failure("u", RouteNotFound("none"))
    contact.check_empty_poll()
    assert "no broker has answered yet" in caplog.text


def test_an_answer_about_something_else_ends_no_trouble(
    contact: Reachability, caplog: pytest.LogCaptureFixture
) -> None:
    contact.on_failure(MessageQueue("t", "a", 0).broker_name, LOST)
    contact.on_answer("b")
    contact.check_empty_poll()
    assert "a broker does not answer" in caplog.text
