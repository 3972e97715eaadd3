"""Which feature is tested with which older broker: the marks of tests write it down, and a page shows it as a table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rocketmq_spark.localbroker import distribution

VERSIONS = distribution.OLDER_VERSIONS
YES, REFUSED, ABSENT = "yes", "refused", "–"

# What the newest version does not have any more; all else is tested with it everywhere.
GONE = {"keys and rights of ACL 1.0"}

# What marks wrote down: of each feature, what tests show with each version.
SHOWN: dict[str, dict[str, str]] = {}


def runs(feature: str, versions: Sequence[str] = VERSIONS, cluster: str = "older") -> pytest.MarkDecorator:
    """A test that the feature works with brokers of these versions; with the fixture ``older``, or another one."""
    return _each(feature, versions, YES, cluster)


def refused(feature: str, versions: Sequence[str]) -> pytest.MarkDecorator:
    """A test that asking for the feature is an error with brokers of these versions; with the fixture ``older``."""
    return _each(feature, versions, REFUSED, "older")


def _each(feature: str, versions: Sequence[str], shown: str, cluster: str) -> pytest.MarkDecorator:
    known = SHOWN.setdefault(feature, {})
    for version in versions:
        assert version in VERSIONS, version
        assert known.setdefault(version, shown) == shown, f"{feature} works with {version} and is refused"
    return pytest.mark.parametrize(cluster, versions, indirect=True)


def table() -> str:
    """The rows of the page; import the tests first."""
    rows = [["", *VERSIONS, distribution.VERSION], ["---"] * (len(VERSIONS) + 2)]
    for feature, shown in SHOWN.items():
        newest = ABSENT if feature in GONE else YES
        rows.append([feature, *(shown.get(version, ABSENT) for version in VERSIONS), newest])
    return "".join(f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in rows)
