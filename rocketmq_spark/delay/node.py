"""Makes a node of the delay service from options: its reader, its store, and its sender."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX, Response
from rocketmq_spark.delay import envelope_records
from rocketmq_spark.delay.commits import REQUEST_TIMEOUT_S, GroupNames
from rocketmq_spark.delay.release import ALL_TOPICS, DEAD_TOPIC, has_default_name
from rocketmq_spark.delay.service import DelayService, NodeTools
from rocketmq_spark.errors import OptionError, RocketMQError
from rocketmq_spark.options import Options
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.session import consumers, spools
from rocketmq_spark.spool.files import COPY_TO_SERVE
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import INNER_TOPIC

DEFAULT_GROUP = "rocketmq_delay"
# Sends in flight: enough for 5,000 messages a second if an answer takes 0.1 s.
MAX_IN_FLIGHT = 512
_GROUP_CHECK_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


def wall_clock_ms() -> int:
    """The time of the system clock, in ms since 1970. Due times are compared with this time, so setting the clock changes when
    messages are sent.
    """
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """A node's folder, the topic of envelopes, the topic for bodies that are not envelopes, and the node's clock ``now_ms``.

    ``topics`` are patterns of the topics to which the node may deliver.
    """

    folder: Path
    topic: str = INNER_TOPIC
    dead_topic: str = DEAD_TOPIC
    now_ms: Callable[[], int] = wall_clock_ms
    topics: tuple[str, ...] = ALL_TOPICS
    resends_dead_letters: bool = False


def purpose_of(group: str) -> str:
    """The ``purpose`` in the ``SpoolOwner`` of a node's folder."""
    return f"the delay service, group {group!r}"


def _check_topics_of_group(member: GroupMember, parsed: Options, topic: str) -> None:
    """Raise ``OptionError`` if a living member of the group reads other topics, or no topic.

    The queues of a topic are shared among all members of a group. Members that do not read the topic would also get queues of
    it, and the messages in these queues would never be sent. All brokers of the topic are queried, because a member may be
    known only to the brokers of its own topics.
    """
    group, name_on_wire = (
        parsed.group,
        scope_of(parsed).name_on_wire,
    )  # the user may have given the topic name that brokers use
    deadline, errors = Deadline.after(_GROUP_CHECK_TIMEOUT_S), dict[str, RocketMQError]()
    for broker in sorted({queue.broker_name for queue in member.queues(topic, deadline)}):
        try:
            subscriptions = member.filters(group, topic, deadline.within(REQUEST_TIMEOUT_S), broker)
        except RocketMQError as e:
            if e.broker_code != Response.CONSUMER_NOT_ONLINE:
                errors[broker] = e
            continue
        other_topics = sorted(
            name
            for name in subscriptions
            if name_on_wire(name) != name_on_wire(topic) and not name.startswith(RETRY_PREFIX)
        )
        if other_topics or name_on_wire(topic) not in map(name_on_wire, subscriptions):
            more_text = f" and {len(other_topics) - 3} more" if len(other_topics) > 3 else ""
            reading_text = f"read {', '.join(other_topics[:3])}{more_text}, and this node would read {topic}"
            raise OptionError(
                f"group {group!r} has members that {reading_text if other_topics else f'do not read {topic}'}: each would get "
                "queues that it does not read",
                remedy="Give the nodes of each inner topic a group of their own (--group)",
            )
    if errors:
        logger.warning(
            "cannot check at %d of the brokers whether group %r has members that do not read %s (with ACL 2.0, the check needs "
            "Get on the group): %s",
            len(errors), group, topic, next(iter(errors.values())),
        )  # fmt: skip


def open_node(node_settings: NodeSettings, **options: object) -> DelayService:
    """Return a node that has joined its group. ``options`` are ``group`` and the options of connections.

    Raises ``OptionError`` if a member of the group does not read this topic, or reads other topics. Logs a warning if a broker
    does not report the members.
    """
    all_options: dict[str, Any] = {"group": DEFAULT_GROUP, **options}
    parsed = options_table.parse(all_options).for_role("pull consumer")
    if parsed.environment is not None and parsed.environment_mode == "queues":
        raise OptionError(
            f"{parsed.environment_source} is {parsed.environment!r}, but with environmentMode=queues one delay service "
            f"serves all environments: in one environment, it would read only some queues of {node_settings.topic}, and never "
            "deliver the messages in the other queues",
            remedy="Start the service without an environment; each message goes to the queues of its sender's environment",
        )
    settings = ProducerSettings.of(options_table.parse(all_options).for_role("producer"))
    for topic in (node_settings.topic, node_settings.dead_topic):
        session.ensure_topic(parsed, topic)
    scope = scope_of(parsed)

    def has_envelopes(topic: str) -> bool:
        return has_default_name(topic) or scope.name_on_wire(topic) == scope.name_on_wire(node_settings.topic)

    rules = envelope_records.DeliveryRules(
        settings, node_settings.dead_topic, node_settings.topics, has_envelopes, scope.name_on_wire(node_settings.topic)
    )
    store = Store(node_settings.folder, use=COPY_TO_SERVE)
    try:
        store.set_owner(spools.owner_of(parsed, purpose_of(parsed.group)))
        member = session.member(parsed)
        _check_topics_of_group(member, parsed, node_settings.topic)
        store.start_target_rules(rules.fingerprint)
        if node_settings.resends_dead_letters:
            store.revive(node_settings.now_ms(), rules.target_of)
        reader_options: dict[str, Any] = {"auto_commit": False, "consume_from_where": "earliest"}
        reader = consumers.PullConsumer(**all_options, **reader_options)
        try:
            reader.subscribe(node_settings.topic)
        except BaseException:
            reader.close()
            raise
    except BaseException:
        store.close()
        raise
    policy = envelope_records.redelivery_policy(rules, MAX_IN_FLIGHT)
    open_spool = partial(spools.open_send_spool, store, session.sender(parsed), settings, node_settings.now_ms, policy)
    make_group = session.committer(parsed).create_group
    tools = NodeTools(
        node_settings.now_ms, partial(session.retention_ms, parsed), make_group, rules, node_settings.topic
    )
    return DelayService(reader, member, GroupNames(parsed.group), store, open_spool, tools)
