"""Typed verbs on brokers: offsets and statistics of queues, many at a time.

Every request names the broker (``bname``): brokers ignore it for ordinary topics, a Proxy needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocketmq_spark import codes
from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.client.route import Routes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import CallTimeout, NotSupported, RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Bytes, Command
from rocketmq_spark.wire.messages import boundaries, decode_messages


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one broker and what to make of the answer."""

    broker_name: str
    command: Command
    topic: str
    queue: MessageQueue | None = None


class Brokers:
    """Questions about queues, asked of the masters. Implements ``ports.OffsetReader``."""

    def __init__(self, calls: Calls, routes: Routes) -> None:
        self.calls = calls
        self.routes = routes
        self._stats: dict[tuple[str, str], tuple[bytes, dict[MessageQueue, QueueBounds]]] = {}

    @property
    def late(self) -> bool:
        return bool(self.calls.late)

    def bounds(
        self,
        queues: Iterable[MessageQueue],
        deadline: Deadline,
        on_error: Callable[[RocketMQError, MessageQueue], None] | None = None,
        read_from: str = "master",
        grace_s: float | None = None,
    ) -> dict[MessageQueue, QueueBounds]:
        """Minimum and maximum offset of each queue: one question per topic and broker, all at once.

        A queue that its broker does not report (read queues were reduced) is missing from the result; with ``on_error``
        so are those whose question failed, and the error is told with one of them.
        With ``grace_s`` a broker that keeps the others waiting is not waited for: what it said before holds until it
        has answered, or failed. Through a Proxy, which does not know that question, the offsets are asked queue by queue.
        """
        wanted = sorted(set(queues))
        firsts = _first_of_each(wanted)
        questions = [
            Question(broker, rpc.GET_TOPIC_STATS_INFO.request(topic=self.calls.on_wire(topic), bname=broker), topic)
            for broker, topic in sorted(firsts)
        ]
        found: dict[MessageQueue, QueueBounds] = {}
        for question, answer in zip(questions, self._asked(questions, deadline, read_from, grace_s), strict=True):
            key = question.broker_name, question.topic
            if answer is None:
                found.update(self._stats[key][1] if key in self._stats else {})
                continue
            if isinstance(answer, NotSupported):
                return self._bounds_by_queue(wanted, deadline)
            if isinstance(answer, RocketMQError):
                self._stats.pop(key, None)
            if not isinstance(answer, RocketMQError):
                found.update(self._parsed(question, answer.body))
            elif on_error is None:
                raise answer
            else:
                on_error(answer, firsts[key])
        return {queue: found[queue] for queue in wanted if queue in found}

    def _parsed(self, question: Question, body: Bytes) -> dict[MessageQueue, QueueBounds]:
        """Most topics of many have nothing new since they were asked last."""
        key = question.broker_name, question.topic
        known = self._stats.get(key)
        if known is None or known[0] != body:
            known = self._stats[key] = bytes(body), bodies.topic_stats(question.topic, body)
        return known[1]

    def _bounds_by_queue(self, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, QueueBounds]:
        lows = self._numbers(rpc.GET_MIN_OFFSET, queues, deadline)
        highs = self._numbers(rpc.GET_MAX_OFFSET, queues, deadline)
        return {queue: QueueBounds(lows[queue], highs[queue], 0) for queue in queues}

    def max_offsets(self, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        return self._numbers(rpc.GET_MAX_OFFSET, queues, deadline)

    def search_offsets(self, times_ms: Mapping[MessageQueue, int], deadline: Deadline) -> dict[MessageQueue, int]:
        """First offset stored at or after each queue's time; the maximum when all messages are older.

        The broker's answer may lie below the minimum after old files were deleted: callers clamp it.
        """
        questions = [
            self._question(rpc.SEARCH_OFFSET_BY_TIMESTAMP, queue, timestamp=time_ms, boundaryType="LOWER")
            for queue, time_ms in times_ms.items()
        ]
        answers = self.ask_all(questions, deadline)
        return {q: rpc.SEARCH_OFFSET_BY_TIMESTAMP.answer(a)["offset"] for q, a in zip(times_ms, answers, strict=True)}

    def committed(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> dict[MessageQueue, int | None]:
        """The group's offset of each queue, None where there is none."""
        questions = [
            self._question(
                rpc.QUERY_CONSUMER_OFFSET, queue, consumerGroup=self.calls.on_wire(group), setZeroIfNotFound=False
            )
            for queue in queues
        ]
        accept = (Response.SUCCESS, Response.QUERY_NOT_FOUND)
        answers = self.ask_all(questions, deadline, accept)
        return {
            queue: None if a.code == Response.QUERY_NOT_FOUND else rpc.QUERY_CONSUMER_OFFSET.answer(a)["offset"]
            for queue, a in zip(queues, answers, strict=True)
        }

    def commit(self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline) -> None:
        """Store the group's offsets, the next ones to read. Raises ``GroupNotFound`` for a group the broker lacks."""
        failed = self.commit_each(group, offsets, deadline)
        if failed:
            raise next(iter(failed.values()))

    def commit_each(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None = None
    ) -> dict[MessageQueue, RocketMQError]:
        """Store the group's offsets where they can be; the errors of the others. ``grace_s`` as in ``bounds``.

        One queue of each topic goes before the others: brokers make the group's table of a topic at its first offset,
        and of two that make it at the same time one is lost (ConsumerOffsetManager.commitOffset in 5.5.0). What it meets
        is met by the others.
        """
        firsts = _first_of_each(offsets)
        failed = self._commit(group, {queue: offsets[queue] for queue in firsts.values()}, deadline, grace_s)
        rest = {}
        for queue in sorted(offsets.keys() - firsts.values()):
            first = firsts[queue.broker_name, queue.topic]
            if first in failed:
                failed[queue] = failed[first]
            else:
                rest[queue] = offsets[queue]
        return {**failed, **self._commit(group, rest, deadline, grace_s)}

    def _commit(
        self, group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline, grace_s: float | None
    ) -> dict[MessageQueue, RocketMQError]:
        group = self.calls.on_wire(group)
        questions = [
            self._question(rpc.UPDATE_CONSUMER_OFFSET, queue, consumerGroup=group, commitOffset=offset)
            for queue, offset in offsets.items()
        ]
        failed: dict[MessageQueue, RocketMQError] = {}
        for queue, answer in zip(offsets, self._asked(questions, deadline, "master", grace_s), strict=True):
            if answer is None:
                failed[queue] = CallTimeout("the broker has not answered yet", queue=str(queue))
            elif isinstance(answer, RocketMQError):
                failed[queue] = answer
        return failed

    def _numbers(self, row: rpc.Row, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        answers = self.ask_all([self._question(row, queue) for queue in queues], deadline)
        return {queue: row.answer(answer)["offset"] for queue, answer in zip(queues, answers, strict=True)}

    def _question(self, row: rpc.Row, queue: MessageQueue, **fields: Any) -> Question:
        command = row.request(
            topic=self.calls.on_wire(queue.topic), queueId=queue.queue_id, bname=queue.broker_name, **fields
        )
        return Question(queue.broker_name, command, queue.topic, queue)

    def store_time_ms(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> int | None:
        """When the message at ``offset`` was stored; None when there is none at exactly that offset."""
        found = decode_messages(self._pulled(group, queue, offset, 1, deadline), queue.broker_name)
        return found[0].store_timestamp_ms if found and found[0].queue_offset <= offset else None

    def sample(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> tuple[int, int]:
        """Bytes and number of the messages that one pull at ``offset`` gives."""
        body = self._pulled(group, queue, offset, 32, deadline)
        return len(body), sum(1 for _ in boundaries(body))

    def _pulled(self, group: str, queue: MessageQueue, offset: int, count: int, deadline: Deadline) -> Bytes:
        """The body of one pull, empty when the broker has nothing there."""
        pull = self._question(
            rpc.PULL_MESSAGE,
            queue,
            consumerGroup=self.calls.on_wire(group),
            queueOffset=offset,
            maxMsgNums=count,
            sysFlag=codes.PullSysFlag.SUBSCRIPTION,
            commitOffset=0,
            suspendTimeoutMillis=0,
            subscription="*",
            subVersion=0,
            expressionType="TAG",
        )
        nothing = (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED)
        (answer,) = self.ask_all([pull], deadline, (Response.SUCCESS, *nothing))
        return answer.body if answer.code == Response.SUCCESS else b""

    def is_proxy(self, topic: str, broker_name: str, deadline: Deadline) -> bool:
        """Whether a Proxy answers for a broker: it does not know statistics."""
        command = rpc.GET_TOPIC_STATS_INFO.request(topic=self.calls.on_wire(topic), bname=broker_name)
        (answer,) = self.ask_each([Question(broker_name, command, topic)], deadline)
        return isinstance(answer, NotSupported)

    def check_filter(self, broker_name: str, group: str, topic: str, sql: str, deadline: Deadline) -> None:
        """Let a broker compile an SQL expression: sent with a pull, an invalid one is answered with every message."""
        body = bodies.client_config(self.calls.on_wire(group), self.calls.on_wire(topic), sql)
        command = rpc.CHECK_CLIENT_CONFIG.request(body, bname=broker_name)
        self.ask_all([Question(broker_name, command, topic)], deadline)

    def members(self, group: str, broker_name: str, deadline: Deadline) -> list[str]:
        """Ids of clients that consume as ``group`` now, as one broker knows them."""
        command = rpc.GET_CONSUMER_LIST_BY_GROUP.request(consumerGroup=self.calls.on_wire(group), bname=broker_name)
        accept = (Response.SUCCESS, Response.SYSTEM_ERROR)  # nobody there is answered as an error
        (answer,) = self.ask_all([Question(broker_name, command, "")], deadline, accept)
        return bodies.consumer_ids(answer.body) if answer.code == Response.SUCCESS else []

    def ask_all(
        self, questions: Sequence[Question], deadline: Deadline, accept: Container[int] = (Response.SUCCESS,)
    ) -> list[Command]:
        """All answers in order, asked at once; raises the first question's error, after all have ended."""
        answers = []
        for answer in self.ask_each(questions, deadline, accept):
            if isinstance(answer, RocketMQError):
                raise answer
            answers.append(answer)
        return answers

    def ask_each(
        self,
        questions: Sequence[Question],
        deadline: Deadline,
        accept: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command | RocketMQError]:
        """Answers and errors in order, asked at once."""
        answers = self._asked(questions, deadline, read_from, None, accept)
        return [answer for answer in answers if answer is not None]

    def _asked(
        self,
        questions: Sequence[Question],
        deadline: Deadline,
        read_from: str,
        grace_s: float | None,
        accept: Container[int] = (Response.SUCCESS,),
    ) -> list[Command | RocketMQError | None]:
        """None for what is still to be answered; only with ``grace_s``."""
        found: dict[str, str | RocketMQError] = {}
        for name in {question.broker_name for question in questions}:
            try:
                found[name] = self.routes.address(name, read_from)
            except RocketMQError as e:
                found[name] = e
        addresses = [found[question.broker_name] for question in questions]
        asked = [(a, q.command) for a, q in zip(addresses, questions, strict=True) if isinstance(a, str)]
        told: Sequence[Command | RocketMQError | None]
        told = (
            self.calls.exchange_each(asked, deadline)
            if grace_s is None
            else self.calls.exchange_soon(asked, deadline, grace_s)
        )
        answers = iter(told)
        return [
            _accepted(next(answers), question, address, accept) if isinstance(address, str) else address
            for question, address in zip(questions, addresses, strict=True)
        ]


def _first_of_each(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], MessageQueue]:
    """The lowest queue of every broker and topic."""
    return {(queue.broker_name, queue.topic): queue for queue in sorted(queues, reverse=True)}


def _accepted(
    result: Command | RocketMQError | None, question: Question, address: str, accept: Container[int]
) -> Command | RocketMQError | None:
    if result is None or isinstance(result, RocketMQError) or result.code in accept:
        return result
    queue = str(question.queue) if question.queue else None
    return refused(result, address, question.topic or None, queue)
