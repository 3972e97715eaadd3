"""One function for all data loss: an error, a warning or a note, and always the same words."""

from __future__ import annotations

import logging

import pytest

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark.source import data_loss


def lost(count=1, cause=Cause.TRUNCATED):
    return [(OffsetRange(MessageQueue("t", "b", i), 3, 10), cause) for i in range(count)]


@pytest.mark.parametrize("cause", list(Cause))
def test_an_error_names_queue_offsets_cause_and_the_option(cause):
    with pytest.raises(DataLossError) as caught:
        data_loss.report_data_loss("fail", lost(2, cause))
    text = str(caught.value)
    assert f"14 offsets cannot be read any more: t/b/0 offsets 3 to 10 ({cause.value}); t/b/1 offsets 3 to 10" in text
    assert "Set option 'failOnDataLoss' to 'warn' or 'ignore'" in text
    assert (caught.value.topic, caught.value.queue) == ("t", "t/b/0")


@pytest.mark.parametrize(("policy", "level"), [("warn", logging.WARNING), ("ignore", logging.INFO)])
def test_other_policies_say_it_in_one_line(caplog, policy, level):
    caplog.set_level(logging.INFO, "rocketmq_spark")
    data_loss.report_data_loss(policy, lost(12))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith("84 offsets cannot be read any more: ")
    assert record.getMessage().endswith(f"and 2 more; failOnDataLoss={policy}")


@pytest.mark.parametrize(
    ("found", "new"),
    [
        ((3, 10), None),
        ((5, 10), None),  # the new topic has grown
        ((10, 10), None),
        ((3, 14), (10, 14)),  # more has expired
        ((2, 10), (2, 10)),
        ((12, 12), (12, 12)),
    ],
)
def test_only_what_was_not_reported_is_a_new_loss(found, new):
    queue = MessageQueue("t", "b", 0)
    losses = [(OffsetRange(queue, *found), Cause.TRUNCATED)]
    expected = [] if new is None else [(OffsetRange(queue, *new), Cause.TRUNCATED)]
    assert data_loss.unreported_losses(losses, lost()) == expected
    assert data_loss.unreported_losses(losses, []) == losses
    assert data_loss.unreported_losses(losses, lost(cause=Cause.WENT_BACK)) == losses
    assert data_loss.unreported_losses(lost(2), lost()) == lost(2)[1:]


def test_a_loss_of_unknown_size_is_not_called_0_offsets(caplog):
    """How many messages of a topic were not read before it was made again is unknown."""
    unknown = [(OffsetRange(MessageQueue("t", "b", 7), 100, 100), Cause.WENT_BACK)]
    data_loss.report_data_loss("warn", unknown)
    data_loss.report_data_loss("warn", [*lost(), *unknown])
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith(
        "an unknown number of offsets cannot be read any more: t/b/7 from offset 100 on (offset went back"
    )
    assert second.startswith(
        "at least 7 offsets cannot be read any more: t/b/0 offsets 3 to 10 (truncated by retention); t/b/7"
    )


def test_nothing_lost_is_not_worth_a_word(caplog):
    data_loss.report_data_loss("fail", [])
    assert not caplog.records
