"""Each row of the connection and source tables has a test of its effect: ``test_<field>__<what>`` in this folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rocketmq_spark.options import SOURCE_ROLES, TABLE

WRITTEN = {
    name
    for path in Path(__file__).parent.glob("test_*.py")
    for name in re.findall(r"^def test_(\w+?)__\w+\(", path.read_text("utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("field", [row.field for row in TABLE if set(row.roles) & set(SOURCE_ROLES)])
def test_has_a_test(field):
    assert field in WRITTEN
