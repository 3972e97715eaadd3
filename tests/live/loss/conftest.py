"""What tests of loss look at."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest


@pytest.fixture
def lost_lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said about loss so far."""
    caplog.set_level(logging.INFO, "rocketmq_spark")
    return lambda: [r.getMessage() for r in caplog.records if "cannot be read any more" in r.getMessage()]
