"""Asks each endpoint of a Proxy over gRPC, and has ``proxies`` judge what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rocketmq_spark.cli.connection import GROUP, Target
from rocketmq_spark.cli.doctor import proxies
from rocketmq_spark.cli.doctor.findings import Finding, Level, failed
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.transport import GRPC

if TYPE_CHECKING:
    from rocketmq_spark.options import Options

# What means something to one of the two only, as ``_plain`` names it.
_OF_BROKERS = frozenset({"nameserver", "namesrvaddr", "addressmap", "tlscheckhostname", "tlskeypassword"})
_OF_PROXIES = frozenset({"proxyendpoint", "tlsservername", "transport"})


def _plain(name: str) -> str:
    """An option's name, however it is written."""
    return name.replace("_", "").lower()


def _names_a_proxy(target: Target) -> bool:
    given = {_plain(name): value for name, value in target.given.items() if value}
    return "proxyendpoint" in given or given.get("transport") == GRPC


def at_brokers(target: Target) -> Target | None:
    """Where name servers and brokers are asked; None where a Proxy is named, and no name server."""
    named = {_plain(name) for name, value in target.given.items() if value}
    if _names_a_proxy(target) and not named & {"nameserver", "namesrvaddr"}:
        return None
    return Target({name: value for name, value in target.given.items() if _plain(name) not in _OF_PROXIES})


def at_proxies(target: Target) -> dict[str, object] | None:
    """What is given for a Proxy; None where none is named."""
    from rocketmq_spark.options import TABLE

    if not _names_a_proxy(target):
        return None
    others = {_plain(name) for row in TABLE if "sink" not in row.roles for name in (row.name, *row.aliases)}
    left_out = _OF_BROKERS | others | {"transport"}
    return {
        **{name: value for name, value in target.given.items() if _plain(name) not in left_out},
        "transport": GRPC,
    }


def of_proxies(target: Target, topics: Sequence[str]) -> Iterator[Finding]:
    """Each endpoint: reached or not, and what it says of each topic. Nothing where no Proxy is named."""
    from rocketmq_spark import options as table

    given = at_proxies(target)
    if given is None:
        return
    try:
        options = table.parse(given).for_role("sink")
    except RocketMQError as e:
        yield failed("options", e, "Look at docs/options.md")
        return
    for address in options.proxy_endpoint:
        # So that no other one answers in its place.
        alone = dataclasses.replace(options, proxy_endpoint=(address,))
        # A topic that there may not be: what is answered, if only that it is not known, comes from a Proxy.
        told = _types(alone, GROUP)
        found = proxies.endpoint(address, told if isinstance(told, RocketMQError) else None, options.tls)
        yield found
        if found.level is Level.OK:
            for topic in topics:
                yield proxies.topic(address, topic, _types(alone, topic))


def _types(options: Options, topic: str) -> frozenset[str] | RocketMQError:
    from rocketmq_spark import session

    try:
        within = Deadline.after(options.request_timeout)
        session.sender(options).publish_queues(topic, within, refresh=True)
        return session.message_types(options, topic, within) or frozenset()
    except RocketMQError as e:
        return e
