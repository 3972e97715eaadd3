from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import CallTimeout, ClosedError, ConnectionLost, MessageRefused, RocketMQError, SendFailed
from rocketmq_spark.model import Message, SendRequest, SendResult, SendStatus
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer import batching
from rocketmq_spark.producer.accumulator import BatchEntry
from rocketmq_spark.producer.encoding import prepare
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender, refused, status
from tests.fakes.timer import Time
from tests.producer.bench import Bench
from tests.queues import q, qs


def message(body: str = "x", **more: Any) -> Message:
    return Message("T", body.encode(), **more)


def bodies(request: SendRequest) -> list[str]:
    if not request.batch:
        return [bytes(request.body).decode()]
    return [bytes(item.body).decode() for item in decode_batch(bytes(request.body))]


def batcher_of(producer: BaseProducer) -> batching.Batcher:
    assert producer._batching is not None
    return producer._batching.batcher


def sent(bench: Bench) -> list[list[str]]:
    return [bodies(request) for request in bench.sender.requests]


@pytest.fixture(autouse=True)
def _no_accumulator_stays() -> Iterator[None]:
    yield
    assert all(batcher.producer_count for batcher in process.entries(batching._ACCUMULATORS).values())


def test_many_single_sends_become_one_batch_with_a_result_each(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    results = [producer.send_async(message(f"{i}" * i)) for i in range(1, 6)]
    assert bench.sender.calls == []
    bench.time.advance(0.01)
    assert sent(bench) == [["1", "22", "333", "4444", "55555"]]
    items = decode_batch(bytes(bench.sender.requests[0].body))
    got = [result.result(0) for result in results]
    assert [r.msg_id for r in got] == [decode_properties(item.properties)["UNIQ_KEY"] for item in items]
    assert [r.offset_msg_id for r in got] == ["OFF100", "OFF101", "OFF102", "OFF103", "OFF104"]
    assert [r.queue_offset for r in got] == [100, 101, 102, 103, 104]


def test_fifty_threads_that_wait_share_batches() -> None:
    sender = ScriptedSender(Time())
    settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, auto_batch=True, batch_max_delay_ms=100)
    with BaseProducer(sender, settings) as producer, ThreadPoolExecutor(50) as pool:
        start = threading.Barrier(50)

        def work(i: int) -> SendResult:
            start.wait(60)
            return producer.send(message(str(i)))

        results = list(pool.map(work, range(50)))
    ids = {decode_properties(item.properties)["UNIQ_KEY"]: bytes(item.body).decode()
           for request in sender.requests for item in decode_batch(bytes(request.body))}  # fmt: skip
    assert [ids[result.msg_id] for result in results] == [str(i) for i in range(50)]
    assert len(sender.requests) < 25


def test_batch_leaves_when_its_bodies_exceed_the_limit(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, batch_max_bytes=10)
    for i in range(3):
        producer.send_async(message(f"body{i}"))
        assert len(bench.sender.calls) == (i == 2)
    assert sent(bench) == [["body0", "body1", "body2"]]


def test_batch_leaves_when_it_is_old(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, batch_max_delay_ms=25)
    producer.send_async(message())
    bench.time.advance(0.024)
    assert bench.sender.calls == []
    bench.time.advance(0.001)
    assert len(bench.sender.calls) == 1


def test_one_timer_call_serves_all_batches_in_time(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, batch_max_bytes=10)
    bench.time.due.clear()
    for tag in "abc":
        producer.send_async(message(tag, tags=tag))
        bench.time.advance(0.002)
    producer.send_async(message("a" * 20, tags="a"))  # the oldest leaves before its time, and another one begins
    producer.send_async(message("d", tags="d"))
    assert len(bench.time.due) == 1
    left = []
    for _ in range(8):
        left.append([bodies[0] for bodies in sent(bench)])
        bench.time.advance(0.002)
    assert left == [["a"]] * 3 + [["a", "b"], ["a", "b", "c"], [*"abcd"], [*"abcd"], [*"abcd"]]
    assert bench.time.due == []


