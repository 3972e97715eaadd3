"""Requests for information about queues, many at a time, and about a topic.

A request about a queue goes to the broker of the queue, and one that fails does not affect others. Every request names the
broker (``bname``): brokers ignore it for ordinary topics, a Proxy needs it.

Information about a topic: its type, the longest delay of its brokers, and whether any consumer reads it. Attributes are
cached: ``queue.type`` cannot change, but a topic can be deleted and created again.
"""

from __future__ import annotations

import bisect
import copy
import logging
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rocketmq_spark.base import codes
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import FIRST_WITH_TIMERS, TIMER_MAX_DELAY_S, Response
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import AccessDenied, BrokerNotFound, CallTimeout, NotSupported, RocketMQError
from rocketmq_spark.model import NO_FILTER, MessageQueue
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import stamp

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Response codes of a pull that has an outcome, even if there is no message.
PULLED = (Response.SUCCESS, Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED)
_RESET = Response.PULL_OFFSET_MOVED, codes.OFFSET_RESET


@dataclass(frozen=True, slots=True)
class BrokerCommand:
    """A request for one broker and the function that interprets the answer."""

    broker_name: str
    command: Command
    topic: str
    queue: MessageQueue | None = None


Attributes = Mapping[str, str]
AttributesByTopic = Mapping[tuple[str, str], Attributes | RocketMQError]


