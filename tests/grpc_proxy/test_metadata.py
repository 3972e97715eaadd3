"""What stands beside a call."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone

import pytest

from rocketmq_spark.grpc_proxy.channel import SigningKeys, metadata

AT = datetime(2026, 1, 2, 4, 4, 5, tzinfo=timezone(timedelta(hours=1)))


def test_the_date_is_signed_in_utc():
    """The signature was made by: printf '20260102T030405Z' | openssl dgst -sha1 -hmac sk"""
    headers = dict(metadata("me", "1", "r", AT, SigningKeys("ak", "sk", "token")))
    assert headers["x-mq-date-time"] == "20260102T030405Z"
    signed = "8253c64a492f7128d6db0454d71f2e9cc618f627"
    assert headers["authorization"].lower() == (
        f"mqv2-hmac-sha1 credential=ak, signedheaders=x-mq-date-time, signature={signed}"
    )
    assert headers["x-mq-session-token"] == "token"


def test_the_date_is_that_of_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch):
    try:
        with monkeypatch.context() as elsewhere:
            elsewhere.setenv("TZ", "XYZ-5")
            time.tzset()
            assert ("x-mq-date-time", "20260102T030405Z") in metadata("me", "1", "r", AT, None)
    finally:
        time.tzset()


def test_who_asks_is_told_in_every_call():
    headers = metadata("me", "1", "r", datetime.now(UTC), None)
    assert ("x-mq-client-id", "me") in headers
    assert ("x-mq-request-id", "r") in headers
    assert not {"authorization", "x-mq-session-token"} & {name for name, _ in headers}


def test_names_are_lower_case_as_grpc_wants_them():
    assert all(name.islower() for name, _ in metadata("me", "1", "r", AT, SigningKeys("ak", "sk", "t")))


def test_a_secret_is_never_shown():
    assert "hidden" not in repr(SigningKeys("ak", "hidden", "hidden"))
