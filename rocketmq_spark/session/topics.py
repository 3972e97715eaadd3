"""Base classes of ``Admin``: its options, ``close``, and its methods about topics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocketmq_spark.admin import AdminTools, topics
from rocketmq_spark.base import arguments
from rocketmq_spark.base.process import Closing, Owner
from rocketmq_spark.model.admin import TopicDescription, TopicQueues
from rocketmq_spark.options import Options
from rocketmq_spark.queues.environment import environment_of
from rocketmq_spark.session import client


class AdminBase(Closing):
    """Has the options, and is closed with ``close``."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._owner = Owner("admin")
        self._closed = False

    @property
    def _tools(self) -> AdminTools:
        self._owner.check(self._closed)
        return client(self._options)

    def _environment_group(self, group: str) -> str:
        """The group's name in the environment of the options."""
        arguments.text("group", group, "the name of a consumer group")
        environment = environment_of(self._options)
        return group if environment is None else environment.group(group)

    def _checked_topic(self, topic: str, brokers: Sequence[str] | None = None, queues: int | None = None) -> str:
        """Check the types of arguments that several methods have. Returns the topic."""
        arguments.text("topic", topic, "the name of a topic")
        if brokers is not None:
            arguments.texts("brokers", brokers, "a list of names of brokers")
        if queues is not None and not arguments.is_whole(queues):
            raise arguments.wrong("queues", queues, "a whole number")
        return topic

    def close(self) -> None:
        """Close this object; its methods then raise ``ClosedError``. Connections, which the process may share, stay open."""
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
            RouteNotFound: There is no such topic. The error names similar ones.
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
        """Create a topic; returns when the name server shows it. Unlike ``mqadmin updateTopic`` it changes no existing topic.

        Args:
            topic: The topic.
            queues: Number of queues on each broker.
            brokers: Only on these brokers (default: all).
            attributes: Attributes, such as ``{"message.type": "FIFO"}`` (default: none).
            batch: Create a batch topic, which stores each batch as one message (docs/batch-topics.md).

        Returns:
            The topic's queues on each broker.

        Raises:
            OptionError: The topic is on one of these brokers, or its name is not allowed.
            BrokerNotFound: One of ``brokers`` has no master now.
            NotSupported: ``attributes`` or ``batch`` are given, and a broker is older than RocketMQ 5.0. It has created the topic
                without attributes.
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
            brokers: Only on these brokers (default: all that have it).
            permission: ``RW``, ``R`` (brokers reject new messages) or ``W`` (brokers reject readers).
            order: The topic's order flag on brokers. With it, a broker rejects messages of the topic while its own
                ``brokerPermission`` forbids writing. It does not affect the order of messages. The ``orderTopicConf`` of
                name servers, which ``mqadmin updateTopic -o true`` also sets, does not change.
            attributes: Attributes to set, such as ``{"message.type": "FIFO"}``; others stay.

        Returns:
            The topic as it is after the change.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: There is nothing to change, the permission is unknown, the topic has more queues than ``queues`` or is
                not on one of ``brokers``, or an attribute cannot be changed.
            NotSupported: ``attributes`` or ``order`` are given, and a broker is older than RocketMQ 5.0: it has no attributes,
                and takes the order from name servers.
            RocketMQError: Another process changed the topic at the same time, and reverted this change.
        """
        change = topics.TopicChange(queues, permission, order, attributes or {})
        return topics.update(self._tools, self._checked_topic(topic, brokers, queues), change, brokers)

    def widen_topic(self, topic: str, queues: int, brokers: Sequence[str] | None = None) -> TopicQueues:
        """Add queues. Messages stay in their queues; hash selectors use the new queues too, so a key may move to another queue.

        Args:
            topic: The topic. Its permission and attributes stay as they are.
            queues: The new number of queues on each broker.
            brokers: Only on these brokers (default: all that have it).

        Returns:
            The topic's queues on each broker.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: The topic has more queues than ``queues``, or is not on one of ``brokers``.
        """
        return topics.widen(self._tools, self._checked_topic(topic, brokers, queues), queues, brokers)

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
            The topic's queues on each broker, and how many messages became unreadable (``hidden``).

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: The topic has fewer queues than ``queues``, or is not on one of ``brokers``.
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
