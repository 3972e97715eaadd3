"""Offset ranges as pipelined pulls: every offset is delivered once, in order, or lost once. Rules 3, 4, 6 and 8."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.errors import AccessDenied, BrokerError, CallTimeout, ConnectionLost, RouteNotFound
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.progress_timeout import MAX_BROKER_SILENCE_S
from rocketmq_spark.remoting.bulk import BUFFER_BYTES, EmptyAnswer
from tests.pull.pull_model import Accidents, Model, Queue, Read, Stream, accidents, pull_settings, queues, read
from tests.scale import examples

FAST = PullSettings(offsets_per_fetch=50)


def rows(*bounds: tuple[int, int]) -> list[tuple[int, int]]:
    return [(i, n) for i, (start, end) in enumerate(bounds) for n in range(start, end)]


def test_several_ranges_in_order() -> None:
    model = Model([Queue(0, 500), Queue(3, 900), Queue(0, 10)])
    assert read(model, [(7, 500), (3, 800), (5, 5)]).delivered == rows((7, 500), (3, 800), (5, 5))
    assert len(model.streams) == 1


def test_nothing_to_read_needs_no_connection() -> None:
    model = Model([Queue(0, 10)])
    assert read(model, [(5, 5)]) == Read()
    assert model.streams == []


def test_nothing_beyond_the_end_is_asked_for() -> None:
    model = Model([Queue(0, 1000)])
    assert read(model, [(90, 97)]).of(0) == list(range(90, 97))
    assert model.asked == [(0, 90, 7)]


def test_range_ends_at_the_broker_next_offset_not_by_counting() -> None:
    queue = Queue(0, 100, gaps=frozenset(range(20, 90)))
    assert read(Model([queue]), [(0, 95)]).of(0) == [*range(20), *range(90, 95)]


def test_inner_batches_that_reach_over_the_edges() -> None:
    queue = Queue(0, 60, batches={5: 10, 30: 8, 45: 10})
    assert read(Model([queue]), [(8, 50)]).of(0) == list(range(8, 50))


def test_an_inner_batch_is_pulled_once() -> None:
    """All of its offsets come with any of them; what is asked for grows with the batches."""
    model = Model([Queue(0, 20_000, batches=dict.fromkeys(range(0, 20000, 500), 500))])
    assert read(model, [(0, 20_000)]).of(0) == list(range(20_000))
    assert len(model.asked) <= 42


@pytest.mark.parametrize("window", [(0, 9000), (3, 8997), (777, 5001)])
def test_inner_batches_of_any_size_are_pulled_about_once(window: tuple[int, int]) -> None:
    rng, batches, at = random.Random(5), {}, 0
    while at < 9000:
        batches[at] = size = min(rng.randint(1, 300), 9000 - at)
        at += size
    model = Model([Queue(0, 9000, batches=batches)])
    assert read(model, [window]).of(0) == list(range(*window))
    assert len(model.asked) <= 3 * len(batches)


@pytest.mark.parametrize("says", [0, 7, 1 << 62])
def test_inner_batch_with_wrong_offset_takes_no_neighbours(says: int) -> None:
    """One flipped byte. What is under way, or is to be asked for again, is not taken for a part of it."""
    queue = Queue(0, 120, batches={60: 10})
    lie = struct.pack(">20xq8xi", says, SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)
    queue.message = lambda offset: lie if 60 <= offset < 70 else Queue.message(queue, offset)  # type: ignore[method-assign]
    model = Model([queue])
    model.latency = lambda queue, start: 0.5 if 30 <= start < 60 else 0.001
    result = read(model, [(0, 120)], PullSettings(batch_size=8, depth=8))
    assert {*range(60), *range(70, 120)} <= {*result.of(0)}


# --- not now


def test_busy_brokers_are_asked_again_with_growing_pauses() -> None:
    model = Model([Queue(0, 100)], Accidents(busy=0.7), seed=3)
    assert read(model, [(0, 100)]).of(0) == list(range(100))


def test_access_denied_is_final_and_names_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Queue(0, 100)])
    monkeypatch.setattr(model, "answer", lambda *_: EmptyAnswer(16, "no permission", None, None, None, 0))
    error = read(model, [(0, 100)]).error
    assert isinstance(error, AccessDenied)
    assert (error.topic, error.queue, error.addr) == ("t", "t/b/0", "h:1")
    assert len(model.asked) == 1


def test_keys_that_expire_in_a_long_task_are_taken_anew() -> None:
    """What was under way with the old ones is asked for again; refused with keys that nobody changes it is final."""
    model, keys = Model([Queue(0, 500)]), ["old"]
    real, denied = model.answer, EmptyAnswer(16, "expired", None, None, None, 0)
    good = ["old"]

    def answer(queue: int, start: int, count: int) -> object:
        if start > 100 and good == ["old"]:
            good[0] = keys[0] = "new"  # the broker takes others from now on
        return real(queue, start, count) if model.signed[-1] == good[0] else denied

    model.answer = answer  # type: ignore[method-assign,assignment]
    model.keys = lambda: (keys[0], "secret", None)
    assert read(model, [(0, 500)]).of(0) == list(range(500))
    assert model.signed[0] == "old"
    good[0] = "others"
    assert isinstance(read(model, [(0, 500)]).error, AccessDenied)


def test_a_reset_is_neither_progress_nor_loss() -> None:
    result = read(Model([Queue(0, 100)], Accidents(reset_once=True)), [(40, 100)])
    assert (result.of(0), result.lost) == (list(range(40, 100)), [])


def test_endless_resets_end_with_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Queue(0, 100)])
    monkeypatch.setattr(model, "answer", lambda *_: EmptyAnswer(21, "OFFSET_RESET", 90, 90, 100, 0))
    result = read(model, [(40, 100)], PullSettings(read_deadline_s=30.0))
    assert isinstance(result.error, CallTimeout)
    text = str(result.error)
    for part in ("no message came within 30 s", "h:1", "t/b/0", "21 OFFSET_RESET", "option 'readDeadline'"):
        assert part in text
    assert (result.delivered, result.lost) == ([], [])
    assert 29 <= model.time.now - 1000 <= 32


@pytest.mark.parametrize("lag_s", [0.005, 3.0, 14.0])
@pytest.mark.parametrize("indexed", [0, 40, 77])
def test_an_index_that_lags_is_asked_again_and_is_not_loss(lag_s: float, indexed: int) -> None:
    queue = Queue(0, 100, visible_from=lambda now: indexed if now < 1000 + lag_s else 100)
    model = Model([queue])
    result = read(model, [(40, 100)], FAST)
    assert (result.of(0), result.lost) == (list(range(40, 100)), [])
    assert model.time.now - 1000 < lag_s + 1.1


def test_a_short_lag_costs_a_short_time() -> None:
    """Pauses are of each slot: sixty that wait do not make the next one wait for a second."""
    queue = Queue(0, 5000, visible_from=lambda now: 3000 if now < 1000.03 else 5000)
    model = Model([queue])
    assert len(read(model, [(0, 5000)]).of(0)) == 5000
    assert model.time.now - 1000 < 0.2


# --- gone


def test_offsets_below_the_minimum_are_lost_once_and_at_once() -> None:
    model = Model([Queue(300, 1000)])
    result = read(model, [(10, 900)], FAST)
    assert [(part.start, part.end, cause) for part, cause in result.lost] == [(10, 300, Cause.TRUNCATED)]
    assert result.of(0) == list(range(300, 900))
    assert model.time.now - 1000 < 1
    assert len(model.asked) < 60


def test_a_range_below_the_minimum_is_lost_up_to_its_end() -> None:
    result = read(Model([Queue(300, 1000)]), [(10, 200)])
    assert [(part.start, part.end) for part, _ in result.lost] == [(10, 200)]


def test_a_queue_that_went_back_is_lost_after_the_grace_time() -> None:
    model = Model([Queue(0, 60), Queue(0, 50)])
    result = read(model, [(0, 100), (0, 50)], FAST)
    assert [(part.start, part.end, cause) for part, cause in result.lost] == [(60, 100, Cause.WENT_BACK)]
    assert result.delivered == rows((0, 60), (0, 50))
    assert 15 <= model.time.now - 1000 < 20


@pytest.mark.parametrize(
    ("code", "remark", "cause"),
    [(17, "topic[t] not exist", Cause.TOPIC_DELETED), (29, "queueId[0] is illegal", Cause.QUEUE_GONE)],
)
def test_codes_17_and_29_are_loss_after_the_grace_time_only(
    code: int, remark: str, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model([Queue(0, 100)])
    real, gone = model.answer, EmptyAnswer(code, remark, None, None, None, 0)
    monkeypatch.setattr(model, "answer", lambda *a: gone if model.time.now < 1010 else real(*a))
    assert (read(model, [(0, 100)]).of(0), model.time.now >= 1010) == (list(range(100)), True)
    monkeypatch.setattr(model, "answer", lambda *a: gone)
    result = read(model, [(0, 100)], PullSettings(grace_s=2.0))
    assert result.lost == [(OffsetRange(result.lost[0][0].queue, 0, 100), cause)]


def test_topic_deleted_during_a_read_is_reported_without_route(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model([Queue(0, 9000, deleted_at=1000.0015)])
    real, without_route = model.connect, []

    def connect(deadline: object) -> object:
        if model.time.now > 1000.0015:
            without_route.append(model.time.now)
            raise RouteNotFound("the name server knows no such topic", topic="t")
        return real(deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "connect", connect)
    result = read(model, [(0, 9000)], FAST)
    assert (result.error, bool(without_route)) == (None, True)
    assert {cause for _, cause in result.lost} == {Cause.TOPIC_DELETED}
    assert sorted(result.lost_offsets() + result.delivered) == rows((0, 9000))
    assert model.time.now - 1000 < 20


def test_messages_read_before_a_loss_are_delivered_and_not_lost() -> None:
    """The first answer is late; when it says that the topic is gone, those behind it are there already."""
    model = Model([Queue(0, 1000)])
    model.latency = lambda _, start: 5.0 if start == 8 else 0.001
    real = model.answer
    refused = EmptyAnswer(17, "topic[t] not exist", None, None, None, 0)
    model.answer = lambda queue, start, count: refused if start <= 8 < start + count else real(queue, start, count)  # type: ignore[method-assign]
    result = read(model, [(0, 1000)])
    lost = result.lost_offsets()
    assert lost
    assert sorted(lost + result.delivered) == rows((0, 1000))
    assert len(result.delivered) > 500


def test_an_error_of_the_loss_report_ends_the_read() -> None:
    model = Model([Queue(300, 1000)])

    def fail(part: OffsetRange, cause: Cause) -> None:
        raise AccessDenied("stop here")

    ranges = [OffsetRange(read(Model([Queue(300, 301)]), [(0, 1)]).lost[0][0].queue, 0, 1000)]
    with pytest.raises(AccessDenied, match="stop here"):
        list(model.reader(ranges, PullSettings(), fail).fetch())
    assert model.streams[0].closed


# --- bounds


@pytest.mark.parametrize("size", [100, 10_000, 200_000, 1 << 20])
def test_bytes_in_flight_are_bounded(size: int) -> None:
    max_bytes = 2 << 20
    count = min(2000, (24 << 20) // size)
    model = Model([Queue(0, count, message_bytes=size)])
    assert len(read(model, [(0, count)], PullSettings(max_bytes_in_flight=max_bytes)).delivered) == count
    assert model.max_in_flight <= max(max_bytes, 8 * size)  # the size is not known before the first answer


def test_a_late_first_answer_does_not_fill_the_memory() -> None:
    """Everything behind it could be read meanwhile, but only so much is collected."""
    size, max_bytes = 10_000, 1 << 20
    model = Model([Queue(0, 6000, message_bytes=size)])
    model.latency = lambda _, start: 15.0 if start in range(100, 140) else 0.001
    assert read(model, [(0, 6000)], PullSettings(max_bytes_in_flight=max_bytes)).of(0) == list(range(6000))
    assert model.max_filled <= BUFFER_BYTES + 4 * max_bytes


def test_a_consumer_that_pauses_is_no_silent_broker() -> None:
    model = Model([Queue(0, 30_000)])
    buffers = 0
    ranges = [OffsetRange(read(Model([Queue(300, 301)]), [(0, 1)]).lost[0][0].queue, 0, 30_000)]
    for _ in model.reader(ranges, PullSettings(offsets_per_fetch=200, read_deadline_s=30), lambda *_: None).fetch():
        model.time.advance(1000.0)
        buffers += 1
    assert buffers > 3
    assert len(model.streams) == 1


# --- connections


def test_pulls_under_way_are_repeated_after_a_broken_connection() -> None:
    model = Model([Queue(0, 2000)], Accidents(cut=0.3), seed=5)
    assert read(model, [(0, 2000)], FAST).of(0) == list(range(2000))
    assert len(model.streams) > 2


@pytest.mark.parametrize("leaves", ["breaks", "moves"])
def test_answers_complete_before_a_reconnect_are_not_read_again(monkeypatch: pytest.MonkeyPatch, leaves: str) -> None:
    """Else a read that needs more answers than any connection gives has no end."""
    model = Model([Queue(0, 2000)])
    model.max_asked = 10_000
    receive, receipts = Stream.receive, itertools.count(1)

    def short_lived(stream: Stream, timeout_s: float) -> bool:
        stream.address = f"h:{len(model.streams)}"
        if next(receipts) % 20 == 0:
            if leaves == "breaks":
                raise ConnectionLost("the connection broke while pulling", stream.address)
            model.suggests ^= 1
        return receive(stream, timeout_s)

    monkeypatch.setattr(Stream, "receive", short_lived)
    model.on_hint = lambda broker_id: leaves == "moves" and broker_id is not None
    result = read(model, [(0, 2000)], PullSettings(batch_size=1, depth=4))
    assert (result.of(0), result.lost, result.error) == (list(range(2000)), [], None)
    assert len(model.streams) > 5


@pytest.mark.parametrize("at", [0, 500])
def test_an_answer_that_ends_a_read_skips_nothing(at: int) -> None:
    model = Model([Queue(0, 2000)])
    real, bad = model.answer, EmptyAnswer(0, "no such code", None, None, None, None)
    model.answer = lambda queue, start, count: bad if start <= at < start + count else real(queue, start, count)  # type: ignore[method-assign]
    model.latency = lambda queue, start: 0.5 if start <= at < start + 50 else 0.001  # when others are there
    result = read(model, [(0, 2000)], PullSettings(batch_size=50))
    assert isinstance(result.error, BrokerError)
    assert result.of(0) == list(range(len(result.delivered)))
    assert len(result.delivered) <= at


def test_a_broker_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Queue(0, 200)])
    real = model.connect

    def connect(deadline: object) -> object:
        if model.time.now < 1020:
            raise ConnectionLost("cannot connect: Connection refused", "h:1")
        return real(deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "connect", connect)
    assert (read(model, [(0, 200)]).of(0), model.time.now >= 1020) == (list(range(200)), True)
    monkeypatch.setattr(model, "connect", lambda _: connect(None) if model.time.now < 0 else _refuse())
    result = read(model, [(0, 200)], PullSettings(read_deadline_s=10))
    assert isinstance(result.error, ConnectionLost)
    assert "refused" in str(result.error)


def test_read_error_names_the_first_cause_not_the_last_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker is killed, its route goes, and in the end the name server has no time left to answer in."""
    model = Model([Queue(0, 200)])

    def connect(deadline: Deadline) -> object:
        if model.time.now < 1002:
            _refuse()
        if model.time.now < 1009.9:
            raise RouteNotFound("the name server knows no such topic, or all its brokers are down", "ns:1", 17, "t")
        raise CallTimeout("no name server answers: no progress in time", "ns:1", remedy="Check option 'nameServer'")

    monkeypatch.setattr(model, "connect", connect)
    error = read(model, [(0, 200)], PullSettings(read_deadline_s=10)).error
    assert isinstance(error, ConnectionLost)
    text = str(error)
    for part in ("cannot connect: Connection refused", "at h:1", "tried ", " times in 10", "at last: "):
        assert part in text


