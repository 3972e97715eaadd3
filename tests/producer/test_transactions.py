"""Half messages: what may become of them, and what a process answers when a broker asks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Response, SysFlag
from rocketmq_spark.errors import (
    CallTimeout,
    ClosedError,
    LocalProtocolError,
    MessageIllegal,
    MessageRefused,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
    SendFailed,
)
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import HalfPlace, HalfState, TransactionState, stored_content_digest
from rocketmq_spark.producer import transactions
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.transactions import TransactionProducer
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire.properties import decode_properties
from tests.consumer.messages import message
from tests.fakes.sender import ScriptedSender, refused
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import ManualTimer, Time

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
COPY = HalfPlace("T", "a", "g", "copy", "copy", 9, 99)
OTHER = HalfPlace("mine", "b", "g", "copy", "copy", 3, 33)


class Halves(ScriptedSender):
    """Its ids are those of a broker."""

    def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
        result = super().send(queue, request, deadline)
        of_script = (result.offset_msg_id or "").startswith("OFF")
        return result._replace(offset_msg_id=f"{result.queue_offset:032X}") if of_script else result


class Shop:
    """A producer with a check whose answers are scripted."""

    def __init__(self) -> None:
        self.time = Time()
        self.sender = Halves(self.time)
        self.asked: list[str] = []
        self.answers: list[object] = []
        settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)
        self.producer = TransactionProducer(
            self.sender, settings, self.check, make_timer=lambda name: ManualTimer(self.time)
        )

    def check(self, message: object) -> TransactionState:
        self.asked.append(message.msg_id)  # type: ignore[attr-defined]
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[return-value]

    def question(self, msg_id: str, place: HalfPlace = COPY, **other: Any) -> TransactionState:
        assert self.sender.check is not None
        asked = replace(message(0), body=b"x")
        properties = {**other.pop("properties", {}), "UNIQ_KEY": msg_id}
        asked = replace(asked, properties=properties, **other)
        found = self.sender.check(asked, place._replace(digest=stored_content_digest(asked)))
        return found if isinstance(found, TransactionState) else found()

    def ends(self) -> list[tuple[HalfPlace, TransactionState]]:
        """The decisions and the places that they are about, without the content of their messages."""
        return [(place._replace(digest=b""), decision) for place, decision in self.sender.seen("end")]


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.producer.close()


def test_ended_block_commits_and_raising_block_rolls_back(shop: Shop) -> None:
    with shop.producer.transaction(Message("T", b"x", keys=["7"])) as half:
        assert half.state is HalfState.PREPARED
        assert shop.ends() == []
    assert half.state is HalfState.COMMITTED
    with pytest.raises(KeyError), shop.producer.transaction(Message("T", b"y")) as second:
        raise KeyError
    assert second.state is HalfState.ROLLED_BACK
    (request, _) = shop.sender.requests
    assert request.sys_flag & SysFlag.TRANSACTION_PREPARED
    assert decode_properties(request.properties)[Property.TRANSACTION_PREPARED] == "true"
    assert decode_properties(request.properties)[Property.UNIQ_KEY] == half.result.msg_id
    assert [(place.msg_id, decision) for place, decision in shop.ends()] == [
        (half.result.msg_id, COMMIT), (second.result.msg_id, ROLLBACK)
    ]  # fmt: skip


def test_a_decision_is_about_the_place_that_the_broker_gave(shop: Shop) -> None:
    where = SendResult(SendStatus.SEND_OK, "", MessageQueue("T", "b", 1), 41, "7F00000100002A9F00000000000003E8", "TX")
    shop.sender.script = [lambda queue, request: where]
    half = shop.producer.send_half(Message("T", b"x"))
    assert half.result.queue_offset is None
    half.commit()
    ((place, _),) = shop.ends()
    assert place == HalfPlace("T", "b", "g", half.result.msg_id, "TX", 41, 1000)


def test_each_half_message_is_decided_once(shop: Shop) -> None:
    half = shop.producer.send_half(Message("T", b"x"))
    half.rollback()
    for again in (half.commit, half.rollback):
        with pytest.raises(LocalProtocolError, match=r"is not possible: .* is ROLLED_BACK"):
            again()
    assert len(shop.ends()) == 1
    with shop.producer.transaction(Message("T", b"y")) as early:
        early.rollback()
    assert early.state is HalfState.ROLLED_BACK


def test_unsent_decision_may_be_repeated_and_unanswered_may_not(shop: Shop) -> None:
    half = shop.producer.send_half(Message("T", b"x"))
    unsent = CallTimeout("no connection")
    unsent.unsent = True
    shop.sender.ends = [unsent, CallTimeout("no answer")]
    with pytest.raises(CallTimeout):
        half.commit()
    assert half.state is HalfState.PREPARED
    with pytest.raises(CallTimeout):
        half.commit()
    assert half.state is HalfState.UNKNOWN
    with pytest.raises(LocalProtocolError, match="is UNKNOWN"):
        half.commit()
    shop.answers = [ROLLBACK]
    assert shop.question(half.result.msg_id) is ROLLBACK, "the user's function knows"


def test_block_whose_decision_is_lost_logs_it_and_does_not_raise(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    shop.sender.ends = [CallTimeout("no answer")]
    with caplog.at_level(logging.WARNING), shop.producer.transaction(Message("T", b"x")) as half:
        pass
    assert half.state is HalfState.UNKNOWN
    assert f"half message {half.result.msg_id} of T may not have arrived" in caplog.text


def unsent() -> CallTimeout:
    error = CallTimeout("no connection")
    error.unsent = True
    return error


def test_block_whose_decision_was_not_sent_leaves_it_to_checker(shop: Shop) -> None:
    """Its broker was killed between send and decision: nobody here will decide any more."""
    shop.sender.ends = [unsent()]
    with shop.producer.transaction(Message("T", b"x")) as half:
        pass
    assert half.state is HalfState.UNKNOWN
    shop.sender.ends = [unsent()]
    with pytest.raises(KeyError), shop.producer.transaction(Message("T", b"y")) as second:
        raise KeyError
    shop.answers = [COMMIT, ROLLBACK]
    assert shop.question(half.result.msg_id) is COMMIT
    assert shop.question(second.result.msg_id) is ROLLBACK
    assert shop.asked == [half.result.msg_id, second.result.msg_id]


def test_what_nobody_can_decide_any_more_is_left_to_the_function(shop: Shop) -> None:
    half = shop.producer.send_half(Message("T", b"x"))
    msg_id = half.result.msg_id
    assert shop.question(msg_id) is UNKNOWN
    del half
    shop.answers = [COMMIT]
    assert shop.question(msg_id) is COMMIT
    assert shop.asked == [msg_id]


def test_what_was_decided_is_remembered_without_the_message(shop: Shop) -> None:
    half = shop.producer.send_half(message := Message("T", b"x"))
    half.commit()
    seen, msg_id = weakref.ref(half), half.result.msg_id
    del half, message
    assert seen() is None
    assert shop.question(msg_id) is ROLLBACK, "a question that crosses the commit"


def test_a_forked_process_knows_nothing_of_its_parent_s(shop: Shop) -> None:
    """What it answers to a broker, after the parent has died, must not be that it waits for a decision."""
    half = shop.producer.send_half(Message("T", b"x"))
    shop.answers = [COMMIT]
    with transactions._registry._lock:  # of another thread: no child gets it back
        child = os.fork()
        if child == 0:  # pragma: no cover
            signal.alarm(30)
            with contextlib.suppress(Exception):
                os._exit(0 if shop.question(half.result.msg_id) is COMMIT else 1)
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert shop.question(half.result.msg_id) is UNKNOWN


def test_undecided_half_is_unknown_and_commits_its_latest_copy(shop: Shop) -> None:
    half = shop.producer.send_half(Message("T", b"x"))
    assert shop.question(half.result.msg_id) is UNKNOWN
    half.commit()
    assert shop.ends() == [(COPY, COMMIT)]
    assert shop.asked == []


@pytest.mark.parametrize(
    "strange",
    [
        {"topic": "mine"},
        {"body": b"y"},
        {"properties": {"UNIQ_KEY": "ID", "a": "b"}},
        {"properties": {"UNIQ_KEY": "ID", "KEYS": "k"}},
        {"properties": {"UNIQ_KEY": "ID", "TIMER_DELIVER_MS": "9" * 13}},
        {"properties": {"UNIQ_KEY": "ID", "INNER_MULTI_DISPATCH": "%LMQ%x"}},
    ],
)
def test_a_decision_never_goes_to_another_message_with_the_id(shop: Shop, strange: dict[str, Any]) -> None:
    """Anyone who may send to some topic can store a half message with any id, and have its broker ask about it."""
    half = shop.producer.send_half(Message("T", b"x"))
    assert shop.question(half.result.msg_id, OTHER, **strange) is UNKNOWN
    half.commit()
    ((place, decision),) = shop.ends()
    assert (place.topic, place.half_offset, decision) == ("T", 100, COMMIT)
    shop.answers = [UNKNOWN]
    assert shop.question(half.result.msg_id, OTHER, **strange) is UNKNOWN
    assert shop.question(half.result.msg_id) is ROLLBACK, "a copy that crosses the commit"
    later = shop.producer.send_half(Message("T", b"x"))
    shop.question(later.result.msg_id)
    shop.question(later.result.msg_id, OTHER, **strange)
    later.commit()
    assert shop.ends()[1:] == [(COPY, COMMIT)]
    assert len(shop.asked) == 1


def test_a_copy_has_what_brokers_add(shop: Shop) -> None:
    sent = {"TAGS": "t", "KEYS": "a b", "own": "é"}
    half = shop.producer.send_half(Message("T", b"x", tags="t", keys=["a", "b"], properties={"own": "é"}))
    added = ("PGROUP", "TRAN_MSG", "REAL_TOPIC", "REAL_QID", "TRANSACTION_CHECK_TIMES", "TRAN_PREPARED_QUEUE_OFFSET",
             "__transactionId__", "MSG_REGION", "TRACE_ON", "CLUSTER", "WAIT", "__CRC32#")  # fmt: skip
    properties = {"UNIQ_KEY": half.result.msg_id, **sent, **dict.fromkeys(added, "1")}
    check = shop.sender.check
    assert check is not None
    copy = replace(message(0), body=b"x", properties=properties)
    assert check(copy, COPY._replace(digest=stored_content_digest(copy))) is UNKNOWN
    half.commit()
    assert shop.ends() == [(COPY, COMMIT)]


@pytest.mark.parametrize("decision", [COMMIT, ROLLBACK])
def test_checker_is_not_asked_while_a_decision_is_under_way(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, decision: TransactionState
) -> None:
    """What it looks at may not be there yet, and its answer would be about a copy beside that one."""
    half = shop.producer.send_half(Message("T", b"x"))
    heard: list[TransactionState] = []

    def meanwhile(place: HalfPlace, decision: TransactionState, deadline: Deadline) -> bool:
        heard.append(shop.question(half.result.msg_id))
        return True

    monkeypatch.setattr(shop.sender, "end_transaction", meanwhile)
    (half.commit if decision is COMMIT else half.rollback)()
    assert (heard, shop.asked) == ([UNKNOWN], [])


def test_a_question_that_crosses_a_commit_is_about_a_copy(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    half = shop.producer.send_half(Message("T", b"x"))
    half.commit()
    assert shop.question(half.result.msg_id) is ROLLBACK
    monkeypatch.setattr(transactions, "RACE_WINDOW_S", 0.0)
    late = shop.producer.send_half(Message("T", b"x"))
    late.commit()
    assert shop.question(late.result.msg_id) is COMMIT, "its broker has lost the decision"
    shop.sender.proves = False
    sent = shop.producer.send_half(Message("T", b"x"))
    sent.commit()
    assert shop.question(sent.result.msg_id) is COMMIT, "it may never have had it"
    dropped = shop.producer.send_half(Message("T", b"x"))
    dropped.rollback()
    assert shop.question(dropped.result.msg_id) is ROLLBACK
    assert shop.asked == []


@pytest.mark.parametrize(
    ("answer", "expected", "said"),
    [
        (COMMIT, COMMIT, None),
        ("ROLLBACK", ROLLBACK, None),
        ("UNKNOWN", UNKNOWN, None),
        (None, UNKNOWN, "returned None for message of a process that ended of T; expected COMMIT, "),
        (True, UNKNOWN, "returned True"),
        (ValueError("db is away"), UNKNOWN, "db is away"),
        (SystemExit(3), UNKNOWN, "transaction_check failed"),
    ],
)
def test_the_user_s_function_decides_about_others(
    shop: Shop, caplog: pytest.LogCaptureFixture, answer: object, expected: TransactionState, said: str | None
) -> None:
    shop.answers = [answer]
    assert shop.question("of a process that ended") is expected
    assert shop.asked == ["of a process that ended"]
    assert said is None or said in caplog.text


def test_environments_sharing_a_topic_check_only_own_halves(shop: Shop) -> None:
    """Brokers ask any producer of a group, and the other environment's function would find nothing that was saved."""
    plain = ProducerSettings(group="g", environment=Environment.of("2", "2"), heartbeat_s=0, route_refresh_s=0)
    producer = TransactionProducer(shop.sender, plain, shop.check, make_timer=lambda name: ManualTimer(shop.time))
    producer.send_half(Message("T", b"x")).commit()
    ((place, _),) = shop.ends()
    (request,) = shop.sender.requests
    assert (shop.sender.seen("join")[-1][0], request.group, place.group) == ("g_env_2",) * 3
    producer.close()
    without = TransactionProducer(shop.sender, plain, make_timer=lambda name: ManualTimer(shop.time))
    assert without.settings.group == "g"
    without.close()


