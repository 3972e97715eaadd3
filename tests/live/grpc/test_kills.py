"""Consumers of a Proxy's messages, the Proxy and the broker are killed by chance while messages come: nothing is lost.

Three kills; with ``make soak`` 20, the broker's too, and the times of the product. The seed is printed, CHAOS_SEED takes it
again.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline, wait_until
from rocketmq_spark.base.codes import DLQ_PREFIX
from tests.chaos.group_run import say
from tests.fix_clusters import WITH_TIMERS
from tests.live.grpc.crew import Account, Crew, Popper, Sending, account
from tests.live.grpc.proxied import forgotten, new_topic
from tests.reading import read
from tests.scale import SCALE

__all__ = ["forgotten"]
LONG = SCALE >= 1
SEED = int(os.environ.get("CHAOS_SEED") or random.randrange(1 << 30))
KILLS, PAUSE_S, DRAIN_S = (20, 8.0, 600.0) if LONG else (3, 0.5, 240.0)
INVISIBLE_S, EVERY_S = (30.0, 0.01) if LONG else (5.0, 0.02)
RETRIES = 5 if LONG else 3  # what is handed out that often in vain is a dead letter, whoever died
LEAST_INVISIBLE = {} if LONG else {"minInvisibleTimeMillsForRecv": 1000}


def accounted(popper: Popper, sending: Sending) -> Account:
    topic = DLQ_PREFIX + popper.group
    dead = read(popper.mq, subscribe=topic) if topic in popper.mq.admin.topics() else []
    return account(set(sending.ids), sending.poison, popper.took(), [row["msgId"] for row in dead])


def victims(crew: Crew) -> list[str]:
    """Each at least once; the short form spares the broker, after whose death POP gives out again what it gave out lately."""
    must = crew.victims if LONG else crew.victims[:KILLS]
    chosen = must + [crew.rng.choice(crew.victims) for _ in range(KILLS - len(must))]
    crew.rng.shuffle(chosen)
    return chosen


@pytest.mark.timeout(1800)
def test_nothing_is_lost_and_what_always_fails_is_a_dead_letter(make_cluster, tmp_path: Path):
    say(f"SEED={SEED}")
    mq = make_cluster(proxy=LEAST_INVISIBLE, conf=WITH_TIMERS)  # by which popped messages come again
    topic = new_topic(mq)
    crew = Crew.of(mq, topic, tmp_path, INVISIBLE_S, random.Random(SEED))
    for popper in crew.poppers:
        mq.admin.create_group(popper.group, settings={"retryMaxTimes": RETRIES})
    try:
        crew.start()
        sending = Sending(mq, topic, EVERY_S)
        try:
            for victim in victims(crew):
                crew.kill(victim, PAUSE_S)
                say(f"{victim} killed")
            assert crew.kills.total() == KILLS
        finally:
            sending.stop()
        over = {popper.kind: lambda a=popper: _all_there(accounted(a, sending)) for popper in crew.poppers}
        done = {kind: wait_until(there, Deadline.after(DRAIN_S), 0.2) for kind, there in over.items()}
        found = {popper.kind: accounted(popper, sending) for popper in crew.poppers}
    finally:
        crew.end()
    for kind, one in found.items():
        say(
            f"{kind}: {len(sending.ids)} sent, {len(sending.poison)} poison, {one.again} came again; {dict(crew.kills)}"
        )
        assert done[kind], one
        assert not one.given_up, "dead letters that never failed"
        assert max(one.attempts.values()) == RETRIES + 1, one.attempts


def _all_there(one: Account) -> bool:
    return not one.lost and not one.not_given_up
