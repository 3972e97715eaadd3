"""Facts about topics, from their brokers: cached attributes, the longest timer delay, and whether a consumer is online."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import FIRST_VERSION_WITH_TIMERS, TIMER_MAX_DELAY_S, Response
from rocketmq_spark.client.broker_client import SWEEP_ABOVE_ENTRIES, Attributes
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import AccessDenied, BrokerNotFound, CallTimeout, NotSupported, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command

logger = logging.getLogger(__name__)


def is_compacted(attributes: Attributes | None) -> bool:
    """Whether these are the attributes of a compaction topic."""
    return (attributes or {}).get(codes.CLEANUP_POLICY) == codes.COMPACTION


# The default maximum age of cached attributes. A broker that did not answer is not asked again, or is asked last, for the
# same time.
ATTRIBUTES_AGE_S = 30.0


# A broker that fails within ``MAX_REFUSAL_DURATION_S`` has refused the connection, perhaps because it restarts. So it is asked
# again after only ``PAUSE_AFTER_REFUSAL_S``.
MAX_REFUSAL_DURATION_S, PAUSE_AFTER_REFUSAL_S = 0.1, 1.0


_AttributesOrError = Attributes | AccessDenied | None


# Only these attributes are cached, because a broker may report any number of attributes.
_CACHED_NAMES = (codes.QUEUE_TYPE, codes.CLEANUP_POLICY)


class _CachedAnswer(NamedTuple):
    answer: _AttributesOrError
    fetched_s: float

    def is_younger_than(self, seconds: float) -> bool:
        return time.monotonic() - self.fetched_s < seconds


class TopicAttributesCache:
    """Cached attributes of the topics of one client."""

    def __init__(self, rpc_client: RpcClient, routes: Routes) -> None:
        self._rpc_client = rpc_client
        self._routes = routes
        self._cached_answers: dict[tuple[str, str], _CachedAnswer] = {}
        self._sweep_threshold = SWEEP_ABOVE_ENTRIES
        # By topic and broker: until when a broker that did not answer about a topic is not asked about this topic again.
        self._unanswered_until: dict[tuple[str, str], Deadline] = {}
        # By broker: until when a broker that did not answer in time is asked last.
        self._hanging_until: dict[str, Deadline] = {}

    def attributes(
        self, topic: str, broker_name: str, deadline: Deadline, max_age_s: float | None = None
    ) -> Attributes | None:
        """Return the topic's attributes on a broker; None if a Proxy answers, because a Proxy does not report attributes.

        While the broker does not answer, older cached attributes are returned.
        """
        key = topic, broker_name
        cached_answer = self._cached_answers.get(key)
        if cached_answer is None or not cached_answer.is_younger_than(
            ATTRIBUTES_AGE_S if max_age_s is None else max_age_s
        ):
            answer = self._fetch_or_cached(topic, broker_name, deadline, cached_answer)
            if len(self._cached_answers) > self._sweep_threshold:
                routed_keys = self._routes.cached_topic_brokers()
                for unrouted_key in [
                    cached_key for cached_key in list(self._cached_answers) if cached_key not in routed_keys
                ]:
                    self._cached_answers.pop(unrouted_key, None)
                self._sweep_threshold = SWEEP_ABOVE_ENTRIES + 2 * len(self._cached_answers)
            cached_answer = self._cached_answers[key] = _CachedAnswer(answer, time.monotonic())
        if isinstance(cached_answer.answer, AccessDenied):
            raise copy.copy(cached_answer.answer)
        return cached_answer.answer

    def stores_batches(self, queue: MessageQueue, deadline: Deadline, max_age_s: float | None = None) -> bool:
        """Whether the topic is a batch topic, in which brokers compare the tags of whole batches only.

        True also at a Proxy, because a Proxy does not report the type. So clients must compare the tags themselves.
        """
        return is_batched(self.attributes(queue.topic, queue.broker_name, deadline, max_age_s)) is not False

    def batch_storage(self, topic: str, brokers: Iterable[str], deadline: Deadline) -> BatchStorage | None:
        """Return how batches of the topic are stored, according to the first of ``brokers`` that answers; None without an answer.
        If brokers deny the request, the topic counts as an ordinary one.

        A broker that did not answer is not asked about the topic for a while, so that it does not delay every task. A broker
        that did not answer about one topic is asked last about other topics. Each broker gets a share of the time, so that a
        broker that hangs leaves time for the others.
        """
        silent_brokers = {
            name
            for (silent_topic, name), until in list(self._unanswered_until.items())
            if silent_topic == topic and not until.expired
        }
        broker_names, is_denied = (
            sorted((name for name in brokers if name not in silent_brokers), key=self._is_hanging),
            False,
        )
        for number, name in enumerate(broker_names):
            broker_deadline, started_s = (
                deadline.within(deadline.remaining() / (len(broker_names) - number)),
                time.monotonic(),
            )
            try:
                attributes = self.attributes(topic, name, broker_deadline)
            except AccessDenied:
                is_denied = True
            except RocketMQError as e:
                logger.info("cannot determine from broker %s how batches of topic %s are stored: %s", name, topic, e)
                _drop_expired(self._unanswered_until)
                self._unanswered_until[topic, name] = Deadline.after(
                    PAUSE_AFTER_REFUSAL_S if time.monotonic() - started_s < MAX_REFUSAL_DURATION_S else ATTRIBUTES_AGE_S
                )
            else:
                return BatchStorage(is_batched(attributes) is True, is_compacted(attributes))
        return BatchStorage() if is_denied else None

    def _is_hanging(self, broker_name: str) -> bool:
        return (until := self._hanging_until.get(broker_name)) is not None and not until.expired

    def is_cached(self, queue: MessageQueue) -> bool:
        """Whether ``attributes`` would return without a request."""
        cached_answer = self._cached_answers.get((queue.topic, queue.broker_name))
        return cached_answer is not None and cached_answer.is_younger_than(ATTRIBUTES_AGE_S)

    def _fetch_or_cached(
        self, topic: str, broker_name: str, deadline: Deadline, cached_answer: _CachedAnswer | None
    ) -> _AttributesOrError:
        try:
            return self._fetch(topic, broker_name, deadline)
        except AccessDenied as e:
            logger.info("the type of topic %s stays unknown: %s", topic, e)
            return e
        except RocketMQError as e:
            if isinstance(e, CallTimeout):
                _drop_expired(self._hanging_until)
                self._hanging_until[broker_name] = Deadline.after(ATTRIBUTES_AGE_S)
            if cached_answer is None or not e.retriable:
                raise
            return cached_answer.answer

    def _fetch(self, topic: str, broker_name: str, deadline: Deadline) -> Attributes | None:
        address = self._address(topic, broker_name, deadline)
        command = rpc.GET_TOPIC_CONFIG.request(topic=self._rpc_client.name_on_wire(topic), bname=broker_name)
        answer = self._rpc_client.invoke(address, command, deadline.within(self._rpc_client.request_timeout_s))
        if answer.code == codes.Response.SUCCESS:
            attributes = bodies.topic_config(answer.body).attributes
            return {name: attributes[name] for name in _CACHED_NAMES if name in attributes}
        error = error_from_response(answer, address, topic)
        if not isinstance(error, NotSupported):
            raise error
        return {} if answer.version < codes.FIRST_VERSION_WITH_ATTRIBUTES else None

    def _address(self, topic: str, broker_name: str, deadline: Deadline) -> str:
        try:
            return self._routes.address(broker_name, "hint")
        except BrokerNotFound:
            self._routes.get(topic, 0.0, deadline)
            return self._routes.address(broker_name, "hint")


def _drop_expired(deadlines: dict[Any, Deadline]) -> None:
    if len(deadlines) > SWEEP_ABOVE_ENTRIES:
        for key in [key for key, deadline in list(deadlines.items()) if deadline.expired]:
            deadlines.pop(key, None)


def is_batched(attributes: Attributes | None) -> bool | None:
    """Whether a topic with these attributes stores batches whole; None if the attributes are unknown."""
    return None if attributes is None else attributes.get(codes.QUEUE_TYPE) == codes.BATCH_QUEUE


def max_timer_delays_ms(
    rpc_client: RpcClient, topic: str, masters: Mapping[str, str], deadline: Deadline
) -> dict[str, int]:
    """Return the longest timer delay in ms of each of ``masters`` (addresses by name) that answers; 0 if timers are
    disabled.
    """
    topic_on_wire = rpc_client.name_on_wire(topic)
    requests = [
        (address, rpc.GET_MAX_OFFSET.request(topic=topic_on_wire, queueId=0, bname=name))
        for name, address in masters.items()
    ]
    answers = dict(zip(masters, rpc_client.invoke_each(requests, _first_half_deadline(deadline)), strict=True))
    versions = {name: answer.version for name, answer in answers.items() if not isinstance(answer, RocketMQError)}
    delays_ms = dict.fromkeys(versions, 0)
    brokers_with_timers = [name for name, version in versions.items() if version >= FIRST_VERSION_WITH_TIMERS]
    # The configuration contains passwords. If others on the network could read the passwords, the default delay is assumed, as
    # for a broker that does not report its configuration.
    delays_ms |= {
        name: 1000 * TIMER_MAX_DELAY_S for name in brokers_with_timers if not rpc_client.is_private(masters[name])
    }
    brokers_with_timers = [name for name in brokers_with_timers if rpc_client.is_private(masters[name])]
    config_requests = [(masters[name], rpc.GET_BROKER_CONFIG.request(bname=name)) for name in brokers_with_timers]
    for name, config_answer in zip(brokers_with_timers, rpc_client.invoke_each(config_requests, deadline), strict=True):
        if isinstance(config_answer, Command):
            delays_ms[name] = _max_timer_delay_ms(config_answer)
        else:
            del delays_ms[name]
    return delays_ms


def has_online_consumer(rpc_client: RpcClient, topic: str, masters: Sequence[str], deadline: Deadline) -> bool:
    """Whether an online consumer has subscribed to the topic, according to the brokers at the addresses ``masters``.

    If no broker reports such a consumer, raises the error of a broker that did not answer.
    """
    topic_on_wire = rpc_client.name_on_wire(topic)
    group_answers = rpc_client.invoke_each(
        [(address, rpc.QUERY_TOPIC_CONSUME_BY_WHO.request(topic=topic_on_wire)) for address in masters],
        _first_half_deadline(deadline),
    )
    answers = [_answer_or_error(answer, address, topic) for answer, address in zip(group_answers, masters, strict=True)]
    member_requests = [
        (address, rpc.GET_CONSUMER_CONNECTION_LIST.request(consumerGroup=group))
        for address, answer in zip(masters, answers, strict=True)
        if isinstance(answer, Command)
        for group in bodies.group_list(answer.body)
    ]
    member_answers = rpc_client.invoke_each(member_requests, deadline)
    for member_answer in member_answers:
        if isinstance(member_answer, RocketMQError) or member_answer.code != Response.SUCCESS:
            continue  # the group has no online member
        if topic_on_wire in bodies.group_filters(member_answer.body):
            return True
    for answer in (*answers, *member_answers):
        if isinstance(answer, RocketMQError):
            raise answer
    return False


def _first_half_deadline(deadline: Deadline) -> Deadline:
    """The deadline of the first of two requests, so that a broker that hangs leaves time for the second request."""
    return deadline.within(deadline.remaining() / 2)


def _max_timer_delay_ms(answer: Command) -> int:
    """The longest timer delay in ms: 0 if timers are disabled, the default if the broker does not report its configuration."""
    settings = bodies.read_config(answer.body) if answer.code == Response.SUCCESS else {}
    if settings.get("timerWheelEnable", "true") != "true":
        return 0
    seconds = bodies.config_number(settings, "timerMaxDelaySec")
    return 1000 * (TIMER_MAX_DELAY_S if seconds is None else seconds)


def _answer_or_error(answer: Command | RocketMQError, address: str, topic: str) -> Command | RocketMQError:
    if isinstance(answer, RocketMQError) or answer.code == Response.SUCCESS:
        return answer
    return error_from_response(answer, address, topic)
