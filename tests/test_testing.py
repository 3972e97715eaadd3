"""The pytest plug-in for users, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

INNER = """
def test_passes(rocketmq, rocketmq_topic, make_rocketmq_topic):
    other = make_rocketmq_topic(queues=3)
    assert len(rocketmq.admin.route(rocketmq_topic).readable()) == 8
    assert len(rocketmq.admin.route(other).readable()) == 3

def test_fails(rocketmq_topic):
    assert not rocketmq_topic
"""


def test_fixtures_and_the_log_of_a_failed_test(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = {**os.environ, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120, check=False)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "RocketMQ log" in done.stdout
    assert "create new topic" in done.stdout


def test_the_plug_in_costs_nothing_until_it_is_used() -> None:
    code = "import sys, rocketmq_spark.testing; print([m for m in sys.modules if 'localbroker' in m or m == 'pyspark'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
