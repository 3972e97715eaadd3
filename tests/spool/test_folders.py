"""Worker folders below one spoolDir: claimed when their process is dead, and drained into one's own."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

from rocketmq_spark.spool.folders import adopt, claim, spools
from rocketmq_spark.spool.store import Done, Store
from tests.spool.bench import record

ROOT = Path(__file__).parents[2]
make = functools.partial(Store, sync="never")


def fill(path: Path, count: int) -> None:
    command = [sys.executable, "-m", "tests.spool.filler", str(path), str(count), "die"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)


def everything(store: Store) -> list[int]:
    found = []
    while works := store.take(10**9, 1000):
        found += [int(work.record.payload.rstrip(b"x")) for work in works]
        store.settle([(work, Done()) for work in works], 10**9)
    return found


def test_a_first_process_makes_a_folder_and_the_next_takes_it_over(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert spools(folder) == []
    store = claim(folder, make)
    store.add([(record(b"1"), 1)])
    assert spools(folder) == [store.path]
    assert spools(store.path) == [store.path]
    store.close()
    again = claim(folder, make)
    assert (again.path, everything(again)) == (store.path, [1])
    again.close()


def test_a_living_process_keeps_its_own(tmp_path: Path) -> None:
    first = claim(tmp_path, make)
    second = claim(tmp_path, make)
    assert first.path != second.path
    assert adopt(tmp_path, second, make) == 0
    assert len(spools(tmp_path)) == 2
    first.close()
    second.close()


def test_3_34_what_dead_processes_left_is_moved_and_their_folders_go(tmp_path: Path) -> None:
    for name in ("worker-1", "worker-2"):
        fill(tmp_path / name, 1200)
    mine = make(tmp_path / "worker-3")
    assert adopt(tmp_path, mine, make) == 2400
    assert spools(tmp_path) == [mine.path]
    found = everything(mine)
    assert sorted(found) == sorted([*range(1200), *range(1200)])
    lane = [number for number in found if number % 3 == 0]
    assert lane == [*range(0, 1200, 3)] * 2  # of a lane in its order, one process after the other
    mine.close()
