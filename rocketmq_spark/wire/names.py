"""Names of topics and groups: which names a broker accepts, which belong to the system, and how namespaces and environments
change them.

The texts of errors begin as those of brokers (``TopicValidator``), so that the user sees the same text wherever a name is
rejected. If a name has characters that are not allowed, the text also has these characters and a legal name.
Namespaces follow ``NamespaceUtil``; the suffix of an environment is the last part of a name.
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

_ILLEGAL_CHARACTERS, _LEGAL_CHARACTER = re.compile("[^%|a-zA-Z0-9_-]+"), re.compile("[%|a-zA-Z0-9_-]")
_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)


def topic_problem(topic: str, scope: Scope | None = None) -> str | None:
    """Why a broker rejects the name, or None. System names are accepted here; see ``is_system_topic``.

    The length includes the namespace and suffix of ``scope``.
    """
    if topic.startswith(_PREFIXES):
        return _problem("topic", topic, scope, MAX_RETRY_OR_DLQ_TOPIC_LENGTH, "DLQ or Retry topic")
    return _problem("topic", topic, scope, MAX_TOPIC_LENGTH)


def group_problem(group: str, scope: Scope | None = None) -> str | None:
    """Why a broker rejects the name of a producer or consumer group, or None. The length includes what ``scope`` adds."""
    return _problem("group", group, scope, MAX_GROUP_LENGTH)


def read_problem(topic: str, scope: Scope | None = None) -> str | None:
    """Why no broker can have a topic of this name, or None. All retry and dead-letter topics are accepted, because the names of
    pop retry topics may contain ``+``, which is not allowed in other names.
    """
    return None if topic.startswith(_PREFIXES) else topic_problem(topic, scope)


def _problem(kind: str, name: str, scope: Scope | None, limit: int, special_kind: str = "") -> str | None:
    if not name.strip():
        return f"The specified {kind} is blank."
    wire_name = name if scope is None else scope.name_on_wire(name)
    for checked_name in (name, wire_name):
        if illegal_characters := dict.fromkeys("".join(_ILLEGAL_CHARACTERS.findall(checked_name))):
            legal = legal_name(checked_name, limit)
            return (
                f"The specified {kind}: {checked_name}, contains illegal characters: {', '.join(map(repr, illegal_characters))}; "
                f"expected letters, digits, '_', '-', '%' and '|'{f', such as {legal!r}' if legal else ''}"
            )
    if len(wire_name) <= limit:
        return None
    description = f"is {special_kind}: {wire_name}, and it's" if special_kind else f": {wire_name}, is"
    return f"The specified {kind}{' ' if special_kind else ''}{description} longer than {kind} max length: {limit}"


def legal_name(name: str, limit: int = MAX_TOPIC_LENGTH) -> str:
    """The name with ``_`` in place of characters that are not allowed; empty if no letter or digit is left."""
    first, last = _LEGAL_CHARACTER.search(name), _LEGAL_CHARACTER.search(name[::-1])
    if first is None or last is None:
        return ""
    legal = _ILLEGAL_CHARACTERS.sub("_", name[first.start() : len(name) - last.start()])[:limit]
    return legal if any(map(str.isalnum, legal)) else ""


def is_system_topic(topic: str) -> bool:
    return topic in SYSTEM_TOPICS or topic.startswith(SYSTEM_TOPIC_PREFIX)


def is_system_group(group: str) -> bool:
    """Whether a group belongs to RocketMQ itself. Applications must not use such groups."""
    return group in SYSTEM_GROUPS or group.startswith(SYSTEM_GROUP_PREFIX)


def is_send_forbidden(topic: str) -> bool:
    """Whether a topic is a system topic that rejects messages of clients."""
    return topic in NO_SEND_TOPICS


def is_user_topic(topic: str, broker_and_cluster_names: Collection[str] = ()) -> bool:
    """Whether a name from a list of all topics is an application's. Every broker and cluster has a topic with its own name."""
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
    """The original topic of a pop retry topic; other topics are unchanged. A group has one pop retry topic for each topic.

    ``topic`` and ``group`` are names on the wire. Mirrors ``KeyBuilder.parseNormalTopic``.
    """
    for separator in "+_":
        if topic.startswith(RETRY_PREFIX + group + separator):
            return topic[len(RETRY_PREFIX + group + separator) :]
    return topic


