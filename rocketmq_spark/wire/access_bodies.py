"""JSON bodies of users and policies of ACL 2.0, as ``UserInfo`` and ``AclInfo`` of RocketMQ have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire.header import Bytes
from rocketmq_spark.wire.loose_json import read_json

_SUPER, _ENABLED = "super", "enable"


class StoredUser(NamedTuple):
    """A user as one broker keeps it, without the password, which brokers tell."""

    name: str
    is_super: bool
    enabled: bool


class StoredPolicy(NamedTuple):
    """What one broker allows or denies a subject on a resource. ``Default`` counts where nothing ``Custom`` does."""

    subject: str
    resource: str
    actions: tuple[str, ...]
    allowed: bool
    sources: tuple[str, ...]
    kind: str = "Custom"


def users(body: Bytes) -> list[StoredUser]:
    """Answer to AUTH_LIST_USER; an empty body for none."""
    return [
        StoredUser(
            str(item["username"]),
            str(item.get("userType") or "").lower() == _SUPER,
            str(item.get("userStatus") or _ENABLED).lower() == _ENABLED,
        )
        for item in _items(body, "username")
    ]


def policies(body: Bytes) -> list[StoredPolicy]:
    """Answer to AUTH_LIST_ACL; an empty body for none."""
    try:
        return [
            StoredPolicy(
                str(item["subject"]),
                str(entry["resource"]),
                tuple(map(str, entry.get("actions") or ())),
                str(entry.get("decision")).lower() == "allow",
                tuple(map(str, entry.get("sourceIps") or ())),
                str(policy.get("policyType") or "Custom"),
            )
            for item in _items(body, "subject")
            for policy in item.get("policies") or ()
            for entry in policy.get("entries") or ()
        ]
    except (KeyError, TypeError, AttributeError) as e:
        raise RemoteProtocolError(f"Unexpected policies: {type(e).__name__} {e}") from e


def _items(body: Bytes, key: str) -> list[dict[str, Any]]:
    found = read_json(body) if len(body) else []
    if not isinstance(found, list) or not all(isinstance(item, dict) and key in item for item in found):
        raise RemoteProtocolError(f"Unexpected list: expected objects with {key!r}")
    return found


def user(name: str, password: str | None, is_super: bool | None, enabled: bool | None) -> bytes:
    """Body of AUTH_CREATE_USER and AUTH_UPDATE_USER; None leaves a broker's default, or what it has."""
    values = {
        "username": name,
        "password": password,
        "userType": None if is_super is None else "Super" if is_super else "Normal",
        "userStatus": None if enabled is None else "enable" if enabled else "disable",
    }
    return json.dumps({key: value for key, value in values.items() if value is not None}).encode()


def policy(subject: str, resource: str, actions: Sequence[str], allowed: bool, sources: Sequence[str]) -> bytes:
    """Body of AUTH_UPDATE_ACL: one entry, which takes the place of the subject's entry for that resource."""
    entry = {
        "resource": resource,
        "actions": list(actions),
        "sourceIps": list(sources),
        "decision": "Allow" if allowed else "Deny",
    }
    return json.dumps({"subject": subject, "policies": [{"policyType": "Custom", "entries": [entry]}]}).encode()
