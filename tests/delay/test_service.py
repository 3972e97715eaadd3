"""A node of the delay service on a scripted inner topic, by the holes of the list G3. The store is real."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import service
from rocketmq_spark.delay.commits import GroupNames
from rocketmq_spark.errors import AccessDenied, CallTimeout, SpoolError
from rocketmq_spark.model import MessageQueue, Resent
from rocketmq_spark.wire.envelope import Envelope, cancel_envelope
from tests.delay.nodes import QUEUES, START_MS, Node, World, envelope

ONE, TWO = QUEUES
DOWN = Resent(None, "down", is_temporary=True)


def test_an_original_is_sent_when_it_is_due_and_not_before(world: World) -> None:
    node = world.node("a")
    for seconds in (1, 7, 59, 3601):
        world.topic.put(envelope(f"m{seconds}", seconds))
    node.turn(ONE)
    node.turn(ONE)
    found = {}
    for _ in range(3700):
        world.time.advance(1)
        found[node.now_ms() - START_MS] = node.sends.bodies[:]
    assert [len(found[at]) for at in (1000, 6000, 7000, 58_000, 59_000, 3_600_000, 3_601_000)] == [1, 1, 2, 2, 3, 3, 4]


def test_nothing_is_told_before_it_is_durable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was read and not stored is read again."""
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    node.turn(ONE)
    node.turn(ONE)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    world.topic.put(envelope("n", 5))
    with monkeypatch.context() as patched:
        patched.setattr(node.store, "add", full)
        node.reader.own(ONE)
        with pytest.raises(OSError, match="no space"):
            node.service.turn()
        assert world.offsets()[:2] == (0, 1)
    node.kill()
    for _ in range(2):
        node.turn(ONE)
    world.time.advance(5)
    assert node.sends.bodies == [b"m", b"n"]


