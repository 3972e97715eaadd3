"""Members of a group in processes of their own, RocketMQ's and ours, and what happens to them and to their brokers."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rocketmq_spark.localbroker import LocalBroker
from tests.chaos.group_books import Event, Took, What, read
from tests.helpers import killed
from tests.mockbroker import eventually
from tests.witness import java_command

ROOT = Path(__file__).parents[2]
TOPIC, GROUP, ORDERED = "shared", "mixed", "mixed-in-order"
KINDS = ("ours", "java")
LOOK_S = 0.5
WORK_S = 90.0  # until a new member has had a message, though it waits for locks of the dead
AWAY_S = 8.0  # how long a broker is gone at most
_ours = itertools.cycle(("messages", "rows"))  # what a member's listeners get


class Member:
    """One process; each is in both groups. Its output lies in a file, which is read on while it grows."""

    def __init__(self, kind: str, name: str, name_server: str, folder: Path) -> None:
        self.kind = kind
        self.name = name
        self._path, errors = folder / f"{name}.out", folder / f"{name}.err"
        self._at = 0
        self._rest = ""
        if kind == "java":
            options = {"nameServer": name_server, "topic": TOPIC, "group": GROUP, "ordered": ORDERED}
            command = [*java_command("Consume"), *(f"{key}={value}" for key, value in options.items())]
        else:
            words = (name_server, TOPIC, GROUP, ORDERED, next(_ours))
            command = [sys.executable, "-m", "tests.chaos.group_member", *words]
        with self._path.open("wb") as out, errors.open("wb") as err:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd=ROOT, env=environment
            )

    def more(self) -> str:
        """The whole lines that were written since the last call; none of a line that its writer could not end."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        whole, newline, self._rest = (self._rest + data.decode()).rpartition("\n")
        return whole + newline

    def started(self) -> bool:
        assert self.process.poll() is None, self.words()
        return b'"started"' in self._path.read_bytes()

    def words(self) -> str:
        """The end of what it said to nobody in particular."""
        return (
            f"{self.name} ended with {self.process.returncode}\n" + self._path.with_suffix(".err").read_text()[-3000:]
        )

    def leave(self) -> None:
        if self.kind == "ours":
            self.process.send_signal(signal.SIGTERM)
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(180)
        assert self.process.returncode == 0, self.words()

    def kill(self) -> None:
        """Of one that runs until then."""
        self.process.kill()
        assert self.process.wait(60) == -signal.SIGKILL, self.words()
        assert self.process.stdin is not None
        self.process.stdin.close()


class Crew:
    """Those that run, those that ran, and everything that happened."""

    def __init__(self, mq: LocalBroker, folder: Path, rng: random.Random) -> None:
        self.mq = mq
        self.events: list[Event] = []
        self.took: dict[str, list[Took]] = {GROUP: [], ORDERED: []}
        self._folder = folder
        self._rng = rng
        self._numbers = itertools.count(1)
        self._here: list[Member] = []
        self._all: list[Member] = []
        self._gone: list[Member] = []
        self._pause = threading.Event()

    def join(self, *kinds: str) -> str:
        """Returns when all of them have joined."""
        begun = time.time()
        new = [Member(kind, f"{kind}-{next(self._numbers)}", self.mq.name_server, self._folder) for kind in kinds]
        self._here += new
        self._all += new
        eventually(lambda: all(member.started() for member in new), 90)
        self.events += [Event(What.JOIN, member.name, begun, time.time()) for member in new]
        return f"{' and '.join(member.name for member in new)} joined"

    def leave(self, kind: str | None = None) -> str:
        return self._ended(self._chosen(kind), What.LEAVE, Member.leave)

    def kill(self, kind: str | None = None) -> str:
        """One that is at work."""
        member = self._chosen(kind)
        self.watch(lambda: self._has_worked(member), WORK_S)
        assert self._has_worked(member), f"{member.name} had nothing to do"
        return self._ended(member, What.KILL, Member.kill)

    def broker(self, name: str | None = None) -> str:
        """Killed, and back after a while."""
        name = name or self._rng.choice(self.mq.brokers)
        begun = time.time()
        killed(self.mq, name)
        self.rest(1.0, AWAY_S)
        self.mq.restart(name)
        self.events.append(Event(What.BROKER, name, begun, time.time()))
        return f"{name} killed, away for {time.time() - begun:.1f} s"

    def killed_and_replaced(self, kind: str | None = None) -> str:
        said, gone = self.kill(kind), self._gone[-1]
        self.rest(0.0, 10.0)
        return f"{said}, {self.join(gone.kind)}"

    def left_and_back(self) -> str:
        member = self._chosen(None)
        said = self._ended(member, What.LEAVE, Member.leave)
        self.rest(0.0, 10.0)
        return f"{said}, {self.join(member.kind)}"

    def visit(self) -> str:
        said = self.join(self._rng.choice(KINDS))
        self.rest(1.0, 15.0)
        return f"{said}, {self._ended(self._here[-1], What.LEAVE, Member.leave)}"

    def one(self) -> str:
        """Any of them."""
        acts: list[tuple[int, Callable[[], str]]] = [
            (3, self.killed_and_replaced), (2, self.left_and_back), (2, self.visit), (2, self.broker),
        ]  # fmt: skip
        (act,) = self._rng.choices([act for _, act in acts], [weight for weight, _ in acts])
        return act()

    def rest(self, least_s: float, most_s: float) -> None:
        self._pause.wait(self._rng.uniform(least_s, most_s))

    def look(self) -> None:
        """Read what members have written meanwhile, of those that are gone, too; one that ended by itself is a failure."""
        for member in self._here:
            assert member.process.poll() is None, member.words()
        for member in self._all:
            if text := member.more():
                for group, took in self.took.items():
                    took += read(member.name, group, text)

    def watch(self, over: Callable[[], bool], seconds: float) -> None:
        """Read on until it is over, or the time is: what is missing then is for the accounts to say."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.look()
            if over():
                return
            self._pause.wait(LOOK_S)

    def end(self) -> None:
        """All that are here leave."""
        for member in list(self._here):
            self._ended(member, What.LEAVE, Member.leave)
        self.look()

    def abandon(self) -> None:
        """After an error, which is the one to be told: whatever they are."""
        for member in self._here:
            member.process.kill()
            member.process.wait(60)

    def _chosen(self, kind: str | None) -> Member:
        return self._rng.choice([member for member in self._here if kind in (None, member.kind)])

    def _has_worked(self, member: Member) -> bool:
        return any(one.member == member.name for took in self.took.values() for one in took)

    def _ended(self, member: Member, what: What, how: Callable[[Member], None]) -> str:
        self._here.remove(member)
        self._gone.append(member)
        begun = time.time()
        how(member)
        self.events.append(Event(what, member.name, begun, time.time()))
        return f"{member.name}: {what.value}"
