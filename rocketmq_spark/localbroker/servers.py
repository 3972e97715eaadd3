"""The three kinds of server: their configuration files, folders, commands and ports.

``make docs`` also renders the templates of this package to ``conf/`` for Docker. In Docker, the three containers share one
network, so 127.0.0.1 with RocketMQ's usual ports is right inside and outside of this network.
"""

from __future__ import annotations

import json
import shutil
import string
import struct
import time
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from rocketmq_spark.base.folders import make_folders, replace_file
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import processes
from rocketmq_spark.localbroker.processes import Program

# Settings in broker.conf and rmq-proxy.json that the cluster sets itself; other values would break the cluster.
RESERVED_SETTINGS = frozenset(
    {"brokerName", "brokerId", "brokerRole", "listenPort", "namesrvAddr", "storePathRootDir", "storePathCommitLog"}
    | {"remotingListenPort", "grpcServerPort", "proxyMode"}
)
BROKER_CONF, PROXY_CONF = "broker.conf", "rmq-proxy.json"
TLS_CERT_FIELD = "tlsCertPath"  # if this field is set, the proxy accepts only TLS


def template(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def render(name: str, values: Mapping[str, object]) -> str:
    """Return a template with values for its ``$names``."""
    return string.Template(template(name)).substitute(values)


def replace_lines(text: str, conf: Mapping[str, object]) -> str:
    """Return ``key=value`` text in which the lines of ``conf`` replace or follow the lines of ``text``."""
    remaining_values = {key: _conf_value(value) for key, value in conf.items()}
    lines = []
    for line in text.splitlines():
        key = line.partition("=")[0].strip()
        lines.append(f"{key}={remaining_values.pop(key)}" if key in remaining_values else line)
    return "\n".join([*lines, *(f"{key}={value}" for key, value in remaining_values.items())]) + "\n"


def replace_fields(text: str, conf: Mapping[str, object]) -> str:
    """Return a JSON object in which the fields of ``conf`` replace or follow the fields of ``text``."""
    return json.dumps(json.loads(text) | dict(conf), indent=2) + "\n"


def change_conf(home: Path, file_name: str, conf: Mapping[str, object]) -> None:
    """Change settings in a server's folder: lines of broker.conf, or fields of rmq-proxy.json, as ``file_name`` says."""
    path = home / file_name
    if not path.exists():
        raise LocalBrokerError(f"{home.name} takes no conf", remedy="Give it to a broker or to the proxy")
    replace_settings = replace_fields if file_name == PROXY_CONF else replace_lines
    replace_file(path, replace_settings(path.read_text(encoding="utf-8"), conf))


def checked_conf(conf: Mapping[str, object], allowed_settings: Container[str] = ()) -> dict[str, object]:
    """Return a copy of ``conf``. Raises an error if ``conf`` sets one of ``RESERVED_SETTINGS`` that is not in
    ``allowed_settings``.
    """
    for key, value in conf.items():
        if key in RESERVED_SETTINGS and key not in allowed_settings:
            raise LocalBrokerError(
                f"conf must not set {key}: LocalBroker decides it",
                remedy="Use brokers=, slaves=, ports= or data= instead",
            )
        if "\n" in str(value):
            raise LocalBrokerError(f"The value of {key} in conf has a line break")
    return dict(conf)


def _conf_value(value: object) -> str:
    # A backslash is an escape character in Java properties, so it is doubled.
    return str(value).lower() if isinstance(value, bool) else str(value).replace("\\", "\\\\")


def compose_files() -> dict[str, str]:
    """The files of ``conf/`` by name."""
    common_values = {"bind": "0.0.0.0", "name_server": "127.0.0.1:9876"}
    broker_values = {
        "broker_name": "broker-a",
        "broker_id": 0,
        "role": "ASYNC_MASTER",
        "store": "/home/rocketmq/store",
    }
    return {
        "namesrv.conf": render("namesrv.conf", {**common_values, "port": 9876}),
        "broker.conf": render("broker.conf", {**common_values, **broker_values, "port": 10911}),
        "rmq-proxy.json": render("rmq-proxy.json", {**common_values, "port": 8080, "grpc_port": 8081}),
    }


def write_compose_files(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in compose_files().items():
        (folder / name).write_text(text, encoding="utf-8")


NAME_SERVER = "namesrv"
PROXY = "proxy"
# Modes of a proxy. With ``CLUSTER``, the proxy runs in its own process, for all brokers of a cluster. With ``LOCAL``, it runs in
# the process of one broker.
CLUSTER, LOCAL = "cluster", "local"
_PROXY_STARTUP = "org.apache.rocketmq.proxy.ProxyStartup"
# A name server needs a small heap. A broker's heap contains the messages in flight, of up to 4 MiB each.
_NAME_SERVER_HEAP_MB = 64
_BROKER_HEAP_MB = 192
_PROXY_HEAP_MB = 192
# Folder for files that libraries unpack at a start. In the system's temporary folder, these files would remain after a kill.
_TEMPORARY_FOLDER = "tmp"
# These flags come after the other flags, because the JVM uses the last value of a repeated flag. With only the flag for
# enforced TLS, the proxy would use TLS to brokers, too (NettyClientConfig).
_ENFORCED_TLS_FLAGS = ("-Dtls.server.mode=enforcing", "-Dtls.enable=false")


@dataclass(frozen=True, slots=True)
class BrokerSpec:
    """A broker: its own name and its broker name. A slave has its master's broker name and an id above 0."""

    broker_name: str
    broker_id: int

    @property
    def name(self) -> str:
        return slave_name(self.broker_name, self.broker_id) if self.broker_id else self.broker_name


def slave_name(broker_name: str, broker_id: int) -> str:
    return f"{broker_name}-slave-{broker_id}"


def broker_names(count: int) -> list[str]:
    """Return the names broker-a to broker-z, followed by broker-27, broker-28 and so on."""
    return [f"broker-{chr(ord('a') + i)}" if i < 26 else f"broker-{i + 1}" for i in range(count)]


def name_server_names(count: int) -> list[str]:
    """Return the names namesrv, namesrv-2, namesrv-3 and so on."""
    return [NAME_SERVER, *(f"{NAME_SERVER}-{i}" for i in range(2, count + 1))]


def prepare_name_server(data: Path, jars: tuple[Path, ...], name: str, port: int) -> Program:
    home = _prepare_home(data, name)
    conf_path = home / "namesrv.conf"
    replace_file(conf_path, render(conf_path.name, {"port": port, "bind": processes.HOST}))
    main_class, arguments = "org.apache.rocketmq.namesrv.NamesrvStartup", ("-c", str(conf_path))
    return Program(name, home, (port,), main_class, arguments, jars, _NAME_SERVER_HEAP_MB, _flags(home))


def prepare_broker(
    data: Path,
    jars: tuple[Path, ...],
    spec: BrokerSpec,
    port: int,
    name_server: str,
    conf: Mapping[str, object],
) -> Program:
    home = _prepare_home(data, spec.name)
    path = home / BROKER_CONF
    values = {
        "broker_name": spec.broker_name,
        "broker_id": spec.broker_id,
        "role": "SLAVE" if spec.broker_id else "ASYNC_MASTER",
        "port": port,
        "bind": processes.HOST,
        "name_server": name_server,
        "store": home / "store",
    }
    replace_file(path, replace_lines(render(path.name, values), conf))
    _write_timer_checkpoint(home / "store")
    ports = tuple(port + distance for distance in processes.BROKER_PORT_DISTANCES)
    main_class, arguments = "org.apache.rocketmq.broker.BrokerStartup", ("-c", str(path))
    return Program(spec.name, home, ports, main_class, arguments, jars, _BROKER_HEAP_MB, _flags(home))


def prepare_proxy(
    data: Path, jars: tuple[Path, ...], port: int, name_server: str, conf: Mapping[str, object]
) -> Program:
    """Prepare a proxy. With a certificate (``tlsCertPath``, ``tlsKeyPath``), both ports accept only TLS; otherwise they accept no
    TLS.
    """
    home = _prepare_home(data, PROXY)
    path = home / PROXY_CONF
    values = {"port": port, "grpc_port": port + 1, "name_server": name_server}
    has_tls = TLS_CERT_FIELD in conf
    fields = {**({"tlsTestModeEnable": False} if has_tls else {}), **conf}
    replace_file(path, replace_fields(render(path.name, values), fields))
    main_class, arguments = _PROXY_STARTUP, ("-pc", str(path))
    flags = (*_flags(home), *_ENFORCED_TLS_FLAGS) if has_tls else _flags(home)
    return Program(PROXY, home, (port, port + 1), main_class, arguments, jars, _PROXY_HEAP_MB, flags)


def proxy_mode(conf: Mapping[str, object]) -> str:
    """Return the mode of a proxy with these fields. Raises ``LocalBrokerError`` for an unknown mode."""
    mode = str(conf.get("proxyMode", CLUSTER)).lower()
    if mode not in (CLUSTER, LOCAL):
        expected = f"{CLUSTER.upper()} or {LOCAL.upper()}"
        raise LocalBrokerError(f"proxyMode is {conf['proxyMode']!r}; expected {expected}")
    return mode


def with_local_proxy(broker: Program, jars: tuple[Path, ...], name_server: str, conf: Mapping[str, object]) -> Program:
    """Return a program that runs ``broker`` with a proxy in the same process, as ``mqbroker --enable-proxy`` does."""
    port = broker.ports[0]
    values = {
        "port": port + processes.LOCAL_PROXY_PORT_DISTANCES[-2],
        "grpc_port": port + processes.LOCAL_PROXY_PORT_DISTANCES[-1],
    }
    path = broker.home / PROXY_CONF
    replace_file(path, replace_fields(render(path.name, {**values, "name_server": name_server}), conf))
    return replace(
        broker,
        ports=tuple(port + distance for distance in processes.LOCAL_PROXY_PORT_DISTANCES),
        main_class=_PROXY_STARTUP,
        arguments=("-pc", str(path), "-pm", LOCAL, "-bc", str(broker.home / BROKER_CONF)),
        jars=jars,
    )


def _prepare_home(data: Path, name: str) -> Path:
    home = data / name
    shutil.rmtree(home / _TEMPORARY_FOLDER, ignore_errors=True)
    make_folders(home / _TEMPORARY_FOLDER)
    replace_file(home / "logback.xml", template("logback.xml"))
    make_folders(home / "conf")
    for server in ("broker", "namesrv"):  # RocketMQ 4.9 reads only the files in this folder
        replace_file(home / "conf" / f"logback_{server}.xml", template("logback.xml"))
    return home


def _write_timer_checkpoint(store: Path) -> None:
    """Write the timer checkpoint of a new store, with the current time as the time until which timers were read. Without this
    file, the broker would search each second of the last week for timers.

    Writes only the first of the eight-byte numbers in TimerCheckpoint's file, a time in ms. The broker reads missing numbers as
    0.
    """
    if not store.exists():
        path = store / "config" / "timercheck"
        make_folders(path.parent)
        replace_file(path, struct.pack(">q", int(time.time()) * 1000))


def _flags(home: Path) -> tuple[str, ...]:
    logging_flag, temporary_folder_flag = (
        f"-Drmq.logback.configurationFile={home / 'logback.xml'}",
        f"-Djava.io.tmpdir={home / _TEMPORARY_FOLDER}",
    )
    return ("-Dtls.server.mode=disabled", logging_flag, temporary_folder_flag)
