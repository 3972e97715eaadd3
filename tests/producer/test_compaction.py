"""Batches by how their topic stores them. Of a message without a key for a compaction topic a broker refuses one alone, and drops
it from a batch, which it acknowledges.
"""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import pyarrow as pa
import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import MessageRefused, RocketMQError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus, SpooledSend
from rocketmq_spark.producer.resender import SILENT_RETRY_S, STORAGE_AGE_S, EngineResender
from rocketmq_spark.producer.rows.routing import TopicRows
from rocketmq_spark.producer.rows.sender import StoragePlan
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import BatchItem, decode_batch, encode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender, refused
from tests.fakes.timer import ManualTimer
from tests.helpers import raising
from tests.producer.bench import Bench, told_storage
from tests.producer.test_batching import message
from tests.producer.test_bulk import Bulk, table
from tests.producer.test_resender import resent, single
from tests.queues import q, qs


@pytest.fixture
def bulk(bench: Bench) -> Bulk:
    bench.sender.compaction_topics.add("T")
    return Bulk(bench)


def test_explicit_batch_without_key_fails_on_compaction_topic(bench: Bench) -> None:
    bench.sender.compaction_topics.add("T")
    producer = bench.producer()
    keyless: tuple[Any, ...] = ((), None, " ", [""], ["\t"])
    for keys in keyless:
        with pytest.raises(MessageRefused, match="Message 1 of a batch has no key, but 'T' is a compaction topic"):
            producer.send_batch([Message("T", b"0", keys="k"), Message("T", b"1", keys=keys)])
    assert not bench.sender.requests
    producer.send_batch([Message("T", b"0", keys="k"), Message("T", b"1", keys=["l"])])
    bench.sender.compaction_topics.clear()
    producer.send_batch([Message("T", b"0"), Message("T", b"1")])
    assert len(bench.sender.requests) == 2


@pytest.mark.parametrize("quick", [True, False], ids=["one tuple a message", "as send does"])
def test_keyless_message_travels_alone_to_compaction_topic(bench: Bench, quick: bool) -> None:
    """Its broker refuses it there; of a batch it would keep the others, and acknowledge all."""
    bench.sender.compaction_topics.add("T")
    producer = bench.producer(auto_batch=True)
    producer.send_async(message("0", keys=["k"]))
    for body, keys in (("1", ["k"]), ("2", ["l"]), ("3", []), ("4", " "), ("5", ["\t\n"])):
        producer.send_async(message(body, keys=keys), **({} if quick else {"queue": q("b:1")}))
    bench.time.advance(0.01)
    alone = [bytes(request.body) for request in bench.sender.requests if not request.batch]
    assert alone == [b"3", b"4", b"5"]
    together = [item.body for request in bench.sender.requests if request.batch for item in decode_batch(request.body)]
    assert sorted(map(bytes, together)) == [b"0", b"1", b"2"]


def test_rows_that_a_compaction_topic_would_not_keep_are_refused(bulk: Bulk) -> None:
    no_key = "no key, but 'T' is a compaction topic, of which brokers keep messages with a key only"
    for keys, bad in ((["k", None, ""], (1, 2)), (["k", " ", "l"], (1,)), ([["k"], [""], ["l", "m"]], (1,))):
        with pytest.raises(MessageRefused) as e:
            bulk.producer().send_arrow(table("a", "b", "c", keys=keys), "T")
        assert "; ".join(f"row {row}: {no_key}" for row in bad) in str(e.value)
    with pytest.raises(MessageRefused, match="message 0: no key, but 'T' is a compaction topic"):
        bulk.producer().send_many([Message("T", b"a"), Message("T", b"b", keys=["k"])])
    assert not bulk.sender.requests
    bulk.producer().send_arrow(table("a", "b", keys=["k", "l"]), "T")
    assert bulk.bodies == [["a", "b"]]


def test_queue_selector_does_not_see_refused_rows(bulk: Bulk) -> None:
    with pytest.raises(MessageRefused, match="row 1: no key, but 'T' is a compaction topic"):
        bulk.producer().send_arrow(table("a", "b", keys=["k", None]), "T", selector=raising(AssertionError("called")))
    assert not bulk.sender.requests


@pytest.mark.parametrize(("hangs", "asked"), [(True, "tu"), (False, "tututu")])
def test_where_nothing_answers_rows_do_not_wait_again_and_again(hangs: bool, asked: str) -> None:
    """As while a name server hangs: with a spool, each batch of rows would wait before it goes there."""
    found: list[str] = []

    def batch_storage(topic: str, deadline: Deadline) -> None:
        found.append(topic)
        if hangs:
            deadline.pause(1)

    options = options_table.parse({"nameServer": "x:1", "requestTimeout": "5ms"}).for_role("sink")
    plan = StoragePlan(options, {}, cast(Any, Mock(batch_storage=batch_storage)), lambda: 0)
    rows = pa.record_batch({"body": ["a"]})
    for _ in range(3):
        plan.check(rows, [TopicRows(rows, topic, None, 0) for topic in "tu"], BadRows())
    assert "".join(found) == asked


