"""How the whole suite runs: quick tests first, one session of Spark for all, and nothing skipped in silence."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, core, settings

from tests.scale import SCALE, examples

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
    "test_mutants.py",
}
# And those among them that start Spark without asking for a fixture.
SPARK_PLACES = {"examples", "notebooks", "spark", "test_packaging.py", "test_play.py"}
# Folders whose single tests take minutes: where files are shared out, they must not be what the last process ends with.
LONG = {"kill", "chaos", "notebooks", "examples"}
# Folders in memory whose tests wait more than they work.
WAITING = {"client", "consumer", "contracts", "fuzz"}
# The files that take longest, half a minute and more: they come before others that wait, so that no process ends with one.
LENGTHY = (
    "fuzz/test_hostile.py",
    "consumer/test_backlog.py",
    "spark/test_cluster.py",
    "live/producer/test_halves_counted.py",
    "live/consumer/test_retries.py",
    "live/loss/test_truncation.py",
    "live/loss/test_holes.py",
    "live/consumer/test_tools.py",
    "localbroker/test_cluster.py",
    "localbroker/test_cluster_ends.py",
    "live/producer/test_transactions.py",
    "compat/test_access.py",
    "live/producer/test_many_halves.py",
    "localbroker/test_cluster_servers.py",
    "live/grpc/test_kills.py",
    "cli/test_broker.py",
)
# Clusters that tests share (fix_clusters), by the names of their fixtures, in the order in which their tests run.
SHARED = (
    "secured", "encrypted", "elsewhere", "slaved", "older", "timerless", "one_broker", "two_brokers", "proxied", "asking_proxy",
    "hidden_proxy", "local_proxy",
)  # fmt: skip
# What is started once for all tests that ask for it: where tests are shared out, they go to one process, whatever file they
# stand in. The first that a test asks for decides; the rest goes file by file.
SCOPES = ("spark", *SHARED)
# These take a third of the time of all that share a session: with one of their own they are not what the last process ends with.
SPARK_PAGES, PAGES = "spark pages", ("spark/test_guides.py", "spark/test_pages.py")
# What lasts for many tests and is ended with the last of them, since it would go on taking a part of the processor.
LASTING = ("rocketmq", *SCOPES)
# Fixtures that start servers, and those that start Spark.
CLUSTERS = {
    *SHARED,
    "make_cluster",
    "brokers",
    "forgetful",
    "guarded",
    "killable",
    "growing",
    "hasty",
    "holed",
    "rooms",
    "sick",
    "mastered",
    "other",
    "asking",
    "keyed",
    "traced",
    "asking_often",
    "counting",
    "two_proxies",
}
SPARKS = {"spark", "start_script", "run_script"}
# What a mark means, and which fixtures give it; ``property`` goes to what hypothesis runs.
MARKS: dict[str, tuple[str, set[str]]] = {
    "live": ("needs a real broker", {"rocketmq", *CLUSTERS}),
    "spark": ("needs Spark", SPARKS),
    "slow": ("starts servers, Spark or processes of its own", SPARKS | CLUSTERS),
    "property": ("examples are made by hypothesis", set()),
    "soak": ("takes minutes by design: make soak runs it, make test a short sibling", set()),
}
# .ci/run sets it: what has passed there passes again. Everywhere else each run looks at new examples, and says its seed.
FIXED = os.environ.get("ROCKETMQ_SPARK_TEST_FIXED") == "1"
# A busy machine takes its time: examples have no deadline of their own, tests have pytest's.
settings.register_profile(
    "house",
    deadline=None,
    derandomize=FIXED,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")

# How late timers of the tests and of all that they start may be, so that several share a wake-up; Linux gives 0.05 ms. A
# broker with nothing to do looks 900 times a second whether it has, which took 77 ms of a core each second, and 51 with this.
# With 16 ms it took 37, which a whole run did not show.
TIMER_SLACK_NS = 4_000_000
_PR_SET_TIMERSLACK = 29

_seen = pytest.StashKey[Counter[str]]()
_seed = pytest.StashKey[str]()
_scopes = pytest.StashKey[str]()
_past_brokers = pytest.StashKey[frozenset[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--complete",
        action="store_true",
        help="fail when a test was skipped, and unless every kind of test ran, and one of each file",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name, (meaning, _) in MARKS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    config.addinivalue_line("markers", "needs(*fixtures): as usefixtures, which pytest refuses for a single parameter")
    if not FIXED:
        # As hypothesis does with its own option, whose value comes first.
        given = getattr(config, "workerinput", {}).get("seed") or config.getoption("--hypothesis-seed", None)
        config.stash[_seed] = str(given or random.SystemRandom().getrandbits(32))
        core.global_force_seed = int(config.stash[_seed])
    folder = tempfile.TemporaryDirectory(prefix="rocketmq-tests-")
    config.add_cleanup(folder.cleanup)
    config.stash[_scopes] = str(Path(folder.name, "scopes"))
    config.stash[_seen] = Counter()
    config.pluginmanager.register(_Reports(config.stash[_seen]))


def pytest_sessionstart() -> None:
    """Threads and processes take the slack of the thread that starts them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of xdist take the seed that is told; the first writes down which scope each test is of."""
    node.workerinput["seed"] = node.config.stash.get(_seed, None)
    node.workerinput["scopes"] = node.config.stash[_scopes] if node.gateway.id == "gw0" else ""


def pytest_report_header(config: pytest.Config) -> list[str]:
    if _seed not in config.stash:
        return []
    seed = config.stash[_seed]
    return [f"examples of hypothesis: seed {seed} (again: --hypothesis-seed={seed})"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file, as ``--dist loadfile``, but all tests of one of ``SCOPES`` go to one process, and nearly half of the
    processes begin with what waits more than it works.

    Files go out as they were collected, not by how many tests a file has: see ``pytest_collection_modifyitems``. The process
    that shares them out collects nothing, so a worker writes down the scopes.
    """
    from xdist.scheduler import LoadFileScheduling

    class ByScope(LoadFileScheduling):
        scopes: Mapping[str, str] = MappingProxyType({})
        waiting: frozenset[str] = frozenset()

        def _split_scope(self, nodeid: str) -> str:
            if not self.scopes:
                noted = json.loads(Path(config.stash[_scopes]).read_text())
                self.scopes, self.waiting = noted["scopes"], frozenset(noted["waiting"])
            return self.scopes[nodeid]

        def _assign_work_unit(self, node: Any) -> None:
            waits = int(node.gateway.id.removeprefix("gw")) >= (self.numnodes + 1) // 2
            first = next((scope for scope in self.workqueue if (scope in self.waiting) == waits), None)
            if self.numnodes > 1 and first is not None:
                self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Processes that share the tests import different parts first, so that the assertions of a file are rewritten once.

    What was collected stays until the end: the collector of garbage looks at it neither now nor with each full round.
    """
    gc.disable()
    if worker := getattr(session.config, "workerinput", None):
        _import_from(session.config, int(worker["workerid"].removeprefix("gw")) / worker["workercount"])
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _import_from(config: pytest.Config, part: float) -> None:
    """Import the tests of the folders that were asked for, those after this part of them first."""
    folders = [path for path in map(Path, config.args) if path.is_dir()]
    files = [path.resolve() for folder in folders for path in sorted(folder.rglob("test_*.py"))]
    begin = int(len(files) * part)
    for file in files[begin:] + files[:begin]:
        name = ".".join(file.relative_to(config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception):  # the collection imports it, too, and tells of it
            importlib.import_module(name)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Fixtures of one parameter only: ``pytest.param("real", marks=pytest.mark.needs("rocketmq"))``."""
    asked = [str(name) for mark in item.iter_markers("needs") for name in mark.args]
    has = getattr(item, "fixturenames", [])
    if not set(asked) <= set(has):
        item.fixturenames = [*has, *(name for name in asked if name not in has)]  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SCALE < 1 and (long := [item for item in items if item.get_closest_marker("soak")]):
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    for item in items:
        for name in marks_of(item):
            item.add_marker(name)
        fixtures = getattr(item, "fixturenames", ())
        item.user_properties += [("needs", what) for name, what in NEEDS.items() if name in fixtures]
    items.sort(key=_weight)
    if worker := getattr(config, "workerinput", None):
        # A scope's place is that of its last test. Of a file tests keep their order: they may share what those before them leave.
        scopes = {item.nodeid: scope_of(item) for item in items}
        order: dict[str, tuple[int, bool, int]] = {}
        for place, item in enumerate(items):
            scope = scopes[item.nodeid]
            order[scope] = min(_turn(item, scope), order.get(scope, (4,))[0]), not _lengthy(item), -place
        items.sort(key=lambda item: order[scopes[item.nodeid]])
        if worker["scopes"]:
            waiting = [scope for scope, (turn, *_) in order.items() if turn in _WAIT]
            Path(worker["scopes"]).write_text(json.dumps({"scopes": scopes, "waiting": waiting}))
    last = max(
        (place for place, item in enumerate(items) if "rocketmq" in getattr(item, "fixturenames", ())), default=-1
    )
    config.stash[_past_brokers] = frozenset(item.nodeid for item in items[last + 1 :])


