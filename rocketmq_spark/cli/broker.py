"""``rocketmq-spark broker``: starts, stops and shows the local broker in the background."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.cli.command import CliGroup
from rocketmq_spark.cli.connection import parse_pairs
from rocketmq_spark.cli.numbers import IntRange
from rocketmq_spark.cli.output import Output
from rocketmq_spark.errors import LocalBrokerError

if TYPE_CHECKING:
    from rocketmq_spark.cli.background import RunningBroker

_LOG_FILE_NAMES = ("out.txt", "server.1.log", "server.log")


@click.group(cls=CliGroup)
def broker() -> None:
    """Start and stop a real RocketMQ on this machine. RocketMQ runs in the background."""


@broker.command()
@click.option("--brokers", type=IntRange(1), help="Number of brokers. [default: as many as the data folder has, or 1]")
@click.option(
    "--slaves",
    type=IntRange(0),
    help="Number of slaves of each broker. [default: as many as the data folder has, or 0]",
)
@click.option("--port", type=IntRange(1024, 65535), help="Port of the name server (default: a free one).")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data folder, kept after the stop (default: in the user's cache folder).",
)
@click.option(
    "--conf", multiple=True, callback=parse_pairs, metavar="NAME=VALUE", help="A line of broker.conf (may be repeated)."
)
@click.pass_obj
def start(
    output: Output, brokers: int | None, slaves: int | None, port: int | None, data: Path | None, conf: dict[str, str]
) -> None:
    """Start a name server and brokers; they run until 'broker stop'.

    Every broker of the data folder is started; --brokers can only add more.
    """
    from rocketmq_spark.cli import background

    folder = (data or background.default_data()).expanduser().absolute()
    stored_brokers = background.stored_brokers(folder)
    request = background.StartRequest(
        max(1, len(stored_brokers)) if brokers is None else brokers,
        max(stored_brokers.values(), default=0) if slaves is None else slaves,
        str(folder),
        conf,
        port,
    )
    if omitted_brokers := list(stored_brokers)[request.brokers :]:
        raise LocalBrokerError(
            f"{folder} has the data of {len(stored_brokers)} brokers: the queues of {', '.join(omitted_brokers)} "
            "would be missing",
            remedy="Omit --brokers, or name another folder with --data",
        )
    broker_state = background.start(request)
    output.item(
        _document(broker_state), f"RocketMQ runs: name server {broker_state.name_server}, data in {broker_state.data}"
    )
    output.note("Try: rocketmq-spark topic create hello, and: echo Hello | rocketmq-spark produce hello")


@broker.command()
@click.pass_obj
def stop(output: Output) -> None:
    """Shut all servers down cleanly. The data is kept."""
    from rocketmq_spark.cli import background

    if background.running_broker() is not None:
        output.note("Stopping RocketMQ, which may take 20 s ...")
    broker_state = background.stop()
    output.item(
        {"running": False, "data": broker_state.data}, f"RocketMQ has stopped; its data stays in {broker_state.data}"
    )


@broker.command()
@click.pass_obj
@click.pass_context
def status(ctx: click.Context, output: Output) -> None:
    """Show the servers and their addresses. The exit code is 1 if no server runs, or if one server is down."""
    from rocketmq_spark.cli import background

    broker_state = background.running_broker()
    if broker_state is None:
        reason = background.not_running_error()
        output.item({"running": False}, f"{reason.message}. {reason.remedy}")
        ctx.exit(1)
    document = _document(broker_state)
    lines = [
        f"Name server  {broker_state.name_server}",
        f"Data         {broker_state.data}",
        f"Started      {document['started']}",
    ]
    is_up_by_name = {str(server["name"]): server["up"] for server in document["servers"]}
    for name, (address, pid) in broker_state.servers.items():
        lines.append(f"{name:<12} {address}  process {pid}  {'up' if is_up_by_name[name] else 'down'}")
    output.item(document, *lines)
    down_servers = [name for name in is_up_by_name if not is_up_by_name[name]]
    if down_servers:
        output.note(
            f"{', '.join(down_servers)} down. See: rocketmq-spark broker logs {down_servers[0]}; then: rocketmq-spark broker "
            f"stop, and: {_start_command(broker_state)}"
        )
        ctx.exit(1)


@broker.command()
@click.argument("name")
@click.option(
    "--lines", type=IntRange(0), default=50, show_default=True, help="Number of lines from the end; 0 for all."
)
@click.pass_obj
def logs(output: Output, name: str, lines: int) -> None:
    """Show what the server NAME printed and logged.

    NAME is one of the servers that 'broker status' shows: namesrv, broker-a, ...
    """
    from rocketmq_spark.cli import background

    broker_state = background.running_broker()
    if broker_state is None:
        raise background.not_running_error()
    if name not in broker_state.servers:
        raise LocalBrokerError(f"There is no server {name!r}", remedy=f"Name one of: {', '.join(broker_state.servers)}")
    files = [Path(broker_state.data, name, file) for file in _LOG_FILE_NAMES]
    text = "".join(f.read_text(encoding="utf-8", errors="replace") for f in files if f.exists())
    for line in text.splitlines()[-lines:]:
        output.item({"server": name, "line": line}, line)


def _start_command(broker_state: RunningBroker) -> str:
    """The command that starts the same broker again. It includes the names of the settings in --conf, because the data folder
    does not store these settings.
    """
    from rocketmq_spark.cli import background

    words = ["rocketmq-spark", "broker", "start"]
    if broker_state.data != str(background.default_data()):
        words += ["--data", broker_state.data]
    return shlex.join(words) + (f", with the same --conf {', '.join(broker_state.conf)}" if broker_state.conf else "")


def _document(broker_state: RunningBroker) -> dict[str, Any]:
    return {
        "running": True,
        "nameServer": broker_state.name_server,
        "data": broker_state.data,
        "pid": broker_state.pid,
        "started": datetime.fromtimestamp(broker_state.started_ms / 1000, UTC).isoformat(timespec="seconds"),
        "servers": [
            {"name": name, "address": address, "pid": pid, "up": broker_state.is_up(name)}
            for name, (address, pid) in broker_state.servers.items()
        ],
    }
