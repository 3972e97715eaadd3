"""The hierarchy of errors: stable codes, texts to act on, and the way through pickle and copy."""

import builtins
import copy
import inspect
import pickle

import pytest

from rocketmq_spark import errors
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import BrokerError, OptionError, RocketMQError, error_for

CLASSES = [
    c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, RocketMQError) and c is not RocketMQError
]
FACTS = ("it broke", "10.0.0.5:10911", 17, "orders", "orders/broker-a/0", "no such topic", "Create it")


@pytest.mark.parametrize("kind", [RocketMQError, *CLASSES], ids=lambda c: c.__name__)
class TestEveryClass:
    def test_survives_pickle_and_copy(self, kind):
        error = kind(*FACTS)
        error.__cause__ = OSError("reset")
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is kind
            assert twin is not error
            assert vars(twin) == vars(error)
            assert str(twin) == str(error)

    def test_what_was_added_later_survives_too(self, kind):
        error = kind("it broke")
        error.addr, error.topic, error.broker_code = "a:1", "orders", 1
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (twin.addr, twin.topic, twin.broker_code) == ("a:1", "orders", 1)
            assert str(twin) == str(error)

    def test_can_be_made_without_arguments(self, kind):
        assert str(kind()) == f"[{kind.code}] "

    def test_has_a_code_of_its_own(self, kind):
        assert kind.code.startswith("ROCKETMQ_")
        assert "code" in vars(kind)
        assert kind.__doc__


def test_codes_are_stable():
    """Programs match on these: a code may be added, never changed."""
    assert {c.__name__: c.code.removeprefix("ROCKETMQ_") for c in CLASSES} == {
        "AccessDenied": "ACCESS_DENIED",
        "BrokerBusy": "BUSY",
        "BrokerError": "BROKER",
        "BrokerNotFound": "BROKER_NOT_FOUND",
        "CallTimeout": "TIMEOUT",
        "ReplyTimeout": "REPLY_TIMEOUT",
        "CertificateRefused": "CERTIFICATE_REFUSED",
        "CheckpointMismatch": "CHECKPOINT_MISMATCH",
        "ClosedError": "CLOSED",
        "ConnectionLost": "CONNECTION_LOST",
        "DataLossError": "DATA_LOSS",
        "UnprovedError": "UNPROVED",
        "DecodeError": "DECODE",
        "GoAway": "GO_AWAY",
        "GroupNotFound": "GROUP_NOT_FOUND",
        "InvalidParameter": "INVALID_PARAMETER",
        "LocalBrokerError": "LOCAL_BROKER",
        "LocalProtocolError": "LOCAL_PROTOCOL",
        "MessageIllegal": "MESSAGE_ILLEGAL",
        "MessageRefused": "MESSAGE_REFUSED",
        "NotFound": "NOT_FOUND",
        "NotReadable": "NOT_READABLE",
        "NotSupported": "NOT_SUPPORTED",
        "OffsetError": "OFFSET",
        "OptionError": "OPTION",
        "RemoteProtocolError": "REMOTE_PROTOCOL",
        "RouteNotFound": "ROUTE_NOT_FOUND",
        "SelectorError": "SELECTOR",
        "SendFailed": "SEND_FAILED",
        "ServerFault": "SYSTEM_ERROR",
        "ServiceNotAvailable": "NOT_AVAILABLE",
        "SpoolError": "SPOOL",
        "SpoolFull": "SPOOL_FULL",
        "TopicNotFound": "TOPIC_NOT_FOUND",
    }
    assert len({c.code for c in CLASSES}) == len(CLASSES)


def test_no_builtin_name_is_used_again():
    assert not {c.__name__ for c in CLASSES} & set(dir(builtins))


def test_the_text_tells_everything_known():
    assert str(RocketMQError(*FACTS)) == (
        "[ROCKETMQ_ERROR] it broke (at 10.0.0.5:10911, topic orders, queue orders/broker-a/0, broker code 17)"
        ": no such topic. Create it"
    )


def test_what_is_unknown_is_left_out():
    assert str(RocketMQError("it broke", remedy="Mend it")) == "[ROCKETMQ_ERROR] it broke. Mend it"
    assert str(RocketMQError("it broke", broker_code=0)) == "[ROCKETMQ_ERROR] it broke (broker code 0)"


def test_one_problem_or_several():
    assert OptionError.of(["a is bad"]).message == "a is bad"
    assert OptionError.of(["a is bad", "b is worse"]).message == "\n  - a is bad\n  - b is worse"


@pytest.mark.parametrize(
    ("code", "name", "retriable", "refresh"),
    [
        (Response.SYSTEM_ERROR, "ServerFault", False, False),
        (Response.SYSTEM_BUSY, "BrokerBusy", True, False),
        (Response.FLOW_CONTROL, "BrokerBusy", True, False),
        (Response.SERVICE_NOT_AVAILABLE, "ServiceNotAvailable", True, True),
        (Response.NO_PERMISSION, "AccessDenied", False, False),
        (Response.TOPIC_NOT_EXIST, "TopicNotFound", True, True),
        (Response.MESSAGE_ILLEGAL, "MessageIllegal", False, False),
        (Response.QUERY_NOT_FOUND, "NotFound", False, False),
        (Response.GO_AWAY, "GoAway", True, True),
    ],
)
def test_the_class_of_a_brokers_answer(code, name, retriable, refresh):
    kind = error_for(code)
    assert (kind.__name__, kind.retriable, kind.refresh_route) == (name, retriable, refresh)


def test_unknown_answers_are_plain_broker_errors():
    assert error_for(424242) is BrokerError
    assert not BrokerError.retriable


def test_users_mistakes_are_value_errors_too():
    for kind in (errors.OptionError, errors.MessageRefused, errors.SelectorError, errors.OffsetError):
        assert issubclass(kind, ValueError)