def test_sends_go_directly_while_total_batch_limit_is_exceeded(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, total_batch_max_bytes=1000)
    bench.sender.script = [None]
    first = producer.send_async(message("a" * 2000))
    bench.time.advance(0.01)
    held = batcher_of(producer).accumulator
    assert held.buffered_bytes > 2000
    assert producer.send_async(message("direct")).done()
    assert [request.batch for request in bench.sender.requests] == [True, False]
    bench.sender.answer()
    assert first.done()
    assert held.buffered_bytes == 0
    producer.send_async(message("batched again"))
    bench.time.advance(0.01)
    assert bench.sender.requests[-1].batch


def test_what_is_turned_away_is_never_counted(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, total_batch_max_bytes=1000)
    for _ in range(100):
        producer.send(message("x" * 100), delay_level=1)
        producer.send(message("x" * 100), timeout_s=1.0)
        with pytest.raises(MessageRefused):
            producer.send(Message("T", b""))
    assert batcher_of(producer).accumulator.buffered_bytes == 0
    producer.send_async(message())
    bench.time.advance(0.01)
    assert bench.sender.requests[-1].batch


def test_equal_names_share_and_the_last_one_ends_it(bench: Bench) -> None:
    one = bench.producer("same", auto_batch=True, group="g1")
    two = bench.producer("same", auto_batch=True, group="g2", batch_max_delay_ms=50)
    other = bench.producer("other", auto_batch=True)
    assert batcher_of(one) is batcher_of(two) is not batcher_of(other)
    unnamed = [batcher_of(bench.producer(auto_batch=True)) for _ in range(2)]
    assert unnamed[0] is not unnamed[1]
    one.send_async(message("from one"))
    joined = two.send_async(message("from two"))
    begun = bench.time.now
    assert one.close() == []  # sends at once what waits, whoever added it
    assert bench.time.now == begun
    assert sent(bench) == [["from one", "from two"]]
    assert (bench.sender.requests[0].group, joined.done()) == ("g1", True)
    alone = two.send(message("two goes on"))
    assert (alone.status, bench.sender.requests[-1].group) == (SendStatus.SEND_OK, "g2")
    assert two.close() == []
    assert batcher_of(bench.producer("same", auto_batch=True)) is not batcher_of(one)


def test_batch_limit_set_by_one_producer_holds_for_all(bench: Bench) -> None:
    one = bench.producer("same", auto_batch=True, batch_max_delay_ms=50)
    bench.producer("same", auto_batch=True, batch_max_bytes=99)
    limits = batcher_of(one).accumulator.limits
    assert (limits.max_bytes, limits.max_delay_ms, limits.total_max_bytes) == (99, 50, 33554432)


