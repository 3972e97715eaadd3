import pytest

from rocketmq_spark.cli.demo.batch_totals import Batches, BatchTotals, Kill


def test_totals_of_a_batch_are_those_since_the_last_finished():
    totals = BatchTotals()
    quiet, flying = Batches(7, 7), Batches(8, 7)
    assert totals.stored(quiet, 20, quiet) is None
    assert totals.stored(flying, 20, flying) == 0
    assert totals.stored(flying, 26, flying) == 6


def test_totals_of_a_batch_not_seen_to_begin_are_unknown():
    totals = BatchTotals()
    quiet, flying = Batches(7, 7), Batches(9, 8)
    assert totals.stored(flying, 20, flying) is None
    totals.stored(quiet, 20, quiet)
    assert totals.stored(flying, 26, flying) is None


def test_a_count_that_went_back_is_not_known():
    totals = BatchTotals()
    totals.stored(Batches(7, 7), 20, Batches(7, 7))
    assert totals.stored(Batches(8, 7), 15, Batches(8, 7)) is None


@pytest.mark.parametrize(("before", "after"), [(Batches(7, 6), Batches(7, 7)), (Batches(7, 7), Batches(8, 7))])
def test_a_count_from_the_time_of_a_change_is_no_beginning(before, after):
    totals = BatchTotals()
    totals.stored(before, 20, after)
    assert totals.stored(Batches(8, 7), 26, Batches(8, 7)) is None


@pytest.mark.parametrize(
    ("kill", "text"),
    [
        (Kill(23, 6), "kill -9 of Spark's driver in batch 23, 6 of its totals stored"),
        (Kill(None, 0), "kill -9 of Spark's driver between two batches"),
    ],
)
def test_a_kill_in_words(kill, text):
    assert str(kill) == text
