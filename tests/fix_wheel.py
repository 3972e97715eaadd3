"""What users install: the wheel, and virtual environments with it that know nothing of the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A wheel or sdist to try instead of one that is built here: .ci/release sets it.
DIST_VARIABLE = "ROCKETMQ_SPARK_TEST_DIST"
SOURCES = (
    "rocketmq_spark", "pyspark_rocketmq", "docs", "setup.cfg", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md",
    "LICENSE",
)  # fmt: skip


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs: builds leave files beside setup.cfg."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    return folder


def outside(**more: str) -> dict[str, str]:
    """The environment of a user who has no clone."""
    ours = ("PYTHONPATH", "PYSPARK_PYTHON", "ROCKETMQ_NAMESRV")
    return {**{name: value for name, value in os.environ.items() if name not in ours}, **more}


def run(*command: object, cwd: Path, **env: str) -> str:
    """The output of a command that must succeed; neither the clone nor its settings are visible to it."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=outside(**env),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: object, cwd: Path) -> str:
    return run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    what = os.environ.get(DIST_VARIABLE, sources)
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, what, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def environment(folder: Path, *install: object) -> Path:
    """A virtual environment with our package; its dependencies are those of the running one. Its bin folder."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    # A line in a .pth file adds the folder, but not what .pth files in it name: the clone stays out of sight.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    how = ("--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed")
    pip("--python", python, "install", *how, *install, cwd=folder)
    return python.parent


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel."""
    return environment(tmp_path_factory.mktemp("installed") / "venv", wheel)
