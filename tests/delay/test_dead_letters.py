"""Messages that a node gives up: they go to the topic of dead letters, or stay in its folder if that topic refuses them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import envelope_records
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import Resent, SpooledSend
from rocketmq_spark.spool.records import Record
from rocketmq_spark.wire.envelope import Envelope
from rocketmq_spark.wire.properties import decode_properties
from tests.delay.nodes import QUEUES, RULES, START_MS, Node, World, envelope
from tests.helpers import raising

ONE, TWO = QUEUES
REFUSED, AWAY = Resent(None, "no permission"), Resent(None, "no master", is_temporary=True)


def answers(to_orders: Resent | None, to_dead: Resent | None) -> Callable[[SpooledSend], Resent | None]:
    return lambda send: to_dead if send.topic == "dead" else to_orders


def given_up(world: World, to_dead: Resent | None, to_orders: Resent = REFUSED) -> Node:
    """A node that had a message for a topic that permanently refuses it."""
    node = world.node("a")
    node.sends.answer = answers(to_orders, to_dead)
    world.topic.put(envelope("m", 1, body=b"body"))
    for _ in range(2):
        node.turn(ONE)
    world.time.advance(2)
    node.turn(ONE)
    return node


def waits_for_answers(world: World) -> Node:
    """A node that has sent a message and has no answer yet."""
    node = world.node("a")
    node.sends.answer = lambda send: None
    world.topic.put(envelope("m", 1))
    for _ in range(2):
        node.turn(ONE)
    world.time.advance(2)
    return node


def topics(node: Node) -> list[str]:
    return [send.topic for send in node.sends.sent]


def test_refused_message_goes_to_dead_letter_topic(world: World, caplog: pytest.LogCaptureFixture) -> None:
    node = given_up(world, Resent(ONE))
    assert topics(node) == ["orders", "dead"]
    letter = node.sends.sent[1]
    assert (bytes(letter.request.body), letter.msg_ids, letter.queue) == (b"body", ("m",), None)
    assert decode_properties(letter.request.properties) == {
        "UNIQ_KEY": "m", "delayTopic": "orders", "delayProblem": "no permission",
    }  # fmt: skip
    totals = node.store.totals
    assert (totals.dead, totals.give_ups, len(node.store), world.offsets()[0]) == (0, 1, 0, 1)
    assert node.service.sent_count == 0
    assert caplog.text.count("is given up") == 1
    assert (
        "(message m for topic orders) is given up, and becomes a dead letter for another topic: no perm" in caplog.text
    )
    assert node.store.revive(node.now_ms()) == 0
    node.kill()
    for _ in range(3):
        node.turn(ONE)
        world.time.advance(5000)
    assert topics(node) == ["orders", "dead"]


def test_a_message_that_failed_at_every_try_goes_there_too(world: World) -> None:
    node = given_up(world, Resent(ONE), to_orders=AWAY)
    for _ in range(100):
        world.time.advance(60)
    assert topics(node) == ["orders"] * 11 + ["dead"]
    assert len(node.store) == 0


def test_a_letter_that_is_refused_stays_on_the_disk(world: World, caplog: pytest.LogCaptureFixture) -> None:
    node = given_up(world, REFUSED)
    assert topics(node) == ["orders", "dead"]
    assert (node.store.totals.dead, node.store.totals.give_ups, world.offsets()[0]) == (1, 1, 1)
    assert caplog.text.count("is given up") == 1
    assert "(message m for topic orders) stays there as a dead letter: no permission; its dead letter is" in caplog.text
    node.sends.answer = answers(Resent(ONE), REFUSED)
    assert node.store.revive(node.now_ms()) == 1
    node.turn(ONE)
    world.time.advance(1)
    assert topics(node) == ["orders", "dead", "orders"]
    assert node.store.totals.all_bytes == 0


def test_a_letter_whose_topic_is_away_is_sent_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Until then it waits, also in another process, and is not lost with the disk. Its own topic is not asked again. It counts,
    and is logged, when it is given up.
    """
    node = given_up(world, AWAY)
    assert (len(node.store), node.store.totals.dead, world.offsets()[0]) == (1, 0, 0)
    assert (node.store.totals.give_ups, caplog.text.count("(message m for topic orders) is given up")) == (1, 1)
    world.time.advance(30_000)
    assert topics(node) == ["orders"] + ["dead"] * (10 + (30_000 - 4298) // 1800 + 1)
    node.kill()
    node.sends.sent.clear()
    node.sends.answer = answers(REFUSED, Resent(ONE))
    for _ in range(2):
        node.turn(ONE)
        world.time.advance(1800)
    node.turn(ONE)
    assert topics(node) == ["dead"]
    assert (node.store.totals.all_bytes, node.store.totals.give_ups, world.offsets()[0]) == (0, 1, 1)
    assert caplog.text.count("is given up") == 1


def test_a_give_up_whose_write_failed_is_logged_once(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = waits_for_answers(world)
    with monkeypatch.context() as patched:
        patched.setattr(node.store, "settle", raising(SpoolError("full")))
        node.sends.waiting.pop(0)(REFUSED)
        world.time.advance(5)
    assert caplog.text.count("full") > 2
    world.time.advance(5)
    assert (caplog.text.count("is given up"), node.store.totals.give_ups) == (1, 1)


def test_a_kill_while_a_letter_is_out_repeats_it(world: World) -> None:
    node = given_up(world, None)
    assert (topics(node), len(node.store)) == (["orders", "dead"], 1)
    node.kill()
    node.sends.answer = answers(REFUSED, Resent(ONE))
    for _ in range(2):
        node.turn(ONE)
    assert topics(node) == ["orders", "dead", "dead"]
    assert len(node.store) == 0
    node.sends.waiting.pop(0)(Resent(ONE))


def test_a_letter_counts_once_however_often_it_is_answered(world: World) -> None:
    """And a second answer about the message is none about its letter."""
    node = waits_for_answers(world)
    done = node.sends.waiting.pop(0)
    for answer in (REFUSED, Resent(ONE)):
        done(answer)
        world.time.advance(1)
    assert (topics(node), len(node.store)) == (["orders", "dead"], 1)
    letter_done = node.sends.waiting.pop(0)
    for _ in range(2):
        letter_done(Resent(ONE))
        world.time.advance(1)
    spool = node.service._spool
    assert spool is not None
    assert (spool.redelivery.trouble, node.store.totals.give_ups, len(node.store)) == (None, 1, 0)


def test_a_node_that_ends_leaves_the_letter_to_the_next_process(world: World) -> None:
    node = waits_for_answers(world)
    spool = node.service._spool
    assert spool is not None
    with spool.redelivery._lock:
        spool.redelivery._is_closed = True
    node.sends.waiting.pop(0)(REFUSED)
    spool.redelivery.close(Deadline.after(0))
    assert (topics(node), len(node.store), node.store.totals.dead) == (["orders"], 1, 0)


def test_dead_letters_of_earlier_release_stay_until_revived(world: World) -> None:
    node = given_up(world, REFUSED)  # as it left them
    node.sends.answer = answers(REFUSED, Resent(ONE))
    node.kill()
    for _ in range(3):
        node.turn(ONE)
        world.time.advance(5000)
    assert (topics(node), node.store.totals.dead) == (["orders", "dead"], 1)
    assert node.store.revive(node.now_ms()) == 1
    node.turn(ONE)
    world.time.advance(1)
    assert topics(node)[2:] == ["orders", "dead"]
    assert node.store.totals.all_bytes == 0


def test_what_was_for_the_topic_of_dead_letters_goes_there_once(world: World) -> None:
    node = world.node("a")
    node.sends.answer = answers(Resent(ONE), REFUSED)
    world.topic.put(b"no envelope")
    for _ in range(2):
        node.turn(ONE)
    assert topics(node) == ["dead"]
    assert node.store.totals.dead == 1


@pytest.mark.parametrize("body", [b"no envelope", envelope("m", 1, "SCHEDULE_TOPIC_XXXX")])
def test_bad_content_waits_for_the_topic_of_dead_letters(
    world: World, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted as if it had not waited."""
    node = world.node("a")
    node.sends.answer = answers(Resent(ONE), AWAY)
    world.topic.put(body)
    for _ in range(2):
        node.turn(ONE)
    world.time.advance(10_000)
    node.turn(ONE)
    assert (len(node.store), node.store.totals.dead, world.offsets()[0]) == (1, 0, 0)
    node.sends.answer = answers(Resent(ONE), Resent(ONE))
    world.time.advance(1800)
    node.turn(ONE)
    assert set(topics(node)) == {"dead"}
    assert (node.store.totals.all_bytes, world.offsets()[0]) == (0, 1)
    assert "delayTopic" not in decode_properties(node.sends.sent[-1].request.properties)
    assert (node.store.totals.give_ups, node.service.sent_count, "given up" in caplog.text) == (0, 1, False)


def test_the_id_of_a_message_that_is_given_up_is_one_line() -> None:
    data = envelope("n\nERROR " + "n" * 5000, 2)
    record = Record(envelope_records.DELAYED_KIND, data, START_MS)
    made = envelope_records.dead_letter_of(RULES, record, REFUSED)
    assert made is not None
    for each in (record, made):
        assert envelope_records.describe_message(each) == f"message n?ERROR {'n' * 247} for topic orders"
    assert (
        envelope_records.describe_message(Record(envelope_records.DELAYED_KIND, b"x", START_MS)) == "no valid envelope"
    )


@pytest.mark.parametrize("size", [31_000, 32_500])
def test_dead_letter_without_room_for_properties_stays_on_disk(size: int) -> None:
    data = Envelope("orders", START_MS, "m", START_MS, 0, f"a\x01{'x' * size}\x02", b"b").pack()
    record = Record(envelope_records.DELAYED_KIND, data, START_MS)
    found = envelope_records.dead_letter_of(RULES, record, Resent(None, "r" * 5000 + "\x02\n"))
    assert (found is None) == (size > 32_000)
    if found is not None:
        send = envelope_records.dead_letter_send(RULES, found)
        assert decode_properties(send.request.properties)["delayProblem"] == "r" * 1000