class BrokerClient:
    """Asks brokers by name, over the connections and with the routes of a client."""

    def __init__(self, calls: RpcClient, routes: Routes) -> None:
        self.calls = calls
        self._routes = routes

    def for_queue(self, row: rpc.Row, queue: MessageQueue, **fields: Any) -> BrokerCommand:
        """The request of a row of ``wire/rpc`` about a queue."""
        command = row.request(
            topic=self.calls.on_wire(queue.topic), queueId=queue.queue_id, bname=queue.broker_name, **fields
        )
        return BrokerCommand(queue.broker_name, command, queue.topic, queue)

    def pull_at(self, group: str, queue: MessageQueue, offset: int, count: int = 1) -> BrokerCommand:
        return self.for_queue(
            rpc.PULL_MESSAGE,
            queue,
            consumerGroup=self.calls.on_wire(group),
            queueOffset=offset,
            maxMsgNums=count,
            subscription=NO_FILTER.expression,
            expressionType=NO_FILTER.kind,
            **rpc.FLEETING,
        )

    def request_pulls(
        self, pulls: Sequence[BrokerCommand], deadline: Deadline, read_from: str = "master"
    ) -> list[Command | RocketMQError]:
        """As ``request_each``. A broker reports an operator's reset in one answer, without a result: such a pull is repeated."""
        answers = self.request_each(pulls, deadline, PULLED, read_from)
        while reset := [i for i, a in enumerate(answers) if isinstance(a, Command) and (a.code, a.remark) == _RESET]:
            repeated = self.request_each([pulls[i] for i in reset], deadline, PULLED, read_from)
            for i, answer in zip(reset, repeated, strict=True):
                answers[i] = answer
        return answers

    def attributes(self, keys: Iterable[tuple[str, str]], deadline: Deadline) -> AttributesByTopic:
        """Current attributes of topics on brokers, or the error. ``keys`` are pairs of broker and topic."""
        commands = [
            BrokerCommand(broker, rpc.GET_TOPIC_CONFIG.request(topic=self.calls.on_wire(topic), bname=broker), topic)
            for broker, topic in sorted(keys)
        ]
        return {
            (command.broker_name, command.topic): answer
            if isinstance(answer, RocketMQError)
            else bodies.topic_config(answer.body).attributes
            for command, answer in zip(commands, self.request_each(commands, deadline), strict=True)
        }

    def first_kept(self, group: str, queue: MessageQueue, time_ms: int, deadline: Deadline) -> int:
        """The first kept offset of a compaction topic that was stored at or after a time, even if messages are missing there, or
        below the minimum of its index.
        """

        def next_ms(offset: int) -> int:
            (answer,) = self.request_pulls([self.pull_at(group, queue, offset)], deadline)
            if isinstance(answer, RocketMQError):
                raise answer
            first = stamp(answer.body) if answer.code == Response.SUCCESS else None
            return time_ms if first is None else first.stored_ms

        (answer,) = self.request_all([self.for_queue(rpc.GET_MAX_OFFSET, queue)], deadline)
        return bisect.bisect_left(range(rpc.GET_MAX_OFFSET.answer(answer)["offset"]), time_ms, key=next_ms)

    def broker_config(self, broker_name: str, deadline: Deadline) -> Command | RocketMQError | None:
        """Return a master's answer with its settings, or the error; None if the network could read the passwords in it."""
        try:
            address = self._routes.address(broker_name)
        except RocketMQError as e:
            return e
        if not self.calls.is_private(address):
            return None
        command = BrokerCommand(broker_name, rpc.GET_BROKER_CONFIG.request(bname=broker_name), "")
        (answer,) = self.calls.invoke_each([(address, command.command)], deadline)
        return _checked(answer, command, address, (Response.SUCCESS,))

    def remove_unrouted(self, table: dict[tuple[str, str], T]) -> None:
        """Forget what is kept by broker and topic if no route has the broker for the topic."""
        routed = self._routes.cached_topic_brokers()
        for key in [key for key in list(table) if key[::-1] not in routed]:
            table.pop(key, None)

    def late_brokers(self) -> frozenset[str]:
        """Brokers that have not answered yet, and for which calls no longer wait."""
        late_addresses = self.calls.late_answers
        if not late_addresses:
            return frozenset()
        return frozenset(
            b.broker_name for b in self._routes.brokers() if late_addresses.keys() & set(b.addresses.values())
        )

    def connection(self, broker_name: str) -> tuple[str, int] | None:
        """Address of the broker's master and the number of connections made to it; None while no route has the broker."""
        try:
            address = self._routes.address(broker_name, "master")
        except RocketMQError:
            return None
        return address, self.calls.pool.attempts(address)

    def request_all(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        accept: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command]:
        """Ask all at once; return answers in order. After all have ended, raises the error of the first that failed."""
        answers = []
        for answer in self.request_each(commands, deadline, accept, read_from):
            if isinstance(answer, RocketMQError):
                raise answer
            answers.append(answer)
        return answers

    def request_each(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        accept: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command | RocketMQError]:
        """Ask all at once; return answers and errors in order."""
        answers = self.request_with_grace(commands, deadline, read_from, accept=accept)
        return [answer for answer in answers if answer is not None]

    def request_with_grace(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        read_from: str = "master",
        grace_s: float | None = None,
        accept: Container[int] = (Response.SUCCESS,),
    ) -> list[Command | RocketMQError | None]:
        """Answers and errors in order; with ``grace_s``, None for each question without an answer after that time."""
        address_of: dict[str, str | RocketMQError] = {}
        for name in {broker_command.broker_name for broker_command in commands}:
            try:
                address_of[name] = self._routes.address(name, read_from)
            except RocketMQError as e:
                address_of[name] = e
        addresses = [address_of[broker_command.broker_name] for broker_command in commands]
        requests = [(a, q.command) for a, q in zip(addresses, commands, strict=True) if isinstance(a, str)]
        outcomes: Sequence[Command | RocketMQError | None]
        outcomes = (
            self.calls.invoke_each(requests, deadline)
            if grace_s is None
            else self.calls.invoke_with_grace(requests, deadline, grace_s)
        )
        answers = iter(outcomes)
        return [
            _checked(next(answers), broker_command, address, accept) if isinstance(address, str) else address
            for broker_command, address in zip(commands, addresses, strict=True)
        ]


