"""A store and its model do the same, whatever happens to both."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.lanes import LeasedRecord
from rocketmq_spark.spool.records import (
    INDEXED_VERSION,
    PENDING,
    RECORD,
    TOTALS,
    VERSION,
    Dead,
    Done,
    Due,
    PendingKey,
    Record,
    RecordState,
    RetryLater,
    Verdict,
    area_end,
    record_key,
)
from rocketmq_spark.spool.store import Store
from rocketmq_spark.spool.turns import Admission, Window
from tests.models import SteppingMachine, model_test, step
from tests.spool.bench import database, record

LANES = (b"", b"l", b"ll")
TARGETS = ("", "a", "ab")
away = st.frozensets(st.sampled_from(TARGETS[1:]))


def unindexed(pending: PendingKey, state: bytes) -> tuple[bytes, bytes]:
    """As releases before 0.2 wrote it: the target was a part of the state."""
    target = pending.target.encode() if pending.waits_for_answer else b""
    return pending.due.mark_value, state[:11] + len(target).to_bytes(2) + target + state[13:]


class Model:
    """What is there: due time, lane and target by number, and the dead."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[int, bytes, str]] = {}
        self.dead: set[int] = set()

    def heads(self, away: Collection[str] = ()) -> dict[int, int]:
        """Due times of what is pending, without the targets that are away: of a lane the first only."""
        seen: set[bytes] = set()
        return {
            number: due
            for number, (due, lane, target) in sorted(self.kept.items())
            if not (lane and lane in seen) and not seen.add(lane) and target not in away
        }

    def move(self, number: int, due: int) -> None:
        self.kept[number] = (due, *self.kept[number][1:])