def _refuse() -> None:
    raise ConnectionLost("cannot connect: Connection refused", "h:1")


def test_a_broker_that_falls_silent_is_left_for_a_new_connection() -> None:
    model = Model([Queue(0, 500)], Accidents(silent=0.3), seed=1)
    assert read(model, [(0, 500)], FAST).of(0) == list(range(500))
    assert len(model.streams) > 1
    assert model.time.now - 1000 >= MAX_BROKER_SILENCE_S


def test_a_broker_that_drains_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model([Queue(0, 500)])
    real = model.answer
    bye = EmptyAnswer(1500, "bye", None, None, None, 0)
    monkeypatch.setattr(model, "answer", lambda *a: bye if len(model.streams) == 1 and a[1] > 100 else real(*a))
    assert read(model, [(0, 500)]).of(0) == list(range(500))
    assert len(model.streams) == 2


class TestReplicas:
    """A slave may be read where the broker suggests it; what is lost only the master knows."""

    def model(self, slave_has: int, size: int = 3000, slave_low: int = 0) -> Model:
        """Number 1 is a slave that has the queue up to ``slave_has``; the master always suggests it."""
        model = Model([Queue(0, size)])
        model.suggests = 1
        at = {"replica": 0, "suggested": 0}
        self.moves = [0]
        self.away: tuple[float, float] = (0, 0)  # since when and until when the master cannot be reached
        slave = Queue(slave_low, slave_has)
        real = model.answer

        def hint(suggested: int | None) -> bool:
            broker = suggested or 0
            if broker == at["replica"]:
                return False
            if broker != at["suggested"]:
                self.moves.append(broker)
            at["suggested"] = broker
            return True

        def connect(deadline: object) -> object:
            if not at["suggested"] and self.away[0] <= model.time.now < self.away[1]:
                raise ConnectionLost("cannot connect: Connection refused", "h:0")
            stream = model_connect(deadline)  # type: ignore[arg-type]
            at["replica"] = at["suggested"]
            stream.address = f"h:{at['replica']}"
            return stream

        def answer(queue: int, start: int, count: int) -> object:
            if model.streams[-1].address == "h:1":
                return slave.pull(model.time.now, start, count)
            return real(queue, start, count)

        model_connect = model.connect
        model.on_hint, model.connect, model.answer = hint, connect, answer  # type: ignore[assignment,method-assign]
        return model

    def test_a_suggestion_is_followed(self) -> None:
        model = self.model(3000)
        assert read(model, [(0, 3000)], FAST).of(0) == list(range(3000))
        assert self.moves == [0, 1]

    @pytest.mark.parametrize("slave_has", [0, 500, 2999])
    def test_what_a_slave_lacks_the_master_is_asked_for(self, slave_has: int) -> None:
        model = self.model(slave_has)
        result = read(model, [(0, 3000)], FAST)
        assert (result.of(0), result.lost) == (list(range(3000)), [])
        assert model.time.now - 1000 < 5

    def test_what_was_removed_from_a_slave_alone_is_not_lost(self) -> None:
        result = read(self.model(3000, slave_low=100), [(0, 3000)], FAST)
        assert (result.of(0), result.lost) == (list(range(3000)), [])

    def test_what_the_master_lacks_too_is_lost(self) -> None:
        model = self.model(500, 600)
        result = read(model, [(0, 700)], FAST)
        assert result.of(0) == list(range(600))
        assert [(part.start, part.end) for part, _ in result.lost] == [(600, 700)]

    @pytest.mark.parametrize("slave_until", [9999.0, 1001.0])
    @pytest.mark.parametrize("dense", [False, True])
    def test_a_slave_does_not_use_up_the_time_that_its_master_has(self, slave_until: float, dense: bool) -> None:
        """The master comes back late, and is not through with its store then. The slave may be gone meanwhile."""
        model = self.model(3000)
        partial = Queue(0, 3000, gaps=frozenset(range(500, 600))) if dense else Queue(0, 500)
        self.away = (1000.001, 1020)

        def answer(queue: int, start: int, count: int) -> object:
            if model.streams[-1].address == "h:1" and model.time.now >= slave_until:
                raise ConnectionLost("the connection broke", "h:1")
            there = model.queues[0] if model.time.now >= 1023 else partial
            return there.pull(model.time.now, start, count)

        model.answer = answer  # type: ignore[method-assign,assignment]
        result = read(model, [(0, 3000)], FAST, dense=dense)
        assert (result.of(0), result.lost, result.error) == (list(range(3000)), [], None)

    def test_a_busy_answer_suggests_nothing(self) -> None:
        model = self.model(3000)
        model.accidents.busy = 0.5
        real = model.answer
        busy = EmptyAnswer(2, "busy", None, None, None, None)
        model.answer = lambda *a: busy if model.rng.random() < 0.3 else real(*a)  # type: ignore[method-assign]
        assert read(model, [(0, 3000)], FAST).of(0) == list(range(3000))
        assert self.moves == [0, 1]


