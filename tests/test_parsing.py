"""Option texts: durations, sizes, lists and JSON. A parser gives a value or a ValueError that says what was expected."""

import json
import pickle
import re
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import parsing as p
from tests.strategies import names, queues

PARSERS = {
    "string": p.string,
    "boolean": p.boolean,
    "integer": p.integer(0, 10),
    "duration": p.duration,
    "positive_duration": p.positive_duration,
    "durations_ms": p.durations_ms,
    "fault_preset": p.fault_preset,
    "size": p.size(1, 1 << 30),
    "choice": p.choice("none", "all"),
    "names": p.names,
    "names_with_repeats": p.names_with_repeats,
    "addresses": p.addresses,
    "name_servers": p.name_servers,
    "address_map": p.address_map,
    "regex": p.regex,
    "assignment": p.assignment,
    "offsets": p.offsets("earliest", "latest"),
    "timestamp": p.timestamp,
    "dotted": p.callable_name,
    "strategy": p.strategy,
    "auto_integer": p.auto_integer(10_000),
    "property_columns": p.property_columns,
    "topic_filters": p.topic_filters,
    "json_object": p.json_object('{"a": 1}'),
}
UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
nearly = st.text(alphabet="0123456789 .,:;-+eEkmgsdhTZ[]{}\"'²٣ab_", max_size=12)


@pytest.mark.parametrize("name", PARSERS)
class TestAnyText:
    @settings(max_examples=30)
    @given(text=nearly | st.text(max_size=12) | json_values.map(json.dumps))
    @pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # about regular expressions
    def test_gives_a_value_or_says_what_was_expected(self, name, text):
        try:
            PARSERS[name](text)
        except ValueError as e:
            expected = str(e)
        else:
            return
        assert len(expected) > 5
        assert "invalid literal" not in expected
        assert "could not convert" not in expected


@given(st.integers(0, 10**9), st.sampled_from(sorted(UNITS_MS)), st.sampled_from(["", " "]))
def test_durations(number, unit, space):
    assert p.duration(f" {number}{space}{unit}") == pytest.approx(number * UNITS_MS[unit] / 1000)


@given(st.integers(0, 10**9))
def test_a_plain_duration_is_milliseconds(number):
    assert p.duration(str(number)) == pytest.approx(number / 1000)


def test_durations_with_a_fraction():
    assert p.duration("1.5s") == 1.5
    assert p.durations_ms("[50ms, 1.5s, 2m]") == (50, 1500, 120_000)


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 week", "1,5s", "1e3", "1s 5", ".5s", "inf", "nan"])
def test_no_durations(text):
    with pytest.raises(ValueError, match="a duration such as 500ms, 3s, 5m, or plain milliseconds"):
        p.duration(text)


@given(st.integers(1, 10**6), st.sampled_from(["", "k", "m", "g"]), st.booleans(), st.sampled_from(["", "b"]))
def test_sizes(number, unit, upper, b):
    text = f"{number}{unit}{b}" if unit or not b else f"{number}"
    factor = 1024 ** ("", "k", "m", "g").index(unit)
    assert p.size()(text.upper() if upper else text) == number * factor


@pytest.mark.parametrize("text", ["", "k", "1.5k", "-1", "1t", "1 2", "0", "1025k"])
def test_sizes_within_bounds(text):
    with pytest.raises(ValueError, match="a size such as 256k, 4m, or plain bytes from 2 to 1048576 bytes"):
        p.size(2, 1 << 20)(text)


@given(st.lists(names, min_size=1))
def test_names_as_comma_text_and_as_json(items):
    assert p.names(" , ".join(items)) == p.names(json.dumps(items)) == tuple(dict.fromkeys(items))
    assert p.names_with_repeats(",".join(items)) == p.names_with_repeats(json.dumps(items)) == tuple(items)


def test_what_is_no_text_among_names_is_not_left_out():
    for parse in (p.names, p.names_with_repeats):
        with pytest.raises(ValueError, match="a JSON array of texts"):
            parse('["orders", 5]')


