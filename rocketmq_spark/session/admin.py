"""The public class ``Admin``. The package ``admin`` implements the methods of this class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Unpack

from rocketmq_spark import options as options_table
from rocketmq_spark.admin import AdminTools, brokers, groups, messages, topics
from rocketmq_spark.admin.groups import OffsetTarget
from rocketmq_spark.base import arguments
from rocketmq_spark.base.process import Closeable, OwnerProcess
from rocketmq_spark.base.secret import Secret
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


_EXPECTED_TOPICS = "a list of names of topics"


class AdminBase(Closeable):
    """The common part of the classes below: the options, and ``close``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._owner = OwnerProcess("admin")
        self._closed = False

    @property
    def _tools(self) -> AdminTools:
        self._owner.check(self._closed)
        return client(self._options)

    def _environment_group(self, group: str) -> str:
        """The group's name in the environment of the options."""
        arguments.check_text("group", group, "the name of a consumer group")
        environment = environment_of(self._options)
        return group if environment is None else environment.group(group)

    def _checked_topic(self, topic: str, brokers: Sequence[str] | None = None, queues: int | None = None) -> str:
        """Check the types of arguments that several methods have. Returns the topic."""
        arguments.check_text("topic", topic, "the name of a topic")
        if brokers is not None:
            arguments.check_texts("brokers", brokers, "a list of names of brokers")
        if queues is not None and not arguments.is_integer(queues):
            raise arguments.argument_error("queues", queues, "a whole number")
        return topic

    def close(self) -> None:
        """Close this object; its methods then raise ``ClosedError``. Connections stay open, because other objects may share
        them.
        """
        self._closed = True


