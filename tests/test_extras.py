"""What extras install, and what it says where one is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.base import extras

ROOT = Path(__file__).parents[1]


def test_a_command_names_the_packages() -> None:
    assert extras.command(extras.CLI) == "pip install 'click>=8.1' 'rich>=13'"


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("click>=8.1", ("click", (8, 1), ())),
        ("pandas>=2.2.0,<3", ("pandas", (2, 2, 0), (3,))),
    ],
)
def test_bounds(requirement: str, expected: object) -> None:
    assert extras.bounds(requirement) == expected


def test_installed() -> None:
    assert extras.installed("pytest")
    assert not extras.installed("no_such_package")
    assert not extras.installed("no_such_package.module")


def test_the_command_says_what_it_lacks() -> None:
    code = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("rich", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from rocketmq_spark.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "Error: the command needs rich: pip install 'click>=8.1' 'rich>=13'\n"
