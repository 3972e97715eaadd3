"""Determines what the options subscribe to: topics, queues, and the tag or SQL filter of each topic.

Brokers compare hashes of tags, so brokers also return messages that have another tag with the same hash. The decoder compares the
tags themselves. If a pull has an invalid SQL expression, brokers answer with all messages, so a broker compiles the expression
before the first pull.

Anyone who may create a topic chooses its name, and with some names Python's ``re`` takes exponential time. So RE2, which takes
linear time, matches option ``subscribePattern``. RE2 has no look-around and no back references, so Python matches an expression
that has them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DLQ_PREFIX, MAX_RETRY_OR_DLQ_TOPIC_LENGTH, RETRY_PREFIX, Perm
from rocketmq_spark.errors import BrokerError, OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.options.names import CALLABLES_VARIABLE, code_allowed
from rocketmq_spark.options.parsing import re2_problem
from rocketmq_spark.options.paths import shortened
from rocketmq_spark.options.topic_names import EXACT, dots_hint
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.pull.puller import batch_topic_filter_error
from rocketmq_spark.queues.environment import environment_of, scope_of
from rocketmq_spark.spark.source.offsets import queues_text
from rocketmq_spark.wire import names
from rocketmq_spark.wire.envelope import INNER_TOPIC
from rocketmq_spark.wire.properties import parse_subscription

logger = logging.getLogger(__name__)

SPECIAL_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)


def filter_of_topic(options: Options, topic: str) -> Filter:
    """Return the filter of a topic. A topic that a JSON filter does not name has no filter."""
    tags, sql = options.tags, options.sql
    expression = tags.get(topic) if isinstance(tags, dict) else tags
    if expression is not None and expression != "*":
        return Filter(" || ".join(parse_subscription(expression).tags), "TAG")
    expression = sql.get(topic) if isinstance(sql, dict) else sql
    return Filter(expression, "SQL92") if expression is not None else NO_FILTER


def check_subscription(options: Options) -> None:
    """Check topic names and filters without a broker, and reject the topic of delayed messages together with an environment.

    Raises ``OptionError``.
    """
    for option, named_topics in (
        ("subscribe", options.subscribe),
        ("assign", [queue.topic for queue in options.assign]),
    ):
        for topic in named_topics:
            if problem := names.read_problem(topic, scope_of(options)):
                raise OptionError(
                    f"option {option!r}: {problem}{dots_hint(topic)}",
                    remedy="If brokers have a topic with this name, read it with option 'subscribePattern'",
                )
    if options.topic_names != EXACT and options.subscribe_pattern is not None:
        raise OptionError(
            f"option 'topicNames' is {options.topic_names!r}, which does not apply to option 'subscribePattern'",
            remedy="Omit topicNames, and write the expression for RocketMQ's names, such as server_shop_.*",
        )
    if group_problem := names.group_problem(options.group, scope_of(options)):
        raise OptionError(
            f"option 'group' is {options.group!r}; expected the name of a consumer group ({group_problem})"
        )
    if INNER_TOPIC in options.subscribe and environment_of(options) is not None:
        raise OptionError(
            f"{options.environment_source} is {options.environment!r}, but with environmentMode=queues {INNER_TOPIC} has the "
            "delayed messages of all environments: the query would read only some of its queues, and never deliver the other "
            "messages",
            remedy=f"Read {INNER_TOPIC} without an environment, and write the due messages without an environment, too",
        )
    if options.tags is not None and options.sql is not None:
        raise OptionError("options 'tags' and 'sql' are mutually exclusive: set only one")
    expressions = options.tags.values() if isinstance(options.tags, dict) else [options.tags]
    for expression in expressions:
        if expression is not None and not _tags(expression) and expression.strip() != "*":
            raise OptionError(f"option 'tags' is {expression!r}; expected tags separated by ||")


def _tags(expression: str) -> Sequence[str]:
    try:
        return parse_subscription(expression).tags
    except ValueError:
        return ()


def check_sql(
    offset_reader: OffsetReader,
    options: Options,
    queues: Iterable[MessageQueue],
    deadline: Deadline,
    is_batch_topic: Callable[[MessageQueue], bool],
) -> None:
    """Let one broker of each topic compile its SQL expression. Raises ``OptionError`` with the broker's message."""
    if options.sql is None:
        return
    queue_by_topic = {queue.topic: queue for queue in queues}
    # If a topic matches the pattern later, it is read without another check, so the expression of such a topic is checked now.
    named_topics = options.sql if isinstance(options.sql, dict) and queue_by_topic else ()
    queue_by_later_topic = {
        topic: min(queue_by_topic.values()) for topic in named_topics if is_subscribed(options, topic)
    }
    for topic, queue in sorted({**queue_by_later_topic, **queue_by_topic}.items()):
        sql_filter, broker_name = filter_of_topic(options, topic), queue.broker_name
        if not sql_filter:
            continue
        try:
            is_compiled = offset_reader.check_filter(broker_name, options.group, topic, sql_filter.expression, deadline)
        except BrokerError as e:
            if e.retriable:
                raise
            raise OptionError(
                f"option 'sql' is {sql_filter.expression!r}; the broker rejects it",
                e.addr,
                e.broker_code,
                topic,
                None,
                e.remark,
                "Set enablePropertyFilter=true in the broker's configuration if the broker says that it does not support SQL92"
                if "support" in (e.remark or "")
                else None,
            ) from e
        if not is_compiled:
            raise OptionError(
                "option 'sql' cannot be used here: a Proxy does not check the expression, and answers an "
                "invalid one with every message",
                remedy="Connect to the brokers, or filter with option 'tags'",
            )
        if topic in queue_by_topic and is_batch_topic(queue):
            raise batch_topic_filter_error(sql_filter, topic)


