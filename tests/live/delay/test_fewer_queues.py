"""A node of which the inner topic gets fewer queues while messages wait, on a real broker."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from rocketmq_spark import Message, Producer
from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.delay.release import PROBLEM_PROPERTY
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.envelope import Envelope
from tests.helpers import WAIT_S, stored


def test_delayed_messages_of_removed_queue_are_sent(rocketmq: LocalBroker, topic: str, tmp_path: Path) -> None:
    inner = f"{topic}-inner"
    rocketmq.create_topic(inner, queues=2)
    lead_s = 0.0  # of the node's clock
    place = NodeSettings(tmp_path / "n", inner, f"{topic}-dead", lambda: int(1000 * (time.time() + lead_s)), (topic,))
    node = open_node(place, name_server=rocketmq.name_server, group=f"g_{topic}")
    over = threading.Event()
    running = threading.Thread(target=node.run, args=(over,))
    running.start()
    now_ms = time.time_ns() // 1_000_000
    body = Envelope(topic, now_ms + 3_600_000, "one", now_ms, 0, "UNIQ_KEY\x01one\x02", b"one").pack()
    elsewhere = Envelope(place.dead_topic, now_ms + 3_600_000, "two", now_ms, 0, "UNIQ_KEY\x01two\x02", b"two").pack()
    gone = MessageQueue(inner, "broker-a", 1)
    try:
        with Producer(name_server=rocketmq.name_server, group="p") as producer:
            producer.send(Message(inner, body), queue=gone)
            producer.send(Message(inner, elsewhere), queue=gone._replace(queue_id=0))
        assert wait_until(lambda: node.waiting_count == 2, Deadline.after(WAIT_S), 0.02)
        rocketmq.admin.resize_topic(inner, 1, ["broker-a"])
        assert wait_until(lambda: gone not in node._checkpoints, Deadline.after(WAIT_S), 0.1)
        lead_s = 3600.0
        assert wait_until(lambda: node.sent_count == 2, Deadline.after(WAIT_S), 0.02)
    finally:
        over.set()
        running.join(60)
    assert [message.body for message in stored(rocketmq, topic, 1)] == [b"one"]
    (dead,) = stored(rocketmq, place.dead_topic, 1)
    assert "is none of those that messages may be delivered to" in dead.properties[PROBLEM_PROPERTY], (
        "this node may not send there"
    )
