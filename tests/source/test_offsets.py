"""Offsets in Spark's log: canonical, readable by a person, and by every later version."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source import kafka_partitions
from rocketmq_spark.spark.source.offsets import VERSION, OffsetLogCache, Offsets
from tests import strategies
from tests.reading import canonical

_POSITIONS = st.dictionaries(strategies.queues, st.integers(0, 1 << 62), max_size=6)
_OFFSETS = st.builds(
    Offsets,
    _POSITIONS,
    _POSITIONS,
    _POSITIONS,
    st.dictionaries(strategies.filled_texts, strategies.texts, max_size=2),
    _POSITIONS,
    queue_runs=st.lists(strategies.queues, max_size=6).map(lambda queues: kafka_partitions.with_new_queues({}, queues)),
)


def queue(queue_id, topic="orders", broker="broker-a"):
    return MessageQueue(topic, broker, queue_id)


def test_the_text_of_the_contract():
    offsets = Offsets({queue(1): 9, queue(0): 12})
    assert canonical(offsets.to_json()) == '{"topics":{"orders":{"broker-a":{"0":12,"1":9}}},"v":1}'


def test_all_parts_in_order():
    offsets = Offsets({queue(0): 5}, {queue(0): 1}, {queue(0): 1700}, {"tags": "a || b"}, {queue(0): 2})
    assert list(offsets.to_json()) == ["environment", "marks", "reads", "start", "topics", "v"]


def test_queues_are_sorted_as_numbers():
    offsets = Offsets({queue(10): 1, queue(9): 2, queue(0, "a"): 3, queue(0, "orders", "b"): 4})
    assert canonical(offsets.to_json()) == (
        '{"topics":{"a":{"broker-a":{"0":3}},"orders":{"b":{"0":4},"broker-a":{"9":2,"10":1}}},"v":1}'
    )


@given(_OFFSETS)
def test_round_trip(offsets):
    assert Offsets.from_json(offsets.to_json()) == offsets
    assert Offsets.from_json(canonical(offsets.to_json())) == offsets
    assert canonical(Offsets.from_json(json.loads(json.dumps(offsets.to_json()))).to_json()) == canonical(
        offsets.to_json()
    )


@given(_OFFSETS, st.randoms())
def test_equal_offsets_are_equal_texts(offsets, random):
    def shuffled(positions):
        items = list(positions.items())
        random.shuffle(items)
        return dict(items)

    parts = (
        offsets.positions,
        offsets.new_queue_starts,
        offsets.newest_store_ms,
        offsets.source_identity,
        offsets.environment_numbers,
    )
    again = Offsets(*(shuffled(part) for part in parts), queue_runs=offsets.queue_runs)
    assert canonical(again.to_json()) == canonical(offsets.to_json())


def test_what_a_person_may_leave_out():
    assert Offsets.from_json('{"topics": {"orders": {"broker-a": {"0": 3}}}}') == Offsets({queue(0): 3})
    assert Offsets.from_json('{"topics":{}}') == Offsets({})


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{", "an offset must be JSON: "),
        ("[]", 'an offset must be a JSON object with "topics"'),
        ("{}", 'an offset must be a JSON object with "topics"'),
        (None, 'an offset must be a JSON object with "topics"'),
        ({"topics": []}, 'an offset must be a JSON object with "topics"'),
        ({"topics": {"t": 5}}, "t: 5 is not a JSON object"),
        ({"topics": {"t": {"b": [1]}}}, "t/b: [1] is not a JSON object"),
        ({"topics": {"t": {"b": {"0": -1}}}}, "t/b/0: -1 is not an offset"),
        ({"topics": {"t": {"b": {"0": "7"}}}}, "t/b/0: '7' is not an offset"),
        ({"topics": {"t": {"b": {"0": True}}}}, "t/b/0: True is not an offset"),
        ({"topics": {"t": {"b": {"x": 7}}}}, "t/b/x: 7 is not an offset"),
        ({"topics": {"t": {"b": {"²": 7}}}}, "t/b/²: 7 is not an offset"),
        ({"topics": {"t": {"b": {"00": 7}}}}, "t/b/00: 7 is not an offset"),
        ({"topics": {"t": {"b": {"07": 7, "7": 5}}}}, "t/b/07: 7 is not an offset"),
        ({"topics": {"t": {"b": {"": 7}}}}, "t/b/: 7 is not an offset"),
        ({"topics": {"t": {"b": {"9" * 5000: 7}}}}, "9: 7 is not an offset"),
        ({"topics": {}, "v": 0}, "the offset has version 0; this package reads version 1"),
        ({"topics": {}, "v": -1}, "the offset has version -1;"),
        ({"topics": {}, "v": True}, "the offset has version True;"),
        ({"topics": {}, "v": 1.0}, "the offset has version 1.0;"),
        ({"topics": {}, "v": "1"}, "the offset has version '1';"),
        ({"topics": {}, "v": None}, "the offset has version None;"),
        ({"topics": {}, "reads": "tags"}, "reads: 'tags' is not a JSON object"),
        ({"topics": {}, "start": {"t": {"b": {"0": 1.5}}}}, "t/b/0: 1.5 is not an offset"),
    ],
)
def test_what_cannot_be_read(given, problem):
    with pytest.raises(OffsetError) as caught:
        Offsets.from_json(given)
    assert problem in str(caught.value)
    assert '{"topics":{"orders":{"broker-a":{"0":12,"1":9}}},"v":1}' in str(caught.value)


def test_what_is_read_as_older_versions_wrote_it():
    text = '{"filter":{"environment":"dev","tags":"a"},"topics":{"orders":{"broker-a":{"0":3}}},"v":1}'
    assert Offsets.from_json(text).source_identity == {"environment": "dev", "tags": "a"}
    assert Offsets.from_json('{"topics":{},"v":1}').source_identity == {}


def test_a_newer_version_says_so():
    with pytest.raises(OffsetError, match=r"has version 2; this package reads version 1.*newer rocketmq-spark"):
        Offsets.from_json({"topics": {}, "v": VERSION + 1})


@given(_OFFSETS)
def test_a_log_gives_back_what_it_wrote_without_reading_it(offsets):
    log, written = OffsetLogCache(), []
    for _ in range(3):
        written.append(json.loads(json.dumps(log.to_log(offsets))))
        assert log.from_log(written[-1]) == Offsets.from_json(written[-1])
    assert log.from_log(written[0]) is log.from_log(written[1])


def test_a_log_keeps_the_last_two():
    log = OffsetLogCache()
    entries = [Offsets({queue(0): end}).to_json() for end in range(3)]
    first = log.from_log(entries[0])
    second = log.from_log(entries[1])
    assert log.from_log(entries[0]) is first
    third = log.from_log(entries[2])
    assert log.from_log(entries[0]) is first
    assert log.from_log(entries[2]) is third
    assert log.from_log(entries[1]) is not second
    assert log.from_log(entries[1]) == second


@pytest.mark.parametrize(
    ("partitions", "problem"),
    [
        ("7", "7 is not a JSON object"),
        ("0", "0 is not a JSON object"),
        ("null", "None is not a JSON object"),
        ("[]", "[] is not a JSON object"),
        ("[[1]]", "[[1]] is not a JSON object"),
        ('{"t":{"broker-a":[0,4]}}', "t: {'broker-a': [0, 4]} is not a list of runs"),
        ('{"t":"abc"}', "t: 'abc' is not a list of runs"),
        *(
            (f'{{"t":[["b",0,1],{run}]}}', "is not a run; expected [broker, first queue id, number of queues]")
            for run in (
                '"abc"', "7", "null", "{}", "[]", '["a",0]', '["a",0,1,2]', "[1,0,1]", '["",0,1]', '["a",-1,1]', '["a",0,0]',
                '["a",0,-1]', '["a",0.0,1]', '["a",0,1.5]', '["a","0","1"]', '["a",true,1]', '["a",0,true]', '["a",null,1]',
                '["a",2147483647,2]', '["a",0,1e9]', '["a",0,99999999999999999999]',
            )
        ),
        ('{"t":[["a",0,1000000000]]}', "t: ['a', 0, 1000000000] makes more than 1048576 queues in all"),
        ('{"t":[["a",0,1048576]],"u":[["a",0,1]]}', "u: ['a', 0, 1] makes more than 1048576 queues in all"),
        ('{"t":[["a",2,2],["b",2,2],["a",0,3]]}', "t: queue 2 of a is in two runs"),
        ('{"t":[["a",1,1],["a",1,1]]}', "t: queue 1 of a is in two runs"),
    ],
)  # fmt: skip
def test_wrong_partitions_of_a_checkpoint_are_named(partitions, problem):
    with pytest.raises(OffsetError) as caught:
        Offsets.from_json(f'{{"topics":{{}},"partitions":{partitions},"v":1}}')
    assert caught.value.message.startswith('"partitions" of an offset: ')
    assert problem in caught.value.message
    assert '{"orders":[["broker-a",0,4],["broker-b",0,4]]}' in str(caught.value)


def test_runs_that_touch_are_no_overlap():
    runs = {"t": [["a", 2, 2], ["b", 2, 2], ["a", 0, 2]], "u": [["a", 2147483647, 1]]}
    assert Offsets.from_json({"topics": {}, "partitions": runs}).queue_runs == runs
