"""Counts of tasks and their sum."""

import pickle

import pytest

from rocketmq_spark.errors import RocketMQError, SendFailed
from rocketmq_spark.spark.sink.report import (
    BrokerCounts,
    TaskCounts,
    Written,
    total,
    warn_of_omitted_headers,
    warn_of_unmatched_messages,
    with_counts,
)


def test_a_tally_counts_by_broker():
    tally = TaskCounts()
    tally.count_acknowledged("b", 10, 100)
    tally.count_acknowledged("b", 5, 50, retries=3, failed_brokers=["a", "a"])
    written = tally.written()
    assert written == Written(15, 150, 2, 3, {"a": BrokerCounts(failures=2), "b": BrokerCounts(15, 150, 2)})
    assert pickle.loads(pickle.dumps(written)) == written
    assert str(written) == (
        "15 rows in 2 batches, 150 bytes, 3 retries (a 0 rows in 0 batches and 2 failed attempts; b 15 rows in 2 batches)"
    )


def test_the_sum_leaves_out_tasks_that_did_not_finish():
    one = Written(1, 2, 3, 4, {"a": BrokerCounts(1, 2, 3)})
    assert total([one, None, one]) == Written(2, 4, 6, 8, {"a": BrokerCounts(2, 4, 6)})
    assert total([None]) == Written()
    assert str(Written(1, 2, 3)) == "1 rows in 3 batches, 2 bytes, 0 retries"


def test_an_error_of_a_task_has_all_in_its_one_line():
    cause = ValueError("why")
    error = SendFailed("gave up", "h:1", topic="t", remedy="Look at the broker")
    error.__cause__ = cause
    error.add_note("The spool could not keep it: it is full.")
    found = with_counts(error, Written(7, 70, 2, 1))
    assert str(found) == (
        "[ROCKETMQ_SEND_FAILED] gave up (at h:1, topic t). The spool could not keep it: it is full. "
        "Acknowledged before that: 7 rows in 2 batches, 70 bytes, 1 retries. Look at the broker"
    )
    assert type(found) is SendFailed
    assert found.__cause__ is cause
    assert not hasattr(found, "__notes__")


def test_error_without_a_remedy_ends_with_acknowledged_counts():
    assert str(with_counts(RocketMQError("x"), Written())).endswith(
        "Acknowledged before that: 0 rows in 0 batches, 0 bytes, 0 retries"
    )


def test_headers_that_were_left_out_are_reported_once_per_write(caplog):
    written = total([Written(rows=1, left_out=2), Written(rows=1, left_out=3)])
    assert str(written).endswith(", 5 headers left out")
    for each in (written, Written(rows=1)):
        warn_of_omitted_headers(each, "batch 4")
    assert [record.message.split(",")[0] for record in caplog.records] == ["batch 4: 5 headers were left out"]


@pytest.mark.parametrize(
    ("sent", "twice"),
    [
        (500, "up to 30 rows may be there twice"),
        (10, "up to 10 rows may be there twice"),
        (0, "no row is there twice because of them"),
    ],
)
def test_unmatched_messages_are_reported_with_rows_stored_twice(caplog, sent, twice):
    warn_of_unmatched_messages(Written(rows=sent, unmatched=30), "batch 4")
    (record,) = caplog.records
    assert record.getMessage().startswith("batch 4: 30 messages that an earlier attempt stored match no row")
    assert record.getMessage().endswith(f"These messages stay in the topic; {twice}")


def test_a_repeat_whose_messages_all_match_is_no_warning(caplog):
    warn_of_unmatched_messages(Written(rows=5, already_stored=5), "batch 4")
    assert not caplog.records