# --- everything together


@settings(deadline=None, max_examples=examples(80))
@given(st.lists(queues(), min_size=1, max_size=3), accidents, pull_settings, st.integers(0, 1 << 32), st.data())
def test_every_offset_is_delivered_once_in_order_or_lost_once(
    given_queues: list[Queue], accident: Accidents, how: PullSettings, seed: int, data: st.DataObject
) -> None:
    bounds = [tuple(sorted((data.draw(st.integers(q.low, q.high)), data.draw(st.integers(q.low, q.high)))))
              for q in given_queues]  # fmt: skip
    stored = [q.stored() for q in given_queues]
    model = Model(given_queues, accident, seed)
    model.buffer_bytes = 256 << 10
    doubting = not any(q.batches for q in given_queues) and data.draw(st.booleans())
    result = read(model, bounds, how, dense=doubting)  # type: ignore[arg-type]
    assert result.error is None
    assert result.delivered == sorted(set(result.delivered))
    lost = result.lost_offsets()
    assert len(lost) == len(set(lost))
    assert not set(lost) & set(result.delivered)
    wanted = {(i, n) for i, (start, end) in enumerate(bounds) for n in range(start, end) if n in stored[i]}
    assert set(result.delivered) <= wanted
    assert wanted <= set(result.delivered) | set(lost)
    if doubting:
        assert set(result.delivered) | set(lost) == set(rows(*bounds))  # type: ignore[arg-type]
    for part, cause in result.lost:
        queue = given_queues[part.queue.queue_id]
        if cause is Cause.TRUNCATED:
            assert part.end <= queue.low or (doubting and queue.gaps.issuperset(range(part.start, part.end)))
        else:
            assert cause is Cause.TOPIC_DELETED
            assert queue.deleted_at is not None