def test_a_half_message_that_may_be_stored_is_not_sent_again(shop: Shop) -> None:
    shop.sender.script = [lambda queue, request: CallTimeout("no answer")]
    with pytest.raises(CallTimeout):
        shop.producer.send_half(Message("T", b"x"))
    assert len(shop.sender.calls) == 1
    shop.sender.script = [lambda queue, request: refused(Response.SERVICE_NOT_AVAILABLE)]
    shop.producer.send_half(Message("T", b"x"))
    assert len(shop.sender.calls) == 3, "one that was refused is"


def test_nor_is_it_spooled(shop: Shop) -> None:
    """It would be delivered without a decision."""
    spool = FakeSpool()
    settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)
    producer = TransactionProducer(
        shop.sender, settings, shop.check, make_timer=lambda name: ManualTimer(shop.time), spool=spool
    )
    shop.sender.by_broker = dict.fromkeys("ab", lambda: refused(Response.SERVICE_NOT_AVAILABLE))
    with pytest.raises(RocketMQError):
        producer.send_half(Message("T", b"x"))
    assert spool.kept == []
    producer.send(Message("T", b"x"))
    assert len(spool.kept) == 1, "as an ordinary one is"
    producer.close()


class Nowhere:
    """Finds nothing, for a half message does not lie in its topic."""

    def __init__(self) -> None:
        self.looks: list[object] = []

    def end(self, queue: MessageQueue) -> Any:
        self.looks.append(queue)

    def find_stored(self, *asked: object) -> Any:
        self.looks.append(asked)

    def stop(self) -> None:
        """Nothing is under way."""


