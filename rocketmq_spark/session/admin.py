"""``Admin``: administration for users. What each verb asks and changes stands in the room ``admin``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack

from rocketmq_spark import options as options_table
from rocketmq_spark.admin import brokers, groups, topics
from rocketmq_spark.admin.groups import Wanted
from rocketmq_spark.admin.tools import AdminTools
from rocketmq_spark.base.lifecycle import Closing, Owner
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import BrokerData, MessageQueue, ReceivedMessage
from rocketmq_spark.model.admin import (
    AccessPolicy,
    BrokerState,
    GroupDescription,
    OffsetChange,
    TopicDescription,
    TopicQueues,
    UserAccount,
)
from rocketmq_spark.options import Options
from rocketmq_spark.queues.environment import environment_of
from rocketmq_spark.session import client

if TYPE_CHECKING:
    from rocketmq_spark.options.typed import AdminOptions


class AdminBase(Closing):
    """The options, and whether it was closed."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._owner = Owner("admin")
        self._closed = False

    @property
    def _tools(self) -> AdminTools:
        self._owner.check(self._closed)
        return client(self._options)

    def _own(self, group: str) -> str:
        """The group's name in the environment of the options."""
        environment = environment_of(self._options)
        return group if environment is None else environment.group(group)

    def close(self) -> None:
        """End it: every verb raises ``ClosedError`` from now on. Connections belong to the process, and others may use them."""
        self._closed = True


