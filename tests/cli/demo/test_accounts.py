import contextlib
import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.demo import job, play, stage
from rocketmq_spark.cli.demo.feed import Accounts
from rocketmq_spark.cli.demo.stage import Stage
from rocketmq_spark.cli.demo.watch import DemoState
from rocketmq_spark.localbroker import java

GOOD = Accounts(
    orders_written=100,
    orders_read=100,
    orders_aggregated=100,
    orders_returned=100,
    totals_written=7,
    totals_returned=7,
    cents_written=123_456_789,
    cents_returned=123_456_789,
    dropped_late=0,
)


def test_good_books():
    assert GOOD.balanced
    assert GOOD.problems() == []
    assert GOOD.document()["balanced"] is True
    assert GOOD.document()["ordersWritten"] == 100
    assert GOOD.lines()[-1].endswith("1,234,567.89 = 1,234,567.89")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Accounts) if f.name != "dropped_late"])
@pytest.mark.parametrize("by", [-1, 1])
def test_any_difference_is_a_problem(name, by):
    wrong = dataclasses.replace(GOOD, **{name: getattr(GOOD, name) + by})
    assert not wrong.balanced
    assert wrong.document()["balanced"] is False


def test_problems_name_the_numbers_and_late_rows():
    wrong = dataclasses.replace(GOOD, orders_aggregated=97, orders_returned=97, dropped_late=3)
    assert wrong.problems() == [
        "100 orders written, but 97 in the totals that were sent",
        "100 orders written, but 97 in the totals read back",
        "3 rows came later than the watermark allows and were dropped",
    ]


def test_late_rows_alone_are_told_only_when_something_is_missing():
    assert dataclasses.replace(GOOD, dropped_late=3).balanced


@pytest.mark.parametrize(
    ("accounts", "code", "said"),
    [
        (GOOD, 0, "All agree."),
        (dataclasses.replace(GOOD, orders_returned=97), 1, "They do not agree."),
    ],
)
def test_the_exit_code_says_whether_the_counts_agree(monkeypatch, tmp_path, accounts, code, said):
    made = Stage("n:1", "orders", "totals", tmp_path, Path("/data"))
    monkeypatch.setattr(java, "find_java", lambda: None)
    monkeypatch.setattr(stage, "stage", lambda *given: contextlib.nullcontext(made))
    monkeypatch.setattr(job, "spark_session", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(play, "_query", lambda *given: contextlib.nullcontext())
    monkeypatch.setattr(play, "_play", lambda *given: play._Result(accounts, DemoState()))
    done = CliRunner().invoke(app, ["demo"])
    assert (done.exit_code, said in done.stdout, "do not agree: 100 orders" in done.stderr) == (code, True, code == 1)
