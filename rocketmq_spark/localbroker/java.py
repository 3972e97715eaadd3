"""Which Java runs the servers and Ivy: JAVA_HOME first, then PATH; 17 or newer, as PySpark itself needs.

The version is read from the ``release`` file beside the installation, since asking ``java -version`` costs a tenth
of a second at every start; only a Java without that file is asked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark.errors import LocalBrokerError

OLDEST = 17
HOW_TO_GET = (
    "Install a Java runtime (Debian, Ubuntu: apt install openjdk-17-jre-headless; Fedora: dnf install "
    "java-21-openjdk-headless; macOS: brew install openjdk@21) or set JAVA_HOME to one"
)


@dataclass(frozen=True, slots=True)
class Java:
    """One runtime: ``identity`` differs between builds whose class-data archives do not fit each other."""

    path: Path
    major: int
    identity: str


def find_java() -> Java:
    """The Java to use, or an error that says what is missing."""
    path = _candidate()
    identity = _release_file(path) or _asked(path)
    major = _major(identity)
    if major is None:
        raise LocalBrokerError(f"{path} does not tell a Java version", remedy=HOW_TO_GET)
    if major < OLDEST:
        raise LocalBrokerError(f"Java {OLDEST} or newer is needed, but {path} is Java {major}", remedy=HOW_TO_GET)
    return Java(path, major, f"{path.resolve()}\n{identity}")


def _candidate() -> Path:
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home, "bin", "java")
        if not os.access(path, os.X_OK):
            raise LocalBrokerError(f"JAVA_HOME is {home}, but there is no bin/java in it", remedy=HOW_TO_GET)
        return path
    program = shutil.which("java")
    if program is None:
        raise LocalBrokerError(
            f"Java {OLDEST} or newer is needed, and there is none: no java on PATH, JAVA_HOME is not set",
            remedy=HOW_TO_GET,
        )
    return Path(program)


def _release_file(path: Path) -> str | None:
    try:
        text = (path.resolve().parent.parent / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text if "JAVA_VERSION=" in text else None


def _asked(path: Path) -> str:
    try:
        done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise LocalBrokerError(f"{path} could not be run", remark=str(e), remedy=HOW_TO_GET) from e
    return done.stderr + done.stdout


def _major(identity: str) -> int | None:
    """``JAVA_VERSION="17.0.15"``, ``version "1.8.0_402"``, ``version "21"``."""
    match = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', identity)
    return int(match[1]) if match else None
