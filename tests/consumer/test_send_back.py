from __future__ import annotations

from dataclasses import replace

import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.workers import SendBack
from rocketmq_spark.errors import CallTimeout, ConnectionLost
from tests.consumer.group import FakeMember, GroupBench
from tests.consumer.messages import QUEUE, message


@pytest.fixture
def port(group: GroupBench) -> FakeMember:
    group.brokers.send(QUEUE, b"0", b"1", b"2", b"3")
    return FakeMember(group.brokers, "me")


def test_1_21_what_brokers_do_not_take_back_goes_as_a_copy(port: FakeMember, caplog) -> None:
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
