"""What checks say, and the exit code."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.doctor.findings import (
    Finding,
    advice_finding,
    broken_finding,
    exit_code,
    failed_finding,
    ok_finding,
)
from rocketmq_spark.errors import BrokerError, OffsetError

OK, ADVICE, BROKEN = ok_finding("a", "fine"), advice_finding("b", "so so", "do"), broken_finding("c", "bad", "do")


@pytest.mark.parametrize(
    ("found", "strict", "expected"),
    [
        ([], False, 0), ([OK], True, 0), ([OK, ADVICE], False, 0), ([OK, ADVICE], True, 1), ([OK, BROKEN], False, 1),
        ([BROKEN, OK], True, 1),
    ],
)  # fmt: skip
def test_advice_counts_only_when_it_is_strict(found: list[Finding], strict: bool, expected: int) -> None:
    assert exit_code(found, strict) == expected


def test_an_error_as_a_finding() -> None:
    refused = failed_finding("x", BrokerError("refused", "h:1", 1, remark="for\na reason"), "Look")
    assert refused == broken_finding("x", "refused: for a reason (at h:1)", "Look")
    assert failed_finding("x", OffsetError("none", remedy="Wait"), "Look") == broken_finding("x", "none", "Wait")
