"""Spark for tests: one session in this process, and sessions of their own in processes that may be killed.

Starting a session costs seconds and its Python workers more, so one ``spark`` serves all tests and is never stopped in
between. Tests that need another master, a fresh JVM or a violent end run a script: ``run_script``, ``start_script``.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark import low_latency_conf
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.spark import compat

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

ROOT = Path(__file__).parent.parent
_CHECKPOINT_FILES = "spark.sql.streaming.checkpointFileManagerClass"
# Spark's default manager starts a process for each check whether a file is a link: 17 in a micro-batch.
_QUICK_FILES = low_latency_conf()[_CHECKPOINT_FILES]
# For tests of kills: Spark's default manager, which users have.
CHECKPOINT_AS_USERS = {_CHECKPOINT_FILES: _QUICK_FILES.replace("FileSystemBased", "FileContextBased")}
CONF = {
    _CHECKPOINT_FILES: _QUICK_FILES,
    "spark.ui.enabled": "false",
    "spark.python.daemon.module": "rocketmq_spark.daemon",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "768m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto",
    "spark.default.parallelism": "2",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.session.timeZone": "UTC",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.python.udf.buffer.size": "1048576",
    "spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true",
    "spark.sql.execution.pyspark.udf.faulthandler.enabled": "true",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}


_UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
# An archive of the classes that every driver loads, so that a start takes half the time; and only the C1 compiler, because tests
# are short.
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:cds=off -Xlog:cds+dynamic=off"
_WITH_ARCHIVE = f"{_JVM} -XX:SharedArchiveFile="
_ARCHIVE_VARIABLE = "SPARK_SUBMIT_OPTS"
_TYPICAL = """
import sys
from pyspark.sql import SparkSession

folder = sys.argv[1]
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(1000).selectExpr("cast(id % 7 as string) k").write.text(folder + "/in")
rows = spark.readStream.text(folder + "/in").groupBy("value").count()
writer = rows.writeStream.format("noop").outputMode("complete").option("checkpointLocation", folder + "/checkpoint")
writer.trigger(availableNow=True).start().awaitTermination()
spark.stop()
"""


# Spark before 4.2 runs a query with availableNow or once as one batch.
ONE_BATCH = not compat.has_class("SupportsTriggerAvailableNow")


def pytest_configure(config: pytest.Config) -> None:
    if ONE_BATCH:  # PySpark before 4.2 leaves the sockets of collected rows to the garbage collector
        config.addinivalue_line("filterwarnings", r"ignore:unclosed <socket\.socket:ResourceWarning")
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the JVMs of all drivers use the class-data archive, which lies in the environment of its PySpark.

    The first process that starts a driver makes the archive (``environment``), which takes half a minute.
    """
    wanted = any(item.get_closest_marker("spark") for item in session.items)
    if wanted and not session.config.getoption("collectonly"):
        os.environ[_ARCHIVE_VARIABLE] = f"{_WITH_ARCHIVE}{_archive()}"


@functools.cache
def _archive() -> Path:
    java = hashlib.sha256(find_java().identity.encode()).hexdigest()[:8]
    return Path(sys.prefix, f"spark-{java}.jsa")


def _await_archive(archive: Path) -> None:
    """Make the archive if it does not exist. One of the processes that start a driver makes it, while the others wait."""
    with archive.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            _compile_zips()
            _make_archive(archive)


def _compile_zips() -> None:
    """Add bytecode to the zips of PySpark and py4j, which Spark's Python processes import. Without it, each one compiles them."""
    import pyspark

    for path in Path(pyspark.__file__).parent.glob("python/lib/*.zip"):
        part = path.with_suffix(f".{os.getpid()}")
        shutil.copy(path, part)
        with (
            zipfile.ZipFile(part, "a") as zipped,
            tempfile.TemporaryDirectory() as folder,
            warnings.catch_warnings(action="ignore"),  # compilers warn about sources of PySpark 4.0 and 4.1
        ):
            known = set(zipped.namelist())
            source, code = Path(folder, "module.py"), Path(folder, "module.pyc")
            for name in known:
                if not name.endswith(".py") or name + "c" in known or "/tests/" in name:
                    continue
                source.write_bytes(zipped.read(name))
                py_compile.compile(str(source), str(code), f"{path}/{name}", doraise=True, invalidation_mode=_UNCHECKED)
                zipped.write(code, name + "c")
        part.replace(path)


