"""A small cluster of Spark's own: a master and two workers are processes, and the job brings its environment with it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from benchmarks.scripted import BEGIN, Layout, Scripted
from tests.fix_spark import CONF
from tests.fix_wheel import outside
from tests.mockbroker import eventually
from tests.scale import scaled, soak
from tests.spark.pipelines import records
from tests.witness import java_read, java_send

HOME = Path(pyspark.__file__).parent
QUICK = CONF["spark.driver.extraJavaOptions"]
JOB = """
import json, os, sys
from pyspark.sql import SparkSession

name_server, source, target, folder, cap = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()

def options(builder, **more):
    return builder.option("nameServer", name_server).options(**more)

def where(batches):
    import pyarrow as pa
    import rocketmq_spark
    for batch in batches:  # the parent of the parent of a Python worker runs the executor
        executor = open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[1]
        yield pa.RecordBatch.from_pydict({"executor": [executor], "package": [rocketmq_spark.__file__]})

processes = spark.range(0, 8, 1, 8).mapInArrow(where, "executor string, package string").distinct().collect()
read = options(spark.read.format("rocketmq"), subscribe=source, numPartitions=4).load()
ids = sorted(row.msgId for row in read.select("msgId").collect())
options(read.select("body", "tags", "keys", "properties").write.format("rocketmq"), topic=target).mode("append").save()
stream = options(spark.readStream.format("rocketmq"), subscribe=source, startingOffsets="earliest")
stream = stream.option("maxOffsetsPerTrigger", cap).load().select("msgId").writeStream.format("text")
query = stream.option("checkpointLocation", folder + "/checkpoint").trigger(availableNow=True).start(folder + "/out")
query.awaitTermination()
streamed = sorted(row[0] for row in spark.read.text(folder + "/out").collect())
with open(folder + "/report", "w") as file:
    json.dump({"processes": processes, "ids": ids, "streamed": streamed}, file)
spark.stop()
"""


# Reads 64 brokers and writes to them. Ends with two counts: of what was read, and of the executors that did it.
LARGE_JOB = """
import json, os, sys
from pyspark.sql import SparkSession

name_server, source, target, folder = sys.argv[1:]
spark = SparkSession.builder.getOrCreate()

def executors(batches):
    import os
    import pyarrow as pa
    executor = open(f"/proc/{os.getppid()}/stat").read().rsplit(")", 1)[1].split()[1]
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"executor": [executor]})

read = spark.read.format("rocketmq").option("nameServer", name_server).option("subscribe", source).load()
places = read.selectExpr("concat(brokerName, '/', queueId, '/', queueOffset) body")
counts = [places.count(), places.distinct().count()]
done = places.mapInArrow(executors, "executor string").distinct().count()
writer = places.write.format("rocketmq").option("nameServer", name_server).option("topic", target)
writer.mode("append").save()
with open(folder + "/report", "w") as file:
    json.dump({"counts": counts, "executors": done}, file)
