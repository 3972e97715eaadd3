"""Typed verbs on brokers: offsets and statistics of queues, many at a time.

Every request names the broker (``bname``): brokers ignore it for ordinary topics, a Proxy needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rocketmq_spark.client.questions import Question, Questions, first_of_each
from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import NotSupported, RocketMQError
from rocketmq_spark.model import NO_FILTER, MessageQueue, QueueBounds
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Bytes
from rocketmq_spark.wire.messages import boundaries, decode_messages


class Brokers:
    """Questions about queues, asked of the masters. Implements ``ports.OffsetReader``."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self.calls = questions.calls
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
        firsts = first_of_each(wanted)
        questions = [
            Question(broker, rpc.GET_TOPIC_STATS_INFO.request(topic=self.calls.on_wire(topic), bname=broker), topic)
            for broker, topic in sorted(firsts)
        ]
        bounds: dict[MessageQueue, QueueBounds] = {}
        for question, answer in zip(
            questions, self._questions.ask_soon(questions, deadline, read_from, grace_s), strict=True
        ):
            key = question.broker_name, question.topic
            if answer is None:
                bounds.update(self._stats[key][1] if key in self._stats else {})
                continue
            if isinstance(answer, NotSupported):
                return self._bounds_by_queue(wanted, deadline)
            if isinstance(answer, RocketMQError):
                self._stats.pop(key, None)
            if not isinstance(answer, RocketMQError):
                bounds.update(self._parsed(question, answer.body))
            elif on_error is None:
                raise answer
            else:
                on_error(answer, firsts[key])
        return {queue: bounds[queue] for queue in wanted if queue in bounds}

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
            self._questions.about(rpc.SEARCH_OFFSET_BY_TIMESTAMP, queue, timestamp=time_ms, boundaryType="LOWER")
            for queue, time_ms in times_ms.items()
        ]
        answers = self._questions.ask_all(questions, deadline)
        return {q: rpc.SEARCH_OFFSET_BY_TIMESTAMP.answer(a)["offset"] for q, a in zip(times_ms, answers, strict=True)}

    def committed(
        self, group: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> dict[MessageQueue, int | None]:
        """The group's offset of each queue, None where there is none."""
        questions = [
            self._questions.about(
                rpc.QUERY_CONSUMER_OFFSET, queue, consumerGroup=self.calls.on_wire(group), setZeroIfNotFound=False
            )
            for queue in queues
        ]
        accept = (Response.SUCCESS, Response.QUERY_NOT_FOUND)
        answers = self._questions.ask_all(questions, deadline, accept)
        return {
            queue: None if a.code == Response.QUERY_NOT_FOUND else rpc.QUERY_CONSUMER_OFFSET.answer(a)["offset"]
            for queue, a in zip(queues, answers, strict=True)
        }

    def _numbers(self, row: rpc.Row, queues: Sequence[MessageQueue], deadline: Deadline) -> dict[MessageQueue, int]:
        answers = self._questions.ask_all([self._questions.about(row, queue) for queue in queues], deadline)
        return {queue: row.answer(answer)["offset"] for queue, answer in zip(queues, answers, strict=True)}

    def store_time_ms(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> int | None:
        """When the message at ``offset`` was stored; None when there is none at exactly that offset."""
        messages = decode_messages(self._pulled(group, queue, offset, 1, deadline), queue.broker_name)
        return messages[0].store_timestamp if messages and messages[0].queue_offset <= offset else None

    def sample(self, group: str, queue: MessageQueue, offset: int, deadline: Deadline) -> tuple[int, int]:
        """Bytes and number of the messages that one pull at ``offset`` gives."""
        body = self._pulled(group, queue, offset, 32, deadline)
        return len(body), sum(1 for _ in boundaries(body))

    def _pulled(self, group: str, queue: MessageQueue, offset: int, count: int, deadline: Deadline) -> Bytes:
        """The body of one pull, empty when the broker has nothing there."""
        pull = self._questions.about(
            rpc.PULL_MESSAGE,
            queue,
            consumerGroup=self.calls.on_wire(group),
            queueOffset=offset,
            maxMsgNums=count,
            subscription=NO_FILTER.expression,
            expressionType=NO_FILTER.kind,
            **rpc.FLEETING,
        )
        nothing = (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED)
        (answer,) = self._questions.ask_all([pull], deadline, (Response.SUCCESS, *nothing))
        return answer.body if answer.code == Response.SUCCESS else b""

    def is_proxy(self, topic: str, broker_name: str, deadline: Deadline) -> bool:
        """Whether a Proxy answers for a broker: it does not know statistics."""
        command = rpc.GET_TOPIC_STATS_INFO.request(topic=self.calls.on_wire(topic), bname=broker_name)
        (answer,) = self._questions.ask_each([Question(broker_name, command, topic)], deadline)
        return isinstance(answer, NotSupported)

    def check_filter(self, broker_name: str, group: str, topic: str, sql: str, deadline: Deadline) -> None:
        """Let a broker compile an SQL expression: sent with a pull, an invalid one is answered with every message."""
        body = bodies.client_config(self.calls.on_wire(group), self.calls.on_wire(topic), sql)
        command = rpc.CHECK_CLIENT_CONFIG.request(body, bname=broker_name)
        self._questions.ask_all([Question(broker_name, command, topic)], deadline)
