"""How the whole suite runs: quick tests first, one session of Spark for all, and nothing skipped in silence."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, core, settings

# What a test needs, by the fixture that gives it; tests that need less come first.
NEEDS = {"rocketmq": "real broker", "spark": "Spark"}
# Folders and files whose tests start processes of their own come after the quick ones too.
PROCESSES = {
    "cli",
    "live",
    "localbroker",
    "notebooks",
    "spark",
    "witness",
    "test_packaging.py",
    "test_testing.py",
    "test_fix_house.py",
}
# And those among them that start Spark without asking for a fixture.
SPARK_PLACES = {"examples", "notebooks", "spark", "test_packaging.py", "test_play.py"}
# The folder whose tests share one session of Spark.
SESSION = "tests/spark/"
# Folders whose single tests take minutes: where files are shared out, they must not be what the last process ends with.
LONG = {"kill", "chaos", "notebooks", "examples"}
# Clusters that tests share (fix_clusters), by the names of their fixtures, in the order in which their tests run.
SHARED = ("secured", "encrypted", "elsewhere", "slaved", "two_brokers", "proxied")
# Fixtures that start servers, and those that start Spark.
CLUSTERS = {*SHARED, "make_cluster", "forgetful", "guarded", "killable", "growing", "hasty", "rooms", "sick"}
SPARKS = {"spark", "start_script", "run_script"}
# What a mark means, and which fixtures give it; ``property`` goes to what hypothesis runs.
MARKS: dict[str, tuple[str, set[str]]] = {
    "live": ("needs a real broker", {"rocketmq", *CLUSTERS}),
    "spark": ("needs Spark", SPARKS),
    "slow": ("starts servers, Spark or processes of its own", SPARKS | CLUSTERS),
    "property": ("examples are made by hypothesis", set()),
}
# .ci/run sets it: what has passed there passes again. Everywhere else each run looks at new examples, and says its seed.
FIXED = os.environ.get("ROCKETMQ_SPARK_TEST_FIXED") == "1"
# A busy machine takes its time: examples have no deadline of their own, tests have pytest's.
settings.register_profile("house", deadline=None, derandomize=FIXED, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

_seen = pytest.StashKey[Counter[str]]()
_seed = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--complete", action="store_true", help="fail when a test was skipped, and unless every kind of test ran"
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, (meaning, _) in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if not FIXED:
        # As hypothesis does with its own option, whose value comes first.
        given = getattr(config, "workerinput", {}).get("seed") or config.getoption("--hypothesis-seed", None)
        config.stash[_seed] = str(given or random.SystemRandom().getrandbits(32))
        core.global_force_seed = int(config.stash[_seed])
    config.stash[_seen] = Counter()
    config.pluginmanager.register(_Reports(config.stash[_seen]))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of xdist take the seed that is told."""
    node.workerinput["seed"] = node.config.stash.get(_seed, None)


def pytest_report_header(config: pytest.Config) -> list[str]:
    if _seed not in config.stash:
        return []
    seed = config.stash[_seed]
    return [f"examples of hypothesis: seed {seed} (again: --hypothesis-seed={seed})"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file, as ``--dist loadfile``, but all files of one Spark session go to one process.

    They go out as they were collected, not by how many tests a file has: see ``pytest_collection_modifyitems``.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return SESSION if file.startswith(SESSION) else file

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in marks_of(item):
            item.add_marker(name)
        fixtures = getattr(item, "fixturenames", ())
        item.user_properties += [("needs", what) for name, what in NEEDS.items() if name in fixtures]
    items.sort(key=_weight)
    if items and hasattr(items[0].config, "workerinput"):
        # A file's place is that of its last test. Of a file tests keep their order: they may share what those before them leave.
        places = {item.path: -place for place, item in enumerate(items)}
        items.sort(key=lambda item: (LONG.isdisjoint(item.path.parts), places[item.path]))


def marks_of(item: pytest.Item) -> set[str]:
    """The marks that a test earns by its fixtures and its folder."""
    fixtures = set(getattr(item, "fixturenames", ()))
    found = {name for name, (_, given) in MARKS.items() if fixtures & given}
    if not PROCESSES.isdisjoint(item.path.parts):
        found.add("slow")
    if not SPARK_PLACES.isdisjoint(item.path.parts):
        found.add("spark")
    if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        found.add("property")
    return found


def _weight(item: pytest.Item) -> tuple[int, bool, int]:
    order = list(NEEDS.values())
    needs = max((order.index(what) + 1 for _, what in item.user_properties), default=0)
    fixtures = getattr(item, "fixturenames", ())
    shared = next((at for at, name in enumerate(SHARED, 1) if name in fixtures), 0)
    return needs, not PROCESSES.isdisjoint(item.path.parts), shared


class _Reports:
    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._seen["skipped"] += 1
        elif report.when == "call" and report.passed:
            self._seen.update(str(what) for name, what in report.user_properties if name == "needs")


def _problems(config: pytest.Config) -> list[str]:
    if not config.getoption("complete") or hasattr(config, "workerinput"):
        return []
    seen = config.stash[_seen]
    skipped = [f"{seen['skipped']} tests were skipped"] if seen["skipped"] else []
    return [*skipped, *(f"no test that needs a {what} has passed" for what in NEEDS.values() if not seen[what])]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _problems(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _seed in config.stash and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"hypothesis had --hypothesis-seed={config.stash[_seed]}")
    for problem in _problems(config):
        terminalreporter.write_line(f"NOT COMPLETE: {problem}", red=True)
