"""Topics, groups, stored messages and brokers, for ``Admin`` and the commands. Here: what all of these ask with.

``AdminTools`` has the parts of one client, as ``session.Client`` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.admin import BaseAdmin, say_done
from rocketmq_spark.client.broker import Brokers
from rocketmq_spark.client.calls import Calls, refused
from rocketmq_spark.client.groups import RemotingCommitter
from rocketmq_spark.client.route import Routes
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.wire.header import Command


class AdminTools(Protocol):
    """Parts of a client. Names are the user's, but for ``calls``."""

    @property
    def calls(self) -> Calls:
        """Requests to one address each."""

    @property
    def routes(self) -> Routes:
        """Where topics are."""

    @property
    def brokers(self) -> Brokers:
        """Questions about queues."""

    @property
    def committer(self) -> RemotingCommitter:
        """Offsets of groups."""

    @property
    def admin(self) -> BaseAdmin:
        """Requests to the masters of a cluster."""


def deadline(tools: AdminTools) -> Deadline:
    """For what is asked of all brokers at once."""
    return Deadline.after(tools.calls.request_timeout_s)


def ask_each(
    tools: AdminTools, asked: Mapping[str, tuple[str, Command]], accept: Sequence[int], change: bool = False
) -> Iterator[tuple[str, Command]]:
    """Ask all at once: the answers by the keys of ``asked``, which has addresses and requests. Raises the first error, which
    of a ``change`` says who has taken it.
    """
    answers = tools.calls.exchange_each(list(asked.values()), deadline(tools))
    outcomes = {
        key: refused(answer, address) if isinstance(answer, Command) and answer.code not in accept else answer
        for (key, (address, _)), answer in zip(asked.items(), answers, strict=True)
    }
    failed = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, RocketMQError)}
    for key, outcome in outcomes.items():
        if isinstance(outcome, RocketMQError):
            if change:
                say_done(outcome, [other for other in asked if other not in failed], failed)
            raise outcome
        yield key, outcome
