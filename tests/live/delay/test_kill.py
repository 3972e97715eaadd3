"""Two nodes of the delay service that are killed at any moment, one after the other: nothing is lost, nothing is early."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.clock import Deadline, wait_until
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope
from tests.live.delay.serving import Command
from tests.live.writes import stored
from tests.scale import scaled

KILLS = scaled(20)
# A kill each so many seconds, more or less; messages fall due all the while.
STEP_S = 2.5
COUNT = 1000


@pytest.mark.timeout(120 + 20 * KILLS)
def test_3_24_3_31_3_34_killed_at_any_moment_nothing_is_lost_and_nothing_is_early(
    rocketmq: LocalBroker, make_topic: Any, tmp_path: Path
) -> None:
    inner, target, dead = make_topic(queues=8), make_topic(queues=4), make_topic(queues=1)
    chance = random.Random()
    arguments = ("--topic", inner, "--dead-topic", dead, "--group", f"delay_{inner}")
    nodes = [Command(rocketmq, tmp_path / f"node{i}", *arguments) for i in range(2)]
    due = {}
    with Producer(name_server=rocketmq.name_server, group="delays") as producer:
        began_ms = int(time.time() * 1000)
        for i in range(COUNT):
            name = f"ID{i:06}"
            due[name] = began_ms + chance.randrange(500, round(1000 * STEP_S * (KILLS + 2)))
            text = f"UNIQ_KEY\x01{name}\x02"
            body = Envelope(target, due[name], name, began_ms, 0, text, name.encode()).pack()
            producer.send_async(Message(inner, body))
    try:
        for number in range(KILLS):
            time.sleep(chance.uniform(0.5, 1.5) * STEP_S)  # into the middle of whatever it does
            nodes[number % 2].kill()
            nodes[number % 2].start()

        def enough() -> bool:
            return sum(bounds.max_offset for bounds in rocketmq.admin.describe_topic(target).values()) >= COUNT

        wait_until(enough, Deadline.after(60), 0.2)
        ids = _ids(rocketmq, target, due)
        assert wait_until(lambda: ids() == due.keys(), Deadline.after(60), 0.5), sorted(due.keys() - ids())[:10]
    finally:
        for node in nodes:
            node.end()
    found = stored(rocketmq, target, COUNT)
    assert not [message for message in found if message.store_timestamp < due[message.msg_id]]
    sent = Counter(message.msg_id for message in found)
    # What was sent and not settled, and, where the other node took over, what fell due since positions were told.
    twice = sum(sent.values()) - COUNT
    print(f"{KILLS} kills: {COUNT} messages, {twice} of them came again")
    assert max(sent.values()) <= 1 + KILLS


def _ids(mq: LocalBroker, topic: str, due: dict[str, int]) -> Any:
    return lambda: {message.msg_id for message in stored(mq, topic, len(due), timeout_s=0)}