class TopicAdmin(AdminBase):
    """Verbs on topics."""

    def topics(self, system: bool = False) -> list[str]:
        """Return the names of all topics, sorted.

        Args:
            system: Include RocketMQ's own topics, and those of retries and dead letters.
        """
        return topics.names(self._tools, system)

    def describe_topic(self, topic: str) -> TopicDescription:
        """Return type, permission, attributes and offsets of a topic, as its brokers have them (``mqadmin topicStatus``).

        Args:
            topic: The topic.

        Raises:
            RouteNotFound: There is no such topic. The error names similar ones.
        """
        return topics.describe(self._tools, topic)

    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        brokers: Sequence[str] | None = None,
        *,
        attributes: Mapping[str, str] | None = None,
        batch: bool = False,
    ) -> TopicQueues:
        """Create a topic; returns when the name server shows it. Unlike ``mqadmin updateTopic`` it changes no existing topic.

        Args:
            topic: The topic.
            queues: Number of queues on each broker.
            brokers: Only on these brokers (default: all).
            attributes: Attributes, such as ``{"message.type": "FIFO"}``. Brokers before 5.0 have none: ``NotSupported``.
            batch: Store batches whole (docs/batch-topics.md).

        Raises:
            OptionError: The topic is on one of these brokers, or its name is not allowed.
            BrokerNotFound: One of ``brokers`` has no master now.
        """
        return topics.create(self._tools, topic, queues, brokers, attributes or {}, batch)

    def widen_topic(self, topic: str, queues: int, brokers: Sequence[str] | None = None) -> TopicQueues:
        """Add queues. Messages stay in their queues; hash selectors use the new queues too, so a key may move to another queue.

        Args:
            topic: The topic. Its permission and attributes stay as they are.
            queues: The new number of queues on each broker.
            brokers: Only on these brokers (default: all that have it).

        Raises:
            OptionError: The topic has more queues than ``queues``, or is not on one of ``brokers``.
        """
        return topics.widen(self._tools, topic, queues, brokers)

    def shrink_topic(
        self, topic: str, queues: int, brokers: Sequence[str] | None = None, *, preview: bool = False
    ) -> TopicQueues:
        """Remove the queues with the highest ids. Their messages cannot be read until the topic has these queues again.

        Args:
            topic: The topic.
            queues: The new number of queues on each broker.
            brokers: Only on these brokers (default: all that have it).
            preview: Change nothing. The result has the current queues, and the number of messages that would become unreadable.

        Returns:
            Its queues, and how many messages became unreadable (``hidden``).

        Raises:
            OptionError: The topic has fewer queues than ``queues``, or is not on one of ``brokers``.
        """
        return topics.shrink(self._tools, topic, queues, brokers, preview)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its messages, on masters, slaves and name servers (``mqadmin deleteTopic``).

        Args:
            topic: The topic.

        Raises:
            RouteNotFound: There is no such topic.
        """
        topics.delete(self._tools, topic)


class GroupAdmin(AdminBase):
    """Verbs on consumer groups."""

    def groups(self) -> list[str]:
        """Return the names of all consumer groups that brokers know, sorted, without RocketMQ's own."""
        return groups.names(self._tools)

    def describe_group(self, group: str) -> GroupDescription:
        """Return settings, members, subscriptions and lag of a group (``mqadmin consumerProgress``, ``consumerConnection``).

        Args:
            group: The consumer group.

        Raises:
            GroupNotFound: No broker knows the group. The error names similar groups.
        """
        return groups.describe(self._tools, self._own(group))

    def create_group(
        self, group: str, brokers: Sequence[str] | None = None, settings: Mapping[str, object] | None = None
    ) -> None:
        """Create a group, or replace its settings (``mqadmin updateSubGroup``).

        Args:
            group: The consumer group.
            brokers: Only on these brokers (default: all).
            settings: Fields of ``SubscriptionGroupConfig``, such as ``{"retryMaxTimes": 3}``; others get the brokers' defaults.
        """
        self._tools.admin.create_group(self._own(group), brokers, settings)

    def delete_group(self, group: str, *, topics: bool = False, force: bool = False) -> None:
        """Delete a group's settings and offsets on all masters (``mqadmin deleteSubGroup -r true``).

        Args:
            group: The consumer group.
            topics: Also delete the topics of its retries and dead letters, with their messages. mqadmin always does.
            force: Delete it although it has members. Brokers create it again when a member reconnects, unless they
                are configured not to (``autoCreateSubscriptionGroup``).

        Raises:
            GroupNotFound: No broker knows the group.
            OffsetError: The group has members, and ``force`` is not set.
        """
        groups.delete(self._tools, self._own(group), topics, force)

    def offsets(self, group: str, topics: Sequence[str] = ()) -> dict[MessageQueue, int | None]:
        """Return the committed offset of each queue, which is read next; None for a queue without one.

        Args:
            group: The consumer group.
            topics: Only these topics (default: all in which it has offsets, its retry topic among them).

        Raises:
            OffsetError: The group has no offsets in these topics.
        """
        return groups.of_group(self._tools, self._own(group), topics)

    def set_offsets(
        self, group: str, offsets: Mapping[MessageQueue, int], *, preview: bool = False, force: bool = False
    ) -> list[OffsetChange]:
        """Set committed offsets, and read them back.

        Args:
            group: The consumer group. It is created on brokers that do not know it.
            offsets: By queue, the offset to read next: -2 for the first one, -1 for the end. Other queues stay unchanged.
            preview: Change nothing, and return what would change.
            force: Set them although the group has members, which soon commit their own offsets again.

        Raises:
            OffsetError: A queue has no such offset, the group has members, or a broker did not store an offset.
        """
        return self._change(group, (), offsets, preview, force)

    def reset_offsets(
        self,
        group: str,
        to: str | int | datetime,
        topics: Sequence[str] = (),
        *,
        preview: bool = False,
        force: bool = False,
    ) -> list[OffsetChange]:
        """Set committed offsets to the beginning, to the end, or to the first message stored at or after a time.

        ``mqadmin resetOffsetByTime`` makes running members seek. This method sets the offsets on brokers: stop the members first.

        Args:
            group: The consumer group.
            to: ``earliest``, ``latest``, a time in ms since 1970, or a ``datetime`` with a zone.
            topics: Only these topics (default: all in which it has offsets, without its retry topic).
            preview: Change nothing, and return what would change.
            force: Set them although the group has members, which soon commit their own offsets again.

        Raises:
            OffsetError: The group has no offsets and no ``topics`` are given, has members, or a broker did not store an offset.
        """
        if isinstance(to, datetime):
            if to.tzinfo is None:
                raise OptionError(f"to is {to!r}; expected a datetime with a zone")
            to = int(to.timestamp() * 1000)
        return self._change(group, topics, to, preview, force)

    def _change(
        self, group: str, of_topics: Sequence[str], wanted: Wanted, preview: bool, force: bool
    ) -> list[OffsetChange]:
        tools, group = self._tools, self._own(group)
        changes = groups.offset_changes(tools, group, of_topics, wanted, environment_of(self._options))
        if not preview:
            if not force:
                groups.check_members(group, groups.members(tools, group, [change.queue for change in changes]))
            groups.store_offsets(tools, group, {change.queue: change.after for change in changes})
        return changes


