"""Endpoints of a Proxy, by what they say."""

from __future__ import annotations

import pytest

from rocketmq_spark.cli.doctor import findings
from rocketmq_spark.cli.doctor.findings import Level
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    CallTimeout,
    CertificateRefused,
    ConnectionLost,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RouteNotFound,
)
from rocketmq_spark.grpc_proxy.tables import Code

A = "h:8081"


@pytest.mark.parametrize(
    ("error", "level", "words", "remedy"),
    [
        (None, Level.OK, "h:8081 answers over gRPC", None),
        (RouteNotFound("the Proxy knows no such topic"), Level.OK, "h:8081 answers over gRPC", None),
        (BrokerBusy("busy", A, Code.TOO_MANY_REQUESTS), Level.OK, "h:8081 answers over gRPC", None),
        (AccessDenied("no", A, Code.FORBIDDEN), Level.OK, "h:8081 answers over gRPC", None),
        (AccessDenied("no", A, Code.UNAUTHORIZED), Level.BROKEN, "does not know this user: no", "'accessKey'"),
        (AccessDenied("the Proxy denies access", A), Level.BROKEN, "does not know this user", "'accessKey'"),
        (CertificateRefused("not trusted"), Level.BROKEN, "not trusted", "'tlsCaFile'"),
        (NotSupported("not implemented"), Level.BROKEN, "not the gRPC port of a Proxy", "'proxyEndpoint'"),
        (RemoteProtocolError("gRPC failed"), Level.BROKEN, "not the gRPC port of a Proxy", "'proxyEndpoint'"),
        (OptionError("needs grpcio", remedy="pip install"), Level.BROKEN, "needs grpcio", "pip install"),
        (ConnectionLost("lost", remark="a\n b", remedy="Do"), Level.BROKEN, "h:8081 cannot be used: lost: a b", "Do"),
        (CallTimeout("no answer in time"), Level.BROKEN, "h:8081 cannot be used: no answer in time", "hangs"),
    ],
)
def test_an_endpoint(error, level, words, remedy) -> None:
    found = findings.proxy_endpoint_finding(A, error, tls=False)
    assert found.level is level
    assert words in found.text
    assert remedy is found.remedy is None or remedy in (found.remedy or "")
    assert ("in TLS" in findings.proxy_endpoint_finding(A, error, tls=True).text) == (level is Level.OK)


@pytest.mark.parametrize(
    ("told", "level", "words", "remedy"),
    [
        ({"NORMAL"}, Level.OK, "h:8081 routes it, and takes NORMAL", None),
        ({"DELAY", "FIFO", "NORMAL"}, Level.OK, "takes DELAY, FIFO, NORMAL", None),
        ({"FIFO"}, Level.ADVICE, "takes FIFO: other messages are refused", "a shardingKey"),
        ({"DELAY"}, Level.ADVICE, "takes DELAY", "a delayMs"),
        ({"PRIORITY"}, Level.ADVICE, "takes PRIORITY", "a priority"),
        ({"TRANSACTION"}, Level.ADVICE, "takes TRANSACTION", "type NORMAL"),
        (set(), Level.ADVICE, "takes no type that is known here", "type NORMAL"),
    ],
)
def test_a_topic(told, level, words, remedy) -> None:
    found = findings.proxy_topic_finding(A, "t", frozenset(told))
    assert (found.check, found.level) == ("topic t", level)
    assert words in found.text
    assert remedy is found.remedy is None or remedy in (found.remedy or "")


def test_a_topic_without_a_route() -> None:
    found = findings.proxy_topic_finding(A, "t", RouteNotFound("the Proxy knows no such topic", A, remark="no route"))
    assert found[:3] == ("topic t", Level.BROKEN, "the Proxy knows no such topic: no route (at h:8081)")
    assert found.remedy