def is_subscribed(options: Options, topic: str) -> bool:
    """Whether the options choose a topic with this name."""
    if options.assign:
        return any(queue.topic == topic for queue in options.assign)
    if options.subscribe_pattern is None:
        return topic in options.subscribe
    return bool(with_checkpoint_topics(options, (), [topic]))


def subscription_text(options: Options) -> str:
    if options.subscribe_pattern is not None:
        return f"topics that match {options.subscribe_pattern!r}"
    return topics_text(sorted({queue.topic for queue in options.assign} if options.assign else options.subscribe))


def topics_text(topics: Sequence[str]) -> str:
    more_text = f" and {len(topics) - 10} more" if len(topics) > 10 else ""
    return f"topic{'s' if len(topics) > 1 else ''} {', '.join(topics[:10])}{more_text}"


class PatternOptions(Protocol):
    """The options of a source that reads the topics of a pattern."""

    @property
    def subscribe_pattern(self) -> str | None: ...
    @property
    def include_internal(self) -> bool: ...


def matching_topics(options: PatternOptions, topics: Iterable[str], internal_topics: set[str]) -> tuple[str, ...]:
    """Return the topics that match the pattern, without topics of RocketMQ itself. ``internal_topics`` has the names of
    RocketMQ's own topics in this cluster.
    """
    matching_topics = matching_names(options.subscribe_pattern or "", topics)
    return tuple(topic for topic in matching_topics if _is_allowed(options, topic, internal_topics))


def _is_allowed(options: PatternOptions, topic: str, internal_topics: set[str]) -> bool:
    return (
        options.include_internal if topic.startswith(SPECIAL_PREFIXES) else names.is_user_topic(topic, internal_topics)
    )


def with_checkpoint_topics(
    options: Options, topics: tuple[str, ...], checkpoint_topics: Collection[str]
) -> tuple[str, ...]:
    """Return ``topics`` with the topics in ``checkpoint_topics`` that match the pattern, also if name servers do not list these
    topics any more.
    """
    unlisted_topics = set(checkpoint_topics) - set(topics)
    if not unlisted_topics:
        return topics
    matching_topics = matching_names(options.subscribe_pattern or "", unlisted_topics)
    return *topics, *sorted(
        t for t in matching_topics if options.include_internal or not t.startswith(SPECIAL_PREFIXES)
    )


def readable_queues(
    options: Options, route: TopicRoute, skip_missing: bool, checkpoint_queues: Container[MessageQueue] = ()
) -> list[MessageQueue]:
    """Return the queues of a topic that the source reads. Raises an error if queues are missing, unless ``skip_missing``.

    ``checkpoint_queues`` are queues that existed earlier. An assigned queue that existed earlier is not reported as missing: if
    the route no longer names its broker, the source waits for the broker.
    """
    if route.static:
        raise OptionError(
            f"topic {route.topic!r} is a static topic (logical queues mapped over brokers), which cannot be read",
            remedy="Name topics with ordinary queues",
        )
    queues, awaited_queues = route.readable_queues(), set[MessageQueue]()
    if options.assign:
        assigned_queues = {queue for queue in options.assign if queue.topic == route.topic}
        missing_queues = assigned_queues - set(queues)
        unknown_queues = {queue for queue in missing_queues if queue not in checkpoint_queues}
        if unknown_queues and not skip_missing:
            raise OptionError(f"option 'assign' names queues that do not exist: {queues_text(unknown_queues)}")
        awaited_queues = {queue for queue in missing_queues if queue.broker_name not in route.brokers}
        queues = sorted(assigned_queues & set(queues))
    if not queues and not awaited_queues and not skip_missing:
        raise RouteNotFound("no queue of the topic is readable: no read permission", topic=route.topic)
    return queues


