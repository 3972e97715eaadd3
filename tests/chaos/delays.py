"""Minutes of the delay service under accidents: ``make soak ONLY=delay SEED=7 SECONDS=600``.

Two nodes, and sometimes a third one, with clocks that are set. Nodes stand still for longer than brokers wait for heartbeats,
are killed, lose their disks, restart, come and go. At the end: each message was sent, none early by the clock of the node that
sent it, and every repeat is one that ``docs/delay.md`` names. Some messages wait until the end, so that a node that takes over
needs all numbers to know what was sent.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_spark import Message, Producer, PullConsumer
from rocketmq_spark.errors import MessageRefused, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.envelope import INNER_TOPIC
from tests.chaos.delay_books import Event, Sent, early, parsed, reason, reasons, repeats
from tests.chaos.delay_node import AHEAD
from tests.chaos.group_run import say
from tests.fix_spark import ROOT

SECONDS = float(os.environ.get("CHAOS_SECONDS") or 600)
SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 30))
A_SECOND = 1000 / 6  # messages: 100,000 in ten minutes
TARGET, QUEUES, THREADS = "delayed", 8, 4
# Brokers look for members without heartbeats every ten seconds.
EXPIRES_S, LOOKS_S = 6.0, 10.0
SOON_S, LONGEST_S, DRAIN_S = 0.1, 25.0, 180.0
_TAKEN = re.compile(rf"^(\d+\.\d+) \S+ {INNER_TOPIC}/\S+ is read from ", re.MULTILINE)


def _ms() -> int:
    return time.time_ns() // 1_000_000


class Node:
    def __init__(self, mq: LocalBroker, folder: Path, name: str, events: list[Event]) -> None:
        self.name, self._mq, self._events = name, mq, events
        self._data, self._clock = folder / name, folder / f"{name}.clock"
        self.log, self.sent = folder / f"{name}.log", folder / f"{name}.sent"
        self._clock.write_bytes(AHEAD.pack(0))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.chaos.delay_node", self._mq.name_server, self._data, self._clock]
        with self.log.open("ab") as log, self.sent.open("ab") as sent:
            self._process = subprocess.Popen(
                command, stdout=sent, stderr=log, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )

    def kill(self) -> None:
        self._end(signal.SIGKILL)
        self._events.append(Event("kill", self.name, _ms(), _ms()))

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def freeze(self, seconds: float, meanwhile: Callable[[], None]) -> None:
        assert self._process is not None
        begin = _ms()
        self._process.send_signal(signal.SIGSTOP)
        over = time.monotonic() + seconds
        try:
            meanwhile()
            time.sleep(max(0.0, over - time.monotonic()))
        finally:
            self._process.send_signal(signal.SIGCONT)
            self._events.append(Event("freeze", self.name, begin, _ms()))

    def set_clock(self, ahead_s: float) -> None:
        with self._clock.open("r+b") as file:
            file.write(AHEAD.pack(round(1000 * ahead_s)))
        self._events.append(Event("clock", self.name, _ms(), _ms(), round(1000 * ahead_s)))

    def lose_disk(self) -> None:
        shutil.rmtree(self._data)

    def _end(self, how: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(how)
        self._process.wait(60)
        self._process = None

    def taken(self) -> list[Event]:
        """The moments at which it took queues over, as its log says."""
        moments = _TAKEN.findall(self.log.read_text()) if self.log.exists() else []
        return [Event("taken", self.name, at, at) for at in (round(1000 * float(moment)) for moment in moments)]


class Crew:
    def __init__(self, mq: LocalBroker, folder: Path, rng: random.Random) -> None:
        self.events: list[Event] = []
        self.nodes = [Node(mq, folder, name, self.events) for name in "abc"]
        self._rng = rng
        for node in self.nodes[:2]:
            node.start()

    def accidents(self) -> Iterator[str]:
        """One accident after the other, for ever; some happen while a node stands still."""
        acts = [
            self._freeze,
            self._freeze,
            self._kill,
            self._kill,
            self._restart,
            self._third,
            self._clock,
            self._clock,
        ]
        while True:
            self._rng.shuffle(acts)
            for act in acts:
                yield act()
                time.sleep(self._rng.uniform(1, 6))

    def settle(self) -> None:
        for node in self.nodes:
            node.set_clock(0.0)
            if not node.runs and node is not self.nodes[2]:
                node.start()

    def end(self) -> None:
        for node in self.nodes:
            if node.runs:
                node.stop()

    def sends(self) -> list[Sent]:
        return [sent for node in self.nodes if node.sent.exists() for sent in parsed(node.name, node.sent.read_text())]

    def taken(self) -> list[Event]:
        return [event for node in self.nodes for event in node.taken()]

    def _pick(self) -> Node:
        return self._rng.choice(self.nodes[:2])

    def _freeze(self) -> str:
        frozen = self._pick()
        (other,) = set(self.nodes[:2]) - {frozen}
        seconds = EXPIRES_S + LOOKS_S + self._rng.uniform(2, 10)
        what = self._rng.choice(("nothing else", "the other node is killed", "a third node comes", "a clock is set"))

        def meanwhile() -> None:
            if what == "nothing else":
                return
            time.sleep(EXPIRES_S + LOOKS_S)
            if what == "the other node is killed":
                other.kill()
                other.start()
            elif what == "a third node comes":
                self._toggle_third()
            else:
                self._clock()

        frozen.freeze(seconds, meanwhile)
        return f"{frozen.name} stood still for {seconds:.0f} s; meanwhile {what}"

    def _kill(self) -> str:
        node, pause_s, lost = self._pick(), self._rng.choice((0.0, 3.0, 12.0)), self._rng.random() < 0.25
        node.kill()
        time.sleep(pause_s)
        if lost:
            node.lose_disk()
        node.start()
        return f"{node.name} was killed for {pause_s:g} s{', and lost its disk' if lost else ''}"

    def _restart(self) -> str:
        node = self._pick()
        node.stop()
        node.start()
        return f"{node.name} was restarted"

    def _third(self) -> str:
        self._toggle_third()
        return f"c {'came' if self.nodes[2].runs else 'left'}"

    def _toggle_third(self) -> None:
        third = self.nodes[2]
        (third.stop if third.runs else third.start)()

    def _clock(self) -> str:
        node, ahead_s = self._rng.choice(self.nodes), self._rng.choice((-20.0, -2.0, 0.0, 2.0, 20.0))
        node.set_clock(ahead_s)
        return f"the clock of {node.name} is {ahead_s:g} s ahead"


class Senders:
    """Threads that send ``count`` messages, evenly over ``seconds``: one in fifty is due at the end, one in fifty at once."""

    def __init__(self, name_server: str, count: int, seconds: float, rng: random.Random) -> None:
        self.failed: list[RocketMQError] = []
        self._end = time.time() + seconds
        self._producer = Producer(name_server=name_server, group="soak", long_delay="dmq", send_timeout="20s")
        self._plan = [(self._delay_s(rng), number) for number in range(count)]
        self._every_s = seconds / count
        self._begun = time.monotonic()
        self._threads = [threading.Thread(target=self._send, args=(i,)) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _delay_s(rng: random.Random) -> float | None:
        kind = rng.random()
        return None if kind < 0.02 else SOON_S if kind < 0.04 else rng.uniform(0.2, LONGEST_S)

    def _send(self, thread: int) -> None:
        try:
            for delay_s, number in self._plan[thread::THREADS]:
                time.sleep(max(0.0, self._begun + number * self._every_s - time.monotonic()))
                due = self._end + 5 if delay_s is None else time.time() + delay_s
                while not self._is_sent(Message(TARGET, str(number).encode()), due):
                    time.sleep(1)
        except RocketMQError as e:
            self.failed.append(e)

    def _is_sent(self, message: Message, due: float) -> bool:
        """False while no node is there: a producer does not send then."""
        try:
            self._producer.send(message, deliver_at=round(1000 * max(due, time.time() + SOON_S)))
        except MessageRefused as e:
            if "no member of a consumer group" not in e.message:
                raise
            return False
        return True

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._producer.close()


def received(mq: LocalBroker) -> Counter[str]:
    """How often the topic has each message."""
    found: Counter[str] = Counter()
    with PullConsumer(name_server=mq.name_server, group="accounts", auto_commit=False) as consumer:
        consumer.assign(consumer.queues(TARGET))
        consumer.seek_to_beginning()
        while polled := consumer.poll(3.0):
            found.update(message.body.decode() for message in polled)
    return found


@pytest.mark.timeout(2 * SECONDS + 900)
def test_delays(make_cluster: Callable[..., LocalBroker], tmp_path: Path) -> None:
    say(f"SEED={SEED} SECONDS={SECONDS:g}")
    rng, count = random.Random(SEED), round(A_SECOND * SECONDS)
    mq = make_cluster(conf={"channelExpiredTimeout": round(1000 * EXPIRES_S)})
    for topic in (INNER_TOPIC, TARGET):
        mq.admin.create_topic(topic, QUEUES)
    crew = Crew(mq, tmp_path, rng)
    try:
        senders, until = Senders(mq.name_server, count, SECONDS, rng), time.monotonic() + SECONDS
        for done in crew.accidents():
            say(done)
            if time.monotonic() > until:
                break
        crew.settle()
        senders.join()
        assert senders.failed == []
        over = time.monotonic() + DRAIN_S
        while len(found := received(mq)) < count and time.monotonic() < over:
            time.sleep(5)
    finally:
        crew.end()
    sends, taken = crew.sends(), crew.taken()
    events, pairs = [*crew.events, *taken], repeats(sends)
    why = reasons(pairs, events)
    say(f"{count} messages, {found.total() - len(found)} repeats in the topic, {len(taken)} queues taken; {dict(why)}")
    assert sorted(map(str, range(count))) == sorted(found), "messages are lost"
    assert early(sends, events) == []
    assert [pair for pair in pairs if reason(*pair, events) is None] == []
    assert len(taken) - QUEUES >= (20 if SECONDS >= 600 else 1)
