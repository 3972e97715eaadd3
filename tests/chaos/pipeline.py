"""What runs on the cluster while it is broken: producers in this process, three queries in a driver that may be killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from rocketmq_spark import Message, Producer
from rocketmq_spark.errors import RocketMQError
from tests.chaos.books import Batch, Place, Row, Sent, row
from tests.fix_spark import Script, without_frames

FILES, COPIED, COPIES, AGAIN = "orders", "trades", "copies", "mayfly"
# What a batch read goes back, and what of it must be there: the rest may be younger than the store time asked for.
WINDOW_S, CHECKED_S = 30, 20
KEYS = 8
PATIENCE_S = 90

# All losses of the stream to files are told; the other two must not speak for it, so each has topics of its own, and the
# batch reads, which look at the first topic again, say nothing.
DRIVER = f"""
    import threading, time
    from rocketmq_spark import register

    name_server, folder = sys.argv[1:]
    spark = new_session("local[2,4]")
    register(spark)
    source = {{"nameServer": name_server, "failOnDataLoss": "warn", "startingOffsets": "earliest", "routeRefresh": "2s"}}

    def read(topics):
        return spark.readStream.format("rocketmq").options(subscribe=topics, **source).load()

    def start(writer, name):
        return writer.option("checkpointLocation", f"{{folder}}/{{name}}/checkpoint").trigger(processingTime="1 second")

    place = "concat_ws('|', topic, brokerName, queueId, queueOffset, substring_index(cast(body as string), ' ', 1)) line"
    files = start(read("{FILES},{COPIES},{AGAIN}").selectExpr(place).writeStream.format("text"), "files")
    copies = read("{COPIED}").selectExpr("body", "keys", "element_at(keys, 1) shardingKey").writeStream.format("rocketmq")
    copies = start(copies, "copies").options(nameServer=name_server, topic="{COPIES}", queueSelector="hash")
    # One after the other: Spark gives the process of a stream ten seconds to start, which two cores need for three of them.
    queries = [files.start(f"{{folder}}/files/out")]
    while queries[0].isActive and not queries[0].lastProgress:
        time.sleep(0.1)
    queries.append(copies.start())
    report("running")

    columns = "topic, brokerName, queueId, min(queueOffset), max(queueOffset), count(distinct queueOffset), count(*)"
    while True:
        for query in queries:
            if not query.isActive:
                raise SystemExit(f"a query died: {{query.exception()}}")
        begun = time.time()
        # A start that reaches nobody fails after numRetries, which is soon: an address may be a slip of the pen.
        options = {{**source, "failOnDataLoss": "ignore", "startingOffsetsByTimestampStrategy": "latest", "numRetries": 8}}
        del options["startingOffsets"]
        batch = spark.read.format("rocketmq").options(
            subscribe="{FILES}", startingTimestamp=int((begun - {WINDOW_S}) * 1000), **options).load()
        batch.createOrReplaceTempView("batch")
        try:
            rows = spark.sql(f"SELECT {{columns}} FROM batch GROUP BY topic, brokerName, queueId").collect()
        except Exception as e:
            # A worker that was killed while it planned: a task would have been repeated, a plan is not.
            if "Python worker exited unexpectedly" not in str(e):
                raise
            continue
        with open(f"{{folder}}/batches.jsonl", "a") as f:
            f.write(json.dumps([begun, [list(row) for row in rows]]) + "\\n")
        time.sleep(2)
