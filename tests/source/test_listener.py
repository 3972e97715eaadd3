"""The listener commits what a query has finished, as soon as Spark tells; with real queries in tests/live/group."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rocketmq_spark.errors import ConnectionLost, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.source.listener import GroupOffsetListener

END = '{"topics":{"t":{"b":{"0":5}},"u":{"b":{"0":7}}},"v":1}'
T, U = MessageQueue("t", "b", 0), MessageQueue("u", "b", 0)


def progress(*ends):
    return SimpleNamespace(progress=SimpleNamespace(sources=[SimpleNamespace(endOffset=end) for end in ends]))


@pytest.fixture
def listening(monkeypatch):
    def made(**options):
        listener = GroupOffsetListener(name_server="h:1", group="g", **options)
        committed = []
        monkeypatch.setattr(listener._group_offsets, "commit", committed.append)
        return listener, committed

    return made


def test_a_group_is_needed():
    with pytest.raises(OptionError, match="option 'group' is required"):
        GroupOffsetListener(name_server="h:1")


def test_the_end_of_a_batch_is_committed(listening):
    listener, committed = listening()
    listener.onQueryProgress(progress(END))
    assert committed == [{T: 5, U: 7}]


def test_only_the_topics_that_are_named(listening):
    listener, committed = listening(subscribe="u")
    listener.onQueryProgress(progress(END))
    assert committed == [{U: 7}]


@pytest.mark.parametrize("other", ["17", "null", '{"kafka":{"0":5}}', None, '{"topics":7}'])
def test_other_formats_are_left_alone(listening, other):
    listener, committed = listening()
    listener.onQueryProgress(progress(other, END))
    assert committed == [{T: 5, U: 7}]


def test_a_query_does_not_suffer_from_a_broker(listening, monkeypatch, caplog):
    listener, _ = listening()

    def refuse(positions):
        raise ConnectionLost("no broker")

    monkeypatch.setattr(listener._group_offsets, "commit", refuse)
    listener.onQueryProgress(progress(END))
    assert "the offsets of a finished batch are not committed" in caplog.text


def test_nothing_else_matters(listening):
    listener, committed = listening()
    for call in (listener.onQueryStarted, listener.onQueryIdle, listener.onQueryTerminated):
        call(SimpleNamespace())
    assert committed == []
