"""Runs decoders on broken inputs for as long as wanted: ``python -m tests.fuzz.fuzz_decoders [seconds] [decoder ...]``.

The number of a round is the seed of its input, so each input can be made again. An input that a decoder may not answer so, or
that takes more time or memory than its size allows, is printed in hexadecimal with its seed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, outcome

# What one input may take: seconds of CPU, and bytes besides a multiple of its size. The memory is that of the process since the
# first input, so it includes what earlier inputs left behind.
MAX_CPU_S = 1.0
MAX_BYTES, MAX_TIMES_SIZE = 64 << 20, 20


class TooCostly(AssertionError):
    """An input took more time or memory than its size allows."""


def run(decoder: str, rounds: range, until: float = float("inf")) -> int:
    """Rounds done before ``until``; each is one mutated input, made from the number of the round."""
    target = TARGETS[decoder]
    for sample in target.samples:  # the first calls import what they need
        outcome(target, sample)
    with contextlib.suppress(OSError):  # Linux: peaks of whatever ran before in this process do not count
        Path("/proc/self/clear_refs").write_text("5")
    before, largest = _peak_bytes(), 0
    for seed in rounds:
        data = mutate(random.Random(seed), target.samples)
        largest = max(largest, len(data))
        began = time.thread_time()
        try:
            outcome(target, data)
            _check(time.thread_time() - began, _peak_bytes() - before, largest)
        except BaseException:
            print(f"{decoder}, seed {seed}: {data[:5000].hex()}", file=sys.stderr)
            raise
        if time.monotonic() > until:
            return seed - rounds.start + 1
    return len(rounds)


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _check(cpu_s: float, grown: int, size: int) -> None:
    if cpu_s > MAX_CPU_S:
        raise TooCostly(f"{cpu_s:.1f} s of CPU; expected at most {MAX_CPU_S:g}")
    if grown > MAX_BYTES + MAX_TIMES_SIZE * size:
        raise TooCostly(f"{grown} bytes; expected at most {MAX_BYTES} and {MAX_TIMES_SIZE} times {size}")


def main(arguments: Sequence[str]) -> None:
    seconds = float(arguments[0]) if arguments else 60.0
    chosen = arguments[1:] or list(TARGETS)
    end = time.monotonic() + seconds
    done = 0
    for start in itertools.count(0, 1000):
        done += sum(run(decoder, range(start, start + 1000), end) for decoder in chosen)
        if time.monotonic() > end:
            print(f"{done} inputs, {len(chosen)} decoders")
            return


if __name__ == "__main__":
    main(sys.argv[1:])
