"""The doctor's checks of a Proxy's gRPC endpoints: whether each answers, and which message types it accepts for a topic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import TopicType
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.doctor.findings import Finding, Level, advice, broken, failed, ok
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    CertificateRefused,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.grpc_proxy.facts import Code
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.options.transport import GRPC

if TYPE_CHECKING:
    from rocketmq_spark.options import Options

CHECK = "proxy"
_TAKEN = frozenset({TopicType.NORMAL, "UNSPECIFIED", "MIXED"})
_NEEDS = {
    TopicType.FIFO: "Give each row a shardingKey, and option queueSelector=hash",
    TopicType.DELAY: "Give each row a delayMs, delayLevel or deliverAt",
    TopicType.PRIORITY: "Give each row a priority",
}


def endpoint(address: str, error: RocketMQError | None, tls: bool) -> Finding:
    """``error`` is what came of the question for a route, None where there is one. A refusal is an answer, too."""
    if error is None or _answered(error):
        return ok(CHECK, f"{address} answers over gRPC{', in TLS' if tls else ''}")
    if isinstance(error, AccessDenied):
        return broken(
            CHECK, f"{address} does not know this user: {_said(error)}", "Check options 'accessKey' and 'secretKey'"
        )
    if isinstance(error, CertificateRefused):
        return failed(CHECK, error, "Check option 'tlsCaFile'")
    if isinstance(error, NotSupported | RemoteProtocolError):
        return broken(
            CHECK, f"{address} is not the gRPC port of a Proxy: {_said(error)}", "Check option 'proxyEndpoint'"
        )
    if isinstance(error, OptionError):
        return failed("options", error, "Look at docs/options.md")
    remedy = error.remedy or "See whether it hangs, or something between here and there drops what is sent"
    return broken(CHECK, f"{address} is of no use: {_said(error)}", remedy)


def _answered(error: RocketMQError) -> bool:
    """Whether a Proxy said it: that there is no such topic, or that this user may not ask for it."""
    known = isinstance(error, BrokerError) and error.broker_code not in (None, Code.UNAUTHORIZED)
    return known or isinstance(error, RouteNotFound)


def _said(error: RocketMQError) -> str:
    return " ".join(f"{error.message}{f': {error.remark}' if error.remark else ''}".split())


def topic(address: str, name: str, answer: frozenset[str] | RocketMQError) -> Finding:
    """``answer`` is which types of messages may be written to it, or why there is no route."""
    check = f"topic {name}"
    if isinstance(answer, RocketMQError):
        return failed(check, answer, "Check its name: rocketmq-spark topic list, at a name server")
    kinds = ", ".join(sorted(answer)) or "no type that is known here"
    text = f"the Proxy at {address} routes it, and takes {kinds}"
    if answer & _TAKEN:
        return ok(check, text)
    remedy = next((_NEEDS[kind] for kind in sorted(answer) if kind in _NEEDS), None)
    return advice(check, f"{text}: other messages are refused", remedy or "A sink needs a topic of type NORMAL")


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
        answer = _types(alone, GROUP)
        found = endpoint(address, answer if isinstance(answer, RocketMQError) else None, options.tls)
        yield found
        if found.level is Level.OK:
            for name in topics:
                yield topic(address, name, _types(alone, name))


def _types(options: Options, topic: str) -> frozenset[str] | RocketMQError:
    from rocketmq_spark import session

    try:
        within = Deadline.after(options.request_timeout)
        session.sender(options).publish_queues(topic, within, refresh=True)
        return session.message_types(options, topic, within) or frozenset()
    except RocketMQError as e:
        return e
