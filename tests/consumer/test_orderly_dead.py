"""Dead letters of ordered consumers: after the last try, once each, and in the way of nobody."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.codes import INNER_BATCH_MASK
from rocketmq_spark.errors import CallTimeout, DecodeError
from tests.consumer.group import GroupBench
from tests.consumer.test_orderly import A, started


@pytest.mark.parametrize("tries", [0, 3, 5])
def test_ordered_message_is_a_dead_letter_after_its_last_attempt(
    group: GroupBench, tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As Java's sends it: a copy that says how often it was tried. Brokers know of no attempt in place."""
    _, port = started(group, lambda messages, context: 1 / 0 if messages[0].body == b"bad" else None, max_retries=tries)
    group.brokers.send(A, b"bad", b"good")
    group.time.advance(3600)
    assert group.bodies() == [*[b"bad"] * (1 + tries), b"good"]
    assert [(m.body, m.reconsume_times) for m in group.brokers.dead] == [(b"bad", tries)]
    assert (port.seen("send_back"), port.seen("send_to_retry")) == ([], [b"bad"])
    assert f"of T/a/0 is a dead letter now, in topic %DLQ%g, after attempt {1 + tries}" in caplog.text


def test_a_message_that_fails_beside_others_has_its_own_tries(group: GroupBench) -> None:
    """One that came later is no dead letter because those that fail with it have failed often enough."""

    def listener(messages: Any, context: Any) -> None:
        if (
            messages[0].body == b"old"
            and messages[0].reconsume_times == 1
            and len(group.brokers.queues[A].messages) == 1
        ):
            group.brokers.send(A, b"young")
        raise ZeroDivisionError

    started(group, listener, max_retries=2, consume_batch_max_size=2)
    group.brokers.send(A, b"old")
    group.time.advance(60)
    assert [(m.body, m.reconsume_times) for m in group.brokers.dead] == [(b"old", 4), (b"young", 2)]


def test_broadcasting_member_drops_message_after_last_attempt(
    group: GroupBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how: dict[str, Any] = {"clustering": False, "offsets_folder": tmp_path, "max_retries": 3}
    _, port = started(group, lambda messages, context: 1 / 0 if messages[0].body == b"bad" else None, **how)
    group.brokers.send(A, b"bad", b"good")
    group.time.advance(60)
    assert group.bodies() == [*[b"bad"] * 4, b"good"]
    assert caplog.text.count("failed and is dropped: the group is broadcasting") == 1
    assert (port.seen("send_back"), port.seen("send_to_retry"), group.brokers.dead) == ([], [], [])


def test_what_failed_in_a_queue_that_is_gone_is_no_dead_letter(group: GroupBench) -> None:
    """Its next owner tries it."""

    def listener(messages: Any, context: Any) -> None:
        consumer._running.state.queues[A].dropped = True
        raise ZeroDivisionError

    consumer, port = started(group, listener, max_retries=0)
    group.brokers.send(A, b"bad")
    group.time.advance(0.1)
    assert (group.bodies(), group.brokers.dead, port.seen("send_to_retry")) == ([b"bad"], [], [])


def test_uncopyable_message_is_made_a_dead_letter_by_its_broker(group: GroupBench) -> None:
    _, port = started(group, lambda messages, context: 1 / 0, max_retries=1)
    group.brokers.failing["send_to_retry"] = DecodeError("no magic")
    group.brokers.send(A, b"bad")
    group.time.advance(60)
    assert port.seen("send_back") == [(b"bad", -1, 1)]
    assert group.bodies() == [b"bad"] * 2
    assert [m.body for m in group.brokers.dead] == [b"bad"]


def test_what_no_broker_takes_is_tried_in_place_until_one_does(group: GroupBench) -> None:
    started(group, lambda messages, context: 1 / 0 if messages[0].body == b"bad" else None, max_retries=1)
    group.brokers.failing |= {"send_to_retry": CallTimeout("late"), "send_back": CallTimeout("late")}
    group.brokers.send(A, b"bad", b"good")
    group.time.advance(5)
    assert set(group.bodies()) == {b"bad"}
    assert len(group.got) > 2
    group.brokers.failing.clear()
    group.time.advance(2)
    assert group.bodies()[-1] == b"good"
    assert [m.body for m in group.brokers.dead] == [b"bad"]


def test_only_refused_dead_letters_of_a_batch_repeat_in_place(group: GroupBench) -> None:
    """Java's makes dead letters of the others with each attempt; without end where a message can never become one."""
    bad: set[bytes] = {b"1", b"2", b"3"}
    consumer, port = started(
        group,
        lambda messages, context: 1 / 0 if bad & {one.body for one in messages} else None,
        max_retries=1,
        consume_batch_max_size=3,
    )
    real, refused = port.send_to_retry, [b"2"]

    def refuses(name: str, message: Any, *how: Any) -> None:
        if message.body in refused:
            raise DecodeError("no magic")
        real(name, message, *how)

    port.send_to_retry = refuses
    group.brokers.failing["send_back"] = CallTimeout("late")
    group.workers[0].held = True
    group.brokers.send(A, b"1", b"2", b"3")
    group.time.advance(0.1)
    group.workers[0].let_go()
    group.time.advance(10)
    assert [letter.body for letter in group.brokers.dead] == [b"1", b"3"]
    assert group.bodies()[:6] == [b"1", b"2", b"3"] * 2
    assert set(group.bodies()[6:]) == {b"2"}
    assert group.brokers.offsets.get(A, 0) == 0
    group.brokers.send(A, b"4")
    bad.clear()
    group.time.advance(2)
    consumer.stop()
    assert group.bodies()[-2:] == [b"2", b"4"]
    assert (group.brokers.offsets[A], len(group.brokers.dead)) == (4, 2)


def no_dead_letter(port: Any, body: bytes, error: BaseException) -> list[bytes]:
    """No broker makes a dead letter of what has this body, while it is in the list that this gives."""
    real, back, refused = port.send_to_retry, port.send_back, [body]

    def refuses(call: Any) -> Any:
        def made(name: str, message: Any, *how: Any) -> None:
            if message.body in refused:
                raise error
            call(name, message, *how)

        return made

    port.send_to_retry, port.send_back = refuses(real), refuses(back)
    return refused


def all_at_once(group: GroupBench, *bodies: bytes) -> None:
    group.workers[0].held = True
    group.brokers.send(A, *bodies)
    group.time.advance(0.1)
    group.workers[0].let_go()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), SystemExit("a bug")])