def is_over(fixture: str, after: pytest.Item | None) -> bool:
    """Whether a fixture of ``LASTING`` has served its last test in this process, when ``after`` is the next test."""
    if fixture == "rocketmq" and after is not None:
        return after.nodeid in after.config.stash[_past_brokers]
    return fixture not in getattr(after, "fixturenames", ())


def scope_of(item: pytest.Item) -> str:
    """What a test shares with others that must run in its process: one of ``SCOPES``, else its file."""
    fixtures = getattr(item, "fixturenames", ())
    scope = next((name for name in SCOPES if name in fixtures), item.nodeid.partition("::")[0])
    return SPARK_PAGES if scope == "spark" and item.path.as_posix().endswith(PAGES) else scope


# The turns whose tests wait more than they work: for timers of brokers, for ends of outages.
_WAIT = (2, 3)


def _turn(item: pytest.Item, scope: str) -> int:
    """The longest come first, and what runs in memory last: a long one must not be what the last process ends with.

    What shares a cluster comes beside what shares Spark: most of it needs no driver, and in a new environment drivers wait for
    the archive that the first of them makes.
    """
    if scope in (*SCOPES, SPARK_PAGES):
        return 0
    if LONG.intersection(item.path.parts):
        return 1
    if marks_of(item) & {"live", "slow", "spark"} or _lengthy(item):
        return 2
    return 3 if WAITING.intersection(item.path.parts) else 4


