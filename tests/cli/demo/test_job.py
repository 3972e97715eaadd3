import inspect
import runpy
from pathlib import Path

import pytest

from rocketmq_spark.cli.demo import job

EXAMPLE = Path(__file__).parents[3] / "examples" / "orders_pipeline.py"


@pytest.mark.parametrize("name", ["read_orders", "region_totals", "as_messages", "write_totals"])
def test_the_demo_runs_what_the_example_shows(name):
    example = runpy.run_path(str(EXAMPLE))
    assert inspect.getsource(getattr(job, name)) in EXAMPLE.read_text()
    assert example["ORDER"] == job.ORDER