def test_keyless_rows_are_named_among_rows_of_several_topics(bulk: Bulk) -> None:
    bulk.sender.routes["U"] = tuple(qs("a:0-1", topic="U"))
    rows = table("a", "b", "c", "d", topic=["U", "T", "U", "T"], keys=[None, "k", None, None])
    with pytest.raises(MessageRefused, match=r"1 rows cannot be sent, .*: row 3: no key, but 'T'"):
        bulk.producer().send_arrow(rows)


def test_keyless_message_goes_alone_while_topic_kind_is_unknown(
    bench: Bench,
) -> None:
    """Its broker acknowledges a batch, and keeps the messages with a key only; one alone it refuses."""
    bench.sender = ScriptedSender(bench.time)
    resender = EngineResender(bench.sender, ProducerSettings(group="g"), ManualTimer(bench.time))
    kinds = (
        (single(b"a", KEYS="k"), single(b"b", KEYS="l")),
        (single(b"a"), single(b"b")),
        (single(b"a", KEYS=" "),) * 2,
    )

    def joined() -> list[bool]:
        return [resender.batch_predicate(first)(other) for first, other in kinds]

    bench.sender.silent = True
    assert joined() == [True, False, False]
    bench.time.advance(0.01)
    assert joined() == [True, False, False]
    bench.sender.silent = False
    bench.time.advance(SILENT_RETRY_S)
    joined()
    bench.time.advance(0.01)
    assert joined() == [True, True, True]
    bench.sender.compaction_topics.add("T")  # deleted, and created again
    bench.time.advance(STORAGE_AGE_S)
    joined()
    bench.time.advance(0.01)
    assert joined() == [True, False, False]


def test_batch_stored_as_one_message_has_id_tag_and_keys(bench: Bench) -> None:
    bench.sender.batch_topics["T"] = True
    resender = told_storage(bench, EngineResender(bench.sender, ProducerSettings(group="g"), ManualTimer(bench.time)))
    whole = resender.join_sends([single(b"a", TAGS="t", KEYS="k l"), single(b"b", TAGS="t", KEYS="l m")])
    about = dict(decode_properties(whole.request.properties))
    assert len(about.pop(Property.UNIQ_KEY)) == 32
    assert about == {Property.WAIT: "true", Property.TAGS: "t", Property.KEYS: "k l m"}


@pytest.mark.parametrize("silent", [False, True], ids=["", "still silent"])
@pytest.mark.parametrize(
    ("keyless", "parts"), [(b"", "abcd"), (b"b", "a b cd"), (b"bd", "a b c d"), (b"abcd", "a b c d")]
)
def test_spooled_batch_loses_no_message_of_compaction_topic(
    bench: Bench, keyless: bytes, parts: str, silent: bool
) -> None:
    """What has no key is refused alone, and the batch becomes a dead letter; in the batch it was acknowledged and dropped. A
    broker that did not answer is not asked again for a while: so the question has no answer when the broker is back.
    """
    bench.sender = ScriptedSender(bench.time)
    bench.sender.silent = silent
    bench.sender.compaction_topics.add("T")
    bodies = [b"a", b"b", b"c", b"d"]
    keys = [{} if body in keyless else {"KEYS": "k"} for body in bodies]
    singles = [single(body, **has) for body, has in zip(bodies, keys, strict=True)]
    items = [BatchItem(each.request.data, each.request.properties) for each in singles]
    request = SendRequest("g", encode_batch(items), "WAIT\x01true\x02", batch=True)

    def answer(queue: MessageQueue, sent: SendRequest) -> SendResult | RocketMQError:
        if not sent.batch and sent.data in keyless:
            return refused(Response.MESSAGE_ILLEGAL)
        return SendResult(SendStatus.SEND_OK, "", queue, 0)

    bench.sender.by_broker = {"b": lambda: answer}
    resender = EngineResender(bench.sender, ProducerSettings(group="g"), ManualTimer(bench.time))
    found = resent(bench, resender, SpooledSend("T", request, q("b:1")))
    assert (found.error is not None, found.is_temporary) == (bool(keyless), False)
    sent = [r for _, _, r in bench.sender.calls]
    assert all(request.batch == (len(part) > 1) for request, part in zip(sent, parts.split(), strict=True))
    bodies = [b"".join(item.body for item in decode_batch(r.data)) if r.batch else bytes(r.data) for r in sent]
    assert bodies == parts.encode().split()
