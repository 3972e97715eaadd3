"""The pytest plug-in for users, in a pytest of its own: what it gives, and that it harms no test run."""

from __future__ import annotations

import subprocess
import sys

import pytest

INNER = """
def test_passes(rocketmq, rocketmq_topic, make_rocketmq_topic):
    other = make_rocketmq_topic(queues=3)
    assert len(rocketmq.admin.route(rocketmq_topic).readable_queues()) == 8
    assert len(rocketmq.admin.route(other).readable_queues()) == 3

def test_fails(rocketmq_topic):
    assert not rocketmq_topic
"""
# Fixtures that bear our names and are something else.
FOREIGN = """
import pytest
from unittest import mock

class Broken:
    def __getattr__(self, name):
        raise RuntimeError("asked for " + name)

@pytest.fixture(params=["text", Broken(), mock.MagicMock(), None], ids=["text", "broken", "mock", "none"])
def rocketmq(request):
    return request.param

def test_fails(rocketmq):
    assert False, "as it says"

def test_passes(rocketmq):
    pass
"""
# A cluster without servers: what the plug-in asks for is there, or is not.
OURS = """
import pytest
from rocketmq_spark.localbroker import LocalBroker

class Cluster(LocalBroker):
    running = True

    def logs(self, broker=None):
        lines = ["INFO channelInactive", "WARN line of " + broker, "INFO create orders"]
        return "\\n".join(lines)

class Unreadable(Cluster):
    def logs(self, broker=None):
        raise RuntimeError("no such log")

def test_running():
    pass

@pytest.fixture
def mine():
    return Cluster(brokers=2)

@pytest.fixture
def topic():
    return "orders"

@pytest.fixture
def unreadable():
    return Unreadable()

@pytest.fixture
def rocketmq():
    return LocalBroker()

@pytest.fixture
def breaks(mine):
    assert False, "in the set-up"

def test_under_another_name(mine, topic):
    assert False

def test_closed(rocketmq):
    assert False

def test_without_a_log(unreadable):
    assert False

def test_set_up(mine, breaks):
    pass
"""


def _run(pytester: pytest.Pytester, text: str, *arguments: str) -> tuple[dict[str, int], str]:
    """The outcomes of a file of tests, and what was printed."""
    pytester.makepyfile(text)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", *arguments, timeout=120)
    printed = done.stdout.str()
    assert "INTERNALERROR" not in printed, printed
    return done.parseoutcomes(), printed


def test_fixtures_and_the_log_of_a_failed_test(pytester: pytest.Pytester) -> None:
    outcomes, printed = _run(pytester, INNER)
    assert outcomes == {"failed": 1, "passed": 1}, printed
    assert "RocketMQ log of broker-a" in printed
    assert "create new topic" in printed


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_fixtures_of_others_are_left_alone(pytester: pytest.Pytester, workers: tuple[str, ...]) -> None:
    outcomes, printed = _run(pytester, FOREIGN, *workers)
    assert outcomes == {"failed": 4, "passed": 4}, printed
    assert printed.count("AssertionError: as it says") >= 4
    assert "RocketMQ log" not in printed
    assert "asked for" not in printed


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_logs_are_of_running_clusters_of_ours_under_any_name(
    pytester: pytest.Pytester, workers: tuple[str, ...]
) -> None:
    outcomes, printed = _run(pytester, OURS, *workers)
    assert outcomes == {"failed": 3, "passed": 1, "errors": 1}, printed
    assert printed.count("line of broker-a") == printed.count("line of broker-b") == 2
    assert printed.count("create orders") == 2, "two brokers, of the one test that has this topic"
    assert "channelInactive" not in printed
    assert printed.count("not added, RuntimeError: no such log") == 1
    assert printed.count("RocketMQ log") == 5


def test_without_java_a_run_goes_on(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(pytester.path))
    outcomes, printed = _run(pytester, "def test_a(): pass\n\ndef test_b(rocketmq): pass\n\ndef test_c(): assert False")
    assert outcomes == {"failed": 1, "passed": 1, "errors": 1}, printed
    assert "Java 17 or newer is needed, and there is none" in printed
    assert "Install a Java runtime" in printed


def test_the_plug_in_costs_nothing_until_it_is_used() -> None:
    code = "import sys, rocketmq_spark.testing; print([m for m in sys.modules if 'localbroker' in m or m == 'pyspark'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