def test_nor_is_it_looked_up(shop: Shop) -> None:
    found = Nowhere()
    settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)
    producer = TransactionProducer(
        shop.sender, settings, shop.check, make_timer=lambda name: ManualTimer(shop.time), stored_ids=found
    )
    shop.sender.script = [lambda queue, request: CallTimeout("no answer")]
    with pytest.raises(CallTimeout):
        producer.send_half(Message("T", b"x"))
    assert (len(shop.sender.calls), found.looks) == (1, [])
    producer.close()


def test_a_forked_process_decides_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    half = shop.producer.send_half(Message("T", b"x"))
    with monkeypatch.context() as forked:
        forked.setattr("rocketmq_spark.base.process._pid", [-1])
        with pytest.raises(ClosedError, match="was forked"):
            half.commit()
    assert (half.state, shop.ends()) == (HalfState.PREPARED, [])
    half.commit()


def test_half_message_stored_less_safely_is_rolled_back(shop: Shop) -> None:
    shop.sender.script = [lambda queue, request: SendResult(SendStatus.FLUSH_DISK_TIMEOUT, "", queue, 7, "0" * 32)]
    with pytest.raises(SendFailed, match="FLUSH_DISK_TIMEOUT, and was rolled back"):
        shop.producer.send_half(Message("T", b"x"))
    assert [decision for _, decision in shop.ends()] == [ROLLBACK]


