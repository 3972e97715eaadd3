"""Messages for others do not wait for dead letters, and dead letters go as soon as their topic answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.delay import envelope_records
from rocketmq_spark.delay.envelope_records import DEAD_LETTER_KIND, DeliveryRules
from rocketmq_spark.delay.release import checkpoints_of
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import MessageQueue, Resent, SpooledSend
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spool.records import NOTE, RECORD, TARGET_RULES_NOTE, Dead, Record, area_end, decode_record
from rocketmq_spark.spool.spool import SendSpool, target_of, topic_target
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import QUEUE, Envelope
from rocketmq_spark.wire.properties import decode_properties
from tests.delay.nodes import QUEUES, START_MS
from tests.fakes.resender import FakeResender
from tests.fakes.timer import ManualTimer, Time
from tests.spool.bench import database

RULES = DeliveryRules(ProducerSettings(group="g", max_message_size=1000), "dead", ("good*", "bad*"))
EARLIER = RULES._replace(topics=("*",), settings=ProducerSettings(group="g"))  # which would deliver what is bad now
REFUSED, AWAY = Resent(None, "no permission"), Resent(None, "no answer", is_temporary=True)
TIMEOUT_S, ANSWER_S, LETTER_S = 3.0, 0.003, 0.02


class Bench:
    """A node's spool. Topics in ``refusing`` refuse messages; ``letters`` is the answer of the topic "dead"."""

    def __init__(self, path: Path, slots: int = 64) -> None:
        self.path, self.slots, self.time = path, slots, Time()
        self.begin_s, self.rules = self.time.now, RULES
        self.letters, self.letter_s = AWAY, TIMEOUT_S
        self.sent: list[tuple[float, SpooledSend]] = []
        self.refusing = {"bad", *(f"bad{i}" for i in range(20))}
        self.offset = self.out = self.most = 0
        self.spread_s: Callable[[], float] = lambda: 0.0
        self.open()

    def open(self) -> None:
        self.store, self.sends, self.timer = Store(self.path, sync="never"), FakeResender(), ManualTimer(self.time)
        self.sends.resend = self.resend  # type: ignore[method-assign]
        self.spool = SendSpool(
            self.store,
            self.sends,
            self.timer,
            self.now_ms,
            policy=envelope_records.redelivery_policy(self.rules, self.slots),
        )

    def restart(self, rules: DeliveryRules) -> None:
        self.timer.close()
        self.store.close()
        self.rules = rules
        self.open()

    @property
    def second(self) -> float:
        return self.time.now - self.begin_s

    def now_ms(self) -> int:
        return START_MS + round(1000 * self.second)

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        self.sent.append((self.second, send))
        answer, after_s = Resent(send.queue or MessageQueue(send.topic, "broker-a", 0)), ANSWER_S
        if send.topic == "dead":
            after_s = self.letter_s
            answer = answer if self.letters.error is None else self.letters
            self.out += 1
            self.most = max(self.most, self.out)
        elif send.topic in self.refusing:
            answer, after_s = REFUSED, ANSWER_S + self.spread_s()

        def end() -> None:
            self.out -= send.topic == "dead"
            done(answer)

        self.timer.call_later(after_s, end)

    def add(
        self,
        name: str,
        due_s: float,
        topic: str = "good",
        properties: str = "",
        body: bytes = b"x",
        rules: DeliveryRules = RULES,
    ) -> None:
        text = f"UNIQ_KEY\x01{name}\x02{properties}"
        data = Envelope(topic, START_MS + round(1000 * due_s), name, START_MS, 0, text, body).pack()
        found = envelope_records.effect_of(rules, QUEUES[0], self.offset, data, self.now_ms())
        assert found.record is not None
        self.offset += 1
        self.store.add([(found.record, found.due_ms)])
        self.spool.redelivery.wake()

    def answer_again(self) -> None:
        self.letters, self.letter_s = Resent(), LETTER_S

    def count(self, topic: str) -> int:
        return sum(send.topic.startswith(topic) for _, send in self.sent)

    def latest_s(self) -> float:
        """How late the last good message was sent: their names are their due times."""
        return max(second - float(send.msg_ids[0]) for second, send in self.sent if send.topic == "good")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Letters have no answer."""
    return Bench(tmp_path / "s")


CHOSEN = f"{QUEUE}\x01broker-a:0\x02"
BAD = {
    "topic": ("foreign", CHOSEN, b"x"),
    "own inner topic": ("dmq_inner_topic", CHOSEN, b"x"),
    "body": ("good", "", b"y" * 2000),
    "empty": ("good", CHOSEN, b""),
}


@pytest.mark.parametrize("rules", [RULES, EARLIER])
@pytest.mark.parametrize("what", BAD)
def test_bad_content_delays_no_good_messages(bench: Bench, what: str, rules: DeliveryRules) -> None:
    """Also if it was stored under other rules, as by an earlier release, with the target of a good message."""
    topic, properties, body = BAD[what]
    for i in range(200):
        bench.add(f"bad{i}", 3 + i / 20, topic, properties, body, rules)
        bench.add(f"{i / 10:.1f}", i / 10, properties=properties)
    bench.time.advance(40)
    assert (bench.count("good"), bench.most, bench.count("dead") > 10) == (200, 1, True)
    assert bench.latest_s() < 0.5
    assert len(bench.store) == 200
    bench.answer_again()
    bench.time.advance(10)
    assert len(bench.store) == 0


@pytest.mark.parametrize("what", BAD)
def test_a_record_has_the_target_of_its_send(what: str) -> None:
    topic, properties, body = BAD[what]
    data = Envelope(topic, START_MS, "m", START_MS, 0, properties, body).pack()
    records = []
    for rules in (RULES, EARLIER):
        record = envelope_records.effect_of(rules, QUEUES[0], 0, data, START_MS).record
        assert record is not None
        assert record.target == target_of(envelope_records.send_decoder(rules)(record))
        records.append(record)
    assert dataclasses.replace(records[0], target="") == dataclasses.replace(records[1], target="")


def test_a_record_that_changes_its_target_keeps_all_else(bench: Bench) -> None:
    bench.add("m", 5, "foreign", CHOSEN, rules=EARLIER)
    marks = [bench.store.places(envelope_records.space_of(QUEUES[0])), bench.store.places(b"")]
    bench.time.advance(4)
    assert bench.sent == []
    bench.time.advance(2)
    assert [send.topic for _, send in bench.sent] == ["dead"]
    assert bench.sent[0][0] == pytest.approx(5, abs=0.1)
    assert marks == [bench.store.places(envelope_records.space_of(QUEUES[0])), bench.store.places(b"")]
    bench.time.advance(10_000)
    bench.answer_again()
    bench.time.advance(1800)
    assert (len(bench.store), bench.store.totals.all_bytes) == (0, 0)


def test_letters_without_answers_delay_no_others(bench: Bench) -> None:
    for i in range(200):
        bench.add(f"{i / 10:.1f}", i / 10)
    for i in range(300):
        bench.add(f"b{i}", 1, f"bad{i % 6}")
    bench.time.advance(30)
    assert (bench.count("good"), bench.count("bad"), bench.most) == (200, 300, 1)
    assert bench.latest_s() < 0.5


@pytest.mark.parametrize("topics", [1, 20])
@pytest.mark.parametrize("outage_s", [10, 300, 5000])
def test_all_letters_go_when_their_topic_answers_again(bench: Bench, outage_s: float, topics: int) -> None:
    """And their own topics have rejected them once."""
    for i in range(100):
        bench.add(f"b{i}", 1, f"bad{i % topics}")
    bench.time.advance(outage_s)
    assert (bench.count("bad"), bench.most, len(bench.store)) == (100, 1, 100)
    bench.answer_again()
    before = len(bench.sent)
    bench.time.advance(1800)  # the next attempt may be that late, as for any message
    assert (len(bench.store), bench.store.totals.give_ups, bench.store.totals.dead) == (0, 100, 0)
    assert bench.sent[-1][0] - bench.sent[before][0] < 5
    assert bench.count("bad") == 100
    assert bench.spool.redelivery.delivered_count == 0


def test_letters_that_wait_are_sent_by_the_next_process(bench: Bench) -> None:
    for i in range(50):
        bench.add(f"b{i}", 1, "bad")
    bench.time.advance(20)
    bench.sent.clear()
    bench.answer_again()
    bench.restart(RULES)
    bench.spool.redelivery.wake()
    bench.time.advance(60)
    assert (len(bench.store), bench.count("bad"), bench.count("dead")) == (0, 0, 50)
    assert bench.spool.redelivery.delivered_count == 0


def test_what_has_no_room_for_a_letter_does_not_wait(bench: Bench) -> None:
    for i in range(20):
        bench.add(f"b{i}", 1, "bad", f"a\x01{'x' * 32_480}\x02" if i % 2 else "")
    bench.time.advance(20)
    assert (bench.store.totals.dead, len(bench.store)) == (10, 10)


def test_a_letter_without_room_for_its_reason_stays_dead(bench: Bench) -> None:
    """A node makes none, but a folder that was damaged or crafted may have one."""
    body = Envelope("bad", START_MS, "m", START_MS, 0, f"UNIQ_KEY\x01m\x02a\x01{'x' * 32_480}\x02", b"x").pack()
    found = envelope_records.effect_of(RULES, QUEUES[0], 0, body, START_MS).record
    assert found is not None
    payload = len(b"away").to_bytes(2) + b"away" + body
    letter = dataclasses.replace(found, kind=DEAD_LETTER_KIND, payload=payload, target=topic_target("dead"))
    bench.store.add([(letter, START_MS)])
    bench.spool.redelivery.wake()
    bench.time.advance(10)
    assert (len(bench.sent), len(bench.store), bench.store.totals.dead) == (0, 0, 1)


def test_a_rejected_letter_stays_as_the_message_that_it_was(bench: Bench) -> None:
    bench.letters = REFUSED
    bench.add("b", 1, "bad")
    bench.time.advance(10)
    assert (bench.store.totals.dead, bench.store.totals.give_ups, len(bench.store)) == (1, 1, 0)
    bench.answer_again()
    assert bench.store.revive(bench.now_ms()) == 1
    bench.spool.redelivery.wake()
    bench.time.advance(10)
    assert [send.topic for _, send in bench.sent] == ["bad", "dead", "bad", "dead"]
    assert bench.store.totals.all_bytes == 0


def targets(bench: Bench) -> set[str]:
    records = (decode_record(data) for _, data in database(bench.store).scan(RECORD, area_end(RECORD)))
    return {record.target for record in records if isinstance(record, Record)}


@pytest.mark.parametrize("target", ["topic bad", "topic dead"])
def test_revived_messages_do_not_wait_behind_letters(bench: Bench, target: str) -> None:
    """Also those that were buried with the target of their letters."""
    bench.letters = REFUSED
    for i in range(50):
        bench.add(f"m{i}", 1, "bad")
    bench.time.advance(10)
    assert (bench.store.totals.dead, targets(bench)) == (50, {"topic bad"})
    for key, data in [*database(bench.store).scan(RECORD, area_end(RECORD))]:
        buried = dataclasses.replace(Record.decode(data), target=target).encode()
        database(bench.store).write([(key, buried)])
        bench.store.totals.dead_bytes += len(buried) - len(data)
    bench.letters = AWAY
    bench.refusing.remove("bad")
    for i in range(300):
        bench.add(f"l{i}", 11, "bad1")
    bench.time.advance(10)
    sent = bench.count("bad")
    assert bench.store.revive(bench.now_ms(), RULES.target_of) == 50
    bench.spool.redelivery.wake()
    bench.time.advance(1)
    assert bench.count("bad") == sent + 50
    assert (len(bench.store), bench.store.totals.dead) == (300, 0)
    bench.answer_again()
    bench.time.advance(1800)
    assert bench.store.totals.all_bytes == 0


def narrower(what: str) -> DeliveryRules:
    return {
        "topic": RULES._replace(topics=("good*",)),
        "body": RULES._replace(settings=ProducerSettings(group="g", max_message_size=3)),
        "inner topic": RULES._replace(has_envelopes=lambda topic: True),
    }[what]


@pytest.mark.parametrize("what", ["topic", "body", "inner topic"])
def test_a_letter_keeps_its_reason_under_narrower_options(bench: Bench, what: str) -> None:
    bench.add("m", 1, "bad", "a\x01b\x02", b"body")
    bench.time.advance(10)
    bench.restart(narrower(what))
    bench.answer_again()
    bench.spool.redelivery.wake()
    bench.time.advance(1800)
    _, letter = bench.sent[-1]
    cut = "; these are its first 3 bytes" if what == "body" else ""
    assert (letter.topic, letter.msg_ids, bytes(letter.request.data)) == ("dead", ("m",), b"bod" if cut else b"body")
    assert decode_properties(letter.request.properties) == {
        "UNIQ_KEY": "m", "a": "b", "delayTopic": "bad", "delayProblem": f"no permission{cut}",
    }  # fmt: skip
    assert (len(bench.store), bench.store.totals.give_ups) == (0, 1)


WIDER = RULES._replace(topics=("good*", "bad*", "pay*"))
LARGER = RULES._replace(settings=ProducerSettings(group="g", max_message_size=5000))


@pytest.mark.parametrize("what", ["topic", "body"])
def test_messages_allowed_since_a_restart_do_not_wait(bench: Bench, what: str) -> None:
    for i in range(300):
        bench.add(f"l{i}", 1, "bad")
    for i in range(200):
        due_s = 100 + i / 1000
        bench.add(f"{due_s}", due_s, *(("pay",) if what == "topic" else ("good", "", bytes(2000))))
    bench.time.advance(50)
    bench.restart(WIDER if what == "topic" else LARGER)
    bench.spool.redelivery.wake()
    bench.time.advance(51)
    sent = [second - float(send.msg_ids[0]) for second, send in bench.sent if send.topic in ("pay", "good")]
    assert (len(sent), max(sent) < 0.5) == (200, True)
    assert targets(bench) == {"topic dead"}
    bench.answer_again()
    bench.time.advance(3600)
    assert (len(bench.store), bench.store.totals.all_bytes) == (0, 0)


@pytest.mark.parametrize(("count", "outage_s"), [(300, 10), (5, 40_000)])
def test_letters_follow_another_topic_of_dead_letters(bench: Bench, count: int, outage_s: float) -> None:
    """At once, however long they would still wait for the one before."""
    for i in range(count):
        bench.add(f"l{i}", 1, "bad")
    bench.time.advance(outage_s)
    bench.restart(RULES._replace(dead_topic="dead2"))
    bench.spool.redelivery.wake()
    bench.time.advance(10)
    assert (targets(bench), bench.count("dead2"), len(bench.store)) == (set(), count, 0)


def test_a_revived_message_is_not_early_after_options_changed(bench: Bench) -> None:
    """It was given up by a clock that was ahead, and an answer of its target must not make it due."""
    bench.letters = Resent()
    bench.add("m", 5000, "good")
    (work,) = bench.store.take(bench.now_ms() + 9_000_000, 1)
    bench.store.settle([(work, Dead("no permission"))], bench.now_ms() + 9_000_000)
    for topics in (("other",), RULES.topics):
        bench.restart(RULES._replace(topics=topics))
        bench.store.revive(bench.now_ms(), bench.rules.target_of)
        bench.spool.redelivery.wake()
        bench.time.advance(1)
        bench.spool.redelivery.on_answer(targets(bench))
        bench.time.advance(1)
    assert bench.sent == []
    bench.time.advance(5000)
    assert bench.count("good") == 1


def compared(bench: Bench, monkeypatch: pytest.MonkeyPatch, pages: int | None = None) -> list[bytes | None]:
    """The starts of the pages that are compared from now on; after some, it fails as in a process that is killed."""
    found: list[bytes | None] = []
    retarget = bench.store.retarget

    def noting(
        target_of: Callable[[Record], str], start: bytes | None, limit: int, kind: str | None, now_ms: int
    ) -> bytes | None:
        if len(found) == pages:
            raise SpoolError("killed")
        found.append(start)
        return retarget(target_of, start, limit, kind, now_ms)

    monkeypatch.setattr(bench.store, "retarget", noting)
    bench.spool.redelivery.wake()
    bench.time.advance(5)
    return found


def test_records_are_compared_once_after_options_changed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a kill in between, and if the first options return then."""
    for i in range(250):
        bench.add(f"{i}", 1000, "pay")
    for rules, pages in ((RULES, 0), (WIDER, 3), (WIDER, 0)):
        bench.restart(rules)
        assert len(compared(bench, monkeypatch)) == pages
    assert targets(bench) == {"topic pay"}
    bench.restart(RULES)
    assert len(compared(bench, monkeypatch, pages=1)) == 1
    assert targets(bench) == {"topic pay", "topic dead"}
    bench.restart(WIDER)
    assert len(compared(bench, monkeypatch)) > 2
    assert targets(bench) == {"topic pay"}


def test_records_of_a_folder_without_a_note_are_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.add("m", 1000)
    database(bench.store).write([], [NOTE + TARGET_RULES_NOTE])
    bench.restart(RULES)
    assert len(compared(bench, monkeypatch)) == 1
    bench.restart(RULES)
    assert len(compared(bench, monkeypatch)) == 0


def test_records_are_compared_while_nothing_may_be_sent(bench: Bench) -> None:
    for i in range(250):
        bench.add(f"{i}", 1, "pay")
    bench.restart(WIDER)
    bench.spool.redelivery.set_paused(True)
    bench.spool.redelivery.wake()
    bench.time.advance(0.1)
    assert (targets(bench), bench.sent) == ({"topic pay"}, [])


@pytest.mark.parametrize(
    "changed",
    [
        WIDER,
        LARGER,
        RULES._replace(dead_topic="dead2"),
        RULES._replace(inner_topic="own"),
    ],
)
def test_other_rules_have_another_fingerprint(changed: DeliveryRules) -> None:
    assert changed.fingerprint != RULES.fingerprint == RULES._replace(topics=list(RULES.topics)).fingerprint
    assert checkpoints_of({b"targeting": changed.fingerprint}) == {}
