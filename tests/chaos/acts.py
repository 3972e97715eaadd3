"""What happens to a cluster: one act at a time, chosen by chance, each over when its harm is undone."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.wire.header import Command
from tests.chaos.books import Place, losses, missing
from tests.chaos.pipeline import AGAIN, COPIED, FILES, Driver, Producers
from tests.helpers import killed
from tests.mockbroker import eventually

DELETE_EXPIRED_COMMITLOG = 329
MISSED = "Python worker exited unexpectedly"
MAX_QUEUES = 4
LONGEST_S = 12.0

# Nothing is deleted by itself, and all but the newest file when it is asked for.
RETENTION = {
    "fileReservedTime": 0,
    "deleteWhen": f"{(time.gmtime().tm_hour + 12) % 24:02d}",
    "cleanResourceInterval": 500,
    "deleteCommitLogFilesInterval": 1,
    "mappedFileSizeCommitLog": 4 << 20,
    "maxMessageSize": 2 << 20,
}
# A broker that is asked to deletes in 20 of its intervals.
DELETES_S = 12.0


@dataclass
class Acts:
    """The acts and what they must remember."""

    mq: LocalBroker
    driver: Driver
    producers: Producers
    rng: random.Random
    queues: int = 2
    # From when to when a read that starts may not see the queues of a broker.
    unreadable: list[tuple[str, float, float]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    _pause: threading.Event = field(default_factory=threading.Event)
    _deletes_until: float = 0.0

    def one(self) -> str:
        """Do one of them; what it was."""
        acts: list[tuple[int, Callable[[], str]]] = [
            (3, self.kill_broker), (2, self.kill_slave), (2, self.kill_name_server), (2, self.hang), (2, self.kill_worker),
            (1, self.kill_driver), (2, self.retention), (1, self.more_queues), (2, self.permission), (1, self.made_again),
        ]  # fmt: skip
        act = self.rng.choices([act for _, act in acts], [weight for weight, _ in acts])[0]
        begun = time.monotonic()
        self.told.append(f"{act()} ({time.monotonic() - begun:.1f} s)")
        self._pause.wait(self.rng.uniform(0.5, 3.0))
        return self.told[-1]

    def _for_a_while(self) -> float:
        seconds = self.rng.uniform(0.5, LONGEST_S)
        self._pause.wait(seconds)
        return seconds

    def _kill(self, name: str) -> str:
        killed(self.mq, name)
        seconds = self._for_a_while()
        self.mq.restart(name)
        return f"{name} killed and away for {seconds:.1f} s"

    def kill_broker(self) -> str:
        return self._kill(self.rng.choice(self.mq.brokers))

    def kill_slave(self) -> str:
        return self._kill(self.rng.choice(self.mq.slaves))

    def kill_name_server(self) -> str:
        """One of the two, or both: brokers and clients go on with what they know."""
        names = self.rng.choice([["namesrv"], ["namesrv-2"], ["namesrv", "namesrv-2"]])
        begun = time.time()
        for name in names:
            killed(self.mq, name)
        seconds = self._for_a_while()
        for name in names:
            self.mq.restart(name)
        # It comes back empty, and brokers register one by one: what starts meanwhile cannot know of the others.
        self.unreadable += [(broker, begun, time.time()) for broker in self.mq.brokers]
        return f"{' and '.join(names)} killed and away for {seconds:.1f} s"

    def hang(self) -> str:
        """SIGSTOP: connections stay open, and nothing answers."""
        name = self.rng.choice([*self.mq.brokers, "namesrv", "namesrv-2"])
        pid = self.mq.pid(name)
        assert pid is not None
        os.killpg(os.getpgid(pid), signal.SIGSTOP)
        try:
            seconds = self._for_a_while()
        finally:
            os.killpg(os.getpgid(pid), signal.SIGCONT)
        return f"{name} stopped for {seconds:.1f} s"

    def kill_worker(self) -> str:
        """One that works: those that have nothing to do are replaced, and nobody misses them.

        Over when both streams have moved on: Spark gives a task up that has failed four times.
        """
        before, missed, many = self.driver.progress(), self.driver.log().count(MISSED), 0

        def felt() -> bool:
            nonlocal many
            self.driver.check()
            many += bool(self.driver.kill_worker(self.rng.choice))
            self._pause.wait(0.5)
            return self.driver.log().count(MISSED) > missed

        eventually(felt, 120)
        self._moved_on(before)
        return f"{many} workers killed until one was missed"

    def kill_driver(self) -> str:
        before = self.driver.progress()
        self.driver.restart()
        self._moved_on(before)
        return "the driver killed"

    def _moved_on(self, before: tuple[int, int]) -> None:
        def moved() -> bool:
            self.driver.check()
            return all(now > was for now, was in zip(self.driver.progress(), before, strict=True))

        eventually(moved, 120)

    def retention(self) -> str:
        name = self.rng.choice([*self.mq.brokers, *self.mq.slaves])
        self.mq.admin.offset_reader.rpc_client.request(self.mq.address(name), Command(DELETE_EXPIRED_COMMITLOG))
        self._deletes_until = time.monotonic() + DELETES_S
        return f"{name} deletes old files"

    def more_queues(self) -> str:
        if self.queues == MAX_QUEUES:
            return "no more queues"
        self.queues += 1
        for topic in (FILES, COPIED):
            self.mq.create_topic(topic, self.queues, resize=True)
        return f"{self.queues} queues a broker"

    def permission(self) -> str:
        """One broker's queues may be written and not read, for a while."""
        name, begun = self.rng.choice(self.mq.brokers), time.time()
        self.mq.admin.create_topic(FILES, self.queues, [name], perm=2)
        seconds = self._for_a_while()
        self.mq.admin.create_topic(FILES, self.queues, [name])
        self.unreadable.append((name, begun, time.time()))
        return f"{FILES} of {name} unreadable for {seconds:.1f} s"

    def made_again(self) -> str:
        """The producer goes on with the next generation when the old topic is gone everywhere. All of the old one has been read
        before: a task whose batch was planned before the deletion may read the new messages in place of the old ones, which
        the next plan notices and reads again (docs/guarantees.md). No broker deletes files meanwhile: of a topic that was made
        again what exists is read.
        """
        self._pause.wait(max(0.0, self._deletes_until - time.monotonic()))
        self._generation_read()
        with self.producers.no_mayflies:  # none of the old generation is sent to the new topic
            self._generation_read(whole=True)
            self.mq.admin.delete_topic(AGAIN)
            self.producers.generation += 1
        self._pause.wait(self.rng.uniform(0.5, 3.0))
        self.mq.create_topic(AGAIN, 2)
        self._generation_read()
        return f"{AGAIN} made again"

    def _generation_read(self, whole: bool = False) -> None:
        """Wait until some of the generation is read, or all that was sent and not named as lost."""

        def read() -> bool:
            self.driver.check()
            generation, sent = self.producers.generation, list(self.producers.sent)
            rows = [r for r in self.driver.rows() if r.place.topic == AGAIN and r.generation == generation]
            wanted = [s for s in sent if s.place.topic == AGAIN and s.generation == generation]
            return bool(rows) and not (whole and missing(wanted, rows, losses(self.driver.log())))

        eventually(read, 120)

    def away(self, begun: float) -> frozenset[str]:
        """Brokers some queues of which a read that began then may not have seen."""
        margin = 15.0  # routes are cached, and a read takes its time
        return frozenset(name for name, start, end in self.unreadable if start - margin < begun < end + margin)

    def new_queues(self, begun: float, first: dict[Place, float]) -> frozenset[Place]:
        return frozenset(place for place, at in first.items() if begun - at < 15.0)