spark.stop()
"""


# Two before a worker is killed, one in the midst, and some after it.
BATCHES = 6


class Cluster:
    """Spark standalone on this machine, below ``folder``."""

    def __init__(self, folder: Path, cores: int = 1, memory: str = "1g") -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        options = ("--host", "127.0.0.1", "--webui-port", "0")
        found = self._start(
            "master", r"Starting Spark master at (spark://\S+)", "master.Master", *options, "--port", "0"
        )
        self.master = found[1]
        for name in ("first", "second"):
            share = ("--cores", str(cores), "--memory", memory, "--work-dir", str(folder / name))
            self._start(name, r"Successfully registered with master", "worker.Worker", *options, *share, self.master)
        self.workers = self._started[1:]

    def _start(self, name: str, ready: str, program: str, *arguments: str) -> re.Match[str]:
        command = [str(HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{program}", *arguments]
        flags = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
        env = outside(SPARK_HOME=str(HOME), SPARK_LOCAL_IP="127.0.0.1", SPARK_DAEMON_JAVA_OPTS=flags)
        log = self.folder / f"{name}.log"
        with log.open("wb") as out:
            self._started.append(subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True))
        eventually(lambda: re.search(ready, log.read_text()), 60)
        found = re.search(ready, log.read_text())
        assert found is not None
        return found

    def submit(self, job: Path, archive: Path, *arguments: object, cores: int = 2) -> subprocess.Popen[bytes]:
        """As docs/where-it-runs.md says: the environment travels as an archive, and lies unpacked beside the driver."""
        conf = {
            **CONF, "spark.executor.memory": "512m", "spark.executor.extraJavaOptions": QUICK, "spark.cores.max": str(cores),
            "spark.executor.cores": "1",
        }  # fmt: skip
        settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
        command = [
            HOME / "bin" / "spark-submit",
            "--master",
            self.master,
            "--archives",
            f"{archive}#environment",
            *settings,
        ]
        env = outside(
            PYSPARK_PYTHON="./environment/bin/python",
            PYSPARK_DRIVER_PYTHON=str(self.folder / "environment" / "bin" / "python"),
            SPARK_LOCAL_IP="127.0.0.1",
        )
        with (self.folder / "driver.log").open("wb") as out:
            driver = subprocess.Popen(
                list(map(str, [*command, job, *arguments])),
                cwd=self.folder, env=env, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        self._started.append(driver)
        return driver

    def close(self) -> None:
        for process in reversed(self._started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    with contextlib.ExitStack() as stack:

        def start(**size: Any) -> Cluster:
            made = Cluster(tmp_path, **size)
            stack.callback(made.close)
            return made

        yield start


def packed(installed: Path, folder: Path) -> Path:
    """The environment as an archive, and unpacked beside it."""
    archive = folder / "job.tar.gz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(installed.parent, ".")
    (folder / "environment").symlink_to(installed.parent)
    return archive


@pytest.mark.timeout(1200)
def test_a_job_that_brings_its_environment_outlives_a_worker(rocketmq, make_topic, installed, cluster, tmp_path):
    name_server, source, target = rocketmq.name_server, make_topic(), make_topic()
    sent = java_send(name_server, source, scaled(10_000), batch=20)
    archive, job = packed(installed, tmp_path), tmp_path / "job.py"
    job.write_text(JOB)
    spark = cluster()
    driver = spark.submit(job, archive, name_server, source, target, tmp_path, len(sent) // BATCHES)

    said = tmp_path / "driver.log"
    offsets, commits = (tmp_path / "checkpoint" / log for log in ("offsets", "commits"))

    def under_way() -> bool:
        """Whether a batch is, after two that are done; which one, a slow machine may see late."""
        begun = [int(path.name) for path in offsets.glob("[0-9]*")]
        return max(begun, default=0) >= 3 and not (commits / f"{max(begun)}").exists()

    eventually(lambda: driver.poll() is not None or under_way(), 240)
    assert driver.poll() is None, said.read_text()[-4000:]
    spark.workers[0].kill()
    assert driver.wait(180) == 0, said.read_text()[-4000:]
    assert len([entry for entry in commits.iterdir() if entry.name.isdigit()]) >= BATCHES

    report = json.loads((tmp_path / "report").read_text())
    executors, packages = zip(*report["processes"], strict=True)
    assert len(set(executors)) == 2
    assert all(re.search(r"/(first|second)/app-\S*/environment/", package) for package in packages), packages
    assert report["ids"] == report["streamed"] == sorted(records(sent))
    seen = sorted(record.content for record in java_read(name_server, target))
    assert seen == sorted(record.content for record in sent)


@soak
@pytest.mark.timeout(1200)
def test_eight_executors_read_64_brokers_and_write_to_them(installed, cluster, tmp_path):
    archive, job = packed(installed, tmp_path), tmp_path / "job.py"
    job.write_text(LARGE_JOB)
    with Scripted(Layout(topics=2, queues=8)) as brokers:
        source, target = brokers.layout.names()
        spark = cluster(cores=4, memory="4g")
        driver = spark.submit(job, archive, brokers.name_server, source, target, tmp_path, cores=8)
        said = tmp_path / "driver.log"
        assert driver.wait(900) == 0, said.read_text()[-4000:]
        rows = 64 * 8 * (BEGIN - brokers.layout.first)
        report = json.loads((tmp_path / "report").read_text())
        assert report["counts"] == [rows, rows]
        assert report["executors"] == 8, report
        sent = brokers.counted()["sent"][target]
        assert (sent["messages"], sent["bodies"]) == (rows, rows)
        assert sent["queues"] > 8, "tasks begin at different queues"
