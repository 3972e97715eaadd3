"""What a check says."""

from __future__ import annotations

import enum
from typing import NamedTuple

from rocketmq_spark.errors import RocketMQError


class Level(enum.Enum):
    """``ADVICE`` is what works and could be better, or would matter for some; ``BROKEN`` is what will fail."""

    OK = "ok"
    ADVICE = "advice"
    BROKEN = "broken"


class Finding(NamedTuple):
    """One line: what was looked at, how it is, what was found, and what can be done."""

    check: str
    level: Level
    found: str
    remedy: str | None = None


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def advice(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.ADVICE, found, remedy)


def broken(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, Level.BROKEN, found, remedy)


def failed(check: str, error: RocketMQError, remedy: str) -> Finding:
    """A question that was not answered as it should be; the error's own remedy comes first."""
    words = error.message if not error.remark else f"{error.message}: {error.remark}"
    where = f" (at {error.addr})" if error.addr else ""
    return broken(check, " ".join(f"{words}{where}".split()), error.remedy or remedy)


def code(findings: list[Finding], strict: bool) -> int:
    """The exit code: 1 where something is broken, with ``strict`` also where there is advice."""
    bad = {Level.BROKEN, Level.ADVICE} if strict else {Level.BROKEN}
    return 1 if any(one.level in bad for one in findings) else 0
