"""The accounts of a group's soak notice what they are there for."""

from __future__ import annotations

import json

import pytest

from tests.chaos.group_books import (
    Event,
    Place,
    Took,
    What,
    calm,
    disordered,
    explained,
    failed,
    lost,
    read,
    reason,
    repeats,
    shared,
    within,
)

A, B = Place("broker-a", 0), Place("broker-b", 0)
KILL = Event(What.KILL, "m1", 100.0, 100.0)
BROKER = Event(What.BROKER, "broker-a", 100.0, 110.0)


def took(at: float, member: str = "m1", offset: int = 0, place: Place = A, times: int = 0) -> Took:
    return Took(at, member, place, offset, f"id-{place.broker}-{offset}", times)


def test_lines_are_read_and_one_that_was_cut_off_is_none() -> None:
    said = {"at": 1500, "group": "g", "id": "x", "broker": "broker-a", "queue": 0, "offset": 7, "times": 0, "body": "b"}
    line = json.dumps(said)
    text = f'{{"started": 1}}\nnoise\n{line}\n{line.replace("g", "h", 1)}\n' + json.dumps(said | {"group": "o"}) + "\n"
    assert list(read("m1", "g", text + line)) == [Took(1.5, "m1", A, 7, "x")]


def test_what_was_sent_must_be_consumed_by_its_id() -> None:
    assert lost(["id-broker-a-0", "id-broker-a-1"], [took(1), took(2), took(3, place=B)]) == ["id-broker-a-1"]
    assert lost(["id-broker-a-0"], [took(1)]) == []


def test_what_was_sent_back_is_reported() -> None:
    assert failed([took(1), took(2, times=1)]) == [took(2, times=1)]


def test_a_repeat_is_of_one_place() -> None:
    again = took(3, "m2")
    assert repeats([again, took(1), took(2, offset=1), took(2, place=B)]) == [(took(1), again)]
    same_id_elsewhere = took(4, offset=9)._replace(id="id-broker-a-0")
    assert repeats([took(1), same_id_elsewhere]) == []


@pytest.mark.parametrize(
    ("before", "again", "event", "ordered", "why"),
    [
        (99, 101, KILL, False, "after a kill"),
        (85, 125, KILL, False, "after a kill"),
        (84, 101, KILL, False, None),  # its offset was stored by then
        (99, 126, KILL, False, None),  # everybody had got over it
        (99, 126, KILL, True, "after a kill"),  # the lock of the dead held it up
        (99, 186, KILL, True, None),
        (98, 99, KILL, False, None),  # before it happened
        (99, 101, KILL._replace(who="m3"), False, "hand-over"),
        (99, 101, KILL._replace(what=What.LEAVE), False, "hand-over"),
        (99, 165, BROKER, False, "broker restart"),
        (99, 166, BROKER, False, None),
        (99, 165, BROKER._replace(who="broker-b"), False, "hand-over"),
    ],
)
def test_a_repeat_needs_an_event_at_its_time(
    before: float, again: float, event: Event, ordered: bool, why: str | None
) -> None:
    assert reason(took(before), took(again, "m2"), [event], ordered) == why


def test_repeats_are_counted_by_cause_and_unexplained_reported() -> None:
    fine, odd = [took(99), took(101, "m2")], [took(200, offset=1), took(201, offset=1)]
    counts, none = explained([*fine, *odd], [KILL], ordered=False)
    assert counts == {"after a kill": 1}
    assert none == [tuple(odd)]


def test_it_is_calm_between_the_events_once_they_are_over() -> None:
    events = [KILL, KILL._replace(begun=110, ended=112), BROKER._replace(begun=200, ended=205)]
    assert calm(events, 300, ordered=False) == [(137, 200), (260, 300)]
    assert calm(events, 250, ordered=True) == [(197, 200)]
    assert calm([], 300, ordered=False) == []


def test_two_members_have_one_queue_in_a_calm_span() -> None:
    spans = [(137.0, 200.0), (260.0, 300.0)]
    assert shared([took(140), took(150, "m2", 1)], spans) == [(A, ("m1", "m2"))]
    assert shared([took(140), took(130, "m2", 1), took(270, "m3", 2)], spans) == []
    assert shared([took(140), took(150, "m2", place=B)], spans) == []
    assert [within([took(140), took(200), took(260)], some) for some in (spans, spans[1:], [])] == [2, 1, 0]


def test_what_comes_for_the_first_time_comes_in_order() -> None:
    fine = [
        took(1, offset=0),
        took(2, offset=1),
        took(3, "m2", 0),
        took(4, "m2", 1),
        took(5, "m1", 2),
        took(6, "m2", 2),
    ]
    assert disordered(fine) == []
    assert disordered([took(1, offset=1), took(2, offset=2), took(3, place=B)]) == []
    late = took(3, "m2", 1)
    assert disordered([took(1), took(2, offset=2), late, took(4, offset=3)]) == [(took(2, offset=2), late)]
