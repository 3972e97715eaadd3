"""What an answer means for a reader that owns its offsets: the cases of the protocol reference, and rules 4 and 6."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import AccessDenied, BrokerError, GroupNotFound, ServerFault
from rocketmq_spark.pull.outcomes import Cause, Continue, Lost, Reconnect, RepeatPull, Reset, Suspect, judge
from rocketmq_spark.remoting.bulk import EmptyAnswer

START = 100


def answer(
    code: int, remark: str = "", beyond: int | None = None, low: int | None = 0, high: int = 1000, **more: int
) -> EmptyAnswer:
    return EmptyAnswer(code, remark, beyond, low, high, 0, **more)


WENT_BACK = Suspect(Cause.WENT_BACK)

CASES = [
    # at the end of the queue, although the plan saw more: the index lags, or the queue is another one
    (answer(19, "OFFSET_OVERFLOW_ONE", 100), WENT_BACK),
    (answer(19, "NO_MESSAGE_IN_QUEUE", 0), WENT_BACK),
    (answer(19, "OFFSET_FOUND_NULL", 300), Suspect(Cause.TRUNCATED, 300)),
    (answer(19, "SOMETHING_NEW", 300), Continue(300)),
    (answer(19, "", None), WENT_BACK),
    # nothing matched
    (answer(20, "NO_MATCHED_MESSAGE", 900), Continue(900)),
    (answer(20, "NO_MATCHED_MESSAGE", 100), RepeatPull(reroute=True)),
    (answer(20, "", None), RepeatPull(reroute=True)),
    (answer(20, "MESSAGE_WAS_REMOVING", 250), Lost(250, Cause.TRUNCATED)),
    (answer(20, "NO_MATCHED_MESSAGE", 900, 100), Continue(900)),
    (answer(20, "NO_MATCHED_MESSAGE", 900, 101), Lost(101, Cause.TRUNCATED)),
    # what a slave says when it would be 21 on a master
    (answer(20, "OFFSET_TOO_SMALL", 500, 500), RepeatPull(reroute=True)),
    (answer(20, "OFFSET_OVERFLOW_BADLY", 400), RepeatPull(reroute=True)),
    (answer(20, "NO_MATCHED_LOGIC_QUEUE", 400), RepeatPull(reroute=True)),
    # moved
    (answer(21, "OFFSET_TOO_SMALL", 500, 500), Lost(500, Cause.TRUNCATED)),
    (answer(21, "OFFSET_TOO_SMALL", 500, None), Lost(500, Cause.TRUNCATED)),
    (answer(21, "OFFSET_OVERFLOW_BADLY", 40, 0, 40), WENT_BACK),
    (answer(21, "NO_MESSAGE_IN_QUEUE", 0, 0, 0), WENT_BACK),
    (answer(21, "NO_MATCHED_LOGIC_QUEUE", 0, 0, 0), WENT_BACK),
    (answer(21, "", None, None), WENT_BACK),
    (answer(21, "OFFSET_RESET", 700), Reset(700)),
    (answer(21, "OFFSET_RESET", 700, 700), Reset(700)),
    (answer(21, "OFFSET_RESET", None), RepeatPull()),
    # not now
    (answer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy"), RepeatPull()),
    (answer(14), RepeatPull(reroute=True)),
    (answer(215), RepeatPull(reroute=True)),
    (answer(501), RepeatPull(reroute=True)),
    (answer(27), RepeatPull(reroute=True)),
    (answer(28), RepeatPull(reroute=True)),
    (answer(1500, "bye"), Reconnect()),
    (answer(16, "the broker[10.0.0.5] pulling message is forbidden", forbidden_type=1), RepeatPull()),
    (answer(16, "the topic[t] pulling message is forbidden", forbidden_type=3), RepeatPull()),
    (answer(16, "the topic[t] pulling message is forbidden"), RepeatPull()),  # a broker before 5.0
    # gone, perhaps
    (answer(17, "topic[t] not exist"), Suspect(Cause.TOPIC_DELETED)),
    (answer(29, "queueId[3] is illegal"), Suspect(Cause.QUEUE_GONE)),
]


@pytest.mark.parametrize(("given_answer", "decision"), CASES)
def test_cases(given_answer: EmptyAnswer, decision: object) -> None:
    assert judge(START, given_answer) == decision


def test_operator_reset_is_neither_progress_nor_loss() -> None:
    for beyond in (0, START, 10_000):
        assert judge(START, answer(21, "OFFSET_RESET", beyond, beyond)) == Reset(beyond)


@given(st.sampled_from([19, 20, 21]), st.text(max_size=5), st.none() | st.integers(0, 200), st.integers(0, 200))
def test_nothing_leads_backwards(code: int, remark: str, beyond: int | None, low: int) -> None:
    match judge(START, answer(code, remark, beyond, low)):
        case Continue(at):
            assert at > START
        case Lost(until):
            assert until > START
        case Suspect(_, until):
            assert until is None or until > START
        case RepeatPull():
            pass
        case other:
            pytest.fail(f"{other}")


def refusal(code: int, remark: str) -> BrokerError:
    decision = judge(START, answer(code, remark))
    assert isinstance(decision, BrokerError)
    assert not decision.retriable
    assert (decision.broker_code, decision.remark) == (code, remark)
    return decision


def test_access_denied_is_final() -> None:
    error = refusal(16, "User:x has no permission to access Topic:t")
    assert isinstance(error, AccessDenied)
    assert "Sub and Get on the topic" in str(error)


def test_a_group_or_subscription_that_the_broker_misses() -> None:
    assert isinstance(refusal(26, "subscription group [g] does not exist"), GroupNotFound)
    for code in (24, 25, 26):
        assert "option 'group'" in str(refusal(code, ""))


def test_a_broker_without_sql_is_told_what_to_set() -> None:
    error = refusal(1, "The broker does not support consumer to filter message by SQL92")
    assert isinstance(error, ServerFault)
    assert "enablePropertyFilter=true" in str(error)


@given(st.integers(0, 3000))
def test_every_code_has_a_decision_and_what_is_raised_is_final(code: int) -> None:
    decision = judge(START, answer(code, "remark", 50))
    if isinstance(decision, BrokerError):
        assert not decision.retriable
    assert decision != Continue(50)


def test_codes_are_those_of_the_reference() -> None:
    assert (Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED) == (19, 20, 21)
