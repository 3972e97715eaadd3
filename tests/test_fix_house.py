"""How the suite runs, in a pytest of its own: seeds of hypothesis, and marks by what a test asks for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.fix_house import TIMER_SLACK_NS

TESTS = """
import pytest
from hypothesis import given, strategies as st

@pytest.fixture
def rocketmq():
    return 1

@pytest.fixture
def spark(rocketmq):
    return 1

def test_plain(): pass

def test_live(rocketmq): pass

def test_spark(spark): pass

@pytest.mark.parametrize("how", ["fake", pytest.param("real", marks=pytest.mark.needs("rocketmq"))])
def test_both(request, how):
    assert ("rocketmq" in request.node.funcargs) == (how == "real")

@pytest.mark.soak
def test_long(): pass

@given(st.integers())
def test_property(n): pass

@given(st.integers())
def test_fails(n):
    print("example", n)
    assert n < 1000
"""

PLUGINS = ("tests.fix_house", "_hypothesis_pytestplugin", "xdist.plugin")


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes half of a short run
    monkeypatch.delenv("ROCKETMQ_SPARK_TEST_FIXED", raising=False)
    monkeypatch.delenv("ROCKETMQ_SPARK_TEST_SCALE", raising=False)
    pytester.makepyfile(TESTS)
    return pytester


def run(inner: pytest.Pytester, *arguments: str) -> str:
    plugins = [part for name in PLUGINS for part in ("-p", name)]
    done = inner.runpytest_subprocess(*plugins, "-p", "no:cacheprovider", *arguments, timeout=120)
    return done.stdout.str()


def test_hypothesis_examples_differ_per_run_and_repeat_by_seed(inner: pytest.Pytester) -> None:
    first, second = (run(inner, "-k", "property or fails") for _ in range(2))
    seeds = [re.findall(r"seed (\d+) \(again: --hypothesis-seed=(\d+)\)", text) for text in (first, second)]
    assert seeds[0] != seeds[1]
    ((seed, again),) = seeds[0]
    assert seed == again
    assert f"hypothesis had --hypothesis-seed={seed}" in first
    assert f"seed {seed} (again" in run(inner, "-k", "property", f"--hypothesis-seed={seed}")


def test_examples_are_the_same_where_that_is_asked_for(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_TEST_FIXED", "1")
    assert "seed" not in run(inner, "-k", "property")


@pytest.mark.parametrize(
    ("marks", "names"),
    [
        ("live", ["live", "both[real]", "spark"]),
        ("spark", ["spark"]),
        ("slow", ["spark"]),
        ("property", ["property", "fails"]),
        ("not live and not spark and not slow", ["plain", "both[fake]", "property", "fails"]),
    ],
)
def test_marks_are_given_by_what_a_test_asks_for(inner: pytest.Pytester, marks: str, names: list[str]) -> None:
    found = re.findall(r"::test_([\w\[\]]+)$", run(inner, "--collect-only", "-q", "-m", marks), re.MULTILINE)
    assert sorted(found) == sorted(names)


def test_a_kind_of_test_that_never_ran_is_a_failure(inner: pytest.Pytester) -> None:
    text = run(inner, "--complete", "-k", "test_live")
    assert "NOT COMPLETE: no test that needs a Spark has passed" in text
    assert "real broker" not in text
    assert "NOT COMPLETE" not in run(inner, "-n2", "--dist=loadfile", "--complete", "-k", "test_live or test_spark")


def test_single_files_need_not_be_of_all_kinds(inner: pytest.Pytester) -> None:
    (file,) = inner.path.glob("test_*.py")
    assert "NOT COMPLETE" not in run(inner, "--complete", file.name, "-k", "test_live")


def test_files_and_kinds_that_are_left_out_by_marks_are_none(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_other="def test_of_another(rocketmq): pass")
    text = run(inner, "--complete", ".", "-m", "not live and not spark", "-k", "not fails")
    assert "NOT COMPLETE" not in text
    assert " passed" in text


def test_a_test_that_did_not_run_is_a_failure(inner: pytest.Pytester) -> None:
    inner.makepyfile(test_absent="import unittest\n\ndef test_absent(): raise unittest.SkipTest")
    assert "NOT COMPLETE: 1 tests were skipped" in run(
        inner, "--complete", "-k", "test_live or test_spark or test_absent"
    )


@pytest.mark.parametrize("processes", [(), ("-n2", "--dist=loadfile")], ids=["one process", "two"])
def test_a_module_that_skips_itself_is_a_failure(inner: pytest.Pytester, processes: tuple[str, ...]) -> None:
    inner.makepyfile(test_module="import unittest\n\nraise unittest.SkipTest\n\ndef test_it(): pass")
    chosen = ("-k", "test_live or test_spark or test_it")
    assert "NOT COMPLETE: test_module.py was skipped" in run(inner, *processes, "--complete", *chosen)
    assert "NOT COMPLETE" not in run(inner, *processes, *chosen)


@pytest.mark.parametrize("processes", [(), ("-n2", "--dist=loadfile")], ids=["one process", "two"])
def test_a_file_none_of_whose_tests_ran_is_a_failure(inner: pytest.Pytester, processes: tuple[str, ...]) -> None:
    """Pytest looks into no folder of this name, and a conftest may leave out any."""
    folder = inner.mkpydir("build")
    (folder / "test_unseen.py").write_text("def test_it(): pass")
    done = run(inner, *processes, "--complete", "-k", "test_live or test_spark or test_it")
    assert "NOT COMPLETE: no test of build/test_unseen.py ran" in done
    assert done.count("NOT COMPLETE") == 1
    assert "NOT COMPLETE" not in run(inner, *processes, "-k", "test_live or test_spark")


def test_what_takes_minutes_runs_at_full_scale_only(inner: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.findall(r"::test_(\w+) PASSED", run(inner, "-v", "-k", "plain or long")) == ["plain"]
    monkeypatch.setenv("ROCKETMQ_SPARK_TEST_SCALE", "1")
    assert re.findall(r"::test_(\w+) PASSED", run(inner, "-v", "-k", "plain or long")) == ["plain", "long"]


CLUSTERS = """
import pytest

