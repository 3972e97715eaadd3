from __future__ import annotations

from dataclasses import replace

import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.send_back import SendBack
from rocketmq_spark.errors import (
    AccessDenied,
    CallTimeout,
    ConnectionLost,
    MessageIllegal,
    MessageRefused,
    RocketMQError,
)
from tests.consumer.group import GroupBench
from tests.consumer.messages import QUEUE, message
from tests.fakes.group_member import FakeMember


@pytest.fixture
def port(group: GroupBench) -> FakeMember:
    group.brokers.send(QUEUE, b"0", b"1", b"2", b"3")
    return FakeMember(group.brokers, "me")


def test_what_brokers_do_not_take_back_goes_as_a_copy(port: FakeMember, caplog) -> None:
    held = MemberState(Thresholds())
    send_back = SendBack(port, "g", 16, held)
    assert send_back(message(1, b"1"), 5)
    assert port.calls == [("send_back", (b"1", 5, 16))]
    port.brokers.failing["send_back"] = CallTimeout("late")
    assert send_back(message(2, b"2"), 5)
    assert port.calls[1:] == [("send_back", (b"2", 5, 16)), ("send_to_retry", b"2")]
    port.brokers.failing["send_to_retry"] = ConnectionLost("gone")
    assert not send_back(message(3, b"3"), 5)
    assert held.stats().sent_back == 2
    assert "could not be copied to the retry topic" in caplog.text


def test_a_message_of_an_inner_batch_goes_as_a_copy_at_once(port: FakeMember, caplog) -> None:
    """A broker could take back its whole batch only, and refuses."""
    send_back = SendBack(port, "g", 16, MemberState(Thresholds()))
    assert send_back(replace(message(1, b"1"), sys_flag=SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP), 5)
    assert port.calls == [("send_to_retry", b"1")]
    assert not caplog.records


def test_a_copy_that_is_not_to_come_again_has_no_tries_left(port: FakeMember, monkeypatch) -> None:
    tries = []
    monkeypatch.setattr(port, "send_to_retry", lambda group, message, most, deadline: tries.append(most))
    port.brokers.failing["send_back"] = CallTimeout("late")
    send_back = SendBack(port, "g", 16, MemberState(Thresholds()))
    for level in (0, 5, -1):
        assert send_back(message(1), level)
    assert tries == [16, 16, 0]


BATCH = int(SysFlag.INNER_BATCH | SysFlag.NEED_UNWRAP)


def test_a_batch_that_cannot_be_decoded_is_a_dead_letter(port: FakeMember, monkeypatch, caplog) -> None:
    """No broker takes it back, and a copy that came again would look like a message that can be decoded."""
    tries = []
    monkeypatch.setattr(port, "send_to_retry", lambda group, message, most, deadline: tries.append(most))
    send_back = SendBack(port, "g", 16, MemberState(Thresholds()))
    bad = replace(message(1, b"1"), sys_flag=BATCH, decode_error="Item 0 of a batch is malformed")
    assert send_back(bad, 5)
    assert send_back.make_dead_letter(bad)
    assert (port.calls, tries) == ([], [0, 0])
    assert caplog.text.count("is a dead letter now, in topic %DLQ%g, after attempt 1") == 2


def test_broker_moves_damaged_message_until_its_last_attempt(port: FakeMember) -> None:
    send_back = SendBack(port, "g", 3, MemberState(Thresholds()))
    bad = replace(message(1, b"1"), decode_error="bad")
    assert send_back(bad, 5)
    assert send_back.make_dead_letter(bad)
    assert port.calls == [("send_back", (b"1", 5, 3)), ("send_back", (b"1", -1, 3))]
    port.brokers.failing["send_back"] = CallTimeout("late")
    assert not send_back(bad, 5)
    assert send_back(replace(bad, reconsume_times=3), 5)
    assert [name for name, _ in port.calls[2:]] == ["send_back", "send_back", "send_to_retry"]


@pytest.mark.parametrize(
    "why", [MessageRefused("too large"), MessageIllegal("illegal", None, 13, None, None, "illegal")]
)
def test_message_no_broker_accepts_is_skipped_after_last_attempt(port: FakeMember, caplog, why: RocketMQError) -> None:
    held = MemberState(Thresholds())
    send_back = SendBack(port, "g", 3, held)
    port.brokers.failing["send_to_retry"] = why
    item = replace(message(1, b"1"), sys_flag=BATCH)
    assert not send_back(item, 5)
    assert send_back(replace(item, reconsume_times=3), 5)
    assert send_back.make_dead_letter(item)
    assert held.stats().sent_back == 0
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert errors[0].startswith("the message at offset 1 of T/a/0 failed and is skipped: no broker takes a copy of it")


@pytest.mark.parametrize("why", [ConnectionLost("gone"), CallTimeout("late"), AccessDenied("no", None, 16)])
def test_a_message_is_not_skipped_while_a_broker_may_take_it(port: FakeMember, why: RocketMQError) -> None:
    send_back = SendBack(port, "g", 3, MemberState(Thresholds()))
    port.brokers.failing["send_to_retry"] = why
    bad = replace(message(1, b"1"), sys_flag=BATCH, decode_error="bad", reconsume_times=9)
    assert not send_back(bad, 5)
    assert not send_back.make_dead_letter(bad)
