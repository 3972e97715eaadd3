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

import pyspark
import pytest

from tests.fix_spark import CONF
from tests.fix_wheel import outside
from tests.mockbroker import eventually
from tests.scale import scaled
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


class Cluster:
    """Spark standalone on this machine, below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []
        options = ("--host", "127.0.0.1", "--webui-port", "0")
        found = self._start(
            "master", r"Starting Spark master at (spark://\S+)", "master.Master", *options, "--port", "0"
        )
        self.master = found[1]
        for name in ("first", "second"):
            share = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / name))
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

    def submit(self, job: Path, archive: Path, *arguments: object) -> subprocess.Popen[bytes]:
        """As docs/where-it-runs.md says: the environment travels as an archive, and lies unpacked beside the driver."""
        conf = {
            **CONF, "spark.executor.memory": "512m", "spark.executor.extraJavaOptions": QUICK, "spark.cores.max": "2",
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
def cluster(tmp_path: Path) -> Iterator[Callable[[], Cluster]]:
    with contextlib.ExitStack() as stack:

        def start() -> Cluster:
            made = Cluster(tmp_path)
            stack.callback(made.close)
            return made

        yield start


@pytest.mark.timeout(1200)
def test_a_job_that_brings_its_environment_outlives_a_worker(rocketmq, make_topic, installed, cluster, tmp_path):
    name_server, source, target = rocketmq.name_server, make_topic(), make_topic()
    sent = java_send(name_server, source, scaled(10_000), batch=20)
    archive, job = tmp_path / "job.tar.gz", tmp_path / "job.py"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        tar.add(installed.parent, ".")
    (tmp_path / "environment").symlink_to(installed.parent)
    job.write_text(JOB)
    spark = cluster()
    driver = spark.submit(job, archive, name_server, source, target, tmp_path, len(sent) // 10)

    said = tmp_path / "driver.log"
    offsets, commits = (tmp_path / "checkpoint" / log for log in ("offsets", "commits"))
    # In the midst of a batch, after two that are done.
    eventually(lambda: driver.poll() is not None or ((offsets / "3").exists() and not (commits / "3").exists()), 240)
    assert driver.poll() is None, said.read_text()[-4000:]
    spark.workers[0].kill()
    assert driver.wait(180) == 0, said.read_text()[-4000:]
    assert len([entry for entry in commits.iterdir() if entry.name.isdigit()]) >= 10

    report = json.loads((tmp_path / "report").read_text())
    executors, packages = zip(*report["processes"], strict=True)
    assert len(set(executors)) == 2
    assert all(re.search(r"/(first|second)/app-\S*/environment/", package) for package in packages), packages
    assert report["ids"] == report["streamed"] == sorted(records(sent))
    seen = sorted(record.content for record in java_read(name_server, target))
    assert seen == sorted(record.content for record in sent)
