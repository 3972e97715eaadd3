"""The rows of the producer's table, given as its user gives them: on a real broker, or one that is told what to answer."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer, session
from rocketmq_spark.base.codes import Request, Response, SysFlag
from rocketmq_spark.errors import MessageRefused, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendStatus
from rocketmq_spark.stored import scan
from rocketmq_spark.wire.messages import decode_batch
from tests.live.producer.recording import RecordingSender
from tests.mockbroker import Call, Command, MockBroker, close, never, ok, refuse, route
from tests.source.scripted import stats

STORED = ok(msgId="x", queueId="0", queueOffset="0")
Make = Callable[..., tuple[Producer, RecordingSender]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Producers of options, and what they send."""
    client = session.client
    with ExitStack() as open_ones:

        def make(server: str, **options: object) -> tuple[Producer, RecordingSender]:
            senders: list[RecordingSender] = []

            def recorded(parsed: session.Options) -> session.Client:
                plain = client(parsed)
                senders.append(RecordingSender(plain))
                return dataclasses.replace(plain, sender=senders[-1])

            with monkeypatch.context() as patched:
                patched.setattr(session, "client", recorded)
                producer = Producer(**{"name_server": server, "group": "g_options", **options})
            open_ones.enter_context(producer)
            return producer, senders[0]  # replies have a client of their own

        yield make


