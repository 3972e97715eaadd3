"""What is waited for, for how long, and what is an error at once."""

from __future__ import annotations

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import BrokerNotFound, ConnectionLost, OffsetError, RouteNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source import bounds_reader
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.waiting import fetch_bounds_of_masters, retry_until_deadline
from tests.mockbroker import MockBroker
from tests.source.scripted import route, stats

QUEUE = MessageQueue("t", "a", 0)
MASTERS = QueuesView({QUEUE: QueueBounds(5, 20, 0)})
SLAVES = QueuesView({QUEUE: QueueBounds(7, 18, 0)}, brokers_without_master=frozenset({"a"}))


class BoundsReader:
    """Gives one answer after the other; the last one again and again."""

    read_deadline_s = 60.0
    clock = Clock()

    def __init__(self, *answers, known=()):
        self.answers, self.known, self.waited, self.routed = list(answers), known, [], 0

    def fetch_all(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_known_topic(self, topic):
        return topic in self.known

    def note_retriable_error(self, error):
        self.waited.append(error)

    def refresh_routes(self):
        self.routed += 1


class TwoTries(Deadline):
    """Is over after a pause, however long that took."""

    expired = False

    def pause(self, seconds):
        self.expired = True


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


LOST, GONE = ConnectionLost("refused", "a:1"), ConnectionLost("no name server answers", "n:1")
ABSENT = RouteNotFound("no route", topic="t")


def test_what_time_heals_is_asked_again_after_the_routes():
    bounds_reader = BoundsReader(LOST, GONE, MASTERS)
    assert retry_until_deadline(bounds_reader, bounds_reader.fetch_all) is MASTERS
    assert (bounds_reader.waited, bounds_reader.routed) == ([LOST, GONE], 2)


def test_a_slave_alone_is_not_asked_what_its_master_keeps():
    """The start waits for the master then; there is none to be asked."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"b": {1: broker.address}}))
        broker.on(Request.GET_TOPIC_STATS_INFO, stats({MessageQueue("t", "b", 0): (2, 9)}))
        made = {"nameServer": broker.address, "subscribe": "t", "numRetries": 0, "requestTimeout": "1s"}
        view = bounds_reader.BoundsReader(options_table.parse(made).for_role("stream source")).fetch_all()
        session.close_all()
    assert (view.brokers_without_master, [bounds.min_offset for bounds in view.bounds.values()]) == ({"b"}, [2])


def test_what_time_does_not_heal_is_an_error_at_once():
    for error in (OffsetError("behind the end"), ABSENT):
        bounds_reader = BoundsReader(error, MASTERS)
        with pytest.raises(type(error)):
            retry_until_deadline(bounds_reader, bounds_reader.fetch_all)
        assert not bounds_reader.waited


def test_a_topic_that_was_there_is_waited_for():
    bounds_reader = BoundsReader(ABSENT, MASTERS, known={"t"})
    assert retry_until_deadline(bounds_reader, bounds_reader.fetch_all) is MASTERS


def test_the_first_cause_is_told_when_time_is_over():
    bounds_reader = BoundsReader(LOST, GONE)
    with pytest.raises(ConnectionLost, match=r"refused; tried 2 times.*at last: no name server answers"):
        retry_until_deadline(bounds_reader, bounds_reader.fetch_all, TwoTries(0))


def test_bounds_are_those_of_masters():
    bounds_reader = BoundsReader(SLAVES, LOST, SLAVES, MASTERS)
    assert fetch_bounds_of_masters(bounds_reader) is MASTERS
    assert [type(e) for e in bounds_reader.waited] == [BrokerNotFound, ConnectionLost, BrokerNotFound]


def test_a_start_that_reaches_nobody_fails_at_once():
    with pytest.raises(ConnectionLost, match="refused"):
        fetch_bounds_of_masters(BoundsReader(LOST, MASTERS))


def test_a_master_that_stays_away_is_an_error():
    bounds_reader = BoundsReader(SLAVES)
    bounds_reader.read_deadline_s = 0.0
    with pytest.raises(BrokerNotFound, match="only slaves of a are up"):
        fetch_bounds_of_masters(bounds_reader)
