"""Members of a group behind one face: the client's on a real broker, and those in memory that other tests use."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DLQ_PREFIX, RETRY_PREFIX
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import NO_FILTER, Message, MessageQueue, PullAnswer, PullRequest, ReceivedMessage
from rocketmq_spark.model.membership import Membership
from rocketmq_spark.ports import GroupMember
from tests.fakes.group_member import GROUP, FakeBrokers, FakeMember, QueueMember
from tests.fakes.timer import Time
from tests.mockbroker import eventually
from tests.queues import q

Outcome = PullAnswer | RocketMQError
_numbers = itertools.count()


def soon() -> Deadline:
    return Deadline.after(20)


class Case:
    """A member of ``group`` whose topic has two queues, ``queue`` and ``other``, without messages and members."""

    group: str
    queue: MessageQueue
    other: MessageQueue
    port: GroupMember

    def another(self) -> GroupMember:
        """One more of the group, as if in another process."""
        raise NotImplementedError

    def send(self, *bodies: bytes) -> None:
        """To ``queue``; returns when they can be read."""
        raise NotImplementedError

    def below(self) -> int:
        """An offset below the first one that is kept of ``queue``."""
        raise NotImplementedError

    def awaited(self, condition: Callable[[], object], seconds: float) -> None:
        """Lets so much time pass at most; fails when it does not happen."""
        raise NotImplementedError

    def dead(self) -> list[bytes]:
        """The group's dead letters."""
        raise NotImplementedError

    def join(self, port: GroupMember) -> Callable[[Deadline], None]:
        """Of this group, and told to brokers."""
        wants = Membership({self.queue.topic: NO_FILTER})
        leave = port.join(self.group, lambda: wants, lambda address, question: None, 30.0)
        port.heartbeat(soon())
        return leave

    def outcomes(
        self, offset: int, queue: MessageQueue | None = None, suspend_s: float = 0.0, **how: Any
    ) -> list[Outcome]:
        """Filled when a pull has its answer, which may be later."""
        found: list[Outcome] = []
        asked = PullRequest(self.group, queue or self.queue, offset, suspend_s=suspend_s, post_filter=True, **how)
        self.port.pull(asked, soon(), found.append)
        return found

    def pulled(self, offset: int, queue: MessageQueue | None = None, **how: Any) -> PullAnswer:
        found = self.outcomes(offset, queue, **how)
        self.awaited(lambda: found, 10)
        (answer,) = found
        assert isinstance(answer, PullAnswer)
        return answer

    def messages(self, offset: int = 0, queue: MessageQueue | None = None) -> list[ReceivedMessage]:
        return list(messages_of(self.pulled(offset, queue)))

    def come_again(self, count: int) -> list[ReceivedMessage]:
        """What the retry topic has, once there is so much."""
        found: list[ReceivedMessage] = []

        def there() -> bool:
            try:
                queues = self.port.queues(RETRY_PREFIX + self.group, soon(), refresh=True)
            except RocketMQError:
                return False
            found[:] = itertools.chain.from_iterable(self.messages(0, queue) for queue in queues)
            return len(found) >= count

        self.awaited(there, 60)
        return found


def messages_of(answer: PullAnswer) -> Iterable[ReceivedMessage]:
    return answer.messages or answer.read_messages()


class Real(Case):
    def __init__(self, mq: LocalBroker, topic: str) -> None:
        self.mq = mq
        self.group = f"g-{topic}"
        self.queue, self.other = (MessageQueue(topic, mq.brokers[0], i) for i in range(2))
        self.port = self.another()

    def another(self) -> GroupMember:
        own = options.parse({"nameServer": self.mq.name_server, "connectTimeout": 5000 + next(_numbers)})
        port = session.member(own.for_role("producer"))
        port.queues(self.queue.topic, soon())  # heartbeats and locks go to brokers of known routes
        return port

    def send(self, *bodies: bytes) -> None:
        end = self.port.bounds(self.queue, soon()).max_offset + len(bodies)
        with Producer(name_server=self.mq.name_server, group="contracts") as producer:
            for body in bodies:
                producer.send(Message(self.queue.topic, body), queue=self.queue)
        eventually(lambda: self.port.bounds(self.queue, soon()).max_offset == end)

    def below(self) -> int:
        return -1

    def awaited(self, condition: Callable[[], object], seconds: float) -> None:
        eventually(lambda: bool(condition()), seconds)

    def dead(self) -> list[bytes]:
        queue = MessageQueue(DLQ_PREFIX + self.group, self.mq.brokers[0], 0)
        eventually(lambda: queue.topic in self.mq.admin.topics(), 30)
        eventually(lambda: self.port.bounds(queue, soon()).max_offset > 0, 30)
        return [message.body for message in self.messages(0, queue)]


class OfGroup(Case):
    """``tests.fakes.group_member.FakeMember``."""

    def __init__(self) -> None:
        self.time = Time()
        self.brokers = FakeBrokers(self.time, {"T": "a:0-1"})
        self.group = GROUP
        self.queue, self.other = q("a:0"), q("a:1")
        self.port = self.another()

    def another(self) -> GroupMember:
        return FakeMember(self.brokers, f"m{next(_numbers)}")  # type: ignore[return-value]

    def send(self, *bodies: bytes) -> None:
        self.brokers.send(self.queue, *bodies)

    def below(self) -> int:
        self.brokers.queues[self.queue].first += 2
        return 1

    def awaited(self, condition: Callable[[], object], seconds: float) -> None:
        for _ in range(int(10 * seconds)):
            if condition():
                return
            self.time.advance(0.1)
        assert condition()

    def dead(self) -> list[bytes]:
        return [message.body for message in self.brokers.dead]


class OfQueues(OfGroup):
    """``tests.fakes.group_member.QueueMember``, whose bodies are offsets."""

    def __init__(self) -> None:
        self.group = GROUP
        self.queue, self.other = q("a:0"), q("a:1")
        self.fake = QueueMember([self.queue, self.other])
        self.brokers, self.time = self.fake.brokers, self.fake.brokers.time
        self.port = self.fake  # type: ignore[assignment]

    def send(self, *bodies: bytes) -> None:
        assert list(bodies) == [b"%d" % (self.fake.high[self.queue] + i) for i in range(len(bodies))]
        self.fake.add(self.queue, len(bodies))


def times(messages: Iterable[ReceivedMessage]) -> Counter[tuple[bytes, int]]:
    """How often each came before."""
    return Counter((message.body, message.reconsume_times) for message in messages)