@pytest.fixture
def scripted() -> Iterator[MockBroker]:
    """Its own name server, with one queue; takes single messages and batches."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        for request in (Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE):
            broker.on(request, STORED)
        yield broker


def test_group__names_the_producer_in_every_send(scripted: MockBroker, made: Make) -> None:
    producer, _ = made(scripted.address, group="g_shop")
    producer.send(Message("t", b"x"))
    assert [command.ext["a"] for command in scripted.seen(Request.SEND_MESSAGE_V2)] == ["g_shop"]


def test_environment__and_environments_confine_producer(rocketmq: LocalBroker, topic: str, made: Make) -> None:
    for options, queues in (({"environment": "2", "environments": "4"}, {1, 5}), ({"environment": "1"}, {0})):
        producer, sender = made(rocketmq.name_server, **options)
        for _ in range(8):
            producer.send(Message(topic, b"x"))
        assert {queue.queue_id for _, queue, _ in sender.sends} == queues


def test_send_timeout__ends_a_send_that_gets_no_answer(scripted: MockBroker, made: Make) -> None:
    scripted.on(Request.SEND_MESSAGE_V2, never)
    for wait_s in (0.3, 1.2):
        producer, _ = made(scripted.address, sendTimeout=f"{wait_s}s")
        started = time.monotonic()
        with pytest.raises(RocketMQError):
            producer.send(Message("t", b"x"))
        assert time.monotonic() - started >= wait_s * 0.9


def test_max_message_size__refuses_before_anything_is_sent(scripted: MockBroker, made: Make) -> None:
    producer, sender = made(scripted.address, maxMessageSize="1k", compression="none")
    producer.send(Message("t", bytes(1024)))
    with pytest.raises(RocketMQError, match="1024"):
        producer.send(Message("t", bytes(1025)))
    assert len(sender.sends) == 1


@pytest.mark.parametrize(
    ("option", "spared"),
    [
        ({"sendLatencyFault": "true", "latencyMax": "1ms,40ms", "notAvailableDuration": "0,60s"}, True),
        ({"sendLatencyFault": "true", "latencyMax": "1ms,40ms", "notAvailableDuration": "0,0"}, False),
        ({"sendLatencyFault": "true", "latencyMax": "1ms,60s", "notAvailableDuration": "0,60s"}, False),
        ({"latencyMax": "1ms,40ms", "notAvailableDuration": "0,60s"}, False),
    ],
    ids=["on", "no duration", "higher latency", "off"],
)
def test_send_latency_fault__and_latency_max_avoid_slow_broker(
    scripted: MockBroker, made: Make, monkeypatch: pytest.MonkeyPatch, option: dict[str, str], spared: bool
) -> None:
    """One that takes 50 ms, with another beside it that takes none, by a clock that stands still but for that."""
    now_ms = [1_000_000]

    def slowly(call: Call) -> Command:
        now_ms[0] += 50
        return STORED

    with MockBroker() as slow:
        slow.on(Request.SEND_MESSAGE_V2, slowly)
        scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": scripted.address, "broker-b": slow.address}))
        producer, sender = made(scripted.address, **option)
        monkeypatch.setattr(producer._engine.timer, "now_ms", lambda: now_ms[0])
        for _ in range(10):
            producer.send(Message("t", b"x"))
        producer.close()
    assert (sender.brokers().count("broker-b") == 1) is spared


def test_auto_batch__puts_single_sends_into_batches(scripted: MockBroker, made: Make) -> None:
    for option, batches in (("true", True), ("false", False)):
        producer, sender = made(scripted.address, group=f"g_{option}", autoBatch=option, batchMaxDelay="30s")
        sent = [producer.send_async(Message("t", b"x" * 10)) for _ in range(20)]
        assert producer.flush(60)
        assert {one.result(60).status for one in sent} == {SendStatus.SEND_OK}
        assert [request.batch for _, _, request in sender.sends] == (
            [True] * len(sender.sends) if batches else [False] * 20
        )
        assert (len(sender.sends) < 20) is batches
        producer.close()


def test_batch_max_bytes__bounds_a_batch(scripted: MockBroker, made: Make) -> None:
    largest = {}
    for limit in (200, 2000):
        producer, sender = made(
            scripted.address, group=f"g_{limit}", autoBatch="true", batchMaxDelay="200ms", batchMaxBytes=limit
        )
        for one in [producer.send_async(Message("t", b"x" * 50)) for _ in range(200)]:
            one.result(60)
        largest[limit] = max(len(decode_batch(bytes(request.body))) for _, _, request in sender.sends if request.batch)
        producer.close()
    assert largest[200] <= 5 < largest[2000] <= 41


def test_batch_max_delay__is_how_long_message_waits_for_batch(scripted: MockBroker, made: Make) -> None:
    for wait_ms in (50, 800):
        producer, _ = made(scripted.address, group=f"g_{wait_ms}", autoBatch="true", batchMaxDelay=f"{wait_ms}ms")
        started = time.monotonic()
        producer.send(Message("t", b"x"))
        assert time.monotonic() - started >= wait_ms / 1000 * 0.9
        producer.close()


def test_total_batch_max_bytes__bounds_messages_held_in_batch(scripted: MockBroker, made: Make) -> None:
    """What is beyond it goes alone and at once."""
    alone = {}
    for total in ("100", "1m"):
        producer, sender = made(
            scripted.address, group=f"g_{total}", autoBatch="true", batchMaxDelay="30s", totalBatchMaxBytes=total
        )
        sent = [producer.send_async(Message("t", b"x" * 60)) for _ in range(10)]
        assert producer.flush(60)
        assert {one.result(60).status for one in sent} == {SendStatus.SEND_OK}
        alone[total] = sum(not request.batch for _, _, request in sender.sends)
        producer.close()
    assert alone["1m"] == 0 < alone["100"]


@pytest.mark.parametrize(("name", "flag"), [("zlib", SysFlag.ZLIB), ("lz4", SysFlag.LZ4), ("zstd", SysFlag.ZSTD)])
def test_compression__and_compress_above_set_codec_and_threshold(
    made: Make, scripted: MockBroker, name: str, flag: SysFlag
) -> None:
    producer, sender = made(scripted.address, compression=name, compressAbove=1000)
    for size in (999, 1000):
        producer.send(Message("t", b"y" * size))
    (_, _, small), (_, _, large) = sender.sends
    assert bytes(small.body) == b"y" * 999
    assert not small.sys_flag & SysFlag.COMPRESSED
    assert len(large.body) < 200
    assert large.sys_flag & SysFlag.COMPRESSED
    assert SysFlag(large.sys_flag) & flag == flag


def test_compression__none_leaves_bodies_as_they_are(made: Make, scripted: MockBroker) -> None:
    producer, sender = made(scripted.address, compression="none", compressAbove=10)
    producer.send(Message("t", b"y" * 5000))
    assert bytes(sender.sends[0][2].body) == b"y" * 5000


@pytest.mark.parametrize(("given", "attempts"), [({}, 1), ({"requireStoreOk": "ok"}, 3)])
def test_require_store_ok__resends_less_safely_stored_message(
    scripted: MockBroker, made: Make, given: dict[str, str], attempts: int
) -> None:
    """And says so when it stays that way, as Java's producer does."""
    scripted.on(Request.SEND_MESSAGE_V2, Command(Response.FLUSH_DISK_TIMEOUT, STORED.ext))
    producer, sender = made(scripted.address, **given)
    assert producer.send(Message("t", b"x")).status is SendStatus.FLUSH_DISK_TIMEOUT
    assert len(sender.sends) == attempts


