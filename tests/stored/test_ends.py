from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout, RouteNotFound
from rocketmq_spark.stored.ends import fetch_ends
from tests.fakes.timer import Time


def test_error_of_fetch_ends_names_the_cause_not_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    time, said = Time(), list[type[Exception]]()
    monkeypatch.setattr("rocketmq_spark.base.clock.time", SimpleNamespace(monotonic=time.monotonic, sleep=time.advance))

    class Unknown:
        def get(self, topic: str, max_age_s: float, deadline: Deadline) -> None:
            late = deadline.remaining() < 0.05
            said.append(CallTimeout if late else RouteNotFound)
            raise said[-1]("the time is over" if late else "the name server knows no such topic")

    brokers: Any = Unknown()
    with pytest.raises(RouteNotFound, match="knows no such topic"):
        fetch_ends(brokers, brokers, ["t"], Deadline.after(0.3), 1.0)
    assert (said[0], said[-1]) == (RouteNotFound, CallTimeout)
