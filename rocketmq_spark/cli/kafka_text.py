"""Searches a text that is not Python (Scala, SQL, shells, cells of notebooks) for lines that must change, by statements. Pure."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from rocketmq_spark.cli.kafka_options import (
    KAFKA,
    OF_GROUPS,
    OF_PARTITIONS,
    OF_SPARK,
    OF_TOPICS,
    ROCKETMQ,
    Setting,
    replacements,
)
from rocketmq_spark.cli.python_values import UNKNOWN

# The number of a line (from 1, in ``_of_statement`` from 0), what the line has of Kafka, and its replacement.
KafkaUse = tuple[int, str, str]

FORMAT = 'format("rocketmq").option("kafkaColumns", True)'
SQL = "USING rocketmq OPTIONS (kafkaColumns 'true', …)"
PACKAGE = "no jar: pip install the package in the Python of driver and workers (docs/where-it-runs.md)"
SETTING = "it has no effect: remove it"
UPDATE = "the sink appends only: write with foreachBatch(foreach_batch_writer(…, kafka_columns=True)) (docs/writing.md)"
COMPUTED = "the format is computed: check whether it may be kafka"
CHECK = "check whether this text becomes a format"

JAR = re.compile(r"spark-(?:sql|streaming)-kafka-\d[\w.:-]*|kafka-clients[:-]\d?[\w.:-]*")
_CREATE = re.compile(r"\bcreate\b|^\s*using\b", re.IGNORECASE)
_IN_SQL = re.compile(r"\busing\s+[`\"]?kafka\b", re.IGNORECASE)
# A parameter of SQL or of a shell, a field of a format, or an unknown part of a text.
_COMPUTED_SQL = re.compile(rf"\busing\s+(?:[$:{{%?]|{UNKNOWN})[\w{{}}]*", re.IGNORECASE)
_FORMAT = re.compile(r"""format\s*\(\s*["']kafka["']\s*\)""", re.IGNORECASE)
_COMPUTED_FORMAT = re.compile(r"(?<!String)\.format\s*\(\s*(?![\"'])[^\s)][^\n)]{0,60}\)?")
_OF_IO = re.compile(r"\b(?:read|readStream|write|writeStream|options?|load|save|start)\b")
_QUOTED = re.compile(r"""["']kafka["']|(?:\bformat\W{1,3}|[=:] ?)kafka\b(?![\w.:/-])""", re.IGNORECASE)
_SETTING = re.compile(r"\bspark\.kafka\.[\w.]+")
_OPTION = re.compile(rf"(?<![\w.])(kafka\.[\w.]+|{'|'.join(map(re.escape, sorted(OF_SPARK)))})\b", re.IGNORECASE)
_MODE = re.compile(r"""outputMode\s*\(\s*(?:["'](?:update|complete)["']|OutputMode\.(?:Update|Complete)\b)\s*\)?""")
_OTHER_FORMAT = re.compile(r"""format\s*\(\s*["'](?!kafka["'])|\busing\s+(?!kafka\b)\w""", re.IGNORECASE)
_ROCKETMQ = re.compile(r"""format\s*\(\s*["']rocketmq["']|\busing\s+rocketmq\b""", re.IGNORECASE)
_NAMES = "|".join(map(re.escape, [*OF_PARTITIONS, *OF_TOPICS, *OF_GROUPS, "topicNames"]))
# An option with its value: "name", "value" in calls, name 'value' in SQL, name=value in shells.
_PAIR = re.compile(
    rf"(?<![\w.])[\"'`]?({_NAMES})[\"'`]?(?:\s*(?:,|=|->)\s*|\s+)"
    r"(?:\"\"\"(?P<long>.*?)\"\"\"|\"(?P<double>[^\"\n]*)\"|'(?P<single>[^'\n]*)')",
    re.IGNORECASE | re.DOTALL,
)
# A line that is only a comment, in any language. Options of shells begin with two hyphens, too, but without a space.
_COMMENT = re.compile(r"^[ \t]*(?://|#|/?\*|--\s).*", re.MULTILINE)
_STATEMENT = re.compile(r"(?:.*?(?:;|\.(?:load|save|start|toTable)\s*\([^\n]*|\n[ \t]*\n)|.+$)", re.DOTALL)


def of_text(text: str) -> Iterator[KafkaUse]:
    """The findings with line numbers from 1."""
    plain = _COMMENT.sub("//", text)
    first = 1
    for statement in _STATEMENT.finditer(plain):
        for line, kafka, replacement in _of_statement(statement[0]):
            yield first + line, kafka, replacement
        first += statement[0].count("\n")


def of_sql(text: str, line: int) -> Iterator[KafkaUse]:
    """The findings of a string that begins in ``line`` of a program; none unless it may create a table of Kafka, or names format
    rocketmq.
    """
    create = _CREATE.search(text)
    is_computed = create is not None and _COMPUTED_SQL.search(text, create.start())
    is_kafka = create is not None and _IN_SQL.search(text, create.start())
    if is_kafka or is_computed or _ROCKETMQ.search(text):
        yield from ((line + number - 1, kafka, replacement) for number, kafka, replacement in of_text(text))


def _is_within(spans: list[tuple[int, int]], position: int) -> bool:
    """Whether one of the spans contains the position. They ascend and do not overlap."""
    following = bisect.bisect_left(spans, (position + 1,))
    return following > 0 and position < spans[following - 1][1]


def _of_statement(text: str) -> Iterator[KafkaUse]:
    """The findings with line numbers from 0. Options and modes that other formats share count only if the statement names no
    other format.
    """
    is_rocketmq = bool(_ROCKETMQ.search(text))
    is_kafka = bool(_FORMAT.search(text) or _IN_SQL.search(text))
    is_shared = is_kafka or is_rocketmq or not _OTHER_FORMAT.search(text)
    ends = [end.start() for end in re.finditer("\n", text)]
    named = sorted(match.span() for pattern in (_FORMAT, _IN_SQL) for match in pattern.finditer(text))
    for pattern, replacement in (
        (_FORMAT, FORMAT),
        (_IN_SQL, SQL),
        (JAR, PACKAGE),
        (_SETTING, SETTING),
        (_COMPUTED_SQL, COMPUTED),
        *([(_COMPUTED_FORMAT, COMPUTED)] if _OF_IO.search(text) else []),
        (_QUOTED, CHECK),
        *([(_MODE, UPDATE)] if is_shared else []),
    ):
        for match in pattern.finditer(text):
            if replacement == CHECK and _is_within(named, match.start()):
                continue
            shown = " ".join(match[0].replace(UNKNOWN, "…").split()).removeprefix(".")
            yield bisect.bisect_left(ends, match.start()), shown, replacement
    source = KAFKA if is_kafka else ROCKETMQ if is_rocketmq else None
    pairs = [(match, match["long"] or match["double"] or match["single"] or "") for match in _PAIR.finditer(text)]
    others = {match[1].lower() for match, _ in pairs}
    settings = [(match, Setting(match[1], [value], None, source, others)) for match, value in pairs if is_shared]
    valued = {match.start(1) for match, _ in settings}
    settings += [
        (match, Setting(match[1], [UNKNOWN], None, source, others))
        for match in _OPTION.finditer(text)
        if match.start(1) not in valued and (match[1].lower().startswith("kafka.") or (is_shared and not is_rocketmq))
    ]
    for match, setting in settings:
        # Other things have topics and groups, too.
        if source is not None or setting.name.lower() not in ("topic", "group"):
            for replacement in replacements(setting):
                yield bisect.bisect_left(ends, match.start(1)), match[1], replacement
