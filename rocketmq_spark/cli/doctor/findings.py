"""``Finding``, the result of one check, and the checks of this machine: Java, Python and packages. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import NamedTuple

from rocketmq_spark.base import extras
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


# What the extra ``spark`` needs, and from which version on something does not go well with us.
_BOUNDS = {name: (low, high) for name, low, high in map(extras.bounds, extras.REQUIREMENTS[extras.SPARK])}
OLDEST = {name: low for name, (low, _) in _BOUNDS.items()}
TOO_NEW = {name: high for name, (_, high) in _BOUNDS.items() if high}


def java(found: tuple[str, int] | RocketMQError) -> Finding:
    """Its path and version, or why there is none."""
    if isinstance(found, RocketMQError):
        return broken("java", found.message, found.remedy or "Install a Java runtime")
    return ok("java", f"Java {found[1]}, {found[0]}")


def python(version: str, versions: Mapping[str, str | None]) -> Finding:
    """``versions`` are those of packages by name, None where one is missing."""
    packages = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    lacking = [name for name, number in versions.items() if number is None and name in OLDEST]
    old = [n for n, v in versions.items() if v is not None and n in OLDEST and _parts(v) < OLDEST[n]]
    new = [n for n, v in versions.items() if v is not None and n in TOO_NEW and _parts(v) >= TOO_NEW[n]]
    if lacking or old:
        wanted = " ".join(f"'{name}>={'.'.join(map(str, OLDEST[name]))}'" for name in (*lacking, *old))
        return broken("python", f"Python {version}, {packages}; missing or too old: {', '.join((*lacking, *old))}",
                      f"pip install {wanted}")  # fmt: skip
    if new:
        name = new[0]
        return advice("python", f"Python {version}, {packages}; PySpark does not go with {name} {versions[name]} yet",
                      f"pip install '{name}<{TOO_NEW[name][0]}'")  # fmt: skip
    return ok("python", f"Python {version}, {packages}")


def workers(program: str, executable: str, can_import: bool) -> Finding:
    """The Python that Spark gives its workers."""
    if can_import:
        return ok("workers", f"Spark's workers on this machine run {program}, which has this package")
    return broken(
        "workers",
        f"Spark's workers on this machine run {program}, which cannot import rocketmq_spark and pyarrow",
        f"Activate the virtual environment, or set PYSPARK_PYTHON={executable}",
    )


def _parts(version: str) -> tuple[int, ...]:
    """The leading numbers: ``4.3.0.dev1`` is (4, 3, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
