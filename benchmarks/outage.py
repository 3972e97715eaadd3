"""A spool and a node of the delay service with a million due records of a target that is away: what waiting costs, and when the
records of other targets leave. Also how long a folder of an earlier release takes to get the index by target, and what 100,000
targets cost.

``python -m benchmarks.outage [--records N]`` prints the figures. The disk is that of the temporary folder; each case has its own
process. Attempts for the target that is away fail at once, or after the three seconds of a send's time-out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.spool import resident_mib
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.model import Resent
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.pending import migrate_keys
from rocketmq_spark.spool.records import IDENTITY, PENDING, TOTALS, VERSION, PendingKey, Record, area_end
from rocketmq_spark.spool.redelivery import MAX_IN_FLIGHT, Redelivery
from rocketmq_spark.spool.store import Store

AWAY, OTHER = "topic away", "topic other"
SECONDS, EVERY_S, SETTLE_S = 60.0, 2.0, 10.0
AT_ONCE, BODY, TARGETS = 1000, b"x" * 256, 100_000


class Case(NamedTuple):
    """The records have ``marks`` and wait only for their time, as those of a node; an attempt fails after ``fails_s``."""

    marks: bool
    max_out: int
    fails_s: float


CASES = {
    "spool, attempts fail at once": Case(False, MAX_IN_FLIGHT, 0.0),
    "spool, attempts time out after 3 s": Case(False, MAX_IN_FLIGHT, 3.0),
    "delay node, attempts fail at once": Case(True, 512, 0.0),
    "delay node, attempts time out after 3 s": Case(True, 512, 3.0),
}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def record(number: int, marks: bool, target: str = AWAY) -> Record:
    identity = ((IDENTITY, now_ms().to_bytes(8) + number.to_bytes(8)), (b"q", number.to_bytes(8))) if marks else ()
    return Record("k", BODY, now_ms(), target, marks=identity)


def fill(store: Store, count: int, marks: bool) -> float:
    began = time.perf_counter()
    for first in range(0, count, AT_ONCE):
        store.add([(record(first + number, marks), now_ms()) for number in range(AT_ONCE)])
    return time.perf_counter() - began


def outage(folder: Path, count: int, case: Case) -> None:
    store = Store(folder / "store", "never")
    took = fill(store, count, case.marks)
    sent, attempts = threading.Event(), 0

    def handle(records: Sequence[Record], done: Callable[[Resent], None]) -> None:
        nonlocal attempts
        if records[0].target == OTHER:
            done(Resent())
            sent.set()
            return
        attempts += 1
        threading.Timer(case.fails_s, done, [Resent(None, "no master", is_temporary=True)]).start()

    redelivery = Redelivery(store, {"k": handle}, now_ms, Timer("outage"), max_in_flight=case.max_out)
    redelivery.wake()
    lateness = list(_lateness(store, redelivery, case, sent, SETTLE_S))
    cpu, began, before = time.process_time(), time.perf_counter(), written()
    attempts = 0
    lateness += _lateness(store, redelivery, case, sent, SECONDS)
    spent = (time.process_time() - cpu) / (time.perf_counter() - began)
    kib_s = (written() - before) / (time.perf_counter() - began) / 1024
    print(
        f"  {100 * spent:.2f} % of a core, {kib_s:.1f} KiB written a second, {attempts / SECONDS:.1f} attempts a second; "
        f"{len(lateness)} records of another target were sent at most {1000 * max(lateness):.0f} ms late; "
        f"filled in {took:.0f} s, {resident_mib():.0f} MiB",
        flush=True,
    )
    redelivery.close(Deadline.after(5))
    store.close()


def _lateness(
    store: Store, redelivery: Redelivery, case: Case, sent: threading.Event, seconds: float
) -> Iterator[float]:
    """Adds a record of another target from time to time, and yields after how many seconds it was sent."""
    end = time.perf_counter() + seconds
    for number in range(1 << 40, 1 << 41):
        if time.perf_counter() >= end:
            return
        sent.clear()
        began = time.perf_counter()
        store.add([(record(number + int(began), case.marks, OTHER), now_ms())])
        redelivery.wake()
        assert sent.wait(120), "a record of another target was not sent"
        yield time.perf_counter() - began
        time.sleep(EVERY_S)


def written() -> int:
    with Path("/proc/self/io").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("wchar"))


def upgrade(folder: Path, count: int, marks: bool) -> None:
    """Writes the keys as releases before 0.2 did, and opens the folder."""
    with contextlib.closing(Store(folder / "store", "never")) as store:
        fill(store, count, marks)
    with contextlib.closing(Database(folder / "store")) as db:
        puts, deletes = [], []
        for key, state in db.scan(PENDING, area_end(PENDING)):
            pending = PendingKey.parse(key)
            target = pending.target.encode() if pending.waits_for_answer else b""
            puts.append((pending.due.mark_value, state[:11] + len(target).to_bytes(2) + target))
            deletes.append(key)
            if len(puts) >= AT_ONCE:
                db.write(puts, deletes)
                puts, deletes = [], []
        db.write([*puts, (TOTALS, bytes((VERSION,)) + (db.get(TOTALS) or b"")[1:])], deletes)
    before, began = resident_mib(), time.perf_counter()
    with contextlib.closing(Database(folder / "store")) as db:
        migrate_keys(db)
        took = time.perf_counter() - began
    print(
        f"  {count:,} records get the index in {took:.1f} s; resident {before:.0f} MiB before, {resident_mib():.0f} after"
    )


def targets(folder: Path, marks: bool = False) -> None:
    with contextlib.closing(Store(folder / "store", "never")) as store:
        for first in range(0, TARGETS, AT_ONCE):
            numbers = range(first, first + AT_ONCE)
            store.add([(record(number, marks, f"topic {number:06}"), 1) for number in numbers])
    before, began = resident_mib(), time.perf_counter()
    with contextlib.closing(Store(folder / "store", "never")) as store:
        opened, taking = time.perf_counter() - began, time.perf_counter()
        first = len(store.take(now_ms(), MAX_IN_FLIGHT))
        took = time.perf_counter() - taking
        print(
            f"  {TARGETS:,} targets with a record each: opened in {opened:.2f} s, {first} taken in {1000 * took:.1f} ms, "
            f"{resident_mib() - before:.0f} MiB"
        )


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--case")
    given = arguments.parse_args()
    cases: dict[str, Callable[[Path], None]] = {
        name: functools.partial(outage, count=given.records, case=case) for name, case in CASES.items()
    }
    cases |= {
        "upgrade of a spool": functools.partial(upgrade, count=given.records, marks=False),
        "upgrade of a delay node's folder": functools.partial(upgrade, count=given.records, marks=True),
        "many targets": targets,
    }
    if given.case:
        with tempfile.TemporaryDirectory() as name:
            cases[given.case](Path(name))
        return
    for name in cases:
        print(f"{name}:", flush=True)
        command = [sys.executable, "-m", "benchmarks.outage", "--records", str(given.records), "--case", name]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
