"""Names of topics that match an expression, as Python's fullmatch would say, and in a time that no name makes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import options
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.names import CALLABLES_VARIABLE
from rocketmq_spark.spark.source.subscription import matching_names

TOPICS = [
    "orders",
    "orders-eu",
    "Orders-EU",
    "orders_1",
    "prices",
    "%RETRY%orders",
    "a|b",
    "a{,2}",
    "aa",
    "a",
    "t" * 200,
    "orders.eu",  # a name that brokers do not create, but may have
    "%RETRY%g+orders",
]


@pytest.mark.parametrize(
    "pattern",
    [
        "orders", "orders.*", "orders|prices", "(?i)orders-eu", "^orders$", r"\w+_\d", r"orders[-_]\w{1,2}", "(?!orders).*",
        r"(a)\1", "(?P<x>a)(?P=x)", "a{,2}", "(?x) o r d e r s", r"\Aorders\Z", "a++", ".*(?<=eu)", "", "(?:a|b)*",
        r"a\|b", "(?s).*", "[^a]+", r"orders\b.*", "(?#c)a", "t{127,}",
    ],
)  # fmt: skip
def test_names_match_as_in_python(pattern: str) -> None:
    expected = [topic for topic in TOPICS if re.fullmatch(pattern, topic)]
    assert matching_names(pattern, TOPICS) == expected


@given(st.from_regex(r"[ab.*+?|()\[\]^$\\dw{},12-]{0,8}", fullmatch=True), st.lists(st.text("ab1-", max_size=5)))
def test_any_expression_of_python_matches_as_in_python(pattern: str, topics: list[str]) -> None:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, FutureWarning):
        return
    topics = [topic for topic in topics if topic]
    assert matching_names(pattern, topics) == [topic for topic in topics if compiled.fullmatch(topic)]


@pytest.mark.parametrize("pattern", ["(a+)+", "(a|aa)+", "(a*)*b", "([a-z]+)*orders", "(.*a){20}"])
def test_no_name_takes_long(pattern: str) -> None:
    began = time.process_time()
    assert matching_names(pattern, ["a" * 127 + "-", "a" * 50_000 + "!"]) == []
    assert time.process_time() - began < 1.0


def test_lookahead_does_not_match_names_that_brokers_reject() -> None:
    began = time.process_time()
    assert matching_names("(?!x)(a+)+", ["a" * 5000 + "!", "ab", "aaa"]) == ["aaa"]
    assert time.process_time() - began < 1.0


def test_a_name_that_cannot_be_encoded_matches_nothing() -> None:
    assert matching_names(".*", ["orders", "\ud800"]) == ["orders"]


@pytest.mark.parametrize("pattern", ["(?=.)(.|.)*!", r"(a)\1", "a++", "[[a]"])
def test_where_code_is_forbidden_no_expression_takes_long(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLABLES_VARIABLE, "0")
    with pytest.raises(
        OptionError, match=rf"'subscribePattern' is .*RE2 cannot match it, and variable {CALLABLES_VARIABLE}"
    ):
        matching_names(pattern, ["a" * 40])
    assert matching_names("a.*", ["a", "\ud800"]) == ["a"]


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a" * 4097, "at most 4096 characters, .*; it has 4097"),
        ("[a-z]{1,1000}" * 20_000, "at most 4096 characters"),
        ("[a-z]{1,1000}" * 39, "at most 1000 repeats in all braces"),  # RE2 makes one repeat of 39,000 of it
        (r"(?:\pL{1000}){2}", "at most 1000 repeats in all braces"),
        ("a{" + "9" * 4000 + "}", "at most 1000 repeats in all braces|RE2 cannot match"),
    ],
)
def test_where_code_is_forbidden_an_expression_has_a_limit(
    pattern: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RE2 takes gigabytes to read longer ones, and a process without memory is aborted."""
    monkeypatch.setenv(CALLABLES_VARIABLE, "0")
    with pytest.raises(OptionError, match=rf"'subscribePattern' is '.{{12,32}}…'; expected {problem}.*"):
        matching_names(pattern, ["orders"])
    with pytest.raises(OptionError, match=f"'subscribePattern' is .*; expected {problem}"):
        options.parse({"nameServer": "a:1", "subscribePattern": pattern})
    for allowed in ("a" * 4096, "a{1,1000}", "(?:a{10}){10}", "[{]5000[}]"):
        options.parse({"nameServer": "a:1", "subscribePattern": allowed})
        assert matching_names(allowed, ["b"]) == []


@pytest.mark.parametrize("code", ["0", "1"])
@pytest.mark.parametrize("pattern", ["a)|(?:b", "a)(?:b", ")(?:"])
def test_an_expression_is_valid_alone(pattern: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CALLABLES_VARIABLE, code)
    with pytest.raises(OptionError, match="'subscribePattern' is"):
        matching_names(pattern, ["ab", "a", "xb"])
