"""Status codes to errors."""

from __future__ import annotations

import pytest

from rocketmq_spark import errors
from rocketmq_spark.base import codes
from rocketmq_spark.grpc_proxy.protos import error_from_grpc, error_from_status
from rocketmq_spark.grpc_proxy.tables import Code
from tests.grpc_proxy.scripted import status


@pytest.mark.parametrize(
    ("code", "kind", "retriable"),
    [
        (Code.TOO_MANY_REQUESTS, errors.BrokerBusy, True),
        (Code.INTERNAL_SERVER_ERROR, errors.ServiceNotAvailable, True),
        (Code.INTERNAL_ERROR, errors.ServiceNotAvailable, True),
        (Code.REQUEST_TIMEOUT, errors.ServiceNotAvailable, True),  # a number among those of refusals for good
        (Code.PROXY_TIMEOUT, errors.ServiceNotAvailable, True),
        (Code.UNAUTHORIZED, errors.AccessDenied, False),
        (Code.FORBIDDEN, errors.AccessDenied, False),
        (Code.NOT_IMPLEMENTED, errors.NotSupported, False),
        (Code.CONSUMER_GROUP_NOT_FOUND, errors.GroupNotFound, False),
        (Code.INVALID_RECEIPT_HANDLE, errors.NotFound, False),
        (41300, errors.MessageIllegal, False),
        (59999, errors.ServerFault, False),
    ],
)
def test_what_the_proxy_refuses(code, kind, retriable):
    error = error_from_status(status(code, "its words"), "a:1", "t")
    assert type(error) is kind
    assert error.retriable is retriable
    assert (error.addr, error.broker_code, error.topic, error.remark) == ("a:1", code, "t", "its words")


@pytest.mark.parametrize(
    "words",
    [
        "java.lang.RuntimeException: message body size exceeded, MessageExtEncoder.encode",
        "the message is illegal, maybe msg body or properties length not matched. msg body length limit 4194304B",
        "timer message illegal, the delay time should not be bigger than the max delay 259200000ms",
    ],
)
def test_permanent_broker_refusal_is_permanent_through_proxy(words):
    """Else a sink sends it again and again, and a producer does not send its batch in halves."""
    error = error_from_status(status(Code.INTERNAL_SERVER_ERROR, words), "a:1", "t")
    assert type(error) is errors.MessageIllegal
    assert (error.retriable, error.remark) == (False, words)


THROWN = "org.apache.rocketmq.proxy.common.ProxyException: "
UNTYPED = f"{THROWN}TopicMessageType validate failed, the expected type is UNSPECIFIED, but actual type is NORMAL"


@pytest.mark.parametrize(
    ("code", "words"), [(Code.TOPIC_NOT_FOUND, "no"), (Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE, UNTYPED)]
)
def test_a_missing_topic_is_a_missing_route_as_over_remoting(code, words):
    error = error_from_status(status(code, words), "a:1", "t")
    assert type(error) is errors.RouteNotFound
    assert (error.broker_code, error.remark) == (codes.Response.TOPIC_NOT_EXIST, words)


@pytest.mark.parametrize("words", [f"{THROWN}no writable queue", "no readable queue"])
def test_a_topic_whose_master_is_away_is_no_matter_of_rights(words):
    """A sink would fail at once, and what a spool holds be dead, while a slave is there alone."""
    error = error_from_status(status(Code.FORBIDDEN, words), "a:1", "t")
    assert type(error) is errors.ServiceNotAvailable
    assert (error.retriable, error.remark) == (True, words)


@pytest.mark.parametrize(
    ("name", "details", "tls", "kind", "said"),
    [
        ("UNAVAILABLE", "failed to connect", False, errors.ConnectionLost, "gRPC port"),
        (
            "UNAVAILABLE",
            "ipv4:1.2.3.4:10911: Socket closed",
            False,
            errors.ConnectionLost,
            "the port of a broker or name",
        ),
        ("UNAVAILABLE", "SSL: CERTIFICATE_VERIFY_FAILED", True, errors.CertificateRefused, "tlsCaFile"),
        ("UNAVAILABLE", "Peer name x is not in peer certificate", True, errors.CertificateRefused, "tlsServerName"),
        ("UNAVAILABLE", "Hostname Verification Check failed", True, errors.CertificateRefused, "tlsServerName"),
        ("UNAVAILABLE", "SSL_ERROR_SSL: WRONG_VERSION_NUMBER", True, errors.ConnectionLost, "not support TLS"),
        ("DEADLINE_EXCEEDED", "late", False, errors.CallTimeout, "in time"),
        ("UNIMPLEMENTED", "no such method", False, errors.NotSupported, "transport=remoting"),
        ("RESOURCE_EXHAUSTED", "Sent message larger than max", False, errors.LocalProtocolError, "larger"),
        ("RESOURCE_EXHAUSTED", "gRPC message exceeds maximum size 3: 4", False, errors.LocalProtocolError, "Inbound"),
        ("CANCELLED", "RST_STREAM (Received RST_STREAM with error code 8)", False, errors.ConnectionLost, "Inbound"),
        ("RESOURCE_EXHAUSTED", "too many streams", False, errors.BrokerBusy, "overloaded"),
        ("UNAVAILABLE", "SSL_ERROR_SSL: WRONG_VERSION_NUMBER", False, errors.ConnectionLost, "no connection"),
        ("UNAUTHENTICATED", "who is that", False, errors.AccessDenied, "denies"),
        ("PERMISSION_DENIED", "not yours", False, errors.AccessDenied, "denies"),
        ("INTERNAL", "Invalid metadata", False, errors.LocalProtocolError, "line breaks"),
        ("INTERNAL", "what", False, errors.RemoteProtocolError, "INTERNAL"),
        ("UNKNOWN", "what", False, errors.RemoteProtocolError, "UNKNOWN"),
    ],
)
def test_calls_without_an_answer(name, details, tls, kind, said):
    error = error_from_grpc(name, details, "a:1", tls)
    assert type(error) is kind
    assert said in str(error)
    assert error.addr == "a:1"


@pytest.mark.parametrize(
    ("details", "unsent"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN", True),
        (
            "errors resolving a:1: [field:hostname lookup error:address lookup failed for a:1: Domain name not found]",
            True,
        ),
        ("Socket closed", False),
        ("GOAWAY", False),
    ],
)
def test_what_had_no_connection_to_go_by_is_known_to_be_unsent(details, unsent):
    assert error_from_grpc("UNAVAILABLE", details, "a:1", False).unsent is unsent
