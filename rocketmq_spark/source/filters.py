"""What the options mean out of what is there: topics, queues, and the tag or SQL filter of a topic.

Brokers compare the hashes of tags, so other tags with the same hash come through; an invalid SQL expression sent with a
pull is answered with every message. Both are closed here: tags are compared as texts, SQL is compiled by a broker
before the first pull.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import DLQ_PREFIX, RETRY_PREFIX, Perm
from rocketmq_spark.errors import BrokerError, OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.queues.environment import environment_of
from rocketmq_spark.source.offsets import Offsets
from rocketmq_spark.source.starting_offsets import listed
from rocketmq_spark.wire import names
from rocketmq_spark.wire.subscription import parse_subscription

_SPECIAL = (RETRY_PREFIX, DLQ_PREFIX)


def of_topic(options: Options, topic: str) -> Filter:
    """The filter of a topic; topics that a JSON filter does not name are read whole."""
    tags, sql = options.tags, options.sql
    expression = tags.get(topic) if isinstance(tags, dict) else tags
    if expression is not None and expression != "*":
        return Filter(" || ".join(parse_subscription(expression).tags), "TAG")
    expression = sql.get(topic) if isinstance(sql, dict) else sql
    return Filter(expression, "SQL92") if expression is not None else NO_FILTER


def check(options: Options) -> None:
    """What can be said without a broker: one kind of filter, and tags that are tags."""
    if options.tags is not None and options.sql is not None:
        raise OptionError("options 'tags' and 'sql' exclude each other: give one of them")
    expressions = options.tags.values() if isinstance(options.tags, dict) else [options.tags]
    for expression in expressions:
        if expression is not None and not _tags(expression) and expression.strip() != "*":
            raise OptionError(f"option 'tags' is {expression!r}; expected tags separated by ||")


def _tags(expression: str) -> Sequence[str]:
    try:
        return parse_subscription(expression).tags
    except ValueError:
        return ()


def validate(
    offsets: OffsetReader,
    options: Options,
    queues: Iterable[MessageQueue],
    deadline: Deadline,
    batched: Callable[[MessageQueue], bool],
) -> None:
    """Let one broker of each topic compile its SQL expression. Raises ``OptionError`` with the broker's words."""
    if options.sql is None:
        return
    for topic, queue in sorted({queue.topic: queue for queue in queues}.items()):
        sql, broker = of_topic(options, topic), queue.broker_name
        if not sql:
            continue
        if offsets.is_proxy(topic, broker, deadline):
            raise OptionError(
                "option 'sql' cannot be used here: a Proxy does not compile the expression, and an invalid one would "
                "be answered with every message",
                remedy="Connect to the brokers, or filter with option 'tags'",
            )
        if batched(queue):
            raise OptionError(
                f"option 'sql' is {sql.expression!r}, but {topic} is a batch topic, of whose messages brokers know no properties",
                remedy="Filter with option 'tags', or in Spark",
            )
        try:
            offsets.check_filter(broker, options.group, topic, sql.expression, deadline)
        except BrokerError as e:
            if e.retriable:
                raise
            raise OptionError(
                f"option 'sql' is {sql.expression!r}; the broker refuses it",
                e.addr,
                e.broker_code,
                topic,
                None,
                e.remark,
                "Set enablePropertyFilter=true in the broker's configuration if it says that it does not support SQL92"
                if "support" in (e.remark or "")
                else None,
            ) from e


def recorded(options: Options) -> dict[str, object]:
    """The filter as it stands in offsets, so that a changed one is noticed; empty without a filter."""
    record: dict[str, object] = {}
    if options.environment is not None:
        record["environment"] = options.environment
        if options.environment_mode != "queues":
            record["environmentMode"] = options.environment_mode
    if options.tags not in (None, "*"):
        record["tags"] = options.tags
    if options.sql is not None:
        record["sql"] = options.sql
    return record


