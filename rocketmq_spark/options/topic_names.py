"""Option ``topicNames``: names of topics as another system writes them, and the names that they have in RocketMQ. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from rocketmq_spark.model import MessageQueue

EXACT = "exact"
RULES: dict[str, Callable[[str], str]] = {EXACT: str, "dotsToUnderscores": lambda name: name.replace(".", "_")}
# ``_TOPIC_OPTIONS`` name topics, and ``_OPTIONS_BY_TOPIC`` may have a value for each topic.
_TOPIC_OPTIONS = ("subscribe", "assign", "topic", "allowed_topics")
_OPTIONS_BY_TOPIC = (
    "tags",
    "sql",
    "starting_offsets",
    "starting_offsets_by_timestamp",
    "ending_offsets",
    "ending_offsets_by_timestamp",
)
# Names of topics in Kafka. Dots are the only characters in such names that RocketMQ does not allow.
_KAFKA_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def dots_hint(name: str) -> str:
    """Return the end of a sentence about an illegal name, if a rule makes the name legal; otherwise an empty string."""
    return (
        "; option 'topicNames' = dotsToUnderscores replaces dots" if "." in name and _KAFKA_NAME.fullmatch(name) else ""
    )


class TopicNames:
    """Applies a rule of ``RULES``. It is an error if two names become the same name, because the messages of both would be in
    one topic.

    ``names`` are treated like names of earlier calls.
    """

    def __init__(self, rule: str, names: Iterable[str] = ()) -> None:
        self.rule = rule
        self._name_by_rocketmq_name: dict[str, str] = {}
        for name in names:
            self.rocketmq_name(name)

    @property
    def original_names(self) -> tuple[str, ...]:
        """The names of all calls, as they were given."""
        return tuple(self._name_by_rocketmq_name.values())

    def rocketmq_name(self, name: str) -> str:
        """Return RocketMQ's name of a topic. Raises ``ValueError`` if another name became this name in an earlier call."""
        rocketmq_name = RULES[self.rule](name)
        earlier_name = self._name_by_rocketmq_name.setdefault(rocketmq_name, name)
        if earlier_name != name:
            raise ValueError(
                f"topics {earlier_name!r} and {name!r} are both {rocketmq_name!r} with option 'topicNames' {self.rule}"
            )
        return rocketmq_name


def with_rocketmq_names(field: str, value: Any, rule: str) -> Any:
    """Return the value of an option with RocketMQ's names of topics. Raises ``ValueError`` as ``TopicNames.rocketmq_name``
    does.
    """
    if field in _TOPIC_OPTIONS or (field in _OPTIONS_BY_TOPIC and isinstance(value, dict)):
        return _renamed(value, TopicNames(rule))
    return value


def _renamed(value: Any, names: TopicNames) -> Any:
    if isinstance(value, str):
        return names.rocketmq_name(value)
    if isinstance(value, MessageQueue):
        return value._replace(topic=names.rocketmq_name(value.topic))
    if isinstance(value, dict):
        return {_renamed(key, names): entry for key, entry in value.items()}
    return tuple(_renamed(item, names) for item in value)
