"""Queries whose sinks must not repeat themselves, in drivers, workers and brokers that are killed: what each test shares."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocketmq_spark import exactly_once_conf
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.spark.checkpoints.batch_notes import NOTES_FOLDER
from rocketmq_spark.wire import header
from rocketmq_spark.wire.header import FrameSplitter
from tests.fix_proxy import FaultyProxy
from tests.fix_spark import CHECKPOINT_AS_USERS, Script, without_frames
from tests.helpers import awaited, stored
from tests.scale import scaled

BATCHES, QUEUES = 4, 2
MESSAGES = scaled(4_800)
# A scan of stored ids waits for a broker that answers within two seconds throughout the settle time: on a machine that is busy
# with other tests, the send timeout, by which it must have done so, is long.
SETTLE = "4s"
CONF = {
    **exactly_once_conf(),
    **CHECKPOINT_AS_USERS,
    # So small Arrow batches, and so large rows, that the sink has some while the next ones are held.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10",
    "spark.sql.execution.python.udf.buffer.size": "65536",
}

SCRIPT = """
    import os, signal, threading
    from rocketmq_spark import foreach_batch_writer, register
    from tests.fix_spark import ONE_BATCH

    name_server, source, folder, cap, queries, conf, address_map = sys.argv[1:]
    queries = json.loads(queries)
    spark = new_session("local[16,3]", **json.loads(conf))
    register(spark)
    SCHEMA = "key string, body string, shardingKey string, queueId int"

    def options(query):
        given = {"nameServer": name_server, "topic": query["topic"], "deliveryGuarantee": query["guarantee"],
                 "sendTimeout": "500s", "batchMaxBytes": "65536"}
        if query["guarantee"] == "exactly-once":
            given["exactlyOnceSettle"] = "SETTLE"
        if query["selector"] == "hash":
            given["queueSelector"] = "hash"
        if json.loads(address_map):
            given["addressMap"] = address_map
        return given

    def gate(query):
        hold, dies = os.path.join(folder, "hold"), os.path.join(folder, query["name"] + ".dies")
        driver = str(os.getpid())

        def passed(batches):
            import os, pathlib, signal, time
            doom = pathlib.Path(dies)
            for number, batch in enumerate(batches):
                yield batch
                while number >= 2 and os.path.exists(hold):  # the sink has the first of three, buffers the others
                    time.sleep(0.02)
                if number == 2 and doom.exists() and doom.read_text() == driver:
                    doom.unlink()
                    os.kill(os.getpid(), signal.SIGKILL)
        return passed

    def rows(query, stream):
        keyed = stream.selectExpr("cast(body as string) key")
        if query["shape"] == "shuffled":
            keyed = keyed.dropDuplicates(["key"])  # no watermark, which would drop what comes late from a broker that was away
        elif query["shape"] == "repartition":
            keyed = keyed.repartition(3)
        whole = keyed.selectExpr("key", "concat(key, ',', repeat('x', 8000)) body", "key shardingKey",
                                 "cast(abs(hash(key)) % 2 as int) queueId")
        columns = {"roundRobin": ["body"], "hash": ["body", "shardingKey"], "column": ["body", "queueId"]}[query["selector"]]
        gated = whole.mapInArrow(gate(query), SCHEMA)
        return gated.select(*columns)

    def start(query):
        stream = spark.readStream.format("rocketmq").options(
            nameServer=name_server, subscribe=source, startingOffsets="earliest", maxOffsetsPerTrigger=cap).load()
        frame, checkpoint = rows(query, stream), f"{folder}/{query['name']}"
        writer = frame.writeStream.queryName(query["name"].replace("-", "_")).option("checkpointLocation", checkpoint)
        if query["shape"] == "foreach":
            writer = writer.foreachBatch(foreach_batch_writer(checkpoint_location=checkpoint, **options(query)))
        else:
            writer = writer.format("rocketmq").options(**options(query))
        return writer.trigger(availableNow=True).start()

    def job(query):
        batch = spark.read.format("rocketmq").options(nameServer=name_server, subscribe=source).load()
        rows(query, batch).write.format("rocketmq").options(**options(query)).mode("append").save()

    def ended(streams):
        for stream in streams:
            stream.awaitTermination()
        return any(progress["numInputRows"] for stream in streams for progress in stream.recentProgress)

    streaming = [query for query in queries if query["shape"] != "job"]
    streams = [start(query) for query in streaming]
    for query in queries:
        if query["shape"] == "job":
            job(query)
    ended(streams)
    idle = 0
    while ONE_BATCH and idle < 2:  # a run may repeat a batch without rows
        idle = 0 if ended([start(query) for query in streaming]) else idle + 1
    report("done")
