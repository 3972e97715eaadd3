"""Kafka as a peer: one KRaft node on loopback with its stock settings, and Spark's own connector for it."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path
from typing import Self

from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import distribution
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.localbroker.processes import free_port

PARTITIONS = 8
_READY_S = 60.0

_CONF = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={data}
num.partitions={partitions}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


def connector_jars() -> list[Path]:
    """What a session needs for ``format("kafka")``."""
    return distribution.fetch(["spark-kafka"], quiet=True)


class KafkaNode:
    """Broker and controller in one JVM; topics make themselves, with eight partitions."""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="rocketmq-bench-kafka-"))
        port = free_port(distances=(0, 1))
        controller = port + 1
        conf = self._folder / "server.properties"
        data = self._folder / "data"
        conf.write_text(_CONF.format(port=port, controller=controller, data=data, partitions=PARTITIONS), "utf-8")
        self.address = f"127.0.0.1:{port}"
        java = [str(find_java().path), "-cp", os.pathsep.join(map(str, distribution.fetch(["kafka"], quiet=True)))]
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(conf)],
            check=True, capture_output=True, timeout=_READY_S,
        )  # fmt: skip
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*java[:1], "-Xms1g", "-Xmx1g", *java[1:], "kafka.Kafka", str(conf)], stdout=log, stderr=log
            )
        try:
            self._await(port)
        except BaseException:
            self.__exit__()
            raise
        return self

    @property
    def pid(self) -> int:
        return self._process.pid

    def _await(self, port: int) -> None:
        deadline = Deadline.after(_READY_S)
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError as e:
                if self._process.poll() is not None or deadline.expired:
                    log = (self._folder / "log").read_text("utf-8", "replace")[-2000:]
                    raise SystemExit(f"Kafka does not start:\n{log}") from e
                time.sleep(0.1)

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def read(self, spark: SparkSession, topic: str) -> DataFrame:
        """All columns and headers from the beginning to now."""
        reader = spark.read.format("kafka").option("kafka.bootstrap.servers", self.address)
        return reader.option("subscribe", topic).option("includeHeaders", "true").load()

    def stream(self, spark: SparkSession, topic: str, **options: str) -> DataFrame:
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.address)
        return reader.option("subscribe", topic).options(**options).load()

    def write(self, rows: DataFrame, topic: str) -> None:
        """The rows of ``spark.rows``: body as value, key, and the user properties as headers."""
        header = "array({})".format(
            ", ".join(
                f"named_struct('key', '{name}', 'value', cast(properties['{name}'] as binary))"
                for name in ("region", "amount")
            )
        )
        records = rows.selectExpr("keys as key", "body as value", f"{header} as headers")
        records.write.format("kafka").option("kafka.bootstrap.servers", self.address).option("topic", topic).save()
