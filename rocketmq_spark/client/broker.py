"""Typed verbs on brokers: offsets and statistics of queues, many at a time.

Every request names the broker (``bname``): brokers ignore it for ordinary topics, a Proxy needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.client.route import Routes
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import NotSupported, RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one broker and what to make of the answer."""

    broker_name: str
    command: Command
    topic: str
    queue: MessageQueue | None = None


class Brokers:
    """Questions about queues, asked of the masters."""

    def __init__(self, calls: Calls, routes: Routes) -> None:
        self.calls = calls
        self.routes = routes

    def bounds(self, queues: Iterable[MessageQueue], deadline: Deadline) -> dict[MessageQueue, QueueBounds]:
        """Minimum and maximum offset of each queue: one question per topic and broker, all at once.

        A queue that its broker does not report (read queues were reduced) is missing from the result.
        Through a Proxy, which does not know that question, the offsets are asked queue by queue.
        """
        wanted = sorted(set(queues))
        pairs = sorted({(queue.broker_name, queue.topic) for queue in wanted})
        questions = [
            Question(broker, rpc.GET_TOPIC_STATS_INFO.request(topic=topic, bname=broker), topic)
            for broker, topic in pairs
        ]
        found: dict[MessageQueue, QueueBounds] = {}
        try:
            for question, answer in zip(questions, self.ask_all(questions, deadline), strict=True):
                found.update(bodies.topic_stats(question.topic, answer.body))
        except NotSupported:
            return self._bounds_by_queue(wanted, deadline)
        return {queue: found[queue] for queue in wanted if queue in found}

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
            self._question(rpc.QUERY_CONSUMER_OFFSET, queue, consumerGroup=group, setZeroIfNotFound=False)
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
        questions = [
            self._question(rpc.UPDATE_CONSUMER_OFFSET, queue, consumerGroup=group, commitOffset=offset)
            for queue, offset in offsets.items()
        ]
        self.ask_all(questions, deadline)

    def _numbers(self, row: rpc.Row, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        answers = self.ask_all([self._question(row, queue) for queue in queues], deadline)
        return {queue: row.answer(answer)["offset"] for queue, answer in zip(queues, answers, strict=True)}

    def _question(self, row: rpc.Row, queue: MessageQueue, **fields: Any) -> Question:
        command = row.request(topic=queue.topic, queueId=queue.queue_id, bname=queue.broker_name, **fields)
        return Question(queue.broker_name, command, queue.topic, queue)

    def ask_all(
        self, questions: Sequence[Question], deadline: Deadline, accept: Container[int] = (Response.SUCCESS,)
    ) -> list[Command]:
        """All answers in order, asked at once; raises the first question's error, after all have ended."""
        addresses = [self.routes.address(question.broker_name) for question in questions]
        results: list[Command | RocketMQError | None] = [None] * len(questions)
        left = threading.Semaphore(0)
        for i, (question, address) in enumerate(zip(questions, addresses, strict=True)):
            self.calls.ask_async(address, question.command, deadline, _keep(results, i, left))
        for _ in questions:
            left.acquire()
        return [
            _accepted(result, question, address, accept)
            for result, question, address in zip(results, questions, addresses, strict=True)
        ]


def _accepted(
    result: Command | RocketMQError | None, question: Question, address: str, accept: Container[int]
) -> Command:
    assert result is not None
    if isinstance(result, RocketMQError):
        raise result
    if result.code not in accept:
        raise refused(result, address, question.topic, str(question.queue) if question.queue else None)
    return result


def _keep(
    results: list[Command | RocketMQError | None], i: int, left: threading.Semaphore
) -> Callable[[Command | RocketMQError], None]:
    def done(result: Command | RocketMQError) -> None:
        results[i] = result
        left.release()

    return done