""".replace("SETTLE", SETTLE)


# What the tests of this process killed, froze and swallowed.
TALLY: Counter[str] = Counter()


@dataclass(frozen=True, slots=True)
class Pipe:
    """One query: its shape, the kind of its topic, and how rows choose queues."""

    shape: str
    kind: str = "ordinary"
    selector: str = "roundRobin"
    guarantee: str = "exactly-once"
    topic: str = ""

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.kind}-{self.selector}-{self.guarantee}".replace(" ", "")


class Pipes:
    """Some queries over one source topic, in drivers that come and go."""

    def __init__(
        self, mq: LocalBroker, start: Callable[..., Script], folder: Path, source: str, pipes: Sequence[Pipe]
    ) -> None:
        self.mq, self._start, self.folder, self.source = mq, start, folder, source
        self.pipes = list(pipes)
        self.said = ""
        self.address_map: dict[str, str] = {}

    @property
    def hold(self) -> Path:
        return self.folder / "hold"

    def begin(self) -> Script:
        queries = json.dumps([{**dataclasses.asdict(pipe), "name": pipe.name} for pipe in self.pipes])
        conf = json.dumps({name.replace(".", "_"): value for name, value in CONF.items()})
        cap = max(QUEUES, MESSAGES // BATCHES)
        arguments = (self.mq.name_server, self.source, self.folder, cap, queries, conf, json.dumps(self.address_map))
        return self._start(SCRIPT, *arguments)

    def dies(self, pipe: Pipe, script: Script) -> None:
        """A worker of the query kills itself while the sink sends. One of this driver: those of a driver that was killed live on
        for a moment.
        """
        doom = self.folder / f"{pipe.name}.dies"
        doom.with_suffix(".new").write_text(str(script.pid))
        doom.with_suffix(".new").rename(doom)

    def died(self) -> bool:
        """Whether a worker of every query that was to lose one has died, and those that must not repeat rows looked again."""
        looked = re.findall(r"attempt [1-9]\d* of partition \d+: \d+ of its rows are stored", self.said)
        wanted = sum(pipe.guarantee == "exactly-once" for pipe in self.pipes)
        TALLY["workers killed"] += len(self.pipes)
        return not list(self.folder.glob("*.dies")) and len(looked) >= wanted

    def wait(self, script: Script, condition: Callable[[], object], what: str, seconds: float = 240.0) -> None:
        deadline, pause = Deadline.after(seconds), 0.05
        while not condition():
            said = without_frames(script.so_far().err)[-6000:]
            assert script.process.poll() is None, said
            assert not deadline.expired, f"{what} did not happen: {said}"
            deadline.pause(pause)

    def sent(self, pipe: Pipe) -> int:
        """Rows in the topic now."""
        return sum(bounds.max_offset for bounds in self.mq.admin.describe_topic(pipe.topic).values())

    def sending(self) -> bool:
        """Whether every streaming query is in the midst of a batch, some rows of which are stored."""
        return all(self.sent(pipe) > 0 for pipe in self.pipes if pipe.shape != "job")

    def kill(self, script: Script) -> None:
        script.kill()
        TALLY["drivers killed"] += 1
        self.said += script.so_far().err

    def finish(self, script: Script, seconds: float = 800.0) -> None:
        done = script.wait(seconds)
        assert done.report == "done"
        self.said += done.err

    def uncommit(self) -> None:
        """As if the drivers had died between the sink's commit and the entry in the log of commits."""
        for pipe in self.pipes:
            commits = self.folder / pipe.name / "commits"
            last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
            for name in (f"{last}", f".{last}.crc"):
                (commits / name).unlink(missing_ok=True)

    @property
    def found(self) -> int:
        """How many rows were left out because they were stored, or confirmed by a look."""
        counts = re.findall(r"(\d+) of its rows are stored already", self.said)
        return sum(map(int, counts)) + sum(map(int, re.findall(r"has stored (\d+) of \d+ messages", self.said)))

    def rows(self, pipe: Pipe, at_least: int) -> Counter[str]:
        """How often each key is in the topic."""
        found = stored(self.mq, pipe.topic, at_least)
        return Counter(message.body.decode().split(",")[0] for message in found)

    def check(self, sent: Sequence[str]) -> dict[str, int]:
        """Every row is there once; how often those are repeated that may be."""
        repeats = {}
        for pipe in self.pipes:
            counts = self.rows(pipe, len(sent))
            missing, extra = set(sent) - counts.keys(), counts.keys() - set(sent)
            assert not missing, f"{pipe.name}: {len(missing)} missing, such as {sorted(missing)[:3]}"
            assert not extra, f"{pipe.name}: {sorted(extra)[:3]}"
            again = counts.total() - len(counts)
            repeats[pipe.name] = again
            if pipe.guarantee == "exactly-once":
                twice = sorted(key for key, count in counts.items() if count > 1)
                assert not twice, f"{pipe.name}: {len(twice)} more than once, such as {twice[:3]}"
        print("repeated rows:", repeats)
        return repeats


class Swallowing(FaultyProxy):
    """Answers to sends are lost, each ``every``-th of them."""

    def __init__(self, target: str, every: int) -> None:
        super().__init__(target)
        self.every, self.swallowed, self._sends = every, 0, 0
        self._splitters: dict[socket.socket, FrameSplitter] = {}

    def pass_on(self, sink: socket.socket, data: bytes, answers: bool) -> None:
        if not answers:
            super().pass_on(sink, data, answers)
            return
        splitter = self._splitters.setdefault(sink, FrameSplitter(1 << 30))
        for frame in splitter.feed(data):
            if not self._lost(frame):
                super().pass_on(sink, len(frame).to_bytes(4, "big") + frame, answers)

    def _lost(self, frame: bytes) -> bool:
        answer = header.decode(frame)
        if not {"msgId", "queueOffset"} <= answer.ext.keys():
            return False
        with self._lock:
            self._sends += 1
            lost = self._sends % self.every == 0
            self.swallowed += lost
            TALLY["answers swallowed"] += lost
        return lost


def noted(pipes: Pipes) -> bool:
    return all(
        (pipes.folder / pipe.name / NOTES_FOLDER).exists() for pipe in pipes.pipes if pipe.guarantee == "exactly-once"
    )


def made(make_topic: Callable[..., str], *pipes: Pipe) -> list[Pipe]:
    """The same with topics."""
    kinds: dict[str, Any] = {"ordinary": None, "batch": {"queue.type": "BatchCQ"}}
    return [dataclasses.replace(pipe, topic=make_topic(queues=2, attributes=kinds[pipe.kind])) for pipe in pipes]


def awaited_in(script: Script, text: str, seconds: float = 240.0) -> None:
    awaited(lambda: text in script.so_far().err, bool, seconds)