def test_addresses():
    assert p.addresses(" a:1; b.c:65535,[::1]:9876;a:1 ") == ("a:1", "b.c:65535", "[::1]:9876")
    for text in ("a", "a:", ":1", "a:0", "a:65536", "a:b", "a:1;b", "", ";"):
        with pytest.raises(ValueError, match="host:port, several separated by ; or ,"):
            p.addresses(text)


def test_a_scheme_of_hosted_clusters_is_removed():
    assert p.addresses("http://a:80; HTTP://b:81,c:82") == ("a:80", "b:81", "c:82")


WRONG_ADDRESSES = [
    ("tcp://a:1", r"'tcp://a:1' has a scheme: remove tcp://"),
    ("https://a:1", r"'https://a:1' has a scheme: remove https://, and set tls=true"),
    ("http://http://a:1", "has a scheme"),
    ("http://a:1/", "'a:1/' has a path: remove the path"),
    ("http://a/rocketmq/nsaddr", "'a/rocketmq/nsaddr' has a path"),
    ("a:1/b", "'a:1/b' has a path"),
    ("http://a", "'a' is not host:port"),
    ("::1", "'::1' is not host:port: an IPv6 address needs brackets"),
    ("fe80::1:9876", "an IPv6 address needs brackets"),
    ("[::1]", r"'\[::1\]' is not host:port"),
    ("[1:2:3]:9876", "'1:2:3' is not an IPv6 address"),
    ("[]:1", "'' is not an IPv6 address"),
    ("[a]:1", "'a' is not an IPv6 address"),
    ("[127.0.0.1]:1", "'127.0.0.1' is not an IPv6 address"),
    ("[::1:1", "an IPv6 address needs brackets"),
    ("a b:1", "'a b' is not a host name"),
    ("user@a:1", "'user@a' is not a host name"),
    ("a?b:1", r"'a\?b' is not a host name"),
    ("a:٣", "is not host:port"),
    ("a:000001", "is not host:port"),
]


@pytest.mark.parametrize(("text", "why"), WRONG_ADDRESSES)
def test_what_is_no_address_is_an_error_that_says_why(text, why):
    for value in (text, f"good:1;{text}"):
        with pytest.raises(ValueError, match=why):
            p.addresses(value)


@pytest.mark.parametrize("text", ["http://a:1", "::1", "[1:2:3]:9876", "a:1/b", "a:0", "tcp://a:1"])
def test_both_sides_of_an_address_map_are_addresses(text):
    for pair in ({text: "b:1"}, {"b:1": text}):
        with pytest.raises(ValueError, match=re.escape(f"({text!r} ")):
            p.address_map(json.dumps(pair))
    with pytest.raises(ValueError, match="5 is not host:port"):
        p.address_map('{"a:1": 5}')


@pytest.mark.parametrize("host", ["a", "a_b.c-d", "127.0.0.1", "[::1]", "[fe80::1%eth0]", "bücher.example"])
def test_hosts(host):
    assert p.addresses(f"{host}:9876") == (f"{host}:9876",)


def test_the_instance_of_a_hosted_cluster():
    assert p.instance_of(p.name_servers("http://MQ_INST_123_BXabc.mq-internet.example.com:80")) == "MQ_INST_123_BXabc"
    for text in ("MQ_INST_1.a:80", "a.MQ_INST_1_b.c:80", "MQ_INST_1_b:80", "mq_inst_1_b.c:80", "a:1"):
        assert p.instance_of(p.name_servers(text)) is None
    with pytest.raises(ValueError, match=r"of one instance .these belong to MQ_INST_1_a, MQ_INST_1_b"):
        p.name_servers("MQ_INST_1_a.h:80;MQ_INST_1_b.h:80")


@pytest.mark.parametrize("text", ["nameServer", "nameserver", " NAMESERVER "])
def test_an_address_map_may_be_the_name_server(text):
    assert p.address_map(text) == p.AT_NAME_SERVER


def test_an_address_map_names_the_bad_item():
    with pytest.raises(ValueError, match="'there' is not host:port"):
        p.address_map('{"10.0.0.5:10911": "there"}')


