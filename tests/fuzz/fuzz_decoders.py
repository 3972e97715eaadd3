"""Runs decoders on broken inputs for as long as wanted: ``python -m tests.fuzz.fuzz_decoders [seconds] [decoder ...]``.

The number of a round is the seed of its input, so each input can be made again. If a decoder raises an
unexpected error, or needs more time or memory than the size of its input allows, the input is printed in hexadecimal with its
seed.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Sequence

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, outcome
from tests.harness import forget_process_peak, process_peak_bytes

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
    forget_process_peak()
    before, largest = process_peak_bytes(), 0
    for seed in rounds:
        data = mutate(random.Random(seed), target.samples)
        largest = max(largest, len(data))
        began = time.thread_time()
        try:
            outcome(target, data)
            _check(time.thread_time() - began, process_peak_bytes() - before, largest)
        except BaseException:
            print(f"{decoder}, seed {seed}: {data[:5000].hex()}", file=sys.stderr)
            raise
        if time.monotonic() > until:
            return seed - rounds.start + 1
    return len(rounds)


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