# So many entries about topics may be kept before those that no route has are looked for.
SWEEP_ABOVE_ENTRIES = 64


def has_attribute(attributes: AttributesByTopic, queue: MessageQueue, name: str, value: str) -> bool | None:
    """Whether the topic of a queue has an attribute; None if its broker does not report attributes."""
    of_topic = attributes[queue.broker_name, queue.topic]
    return None if isinstance(of_topic, RocketMQError) else of_topic.get(name) == value


def raise_if_retriable(attributes: AttributesByTopic) -> AttributesByTopic:
    """Return ``attributes``. Raises a broker's error if the broker may answer later."""
    for of_topic in attributes.values():
        if isinstance(of_topic, RocketMQError) and of_topic.retriable:
            raise of_topic
    return attributes


def is_compacted(attributes: Attributes | None) -> bool:
    """Whether it is a compaction topic, according to the known attributes."""
    return (attributes or {}).get(codes.CLEANUP_POLICY) == codes.COMPACTION


def first_queues(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], MessageQueue]:
    """The lowest queue of every broker and topic."""
    return {(queue.broker_name, queue.topic): queue for queue in sorted(queues, reverse=True)}


def _checked(
    result: Command | RocketMQError | None, command: BrokerCommand, address: str, accept: Container[int]
) -> Command | RocketMQError | None:
    if result is None or isinstance(result, RocketMQError) or result.code in accept:
        return result
    queue = str(command.queue) if command.queue else None
    return error_from_response(result, address, command.topic or None, queue)


ATTRIBUTES_AGE_S = 30.0
# A broker that refuses connections does so at once, and may be back in a moment.
REFUSED_WITHIN_S, REFUSED_PAUSE_S = 0.1, 1.0

_Attributes = Attributes | AccessDenied | None
_CACHED_NAMES = (codes.QUEUE_TYPE, codes.CLEANUP_POLICY)  # a broker could have any number of others


class _CachedAnswer(NamedTuple):
    answer: _Attributes
    fetched_s: float

    def is_younger(self, seconds: float) -> bool:
        return time.monotonic() - self.fetched_s < seconds


