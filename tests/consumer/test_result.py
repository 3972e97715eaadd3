from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.threads import Failure
from rocketmq_spark.consumer.listener import (
    AcknowledgingContext,
    Context,
    OrderedAction,
    OrderedContext,
    OrderedVerdict,
    ReplyingContext,
    Verdict,
    judge_concurrent_outcome,
    judge_ordered_outcome,
    with_replier,
)
from rocketmq_spark.consumer.process_queue import in_batches, with_next_attempt
from rocketmq_spark.errors import MessageRefused, NotSupported, OptionError
from tests.consumer.messages import QUEUE, message

FAILED = Failure(KeyError("k"))


def context(ack_index: int | None = None, delay_level: int = 0) -> Context:
    made = Context(QUEUE)
    made.ack_index, made.delay_level = ack_index, delay_level
    return made


@pytest.mark.parametrize(("ack_index", "done"), [(None, 4), (99, 4), (3, 4), (2, 3), (0, 1), (-1, 0), (-5, 0)])
def test_returning_none_is_success_up_to_the_ack_index(ack_index: int | None, done: int) -> None:
    assert judge_concurrent_outcome(None, context(ack_index, delay_level=3), 4) == Verdict(done, 3)


def test_retry_is_of_all_messages_at_its_level() -> None:
    given = context(ack_index=2)
    assert judge_concurrent_outcome(given.retry(), given, 4) == Verdict(0)
    assert judge_concurrent_outcome(given.retry(5), given, 4) == Verdict(0, 5)
    assert judge_concurrent_outcome(given.retry(level=-1), given, 4) == Verdict(0, -1)


@pytest.mark.parametrize("nonsense", [True, False, 0, "CONSUME_SUCCESS", [], Context, FAILED])
def test_everything_else_is_a_failure_and_said(nonsense: object) -> None:
    found = judge_concurrent_outcome(nonsense, Context(QUEUE), 4)
    assert found.done_count == 0
    expected = "raised KeyError" if nonsense is FAILED else "expected None or context.retry()"
    assert found.problem is not None
    assert expected in found.problem


def test_a_coroutine_that_a_decorator_returns_has_a_remedy() -> None:
    async def listener(messages: object, context: object) -> None: ...

    coroutine = listener((), None)
    for why in (
        judge_concurrent_outcome(coroutine, Context(QUEUE), 4).problem,
        judge_ordered_outcome(coroutine, OrderedContext(QUEUE), 0).problem,
    ):
        assert why is not None
        assert why.endswith("; rocketmq_spark.aio awaits coroutines")
    coroutine.close()


@given(st.none() | st.integers(), st.integers(1, 99))
def test_never_more_is_done_than_there_was(ack_index: int | None, size: int) -> None:
    assert 0 <= judge_concurrent_outcome(None, context(ack_index), size).done_count <= size


def test_ordered_success_commits_by_itself_or_goes_on() -> None:
    assert judge_ordered_outcome(None, OrderedContext(QUEUE), 1000) == OrderedVerdict(OrderedAction.COMMIT)
    assert judge_ordered_outcome(None, OrderedContext(QUEUE, auto_commit=False), 1000) == OrderedVerdict(
        OrderedAction.CONTINUE
    )


def test_ordered_commit_and_rollback_by_hand() -> None:
    context = OrderedContext(QUEUE, auto_commit=False)
    assert judge_ordered_outcome(context.commit(), context, 1000) == OrderedVerdict(OrderedAction.COMMIT)
    assert judge_ordered_outcome(context.rollback(), context, 1000) == OrderedVerdict(OrderedAction.ROLLBACK, 1000)


def test_rollback_fails_where_consumer_commits_automatically() -> None:
    context = OrderedContext(QUEUE)
    assert judge_ordered_outcome(context.commit(), context, 1000).action is OrderedAction.COMMIT
    found = judge_ordered_outcome(context.rollback(), context, 1000)
    assert found.action is OrderedAction.RETRY
    assert found.problem is not None
    assert "expected None or context.suspend()" in found.problem


@pytest.mark.parametrize(
    ("asked", "pause"),
    [(None, 1000), (0, 10), (10, 10), (12.4, 12), (700, 700), (30_000, 30_000), (9**9, 30_000), (math.inf, 30_000)],
)
def test_suspended_queue_waits_between_10_ms_and_30_s(asked: int | None, pause: int) -> None:
    context = OrderedContext(QUEUE)
    assert judge_ordered_outcome(context.suspend(asked), context, 1000) == OrderedVerdict(OrderedAction.RETRY, pause)


