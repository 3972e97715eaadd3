"""The comparisons of this folder themselves: what differs fails, and is shown."""

from __future__ import annotations

import pytest
from chispa import DataFramesNotEqualError
from chispa.schema_comparer import SchemasNotEqualError

from tests.spark.pipelines import holds, holds_bodies


def test_rows_in_any_order_are_equal(spark):
    holds(spark.range(3).selectExpr("2 - id n"), "n bigint", [(0,), (1,), (2,)])


@pytest.mark.parametrize("rows", [["a", "b"], ["a", "b", "b"], ["a", "b", "x"], []])
def test_row_too_many_or_too_few_fails_and_is_shown(spark, rows):
    found = spark.createDataFrame([("b",), ("c",), ("a",)], "body string")
    with pytest.raises(DataFramesNotEqualError, match=r"body='?c\b"):
        holds_bodies(found, rows)


def test_columns_of_another_type_fail(spark):
    with pytest.raises(SchemasNotEqualError, match=r"bigint|LongType"):
        holds(spark.range(1), "id int", [(0,)])
