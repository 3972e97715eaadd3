"""What is tried again, and that the first cause is what is told, with what was tried since."""

from __future__ import annotations

import contextlib

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.retry import Retry, RetryErrors
from rocketmq_spark.errors import BrokerNotFound, CallTimeout, ConnectionLost, NotFound, OptionError, RocketMQError

FIRST = ConnectionLost("the server closed the connection", "h:1", remark="mid-frame")
LAST = CallTimeout(
    "no name server answers: no progress in time", "ns:1", queue="t/broker-a/0", remedy="Check option 'nameServer'"
)


def noted(*errors, at=100.0, step=5.0):
    trouble = RetryErrors()
    for i, error in enumerate(errors):
        trouble.record(error, at + i * step)
    return trouble


def test_a_single_error_stands_for_itself():
    assert RetryErrors().final_error(LAST, 7.0) is LAST
    assert noted(FIRST).final_error(FIRST, 100.0) is FIRST
    final = OptionError("no waiting heals this")
    assert noted(FIRST, final).final_error(final, 105.0) is final


def test_no_error_is_its_own_cause():
    for given, cause in (([LAST], None), ([FIRST, LAST], LAST)):
        with pytest.raises(RocketMQError) as e:
            noted(*given).raise_final(LAST, 110.0)
        assert e.value.__cause__ is cause


def test_the_first_of_many_is_told_with_the_last_one_s_words():
    told = noted(FIRST, LAST, LAST).final_error(LAST, 110.0)
    assert type(told) is ConnectionLost
    assert str(told) == (
        "[ROCKETMQ_CONNECTION_LOST] the server closed the connection; tried 3 times in 10 s (at h:1, queue t/broker-a/0): "
        "mid-frame; at last: no name server answers: no progress in time. Check option 'nameServer'"
    )


def test_the_same_again_is_said_once():
    again = ConnectionLost(FIRST.message, "h:1")
    assert noted(FIRST, again).final_error(again, 105.0).remark == "mid-frame"


def test_after_a_success_it_begins_anew():
    trouble = noted(FIRST, FIRST)
    trouble.clear()
    assert trouble.final_error(LAST, 300.0) is LAST
    trouble.record(LAST, 400.0)
    assert trouble.first_error is LAST
    assert trouble.first_failure_s == 400.0


class TestRetry:
    def attempt_count(
        self, errors: list[RocketMQError], times: int = 3, deadline: Deadline | None = None
    ) -> list[object]:
        """What each try ended with."""
        seen: list[object] = []

        def ask() -> str:
            if errors:
                seen.append(errors.pop(0))
                raise seen[-1]  # type: ignore[misc]
            seen.append("answer")
            return "answer"

        with contextlib.suppress(RocketMQError):
            Retry(times, 0.0).run(ask, deadline)
        return seen

    def test_until_it_succeeds_or_tries_are_over(self) -> None:
        lost = [ConnectionLost("lost") for _ in range(9)]
        assert self.attempt_count(lost[:2]) == [lost[0], lost[1], "answer"]
        assert self.attempt_count(lost[:9]) == lost[:4]
        assert self.attempt_count(lost[:1], times=0) == lost[:1]

    def test_what_will_not_pass_is_not_repeated(self) -> None:
        error = NotFound("no")
        assert self.attempt_count([error]) == [error]

    def test_not_beyond_the_deadline(self) -> None:
        late = CallTimeout("late")
        assert self.attempt_count([late], deadline=Deadline.after(0.0)) == [late]

    def test_a_deadline_that_expires_does_not_hide_the_first_cause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nor does the question that it cut short take the place of the last answer."""
        errors = [
            ConnectionLost("the broker is gone", "h:1"),
            BrokerNotFound("no address is registered"),
            CallTimeout("the time was over", "ns:1"),
        ]
        deadline = Deadline.after(60.0)

        def ask() -> None:
            if len(errors) == 1:
                monkeypatch.setattr(Deadline, "expired", True)
            raise errors.pop(0)

        with pytest.raises(
            ConnectionLost, match=r"the broker is gone; tried 3 times .*\(at h:1\): at last: no address is registered$"
        ):
            Retry(3, 0.0).run(ask, deadline)
