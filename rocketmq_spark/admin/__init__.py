"""Topics, groups, stored messages and brokers, for ``Admin`` and the commands. Here: what all of these ask with.

``AdminTools`` has the parts of one client, as ``session.Client`` has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.admin import BaseAdmin
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
    tools: AdminTools, asked: Mapping[str, tuple[str, Command]], accept: Sequence[int]
) -> Iterator[tuple[str, Command]]:
    """Ask all at once: the answers by the keys of ``asked``, which has addresses and requests. Raises the first error."""
    answers = tools.calls.exchange_each(list(asked.values()), deadline(tools))
    for (key, (address, _)), answer in zip(asked.items(), answers, strict=True):
        if isinstance(answer, RocketMQError):
            raise answer
        if answer.code not in accept:
            raise refused(answer, address)
        yield key, answer