def test_error_making_one_dead_letter_spares_the_others(group: GroupBench, error: BaseException) -> None:
    _, port = started(group, lambda messages, context: 1 / 0, max_retries=1, consume_batch_max_size=2)
    refused = no_dead_letter(port, b"2", error)
    all_at_once(group, b"1", b"2")
    group.time.advance(10)
    assert [letter.body for letter in group.brokers.dead] == [b"1"]
    assert set(group.bodies()[4:]) == {b"2"}
    refused.clear()
    group.time.advance(2)
    assert [letter.body for letter in group.brokers.dead] == [b"1", b"2"]


@pytest.mark.parametrize("size", [2, 3])
def test_refused_dead_letter_fails_no_message_behind_it(group: GroupBench, size: int) -> None:
    def listener(messages: Any, context: Any) -> None:
        assert not {b"1", b"2"} & {one.body for one in messages}

    consumer, port = started(group, listener, max_retries=1, consume_batch_max_size=size)
    refused = no_dead_letter(port, b"2", CallTimeout("late"))
    all_at_once(group, b"1", b"2")
    group.time.advance(5)
    group.brokers.send(A, b"3", b"4")
    group.time.advance(10)
    assert set(group.bodies()[4:]) == {b"2"}
    refused.clear()
    group.time.advance(2)
    assert [(body, times) for _, body, times in group.got[-2:]] == [(b"3", 0), (b"4", 0)]
    assert [letter.body for letter in group.brokers.dead] == [b"1", b"2"]
    consumer.stop()
    assert group.brokers.offsets[A] == 4


def test_rollback_does_not_bring_dead_letters_back(group: GroupBench) -> None:
    """Nor does a commit of what was rolled back pass what waits before a dead letter."""
    answers = iter([None, "suspend", "suspend", "rollback", "commit", "commit", "commit"])

    def listener(messages: Any, context: Any) -> Any:
        word = next(answers)
        return getattr(context, word)() if word else None

    consumer, _ = started(group, listener, auto_commit=False, max_retries=1)
    all_at_once(group, b"1", b"dead", b"3")
    group.time.advance(5)
    assert group.bodies() == [b"1", b"dead", b"dead", b"3", b"1", b"3"]
    assert [letter.body for letter in group.brokers.dead] == [b"dead"]
    consumer.stop()
    assert group.brokers.offsets[A] == 3


def test_where_commits_are_by_hand_a_dead_letter_waits_for_one(group: GroupBench) -> None:
    """As in Java: what was not committed before it may still be rolled back."""
    answers = iter([None, "suspend", "suspend", None, "commit"])

    def listener(messages: Any, context: Any) -> Any:
        word = next(answers)
        return getattr(context, word)() if word else None

    consumer, _ = started(group, listener, auto_commit=False, max_retries=1)
    group.brokers.send(A, b"1", b"bad", b"3")
    group.time.advance(3)
    assert group.bodies() == [b"1", b"bad", b"bad", b"3"]
    assert [m.body for m in group.brokers.dead] == [b"bad"]
    assert consumer.stats().cached == 3
    group.brokers.send(A, b"4")
    group.time.advance(1)
    consumer.stop()
    assert group.brokers.offsets[A] == 4


def test_a_batch_that_cannot_be_decoded_stops_no_ordered_queue(group: GroupBench) -> None:
    """Its sender chose how often it was tried, perhaps a negative number."""
    for times in (0, -(2**31), 2**31 - 1):
        group.brokers.send(A, b"bad", times=times)
        group.brokers.queues[A].messages[-1] = replace(
            group.brokers.queues[A].messages[-1], decode_error="malformed", sys_flag=int(INNER_BATCH_MASK)
        )
    group.brokers.send(A, b"good")
    _, port = started(group, lambda messages, context: 1 / 0 if messages[0].decode_error else None, max_retries=2)
    group.time.advance(3600)
    assert group.bodies() == [*[b"bad"] * (3 + 3 + 1), b"good"]
    assert (port.seen("send_back"), port.seen("send_to_retry")) == ([], [b"bad"] * 3)
    assert group.brokers.offsets[A] == 4