def test_kill_between_write_and_commit_stores_no_second_record(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    world.topic.silent = False
    node.turn(ONE)
    node.turn(ONE)
    world.topic.offsets.clear()  # as if nothing had been told
    node.kill()
    for _ in range(3):
        node.turn(ONE)
    assert len(node.store) == 1
    world.time.advance(5)
    assert node.sends.bodies == [b"m"]


def test_a_message_that_its_sender_repeated_counts_once(world: World) -> None:
    node = world.node("a")
    for queue in (ONE, ONE, TWO):
        world.topic.put(envelope("m", 5), queue)
    for _ in range(4):
        node.turn(ONE, TWO)
    world.time.advance(5)
    node.turn(ONE, TWO)
    assert node.sends.bodies == [b"m"]
    assert (world.offsets(ONE)[0], world.offsets(TWO)[0]) == (2, 1)


def test_an_original_is_forgotten_only_when_a_broker_took_it(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    node.turn(ONE)
    node.turn(ONE)
    node.sends.answer = lambda send: None  # no answer yet
    world.time.advance(6)
    node.turn(ONE)
    assert (node.sends.bodies, len(node.store), world.offsets()[0]) == ([b"m"], 1, 0)
    node.kill()  # so it is sent once more, with the same id
    for _ in range(2):
        node.turn(ONE)
    assert node.sends.bodies == [b"m", b"m"]
    node.sends.waiting.pop()(Resent(ONE))
    world.time.run_due()
    node.turn(ONE)
    assert (len(node.store), world.offsets()[0]) == (0, 1)
    assert {send.msg_ids for send in node.sends.sent} == {("m",)}


def test_what_is_past_due_is_sent_at_once(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", -3600))
    node.turn(ONE)
    node.turn(ONE)
    assert node.sends.bodies == [b"m"]


def test_what_is_taken_back_is_not_sent(world: World) -> None:
    node = world.node("a")
    for name in ("m", "n"):
        world.topic.put(envelope(name, 5))
    world.topic.put(cancel_envelope("orders", START_MS + 5000, "m", START_MS))
    world.topic.put(cancel_envelope("orders", START_MS + 5000, "never", START_MS))
    for _ in range(5):
        node.turn(ONE)
    world.time.advance(10)
    node.turn(ONE)
    assert node.sends.bodies == [b"n"]
    assert world.offsets()[0] == 4


def test_copies_that_two_nodes_have_are_both_taken_back(world: World) -> None:
    """As ``Producer.recall`` does it, which writes to all queues."""
    nodes = {ONE: world.node("a"), TWO: world.node("b")}
    for queue in nodes:
        world.topic.put(envelope("m", 5), queue)
        world.topic.put(cancel_envelope("orders", START_MS + 5000, "m", START_MS), queue)
        world.topic.put(envelope(f"n{queue.queue_id}", 5), queue)
    for _ in range(4):
        for queue, node in nodes.items():
            node.turn(queue)
    world.time.advance(10)
    assert [node.sends.bodies for node in nodes.values()] == [[b"n0"], [b"n1"]]


def test_cancelled_message_is_not_sent_by_node_rereading_topic(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("first", 900))
    world.topic.put(envelope("m", 500))
    world.topic.put(cancel_envelope("orders", START_MS + 500_000, "m", START_MS))
    for _ in range(4):
        node.turn(ONE)
    fresh = world.node("fresh")
    for _ in range(4):
        fresh.turn(ONE)
    world.time.advance(1000)
    assert fresh.sends.bodies == [b"first"]


@pytest.mark.parametrize("taken_over", [False, True], ids=["at its start", "with a queue that it gets"])
def test_overdue_message_is_not_sent_before_its_cancel_is_read(
    world: World, monkeypatch: pytest.MonkeyPatch, taken_over: bool
) -> None:
    """After a lost disk, or a long absence, there may be many pages between both."""
    monkeypatch.setattr(service, "PAGE", 2)
    node = world.node("a")
    if taken_over:
        world.topic.put(envelope("other", -1), TWO)
        for _ in range(3):
            node.turn(TWO)
    world.topic.put(envelope("m", -500))
    for i in range(20):
        world.topic.put(envelope(f"n{i}", -400))
    world.topic.put(cancel_envelope("orders", START_MS - 500_000, "m", START_MS))
    for _ in range(30):
        node.turn(ONE, TWO)
    assert sorted(node.sends.bodies) == sorted([b"n%d" % i for i in range(20)] + [b"other"] * taken_over)
    assert world.offsets()[0] == 22


def test_queue_not_readable_to_end_stops_no_messages_for_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", -500))
    world.topic.put(envelope("unreadable", -500))
    poll = node.reader.poll
    monkeypatch.setattr(node.reader, "poll", lambda timeout_s: [each for each in poll() if each.queue_offset == 0])
    for _ in range(3):
        node.turn(ONE)
    assert (len(node.store), node.sends.bodies) == (1, [])
    monkeypatch.setattr(node.service, "_catch_up_deadline", Deadline(0.0))
    node.turn(ONE)
    assert node.sends.bodies == [b"m"]


def test_a_bad_body_is_a_dead_letter_and_stops_nobody(world: World) -> None:
    node = world.node("a")
    world.topic.put(b"no envelope")
    world.topic.put(envelope("m", 1))
    for _ in range(3):
        node.turn(ONE)
    world.time.advance(1)
    node.turn(ONE)
    assert [(send.topic, bytes(send.request.body)) for send in node.sends.sent] == [
        ("dead", b"no envelope"), ("orders", b"m"),
    ]  # fmt: skip
    assert world.offsets()[0] == 2


@pytest.mark.parametrize("step_s", [-60, 60])
def test_due_times_follow_clock_of_node_even_when_it_steps(world: World, step_s: int) -> None:
    """Due times are absolute: a clock that is a minute ahead sends a minute early by others, and never by its own."""
    node = world.node("a")
    world.topic.put(envelope("m", 100))
    node.turn(ONE)
    node.turn(ONE)
    node.step_ms = 1000 * step_s
    world.time.advance(99 - step_s)
    node.turn(ONE)
    assert node.sends.bodies == []
    world.time.advance(1)
    node.turn(ONE)
    assert node.sends.bodies == [b"m"]


def test_message_failed_while_clock_was_ahead_is_not_sent_early(world: World) -> None:
    node, answers = world.node("a"), []
    world.topic.put(envelope("away since", 5))
    world.topic.put(envelope("m", 1000))
    node.sends.answer = lambda send: answers[0] if answers else DOWN
    for _ in range(3):
        node.turn(ONE)
        world.time.advance(2)
    node.turn(ONE)
    assert node.sends.bodies == [b"away since"]
    node.step_ms = 1_200_000
    for _ in range(2):  # attempts for a target that fails are not made one right after the other
        node.turn(ONE)
        world.time.advance(1)
    assert b"m" in node.sends.bodies
    node.step_ms = 0
    answers.append(Resent(ONE))
    assert node.service._spool is not None
    node.sends.sent.clear()
    node.service._spool.note_accepted_send(MessageQueue("orders", "broker-a", 0))
    for _ in range(3):
        node.turn(ONE)
    assert node.sends.bodies == [b"away since"]
    world.time.advance(991)
    node.turn(ONE)
    assert node.sends.bodies == [b"away since"], "it is early"
    world.time.advance(2)
    node.turn(ONE)
    assert node.sends.bodies == [b"away since", b"m"]


def test_what_cannot_be_sent_is_tried_again_as_the_spool_does(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 10))
    node.turn(ONE)
    node.turn(ONE)
    node.sends.answer = lambda send: DOWN
    at = []
    for _ in range(120):
        world.time.advance(1)
        at += [round(world.time.now - 1000)] * (len(node.sends.sent) - len(at))
    assert at == [10, 13, 18, 48, 108]
    node.sends.answer = lambda send: Resent(ONE)
    world.time.advance(150)
    assert len(node.store) == 0


def test_answer_of_topic_sends_no_message_before_it_is_due(world: World) -> None:
    """Only what failed waits for an answer; after a restart anything might have failed."""
    node = world.node("a")
    for name, seconds in (("m", 5), ("n", 100), ("o", 200)):
        world.topic.put(envelope(name, seconds))
    for _ in range(2):
        node.turn(ONE)
    node.kill()
    for _ in range(2):
        node.turn(ONE)
    world.time.advance(6)
    assert node.sends.bodies == [b"m"]
    works, node.sends.answer = node.sends.answer, lambda send: DOWN
    world.time.advance(94)
    node.sends.answer = works
    world.topic.put(envelope("now", 0))
    node.turn(ONE)  # its topic answers: what failed is sent soon, and the rest waits
    world.time.advance(3)
    assert node.sends.bodies == [b"m", b"n", b"now", b"n"]


def test_finally_refused_message_is_kept_with_its_content(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 1))
    node.sends.answer = lambda send: Resent(None, "no permission")
    for _ in range(2):
        node.turn(ONE)
    world.time.advance(1)
    node.turn(ONE)
    assert (node.store.totals.dead, world.offsets()[0]) == (1, 1)
    node.sends.answer = lambda send: Resent(ONE)
    assert node.store.revive(node.now_ms()) == 1
    node.turn(ONE)
    world.time.advance(1)
    assert [send.topic for send in node.sends.sent] == ["orders", "dead", "orders"]


def test_brokers_that_do_not_answer_are_told_later(world: World, caplog: pytest.LogCaptureFixture) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    node.turn(ONE)
    node.turn(ONE)
    world.topic.silent = True
    world.time.advance(6)
    for _ in range(3):
        node.turn(ONE)
    assert world.offsets()[0] == 0
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    world.topic.silent = False
    node.turn(ONE)
    assert world.offsets()[0] == 1


def test_the_groups_of_the_other_numbers_are_made(world: World) -> None:
    world.topic.groups = {"g"}
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    node.turn(ONE)
    node.turn(ONE)
    assert world.topic.groups == set(GroupNames("g").all_groups)
    assert world.offsets() == (0, 1, 0)


def test_one_long_delay_makes_a_hand_over_repeat_nothing(world: World) -> None:
    """What a queue's next node may leave out goes on with time, though the first that waits is due in a month."""
    node = world.node("a")
    world.topic.put(envelope("long", 30 * 86_400))
    node.turn(ONE)
    for number in range(20):
        world.topic.put(envelope(f"m{number}", 10 * number + 60))
        node.turn(ONE)
        world.time.advance(10)
        node.turn(ONE)
    sent = set(node.sends.bodies)
    node.kill()
    assert len(sent) > 10
    other = world.node("b")
    for _ in range(25):
        other.turn(ONE)
    world.time.advance(60)
    assert sorted(other.sends.bodies) == sorted({b"m%d" % number for number in range(20)} - sent)


@pytest.mark.parametrize("sends", [False, True], ids=["with nothing due", "with a message that it sends early"])
def test_clock_ahead_for_one_turn_makes_handover_repeat_nothing(world: World, sends: bool) -> None:
    """Otherwise nothing that is done before that moment is committed, while one long delay waits."""
    node, day = world.node("a"), 86_400
    world.topic.put(envelope("long", 30 * day))
    world.topic.put(envelope("early", day // 2 if sends else 20 * day))
    for _ in range(3):
        node.turn(ONE)
    node.step_ms = 1000 * day
    world.topic.put(envelope("at that time", 1))
    for _ in range(2):
        node.turn(ONE)
    node.step_ms = 0
    for number in range(24):
        world.topic.put(envelope(f"m{number}", 100 * number + 60))
        node.turn(ONE)
        world.time.advance(100)
        node.turn(ONE)
    sent = Counter(node.sends.bodies)
    assert len(sent) == 25 + sends
    node.kill()
    other = world.node("b")
    for _ in range(30):
        other.turn(ONE)
    world.time.advance(100)
    assert other.sends.bodies == []


def test_nothing_is_committed_while_nothing_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = world.node("a")
    world.topic.put(envelope("long", 30 * 86_400))
    for _ in range(3):
        node.turn(ONE)
    commits: list[str] = []
    monkeypatch.setattr(world.topic, "commit", lambda group, offsets, deadline: commits.append(group) or {})
    for _ in range(5):
        world.time.advance(10)
        node.turn(ONE)
    assert commits == []


def test_when_all_is_done_nothing_more_is_reported(world: World) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 1))
    for _ in range(3):
        node.turn(ONE)
        world.time.advance(1)
    told = world.offsets()
    assert told[:2] == (1, 1)
    world.time.advance(100)
    node.turn(ONE)
    assert world.offsets() == told


def test_the_end_sends_nothing_new_and_tells_the_rest(world: World) -> None:
    node, over = world.node("a"), threading.Event()
    world.topic.put(envelope("m", 1))
    world.topic.put(envelope("n", 100))
    for _ in range(3):
        node.turn(ONE)
    world.time.advance(2)
    over.set()
    node.service.run(over)
    assert (node.sends.bodies, world.offsets()[0], node.reader.closed) == ([b"m"], 1, True)
    node.open()
    node.turn(ONE)
    world.time.advance(100)
    assert node.sends.bodies == [b"m", b"n"]


def test_transient_error_is_waited_out_and_other_ends_service(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = world.node("a")
    turns = []

    def silent(timeout_s: float = 5.0) -> list:  # type: ignore[type-arg]
        raise CallTimeout("no answer")

    def wait(seconds: float) -> bool:
        turns.append(seconds)
        monkeypatch.setattr(node.reader, "poll", denied)
        return False

    def denied(timeout_s: float = 5.0) -> list:  # type: ignore[type-arg]
        raise AccessDenied("access denied")

    over = threading.Event()
    monkeypatch.setattr(over, "wait", wait)
    monkeypatch.setattr(node.reader, "poll", silent)
    with pytest.raises(AccessDenied):
        node.service.run(over)
    assert len(turns) == 1
    assert "continues after an error" in caplog.text
    assert node.reader.closed


def damaged(node: Node, share: float) -> None:
    """One byte of the table that its store wrote, which is opened again."""
    node.store.close()
    (table,) = node.folder.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[int(share * len(data))] ^= 1
    table.write_bytes(data)
    node.open()


@pytest.mark.parametrize("share", [i / 16 for i in range(16)])
def test_damage_sends_nothing_early_and_lost_records_are_reread(world: World, share: float) -> None:
    """Wherever a byte fell over: due times come from the records themselves, and lost records from the topic."""
    node = world.node("a")
    due_s = {f"m{i}": 100.0 + 10 * (i % 50) for i in range(300)}
    for name, seconds in due_s.items():
        world.topic.put(envelope(name, seconds))
    for _ in range(301):
        node.turn(ONE)
    assert len(node.store) == 300
    damaged(node, share)
    sent: Counter[str] = Counter()
    for _ in range(700):
        with contextlib.suppress(SpoolError):
            node.turn(ONE)
        for body in node.sends.bodies[sent.total() :]:
            assert (node.now_ms() - START_MS) / 1000 >= due_s[body.decode()], body
            sent[body.decode()] += 1
        world.time.advance(1)
    assert set(sent) == set(due_s)
    twice = [name for name, count in sent.items() if count > 1]
    assert max(sent.values()) <= 2, "what was sent in the moment before the damage was met, and not told yet"
    assert len({due_s[name] for name in twice}) <= 2, twice


def test_damage_that_a_living_node_meets_is_read_again_too(world: World) -> None:
    node = world.node("a")
    for i in range(300):
        world.topic.put(envelope(f"m{i}", 100))
    for _ in range(301):
        node.turn(ONE)
    damaged(node, 0.3)
    assert len(node.store) == 300, "it was not looked at yet"
    for _ in range(5):
        node.turn(ONE)
    world.time.advance(101)
    for _ in range(400):
        with contextlib.suppress(SpoolError):
            node.turn(ONE)
        world.time.advance(1)
    assert node.store.damage_count, "nobody met it"
    assert set(node.sends.bodies) == {b"m%d" % i for i in range(300)}


def test_one_bad_envelope_stops_no_other(world: World) -> None:
    """An honest date in year 9999, the last moment there is, and what no producer could have sent."""
    node = world.node("a")
    far_s = (253_402_300_799_000 - START_MS) / 1000
    odd = [
        envelope("y9999", far_s),
        Envelope("orders", (1 << 63) - 1, "forever", 1, 0, "", b"forever").pack(),
        b"",
        b"RDMQ",
        b"x" * 70_000,
    ]
    odd += [envelope("m", 1, topic=topic) for topic in ("t" * 65_535, "a b", "%RETRY%g", "rmq_sys_x")]
    for body in [envelope("first", 5), *odd, envelope("last", 5)]:
        world.topic.put(body)
    for _ in range(20):
        node.turn(ONE)
        world.time.advance(1)
    assert {b"first", b"last"} <= set(node.sends.bodies)
    assert len([send for send in node.sends.sent if send.topic == "dead"]) == 7
    assert len(node.store) == 2, "those of far dates"
    world.time.advance(86_400)
    node.turn(ONE)
    assert len(node.sends.sent) == 9
