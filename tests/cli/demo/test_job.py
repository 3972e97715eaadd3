import inspect
from pathlib import Path

import pytest

from rocketmq_spark.cli.demo import job
from rocketmq_spark.cli.demo.environment import DemoEnvironment

EXAMPLE = (Path(__file__).parents[3] / "examples" / "orders_pipeline.py").read_text("utf-8")


@pytest.mark.parametrize("name", ["read_orders", "region_totals", "as_messages", "write_totals"])
def test_the_example_has_the_functions_of_the_demo(name):
    assert inspect.getsource(getattr(job, name)) in EXAMPLE


def test_the_example_has_the_orders_of_the_demo():
    assert f'ORDER = "{job.ORDER}"\n' in EXAMPLE


@pytest.mark.parametrize(
    ("regions", "totals"),
    [
        ([], {"different": 0, "repeated": 0, "orders": 0, "cents": 0}),
        (["asia", "africa"], {"different": 2, "repeated": 0, "orders": 4, "cents": 2098}),
        (["asia", "asia", "asia", "africa"], {"different": 2, "repeated": 1, "orders": 4, "cents": 2098}),
    ],
    ids=["none", "each once", "one three times"],
)
def test_a_total_stored_more_than_once_counts_once(spark, monkeypatch, tmp_path, regions, totals):
    values = [
        f"(timestamp'2026-01-31 12:00:00', timestamp'2026-01-31 12:00:05', '{name}', 2, 10.49)" for name in regions
    ]
    stored = spark.createDataFrame([], job.TOTAL)
    if values:
        stored = stored.union(spark.sql(f"SELECT * FROM VALUES {', '.join(values)}"))
    monkeypatch.setattr(job, "read_totals", lambda *arguments: stored)
    assert job._totals(spark, DemoEnvironment("n:1", "orders", "totals", tmp_path, None)) == totals
