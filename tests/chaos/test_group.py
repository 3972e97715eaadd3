"""A short run of what ``make soak ONLY=group`` does for minutes: one kill of each kind, and who was killed is replaced."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import LocalBroker
from tests.chaos.group_books import REBALANCED_S
from tests.chaos.group_crew import Crew
from tests.chaos.group_run import run

COUNT, SECONDS = 12_000, 70.0


@pytest.mark.timeout(1200)
def test_mixed_group_loses_nothing_whoever_is_killed(make_cluster: Callable[..., LocalBroker], tmp_path: Path) -> None:
    def calm(crew: Crew) -> str:
        crew.rest(REBALANCED_S + 5, REBALANCED_S + 5)
        return "calm"

    def plan(crew: Crew) -> Iterator[Callable[[], str]]:
        yield partial(calm, crew)
        # Brokers last: they forget the locks of the dead, which the ordered group would wait a minute for.
        yield crew.left_and_back
        yield partial(crew.killed_and_replaced, "ours")
        yield partial(crew.killed_and_replaced, "java")
        for broker in crew.mq.brokers:
            yield partial(crew.broker, broker)

    in_calm_times = run(make_cluster(brokers=2), tmp_path, COUNT, SECONDS, random.Random(1), plan)
    assert all(in_calm_times.values()), in_calm_times
