"""What may be stored is looked up before it is sent again: as a table, and against brokers that do as they like."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import ports
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    BrokerError,
    BrokerNotFound,
    CallTimeout,
    ClosedError,
    ConnectionLost,
    LocalProtocolError,
    MessageRefused,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    UnprovedError,
    error_for,
)
from rocketmq_spark.model import MessageQueue, QueueEnd, SendRequest, SendResult, SendStatus
from rocketmq_spark.producer.ambiguity import AmbiguousSendResolver, SendOutcomeKind, classify, without_stored
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion, split_result, with_message_ids
from rocketmq_spark.producer.retry import RetryPolicy
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import decode_batch, encode_item
from rocketmq_spark.wire.properties import decode_properties, encode_properties
from tests.fakes.ports import Fake
from tests.fakes.sender import Outcome
from tests.fakes.timer import ManualTimer
from tests.producer.bench import Bench
from tests.queues import q, qs

STORED, REFUSED, AMBIGUOUS = SendOutcomeKind.STORED, SendOutcomeKind.REJECTED, SendOutcomeKind.AMBIGUOUS


def answer(code: int, remark: str = "") -> RocketMQError:
    return error_for(code)("refused", "a:1", code, remark=remark or None)


def unsent(error: RocketMQError) -> RocketMQError:
    error.unsent = True
    return error


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        *((SendResult(status, "", q("a:0"), 7), STORED) for status in SendStatus if status != "SPOOLED"),
        (CallTimeout("no answer"), AMBIGUOUS),
        (unsent(CallTimeout("not connected in time")), REFUSED),
        (ConnectionLost("reset"), AMBIGUOUS),
        (unsent(ConnectionLost("refused")), REFUSED),
        (RemoteProtocolError("garbage"), AMBIGUOUS),
        (LocalProtocolError("cannot be sent"), REFUSED),
        (MessageRefused("too large"), REFUSED),
        *((error("not sent"), REFUSED) for error in (ClosedError, BrokerNotFound, RouteNotFound)),
        (answer(Response.SYSTEM_ERROR), AMBIGUOUS),
        (answer(Response.SYSTEM_ERROR, "UNKNOWN_ERROR"), AMBIGUOUS),
        (answer(Response.SYSTEM_ERROR, "java.lang.NullPointerException"), AMBIGUOUS),
        (answer(Response.SYSTEM_ERROR, "[PC_SYNCHRONIZED]broker busy, start flow control for a while"), AMBIGUOUS),
        (answer(Response.SYSTEM_ERROR, "broker unable to service, until 1"), REFUSED),
        (answer(Response.SYSTEM_ERROR, "create mapped file failed, server is busy or broken."), REFUSED),
        (answer(Response.SYSTEM_ERROR, "in-sync replicas not enough"), AMBIGUOUS),
        (answer(Response.SYSTEM_BUSY), AMBIGUOUS),
        (answer(Response.SYSTEM_BUSY, "something new"), AMBIGUOUS),
        (answer(Response.SYSTEM_BUSY, "[PC_SYNCHRONIZED]broker busy"), AMBIGUOUS),
        (answer(Response.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while"), REFUSED),
        (answer(Response.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"), REFUSED),
        (answer(Response.SYSTEM_BUSY, "[OVERLOAD]system busy, start flow control for a while"), REFUSED),
        (answer(Response.SERVICE_NOT_AVAILABLE), REFUSED),
        (answer(Response.MESSAGE_ILLEGAL), REFUSED),
        (answer(Response.NO_PERMISSION), REFUSED),
        (answer(Response.TOPIC_NOT_EXIST), REFUSED),
        (answer(Response.GO_AWAY), REFUSED),
        (BrokerError("a code nobody knows", "a:1", 4711), AMBIGUOUS),
    ],
    ids=repr,
)
def test_every_end_is_definite_or_ambiguous(outcome: Outcome, end: SendOutcomeKind) -> None:
    assert classify(outcome) is end


def test_without_a_queue_nothing_was_sent() -> None:
    assert classify(CallTimeout("the name server says nothing"), has_queue=False) is REFUSED


def batch(*ids: str) -> SendRequest:
    items = [encode_item(name.encode(), encode_properties({"UNIQ_KEY": name}), 0) for name in ids]
    return SendRequest("g", b"".join(items), batch=True)


def ids_of(request: SendRequest) -> list[str]:
    if not request.batch:
        return [decode_properties(request.properties)["UNIQ_KEY"]]
    return [decode_properties(item.properties)["UNIQ_KEY"] for item in decode_batch(request.body)]


def test_a_batch_that_was_cut_in_two_keeps_the_rest() -> None:
    request = batch("x", "y", "z")
    assert without_stored(request, {"a"}) == (0, request)
    stored, rest = without_stored(request, {"x", "z"})
    assert stored == 2
    assert rest is not None
    assert ids_of(rest) == ["y"]
    assert without_stored(request, {"x", "y", "z"}) == (3, None)
    single = SendRequest("g", b"body", encode_properties({"UNIQ_KEY": "s"}))
    assert without_stored(single, {"s"}) == (1, None)
    assert without_stored(single, set()) == (0, single)


class Broker:
    """Stores what the script says, and answers what the script says: the two are independent."""

    def __init__(self, script: Sequence[tuple[str, str]]) -> None:
        self.script = list(script)
        self.stored: Counter[str] = Counter()
        self.places: list[tuple[MessageQueue, int, str]] = []
        self.looks: list[dict[MessageQueue, int]] = []
        self.fails = False
        self.followers = ""
        self.offsets: Counter[MessageQueue] = Counter()
        self.queues = qs("a:0-1 b:0-1")
        self.master = "10.0.0.1:10911"
        self.away: set[str] = set()  # brokers that are not asked where their queues end
        self.late: Callable[[Callable[[], None]], None] | None = None  # what has its answer come later
        self.breaks: Exception | None = None
        self.stopped = 0
        self.noted = False  # it said where its queues end when they were empty, as it is asked once a minute

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        return self.queues

    def send_async(
        self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[[Outcome], None]
    ) -> None:
        what, says = self.script.pop(0) if self.script else ("all", "ok")
        ids = ids_of(request)
        ids = {"all": ids, "none": [], "some": ids[: len(ids) // 2]}[what]
        if says == "refused":
            done(answer(Response.SERVICE_NOT_AVAILABLE))
            return
        if says == "ok":
            ids = ids_of(request)
        first = self.offsets[queue]
        for name in ids:
            self.places.append((queue, self.offsets[queue], name))
            self.stored[name] += 1
            self.offsets[queue] += 1
        ambiguous = {
            "timeout": CallTimeout("no answer"), "lost": ConnectionLost("reset"), "1": answer(1),
            "followers": answer(1, self.followers),
        }  # fmt: skip
        if says == "late":
            assert self.late is not None
            self.late(lambda: done(CallTimeout("no answer")))
            return
        done(SendResult(SendStatus.SEND_OK, "", queue, first) if says == "ok" else ambiguous[says])

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        outcomes: list[Outcome] = []
        self.send_async(queue, request, deadline, outcomes.append)
        (outcome,) = outcomes
        if isinstance(outcome, RocketMQError):
            raise outcome
        return outcome

    def end(self, queue: MessageQueue) -> QueueEnd:
        if queue.broker_name in self.away:
            raise CallTimeout("the broker does not say where its queues end")
        return QueueEnd(0 if self.noted else self.offsets[queue], self.master)

    def find_stored(
        self, since: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline
    ) -> set[str]:
        assert master == self.master
        self.looks.append(dict(since))
        if self.breaks is not None:
            raise self.breaks
        if self.fails:
            raise UnprovedError("nobody knows", remedy="Look")
        return {name for queue, at, name in self.places if queue in since and at >= since[queue] and name in ids}

    def stop(self) -> None:
        self.stopped += 1


def run(
    bench: Bench, broker: Broker, requests: Sequence[SendRequest], pinned: Sequence[Any], blocking: bool = False
) -> list[SendCompletion]:
    ended: list[SendCompletion] = []
    settings = ProducerSettings(
        group="g", retries=None, pinned_retries=None, send_timeout_s=60.0, max_in_flight=None,
        max_in_flight_per_broker=4, failed_queues_stay_closed=True, heartbeat_s=0,
    )  # fmt: skip
    engine = Engine(Fake(ports.Sender, broker), settings, ManualTimer(bench.time))  # type: ignore[arg-type]
    engine.ambiguity_resolver = AmbiguousSendResolver(broker, engine.timer)
    broker.late = lambda answer: engine.timer.call_later(1.0, answer)
    for request, queue in zip(requests, pinned, strict=True):
        outgoing = OutgoingSend("T", request, 60.0, queue, ordered=queue is not None, done=ended.append)
        if not blocking:
            engine.submit(outgoing)
            continue
        with contextlib.suppress(RocketMQError):
            engine.send(outgoing)
    bench.time.advance(120.0)
    engine.close(Deadline.after(0))
    return ended


def begun(confirming: AmbiguousSendResolver, queue: MessageQueue, timeout_s: float = 60.0) -> OutgoingSend:
    """An attempt by itself."""
    outgoing = OutgoingSend("T", batch("x"), timeout_s)
    outgoing.reset_attempts(RetryPolicy())
    confirming.record_lookup_start(outgoing, queue)
    return outgoing


_scripts = st.lists(
    st.tuples(st.sampled_from(["all", "some", "none"]), st.sampled_from(["ok", "refused", "timeout", "lost", "1"])),
    max_size=12,
)
_queues = st.lists(st.sampled_from([None, q("a:0"), q("b:1")]), min_size=1, max_size=4)


@given(_scripts, _queues, st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_ambiguous_sends_are_stored_once_whatever_brokers_do(
    script: list[tuple[str, str]], pinned: list[Any], size: int, fails: bool, blocking: bool, noted: bool
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        bench, broker = Bench(patched), Broker(script)
        broker.fails, broker.noted = fails, noted
        names = itertools.count()
        requests = [batch(*(f"m{next(names)}" for _ in range(size))) for _ in pinned]
        ended = run(bench, broker, requests, pinned, blocking)
    assert len(ended) == len(requests)
    assert all(count == 1 for count in broker.stored.values())
    for each in ended:
        mine = [broker.stored[name] for name in ids_of(each.outgoing.request)]
        if isinstance(each.outcome, SendResult):
            assert all(mine), "acknowledged, and not stored"
            assert each.outcome.status is SendStatus.SEND_OK
            assert 0 <= each.confirmed_count <= len(mine)
        else:
            assert fails or ("none", "1") in script or ("some", "1") in script  # which is doubted a few times only
            assert isinstance(each.outcome, UnprovedError) or not any(mine), "raised, and stored"


@pytest.mark.parametrize("blocking", [False, True])
def test_nothing_goes_to_a_queue_whose_end_is_not_known(bench: Bench, blocking: bool) -> None:
    broker = Broker([])
    broker.away = {"a"}
    ended = run(bench, broker, [batch(f"m{i}") for i in range(4)], [None] * 4, blocking)
    assert {queue.broker_name for queue, _, _ in broker.places} == {"b"}
    assert all(isinstance(each.outcome, SendResult) for each in ended)
    assert broker.looks == []
    broker.away = {"a", "b"}
    for each in run(bench, broker, [batch("z")], [q("a:0")], blocking):
        assert isinstance(each.outcome, RocketMQError)
        cause = each.outcome if isinstance(each.outcome, CallTimeout) else each.outcome.__cause__
        assert isinstance(cause, CallTimeout)
        assert cause.unsent
    assert broker.looks == []


@pytest.mark.parametrize("blocking", [False, True])
def test_a_look_is_at_the_master_that_was_sent_to(bench: Bench, blocking: bool) -> None:
    """Where the end of a queue is known of another master, what was acknowledged before says nothing of it."""
    broker = Broker([("all", "ok"), ("all", "ok"), ("all", "timeout")])
    masters = iter(["10.0.0.1:10911", "10.0.0.1:10911", "10.0.0.2:10911"])

    def end(queue: MessageQueue) -> QueueEnd:
        broker.master = next(masters)
        return QueueEnd(0, broker.master)

    broker.end = end  # type: ignore[method-assign]
    ended = run(bench, broker, [batch("x"), batch("y"), batch("z")], [q("a:0")] * 3, blocking)
    assert broker.looks == [{q("a:0"): 0}]
    assert [each.confirmed_count for each in ended] == [0, 0, 1]


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), KeyboardInterrupt()])
def test_what_breaks_after_the_request_went_out_is_looked_up(bench: Bench, error: BaseException) -> None:
    broker = Broker([])

    def breaks(*given: Any) -> None:
        broker.send_async = Broker.send_async.__get__(broker)  # type: ignore[method-assign]
        broker.send_async(*given[:3], lambda outcome: None)
        raise error

    broker.send_async = breaks  # type: ignore[method-assign]
    if isinstance(error, Exception):
        (ended,) = run(bench, broker, [batch("x")], [q("a:0")])
        assert (ended.confirmed_count, broker.stored) == (1, {"x": 1})
    else:
        with pytest.raises(KeyboardInterrupt):
            run(bench, broker, [batch("x")], [q("a:0")])
        bench.time.advance(120.0)
        assert broker.stored == {"x": 1}
    assert broker.looks == [{q("a:0"): 0}]


@pytest.mark.parametrize("stored", ["all", "none"])
@pytest.mark.parametrize("name", ["DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"])
def test_delayed_message_not_found_is_not_sent_again(bench: Bench, name: str, stored: str) -> None:
    broker = Broker([(stored, "timeout")])
    request = SendRequest("g", b"body", encode_properties({"UNIQ_KEY": "s", name: "3"}))
    (ended,) = run(bench, broker, [request], [None])
    if stored == "all":  # it was due
        assert (isinstance(ended.outcome, SendResult), ended.confirmed_count) == (True, 1)
    else:
        assert isinstance(ended.outcome, UnprovedError)
        assert "not in its topic before it is due" in ended.outcome.message
    assert broker.script == []
    assert sum(broker.stored.values()) == (stored == "all")


@pytest.mark.parametrize("blocking", [False, True])
def test_a_message_by_itself_that_is_not_stored_is_sent_again(bench: Bench, blocking: bool) -> None:
    broker = Broker([("none", "timeout")])
    request = SendRequest("g", b"body", encode_properties({"UNIQ_KEY": "s"}))
    (ended,) = run(bench, broker, [request], [None], blocking)
    assert isinstance(ended.outcome, SendResult)
    assert (ended.confirmed_count, broker.stored, len(broker.looks)) == (0, {"s": 1}, 1)


def test_a_look_begins_behind_what_was_acknowledged_before(bench: Bench) -> None:
    broker = Broker([("all", "ok"), ("all", "ok"), ("all", "timeout")])
    broker.noted = True
    queue = q("a:0")
    ended = run(bench, broker, [batch("x", "y"), batch("z"), batch("w")], [queue] * 3)
    assert [each.confirmed_count for each in ended] == [0, 0, 1]
    assert broker.looks == [{queue: 2}]


def test_one_look_for_several_begins_with_the_first_of_them(bench: Bench) -> None:
    """What came between the first and the last was acknowledged; a look from there on would miss the first."""
    broker = Broker([("all", "late"), ("all", "ok"), ("all", "late")])
    broker.queues = qs("a:0")
    ended = run(bench, broker, [batch("x"), batch("y"), batch("z")], [None] * 3)
    assert broker.looks == [{q("a:0"): 0}]
    assert broker.stored == {"x": 1, "y": 1, "z": 1}
    assert sum(each.confirmed_count for each in ended) == 2


def test_each_master_is_asked_for_its_sends_until_last_deadline(bench: Bench) -> None:
    broker, queue, asked, settled = Broker([]), q("a:0"), [], []
    confirming = AmbiguousSendResolver(broker, ManualTimer(bench.time))

    def find_stored(since: Any, master: str, ids: Any, deadline: Deadline) -> Any:
        return asked.append((master, dict(since), round(deadline.remaining()))) or set()

    broker.find_stored = find_stored  # type: ignore[method-assign]
    for broker.master, timeout_s in (("one", 9.0), ("two", 7.0), ("one", 5.0), ("one", 6.0)):
        end = partial(lambda name, *_: settled.append(name), broker.master)
        confirming.resolve_async(begun(confirming, queue, timeout_s), queue, CallTimeout("no answer"), end)
    bench.time.run_due()
    assert sorted(asked) == [("one", {queue: 0}, 9), ("two", {queue: 0}, 7)]
    assert sorted(settled) == ["one", "one", "one", "two"]


def test_lookup_after_another_attempt_starts_at_that_attempt(bench: Bench) -> None:
    """It may have gone to another queue, which is much shorter."""
    broker = Broker([("none", "refused"), ("all", "timeout")])
    asked: list[MessageQueue] = []

    def end(queue: MessageQueue) -> QueueEnd:
        asked.append(queue)
        return QueueEnd(50 if queue == asked[0] else 3, broker.master)

    broker.end = end  # type: ignore[method-assign]
    broker.offsets = Counter(dict.fromkeys(broker.queues, 3))
    (ended,) = run(bench, broker, [batch("x")], [None])
    assert broker.looks == [{asked[1]: 3}]
    assert (broker.stored, ended.confirmed_count) == ({"x": 1}, 1)
    assert asked[0].broker_name != asked[1].broker_name


def test_a_look_that_breaks_is_an_outcome(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker([("all", "timeout")])
    broker.breaks = ZeroDivisionError("a bug")
    (ended,) = run(bench, broker, [batch("x")], [None])
    assert isinstance(ended.outcome, UnprovedError)
    assert "looking up what is stored failed: ZeroDivisionError: a bug" in ended.outcome.message
    (record,) = caplog.records
    assert re.fullmatch(r"could not check which messages [ab] has stored", record.getMessage())
    assert record.exc_info is not None
    assert record.exc_info[1] is broker.breaks


def test_the_close_ends_looks(bench: Bench) -> None:
    """What they wait for would hold up the task that is over."""
    broker = Broker([])
    run(bench, broker, [batch("x")], [None])
    assert broker.stopped == 1
    confirming, queue = AmbiguousSendResolver(broker, ManualTimer(bench.time)), q("a:0")
    confirming.resolve_async(begun(confirming, queue), queue, CallTimeout("no answer"), lambda *_: None)
    (thread,) = confirming._lookup_timers.values()
    confirming.close()
    assert thread._closed


def test_an_equal_row_of_an_earlier_attempt_confirms_nothing(bench: Bench) -> None:
    """It differs in the last bytes of its id only, and all are compared."""
    broker = Broker([("none", "timeout")])
    broker.places = [(q("a:0"), 0, "row-1")]
    broker.offsets[q("a:0")] = 1
    run(bench, broker, [batch("row-2")], [q("a:0")])
    assert broker.stored == {"row-2": 1}


@pytest.mark.parametrize(
    "words", ["[PC_SYNCHRONIZED]broker busy, start flow control for a while", "in-sync replicas not enough"]
)
def test_send_unconfirmed_by_dledger_followers_is_looked_up(bench: Bench, words: str) -> None:
    """Its leader has stored it when it says so, and keeps it once they are back."""
    broker = Broker([("all", "followers")])
    broker.followers = words
    (ended,) = run(bench, broker, [batch("x", "y")], [None])
    assert broker.stored == {"x": 1, "y": 1}
    assert ended.confirmed_count == 2


def test_what_ends_after_the_close_is_not_looked_up(bench: Bench) -> None:
    """Nobody would end the thread of that look."""
    held: list[Callable[[Outcome], None]] = []
    broker = Broker([])
    broker.send_async = lambda queue, request, deadline, done: held.append(done)  # type: ignore[method-assign]
    (ended,) = run(bench, broker, [batch("x")], [None])
    assert isinstance(ended.outcome, ClosedError)
    held[0](CallTimeout("no answer"))
    bench.time.advance(60.0)
    assert broker.looks == []


def test_what_cannot_be_looked_up_is_not_sent_again(bench: Bench) -> None:
    broker = Broker([("none", "timeout")])
    broker.fails = True
    (ended,) = run(bench, broker, [batch("x")], [None])
    assert isinstance(ended.outcome, UnprovedError)
    assert "may be stored, and its broker did not confirm" in ended.outcome.message
    assert isinstance(ended.outcome.__cause__, CallTimeout)
    assert not broker.stored


@pytest.mark.parametrize("blocking", [False, True])
def test_offsets_of_partly_found_batch_are_unknown(bench: Bench, blocking: bool) -> None:
    """The broker's answer is of the rest only."""
    broker = Broker([("some", "timeout"), ("all", "ok")])
    (ended,) = run(bench, broker, [batch("x", "y")], [q("a:0")], blocking)
    assert (broker.stored, ended.confirmed_count) == ({"x": 1, "y": 1}, 1)
    result = ended.outcome
    assert isinstance(result, SendResult)
    assert (result.queue, result.queue_offset, result.offset_msg_id) == (q("a:0"), None, None)
    assert [(each.msg_id, each.queue_offset) for each in split_result(with_message_ids(result, ["x", "y"]), 2)] == [
        ("x", None),
        ("y", None),
    ]


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("lost", ["timeout", "1"])
def test_partly_stored_batch_error_counts_stored_messages(bench: Bench, lost: str, blocking: bool) -> None:
    """The rest is refused for good."""
    broker = Broker([("some", lost), *[("none", "1")] * 5])
    (ended,) = run(bench, broker, [batch("x", "y")], [q("a:0")], blocking)
    assert (broker.stored, ended.confirmed_count) == ({"x": 1}, 1)
    assert isinstance(ended.outcome, UnprovedError)
    assert "1 of its messages are stored" in ended.outcome.message


