"""Names of topics and groups: which ones a broker takes, which belong to the system, and how namespaces and environments
wrap them.

The texts of refusals are the broker's own (``TopicValidator``), so that a name is refused here as it would be there.
Namespaces follow ``NamespaceUtil``; the suffix of an environment stands behind everything else.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from rocketmq_spark.base.codes import (
    DLQ_PREFIX,
    MAX_GROUP_LENGTH,
    MAX_RETRY_OR_DLQ_TOPIC_LENGTH,
    MAX_TOPIC_LENGTH,
    NAMESPACE_SEPARATOR,
    NO_SEND_TOPICS,
    REPLY_SUFFIX,
    RETRY_PREFIX,
    SYSTEM_GROUP_PREFIX,
    SYSTEM_GROUPS,
    SYSTEM_TOPIC_PREFIX,
    SYSTEM_TOPICS,
)

_LEGAL = re.compile(r"[%|a-zA-Z0-9_-]+")
_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)


def topic_problem(topic: str) -> str | None:
    """Why a broker refuses the name, or None. System names are legal here; see ``is_system_topic``."""
    if not topic.strip():
        return "The specified topic is blank."
    if not _LEGAL.fullmatch(topic):
        return f"The specified topic: {topic}, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if topic.startswith(_PREFIXES):
        if len(topic) > MAX_RETRY_OR_DLQ_TOPIC_LENGTH:
            return (
                f"The specified topic is DLQ or Retry topic: {topic}, and it's longer than topic max length:"
                f" {MAX_RETRY_OR_DLQ_TOPIC_LENGTH}"
            )
    elif len(topic) > MAX_TOPIC_LENGTH:
        return f"The specified topic: {topic}, is longer than topic max length: {MAX_TOPIC_LENGTH}"
    return None


def group_problem(group: str) -> str | None:
    """Why a broker refuses the name of a producer or consumer group, or None."""
    if not group.strip():
        return "The specified group is blank."
    if not _LEGAL.fullmatch(group):
        return f"The specified group: {group}, contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
    if len(group) > MAX_GROUP_LENGTH:
        return f"The specified group: {group}, is longer than group max length: {MAX_GROUP_LENGTH}"
    return None


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    """Groups of RocketMQ's own tools, which an application must not use."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def is_send_forbidden(topic: str) -> bool:
    """System topics that refuse what clients send."""
    return topic in NO_SEND_TOPICS


def is_user_topic(topic: str, broker_and_cluster_names: Collection[str] = ()) -> bool:
    """Whether a name from a list of all topics is an application's. Each broker and cluster has a topic of its name."""
    return not (
        is_system_topic(topic)
        or topic.startswith((*_PREFIXES, "RMQ_SYS_"))
        or topic.endswith(REPLY_SUFFIX)
        or topic in broker_and_cluster_names
    )


def is_user_group(group: str) -> bool:
    """Whether a name from a list of all groups is an application's."""
    return group not in SYSTEM_GROUPS and not group.startswith(SYSTEM_GROUP_PREFIX)


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    return DLQ_PREFIX + group


def normal_topic(topic: str, group: str) -> str:
    """The topic whose messages lie in a retry topic of pops, which a group has for each of its topics; any other as it is.

    Both names as on the wire. Mirrors ``KeyBuilder.parseNormalTopic``.
    """
    for separator in "+_":
        if topic.startswith(RETRY_PREFIX + group + separator):
            return topic[len(RETRY_PREFIX + group + separator) :]
    return topic


def wrap_namespace(namespace: str, name: str) -> str:
    """``namespace%name``, behind a retry or dead-letter prefix; system names and wrapped ones stay as they are."""
    if not namespace or not name or _is_system(name):
        return name
    prefix, bare = _split(name)
    wrapped = namespace + NAMESPACE_SEPARATOR
    return name if bare.startswith(wrapped) else prefix + wrapped + bare


def strip_namespace(namespace: str, name: str) -> str:
    """``name`` without this namespace; names of another one stay as they are."""
    if not namespace or not _split(name)[1].startswith(namespace + NAMESPACE_SEPARATOR):
        return name
    return strip_any_namespace(name)


def strip_any_namespace(name: str) -> str:
    """``name`` without its namespace, whichever it is."""
    namespace = namespace_of(name)
    if not namespace:
        return name
    prefix, bare = _split(name)
    return prefix + bare[len(namespace) + len(NAMESPACE_SEPARATOR) :]


def namespace_of(name: str) -> str:
    """The namespace a name is wrapped in, empty for none. Any ``%`` inside a name looks like one."""
    if _is_system(name):
        return ""
    namespace, separator, _ = _split(name)[1].partition(NAMESPACE_SEPARATOR)
    return namespace if separator else ""


class Scope(NamedTuple):
    """How the names of a client stand on the wire: in a namespace, and with the suffix of an environment."""

    namespace: str = ""
    suffix: str = ""

    def on_wire(self, name: str) -> str:
        """A topic or group as brokers know it; system names, and what stands so already, stay as they are."""
        wrapped = wrap_namespace(self.namespace, name)
        if not self.suffix or not name or _is_system(name) or wrapped.endswith(self._ending):
            return wrapped
        return wrapped + self._ending

    def plain(self, name: str) -> str:
        """A name as the user wrote it; one of another scope stays as it is."""
        if not self.suffix:
            return strip_namespace(self.namespace, name)
        inside = self.holds(name)
        return strip_namespace(self.namespace, name.removesuffix(self._ending)) if inside else name

    def holds(self, name: str) -> bool:
        """Whether a name that brokers gave is of this scope."""
        if self.namespace and namespace_of(name) != self.namespace:
            return False
        return not self.suffix or (name.endswith(self._ending) and not _is_system(name))

    def reaches(self, name: str) -> bool:
        """Whether the user's name of what brokers call ``name`` means just that. One of another scope may look the same."""
        return self.on_wire(self.plain(name)) == name

    def contains(self, name: str) -> bool:
        """Whether a name that brokers gave is of this scope, and the user's name of it means just that."""
        return self.holds(name) and self.reaches(name)

    @property
    def _ending(self) -> str:
        return f"_{self.suffix}"


NO_SCOPE = Scope()


def _split(name: str) -> tuple[str, str]:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def _is_system(name: str) -> bool:
    # Java does not count its fixed tool groups here: TOOLS_CONSUMER is wrapped like any other name.
    return is_system_topic(name) or name.startswith(SYSTEM_GROUP_PREFIX)
