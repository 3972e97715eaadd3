"""Two nodes of the delay service that are killed at any moment, one after the other: nothing is lost, nothing is early."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Message, Producer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import Envelope
from tests.helpers import awaited, stored, stored_now, total
from tests.live.delay.serving import Command
from tests.scale import scaled

KILLS = scaled(20)
MOST_S = 3.5  # until a kill, from the first release on
PORTION, DUE_WITHIN_MS = 500, 12_000
LEAST_MS = 5000  # which the last one must still have to wait then


@pytest.mark.timeout(900 + 20 * KILLS)
def test_killed_delay_nodes_lose_nothing_and_send_nothing_early(
    rocketmq: LocalBroker, make_topic: Any, tmp_path: Path
) -> None:
    inner, target, dead = make_topic(queues=8), make_topic(queues=4), make_topic(queues=1)
    chance = random.Random()
    arguments = ("--inner-topic", inner, "--dead-topic", dead, "--group", f"delay_{inner}")

    def ids() -> set[str]:
        return {message.msg_id for message in stored_now(rocketmq, target)}

    nodes = [Command(rocketmq, tmp_path / f"node{i}", *arguments) for i in range(2)]
    due: dict[str, int] = {}

    def send(producer: Producer) -> None:
        now_ms = int(time.time() * 1000)
        for _ in range(PORTION):
            name = f"ID{len(due):06}"
            due[name] = now_ms + chance.randrange(500, DUE_WITHIN_MS)
            text = f"UNIQ_KEY\x01{name}\x02"
            body = Envelope(target, due[name], name, now_ms, 0, text, name.encode()).pack()
            producer.send_async(Message(inner, body))

    try:
        for number in range(KILLS):
            for node in nodes:
                node.begun()
            before = total(rocketmq, target)
            with Producer(name_server=rocketmq.name_server, group="delays") as producer:
                send(producer)
                total(rocketmq, target, before + 1, 60)  # some are released, and others wait
                time.sleep(chance.uniform(0.0, MOST_S))  # into the middle of whatever it does
                if max(due.values()) < time.time() * 1000 + LEAST_MS:  # a slow machine took so long to release one
                    send(producer)
            killed_ms = int(time.time() * 1000)
            nodes[number % 2].kill()
            assert max(due.values()) > killed_ms, "there was nothing left to lose"
            nodes[number % 2].start()
        total(rocketmq, target, len(due), 60)
        awaited(ids, lambda found: found == due.keys(), 60)
    finally:
        for node in nodes:
            node.end()
    found = stored(rocketmq, target, len(due))
    assert not [message for message in found if message.store_timestamp < due[message.msg_id]]
    sent = Counter(message.msg_id for message in found)
    # What was sent and not settled, and, where the other node took over, what fell due since positions were told.
    twice = sum(sent.values()) - len(due)
    print(f"{KILLS} kills: {len(due)} messages, {twice} of them came again")
    assert max(sent.values()) <= 1 + KILLS
