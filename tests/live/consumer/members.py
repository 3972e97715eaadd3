"""Members of one group on a real broker, each with a client of its own, as processes have."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.consumer import push
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from tests.mockbroker import eventually
from tests.witness import java_command

_numbers = itertools.count()
EARLIEST = ConsumeFrom(ConsumeFromWhere.EARLIEST)


class JavaMember:
    """``tests/witness/Consume.java`` in a process; what it was handed, as it says."""

    def __init__(self, members: Members, **options: object) -> None:
        given = {"nameServer": members.mq.name_server, "topic": members.topic, "group": members.group, **options}
        command = [*java_command("Consume"), *(f"{name}={value}" for name, value in given.items())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._lock = threading.Lock()
        self._got: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{") and "body" in (said := json.loads(line)):
                with self._lock:
                    self._got.append(said)

    def got(self) -> list[dict[str, Any]]:
        """A line for each message: ``at`` in ms since 1970, ``id``, ``broker``, ``queue``, ``offset``, ``times`` and ``body``."""
        with self._lock:
            return list(self._got)

    def bodies(self) -> list[str]:
        return [each["body"] for each in self.got()]

    def queues(self) -> set[int]:
        return {each["queue"] for each in self.got()}

    def stop(self) -> None:
        """It leaves the group when its standard input ends."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(60)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Members:
    """Of the group ``group``; ``got`` is what they were handed, in turn: who, and what."""

    def __init__(self, mq: LocalBroker, topic: str) -> None:
        self.mq = mq
        self.topic = topic
        self.group = f"g-{topic}"
        self.lock = threading.Lock()
        self.got: list[tuple[str, ReceivedMessage]] = []
        self.all: list[BaseConsumer] = []

    def make(self, **settings: Any) -> BaseConsumer:
        """A member that does not run yet; its connections are its own, so that it has a client id."""
        own = options.parse({"nameServer": self.mq.name_server, "connectTimeout": 3000 + next(_numbers)})
        chosen = {"group": self.group, "consume_from": EARLIEST, **settings}
        self.all.append(BaseConsumer(session.member(own.for_role("producer")), ConsumerSettings(**chosen)))
        return self.all[-1]

    def start(self, listener: Callable[..., Any] = lambda messages, context: None, **settings: Any) -> BaseConsumer:
        consumer = self.make(**settings)
        consumer.subscribe(self.topic)

        def noting(messages: list[ReceivedMessage], context: Any) -> Any:
            with self.lock:
                self.got += [(consumer.client_id, message) for message in messages]
            return listener(messages, context)

        consumer.start(noting)
        return consumer

    @contextmanager
    def java(self, fail: bool = False, **options: object) -> Iterator[JavaMember]:
        """A member of RocketMQ's own client in this group, which succeeds with everything or with nothing."""
        made = JavaMember(self, fail=str(fail).lower(), **options)
        try:
            yield made
        finally:
            made.stop()

    def bodies(self) -> list[str]:
        with self.lock:
            return [message.body.decode() for _, message in self.got]

    def owned(self, consumer: BaseConsumer) -> int:
        """How many queues of the topic it has."""
        assert consumer._running is not None
        return sum(held.queue.topic == self.topic for held in consumer._running.state.owned_queues())

    def stored(self) -> dict[MessageQueue, int | None]:
        queues = self.mq.admin.route(self.topic).readable_queues()
        try:
            return self.mq.admin.offset_reader.committed(self.group, queues, Deadline.after(10))
        except ConnectionLost:
            # A broker closes a connection two minutes after the last word of a member that was there and said no goodbye
            # that it heard; the connection is that of all tests of this process.
            return self.mq.admin.offset_reader.committed(self.group, queues, Deadline.after(10))

    def all_stored(self, count: int) -> None:
        """Until the offsets of so many messages are stored, before who consumed them leaves: of what a member stores as it
        leaves, a broker may go back to the older offset of a pull that was under way (as with Java's members).
        """
        eventually(lambda: sum(offset or 0 for offset in self.stored().values()) == count, 60)


@pytest.fixture
def members(rocketmq: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    monkeypatch.setattr(push, "FIRST_COMMIT_DELAY_S", 1.0)  # ten, as in Java, are long to wait
    made = Members(rocketmq, topic)
    yield made
    for consumer in made.all:
        consumer.stop(5)
