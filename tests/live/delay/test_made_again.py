"""A node of which the inner topic is deleted and made again while it runs, on a real broker."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope
from tests.helpers import WAIT_S, stored


@pytest.mark.parametrize("more", [1, 6])
def test_messages_in_recreated_inner_topic_are_sent(
    rocketmq: LocalBroker, topic: str, tmp_path: Path, more: int
) -> None:
    """A pull that waits meanwhile goes on behind the end of the old one; one that comes then is given the new end."""
    inner = f"{topic}-inner"
    rocketmq.create_topic(inner, queues=1)
    place = NodeSettings(tmp_path / "n", inner, f"{topic}-dead")
    node = open_node(place, name_server=rocketmq.name_server, group=f"g_{topic}")
    over = threading.Event()
    running = threading.Thread(target=node.run, args=(over,))
    running.start()
    due_ms = time.time_ns() // 1_000_000
    names = [f"old{i}" for i in range(3)] + [f"new{i}" for i in range(more)]
    try:
        with Producer(name_server=rocketmq.name_server, group="p") as producer:
            for sent, name in enumerate(names):
                if name == "new0":
                    time.sleep(1)  # the node waits in a pull by then
                    rocketmq.admin.delete_topic(inner)
                    rocketmq.create_topic(inner, queues=1)
                envelope = Envelope(topic, due_ms, name, due_ms, 0, f"UNIQ_KEY\x01{name}\x02", name.encode())
                producer.send(Message(inner, envelope.pack()))
                if name.startswith("old"):
                    assert wait_until(lambda sent=sent: node.sent_count == sent + 1, Deadline.after(WAIT_S), 0.02)
        assert wait_until(lambda: node.sent_count == len(names), Deadline.after(WAIT_S), 0.02)
    finally:
        over.set()
        running.join(60)
    assert sorted(message.body.decode() for message in stored(rocketmq, topic, len(names))) == sorted(names)
