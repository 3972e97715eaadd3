from __future__ import annotations

import random
from typing import Any

import pytest

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    ClosedError,
    ConnectionLost,
    LocalProtocolError,
    MessageRefused,
    RocketMQError,
    RouteNotFound,
    SendFailed,
    UnprovedError,
    error_for,
)
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.producer.fault_tolerance import broker_report
from rocketmq_spark.producer.retry import RETRY_CODES, OutOfTime, RetryAttempt, RetryPolicy, RetryState
from tests.queues import q

OK = SendResult(SendStatus.SEND_OK, "", q("a:0"), 1)
SLAVE = SendResult(SendStatus.SLAVE_NOT_AVAILABLE, "", q("a:0"), 1)
LOST = ConnectionLost("the connection broke", "host:1")
AB = ("a", "b")


def code(number: Response) -> RocketMQError:
    return error_for(number)("no", "host:1", number, "T", remark="remark")


def attempts(pinned: bool = False, **policy: Any) -> RetryState:
    return RetryState(RetryPolicy(**policy), pinned, random.Random(0))


def test_the_default_codes_are_javas_eight() -> None:
    assert {int(c) for c in RETRY_CODES} == {17, 14, 1, 2, 16, 204, 205, 1500}


def test_success_and_other_stored_states_are_results() -> None:
    assert attempts().next_action(q("a:0"), OK, AB, 3.0) is OK
    assert attempts().next_action(q("a:0"), SLAVE, AB, 3.0) is SLAVE


def test_non_ok_store_status_is_retried_and_returned_at_the_end() -> None:
    tries = attempts(store_must_be_ok=True)
    assert tries.next_action(q("a:0"), SLAVE, AB, 3.0) == RetryAttempt(0.0, False)
    assert tries.next_action(q("b:0"), LOST, AB, 3.0).__class__ is RetryAttempt
    assert tries.next_action(q("a:0"), LOST, AB, 3.0) is SLAVE
    late = attempts(store_must_be_ok=True)
    assert late.next_action(q("a:0"), SLAVE, AB, 0.0) is SLAVE
    final = attempts(store_must_be_ok=True)
    final.next_action(q("a:0"), SLAVE, AB, 3.0)
    assert final.next_action(q("b:0"), code(Response.MESSAGE_ILLEGAL), AB, 3.0) is SLAVE


@pytest.mark.parametrize("number", sorted(RETRY_CODES))
def test_retryable_codes_are_retried_at_once_on_another_broker(number: Response) -> None:
    verdict = attempts().next_action(q("a:0"), code(number), AB, 3.0)
    assert isinstance(verdict, RetryAttempt)
    assert verdict.pause_s == 0.0


@pytest.mark.parametrize("number", [Response.MESSAGE_ILLEGAL, Response.TRANSACTION_FAILED])
def test_other_codes_are_final(number: Response) -> None:
    error = code(number)
    assert attempts().next_action(q("a:0"), error, AB, 3.0) is error


def test_silent_name_server_costs_no_retry_and_error_names_cause() -> None:
    tries = attempts(retries=1)
    for _ in range(9):
        assert (
            tries.next_action(None, ConnectionLost("no name server answers: refused"), (), 3.0).__class__
            is RetryAttempt
        )
    assert tries.next_action(q("a:0"), CallTimeout("late"), AB, 3.0).__class__ is RetryAttempt
    failed = tries.next_action(None, OutOfTime("the send timeout is over"), AB, 0.0)
    assert isinstance(failed, SendFailed)
    assert "the send timeout expired after 1 attempt; brokers tried: a; the error: no name" in failed.message
    tries = attempts(retries=None)
    tries.next_action(q("a:0"), LOST, AB, 3.0)
    failed = tries.next_action(None, ConnectionLost("no name server answers"), AB, 0.0)
    assert isinstance(failed, SendFailed)
    assert failed.message.endswith("the first error: the connection broke; the last error: no name server answers")


def test_time_out_asks_for_the_route() -> None:
    assert attempts().next_action(q("a:0"), CallTimeout("late"), AB, 3.0) == RetryAttempt(0.0, True)


def test_queue_that_is_not_there_moves_what_may_go_anywhere() -> None:
    error = code(Response.INVALID_PARAMETER)
    for retries in (2, None):
        assert attempts(retries=retries).next_action(q("a:9"), error, AB, 3.0) == RetryAttempt(0.0, True)
    assert attempts(pinned=True, pinned_retries=None).next_action(q("a:9"), error, AB, 3.0) is error
    tries = attempts(retries=None)
    verdicts = [tries.next_action(q("a:9"), error, ("a",), 3.0) for _ in range(3)]
    assert [verdict.__class__ is RetryAttempt for verdict in verdicts] == [True, True, False], "it may be for good"


def test_a_user_may_add_codes() -> None:
    tries = attempts(codes=frozenset({Response.MESSAGE_ILLEGAL}))
    assert isinstance(tries.next_action(q("a:0"), code(Response.MESSAGE_ILLEGAL), AB, 3.0), RetryAttempt)


@pytest.mark.parametrize(
    "error", [LOST, CallTimeout("late"), BrokerNotFound("gone"), code(Response.FLOW_CONTROL), RocketMQError("odd")]
)
def test_transport_errors_are_retried(error: RocketMQError) -> None:
    assert isinstance(attempts().next_action(q("a:0"), error, AB, 3.0), RetryAttempt)


