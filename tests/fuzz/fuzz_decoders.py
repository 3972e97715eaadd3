"""Runs decoders on broken inputs for as long as wanted: ``python -m tests.fuzz.fuzz_decoders [seconds] [decoder ...]``.

An input that a decoder may not answer so is printed in hexadecimal with the seed that made it.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Sequence

from tests.fuzz.mutate import mutate
from tests.fuzz.targets import TARGETS, outcome


def run(decoder: str, rounds: range, until: float = float("inf")) -> int:
    """Rounds done before ``until``; each is one mutated input, made from the number of the round."""
    target = TARGETS[decoder]
    for seed in rounds:
        data = mutate(random.Random(seed), target.samples)
        try:
            outcome(target, data)
        except BaseException:
            print(f"{decoder}, seed {seed}: {data.hex()}", file=sys.stderr)
            raise
        if time.monotonic() > until:
            return seed - rounds.start + 1
    return len(rounds)


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
