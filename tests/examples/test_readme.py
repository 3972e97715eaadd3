"""README.md says only what works: its links lead somewhere, its programs run; its commands are read by ``tests/test_docs.py``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.cli import background
from rocketmq_spark.localbroker.process import free_port
from tests.examples.test_orders_pipeline import EXAMPLE
from tests.fix_spark import ROOT, environment

TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_job_takes_the_arguments_that_are_shown() -> None:
    shown = re.findall(r"--[a-z-]+", TEXT.partition("spark-submit examples/orders_pipeline.py")[2].partition("```")[0])
    assert set(shown) == {"--name-server", "--input", "--output", "--checkpoint"}
    assert all(f'"{name}"' in EXAMPLE.read_text() for name in shown)


def execute(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=folder, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_job_is_the_example() -> None:
    code = (ROOT / "examples" / "upper.py").read_text("utf-8").partition('"""\n\n')[2]
    assert PROGRAMS[0] == code


@pytest.mark.timeout(1200)
def test_the_quick_start_runs_line_by_line_in_one_shell(own_cache: Path, tmp_path: Path) -> None:
    """But for the installation. The broker has a free port, and the job's checkpoint a folder of the test."""
    lines = BLOCKS[1].strip().splitlines()
    assert lines[0].startswith("python3 -m venv .venv && . .venv/bin/activate && pip install '.[spark,cli]'")
    assert lines[-1] == "rocketmq-spark broker stop"
    port, job = str(free_port()), tmp_path / "upper.py"
    text = (ROOT / "examples" / "upper.py").read_text("utf-8")
    job.write_text(text.replace("9876", port).replace("/tmp/orders-upper", str(tmp_path / "checkpoint")), "utf-8")
    script = "\n".join(["set -e", *lines[1:]]).replace("9876", port).replace("examples/upper.py", str(job))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = subprocess.run(
        ["bash", "-c", script], env=environment(PATH=path), cwd=tmp_path, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    try:
        assert shell.returncode == 0, shell.stderr[-4000:]
        assert shell.stdout.count('"ORDER_ID"') == 3, shell.stdout
        assert "RocketMQ has stopped" in shell.stdout
    finally:
        left = background.running()
        if left is not None:
            os.kill(left.pid, signal.SIGKILL)


def test_the_client_alone_runs(tmp_path: Path) -> None:
    assert execute(PROGRAMS[1], tmp_path) == "SEND_OK\norders b'one'\n"
