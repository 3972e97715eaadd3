from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.consumer.rebalance import (
    ConsumeFrom,
    ConsumeFromWhere,
    StartOffset,
    StartOffsetRequests,
    start_offset,
)
from rocketmq_spark.errors import CallTimeout, OffsetError, RocketMQError, ServerFault
from tests.queues import q

NORMAL, RETRY = q("a:0"), q("a:0", "%RETRY%g")
MODES = {
    "last": ConsumeFrom(),
    "first": ConsumeFrom(ConsumeFromWhere.EARLIEST),
    "time": ConsumeFrom(ConsumeFromWhere.TIMESTAMP, 77),
}


class Broker:
    """Answers or raises what it is told, and remembers what it was asked."""

    def __init__(self, stored: object = None, maximum: object = 12345, found: object = 23456) -> None:
        self.answers = {"stored": stored, "max": maximum, "search": found}
        self.asked: list[str] = []

    def ask(self, what: str) -> int | None:
        self.asked.append(what)
        answer = self.answers[what]
        if isinstance(answer, RocketMQError):
            raise answer
        assert answer is None or isinstance(answer, int)
        return answer

    @property
    def questions(self) -> StartOffsetRequests:
        def number(what: str) -> int:
            found = self.ask(what)
            assert found is not None
            return found

        def search(epoch_ms: int) -> int:
            assert epoch_ms == 77
            return number("search")

        return StartOffsetRequests(lambda: self.ask("stored"), lambda: number("max"), search)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("queue", [NORMAL, RETRY])
@pytest.mark.parametrize("stored", [0, 1, 1 << 40])
def test_stored_offset_decides_in_every_mode(mode, queue, stored):
    """Of 0 a broker does not say whether the group has it, or the queue is young: so it counts as not stored."""
    broker = Broker(stored)
    assert start_offset(queue, MODES[mode], broker.questions) == StartOffset(stored, stored > 0)
    assert broker.asked == ["stored"]


@pytest.mark.parametrize(
    ("mode", "queue", "expected", "asked"),
    [
        ("last", NORMAL, 12345, "max"),
        ("last", RETRY, 0, None),
        ("first", NORMAL, 0, None),
        ("first", RETRY, 0, None),
        ("time", NORMAL, 23456, "search"),
        ("time", RETRY, 0, None),  # Java: its end
    ],
)
def test_where_there_is_none_the_mode_decides(mode, queue, expected, asked):
    broker = Broker(None)
    assert start_offset(queue, MODES[mode], broker.questions) == StartOffset(expected, False)
    again = ["stored"] if asked == "max" else []
    assert broker.asked == ["stored", *([asked] if asked else []), *again]


@pytest.mark.parametrize("stored", [0, 7])
def test_message_arriving_between_offset_requests_is_not_skipped(stored):
    """An empty queue has no offset of a group, a young one 0: a broker that got its first message meanwhile says so."""
    broker = Broker(None, maximum=1)
    first = broker.questions

    def end() -> int:
        broker.answers["stored"] = stored
        return first.max_offset()

    assert start_offset(NORMAL, MODES["last"], replace(first, max_offset=end)) == StartOffset(stored, stored > 0)


def test_an_empty_queue_is_asked_about_once():
    broker = Broker(None, maximum=0)
    assert start_offset(NORMAL, MODES["last"], broker.questions) == StartOffset(0, False)
    assert broker.asked == ["stored", "max"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("error", [ServerFault("code 1"), CallTimeout("late")])
def test_question_that_failed_is_no_answer(mode, error):
    broker = Broker(error)
    with pytest.raises(type(error)):
        start_offset(NORMAL, MODES[mode], broker.questions)
    assert broker.asked == ["stored"]


@pytest.mark.parametrize(("mode", "failing"), [("last", "maximum"), ("time", "found")])
def test_neither_is_a_failed_second_question(mode, failing):
    with pytest.raises(CallTimeout):
        start_offset(NORMAL, MODES[mode], Broker(None, **{failing: CallTimeout("late")}).questions)


@given(st.integers(max_value=-1), st.sampled_from(["stored", "maximum", "found"]), st.sampled_from(sorted(MODES)))
def test_an_offset_below_zero_is_never_pulled(offset, which, mode):
    broker = Broker(**{which: offset})
    names = {"stored": "stored", "maximum": "max", "found": "search"}
    try:
        found = start_offset(NORMAL, MODES[mode], broker.questions).offset
    except OffsetError:
        assert broker.asked[-1] == names[which]
    else:
        assert found >= 0
        assert names[which] not in broker.asked
