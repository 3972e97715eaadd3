"""Environments by their number while a broker is away: what is another's is never read, and nothing is sent there."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rocketmq_spark import Message, Producer, session
from rocketmq_spark.model import MessageQueue, SendStatus
from rocketmq_spark.producer.retry import RetryState
from rocketmq_spark.spark.datasource import RocketMQDataSource
from tests.helpers import killed, stored
from tests.live.writes import bodies, frame
from tests.mockbroker import eventually
from tests.reading import Run, feed, names
from tests.schemas import struct

SHORT = {"requestTimeout": "1s", "numRetries": 3}


def test_environment_reads_only_its_queue_while_broker_is_away(pair, caplog):
    (topic,) = names(1, "orders")
    pair.create_topic(topic, 2)
    a, b = (MessageQueue(topic, f"broker-{name}", 0) for name in "ab")
    options = {"subscribe": topic, **SHORT}
    first = Run(pair, startingOffsets="earliest", environment=1, **options)
    third = Run(pair, startingOffsets="earliest", environment=3, **options)
    mine = feed(pair, topic, 4, queues=[a])
    first.drain(mine)
    killed(pair, "broker-a")
    eventually(lambda: "broker-a" not in pair.admin.routes.cluster(), 60)
    foreign = feed(pair, topic, 70, queues=[b])
    third.drain(foreign)  # which would be called out of range by the two queues that are left
    again = Run(pair, first.offset, environment=1, **options)
    for run in (first, again):
        for _ in range(5):
            assert run.batch() == []
    assert f"cannot read now: {topic}/broker-a/0" in caplog.text
    pair.restart("broker-a")
    mine += feed(pair, topic, 4, queues=[a])
    first.drain(mine)
    again.drain(mine[4:])
    assert sorted(first.read) == sorted(mine)
    assert sorted(again.read) == sorted(mine[4:])
    assert sorted(third.read) == sorted(foreign)


@pytest.mark.parametrize("spooled", [False, True])
def test_task_sends_to_queue_of_driver_despite_lost_broker(pair, tmp_path, monkeypatch, spooled):
    (topic,) = names(1, "orders")
    pair.create_topic(topic, 2)
    more = {"onSendFailure": "spool", "spoolDir": str(tmp_path), "sendTimeout": "1s"} if spooled else {}
    options = {"nameServer": pair.name_server, "topic": topic, "environment": "1", "sendTimeout": "60s", **more}
    sent = pickle.dumps(RocketMQDataSource(options).writer(struct("body string"), False))
    killed(pair, "broker-a")
    eventually(lambda: "broker-a" not in pair.admin.routes.cluster(), 60)
    session.close_all()  # as a worker that was started only now, and knows nothing
    writer, tried, judge = pickle.loads(sent), threading.Event(), RetryState.next_action
    monkeypatch.setattr(
        RetryState, "next_action", lambda one, *of: (judge(one, *of), one.tried_brokers and tried.set())[0]
    )
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(writer.write, iter([frame(body=["mine"])]))
        eventually(lambda: written.done() if spooled else tried.is_set(), 60)
        pair.restart("broker-a")
        done = written.result(120).written
    assert (done.rows, done.spooled) == ((0, 1) if spooled else (1, 0))
    assert spooled or done.brokers["broker-a"].failures > 0, "it was back before it was tried"
    (message,) = stored(pair, topic, 1)
    assert (bodies([message]), message.queue) == (["mine"], MessageQueue(topic, "broker-a", 0))
    session.close_all()


@pytest.mark.parametrize("number", [1, 4])
def test_spooled_messages_keep_their_queue_after_restart(pair, tmp_path, number):
    """With a broker fewer the first number is another environment's queue, and the fourth none, which refuses for good."""
    (topic,) = names(1, "orders")
    pair.create_topic(topic, 2)
    mine = MessageQueue(topic, "broker-a", 0) if number == 1 else MessageQueue(topic, "broker-b", 1)

    def producer():
        return Producer(
            name_server=pair.name_server, group="g", environment=str(number), send_timeout="1s",
            on_send_failure="spool", spool_dir=str(tmp_path),
        )  # fmt: skip

    first = producer()
    assert first.send(Message(topic, b"1"), timeout_s=60).queue == mine
    killed(pair, mine.broker_name)
    assert first.send(Message(topic, b"2")).status is SendStatus.SPOOLED
    first.close()
    eventually(lambda: mine.broker_name not in pair.admin.routes.cluster(), 60)
    session.close_all()  # as a process that was started only now
    again = producer()
    assert again.send(Message(topic, b"3")).status is SendStatus.SPOOLED
    pair.restart(mine.broker_name)
    eventually(lambda: again.spool_metrics().depth == 0, 60)
    assert again.spool_metrics().dead == 0
    again.close()
    found = stored(pair, topic, 3)
    assert (sorted(bodies(found)), {message.queue for message in found}) == (["1", "2", "3"], {mine})
    session.close_all()
