"""How much is asked for at once: follows what the broker gives, and keeps the bound of bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import options
from rocketmq_spark.pull.pacing import MAX_PULL_DEPTH, PullPacing, PullSettings

Broker = Callable[[int], tuple[int, int]]


def gives(max_messages: int, size: int) -> Broker:
    """A broker that answers with ``max_messages`` messages of one size at most."""
    return lambda asked: (min(asked, max_messages), min(asked, max_messages) * size)


def run(pacing: PullPacing, broker: Broker, pulls: int) -> list[int]:
    """What was asked for."""
    asked = []
    for _ in range(pulls):
        count = pacing.next_pull_size()
        pacing.on_pull_sent(count)
        pacing.on_answers_received(count, *broker(count))
        asked.append(count)
    return asked


def test_the_first_pull_is_small_and_alone() -> None:
    pacing = PullPacing(PullSettings())
    assert (pacing.next_pull_size(), pacing.depth()) == (8, 1)
    assert PullPacing(PullSettings(batch_size=3)).next_pull_size() == 3
    assert PullPacing(PullSettings(depth=5)).depth() == 1


def test_a_broker_as_shipped_is_asked_for_what_it_gives() -> None:
    pacing = PullPacing(PullSettings())
    asked = run(pacing, gives(32, 100), 200)
    assert asked[1] == 32
    assert asked.count(32) > 190
    assert max(asked) == 64  # a try now and then
    assert pacing.depth() == MAX_PULL_DEPTH


def test_raised_limits_are_found() -> None:
    asked = run(PullPacing(PullSettings()), gives(100_000, 100), 12)
    assert asked[-1] == 1024


def test_limits_that_are_raised_later_are_found() -> None:
    pacing = PullPacing(PullSettings())
    run(pacing, gives(32, 100), 50)
    assert run(pacing, gives(100_000, 100), 150)[-1] == 1024


def test_cold_data_is_asked_for_in_eights_and_warm_again_in_more() -> None:
    pacing = PullPacing(PullSettings())
    run(pacing, gives(32, 100), 10)
    assert run(pacing, gives(8, 100), 3)[-1] == 8
    assert max(run(pacing, gives(32, 100), 200)) >= 32


def test_ends_of_ranges_do_not_stop_the_search_for_more() -> None:
    """A try that met the end of a range was once waited for, for ever."""
    pacing = PullPacing(PullSettings())
    run(pacing, gives(32, 100), 3)
    for _ in range(200):
        pacing.next_pull_size()
        pacing.on_pull_sent(5)  # proposed were more
        pacing.on_answers_received(5, 5, 500)
    assert run(pacing, gives(100_000, 100), 200)[-1] == 1024


def test_a_try_whose_answer_never_comes_is_forgotten() -> None:
    pacing = PullPacing(PullSettings())
    run(pacing, gives(32, 100), 2)
    assert pacing.next_pull_size() == 64
    pacing.on_pull_sent(64)
    assert pacing.next_pull_size() == 32
    pacing.on_pulls_lost()
    assert pacing.next_pull_size() == 64


def test_one_large_message_does_not_change_the_count_for_good() -> None:
    pacing = PullPacing(PullSettings())
    run(pacing, gives(1024, 100), 20)
    pacing.on_answers_received(1, 1, 4 << 20)
    assert pacing.next_pull_size() == 1
    assert pacing.depth() <= 2
    assert run(pacing, gives(1024, 100), 100)[-1] > 500


@pytest.mark.parametrize("depth", [None, 64])
@given(sizes=st.lists(st.integers(1, 4 << 20), min_size=1, max_size=30))
def test_bytes_under_way_follow_the_largest_answers_at_once(depth: int | None, sizes: list[int]) -> None:
    settings = PullSettings(max_bytes_in_flight=8 << 20, depth=depth)
    pacing = PullPacing(settings)
    for size in sizes:
        count = pacing.next_pull_size()
        pacing.on_pull_sent(count)
        pacing.on_answers_received(count, count, size * count)
        if size * count <= settings.max_bytes_in_flight:
            assert pacing.depth() * size * count <= settings.max_bytes_in_flight
        else:
            assert pacing.depth() == 1


def test_the_depth_that_is_set_is_kept_within_the_bound() -> None:
    pacing = PullPacing(PullSettings(depth=4))
    run(pacing, gives(32, 100), 5)
    assert pacing.depth() == 4
    run(pacing, gives(32, 256 << 10), 5)
    assert pacing.depth() < 4


def test_filtered_pulls_always_ask_for_all_they_may() -> None:
    assert set(run(PullPacing(PullSettings(has_filter=True)), gives(3, 100), 50)) == {1024}


@given(st.integers(1, 2000), st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 300_000)), max_size=60), st.data())
def test_counts_stay_within_what_is_allowed(batch: int, answers: list[tuple[int, int]], data: st.DataObject) -> None:
    pacing = PullPacing(PullSettings(batch_size=batch))
    for max_messages, size in answers:
        count = pacing.next_pull_size()
        assert 1 <= count <= batch
        sent = min(count, data.draw(st.integers(1, 3000)))
        pacing.on_pull_sent(sent)
        pacing.on_answers_received(sent, min(sent, max_messages), size)
        assert 1 <= pacing.depth() <= MAX_PULL_DEPTH


def test_settings_of_pulls_come_from_the_options() -> None:
    settings = PullSettings.of(
        options.parse({"pullDepth": "3", "maxBytesInFlight": "1m", "readDeadline": "5s", "pullBatchSize": "7"})
    )
    assert (settings.depth, settings.max_bytes_in_flight) == (3, 1 << 20)
    assert (settings.read_deadline_s, settings.batch_size) == (5.0, 7)
