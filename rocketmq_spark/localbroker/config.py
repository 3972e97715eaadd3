"""Configuration files of the servers, from the templates in this package.

The same templates make ``conf/`` for people with Docker: ``python -m rocketmq_spark.localbroker conf``. There the
three containers share one network, so 127.0.0.1 with RocketMQ's usual ports is right inside and outside alike.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from rocketmq_spark.errors import LocalBrokerError

# Lines of broker.conf, and fields of rmq-proxy.json, that the cluster itself decides; another value would break what it promises.
OURS = frozenset(
    {"brokerName", "brokerId", "brokerRole", "listenPort", "namesrvAddr", "storePathRootDir", "storePathCommitLog"}
    | {"remotingListenPort", "grpcServerPort", "proxyMode"}
)


def template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def render(name: str, values: Mapping[str, object]) -> str:
    """A template with its ``$names`` filled in."""
    return string.Template(template(name)).substitute(values)


def with_lines(text: str, conf: Mapping[str, object]) -> str:
    """``key=value`` text with the lines of ``conf`` in place of, or after, its own."""
    left = {key: _value(value) for key, value in conf.items()}
    lines = []
    for line in text.splitlines():
        key = line.partition("=")[0].strip()
        lines.append(f"{key}={left.pop(key)}" if key in left else line)
    return "\n".join([*lines, *(f"{key}={value}" for key, value in left.items())]) + "\n"


def with_fields(text: str, conf: Mapping[str, object]) -> str:
    """A JSON object with the fields of ``conf`` in place of, or after, its own."""
    return json.dumps(json.loads(text) | dict(conf), indent=2) + "\n"


def change(home: Path, conf: Mapping[str, object]) -> None:
    """Lines of the broker.conf, or fields of the rmq-proxy.json, in a server's folder."""
    for name, changed in (("broker.conf", with_lines), ("rmq-proxy.json", with_fields)):
        if (path := home / name).exists():
            path.write_text(changed(path.read_text(encoding="utf-8"), conf), encoding="utf-8")
            return
    raise LocalBrokerError(f"{home.name} takes no conf", remedy="Give it to a broker or to the proxy")


def checked(conf: Mapping[str, object]) -> dict[str, object]:
    """``conf`` unless it sets a line that is not the user's to set."""
    for key, value in conf.items():
        if key in OURS:
            raise LocalBrokerError(
                f"conf must not set {key}: LocalBroker decides it",
                remedy="Use brokers=, slaves=, ports= or data= instead",
            )
        if "\n" in str(value):
            raise LocalBrokerError(f"The value of {key} in conf has a line break")
    return dict(conf)


def _value(value: object) -> str:
    # Java properties: a backslash escapes, so a literal one is doubled.
    return str(value).lower() if isinstance(value, bool) else str(value).replace("\\", "\\\\")


def compose_files() -> dict[str, str]:
    """The files of ``conf/`` by name."""
    everywhere = {"bind": "0.0.0.0", "name_server": "127.0.0.1:9876"}
    broker = {
        "broker_name": "broker-a",
        "broker_id": 0,
        "role": "ASYNC_MASTER",
        "store": "/home/rocketmq/store",
    }
    return {
        "namesrv.conf": render("namesrv.conf", {**everywhere, "port": 9876}),
        "broker.conf": render("broker.conf", {**everywhere, **broker, "port": 10911}),
        "rmq-proxy.json": render("rmq-proxy.json", {**everywhere, "port": 8080, "grpc_port": 8081}),
    }


def write_compose_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in compose_files().items():
        (folder / name).write_text(text, encoding="utf-8")