def wrap_namespace(namespace: str, name: str) -> str:
    """``name`` with ``namespace%`` in front of it, or behind its retry or dead-letter prefix. System names, and names that have
    the namespace, are unchanged.
    """
    if not namespace or not name or _is_system(name):
        return name
    prefix, bare_name = _split(name)
    namespace_prefix = namespace + NAMESPACE_SEPARATOR
    return name if bare_name.startswith(namespace_prefix) else prefix + namespace_prefix + bare_name


def strip_namespace(namespace: str, name: str) -> str:
    """``name`` without this namespace; names in other namespaces are unchanged."""
    if not namespace or not _split(name)[1].startswith(namespace + NAMESPACE_SEPARATOR):
        return name
    return strip_any_namespace(name)


def strip_any_namespace(name: str) -> str:
    """``name`` without any namespace."""
    namespace = namespace_of(name)
    if not namespace:
        return name
    prefix, bare_name = _split(name)
    return prefix + bare_name[len(namespace) + len(NAMESPACE_SEPARATOR) :]


def namespace_of(name: str) -> str:
    """The namespace of a name, or an empty text. If a name without a namespace contains ``%``, returns the part before the
    ``%``.
    """
    if _is_system(name):
        return ""
    namespace, separator, _ = _split(name)[1].partition(NAMESPACE_SEPARATOR)
    return namespace if separator else ""


class Scope(NamedTuple):
    """Converts the user's names to names on the wire, which have a namespace and the suffix of an environment, and back."""

    namespace: str = ""
    suffix: str = ""

    def name_on_wire(self, name: str) -> str:
        """The name of a topic or group on the wire. System names, and names that have the namespace and suffix, are unchanged."""
        wrapped = wrap_namespace(self.namespace, name)
        if not self.suffix or not name or _is_system(name) or wrapped.endswith(self._suffix_ending):
            return wrapped
        return wrapped + self._suffix_ending

    def user_name(self, name: str) -> str:
        """The user's form of a name on the wire. Names of other scopes are unchanged."""
        if not self.suffix:
            return strip_namespace(self.namespace, name)
        is_of_scope = self.has_affixes(name)
        return strip_namespace(self.namespace, name.removesuffix(self._suffix_ending)) if is_of_scope else name

    def has_affixes(self, name: str) -> bool:
        """Whether a name on the wire has the namespace and suffix of this scope."""
        if self.namespace and namespace_of(name) != self.namespace:
            return False
        return not self.suffix or (name.endswith(self._suffix_ending) and not _is_system(name))

    def is_reversible(self, name: str) -> bool:
        """Whether ``name_on_wire(user_name(name))`` is ``name`` again. The result may differ if the name is of another scope."""
        return self.name_on_wire(self.user_name(name)) == name

    def contains(self, name: str) -> bool:
        """Whether a name on the wire has the namespace and suffix of this scope, and can be converted back."""
        return self.has_affixes(name) and self.is_reversible(name)

    @property
    def _suffix_ending(self) -> str:
        return f"_{self.suffix}"


NO_SCOPE = Scope()


def _split(name: str) -> tuple[str, str]:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return prefix, name[len(prefix) :]
    return "", name


def _is_system(name: str) -> bool:
    # As in Java, groups of Java's tools are not system names here: TOOLS_CONSUMER gets a namespace like any other name.
    return is_system_topic(name) or name.startswith(SYSTEM_GROUP_PREFIX)
