"""A mixed group's run: producers by keys, accidents, and the accounts at the end."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rocketmq_spark import Message, Producer
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from tests.chaos.group_books import What, calm, disordered, explained, failed, lost, shared, within
from tests.chaos.group_crew import KINDS, ORDERED, TOPIC, Crew
from tests.helpers import awaited

Plan = Callable[[Crew], Iterator[Callable[[], str]]]

QUEUES_A_BROKER = 6
THREADS, KEYS = 8, 96
DRAIN_S = 240.0
AGAIN_S = 0.1


class Producers:
    """Threads that send ``count`` messages by keys, evenly over ``seconds``, and what they missed as soon as they can.

    They go on in this pace until they are told that it is ``enough``.
    """

    def __init__(self, name_server: str, count: int, seconds: float) -> None:
        self.sent: list[str] = []
        self.failed: list[RocketMQError] = []
        self.missed = 0  # attempts, all of which were made up for
        self._sent_by = [0] * THREADS
        self._stop = threading.Event()
        self._enough = threading.Event()
        self._share = count // THREADS
        self._every_s = seconds / self._share
        self._producer = Producer(name_server=name_server, group="soak", send_timeout="10s")
        self._threads = [threading.Thread(target=self._send, args=(i,)) for i in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _send(self, thread: int) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            if number >= self._share and self._enough.is_set():
                return
            if self._stop.wait(max(0.0, begun + number * self._every_s - time.monotonic())):
                return
            key = f"k{thread + THREADS * (number % (KEYS // THREADS))}"
            while not self._stop.is_set() and not self._acknowledged(key, number):
                pass
            self._sent_by[thread] += 1

    def _acknowledged(self, key: str, number: int) -> bool:
        """One that must have its queue is tried once, as by Java's client: who wants it there sends it again."""
        message = Message(TOPIC, f"{key}:{number}".encode(), keys=[key])
        try:
            result = self._producer.send(message, selector="hash", arg=key)
        except RocketMQError as e:
            if not e.retriable:
                self.failed.append(e)
                self._stop.set()
            self.missed += 1
            self._stop.wait(AGAIN_S)
            return False
        self.sent.append(result.msg_id)
        return True

    def flow(self) -> bool:
        """Whether every thread sends within a while: none of them still waits for a broker of the act before."""
        before = list(self._sent_by)
        return awaited(lambda: all(now > then for now, then in zip(self._sent_by, before, strict=True)))

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def enough(self) -> None:
        self._enough.set()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._producer.close()


def run(mq: LocalBroker, folder: Path, count: int, seconds: float, rng: random.Random, plan: Plan) -> dict[str, int]:
    """All acts of the ``plan`` happen while messages come and go; then all of these must be there, and fit.

    Returns how many messages each group consumed in calm times, in which no queue may have two owners.
    """
    mq.create_topic(TOPIC, QUEUES_A_BROKER)
    crew = Crew(mq, folder, rng)
    try:
        say(crew.join(*KINDS, *KINDS))
        producers = Producers(mq.name_server, count, seconds)
        try:
            for act in plan(crew):
                assert producers.flow()
                missed, before = producers.missed, len(crew.events)
                say(act())
                died = [event.who for event in crew.events[before:] if event.what is What.BROKER]
                assert not died or producers.missed > missed, f"nobody missed {died}"
                crew.look()
                assert producers.running, producers.failed
            producers.enough()
            crew.watch(lambda: not producers.running, seconds + DRAIN_S)
        finally:
            producers.stop()
        assert not producers.failed, producers.failed
        sent = set(producers.sent)
        crew.watch(lambda: all(sent <= {t.id for t in took} for took in crew.took.values()), DRAIN_S)
        until = time.time()
        crew.end()
    finally:
        crew.abandon()
    return verdict(crew, producers.sent, until)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def verdict(crew: Crew, sent: list[str], until: float) -> dict[str, int]:
    """Of each group: the figures are printed, and whatever does not fit is a complaint."""
    complaints, in_calm_times = {}, {}
    for group, took in crew.took.items():
        ordered = group == ORDERED
        counts, unexplained = explained(took, crew.events, ordered)
        spans = calm(crew.events, until, ordered)
        in_calm_times[group] = within(took, spans)
        kinds = {kind: sum(t.member.startswith(kind) for t in took) for kind in KINDS}
        say(
            f"{group}: {len(sent)} sent, {len(took)} consumed {kinds}, repeats {dict(counts)}, "
            f"calm for {sum(end - begin for begin, end in spans):.0f} s"
        )
        complaints[group] = {
            "lost": lost(sent, took),
            "sent back": failed(took),
            "again without a reason": unexplained,
            "two owners": shared(took, spans),
            "out of order": disordered(took) if ordered else [],
        }
        assert all(kinds.values()), "the members of one kind had nothing"
    wrong = {(group, what): (len(f), f[:5]) for group, all in complaints.items() for what, f in all.items() if f}
    assert not wrong, wrong
    return in_calm_times
