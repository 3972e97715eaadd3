"""The topics and queues that the options choose among the existing ones, and the tag or SQL filter of a topic.

Brokers compare the hashes of tags, so they also return messages with another tag of the same hash. They answer a pull with an
invalid SQL expression with every message. So tags are compared again as texts, and a broker compiles the SQL before the first
pull.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DLQ_PREFIX, RETRY_PREFIX, Perm
from rocketmq_spark.errors import BrokerError, CheckpointMismatch, OffsetError, OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import assignment
from rocketmq_spark.options.topic_names import EXACT, hint
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.pull.puller import of_batch_topic
from rocketmq_spark.queues.environment import ANY_BROKER, Environment, environment_of, scope_of
from rocketmq_spark.spark.source import partitioning, patterns
from rocketmq_spark.spark.source.offsets import Offsets, queues_text
from rocketmq_spark.wire import names
from rocketmq_spark.wire.envelope import INNER_TOPIC
from rocketmq_spark.wire.properties import parse_subscription

logger = logging.getLogger(__name__)

_SPECIAL_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)


def filter_of_topic(options: Options, topic: str) -> Filter:
    """The filter of a topic. A topic that a JSON filter does not name has none."""
    tags, sql = options.tags, options.sql
    expression = tags.get(topic) if isinstance(tags, dict) else tags
    if expression is not None and expression != "*":
        return Filter(" || ".join(parse_subscription(expression).tags), "TAG")
    expression = sql.get(topic) if isinstance(sql, dict) else sql
    return Filter(expression, "SQL92") if expression is not None else NO_FILTER


def check_subscription(options: Options) -> None:
    """Checks topic names and filters without a broker, and rejects the topic of delayed messages together with an environment.

    Raises ``OptionError``.
    """
    for name, topics in (("subscribe", options.subscribe), ("assign", [queue.topic for queue in options.assign])):
        for topic in topics:
            if problem := names.read_problem(topic, scope_of(options)):
                raise OptionError(
                    f"option {name!r}: {problem}{hint(topic)}",
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
            remedy="Read it without an environment, and write the due messages without one, too",
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
    offsets: OffsetReader,
    options: Options,
    queues: Iterable[MessageQueue],
    deadline: Deadline,
    batched: Callable[[MessageQueue], bool],
) -> None:
    """Let one broker of each topic compile its SQL expression. Raises ``OptionError`` with the broker's message."""
    if options.sql is None:
        return
    there = {queue.topic: queue for queue in queues}
    # A topic that matches the pattern later is read without another check, so its expression is checked now.
    named = options.sql if isinstance(options.sql, dict) and there else ()
    later = {topic: min(there.values()) for topic in named if is_subscribed(options, topic)}
    for topic, queue in sorted({**later, **there}.items()):
        sql, broker = filter_of_topic(options, topic), queue.broker_name
        if not sql:
            continue
        try:
            compiled = offsets.check_filter(broker, options.group, topic, sql.expression, deadline)
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
        if not compiled:
            raise OptionError(
                "option 'sql' cannot be used here: a Proxy does not check the expression, and answers an "
                "invalid one with every message",
                remedy="Connect to the brokers, or filter with option 'tags'",
            )
        if topic in there and batched(queue):
            raise of_batch_topic(sql, topic)


def source_identity(options: Options, clusters: Sequence[str] = ()) -> dict[str, object]:
    """What offsets record of a source: the namespace; clusters, environment and filter if there are any; the option that chooses
    topics; the group to which the query commits; and ``newQueues``, which is False if queues that are created later are not read.
    """
    record: dict[str, object] = {"namespace": options.namespace or ""}
    if "group" in options.given:
        record["group"] = options.group
    if clusters:
        record["clusters"] = list(clusters)
    if options.environment is not None:
        record["environment"] = options.environment
        if options.environment_mode != "queues":
            record["environmentMode"] = options.environment_mode
        layout = _environment_layout(environment_of(options))
        if layout is not None:
            record["environments"] = layout
    if options.subscribe:
        record["subscribe"] = sorted({*options.subscribe})
    if options.assign:
        record["assign"] = _assign_json(options.assign)
    if options.subscribe_pattern is not None:
        record["subscribePattern"] = options.subscribe_pattern
        if options.include_internal:
            record["includeInternal"] = True
    if options.assign or not partitioning.allocates_every_queue(options.allocation_strategy):
        record["newQueues"] = False
    if options.tags not in (None, "*"):
        record["tags"] = options.tags
    if options.sql is not None:
        record["sql"] = options.sql
    return record


def _assign_json(queues: Iterable[MessageQueue]) -> dict[str, dict[str, list[int]]]:
    """Queues in the form of option ``assign``."""
    nested: dict[str, dict[str, list[int]]] = {}
    for topic, broker_name, queue_id in sorted(queues):
        nested.setdefault(topic, {}).setdefault(broker_name, []).append(queue_id)
    return nested


