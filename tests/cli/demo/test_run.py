"""When the driver is killed, and what the run reports, with a driver, a checkpoint and a broker that are made up."""

from types import SimpleNamespace

import pytest

from rocketmq_spark.cli.demo.batch_totals import Batches, Kill
from rocketmq_spark.cli.demo.run import DemoRun
from rocketmq_spark.cli.demo.watch import DemoState
from rocketmq_spark.errors import RocketMQError


class FakeDriver:
    """The driver, and the watch that sees it. ``moments``: the batches and the number of totals of the moments to come; the last
    one stays. ``at_stop``: those from the moment on when the driver is stopped."""

    def __init__(self, moments, at_stop=None, can_stop=True):
        self.moments = list(moments)
        self.at_stop = at_stop
        self.can_stop = can_stop
        self.calls = []
        self.state = DemoState()
        self.newest_finished = 7
        self.remedy = "Read the log"

    def stored_totals(self):
        return self.moments[0][1]

    def batches(self):
        moment = self.moments.pop(0) if len(self.moments) > 1 else self.moments[0]
        return moment[0]

    def stop(self):
        self.calls.append("stop")
        if self.at_stop is not None:
            self.moments = list(self.at_stop)
        return self.can_stop

    def resume(self):
        self.calls.append("resume")

    def kill(self):
        self.calls.append("kill")

    def start(self):
        self.calls.append("start")

    def show(self, state):
        self.calls.append("show")


QUIET, FLYING = Batches(7, 7), Batches(8, 7)
BEFORE = [(QUIET, 20), (QUIET, 20)]


def demo_of(run):
    return DemoRun(run, run, SimpleNamespace(sent_count=10), run, 1.0)


@pytest.fixture
def kill_of(monkeypatch):
    """Look once for a batch in which to kill; return what was decided."""
    monkeypatch.setattr("rocketmq_spark.cli.demo.run._REFRESH_S", 0.2)
    monkeypatch.setattr("rocketmq_spark.cli.demo.run._IDLE_BEFORE_KILL_S", -1.0)

    def look(run):
        demo = demo_of(run)
        demo._kill_in_a_batch()
        return demo._kill

    return look


def test_it_kills_in_a_batch_that_has_stored_totals(kill_of):
    run = FakeDriver([*BEFORE, (FLYING, 20), (FLYING, 26)])
    assert kill_of(run) == Kill(8, 6)
    assert run.calls == ["stop", "kill", "show", "start"]


def test_the_number_of_totals_is_that_of_the_stopped_driver(kill_of):
    assert kill_of(FakeDriver([*BEFORE, (FLYING, 21)], at_stop=[(FLYING, 27)])) == Kill(8, 7)


@pytest.mark.parametrize(
    ("at_stop", "can_stop"),
    [([(Batches(8, 8), 26)], True), ([(FLYING, None)], True), ([(FLYING, 26)], False)],
    ids=["it finished the batch", "the broker does not answer", "a process runs on"],
)
def test_a_driver_that_cannot_be_killed_in_the_batch_resumes(kill_of, at_stop, can_stop):
    run = FakeDriver([*BEFORE, (FLYING, 26)], at_stop, can_stop)
    assert kill_of(run) is None
    assert run.calls[:2] == ["stop", "resume"]
    assert "kill" not in run.calls


def test_a_broker_that_does_not_answer_is_asked_again(kill_of):
    run = FakeDriver([*BEFORE, (FLYING, 26)])
    answers = iter([None, None])
    stored = run.stored_totals
    run.stored_totals = lambda: next(answers, stored())
    assert kill_of(run) == Kill(8, 6)


@pytest.mark.parametrize(("at_stop", "kill"), [(QUIET, Kill(None, 0)), (FLYING, None)])
def test_it_kills_between_batches_only_while_none_is_in_flight(kill_of, at_stop, kill):
    run = FakeDriver([(QUIET, 20)], at_stop=[(at_stop, 20)])
    run.state.read = 11
    assert kill_of(run) == kill
    assert run.calls[:2] == ["stop", "resume" if kill is None else "kill"]


def test_the_repeated_batch_is_reported_once_with_its_time(kill_of):
    run = FakeDriver([*BEFORE, (FLYING, 26)])
    demo = demo_of(run)
    demo._kill_in_a_batch()
    demo._report_repeated_batch()
    assert len(run.state.events) == 1, "the new driver has not finished it"
    run.newest_finished = 8
    demo._killed_s -= 22
    demo._report_repeated_batch()
    demo._report_repeated_batch()
    assert run.state.events[1:] == ["A new driver repeated batch 8 and continues, 22 s after the kill"]


def test_a_run_without_progress_fails_with_its_phase_and_remedy():
    """The closing order counts as no order."""
    run = FakeDriver([(QUIET, 20)])
    run.state.phase, run.state.read, run.state.closing = "ending the last windows", 11, 1
    demo = demo_of(run)
    demo._check_progress(has_changed=False)
    demo._last_progress_s -= 200
    with pytest.raises(RocketMQError) as error:
        demo._check_progress(has_changed=False)
    assert "ending the last windows: nothing has changed for 180 s; 10 of 10 orders are read" in str(error.value)
    assert error.value.remedy == "Read the log"
    demo._check_progress(has_changed=True)
    demo._check_progress(has_changed=False)
