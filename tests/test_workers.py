"""Warnings if Spark's workers run a Python without this package."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.spark import workers
from tests.fix_spark import ROOT, environment


@pytest.fixture(autouse=True)
def warns_again():
    workers.warn_if_workers_differ.cache_clear()
    yield
    workers.warn_if_workers_differ.cache_clear()


def program(tmp_path: Path, code: int) -> str:
    """A program that ends with exit code ``code``, in place of a Python."""
    path = tmp_path / f"python-{code}"
    path.write_text(f"#!/bin/sh\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def said(name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        workers.warn_if_workers_differ(name)
        workers.warn_if_workers_differ(name)
    return [str(warning.message) for warning in caught]


def test_a_python_without_the_package_warns_once_with_a_remedy(tmp_path):
    name = program(tmp_path, 1)
    (message,) = said(name)
    assert f"Spark's workers run {name}, which cannot import rocketmq_spark" in message
    assert sys.executable in message
    assert "os.environ['PYSPARK_PYTHON'] = sys.executable" in message


def test_a_python_with_the_package_or_elsewhere_does_not_warn(tmp_path):
    assert said(program(tmp_path, 0)) == []
    assert said(sys.executable) == []
    assert said("./environment/bin/python") == []
    assert said("no-such-python") == []


def test_the_probe_imports_nothing_from_the_current_folder(tmp_path, monkeypatch):
    """A program may be started in a folder of all users, and imports PySpark before it does anything else."""
    called = []
    monkeypatch.setattr(subprocess, "run", lambda **call: called.append(call) or SimpleNamespace(returncode=0))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", ":relative")
    Path("python-1").write_text("#!/bin/sh")
    Path("python-1").chmod(0o755)
    monkeypatch.setenv("PATH", ".")
    assert workers.can_import("python-1")
    assert (called[0]["cwd"], called[0]["args"][0]) == ("/", str(tmp_path / "python-1"))
    assert "PYTHONPATH" not in called[0]["env"]


def test_the_probe_finds_what_is_missing():
    """A Python without site packages lacks pyarrow; it finds the package itself in the folder of the clone."""
    probe = [sys.executable, "-c", workers._IMPORT_PROBE]
    assert subprocess.run(probe, env=environment()).returncode == 0
    assert subprocess.run([probe[0], "-S", *probe[1:]], env=environment()).returncode == 1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import pyspark, rocketmq_spark", 1),
        ("import rocketmq_spark, pyspark", 1),
        ("from rocketmq_spark import Producer\nfrom pyspark.sql import SparkSession\nimport pyspark.errors", 1),
        ("import importlib.util, rocketmq_spark\nassert importlib.util.find_spec('pyspark')", 0),
        ("import pytest, rocketmq_spark, pyspark", 0),  # as pytest's plug-in
        ("import pyspark, rocketmq_spark.errors, rocketmq_spark.model", 1),
    ],
)
def test_importing_both_packages_in_a_driver_warns_once(tmp_path, code, expected):
    env = {**environment(), "PYSPARK_PYTHON": program(tmp_path, 1)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.count("Spark will not find the format 'rocketmq'") == expected


def test_a_program_of_an_environment_that_is_not_activated_warns(tmp_path):
    """With ``venv/bin/python job.py``, workers run the first ``python3`` of the path."""
    Path(program(tmp_path, 1)).rename(tmp_path / "python3")
    (tmp_path / "job.py").write_text("import rocketmq_spark\nfrom pyspark.sql import SparkSession\n")
    env = {**environment(), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    del env["PYSPARK_PYTHON"]
    done = subprocess.run([sys.executable, tmp_path / "job.py"], env=env, capture_output=True, text=True, check=True)
    assert "Spark's workers run python3, which cannot import" in done.stderr


def test_the_daemon_of_this_package_checks_no_python(tmp_path):
    env = {**environment(), "PYSPARK_PYTHON": program(tmp_path, 1)}
    command = [sys.executable, "-m", "rocketmq_spark.daemon", "pyspark.worker"]
    done = subprocess.run(command, env=env, input=b"", capture_output=True, timeout=60, check=False)
    assert len(done.stdout) == 4  # the number of its port
    assert b"Spark will not find the format" not in done.stderr


def test_processes_of_spark_check_no_python(tmp_path):
    """Spark starts its processes with ``-m pyspark…``, or from the daemon of this package. A module of another name that imports
    PySpark is a driver.
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


@pytest.mark.parametrize("has_them", [True, False])
@pytest.mark.parametrize("zipped", [True, False])
def test_data_sources_are_found_without_an_import(tmp_path, zipped, has_them):
    """A platform may have PySpark as a zip file."""
    files = {"__init__.py": "raise ImportError", "sql/__init__.py": "", "sql/datasource.py": ""}
    with zipfile.ZipFile(tmp_path / "pyspark.zip", "w") as archive:
        for name, text in list(files.items())[: 3 if has_them else 2]:
            archive.writestr(f"pyspark/{name}", text)
    if not zipped:
        zipfile.ZipFile(tmp_path / "pyspark.zip").extractall(tmp_path / "folder")
    where = tmp_path / ("pyspark.zip" if zipped else "folder")
    code = f"import sys\nsys.path.insert(0, {str(where)!r})\nfrom rocketmq_spark.spark import conf\n"
    command = [sys.executable, "-c", f"{code}print(conf.has_data_sources())"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout == f"{has_them}\n", done.stderr
