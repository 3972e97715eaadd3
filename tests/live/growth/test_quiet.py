"""What the driver asks of brokers: little when idle, one question per topic and broker when it plans, and no leaks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rocketmq_spark.base.codes import Request
from rocketmq_spark.wire.header import Command
from tests.mockbroker import Call, MockBroker, ok, route
from tests.reading import Run, canonical, feed, ranges_of, stream_reader
from tests.scale import scaled

ROOT = Path(__file__).parents[3]
TOPICS = scaled(1250)


@pytest.fixture
def pair():
    """Two brokers, the first of them also the name server; every topic has four queues on each."""
    with MockBroker() as first, MockBroker() as second:
        masters = {"broker-a": first.address, "broker-b": second.address}
        first.on(Request.GET_ROUTEINFO_BY_TOPIC, route(4, masters))
        for name, broker in (("broker-a", first), ("broker-b", second)):
            broker.on(Request.GET_TOPIC_STATS_INFO, statistics(name))
        yield first, second


def statistics(broker_name: str):
    """Ten messages in each queue, as a broker tells it: objects as keys."""

    def reply(call: Call) -> Command:
        entries = ",".join(
            f'{{"brokerName":"{broker_name}","queueId":{i},"topic":{json.dumps(call.ext("topic"))}}}:'
            '{"lastUpdateTimestamp":1,"maxOffset":10,"minOffset":0}'
            for i in range(4)
        )
        return ok(f'{{"offsetTable":{{{entries}}},"topicPutTps":0.0}}'.encode())

    return reply


def asked(*brokers: MockBroker) -> Counter[int]:
    return Counter(request.code for broker in brokers for request in broker.requests)


def test_planning_10000_queues_asks_once_per_topic_and_broker(pair):
    topics = [f"topic-{i:04d}" for i in range(TOPICS)]
    run = Run(pair[0].address, subscribe=topics, startingOffsets="earliest", routeRefresh="1h", requestTimeout="60s")
    assert asked(*pair) == {Request.GET_ROUTEINFO_BY_TOPIC: TOPICS, Request.GET_TOPIC_STATS_INFO: 2 * TOPICS}
    for broker in pair:
        questions = [r.ext["topic"] for r in broker.requests if r.code == Request.GET_TOPIC_STATS_INFO]
        assert sorted(questions) == topics
        broker.requests.clear()
    end = run.latest()
    tasks = ranges_of(run.plan(end))
    # Routes are kept; the statistics are asked for at most once more.
    assert asked(*pair).keys() <= {Request.GET_TOPIC_STATS_INFO}
    assert asked(*pair)[Request.GET_TOPIC_STATS_INFO] <= 2 * TOPICS
    assert len({r.queue for task in tasks for r in task}) == 8 * TOPICS
    assert sum(r.size for task in tasks for r in task) == 80 * TOPICS
    assert canonical(json.loads(end)) == end


def test_an_idle_stream_asks_each_broker_a_few_times_a_second(rocketmq, topic, make_tap):
    """Spark asks us about 75 times a second, twice: for the next batch, and for the progress."""
    sent = feed(rocketmq, topic, 8)
    address = rocketmq.address("broker-a")
    tap = make_tap(address)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", addressMap={address: tap.address})
    run.drain(sent)
    polled(run, 1.5)
    for attempt in range(10):
        tap.data.clear()
        begun = time.monotonic()
        calls = polled(run, 3 * (1 + attempt))
        requests = len(re.findall(rb'"code": ?\d+', bytes(tap.data)))
        assert requests <= (time.monotonic() - begun) * 4 + 2
        # A machine that is slow just now is asked less often, and rests for longer behind each question.
        if 2 <= requests < calls / 2:
            break
    assert 2 <= requests < calls / 2
    run.drain(feed(rocketmq, topic, 8))


def polled(run: Run, seconds: float) -> int:
    """How often an idle stream was asked in that time."""
    until, calls = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        assert run.latest() == run.offset
        assert run.reader.reportLatestOffset() is not None
        calls += 1
        time.sleep(0.005)
    return calls


def sockets() -> int:
    return sum(1 for fd in os.listdir("/proc/self/fd") if _target(fd).startswith("socket:"))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


BATCHES = """
import json, sys
from tests.live.growth.test_quiet import sockets
from tests.reading import Run

def resident_kb():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS"))

run, seen = Run(sys.argv[1], subscribe=sys.argv[2], startingOffsets="earliest", maxOffsetsPerTrigger=8), []
for number in range(520):
    assert run.batch()
    if number in (100, 519):
        seen.append((sockets(), resident_kb()))
print(json.dumps([run.read, *seen]))
"""


def test_five_hundred_batches_leave_sockets_and_memory_flat(rocketmq, topic):
    """In a process of its own: what others of this one keep is not counted."""
    sent = feed(rocketmq, topic, 8 * 520)
    command = [sys.executable, "-c", BATCHES, rocketmq.name_server, topic]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    read, first, last = json.loads(done.stdout)
    assert Counter(read) == Counter(sent)
    assert last[0] <= first[0] + 1
    assert last[1] <= first[1] + 20_000


def test_readers_made_again_and_again_share_their_connections(rocketmq, topic):
    sent = feed(rocketmq, topic, 8)
    Run(rocketmq, subscribe=topic, startingOffsets="earliest").drain(sent)
    before = sockets()
    for _ in range(100):
        reader = stream_reader(rocketmq, subscribe=topic, startingOffsets="earliest")
        start = reader.initialOffset()
        assert reader.latestOffset(start, reader.getDefaultReadLimit()) != start
    assert sockets() <= before + 1
