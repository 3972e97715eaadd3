"""JSON with bare and object keys: equal to strict JSON where that applies, and refused when it is neither."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire import loose_json
from rocketmq_spark.wire.loose_json import read_json
from tests.harness import check_decoder

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


def loosely(value):
    """Writes numeric keys bare, which makes the whole text unreadable for a strict parser."""
    if isinstance(value, dict):
        pairs = (f"{k if k.isdecimal() and k.isascii() else json.dumps(k)} : {loosely(v)}" for k, v in value.items())
        return "{" + " , ".join(pairs) + "}"
    if isinstance(value, list):
        return f"[ {' ,'.join(map(loosely, value))} ]"
    return json.dumps(value)


@given(st.dictionaries(st.integers(0, 99).map(str) | st.text(max_size=2), values, max_size=4))
def test_bare_keys_read_as_if_quoted(value):
    check_decoder(read_json, f" {loosely(value)}\n".encode(), value)


@given(values)
def test_strict_json_is_read(value):
    assert read_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{0:1}", {"0": 1}),
        ("{-1:{},\n 2 :[]}", {"-1": {}, "2": []}),
        ("{null:1,true:2}", {"null": 1, "true": 2}),
        ('{{"b":1,"a":"x"}:2}', {(("a", "x"), ("b", 1)): 2}),
        ('{{"q":{0:1}}:[{1:2},3]}', {(("q", (("0", 1),)),): [{"1": 2}, 3]}),
        ('{{"a":[1,{}]}:0}', {(("a", (1, ())),): 0}),
        ('{0:"{1:2},3:"}', {"0": "{1:2},3:"}),
        ("{ }", {}),
        ("[{0:1},{}]", [{"0": 1}, {}]),
    ],
)
def test_examples(text, expected):
    check_decoder(read_json, text.encode(), expected)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "{0", "{0:", "{0:1", "{0:1,", "{0:1,}", "{0:1}}", "{0:1 2:3}", "{:1}", "{a:1}", "{[]:1}", "{0:}",
        "{0:x}", "{0:[1,]}", "{0:[1 2]}", "{0:[", "{{}}", '{{"a":1}}', "{{0:1}", "{0:1}x", "\x00", "{0:'a'}",
        "[" * 5000, "{0:" * 5000, '{"a":' * 300 + "{0:1}" + "}" * 300,
    ],
)  # fmt: skip
def test_neither(text):
    with pytest.raises(RemoteProtocolError, match="Unreadable JSON"):
        read_json(text.encode("latin-1"))


def test_bytes_that_are_not_utf8():
    with pytest.raises(RemoteProtocolError):
        read_json(b'{0:"\xff"}')


def test_however_many_containers_are_no_json_the_strict_parser_is_asked_a_thousand_times(monkeypatch):
    """It counts the lines before each place that it rejects: a hundred thousand times took five seconds."""
    rejected = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s, idx=0):
            try:
                return super().raw_decode(s, idx)
            except json.JSONDecodeError:
                rejected.append(idx)
                raise

    monkeypatch.setattr(loose_json, "_strict", Counting())
    text = "[" + ",".join(['{"a":[{0:"x"}]}'] * 5000) + ',{"b":{"c":[1,"]"]}}]'
    assert read_json(text.encode()) == [{"a": [{"0": "x"}]}] * 5000 + [{"b": {"c": [1, "]"]}}]
    assert len(rejected) == 1000


def test_a_body_has_a_limit(monkeypatch):
    monkeypatch.setattr(loose_json, "_MAX_BYTES", 10)
    assert read_json(b'"12345678"') == "12345678"
    with pytest.raises(RemoteProtocolError, match="A JSON body of 11 bytes; expected at most 10"):
        read_json(b'"123456789"')
