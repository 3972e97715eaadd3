from __future__ import annotations

import pytest

from rocketmq_spark.base.java import Long, java_hash
from rocketmq_spark.errors import OptionError
from tests.harness import in_one_test
from tests.queues import read

CASES = read("select_by_hash")


def java_value(case: dict[str, object]) -> object:
    return Long(str(case["arg"])) if case["arg_type"] == "Long" else case["arg"]


@in_one_test("case", CASES)
def test_every_vector_of_the_java_class(case: dict[str, object]) -> None:
    assert java_hash(java_value(case)) == case["java_hash"]


def test_long_hash_differs_if_negative_and_serves_past_32_bits() -> None:
    assert (java_hash(-1), java_hash(Long(-1))) == (-1, 0)
    assert java_hash(123456789012) == java_hash(Long(123456789012)) == -1097262584
    assert java_hash(-(1 << 63)) == -(1 << 31)


@pytest.mark.parametrize("value", [None, 1.5, b"x", ("a",), 1 << 63, -(1 << 63) - 1])
def test_what_has_no_portable_hash_is_refused(value: object) -> None:
    with pytest.raises(OptionError, match="cannot hash"):
        java_hash(value)
