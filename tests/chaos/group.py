"""Minutes of a group of RocketMQ's members and ours: ``make soak ONLY=group SEED=7 SECONDS=600``.

Two of each kind on twelve queues of two brokers, each in a concurrent and in an ordered group, while members join, leave
and are killed, and brokers are killed and restarted. At the end, by message id: nothing lost, every repeat explained, one
owner for each queue in calm times, order kept. ``make test`` runs a short one (``test_group.py``).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import LocalBroker
from tests.chaos.group_crew import Crew
from tests.chaos.group_run import run, say

SECONDS = float(os.environ.get("CHAOS_SECONDS") or 600)
SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 30))
A_SECOND = 1000 / 3  # messages: 200,000 in ten minutes
CALM_S = 60.0  # longer than anything is felt by the concurrent group


@pytest.mark.timeout(2 * SECONDS + 900)
def test_group(make_cluster: Callable[..., LocalBroker], tmp_path: Path) -> None:
    say(f"SEED={SEED} SECONDS={SECONDS:g}")
    rng = random.Random(SEED)

    def plan(crew: Crew) -> Iterator[Callable[[], str]]:
        def rest() -> str:
            most_s = rng.choice((5.0, 5.0, CALM_S + 30.0))
            crew.rest(min(CALM_S, most_s), most_s)
            return "a rest"

        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            yield rest
            yield crew.one

    run(make_cluster(brokers=2), tmp_path, round(A_SECOND * SECONDS), SECONDS, rng, plan)
