"""The first cause is what is told, with what was tried since."""

from __future__ import annotations

from rocketmq_spark.client.trouble import Trouble
from rocketmq_spark.errors import CallTimeout, ConnectionLost, OptionError

FIRST = ConnectionLost("the server closed the connection", "h:1", remark="mid-frame")
LAST = CallTimeout(
    "no name server answers: no progress in time", "ns:1", queue="t/broker-a/0", remedy="Check option 'nameServer'"
)


def noted(*errors, at=100.0, step=5.0):
    trouble = Trouble()
    for i, error in enumerate(errors):
        trouble.note(error, at + i * step)
    return trouble


def test_a_single_error_stands_for_itself():
    assert Trouble().cause(LAST, 7.0) is LAST
    assert noted(FIRST).cause(FIRST, 100.0) is FIRST
    final = OptionError("no waiting heals this")
    assert noted(FIRST, final).cause(final, 105.0) is final


def test_the_first_of_many_is_told_with_the_last_one_s_words():
    told = noted(FIRST, LAST, LAST).cause(LAST, 110.0)
    assert type(told) is ConnectionLost
    assert str(told) == (
        "[ROCKETMQ_CONNECTION_LOST] the server closed the connection; tried 3 times in 10 s (at h:1, queue t/broker-a/0): "
        "mid-frame; at last: no name server answers: no progress in time. Check option 'nameServer'"
    )


def test_the_same_again_is_said_once():
    again = ConnectionLost(FIRST.message, "h:1")
    assert noted(FIRST, again).cause(again, 105.0).remark == "mid-frame"


def test_after_a_success_it_begins_anew():
    trouble = noted(FIRST, FIRST)
    trouble.clear()
    assert trouble.cause(LAST, 300.0) is LAST
    trouble.note(LAST, 400.0)
    assert trouble.first is LAST
    assert trouble.since == 400.0
