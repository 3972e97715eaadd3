"""What a batch says of its messages."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode.batch_tags import MAX_BATCH_KEYS, BatchTagKeys, rows_without_key
from tests.live.writes import frame

COLUMNS = {"tags": "tags", "keys": "keys"}
TAGS = st.lists(st.none() | st.sampled_from(["", "a", "b", "c", "ü"]), min_size=1, max_size=30)


def of(max_bytes=24_000, **columns):
    return BatchTagKeys(frame(**columns), {name: name for name in columns}, max_bytes)


def rows(*numbers):
    return np.array(numbers, np.intp)


@given(TAGS, st.data())
def test_rows_of_a_tag_come_together_and_say_it(tags, data):
    made = of(tags=tags)
    mine = rows(*data.draw(st.permutations(range(len(tags))).map(lambda p: p[: data.draw(st.integers(1, len(p)))])))
    parts = made.rows_by_tag(mine)
    assert sorted(np.concatenate(parts).tolist()) == sorted(mine.tolist())
    said = [made.properties(part).get("TAGS") for part in parts]
    assert len(said) == len(set(said))
    for part, tag in zip(parts, said, strict=True):
        assert {tags[row] or None for row in part.tolist()} == {tag}
        places = [mine.tolist().index(row) for row in part.tolist()]
        assert places == sorted(places)
    assert made.tag_count == len({tag for tag in tags if tag})


def test_many_rows_of_a_tag_keep_their_order():
    """So few as the test above has are sorted in their order by any way of sorting."""
    made = of(tags=["abc"[n % 3] for n in range(1000)])
    assert [part.tolist() for part in made.rows_by_tag(rows(*range(1000)))] == [[*range(n, 1000, 3)] for n in range(3)]


def test_tags_and_keys_of_invalid_utf_8_read_as_in_java():
    """Spark's ``cast(binary as string)`` makes such texts, and the messages have their bytes."""
    texts = pa.array([b"\xff", b"a", None, b"b"], pa.binary()).view(pa.string())
    lists = pa.ListArray.from_arrays(
        [0, 1, 2, 2, 4], pa.array([b"\xff", b"a", b" ", b"\n"], pa.binary()).view(pa.string())
    )
    for keys in (texts, lists):
        made = of(tags=texts, keys=keys)
        assert made.properties(rows(0)) == {"TAGS": "\ufffd", "KEYS": "\ufffd"}
        assert made.properties(rows(0, 1)) == {"KEYS": "\ufffd a"}
    assert [rows_without_key(frame(keys=keys), {"keys": "keys"}).tolist() for keys in (texts, lists)] == [
        [False, False, True, False],
        [False, False, True, True],
    ]


def test_messages_of_several_tags_have_none_together():
    made = of(tags=["a", "b", None, "a"])
    assert [made.properties(rows(*some)) for some in ((0, 3), (0, 1), (0, 2), (2,))] == [{"TAGS": "a"}, {}, {}, {}]


def test_without_columns_nothing_is_said():
    made = of(body=["x", "y"])
    assert [part.tolist() for part in made.rows_by_tag(rows(1, 0))] == [[1, 0]]
    assert (made.tag_count, made.properties(rows(0, 1))) == (0, {})


@pytest.mark.parametrize(
    "keys",
    [
        [["k2", "k1"], ["k1"], None, [], ["k3", None, ""]],
        pa.array(["k2 k1", "k1", None, "", "k3"]),
    ],
)
def test_keys_are_the_different_words(keys):
    made = of(keys=keys)
    assert made.properties(rows(0, 1, 2, 3, 4)) == {"KEYS": "k2 k1 k3"}
    assert sorted(made.properties(rows(4, 1))["KEYS"].split(" ")) == ["k1", "k3"]
    assert made.properties(rows(2, 3)) == {}


@pytest.mark.parametrize("keys", [[["é1"], ["é2"]], pa.array(["é1 é2", "é2 é1"])])
def test_keys_that_do_not_fit_are_not_said(keys):
    assert of(8, keys=keys).properties(rows(0, 1)) == {"KEYS": "é1 é2"}
    assert of(7, keys=keys).properties(rows(0, 1)) == {}
    assert of(10, keys=keys, tags=["t", "t"]).properties(rows(0, 1)) == {"TAGS": "t", "KEYS": "é1 é2"}
    assert of(8, keys=keys, tags=["t", "t"]).properties(rows(0, 1)) == {"TAGS": "t"}


def test_a_tag_that_does_not_fit_cannot_be_left_out():
    """A filter for it would not find its messages."""
    assert of(3, tags=["abcd"]).properties(rows(0)) is None


@pytest.mark.parametrize("blank", [False, True])
def test_no_more_keys_are_said_than_a_broker_indexes_cheaply(blank):
    def said(count):
        words = [f"k{i}" for i in range(count)]
        pairs = [f"{word} k0" for word in words] if blank else words
        return of(keys=pa.array(pairs * 3)).properties(np.arange(3 * count))

    assert len(said(MAX_BATCH_KEYS)["KEYS"].split(" ")) == MAX_BATCH_KEYS
    assert said(MAX_BATCH_KEYS + 1) == {}
