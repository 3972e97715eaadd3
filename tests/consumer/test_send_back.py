from __future__ import annotations

import pytest

from rocketmq_spark.consumer.flow import Thresholds
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.send_back import SendBack
from rocketmq_spark.errors import CallTimeout, ConnectionLost
from tests.consumer.group import FakeMember, GroupBench
from tests.consumer.messages import message


@pytest.fixture
def port(group: GroupBench) -> FakeMember:
    return FakeMember(group.brokers, "me")


def test_1_21_what_brokers_do_not_take_back_goes_as_a_copy(port: FakeMember, caplog) -> None:
    held = Held(Thresholds())
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
