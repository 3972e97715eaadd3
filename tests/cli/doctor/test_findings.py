"""What checks say, and the exit code."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.doctor.findings import Finding, advice, broken, exit_code, failed, ok
from rocketmq_spark.errors import BrokerError, OffsetError

OK, ADVICE, BROKEN = ok("a", "fine"), advice("b", "so so", "do"), broken("c", "bad", "do")


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
    refused = failed("x", BrokerError("refused", "h:1", 1, remark="for\na reason"), "Look")
    assert refused == broken("x", "refused: for a reason (at h:1)", "Look")
    assert failed("x", OffsetError("none", remedy="Wait"), "Look") == broken("x", "none", "Wait")