class TopicAdmin(AdminBase):
    """Methods about topics."""

    def topics(self, system: bool = False) -> list[str]:
        """Return the names of all topics, sorted.

        Args:
            system: Include RocketMQ's own topics, and those of retries and dead letters.
        """
        return topics.names(self._tools, system)

    def describe_topic(self, topic: str) -> TopicDescription:
        """Return a topic's type, permission, attributes and offsets, as its brokers have them (``mqadmin topicStatus``).

        Args:
            topic: The topic.

        Raises:
            RouteNotFound: There is no such topic. The error names similar topics.
        """
        return topics.describe(self._tools, self._checked_topic(topic))

    def create_topic(
        self,
        topic: str,
        queues: int = 8,
        brokers: Sequence[str] | None = None,
        *,
        attributes: Mapping[str, str] | None = None,
        batch: bool = False,
    ) -> TopicQueues:
        """Create a topic; returns when the name server shows it. Unlike ``mqadmin updateTopic``, this method changes no
        existing topic.

        Args:
            topic: The topic.
            queues: Number of queues on each broker.
            brokers: Only on these brokers (default: all).
            attributes: Attributes, such as ``{"message.type": "FIFO"}`` (default: none).
            batch: Create a batch topic, which stores each batch as one message (docs/batch-topics.md).

        Returns:
            The topic's queues on each broker.

        Raises:
            OptionError: The topic already exists on one of these brokers, or its name is not allowed.
            BrokerNotFound: One of ``brokers`` has no master now.
            NotSupported: ``attributes`` or ``batch`` are given, and a broker is older than RocketMQ 5.0. The older broker has
                created the topic without attributes.
        """
        return topics.create(
            self._tools, self._checked_topic(topic, brokers, queues), queues, brokers, attributes or {}, batch
        )

    def update_topic(
        self,
        topic: str,
        queues: int | None = None,
        brokers: Sequence[str] | None = None,
        *,
        permission: str | None = None,
        order: bool | None = None,
        attributes: Mapping[str, str] | None = None,
    ) -> TopicDescription:
        """Change a topic. Settings that are not given are kept (``mqadmin updateTopic``, ``updateTopicPerm``).

        Args:
            topic: The topic.
            queues: The new number of queues on each broker, as for ``widen_topic``; ``shrink_topic`` removes queues.
            brokers: Only on these brokers (default: all that have the topic).
            permission: ``RW``, ``R`` (brokers reject new messages) or ``W`` (brokers reject readers).
            order: The topic's order flag on brokers. If the flag is set, a broker rejects messages of the topic while the
                broker's ``brokerPermission`` forbids writing. The flag does not affect the order of messages. The
                ``orderTopicConf`` of name servers, which ``mqadmin updateTopic -o true`` also sets, does not change.
            attributes: Attributes to set, such as ``{"message.type": "FIFO"}``; other attributes stay.

        Returns:
            The topic as it is after the change.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: No change is given; the permission is unknown; the topic has more queues than ``queues``; one of
                ``brokers`` does not have the topic; or an attribute cannot be changed.
            NotSupported: ``attributes`` or ``order`` are given, and a broker is older than RocketMQ 5.0. Such a broker has no
                attributes, and takes the order from name servers.
            RocketMQError: Another process changed the topic at the same time, and reverted this change.
        """
        change = topics.TopicChange(queues, permission, order, attributes or {})
        return topics.update(self._tools, self._checked_topic(topic, brokers, queues), change, brokers)

    def widen_topic(self, topic: str, queues: int, brokers: Sequence[str] | None = None) -> TopicQueues:
        """Add queues. Messages stay in their queues; hash selectors use the new queues too, so a key may move to another queue.

        Args:
            topic: The topic. This method does not change the topic's permission and attributes.
            queues: The new number of queues on each broker.
            brokers: Only on these brokers (default: all that have the topic).

        Returns:
            The topic's queues on each broker.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: The topic has more queues than ``queues``, or one of ``brokers`` does not have the topic.
        """
        return topics.widen(self._tools, self._checked_topic(topic, brokers, queues), queues, brokers)

    def shrink_topic(
        self, topic: str, queues: int, brokers: Sequence[str] | None = None, *, preview: bool = False
    ) -> TopicQueues:
        """Remove the queues with the highest ids. The messages of a removed queue cannot be read until the topic has the queue
        again.

        Args:
            topic: The topic.
            queues: The new number of queues on each broker.
            brokers: Only on these brokers (default: all that have the topic).
            preview: Change nothing. The result has the current queues, and the number of messages that would become unreadable.

        Returns:
            The topic's queues on each broker, and how many messages became unreadable (``hidden``).

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: The topic has fewer queues than ``queues``, or one of ``brokers`` does not have the topic.
        """
        return topics.shrink(self._tools, self._checked_topic(topic, brokers, queues), queues, brokers, preview)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic and its messages, on masters, slaves and name servers (``mqadmin deleteTopic``).

        Args:
            topic: The topic.

        Raises:
            RouteNotFound: There is no such topic.
            BrokerNotFound: The master of a broker is not registered. Nothing was deleted.
        """
        topics.delete(self._tools, self._checked_topic(topic))


class GroupAdmin(AdminBase):
    """Methods about consumer groups."""

    def groups(self) -> list[str]:
        """Return the names of all consumer groups that brokers know, sorted, without RocketMQ's own."""
        return groups.names(self._tools)

    def describe_group(self, group: str) -> GroupDescription:
        """Return settings, members, subscriptions and lag of a group (``mqadmin consumerProgress``, ``consumerConnection``).

        Args:
            group: The consumer group. Members that consume over gRPC are left out, because brokers do not know them.

        Raises:
            GroupNotFound: No broker knows the group. The error names similar groups.
        """
        return groups.describe(self._tools, self._environment_group(group))

    def create_group(
        self, group: str, brokers: Sequence[str] | None = None, settings: Mapping[str, object] | None = None
    ) -> None:
        """Create a group, or replace its settings (``mqadmin updateSubGroup``).

        Args:
            group: The consumer group.
            brokers: Only on these brokers (default: all).
            settings: Fields of ``SubscriptionGroupConfig``, such as ``{"retryMaxTimes": 3}``; other fields get the brokers'
                defaults.
        """
        self._tools.admin.create_group(self._environment_group(group), brokers, settings)

    def delete_group(self, group: str, *, topics: bool = False, force: bool = False) -> None:
        """Delete a group's settings and offsets on all masters (``mqadmin deleteSubGroup -r true``).

        Args:
            group: The consumer group.
            topics: Also delete the topics of its retries and dead letters, with their messages; ``mqadmin`` with ``-c``
                always deletes them.
            force: Delete the group although it has members. When a member reconnects, a broker creates the group again, unless
                the broker's setting ``autoCreateSubscriptionGroup`` is false.

        Raises:
            GroupNotFound: No broker knows the group.
            OptionError: The group is one of RocketMQ's own.
            BrokerNotFound: The master of a broker is not registered. Nothing was deleted.
            OffsetError: The group has members, and ``force`` is not set. Members that consume over gRPC are not counted, because
                brokers do not know them.
        """
        groups.delete(self._tools, self._environment_group(group), topics, force)

    def offsets(self, group: str, topics: Sequence[str] = ()) -> dict[MessageQueue, int | None]:
        """Return the committed offset of each queue, at which the group continues; None for a queue without a committed offset.

        Args:
            group: The consumer group.
            topics: Only these topics (default: all topics in which the group has offsets, also its retry topic).

        Raises:
            OffsetError: The group has no offsets in these topics.
        """
        arguments.check_texts("topics", topics, _EXPECTED_TOPICS)
        return groups.committed_offsets(self._tools, self._environment_group(group), topics)

    def set_offsets(
        self, group: str, offsets: Mapping[MessageQueue, int], *, preview: bool = False, force: bool = False
    ) -> list[OffsetChange]:
        """Set committed offsets, and read them back.

        Args:
            group: The consumer group. This method creates the group on brokers that do not know it.
            offsets: The offset to read next, by queue: -2 for the first offset, -1 for the end. All other queues stay unchanged.
            preview: Change nothing, and return what would change.
            force: Set the offsets although the group has members. The members soon commit their own offsets again.

        Returns:
            The old and the new offset of each queue.

        Raises:
            OffsetError: A queue has no such offset, the group has members, or a broker did not store an offset.
        """
        arguments.check_instance("offsets", offsets, Mapping, "a dict of offsets by MessageQueue")
        return self._change_offsets(group, (), offsets, preview, force)

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

        ``mqadmin resetOffsetByTime`` makes running members seek. This method sets the offsets on brokers, so stop the members
        first.

        Args:
            group: The consumer group.
            to: ``earliest`` or -2, ``latest`` or -1, a time in ms since 1970, or a ``datetime`` with a zone.
            topics: Only these topics (default: all topics in which the group has offsets, except its retry topic).
            preview: Change nothing, and return what would change.
            force: Set the offsets although the group has members. The members soon commit their own offsets again.

        Returns:
            The old and the new offset of each queue.

        Raises:
            OptionError: ``to`` is of another type, or a ``datetime`` without a zone; or ``topics`` is not a list of names.
            OffsetError: ``to`` is an unknown text or another negative number; the group has members, and ``force`` is not set;
                the group has no offsets, and no ``topics`` are given; or a broker did not store an offset.
        """
        if isinstance(to, datetime):
            if to.tzinfo is None:
                raise OptionError(f"to is {to!r}; expected a datetime with a zone")
            to = max(0, int(to.timestamp() * 1000))  # -1 and -2 have other meanings
        arguments.check_texts("topics", topics, _EXPECTED_TOPICS)
        return self._change_offsets(group, topics, to, preview, force)

    def _change_offsets(
        self, group: str, topics: Sequence[str], target: OffsetTarget, preview: bool, force: bool
    ) -> list[OffsetChange]:
        tools, group = self._tools, self._environment_group(group)
        argument = "offsets" if isinstance(target, Mapping) else "to"
        changes = groups.offset_changes(tools, group, topics, target, environment_of(self._options), argument)
        if not preview:
            if not force:
                groups.check_members(group, groups.members(tools, group, [change.queue for change in changes]))
            groups.store_offsets(tools, group, {change.queue: change.after for change in changes})
            groups.warn_of_unseen_members(tools, group, [change.queue for change in changes])
        return changes


class BrokerAdmin(AdminBase):
    """Brokers, and the messages that they store."""

    def message(self, message_id: str, topic: str | None = None) -> ReceivedMessage:
        """Return one stored message (``mqadmin queryMsgById`` and ``queryMsgByUniqueKey``).

        Args:
            message_id: The id that the broker gave the message (``SendResult.offset_msg_id``), or, if ``topic`` is given, the
                id that the producer gave it (``SendResult.msg_id``). Of several messages with the same id, the oldest is
                returned.
            topic: The topic of the message. Brokers with ACL require it.

        Raises:
            NotFound: There is no such message, or brokers have deleted it.
        """
        arguments.check_text("message_id", message_id, "the id of a message")
        return messages.message_by_id(self._tools, message_id, topic)

    def find_messages(
        self,
        topic: str,
        key: str | None = None,
        *,
        begin_ms: int | None = None,
        end_ms: int | None = None,
        limit: int = 32,
    ) -> list[ReceivedMessage]:
        """Return messages of a topic that have a key (``mqadmin queryMsgByKey``), or were stored in a period, oldest first.

        Args:
            topic: The topic.
            key: One of the message's business keys, or the id that the message's producer gave it. Without ``key``, the method
                returns the messages of the period from ``begin_ms`` to ``end_ms``: of all queues, or with option
                ``environment``, of the queues of that environment.
            begin_ms: Only messages stored at or after this time, in ms since 1970.
            end_ms: Only messages stored at or before this time, in ms since 1970. By default, the period is open at both ends.
            limit: With a key, at most this many messages of each broker, the newest ones; 1 to 64, the limit of brokers.
                Without a key, at most this many messages in all, the oldest; 1 to 10,000.

        Raises:
            OptionError: ``limit`` is out of range, or ``end_ms`` is before ``begin_ms``.
        """
        self._checked_topic(topic)
        if key is not None:
            arguments.check_text("key", key)
            return messages.messages_by_key(self._tools, topic, key, begin_ms, end_ms, limit)
        environment = environment_of(self._options)
        return messages.messages_of_time(self._tools, topic, begin_ms, end_ms, limit, environment)

    def cluster(self) -> list[BrokerData]:
        """Return the brokers that the name server knows: names, clusters and addresses by broker id (0: the master)."""
        return brokers.cluster(self._tools)

    def brokers(self) -> list[BrokerState]:
        """Return what each broker, master or slave, reports of itself (``mqadmin brokerStatus``).

        Requests are sent in parallel. The state of a broker that does not answer has an ``error``.
        """
        return brokers.states(self._tools)

    def broker_config(self, broker: str) -> dict[str, Secret]:
        """Return all settings of a broker's master (``mqadmin getBrokerConfig``).

        The settings include passwords. A ``Secret`` is a str that is hidden when it is formatted; ``reveal()`` returns the text.

        Args:
            broker: The broker's name.

        Raises:
            OptionError: Others on the network could read the answer: ``tls`` is not set, and the broker is on another machine. An
                explicit ``tls=false`` permits the request.
            BrokerNotFound: No master of the broker is registered.
        """
        return self._tools.admin.broker_config(broker, allow_plain_text=True)

    def update_broker_config(self, broker: str, values: Mapping[str, str]) -> dict[str, Secret]:
        """Change settings of a broker's master while it runs, and return all settings (``mqadmin updateBrokerConfig``).

        The broker also writes the settings to its configuration file. Without TLS, this method does not request the settings of
        a broker on another machine, because the settings include passwords. In this case, the method sends the values
        unchecked, and returns an empty dict.

        Args:
            broker: The broker's name.
            values: The new values, by the names of the settings.

        Raises:
            OptionError: The broker does not have one of the settings, and nothing was changed. Or the broker kept the old value
                of a setting, and changed the other settings.
        """
        return brokers.update_config(self._tools, broker, values)


class AccessAdmin(AdminBase):
    """Users and policies of ACL 2.0 (RocketMQ 5.3 and newer). Each broker stores its own users and policies, so requests
    go to all masters."""

    def users(self) -> list[UserAccount]:
        """Return all users, without their passwords (``mqadmin listUser``).

        Raises:
            OptionError: Others on the network could read the passwords in the answers (see ``broker_config``).
        """
        return brokers.users(self._tools)

    def set_user(
        self, name: str, password: str | None = None, *, is_super: bool | None = None, enabled: bool | None = None
    ) -> list[UserAccount]:
        """Create or change a user; None leaves a property unchanged (``mqadmin createUser``, ``updateUser``).

        Args:
            name: The user name.
            password: The password. Required to create a user.
            is_super: Whether the user may do everything; by default, a new user may not.
            enabled: Whether the user may connect; by default, a new user may.

        Returns:
            The user as brokers have it now. With ``tls=false``, the user is not requested from the brokers, because their
            answers would contain the stored password. In this case, a property that was not given is None.

        Raises:
            OptionError: The user does not exist on a broker, and ``password`` is None; ``password`` is empty; or others on the
                network could read the password (see ``broker_config``).
            NotSupported: A broker is older than 5.3; or the user exists on a broker of 5.3.0 or 5.3.1, which cannot change users.
        """
        return brokers.set_user(self._tools, name, password, is_super, enabled)

    def delete_user(self, name: str) -> None:
        """Delete the user ``name`` and its policies (``mqadmin deleteUser``). Raises ``OptionError`` if there is no such user,
        or if others on the network could read passwords (see ``broker_config``).
        """
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
            actions: One or more of ``All``, ``Pub``, ``Sub``, ``Create``, ``Update``, ``Delete``, ``Get``, ``List``.
            allowed: Whether the actions are allowed; False denies the actions.
            sources: The policy applies only to clients with these addresses or networks (default: all).

        Returns:
            All policies of the user.

        Raises:
            OptionError: The resource, an action or a source is invalid, or a broker does not have the user. Nothing was changed.
        """
        return brokers.set_policy(self._tools, user, resource, actions, allowed, sources)

    def delete_policy(self, user: str, resource: str) -> None:
        """Delete the policy of a ``user`` for a ``resource`` (``mqadmin deleteAcl``). Raises ``OptionError`` if there is no
        such policy.
        """
        brokers.delete_policy(self._tools, user, resource)


class Admin(TopicAdmin, GroupAdmin, BrokerAdmin, AccessAdmin):
    """Administers a cluster: topics, consumer groups, stored messages, brokers, users. An ``Admin`` connects when a method is
    first called.

    Args:
        name_server: ``host:port``, several separated by ``;``. Required.
        options: Connection options (docs/options.md), in snake_case or camelCase: TLS, keys, namespace, timeouts. Durations are
            milliseconds or text (``3s``). With option ``environment``, a group name means the group of that environment's
            consumers, and offsets are set only in the queues of that environment.

    Raises:
        OptionError: An option is unknown, has a wrong value or does not belong to ``Admin``. Lists all problems.
    """

    def __init__(self, name_server: str | None = None, **options: Unpack[AdminOptions]) -> None:
        keywords: dict[str, Any] = {"name_server": name_server, **options}
        super().__init__(options_table.parse(keywords, keywords=True).for_role("cluster admin"))
