"""Consumers in processes of their own, a producer of known messages, and who is killed: the accounts are by message id."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark import Message, Producer
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.localbroker.servers import PROXY
from tests.fix_spark import ROOT, environment
from tests.helpers import killed
from tests.live.grpc.popper import KINDS, POISON
from tests.mockbroker import eventually

ONE_IN = 40  # is a message that always fails


class Took(NamedTuple):
    """A consumer got a message; the first attempt is 1."""

    id: str
    attempt: int


@dataclass
class Popper:
    """Consumers of one kind and one group, one process after the other."""

    mq: LocalBroker
    kind: str
    topic: str
    folder: Path
    invisible_s: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _outs: list[Path] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def group(self) -> str:
        return f"{self.kind}-{self.topic}"

    def start(self) -> None:
        """Returns at once: ``started`` tells."""
        out = self.folder / f"{self.kind}-{next(self._numbers)}.out"
        command = [
            sys.executable,
            "-m",
            "tests.live.grpc.popper",
            self.kind,
            self.mq.proxy_grpc,
            self.topic,
            self.group,
        ]
        with out.open("wb") as said, out.with_suffix(".err").open("wb") as errors:
            self._process = subprocess.Popen(
                [*command, str(self.invisible_s)], stdout=said, stderr=errors, cwd=ROOT, env=environment()
            )
        self._outs.append(out)

    def kill(self) -> None:
        """Of one that runs until then."""
        assert self.started()
        assert self._process is not None
        self._process.kill()
        assert self._process.wait() == -signal.SIGKILL

    def end(self) -> None:
        """Whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def started(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._outs[-1].with_suffix(".err").read_text()[-3000:]
        return b'"started"' in self._outs[-1].read_bytes()

    def took(self) -> list[Took]:
        """All that its processes have said, but for a line that is not whole yet."""
        said = [
            json.loads(line) for out in self._outs for line in out.read_text().splitlines(True) if line[-1:] == "\n"
        ]
        return [Took(one["id"], one["attempt"]) for one in said if "id" in one]


class Sending:
    """Sends by Remoting, directly to brokers, until it is stopped: ids of what was acknowledged, and which of them are poison."""

    def __init__(self, mq: LocalBroker, topic: str, every_s: float) -> None:
        self.ids: list[str] = []
        self.poison: set[str] = set()
        self._topic, self._every_s = topic, every_s
        self._stop = threading.Event()
        self._producer = Producer(name_server=mq.name_server, group="sends", send_timeout="5s")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            if self._stop.wait(self._every_s):
                return
            poison = number % ONE_IN == 0
            try:
                result = self._producer.send(Message(self._topic, (POISON if poison else b"fine") + b" %d" % number))
            except RocketMQError:
                continue  # nobody knows whether it is there: no promise
            self.ids.append(result.msg_id)
            if poison:
                self.poison.add(result.msg_id)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()


@dataclass
class Crew:
    mq: LocalBroker
    poppers: list[Popper]
    rng: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    _pause: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, mq: LocalBroker, topic: str, folder: Path, invisible_s: float, rng: random.Random) -> Crew:
        return cls(mq, [Popper(mq, kind, topic, folder, invisible_s) for kind in KINDS], rng)

    def start(self) -> None:
        for popper in self.poppers:
            popper.start()
        self.all_started()

    def all_started(self) -> None:
        eventually(lambda: all(popper.started() for popper in self.poppers), 90)

    def kill(self, victim: str, pause_s: float) -> None:
        """A consumer by its kind, the Proxy or a broker, while everybody gets messages; it is back when this returns."""
        before = {popper.kind: len(popper.took()) for popper in self.poppers}
        eventually(lambda: all(len(popper.took()) > before[popper.kind] for popper in self.poppers), 90)
        self._pause.wait(self.rng.uniform(0.2, pause_s))
        popper = next((one for one in self.poppers if one.kind == victim), None)
        if popper is not None:
            popper.kill()
            popper.start()
            eventually(popper.started, 90)
        else:
            killed(self.mq, victim)
            self._pause.wait(self.rng.uniform(0.0, pause_s))
            self.mq.restart(victim)
        self.kills[victim] += 1

    @property
    def victims(self) -> list[str]:
        return [*KINDS, PROXY, *self.mq.brokers]

    def end(self) -> None:
        for popper in self.poppers:
            popper.end()


class Account(NamedTuple):
    """What became of the messages of a group: figures, and what does not fit."""

    lost: set[str]
    again: int
    given_up: set[str]
    not_given_up: set[str]
    attempts: dict[str, int]


def account(sent: set[str], poison: set[str], took: list[Took], dead: list[str]) -> Account:
    """Of messages that were acknowledged; ``again`` is how often a message came that had come before and never fails."""
    attempts: defaultdict[str, int] = defaultdict(int)
    for one in took:
        attempts[one.id] = max(attempts[one.id], one.attempt)
    fine = [one.id for one in took if one.id not in poison]
    return Account(
        lost=sent - attempts.keys(),
        again=len(fine) - len(set(fine)),
        given_up=set(dead) & (sent - poison),
        not_given_up=poison - set(dead),
        attempts={each: attempts[each] for each in poison},
    )
