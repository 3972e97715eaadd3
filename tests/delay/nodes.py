"""Nodes of the delay service on a scripted inner topic: what each reads, what it sends, and time that a test moves."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import envelope_records, service
from rocketmq_spark.delay.commits import CommittedOffsets, CommittedProgress, GroupNames
from rocketmq_spark.delay.service import DelayService, NodeTools
from rocketmq_spark.errors import CallTimeout, GroupNotFound, OffsetError, RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds, ReceivedMessage
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.spool import SendSpool
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import INNER_TOPIC, Envelope
from tests.fakes.resender import FakeResender
from tests.fakes.timer import ManualTimer, Time

START_MS = 1_700_000_000_000
QUEUES = [MessageQueue(INNER_TOPIC, "broker-a", i) for i in range(2)]
OTHER = MessageQueue(INNER_TOPIC, "broker-b", 0)


RULES = envelope_records.DeliveryRules(ProducerSettings(group="g"), "dead")


class Topic:
    """The inner topic and the offsets of groups."""

    def __init__(self) -> None:
        self.messages: dict[MessageQueue, list[bytes]] = {queue: [] for queue in (*QUEUES, OTHER)}
        self.times_ms: dict[MessageQueue, list[int]] = {queue: [] for queue in (*QUEUES, OTHER)}
        self.now_ms = START_MS
        self.first: dict[MessageQueue, int] = dict.fromkeys((*QUEUES, OTHER), 0)
        self.offsets: dict[tuple[str, MessageQueue], int] = {}
        self.groups: set[str] = set(GroupNames("g").all_groups)
        self.silent = False
        self.takes = -1  # commits, and no more; any number below 0
        self.away: set[str] = set()  # brokers
        self.unread: set[MessageQueue] = set()  # by the route

    def put(self, body: bytes, queue: MessageQueue = QUEUES[0]) -> None:
        self.messages[queue].append(body)
        self.now_ms += 1
        self.times_ms[queue].append(self.now_ms)

    def make_again(self) -> None:
        """As it is deleted and made again: brokers forget the offsets of groups with it."""
        for queue in QUEUES:
            self.messages[queue], self.times_ms[queue], self.first[queue] = [], [], 0
        self.offsets.clear()

    def lose_last(self, count: int, queue: MessageQueue = QUEUES[0]) -> list[bytes]:
        """As after a power cut, or when a slower slave takes over. Returns the messages; later ones get their offsets."""
        at = max(self.first[queue], len(self.messages[queue]) - count)
        lost = self.messages[queue][at:]
        del self.messages[queue][at:], self.times_ms[queue][at:]
        return lost

    # As a ``GroupMember``.

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> list[MessageQueue]:
        return sorted(queue for queue in self.messages.keys() - self.unread if queue.topic == topic)

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, zero_if_new: bool = True) -> int | None:
        assert not zero_if_new
        self._ask(queue)
        return self.offsets.get((group, queue))

    def bounds(self, queue: MessageQueue, deadline: Deadline) -> QueueBounds:
        self._ask(queue)
        return QueueBounds(self.first[queue], max(self.first[queue], len(self.messages[queue])), 0)

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        self._ask(queue)
        times_ms = self.times_ms[queue]
        at = next((at for at in range(self.first[queue], len(times_ms)) if times_ms[at] >= epoch_ms), len(times_ms))
        return min(at, max(0, len(times_ms) - 1)) if group is None else at  # as brokers before 5.1.4

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        if group not in self.groups:
            return dict.fromkeys(offsets, GroupNotFound("no such group"))
        if self.silent or self.away & {queue.broker_name for queue in offsets} or self.takes == 0:
            return dict.fromkeys(offsets, CallTimeout("no answer"))
        self.takes -= 1
        self.offsets |= {(group, queue): offset for queue, offset in offsets.items()}
        return {}

    def _ask(self, queue: MessageQueue) -> None:
        if self.silent or queue.broker_name in self.away:
            raise CallTimeout("no answer")


class Reader:
    """A pull consumer whose queues a test gives it."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.at: dict[MessageQueue, int] = {}
        self.paused: set[MessageQueue] = set()
        self.closed = False

    def own(self, *queues: MessageQueue) -> None:
        self.at = {q: self.at.get(q, self.topic.offsets.get(("g", q), 0)) for q in queues}
        self.paused &= self.at.keys()

    def assignment(self) -> list[MessageQueue]:
        return sorted(self.at)

    def poll(self, timeout_s: float = 5.0) -> list[ReceivedMessage]:
        for queue, at in self.at.items():
            if queue in self.paused:
                continue
            at = max(at, self.topic.first[queue])
            if at < len(self.topic.messages[queue]):
                self.at[queue] = at + 1
                return [received(queue, at, self.topic.messages[queue][at], self.topic.times_ms[queue][at])]
        return []

    def pause(self, *queues: MessageQueue) -> None:
        self.paused |= set(queues)

    def resume(self, *queues: MessageQueue) -> None:
        self.paused -= set(queues)

    def seek(self, queue: MessageQueue, offset: int) -> None:
        if queue not in self.at:
            raise OffsetError("the queue is not assigned")
        bounds = self.topic.bounds(queue, Deadline.after(1))
        if not bounds.min_offset <= offset <= bounds.max_offset:
            raise OffsetError(f"offset {offset} is sought; expected one of {bounds}")
        self.at[queue] = offset

    def close(self) -> None:
        self.closed = True