@pytest.mark.parametrize("auto_commit", [True, False])
@pytest.mark.parametrize("outcome", [FAILED, "SUCCESS", True])
def test_an_ordered_listener_that_fails_gets_the_same_again(auto_commit: bool, outcome: object) -> None:
    found = judge_ordered_outcome(outcome, OrderedContext(QUEUE, auto_commit), 1000)
    assert (found.action, found.pause_ms, bool(found.problem)) == (OrderedAction.RETRY, 1000, True)


def test_attempts_are_counted_in_a_copy() -> None:
    first = message(1)
    assert (with_next_attempt(with_next_attempt(first)).reconsume_times, first.reconsume_times) == (2, 0)
    for sent, counted in ((-(2**31), 1), (-1, 1), (2**31 - 1, 2**31 - 1)):  # its sender chose it
        assert with_next_attempt(replace(first, reconsume_times=sent)).reconsume_times == counted


def test_pull_is_cut_into_slices() -> None:
    found = list(in_batches([message(i) for i in range(32)], 10))
    assert [len(part) for part in found] == [10, 10, 10, 2]
    assert all(isinstance(part, tuple) for part in found)


def test_a_part_that_was_taken_is_not_held() -> None:
    class Large:
        pass

    parts = in_batches([Large() for _ in range(4)], 2)  # type: ignore[list-item]
    taken = weakref.ref(next(parts)[0])
    assert taken() is None
    assert len(next(parts)) == 2


class Textless:
    def __repr__(self) -> str:
        raise SystemExit

    __str__ = __repr__


WRONG_LEVELS = ["3", None, 1.0, True, -2, 1 << 31, 10**5000, Textless()]


@pytest.mark.parametrize("level", WRONG_LEVELS, ids=range(len(WRONG_LEVELS)))
def test_invalid_delay_level_is_refused_where_it_is_set(level: Any) -> None:
    given = Context(QUEUE)
    with pytest.raises(OptionError, match=r"the delay level is .*; expected -1 for a dead letter, 0"):
        given.retry(level)
    with pytest.raises(OptionError, match="the delay level is"):
        given.delay_level = level
    assert given.delay_level == 0


@pytest.mark.parametrize("index", [1.0, "1", True, math.nan, Textless()])
def test_an_ack_index_that_is_no_index_is_refused(index: Any) -> None:
    given = Context(QUEUE)
    with pytest.raises(OptionError, match=r"ack_index is .*; expected the index of a message, -1 or None"):
        given.ack_index = index
    assert given.ack_index is None


@pytest.mark.parametrize("ms", ["5s", math.nan, True, [1], Textless()])
def test_a_pause_that_is_no_number_is_refused(ms: Any) -> None:
    with pytest.raises(OptionError, match=r"suspend got .* ms; expected a number of milliseconds"):
        OrderedContext(QUEUE).suspend(ms)


def test_what_has_no_text_is_a_failure_like_any_other() -> None:
    for outcome in (Textless(), Failure(type("Odd", (Exception,), {"__str__": Textless.__repr__})())):
        assert judge_concurrent_outcome(outcome, Context(QUEUE), 1).done_count == 0
        assert judge_ordered_outcome(outcome, OrderedContext(QUEUE), 1000).action is OrderedAction.RETRY


@pytest.mark.parametrize("made", [Context(QUEUE), OrderedContext(QUEUE)], ids=["concurrent", "ordered"])
def test_a_context_answers_its_message_or_the_one_that_is_named(made: ReplyingContext) -> None:
    got: list[tuple[object, ...]] = []
    first, second = message(0), message(1)
    with_replier(made, (first,), lambda *given: got.append(given)).reply(b"yes")
    with_replier(made, (first, second), lambda *given: got.append(given)).reply(b"no", to=second, properties={"a": "b"})
    assert got == [(first, b"yes", None), (second, b"no", {"a": "b"})]
    with pytest.raises(OptionError, match=r"got 2 messages; expected reply\(body, to=message\)"):
        made.reply(b"yes")
    assert len(got) == 2


def test_an_error_of_an_answer_is_the_listener_s() -> None:
    def refusing(*given: object) -> None:
        raise MessageRefused("it is not a request")

    with pytest.raises(MessageRefused):
        with_replier(Context(QUEUE), (message(0),), refusing).reply(b"yes")


@pytest.mark.parametrize("made", [Context(QUEUE), OrderedContext(QUEUE), AcknowledgingContext(QUEUE)])
def test_over_grpc_nothing_is_answered(made: ReplyingContext) -> None:
    with pytest.raises(NotSupported, match="need transport=remoting"):
        made.reply(b"yes")
    with pytest.raises(NotSupported):
        with_replier(made, (message(0),), None).reply(b"yes")