class ReadableQueues:
    """Caches ``readable_queues`` for each topic until its route changes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._entry_by_topic: dict[str, tuple[TopicRoute, list[MessageQueue]]] = {}

    def of_routes(
        self, routes: Iterable[TopicRoute], skip_missing: bool, checkpoint_queues: Container[MessageQueue] = ()
    ) -> list[MessageQueue]:
        cached_entries, self._entry_by_topic = self._entry_by_topic, {}
        queues: list[MessageQueue] = []
        for route in routes:
            entry = cached_entries.get(route.topic)
            if entry is None or entry[0] != route:
                entry = route, readable_queues(self._options, route, skip_missing, checkpoint_queues)
            if entry[1] and not self._options.assign:  # each call must check whether assigned queues are missing
                self._entry_by_topic[route.topic] = entry
            queues += entry[1]
        return queues


def _queue_data(route: TopicRoute | None, queue: MessageQueue) -> QueueData | None:
    """Return the entry of the route for the broker of the queue; None if the route has no such entry."""
    if route is None:
        return None
    return next((data for data in route.queues if data.broker_name == queue.broker_name), None)


def is_removed_queue(route: TopicRoute | None, queue: MessageQueue) -> bool:
    """Whether the route says that the broker no longer lets clients read the queue."""
    data = _queue_data(route, queue)
    return data is not None and queue.queue_id >= data.read_queues


def unavailable_reason(route: TopicRoute | None, queue: MessageQueue) -> str:
    """Return the reason why a queue has no bounds, as far as the route shows a reason."""
    data = _queue_data(route, queue)
    if route is None or queue.broker_name not in route.brokers or data is None:
        return "the route does not name its broker"
    if not data.perm & Perm.READ:
        return "no read permission"
    if is_removed_queue(route, queue):
        return "the route says that its broker does not read it any more"
    if not route.brokers[queue.broker_name].own_master:
        return "its master is down, and the slave lacks messages"
    return "its broker does not answer, or the options do not choose it"


# Syntax that means different things in Python and RE2. RE2 rejects all other syntax that it does not support.
_SYNTAX_DIFFERENT_IN_RE2 = re.compile(r"\{,|\[\[|\[:")


def matching_names(pattern: str, topics: Iterable[str]) -> list[str]:
    """Return those of ``topics`` whose whole name matches ``pattern``, in the given order.

    If the operator forbids code in options, raises ``OptionError`` for an expression that only Python can match, because such an
    expression could keep the process busy forever.
    """
    import pyarrow as pa  # the import is here, because only patterns need pyarrow
    import pyarrow.compute as pc

    if not code_allowed() and (problem := re2_problem(pattern)) is not None:  # the pattern may come from a checkpoint
        raise OptionError(f"option 'subscribePattern' is {shortened(pattern)}; expected {problem}")
    # RE2 cannot match single surrogates, and no valid name of a topic contains a surrogate.
    encodable_topics = [topic for topic in topics if topic.isprintable()]
    if not _SYNTAX_DIFFERENT_IN_RE2.search(pattern):
        try:
            # The expression must also be valid outside of a group.
            pc.match_substring_regex(pa.array([""], pa.string()), pattern=pattern)
            match_results = pc.match_substring_regex(
                pa.array(encodable_topics, pa.string()), pattern=rf"\A(?:{pattern})\z"
            )
        except pa.ArrowException:  # RE2 does not support the expression
            pass
        else:
            return [
                topic for topic, matches in zip(encodable_topics, match_results.to_pylist(), strict=True) if matches
            ]
    if not code_allowed():
        raise OptionError(
            f"option 'subscribePattern' is {pattern!r}; RE2 cannot match it, and variable {CALLABLES_VARIABLE} forbids other "
            "expressions",
            remedy="Give an expression without look-around, back references, possessive and atomic groups, '{,', '[[' and '[:'",
        )
    try:
        matches = re.compile(pattern).fullmatch
    except re.error as e:  # patterns in checkpoints were not checked earlier
        raise OptionError(f"option 'subscribePattern' is {pattern!r}; expected a regular expression ({e})") from None
    return [topic for topic in encodable_topics if len(topic) <= MAX_RETRY_OR_DLQ_TOPIC_LENGTH and matches(topic)]
