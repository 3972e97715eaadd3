"""The process of the driver, with a small program instead of Spark."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.base import folders
from rocketmq_spark.cli.demo import process_session
from rocketmq_spark.cli.demo.driver import SparkDriver
from rocketmq_spark.cli.demo.environment import DemoEnvironment
from rocketmq_spark.errors import RocketMQError
from tests.helpers import awaited

HEAD = "import os, sys, json\nout = os.fdopen(int(sys.argv[1]), 'w')\nmade = json.loads(sys.stdin.readline())\n"
ECHO = HEAD + "print(json.dumps({'name': made['name_server']}), file=out, flush=True)\n"


@pytest.fixture
def driver_of(tmp_path):
    """A driver whose process runs this program."""

    def make(program):
        (tmp_path / "program.py").write_text(program)
        environment = DemoEnvironment("n:1", "orders", "totals", tmp_path, Path("/data"))
        return SparkDriver(environment, program=[str(tmp_path / "program.py")])

    return make


def next_reports(driver):
    return awaited(lambda: list(driver.reports()), bool)


def test_it_yields_reports_and_finishes_on_request(driver_of):
    program = ECHO + "print(json.dumps({'totals': sys.stdin.readline()}), file=out, flush=True)"
    with driver_of(program) as driver:
        assert next_reports(driver) == [{"name": "n:1"}]
        driver.finish()
        assert next_reports(driver) == [{"totals": "finish\n"}]
        driver.wait()
        assert list(driver.reports()) == [], "it has ended after its last report"


def test_a_killed_driver_starts_again(driver_of):
    with driver_of(ECHO + "sys.stdin.readline()") as driver:
        assert next_reports(driver) == [{"name": "n:1"}]
        driver.kill()
        driver.start()
        assert next_reports(driver) == [{"name": "n:1"}]


def test_a_driver_that_ends_by_itself_is_an_error_at_last(driver_of):
    with driver_of(ECHO + "sys.exit(3)") as driver:
        reported = []

        def ended():
            try:
                reported.extend(driver.reports())
            except RocketMQError as e:
                return e
            return None

        error = awaited(ended, bool)
        assert "exit code 3" in str(error)
        assert "spark.log" in str(error)
        assert reported == [{"name": "n:1"}]


def test_the_pid_of_an_ended_driver_is_not_reused(driver_of):
    """A signal to its session would reach another process that has the number by then."""
    with driver_of(ECHO + "print(json.dumps({'totals': 1}), file=out, flush=True)") as driver:
        next_reports(driver)
        driver.wait()
        assert list(driver.reports()) == []
        pid = driver._process.pid
        assert os.getsid(pid) == pid
        driver.kill()
        with pytest.raises(ProcessLookupError):
            os.getsid(pid)


def test_a_frozen_driver_can_be_killed(driver_of):
    with driver_of(ECHO + "sys.stdin.readline()") as driver:
        next_reports(driver)
        pid = driver._process.pid
        assert driver.stop()
        driver.kill()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_it_prints_goes_to_the_log_of_the_run(driver_of, tmp_path):
    with driver_of(ECHO + "print('from Spark', flush=True)\nprint('{\"totals\": 1}', file=out, flush=True)") as driver:
        next_reports(driver)
        driver.wait()
    assert (tmp_path / "spark.log").read_text() == "from Spark\n"


# A driver with a worker in a group of its own, as Spark's are; both are stopped when the program that runs them is killed.
DEMO = """
import os, signal, sys, time
from pathlib import Path
from rocketmq_spark.base import folders
from rocketmq_spark.cli.demo.driver import SparkDriver
from rocketmq_spark.cli.demo.environment import DemoEnvironment

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may run the tests, makes all programs ignore it
folder = Path(sys.argv[1])
lock = os.open(folder / "in-use", os.O_WRONLY | os.O_CREAT)
assert folders.try_lock(lock)
environment = DemoEnvironment("n:1", "orders", "totals", folder, None, lock=lock)
with SparkDriver(environment, program=[str(folder / "program.py")]) as driver:
    while not (reports := list(driver.reports())):
        time.sleep(0.01)
    assert driver.stop()
    print(driver._process.pid, driver._watcher.pid, reports[0]["worker"], flush=True)
    if sys.argv[2] == "fail":
        raise ZeroDivisionError
    signal.pause()
"""
WORKER = """
worker = os.fork()
if not worker:
    os.setpgid(0, 0)
    sys.stdin.read()
print(json.dumps({"worker": worker}), file=out, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def demo(tmp_path):
    """A program with a driver that it has stopped: the process, and the ids of driver, watcher and worker."""
    started = []

    def start(how):
        (tmp_path / "program.py").write_text(HEAD + WORKER)
        process = subprocess.Popen(
            [sys.executable, "-c", DEMO, str(tmp_path), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        driver, watcher, worker = map(int, process.stdout.readline().split())
        started.append((process, driver))
        assert process_session.members(driver).keys() <= {driver, worker}
        return process, driver, watcher

    yield start
    for process, driver in started:
        process.kill()
        process.communicate()
        process_session.kill(driver)


def is_free(folder):
    lock = os.open(folder / "in-use", os.O_WRONLY)
    try:
        return folders.try_lock(lock)
    finally:
        os.close(lock)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_driver_ends_with_a_demo_that_is_killed(demo, tmp_path, number):
    process, driver, watcher = demo("wait")
    assert process_session.members(driver)
    assert not is_free(tmp_path)
    process.send_signal(number)
    process.wait()
    awaited(lambda: is_free(tmp_path), bool)
    assert process_session.members(driver) == {}
    awaited(lambda: process_session.members(watcher) == {}, bool)


def test_a_stopped_driver_ends_with_a_demo_that_fails(demo, tmp_path):
    process, driver, watcher = demo("fail")
    assert "ZeroDivisionError" in process.communicate()[1]
    assert process_session.members(driver) == {}
    awaited(lambda: process_session.members(watcher) == {}, bool)
    assert is_free(tmp_path)


def test_the_folder_is_in_use_while_a_driver_lives(demo, tmp_path):
    """Even if the watcher was killed, too."""
    process, driver, watcher = demo("wait")
    os.kill(watcher, signal.SIGKILL)
    process.kill()
    process.wait()
    assert process_session.members(driver)
    assert not is_free(tmp_path)
    process_session.kill(driver)
    awaited(lambda: is_free(tmp_path), bool)
