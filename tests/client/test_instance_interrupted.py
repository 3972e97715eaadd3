"""Ctrl-C at any line of what joins a group and leaves it: there is no member that nobody can remove, and heartbeats go on."""

from __future__ import annotations

import itertools
import linecache
import sys
from types import FrameType
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client import instance, member
from rocketmq_spark.client.instance import RegisteredMember
from rocketmq_spark.consumer import pull, push, upkeep
from rocketmq_spark.consumer.pull import BasePullConsumer
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.tools import ConsumerTools
from rocketmq_spark.wire.bodies import GroupMembership
from tests.client.conftest import Parts
from tests.fakes.timer import ManualTimer, Time
from tests.helpers import no_more_threads, raising, unlike_ctrl_c

FILES = {module.__file__ for module in (instance, member, push, pull, upkeep)}
# Where the interpreter itself lets nothing come between: lines around blocks, a store before or behind one, and what was stored
# last being returned.
UNPARTED = ("with ", "try:", "except", "finally", "self._is_starting_or_stopping = ", "return leave")


class Interrupts:
    """Raises Ctrl-C at the n-th line of these modules."""

    def __init__(self, at: int) -> None:
        self.left, self.where = at, ""

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupts | None:
        path = frame.f_code.co_filename
        if path not in FILES:
            return None
        line = linecache.getline(path, frame.f_lineno).strip()
        if event == "line" and not line.startswith(UNPARTED) and not unlike_ctrl_c(frame):
            self.left -= 1
            if self.left == -1:
                self.where = f"{path}:{frame.f_lineno} {line}"
                raise KeyboardInterrupt
        return self

    def call(self, what: Any, *given: Any) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            what(*given)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def groups(parts: Parts) -> list[str]:
    return [name_on_wire for name_on_wire, _ in parts.groups.one_member_per_group()]


@pytest.fixture
def parts(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """Nothing is asked of brokers, and time stands still."""
    time = Time()
    monkeypatch.setattr(parts.instance, "_make_timer", lambda name: ManualTimer(time))
    monkeypatch.setattr(parts.instance, "_send_all", lambda *given: None)
    return parts


def test_a_member_that_ctrl_c_kept_from_joining_is_none(parts: Parts) -> None:
    one = RegisteredMember("g", membership=lambda: GroupMembership("g", {}))
    for at in itertools.count():
        interrupts = Interrupts(at)
        if not interrupts.call(parts.instance.join, one):
            break
        assert groups(parts) == [], interrupts.where
        assert parts.instance._timer is None, interrupts.where
    assert at > 10
    assert groups(parts) == ["g"]


def test_a_member_that_ctrl_c_kept_from_leaving_leaves_again(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    one = RegisteredMember("g", membership=lambda: GroupMembership("g", {}))
    told: list[Any] = []
    monkeypatch.setattr(parts.instance, "_addresses", lambda slaves, everywhere: [("b", "b:1")])
    monkeypatch.setattr(parts.instance, "_send_all", lambda asked, deadline: told.extend(asked))
    for at in itertools.count():
        parts.instance.join(one)
        told.clear()
        interrupts = Interrupts(at)
        interrupted = interrupts.call(parts.instance.leave, one, Deadline.after(1))
        parts.groups.one_member_per_group()
        if interrupted:
            told.clear()
            parts.instance.leave(one, Deadline.after(1))
        assert (groups(parts), len(told)) == ([], 1), interrupts.where
        if not interrupted:
            break
    assert at > 10
    other = RegisteredMember("g", membership=lambda: GroupMembership("g", {}))
    parts.instance.join(other)
    parts.instance.leave(one, Deadline.after(1))
    assert (groups(parts), len(told)) == (["g"], 1)


def test_a_start_that_ctrl_c_interrupts_leaves_the_group(parts: Parts) -> None:
    for at in itertools.count():
        one = BaseConsumer(parts.member, ConsumerSettings(group="g"), ConsumerTools(lambda name: ManualTimer(Time())))
        one.subscribe("t")
        interrupts = Interrupts(at)
        interrupted = interrupts.call(one.start, print)
        one.stop(0)
        assert groups(parts) == [], interrupts.where
        if not interrupted:
            break
    assert at > 50


@pytest.mark.parametrize("verb", ["subscribe", "close"])
def test_pull_consumer_interrupted_by_ctrl_c_leaves_on_close(parts: Parts, verb: str) -> None:
    def made() -> BasePullConsumer:
        one = BasePullConsumer(
            parts.member, ConsumerSettings(group="g"), print, make_timer=lambda name: ManualTimer(Time())
        )
        if verb == "close":
            one.subscribe("t")
        return one

    for at in itertools.count():
        one = made()
        interrupts = Interrupts(at)
        interrupted = interrupts.call(*((one.subscribe, "t") if verb == "subscribe" else (one.close,)))
        one.close()
        assert groups(parts) == [], interrupts.where
        if not interrupted:
            break
    assert at > 20


def test_heartbeats_begin_when_there_are_threads_again(monkeypatch: pytest.MonkeyPatch, broker: Any) -> None:
    parts = Parts(broker.address)
    with monkeypatch.context() as patch:
        no_more_threads(patch, "rocketmq-instance")
        with pytest.raises(RuntimeError):
            parts.instance.join(RegisteredMember("g"))
    assert groups(parts) == []
    parts.instance.join(RegisteredMember("g"))
    timer: Any = parts.instance._timer
    assert timer._pending_calls
    parts.close()


def test_a_join_that_is_interrupted_ends_no_heartbeats_of_others(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    time, beats = Time(), []
    monkeypatch.setattr(parts.instance, "_make_timer", lambda name: ManualTimer(time))
    monkeypatch.setattr(parts.instance, "heartbeat", beats.append)
    parts.instance.join(RegisteredMember("g"))
    time.advance(2)
    timer: Any = parts.instance._timer
    with monkeypatch.context() as patch:
        patch.setattr(timer, "call_later", raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            parts.instance.join(RegisteredMember("other"))
    time.advance(60)
    assert len(beats) == 3
