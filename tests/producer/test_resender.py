"""What a spool kept goes through an engine like anything else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response, SysFlag
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError, RouteNotFound, ServerFault
from rocketmq_spark.model import MessageQueue, Resent, SendRequest, SendResult, SendStatus, SpooledSend
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer.accumulator import MAX_KEYWORD_BYTES
from rocketmq_spark.producer.delays import LIMITS_VALID_S
from rocketmq_spark.producer.resender import SILENT_RETRY_S, EngineResender
from rocketmq_spark.producer.routing import queues_of_environment
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import select
from rocketmq_spark.spool.lanes import RETRY_PAUSES_S
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.compression import compress, decompress
from rocketmq_spark.wire.envelope import INNER_TOPIC, QUEUE, unpack
from rocketmq_spark.wire.messages import BatchItem, decode_batch, encode_batch
from rocketmq_spark.wire.properties import decode_properties, encode_properties
from tests.fakes.sender import ScriptedSender, refused
from tests.fakes.timer import ManualTimer
from tests.helpers import no_more_threads, raising
from tests.producer.bench import Bench, told_storage
from tests.queues import q, qs

REQUEST = SendRequest("g", b"x", "UNIQ_KEY\x01ID\x02")


@pytest.fixture
def resender(bench: Bench) -> EngineResender:
    bench.sender = ScriptedSender(bench.time)
    settings = ProducerSettings(
        group="g", retries=None, pinned_retries=None, send_timeout_s=120, failed_queues_stay_closed=True
    )
    return told_storage(bench, EngineResender(bench.sender, settings, ManualTimer(bench.time)))


def resent(bench: Bench, resender: EngineResender, send: SpooledSend) -> Resent:
    found: list[Resent] = []
    resender.resend(send, found.append)
    bench.time.advance(4)
    (only,) = found
    return only


def test_it_goes_to_its_queue_as_it_was_kept(bench: Bench, resender: EngineResender) -> None:
    assert resent(bench, resender, SpooledSend("T", REQUEST, q("b:1"), ("ID",))) == Resent(q("b:1"))
    assert bench.sender.calls == [("async", q("b:1"), REQUEST)]


def test_unpinned_spooled_send_tries_other_brokers_after_failure(bench: Bench, resender: EngineResender) -> None:
    bench.sender.script = [ConnectionLost("down"), ConnectionLost("down")]
    found = resent(bench, resender, SpooledSend("T", REQUEST))
    assert found.queue in qs("a:0-1 b:0-1")
    assert len(bench.sender.calls) == 3


def test_unpinned_spooled_sends_avoid_a_hanging_broker(bench: Bench, resender: EngineResender) -> None:
    """Each try there takes all the time that it has, and holds up what waits behind it."""
    bench.sender.by_broker, bench.sender.latency_s = {"a": lambda: CallTimeout("no answer in time")}, {"a": 3.0}
    found: list[MessageQueue | None] = []
    for _ in range(30):
        resender.resend(SpooledSend("T", REQUEST), lambda resent: found.append(resent.queue))
        bench.time.advance(0.01)
    assert bench.sender.brokers.split().count("a") == found.count(None) == 1


def test_resend_keeps_environment_queues_of_before_broker_left(bench: Bench) -> None:
    bench.sender = ScriptedSender(bench.time)
    settings = ProducerSettings(group="g", environment=Environment.of(1))
    queues_of_environment(bench.sender, Environment.of(1))["T"] = (q("a:0"),)
    bench.sender.routes["T"] = tuple(qs("b:0-1"))
    resender = EngineResender(bench.sender, settings, ManualTimer(bench.time))
    found = resent(bench, resender, SpooledSend("T", REQUEST))
    assert (found.queue, found.is_temporary) == (None, True)
    bench.sender.routes["T"] = tuple(qs("a:0-1 b:0-1"))
    assert resent(bench, resender, SpooledSend("T", REQUEST)).queue == q("a:0")


@pytest.mark.parametrize(
    ("environment", "queue"),
    [((1,), "b:0"), ((2, 2), "a:0"), (("eu", {"eu": {"a": [1]}}), "a:0")],
    ids=["number", "count", "listed"],
)
def test_spooled_send_to_queue_outside_environment_is_refused(
    bench: Bench, environment: tuple[Any, ...], queue: str
) -> None:
    """The command 'spool assign' gave the records to this one, or it has other queues now."""
    bench.sender = ScriptedSender(bench.time)
    bench.sender.routes["T"] = tuple(qs("a:0-1 b:0-1"))
    mine = Environment.of(*environment)
    if mine.is_by_position:
        queues_of_environment(bench.sender, mine)["T"] = (q("a:0"),)
    resender = EngineResender(bench.sender, ProducerSettings(group="g", environment=mine), ManualTimer(bench.time))
    resender.resend(SpooledSend("T", REQUEST, q(queue)), (found := []).append)
    assert found == [Resent(None, f"T/{queue.replace(':', '/')} does not belong to environment {mine.name!r}")]
    own = q("a:0" if mine.is_by_position else "a:1")
    assert resent(bench, resender, SpooledSend("T", REQUEST, own)).queue == own


@pytest.mark.parametrize("delayed", [False, True])
def test_resend_waits_for_broker_with_only_queue_of_environment(bench: Bench, delayed: bool) -> None:
    """A process that starts while it is away finds none: nobody has refused what it was given to keep."""
    bench.sender = ScriptedSender(bench.time)
    more = f"TIMER_DELIVER_MS\x01{round(1000 * bench.time.now) + 10**15}\x02" if delayed else ""
    send = SpooledSend("T", REQUEST._replace(properties=REQUEST.properties + more))
    bench.sender.routes["T"] = tuple(qs("b:0-1"))
    settings = ProducerSettings(group="g", environment=Environment.of(3, 3))
    resender = EngineResender(bench.sender, settings, Timer("x") if delayed else ManualTimer(bench.time))
    found: list[Resent] = []
    ended = Event()
    resender.resend(send, lambda each: (found.append(each), ended.set()))
    bench.time.advance(4)
    assert ended.wait(10)
    assert (found[0].queue, found[0].is_temporary) == (None, True)
    assert "expected at most 2, the queues of a broker" in str(found[0].error)
    resender.close(Deadline.after(0))


def test_a_selector_chooses_now(bench: Bench, resender: EngineResender) -> None:
    found = resent(bench, resender, SpooledSend("T", REQUEST, selector="hash", arg="customer-7"))
    assert found.queue == select("hash", qs("a:0-1 b:0-1"), None, "customer-7")


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (ConnectionLost("down"), True),
        (refused(Response.MESSAGE_ILLEGAL), False),
        (RouteNotFound("missing", "ns:1", Response.TOPIC_NOT_EXIST, "T"), True),
    ],
    ids=str,
)
def test_a_failure_says_whether_it_may_pass(
    bench: Bench, resender: EngineResender, error: RocketMQError, passing: bool
) -> None:
    bench.sender.by_broker = {name: lambda: error for name in "ab"}
    bench.sender.routes.clear()
    found = resent(bench, resender, SpooledSend("T", REQUEST, q("a:0")))
    assert (found.queue, found.is_temporary) == (None, passing)
    assert found.error is not None
    assert error.message in found.error
    assert len(bench.sender.calls) == 1


@pytest.mark.parametrize("status", [each for each in SendStatus if each is not SendStatus.SPOOLED])
@pytest.mark.parametrize("must", [True, False])
def test_what_must_be_stored_well_is_kept_until_it_is(bench: Bench, status: SendStatus, must: bool) -> None:
    bench.sender = ScriptedSender(bench.time)
    bench.sender.by_broker = {name: lambda: SendResult(status, "ID", q("a:0"), 1) for name in "ab"}
    settings = ProducerSettings(group="g", store_must_be_ok=must)
    resender = EngineResender(bench.sender, settings, ManualTimer(bench.time))
    found = resent(bench, resender, SpooledSend("T", REQUEST, q("a:0")))
    if must and status is not SendStatus.SEND_OK:
        error = f"it was stored with {status.value}, and option 'requireStoreOk' is ok"
        assert found == Resent(None, error, is_temporary=True)
    else:
        assert found == Resent(q("a:0"))


def test_what_has_no_answer_at_the_close_has_not_failed_for_good(bench: Bench, resender: EngineResender) -> None:
    bench.sender.script = [None]
    found: list[Resent] = []
    resender.resend(SpooledSend("T", REQUEST), found.append)
    resender.close(Deadline.after(0))
    assert [(each.queue, each.is_temporary) for each in found] == [(None, True)]


def test_resend_open_at_process_close_does_not_count_as_a_try(bench: Bench, tmp_path: Path) -> None:
    """Ten ends of processes in the middle of a try made it a dead letter."""

    def clock() -> int:
        return round(1000 * bench.time.now)

    kept = SpooledSend("T", REQUEST)
    for number in range(len(RETRY_PAUSES_S) + 1):
        bench.sender = ScriptedSender(bench.time)
        bench.sender.script = [None]
        resender = EngineResender(bench.sender, ProducerSettings(group="g"), ManualTimer(bench.time))
        spool = SendSpool(Store(tmp_path, "never"), resender, ManualTimer(bench.time), clock)
        if not number:
            spool.keep([kept])
        bench.time.advance(RETRY_PAUSES_S[0] + 0.001)
        assert not bench.sender.script
        spool.close(Deadline.after(0))
        assert (spool.store.totals.depth, spool.store.totals.dead) == (1, 0)
    (work,) = Store(tmp_path, "never").take(clock(), 1)
    assert work.state.tries == 0


def test_what_is_handed_over_in_one_moment_is_sent_together(bench: Bench) -> None:
    bench.sender = ScriptedSender(bench.time)
    blocks: list[int] = []

    @contextlib.contextmanager
    def together() -> Iterator[None]:
        before = len(bench.sender.calls)
        yield
        if len(bench.sender.calls) > before:
            blocks.append(len(bench.sender.calls) - before)

    resender = EngineResender(bench.sender, ProducerSettings(group="g"), ManualTimer(bench.time), together)
    found: list[Resent] = []
    for _ in range(2):
        for number in range(5):
            resender.resend(SpooledSend("T", REQUEST, q("b:1"), (str(number),)), found.append)
        assert len(found) % 5 == 0
        bench.time.advance(1)
    assert (len(found), blocks) == (10, [5, 5])
    resender.close(Deadline.after(0))
    resender.resend(SpooledSend("T", REQUEST, q("b:1"), ("late",)), found.append)
    assert (found[-1].queue, found[-1].is_temporary) == (None, True)


DUE_MS = 1_700_000_000_000 + 5_000_000
LARGE = b"large " * 1000


def delayed(bench: Bench, resender: EngineResender, body: bytes, queue: str | None = None) -> Resent:
    """A message with a timer that was spooled while nobody said what timers do."""
    text = encode_properties({Property.UNIQ_KEY: "ID", Property.TIMER_DELIVER_MS: str(DUE_MS), "p": "v"})
    packed, sys_flag = (body, 0) if body is not LARGE else (compress(body), int(SysFlag.COMPRESSED | SysFlag.ZLIB))
    request = SendRequest("g", packed, text, sys_flag, 7, 5)
    bench.sender.calls.clear()
    chosen = (None, ("ID",), queue, "k") if queue == "hash" else (q(queue) if queue else None, ("ID",))
    return resent(bench, resender, SpooledSend("T", request, *chosen))


@pytest.mark.parametrize("body", [b"small", LARGE], ids=["plain", "compressed"])
@pytest.mark.parametrize("queue", [None, "a:1", "hash"])
def test_spooled_delay_beyond_broker_timers_goes_as_an_envelope(bench: Bench, body: bytes, queue: str | None) -> None:
    """A broker without timers would deliver it at once."""
    bench.sender = ScriptedSender(bench.time)
    settings = ProducerSettings(group="g", long_delay="dmq")
    resender = EngineResender(bench.sender, settings, ManualTimer(bench.time))
    bench.sender.longest_timers = {}
    for _ in range(2):
        found = delayed(bench, resender, body, queue)
        assert (found.queue, found.is_temporary, bench.sender.calls) == (None, True, [])
        assert "did not report timers" in (found.error or "")
    bench.sender.longest_timers = {"a": 0, "b": 259_200_000}
    found = delayed(bench, resender, body, queue)
    assert (found.queue, found.is_temporary, bench.sender.calls) == (None, True, []), "nobody takes envelopes"
    bench.sender.routes[INNER_TOPIC] = (q("a:0", INNER_TOPIC),)
    bench.sender.consumed_topics.add(INNER_TOPIC)
    assert delayed(bench, resender, body, queue).queue == q("a:0", INNER_TOPIC)
    ((_, _, request),) = bench.sender.calls
    stored = decompress(request.body, request.sys_flag) if request.sys_flag else request.body
    envelope, found_properties = unpack(stored), decode_properties(request.properties)
    assert (envelope.topic, envelope.due_ms, envelope.flag, envelope.body) == ("T", DUE_MS, 7, body)
    assert found_properties[Property.UNIQ_KEY] == "ID"
    chosen = {} if queue is None else {QUEUE: "b:1" if queue == "hash" else queue}
    assert decode_properties(envelope.properties) == {Property.UNIQ_KEY: "ID", "p": "v"} | chosen
    bench.sender.longest_timers = {"a": 259_200_000, "b": 259_200_000}
    bench.time.advance(LIMITS_VALID_S)
    assert delayed(bench, resender, body, queue).queue in qs("a:0-1 b:0-1")


@pytest.mark.parametrize(
    ("timers", "sent", "passing"),
    [({"a": 0, "b": 5}, False, False), ({"b": 5}, False, True), ({"a": 5, "b": 5}, True, False)],
)
def test_spooled_delay_without_service_waits_for_timer_limits(
    bench: Bench, resender: EngineResender, timers: dict[str, int], sent: bool, passing: bool
) -> None:
    bench.sender.longest_timers = timers
    found = delayed(bench, resender, b"x")
    assert (len(bench.sender.calls), found.is_temporary) == (sent, passing)
    bench.sender.longest_timers, calls = {}, len(bench.sender.seen("timers"))
    bench.time.advance(10_000)
    assert delayed(bench, resender, b"x").queue is not None, "it is due"
    assert len(bench.sender.seen("timers")) == calls


@pytest.mark.parametrize("queue", [None, "a:1"])
def test_broker_with_timers_off_gets_due_messages_without_delay(
    bench: Bench, resender: EngineResender, queue: str | None
) -> None:
    """It refuses a moment that is over, too (``HookUtils.handleScheduleMessage``)."""

    def off(queue: MessageQueue, request: SendRequest) -> SendResult | RocketMQError:
        if Property.TIMER_DELIVER_MS in request.properties:
            words = "accurate timer message is not enabled, timerWheelEnable is false"
            return ServerFault("the server refused the request", "a:1", Response.SYSTEM_ERROR, remark=words)
        return SendResult(SendStatus.SEND_OK, "ID", queue, 1)

    bench.sender.by_broker = {name: lambda: off for name in "ab"}
    found = delayed(bench, resender, b"x", queue)
    assert (found.queue, found.is_temporary) == (None, True)
    bench.time.advance(10_000)
    assert delayed(bench, resender, b"x", queue).queue is not None
    assert decode_properties(bench.sender.requests[-1].properties) == {Property.UNIQ_KEY: "ID", "p": "v"}


def test_broker_silent_about_timers_is_asked_once_for_all(bench: Bench, resender: EngineResender) -> None:
    """Each question takes all the time that it has, and those for other brokers wait behind it."""
    bench.sender.longest_timers = {"b": 259_200_000}
    text = encode_properties({Property.UNIQ_KEY: "ID", Property.TIMER_DELIVER_MS: str(DUE_MS)})
    found: list[Resent] = []
    for _ in range(2):
        for queue in (*qs("a:0-1") * 10, q("b:0")):
            resender.resend(SpooledSend("T", SendRequest("g", b"x", text), queue, ("ID",)), found.append)
        bench.time.run_due()
        bench.time.advance(SILENT_RETRY_S)
    assert [names for what, names in bench.sender.events if what == "timers"] == [["a"], ["b"], ["a"]]
    assert [each.queue for each in found].count(None) == 40
    assert [each.queue for each in found].count(q("b:0")) == 2


def test_whatever_goes_wrong_with_a_delay_is_an_outcome(
    bench: Bench, resender: EngineResender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bench.sender, "max_timer_delays_ms", raising(ZeroDivisionError("a bug")))
    found = delayed(bench, resender, b"x")
    assert (found.queue, found.error, found.is_temporary) == (None, "ZeroDivisionError: a bug", True)
    assert "cannot determine the timers" in caplog.text


def test_a_proxy_is_not_asked_what_timers_do(bench: Bench) -> None:
    bench.sender = ScriptedSender(bench.time)
    bench.sender.longest_timers = {}
    settings = ProducerSettings(group="g", features=FEATURES[GRPC], auto_create_topics=False)
    resender = EngineResender(bench.sender, settings, ManualTimer(bench.time))
    assert delayed(bench, resender, b"x").queue is not None


def single(body: bytes, born_ms: int = 5, **properties: str) -> SpooledSend:
    text = encode_properties({Property.UNIQ_KEY: f"id of {body.decode()}", Property.WAIT: "true", **properties})
    return SpooledSend(
        "T",
        SendRequest("g", body, text, flag=len(body), born_timestamp_ms=born_ms),
        q("b:1"),
        (f"id of {body.decode()}",),
    )


def test_those_of_a_lane_go_as_one_batch_in_their_order(resender: EngineResender) -> None:
    sends = [
        single(b"a", TAGS="t", KEYS="k l"),
        single(b"bb", TAGS="t", KEYS="l m"),
        single(b"ccc", 1005, TAGS="t", p="v"),
    ]
    takes = resender.batch_predicate(sends[0])
    assert [takes(send) for send in sends[1:]] == [True, True]
    whole = resender.join_sends(sends)
    assert (whole.topic, whole.queue, whole.msg_ids) == ("T", q("b:1"), ("id of a", "id of bb", "id of ccc"))
    request = whole.request
    assert (request.batch, request.flag, request.born_timestamp_ms, request.group) == (True, 0, 5, "g")
    assert decode_batch(request.body) == [
        BatchItem(send.request.body, send.request.properties, send.request.flag) for send in sends
    ]
    assert request.properties == "WAIT\x01true\x02"  # brokers before 5.5 would give each message what else it had


@pytest.mark.parametrize(
    "odd",
    [
        single(b"x", TAGS="u"),
        single(b"x", 1006),
        single(b"x", DELAY="1"),
        single(b"x", TIMER_DELIVER_MS="5"),
        single(b"x", WAIT="false"),
        single(b"x", INNER_MULTI_DISPATCH="a"),
        single(b"x", KEYS="k" * MAX_KEYWORD_BYTES),
        replace(single(b"x"), queue=q("b:0")),
        replace(single(b"x"), queue=None, selector="hash", arg="k"),
        replace(single(b"x"), topic="U"),
        replace(single(b"x"), request=single(b"x").request._replace(batch=True)),
        replace(single(b"x"), request=single(b"x").request._replace(sys_flag=1)),
        replace(single(b"x"), request=single(b"x").request._replace(reconsume_times=1)),
        replace(single(b"x"), request=single(b"x").request._replace(max_reconsume_times=3)),
        replace(single(b"x"), request=single(b"x").request._replace(group="h")),
        replace(single(b"x"), request=single(b"x").request._replace(properties="no end")),
    ],
    ids=range(16),
)
def test_what_may_not_be_in_one_batch_goes_alone(resender: EngineResender, odd: SpooledSend) -> None:
    assert resender.batch_predicate(single(b"a"))(single(b"b"))
    assert not resender.batch_predicate(single(b"a"))(odd)
    assert not resender.batch_predicate(odd)(single(b"a"))
    with pytest.raises(ValueError, match="does not fit into the batch of"):
        resender.join_sends([single(b"a"), odd])


def test_a_retry_topic_takes_no_batches(resender: EngineResender) -> None:
    one = replace(single(b"a"), topic="%RETRY%g")
    assert not resender.batch_predicate(one)(one)


def test_a_batch_has_bounds(resender: EngineResender) -> None:
    takes = resender.batch_predicate(single(b"a"))
    assert sum(takes(single(b"b")) for _ in range(1000)) == 255
    takes, large = resender.batch_predicate(single(b"a")), single(b"b")
    large = replace(large, request=large.request._replace(body=b"b" * 300_000))
    assert sum(takes(large) for _ in range(10)) == 3


def test_grpc_lane_of_single_requests_joins_few_messages(bench: Bench) -> None:
    """Else a Proxy that takes 12 ms for each would be sent the same 256 again and again, and never all in time."""
    resender = EngineResender(
        bench.sender, ProducerSettings(group="g", features=FEATURES[GRPC]), ManualTimer(bench.time)
    )
    takes = told_storage(bench, resender).batch_predicate(single(b"a"))
    assert sum(takes(single(b"b")) for _ in range(1000)) == 15


def test_it_has_its_thread_before_it_takes_anything(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = EngineResender(bench.sender, ProducerSettings(group="g"), Timer("x"), contextlib.nullcontext)
    found: list[Resent] = []
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted)
        made.resend(SpooledSend("T", REQUEST), found.append)
    assert found == [Resent(None, "can't start new thread", is_temporary=True)]
    assert bench.sender.calls == []
    done = Event()
    made.resend(SpooledSend("T", REQUEST), lambda resent: done.set())
    assert done.wait(60)
    made.close(Deadline.after(0))


def test_resend_that_found_no_thread_is_sent_with_the_next_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.sender = ScriptedSender(bench.time)
    timer = ManualTimer(bench.time)
    resender = EngineResender(bench.sender, ProducerSettings(group="g"), timer, contextlib.nullcontext)
    found: list[Resent] = []
    with monkeypatch.context() as patched:
        patched.setattr(timer, "call_later", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            resender.resend(SpooledSend("T", REQUEST, q("a:0")), found.append)
    resender.resend(SpooledSend("T", REQUEST, q("a:1")), found.append)
    bench.time.advance(1)
    assert found == [Resent(q("a:0")), Resent(q("a:1"))]


def kept_batch(bodies: bytes) -> SpooledSend:
    """As 'autoBatch' and the sink keep it: as one record."""
    sends = [single(bytes([body])) for body in bodies]
    items = [BatchItem(each.request.body, each.request.properties, 0) for each in sends]
    request = SendRequest("g", encode_batch(items), "WAIT\x01true\x02UNIQ_KEY\x01B\x02", batch=True)
    return SpooledSend("T", request, q("b:1"), tuple(each.msg_ids[0] for each in sends))


def bodies_of(request: SendRequest) -> bytes:
    return b"".join(item.body for item in decode_batch(request.data)) if request.batch else bytes(request.data)


def test_refused_spooled_batch_is_split_and_bad_messages_fail(bench: Bench, resender: EngineResender) -> None:
    """The spool has one record of it: its other messages would be dead for good."""
    taken: list[bytes] = []
    wrong = {b"d", b"h"}

    def answer(queue: MessageQueue, request: SendRequest) -> SendResult | RocketMQError:
        bodies = bodies_of(request)
        if any(each in bodies for each in wrong) or len(bodies) > limit:
            return refused(Response.MESSAGE_ILLEGAL)
        taken.append(bodies)
        return SendResult(SendStatus.SEND_OK, "", queue, 1)

    limit = 9
    bench.sender.by_broker = {"b": lambda: answer}
    assert not resent(bench, resender, kept_batch(b"abcdefgh")).is_temporary
    assert taken == [b"ab", b"c", b"ef", b"g"]
    ids = [decode_properties(r.properties).get(Property.UNIQ_KEY) for _, _, r in bench.sender.calls if r.batch]
    assert len(set(ids)) == len(ids)
    wrong, limit = set(), 3  # it was too large
    assert resent(bench, resender, kept_batch(b"abcde")) == Resent(q("b:1"))
    assert taken[4:] == [b"ab", b"cde"]
    whole = resender.join_sends([single(b"a"), single(b"b"), single(b"c"), single(b"d")])
    assert resent(bench, resender, whole).error is not None  # the spool sends each by itself
    assert taken[6:] == []


def test_messages_stored_before_a_refusal_are_not_sent_again(bench: Bench, resender: EngineResender) -> None:
    error = refused(Response.MESSAGE_ILLEGAL)
    error.stored = {f"id of {each}": None for each in "abd"}
    bench.sender.script = [error, refused(Response.MESSAGE_ILLEGAL), ConnectionLost("down")]
    assert resent(bench, resender, kept_batch(b"abcdef")).is_temporary
    assert [bodies_of(request) for _, _, request in bench.sender.calls[:3]] == [b"abcdef", b"c", b"ef"]
    bench.sender.script = [error, ConnectionLost("down")]
    assert resent(bench, resender, kept_batch(b"abcdef")).is_temporary
    assert [bodies_of(request) for request in bench.sender.requests[3:]] == [b"abcdef", b"c"], "nothing overtakes it"
