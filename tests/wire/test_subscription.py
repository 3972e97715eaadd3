"""Tag expressions and hashes as the Java client makes them."""

import pytest

from rocketmq_spark.base.java import string_hash
from rocketmq_spark.wire.properties import Subscription, parse_subscription
from tests.harness import in_one_test, vectors

CASES = vectors("subscriptions")


@pytest.mark.parametrize("case", CASES, ids=[repr(case["expression"]) for case in CASES])
def test_expressions(case):
    if "sub_string" not in case or case.get("error"):
        with pytest.raises(ValueError, match="No tag"):
            parse_subscription(case["expression"])
        return
    found = parse_subscription(case["expression"])
    assert found.sub_string == case["sub_string"]
    assert set(found.tags) == set(case["tags"])
    assert len(found.tags) == len(case["tags"])
    assert list(found.codes) == sorted(case["codes"])


HASHES = [case for case in vectors("select_by_hash") if case["arg_type"] == "String"]


@in_one_test("case", HASHES)
def test_hash_is_javas(case):
    assert string_hash(case["arg"]) == case["java_hash"]


def test_equal_hashes_are_told_apart_by_text():
    subscription = parse_subscription("Aa || C")
    assert string_hash("Aa") == string_hash("BB")
    assert subscription.accepts("Aa")
    assert not subscription.accepts("BB")
    assert not subscription.accepts(None)


def test_everything():
    assert Subscription().accepts(None)
    assert Subscription().accepts("any")
    assert parse_subscription("*") == Subscription()
