"""Two environments on one topic: what one sends is never seen by the other, however often it fails (3-1).

RocketMQ's own client tells where messages lie: in which queues, retry topics and dead letters.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, ReceivedMessage
from rocketmq_spark.session import Consumer, Producer
from tests.mockbroker import eventually
from tests.witness import java_read

ENVIRONMENTS = ("1", "2")
COUNT, TRIES = 60, 3
DELAYS = " ".join(["1s"] * 18)


class Seen:
    """What listeners of one environment were handed: how often each message, and which of them succeeded."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.handed: Counter[str] = Counter()
        self.queues: set[int] = set()
        self.done: Counter[str] = Counter()

    def listener(self, messages: list[ReceivedMessage], context: object) -> object:
        for message in messages:
            number = int(message.body)
            with self.lock:
                self.handed[message.msg_id] += 1
                self.queues |= set() if message.queue.topic.startswith("%RETRY%") else {message.queue.queue_id}
            if is_dead(number) or (number % 3 == 0 and message.reconsume_times < 2):
                raise ValueError(f"{number} fails")
            with self.lock:
                self.done[message.msg_id] += 1
        return None


def is_dead(number: int) -> bool:
    return number % 20 == 1


def isolated(name: str) -> dict[str, str]:
    return {"environment": name, "environments": str(len(ENVIRONMENTS))}


def test_3_1_3_3_3_4_nothing_is_consumed_in_another_environment_retries_and_dead_letters_included(
    make_cluster: Callable[..., LocalBroker],
) -> None:
    mq = make_cluster(conf={"messageDelayLevel": DELAYS})
    topic, group = "shared", "billing"
    mq.create_topic(topic, queues=6)
    seen = {name: Seen(name) for name in ENVIRONMENTS}
    sent: dict[str, dict[str, int]] = {name: {} for name in ENVIRONMENTS}
    with ExitStack() as stack:
        for i, name in enumerate(("1", "1", "2")):  # two members share what belongs to the first
            options = {"name_server": mq.name_server, "group": group, "connect_timeout": f"{2990 + i}ms"}
            consumer = stack.enter_context(
                Consumer(**options, **isolated(name), consume_from_where="earliest", max_reconsume_times=TRIES)
            )
            consumer.subscribe(topic)
            consumer.start(seen[name].listener)
        for name in ENVIRONMENTS:
            with Producer(name_server=mq.name_server, group="p_environments", **isolated(name)) as producer:
                for number in range(COUNT):
                    sent[name][producer.send(Message(topic, b"%d" % number)).msg_id] = number
        alive = {name: {i for i, n in sent[name].items() if not is_dead(n)} for name in ENVIRONMENTS}
        dead = {name: set(sent[name]) - alive[name] for name in ENVIRONMENTS}

        def over() -> bool:
            return all(
                one.done.keys() >= alive[name] and all(one.handed[i] > TRIES for i in dead[name])
                for name, one in seen.items()
            )

        eventually(over, 120)
        letters = {
            name: java_read(mq.name_server, f"%DLQ%{group}_env_{name}", len(dead[name])) for name in ENVIRONMENTS
        }
    for name, one in seen.items():
        assert one.handed.keys() == sent[name].keys()
        assert one.done.keys() == alive[name]
        assert one.queues <= {queue for queue in range(6) if queue % 2 == int(name) - 1}
        assert {record.id for record in letters[name]} == dead[name]
        retried = java_read(mq.name_server, f"%RETRY%{group}_env_{name}")
        assert {record.id for record in retried} == {i for i, n in sent[name].items() if n % 3 == 0 or is_dead(n)}
    lying = java_read(mq.name_server, topic, 2 * COUNT)
    assert {record.id: record.place[1] % 2 + 1 for record in lying} == {
        i: int(name) for name in ENVIRONMENTS for i in sent[name]
    }
