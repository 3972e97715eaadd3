"""Drivers that are killed (SIGKILL) at every point of a batch, again and again: what their queries committed is the input.

Two queries run in each driver: one over messages that were there before, one that started at ``latest`` while a
producer sends. The file sink drops repeated batches, so every message must be there exactly once.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer, low_latency_conf
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.fix_spark import CHECKPOINT_AS_USERS, Script, without_frames
from tests.helpers import freeze, indexed
from tests.reading import feed, names, positions
from tests.scale import SCALE, scaled, soak

KILLS = 20 if SCALE >= 1 else 3
MESSAGES = scaled(100_000)
CAP = MESSAGES // (10 * KILLS)

SCRIPT = """
    import os, time
    from rocketmq_spark import register

    name_server, folder, early_topic, late_topic, cap, conf, word = sys.argv[1:]
    spark = new_session("local[2]", **json.loads(conf))
    register(spark)  # two streams start at once
    while not os.path.exists(word):
        time.sleep(0.02)
    last = open(word).read()

    def start(name, topic, where):
        few = {} if last else {"maxOffsetsPerTrigger": cap}  # the last driver is not killed, so it needs no small batches
        stream = spark.readStream.format("rocketmq").options(
            nameServer=name_server, subscribe=topic, startingOffsets=where, **few).load()
        writer = stream.selectExpr("cast(body as string)").writeStream.format("text")
        writer = writer.option("checkpointLocation", f"{folder}/{name}/checkpoint")
        return (writer.trigger(availableNow=True) if last else writer).start(f"{folder}/{name}/out")

    queries = [("early", early_topic, "earliest"), ("late", late_topic, "latest")]
    if last:
        for query in queries:
            drain(lambda: start(*query))
    else:
        for running in [start(*query) for query in queries]:
            running.awaitTermination()
    for name in ("early", "late"):
        rows = spark.read.text(f"{folder}/{name}/out").collect()
        with open(f"{folder}/{name}.txt", "w") as f:
            f.writelines(row[0] + "\\n" for row in rows)
    report("done")
"""


def numbers(folder: Path) -> set[int]:
    """The batches that a log of Spark's knows."""
    with suppress(FileNotFoundError):
        return {int(p.name.removesuffix(".compact")) for p in folder.iterdir() if p.name[:1].isdigit()}
    return set()


LOGS = ("checkpoint/offsets", "checkpoint/commits", "out/_spark_metadata")


@dataclass(frozen=True, slots=True)
class State:
    """How far a query is: last batch in the log of offsets, of commits, and of the file sink; files of its tasks."""

    planned: int
    committed: int
    written: int
    files: int

    @classmethod
    def of(cls, folder: Path) -> State:
        planned, committed, written = (max(numbers(folder / log), default=-1) for log in LOGS)
        return cls(planned, committed, written, sum(1 for _ in folder.glob("out/part-*")))


# Files that appear within one tick of the clock give a folder one time.
_TICK_NS = 20_000_000


