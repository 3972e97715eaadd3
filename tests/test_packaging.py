"""What users install: the wheel and an editable install, each tried in a virtual environment away from the clone."""

from __future__ import annotations

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from rocketmq_spark.base import extras
from rocketmq_spark.localbroker import distribution, maven
from tests.fix_wheel import environment, pip, run

ROOT = Path(__file__).parents[1]

# Spark finds the source by itself, and our error for the misspelt option shows that it is ours.
FIND_THE_SOURCE = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = spark.config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC").getOrCreate()
try:
    spark.read.format("rocketmq").option("nameServr", "h:1").load()
except Exception as e:
    print(e)
import rocketmq_spark
print("FROM", rocketmq_spark.__file__)
spark.stop()
"""

SEND_TO_A_LOCAL_BROKER = """
import rocketmq_spark
from rocketmq_spark import LocalBroker, Message, Producer

with LocalBroker(quiet=True) as mq, Producer(name_server=mq.name_server, group="g") as producer:
    mq.create_topic("t", 1)
    print("SENT", producer.send(Message("t", b"x")).queue_offset, "FROM", rocketmq_spark.__file__)
"""


@pytest.fixture
def own_cache(tmp_path: Path) -> dict[str, str]:
    """A cache of our own, as environment: the jars and archives are the user's, so that nothing is fetched."""
    distribution.fetch()
    shared, cache = distribution.cache_folder(), tmp_path / "cache"
    cache.mkdir()
    for name in ("jars", "archives"):
        (shared / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    return {distribution.CACHE_VARIABLE: str(cache), "SPARK_LOCAL_IP": "127.0.0.1"}


def repository(folder: Path) -> Path:
    """Ivy settings of one that has the jars which are in the user's cache."""
    core = distribution.cache_folder() / "jars" / distribution.read_lock_file()["core"].key
    pattern = f"{core}/[artifact]-[revision](-[classifier]).[ext]"
    settings = folder / "ivysettings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="here"/><resolvers><filesystem name="here">'
        f'<artifact pattern="{pattern}"/></filesystem></resolvers></ivysettings>'
    )
    return settings


