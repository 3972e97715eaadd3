"""What came with later brokers: where they have it, it works; older ones are found out before anything is lost."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark import Admin, Message, Producer
from rocketmq_spark.errors import MessageRefused, NotSupported, OptionError
from rocketmq_spark.localbroker import LocalBroker
from tests.compat.features import VERSIONS, refused, runs
from tests.helpers import stored, stored_now, total
from tests.live.delay.serving import Node
from tests.live.writes import Writes, frame, numbered
from tests.reading import bodies, read
from tests.witness import java_read

Make = Callable[..., str]
OLD, NEW = VERSIONS[:1], VERSIONS[1:]
TIMERS = "`delay`, `deliver_at`, `delayMs`, `deliverAt`"
RECALL = "`recall`"
BATCH_TOPICS = "batch topics"
STEP_MS = 150  # timers have steps of a tenth of a second here


@runs("delay levels")
def test_delay_levels(older: LocalBroker, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, begin_ms = make(1), int(time.time() * 1000)
    with Producer(older.name_server, "p") as producer:
        producer.send(Message(topic, b"level"), delay_level=1)
    Writes(older.name_server, monkeypatch)(frame(body=["row"], delayLevel=[1]), topic=topic)
    found = stored(older, topic, 2)
    assert Counter(message.body for message in found) == Counter([b"level", b"row"])
    assert all(message.store_timestamp >= begin_ms + 1000 for message in found)


@runs(TIMERS, NEW)
def test_timers(older: LocalBroker, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, begin_ms = make(1), int(time.time() * 1000)
    with Producer(older.name_server, "p") as producer:
        producer.send(Message(topic, b"delay"), delay=2)
        producer.send(Message(topic, b"moment"), deliver_at=begin_ms + 2000)
    Writes(older.name_server, monkeypatch)(frame(body=["row"], delayMs=[2000]), topic=topic)
    found = stored(older, topic, 3)
    assert Counter(message.body for message in found) == Counter([b"delay", b"moment", b"row"])
    assert all(message.store_timestamp >= begin_ms + 2000 - STEP_MS for message in found)


@refused(TIMERS, OLD)
def test_timers_are_refused_before_anything_is_sent(
    older: LocalBroker, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, writes = make(1), Writes(older.name_server, monkeypatch)
    with Producer(older.name_server, "p") as producer:
        for how in ({"delay": 2}, {"deliver_at": int(time.time() * 1000) + 2000}):
            with pytest.raises(MessageRefused, match=r"broker-a is older than RocketMQ 5\.0"):
                producer.send(Message(topic, b"never"), **how)
        with pytest.raises(OptionError, match=r"'delayMs' cannot be kept: broker-a is older than RocketMQ 5\.0"):
            writes(frame(body=["plain", "never"], delayMs=[None, 2000]), topic=topic)
        producer.send(Message(topic, b"last"))
    assert [message.body for message in stored(older, topic, 1)] == [b"last"]


@runs("`longDelay=dmq`: delays of any length")
def test_the_delay_service(older: LocalBroker, make: Make, tmp_path: Path) -> None:
    """A broker with timers delays 3 seconds itself."""
    topic, days = make(1), 30 * 24 * 3600
    given = {"name_server": older.name_server}
    with Node(tmp_path / "n", **given) as node, Producer(**given, group=f"g-{topic}", long_delay="dmq") as producer:
        begin_ms = int(time.time() * 1000)
        producer.send(Message(topic, b"3 s", keys=["k"]), delay=3)
        producer.send(Message(topic, b"30 days"), delay=days)
        gone = producer.send(Message(topic, b"never"), delay=days - 5)
        assert producer.recall(topic, gone.recall_handle or "") == gone.msg_id
        (soon,) = stored(older, topic, 1)
        assert (soon.body, soon.store_timestamp >= begin_ms + 3000 - STEP_MS) == (b"3 s", True)
        assert node.holds(1)
        node.step_s = days
        assert [message.body for message in stored(older, topic, 2)] == [b"3 s", b"30 days"]


@refused(RECALL, VERSIONS)
def test_recall_is_an_error_that_says_so(older: LocalBroker, make: Make) -> None:
    topic = make(1)
    with Producer(older.name_server, "p") as producer:
        assert producer.send(Message(topic, b"x")).recall_handle is None
        handle = base64.urlsafe_b64encode(
            f"v1 {topic} broker-a {int(time.time() * 1000) + 60_000} ID".encode()
        ).decode()
        with pytest.raises(NotSupported, match="not supported"):
            producer.recall(topic, handle)


@runs(BATCH_TOPICS, NEW)
def test_batch_topics(older: LocalBroker, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    topic, writes = make(2, batch=True), Writes(older.name_server, monkeypatch)
    rows = frame(body=numbered(1000), tags=["ab"[n % 2] for n in range(1000)], keys=[[f"k{n}"] for n in range(1000)])
    assert writes(rows, topic=topic).rows == 1000
    with Producer(older.name_server, "p", auto_batch=True) as producer:
        producer.send_batch([Message(topic, b"x%d" % n, tags="a", keys=[f"k{n}"]) for n in range(100)])
        futures = [producer.send_async(Message(topic, b"y%d" % n, tags="b")) for n in range(100)]
        assert len({future.result(60).offset_msg_id for future in futures}) < 50  # whole batches
    expected = Counter([*numbered(1000), *(f"{letter}{n}" for letter in "xy" for n in range(100))])
    total(older, topic, 1200)
    found = read(older, subscribe=topic)
    assert Counter(bodies(found)) == expected
    of_java = java_read(older.name_server, topic, 1200, bodies=True)
    assert Counter((r.id, r.queue, r.offset, tuple(r.keys or ())) for r in of_java) == Counter(
        (row["msgId"], row["queueId"], row["queueOffset"], tuple(row["keys"] or ())) for row in found
    )
    assert len({row["msgId"] for row in found}) == 1200
    of_tag = Counter(body for body in expected if body[0] == "x" or (body[0] != "y" and int(body) % 2 == 0))
    assert Counter(bodies(read(older, subscribe=topic, tags="a"))) == of_tag


@refused(BATCH_TOPICS, OLD)
def test_batch_topics_are_refused(older: LocalBroker) -> None:
    name = f"batch-{time.time_ns()}"
    with Admin(older.name_server) as admin:
        with pytest.raises(NotSupported, match=r"broker-a is older than RocketMQ 5\.0 and ignored the attributes"):
            admin.create_topic(name, 2, batch=True)
        with pytest.raises(NotSupported, match=r"ignored the attributes message\.type"):
            admin.create_topic(f"{name}-typed", 2, attributes={"message.type": "FIFO"})
    with Producer(older.name_server, "p") as producer:  # as the remedy says
        producer.send_batch([Message(name, b"1"), Message(name, b"2")])
    assert [message.body for message in stored(older, name, 2)] == [b"1", b"2"]
    assert len(stored_now(older, name)) == 2
