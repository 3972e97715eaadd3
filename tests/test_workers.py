"""The Python of Spark's workers, and what is said when it is another one."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from rocketmq_spark.spark import tuning
from tests.fix_spark import ROOT, environment


@pytest.fixture(autouse=True)
def warns_again():
    tuning.warn_if_workers_differ.cache_clear()
    yield
    tuning.warn_if_workers_differ.cache_clear()


def program(tmp_path: Path, code: int) -> str:
    """Something that runs like a Python and ends with ``code``."""
    path = tmp_path / f"python-{code}"
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def said(name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tuning.warn_if_workers_differ(name)
        tuning.warn_if_workers_differ(name)
    return [str(warning.message) for warning in caught]


def test_11_24_a_python_without_the_package_is_told_once_with_the_remedy(tmp_path):
    name = program(tmp_path, 1)
    (message,) = said(name)
    assert f"Spark's workers run {name}, which cannot import rocketmq_spark" in message
    assert sys.executable in message
    assert "os.environ['PYSPARK_PYTHON'] = sys.executable" in message


def test_nothing_is_said_of_a_python_that_has_it_or_is_not_here(tmp_path):
    assert said(program(tmp_path, 0)) == []
    assert said(sys.executable) == []
    assert said("./environment/bin/python") == []
    assert said("no-such-python") == []


def test_the_probe_finds_what_is_missing():
    """In a Python without site packages pyarrow is, while the package itself lies in the folder of the clone."""
    probe = [sys.executable, "-c", tuning._PROBE]
    assert subprocess.run(probe, env=environment()).returncode == 0
    assert subprocess.run([probe[0], "-S", *probe[1:]], env=environment()).returncode == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pyspark, rocketmq_spark", 1),
        ("import rocketmq_spark, pyspark", 0),  # nobody has said yet that there will be Spark; ``register`` looks again
        ("import pyspark, rocketmq_spark.errors, rocketmq_spark.model", 1),
    ],
)
def test_11_24_importing_the_package_in_a_driver_warns(tmp_path, code, expected):
    env = {**environment(), "PYSPARK_PYTHON": program(tmp_path, 1)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("Spark will not find the format 'rocketmq'") == expected


def test_spark_itself_does_not_look(tmp_path):
    """Its workers are started with ``-m pyspark…``, or from the daemon of this package; a module of another name that imports
    the same is a driver.
    """
    names = (("pyspark.worker_like", 0), ("rocketmq_spark.daemon", 0), ("jobs.worker_like", 1))
    imports = (
        "import sys\nsys.modules['pyspark'] = sys\nsys.path.pop(0)\nsys.modules.pop('rocketmq_spark', None)\n"
        f"sys.path.insert(0, {str(ROOT)!r})\nimport rocketmq_spark\n"
    )
    for name, expected in names:
        folder, _, module = name.rpartition(".")
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / folder / f"{module}.py").write_text(imports)
        env = {**environment(), "PYSPARK_PYTHON": program(tmp_path, 1)}
        command = [sys.executable, "-m", name]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr.count("Spark will not find the format") == expected
