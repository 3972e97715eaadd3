"""Messages whose fields are decoded when they are read, compared with those that are decoded at once."""

import copy
import dataclasses
import gc
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.wire.messages import DecodeSettings, decode_one, find_messages
from rocketmq_spark.wire.stored_fields import usual_messages
from tests import strategies
from tests.harness import in_one_test, store, unhex, vectors

QUEUE = MessageQueue("t", "broker-a", 3)
USUAL_FLAGS = [0, SysFlag.MULTI_TAGS, SysFlag.TRANSACTION_COMMIT, SysFlag.LZ4, SysFlag.ZSTD]
FIELDS = [field.name for field in dataclasses.fields(ReceivedMessage)]


def at_once(data: bytes) -> list[ReceivedMessage]:
    how = DecodeSettings(QUEUE.broker_name, queue=QUEUE)
    return [message for one in find_messages(data) for message in decode_one(data, one, how)]


@st.composite
def stored(draw: st.DrawFn, offset: int) -> bytes:
    address = st.tuples(st.binary(min_size=4, max_size=4), st.integers(0, 65_535))
    pairs = draw(strategies.properties)
    return store(
        draw(st.text("tT%_", min_size=1, max_size=127)),
        draw(st.binary(max_size=60)),
        "".join(f"{name}\x01{value}\x02" for name, value in pairs.items()),
        draw(strategies.int32),
        offset,
        draw(strategies.int64),
        draw(strategies.int32),
        int(draw(st.sampled_from(USUAL_FLAGS))),
        draw(strategies.int64),
        draw(strategies.int64),
        draw(address),
        draw(address),
        draw(strategies.int32),
        draw(strategies.int64),
    )


@given(st.data())
def test_fast_decoding_of_a_usual_answer_equals_full_decoding(data: st.DataObject) -> None:
    offsets = sorted(data.draw(st.sets(st.integers(5, 50), max_size=6)))
    answer = b"".join(data.draw(stored(offset)) for offset in offsets)
    found = usual_messages(answer, 5, 51, QUEUE)
    assert found is not None
    names = data.draw(st.permutations(FIELDS))  # in whatever order they are read
    for message, expected in zip(found, at_once(answer), strict=True):
        assert {name: getattr(message, name) for name in names} == {name: getattr(expected, name) for name in names}
        assert (message, repr(message)) == (expected, repr(expected))


@in_one_test("case", vectors("stored_messages"))
def test_what_java_stored(case) -> None:
    data, usual = unhex(case["stored"]), case["decoded"]
    offset = usual["queue_offset"]
    found = usual_messages(data, offset, offset + 1, QUEUE)
    assert found is None or found == at_once(data)


def test_some_of_what_java_stored_is_usual() -> None:
    cases = [(unhex(case["stored"]), case["decoded"]["queue_offset"]) for case in vectors("stored_messages")]
    found = [usual_messages(data, offset, offset + 1, QUEUE) for data, offset in cases]
    assert 3 <= sum(messages is not None for messages in found) < len(found)


V6 = (bytes(range(16)), 9)


@pytest.mark.parametrize(
    "second",
    [
        store("t" * 128, b"2", queue_offset=6),
        store("t", b"2", queue_offset=6, born=V6),
        store("t", b"2", queue_offset=6, stored=V6),
        store("t", b"2", queue_offset=6, sys_flag=int(SysFlag.COMPRESSED)),
        store("t", b"2", queue_offset=6, sys_flag=int(SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)),
        store("t", b"2", queue_offset=5),
        store("t", b"2", queue_offset=8),
        store("t", b"2", queue_offset=6)[:-1],
        store("t", b"2", queue_offset=6) + b"\0",
        store("t", b"2", queue_offset=6)[:40],
    ],
    ids=["layout 2", "born V6", "stored V6", "compressed", "batch", "repeated", "beyond", "cut", "longer", "head only"],
)
def test_an_answer_with_one_other_message_is_not_usual(second: bytes) -> None:
    first = store("t", b"1", queue_offset=5)
    assert usual_messages(first, 5, 8, QUEUE) == at_once(first)
    assert usual_messages(first + second, 5, 8, QUEUE) is None


