"""Which replica a broker suggests for the next pulls, and whether to go elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rocketmq_spark.model import MASTER_ID
from rocketmq_spark.pull.trials import Trials

# Told of the replica that a broker suggests, or (None) that its word is doubted; says whether to connect anew.
OnHint = Callable[[int | None], bool]


class Hints:
    """``moving``: the address may be another one by now, which is to be looked at when nothing is under way."""

    def __init__(self, on_hint: OnHint | None) -> None:
        self._on_hint = on_hint
        self.last: int | None = None
        self.moving = False

    def follow(self, suggested: int, trials: Trials) -> None:
        """Go where the broker suggests; but while something looks like loss, the master has to say first what is lost."""
        if suggested != MASTER_ID and trials.suspicious:
            return
        self.last = suggested
        if self._on_hint is not None and self._on_hint(suggested):
            self.moving = True

    def doubt(self) -> bool:
        """A slave may just not have it: whether the master is to be asked before anything is called lost."""
        if self._on_hint is None or not self._on_hint(None):
            return False
        self.last, self.moving = MASTER_ID, True
        return True