@given(st.dictionaries(queues, st.integers(-2, 2**62), min_size=1))
def test_offsets_by_queue(wanted):
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for queue, offset in wanted.items():
        nested.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = offset
    assert p.offsets("earliest")(json.dumps(nested)) == wanted


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "Expecting property name"),
        ("{}", "at least one queue"),
        ('{"t":[1]}', "JSON such as"),
        ('{"t":{"b":{"x":1}}}', "t/b/x: the queue id is not a whole number"),
        ('{"t":{"b":{"0":-3}}}', "t/b/0: -3 is not a whole number of at least -2"),
        ('{"t":{"b":{"0":true}}}', "t/b/0: True is not a whole number"),
        ('{"t":{"b":{"0":1.5}}}', "t/b/0: 1.5 is not a whole number"),
        ("latest", "earliest, or JSON such as"),
    ],
)
def test_bad_offsets(text, problem):
    with pytest.raises(ValueError, match="JSON such as") as caught:
        p.offsets("earliest")(text)
    assert problem in str(caught.value)


def test_offsets_of_whole_topics():
    parse = p.offsets("earliest", "latest", "committed")
    assert parse('{"a":"earliest","b":" LATEST "}') == {"a": p.EARLIEST, "b": p.LATEST}
    assert parse('{"a":"earliest","b":{"x":{"0":7,"1":-2}}}') == {
        "a": p.EARLIEST,
        MessageQueue("b", "x", 0): 7,
        MessageQueue("b", "x", 1): p.EARLIEST,
    }
    assert p.offsets("latest")('{"a":"latest"}') == {"a": p.LATEST}


@pytest.mark.parametrize(
    ("words", "text", "problem"),
    [
        (
            ("earliest", "latest", "committed"),
            '{"a":"committed"}',
            "with earliest or latest for a topic (a: 'committed' is",
        ),
        (("latest",), '{"a":"earliest"}', "with latest for a topic (a: 'earliest' is not allowed)"),
        (("latest",), '{"a":5}', "JSON such as"),
        (("earliest",), '{"a":{"b":"earliest"}}', "JSON such as"),
        (("earliest",), "{}", "at least one queue"),
        (("earliest", "latest"), '{"a":"earliest","a":"latest"}', "'a' is named twice"),
        (("earliest", "latest"), '{"a":"earliest","a":{"b":{"0":1}}}', "'a' is named twice"),
    ],
)
def test_bad_offsets_of_topics(words, text, problem):
    with pytest.raises(ValueError, match="JSON such as") as caught:
        p.offsets(*words)(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("offsets", '{"t":{"b":{"0":1,"0":2}}}'),
        ("offsets", '{"t":{"b":{"0":1},"b":{"1":2}}}'),
        ("offsets", '{"t":{"b":{"0":1}},"t":{"b":{"1":2}}}'),
        ("assignment", '{"t":{"b":[0]},"t":{"b":[1]}}'),
        ("assignment", '{"t":{"b":[0,1,0]}}'),
        ("address_map", '{"a:1":"b:1","a:1":"c:1"}'),
        ("property_columns", '{"a":"int","a":"bigint"}'),
        ("topic_filters", '{"t":"x","t":"y"}'),
        ("json_object", '{"a":{"b":1,"b":1}}'),
    ],
)
def test_a_name_that_stands_twice_in_json_is_an_error(name, text):
    with pytest.raises(ValueError, match="is named twice"):
        PARSERS[name](text)


@pytest.mark.parametrize("name", ["assignment", "address_map", "topic_filters", "json_object"])
def test_json_that_is_nested_too_deeply_is_an_error(name):
    with pytest.raises(ValueError):
        PARSERS[name]('{"t":' * 100_000)


NO_NUMBERS = ["1_000", "1_0", "\u0661\u0660", "\uff15", "1 0", "0x10", "1.0", "1e1", "", " ", "+", "--1", "9" * 5000]


@pytest.mark.parametrize("text", NO_NUMBERS)
@pytest.mark.parametrize("parse", [p.integer(0), p.auto_integer(10_000), p.size(), p.timestamp, p.consume_from_where])
def test_a_number_is_of_plain_digits_alone(parse, text):
    assert parse(" 10 ") == 10
    with pytest.raises(ValueError, match=r"a whole number|a size|epoch milliseconds"):
        parse(text)
    with pytest.raises(ValueError, match="a duration"):
        p.duration("1_0s" if "_" in text else "\u0661s")


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_a_pattern_is_not_empty(text):
    with pytest.raises(ValueError, match="a regular expression that is not empty"):
        p.regex(text)


