"""Which sends of a producer are stored: looks for one that does not repeat what may be stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import ClosedError, RocketMQError, RouteNotFound, UnprovedError
from rocketmq_spark.model import MessageQueue, QueueEnd
from rocketmq_spark.stored.ends import QueueEnds, last_times
from rocketmq_spark.stored.look import Look, LookTools

# What looks, with so many seconds and this clock.
MakeTools = Callable[[float, Clock], LookTools]
# After this a noted end is asked for again: retention must not delete what a look would read, and the look must be short.
NOTED_S = 60.0
# A broker that did not say where a queue ends is not asked again before.
_AWAY_S = 5.0


class NotedStoredIds:
    """Implements ``producer.confirming.StoredIds`` for queues whose ends were noted before anything was sent."""

    def __init__(self, make_tools: MakeTools, ends: QueueEnds) -> None:
        self._make_tools = make_tools
        self._ends = ends
        self._stopped = threading.Event()

    def end(self, queue: MessageQueue) -> QueueEnd:
        return QueueEnd(self._ends.queues.get(queue, 0), self._ends.masters.get(queue.broker_name, ""))

    def among(
        self, since: Mapping[MessageQueue, int], master: str, ids: Collection[str], deadline: Deadline
    ) -> set[str]:
        (name,) = {queue.broker_name for queue in since}
        wanted, found = pa.array(sorted(ids), pa.string()), set[str]()

        def take(stored: pa.Array) -> None:
            found.update(stored.filter(pc.is_in(stored, wanted)).to_pylist())

        tools = self._make_tools(max(1.0, deadline.remaining()), Clock(sleep=self._sleep))
        Look(tools, QueueEnds(since, {name: master}), self._noted_of(since, master)).run(take)
        return found

    def _noted_of(self, queues: Collection[MessageQueue], master: str) -> list[QueueEnds]:
        """What is known of queues from before their sends were begun, by which one sees that their topic was made again."""
        return [self._ends.of_queues(queues)]

    def stop(self) -> None:
        self._stopped.set()

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(seconds):
            raise ClosedError("the producer was closed")


class _Noted(NamedTuple):
    """Where queues of a topic on one broker ended, and which master said so; or why that is not known. ``before`` is what was
    known before that: a send may have begun then.
    """

    at: float
    master: str
    ends: QueueEnds
    error: RocketMQError | None = None
    before: _Noted | None = None


class AskedStoredIds(NotedStoredIds):
    """The same for a producer that sends wherever it likes: it asks where queues end before it sends to them.

    One question for each topic and broker: at the first send, after a minute, and when there is another master.
    """

    def __init__(self, make_tools: MakeTools, clock: Clock | None = None) -> None:
        super().__init__(make_tools, QueueEnds({}, {}))
        self._clock = clock or Clock()
        self._tools = make_tools(0.0, self._clock)
        self._noted: dict[tuple[str, str], _Noted] = {}
        self._lock = threading.Lock()

    def end(self, queue: MessageQueue) -> QueueEnd:
        master = self._tools.routes.address(queue.broker_name)
        noted = self._fresh(queue, master)
        if noted is None:
            with self._lock:
                noted = self._fresh(queue, master)
                if noted is None:
                    noted = self._noted[queue.topic, queue.broker_name] = self._ask(queue, master)
        if noted.error is not None:
            raise noted.error.with_traceback(None)
        return QueueEnd(noted.ends.queues[queue], master)

    def _fresh(self, queue: MessageQueue, master: str) -> _Noted | None:
        noted = self._noted.get((queue.topic, queue.broker_name))
        if noted is None or noted.master != master or not (noted.error or queue in noted.ends.queues):
            return None
        return noted if self._clock.now() - noted.at < (NOTED_S if noted.error is None else _AWAY_S) else None

    def _ask(self, queue: MessageQueue, master: str) -> _Noted:
        try:
            ends, error = self._ends_of(queue), None
        except RocketMQError as e:
            ends, error = QueueEnds({}, {}), e
        before = self._noted.get((queue.topic, queue.broker_name))
        if before is not None:
            before = before.before if before.error is not None else before._replace(before=None)
        return _Noted(self._clock.now(), master, ends, error, before)

    def _noted_of(self, queues: Collection[MessageQueue], master: str) -> list[QueueEnds]:
        known = [self._noted.get(key) for key in {(queue.topic, queue.broker_name) for queue in queues}]
        both = [noted for each in known if each is not None for noted in (each, each.before) if noted is not None]
        return [noted.ends.of_queues(queues) for noted in both if noted.master == master]

    def _ends_of(self, queue: MessageQueue) -> QueueEnds:
        deadline = Deadline.after(self._tools.question_s)
        try:
            route = self._tools.routes.get(queue.topic, NOTED_S, deadline)
            queues = {queue, *(each for each in route.readable() if each.broker_name == queue.broker_name)}
            bounds = self._tools.offsets.bounds(queues, deadline)
        except RocketMQError as e:
            if not isinstance(e, RouteNotFound) and e.broker_code != Response.TOPIC_NOT_EXIST:
                raise
            return QueueEnds({queue: 0}, {})  # the send makes the topic
        if queue not in bounds:
            raise UnprovedError(
                f"the broker does not report where {queue} ends",
                topic=queue.topic,
                queue=str(queue),
                remedy="Give the topic as many queues for reading as for writing",
            )
        return QueueEnds({each: bounds[each].max_offset for each in bounds}, {}, last_times(bounds))
