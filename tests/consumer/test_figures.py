"""Figures of the last minute and the last hour, by topic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.consumer.figures import HOUR_MS, MINUTE_MS, ConsumerFigures
from rocketmq_spark.model.membership import GetRunningInfo, TopicFigures
from tests.consumer.group import GroupBench
from tests.queues import q

START = 5_003_000  # in the midst of ten seconds


def test_nothing_is_known_of_a_topic_without_messages() -> None:
    assert ConsumerFigures().figures_of_topics(["T"], START) == {"T": TopicFigures()}
    assert TopicFigures().consume_ms is None


def test_means_and_rates_are_those_of_the_last_minute() -> None:
    one = ConsumerFigures()
    one.record_pull("T", 30, 4, START)
    one.record_pull("T", 10, 8, START + 9_000)
    one.record_call("T", 20, 0, 3, START + 9_000)
    one.record_call("T", 0, 10, 9, START + 10_000)
    found = one.figures_of_topic("T", START + 10_000)
    assert found == TopicFigures(6.0, 4.0, 6.0, 2.0, 1.0, 10)
    later = one.figures_of_topic("T", START + 10_000 + MINUTE_MS)
    assert (later.pull_ms, later.pulled_per_s, later.consumed_per_s, later.failed_per_s) == (None, 0.0, 0.0, 0.0)
    assert (later.consume_ms, later.failed) == (6.0, 10), "of the hour, as in Java"
    assert one.figures_of_topic("T", START + 10_000 + HOUR_MS) == TopicFigures()


def test_topics_are_told_apart() -> None:
    one = ConsumerFigures()
    one.record_call("T", 1, 0, 0, START)
    one.record_call("U", 0, 2, 0, START)
    found = one.figures_of_topics(["V"], START)
    assert [(topic, figures.failed) for topic, figures in found.items()] == [("T", 0), ("U", 2), ("V", 0)]


@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_failures_of_an_hour_are_those_that_were_told(calls: list[tuple[int, int, int]]) -> None:
    one, now_ms, told = ConsumerFigures(), START, []
    for gap_ms, done, failed in calls:
        now_ms += gap_ms
        one.record_call("T", done, failed, 1, now_ms)
        told.append((now_ms, failed))
    step = [failed for at_ms, failed in told if at_ms - at_ms % 10_000 > now_ms - HOUR_MS]
    assert one.figures_of_topic("T", now_ms).failed == sum(step)


def test_a_member_tells_them_to_brokers_and_to_its_user(group: GroupBench) -> None:
    consumer, port = group.start(lambda messages, context: None if messages[0].body != b"bad" else 1 / 0)
    assert consumer.stats().topics["T"].consume_ms is None
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"good", b"bad")
    group.time.advance(1)
    assert port.asked is not None
    info = port.asked("a:1", GetRunningInfo(False))
    assert info is not None
    assert set(info.topics) == {"T", "%RETRY%g"}
    figures = info.topics["T"]
    assert (figures.failed, figures.consume_ms) == (1, 0.0)
    assert figures.consumed_per_s == figures.failed_per_s > 0
    assert figures.pulled_per_s > 0
    assert consumer.stats().topics["T"].failed == 1


def test_an_ordered_member_counts_what_is_tried_again(group: GroupBench) -> None:
    consumer, _ = group.start(lambda messages, context: context.suspend(10), ordered=True)
    group.time.advance(2)
    group.brokers.send(q("a:0"), b"bad")
    group.time.advance(5)
    stats = consumer.stats()
    assert stats.topics["T"].failed == stats.failed > 1
    assert stats.topics["T"].consumed_per_s == 0.0
