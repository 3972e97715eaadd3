"""Messages of groups, which go through lanes to a server that chooses queues: those of a group one by one."""

from __future__ import annotations

from typing import Any

from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.errors import ConnectionLost, MessageIllegal, SendFailed
from rocketmq_spark.model import Message, SendResult, SendStatus
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ok, refused
from tests.producer.bench import Bench
from tests.producer.test_batching import sent


def of_group(producer: BaseProducer, body: str, group: str = "g", **how: Any) -> Any:
    return producer.send_async(Message("T", body.encode()), selector="hash", arg=group, **how)


def test_what_is_sent_without_waiting_waits_for_its_group(bench: Bench) -> None:
    producer = bench.producer(features=FEATURES[GRPC])
    bench.sender.script = [None] * 10
    results = [of_group(producer, "first"), of_group(producer, "second")]
    others = [f"other {i}" for i in range(8)]  # some of which share its lane
    results += [of_group(producer, other, other) for other in others]
    assert sent(bench) == [["first"], *([other] for other in others)]
    bench.time.advance(10.0)  # which is no time of the second one
    bench.sender.answer(0, ok)
    bench.time.advance(0.0)
    assert sent(bench)[9:] == [["second"]]
    for _ in range(9):
        bench.sender.answer(0, ok)
    assert all(result.result(0) for result in results)


def test_transient_failure_is_retried_before_rest_of_its_group(bench: Bench) -> None:
    producer = bench.producer(features=FEATURES[GRPC], retries=2)
    bench.sender.script = [ConnectionLost("the endpoint is away")] * 2
    results = [of_group(producer, "first"), of_group(producer, "second")]
    bench.time.advance(1.0)
    assert sent(bench) == [["first"]] * 3 + [["second"]]
    assert all(result.result(0) for result in results)
    bench.sender.script = [ConnectionLost("the endpoint is away")]
    assert producer.send(Message("T", b"waits"), selector="hash", arg="g")


def test_message_unfit_for_batch_does_not_overtake_its_group(bench: Bench) -> None:
    producer = bench.producer(features=FEATURES[GRPC], auto_batch=True)
    results = [of_group(producer, f"{i}") for i in range(3)]
    results += [of_group(producer, "apart", timeout_s=3.0), of_group(producer, "last")]
    bench.time.advance(0.1)
    assert sent(bench) == [["0", "1", "2"], ["apart"], ["last"]]
    assert all(result.result(0) for result in results)


def test_group_messages_keep_order_whatever_their_tags(bench: Bench) -> None:
    producer = bench.producer(features=FEATURES[GRPC], auto_batch=True)
    for i in range(6):
        made = Message("T", f"{i}".encode(), tags=("a", "b", None)[i % 3], wait_store_ok=i % 2 == 0)
        producer.send_async(made, selector="hash", arg="g")
    bench.time.advance(0.1)
    assert sent(bench) == [["0", "1", "2", "3", "4", "5"]]
    found = [
        decode_properties(item.properties).get(Property.TAGS) for item in decode_batch(bench.sender.requests[0].body)
    ]
    assert found == ["a", "b", None, "a", "b", None]


def test_one_that_is_refused_for_good_does_not_close_its_lane(bench: Bench) -> None:
    """Others wait in it: those of other groups, too."""
    producer = bench.producer(features=FEATURES[GRPC], auto_batch=True)
    bench.sender.script = [None]
    results = [of_group(producer, f"{i}") for i in range(40)]
    bench.sender.answer(0, refused(Response.MESSAGE_ILLEGAL))
    bench.time.advance(0.1)
    assert [type(result.exception(0)) for result in results] == [MessageIllegal] * 16 + [type(None)] * 24


def test_unsent_message_behind_refused_one_is_not_called_refused(bench: Bench) -> None:
    """Who drops what is refused for good would lose it."""
    producer = bench.producer(features=FEATURES[GRPC], auto_batch=True)
    error = MessageIllegal("too long", "a:1")
    bench.sender.script = [error]
    results = [of_group(producer, f"{i}") for i in range(3)]
    error.skipped_ids = [results[2].msg_id]
    error.stored = {results[0].msg_id: SendResult(SendStatus.SEND_OK, results[0].msg_id, None, None)}
    bench.time.advance(0.1)
    assert results[0].result(0)
    assert isinstance(results[1].exception(0), MessageIllegal)
    assert isinstance(failed := results[2].exception(0), SendFailed)
    assert "an earlier message of its group was rejected: too long" in str(failed)
    assert failed.__cause__ is error


def test_priority_message_is_its_own_request_with_own_time(bench: Bench) -> None:
    """As one send, thousands of small ones would have to end within one attempt."""
    producer = bench.producer(features=FEATURES[GRPC], auto_batch=True)
    results = [producer.send_async(Message("T", f"{i}".encode(), priority=1)) for i in range(40)]
    assert sent(bench) == [[f"{i}"] for i in range(40)]
    assert all(result.result(0) for result in results)
