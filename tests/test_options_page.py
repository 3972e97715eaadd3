from __future__ import annotations

import pytest

from rocketmq_spark.options import TABLE, Option
from rocketmq_spark.options_page import markdown


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_option_stands_there_once(row: Option) -> None:
    assert markdown().count(f"\n| `{row.name}`") == 1
    assert row.help
    assert row.shown