class Watch:
    """The state of a query, looked at again when one of its folders has changed: a look takes long where many wait for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: tuple[int, ...] = ()
        self._state: State

    def now(self) -> State:
        changed = tuple(_changed_ns(self._folder / name) for name in (*LOGS, "out"))
        if changed != self._seen or time.time_ns() - max(changed) < _TICK_NS:
            self._seen, self._state = changed, State.of(self._folder)
        return self._state


def _changed_ns(folder: Path) -> int:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime_ns
    return 0


# When to kill, given how far the query was when its driver started and how far it is now.
POINTS: dict[str, Callable[[State, State], bool]] = {
    "after the offset log entry": lambda was, now: now.planned > max(was.planned, now.committed),
    "during tasks": lambda was, now: now.files > was.files and now.planned > max(now.written, was.planned, 0),
    "after tasks, before the commit entry": lambda was, now: now.written == now.planned > max(was.planned, 0),
    "during planning": lambda was, now: now.committed > max(was.committed, 0) and now.planned == now.committed,
    "at random": lambda was, now: now.committed > was.committed,
}


# What is there at the moment, where it is long enough to be met; who missed it tries again.
MET: dict[str, Callable[[State], bool]] = {
    "after the offset log entry": lambda dead: dead.planned > dead.committed,
    "during tasks": lambda dead: dead.planned > dead.written,
    "after tasks, before the commit entry": lambda dead: dead.written == dead.planned > dead.committed,
}
TRIES = 6


# In turn; Spark logs a first batch also when there is nothing to read, so the first kill hits the query at "latest".
_POINTS = zip(itertools.cycle(POINTS), itertools.cycle(["late", "early"]), strict=False)
KILLED = list(itertools.islice(_POINTS, max(KILLS, len(POINTS))))
EACH = KILLED[: len(POINTS)]


@dataclass(slots=True)
class Sending:
    """A producer that goes on sending; where each message went."""

    mq: LocalBroker
    topic: str
    sent: dict[str, tuple[MessageQueue, int]]
    stop: threading.Event
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        try:
            self._send()
        finally:
            self.ended.set()

    def _send(self) -> None:
        with Producer(name_server=self.mq.name_server, group="steady", send_timeout="30s") as producer:
            for queue in itertools.cycle(producer.queues(self.topic)):
                if self.stop.wait(0.02):
                    return
                made = names(5, "late")
                result = producer.send_batch([Message(self.topic, body.encode()) for body in made], queue)
                assert result.queue_offset is not None
                for i, body in enumerate(made):
                    self.sent[body] = (queue, result.queue_offset + i)


@pytest.fixture
def sending(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> Iterator[Sending]:
    one = Sending(rocketmq, make_topic(queues=4), {}, threading.Event())
    thread = threading.Thread(target=one.run)
    thread.start()
    yield one
    one.stop.set()
    thread.join()


class Drivers:
    """Each starts its JVM while the one before it is at work, and waits for the word to begin. ``confs`` are used in turn."""

    def __init__(
        self, start: Callable[..., Script], folder: Path, confs: Sequence[Mapping[str, str]], *arguments: object
    ) -> None:
        self._start, self._folder, self._arguments = start, folder, arguments
        self._confs = itertools.cycle(confs)
        self._numbers = itertools.count()
        self._waiting = self._next()

    def _next(self) -> tuple[Script, Path]:
        word = self._folder / f"word-{next(self._numbers)}"
        conf = {**CHECKPOINT_AS_USERS, **next(self._confs)}
        given = json.dumps({name.replace(".", "_"): value for name, value in conf.items()})
        return self._start(SCRIPT, *self._arguments, given, word), word

    def begin(self, last: bool = False) -> Script:
        """The one that waits. The last one reads what is there and ends."""
        (script, word), self._waiting = self._waiting, (self._next() if not last else self._waiting)
        written = word.with_suffix(".new")
        written.write_text("last" if last else "")
        written.rename(word)
        return script


def kill_at(script: Script, folder: Path, point: str, rng: random.Random) -> State:
    """Wait for the moment in the query that lives in ``folder``, and end its driver there; how far it was then.

    Its JVM stands still while it is looked whether the moment was met. One that was faster than the look goes on.

    Not before the other query has its first entry, too: a checkpoint whose very first entry was torn is refused by Spark
    itself (STATE_STORE_CHECKPOINT_LOCATION_NOT_EMPTY), whatever the source.
    """
    watch, deadline = Watch(folder), Deadline.after(360)
    was, missed = watch.now(), 0
    while True:
        now = watch.now()
        if POINTS[point](was, now) and all(State.of(folder.parent / name).planned >= 0 for name in ("early", "late")):
            if point == "at random":
                time.sleep(rng.random() * 2)
            freeze(jvm := jvm_of(script))
            now = State.of(folder)
            if point not in MET or MET[point](before_its_commit(point, now)):
                break
            missed += 1
            assert missed < TRIES, f"{point} was missed {missed} times: {was} and then {now}"
            was = now
            os.kill(jvm, signal.SIGCONT)
        assert not deadline.expired, f"{point}: {was} and still {now}\n{without_frames(script.so_far().err)[-6000:]}"
        assert script.process.poll() is None, without_frames(script.so_far().err)[-6000:]
        time.sleep(0.001)
    script.kill()
    if now != before_its_commit(point, now):
        # It was faster than we looked: without the entry it has died before it.
        for name in (f"{now.committed}", f".{now.committed}.crc"):
            (folder / "checkpoint" / "commits" / name).unlink(missing_ok=True)
    return State.of(folder)


def before_its_commit(point: str, now: State) -> State:
    """The same a moment ago, where a driver is to die before the entry of its commit: that one is faster than a look."""
    all_committed = point.startswith("after tasks") and now.committed == now.written
    return replace(now, committed=now.committed - 1) if all_committed else now


def jvm_of(script: Script) -> int:
    """The process that writes the logs. What it starts is left alone: a thread would wait for a child that stands still."""
    (jvm,) = Path(f"/proc/{script.pid}/task/{script.pid}/children").read_text().split()
    return int(jvm)


@pytest.mark.timeout(900 + 60 * KILLS)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(([{}], None, KILLED), marks=soak, id="defaults, all kills"),
        pytest.param(
            ([low_latency_conf()], {"queue.type": "BatchCQ"}, KILLED[:11]),
            marks=soak,
            id="low_latency_conf, batch topic, eleven kills",
        ),
        pytest.param(([{}, low_latency_conf()], {"queue.type": "BatchCQ"}, EACH), id="both in turn, batch topic"),
    ],
)
def test_batches_committed_by_killed_drivers_equal_the_input(
    rocketmq, make_topic, sending, start_script, tmp_path, case
):
    """Micro-batches of a batch topic end in the middle of its batches, which have 500 messages."""
    rng = random.Random(KILLS)
    confs, attributes, kills = case
    topic = make_topic(queues=4, attributes=attributes)
    early = feed(rocketmq, topic, MESSAGES)
    folders = {name: tmp_path / name for name in ("early", "late")}
    arguments = (rocketmq.name_server, tmp_path, topic, sending.topic, CAP)
    deaths: list[tuple[str, str, State]] = []
    drivers = Drivers(start_script, tmp_path, confs, *arguments)
    for point, name in kills:
        script = drivers.begin()
        deaths.append((name, point, kill_at(script, folders[name], point, rng)))
        if len(deaths) == 1:  # Spark forgets old batches
            log = folders["late"] / "checkpoint" / "offsets" / "0"
            first = json.loads(log.read_text().splitlines()[-1])
        assert point not in MET or MET[point](deaths[-1][2]), deaths
    after_first = [state for _, _, state in deaths if state.committed >= 0 or state.planned > 0]
    assert 4 * len(after_first) >= 3 * len(kills) - 2, deaths
    sending.stop.set()
    assert sending.ended.wait(60)
    indexed(rocketmq)
    assert drivers.begin(last=True).wait(600).report == "done"

    committed = {name: (tmp_path / f"{name}.txt").read_text().split() for name in folders}
    assert sorted(committed["early"]) == sorted(early), deaths
    # The first batch says where it began; whatever was sent from there on has to be there.
    begun = positions(json.dumps({"topics": first.get("start", first["topics"])}))
    expected = [body for body, (queue, offset) in sending.sent.items() if offset >= begun[queue]]
    assert sorted(committed["late"]) == sorted(expected), deaths
    assert expected