class StoreMachine(SteppingMachine):
    """A store and its model do the same, through restarts, kills (which drop leases), upgrades and damage."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder / "s", sync="never")
        self.model = Model()
        self.numbers = 0
        self.now = 1000
        self.out: dict[int, LeasedRecord] = {}

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    @step(
        delays=st.lists(
            st.tuples(st.integers(-50, 50), st.sampled_from(LANES), st.sampled_from(TARGETS)), min_size=1, max_size=4
        )
    )
    def add(self, delays: list[tuple[int, bytes, str]]) -> None:
        records = []
        for delay, lane, target in delays:
            self.numbers += 1
            due = self.now + delay
            records.append((record(str(self.numbers).encode(), target=target, lane=lane, at_ms=self.now), due))
            self.model.kept[self.numbers] = (due, lane, target)
        self.store.add(records)

    @step(seconds=st.integers(0, 60))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds

    @step(limit=st.integers(1, 5), away=away)
    def take(self, limit: int, away: frozenset[str] = frozenset()) -> None:
        heads = self.model.heads(away)
        due = sorted((at, n) for n, at in heads.items() if at <= self.now and n not in self.out)[:limit]
        turns = Admission(dict.fromkeys(away, Window(1, 1, 1 << 62)), set(TARGETS) - away, 99, self.now)
        taken = self.store.take(self.now, limit, admission=turns)
        self.did["taken"] += len(taken)
        self.did["refused"] += len(turns.refused_targets)
        assert [int(work.record.payload) for work in taken] == [number for _, number in due]
        self.out |= {int(work.record.payload): work for work in taken}

    @step(data=st.data())
    def settle(self, data: st.DataObject) -> None:
        """Of what is out, or else of what comes next."""
        if not self.out:
            self.now += 50
            self.take(3)
        if not self.out:
            return
        numbers = data.draw(st.lists(st.sampled_from(sorted(self.out)), min_size=1, unique=True))
        outcomes: list[tuple[LeasedRecord, Verdict]] = []
        for number in numbers:
            verdict = data.draw(st.sampled_from([Done(), Dead("why"), RetryLater(self.now + 30, "why")]))
            outcomes.append((self.out.pop(number), verdict))
            lane = self.model.kept[number][1]
            if isinstance(verdict, RetryLater):
                self.model.move(number, verdict.due_ms)
                self.did["retried"] += 1
                continue
            del self.model.kept[number]
            if isinstance(verdict, Dead):
                self.model.dead.add(number)
                self.did["dead"] += 1
            following = min((n for n, (_, other, _) in self.model.kept.items() if lane and other == lane), default=None)
            if following is not None:
                self.model.move(following, self.now)
                self.did["followed"] += 1
        self.store.settle(outcomes, self.now)

    @step(limit=st.integers(1, 3), target=st.sampled_from((None, "a", "ab")))
    def hasten(self, limit: int, target: str | None) -> None:
        start, first = None, True
        while first or start is not None:
            start, first = self.store.make_due(target, start, limit, self.now), False
        for number, due in self.model.heads().items():
            if number not in self.out and due > self.now and target in (None, self.model.kept[number][2]):
                self.model.move(number, self.now)
                self.did["hastened"] += 1

    @step()
    def restart(self) -> None:
        self._open_again()

    @step(written=st.booleans(), target=st.sampled_from(TARGETS))
    def kill(self, written: bool, target: str) -> None:
        """Before or after a write: that of what is out, or else of a new record."""
        write, settles = database(self.store).write, bool(self.out)

        def killed(*given: Any, **more: Any) -> None:
            if written:
                write(*given, **more)
            raise SpoolError("killed")

        database(self.store).write = killed  # type: ignore[method-assign]
        if settles:
            number, work = self.out.popitem()
            change = partial(self.store.settle, [(work, RetryLater(self.now + 9, "why"))], self.now)
        else:
            number = self.numbers = self.numbers + 1
            change = partial(self.store.add, [(record(str(number).encode(), target=target), self.now)])
        with pytest.raises(SpoolError, match="killed"):
            change()
        if written and settles:
            self.model.move(number, self.now + 9)
        elif written:
            self.model.kept[number] = (self.now, b"", target)
        self.did["killed"] += 1
        self._open_again()

    @step(data=st.data())
    def upgrade(self, data: st.DataObject) -> None:
        """From a release before 0.2, or from a process that was killed while it added targets to the keys."""
        db, kept = database(self.store), list(database(self.store).scan(PENDING, area_end(PENDING)))
        due = sorted(kept, key=lambda entry: PendingKey.parse(entry[0]).due)
        done = data.draw(st.integers(0, max(0, len(due) - 1)))
        puts = [unindexed(PendingKey.parse(key), state) for key, state in due[done:]]
        totals = bytes((INDEXED_VERSION if done else VERSION,)) + (db.get(TOTALS) or self.store.totals.encode())[1:]
        db.write([*puts, (TOTALS, totals)], [key for key, _ in due[done:]])
        self.did["upgraded"] += len(puts)
        self._open_again()

    @step(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Places of records are lost, and obsolete ones are back; what is known of no due time is due at once."""
        db = database(self.store)
        lost, back = [], []
        for key, state in db.scan(PENDING, area_end(PENDING)):
            pending = PendingKey.parse(key)
            damage = data.draw(st.sampled_from(("none", "lost", "doubled", "after a retry")))
            if damage == "lost":
                lost.append(key)
                self.model.move(self._number(pending), 0)
                self.did["lost"] += 1
            elif damage != "none":
                later = Due(pending.due.due_ms + 7, pending.due.sequence)
                back.append(
                    (
                        pending._replace(
                            due=later, waits_for_answer=pending.waits_for_answer != (damage == "doubled")
                        ).encoded,
                        state,
                    )
                )
        db.write(back, [*lost, TOTALS])
        self._open_again()
        assert self.store.damage_count == (1 if self.model.kept or self.model.dead else 0)

    @step(data=st.data())
    def repaired_by_an_earlier_release(self, data: st.DataObject) -> None:
        """It finds no place that has a target, and makes all records due; their earlier places are still there."""
        if not self.model.kept:
            return
        db, puts = database(self.store), []
        for key, _ in db.scan(PENDING, area_end(PENDING)):
            pending = PendingKey.parse(key)._replace(due=Due(0, PendingKey.parse(key).due.sequence))
            puts.append(unindexed(pending, RecordState(0, 0).encode()))
            self.model.move(self._number(pending), 0)
        totals = bytes((VERSION,)) + (db.get(TOTALS) or b"")[1:]
        db.write([*puts, (TOTALS, totals)])
        self.did["repaired"] += 1
        self._open_again()

    def _number(self, pending: PendingKey) -> int:
        data = database(self.store).get(record_key(RECORD, pending.due.sequence))
        return int(Record.decode(data or b"").payload)

    def _open_again(self) -> None:
        self.did["dropped"] += len(self.out)
        self.store.close()
        self.store = Store(self.folder / "s", sync="never")
        self.out.clear()

    @invariant()
    def the_same(self) -> None:
        for away in ((), ("a",), ("a", "ab")):
            free = [due for number, due in self.model.heads(away).items() if number not in self.out]
            assert self.store.next_due_ms(away) == min(free, default=None)
        assert len(self.store) == len(self.model.kept)
        assert self.store.totals.dead == len(self.model.dead)
        held = {lane for _, lane, _ in self.model.kept.values() if lane}
        assert {lane for lane in LANES if self.store.holds_lane(lane)} == held


test_g2_a_store_and_its_model_do_the_same = model_test(
    StoreMachine,
    settings(max_examples=30, stateful_step_count=40, deadline=None),
    taken=10,
    followed=1,
    retried=2,
    dead=2,
    hastened=1,
    dropped=2,
    refused=1,
    killed=2,
    upgraded=2,
    lost=2,
    repaired=2,
)