class TopicAttributesCache:
    """Cached attributes of the topics of one client."""

    def __init__(self, calls: RpcClient, routes: Routes) -> None:
        self._calls = calls
        self._routes = routes
        self._cached: dict[tuple[str, str], _CachedAnswer] = {}
        self._sweep_above = SWEEP_ABOVE_ENTRIES
        self._unanswered_until: dict[tuple[str, str], Deadline] = {}
        self._hanging_until: dict[str, Deadline] = {}

    def attributes(
        self, topic: str, broker_name: str, deadline: Deadline, max_age_s: float | None = None
    ) -> Attributes | None:
        """The topic's attributes on a broker; None if a Proxy answers for it, which does not have them.

        While the broker does not answer, the cached attributes are returned.
        """
        key = topic, broker_name
        cached = self._cached.get(key)
        if cached is None or not cached.is_younger(ATTRIBUTES_AGE_S if max_age_s is None else max_age_s):
            answer = self._fetch_or_cached(topic, broker_name, deadline, cached)
            if len(self._cached) > self._sweep_above:
                routed = self._routes.cached_topic_brokers()
                for unrouted in [cached_key for cached_key in list(self._cached) if cached_key not in routed]:
                    self._cached.pop(unrouted, None)
                self._sweep_above = SWEEP_ABOVE_ENTRIES + 2 * len(self._cached)
            cached = self._cached[key] = _CachedAnswer(answer, time.monotonic())
        if isinstance(cached.answer, AccessDenied):
            raise copy.copy(cached.answer)
        return cached.answer

    def stores_batches(self, queue: MessageQueue, deadline: Deadline, max_age_s: float | None = None) -> bool:
        """Whether brokers compare the tags of whole batches only, as they do for a batch topic.

        True also at a Proxy, which does not report this, so that no topic is missed.
        """
        return is_batched(self.attributes(queue.topic, queue.broker_name, deadline, max_age_s)) is not False

    def batch_storage(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> BatchStorage | None:
        """Return how batches of the topic are stored, according to the first of ``brokers`` that answers; None without an answer.
        If the user may not ask, it counts as an ordinary topic, because an answer never comes.

        A broker that did not answer is skipped for a while, so that it does not delay every task, and asked last about other
        topics. Each gets a share of the time, so that one that hangs leaves some for the others.
        """
        silent = {
            name for (of, name), until in list(self._unanswered_until.items()) if of == topic and not until.expired
        }
        broker_names, denied = sorted((name for name in brokers if name not in silent), key=self._is_hanging), False
        for number, name in enumerate(broker_names):
            share, started = deadline.within(deadline.remaining() / (len(broker_names) - number)), time.monotonic()
            try:
                attributes = self.attributes(topic, name, share)
            except AccessDenied:
                denied = True
            except RocketMQError as e:
                logger.info("cannot determine from broker %s how batches of topic %s are stored: %s", name, topic, e)
                _drop_expired(self._unanswered_until)
                self._unanswered_until[topic, name] = Deadline.after(
                    REFUSED_PAUSE_S if time.monotonic() - started < REFUSED_WITHIN_S else ATTRIBUTES_AGE_S
                )
            else:
                return BatchStorage(is_batched(attributes) is True, is_compacted(attributes))
        return BatchStorage() if denied else None

    def _is_hanging(self, broker_name: str) -> bool:
        return (until := self._hanging_until.get(broker_name)) is not None and not until.expired

    def is_cached(self, queue: MessageQueue) -> bool:
        """Whether ``attributes`` would answer from the cache."""
        cached = self._cached.get((queue.topic, queue.broker_name))
        return cached is not None and cached.is_younger(ATTRIBUTES_AGE_S)

    def _fetch_or_cached(
        self, topic: str, broker_name: str, deadline: Deadline, cached: _CachedAnswer | None
    ) -> _Attributes:
        try:
            return self._fetch(topic, broker_name, deadline)
        except AccessDenied as e:
            logger.info("the kind of topic %s stays unknown: %s", topic, e)
            return e
        except RocketMQError as e:
            if isinstance(e, CallTimeout):
                _drop_expired(self._hanging_until)
                self._hanging_until[broker_name] = Deadline.after(ATTRIBUTES_AGE_S)
            if cached is None or not e.retriable:
                raise
            return cached.answer

    def _fetch(self, topic: str, broker_name: str, deadline: Deadline) -> Attributes | None:
        address = self._address(topic, broker_name, deadline)
        command = rpc.GET_TOPIC_CONFIG.request(topic=self._calls.on_wire(topic), bname=broker_name)
        answer = self._calls.invoke(address, command, deadline.within(self._calls.request_timeout_s))
        if answer.code == codes.Response.SUCCESS:
            attributes = bodies.topic_config(answer.body).attributes
            return {name: attributes[name] for name in _CACHED_NAMES if name in attributes}
        error = error_from_response(answer, address, topic)
        if not isinstance(error, NotSupported):
            raise error
        return {} if answer.version < codes.FIRST_WITH_ATTRIBUTES else None

    def _address(self, topic: str, broker_name: str, deadline: Deadline) -> str:
        try:
            return self._routes.address(broker_name, "hint")
        except BrokerNotFound:
            self._routes.get(topic, 0.0, deadline)
            return self._routes.address(broker_name, "hint")


def _drop_expired(until: dict[Any, Deadline]) -> None:
    if len(until) > SWEEP_ABOVE_ENTRIES:
        for key in [key for key, deadline in list(until.items()) if deadline.expired]:
            until.pop(key, None)


def is_batched(attributes: Attributes | None) -> bool | None:
    """Whether a topic with these attributes stores batches whole; None if they are unknown."""
    return None if attributes is None else attributes.get(codes.QUEUE_TYPE) == codes.BATCH_QUEUE


def max_timer_delays_ms(calls: RpcClient, topic: str, masters: Mapping[str, str], deadline: Deadline) -> dict[str, int]:
    """The longest delay, in ms, of each of ``masters``, addresses by broker name, that answers; 0 without timers."""
    topic_on_wire = calls.on_wire(topic)
    requests = [
        (address, rpc.GET_MAX_OFFSET.request(topic=topic_on_wire, queueId=0, bname=name))
        for name, address in masters.items()
    ]
    answers = dict(zip(masters, calls.invoke_each(requests, _first_half(deadline)), strict=True))
    versions = {name: answer.version for name, answer in answers.items() if not isinstance(answer, RocketMQError)}
    delays_ms = dict.fromkeys(versions, 0)
    with_timers = [name for name, version in versions.items() if version >= FIRST_WITH_TIMERS]
    # The configuration contains passwords. If the network could read it, it is not requested, and the default is assumed, as for
    # a broker that does not report its configuration.
    delays_ms |= {name: 1000 * TIMER_MAX_DELAY_S for name in with_timers if not calls.is_private(masters[name])}
    with_timers = [name for name in with_timers if calls.is_private(masters[name])]
    configs = [(masters[name], rpc.GET_BROKER_CONFIG.request(bname=name)) for name in with_timers]
    for name, config in zip(with_timers, calls.invoke_each(configs, deadline), strict=True):
        if isinstance(config, Command):
            delays_ms[name] = _max_timer_delay_ms(config)
        else:
            del delays_ms[name]
    return delays_ms


def has_online_consumer(calls: RpcClient, topic: str, masters: Sequence[str], deadline: Deadline) -> bool:
    """Whether a member of any group that is online at one of ``masters``, addresses, has subscribed to the topic.

    Raises the error of a broker that does not answer, if no other broker has a member.
    """
    topic_on_wire = calls.on_wire(topic)
    by_broker = calls.invoke_each(
        [(address, rpc.QUERY_TOPIC_CONSUME_BY_WHO.request(topic=topic_on_wire)) for address in masters],
        _first_half(deadline),
    )
    answers = [_success(answer, address, topic) for answer, address in zip(by_broker, masters, strict=True)]
    groups = [
        (address, rpc.GET_CONSUMER_CONNECTION_LIST.request(consumerGroup=group))
        for address, answer in zip(masters, answers, strict=True)
        if isinstance(answer, Command)
        for group in bodies.group_list(answer.body)
    ]
    of_groups = calls.invoke_each(groups, deadline)
    for members in of_groups:
        if isinstance(members, RocketMQError) or members.code != Response.SUCCESS:
            continue  # no member of the group is online
        if topic_on_wire in bodies.group_filters(members.body):
            return True
    for answer in (*answers, *of_groups):
        if isinstance(answer, RocketMQError):
            raise answer
    return False


def _first_half(deadline: Deadline) -> Deadline:
    """The deadline of the first of two questions: a broker that hangs leaves time for the second one."""
    return deadline.within(deadline.remaining() / 2)


def _max_timer_delay_ms(config: Command) -> int:
    """In ms, 0 with disabled timers; RocketMQ's default if the broker does not report its configuration."""
    answer = bodies.read_config(config.body) if config.code == Response.SUCCESS else {}
    if answer.get("timerWheelEnable", "true") != "true":
        return 0
    seconds = bodies.setting_number(answer, "timerMaxDelaySec")
    return 1000 * (TIMER_MAX_DELAY_S if seconds is None else seconds)


def _success(answer: Command | RocketMQError, address: str, topic: str) -> Command | RocketMQError:
    if isinstance(answer, RocketMQError) or answer.code == Response.SUCCESS:
        return answer
    return error_from_response(answer, address, topic)
