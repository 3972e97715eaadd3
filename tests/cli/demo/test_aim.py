import pytest

from rocketmq_spark.cli.demo.aim import Aim, Batches, Kill


def test_totals_of_the_batch_in_flight_are_those_that_came_since_the_last_one_finished():
    aim = Aim()
    quiet, flying = Batches(7, 7), Batches(8, 7)
    assert aim.stored(quiet, 20, quiet) is None
    assert aim.stored(flying, 20, flying) == 0
    assert aim.stored(flying, 26, flying) == 6


def test_nothing_is_known_of_a_batch_whose_beginning_was_not_seen():
    aim = Aim()
    quiet, flying = Batches(7, 7), Batches(9, 8)
    assert aim.stored(flying, 20, flying) is None
    aim.stored(quiet, 20, quiet)
    assert aim.stored(flying, 26, flying) is None


def test_a_count_that_went_back_is_not_known():
    aim = Aim()
    aim.stored(Batches(7, 7), 20, Batches(7, 7))
    assert aim.stored(Batches(8, 7), 15, Batches(8, 7)) is None


@pytest.mark.parametrize(("before", "after"), [(Batches(7, 6), Batches(7, 7)), (Batches(7, 7), Batches(8, 7))])
def test_a_count_from_the_time_of_a_change_is_no_beginning(before, after):
    aim = Aim()
    aim.stored(before, 20, after)
    assert aim.stored(Batches(8, 7), 26, Batches(8, 7)) is None


@pytest.mark.parametrize(
    ("kill", "text"),
    [
        (Kill(23, 6), "kill -9 of Spark's driver in batch 23, 6 of its totals stored"),
        (Kill(None, 0), "kill -9 of Spark's driver between two batches"),
    ],
)
def test_a_kill_is_told_in_words(kill, text):
    assert str(kill) == text
