"""``explain(exception)`` returns the one line of a PySpark exception that has the cause and the remedy.

Spark wraps the error of a Python task or a source in a Python traceback, a JVM stack and a plan. The returned line is the last
line with an error code of this package. Without such a line, ``explain`` recognizes known problems of Spark and adds their
remedies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.options.names import KAFKA_SOURCE_COLUMNS, kafka_column_hint

if TYPE_CHECKING:
    pass


# A line with an error code of this package, with the lines below it that list problems.
_ERROR_LINE = re.compile(r"\[ROCKETMQ_[A-Z_]+\][^\n]*(?:\n[ \t]+- [^\n]*)*")


_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}\b.*$")


# The last line of a traceback, which names the class of the error; frames are indented.
_PYTHON_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: [^\n]*)?$", re.MULTILINE
)


# Known problems of Spark, and their remedies.
_KNOWN_PROBLEMS = (
    (
        r"DATA_SOURCE_NOT_FOUND|No module named '(?:rocketmq_spark|pyspark_rocketmq|pyarrow)'",
        "Spark's workers run a Python that lacks rocketmq-spark or pyarrow. Set PYSPARK_PYTHON to the python of a virtual "
        "environment with both packages before the session is created, or call register(spark). "
        "PySpark before 4.0 has no data sources in Python: read with read_rocketmq",
    ),
    (
        r"Illegal size \d+ of collection",
        "two streams started at once and broke Spark's driver. Restart it, and call register(spark) before the first "
        "stream (docs/upstream.md)",
    ),
    (
        r"Class is not registered: org\.apache\.spark\.sql\.catalyst\."
        r"(?:util\.(?:GenericArrayData|ArrayBasedMapData)|expressions\.GenericInternalRow)",
        "spark.kryo.registrationRequired is set, and Kryo does not know the classes of Spark's rows, arrays and maps; call "
        "register(spark) before the query starts, or set spark.kryo.classesToRegister to "
        "org.apache.spark.sql.catalyst.util.GenericArrayData,org.apache.spark.sql.catalyst.util.ArrayBasedMapData,"
        "org.apache.spark.sql.catalyst.expressions.GenericInternalRow",
    ),
    (
        r"\[UNSUPPORTED_DATA_SOURCE_SAVE_MODE\].*rocketmq",
        'a topic takes appended rows only. Write with .mode("append"), or with write_rocketmq(df, …), which needs no mode',
    ),
    (
        r"rocketmq does not support Update mode",
        "a topic takes appended rows only. Write the updates with foreachBatch(foreach_batch_writer(…))",
    ),
    (
        r"Data source rocketmq does not support continuous processing",
        "Python data sources do not support it. Use trigger(processingTime=…), and low_latency_conf() for small batches",
    ),
    (
        r"failed to connect back",
        "a Python worker did not start within Spark's 10 s. Is the machine overloaded, or the folder of Python slow? Start "
        "the query again",
    ),
)


# A name that Spark could not resolve, with its parts in backticks or in quotes.
_UNRESOLVED_NAME_PATTERNS = (
    re.compile(r".*\[UNRESOLVED_COLUMN\b.* with name ((?:`[^`]*`\.)*`[^`]*`) cannot be resolved"),
    re.compile(r'.*\[UNRESOLVED_COLUMN_AMONG_FIELD_NAMES\] Cannot resolve column name "([^"]*)" among'),
)


# Matches the error for an unknown attribute of a DataFrame. This error does not name the DataFrame.
_UNKNOWN_ATTRIBUTE = re.compile(r".*\[ATTRIBUTE_NOT_SUPPORTED\] Attribute `([^`]*)` is not supported")


# The number of characters of a line that are searched. Expressions with several ``.*`` take long for a long line, and the line
# may contain any text of a server or of a message.
_MAX_LINE_CHARACTERS = 16_384


# Names of columns in an error: quoted, in a list, or with a number in a plan.
_OWN_COLUMN = re.compile(r"[`(\[ ](?:brokerName|queueId|queueOffset|body|bornTimestamp|storeTimestamp|msgId)(?=[`,)#])")


_KAFKA_COLUMN = re.compile(r"[`(\[ ](key|value|partition|offset|timestampType)(?=[`,)#])")


_FORMAT_NAME = re.compile(r"\brocketmq\b")


_KAFKA_COLUMNS_OPTION = re.compile(r"\bkafka_?columns\s*=\s*(?:true|yes|on|1)\b", re.IGNORECASE)


def explain(exception: BaseException) -> str:
    """Return the one useful line of ``exception``, which PySpark may have wrapped: the cause, and the remedy if known.

    The exception may contain several useful lines. The function returns the first of the following that it finds: the
    rocketmq-spark error that the driver or a task raised, with its code and all of its problems; a known problem of Spark with
    its remedy; a column of Spark's Kafka source that is missing, with the column that replaces it; the last line of a Python
    error in a task; the first line of the exception.
    """
    chain = list(_chain(exception))
    for error in chain:
        if isinstance(error, RocketMQError):
            return _one_line(str(error))
    texts = [str(error) for error in chain]
    for text in texts:
        error_lines = _ERROR_LINE.findall(text)
        if error_lines:
            return _one_line(error_lines[-1])
    for text in texts:
        for pattern, remedy in _KNOWN_PROBLEMS:
            matching_line = next((line for line in _lines(text) if re.search(pattern, line)), None)
            if matching_line is not None:
                return f"{_one_line(matching_line).rstrip('.')}: {remedy}"
    for text in texts:
        if unresolved_line := _unresolved_column_line(text):
            return unresolved_line
    for text in texts:
        python_errors = _PYTHON_ERROR.findall(text) if "Traceback (most recent call last)" in text else ()
        if python_errors:
            return _one_line(python_errors[-1])
    return next(
        (_one_line(line) for text in texts for line in text.splitlines() if line.strip()), type(exception).__name__
    )


def _lines(text: str) -> Iterator[str]:
    return (line[:_MAX_LINE_CHARACTERS] for line in text.split("\n"))


def _unresolved_column_line(text: str) -> str:
    """Return the line of an error about a missing column of Spark's Kafka source, with the column that replaces it; otherwise
    ``""``.
    """
    for line in _lines(text):
        if attribute := _UNKNOWN_ATTRIBUTE.match(line):
            replacement = kafka_column_hint(attribute[1]).removeprefix("; ")
            return (
                f"{_one_line(attribute[0])}. If this is a frame of format rocketmq: {replacement}"
                if replacement
                else ""
            )
        name_match = next(filter(None, (pattern.match(line) for pattern in _UNRESOLVED_NAME_PATTERNS)), None)
        if name_match is not None:
            parts = [part.strip("`") for part in name_match[1].split(".")]
            name = next((part for part in parts if part.lower() in (*KAFKA_SOURCE_COLUMNS, "topic")), "")
            replacement = _replacement_of_column(name, text) if name else ""
            head = line[: name_match.end()].removesuffix(" among")
            return f"{_one_line(head)}: {replacement}" if replacement else ""
    return ""


def _replacement_of_column(name: str, error: str) -> str:
    """Return what replaces a missing column of Spark's Kafka source; empty if the DataFrame is not from format rocketmq.

    With ``kafkaColumns``, the DataFrame has Kafka's columns instead of RocketMQ's columns.
    """
    kafka_columns = set(_KAFKA_COLUMN.findall(error.replace(f"`{name}`", "")))
    has_own_column = bool(_OWN_COLUMN.search(error))
    has_kafka_columns = bool(_KAFKA_COLUMNS_OPTION.search(error)) or (not has_own_column and len(kafka_columns) > 1)
    if not (has_own_column or has_kafka_columns or _FORMAT_NAME.search(error)):
        return ""
    if has_kafka_columns and name.lower() == "headers":
        return "set option 'includeHeaders' = true, and keep 'headers' in each select"
    if has_kafka_columns or name.lower() == "topic":
        return f"the source has a column {name!r}, unless option 'columns' omits it; keep it in each select"
    return kafka_column_hint(name).removeprefix("; ")


def _chain(exception: BaseException) -> Iterator[BaseException]:
    """Yield the exception, then its causes."""
    seen: set[int] = set()
    error: BaseException | None = exception
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _one_line(text: str) -> str:
    head, *problems = re.split(r"\n[ \t]+- ", text.strip())
    line = " ".join((head.rstrip() + " " + "; ".join(problems)).split())
    return _SQL_STATE.sub("", line)
