"""Any accident with any file of a store: what can be read is had in its order, and what is lost is counted or said to be unknown.

With those of ``tests/delay/test_damages.py`` there are 200 of them.
"""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.lanes import LeasedRecord
from rocketmq_spark.spool.records import IDENTITY, Dead, Done, Record, RetryLater
from rocketmq_spark.spool.recovery import dead_records
from rocketmq_spark.spool.store import Store
from tests.spool.bench import database, record
from tests.spool.damages import damage

ADDED, LANES, AT_ONCE, SEEDS = 150, 7, 10, 12
LATER = 10**13


class Whole(NamedTuple):
    """A folder with three tables and a log, whose records stand in all ways; the numbers of those that are not over."""

    path: Path
    live: frozenset[int]
    dead: frozenset[int]


def spooled(number: int) -> Record:
    lane = b"lane %d" % (number % LANES) if number % 3 == 0 else b""
    return record(b"%d" % number + b"x" * (100 + number % 200), lane=lane, target="topic X")


def waiting(number: int) -> Record:
    """As the delay service keeps an envelope."""
    due_ms, offset = (1000 + number).to_bytes(8), number.to_bytes(8)
    marks = ((IDENTITY, due_ms + b"%016d" % number), (b"qT/b/%d" % (number % 3), offset + due_ms))
    return Record("k", b"%d" % number + b"x" * (100 + number % 200), 1000, "topic X", marks=marks)


def number_of(work: LeasedRecord) -> int:
    return int(work.record.payload.rstrip(b"x"))


@pytest.fixture(scope="module", params=[spooled, waiting], ids=["spool", "delay"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Its process ends without a word: a store that is open is copied."""
    path = tmp_path_factory.mktemp("whole") / "store"
    live, dead = set(range(4 * ADDED)), set()
    store = Store(path, sync="never")
    for begin in range(0, 4 * ADDED, ADDED):
        if begin:  # what the log has becomes a table
            store.close()
            store = Store(path, sync="never")
        for first in range(begin, begin + ADDED, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            store.add([(request.param(number), 1000 + number) for number in numbers])
        now_ms = 2000 + 3 * begin
        outcomes = []
        for turn, work in enumerate(store.take(now_ms, 60)):
            done, dies = turn % 3 == 0, turn % 9 == 2
            live -= {number_of(work)} if done or dies else set()
            dead |= {number_of(work)} if dies else set()
            again = RetryLater(now_ms + (100 if turn % 3 else 5000), "busy")
            outcomes.append((work, Done() if done else Dead("no") if dies else again))
        store.settle(outcomes, now_ms)
    copy = shutil.copytree(path, path.with_name("killed"))
    store.close()
    assert len([*copy.glob("*.sst")]) == 3
    assert any(log.stat().st_size for log in copy.glob("*.log"))
    return Whole(copy, frozenset(live), frozenset(dead))


def drained(store: Store) -> list[int]:
    """All that it gives, however often it meets damage."""
    found: list[int] = []
    for _ in range(10 * ADDED):
        try:
            works = store.take(LATER, 50)
            if not works and store.next_due_ms() is None:
                return found
        except SpoolError:
            continue
        while works:
            try:
                store.settle([(work, Done()) for work in works], LATER)
                break
            except SpoolError:
                continue
        found += map(number_of, works)
    raise AssertionError("it never ends")


def said_to_be_lost(text: str) -> tuple[int, bool] | None:
    """How many, and whether that is exact; None where nothing is said."""
    text = re.sub("an unknown number(, perhaps none,)?", "at least 0", text)
    said = re.findall(r"(?:are there|are lost), (at least )?(\d+) (?:are lost|of records)", text)
    return (sum(int(count) for _, count in said), not any(least for least, _ in said)) if said else None


def out_of_order(numbers: Iterable[int]) -> list[int]:
    last: dict[int, int] = {}
    found = []
    for number in numbers:
        if number < last.get(number % LANES, -1):
            found.append(number)
        last[number % LANES] = number
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_damaged_store_yields_readable_records_and_reports_lost(
    whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    rng = random.Random(seed)
    for number in range(5):
        caplog.clear()
        path = shutil.copytree(whole.path, tmp_path / str(number))
        case = f"{damage(rng, path)}, seed {seed}"
        store = Store(path, sync="never")
        given = drained(store)
        buried = {
            int(each.payload.rstrip(b"x")) for _, each, _ in dead_records(database(store)) if isinstance(each, Record)
        }
        assert (store.totals.depth, store.totals.size) == (0, 0), case
        assert store.totals.dead == len(buried), case
        store.close()
        lost = (whole.live | whole.dead) - set(given) - buried
        assert max(Counter(given).values(), default=1) == 1, case
        assert not out_of_order(each for each in given if each % 3 == 0 and each in whole.live), case
        said = said_to_be_lost(caplog.text)
        assert said is not None or not lost, (case, len(lost))
        if said is not None:
            assert said[0] == len(lost) if said[1] else said[0] <= len(lost), (case, len(lost), said)
