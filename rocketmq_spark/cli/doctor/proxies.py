"""Endpoints of a Proxy over gRPC, and what it takes for a topic. Pure."""

from __future__ import annotations

from rocketmq_spark.cli.doctor.findings import Finding, advice, broken, failed, ok
from rocketmq_spark.codes import TopicType
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


def topic(address: str, name: str, told: frozenset[str] | RocketMQError) -> Finding:
    """``told`` is which types of messages may be written to it, or why there is no route."""
    check = f"topic {name}"
    if isinstance(told, RocketMQError):
        return failed(check, told, "Check its name: rocketmq-spark topic list, at a name server")
    kinds = ", ".join(sorted(told)) or "no type that is known here"
    text = f"the Proxy at {address} routes it, and takes {kinds}"
    if told & _TAKEN:
        return ok(check, text)
    remedy = next((_NEEDS[kind] for kind in sorted(told) if kind in _NEEDS), None)
    return advice(check, f"{text}: other messages are refused", remedy or "A sink needs a topic of type NORMAL")
