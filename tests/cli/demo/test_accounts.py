import contextlib
import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.demo import command
from rocketmq_spark.cli.demo import environment as environment_module
from rocketmq_spark.cli.demo.accounts import Accounts
from rocketmq_spark.cli.demo.batch_totals import Kill
from rocketmq_spark.cli.demo.environment import DemoEnvironment
from rocketmq_spark.cli.demo.run import DemoResult
from rocketmq_spark.cli.demo.watch import DemoState
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import java

GOOD = Accounts(
    orders_written=25_011,
    orders_read=25_011,
    orders_returned=25_011,
    totals_returned=7,
    totals_repeated=0,
    cents_written=123_456_789,
    cents_returned=123_456_789,
    dropped_late=0,
    exactly_once=True,
)
COUNTS = ["orders_written", "orders_read", "orders_returned", "cents_written", "cents_returned"]


def test_good_books():
    assert GOOD.balanced
    assert GOOD.problems() == []
    assert GOOD.document()["balanced"] is True
    assert GOOD.document()["ordersWritten"] == 25_011
    assert GOOD.lines()[-1].endswith("1,234,567.89 = 1,234,567.89")
    assert GOOD.lines()[-2].endswith("in 7 totals, none of them stored twice")
    assert GOOD.verdict() == "25,011 = 25,011 = 25,011. All agree."


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("by", [-1, 1])
def test_any_difference_is_a_problem(name, by):
    wrong = dataclasses.replace(GOOD, **{name: getattr(GOOD, name) + by})
    assert not wrong.balanced
    assert wrong.document()["balanced"] is False
    assert wrong.verdict().endswith("The result is wrong.")


def test_problems_name_the_numbers_and_late_rows():
    wrong = dataclasses.replace(GOOD, orders_returned=97, dropped_late=3)
    assert wrong.problems() == [
        "25011 orders written, but 97 in the totals read back",
        "3 rows came later than the watermark allows and were dropped",
    ]
    assert wrong.verdict() == "25,011 = 25,011 ≠ 97. The result is wrong."


def test_late_rows_are_reported_only_when_something_is_missing():
    assert dataclasses.replace(GOOD, dropped_late=3).balanced


@pytest.mark.parametrize(("exactly_once", "problems"), [(True, ["2 totals are stored more than once"]), (False, [])])
def test_a_total_is_stored_twice_only_without_exactly_once(exactly_once, problems):
    repeated = dataclasses.replace(GOOD, totals_repeated=2, exactly_once=exactly_once)
    assert repeated.problems() == problems
    assert repeated.lines()[-2].endswith("in 7 totals, 2 of them stored more than once")
    assert repeated.verdict().endswith("The result is wrong." if problems else "All agree.")


@pytest.mark.parametrize(
    ("accounts", "code", "verdict"),
    [
        (GOOD, 0, "All agree."),
        (dataclasses.replace(GOOD, orders_returned=97), 1, "The result is wrong."),
    ],
)
def test_the_exit_code_says_whether_the_counts_agree(monkeypatch, tmp_path, accounts, code, verdict):
    environment = DemoEnvironment("n:1", "orders", "totals", tmp_path, Path("/data"))
    monkeypatch.setattr(java, "find_java", lambda: None)
    monkeypatch.setattr(environment_module, "demo_environment", lambda *arguments: contextlib.nullcontext(environment))
    monkeypatch.setattr(DemoEnvironment, "create_topics", lambda self: None)
    monkeypatch.setattr(
        command, "_run", lambda *arguments: DemoResult(accounts, DemoState(batch_ms=[300]), Kill(23, 6))
    )
    done = CliRunner().invoke(app, ["demo"])
    assert (done.exit_code, verdict in done.stdout) == (code, True)
    assert ("the result is wrong: 25011 orders" in done.stderr) == (code == 1)
    assert "In between: kill -9 of Spark's driver in batch 23, 6 of its totals stored." in done.stdout


DELETE = "rocketmq-spark topic delete {} --yes --name-server n:1"


@pytest.mark.parametrize("data", [None, Path("/data")])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RocketMQError("it failed")])
@pytest.mark.parametrize("while_creating", [True, False])
def test_a_run_that_does_not_end_names_its_topics(monkeypatch, tmp_path, error, data, while_creating):
    def fail(*arguments):
        raise error

    environment = DemoEnvironment("n:1", "orders", "totals", tmp_path, data)
    monkeypatch.setattr(java, "find_java", lambda: None)
    monkeypatch.setattr(environment_module, "demo_environment", lambda *arguments: contextlib.nullcontext(environment))
    monkeypatch.setattr(DemoEnvironment, "create_topics", fail if while_creating else lambda self: None)
    monkeypatch.setattr(command, "_run", fail)
    done = CliRunner().invoke(app, ["demo", "--json"])
    assert done.exit_code in (1, 130)
    assert all((DELETE.format(topic) in done.stderr) == (data is None) for topic in ("orders", "totals"))


def test_after_a_run_both_topics_are_named_for_deletion(tmp_path):
    commands = command._next_commands(DemoEnvironment("n:1", "orders", "totals", tmp_path, None))
    assert commands[-2:] == [DELETE.format("orders"), DELETE.format("totals")]