def _make_archive(archive: Path) -> None:
    """Run a typical driver, whose JVM archives the classes that it loaded. If this fails, drivers start without an archive."""
    part = archive.with_suffix(f".{os.getpid()}")
    with tempfile.TemporaryDirectory() as folder:
        env = environment(**{_ARCHIVE_VARIABLE: f"{_JVM} -XX:ArchiveClassesAtExit={part}"})
        # A session of its own, so that the JVM can be ended with it. That one has the pipe, too, and writes after its driver
        # has ended: all is there when the pipe is closed.
        driver = subprocess.Popen(
            [sys.executable, "-c", _TYPICAL, folder], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            driver.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(driver.pid, signal.SIGKILL)
            driver.communicate()
        if driver.returncode == 0 and part.exists():
            part.replace(archive)
        else:
            part.unlink(missing_ok=True)


def environment(**more: str) -> dict[str, str]:
    """The environment variables of a Spark driver, which its Python workers inherit."""
    asked, wanted = _ARCHIVE_VARIABLE in more, os.environ.get(_ARCHIVE_VARIABLE, "")
    if not asked and wanted == f"{_WITH_ARCHIVE}{_archive()}":
        _await_archive(_archive())
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", "PYTHONPATH": path, **more}


def new_session(master: str = "local[2]", **conf: str) -> SparkSession:
    """A session with the settings of all tests; ``conf`` names have ``_`` for ``.``."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    for name, value in {**CONF, **{name.replace("_", "."): value for name, value in conf.items()}}.items():
        builder = builder.config(name, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel(os.environ.get("ROCKETMQ_SPARK_TEST_LOG", "ERROR"))
    return session


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """``local[2,3]``: two slots, and three attempts per task. Shared: tests clean up what they set."""
    os.environ.update(environment())
    session = new_session("local[2,3]", spark_sql_warehouse_dir=str(tmp_path_factory.mktemp("warehouse")))
    yield session
    session.stop()


def wait_until(query: StreamingQuery, condition: Callable[[], object], timeout_s: float = 180.0) -> None:
    """Return when ``condition`` holds. A query that failed raises its error, one that ended fails the test."""
    until = time.monotonic() + timeout_s
    while not condition():
        error = query.exception()
        if error is not None:
            raise error
        if not query.isActive and not condition():
            pytest.fail(f"the query ended first; last progress: {query.lastProgress}")
        if time.monotonic() > until:
            pytest.fail(f"not within {timeout_s:g} s; last progress: {query.lastProgress}")
        time.sleep(0.02)


def finish(query: StreamingQuery, timeout_s: float = 360.0) -> None:
    """Wait for the end of an AvailableNow query and raise its error."""
    if not query.awaitTermination(timeout_s):
        query.stop()
        pytest.fail(f"not finished within {timeout_s:g} s; last progress: {query.lastProgress}")


def drain(start: Callable[[], StreamingQuery], timeout_s: float = 360.0) -> None:
    """Run an AvailableNow query until all messages are read. If a run is one batch, until two runs in a row have no rows.

    One such run is not enough, because it may have repeated an unfinished batch without rows.
    """
    idle = 0
    while idle < (2 if ONE_BATCH else 1):
        query = start()
        finish(query, timeout_s)
        idle = 0 if ONE_BATCH and any(progress["numInputRows"] for progress in query.recentProgress) else idle + 1


# What PySpark's daemon prints for each worker whose driver has died or ended.
_BROKEN_PIPES = re.compile(
    r"(?:^Traceback \(most recent call last\):\n)?"
    r'(?:^  File "[^"\n]*/daemon\.py", .*\n(?:^    .*\n)*)+'
    r"^BrokenPipeError: .*\n?",
    re.MULTILINE,
)


def without_frames(text: str) -> str:
    """The output of a driver without frames of stacks and without errors of workers that it left, which hide the causes."""
    return "\n".join(line for line in _BROKEN_PIPES.sub("", text).splitlines() if not line.startswith("\tat "))


@dataclass(frozen=True, slots=True)
class Finished:
    """A script that ended: its exit code, what it printed, and the values it handed back with ``report``."""

    code: int
    out: str
    err: str

    @property
    def reports(self) -> list[Any]:
        return [json.loads(line[len(_MARK) :]) for line in self.out.splitlines() if line.startswith(_MARK)]

    @property
    def report(self) -> Any:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{without_frames(self.err)[-8000:]}"
        return self.reports[-1]


_MARK = "##report "
_PRELUDE = f"""\
import json, sys
from tests.fix_spark import drain, finish, new_session, wait_until

def report(value):
    print({_MARK!r} + json.dumps(value), flush=True)

"""


class Script:
    """A Python script in a process group of its own. ``kill`` ends all of it: Python, JVM and workers."""

    def __init__(self, text: str, arguments: Sequence[str], env: dict[str, str], folder: Path) -> None:
        self._out, self._err = (folder / f"script-{time.monotonic_ns()}.{end}" for end in ("out", "err"))
        command = [sys.executable, "-c", _PRELUDE + textwrap.dedent(text), *arguments]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env=env, cwd=folder, start_new_session=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def so_far(self) -> Finished:
        return Finished(self.process.poll() or 0, self._out.read_text(), self._err.read_text())

    def wait(self, timeout_s: float = 420.0) -> Finished:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"the script did not end within {timeout_s:g} s:\n{without_frames(self.so_far().err)[-8000:]}")
        return Finished(code, self._out.read_text(), self._err.read_text())

    def kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@pytest.fixture
def start_script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Starts a script: ``report(value)`` hands JSON values back, ``sys.argv[1:]`` are the arguments."""
    started: list[Script] = []

    def start(text: str, *arguments: object, **env: str) -> Script:
        started.append(Script(text, list(map(str, arguments)), environment(**env), tmp_path))
        return started[-1]

    yield start
    for script in started:
        script.kill()


@pytest.fixture
def run_script(start_script: Callable[..., Script]) -> Callable[..., Finished]:
    """Runs a script to its end."""
    return lambda text, *arguments, **env: start_script(text, *arguments, **env).wait()