@given(st.data())
def test_damaged_byte_changes_a_field_or_makes_answer_unusual(data: st.DataObject) -> None:
    answer = bytearray(b"".join(store("t", b"body %d" % i, "TAGS\x01Aa\x02", 1, 5 + i) for i in range(2)))
    at = data.draw(st.integers(0, len(answer) - 1))
    answer[at] ^= 1 << data.draw(st.integers(0, 7))
    found = usual_messages(bytes(answer), 5, 7, QUEUE)
    assert found is None or found == at_once(bytes(answer))


def one() -> ReceivedMessage:
    (message,) = usual_messages(store("t", b"body", "TAGS\x01a\x02", 3, 5, 77, reconsumed=2), 5, 6, QUEUE) or ()
    return message


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), dataclasses.replace]
)
def test_a_copy_has_all_fields(copied) -> None:
    assert copied(one()) == at_once(store("t", b"body", "TAGS\x01a\x02", 3, 5, 77, reconsumed=2))[0]


def test_pickled_message_has_the_fields_of_a_full_message_only() -> None:
    """An earlier release has no others, and they would take as many bytes again."""
    complete = at_once(store("t", b"body", "TAGS\x01a\x02", 3, 5, 77, reconsumed=2))[0]
    names = [set(pickled.__getstate__()[1]) for pickled in (one(), complete)]  # type: ignore[attr-defined]
    assert names == [set(FIELDS)] * 2


def test_a_field_that_was_set_stays_when_others_are_read() -> None:
    message = one()
    message.reconsume_times = 7
    message.properties = {}
    assert (message.reconsume_times, message.properties, message.commit_log_offset, message.tags) == (7, {}, 77, None)


def test_a_field_that_is_set_while_another_thread_reads_it_stays() -> None:
    message = one()
    decode = message._decode_field

    def meanwhile(name: str, stored: object) -> object:
        setattr(message, name, "set")
        return decode(name, stored)

    message._decode_field = meanwhile
    for name in ("reconsume_times", "store_timestamp", "born_host", "offset_msg_id"):
        getattr(message, name)
        assert getattr(message, name) == "set"


def test_properties_are_one_object() -> None:
    message = one()
    assert message.properties is message.properties
    assert pickle.loads(pickle.dumps(message)).properties == message.properties == {"TAGS": "a"}


def test_a_body_that_is_deleted_is_gone() -> None:
    for message in (one(), at_once(store("t", b"body"))[0]):
        del message.body
        assert not hasattr(message, "body")
        with pytest.raises(AttributeError, match="object has no attribute 'body'"):
            _ = message.body
        with pytest.raises(AttributeError, match="object has no attribute 'body'"):
            repr(message)


def test_the_error_of_a_property_is_not_hidden() -> None:
    for message in (one(), at_once(store("t", b"body"))[0]):
        message.properties = None  # type: ignore[assignment]
        with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'get'"):
            _ = message.tags


def test_a_message_has_no_other_attributes() -> None:
    complete = at_once(store("t", b"body"))[0]
    for message in (one(), complete):
        for name in ("tag", "_anything", "__len__"):
            with pytest.raises(AttributeError, match=f"'ReceivedMessage' object has no attribute '{name}'"):
                getattr(message, name)


def test_a_message_that_is_kept_does_not_keep_its_answer() -> None:
    """Which may have 16 MiB: one message of each answer would take gigabytes."""
    messages = usual_messages(
        store("t", b"x" * 100_000, queue_offset=5) + store("t", b"1", queue_offset=6), 5, 7, QUEUE
    )
    assert messages is not None
    sizes = [len(found) for found in gc.get_referents(messages[1]) if isinstance(found, bytes)]
    assert sizes
    assert max(sizes) < 1000