def check_environment(options: Options, begin: Offsets) -> None:
    """That positions are of the environment of the options: else a forgotten variable would leave queues unread, or read
    those of others. Raises ``OptionError``."""
    was, now = (
        tuple(found[name] for name in ("environment", "environmentMode") if name in found)
        for found in (begin.filter, recorded(options))
    )
    if was == now or not begin.positions or (not was and _fits(options, begin)):
        return
    raise OptionError(
        f"the checkpoint is of {_environment(was)}, and this query of {_environment(now)}",
        remedy="Start it with option 'environment' (or variable ROCKETMQ_ENVIRONMENT) as before, or with a new checkpoint",
    )


def _fits(options: Options, begin: Offsets) -> bool:
    """Whether positions that name no environment, as before they did, are all of this one."""
    mine = environment_of(options)
    if mine is None:
        return False
    if begin.environment:
        return set(begin.environment.values()) == {mine.number}
    queues = {q for q in begin.positions if not q.topic.startswith(_SPECIAL)}
    return not mine.by_position and set(mine.owned(queues, may_lack={q.topic for q in queues})) == queues


def _environment(named: tuple[object, ...]) -> str:
    return f"environment {' with '.join(map(repr, named))}" if named else "no environment"


def matching(options: Options, topics: Iterable[str], internal: set[str]) -> tuple[str, ...]:
    """Topics of the pattern that are for users; ``internal`` are names that RocketMQ itself uses in this cluster."""
    matches = re.compile(options.subscribe_pattern or "").fullmatch
    return tuple(topic for topic in topics if matches(topic) and _is_for_users(options, topic, internal))


def _is_for_users(options: Options, topic: str, internal: set[str]) -> bool:
    return options.include_internal if topic.startswith(_SPECIAL) else names.is_user_topic(topic, internal)


def with_known(options: Options, topics: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """With topics that have positions and are not listed any more: whether they are gone is to be found out."""
    unlisted = set(known) - set(topics)
    if not unlisted:
        return topics
    matches = re.compile(options.subscribe_pattern or "").fullmatch
    return (
        *topics,
        *sorted(t for t in unlisted if matches(t) and (options.include_internal or not t.startswith(_SPECIAL))),
    )


def readable(options: Options, route: TopicRoute, tolerant: bool) -> list[MessageQueue]:
    """The queues of a topic that are read. What is missing of them is an error, unless ``tolerant``."""
    if route.static:
        raise OptionError(
            f"topic {route.topic!r} is a static topic (logical queues mapped over brokers), which cannot be read",
            remedy="Name topics with ordinary queues",
        )
    queues = route.readable()
    if options.assign:
        mine = {queue for queue in options.assign if queue.topic == route.topic}
        absent = mine - set(queues)
        if absent and not tolerant:
            raise OptionError(f"option 'assign' names queues that do not exist: {listed(absent)}")
        queues = sorted(mine & set(queues))
    if not queues and not tolerant:
        raise RouteNotFound("no queue of the topic may be read: no read permission", remedy=f"Topic: {route.topic}")
    return queues


def _on_its_broker(route: TopicRoute | None, queue: MessageQueue) -> QueueData | None:
    """What the route says about queues of the broker that has this one."""
    if route is None:
        return None
    return next((data for data in route.queues if data.broker_name == queue.broker_name), None)


def is_hidden(route: TopicRoute | None, queue: MessageQueue) -> bool:
    """Whether its broker does not read the queue any more."""
    data = _on_its_broker(route, queue)
    return data is not None and queue.queue_id >= data.read_queues


def why_absent(route: TopicRoute | None, queue: MessageQueue) -> str:
    """Why a queue gives no bounds, as far as the route tells."""
    data = _on_its_broker(route, queue)
    if route is None or queue.broker_name not in route.brokers or data is None:
        return "the route does not name its broker"
    if not data.perm & Perm.READ:
        return "no read permission"
    if is_hidden(route, queue):
        return "its broker does not read it any more"
    if not route.brokers[queue.broker_name].master:
        return "its master is down, and the slave lacks messages"
    return "its broker does not answer, or the options do not choose it"
