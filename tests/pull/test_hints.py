"""What brokers suggest, and whether to go there."""

from __future__ import annotations

import pytest

from rocketmq_spark.pull.replica import ReplicaHints
from rocketmq_spark.pull.suspicions import LossSuspicions

QUIET = LossSuspicions(15.0, lambda: iter(()))


def suspicious() -> LossSuspicions:
    trials = LossSuspicions(15.0, lambda: iter(()))
    trials.suspect_loss((0, 0), 0.0)
    return trials


@pytest.mark.parametrize("goes", [True, False])
def test_who_opens_connections_says_whether_to_go(goes: bool) -> None:
    told: list[int | None] = []
    hints = ReplicaHints(lambda broker_id: told.append(broker_id) or goes)
    hints.follow(1, QUIET)
    assert (told, hints.last_suggested_broker, hints.reconnect_needed) == ([1], 1, goes)


def test_a_suggestion_does_not_undo_what_another_began() -> None:
    hints = ReplicaHints(lambda broker_id: broker_id == 1)
    hints.follow(1, QUIET)
    hints.follow(2, QUIET)
    assert (hints.last_suggested_broker, hints.reconnect_needed) == (2, True)


def test_suspected_loss_makes_the_read_follow_only_the_master() -> None:
    told: list[int | None] = []
    hints = ReplicaHints(lambda broker_id: bool(told.append(broker_id)))
    hints.follow(1, suspicious())
    assert (told, hints.last_suggested_broker) == ([], None)
    hints.follow(0, suspicious())
    assert (told, hints.last_suggested_broker) == ([0], 0)


@pytest.mark.parametrize("slave", [True, False])
def test_a_slave_is_doubted_and_its_master_asked(slave: bool) -> None:
    hints = ReplicaHints(lambda broker_id: broker_id is None and slave)
    hints.follow(3, QUIET)
    assert hints.return_to_master() is slave
    assert (hints.last_suggested_broker, hints.reconnect_needed) == ((0, True) if slave else (3, False))


def test_without_anybody_to_ask_nothing_moves() -> None:
    hints = ReplicaHints(None)
    hints.follow(1, QUIET)
    assert (hints.return_to_master(), hints.last_suggested_broker, hints.reconnect_needed) == (False, 1, False)