@pytest.mark.parametrize("error", [MessageRefused("x"), LocalProtocolError("x"), ClosedError("x"), RouteNotFound("x")])
def test_what_would_be_the_same_next_time_is_final(error: RocketMQError) -> None:
    assert attempts().next_action(None, error, (), 3.0) is error


@pytest.mark.parametrize("pinned", [False, True])
def test_what_may_be_stored_is_not_sent_again(pinned: bool) -> None:
    """Also where time alone bounds the attempts."""
    error = UnprovedError("the broker lost its tail")
    assert attempts(pinned, retries=None, pinned_retries=None).next_action(q("a:0"), error, AB, 3.0) is error


def test_three_attempts_then_an_error_with_everything_known() -> None:
    tries = attempts()
    assert isinstance(tries.next_action(q("a:0"), LOST, AB, 3.0), RetryAttempt)
    assert isinstance(tries.next_action(q("b:0"), LOST, AB, 3.0), RetryAttempt)
    busy = code(Response.SYSTEM_BUSY)
    busy.stored = {"A": OK}
    failed = tries.next_action(q("a:1"), busy, AB, 3.0)
    assert isinstance(failed, SendFailed)
    assert failed.message == (
        "all retries failed after 3 attempts; brokers tried: a, b, a; the first error: the connection broke; "
        "the last error: no"
    )
    assert (failed.addr, failed.broker_code, failed.topic, failed.remark) == ("host:1", 2, "T", "remark")
    assert failed.__cause__ is busy
    assert failed.stored == {"A": OK}


def test_single_unrepeatable_attempt_raises_its_own_error() -> None:
    assert attempts(retries=0).next_action(q("a:0"), LOST, AB, 3.0) is LOST
    assert attempts(pinned=True).next_action(q("a:0"), LOST, AB, 0.0) is LOST


def test_the_end_of_time_names_the_real_cause() -> None:
    failed = attempts().next_action(q("a:0"), LOST, AB, 0.0)
    assert isinstance(failed, SendFailed)
    assert "the send timeout expired after 1 attempt;" in str(failed)
    assert "the connection broke" in str(failed)


def test_broker_that_failed_in_this_call_is_retried_after_pause() -> None:
    tries = attempts(retries=None, first_pause_s=0.1, max_pause_s=1.0)
    verdicts = [tries.next_action(q(name), LOST, AB, 30.0) for name in ("a:0", "b:0", "a:0", "b:0")]
    pauses = [verdict.pause_s for verdict in verdicts if isinstance(verdict, RetryAttempt)]
    assert pauses[0] == 0.0
    assert 0.05 <= pauses[1] <= 0.1
    assert 0.1 <= pauses[2] <= 0.2
    assert 0.2 <= pauses[3] <= 0.4


def test_a_pause_that_outlasts_the_deadline_is_not_made() -> None:
    tries = attempts(retries=None, first_pause_s=1.0)
    assert isinstance(tries.next_action(q("a:0"), LOST, ("a",), 0.4), SendFailed)


def test_unlimited_retries_apply_to_transient_errors_only() -> None:
    tries = attempts(retries=None)
    for _ in range(50):
        assert isinstance(tries.next_action(q("a:0"), code(Response.SYSTEM_BUSY), AB, 9.0), RetryAttempt)
    doubtful = [tries.next_action(q("a:0"), code(Response.SYSTEM_ERROR), AB, 9.0) for _ in range(3)]
    assert [isinstance(verdict, RetryAttempt) for verdict in doubtful] == [True, True, False]
    assert isinstance(attempts(retries=None).next_action(None, RouteNotFound("x"), (), 9.0), RetryAttempt)


def test_pinned_send_has_own_retry_count_and_stops_at_refusal() -> None:
    tries = attempts(pinned=True, pinned_retries=1)
    verdict = tries.next_action(q("a:0"), LOST, AB, 3.0)
    assert isinstance(verdict, RetryAttempt)
    assert verdict.pause_s > 0
    assert isinstance(tries.next_action(q("a:0"), LOST, AB, 3.0), SendFailed)
    denied = code(Response.NO_PERMISSION)
    assert attempts(pinned=True, pinned_retries=None).next_action(q("a:0"), denied, AB, 3.0) is denied


def test_errors_that_say_so_ask_for_the_route() -> None:
    assert attempts().next_action(q("a:0"), code(Response.TOPIC_NOT_EXIST), AB, 3.0) == RetryAttempt(0.0, True)
    assert attempts().next_action(q("a:0"), code(Response.SYSTEM_BUSY), AB, 3.0) == RetryAttempt(0.0, False)


@pytest.mark.parametrize(
    ("outcome", "isolated", "reachable"),
    [
        (OK, False, True),
        (SLAVE, False, True),
        (BrokerNotFound("x"), False, True),
        (LOST, True, False),
        (CallTimeout("x"), True, False),
        (code(Response.SYSTEM_BUSY), True, False),
    ],
)
def test_what_an_outcome_says_of_its_broker(outcome: Any, isolated: bool, reachable: bool) -> None:
    assert broker_report(outcome) == (isolated, reachable)


def test_our_own_errors_say_nothing_of_a_broker() -> None:
    assert broker_report(MessageRefused("x")) is None
