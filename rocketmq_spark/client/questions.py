"""Questions about queues, many at a time: each goes to the broker of its queue, and what fails fails alone.

Every request names the broker (``bname``): brokers ignore it for ordinary topics, a Proxy needs it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.client.route import Routes
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command


@dataclass(frozen=True, slots=True)
class Question:
    """A request for one broker and what to make of the answer."""

    broker_name: str
    command: Command
    topic: str
    queue: MessageQueue | None = None


class BrokerQuestions:
    """Asks brokers by name, over the connections and with the routes of a client."""

    def __init__(self, calls: Calls, routes: Routes) -> None:
        self.calls = calls
        self._routes = routes

    def about(self, row: rpc.Row, queue: MessageQueue, **fields: Any) -> Question:
        """The question that a row of the table asks about a queue."""
        command = row.request(
            topic=self.calls.on_wire(queue.topic), queueId=queue.queue_id, bname=queue.broker_name, **fields
        )
        return Question(queue.broker_name, command, queue.topic, queue)

    def owing(self) -> frozenset[str]:
        """Brokers that were not waited for any longer, and have not answered yet."""
        late = self.calls.late
        if not late:
            return frozenset()
        return frozenset(b.broker_name for b in self._routes.brokers() if late.keys() & set(b.addresses.values()))

    def connection(self, broker_name: str) -> tuple[str, int] | None:
        """Where the broker's master is, and how many connections there were; None while no route says where."""
        try:
            address = self._routes.address(broker_name, "master")
        except RocketMQError:
            return None
        return address, self.calls.pool.attempts(address)

    def ask_all(
        self,
        questions: Sequence[Question],
        deadline: Deadline,
        accept: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command]:
        """All answers in order, asked at once; raises the first question's error, after all have ended."""
        answers = []
        for answer in self.ask_each(questions, deadline, accept, read_from):
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
        answers = self.ask_soon(questions, deadline, read_from, accept=accept)
        return [answer for answer in answers if answer is not None]

    def ask_soon(
        self,
        questions: Sequence[Question],
        deadline: Deadline,
        read_from: str = "master",
        grace_s: float | None = None,
        accept: Container[int] = (Response.SUCCESS,),
    ) -> list[Command | RocketMQError | None]:
        """Answers and errors in order; with ``grace_s`` None for what is still to be answered after that time."""
        by_name: dict[str, str | RocketMQError] = {}
        for name in {question.broker_name for question in questions}:
            try:
                by_name[name] = self._routes.address(name, read_from)
            except RocketMQError as e:
                by_name[name] = e
        addresses = [by_name[question.broker_name] for question in questions]
        asked = [(a, q.command) for a, q in zip(addresses, questions, strict=True) if isinstance(a, str)]
        outcomes: Sequence[Command | RocketMQError | None]
        outcomes = (
            self.calls.exchange_each(asked, deadline)
            if grace_s is None
            else self.calls.exchange_soon(asked, deadline, grace_s)
        )
        answers = iter(outcomes)
        return [
            _accepted(next(answers), question, address, accept) if isinstance(address, str) else address
            for question, address in zip(questions, addresses, strict=True)
        ]


def first_of_each(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], MessageQueue]:
    """The lowest queue of every broker and topic."""
    return {(queue.broker_name, queue.topic): queue for queue in sorted(queues, reverse=True)}


def _accepted(
    result: Command | RocketMQError | None, question: Question, address: str, accept: Container[int]
) -> Command | RocketMQError | None:
    if result is None or isinstance(result, RocketMQError) or result.code in accept:
        return result
    queue = str(question.queue) if question.queue else None
    return refused(result, address, question.topic or None, queue)
