"""What extras install, and what it says where one is missing."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from rocketmq_spark.base import extras

ROOT = Path(__file__).parents[1]


def test_a_command_names_the_packages() -> None:
    assert extras.install_command(extras.CLI) == "pip install 'click>=8.1' 'rich>=13'"


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("click>=8.1", ("click", (8, 1), ())),
        ("pandas>=2.2.0,<3", ("pandas", (2, 2, 0), (3,))),
    ],
)
def test_bounds(requirement: str, expected: object) -> None:
    assert extras.requirement_parts(requirement) == expected


def test_installed() -> None:
    assert extras.is_installed("pytest")
    assert not extras.is_installed("no_such_package")
    assert not extras.is_installed("no_such_package.module")


def test_a_module_that_a_program_made_counts_as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "made_by_a_program", types.ModuleType("made_by_a_program"))
    assert extras.is_installed("made_by_a_program")


def _without(absent: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where the packages ``absent`` are not installed."""
    code = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent.split()!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from rocketmq_spark.cli import main
main()
"""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )


def test_the_command_says_what_it_lacks() -> None:
    done = _without("rich numpy")
    assert done.returncode == 1
    assert done.stderr == "Error: the command needs rich: pip install 'click>=8.1' 'rich>=13'\n"


@pytest.mark.parametrize(
    ("arguments", "package", "extra"),
    [
        ("tail orders --name-server 127.0.0.1:1", "numpy", extras.ARROW),
        ("dlq show billing --name-server 127.0.0.1:1", "numpy", extras.ARROW),
        ("checkpoint show FOLDER", "pyarrow", extras.ARROW),
        ("checkpoint rewind FOLDER --to-batch 1", "pyarrow", extras.ARROW),
        ("lag --checkpoint FOLDER --name-server 127.0.0.1:1", "pyarrow", extras.ARROW),
        ("demo", "pyspark", extras.SPARK),
    ],
)
def test_a_command_that_needs_more_names_the_packages(tmp_path: Path, arguments: str, package: str, extra: str) -> None:
    given = [str(tmp_path) if each == "FOLDER" else each for each in arguments.split()]
    done = _without("numpy pyarrow pandas pyspark py4j xxhash", *given)
    assert done.returncode == 1
    assert done.stderr == (
        f"Error: [ROCKETMQ_OPTION] this command needs {package}, which is not installed. "
        f"Install it: {extras.install_command(extra)}\n"
    )


def test_doctor_needs_no_more() -> None:
    done = _without("numpy pyarrow pandas pyspark py4j xxhash", "doctor", "--name-server", "127.0.0.1:1")
    assert "java" in done.stdout
    assert "name server: 127.0.0.1:1 cannot be used" in done.stdout
    assert done.stderr.count("\n") == 1  # its summary


def test_the_extra_of_a_module() -> None:
    assert extras.extra_with_module("numpy.typing") == extras.ARROW
    assert extras.extra_with_module("pandas") == extras.SPARK
    assert extras.extra_with_module("no_such_package") is None
