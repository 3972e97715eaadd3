"""What stands beside every call: who asks, and the signature. Pure.

Mirrors ``org.apache.rocketmq.client.java.rpc.Signature``: only the date is signed.
"""

from __future__ import annotations

import hashlib
import hmac
from datetime import UTC, datetime
from typing import NamedTuple

PROTOCOL = "v2"
_ALGORITHM = "MQv2-HMAC-SHA1"


class Keys(NamedTuple):
    """Who signs."""

    access_key: str
    secret_key: str
    security_token: str | None = None

    def __repr__(self) -> str:
        return f"Keys(access_key={self.access_key!r})"


def metadata(client_id: str, version: str, request_id: str, now: datetime, keys: Keys | None) -> list[tuple[str, str]]:
    """The headers of one call at ``now``; the Proxy wants a ``client_id`` in each."""
    date = now.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    headers = [
        ("x-mq-language", "PYTHON"),
        ("x-mq-protocol", PROTOCOL),
        ("x-mq-client-version", version),
        ("x-mq-client-id", client_id),
        ("x-mq-request-id", request_id),
        ("x-mq-date-time", date),
    ]
    if keys is None:
        return headers
    if keys.security_token:
        headers.append(("x-mq-session-token", keys.security_token))
    signature = hmac.new(keys.secret_key.encode(), date.encode(), hashlib.sha1).hexdigest().upper()
    headers.append(
        (
            "authorization",
            f"{_ALGORITHM} Credential={keys.access_key}, SignedHeaders=x-mq-date-time, Signature={signature}",
        )
    )
    return headers
