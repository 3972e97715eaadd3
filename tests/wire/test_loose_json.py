"""JSON with bare and object keys: equal to strict JSON where that applies, and refused when it is neither."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire import loose_json
from rocketmq_spark.wire.loose_json import read_json
from tests.harness import check_decoder, peak_bytes

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


def test_strict_json_parser_is_asked_at_most_a_thousand_times(monkeypatch):
    """It counts the lines before each place that it rejects: a hundred thousand times took five seconds."""
    rejected = []

    class Counting(json.JSONDecoder):
        def raw_decode(self, s, idx=0):
            try:
                return super().raw_decode(s, idx)
            except json.JSONDecodeError:
                rejected.append(idx)
                raise

    monkeypatch.setattr(loose_json, "_strict_decoder", Counting())
    text = "[" + ",".join(['{"a":[{0:"x"}]}'] * 5000) + ',{"b":{"c":[1,"]"]}}]'
    assert read_json(text.encode()) == [{"a": [{"0": "x"}]}] * 5000 + [{"b": {"c": [1, "]"]}}]
    assert len(rejected) == 1000


def test_a_body_has_a_limit(monkeypatch):
    monkeypatch.setattr(loose_json, "MAX_JSON_BYTES", 10)
    assert read_json(b'"12345678"') == "12345678"
    with pytest.raises(RemoteProtocolError, match="A JSON body of 11 bytes; expected at most 10"):
        read_json(b'"123456789"')


def test_a_table_of_queues_may_be_larger(monkeypatch):
    monkeypatch.setattr(loose_json, "MAX_JSON_BYTES", 10)
    assert read_json(b'"123456789"', is_table=True) == "123456789"
    monkeypatch.setattr(loose_json, "MAX_TABLE_BYTES", 10)
    with pytest.raises(RemoteProtocolError, match="A JSON body of 11 bytes; expected at most 10"):
        read_json(b'"123456789"', is_table=True)


MIB = 1 << 20
# Bodies that cost many times their size in memory, or minutes.
BOMBS = {
    "empty objects": lambda size: b"[" + b"{}," * (size // 3 - 1) + b"{}]",
    "numbers": lambda size: b"[" + b"1," * (size // 2 - 2) + b"1]",
    "arrays": lambda size: b"[" * 30 + b"[]," * (size // 3 - 30) + b"[]" + b"]" * 30,
    "pairs": lambda size: b"{" + b",".join(b'"%x":[]' % i for i in range(size // 12)) + b"}",
    "bare keys": lambda size: b"[" + b"{0:1}," * (size // 6 - 1) + b"{}]",
    "bare keys in bare keys": lambda size: b"[" + b"{0:{0:1}}," * (size // 10 - 1) + b"{}]",
    "object keys": lambda size: b"{" + b",".join(b'{"q":%d}:1' % i for i in range(size // 16)) + b"}",
    "a long text, then bare keys": lambda size: b'{"a":"' + b"x" * (size // 2) + b'","b":[' + b"{0:1}," * (size // 12) + b"{}]}",
    "lines, then bare keys": lambda size: b"[" + b"\n" * (size // 2) + b"{0:1}," * (size // 12) + b"{}]",
    "blanks between bare keys": lambda size: b"[" + (b"{0 : 1} , " + b" " * 50) * (size // 60 - 1) + b"{}]",
    "strict values behind many doors": lambda size: b'{"a":' * 30 + b"[" + b'"xxxxxx",' * (size // 10) + b"{0:1}]" + b"}" * 30,
    "texts with a sign of four bytes": lambda size: b'["\xf0\x9f\x98\x80' + b"x" * (size - 20) + b'",{0:1}]',
    "escapes": lambda size: b'{"a":"' + rb"\ud83d\ude00" * (size // 12 - 2) + b'",0:1}',
    "digits": lambda size: b"{0:[" + (b"9" * 4200 + b",") * (size // 4201 - 1) + b"1]}",
    "keys of one hash": lambda size: b"{" + b",".join(b'{"q":%d}:1' % (i * ((1 << 61) - 1)) for i in range(size // 34)) + b"}",
}  # fmt: skip


# Only these of 8 MiB are read to the end: the parser gives the others up early.
LARGE = [(kind, 8 * MIB - 100) for kind in ("blanks between bare keys", "strict values behind many doors", "digits")]


@pytest.mark.parametrize(("kind", "size"), [*((kind, MIB // 4) for kind in BOMBS), *LARGE])
def test_no_body_costs_more_than_its_bounds(kind, size):
    """It takes less time than the strict parser takes for 40 MiB of objects, and little memory."""
    body = BOMBS[kind](size)
    assert len(body) <= 8 * MIB
    assert processor_s(lambda: outcome(body)) < 40 * processor_s(lambda: json.loads(OBJECTS))
    assert peak_bytes(lambda: outcome(body)) < 64 * MIB + 20 * len(body)


OBJECTS = b"[" + b'{"x":1},' * (MIB // 8) + b"{}]"


def processor_s(work):
    began = time.process_time()
    work()
    return time.process_time() - began


def outcome(body, table=False):
    try:
        return read_json(body, table)
    except RemoteProtocolError as e:
        return e


def test_the_number_of_values_is_bounded():
    assert "it has more than 1000000 values" in str(outcome(b"[" + b"1," * 1_000_000 + b"1]"))
    assert outcome(b"[" + b"1," * 999_000 + b"1]") == [1] * 999_001
    assert outcome(b'["' + b"," * 900_000 + b'"]') == ["," * 900_000]
    assert "more than 250000 values are in containers" in str(outcome(b"[" + b"{0:1}," * 200_000 + b"{}]"))


def test_a_key_with_a_number_beyond_64_bits_is_refused():
    assert read_json(b'{{"q":-9223372036854775808}:1}') == {(("q", -(1 << 63)),): 1}
    for number in (b"9223372036854775808", b"-9223372036854775809"):
        assert "in a key; expected 64 bits" in str(outcome(b'{{"q":%b}:1}' % number))


def queues(of_queue, count=200_000):
    """A table of queues, whose names are as long as those of clusters with so many."""
    return b'{"offsetTable":{%b}}' % b",".join(
        b'{"brokerName":"broker-%d","queueId":%d,"topic":"orders-of-region-%d"}:%b' % (i % 50, i // 50, i % 7, of_queue % i)
        for i in range(count)
    )  # fmt: skip


TABLES = {
    "statistics": b'{"lastUpdateTimestamp":17000000%d,"maxOffset":1234567,"minOffset":0}',
    "progress": b'{"brokerOffset":%d,"consumerOffset":12345,"lastTimestamp":1700000000000,"pullOffset":12345}',
    "offsets": b"%d",
}


@pytest.mark.parametrize("kind", TABLES)
def test_tables_of_200000_queues_are_read(kind):
    """Their keys make them loose, which costs a few times what the strict parser takes for the same values.

    That of most values has so many queues, the others a quarter of them.
    """
    count = 200_000 if kind == "progress" else 50_000
    body = queues(TABLES[kind], count)
    began = time.process_time()
    table = read_json(body, is_table=True)["offsetTable"]
    took_s = time.process_time() - began
    assert len(table) == count
    values = [[dict(key), value] for key, value in table.items()]
    text = json.dumps(values)
    began = time.process_time()
    json.loads(text)
    assert took_s < 6 * (time.process_time() - began) + 0.1
