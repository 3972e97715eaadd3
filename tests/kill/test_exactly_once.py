"""Sinks with exactly-once while drivers, workers and brokers are killed: by row key none is missing, and none there twice."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message
from tests.fix_spark import Script
from tests.helpers import awaited, freeze, killed
from tests.kill.pipes import MESSAGES, QUEUES, TALLY, Pipe, Pipes, Swallowing, awaited_in, made
from tests.reading import names, post
from tests.scale import soak
from tests.witness import java_read

SELECTORS = ("roundRobin", "hash", "column")
SHAPES = ("map", "shuffled", "repartition", "foreach")
Make = Callable[..., str]
FROZEN_S = 6.0


def fed(mq: LocalBroker, make_topic: Make) -> tuple[str, list[str]]:
    source = make_topic(queues=QUEUES)
    keys = names(MESSAGES, "row")
    post(mq, [Message(source, key.encode()) for key in keys])
    return source, keys


@pytest.fixture
def pipes(
    rocketmq: LocalBroker, make_topic: Make, start_script: Callable[..., Script], tmp_path: Path
) -> Callable[..., tuple[Pipes, list[str]]]:
    def make(*given: Pipe) -> tuple[Pipes, list[str]]:
        source, keys = fed(rocketmq, make_topic)
        return Pipes(rocketmq, start_script, tmp_path, source, made(make_topic, *given)), keys

    return make


def cases(kind: str, shapes: Sequence[str]) -> list[list[Pipe]]:
    return [[Pipe(shape, kind, selector) for selector in SELECTORS] for shape in shapes]


ALL = [*cases("ordinary", SHAPES), *cases("batch", SHAPES)]


def label(given: Sequence[Pipe]) -> str:
    return f"{given[0].shape}, {given[0].kind}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "given", [pytest.param(case, id=label(case), marks=() if case is ALL[0] else soak) for case in ALL]
)
def test_killed_driver_and_dying_workers_store_rows_once(
    rocketmq: LocalBroker, pipes: Callable[..., tuple[Pipes, list[str]]], given: list[Pipe]
) -> None:
    """With at-least-once the same run repeats rows: so the test can see repeats."""
    running, keys = pipes(*given, Pipe(given[0].shape, given[0].kind, guarantee="at-least-once"))
    running.hold.touch()
    script = running.begin()
    running.wait(script, running.sending, "rows of every query")
    running.kill(script)
    running.hold.unlink()
    script = running.begin()
    for pipe in running.pipes:
        running.dies(pipe, script)
    running.finish(script)
    assert running.died(), "a worker that was to die has not"
    repeats = running.check(keys)
    assert repeats[running.pipes[-1].name] > 0
    assert running.found > 0
    first = running.pipes[0]
    seen = [record.body.decode().split(",")[0] for record in java_read(rocketmq.name_server, first.topic, bodies=True)]
    assert len(seen) == len(set(seen)), "RocketMQ's own client sees the same"
    assert set(seen) <= set(keys)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("given", [pytest.param(case, id=label(case), marks=soak) for case in ALL])
def test_lost_acks_and_driver_death_before_commit_repeat_no_row(
    rocketmq: LocalBroker, pipes: Callable[..., tuple[Pipes, list[str]]], given: list[Pipe]
) -> None:
    running, keys = pipes(*given)
    address = rocketmq.address(rocketmq.brokers[0])
    with Swallowing(address, 40) as proxy:
        running.address_map = {address: proxy.address}
        running.finish(running.begin())
        assert proxy.swallowed > 0
        assert running.found > 0
        before = running.found
        running.uncommit()
        running.finish(running.begin())
        assert running.found - before > 0
        running.check(keys)


@soak
@pytest.mark.timeout(1800)
def test_dying_freezing_and_absent_brokers_store_each_row_once(
    pair: LocalBroker, start_script: Callable[..., Script], tmp_path: Path
) -> None:
    """A batch write, whose tasks Spark repeats, comes last; its worker dies."""

    def make_topic(queues: int, attributes: object = None) -> str:
        (topic,) = names(1, "pipe")
        pair.create_topic(topic, queues=queues)
        return topic

    source, keys = fed(pair, make_topic)
    given = made(make_topic, Pipe("shuffled"), Pipe("foreach"), Pipe("job"))
    running = Pipes(pair, start_script, tmp_path, source, given)
    running.hold.touch()
    job = running.pipes.pop()
    script = running.begin()
    running.wait(script, running.sending, "rows of every query")
    running.kill(script)
    running.hold.unlink()
    broker_dies(pair, "broker-b")
    script = running.begin()
    awaited_in(script, "what is stored cannot be read yet, waiting for the brokers")
    pair.restart("broker-b")
    counts = {pipe.name: running.sent(pipe) for pipe in running.pipes}
    running.wait(script, lambda: any(running.sent(p) > counts[p.name] for p in running.pipes), "more rows")
    with frozen(pair, "broker-a"):
        broker_dies(pair, "broker-b")
        pair.restart("broker-b")
    running.finish(script)
    running.pipes.append(job)
    script = running.begin()
    running.dies(job, script)
    running.finish(script)  # the streams read what was on the broker that was away when the run before began
    assert not list(running.folder.glob("*.dies"))
    running.check(keys)
    assert running.found > 0


@soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("turn", range(11))
def test_everything_at_once(pair: LocalBroker, start_script: Callable[..., Script], tmp_path: Path, turn: int) -> None:
    """Brokers freeze and die while rows are on their way, then the driver does, then workers, then a broker again."""

    def make_topic(queues: int, attributes: object = None) -> str:
        (topic,) = names(1, "pipe")
        pair.create_topic(topic, queues=queues, batch=attributes is not None)
        return topic

    source, keys = fed(pair, make_topic)
    kind = ("ordinary", "batch")[turn % 2]
    # Not by column: a queue id alone is refused where two brokers have it.
    shapes = Pipe(SHAPES[turn % 3], kind, SELECTORS[turn // 2 % 2]), Pipe("foreach", kind)
    running = Pipes(pair, start_script, tmp_path, source, made(make_topic, *shapes))
    running.hold.touch()
    script = running.begin()
    running.wait(script, running.sending, "rows of every query")
    with frozen(pair, "broker-a"):
        running.hold.unlink()
        broker_dies(pair, "broker-b")
        pair.restart("broker-b")
    running.kill(script)
    script = running.begin()
    for pipe in running.pipes:
        running.dies(pipe, script)
    running.wait(script, lambda: not list(running.folder.glob("*.dies")), "the death of a worker of each query")
    broker_dies(pair, "broker-a")
    pair.restart("broker-a")
    running.finish(script)
    running.check(keys)
    assert running.died(), "a worker that was to die has not"
    assert running.found > 0


def broker_dies(mq: LocalBroker, name: str) -> None:
    killed(mq, name)
    TALLY["brokers killed"] += 1


@contextlib.contextmanager
def frozen(mq: LocalBroker, name: str) -> Iterator[None]:
    """The broker does not run, for some seconds at least."""
    pid = mq.pid(name)
    assert pid is not None
    freeze(pid)
    TALLY["freezes"] += 1
    until = time.monotonic() + FROZEN_S
    try:
        yield
        awaited(lambda: time.monotonic() >= until)
    finally:
        os.kill(pid, signal.SIGCONT)


@soak
@pytest.mark.usefixtures("rocketmq")  # tests run by their fixtures: else this one would be the first
def test_in_all_enough_was_killed() -> None:
    """The last of this file: what the tests before it did."""
    print(dict(TALLY))
    least = {"drivers killed": 20, "workers killed": 20, "brokers killed": 20, "freezes": 10, "answers swallowed": 200}
    assert all(TALLY[what] >= count for what, count in least.items()), TALLY
