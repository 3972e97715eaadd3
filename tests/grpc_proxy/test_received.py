"""What a Proxy hands out, as values."""

from __future__ import annotations

import math
import sys

import pytest

from rocketmq_spark.grpc_proxy.member import group_policy, to_popped_message
from rocketmq_spark.grpc_proxy.protos import proto, set_ms, set_seconds
from rocketmq_spark.grpc_proxy.tables import Encoding
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.session.proxy_clients import decompress_body
from rocketmq_spark.wire import compression


def message(**system: object):
    made = proto("Message")(body=b"packed")
    for name, value in {"message_id": "ID", "receipt_handle": "r", "queue_id": 3, "queue_offset": 9, **system}.items():
        setattr(made.system_properties, name, value)
    set_ms(made.system_properties.born_timestamp, 5)
    return made


def taken(made: object):
    return to_popped_message(made, "t", ("broker-a", "h:1"), lambda body: b"un" + body)


def test_a_message_has_its_place_and_its_receipt():
    found = taken(message(tag="a", delivery_attempt=2, message_group="g"))
    assert found.queue == MessageQueue("t", "broker-a", 3)
    assert (found.queue_offset, found.msg_id, found.receipt, found.endpoint) == (9, "ID", "r", "h:1")
    assert (found.tags, found.message_group, found.delivery_attempt, found.reconsume_times) == ("a", "g", 2, 1)
    assert found.body == b"packed"


def test_what_is_not_told_is_none():
    found = taken(message())
    assert (found.tags, found.message_group, found.store_timestamp, found.keys) == (None, None, None, [])
    assert (found.delivery_attempt, found.born_timestamp) == (1, 5)


def test_a_compressed_body_is_opened():
    assert taken(message(body_encoding=Encoding.GZIP)).body == b"unpacked"


def test_a_body_that_cannot_be_opened_comes_raw_with_the_reason():
    found = to_popped_message(message(body_encoding=Encoding.GZIP), "t", ("broker-a", "h:1"), decompress_body)
    assert (found.body, found.receipt) == (b"packed", "r")
    assert "zlib" in found.decode_error
    assert taken(message()).decode_error is None


def test_the_policy_of_a_group():
    settings = proto("Settings")()
    assert group_policy(settings).max_attempts == 17
    settings.subscription.fifo = True
    settings.backoff_policy.max_attempts = 4
    for seconds in (1, 5):
        set_seconds(settings.backoff_policy.customized_backoff.next.add(), seconds)
    found = group_policy(settings)
    assert (found.max_attempts, found.ordered, found.redelivery_pauses_s) == (4, True, (1.0, 5.0))


def test_pauses_that_grow():
    settings = proto("Settings")()
    grown = settings.backoff_policy.exponential_backoff
    set_seconds(grown.initial, 1)
    set_seconds(grown.max, 5)
    grown.multiplier = 2
    assert group_policy(settings).redelivery_pauses_s == (1.0, 2.0, 4.0, 5.0)


@pytest.mark.parametrize(
    ("initial", "longest", "multiplier", "expected"),
    [
        (0, 5, 2.0, (0.0,) * 100),
        (1e-6, 3e9, 1.0001, tuple(1e-6 * 1.0001**n for n in range(100))),
        (1, 2**60, math.inf, (1.0, 365 * 86_400.0)),
        (1, 5, math.nan, (1.0,)),
        (-1, 5, 2.0, (0.0,) * 100),
    ],
)
def test_what_a_proxy_says_of_pauses_has_an_end(initial, longest, multiplier, expected):
    settings = proto("Settings")()
    grown = settings.backoff_policy.exponential_backoff
    set_seconds(grown.initial, initial)
    set_seconds(grown.max, longest)
    grown.multiplier = multiplier
    settings.backoff_policy.max_attempts = -5
    found = group_policy(settings)
    assert found.redelivery_pauses_s == pytest.approx(expected, rel=1e-4)
    assert found.max_attempts == 17


def test_of_pauses_without_end_the_first_are_taken():
    settings = proto("Settings")()
    for _ in range(5000):
        set_seconds(settings.backoff_policy.customized_backoff.next.add(), 1)
    assert group_policy(settings).redelivery_pauses_s == (1.0,) * 100


def test_body_of_missing_codec_is_raw_and_names_its_package(monkeypatch):
    """Its neighbours in the answer are handed out all the same."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    compression._arrow.cache_clear()
    made = message(body_encoding=Encoding.GZIP)
    made.body = b"\x04\x22\x4d\x18rest"
    found = to_popped_message(made, "t", ("broker-a", "h:1"), decompress_body)
    assert found.body == made.body
    assert "pip install 'pyarrow" in found.decode_error
