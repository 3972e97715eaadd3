"""``rocketmq-spark cluster``: the brokers of a cluster and what they report of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliCommand
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output, moment

if TYPE_CHECKING:
    from rocketmq_spark.model.admin import BrokerState

_SHOWN = {
    "cluster": "CLUSTER NAME",
    "brokerName": "BROKER",
    "brokerId": "ID",
    "address": "ADDRESS",
    "version": "VERSION",
    "started": "STARTED",
    "putPerSecond": "IN/S",
    "getPerSecond": "OUT/S",
    "diskUsed": "DISK",
}


@click.command(cls=CliCommand)
@connected
@click.pass_obj
@click.pass_context
def cluster(ctx: click.Context, output: Output, target: Target) -> None:
    """Show all brokers, masters (ID 0) and slaves, with the figures that they report. Exits with 1 if one does not answer.

    With --json, facts contains everything that a broker reports.
    """
    from rocketmq_spark.admin import brokers

    states = brokers.states(target.client())
    output.rows(_SHOWN, [_row(state, output.machine) for state in states])
    silent = [state for state in states if state.error is not None]
    for state in silent:
        output.note(f"{state.broker_name} ({state.address}) does not answer: {state.error}")
    if not states:
        output.note("The name server knows no broker")
    if silent or not states:
        ctx.exit(1)


def _row(state: BrokerState, machine: bool) -> dict[str, object]:
    row: dict[str, object] = {
        "cluster": state.cluster,
        "brokerName": state.broker_name,
        "brokerId": state.broker_id,
        "address": state.address,
        "version": state.version,
        "started": moment(state.started_ms),
        "putPerSecond": state.put_per_s,
        "getPerSecond": state.get_per_s,
        "diskUsed": state.disk_used,
    }
    if machine:
        row |= {"error": state.error, "facts": None if state.facts is None else dict(state.facts)}
    elif state.disk_used is not None:
        row["diskUsed"] = f"{state.disk_used:.0%}"
    return row