def test_confirm_ambiguous__and_exactly_once_settle_check_stored(
    scripted: MockBroker, made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection breaks instead of an answer, and the queue is as empty as before."""
    settles, settle = list[float](), scan.StoredIdScan._wait_until_settled
    monkeypatch.setattr(
        scan.StoredIdScan, "_wait_until_settled", lambda one: (settles.append(one._tools.settle_s), settle(one))
    )
    zeros = dict.fromkeys(
        ("dispatchBehindBytes", "sendThreadPoolQueueHeadWaitTimeMills", "pageCacheLockTimeMills"), "0"
    )
    state = json.dumps({"table": {"commitLogMaxOffset": "7", **zeros}}).encode()
    scripted.on(Request.GET_BROKER_RUNTIME_INFO, ok(state))
    scripted.on(Request.GET_BROKER_CONFIG, ok(b"brokerName=broker-a\n"))
    # Without the time of its last message, by which a look would prove that the queue is still the same.
    scripted.on(Request.GET_TOPIC_STATS_INFO, stats({MessageQueue("t", "broker-a", 0): (0, 5)}, newest_ms=0))
    for options in ({}, {"confirmAmbiguous": "true", "exactlyOnceSettle": "2100ms"}, {"exactlyOnceSettle": "4100ms"}):
        before = len(scripted.seen(Request.SEND_MESSAGE_V2))
        scripted.on(Request.SEND_MESSAGE_V2, [close, STORED])
        confirming = {"confirmAmbiguous": "true", "sendTimeout": "30s"} if options else {}
        producer, _ = made(scripted.address, **{**confirming, **options})
        assert producer.send(Message("t", b"x")).status is SendStatus.SEND_OK
        assert len(scripted.seen(Request.SEND_MESSAGE_V2)) - before == 2
        assert bool(scripted.seen(Request.GET_BROKER_RUNTIME_INFO)) == bool(options)
    assert list(dict.fromkeys(settles)) == [2.1, 4.1], "for as long as a request may still arrive"


def test_long_delay__sends_envelope_where_timers_do_not_serve(scripted: MockBroker, made: Make) -> None:
    ten_days = 10 * 24 * 3600
    plain, sent = made(scripted.address)
    plain.send(Message("t", b"x"), delay=ten_days)
    scripted.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(b'{"groupList":["g"]}'))
    scripted.on(Request.GET_CONSUMER_CONNECTION_LIST, refuse(Response.CONSUMER_NOT_ONLINE, "nobody"))
    producer, enveloped = made(scripted.address, long_delay="dmq")
    with pytest.raises(MessageRefused, match="consumes dmq_inner_topic"):
        producer.send(Message("t", b"x"), delay=ten_days)
    members = b'{"subscriptionTable":{"dmq_inner_topic":{"subString":"*"}}}'
    scripted.on(Request.GET_CONSUMER_CONNECTION_LIST, ok(members))
    producer.send(Message("t", b"x"), delay=ten_days)
    assert [queue.topic for _, queue, _ in (*sent.sends, *enveloped.sends)] == ["t", "dmq_inner_topic"]


@pytest.mark.parametrize(("sync", "syncs"), [("always", 1), ("batch", 1), ("never", 0)])
def test_on_send_failure__and_spool_dir_and_spool_sync_keep_send(
    scripted: MockBroker, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str, syncs: int
) -> None:
    scripted.on(Request.SEND_MESSAGE_V2, refuse(Response.SYSTEM_BUSY, "busy"))
    calls: list[int] = []
    monkeypatch.setattr("rocketmq_spark.spool.files._sync_file", calls.append)
    folder = {"spool_dir": str(tmp_path / "s"), "spool_sync": sync, "spool_max_bytes": "1k"}
    producer, _ = made(scripted.address, on_send_failure="spool", **folder)
    assert len(calls) == syncs, "whose it is"
    calls.clear()
    assert producer.send(Message("t", b"x")).status is SendStatus.SPOOLED
    assert len(calls) == syncs
    assert (tmp_path / "s" / "CURRENT").exists()
    with pytest.raises(RocketMQError, match="busy"):
        producer.send(Message("t", b"x" * 1000))
    plain, _ = made(scripted.address, on_send_failure="fail")
    with pytest.raises(RocketMQError, match="busy"):
        plain.send(Message("t", b"x"))
