"""Finds the replacements of options of Spark's Kafka connector, and remains of Kafka in options for RocketMQ. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from typing import NamedTuple

from rocketmq_spark.cli.python_values import UNKNOWN
from rocketmq_spark.options import TABLE
from rocketmq_spark.options.names import KAFKA_OPTIONS
from rocketmq_spark.options.table import TOLERATED_OPTIONS, foreign_option
from rocketmq_spark.wire.names import legal_name

KAFKA, ROCKETMQ = "kafka", "rocketmq"
TOPIC_NAMES_REMEDY = "RocketMQ's names have no dots: add option topicNames=dotsToUnderscores"
_PATTERN_REMEDY = (
    "it matches RocketMQ's names, which have no dots: shop_.* for shop\\..*; "
    "option topicNames is an error with a pattern"
)
_GROUP_NAMES_REMEDY = "RocketMQ's names of groups have only letters, digits, %, |, - and _"
_HEADERS_REMEDY = "the same option, with kafkaColumns"
_SINK_HEADERS_REMEDY = "remove it: the sink always stores a column headers"
_CHECKPOINT_REMEDY = "use a new folder: Kafka offsets have no meaning in RocketMQ"
_TIMES_REMEDY = (
    'by broker and queue: {"orders": {"broker-a": {"0": 1700000000000}}}; or one time for all queues, option '
)
_OFFSETS_REMEDY = 'by broker and queue: {"orders": {"broker-a": {"0": 12}}}; or a time, option '
# Options of both connectors whose values may name partitions.
REMEDY_BY_PARTITION_OPTION = {
    "assign": 'by broker and queue: {"orders": {"broker-a": [0, 1]}}',
    "startingoffsets": f"{_OFFSETS_REMEDY}startingTimestamp",
    "endingoffsets": f"{_OFFSETS_REMEDY}endingTimestamp",
    "startingoffsetsbytimestamp": f"{_TIMES_REMEDY}startingTimestamp",
    "endingoffsetsbytimestamp": f"{_TIMES_REMEDY}endingTimestamp",
}
TOPIC_OPTIONS = ("topic", "subscribe", "subscribepattern")
GROUP_OPTIONS = ("group", "kafka.group.id", "groupidprefix")
# Options that only Spark's Kafka connector has. Other formats have names such as ``timeout`` or ``key``, too.
SPARK_KAFKA_OPTIONS = {"includeheaders", "groupidprefix"} | {
    name for name in KAFKA_OPTIONS if name.startswith(("kafkac", "fetcho"))
}
_PARTITION_NUMBER = re.compile(r'"\s*\d+\s*"\s*:|\[\s*\d')
_ROW_BY_NAME = {name.lower(): row for row in TABLE for name in (row.name, row.field, *row.aliases)}


class Setting(NamedTuple):
    """An option of a source or a sink.

    ``texts`` are its possible values; an unknown part is ``UNKNOWN``. ``role`` is one of ``options.ROLES``, ``format`` is the
    format's name. ``role`` or ``format`` is None if it is unknown. ``option_names`` are the names of all options of the same
    reader or writer, in lower case.
    """

    name: str
    texts: list[str]
    role: str | None
    format: str | None
    option_names: Container[str] = ()


def replacements(setting: Setting) -> Iterator[str]:
    """Yield the replacements of an option; yields nothing if the option stays."""
    lower_name = setting.name.lower()
    row = _ROW_BY_NAME.get(lower_name)
    if lower_name == "includeheaders" and setting.format != ROCKETMQ:
        yield _SINK_HEADERS_REMEDY if setting.role == "sink" else _HEADERS_REMEDY
    elif lower_name == "checkpointlocation":
        if setting.format == KAFKA:
            yield _CHECKPOINT_REMEDY
    elif row is not None and setting.role is not None and setting.role not in row.roles:
        yield _no_option_remedy(setting.role)
    elif lower_name in REMEDY_BY_PARTITION_OPTION:
        yield from _partition_replacements(setting)
    elif lower_name == "subscribepattern":
        if any(has_dots_of_names(text) for text in setting.texts) or _is_computed(setting):
            yield _PATTERN_REMEDY
    elif lower_name in ("topic", "subscribe"):
        if any("." in text for text in setting.texts) and "topicnames" not in setting.option_names:
            yield TOPIC_NAMES_REMEDY
    elif lower_name in GROUP_OPTIONS:
        yield from _group_replacements(setting)
    elif (
        row is None
        and lower_name not in TOLERATED_OPTIONS
        and (setting.format != ROCKETMQ or _belongs_to_kafka_connector(lower_name))
    ):
        replacement = foreign_option(setting.name)
        if replacement is not None:
            names_option = setting.role is not None and not replacement.startswith("remove it")
            yield (
                _no_option_remedy(setting.role)
                if names_option and not _role_accepts(replacement, setting.role)
                else replacement
            )


def _belongs_to_kafka_connector(lower_name: str) -> bool:
    return lower_name.startswith("kafka.") or lower_name in SPARK_KAFKA_OPTIONS


def _no_option_remedy(role: str | None) -> str:
    return f"remove it: a {role} has no such option"


def _is_computed(setting: Setting) -> bool:
    """Whether a part of the value is unknown. Returns False in a program for RocketMQ, because the option has been ported
    already.
    """
    return setting.format != ROCKETMQ and (not setting.texts or any(UNKNOWN in text for text in setting.texts))


def has_dots_of_names(pattern: str) -> bool:
    """Whether a regular expression contains a dot that is meant as the dot of a name, not as any character."""
    return "\\." in pattern or "[.]" in pattern or bool(re.search(r"\w\.\w", pattern))


def _partition_replacements(setting: Setting) -> Iterator[str]:
    if _is_computed(setting) or any(map(_has_partition_numbers, setting.texts)):
        yield REMEDY_BY_PARTITION_OPTION[setting.name.lower()]
    if "topicnames" not in setting.option_names and any(
        "." in topic for text in setting.texts for topic in _topics_of_json(text)
    ):
        yield TOPIC_NAMES_REMEDY


def _has_partition_numbers(text: str) -> bool:
    """Whether a value of ``REMEDY_BY_PARTITION_OPTION`` names partitions as Kafka does: by number, without a broker."""
    try:
        value = json.loads(text, strict=False)  # ``strict`` would reject UNKNOWN, a control character
    except ValueError:
        return bool(_PARTITION_NUMBER.search(text))
    queues = value.values() if isinstance(value, dict) else ()
    return any(isinstance(partitions, list) or _is_by_number(partitions) for partitions in queues)


def _is_by_number(offsets: object) -> bool:
    """Whether the keys of offsets or times are numbers of partitions. In RocketMQ's form, the keys are names of brokers."""
    items = offsets.items() if isinstance(offsets, dict) else ()
    return any(key.isdecimal() and not isinstance(value, dict | list) for key, value in items)


def _topics_of_json(text: str) -> list[str]:
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return []
    return list(value) if isinstance(value, dict) else []


def _group_replacements(setting: Setting) -> Iterator[str]:
    is_kafka_option = setting.name.lower() != "group"
    illegal_names = [text for text in setting.texts if UNKNOWN not in text and legal_name(text) not in (text, "")]
    if setting.role == "sink" and is_kafka_option:
        yield _no_option_remedy("sink")
    elif illegal_names:
        yield f"option group={legal_name(illegal_names[0])}: {_GROUP_NAMES_REMEDY}"
    elif is_kafka_option:
        yield foreign_option(setting.name) or ""


def _role_accepts(replacement: str, role: str | None) -> bool:
    """Whether the role accepts one of the options that ``replacement`` names; True if ``replacement`` names no option."""
    main_part, _, _ = replacement.partition(", with ")
    named_rows = [row for row in TABLE if f"'{row.name}'" in main_part]
    return not named_rows or any(role in row.roles for row in named_rows)
