from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout, RouteNotFound
from rocketmq_spark.stored.ends import ends_now


def test_the_error_of_ends_says_what_is_wrong_and_not_that_the_time_is_over() -> None:
    class Unknown:
        def get(self, topic: str, max_age_s: float, deadline: Deadline) -> None:
            if deadline.remaining() < 0.05:
                raise CallTimeout("no name server answered in time")
            raise RouteNotFound("the name server knows no such topic", topic=topic)

    brokers: Any = Unknown()
    with pytest.raises(RouteNotFound, match="knows no such topic"):
        ends_now(brokers, brokers, ["t"], Deadline.after(0.3), 1.0)
