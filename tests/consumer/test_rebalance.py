from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.rebalance import (
    MAX_PULL_SILENCE_MS,
    UNKNOWN_ALLOCATION,
    Allocation,
    QueueChange,
    allocate_broadcasting,
    allocate_clustering,
    is_balanced,
    queue_change,
    rebalance_wait_s,
    unsubscribed_queues,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.allocation import STRATEGIES, allocate
from tests.models import SteppingMachine, model_test, step
from tests.queues import names, q, qs
from tests.scale import examples

averagely = partial(allocate, "averagely")
EIGHT = qs("a:0-3 b:0-3")


def of_all(strategy: str, queues: Sequence[MessageQueue], members: Sequence[str]) -> list[str]:
    shares = [allocate_clustering(partial(allocate, strategy), me, queues, members).queues for me in members]
    return [names(sorted(share or ())) for share in shares]


def owning(*queues: MessageQueue, now_ms: int = 0) -> dict[MessageQueue, ProcessQueue]:
    return {queue: ProcessQueue(queue, now_ms) for queue in queues}


def test_three_members_share_eight_queues_averagely() -> None:
    assert of_all("averagely", EIGHT[::-1], ["m3", "m1", "m2"]) == ["b:2 b:3", "a:0 a:1 a:2", "a:3 b:0 b:1"]


def test_or_by_circle() -> None:
    assert of_all("averagelyByCircle", EIGHT, ["m1", "m2", "m3"]) == ["a:0 a:3 b:2", "a:1 b:0 b:3", "a:2 b:1"]


def test_who_comes_after_the_last_queue_has_none() -> None:
    assert of_all("averagely", EIGHT[:2], ["m1", "m2", "m3"]) == ["a:0", "a:1", ""]


@pytest.mark.parametrize("strategy", ["averagely", "averagelyByCircle", "consistentHash"])
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8, 9])
def test_every_queue_has_one_owner(strategy: str, members: int) -> None:
    found = " ".join(of_all(strategy, EIGHT, [f"m{i}" for i in range(members)])).split()
    assert sorted(found) == names(EIGHT).split()


@pytest.mark.parametrize(("queues", "members"), [(None, ["me"]), (EIGHT, None), (EIGHT, []), (None, None)])
def test_what_is_not_known_changes_nothing_and_is_no_trouble(queues, members) -> None:
    share = allocate_clustering(averagely, "me", queues, members)
    assert share == UNKNOWN_ALLOCATION
    assert queue_change(owning(*EIGHT), "T", share, 0) == QueueChange()
    assert is_balanced(owning(*EIGHT), "T", share)
    assert allocate_broadcasting(None) == UNKNOWN_ALLOCATION


def test_failing_strategy_keeps_queues_and_is_retried_soon() -> None:
    def broken(*_: object) -> list[MessageQueue]:
        raise ZeroDivisionError("mine")

    owned = owning(q("a:0"))
    share = allocate_clustering(broken, "me", EIGHT, ["me"])
    assert str(share.problem) == "ZeroDivisionError: mine"
    assert queue_change(owned, "T", share, 0) == QueueChange()
    assert not is_balanced(owned, "T", share)


def test_topic_without_queues_is_such_a_case() -> None:
    share = allocate_clustering(averagely, "me", [], ["me"])
    assert share.queues is None
    assert "mqAll empty" in str(share.problem)


def test_queues_of_others_go_and_new_ones_come() -> None:
    found = queue_change(owning(*qs("a:0-1"), q("x:0", "U")), "T", Allocation(frozenset(qs("a:1-2"))), 0)
    assert found == QueueChange(queues_to_drop=(q("a:0"),), queues_to_add=(q("a:2"),))
    assert found
    assert not QueueChange()


def test_a_queue_whose_pulls_stopped_is_dropped_and_added_again() -> None:
    owned = owning(q("a:0")) | owning(q("a:1"), now_ms=1)
    assert not queue_change(owned, "T", Allocation(frozenset(owned)), MAX_PULL_SILENCE_MS)
    found = queue_change(owned, "T", Allocation(frozenset(owned)), MAX_PULL_SILENCE_MS + 1)
    assert found == QueueChange((q("a:0"),), (q("a:0"),))