def _lengthy(item: pytest.Item) -> bool:
    return item.path.as_posix().endswith(LENGTHY)


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


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """With ``--complete`` a module that skips itself has failed. xdist's workers do not tell of what they skip so."""
    report = yield
    if report.skipped and collector.config.getoption("complete"):
        report.outcome = "failed"
        report.longrepr = f"NOT COMPLETE: {collector.nodeid} was skipped: {report.longreprtext}"
    return report


class _Reports:
    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._seen["skipped"] += 1
        elif report.when == "call":
            self._seen[report.nodeid.partition("::")[0]] += 1
            if report.passed:
                self._seen.update(str(what) for name, what in report.user_properties if name == "needs")


def _problems(config: pytest.Config) -> list[str]:
    if not config.getoption("complete") or hasattr(config, "workerinput"):
        return []
    seen = config.stash[_seen]
    skipped = [f"{seen['skipped']} tests were skipped"] if seen["skipped"] else []
    if config.getoption("markexpr"):  # leaves kinds and files out on purpose
        return skipped
    absent = [f"no test of {name} ran" for name in _files(config) if not seen[name]]
    if all(Path(config.rootpath, argument.partition("::")[0]).is_file() for argument in config.args):
        return [*skipped, *absent]  # single files need not be of all kinds
    return [
        *skipped,
        *absent,
        *(f"no test that needs a {what} has passed" for what in NEEDS.values() if not seen[what]),
    ]


def _files(config: pytest.Config) -> list[str]:
    """The files of tests that were asked for, whatever became of their collection, as tests name them."""
    asked = [Path(config.rootpath, argument.partition("::")[0]) for argument in config.args]
    files = {file for path in asked for file in (path.rglob("test_*.py") if path.is_dir() else [path])}
    return sorted(file.resolve().relative_to(config.rootpath.resolve()).as_posix() for file in files)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and _problems(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _seed in config.stash and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"hypothesis had --hypothesis-seed={config.stash[_seed]}")
    for problem in _problems(config):
        terminalreporter.write_line(f"NOT COMPLETE: {problem}", red=True)