class BrokerAdmin(AdminBase):
    """Brokers, and the messages that they store."""

    def message(self, message_id: str, topic: str | None = None) -> ReceivedMessage:
        """Return one stored message (``mqadmin queryMsgById`` and ``queryMsgByUniqueKey``).

        Args:
            message_id: An offset message id; or with ``topic`` also the id that its producer gave it (``SendResult.msg_id``).
                Of several messages with the same id, the oldest is returned.
            topic: The topic. Brokers with ACL require it.

        Raises:
            NotFound: There is no such message, or brokers have deleted it.
        """
        return topics.message_by_id(self._tools, message_id, topic)

    def find_messages(
        self, topic: str, key: str, *, begin_ms: int | None = None, end_ms: int | None = None, limit: int = 32
    ) -> list[ReceivedMessage]:
        """Return messages of a topic by a key, in the order of their store times (``mqadmin queryMsgByKey``).

        Args:
            topic: The topic.
            key: One of the message's business keys, or the id that its producer gave it.
            begin_ms: Only messages stored at or after this time, in ms since 1970.
            end_ms: Only messages stored until this time, in ms since 1970.
            limit: At most this many messages of each broker, the newest ones; 1 to 64, the limit of brokers.
        """
        return topics.messages_by_key(self._tools, topic, key, begin_ms, end_ms, limit)

    def cluster(self) -> list[BrokerData]:
        """Return the brokers that the name server knows: names, clusters and addresses by broker id (0: the master)."""
        return brokers.cluster(self._tools)

    def brokers(self) -> list[BrokerState]:
        """Return what each broker, master or slave, reports of itself (``mqadmin brokerStatus``).

        All are asked in parallel. The state of a broker that does not answer has an ``error``.
        """
        return brokers.states(self._tools)

    def broker_config(self, broker: str) -> dict[str, str]:
        """Return all settings of a broker's master (``mqadmin getBrokerConfig``).

        Args:
            broker: The broker's name.

        Raises:
            BrokerNotFound: No master of that name is registered.
        """
        return self._tools.admin.broker_config(broker)

    def update_broker_config(self, broker: str, values: Mapping[str, str]) -> dict[str, str]:
        """Change settings of a broker's master while it runs, and return all of them (``mqadmin updateBrokerConfig``).

        The broker also writes them to its configuration file.

        Args:
            broker: The broker's name.
            values: The new values, by the names of the settings.

        Raises:
            OptionError: The broker has no such setting (nothing was changed then), or rejected the value.
        """
        return brokers.update_config(self._tools, broker, values)


class AccessAdmin(AdminBase):
    """Users and policies of ACL 2.0 (RocketMQ 5.3 and newer). Each broker stores its own, so all masters are asked."""

    def users(self) -> list[UserAccount]:
        """Return all users, without their passwords (``mqadmin listUser``)."""
        return brokers.users(self._tools)

    def set_user(
        self, name: str, password: str | None = None, *, is_super: bool | None = None, enabled: bool | None = None
    ) -> list[UserAccount]:
        """Create or change a user; None leaves a property unchanged (``mqadmin createUser``, ``updateUser``).

        Args:
            name: The user name.
            password: The password. Required to create a user.
            is_super: Whether the user may do everything; a new one may not.
            enabled: Whether the user may connect; a new one may.

        Raises:
            OptionError: The user does not exist on a broker, and ``password`` is None.
        """
        return brokers.set_user(self._tools, name, password, is_super, enabled)

    def delete_user(self, name: str) -> None:
        """Delete a user by its ``name``, and its policies (``mqadmin deleteUser``). Raises ``OptionError`` if there is none."""
        brokers.delete_user(self._tools, name)

    def policies(self, user: str | None = None) -> list[AccessPolicy]:
        """Return all policies, or those of one ``user`` (``mqadmin listAcl``)."""
        return brokers.policies(self._tools, user)

    def set_policy(
        self, user: str, resource: str, actions: Sequence[str], *, allowed: bool = True, sources: Sequence[str] = ()
    ) -> list[AccessPolicy]:
        """Allow or deny actions on a resource, in place of the user's policy for that resource (``mqadmin updateAcl``).

        Args:
            user: The user name.
            resource: Such as ``Topic:orders``, ``Group:billing*`` (a prefix) or ``Cluster:*``.
            actions: Of ``All``, ``Pub``, ``Sub``, ``Create``, ``Update``, ``Delete``, ``Get``, ``List``.
            allowed: False denies them.
            sources: Only for clients with these addresses or networks.

        Returns:
            All policies of the user.
        """
        return brokers.set_policy(self._tools, user, resource, actions, allowed, sources)

    def delete_policy(self, user: str, resource: str) -> None:
        """Delete the policy of a ``user`` for a ``resource`` (``mqadmin deleteAcl``). Raises ``OptionError`` if there is none."""
        brokers.delete_policy(self._tools, user, resource)


class Admin(TopicAdmin, GroupAdmin, BrokerAdmin, AccessAdmin):
    """Administers a cluster: topics, consumer groups, stored messages, brokers. Nothing connects before it is used.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required.
        options: Connection options (docs/options.md), in snake_case or camelCase: TLS, keys, namespace, timeouts. Durations are
            milliseconds or text (``3s``). In an ``environment`` groups are those of its own consumers, and offsets are set in
            its queues only.

    Raises:
        OptionError: An option is unknown, has a wrong value or is no connection option. Lists all problems.
    """

    def __init__(self, name_server: str | None = None, **options: Unpack[AdminOptions]) -> None:
        given: dict[str, Any] = {"name_server": name_server, **options}
        super().__init__(options_table.parse(given, keywords=True).for_role("cluster admin"))