def test_busy_dropped_queue_is_removed_before_it_is_added_again() -> None:
    owned = owning(*qs("a:0-1"))
    owned[q("a:0")].dropped = True
    share = Allocation(frozenset(owned))
    # Who adds it looks whether it is gone.
    assert queue_change(owned, "T", share, 0) == QueueChange(queues_to_drop=(q("a:0"),), queues_to_add=(q("a:0"),))
    assert not is_balanced(owned, "T", share)
    del owned[q("a:0")]
    assert queue_change(owned, "T", share, 0) == QueueChange(queues_to_add=(q("a:0"),))


def test_queues_of_topics_that_are_not_subscribed_to_go() -> None:
    owned = owning(q("a:0"), q("b:1", "U"), q("a:0", "U"))
    assert unsubscribed_queues(owned, {"T"}) == (q("a:0", "U"), q("b:1", "U"))


def test_a_broadcasting_member_has_all_queues() -> None:
    assert allocate_broadcasting(EIGHT).queues == frozenset(EIGHT)


def test_the_next_run_comes_in_twenty_seconds_or_one() -> None:
    assert (rebalance_wait_s(True), rebalance_wait_s(False)) == (20.0, 1.0)
    assert (rebalance_wait_s(True, 7.0), rebalance_wait_s(False, 7.0), rebalance_wait_s(False, 0.5)) == (7.0, 1.0, 0.5)


def test_without_notices_the_group_is_looked_at_more_often() -> None:
    assert [rebalance_wait_s(True, interval_s, receives_notices=False) for interval_s in (20.0, 3.0)] == [5.0, 3.0]
    assert rebalance_wait_s(False, receives_notices=False) == 1.0


class GroupMachine(SteppingMachine):
    """Members that see the same lists now and then: once all have looked, every queue has one owner, the model's."""

    @initialize(strategy=st.sampled_from([name for name in STRATEGIES if name.startswith(("averagely", "consistent"))]))
    def begin(self, strategy: str) -> None:
        self.allocate = partial(allocate, strategy)
        self.queues = set(EIGHT)
        self.members: dict[str, dict[MessageQueue, ProcessQueue]] = {}

    @step(name=st.sampled_from("uvwxyz"))
    def join(self, name: str) -> None:
        self.members.setdefault(name, {})

    @step(name=st.sampled_from("uvwxyz"))
    def leave(self, name: str) -> None:
        self.members.pop(name, None)

    @step(queue=st.sampled_from(EIGHT))
    def come_or_go(self, queue: MessageQueue) -> None:
        if self.queues != {queue}:
            self.queues ^= {queue}

    @step(data=st.data())
    def one_looks(self, data: st.DataObject) -> None:
        if self.members:
            self.look(data.draw(st.sampled_from(sorted(self.members))))

    def look(self, name: str) -> None:
        owned = self.members[name]
        share = allocate_clustering(self.allocate, name, self.queues, list(self.members))
        found = queue_change(owned, "T", share, 0)
        assert set(found.queues_to_drop) <= set(owned)
        assert not set(found.queues_to_add) & set(owned)
        for queue in found.queues_to_drop:
            del owned[queue]
        owned.update(owning(*found.queues_to_add))
        self.did["dropped"] += len(found.queues_to_drop)
        assert is_balanced(owned, "T", share)
        assert not queue_change(owned, "T", share, 0), "1-11: nothing moves while nothing changes"

    @step()
    def all_look(self) -> None:
        for name in self.members:
            self.look(name)
        owners = sorted(queue for owned in self.members.values() for queue in owned)
        assert owners == (sorted(self.queues) if self.members else [])
        self.did["shared"] += len(self.members) > 1

    @invariant()
    def no_queue_twice_in_a_member(self) -> None:
        assert all(
            held.queue == queue for owned in getattr(self, "members", {}).values() for queue, held in owned.items()
        )


TestGroup = model_test(
    GroupMachine,
    settings(max_examples=examples(300), stateful_step_count=30, deadline=None),
    shared=50,
    dropped=100,
)
