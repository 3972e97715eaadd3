from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    CallTimeout,
    ClosedError,
    ConnectionLost,
    MessageIllegal,
    MessageRefused,
    OptionError,
    RouteNotFound,
    SelectorError,
    SendFailed,
)
from rocketmq_spark.model import Message, MessageQueue, SendStatus
from rocketmq_spark.producer.ambiguity import AmbiguousSendResolver
from rocketmq_spark.producer.engine import Unsent
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire.identifiers import RecallHandle
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.names import NO_SCOPE, Scope
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import refused, status
from tests.producer.bench import Bench
from tests.producer.test_ambiguity import Broker
from tests.queues import names, q, qs

M = Message("T", b"x", tags="vip", keys=["k"])


def third(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
    return queues[2]


def test_send_goes_to_the_queue_to_the_selectors_choice_or_round(bench: Bench) -> None:
    producer = bench.producer()
    assert producer.send(M, queue=q("b:1")).queue == q("b:1")
    assert producer.send(M, selector=third).queue == q("b:0")
    for _ in range(40):
        producer.send(M)
    assert Counter(queue for _, queue, _ in bench.sender.calls[2:]) == dict.fromkeys(qs("a:0-1 b:0-1"), 10)


def test_a_result_has_the_clients_id_and_the_brokers_place(bench: Bench) -> None:
    result = bench.producer().send(M)
    request = bench.sender.requests[0]
    assert decode_properties(request.properties) == {
        "KEYS": "k", "TAGS": "vip", "WAIT": "true", "UNIQ_KEY": result.msg_id,
    }  # fmt: skip
    assert (result.status, result.queue_offset, result.offset_msg_id) == (SendStatus.SEND_OK, 100, "OFF100")
    assert (request.group, request.default_topic_queues) == ("g", 4)


def test_without_fault_mode_next_send_may_use_failing_broker(bench: Bench) -> None:
    producer = bench.producer()
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    for _ in range(20):
        producer.send(M)
    assert bench.sender.brokers.count("a") >= 9
    assert producer.faults.faults == {}


def test_selector_works_in_every_mode_with_and_without_timeout(bench: Bench) -> None:
    producer = bench.producer()
    for how in ({}, {"timeout_s": 1.0}):
        assert producer.send(M, selector=third, **how).queue == q("b:0")  # type: ignore[arg-type]
        assert producer.send_async(M, selector="hash", arg="a", **how).result(0).queue == q("a:1")  # type: ignore[arg-type]
        producer.send_oneway(M, selector=third, **how)  # type: ignore[arg-type]
    assert [mode for mode, _, _ in bench.sender.calls] == ["sync", "async", "oneway"] * 2
    with pytest.raises(MessageRefused, match="a queue or through a selector, not both"):
        producer.send(M, selector=third, queue=q("a:0"))


def test_state_then_message_then_route(bench: Bench) -> None:
    producer = bench.producer(auto_create_topics=False)
    with pytest.raises(MessageRefused, match="body length is zero"):
        producer.send(Message("Nowhere", b""), selector=third)
    assert [name for name, _ in bench.sender.events] == ["join"]
    with pytest.raises(RouteNotFound):
        producer.send(Message("Nowhere", b"x"), selector=third)
    producer.close()
    for call in (
        lambda: producer.send(Message("", b"")),
        lambda: producer.send_async(M),
        lambda: producer.send_oneway(M),
        lambda: producer.send_batch([M]),
        lambda: producer.recall("T", "x"),
        lambda: producer.queues("T"),
    ):
        with pytest.raises(ClosedError, match="the producer is closed"):
            call()


def test_selector_gets_copies_of_the_list_and_of_the_message(bench: Bench) -> None:
    seen: list[Any] = []

    def greedy(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
        seen.append((list(queues), arg))
        message.body = b"changed"
        return queues.pop()

    producer = bench.producer()
    producer.send(M, selector=greedy, arg="A")
    assert seen == [(qs("a:0-1 b:0-1"), "A")]
    assert bench.sender.requests[0].body == b"x"
    assert M.body == b"x"
    assert producer.queues("T") == qs("a:0-1 b:0-1")


def test_what_a_selector_raises_is_wrapped(bench: Bench) -> None:
    with pytest.raises(SelectorError, match="select message queue threw exception") as e:
        bench.producer().send(M, selector=lambda queues, message, arg: {}[arg])
    assert isinstance(e.value.__cause__, KeyError)
    assert bench.sender.calls == []


def test_selector_that_takes_too_long_is_a_timeout(bench: Bench) -> None:
    def slow(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
        bench.time.advance(3.1)
        return queues[0]

    with pytest.raises(CallTimeout, match="sendSelectImpl call timeout"):
        bench.producer().send(M, selector=slow)
    assert bench.sender.calls == []


def test_null_selector_result_fails_and_chosen_queue_gets_1_try(bench: Bench) -> None:
    def takes_a_second(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
        bench.time.advance(1.0)
        return queues[0]

    producer = bench.producer()
    with pytest.raises(SelectorError, match="return null"):
        producer.send(M, selector=lambda queues, message, arg: None)
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    for how in ({"selector": takes_a_second}, {"queue": q("a:0")}):
        with pytest.raises(ConnectionLost):
            producer.send(M, **how)  # type: ignore[arg-type]
    assert bench.sender.deadlines == [2.0, 3.0]


def test_no_route_and_no_name_server_are_different_errors(bench: Bench) -> None:
    producer = bench.producer(auto_create_topics=False)
    with pytest.raises(RouteNotFound, match="topic Nowhere"):
        producer.send(Message("Nowhere", b"x"))
    bench.sender.routes["Other"] = ConnectionLost("no name server answers", "ns:9876")
    with pytest.raises(SendFailed, match="no name server answers"):
        producer.send(Message("Other", b"x"))


def test_hash_sends_equal_args_to_equal_queues(bench: Bench) -> None:
    producer = bench.producer()
    chosen = {arg: {producer.send(M, selector="hash", arg=arg).queue for _ in range(3)} for arg in ("order-1", "中文")}
    assert chosen == {"order-1": {q("b:0")}, "中文": {q("b:0")}}
    with pytest.raises(SelectorError, match="cannot hash None"):
        producer.send(M, selector="hash")


def test_retry_avoids_the_failed_broker_and_first_attempt_none(bench: Bench) -> None:
    producer = bench.producer()
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    results = [producer.send(M).queue.broker_name for _ in range(30)]
    assert set(results) == {"b"}
    assert "a a" not in bench.sender.brokers
    assert "a b" in bench.sender.brokers


def test_two_failing_brokers_are_tried_alternately_three_times(bench: Bench) -> None:
    bench.sender.by_broker = {"a": lambda: ConnectionLost("a down"), "b": lambda: refused(Response.SYSTEM_BUSY)}
    with pytest.raises(SendFailed, match="all retries failed after 3 attempts") as e:
        bench.producer().send(M)
    assert bench.sender.brokers in ("a b a", "b a b")
    assert e.value.__cause__ is not None


def test_the_id_is_the_same_in_every_attempt(bench: Bench) -> None:
    bench.sender.script = [ConnectionLost("x"), CallTimeout("x")]
    result = bench.producer().send(M)
    assert {decode_properties(r.properties)["UNIQ_KEY"] for r in bench.sender.requests} == {result.msg_id}


def test_a_refusal_for_good_is_raised_at_once(bench: Bench) -> None:
    bench.sender.script = [refused(Response.MESSAGE_ILLEGAL)]
    with pytest.raises(MessageIllegal):
        bench.producer().send(M)
    assert len(bench.sender.calls) == 1


def test_send_retries_through_flow_control_until_its_deadline(bench: Bench) -> None:
    bench.sender.routes["T"] = tuple(qs("a:0-1"))
    bench.sender.script = [refused(Response.SYSTEM_BUSY)] * 8
    producer = bench.producer(retries=None, send_timeout_s=30.0)
    assert producer.send(M).status is SendStatus.SEND_OK
    pauses = bench.timers["send"].pauses
    assert len(pauses) == 8
    assert all(late > early for early, late in zip(pauses, pauses[2:], strict=False) if late < 0.5)
    bench.sender.by_broker["a"] = lambda: refused(Response.FLOW_CONTROL)
    with pytest.raises(SendFailed, match="the send timeout expired"):
        producer.send(M)


def test_the_deadline_covers_all_attempts(bench: Bench) -> None:
    bench.sender.latency_s = {"a": 1.6, "b": 1.6}
    bench.sender.script = [CallTimeout("late")] * 2
    with pytest.raises(SendFailed, match="the send timeout expired after 2 attempts"):
        bench.producer().send(M)
    assert bench.sender.deadlines == [3.0, 1.4]


def test_attempts_are_bounded_but_the_last_gets_remaining_time(bench: Bench) -> None:
    bench.sender.latency_s = {"a": 0.5, "b": 0.5}
    bench.sender.script = [CallTimeout("late")] * 2
    bench.producer(attempt_timeout_s=0.5).send(M)
    assert bench.sender.deadlines == [0.5, 0.5, pytest.approx(2.0, abs=0.1)]


def test_single_pinned_attempt_keeps_time_for_the_stored_lookup(bench: Bench) -> None:
    """To a chosen queue there is but one."""
    producer = bench.producer(attempt_timeout_s=0.5)
    producer._engine.ambiguity_resolver = AmbiguousSendResolver(Broker([]), producer._engine.timer)
    producer.send(M, queue=q("a:0"))
    producer.send_async(M, queue=q("a:0"))
    assert bench.sender.deadlines == [0.5, 0.5]


def test_another_state_than_ok_is_a_result_unless_ok_is_required(bench: Bench) -> None:
    bench.sender.script = [status(SendStatus.FLUSH_DISK_TIMEOUT)]
    assert bench.producer().send(M).status is SendStatus.FLUSH_DISK_TIMEOUT
    bench.sender.script = [status(SendStatus.SLAVE_NOT_AVAILABLE)]
    assert bench.producer(store_must_be_ok=True).send(M).status is SendStatus.SEND_OK


def test_topic_not_exist_refreshes_route_before_next_attempt(bench: Bench) -> None:
    producer = bench.producer()
    producer.send(M)
    bench.sender.events.clear()
    bench.sender.script = [refused(Response.TOPIC_NOT_EXIST)]
    producer.send(M)
    assert bench.sender.seen("route") == [("T", True)]


def test_async_gives_a_future_and_calls_back_once(bench: Bench) -> None:
    producer, seen = bench.producer(), []
    result = producer.send_async(M, seen.append)
    assert result.result(0).msg_id == decode_properties(bench.sender.requests[0].properties)["UNIQ_KEY"]
    bench.time.run_due()
    assert seen == [result.result(0)]
    assert not result.cancel()
    bench.sender.script = [refused(Response.MESSAGE_ILLEGAL)]
    failed = producer.send_async(M, seen.append)
    assert isinstance(failed.exception(0), MessageIllegal)
    bench.time.run_due()
    assert seen[1] is failed.exception(0)


def test_async_send_retries_on_a_queue_of_another_broker(bench: Bench) -> None:
    bench.sender.routes["T"] = tuple(qs("a:0-7 b:0"))
    bench.sender.by_broker["a"] = lambda: refused(Response.SYSTEM_BUSY)
    producer = bench.producer()
    results = [producer.send_async(M) for _ in range(20)]
    bench.time.advance(1)
    assert {result.result(0).queue for result in results} == {q("b:0")}


def test_async_routes_that_fail_come_through_the_future(bench: Bench) -> None:
    failed = bench.producer(auto_create_topics=False).send_async(Message("Nowhere", b"x"))
    assert isinstance(failed.exception(0), RouteNotFound)


def test_async_sends_wait_for_room_and_then_fail(bench: Bench) -> None:
    producer = bench.producer(max_async_messages=2)
    bench.sender.script = [None, None]
    first = [producer.send_async(M) for _ in range(2)]
    with pytest.raises(SendFailed, match="2 asynchronous sends with 138 bytes are not answered yet"):
        producer.send_async(M)
    bench.timers["send"].call_later(1.0, bench.sender.answer)
    assert producer.send_async(M).done()
    assert first[0].done()
    bench.sender.answer()
    assert producer.flush()


def test_what_is_in_flight_is_filled_up_when_answers_come(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=2)
    bench.sender.script = [None] * 5
    results = [producer.send_async(M) for _ in range(5)]
    assert len(bench.sender.waiting) == 2
    for _ in range(5):
        bench.sender.answer()
        bench.time.run_due()
    assert all(result.done() for result in results)


def test_oneway_makes_one_attempt_and_returns_nothing(bench: Bench) -> None:
    bench.sender.script = [ConnectionLost("ignored by a one-way send")]
    producer = bench.producer()
    producer.send_oneway(M, queue=q("a:1"))
    assert [(mode, queue) for mode, queue, _ in bench.sender.calls] == [("oneway", q("a:1"))]


def test_an_explicit_queue_must_be_of_the_topic(bench: Bench) -> None:
    with pytest.raises(MessageRefused, match="message's topic not equal mq's topic"):
        bench.producer().send(M, queue=q("a:0", "Other"))
    with pytest.raises(MessageRefused, match="message's topic not equal mq's topic"):
        bench.producer().send_batch([M], queue=q("a:0", "Other"))


def test_delays_levels_and_timers_are_properties_of_the_request(bench: Bench) -> None:
    producer = bench.producer()
    producer.send(M, delay_level=3)
    producer.send(M, delay=7)
    producer.send(M, deliver_at=1_800_000_000_000)
    found = [decode_properties(request.properties) for request in bench.sender.requests]
    assert (found[0]["DELAY"], found[1]["TIMER_DELAY_MS"], found[2]["TIMER_DELIVER_MS"]) == (
        "3",
        "7000",
        "1800000000000",
    )


def test_an_explicit_batch_is_one_request_with_all_ids_in_order(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    result = producer.send_batch([Message("T", bytes([65 + i]), tags=f"t{i}") for i in range(3)])
    (request,) = bench.sender.requests
    items = decode_batch(bytes(request.body))
    assert [bytes(item.body) for item in items] == [b"A", b"B", b"C"]
    ids = [decode_properties(item.properties)["UNIQ_KEY"] for item in items]
    assert result.msg_id == ",".join(ids)
    assert result.offset_msg_id == "OFF100,OFF101,OFF102"
    assert decode_properties(request.properties) == {"WAIT": "true"}  # brokers before 5.5 give it to each message
    bench.sender.batch_topics = {"T": True}
    producer.send_batch([M])
    assert decode_properties(bench.sender.requests[-1].properties)["UNIQ_KEY"] not in ids
    assert producer.send_batch([M], queue=q("b:1")).queue == q("b:1")


def test_an_explicit_batch_tells_a_batch_topic_tag_and_keys(bench: Bench) -> None:
    """What the broker drops of ordinary topics is not sent to them."""
    bench.sender.batch_topics = {"T": True, "U": False}
    bench.sender.routes["U"] = tuple(qs("a:0-1", topic="U"))
    producer = bench.producer()
    for topic, tags in (("T", "xx"), ("T", "xy"), ("U", "xx"), ("V", "xx")):
        bench.sender.routes.setdefault(topic, tuple(qs("a:0-1", topic=topic)))
        producer.send_batch(
            [Message(topic, b"1", tags=tags[0], keys="k 1"), Message(topic, b"2", tags=tags[1], keys=["k"])]
        )
    producer.send_batch(
        [Message("T", b"1", tags="x", keys=["k" * 15_000]), Message("T", b"2", tags="x", keys=["l" * 15_000])]
    )
    said = [decode_properties(request.properties) for request in bench.sender.requests]
    assert (said[-1]["TAGS"], said.pop().get("KEYS")) == ("x", None)  # more than a batch can say
    assert [(one.get("TAGS"), one.get("KEYS")) for one in said] == [
        ("x", "k 1"),
        (None, "k 1"),
        (None, None),
        (None, None),
    ]


def test_the_kind_of_a_topic_is_looked_at_again_with_its_route(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, route_refresh_s=30)
    for whole in (False, True):
        bench.sender.batch_topics = {"T": whole}
        bench.time.advance(30.0)
        producer.send_async(M)
        bench.time.advance(0.01)
        assert ("UNIQ_KEY" in decode_properties(bench.sender.requests[-1].properties)) == whole


@pytest.mark.parametrize(("scope", "name_on_wire"), [(NO_SCOPE, "T"), (Scope("ns", "dev"), "ns%T_dev")])
def test_recall_goes_to_the_broker_in_the_handle(bench: Bench, scope: Scope, name_on_wire: str) -> None:
    producer = bench.producer(scope=scope)
    handle = str(RecallHandle(name_on_wire, "b", 1_800_000_000_001, "UNIQ"))
    assert producer.recall("T", handle) == "ID"
    assert bench.sender.seen("recall") == [("T", "b", handle, "g")]
    with pytest.raises(MessageRefused, match="the recall handle belongs to topic 'T'"):
        producer.recall("Other", handle)


def test_hooks_stand_round_every_attempt(bench: Bench) -> None:
    producer, seen = bench.producer(), []
    producer.add_hook(after=lambda c: seen.append((c.mode, c.attempt, c.latency_ms, c.result is not None, c.message)))
    bench.sender.latency_s = {"a": 0.25, "b": 0.25}
    bench.sender.script = [ConnectionLost("x")]
    producer.send(M)
    producer.send_async(M)
    producer.send_oneway(M)
    producer.send_batch([M])
    assert seen == [
        ("sync", 1, 250, False, M), ("sync", 2, 250, True, M), ("async", 1, 250, True, M), ("oneway", 1, 0, False, M),
        ("sync", 1, 250, True, None),
    ]  # fmt: skip


def test_producer_of_an_environment_never_leaves_it(bench: Bench) -> None:
    bench.sender.routes["T"] = tuple(qs("a:0-3 b:0-3"))
    producer = bench.producer(environment=Environment.of(2, 4))
    found = {producer.send(M).queue for _ in range(8)} | {
        producer.send(M, selector="environment").queue for _ in range(8)
    }
    found |= {producer.send(M, selector="hash", arg=i).queue for i in range(8)}
    assert found == set(qs("a:1 b:1"))
    with pytest.raises(MessageRefused, match="T/a/0 does not belong to environment '2'"):
        producer.send(M, queue=q("a:0"))
    with pytest.raises(OptionError, match="option 'environments' is 9"):
        bench.producer(environment=Environment.of(9, 9)).send(M)


def test_environment_n_as_argument_of_the_selector(bench: Bench) -> None:
    assert bench.producer().send(M, selector="environment", arg=3).queue == q("b:0")
    with pytest.raises(SelectorError, match="expected a whole number from 1 to 4"):
        bench.producer().send(M, selector="environment", arg=5)


def test_round_robin_named_as_selector_is_the_default(bench: Bench) -> None:
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    producer = bench.producer()
    assert {producer.send(M, selector="RoundRobin").queue.broker_name for _ in range(8)} == {"b"}


def test_close_waits_for_what_is_under_way(bench: Bench) -> None:
    producer = bench.producer()
    bench.sender.script = [None]
    result = producer.send_async(M)
    bench.timers["send"].call_later(0.5, bench.sender.answer)
    assert producer.close() == []
    assert result.done()
    assert bench.sender.seen("leave") == ["g"]
    assert producer.close() == []
    assert len(bench.sender.seen("leave")) == 1


def test_close_says_what_had_no_answer_and_fails_it(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    producer, seen = bench.producer(max_in_flight=1), []
    bench.sender.script = [None]
    results = [producer.send_async(M, seen.append, queue=q("a:0")), producer.send_async(M, seen.append)]
    unsent = producer.close(0.5)
    assert [(u.topic, u.queue, len(u.msg_ids)) for u in unsent] == [("T", q("a:0"), 1), ("T", None, 1)]
    assert all(isinstance(result.exception(0), ClosedError) for result in results)
    assert len(seen) == 2
    first, second = (u.msg_ids[0] for u in unsent)
    assert f"2 sends have no answer, among them {first} to T/a/0, {second} to T" in caplog.text
    bench.sender.answer()  # too late: nothing happens
    assert len(seen) == 2


def test_log_names_first_three_messages_of_an_unanswered_batch() -> None:
    assert str(Unsent("T", None, ["A", "B", "C"])) == "A, B, C to T"
    assert str(Unsent("T", q("a:0"), ["A", "B", "C", "D", "E"])) == "A, B, C and 2 more to T/a/0"


def interrupted(*args: object) -> None:
    raise KeyboardInterrupt


def test_interrupted_close_fails_and_logs_unanswered_sends(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = bench.producer()
    bench.sender.script = [None]
    result = producer.send_async(M)
    monkeypatch.setattr(bench.timers["callback"], "wait_notified", interrupted)
    with pytest.raises(KeyboardInterrupt):
        producer.close()
    assert isinstance(result.exception(0), ClosedError)
    assert "1 sends have no answer" in caplog.text
    assert bench.sender.seen("leave") == ["g"]
    assert bench.timers["housekeeping"]._closed
    assert producer.close() == []


def test_a_context_manager_closes(bench: Bench) -> None:
    with bench.producer() as producer:
        producer.send(M)
    with pytest.raises(ClosedError):
        producer.send(M)


def test_a_forked_process_must_make_its_own(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer()
    monkeypatch.setattr("rocketmq_spark.base.process._pid", [1])
    with pytest.raises(ClosedError, match=r"from which this one was forked.*Make a producer in this process"):
        producer.send(M)
    assert producer.close() == []
    assert bench.sender.seen("leave") == []


def test_the_client_id_is_that_of_the_process(bench: Bench) -> None:
    assert bench.producer().client_id == bench.producer().client_id == bench.sender.client_id
    assert isinstance(bench.producers[0], BaseProducer)
    assert names(bench.producer().queues("T")) == "a:0 a:1 b:0 b:1"
