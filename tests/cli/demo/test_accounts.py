import dataclasses

import pytest

from rocketmq_spark.cli.demo.feed import Accounts

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
