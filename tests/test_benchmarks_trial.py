"""Every section of the benchmarks runs, with everything tiny: what it measures then means nothing, that it counts right does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness, targets
from benchmarks.__main__ import SECTIONS

ROOT = Path(__file__).parents[1]
SIZED = {"codec": ["codec"], "read": ["stock", "raised", "cold"], "write": ["write"]}


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("rocketmq")  # the jars are there
def test_11_29_every_section_runs(tmp_path):
    document = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--no-kafka", "--json", document],
        cwd=ROOT,
        env={**os.environ, harness.TRIAL_VARIABLE: "yes"},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(document.read_text("utf-8"))
    found = told["figures"]
    names = [name for section in SECTIONS for name in SIZED.get(section, ())]
    assert found.keys() == {f"{name} {size}" for name in names for size in harness.SIZES} | {
        "latency",
        "planning",
        "memory",
    }
    for name in names:
        for size in harness.SIZES:
            assert all(case["median"] > 0 for case in found[f"{name} {size}"].values())
    assert {targets.SPARK, targets.STREAM, targets.PULL8, targets.LITE, targets.CEILING} <= found["stock 100"].keys()
    assert {targets.WRITE, targets.HASH, targets.DROP, *targets.JAVA_BATCH} <= found["write 1024"].keys()
    assert found["latency"].keys() == {targets.OURS, targets.LOW}
    assert "Targets (medians of this run)" in done.stdout