def test_failed_rollback_is_answered_when_the_broker_checks(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    """A Proxy does not keep what it would have to know for it."""
    shop.sender.script = [lambda queue, request: SendResult(SendStatus.FLUSH_DISK_TIMEOUT, "ID", queue, 7, "0" * 32)]
    shop.sender.ends = [MessageIllegal("no such transaction")]
    with pytest.raises(SendFailed, match="FLUSH_DISK_TIMEOUT, and its rollback may not have arrived"):
        shop.producer.send_half(Message("T", b"x"))
    assert "no such transaction" in caplog.text
    assert shop.question(next(reversed(transactions._registry._recent_fates))) is ROLLBACK
    assert shop.asked == []


def test_nor_is_that_sent_again_where_sends_must_be_stored_well(shop: Shop) -> None:
    """The second one would have the id of the first, which would stay with its broker undecided."""
    settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, store_must_be_ok=True)
    producer = TransactionProducer(shop.sender, settings, shop.check, make_timer=lambda name: ManualTimer(shop.time))
    shop.sender.script = [lambda queue, request: SendResult(SendStatus.FLUSH_DISK_TIMEOUT, "", queue, 7, "0" * 32)]
    with pytest.raises(SendFailed, match="FLUSH_DISK_TIMEOUT, and was rolled back"):
        producer.send_half(Message("T", b"x"))
    assert (len(shop.sender.calls), [decision for _, decision in shop.ends()]) == (1, [ROLLBACK])
    producer.close()


