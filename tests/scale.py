"""How much the tests of whole pipelines do: one variable, ROCKETMQ_SPARK_TEST_SCALE.

1 is the full count (``make soak``: 200,000 messages where the acceptance list says so), the default a tenth of it. Tests with
the mark ``soak`` run at 1 only; a short sibling of each runs always.
"""

from __future__ import annotations

import os

import pytest

soak = pytest.mark.soak
SCALE = float(os.environ.get("ROCKETMQ_SPARK_TEST_SCALE", "0.1"))


def scaled(full: int, minimum: int = 1) -> int:
    """A tenth of ``full`` by default, all of it at scale 1, never below ``minimum``."""
    return max(minimum, round(full * SCALE))


def examples(full: int) -> int:
    """A third of ``full`` examples of a property by default, all of them at scale 1 (``make soak ONLY=properties``)."""
    return full if SCALE >= 1 else max(1, full // 3)