@pytest.fixture(scope="session")
def proxied():
    return 1
"""


def test_tests_of_one_cluster_run_sequentially_in_one_process(inner: pytest.Pytester) -> None:
    """Whatever file they stand in; what shares nothing goes file by file."""
    inner.makeconftest(CLUSTERS)
    shared = "def test_quick(): pass\n\ndef test_cluster(proxied): pass\n"
    inner.makepyfile(**{f"test_{name}": shared for name in "abcd"})
    text = run(inner, "-n3", "--dist=loadfile", "-v", "-k", "cluster or quick")
    ran = re.findall(r"\[(gw\d)\] .*PASSED test_([a-d])\.py::test_(cluster|quick)", text)
    assert sorted((file, name) for _, file, name in ran) == sorted((f, n) for f in "abcd" for n in ("cluster", "quick"))
    ((worker, _),) = Counter(worker for worker, _, name in ran if name == "cluster").items()
    names = [name for where, _, name in ran if where == worker]
    assert "cluster" * 4 in "".join(names)


def test_half_of_the_processes_begin_with_what_waits(inner: pytest.Pytester) -> None:
    """The others with what works, so that a processor has something to do while brokers and timers are awaited."""
    (inner.path / "live").mkdir()
    files = [f"test_{name}.py" for name in "abcd"] + [f"live/test_{name}.py" for name in "ef"]
    for file in files:
        (inner.path / file).write_text("def test_it(): pass")
    text = run(inner, "-n3", "--dist=loadfile", "-v", *files)
    ran = re.findall(r"\[gw(\d)\] .*PASSED (\S+)::test_it", text)
    assert sorted(file for _, file in ran) == sorted(files)
    assert {file for worker, file in ran if worker == "2"} == {"live/test_e.py", "live/test_f.py"}


LASTING = """
import pathlib
import pytest

def note(name):
    with pathlib.Path("notes").open("a") as file:
        file.write(name + " ")

@pytest.fixture(scope="session")
def rocketmq():
    yield
    note("broker-ends")

@pytest.fixture(scope="session")
def spark(rocketmq):
    yield
    note("spark-ends")

@pytest.fixture(autouse=True)
def noted(request):
    yield
    note(request.node.name)
"""


def test_broker_and_spark_stop_after_last_test_that_uses_them(inner: pytest.Pytester) -> None:
    inner.makeconftest(LASTING)
    live = "def test_quick{0}(): pass\n\ndef test_live{0}(rocketmq): pass\n"
    spark = "def test_spark{0}(spark): pass\n"
    files = [f"test_{name}.py" for name in "abcd"]
    inner.makepyfile(
        test_a=live.format("_a"), test_b=spark.format("_b"), test_c=live.format("_c"), test_d="def test_quick_d(): pass"
    )
    run(inner, "-n1", "--dist=loadfile", "-p", "tests.fix_clusters", *files)
    *names, last = Path(str(inner.path), "notes").read_text().split()
    assert names.index("spark-ends") == names.index("test_spark_b") + 1
    live = [names.index("test_live_a"), names.index("test_live_c")]
    assert names.index("broker-ends") == max(live) + 1
    assert last == "test_quick_d"


def test_timers_of_processes_that_tests_start_may_be_late() -> None:
    if sys.platform != "linux":
        return
    said = subprocess.run(["cat", "/proc/self/timerslack_ns"], capture_output=True, check=True).stdout
    assert int(said) == TIMER_SLACK_NS
