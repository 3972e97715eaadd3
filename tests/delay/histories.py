"""Random histories of three nodes that share three queues, of two brokers: what goes wrong in them, in any order.

The nodes' stores, redelivery and commits are real. Nodes are killed before or after any write or commit, their disks fail or are
lost, they stand still while another one has their queues, brokers go away, commits break off, topics reject or do not answer, and
queues move. In the end everything answers again: then each message must have been sent, none early, and nothing may be left.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import queue_records, service
from rocketmq_spark.errors import ClosedError, RocketMQError, SpoolError
from rocketmq_spark.model import MessageQueue, ReceivedMessage, Resent, SpooledSend
from rocketmq_spark.spool.database import Database
from rocketmq_spark.wire.envelope import cancel_envelope
from tests.delay.nodes import OTHER, QUEUES, START_MS, Node, Reader, Topic, World, at_once, envelope, received

ALL = [*QUEUES, OTHER]
NAMES = "abc"
STEPS = 120
_LATE_S = (-5, 0.5, 3, 10, 20, 40, 60)
# A topic that answers, one that refuses all messages, one that may not answer, and one that no producer could have named.
_TOPICS, _WEIGHTS = ("orders", "bad", "flaky", "foreign?"), (65, 15, 15, 5)


class Killed(BaseException):
    """A process ends. Not an error that a node handles."""


class Fuse:
    """Ends a node at a write or commit that is counted, before or after it, or lets a write fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.after = self.kills = False
        write, commit = Database.write, Topic.commit

        def fused_write(
            db: Database, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), sync: bool = False
        ) -> None:
            self._burn(lambda: write(db, puts, deletes, sync), SpoolError("the disk is away"))

        def fused_commit(
            topic: Topic, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
        ) -> dict[MessageQueue, RocketMQError]:
            return self._burn(lambda: commit(topic, group, offsets, deadline), Killed())

        monkeypatch.setattr(Database, "write", fused_write)
        monkeypatch.setattr(Topic, "commit", fused_commit)

    def light(self, rng: random.Random) -> None:
        self.left, self.after, self.kills = rng.randint(0, 8), rng.random() < 0.5, rng.random() < 0.7

    def _burn(self, call: Callable[[], Any], error: BaseException) -> Any:
        if self.left is None or self.left > 0:
            self.left = None if self.left is None else self.left - 1
            return call()
        self.left = None
        if self.after:
            call()
        raise Killed if self.kills else error


class Accident(StrEnum):
    """What may happen to the inner topic, besides all else."""

    NOTHING = "nothing"
    REMADE = "it is created again"
    SHORTER = "its broker loses its last messages"


def prepare(monkeypatch: pytest.MonkeyPatch, accident: Accident) -> Fuse:
    """No pauses, polls of several messages, and hand-overs of several writes."""
    at_once(monkeypatch)
    # A node that waits for messages of a topic that was created again waits by the machine's clock.
    for name in (
        "JOIN_S",
        "PAUSE_S",
        "RECREATION_CHECK_S",
        *(["CATCH_UP_S"] if accident is not Accident.NOTHING else []),
    ):
        monkeypatch.setattr(service, name, 0.0)
    monkeypatch.setattr(queue_records, "PAGE", 2)
    monkeypatch.setattr(Reader, "poll", _poll)
    return Fuse(monkeypatch)


def _poll(reader: Reader, timeout_s: float = 5.0) -> list[ReceivedMessage]:
    topic, found = reader.topic, []
    for queue, at in reader.at.items():
        if queue in reader.paused or queue.broker_name in topic.away:
            continue
        start = max(at, topic.first[queue])
        end = min(len(topic.messages[queue]), start + _few(topic))
        found += [received(queue, i, topic.messages[queue][i], topic.times_ms[queue][i]) for i in range(start, end)]
        reader.at[queue] = max(start, end)
    return found


def _few(topic: Any) -> int:
    return topic.rng.randint(0, 5)