def clusters_of(routes: Iterable[TopicRoute]) -> list[str]:
    """The clusters of all brokers of topics."""
    return sorted({data.cluster for route in routes for data in route.brokers.values() if data.cluster})


def filter_of(record: Mapping[str, object]) -> dict[str, object]:
    """The filter alone, which may change between runs."""
    return {name: record[name] for name in ("sql", "tags") if name in record}


def check_checkpoint(options: Options, begin: Offsets) -> None:
    """Raises ``CheckpointMismatch`` if the positions belong to another namespace, environment or set of topics than the options.

    Without this check, a forgotten environment variable would leave queues unread, or read other queues from meaningless
    positions. A query that waits for its first topic has no positions yet; its namespace and environment are compared, too.
    """
    if not (begin.positions or begin.reads):
        return
    was, now = begin.reads, source_identity(options)
    pairs = []
    if was.get("namespace", now["namespace"]) != now["namespace"]:
        pairs.append(
            (
                _namespace_text(was),
                _namespace_text(now),
                "option 'namespace'" if was["namespace"] else "an empty option 'namespace'",
            )
        )
    of, mine = _environment_key(was), _environment_key(now)
    if of != mine and (of or not _legacy_identity_matches(options, begin)):
        pairs.append(
            (_environment_text(of), _environment_text(mine), "option 'environment' (or variable ROCKETMQ_ENVIRONMENT)")
        )
    elif was.get("environments") != now.get("environments") and not _layout_was_added(options, begin):
        pairs.append((_layout_text(was), _layout_text(now), "option 'environments'"))
    if pairs:
        before, here, names = (" and ".join(words) for words in zip(*pairs, strict=True))
        raise CheckpointMismatch(
            f"the checkpoint is of {before}, and this query of {here}",
            remedy=f"Start it with {names} as before, or with a new checkpointLocation",
        )
    topics = sorted({queue.topic for queue in begin.positions})
    if topics and options.fail_on_data_loss == "fail" and not any(is_subscribed(options, topic) for topic in topics):
        raise CheckpointMismatch(
            f"the checkpoint is of {_topics_text(topics)}, and this query of {_subscription_text(options)}",
            remedy="Start it with a new checkpointLocation, or subscribe to a topic of the checkpoint, too. With "
            "failOnDataLoss=warn the query drops the checkpoint's positions and reads its own topics from their first message",
        )


def check_clusters(options: Options, begin: Offsets, clusters: Sequence[str]) -> None:
    """Raises ``CheckpointMismatch`` if the positions belong to another cluster, whose topics have other messages.

    Only warns if ``failOnDataLoss`` is ``warn`` or ``ignore``.
    """
    if not (was := other_clusters(begin.reads, clusters)):
        return
    text = f"the checkpoint is of cluster {', '.join(map(str, was))}, and this query of cluster {', '.join(clusters)}"
    if options.fail_on_data_loss != "fail":
        logger.warning("%s: the positions are those of the checkpoint's cluster", text)
        return
    raise CheckpointMismatch(
        text,
        remedy="Start it with option 'nameServer' as before, or with a new checkpointLocation. If the cluster was only "
        "renamed, set option 'failOnDataLoss' to 'warn': the query then continues at these positions",
    )


def other_clusters(reads: Mapping[str, object], clusters: Sequence[str]) -> list[str]:
    """The recorded clusters in ``reads``, if none of them is one of ``clusters``; otherwise empty."""
    was = reads.get("clusters")
    return was if isinstance(was, list) and clusters and not {*was} & {*clusters} else []


def is_other_source(options: Options, of: Offsets) -> bool:
    """Whether positions belong to another namespace or environment than the options, or to a query with another group."""
    was, now = of.reads, source_identity(options)
    other = any(name in was and was[name] != now.get(name) for name in ("namespace", "group"))
    return other or _environment_key(was) != _environment_key(now)


def is_subscribed(options: Options, topic: str) -> bool:
    """Whether the options choose a topic with this name."""
    if options.assign:
        return any(queue.topic == topic for queue in options.assign)
    if options.subscribe_pattern is None:
        return topic in options.subscribe
    return bool(plus_checkpoint_topics(options, (), [topic]))


def _subscription_text(options: Options) -> str:
    if options.subscribe_pattern is not None:
        return f"topics that match {options.subscribe_pattern!r}"
    return _topics_text(sorted({queue.topic for queue in options.assign} if options.assign else options.subscribe))


def _topics_text(topics: Sequence[str]) -> str:
    more = f" and {len(topics) - 10} more" if len(topics) > 10 else ""
    return f"topic{'s' if len(topics) > 1 else ''} {', '.join(topics[:10])}{more}"