"""


class Driver:
    """The driver's process, started again by whoever killed it."""

    def __init__(self, start: Callable[..., Script], name_server: str, folder: Path) -> None:
        self._start = lambda: start(DRIVER, name_server, folder)
        self.folder = folder
        self.scripts = [self._start()]

    @property
    def script(self) -> Script:
        return self.scripts[-1]

    def check(self) -> None:
        """Fail when it ended by itself: every outage is shorter than its patience."""
        if self.script.process.poll() is not None:
            raise AssertionError(f"the driver died\n{without_frames(self.script.so_far().err)[-6000:]}")

    def restart(self) -> None:
        self.script.kill()
        self.scripts.append(self._start())

    def kill_worker(self, choose: Callable[[list[int]], int]) -> int:
        """SIGKILL for one of the workers that run tasks; Spark does not replace what plans and commits for the driver."""
        with suppress(ProcessLookupError, IndexError):
            pid = choose(sorted(_workers(self.script.pid)))
            os.kill(pid, signal.SIGKILL)
            return pid
        return 0

    def progress(self) -> tuple[int, int]:
        """The last batches that both streams have committed."""
        logs = (self.folder / name / "checkpoint" / "commits" for name in ("files", "copies"))
        return tuple(max((int(p.name) for p in log.glob("[0-9]*") if p.name.isdigit()), default=-1) for log in logs)  # type: ignore[return-value]

    def log(self) -> str:
        return "\n".join(script.so_far().err for script in self.scripts)

    def rows(self) -> list[Row]:
        """What the file sink has committed."""
        log, names = self.folder / "files" / "out" / "_spark_metadata", set()
        for path in log.glob("[0-9]*"):
            for line in path.read_text().splitlines()[1:]:
                names.add(json.loads(line)["path"].rpartition("/")[2])
        found: list[Row] = []
        for name in sorted(names):
            found += map(row, (self.folder / "files" / "out" / name).read_text().splitlines())
        return found

    def batches(self) -> Iterator[Batch]:
        with suppress(FileNotFoundError):
            for line in (self.folder / "batches.jsonl").read_text().splitlines():
                begun, rows = json.loads(line)
                yield Batch(begun, {Place(t, b, q): (first, last, n, count) for t, b, q, first, last, n, count in rows})


def _workers(driver: int) -> Iterator[int]:
    """Children of the daemon of tasks, which may be ours or PySpark's, below the driver."""
    parents, daemons = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid, stat = int(path.name), (path / "stat").read_text()
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
            if "pyspark.worker" in (path / "cmdline").read_text().split("\0"):
                daemons.add(pid)
    for pid in daemons:
        above = pid
        while above in parents and above != driver:
            above = parents[above]
        if above == driver and parents[pid] in daemons:
            yield pid


class Producers:
    """Threads that send as fast as they are let: by keys to the first two topics, to the mayfly as long as it lives."""

    def __init__(self, name_server: str, rate: float) -> None:
        self.sent: list[Sent] = []
        self.failed: list[RocketMQError] = []
        self.generation = 0
        self.no_mayflies = threading.Lock()
        self._stop = threading.Event()
        self._pause_s = 1 / rate
        self._producer = Producer(name_server=name_server, group="chaos", send_timeout="10s")
        works = [
            lambda key=f"k{i}", topic=topic: self._by_key(topic, key) for i in range(KEYS) for topic in (FILES, COPIED)
        ]
        self._threads = [threading.Thread(target=work) for work in [*works, self._mayflies]]
        for thread in self._threads:
            thread.start()

    def _by_key(self, topic: str, key: str) -> None:
        """A message to a chosen queue is tried once, as by Java's client: who wants it there sends it again."""
        number, failing_since = 0, 0.0
        while not self._stop.wait(self._pause_s):
            try:
                self._send(topic, key, number, 0, selector="hash", arg=key)
            except RocketMQError as e:
                failing_since = failing_since or time.monotonic()
                if not e.retriable or time.monotonic() - failing_since > PATIENCE_S:
                    self.failed.append(e)
                    return
                continue
            number, failing_since = number + 1, 0.0

    def _mayflies(self) -> None:
        number = 0
        while not self._stop.wait(self._pause_s):
            with self.no_mayflies, suppress(RocketMQError):  # it is not there for a while, again and again
                self._send(AGAIN, "m", number, self.generation, timeout_s=5.0)
            number += 1

    def _send(self, topic: str, key: str, number: int, generation: int, **how: float) -> None:
        body = f"{key}:{number}:{generation} ".encode() + b"." * 1000
        result = self._producer.send(Message(topic, body, keys=[key]), **how)
        queue, offset = result.queue, result.queue_offset
        assert queue is not None
        assert offset is not None
        place = Place(queue.topic, queue.broker_name, queue.queue_id)
        self.sent.append(Sent(place, offset, key, number, time.time(), generation))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._producer.close()
