"""Topics of a pattern are created, fed, resized, deleted and made again at random, before and after a query plans a batch.

``make test`` runs a few seconds of it, ``make soak`` a minute. A seed (``GROWTH_SEED``) repeats the steps, not their moments.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from rocketmq_spark.localbroker import LocalBroker
from tests.helpers import indexed
from tests.mockbroker import eventually
from tests.reading import Run, bodies, feed, handed_over, names, rows
from tests.scale import soak

FAMILY = 4
MAX_QUEUES = 4
# More than the driver reads with the plan: tasks read the rows of such a batch.
MANY = 1500


@dataclass
class Topic:
    """A topic of the pattern: its queues, 0 while it does not exist, and what it was sent since it was last created."""

    name: str
    queues: int = 0
    sent: list[str] = field(default_factory=list)


class World:
    """The topics, what happens to them, and what may be missing because of that."""

    def __init__(self, mq: LocalBroker, rng: random.Random) -> None:
        (prefix,) = names(1, "random")
        self.mq, self.rng = mq, rng
        self.pattern = f"{prefix}-.*"
        # Nothing happens to the first one but messages and new queues.
        self.topics = [Topic(f"{prefix}-{number}") for number in range(FAMILY)]
        self.deleted: set[str] = set()  # messages whose topic was deleted, read before or not
        self.did: Counter[str] = Counter()
        self.create(self.topics[0], 10)

    def create(self, topic: Topic, count: int) -> None:
        topic.queues = self.rng.randint(1, MAX_QUEUES - 1)
        self.mq.create_topic(topic.name, topic.queues)
        self.send(topic, count)

    def send(self, topic: Topic, count: int) -> None:
        topic.sent += feed(self.mq, topic.name, count)

    def delete(self, topic: Topic) -> None:
        self.mq.admin.delete_topic(topic.name)
        eventually(lambda: topic.name not in self.mq.admin.topics(), 60)
        self.deleted.update(topic.sent)
        topic.queues, topic.sent = 0, []

    def grow(self, topic: Topic) -> None:
        topic.queues += 1
        self.mq.create_topic(topic.name, topic.queues, resize=True)
        self.send(topic, self.rng.randint(1, 20))

    def step(self) -> None:
        """One random change. A topic that is made again has fewer messages than before, or has overtaken the old positions."""
        topic, few = self.rng.choice(self.topics), self.rng.randint(1, 40)
        action = self.rng.choices(["send", "send many", "grow", "delete", "make again"], [5, 2, 2, 1, 2])[0]
        if not topic.queues:
            action = "create"
        elif topic is self.topics[0] and action in ("delete", "make again"):
            action = "send"
        elif action == "grow" and topic.queues == MAX_QUEUES:
            action = "send many"
        match action:
            case "create":
                self.create(topic, few)
            case "send":
                self.send(topic, few)
            case "send many":
                self.send(topic, MANY)
            case "grow":
                self.grow(topic)
            case "delete":
                self.delete(topic)
            case "make again":
                count = min(2 * MANY, round(len(topic.sent) * 2 * self.rng.random()) + 1)
                self.delete(topic)
                self.create(topic, count)
        self.did[action] += 1

    def there(self) -> set[str]:
        return {body for topic in self.topics for body in topic.sent}


class Query:
    """A query over the pattern, which sometimes dies between the plan of a batch and its end, and starts again."""

    def __init__(self, world: World) -> None:
        self._world = world
        # A task calls a topic deleted after half of the deadline.
        self._options = {"subscribePattern": world.pattern, "failOnDataLoss": "warn", "readDeadline": "8s"}
        self._run = Run(world.mq, startingOffsets="earliest", **self._options)
        self.batches = 0
        self.times: Counter[str] = Counter()  # how often each message was read

    def batch(self, steps: int, dies: bool = False) -> bool:
        """The next batch, with ``steps`` changes after its plan; whether there was one."""
        run, world = self._run, self._world
        end = run.latest()
        if end == run.offset:
            return False
        tasks = run.plan(end)
        for _ in range(steps):
            world.step()
        if dies and self.batches:
            rows(run.reader, tasks)
            run = Run(world.mq, run.offset, **self._options)
            tasks = run.plan(end)
            world.did["died"] += 1
        handed = handed_over(run.reader)
        found = rows(run.reader, tasks) if handed is None else handed
        world.did["read by tasks" if handed is None else "read with the plan"] += bool(found)
        run.offset = end
        self._run, self.batches = run, self.batches + 1
        self.times.update(bodies(found))
        return True

    def catch_up(self) -> None:
        """Read all that is there now."""
        indexed(self._world.mq)
        wanted = self._world.there()
        eventually(lambda: not self.batch(0) and not wanted - self.times.keys(), 60)


def play(mq: LocalBroker, seconds: float, seed: int, **least: int) -> None:
    print(f"GROWTH_SEED={seed}")
    rng = random.Random(seed)
    world = World(mq, rng)
    query = Query(world)
    until = time.monotonic() + seconds
    while time.monotonic() < until or any(world.did[name] < count for name, count in least.items()):
        world.step()
        query.batch(steps=rng.choice([0, 0, 1, 2]), dies=rng.random() < 0.2)
        if rng.random() < 0.3:  # else what is skipped would soon be of a topic that was deleted
            query.catch_up()
    query.catch_up()
    told, times = {"seed": seed, "batches": query.batches, **world.did}, query.times
    complaints: dict[str, Any] = {
        "never sent": times.keys() - world.there() - world.deleted,
        "twice": {body for body, count in times.items() if count > 1},
        "not once, of the topic that stays": [b for b in world.topics[0].sent if times[b] != 1],
    }
    assert not any(complaints.values()), ({name: (len(f), sorted(f)[:5]) for name, f in complaints.items() if f}, told)
    sent = len(world.there() | world.deleted)
    print(json.dumps({**told, "sent": sent, "read": len(times)}))


def seed() -> int:
    return int(os.environ.get("GROWTH_SEED") or random.randrange(1 << 30))


def test_random_changes_of_a_pattern_lose_and_repeat_nothing(rocketmq):
    play(rocketmq, 4.0, seed(), send=3, **{"make again": 2})


@soak
@pytest.mark.timeout(600)
def test_a_minute_of_random_changes_of_a_pattern(rocketmq):
    play(rocketmq, 60.0, seed(), send=30, grow=5, delete=5, died=5, **{"make again": 20, "read by tasks": 10})