class History:
    """One history. What the inner topic loses by ``accident`` need not be sent."""

    def __init__(self, seed: int, folder: Path, fuse: Fuse, accident: Accident = Accident.NOTHING) -> None:
        self.rng, self.fuse, self.world = random.Random(seed), fuse, World(folder)
        topic: Any = self.world.topic
        topic.rng = self.rng
        self.count = 0
        self.due_ms: dict[bytes, int] = {}  # by body, what must be sent
        self.optional: set[bytes] = set()
        self.names: dict[bytes, bytes] = {}  # what is sent of a message, by its envelope
        self.sent: dict[bytes, list[int]] = {}  # when brokers accepted it, by the clock of its node
        self.down: set[str] = set()  # topics that do not answer
        self.frozen: set[str] = set()  # nodes that do not hear that their queues moved
        self.owner = {queue: self.rng.choice(NAMES) for queue in ALL}
        for name in NAMES:
            self._prepare(self.world.node(name))
        self.actions: dict[Callable[[], None], float] = {
            self.put: 28, self.turn_one: 32, self.advance_a_while: 18, self.move: 8, self.freeze: 3, self.kill_one: 3,
            self.restart: 2, self.break_topic: 2, self.break_broker: 2, self.break_commits: 2,
            self.make_again: 2 * (accident is Accident.REMADE), self.lose_last: 4 * (accident is Accident.SHORTER),
        }  # fmt: skip

    @property
    def nodes(self) -> dict[str, Node]:
        return self.world.nodes

    def run(self, steps: int = STEPS) -> list[str]:
        """Returns what is wrong in the end."""
        try:
            actions, weights = list(self.actions), list(self.actions.values())
            for _ in range(steps):
                self.rng.choices(actions, weights)[0]()
                self.fuse.left = None
            self._recover()
            return self._problems()
        finally:
            for node in self.nodes.values():
                node.store.close()

    # --- what happens

    def put(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.count += 1
            name, queue, topic = f"m{self.count}", self.rng.choice(ALL), self.rng.choices(_TOPICS, _WEIGHTS)[0]
            due_s = self.world.time.now - 1000 + self.rng.choice(_LATE_S)
            due_ms, body = START_MS + round(1000 * due_s), envelope(name, due_s, topic)
            if self.rng.random() < 0.05:
                body = name.encode()
            self.world.topic.put(body, queue)
            self.names[body] = name.encode()
            if topic == "foreign?" or body == name.encode():  # a dead letter of the whole body, at once
                self.names[body], self.due_ms[body] = body, 0
                continue
            self.due_ms[name.encode()] = due_ms
            if self.rng.random() < 0.1:
                self.world.topic.put(body, self.rng.choice(ALL))
            if self.rng.random() < 0.06:
                self.optional.add(name.encode())
                for each in ALL:
                    self.world.topic.put(cancel_envelope(topic, due_ms, name, START_MS), each)

    def turn_one(self) -> None:
        if self.rng.random() < 0.15:
            self.fuse.light(self.rng)
        self._turn(self.rng.choice(NAMES))
        if self.rng.random() < 0.5:
            self._advance(0.0)

    def advance_a_while(self) -> None:
        if self.rng.random() < 0.1:
            self.fuse.light(self.rng)
        self._advance(self.rng.choice((0.1, 1, 3, 8, 20)))

    def move(self) -> None:
        self.owner[self.rng.choice(ALL)] = self.rng.choice(NAMES)

    def freeze(self) -> None:
        self.frozen ^= {self.rng.choice(NAMES)}

    def kill_one(self) -> None:
        name = self.rng.choice(NAMES)
        self._kill(name)
        if self.rng.random() < 0.4:  # and loses its disk
            node = self.nodes[name]
            self._stop(node)
            shutil.rmtree(node.folder)
            node.open()

    def restart(self) -> None:
        node = self.nodes[self.rng.choice(NAMES)]
        node.service.close()
        self._stop(node)
        node.open()

    def break_topic(self) -> None:
        self.down ^= {self.rng.choice(("flaky", "dead"))}

    def break_broker(self) -> None:
        self.world.topic.away ^= {self.rng.choice(("broker-a", "broker-b"))}

    def break_commits(self) -> None:
        self.world.topic.takes = self.rng.choice((-1, 0, 1, 2, 3, 5))

    def make_again(self) -> None:
        self.world.topic.make_again()
        self.optional |= self.due_ms.keys()

    def lose_last(self) -> None:
        lost = self.world.topic.lose_last(self.rng.randint(1, 4), self.rng.choice(ALL))
        for body in lost:
            self.optional.add(self.names.get(body, body))

    # --- how

    def _prepare(self, node: Node) -> None:
        def answer(send: SpooledSend) -> Resent:
            if send.topic in self.down or self.rng.random() < 0.03:
                return Resent(None, "no answer", is_temporary=True)
            if send.topic == "bad":
                return Resent(None, "no permission")
            self.sent.setdefault(bytes(send.request.body), []).append(node.now_ms())
            return Resent(send.queue or MessageQueue(send.topic, "broker-a", 0))

        node.sends.answer = answer

    def _turn(self, name: str) -> None:
        node = self.nodes[name]
        if name not in self.frozen:
            node.reader.own(*(queue for queue in ALL if self.owner[queue] == name))
        try:
            node.service.turn()
        except (Killed, ClosedError):  # ``run`` ends with the latter, after its spool could not be opened
            self._kill(name)
        except RocketMQError:  # ``run`` goes on after it
            pass

    def _advance(self, seconds: float) -> None:
        try:
            self.world.time.advance(seconds)
        except Killed:  # nobody knows which one
            for name in NAMES:
                self._kill(name)

    def _kill(self, name: str) -> None:
        self.fuse.left = None
        self.nodes[name].kill()

    def _stop(self, node: Node) -> None:
        for timer in node.timers:
            timer.close()
        node.store.close()

    def _recover(self) -> None:
        self.down.clear()
        self.frozen.clear()
        self.world.topic.away.clear()
        self.world.topic.takes = -1
        for pauses_s in ([5] * 40, [4000], [1900] * 10):  # everything is read; retries end; their results are committed
            for pause_s in pauses_s:
                for name in NAMES:
                    self._turn(name)
                self._advance(pause_s)
        for name in NAMES:
            self._turn(name)

    def _problems(self) -> list[str]:
        found = [f"{body!r} is lost" for body in self.due_ms.keys() - self.sent.keys() - self.optional]
        found += [
            f"{body!r} is early" for body in self.due_ms if min(self.sent.get(body, [1 << 63])) < self.due_ms[body]
        ]
        for name, node in self.nodes.items():
            if len(node.store) or node.store.totals.dead:
                found.append(f"{name} holds {len(node.store)} messages and {node.store.totals.dead} dead ones")
        for queue in ALL:
            oldest, end = self.world.offsets(queue)[0] or 0, len(self.world.topic.messages[queue])
            if oldest != end:
                found.append(f"{queue} ends at {end}, and is done up to {oldest}")
        return found
