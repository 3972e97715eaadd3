"""Searches text that is not Python (Scala, SQL, shells, cells of notebooks) for lines that must change. Pure."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from rocketmq_spark.cli.kafka_options import (
    GROUP_OPTIONS,
    KAFKA,
    REMEDY_BY_PARTITION_OPTION,
    ROCKETMQ,
    SPARK_KAFKA_OPTIONS,
    TOPIC_OPTIONS,
    Setting,
    replacements,
)
from rocketmq_spark.cli.python_values import UNKNOWN

# The number of a line (from 1; in ``_statement_findings`` from 0), the part that belongs to Kafka, and its replacement.
KafkaFinding = tuple[int, str, str]

USE_FORMAT = 'format("rocketmq").option("kafkaColumns", True)'
USE_SQL = "USING rocketmq OPTIONS (kafkaColumns 'true', …)"
USE_PACKAGE = "no jar: pip install the package in the Python of driver and workers (docs/where-it-runs.md)"
REMOVE_SETTING = "it has no effect: remove it"
APPEND_ONLY = (
    "the sink appends only: write with foreachBatch(foreach_batch_writer(…, kafka_columns=True)) (docs/writing.md)"
)
CHECK_FORMAT = "the format is computed: check whether it may be kafka"
CHECK_TEXT = "check whether this text becomes a format"

JAR_PATTERN = re.compile(r"spark-(?:sql|streaming)-kafka-\d[\w.:-]*|kafka-clients[:-]\d?[\w.:-]*")
_CREATE_PATTERN = re.compile(r"\bcreate\b|^\s*using\b", re.IGNORECASE)
_USING_KAFKA = re.compile(r"\busing\s+[`\"]?kafka\b", re.IGNORECASE)
# A parameter of SQL or of a shell, a field of a format, or an unknown part of a text.
_COMPUTED_SQL = re.compile(rf"\busing\s+(?:[$:{{%?]|{UNKNOWN})[\w{{}}]*", re.IGNORECASE)
_KAFKA_FORMAT = re.compile(r"""format\s*\(\s*["']kafka["']\s*\)""", re.IGNORECASE)
_COMPUTED_FORMAT = re.compile(r"(?<!String)\.format\s*\(\s*(?![\"'])[^\s)][^\n)]{0,60}\)?")
_IO_WORDS = re.compile(r"\b(?:read|readStream|write|writeStream|options?|load|save|start)\b")
_QUOTED_KAFKA = re.compile(r"""["']kafka["']|(?:\bformat\W{1,3}|[=:] ?)kafka\b(?![\w.:/-])""", re.IGNORECASE)
_KAFKA_SETTING = re.compile(r"\bspark\.kafka\.[\w.]+")
_KAFKA_OPTION = re.compile(
    rf"(?<![\w.])(kafka\.[\w.]+|{'|'.join(map(re.escape, sorted(SPARK_KAFKA_OPTIONS)))})\b", re.IGNORECASE
)
_UNSUPPORTED_MODE = re.compile(
    r"""outputMode\s*\(\s*(?:["'](?:update|complete)["']|OutputMode\.(?:Update|Complete)\b)\s*\)?"""
)
_OTHER_FORMAT = re.compile(r"""format\s*\(\s*["'](?!kafka["'])|\busing\s+(?!kafka\b)\w""", re.IGNORECASE)
_ROCKETMQ_FORMAT = re.compile(r"""format\s*\(\s*["']rocketmq["']|\busing\s+rocketmq\b""", re.IGNORECASE)
_OPTION_NAMES = "|".join(map(re.escape, [*REMEDY_BY_PARTITION_OPTION, *TOPIC_OPTIONS, *GROUP_OPTIONS, "topicNames"]))
# An option with its value: "name", "value" in calls, name 'value' in SQL, name=value in shells.
_OPTION_WITH_VALUE = re.compile(
    rf"(?<![\w.])[\"'`]?({_OPTION_NAMES})[\"'`]?(?:\s*(?:,|=|->)\s*|\s+)"
    r"(?:\"\"\"(?P<long>.*?)\"\"\"|\"(?P<double>[^\"\n]*)\"|'(?P<single>[^'\n]*)')",
    re.IGNORECASE | re.DOTALL,
)
# A line that is only a comment, in any language. A space follows the two hyphens of SQL, but not those of a shell's option.
_COMMENT = re.compile(r"^[ \t]*(?://|#|/?\*|--\s).*", re.MULTILINE)
_STATEMENT = re.compile(r"(?:.*?(?:;|\.(?:load|save|start|toTable)\s*\([^\n]*|\n[ \t]*\n)|.+$)", re.DOTALL)


def text_findings(text: str) -> Iterator[KafkaFinding]:
    """Yield the findings, with line numbers from 1."""
    text_without_comments = _COMMENT.sub("//", text)
    first_line = 1
    for statement in _STATEMENT.finditer(text_without_comments):
        for line, kafka_text, replacement in _statement_findings(statement[0]):
            yield first_line + line, kafka_text, replacement
        first_line += statement[0].count("\n")


def sql_findings(text: str, line: int) -> Iterator[KafkaFinding]:
    """Yield the findings of a string that begins in ``line`` of a program, if the string may create a table of Kafka or names
    format rocketmq.
    """
    create_match = _CREATE_PATTERN.search(text)
    is_computed = create_match is not None and _COMPUTED_SQL.search(text, create_match.start())
    is_kafka = create_match is not None and _USING_KAFKA.search(text, create_match.start())
    if is_kafka or is_computed or _ROCKETMQ_FORMAT.search(text):
        yield from (
            (line + number - 1, kafka_text, replacement) for number, kafka_text, replacement in text_findings(text)
        )


def _is_within(spans: list[tuple[int, int]], position: int) -> bool:
    """Whether one of the spans contains the position. The spans ascend and do not overlap."""
    next_index = bisect.bisect_left(spans, (position + 1,))
    return next_index > 0 and position < spans[next_index - 1][1]


def _statement_findings(text: str) -> Iterator[KafkaFinding]:
    """Yield the findings, with line numbers from 0. Options and modes that other formats have, too, are findings only if the
    statement names no other format.
    """
    is_rocketmq = bool(_ROCKETMQ_FORMAT.search(text))
    is_kafka = bool(_KAFKA_FORMAT.search(text) or _USING_KAFKA.search(text))
    includes_shared_options = is_kafka or is_rocketmq or not _OTHER_FORMAT.search(text)
    line_ends = [end.start() for end in re.finditer("\n", text)]
    named_format_spans = sorted(
        match.span() for pattern in (_KAFKA_FORMAT, _USING_KAFKA) for match in pattern.finditer(text)
    )
    for pattern, replacement in (
        (_KAFKA_FORMAT, USE_FORMAT),
        (_USING_KAFKA, USE_SQL),
        (JAR_PATTERN, USE_PACKAGE),
        (_KAFKA_SETTING, REMOVE_SETTING),
        (_COMPUTED_SQL, CHECK_FORMAT),
        *([(_COMPUTED_FORMAT, CHECK_FORMAT)] if _IO_WORDS.search(text) else []),
        (_QUOTED_KAFKA, CHECK_TEXT),
        *([(_UNSUPPORTED_MODE, APPEND_ONLY)] if includes_shared_options else []),
    ):
        for match in pattern.finditer(text):
            if replacement == CHECK_TEXT and _is_within(named_format_spans, match.start()):
                continue
            shown_text = " ".join(match[0].replace(UNKNOWN, "…").split()).removeprefix(".")
            yield bisect.bisect_left(line_ends, match.start()), shown_text, replacement
    format = KAFKA if is_kafka else ROCKETMQ if is_rocketmq else None
    matches_with_values = [
        (match, match["long"] or match["double"] or match["single"] or "")
        for match in _OPTION_WITH_VALUE.finditer(text)
    ]
    option_names = {match[1].lower() for match, _ in matches_with_values}
    settings_with_matches = [
        (match, Setting(match[1], [value], None, format, option_names))
        for match, value in matches_with_values
        if includes_shared_options
    ]
    positions_with_value = {match.start(1) for match, _ in settings_with_matches}
    settings_with_matches += [
        (match, Setting(match[1], [UNKNOWN], None, format, option_names))
        for match in _KAFKA_OPTION.finditer(text)
        if match.start(1) not in positions_with_value
        and (match[1].lower().startswith("kafka.") or (includes_shared_options and not is_rocketmq))
    ]
    for match, setting in settings_with_matches:
        # Without a known format, options named topic and group may belong to something else.
        if format is not None or setting.name.lower() not in ("topic", "group"):
            for replacement in replacements(setting):
                yield bisect.bisect_left(line_ends, match.start(1)), match[1], replacement