def test_the_wheel_contains_what_it_needs_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for name in (
        "pyspark_rocketmq/__init__.py",
        "rocketmq_spark/py.typed",
        "rocketmq_spark/localbroker/jars.lock",
        "rocketmq_spark/localbroker/templates/broker.conf",
    ):
        assert name in names
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "rocketmq_spark").rglob("*") if p.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= set(names)
    tops = {name.partition("/")[0] for name in names}
    assert tops - {name for name in tops if name.endswith(".dist-info")} == {"rocketmq_spark", "pyspark_rocketmq"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_an_installed_package_is_found_by_spark(kind, request, tmp_path):
    if kind == "wheel":
        bin_folder = request.getfixturevalue("installed")
        home = bin_folder.parent
    else:
        home = request.getfixturevalue("sources")
        bin_folder = environment(tmp_path / "venv", "--editable", home)
    python = bin_folder / "python"
    out = run(python, "-c", FIND_THE_SOURCE, cwd=tmp_path, PYSPARK_PYTHON=str(python), SPARK_LOCAL_IP="127.0.0.1")
    assert "option 'nameservr' is unknown; did you mean 'nameServer'?" in out
    assert f"FROM {home}" in out
    assert "Usage: rocketmq-spark" in run(bin_folder / "rocketmq-spark", "--help", cwd=tmp_path)
    page = (ROOT / "docs" / "how-to" / "replay.md").read_text()
    assert run(bin_folder / "rocketmq-spark", "help", "replay", cwd=tmp_path) == page


def test_local_broker_runs_from_installed_wheel(installed, own_cache, tmp_path):
    out = run(installed / "python", "-c", SEND_TO_A_LOCAL_BROKER, cwd=tmp_path, **own_cache)
    assert f"SENT 0 FROM {installed.parent}" in out


THE_CLIENT = """
import sys
from rocketmq_spark import Consumer, LocalBroker, Message, Producer, PullConsumer

with LocalBroker(quiet=True) as mq:
    mq.create_topic("t", 2)
    with Producer(mq.name_server, "p") as producer:
        for i in range(1500):  # more than a consumer pulls at once: it would read ahead where numpy is installed
            producer.send_async(Message("t", b"%d" % i))
        producer.flush(60)
    got = set()
    with PullConsumer(mq.name_server, "pull", consume_from_where="earliest") as reader:
        reader.subscribe("t")
        while len(got) < 1500:
            got |= {message.body for message in reader.poll()}
    heard = set()
    consumer = Consumer(mq.name_server, "push", consume_from_where="earliest")
    def listener(messages, context):
        heard.update(message.body for message in messages)
        if len(heard) == 1500:
            consumer.stop(0)
    consumer.subscribe("t")
    consumer.run(listener)
    print(got == heard == {b"%d" % i for i in range(1500)})
heavy = ("pyspark", "pyarrow", "numpy", "pandas", "click", "rich", "rocksdict", "grpc", "google.protobuf")
print([name for name in heavy if name in sys.modules])
"""


@pytest.mark.timeout(600)
def test_producer_consumers_and_broker_run_from_wheel_alone(wheel, own_cache, tmp_path):
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    python = bare / "bin" / "python"
    (packages,) = bare.glob("lib/python*/site-packages")
    pip("--python", python, "install", "--quiet", "--no-index", "--ignore-installed", wheel, cwd=tmp_path)
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file() and file.suffix != ".pyc")
    assert size < 10e6
    fetched = {**own_cache, maven.SETTINGS_VARIABLE: str(repository(tmp_path))}
    (tmp_path / "cache" / "jars").unlink()  # all are fetched, without the Ivy of PySpark
    assert run(python, "-c", THE_CLIENT, cwd=tmp_path, **fetched).splitlines() == ["True", "[]"]
    done = subprocess.run([bare / "bin" / "rocketmq-spark"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1, "Error: the command needs click and rich: pip install 'click>=8.1' 'rich>=13'\n",
    )  # fmt: skip


def test_what_spark_imports_needs_nothing_heavy(tmp_path):
    """With pyarrow and numpy broken the import still works: it would hide every other Python source."""
    code = """
import sys
for name in ("pyarrow", "numpy", "pandas", "click", "rich"):
    sys.modules[name] = None
import pyspark_rocketmq
assert pyspark_rocketmq.DefaultSource.name() == "rocketmq"
assert not [name for name in sys.modules if name.startswith("rocketmq_spark")]
"""
    run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def metadata() -> configparser.ConfigParser:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", "utf-8")
    return found


def bounds(lines: list[str]) -> dict[str, tuple[int, ...]]:
    """Lower bounds by package, without trailing zeros."""
    found = {}
    for line in lines:
        match = re.match(r"([A-Za-z0-9_-]+)>=([0-9.]+)", line)
        if match:
            found[match[1].lower()] = tuple(int(part) for part in re.sub(r"(\.0)+$", "", match[2]).split("."))
    return found


def test_lower_bounds_are_those_of_pyspark(metadata):
    ours = bounds(metadata["options.extras_require"]["spark"].split("\n"))
    assert ours["pyspark"] == (4,)
    assert ours["pyarrow"] == (18,)
    assert ours["numpy"] == (1, 23, 2)
    theirs = bounds([line for line in importlib.metadata.requires("pyspark") or [] if 'extra == "sql"' in line])
    assert all(ours[name] == theirs[name] for name in ("pyarrow", "numpy", "pandas"))
    assert metadata["options"]["python_requires"] == ">=3.11"


def test_client_requires_no_packages_and_extras_match_table(metadata):
    assert "install_requires" not in metadata["options"]
    written = {name: tuple(text.split()) for name, text in metadata["options.extras_require"].items()}
    assert {name: written[name] for name in extras.REQUIREMENTS} == extras.REQUIREMENTS
    (everything,) = written["all"]
    assert everything == f"rocketmq-spark[{','.join(extras.REQUIREMENTS)}]"
    assert set(written) - set(extras.REQUIREMENTS) == {"all", "test", "check", "site"}


def test_nothing_is_pinned_above_but_pandas(metadata):
    """Of pandas 3 PySpark itself warns at each start."""
    requirements = "".join(metadata["options.extras_require"].values())
    assert {line for line in requirements.split("\n") if re.search(r"<|==|~=|!=", line)} == {
        "pandas>=2.2.0,<3",
        "pandas>=2.2,<3",
    }


def test_actions_of_workflows_are_pinned_by_commit():
    """Someone who can move a tag could otherwise run code with the rights of the workflow."""
    used = [
        line.partition("uses:")[2].strip()
        for workflow in (ROOT / ".github" / "workflows").iterdir()
        for line in workflow.read_text("utf-8").splitlines()
        if "uses:" in line
    ]
    assert len(used) >= 4
    assert [each for each in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", each)] == []


def test_the_version_is_the_same_everywhere(metadata):
    import rocketmq_spark

    version = metadata["metadata"]["version"]
    assert rocketmq_spark.__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


class TestTheMachine:
    """``.ci/machine``: the first line says what is missing."""

    @pytest.fixture
    def programs(self, tmp_path) -> Path:
        """A folder of programs that is all of PATH, with what the script itself needs."""
        folder = tmp_path / "bin"
        folder.mkdir()
        for tool in ("sed", "head"):
            (folder / tool).symlink_to(shutil.which(tool) or "")
        return folder

    def machine(self, programs: Path, *arguments: str, java_home: str = "") -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(programs), "JAVA_HOME": java_home, "HOME": str(programs)}
        command = ["/bin/sh", str(ROOT / ".ci" / "machine"), *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    def program(self, folder: Path, name: str, text: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n", "utf-8")
        path.chmod(0o755)

    def test_no_python(self, programs):
        done = self.machine(programs, "python")
        assert done.returncode == 1
        assert done.stderr.startswith("Python 3.11 or newer is needed, found: none. Install one (")

    def test_an_old_python(self, programs):
        self.program(programs, "python3", 'test "$1" = --version || exit 1\necho Python 3.9.2')
        done = self.machine(programs, "python")
        assert done.returncode == 1
        assert done.stderr.startswith("Python 3.11 or newer is needed, found: Python 3.9.2.")

    def test_a_newer_python_beside_an_old_one(self, programs):
        self.program(programs, "python3", "exit 1")
        (programs / "python3.12").symlink_to(sys.executable)
        assert self.machine(programs, "python").stdout == "python3.12\n"

    def test_newer_pythons_come_from_path_pyenv_or_given_name(self, programs):
        assert self.machine(programs, "pythons").stdout == ""
        (programs / "python3.12").symlink_to(sys.executable)
        self.program(programs, "python3.13", "exit 127")  # as pyenv has it for one that is not chosen
        own = programs / ".pyenv" / "versions" / "3.13.7" / "bin"
        own.mkdir(parents=True)
        (own / "python3").symlink_to(sys.executable)
        assert self.machine(programs, "pythons").stdout == f"python3.12\n{own}/python3\n"
        assert self.machine(programs, "pythons", sys.executable).stdout == f"{sys.executable}\n"
        assert self.machine(programs, "pythons", "python9").returncode == 1

    def test_no_java(self, programs):
        done = self.machine(programs, "java")
        assert done.returncode == 1
        assert done.stderr.startswith("Java 17 or newer is needed, and java cannot be run. Install one (Debian")

    @pytest.mark.parametrize(("version", "major"), [("1.8.0_402", 8), ("11.0.2", 11), ("16", 16)])
    def test_an_old_java(self, programs, version, major):
        self.program(programs, "java", f"echo 'openjdk version \"{version}\"' >&2")
        done = self.machine(programs, "java")
        assert done.returncode == 1
        assert done.stderr.startswith(f"Java 17 or newer is needed, but java is Java {major}. Install one (")

    @pytest.mark.parametrize("version", ["17.0.15", "21", "25-ea"])
    def test_a_java_that_will_do(self, programs, version):
        self.program(programs, "java", f"echo 'openjdk version \"{version}\" 2025-04-15' >&2")
        assert self.machine(programs, "java").returncode == 0

    def test_java_home_comes_first(self, programs, tmp_path):
        self.program(programs, "java", "echo 'openjdk version \"21\"' >&2")
        done = self.machine(programs, "java", java_home=str(tmp_path / "home"))
        assert done.returncode == 1
        assert f"{tmp_path}/home/bin/java cannot be run" in done.stderr


class TestTheRun:
    """``.ci/run``: it ends as its tests do, whatever becomes of what only looks on."""

    REPORT = (
        '<testsuites><testsuite skipped="{skipped}" tests="{tests}" time="2"><properties><property name="broker version"'
        ' value="V5_5_0"/></properties><testcase classname="c" name="n" time="1"><properties>'
        '<property name="needs" value="real broker"/><property name="needs" value="Spark"/>'
        "</properties></testcase></testsuite></testsuites>"
    )

    def ended(self, folder: Path, skipped: int, code: int, tests: int = 11400) -> tuple[int, str]:
        """What a run says whose ``make test`` writes a report of that many skipped tests and ends with that code."""
        shutil.copytree(ROOT / ".ci", folder / ".ci")
        shutil.copy(ROOT / "README.md", folder)
        programs = folder / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "python").symlink_to(sys.executable)
        (folder / "report.xml").write_text(self.REPORT.format(skipped=skipped, tests=tests), "utf-8")
        make = programs / "make"
        make.write_text(f'#!/bin/sh\ncp report.xml "${{2#*--junit-xml=}}"\nexit {code}\n', "utf-8")
        make.chmod(0o755)
        (folder / "tmp").mkdir()
        env = dict(os.environ) | {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder / "tmp")}
        done = subprocess.run(
            [folder / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        assert list((folder / "tmp").iterdir()) == []
        return done.returncode, done.stdout + done.stderr

    def test_it_ends_with_0_when_all_have_passed(self, tmp_path):
        code, said = self.ended(tmp_path, 0, 0)
        assert code == 0, said
        assert "11400 tests, 2 s; the ten longest" in said

    def test_a_make_that_ignores_errors_does_not_hide_them(self, tmp_path, monkeypatch):
        monkeypatch.setenv("MAKEFLAGS", "i")
        monkeypatch.setattr(
            self.__class__, "REPORT", self.REPORT.replace('tests="{tests}"', 'tests="{tests}" failures="1"')
        )
        code, said = self.ended(tmp_path, 0, 0)
        assert code == 1, said
        assert "tests failed" in said
        assert "unset PYTEST_ADDOPTS PYTHONOPTIMIZE ROCKETMQ_SPARK_TEST_SCALE MAKEFLAGS" in (
            ROOT / ".ci" / "run"
        ).read_text("utf-8")

    def test_tests_that_are_not_there_any_more_fail_it(self, tmp_path):
        code, said = self.ended(tmp_path, 0, 0, tests=11399)
        assert code == 1, said
        assert "there are fewer tests than there were" in said

    def test_it_ends_as_its_tests_did(self, tmp_path):
        code, said = self.ended(tmp_path, 0, 2)
        assert code == 2, said
        assert "the ten longest" not in said

    def test_a_skipped_test_fails_it(self, tmp_path):
        code, said = self.ended(tmp_path, 1, 0)
        assert code == 1, said
        assert "1 tests were skipped" in said
