"""What an error says after a time of trying: the first cause, for the last question of an expired deadline explains nothing.

A broker dies, its route goes, and when patience ends the name server has no time left to answer in: "no name server
answers" would be the last error, of the one server that was well. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocketmq_spark.errors import RocketMQError


@dataclass(slots=True)
class Trouble:
    """Errors from the first one until something succeeds."""

    first: RocketMQError | None = None
    since: float = 0.0
    tries: int = 0

    def note(self, error: RocketMQError, now: float) -> None:
        if self.first is None:
            self.first, self.since = error, now
        self.tries += 1

    def clear(self) -> None:
        self.first, self.since, self.tries = None, 0.0, 0

    def cause(self, last: RocketMQError, now: float) -> RocketMQError:
        """The error to raise: the first one with how often and how long was tried, and what was said at last.

        A single error stands for itself, and so does one that no waiting heals.
        """
        first = self.first
        if first is None or first is last or not last.retriable:
            return last
        ending = [f"at last: {last.message}", last.remark] if last.message != first.message else []
        remark = "; ".join(part for part in (first.remark, *ending) if part) or None
        return type(first)(
            f"{first.message}; tried {self.tries} times in {now - self.since:.3g} s",
            first.addr,
            first.broker_code,
            first.topic,
            first.queue or last.queue,
            remark,
            first.remedy or last.remedy,
        )
