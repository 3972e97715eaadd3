"""Which endpoint takes a call."""

from __future__ import annotations

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.grpc_proxy.channel import AVOID_S, Endpoints


def test_what_belongs_nowhere_goes_round():
    ends = Endpoints(["a:1", "b:1", "c:1"])
    assert [ends.choose(None, 0.0) for _ in range(4)] == ["a:1", "b:1", "c:1", "a:1"]


def test_one_that_failed_is_left_alone_for_a_while():
    ends = Endpoints(["a:1", "b:1", "c:1"])
    ends.record_failure("b:1", 100.0)
    assert ends.choose("b:1", 100.0) == "c:1"
    assert ends.choose("a:1", 100.0) == "a:1"
    assert ends.choose("b:1", 100.0 + AVOID_S) == "b:1"


def test_one_that_took_long_to_fail_is_left_alone_for_longer():
    ends = Endpoints(["a:1", "b:1"])
    ends.record_failure("b:1", 100.0, 23.0)
    assert [ends.choose("b:1", 100.0 + after) for after in (AVOID_S, 23.0)] == ["a:1", "b:1"]


def test_one_that_answers_is_used_at_once():
    ends = Endpoints(["a:1", "b:1"])
    ends.record_failure("a:1", 0.0)
    ends.record_contact("a:1")
    assert ends.choose("a:1", 0.0) == "a:1"


def test_when_all_failed_the_own_one_is_tried():
    ends = Endpoints(["a:1", "b:1"])
    ends.record_failure("a:1", 0.0)
    ends.record_failure("b:1", 0.0)
    assert ends.choose("b:1", 0.0) == "b:1"


def test_failed_endpoint_gets_part_of_time_until_it_answers() -> None:
    """One whose host lost power would take all of a call's time each time it is tried."""
    endpoints, deadline = Endpoints(["a", "b"]), Deadline.after(1000)
    endpoints.record_answer("a")
    assert endpoints.call_deadline("a", deadline, 2) is deadline
    endpoints.record_failure("a", 0.0)
    assert endpoints.call_deadline("a", deadline, 2).remaining() < 600
    endpoints.record_answer("a")
    assert endpoints.call_deadline("a", deadline, 2) is deadline
