"""Counts of tasks and their sum."""

import pickle

from rocketmq_spark.sink.report import AtBroker, Tally, Written, total


def test_a_tally_counts_by_broker():
    tally = Tally()
    tally.acknowledged("b", 10, 100)
    tally.acknowledged("b", 5, 50, retries=3, failed=["a", "a"])
    written = tally.written()
    assert written == Written(15, 150, 2, 3, {"a": AtBroker(failures=2), "b": AtBroker(15, 150, 2)})
    assert pickle.loads(pickle.dumps(written)) == written
    assert str(written) == (
        "15 rows in 2 batches, 150 bytes, 3 retries (a 0 rows in 0 batches and 2 failed attempts; b 15 rows in 2 batches)"
    )


def test_the_sum_leaves_out_tasks_that_did_not_finish():
    one = Written(1, 2, 3, 4, {"a": AtBroker(1, 2, 3)})
    assert total([one, None, one]) == Written(2, 4, 6, 8, {"a": AtBroker(2, 4, 6)})
    assert total([None]) == Written()
    assert str(Written(1, 2, 3)) == "1 rows in 3 batches, 2 bytes, 0 retries"
