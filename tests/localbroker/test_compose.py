"""docker-compose.yml: the part of the Compose schema that it uses, files that exist, ports that are listened on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rocketmq_spark.localbroker import distribution

ROOT = Path(__file__).parents[2]

# Subset of the Compose specification's schema, strict: a key outside of it is a misspelling here.
_STRINGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
_SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image", "command"],
    "properties": {
        "image": {"type": "string", "pattern": r"^[a-z0-9/._-]+:[\w.-]+$"},
        "command": {"type": "string"},
        "environment": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
        "volumes": {**_STRINGS, "items": {"type": "string", "pattern": r"^[^:]+:/[^:]+(:(ro|rw))?$"}},
        "ports": {**_STRINGS, "items": {"type": "string", "pattern": r"^127\.0\.0\.1:\d+:\d+$"}},
        "network_mode": {"type": "string", "pattern": r"^(host|none|bridge|service:\w+)$"},
        "depends_on": _STRINGS,
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
    },
}
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["services"],
    "properties": {
        "services": {"type": "object", "additionalProperties": False, "patternProperties": {r"^[\w.-]+$": _SERVICE}}
    },
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def test_it_fits_the_schema(compose: dict[str, Any]) -> None:
    jsonschema.validate(compose, SCHEMA)


def test_names_lead_somewhere(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        mode, _, other = service.get("network_mode", "").partition(":")
        if mode == "service":
            assert other in services
            assert "ports" not in service


def test_every_mounted_file_exists_and_is_used(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            assert (ROOT / source).is_file()
            assert target in service["command"]


def test_the_version_is_that_of_the_local_broker(compose: dict[str, Any]) -> None:
    assert {s["image"] for s in compose["services"].values()} == {f"apache/rocketmq:{distribution.VERSION}"}


def test_published_ports_are_those_of_the_configuration(compose: dict[str, Any]) -> None:
    published = {int(p.split(":")[1]) for s in compose["services"].values() for p in s.get("ports", ())}
    name_server, broker = (
        int(re.findall(r"^listenPort=(\d+)$", (ROOT / "conf" / name).read_text(), re.MULTILINE)[0])
        for name in ("namesrv.conf", "broker.conf")
    )
    proxy = json.loads((ROOT / "conf" / "rmq-proxy.json").read_text())
    assert published == {
        name_server,
        broker,
        broker - 2,
        proxy["remotingListenPort"],
        proxy["grpcServerPort"],
    }
