"""Brokers of one group in memory, and time that the test moves: what a member asks is answered as brokers would.

``FakeBrokers`` keeps topics, offsets, locks and members; each member of the group has a ``FakeMember``, which is its
``ports.GroupMember``. Pulls that find nothing wait until something comes or their time is over.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX, Response
from rocketmq_spark.errors import BrokerError, LocalProtocolError, RocketMQError, RouteNotFound, ServerFault, error_for
from rocketmq_spark.model import Filter, MessageQueue, PullAnswer, PullRequest, PullStatus, QueueBounds, ReceivedMessage
from rocketmq_spark.model.membership import MembersChanged, Membership, RequestCallback
from tests.consumer.messages import message
from tests.fakes.timer import ManualTimer, Time
from tests.queues import qs

# As RocketMQ's documentation prints them; a failed message begins at the third.
LEVELS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
GROUP = "g"
RETRY = RETRY_PREFIX + GROUP

Done = Callable[[PullAnswer | RocketMQError], None]


@dataclass
class Lying:
    """A queue at its broker: messages by offset, what is gone below ``first``."""

    messages: list[ReceivedMessage] = field(default_factory=list)
    first: int = 0


RARE = "rare"  # messages are of every tag but this one


class FakeBrokers:
    """All brokers, and the name server."""

    def __init__(self, time: Time, topics: Mapping[str, str]) -> None:
        self.time = time
        self.old = False  # before 5.1.4
        self.heard: Membership | None = None  # of the member that spoke last
        self.versions: dict[str, int] = {}  # the newest of each topic that the group wants
        self.timer = ManualTimer(time)
        self.topics = {topic: qs(queues, topic) for topic, queues in topics.items()}
        self.queues: defaultdict[MessageQueue, Lying] = defaultdict(Lying)
        self.offsets: dict[MessageQueue, int] = {}
        self.locks: dict[MessageQueue, str] = {}
        self.connections: dict[str, int | None] = {}  # where it is not the first one; None: broken
        self.members: dict[str, FakeMember] = {}
        self.groups: set[str] = set()  # those that ever had a member, or pulled
        self.dead: list[ReceivedMessage] = []
        self.modes: dict[tuple[str, str], str] = {}  # those that an operator set, by topic and broker
        self.failing: dict[str, RocketMQError] = {}  # by verb, or verb and broker name
        self.parked: list[tuple[PullRequest, Done]] = []
        self.random = random.Random(1)

    def send(self, queue: MessageQueue, *bodies: bytes, times: int = 0, topic: str | None = None) -> None:
        lying = self.queues[queue]
        for body in bodies:
            offset = lying.first + len(lying.messages)
            lying.messages.append(message(offset, body, queue, times, topic))
        for request, done in [entry for entry in self.parked if entry[0].queue == queue]:
            self.parked.remove((request, done))
            done(self.answer(request))

    def kept(self, message: ReceivedMessage) -> ReceivedMessage:
        """The message as it is stored, whatever its reader made of it."""
        lying = self.queues[message.queue]
        return lying.messages[message.queue_offset - lying.first]

    def delayed(self, found: ReceivedMessage, level: int, most: int) -> None:
        """To the retry topic at its time, or to the dead letters."""
        if level < 0 or found.reconsume_times >= most:
            self.dead.append(found)
            return
        self.topics.setdefault(RETRY, qs("a:0", RETRY))
        wait_s = LEVELS_S[(level or 3 + found.reconsume_times) - 1]
        queue = self.topics[RETRY][0]
        self.timer.call_later(
            wait_s, lambda: self.send(queue, found.body, times=found.reconsume_times + 1, topic=found.topic)
        )

    def copied(self, found: ReceivedMessage, most: int) -> None:
        """Who sends a copy says how often it came; a group that has locked queues is an ordered one, whose copies are dead."""
        self.delayed(found, -1 if self.locks else 0, most)

    def answer(self, request: PullRequest) -> PullAnswer:
        lying = self.queues[request.queue]
        end = lying.first + len(lying.messages)
        if not lying.first <= request.offset <= end:
            right = lying.first if request.offset < lying.first else end
            return PullAnswer(PullStatus.OFFSET_ILLEGAL, right, lying.first, end)
        at = request.offset - lying.first
        looked_at = lying.messages[at : at + request.count]
        found = [replace(each) for each in looked_at] if request.filter.expression != RARE else []
        status = PullStatus.FOUND if found else PullStatus.NO_MATCHED_MSG if looked_at else PullStatus.NO_NEW_MSG
        answer = PullAnswer(status, request.offset + len(looked_at), lying.first, end, found)
        return answer if request.decoded else replace(answer, messages=(), read_messages=lambda: found)

    def hear(self, wants: Membership | None) -> None:
        """What a heartbeat says; of each topic the newest version counts."""
        self.heard = wants
        told = wants.versions_ms if wants else {}
        self.versions = {topic: max(at_ms, self.versions.get(topic, 0)) for topic, at_ms in told.items()}

    def refusal(self, request: PullRequest) -> RocketMQError | None:
        """Of a pull of a queue that is not there, or by a filter of which no heartbeat has told, unless it brings it along."""
        topic = request.queue.topic
        if request.queue not in self.topics.get(topic, ()):
            code = Response.INVALID_PARAMETER if topic in self.topics else Response.TOPIC_NOT_EXIST
            return error_for(code)("there is no such queue", "a:1", code, topic)
        known = self.versions.get(request.queue.topic)
        if request.post_filter or (known is not None and known >= request.version_ms):
            return None
        code = Response.SUBSCRIPTION_NOT_EXIST if known is None else Response.SUBSCRIPTION_NOT_LATEST
        return error_for(code)("the consumer's subscription is not here", "a:1", code, request.queue.topic)

    def told(self, gone: bool = False) -> None:
        """A member came or went: the others are told."""
        for member in list(self.members.values()):
            if member.asked is not None:
                member.asked("a:1", MembersChanged())


class FakeMember:
    """Implements ``ports.GroupMember`` for one client id."""

    receives_notices = True
    overlaps = False  # whether a queue may have several pulls under way

    def __init__(self, brokers: FakeBrokers, client_id: str) -> None:
        self.brokers = brokers
        self.client_id = client_id
        self.asked: RequestCallback | None = None
        self.group = ""
        self.membership: Callable[[], Membership] | None = None
        self.calls: list[tuple[str, Any]] = []
        self.begun: Counter[MessageQueue] = Counter()  # how often a queue became this member's
        self.under_way: Counter[tuple[MessageQueue, int]] = Counter()  # pulls
        self.parked: list[tuple[PullRequest, Done]] = []  # all that ever were

    def _call(self, verb: str, what: Any, broker: str = "") -> None:
        self.calls.append((verb, what))
        for key in (verb, f"{verb} {broker}"):
            if key in self.brokers.failing:
                raise self.brokers.failing[key]

    def seen(self, verb: str) -> list[Any]:
        return [what for name, what in self.calls if name == verb]

    def join(
        self, group: str, membership: Callable[[], Membership], on_request: RequestCallback, heartbeat_s: float
    ) -> Callable[[Deadline], None]:
        if self.asked is not None:
            raise LocalProtocolError(f"consumer group {group!r} has a member in this process already")
        self._call("join", group)
        self.asked, self.membership, self.group = on_request, membership, group

        def leave(deadline: Deadline) -> None:
            self._call("leave", group)
            self.brokers.members.pop(self.client_id, None)
            self.asked = None
            self.brokers.told()

        return leave

    def heartbeat(self, deadline: Deadline) -> None:
        self._call("heartbeat", self.membership and self.membership())
        if self.membership is not None:
            self.brokers.groups.add(self.group)
        self.brokers.hear(self.membership() if self.membership else None)
        if self.client_id not in self.brokers.members:
            self.brokers.members[self.client_id] = self
            self.brokers.told()

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        self._call("queues", topic)
        if topic not in self.brokers.topics:
            raise RouteNotFound("no such topic", topic=topic)
        return self.brokers.topics[topic]

    def members(self, group: str, topic: str, deadline: Deadline) -> list[str]:
        self._call("members", topic)
        if not self.brokers.members:
            raise ServerFault("no consumer for this group", "a:1", Response.SYSTEM_ERROR, topic)
        return self.brokers.random.sample(sorted(self.brokers.members), len(self.brokers.members))

    def consume_modes(self, group: str, topics: Iterable[str], deadline: Deadline) -> dict[tuple[str, str], str]:
        topics = list(topics)
        self._call("modes", topics)
        places = {(queue.topic, queue.broker_name) for topic in topics for queue in self.brokers.topics.get(topic, ())}
        return {place: self.brokers.modes.get(place, "PULL") for place in places}

    def filters(self, group: str, topic: str, deadline: Deadline, broker_name: str = "") -> dict[str, Filter]:
        self._call("filters", topic)
        if not self.brokers.members:
            raise BrokerError("the consumer group is not online", "a:1", Response.CONSUMER_NOT_ONLINE)
        return dict(self.brokers.heard.subscriptions) if self.brokers.heard else {}

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, zero_if_new: bool = True) -> int | None:
        self.begun[queue] += 1
        self._call("committed", queue, queue.broker_name)
        young = zero_if_new and not self.brokers.queues[queue].first
        return self.brokers.offsets.get(queue, 0 if young else None)

    def connection(self, broker_name: str) -> object:
        return self.brokers.connections.get(broker_name, 1)

    def bounds(self, queue: MessageQueue, deadline: Deadline, group: str | None = None) -> QueueBounds:
        self._call("bounds", queue, queue.broker_name)
        lying = self.brokers.queues[queue]
        return QueueBounds(lying.first, lying.first + len(lying.messages), 0)

    def search_offset(self, queue: MessageQueue, epoch_ms: int, deadline: Deadline, group: str | None = None) -> int:
        """Of an old broker who does not look at messages gets one that is near."""
        self._call("search", (queue, epoch_ms), queue.broker_name)
        return min(epoch_ms, self.bounds(queue, deadline).max_offset) + (self.brokers.old and not group)

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        self.calls.append(("commit", dict(offsets)))
        assert min(offsets.values(), default=0) >= 0
        self.brokers.groups.add(group)
        failing = self.brokers.failing
        errors = {q: failing[k] for q in offsets for k in ("commit", f"commit {q.broker_name}") if k in failing}
        self.brokers.offsets |= {queue: offset for queue, offset in offsets.items() if queue not in errors}
        return errors

    def pull(self, request: PullRequest, deadline: Deadline, done: Done) -> None:
        self.calls.append(("pull", request))
        self.brokers.groups.add(request.group)
        queue = request.queue
        one = queue, self.begun[queue]
        self.under_way[one] += 1
        assert self.under_way[one] == 1 or self.overlaps, "1-14: one pull of a queue at a time"
        assert request.offset >= (request.commit_offset or 0), "1-29"

        def once(answer: PullAnswer | RocketMQError) -> None:
            self.under_way[one] -= 1
            done(answer)

        failing = self.brokers.failing
        error = failing.get("pull") or failing.get(f"pull {queue.broker_name}") or self.brokers.refusal(request)
        if error is not None:
            once(error)
            return
        if request.commit_offset is not None:
            self.brokers.offsets[queue] = request.commit_offset
        answer = self.brokers.answer(request)
        if answer.status is not PullStatus.NO_NEW_MSG:
            once(answer)
            return
        entry = (request, once)
        self.parked.append(entry)
        self.brokers.parked.append(entry)
        self.brokers.timer.call_later(request.suspend_s, lambda: self._over(entry))

    def _over(self, entry: tuple[PullRequest, Done]) -> None:
        if entry in self.brokers.parked:
            self.brokers.parked.remove(entry)
            entry[1](self.brokers.answer(entry[0]))

    def send_back(
        self, group: str, message: ReceivedMessage, delay_level: int, max_reconsume_times: int, deadline: Deadline
    ) -> None:
        self._call("send_back", (message.body, delay_level, max_reconsume_times), message.broker_name)
        self.brokers.delayed(self.brokers.kept(message), delay_level, max_reconsume_times)

    def send_to_retry(self, group: str, message: ReceivedMessage, max_reconsume_times: int, deadline: Deadline) -> None:
        self._call("send_to_retry", message.body)
        self.brokers.copied(replace(message), max_reconsume_times)

    def lock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> set[MessageQueue]:
        self._call("lock", list(queues))
        return {queue for queue in queues if self.brokers.locks.setdefault(queue, self.client_id) == self.client_id}

    def unlock(self, group: str, queues: Iterable[MessageQueue], deadline: Deadline) -> None:
        self._call("unlock", list(queues))
        for queue in queues:
            if self.brokers.locks.get(queue) == self.client_id:
                del self.brokers.locks[queue]


def numbered(queue: MessageQueue, offset: int) -> ReceivedMessage:
    """A message whose body is its offset."""
    return message(offset, b"%d" % offset, queue)


class NumberedQueues(MutableMapping[MessageQueue, int]):
    """First or end offset of each queue; a queue whose offset is set gets or loses numbered messages."""

    def __init__(self, brokers: FakeBrokers, is_first: bool) -> None:
        self.brokers = brokers
        self.is_first = is_first

    def __getitem__(self, queue: MessageQueue) -> int:
        if queue not in self.brokers.topics.get(queue.topic, ()):
            raise KeyError(queue)
        lying = self.brokers.queues[queue]
        return lying.first if self.is_first else lying.first + len(lying.messages)

    def __setitem__(self, queue: MessageQueue, offset: int) -> None:
        queues = self.brokers.topics.get(queue.topic, [])
        if queue not in queues:
            self.brokers.topics[queue.topic] = sorted([*queues, queue])
        lying = self.brokers.queues[queue]
        first, end = lying.first, lying.first + len(lying.messages)
        first, end = (offset, max(offset, end)) if self.is_first else (first, offset)
        lying.first, lying.messages = first, [numbered(queue, at) for at in range(first, end)]

    def __delitem__(self, queue: MessageQueue) -> None:
        left = [other for other in self.brokers.topics[queue.topic] if other != queue]
        self.brokers.topics[queue.topic] = left

    def __iter__(self) -> Iterator[MessageQueue]:
        return (queue for queues in self.brokers.topics.values() for queue in queues)

    def __len__(self) -> int:
        return sum(map(len, self.brokers.topics.values()))


class QueueMember(FakeMember):
    """The ``FakeMember`` of brokers whose queues have numbered messages, for tests that look at one member only."""

    overlaps = True  # a pull consumer that seeks sends another pull, and drops the answer of the first

    def __init__(self, queues: Sequence[MessageQueue], high: int = 0) -> None:
        super().__init__(FakeBrokers(Time(), {}), "me")
        self.low, self.high = NumberedQueues(self.brokers, True), NumberedQueues(self.brokers, False)
        self.high.update(dict.fromkeys(queues, high))
        self.commits: list[dict[MessageQueue, int]] = []  # what was stored of each
        self.errors: list[RocketMQError] = []  # of the next pulls
        self.refused: dict[MessageQueue, RocketMQError] = {}  # when they are committed
        self.unknown: dict[MessageQueue, RocketMQError] = {}  # when their committed offsets are asked for

    def add(self, queue: MessageQueue, count: int = 1) -> None:
        """Messages come, and pulls that wait for them are answered."""
        end = self.high[queue]
        self.brokers.send(queue, *(b"%d" % at for at in range(end, end + count)))

    @property
    def stored(self) -> dict[MessageQueue, int]:
        return self.brokers.offsets

    @property
    def waiting(self) -> list[tuple[PullRequest, Done]]:
        return self.brokers.parked

    @property
    def pulls(self) -> list[PullRequest]:
        return self.seen("pull")

    @property
    def memberships(self) -> list[Membership]:
        return self.seen("heartbeat")

    @property
    def joined(self) -> bool:
        return self.asked is not None

    def has_members(self, *client_ids: str) -> None:
        """Brokers know these members of the group now."""
        others = {name: FakeMember(self.brokers, name) for name in client_ids}
        self.brokers.members = {name: self if name == self.client_id else other for name, other in others.items()}

    def committed(self, group: str, queue: MessageQueue, deadline: Deadline, zero_if_new: bool = True) -> int | None:
        if queue in self.unknown:
            raise self.unknown[queue]
        return super().committed(group, queue, deadline, zero_if_new)

    def commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        self.commits.append({queue: offset for queue, offset in offsets.items() if queue not in self.refused})
        super().commit(group, self.commits[-1], deadline)
        return {queue: error for queue, error in self.refused.items() if queue in offsets}

    def pull(self, request: PullRequest, deadline: Deadline, done: Done) -> None:
        if self.errors:
            self.calls.append(("pull", request))
            done(self.errors.pop(0))
        else:
            super().pull(request, deadline, done)
