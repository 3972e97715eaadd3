"""Makes a member known again to brokers that were restarted, and have forgotten the members of groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rocketmq_spark.base.clock import Deadline, NowAndThen
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.ports import GroupMember

TIMEOUT_S = 3.0
REFUSED_S = 3.0  # a broker that accepts no heartbeats does not get one with each pull
LOOK_S, LOST_S = 1.0, 60.0  # between heartbeats while a broker is away, and after how long the regular ones are enough


class Introductions:
    """Sends heartbeats to brokers that do not know this member, because they were restarted. They notify all members then.

    The route of a broker that was away may be gone, and its address with it: ``rebalance`` asks for it, and who is listed.
    """

    def __init__(self, port: GroupMember, timer: Timer, rebalance: Callable[[], None]) -> None:
        self._port = port
        self._timer = timer
        self._rebalance = rebalance
        self._refused = NowAndThen(REFUSED_S)

    def refused(self) -> None:
        """A broker refused a pull because it does not know this member. Must not block."""
        if self._refused.due():
            self._timer.later(0, self._introduce)

    def lost(self, broker_name: str) -> None:
        """The connection to a broker broke: send a heartbeat as soon as there is one again. Must not block.

        A broker that was restarted does not refuse pulls of a member that it does not know if it knows others of the group.
        """
        self._look_for(broker_name, self._timer.now_ms() + 1000 * LOST_S)

    def _look_for(self, broker_name: str, until_ms: float) -> None:
        self._timer.later(LOOK_S, partial(self._look, broker_name, until_ms))

    def _look(self, broker_name: str, until_ms: float) -> None:
        try:
            self._beat()
        finally:
            if self._port.connection(broker_name) is None and self._timer.now_ms() < until_ms:
                self._look_for(broker_name, until_ms)
            else:
                self._rebalance()

    def _beat(self) -> None:
        self._port.heartbeat(Deadline.after(TIMEOUT_S))

    def _introduce(self) -> None:
        self._beat()
        self._rebalance()