def test_senders_that_wait_and_those_that_do_not_are_not_mixed(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    producer.send_async(message("async"))
    producer.send(message("sync"))
    assert sorted(sent(bench)) == [["async"], ["sync"]]


def test_messages_for_a_queue_are_batched_for_that_queue(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    for queue in ("a:0", "b:1", "a:0"):
        producer.send_async(message(queue), queue=q(queue))
    producer.send_async(message("hash"), selector="hash", arg="a")
    bench.time.advance(0.01)
    assert {str(queue): bodies(request) for _, queue, request in bench.sender.calls} == {
        "T/a/0": ["a:0", "a:0"], "T/b/1": ["b:1"], "T/a/1": ["hash"],
    }  # fmt: skip


def test_over_grpc_messages_of_groups_have_small_batches(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, features=FEATURES[GRPC])
    for i in range(40):
        producer.send_async(message(f"{i}"), selector="hash", arg="a group")
        producer.send_async(message(f"{i}"))
    bench.time.advance(0.01)
    assert sorted(map(len, sent(bench))) == [8, 16, 16, 40]


def test_ten_thousand_tags_do_not_take_more_memory_than_allowed(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, max_async_messages=100_000)
    for i in range(10_000):
        producer.send_async(message(tags=f"tag-{i}"))
    assert batcher_of(producer).accumulator.open_count == 1024
    bench.time.advance(0.01)
    assert batcher_of(producer).accumulator.open_count == 0
    assert sum(len(bodies(r)) for r in bench.sender.requests) == 10_000


def test_waiting_sender_returns_although_no_timer_runs(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    bench.timers["batch"].stopped = True
    start = bench.time.now
    assert producer.send(message()).status is SendStatus.SEND_OK
    assert bench.time.now - start == pytest.approx(0.01)


def test_waiting_sender_does_not_wait_for_ever(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    bench.sender.script = [None]
    with pytest.raises(CallTimeout, match="the batch has no answer in time"):
        producer.send(message())
    bench.sender.answer()


def test_an_asynchronous_send_returns_at_once(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    start = bench.time.now
    assert not producer.send_async(message()).done()
    assert bench.time.now == start


def test_a_message_whose_keys_are_none_is_batched(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    sent = [producer.send_async(message(keys=None)) for _ in range(3)]
    producer.close()
    assert {each.result(0).status for each in sent} == {SendStatus.SEND_OK}


def test_every_message_keeps_its_own_tag_keys_and_id(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    for i in range(2):
        producer.send_async(message(tags="vip", keys=[f"k{i}"], properties={"own": str(i)}))
    bench.time.advance(0.01)
    found = [decode_properties(item.properties) for item in decode_batch(bytes(bench.sender.requests[0].body))]
    assert [(p["TAGS"], p["KEYS"], p["own"]) for p in found] == [("vip", "k0", "0"), ("vip", "k1", "1")]
    assert len({p["UNIQ_KEY"] for p in found}) == 2


@pytest.mark.parametrize("waits", [True, False])
def test_batch_has_one_tag_and_all_keys_sync_and_async(bench: Bench, waits: bool) -> None:
    bench.sender.batch_topics = {"T": True}
    producer = bench.producer(auto_batch=True)
    key = message(tags="vip", keys=["k1", "k2"])
    if waits:
        producer.send(key)
    else:
        producer.send_async(key)
        bench.time.advance(0.01)
    properties = decode_properties(bench.sender.requests[0].properties)
    assert (properties["TAGS"], properties["KEYS"], properties["WAIT"]) == ("vip", "k1 k2", "true")


@pytest.mark.parametrize("kind", [{"T": False}, {}], ids=["ordinary", "unknown"])
def test_batch_has_no_properties_where_it_is_not_stored_whole(bench: Bench, kind: dict[str, bool]) -> None:
    """Brokers before 5.5 give each message what its batch says: its id, its keys."""
    bench.sender.batch_topics = kind
    producer = bench.producer(auto_batch=True)
    results = [producer.send_async(message(tags="vip", keys=[f"k{i}"])) for i in range(3)]
    bench.time.advance(0.01)
    (request,) = bench.sender.requests
    assert decode_properties(request.properties) == {"WAIT": "true"}
    ids = [decode_properties(item.properties)["UNIQ_KEY"] for item in decode_batch(bytes(request.body))]
    assert [result.result(0).msg_id for result in results] == ids


def test_tags_are_not_mixed_and_no_tag_is_one(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    for body, tag in (("1", "A"), ("2", None), ("3", "B"), ("4", "A")):
        producer.send_async(message(body, tags=tag))
    bench.time.advance(0.01)
    assert sorted(sent(bench)) == [["1", "4"], ["2"], ["3"]]


def test_batch_stored_as_one_gives_all_messages_same_result(bench: Bench) -> None:
    bench.sender.batch_topics = {"T": True}
    producer = bench.producer(auto_batch=True)
    bench.sender.script = [lambda queue, request: SendResult(SendStatus.SEND_OK, "", queue, 7, "ONE")]
    results = [producer.send_async(message()) for _ in range(3)]
    bench.time.advance(0.01)
    batch_id = decode_properties(bench.sender.requests[0].properties)["UNIQ_KEY"]
    assert [(r.result(0).msg_id, r.result(0).queue_offset) for r in results] == [(batch_id, 7)] * 3


DIRECT: list[tuple[str, dict[str, Any]]] = [
    ("T", {"delay_level": 3}),
    ("T", {"delay": 5}),
    ("T", {"deliver_at": 1_800_000_000_000}),
    ("T", {"timeout_s": 1.0}),
    ("%RETRY%g", {}),
]


@pytest.mark.parametrize(("topic", "how"), DIRECT)
def test_what_is_never_batched(bench: Bench, topic: str, how: dict[str, Any]) -> None:
    bench.sender.routes["%RETRY%g"] = tuple(qs("a:0", "%RETRY%g"))
    producer = bench.producer(auto_batch=True)
    producer.send(Message(topic, b"x"), **how)
    producer.send_async(Message(topic, b"x"), **how)
    producer.send_oneway(message())
    assert [request.batch for request in bench.sender.requests] == [False] * 3


def test_switched_off_nothing_is_batched(bench: Bench) -> None:
    producer = bench.producer()
    producer.send(message())
    assert [request.batch for request in bench.sender.requests] == [False]
    assert producer._batching is None


def test_waiting_for_the_store_separates_batches(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    for wait in (True, False, True):
        producer.send_async(message(wait_store_ok=wait))
    bench.time.advance(0.01)
    waits = {decode_properties(r.properties)["WAIT"]: len(bodies(r)) for r in bench.sender.requests}
    assert waits == {"true": 2, "false": 1}


def test_ids_that_do_not_fit_fail_every_message_as_unknown(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    bench.sender.script = [lambda queue, request: SendResult(SendStatus.SEND_OK, "", queue, 7, "x,y")]
    results = [producer.send_async(message()) for _ in range(3)]
    bench.time.advance(0.01)
    for result in results:
        assert isinstance(result.exception(0), SendFailed)
        assert "sendResult is illegal" in str(result.exception(0))


@pytest.mark.parametrize(("queue", "requests"), [(None, 5), (q("a:0"), 1)])  # whose order a second try would lose
def test_failed_batch_gives_each_message_its_own_error(bench: Bench, queue: Any, requests: int) -> None:
    producer = bench.producer(auto_batch=True, retries=0)
    bench.sender.script = [refused(Response.MESSAGE_ILLEGAL)] * 5  # of all, one, two, and each of them
    results = [producer.send_async(message(), queue=queue) for _ in range(3)]
    bench.time.advance(0.01)
    assert len(bench.sender.calls) == requests
    errors = [result.exception(0) for result in results]
    assert {type(error).__name__ for error in errors} == {"MessageIllegal"}
    assert len({id(error) for error in errors}) == 3
    assert batcher_of(producer).accumulator.buffered_bytes == 0


def test_a_state_other_than_ok_is_the_state_of_each(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    bench.sender.script = [status(SendStatus.FLUSH_DISK_TIMEOUT)]
    results = [producer.send_async(message()) for _ in range(2)]
    bench.time.advance(0.01)
    assert {result.result(0).status for result in results} == {SendStatus.FLUSH_DISK_TIMEOUT}


def test_one_callback_that_fails_changes_nothing_for_the_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    producer, seen = bench.producer(auto_batch=True), []
    producer.send_async(message("1"), lambda outcome: 1 / 0)  # type: ignore[arg-type, return-value]
    producer.send_async(message("2"), seen.append)
    bench.time.advance(0.01)
    assert len(seen) == 1
    assert "ZeroDivisionError" in caplog.text


def test_batches_without_a_queue_are_retried_on_another_broker(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    results = [producer.send_async(message(tags=str(i))) for i in range(8)]
    bench.time.advance(0.01)
    assert {result.result(0).queue.broker_name for result in results} == {"b"}


def test_batches_of_one_queue_keep_their_order_across_a_retry(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True, batch_max_bytes=1, pinned_retries=None, send_timeout_s=60.0)
    bench.sender.script = [None]
    results: list[Future[SendResult]] = [producer.send_async(message(f"{i}!"), queue=q("a:0")) for i in range(4)]
    assert sent(bench) == [["0!"]]
    bench.sender.answer(0, refused(Response.SYSTEM_BUSY))
    bench.sender.script = [refused(Response.SYSTEM_BUSY)]
    bench.time.advance(1)
    assert sent(bench) == [["0!"], ["0!"], ["0!"], ["1!"], ["2!"], ["3!"]]
    assert all(result.done() for result in results)


def test_closing_sends_what_waits_and_fails_what_gets_no_answer(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    waiting = producer.send_async(message())
    assert producer.close() == []
    assert waiting.result(0).status is SendStatus.SEND_OK
    stuck = bench.producer(auto_batch=True)
    bench.sender.script = [None]
    lost = [stuck.send_async(message()) for _ in range(2)]
    (unsent,) = stuck.close(0.5)
    assert (unsent.topic, len(unsent.msg_ids)) == ("T", 2)
    assert all(isinstance(result.exception(0), ClosedError) for result in lost)


def test_accumulator_ends_with_last_producer_despite_ctrl_c(bench: Bench) -> None:
    batcher = batching.join_accumulator("of one", ProducerSettings(group="g"), lambda: bench.timer("x-batch"))
    close_all = batcher.accumulator.close_all

    def interrupted() -> None:
        batcher.accumulator.close_all = close_all  # type: ignore[method-assign]
        raise KeyboardInterrupt

    batcher.accumulator.close_all = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        batching.leave_accumulator("of one", batcher)
    assert "of one" not in process.entries(batching._ACCUMULATORS)


def test_message_added_while_last_producer_closes_is_refused(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    batcher = batcher_of(producer)
    batcher.producer_count += 1  # as if another producer still shared it
    producer.close()
    assert producer._batching is not None
    result, batch = producer._batching.add(prepared(), None, sender_waits=False)
    assert batch is not None
    batcher.producer_count -= 1
    batcher.close()
    assert isinstance(result.exception(0), ClosedError)
    process.entries(batching._ACCUMULATORS).clear()
    again, none = producer._batching.add(prepared(), None, sender_waits=False)
    assert none is None
    assert not again.done()


def prepared() -> Any:
    return prepare(message(), "ID", ProducerSettings(group="g"))


def test_flush_sends_what_waits(bench: Bench) -> None:
    producer = bench.producer(auto_batch=True)
    result = producer.send_async(message())
    assert producer.flush()
    assert result.done()
    bench.sender.script = [None]
    producer.send_async(message())
    assert not producer.flush(0.1)
    bench.sender.answer()
    assert producer.flush(0.1)


def test_errors_are_copied_with_their_cause() -> None:
    error: RocketMQError = ConnectionLost("x")
    error.__cause__ = OSError("y")
    entries = [BatchEntry(b"", 0, msg_id, (), None) for msg_id in ("A", "B", "C")]
    result = SendResult(SendStatus.SEND_OK, "B", q("a:0"), 1)
    error.stored = {"B": result}
    first, stored, last = batching._outcomes_by_message(error, entries)
    assert first is not last
    for share in (first, last):
        assert isinstance(share, ConnectionLost)
        assert share.__cause__ is error.__cause__
        assert not share.stored
    assert stored is result, "of this one it is known that it was acknowledged"


def test_send_interrupted_after_batch_left_still_has_one_future(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer(auto_batch=True, batch_max_bytes=1)

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr(bench.sender, "publish_queues", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.send_async(message("xx"))
    assert producer.flush()
    bench.sender.script = [None]
    producer.send_async(message("yy"))
    assert not producer._futures.wait_until_empty(Deadline.after(0.0))
    bench.sender.answer()
    assert producer.flush(0.0)


def test_batches_are_due_again_after_thread_shortage(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer(auto_batch=True)

    def none_left(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(bench.timers["batch"], "call_later", none_left)
        with pytest.raises(RuntimeError):
            producer.send_async(message("first"))
    result = producer.send_async(message("second"))
    bench.time.advance(0.02)
    assert result.done()
    assert [body for each in sent(bench) for body in each] == ["first", "second"]
    assert producer.flush(0.0)