def test_where_a_topic_was_made_again_looks_begin_in_the_new_one(bench: Bench) -> None:
    """What landed in the old one lies behind what is sent now, and a look from there finds nothing of it."""
    broker = Broker([])
    confirming, queue = AmbiguousSendResolver(broker, ManualTimer(bench.time)), q("a:0")
    for landed in (1000, 999, 4, 3, 5):
        outcome = SendResult(SendStatus.SEND_OK, "", queue, landed)
        confirming.resolve_async(begun(confirming, queue), queue, outcome, lambda *_: None)
        if landed in (1000, 5):
            assert begun(confirming, queue).lookup_start == QueueEnd(landed, broker.master)


def test_lookup_start_follows_newly_noted_end_even_if_lower(bench: Bench) -> None:
    """That may have been in a topic that was made again since."""
    broker, queue, end = Broker([]), q("a:0"), [990]
    broker.end = lambda queue: QueueEnd(end[0], broker.master)  # type: ignore[method-assign]
    confirming = AmbiguousSendResolver(broker, ManualTimer(bench.time))
    outcome = SendResult(SendStatus.SEND_OK, "", queue, 1000)
    confirming.resolve_async(begun(confirming, queue), queue, outcome, lambda *_: None)
    assert begun(confirming, queue).lookup_start == QueueEnd(1000, broker.master)
    end[0] = 4
    assert begun(confirming, queue).lookup_start == QueueEnd(4, broker.master)
