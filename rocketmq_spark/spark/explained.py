"""``explain(exception)``: the one line of a PySpark exception that says what went wrong and what to do.

Spark wraps what a Python task or a source says into a traceback of Python, a stack of the JVM and a plan. The line is in
there, last of all that speak in our name; where none does, a trap that is known has its remedy here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rocketmq_spark.errors import RocketMQError

# Our own line, with those below it that list problems.
_OURS = re.compile(r"\[ROCKETMQ_[A-Z_]+\][^\n]*(?:\n[ \t]+- [^\n]*)*")
_STATE = re.compile(r"\s*SQLSTATE: \w{5}\b.*$")
# The last line of a traceback, which names a class; indented ones are frames.
_OF_PYTHON = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: [^\n]*)?$", re.MULTILINE)
# What Spark says of its own, and what to do.
_KNOWN = (
    (
        r"DATA_SOURCE_NOT_FOUND|No module named '(?:rocketmq_spark|pyspark_rocketmq|pyarrow)'",
        "Spark's workers run a Python that lacks rocketmq-spark or pyarrow. Set PYSPARK_PYTHON to the python of its virtual "
        "environment before the session is made, or call register(spark). The source needs PySpark 4.2",
    ),
    (
        r"Illegal size \d+ of collection",
        "two streams started at once and broke Spark's driver. Start it again, and call register(spark) before the first "
        "stream (docs/upstream.md)",
    ),
    (
        r"\[UNSUPPORTED_DATA_SOURCE_SAVE_MODE\].*rocketmq",
        'a topic takes appended rows only. Write with .mode("append"), or with write_rocketmq(df, …), which needs no mode',
    ),
    (
        r"failed to connect back",
        "a Python worker did not start within Spark's 10 s. Is the machine overloaded, or the folder of Python slow? Start "
        "the query again",
    ),
)


def explain(exception: BaseException) -> str:
    """Return the one useful line of ``exception``, which PySpark may have wrapped: the cause, and the remedy if known.

    That is, in this order: the rocketmq-spark error that the driver or a task raised, with its code and all of its problems;
    a known problem of Spark with its remedy; the last line of a Python error in a task; the first line of the exception.
    """
    chain = list(_chain(exception))
    for one in chain:
        if isinstance(one, RocketMQError):
            return _one_line(str(one))
    texts = [str(one) for one in chain]
    for text in texts:
        ours = _OURS.findall(text)
        if ours:
            return _one_line(ours[-1])
    for text in texts:
        for known, remedy in _KNOWN:
            found = re.search(rf"^.*(?:{known}).*$", text, re.MULTILINE)
            if found:
                return f"{_one_line(found[0]).rstrip('.')}: {remedy}"
    for text in texts:
        said = _OF_PYTHON.findall(text) if "Traceback (most recent call last)" in text else ()
        if said:
            return _one_line(said[-1])
    return next(
        (_one_line(line) for text in texts for line in text.splitlines() if line.strip()), type(exception).__name__
    )


def _chain(exception: BaseException) -> Iterator[BaseException]:
    """The exception, then what it came from."""
    seen: set[int] = set()
    one: BaseException | None = exception
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


def _one_line(text: str) -> str:
    head, *problems = re.split(r"\n[ \t]+- ", text.strip())
    line = " ".join((head.rstrip() + " " + "; ".join(problems)).split())
    return _STATE.sub("", line)
