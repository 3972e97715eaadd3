"""The process of the driver, with a small program instead of Spark."""

import os
import sys
from pathlib import Path

import pytest

from rocketmq_spark.cli.demo import driver as driver_module
from rocketmq_spark.cli.demo.driver import SparkDriver
from rocketmq_spark.cli.demo.stage import Stage
from rocketmq_spark.errors import RocketMQError
from tests.helpers import awaited

HEAD = "import os, sys, json\nout = os.fdopen(int(sys.argv[1]), 'w')\nmade = json.loads(sys.stdin.readline())\n"
ECHO = HEAD + "print(json.dumps({'name': made['name_server']}), file=out, flush=True)\n"


@pytest.fixture
def driver_of(tmp_path, monkeypatch):
    """A driver whose process runs this program."""

    def make(program):
        (tmp_path / "program.py").write_text(program)
        start = driver_module.subprocess.Popen

        def popen(args, **how):
            return start([sys.executable, str(tmp_path / "program.py"), args[-1]], **how)

        monkeypatch.setattr(driver_module.subprocess, "Popen", popen)
        return SparkDriver(Stage("n:1", "orders", "totals", tmp_path, Path("/data")))

    return make


def heard(driver):
    return awaited(lambda: list(driver.reports()), bool)


def test_it_hears_reports_and_is_told_to_finish(driver_of):
    program = ECHO + "print(json.dumps({'totals': sys.stdin.readline()}), file=out, flush=True)"
    with driver_of(program) as driver:
        assert heard(driver) == [{"name": "n:1"}]
        driver.finish()
        assert heard(driver) == [{"totals": "finish\n"}]
        driver.wait()
        assert list(driver.reports()) == [], "it has ended after its last report"


def test_a_killed_driver_starts_again(driver_of):
    with driver_of(ECHO + "sys.stdin.readline()") as driver:
        assert heard(driver) == [{"name": "n:1"}]
        driver.kill()
        driver.start()
        assert heard(driver) == [{"name": "n:1"}]


def test_a_driver_that_ends_by_itself_is_an_error_after_all_that_it_said(driver_of):
    with driver_of(ECHO + "sys.exit(3)") as driver:
        said = []

        def ended():
            try:
                said.extend(driver.reports())
            except RocketMQError as e:
                return e
            return None

        error = awaited(ended, bool)
        assert "exit code 3" in str(error)
        assert "spark.log" in str(error)
        assert said == [{"name": "n:1"}]


def test_the_number_of_a_driver_that_ended_stays_its_own_until_it_is_killed(driver_of):
    """The signal to its group would reach another process that has the number by then."""
    with driver_of(ECHO + "print(json.dumps({'totals': 1}), file=out, flush=True)") as driver:
        heard(driver)
        driver.wait()
        assert list(driver.reports()) == []
        pid = driver._process.pid
        assert os.getpgid(pid) == pid
        driver.kill()
        with pytest.raises(ProcessLookupError):
            os.getpgid(pid)


def test_a_frozen_driver_can_be_killed(driver_of):
    with driver_of(ECHO + "sys.stdin.readline()") as driver:
        heard(driver)
        pid = driver._process.pid
        driver.freeze()
        driver.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_it_prints_goes_to_the_log_of_the_run(driver_of, tmp_path):
    with driver_of(ECHO + "print('from Spark', flush=True)\nprint('{\"totals\": 1}', file=out, flush=True)") as driver:
        heard(driver)
        driver.wait()
    assert (tmp_path / "spark.log").read_text() == "from Spark\n"