class Node:
    """A node of group ``g``, on a folder; ``world`` is the clock of all of them."""

    def __init__(self, topic: Topic, folder: Path, world: Time) -> None:
        self.topic, self.folder, self.world = topic, folder, world
        self.step_ms = 0  # of this machine's clock
        self.sends = FakeResender()
        self.open()

    def open(self) -> None:
        self.reader = Reader(self.topic)
        self.store = Store(self.folder, sync="never")
        self.sends.closed = False  # the next process has its own resender
        self.timers: list[ManualTimer] = []
        trade = envelope_records.redelivery_policy(RULES, 64)
        tools = NodeTools(
            self.now_ms, lambda broker: 3_600_000, lambda group, brokers: self.topic.groups.add(group), RULES
        )
        member: Any = self.topic
        self.service = DelayService(
            self.reader, member, GroupNames("g"), self.store,
            lambda: SendSpool(self.store, self.sends, self.timer(), self.now_ms, policy=trade), tools,
        )  # fmt: skip

    def timer(self) -> ManualTimer:
        self.timers.append(ManualTimer(self.world))
        return self.timers[-1]

    def now_ms(self) -> int:
        return START_MS + round(1000 * (self.world.now - 1000)) + self.step_ms

    def turn(self, *queues: MessageQueue) -> None:
        """One step with these queues; what is due is sent in it."""
        self.reader.own(*queues)
        self.service.turn()
        self.world.run_due()

    def kill(self) -> None:
        """What is in memory is gone; the folder is as it was, not as a close leaves it."""
        left = shutil.copytree(self.folder, self.folder.with_name(f"{self.folder.name}-left"))
        for timer in self.timers:
            timer.close()
        self.store.close()
        shutil.rmtree(self.folder)
        left.rename(self.folder)
        self.open()


def received(queue: MessageQueue, offset: int, body: bytes, stored_ms: int = START_MS) -> ReceivedMessage:
    return ReceivedMessage(
        queue.topic, queue, offset, 0, body, {}, 0, 0, START_MS, stored_ms, "", "", 0, 0, 0, f"OFF{offset}"
    )


def envelope(name: str, due_s: float, topic: str = "orders", body: bytes = b"") -> bytes:
    due_ms = START_MS + round(1000 * due_s)
    return Envelope(topic, due_ms, name, START_MS, 0, f"UNIQ_KEY\x01{name}\x02", body or name.encode()).pack()


def at_once(monkeypatch: Any) -> None:
    """Positions are told each turn, and queues that change hands are begun without waiting."""
    monkeypatch.setattr(service, "COMMIT_S", 0.0)
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    monkeypatch.setattr(service, "HAND_OVER_S", 0.0)
    monkeypatch.setattr(service, "COMMIT_CHECK_S", 0.0)


class World:
    """An inner topic, time, and nodes by name."""

    def __init__(self, folder: Path) -> None:
        self.topic, self.time = Topic(), Time()
        self._folder = folder
        self.nodes: dict[str, Node] = {}

    def node(self, name: str) -> Node:
        self.nodes[name] = Node(self.topic, self._folder / name, self.time)
        return self.nodes[name]

    def offsets(self, queue: MessageQueue = QUEUES[0]) -> tuple[int | None, ...]:
        """The progress that brokers have, as oldest, stored and done_ms."""
        oldest, progress, *others = (self.topic.offsets.get((group, queue)) for group in GroupNames("g").all_groups)
        if oldest is None or progress is None:
            return oldest, None, None
        progress_ms, newest_store_ms = (number or 0 for number in others)
        return tuple(
            CommittedProgress.decode(CommittedOffsets(oldest, progress, progress_ms, newest_store_ms)).progress
        )
