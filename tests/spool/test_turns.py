"""Of which targets records may be handed out."""

from __future__ import annotations

from rocketmq_spark.spool.turns import Turns, Window


def test_a_target_gets_what_its_window_allows_and_leaves_a_share_to_others() -> None:
    turns = Turns({"a": Window(2), "paused": Window(1, 3, 50), "sooner": Window(1, 3, 40), "": Window(1)}, 3, ["a"], 30)
    for target, accepted in (("a", 1), ("b", 3), ("", 1), ("paused", 0), ("sooner", 0)):
        for number in range(5):
            assert turns.accepts(target) == (number < accepted), target
            turns.took(target) if number < accepted else None
    assert turns.refused == {"a", "b", "", "paused", "sooner"}
    assert turns.next_ms == 40
    assert all(Turns({}, 3, [""] * 99, 30).accepts("") for _ in range(9)), "no target in particular"
