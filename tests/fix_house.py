"""How the whole suite runs: quick tests first, and with ``--complete`` a skipped test or a missing broker is a failure."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

from tests.scale import SCALE

# What a test needs, by the fixture that gives it; tests that need less come first.
NEEDS = {"rocketmq": "real broker", "spark": "Spark"}
# Folders and files whose tests start processes of their own come after the quick ones too.
PROCESSES = {"broker", "cli", "localbroker", "notebooks", "spark", "witness", "test_packaging.py", "test_testing.py"}
# A busy machine takes its time: examples have no deadline of their own, tests have pytest's. What has passed passes again
# tomorrow; new examples are looked for with full counts.
settings.register_profile("house", deadline=None, derandomize=SCALE < 1, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

_seen = pytest.StashKey[Counter[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--complete", action="store_true", help="fail unless every kind of test ran and none was skipped")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_seen] = Counter()
    config.pluginmanager.register(_Reports(config.stash[_seen]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        item.user_properties += [("needs", what) for name, what in NEEDS.items() if name in fixtures]
    items.sort(key=_weight)


def _weight(item: pytest.Item) -> tuple[int, bool]:
    order = list(NEEDS.values())
    needs = max((order.index(what) + 1 for _, what in item.user_properties), default=0)
    return needs, not PROCESSES.isdisjoint(item.path.parts)


class _Reports:
    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._seen["skipped"] += 1
        elif report.when == "call" and report.passed:
            self._seen.update(str(what) for name, what in report.user_properties if name == "needs")


def _problems(config: pytest.Config) -> list[str]:
    if not config.getoption("complete"):
        return []
    seen = config.stash[_seen]
    found = [f"no test that needs a {what} has passed" for what in NEEDS.values() if not seen[what]]
    return [f"{seen['skipped']} tests were skipped", *found] if seen["skipped"] else found


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _problems(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for problem in _problems(config):
        terminalreporter.write_line(f"NOT COMPLETE: {problem}", red=True)