@given(st.sets(queues, min_size=1))
def test_assignments(wanted):
    nested: dict[str, dict[str, list[int]]] = {}
    for queue in wanted:
        nested.setdefault(queue.topic, {}).setdefault(queue.broker_name, []).append(queue.queue_id)
    assert p.assignment(json.dumps(nested)) == tuple(sorted(wanted))


@pytest.mark.parametrize(
    "text", ['{"t":{"b":[true]}}', '{"t":{"b":[-1]}}', '{"t":{"b":["0"]}}', '{"t":{"b":[]}}', "[]"]
)
def test_bad_assignments(text):
    with pytest.raises(ValueError, match=r'JSON such as \{"orders":\{"broker-a":'):
        p.assignment(text)


@given(st.integers(0, 4_000_000_000_000), st.integers(-12, 12))
def test_timestamps(ms, hours):
    assert p.timestamp(f" {ms} ") == ms
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)
    zone = timezone(timedelta(hours=hours))
    assert p.timestamp(moment.astimezone(zone).isoformat()) == ms
    assert p.timestamp(moment.replace(tzinfo=None).isoformat()) == ms


def test_property_columns():
    assert p.property_columns("a:LONG, b , c:d:int") == (("a", "bigint"), ("b", "string"), ("c:d", "int"))
    assert p.property_columns('{"a":"double"}') == (("a", "double"),)
    for text in ("", "a:money", "a,a:int", ":int:", '{"a":1}'):
        with pytest.raises(ValueError, match="amount:bigint, region:string"):
            p.property_columns(text)


def test_filters_per_topic():
    assert p.topic_filters(" a || b ") == "a || b"
    assert p.topic_filters('{"t": " a "}') == {"t": "a"}
    for text in ("{}", '{"t":""}', '{"t":1}'):
        with pytest.raises(ValueError, match="a filter, or JSON such as"):
            p.topic_filters(text)


def test_choices_keep_the_listed_spelling():
    assert p.choice("roundRobin", "hash")(" ROUNDROBIN ") == "roundRobin"
    assert p.strategy("machineroomnearby") == "machineRoomNearby"
    assert p.strategy("my.module:pick") == "my.module:pick"


def test_python_values_as_texts():
    assert [p.text(v) for v in (True, 5, 1.5, "x", ["a", "b"], ("a",), {"a": 1})] == [
        "true", "5", "1.5", "x", '["a", "b"]', '["a"]', '{"a": 1}',
    ]  # fmt: skip


@given(st.text(min_size=1))
def test_a_secret_is_revealed_on_demand_only(value):
    secret = p.secret(value)
    assert secret.reveal() == value
    for shown in (str(secret), repr(secret), f"{secret}", f"{secret!r:>20}", f"{[secret]}"):
        assert shown.strip(" []'") == "***"
    assert pickle.loads(pickle.dumps(secret)).reveal() == value


def test_a_queue_has_one_number_and_one_name():
    for ids in ('{"0":1,"00":2}', '{"\u0660":1}'):
        with pytest.raises(ValueError, match="the queue id is not a whole number"):
            p.queue_numbers("{}", 0)('{"t":{"b":' + ids + "}}")


def test_queue_numbers_have_a_lower_bound():
    parse = p.queue_numbers('{"t":{"b":{"0":1}}}', 0)
    assert parse('{"t":{"b":{"3":0}}}') == {MessageQueue("t", "b", 3): 0}
    with pytest.raises(ValueError, match="at least 0"):
        parse('{"t":{"b":{"3":-1}}}')


def test_a_list_of_addresses_has_a_limit() -> None:
    """Each may cost a connection."""
    assert len(p.addresses(";".join(f"h{i}:1" for i in range(100)))) == 100
    with pytest.raises(ValueError, match=r"at most 100 addresses \(these are 101\)"):
        p.addresses(";".join(f"h{i}:1" for i in range(101)))
