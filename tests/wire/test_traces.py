"""Trace records, character by character as Java's ``TraceDataEncoder`` writes them, and how they are put into messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.wire import traces
from rocketmq_spark.wire.traces import Acknowledgement, ConsumeReturn, MessageKind, TracedMessage, TraceRecord

PLAIN = TracedMessage("orders", "ID1", None, None, "DefaultRegion")
FULL = TracedMessage("orders", "ID1", "paid", "k1 k2", "east")


def fields(record: TraceRecord) -> list[str]:
    assert record.text.endswith("\x02")
    return record.text[:-1].split("\x01")


def test_a_stored_message() -> None:
    record = traces.publish_record(
        FULL, "shop", 1700, 12, Acknowledgement(5, MessageKind.DELAY, "1.2.3.4:10911", "AB", True)
    )
    assert fields(record) == [
        "Pub", "1700", "east", "shop", "orders", "ID1", "paid", "k1 k2", "1.2.3.4:10911", "5", "12", "3", "AB", "true",
    ]  # fmt: skip
    assert record.keys == ("ID1", "k1", "k2")


def test_what_is_missing_is_the_word_null() -> None:
    record = traces.publish_record(PLAIN, "shop", 1700, 12, Acknowledgement(5, MessageKind.NORMAL, "", None, False))
    assert fields(record)[6:] == ["null", "null", "", "5", "12", "0", "null", "false"]
    assert record.keys == ("ID1",)


def test_an_id_of_another_client_that_no_key_can_be_is_several() -> None:
    """A broker's key has no blank: one such id was the end of all records that were sent with it."""
    assert traces.consume_start_record(FULL._replace(msg_id="A B"), "g", "R", 1, 0).keys == ("A", "B", "k1", "k2")


def test_a_consumed_message() -> None:
    assert fields(traces.consume_start_record(FULL, "billing", "R", 1800, 2)) == [
        "SubBefore", "1800", "east", "billing", "R", "ID1", "2", "k1 k2",
    ]  # fmt: skip
    assert fields(traces.consume_end_record(FULL, "billing", "R", 1900, 7, ConsumeReturn.EXCEPTION)) == [
        "SubAfter", "R", "ID1", "7", "false", "k1 k2", "2", "1900", "billing",
    ]  # fmt: skip
    assert fields(traces.consume_end_record(FULL, "billing", "R", 1900, 7, ConsumeReturn.SUCCESS))[4] == "true"


def test_decisions_and_recalls() -> None:
    assert fields(traces.transaction_end_record(FULL, "shop", 1700, "T", "COMMIT_MESSAGE", True)) == [
        "EndTransaction", "1700", "east", "shop", "orders", "ID1", "paid", "k1 k2", "", "2", "T", "COMMIT_MESSAGE", "true",
    ]  # fmt: skip
    assert fields(traces.recall_record(PLAIN, "shop", 1700, True)) == [
        "Recall", "1700", "DefaultRegion", "shop", "orders", "ID1", "true",
    ]  # fmt: skip


def test_kinds_and_regions_are_those_of_the_properties() -> None:
    assert MessageKind.of({"TRAN_MSG": "true", "DELAY": "3"}) is MessageKind.HALF
    assert {
        MessageKind.of({name: "1"}) for name in ("DELAY", "TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS")
    } == {MessageKind.DELAY}
    assert MessageKind.of({"KEYS": "DELAY"}) is MessageKind.NORMAL
    stored = {"UNIQ_KEY": "ID1", "TAGS": "paid", "KEYS": "k1 k2", "MSG_REGION": "east"}
    assert TracedMessage.from_properties("orders", stored) == FULL
    assert TracedMessage.from_properties("orders", stored, "west").region == "west"
    assert TracedMessage.from_properties("orders", {"UNIQ_KEY": "ID1"}) == PLAIN


records = st.builds(
    TraceRecord,
    st.text(st.characters(exclude_characters="\x02"), max_size=60_000).map(lambda text: text + "\x02"),
    st.lists(st.text(min_size=1, max_size=9_000), min_size=1, max_size=6).map(tuple),
)


@given(st.lists(st.one_of(records, st.just(TraceRecord("short\x02", ("id",)))), max_size=300))
def test_every_record_is_in_one_message_that_a_broker_takes(given_records: list[TraceRecord]) -> None:
    made = list(traces.trace_messages(given_records))
    assert "".join(body for body, _, _ in made) == "".join(record.text for record in given_records)
    at = 0
    for body, keys, count in made:
        inside = given_records[at : at + count]
        at += count
        assert body == "".join(record.text for record in inside)
        assert count == 1 or len(body) <= traces.MAX_CHARACTERS
        assert 1 <= count <= traces.MAX_RECORDS
        assert len(set(keys)) == len(keys)
        assert sum(len(key.encode()) + 1 for key in keys) <= max(traces.MAX_KEY_BYTES, 0)
        for record in inside:
            assert record.keys[0] in keys or len(record.keys[0].encode()) >= traces.MAX_KEY_BYTES
        assert set(keys) <= {key for record in inside for key in record.keys}
    assert at == len(given_records)


def test_a_message_has_a_hundred_records() -> None:
    many = [TraceRecord(f"{i}\x02", (f"id{i}",)) for i in range(250)]
    assert [count for _, _, count in traces.trace_messages(many)] == [100, 100, 50]