def test_what_cannot_be_half_is_refused_before_anything_is_sent(shop: Shop) -> None:
    with pytest.raises(MessageRefused, match="priority"):
        shop.producer.send_half(Message("T", b"x", priority=1))
    with pytest.raises(MessageRefused, match="Properties of"):
        shop.producer.send_half(Message("T", b"x", properties={"a": "b" * 32_200}))
    plain = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)
    without = TransactionProducer(shop.sender, plain, make_timer=lambda name: ManualTimer(shop.time))
    with pytest.raises(OptionError, match="transaction_check"):
        without.send_half(Message("T", b"x"))
    without.close()
    assert shop.sender.calls == []


def test_a_place_that_cannot_be_read_is_an_error(shop: Shop) -> None:
    shop.sender.script = [lambda queue, request: SendResult(SendStatus.SEND_OK, "", queue, 7, "no number")]
    with pytest.raises(RemoteProtocolError, match="no position"):
        shop.producer.send_half(Message("T", b"x"))


def test_remembered_decisions_are_bounded_but_open_halves_stay(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MAX_REMEMBERED_FATES", 3)
    halves = [shop.producer.send_half(Message("T", b"x")) for _ in range(5)]
    msg_ids = [half.result.msg_id for half in halves]
    assert [shop.question(msg_id) for msg_id in msg_ids] == [UNKNOWN] * 5
    for half in halves:
        half.commit()
    del half, halves
    shop.answers = [COMMIT, COMMIT]
    assert [shop.question(msg_id) for msg_id in msg_ids] == [COMMIT, COMMIT, ROLLBACK, ROLLBACK, ROLLBACK]
    assert shop.asked == msg_ids[:2]


def test_a_decision_is_remembered_however_long_it_took(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "MAX_REMEMBERED_FATES", 3)
    half = shop.producer.send_half(Message("T", b"x"))
    msg_id = half.result.msg_id
    for _ in range(5):
        shop.producer.send_half(Message("T", b"y")).commit()
    half.commit()
    del half
    assert (shop.question(msg_id), shop.asked) == (ROLLBACK, [])


def test_unnamed_broker_in_check_is_known_by_its_message_place(shop: Shop) -> None:
    """Those before 5.1 do not."""
    half = shop.producer.send_half(Message("T", b"x"))
    assert shop.question(half.result.msg_id, COPY._replace(broker_name="")) is UNKNOWN
    half.commit()
    assert half.result.queue is not None
    assert shop.ends() == [(COPY._replace(broker_name=half.result.queue.broker_name), COMMIT)]


def test_unanswered_half_is_rolled_back_despite_second_try(shop: Shop) -> None:
    """The function is asked by key, and would find what the second one saved."""
    shop.sender.script = [lambda queue, request: CallTimeout("no answer")]
    with pytest.raises(CallTimeout):
        shop.producer.send_half(Message("T", b"x", keys=["7"]))
    with shop.producer.transaction(Message("T", b"x", keys=["7"])):
        pass
    first, _ = shop.sender.requests
    assert shop.question(decode_properties(first.properties)[Property.UNIQ_KEY], properties={"KEYS": "7"}) is ROLLBACK
    assert shop.asked == []


def test_what_is_stored_less_safely_is_not_held_by_its_error(shop: Shop) -> None:
    shop.sender.script = [lambda queue, request: SendResult(SendStatus.FLUSH_DISK_TIMEOUT, "", queue, 7, "0" * 32)]
    shop.sender.ends = [unsent()]
    with pytest.raises(SendFailed, match="FLUSH_DISK_TIMEOUT, and its rollback may not have arrived") as kept:
        shop.producer.send_half(Message("T", b"x"))
    (request,) = shop.sender.requests
    assert shop.question(decode_properties(request.properties)[Property.UNIQ_KEY]) is ROLLBACK
    assert kept.tb is not None


@pytest.mark.parametrize(
    ("error", "expected"), [(None, ROLLBACK), (unsent(), UNKNOWN), (CallTimeout("no answer"), COMMIT)]
)
def test_check_during_a_commit_waits_for_the_commit(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: CallTimeout | None, expected: TransactionState
) -> None:
    """Its broker may ask again after a minute only, when it would be taken for one that has lost the commit."""
    half = shop.producer.send_half(Message("T", b"x"))
    found: list[Any] = []
    send = shop.sender.end_transaction

    def crossed(*given: Any) -> bool:
        assert shop.sender.check is not None
        copy = replace(message(0), body=b"x", properties={"UNIQ_KEY": half.result.msg_id})
        found.append(shop.sender.check(copy, COPY._replace(digest=stored_content_digest(copy))))
        return send(*given)

    with monkeypatch.context() as crossing:
        crossing.setattr(shop.sender, "end_transaction", crossed)
        shop.sender.ends = [] if error is None else [error]
        with contextlib.nullcontext() if error is None else pytest.raises(CallTimeout):
            half.commit()
    shop.answers = [COMMIT]
    assert found[0]() is expected
    if expected is UNKNOWN:
        half.commit()
        assert shop.ends()[-1] == (COPY, COMMIT)
