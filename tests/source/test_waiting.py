"""What is waited for, for how long, and what is an error at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import BrokerBusy, BrokerNotFound, ConnectionLost, OffsetError, RouteNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source.bounds_reader import BoundsReader
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.waiting import WaitLimits, fetch_bounds_of_masters, retry_until
from tests.mockbroker import MockBroker
from tests.source.scripted import route, stats

QUEUE = MessageQueue("t", "a", 0)
TOPICS = frozenset({"t"})
MASTERS = QueuesView({QUEUE: QueueBounds(5, 20, 0)}, topics=TOPICS)
SLAVES = QueuesView({QUEUE: QueueBounds(7, 18, 0)}, brokers_without_master=frozenset({"a"}), topics=TOPICS)


class Answers:
    """A reader that gives one answer after the other; the last one again and again."""

    clock = Clock()

    def __init__(self, *answers, known=(), have_brokers_answered=True):
        self.answers, self.known, self.have_brokers_answered, self.waited = (
            list(answers),
            known,
            have_brokers_answered,
            [],
        )
        self.ports = SimpleNamespace(routes=SimpleNamespace(with_similar_topics=lambda error: error))

    def fetch_complete_view(self):
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_known_topic(self, topic):
        return topic in self.known

    def note_retriable_error(self, error):
        self.waited.append(error)


def fetched(reader, **limits):
    return retry_until(
        reader, reader.fetch_complete_view, WaitLimits(**{"deadline": LONG, "topic_deadline": Deadline(0), **limits})
    )


def masters(reader, options=None, **limits):
    of_start = WaitLimits(**{"deadline": LONG, "topic_deadline": Deadline(0), "max_attempts": 1, **limits})
    return retry_until(reader, lambda: fetch_bounds_of_masters(reader, options, of_start), of_start)


class TwoTries(Deadline):
    """Is over after a pause, however long that took."""

    expired = False

    def pause(self, seconds):
        self.expired = True


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


LOST, GONE = ConnectionLost("refused", "a:1"), ConnectionLost("no name server answers", "n:1")
BUSY = BrokerBusy("busy")
ABSENT, UNREADABLE = (
    RouteNotFound("no route", broker_code=17, topic="t"),
    RouteNotFound("no read permission", topic="t"),
)
LONG = Deadline(float("inf"))


def test_retriable_error_is_retried_and_noted():
    reader = Answers(LOST, GONE, MASTERS)
    assert fetched(reader) is MASTERS
    assert reader.waited == [LOST, GONE]


def test_a_slave_alone_is_not_asked_what_its_master_keeps():
    """The start waits for the master then; there is none to be asked."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"b": {1: broker.address}}))
        broker.on(Request.GET_TOPIC_STATS_INFO, stats({MessageQueue("t", "b", 0): (2, 9)}))
        made = {"nameServer": broker.address, "subscribe": "t", "numRetries": 0, "requestTimeout": "1s"}
        view = BoundsReader(options_table.parse(made).for_role("stream source")).fetch_complete_view()
        session.close_all()
    assert (view.brokers_without_master, [bounds.min_offset for bounds in view.bounds.values()]) == ({"b"}, [2])


@pytest.mark.parametrize("error", [OffsetError("behind the end"), ABSENT, UNREADABLE])
def test_permanent_error_and_new_topic_are_raised_at_once(error):
    reader = Answers(error, MASTERS)
    with pytest.raises(type(error)):
        fetched(reader)
    assert not reader.waited


def test_a_topic_that_was_there_is_waited_for():
    assert fetched(Answers(ABSENT, MASTERS, known={"t"})) is MASTERS
    assert fetched(Answers(UNREADABLE, MASTERS, known={"t"})) is MASTERS


def test_a_new_topic_is_waited_for_until_its_own_deadline():
    assert fetched(Answers(ABSENT, ABSENT, MASTERS), topic_deadline=LONG, deadline=Deadline(0)) is MASTERS
    with pytest.raises(RouteNotFound):
        fetched(Answers(UNREADABLE, MASTERS), topic_deadline=LONG)


def test_waits_for_a_topic_are_no_attempts_to_reach_a_server():
    """The name server answered all the time."""
    answers = [ABSENT, ABSENT, ABSENT, BUSY, MASTERS]
    assert masters(Answers(*answers, have_brokers_answered=False), topic_deadline=LONG, max_attempts=2) is MASTERS
    with pytest.raises(BrokerBusy, match=r"\[ROCKETMQ_BUSY\] busy$"):
        masters(Answers(*answers, have_brokers_answered=False), topic_deadline=LONG, max_attempts=1)


def test_read_deadline_begins_when_the_topic_is_there():
    """Also for the next wait of the same call."""
    limits = WaitLimits(Deadline(0), LONG, read_deadline_s=60.0)
    for answers in ([ABSENT, BUSY, MASTERS], [BUSY, MASTERS]):
        reader = Answers(*answers)
        assert retry_until(reader, reader.fetch_complete_view, limits) is MASTERS
    with pytest.raises(BrokerBusy, match=r"\[ROCKETMQ_BUSY\] busy$"):
        fetched(Answers(ABSENT, BUSY), topic_deadline=LONG, read_deadline_s=0.0)


@pytest.mark.parametrize("looks", range(4))
def test_topic_deadline_during_an_attempt_ends_no_stream(looks):
    """The attempt that finds no topic then is not the last one: a stream starts without a topic."""

    class Expiring(Deadline):
        looked = 0

        @property
        def expired(self):
            self.looked += 1
            return self.looked > looks

        def pause(self, seconds):
            pass

    pattern = SimpleNamespace(subscribe_pattern="family-.*")
    assert masters(Answers(QueuesView()), pattern, topic_deadline=Expiring(0)) == QueuesView()


def test_what_is_waited_for_is_logged(caplog):
    caplog.set_level("INFO")
    pattern = SimpleNamespace(subscribe_pattern="family-.*")
    assert masters(Answers(QueuesView(), ABSENT, MASTERS), pattern, topic_deadline=LONG) is MASTERS
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for a topic: no topic matches option 'subscribePattern' 'family-.*'",
        "waiting for topic t",
    ]


def test_first_error_is_raised_at_the_deadline():
    with pytest.raises(ConnectionLost, match=r"refused; tried 2 times.*at last: no name server answers"):
        fetched(Answers(LOST, GONE), deadline=TwoTries(0))


def test_bounds_are_those_of_masters():
    reader = Answers(SLAVES, LOST, SLAVES, MASTERS)
    assert masters(reader) is MASTERS
    assert [type(e) for e in reader.waited] == [BrokerNotFound, ConnectionLost, BrokerNotFound]


@pytest.mark.parametrize(("attempts", "answers"), [(1, [LOST, MASTERS]), (3, [LOST, LOST, LOST, MASTERS])])
def test_a_start_that_reaches_no_server_makes_a_few_attempts(attempts, answers):
    reader = Answers(*answers, have_brokers_answered=False)
    with pytest.raises(ConnectionLost, match="refused"):
        masters(reader, max_attempts=attempts)
    assert reader.answers == [MASTERS]
    assert masters(Answers(*answers, have_brokers_answered=False), max_attempts=attempts + 1) is MASTERS


def test_a_master_that_stays_away_is_an_error():
    with pytest.raises(BrokerNotFound, match="only slaves of a are up"):
        masters(Answers(SLAVES), deadline=Deadline(0))
