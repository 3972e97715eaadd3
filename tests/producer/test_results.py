from __future__ import annotations

import numpy as np
import pytest

from rocketmq_spark.errors import MessageIllegal, SendFailed
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.producer import batching
from rocketmq_spark.producer.accumulator import BatchEntry
from rocketmq_spark.producer.outgoing import split_result, with_message_ids
from rocketmq_spark.producer.rows.sent import OutcomeCollector
from tests.queues import q


def result(msg_id: str = "", offset_msg_id: str | None = None, offset: int | None = 100) -> SendResult:
    return SendResult(SendStatus.SEND_OK, msg_id, q("a:0"), offset, offset_msg_id, "TX")


def test_joined_ids_become_one_result_each_with_rising_offsets() -> None:
    parts = split_result(result("A,B,C", "x,y,z"), 3)
    assert [(r.msg_id, r.offset_msg_id, r.queue_offset) for r in parts] == [
        ("A", "x", 100),
        ("B", "y", 101),
        ("C", "z", 102),
    ]
    assert {(r.status, r.transaction_id) for r in parts} == {(SendStatus.SEND_OK, "TX")}


def test_results_of_a_batch_are_a_sequence() -> None:
    parts = split_result(result("A,B,C", "x,y,z"), 3)
    assert (len(parts), parts[-1].msg_id, parts[-1].queue_offset) == (3, "C", 102)
    assert [each.msg_id for each in parts[1:]] == ["B", "C"]
    with pytest.raises(IndexError):
        parts[3]


def test_ids_that_do_not_fit_are_an_error() -> None:
    for bad in (result("A,B", "x,y"), result("A,B,C", "x,y"), result("A,B,C", None)):
        with pytest.raises(SendFailed, match="sendResult is illegal"):
            split_result(bad, 3)


def test_without_a_comma_every_message_has_the_same_result() -> None:
    inner = result("Z", "x", 7)
    assert split_result(inner, 3) == [inner, inner, inner]
    assert split_result(result("A", "x"), 1) == [result("A", "x")]


def test_offsets_that_are_not_known_stay_unknown() -> None:
    assert [r.queue_offset for r in split_result(result("A,B", "x,y", None), 2)] == [None, None]


def test_batch_that_is_stored_as_one_message_has_the_batchs_id() -> None:
    assert with_message_ids(result(offset_msg_id="x"), ("A", "B"), "BATCH").msg_id == "BATCH"
    assert (
        with_message_ids(result("UNIQ", "x"), ("A", "B"), "BATCH").msg_id == "UNIQ"
    )  # a sender that passes batchUniqId on
    assert with_message_ids(result(offset_msg_id="x,y"), ("A", "B"), "BATCH").msg_id == "A,B"
    assert with_message_ids(result(offset_msg_id="x"), ("A",), "BATCH").msg_id == "A"
    assert with_message_ids(result(offset_msg_id="x"), ("A",)).msg_id == "A"


def test_message_behind_refused_one_of_its_group_is_only_unsent() -> None:
    """Who drops what is refused for good would lose it."""
    error = MessageIllegal("too large")
    error.skipped_ids = ("B",)
    first, behind, last = batching._outcomes_by_message(error, [BatchEntry(b"", 0, name, (), None) for name in "ABC"])
    assert isinstance(behind, SendFailed)
    assert (behind.message, behind.__cause__) == (
        "not sent, because an earlier message of its group was rejected: too large",
        error,
    )
    for share in (first, last):
        assert isinstance(share, MessageIllegal)
        assert share.skipped_ids == ()


@pytest.mark.parametrize(
    ("stored", "behind", "said"),
    [("", "c", ["refused", "refused", "not sent"]), ("a", "", ["stored", "refused", "refused"])],
)
def test_partly_stored_error_gives_each_row_its_own_outcome(stored: str, behind: str, said: list[str]) -> None:
    error = MessageIllegal("refused")
    error.stored = {each * 32: result(each * 32) for each in stored}
    error.skipped_ids = tuple(each * 32 for each in behind)
    ends = OutcomeCollector()
    ends.add_rows(np.frombuffer(b"".join(each * 32 for each in (b"a", b"b", b"c")), np.uint8).reshape(3, 32))
    ends.add_outcome(np.arange(3), error)
    sent = ends.result()
    assert [str(each) if isinstance(each, MessageIllegal) else type(each).__name__ for each in sent] == [
        {"refused": str(error), "not sent": "SendFailed", "stored": "SendResult"}[each] for each in said
    ]
    assert sent.failed.tolist() == [i for i, each in enumerate(said) if each != "stored"]