def _namespace_text(record: Mapping[str, object]) -> str:
    return f"namespace {record['namespace']!r}" if record["namespace"] else "no namespace"


def _environment_key(record: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(record[name] for name in ("environment", "environmentMode") if name in record)


def _environment_layout(environment: Environment | None) -> object:
    """What its own queues follow from beside its number: the count, or its queues. Those of others may change."""
    if environment is None or environment.listed is None:
        return environment and environment.count
    return [f"{broker or '*'}:{queue_id}" for broker, queue_id in sorted(environment.listed)]


def _layout_text(record: Mapping[str, object]) -> str:
    layout = record.get("environments")
    if isinstance(layout, Sequence):
        return f"environment {record['environment']!r} with the queues {', '.join(map(str, layout))}"
    return f"environment {record['environment']!r} " + (f"of {layout}" if layout else "by its number alone")


def _layout_was_added(options: Options, begin: Offsets) -> bool:
    """Whether positions that do not say how many environments there were are those of this one."""
    mine = environment_of(options)
    if "environments" in begin.reads or mine is None or mine.by_position:
        return False
    return _owns_all_positions(mine, begin)


def _legacy_identity_matches(options: Options, begin: Offsets) -> bool:
    """Whether positions that name no environment, as before they did, are all of this one."""
    mine = environment_of(options)
    if mine is None:
        return False
    if begin.environment:
        return set(begin.environment.values()) == {mine.number}
    if mine.by_position:
        return _lacks_environment_record(
            begin
        )  # ``check_environment_queues`` compares the queues, as soon as it is known which they are
    return _owns_all_positions(mine, begin)


def _owns_all_positions(mine: Environment, begin: Offsets) -> bool:
    """Whether an environment owns all queues that there are positions of."""
    queues = _without_special_topics(begin.positions)
    return set(mine.owned(queues, may_lack={q.topic for q in queues})) == queues


def _lacks_environment_record(begin: Offsets) -> bool:
    """Whether offsets may be of a version that did not write environments down."""
    return not begin.environment and "namespace" not in begin.reads and "environment" not in begin.reads


def _without_special_topics(queues: Iterable[MessageQueue]) -> set[MessageQueue]:
    return {queue for queue in queues if not queue.topic.startswith(_SPECIAL_PREFIXES)}


def check_environment_queues(options: Options, begin: Offsets, owned: Collection[MessageQueue]) -> None:
    """That positions which say nothing of an environment are those of the queues that this one owns by its number, ``owned``.

    Raises ``CheckpointMismatch``.
    """
    mine = environment_of(options)
    if mine is None or not mine.by_position or not begin.positions or not _lacks_environment_record(begin):
        return
    queues, topics = _without_special_topics(begin.positions), {queue.topic for queue in begin.positions}
    expected = {queue for queue in _without_special_topics(owned) if queue.topic in topics}
    if queues != expected:
        raise CheckpointMismatch(
            f"the checkpoint says nothing of an environment and is of {queues_text(queues)}; this query of environment "
            f"{options.environment!r} reads {queues_text(expected) or 'none of these topics'}",
            remedy="Start it as before, or with a new checkpointLocation; or start the broker that is away",
        )


def _environment_text(named: tuple[object, ...]) -> str:
    return f"environment {' with '.join(map(repr, named))}" if named else "no environment"


class PatternOptions(Protocol):
    """The options of a source that reads the topics of a pattern."""

    @property
    def subscribe_pattern(self) -> str | None: ...
    @property
    def include_internal(self) -> bool: ...


class RecordedPattern(NamedTuple):
    """``PatternOptions`` as offsets record it."""

    subscribe_pattern: str | None
    include_internal: bool


def recorded_pattern(reads: Mapping[str, object]) -> RecordedPattern | None:
    """Return the pattern that offsets record; None if their source names its topics, or if an older release wrote them."""
    pattern = reads.get("subscribePattern")
    return RecordedPattern(pattern, bool(reads.get("includeInternal"))) if isinstance(pattern, str) else None


def recorded_topics(reads: Mapping[str, object]) -> set[str]:
    """Return the topics that offsets record as read by name; empty if their source has a pattern, or an older release wrote them.

    When a batch was planned, each of them existed or was known to be deleted.
    """
    choices = (reads.get("subscribe"), reads.get("assign"))
    return {str(topic) for topics in choices if isinstance(topics, list | Mapping) for topic in topics}


def recorded_queues(reads: Mapping[str, object]) -> set[MessageQueue]:
    """Return the queues that offsets record as assigned. When a batch was planned, each existed or was known to be gone."""
    if "assign" not in reads:
        return set()
    try:
        return {*assignment(json.dumps(reads["assign"]))}
    except ValueError as e:
        raise OffsetError(f"reads/assign: {reads['assign']!r} cannot be used; expected {e}") from e


def queues_of_next_batch(of: Offsets, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Return those of ``queues`` that a source with these offsets reads in its next batch."""
    candidates = list(queues)
    known = [queue for queue in candidates if queue in of.positions]
    if of.reads.get("newQueues") is False:
        if not partitioning.allocates_every_queue(of.plan.get("allocationStrategy")):  # it may leave out new queues
            return known
        assigned = recorded_queues(of.reads)
        return [queue for queue in candidates if queue in of.positions or queue in assigned]
    if "environment" not in of.reads or of.reads.get("environmentMode") == "suffix":
        return candidates
    mine = _recorded_environment(of)
    return known if mine is None else mine.owned(candidates, of.environment, {queue.topic for queue in candidates})


def _recorded_environment(of: Offsets) -> Environment | None:
    """Return the environment that offsets record; None if an older release wrote them, without the environment's queues."""
    name, layout = str(of.reads["environment"]), of.reads.get("environments")
    if isinstance(layout, list):
        pairs = (text.rpartition(":") for text in map(str, layout))
        return Environment(
            name, listed=frozenset((broker.replace("*", ANY_BROKER), int(id_)) for broker, _, id_ in pairs)
        )
    if isinstance(layout, int) or of.environment:
        return Environment.of(name, layout)
    return None


def matching_topics(options: PatternOptions, topics: Iterable[str], internal: set[str]) -> tuple[str, ...]:
    """Topics of the pattern that are for users; ``internal`` are names that RocketMQ itself uses in this cluster."""
    found = patterns.matching_names(options.subscribe_pattern or "", topics)
    return tuple(topic for topic in found if _is_allowed(options, topic, internal))


def _is_allowed(options: PatternOptions, topic: str, internal: set[str]) -> bool:
    return options.include_internal if topic.startswith(_SPECIAL_PREFIXES) else names.is_user_topic(topic, internal)


def plus_checkpoint_topics(options: Options, topics: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """With topics that have positions and are not listed any more: whether they are gone is to be found out."""
    unlisted = set(known) - set(topics)
    if not unlisted:
        return topics
    found = patterns.matching_names(options.subscribe_pattern or "", unlisted)
    return *topics, *sorted(t for t in found if options.include_internal or not t.startswith(_SPECIAL_PREFIXES))


def readable_queues(
    options: Options, route: TopicRoute, tolerant: bool, known: Container[MessageQueue] = ()
) -> list[MessageQueue]:
    """The queues of a topic that are read. What is missing of them is an error, unless ``tolerant``.

    ``known`` are queues that existed before: one of these that is assigned and whose broker left the route is waited for.
    """
    if route.static:
        raise OptionError(
            f"topic {route.topic!r} is a static topic (logical queues mapped over brokers), which cannot be read",
            remedy="Name topics with ordinary queues",
        )
    queues, left = route.readable(), set[MessageQueue]()
    if options.assign:
        mine = {queue for queue in options.assign if queue.topic == route.topic}
        absent = mine - set(queues)
        unknown = {queue for queue in absent if queue not in known}
        if unknown and not tolerant:
            raise OptionError(f"option 'assign' names queues that do not exist: {queues_text(unknown)}")
        left = {queue for queue in absent if queue.broker_name not in route.brokers}
        queues = sorted(mine & set(queues))
    if not queues and not left and not tolerant:
        raise RouteNotFound("no queue of the topic is readable: no read permission", topic=route.topic)
    return queues


class ReadableQueues:
    """The queues that are read, worked out anew for routes that changed: an unchanged one stays the same object."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._by_topic: dict[str, tuple[TopicRoute, list[MessageQueue]]] = {}

    def of_routes(
        self, routes: Iterable[TopicRoute], tolerant: bool, known: Container[MessageQueue] = ()
    ) -> list[MessageQueue]:
        before, self._by_topic = self._by_topic, {}
        found: list[MessageQueue] = []
        for route in routes:
            kept = before.get(route.topic)
            if kept is None or kept[0] is not route:
                kept = route, readable_queues(self._options, route, tolerant, known)
            if kept[1] and not self._options.assign:  # what is missing of these is looked for every time
                self._by_topic[route.topic] = kept
            found += kept[1]
        return found


def _queue_data(route: TopicRoute | None, queue: MessageQueue) -> QueueData | None:
    """What the route says about queues of the broker that has this one."""
    if route is None:
        return None
    return next((data for data in route.queues if data.broker_name == queue.broker_name), None)


def is_removed_queue(route: TopicRoute | None, queue: MessageQueue) -> bool:
    """Whether the queue is none that its broker reads, as the route says."""
    data = _queue_data(route, queue)
    return data is not None and queue.queue_id >= data.read_queues


def unavailable_reason(route: TopicRoute | None, queue: MessageQueue) -> str:
    """Why a queue gives no bounds, as far as the route shows."""
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
