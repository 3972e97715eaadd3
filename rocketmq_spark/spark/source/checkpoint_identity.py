"""Compares the source that wrote a checkpoint with the source that the present options describe.

Each end offset records the identity of its source: namespace, clusters, environment, subscription, filter and group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.errors import CheckpointMismatch, OffsetError
from rocketmq_spark.model import MessageQueue, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import assignment
from rocketmq_spark.queues.environment import ANY_BROKER, Environment, environment_of
from rocketmq_spark.spark.source import partitioning
from rocketmq_spark.spark.source.offsets import Offsets, queues_text
from rocketmq_spark.spark.source.subscription import SPECIAL_PREFIXES, is_subscribed, subscription_text, topics_text

logger = logging.getLogger(__name__)


def source_identity(options: Options, clusters: Sequence[str] = ()) -> dict[str, object]:
    """Return the identity of a source, as offsets record it.

    The identity has the namespace, the option that chooses topics, and the group to which the query commits. The identity also
    has the clusters, the environment and the filter, if there are any. The entry ``newQueues`` is False if the source does not
    read queues that are created later.
    """
    identity: dict[str, object] = {"namespace": options.namespace or ""}
    if "group" in options.given_fields:
        identity["group"] = options.group
    if clusters:
        identity["clusters"] = list(clusters)
    if options.environment is not None:
        identity["environment"] = options.environment
        if options.environment_mode != "queues":
            identity["environmentMode"] = options.environment_mode
        layout = _environment_layout(environment_of(options))
        if layout is not None:
            identity["environments"] = layout
    if options.subscribe:
        identity["subscribe"] = sorted({*options.subscribe})
    if options.assign:
        identity["assign"] = _assign_json(options.assign)
    if options.subscribe_pattern is not None:
        identity["subscribePattern"] = options.subscribe_pattern
        if options.include_internal:
            identity["includeInternal"] = True
    if options.assign or not partitioning.allocates_every_queue(options.allocation_strategy):
        identity["newQueues"] = False
    if options.tags not in (None, "*"):
        identity["tags"] = options.tags
    if options.sql is not None:
        identity["sql"] = options.sql
    return identity


def _assign_json(queues: Iterable[MessageQueue]) -> dict[str, dict[str, list[int]]]:
    """Return queues in the JSON form of option ``assign``."""
    queue_ids: dict[str, dict[str, list[int]]] = {}
    for topic, broker_name, queue_id in sorted(queues):
        queue_ids.setdefault(topic, {}).setdefault(broker_name, []).append(queue_id)
    return queue_ids


def clusters_of(routes: Iterable[TopicRoute]) -> list[str]:
    """Return the clusters of all brokers in the routes, sorted."""
    return sorted({data.cluster for route in routes for data in route.brokers.values() if data.cluster})


def filter_of(identity: Mapping[str, object]) -> dict[str, object]:
    """Return the filter in an identity. Users may change the filter between runs."""
    return {name: identity[name] for name in ("sql", "tags") if name in identity}


def check_checkpoint(options: Options, start: Offsets) -> None:
    """Raise ``CheckpointMismatch`` if the positions belong to another namespace, environment or set of topics than the options.

    Without this check, a query with a forgotten environment variable would omit queues, or would read queues of another
    environment from positions that do not belong to these queues. A query that waits for its first topic has no positions yet,
    so only its namespace and its environment are compared.
    """
    if not (start.positions or start.source_identity):
        return
    recorded_identity, current_identity = start.source_identity, source_identity(options)
    differences = []
    if recorded_identity.get("namespace", current_identity["namespace"]) != current_identity["namespace"]:
        differences.append(
            (
                _namespace_text(recorded_identity),
                _namespace_text(current_identity),
                "option 'namespace'" if recorded_identity["namespace"] else "an empty option 'namespace'",
            )
        )
    recorded_key, current_key = _environment_key(recorded_identity), _environment_key(current_identity)
    if recorded_key != current_key and (recorded_key or not _legacy_identity_matches(options, start)):
        differences.append(
            (
                _environment_text(recorded_key),
                _environment_text(current_key),
                "option 'environment' (or variable ROCKETMQ_ENVIRONMENT)",
            )
        )
    elif recorded_identity.get("environments") != current_identity.get("environments") and not _can_add_layout(
        options, start
    ):
        differences.append((_layout_text(recorded_identity), _layout_text(current_identity), "option 'environments'"))
    if differences:
        recorded_text, current_text, option_names = (" and ".join(words) for words in zip(*differences, strict=True))
        raise CheckpointMismatch(
            f"the checkpoint is of {recorded_text}, and this query of {current_text}",
            remedy=f"Start the query with {option_names} as before, or with a new checkpointLocation",
        )
    topics = sorted({queue.topic for queue in start.positions})
    if topics and options.fail_on_data_loss == "fail" and not any(is_subscribed(options, topic) for topic in topics):
        raise CheckpointMismatch(
            f"the checkpoint is of {topics_text(topics)}, and this query of {subscription_text(options)}",
            remedy="Start the query with a new checkpointLocation, or subscribe to a topic of the checkpoint, too. With "
            "failOnDataLoss=warn the query drops the checkpoint's positions and reads its own topics from their first message",
        )


def check_clusters(options: Options, start: Offsets, clusters: Sequence[str]) -> None:
    """Raise ``CheckpointMismatch`` if the positions belong to another cluster, whose topics have other messages.

    If ``failOnDataLoss`` is ``warn`` or ``ignore``, log a warning instead.
    """
    if not (recorded_clusters := other_clusters(start.source_identity, clusters)):
        return
    recorded_text, current_text = ", ".join(map(str, recorded_clusters)), ", ".join(clusters)
    text = f"the checkpoint is of cluster {recorded_text}, and this query of cluster {current_text}"
    if options.fail_on_data_loss != "fail":
        logger.warning("%s. The query continues at the positions of the checkpoint's cluster", text)
        return
    raise CheckpointMismatch(
        text,
        remedy="Start the query with option 'nameServer' as before, or with a new checkpointLocation. If the cluster was only "
        "renamed, set option 'failOnDataLoss' to 'warn': the query then continues at these positions",
    )


def other_clusters(identity: Mapping[str, object], clusters: Sequence[str]) -> list[str]:
    """Return the clusters in ``identity`` if none of them is in ``clusters``; otherwise an empty list."""
    recorded_clusters = identity.get("clusters")
    return (
        recorded_clusters
        if isinstance(recorded_clusters, list) and clusters and not {*recorded_clusters} & {*clusters}
        else []
    )


def is_other_source(options: Options, offsets: Offsets) -> bool:
    """Whether offsets were written by a source with another namespace, environment or group than the options have."""
    recorded_identity, current_identity = offsets.source_identity, source_identity(options)
    has_other_name = any(
        name in recorded_identity and recorded_identity[name] != current_identity.get(name)
        for name in ("namespace", "group")
    )
    return has_other_name or _environment_key(recorded_identity) != _environment_key(current_identity)


def _namespace_text(identity: Mapping[str, object]) -> str:
    return f"namespace {identity['namespace']!r}" if identity["namespace"] else "no namespace"


def _environment_key(identity: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(identity[name] for name in ("environment", "environmentMode") if name in identity)


def _environment_layout(environment: Environment | None) -> object:
    """Return what determines the queues of an environment besides its number: the number of environments, or the list of the
    queues of this environment. The queues of other environments may change.
    """
    if environment is None or environment.listed_queues is None:
        return environment and environment.environment_count
    return [f"{broker or '*'}:{queue_id}" for broker, queue_id in sorted(environment.listed_queues)]


def _layout_text(identity: Mapping[str, object]) -> str:
    layout = identity.get("environments")
    if isinstance(layout, Sequence):
        return f"environment {identity['environment']!r} with the queues {', '.join(map(str, layout))}"
    return f"environment {identity['environment']!r} " + (f"of {layout}" if layout else "by its number alone")


def _can_add_layout(options: Options, start: Offsets) -> bool:
    """Whether offsets that record no layout of environments can belong to the layout of the options. They can if the environment
    of the options owns all queues with a position.
    """
    environment = environment_of(options)
    if "environments" in start.source_identity or environment is None or environment.is_by_position:
        return False
    return _owns_all_positions(environment, start)


def _legacy_identity_matches(options: Options, start: Offsets) -> bool:
    """Whether offsets of an older release, which record no environment, may belong to the environment of the options."""
    environment = environment_of(options)
    if environment is None:
        return False
    if start.environment_numbers:
        return set(start.environment_numbers.values()) == {environment.number}
    if environment.is_by_position:
        # ``check_environment_queues`` compares the queues when brokers have answered.
        return _lacks_environment_record(start)
    return _owns_all_positions(environment, start)


def _owns_all_positions(environment: Environment, start: Offsets) -> bool:
    """Whether an environment owns all queues with a position, except those of retry and dead-letter topics."""
    queues = _without_special_topics(start.positions)
    return set(environment.owned(queues, possibly_empty_topics={q.topic for q in queues})) == queues


def _lacks_environment_record(start: Offsets) -> bool:
    """Whether offsets may have been written by a release that did not record environments."""
    return (
        not start.environment_numbers
        and "namespace" not in start.source_identity
        and "environment" not in start.source_identity
    )


def _without_special_topics(queues: Iterable[MessageQueue]) -> set[MessageQueue]:
    return {queue for queue in queues if not queue.topic.startswith(SPECIAL_PREFIXES)}


def check_environment_queues(options: Options, start: Offsets, owned_queues: Collection[MessageQueue]) -> None:
    """Raise ``CheckpointMismatch`` if offsets without a recorded environment have positions of other queues than
    ``owned_queues``, the queues that the environment of the options owns by its number.
    """
    environment = environment_of(options)
    if (
        environment is None
        or not environment.is_by_position
        or not start.positions
        or not _lacks_environment_record(start)
    ):
        return
    queues, topics = _without_special_topics(start.positions), {queue.topic for queue in start.positions}
    expected_queues = {queue for queue in _without_special_topics(owned_queues) if queue.topic in topics}
    if queues != expected_queues:
        raise CheckpointMismatch(
            f"the checkpoint records no environment and has positions of {queues_text(queues)}; this query of environment "
            f"{options.environment!r} reads {queues_text(expected_queues) or 'none of these topics'}",
            remedy="Start the query as before, or with a new checkpointLocation; or start the brokers that are down",
        )


def _environment_text(key: tuple[object, ...]) -> str:
    return f"environment {' with '.join(map(repr, key))}" if key else "no environment"


class RecordedPattern(NamedTuple):
    """The options of a pattern (``PatternOptions``) that offsets record."""

    subscribe_pattern: str | None
    include_internal: bool


def recorded_pattern(identity: Mapping[str, object]) -> RecordedPattern | None:
    """Return the pattern in an identity; None if the source names its topics, or if an older release wrote the identity."""
    pattern = identity.get("subscribePattern")
    return RecordedPattern(pattern, bool(identity.get("includeInternal"))) if isinstance(pattern, str) else None


def recorded_topics(identity: Mapping[str, object]) -> set[str]:
    """Return the topics in an identity. The result is empty if the source has a pattern, or if an older release wrote the
    identity.

    Each topic of an identity existed when the batch was planned, or was known to be deleted.
    """
    subscriptions = (identity.get("subscribe"), identity.get("assign"))
    return {str(topic) for topics in subscriptions if isinstance(topics, list | Mapping) for topic in topics}


def recorded_queues(identity: Mapping[str, object]) -> set[MessageQueue]:
    """Return the assigned queues in an identity. When the batch was planned, each assigned queue existed or was known to be
    deleted.
    """
    if "assign" not in identity:
        return set()
    try:
        return {*assignment(json.dumps(identity["assign"]))}
    except ValueError as e:
        raise OffsetError(f"reads/assign: {identity['assign']!r} cannot be used; expected {e}") from e


def queues_of_next_batch(offsets: Offsets, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Return those of ``queues`` that a source with these offsets reads in its next batch."""
    candidates = list(queues)
    queues_with_position = [queue for queue in candidates if queue in offsets.positions]
    if offsets.source_identity.get("newQueues") is False:
        if not partitioning.allocates_every_queue(offsets.partitioning_json.get("allocationStrategy")):
            # The strategy may omit new queues.
            return queues_with_position
        assigned_queues = recorded_queues(offsets.source_identity)
        return [queue for queue in candidates if queue in offsets.positions or queue in assigned_queues]
    if "environment" not in offsets.source_identity or offsets.source_identity.get("environmentMode") == "suffix":
        return candidates
    environment = _recorded_environment(offsets)
    return (
        queues_with_position
        if environment is None
        else environment.owned(candidates, offsets.environment_numbers, {queue.topic for queue in candidates})
    )


def _recorded_environment(offsets: Offsets) -> Environment | None:
    """Return the environment that offsets record. Returns None if an older release, which did not record the queues of an
    environment, wrote the offsets.
    """
    name, layout = str(offsets.source_identity["environment"]), offsets.source_identity.get("environments")
    if isinstance(layout, list):
        split_texts = (text.rpartition(":") for text in map(str, layout))
        return Environment(
            name,
            listed_queues=frozenset(
                (broker.replace("*", ANY_BROKER), int(queue_id)) for broker, _, queue_id in split_texts
            ),
        )
    if isinstance(layout, int) or offsets.environment_numbers:
        return Environment.of(name, layout)
    return None
