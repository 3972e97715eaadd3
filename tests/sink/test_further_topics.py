"""A batch that failed on bad rows, and is finished by a version of the job that sends these rows to a topic of their own."""

from __future__ import annotations

import pytest

from rocketmq_spark.errors import CallTimeout, OptionError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import exactly_once
from tests.helpers import stored
from tests.live.writes import Make, bodies, frame
from tests.sink.test_once import Sink, sink, soon

__all__ = ["sink", "soon"]


def test_a_batch_may_be_finished_with_further_topics(
    timerless: LocalBroker, make_timerless_topic: Make, sink: Sink
) -> None:
    good, bad = make_timerless_topic(queues=2), make_timerless_topic(queues=2)
    before = sink.options(topic=good)
    sink.attempt(sink.plan(before), before, frame(body=["a", "b"]))
    repaired = sink.options(allowedTopics=f"{bad},{good}")
    rows = frame(body=["a", "b", "no number", "c"], topic=[good, good, bad, good])
    done = sink.attempt(sink.plan(repaired), repaired, rows)
    assert (done.sent, done.already_stored, done.unmatched) == (2, 2, 0)
    done = sink.attempt(sink.plan(repaired), repaired, rows)
    assert (done.sent, done.already_stored, done.unmatched) == (0, 4, 0)
    assert sorted(bodies(stored(timerless, good, 3))) == ["a", "b", "c"]
    assert bodies(stored(timerless, bad, 1)) == ["no number"]
    with pytest.raises(
        OptionError, match=rf"was begun for .*{bad}.*, and the query now writes to {good}; .*sends again"
    ):
        sink.plan(before)


def test_further_topics_are_noted_before_anything_is_sent(
    make_timerless_topic: Make, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their ends, no later attempt could tell which of their rows are stored."""
    good, bad = make_timerless_topic(queues=2), make_timerless_topic(queues=2)
    sink.plan(sink.options(topic=good))

    def unanswered(options: Options) -> None:
        raise CallTimeout("no answer")

    with monkeypatch.context() as patched:
        patched.setattr(exactly_once, "snapshot_queue_ends", unanswered)
        assert sink.plan(sink.options(topic=good)).ends.topics == [good]
        with pytest.raises(CallTimeout):
            sink.plan(sink.options(allowedTopics=f"{bad},{good}"))
    assert sink.plan(sink.options(allowedTopics=f"{bad},{good}")).ends.topics == sorted([good, bad])
