"""``rocketmq-spark cluster``, ``user`` and ``policy``: shows brokers with their figures, and administers users and policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliCommand, CliGroup, confirm
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.output import Output, time_text

if TYPE_CHECKING:
    from rocketmq_spark.model.admin import AccessPolicy, BrokerState, UserAccount


_BROKER_COLUMNS = {
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
@with_connection_options
@click.pass_obj
@click.pass_context
def cluster(ctx: click.Context, output: Output, target: Target) -> None:
    """Show all brokers, masters (ID 0) and slaves, with the figures that they report.

    The exit code is 1 if a broker does not answer, or if there is no broker. With --json, the field facts has everything that a
    broker reports.
    """
    from rocketmq_spark.admin import brokers

    states = brokers.states(target.client())
    output.rows(_BROKER_COLUMNS, [_row(state, output.is_for_programs) for state in states])
    silent_brokers = [state for state in states if state.error is not None]
    for state in silent_brokers:
        output.note(f"{state.broker_name} ({state.address}) does not answer: {state.error}")
    if not states:
        output.note("The name server knows no broker")
    if silent_brokers or not states:
        ctx.exit(1)


def _row(state: BrokerState, for_programs: bool) -> dict[str, object]:
    row: dict[str, object] = {
        "cluster": state.cluster,
        "brokerName": state.broker_name,
        "brokerId": state.broker_id,
        "address": state.address,
        "version": state.version,
        "started": time_text(state.started_ms),
        "putPerSecond": state.put_per_s,
        "getPerSecond": state.get_per_s,
        "diskUsed": state.disk_used,
    }
    if for_programs:
        row |= {"error": state.error, "facts": None if state.facts is None else dict(state.facts)}
        return row
    for name, value in (("putPerSecond", state.put_per_s), ("getPerSecond", state.get_per_s)):
        row[name] = None if value is None else f"{value:.1f}"
    row["diskUsed"] = None if state.disk_used is None else f"{state.disk_used:.0%}"
    return row


_USER_COLUMNS = {"user": "USER", "type": "TYPE", "status": "STATUS", "brokers": "BROKERS"}
_POLICY_COLUMNS = {
    "user": "USER",
    "resource": "RESOURCE",
    "actions": "ACTIONS",
    "decision": "DECISION",
    "sourceIps": "FROM",
    "brokers": "BROKERS",
}


@click.group(cls=CliGroup)
def user() -> None:
    """List, set and delete users of a cluster with ACL 2.0."""


@user.command("list")
@with_connection_options
@click.pass_obj
def list_users(output: Output, target: Target) -> None:
    """List the users. Passwords are not shown."""
    from rocketmq_spark.admin import brokers

    _show_users(output, brokers.users(target.client()))


@user.command("set")
@click.argument("name")
@click.option(
    "--password",
    envvar="ROCKETMQ_NEW_PASSWORD",
    help="The password, required for a new user. Other users of this machine can see it on the command line, but not in the "
    "variable [env: ROCKETMQ_NEW_PASSWORD]",
)
@click.option("--super/--normal", "is_super", default=None, help="Whether the user may do everything.")
@click.option("--enable/--disable", "enabled", default=None, help="Whether the user may connect.")
@with_connection_options
@click.pass_obj
def set_user(
    output: Output, target: Target, name: str, password: str | None, is_super: bool | None, enabled: bool | None
) -> None:
    """Create the user NAME, or change it. Properties that are not given stay; a new user is normal and enabled."""
    from rocketmq_spark.admin import brokers

    _show_users(output, brokers.set_user(target.client(), name, password, is_super, enabled))


@user.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_connection_options
@click.pass_obj
def delete_user(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete the user NAME and its policies."""
    from rocketmq_spark.admin import brokers

    confirm(f"Delete user {name} and its policies", yes)
    brokers.delete_user(target.client(), name)
    output.item({"user": name, "deleted": True}, f"User {name} is deleted")


def _show_users(output: Output, accounts: Iterable[UserAccount]) -> None:
    rows = [
        {
            "user": account.name,
            "type": _word_of_flag(account.is_super, "super", "normal"),
            "status": _word_of_flag(account.enabled, "enabled", "disabled"),
            "brokers": list(account.brokers),
        }
        for account in accounts
    ]
    output.rows(_USER_COLUMNS, rows)


def _word_of_flag(value: bool | None, yes: str, no: str) -> str | None:
    return None if value is None else yes if value else no


@click.group(cls=CliGroup)
def policy() -> None:
    """List, set and delete policies (what users may do) of a cluster with ACL 2.0."""


@policy.command("list")
@click.option("--user", "name", help="Only of this user.")
@with_connection_options
@click.pass_obj
def list_policies(output: Output, target: Target, name: str | None) -> None:
    """List the policies."""
    from rocketmq_spark.admin import brokers

    _show_policies(output, brokers.policies(target.client(), name))


@policy.command("set")
@click.argument("name")
@click.argument("resource")
@click.argument("actions", nargs=-1, required=True)
@click.option("--deny", is_flag=True, help="Deny these actions instead of allowing them.")
@click.option("--source", "sources", multiple=True, help="Only from this address or network (may be repeated).")
@with_connection_options
@click.pass_obj
def set_policy(
    output: Output, /, target: Target, name: str, resource: str, actions: tuple[str, ...], **flags: object
) -> None:
    """Allow the user NAME the ACTIONS on RESOURCE. Replaces the user's policy for that resource.

    ACTIONS: All, Pub, Sub, Create, Update, Delete, Get, List. Examples: policy set alice Topic:orders Sub Get,
    and policy set alice 'Group:billing*' Sub.
    """
    from rocketmq_spark.admin import brokers

    sources = flags["sources"]
    assert isinstance(sources, tuple)
    _show_policies(output, brokers.set_policy(target.client(), name, resource, actions, not flags["deny"], sources))


@policy.command("delete")
@click.argument("name")
@click.argument("resource")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_connection_options
@click.pass_obj
def delete_policy(output: Output, target: Target, name: str, resource: str, yes: bool) -> None:
    """Delete the policy of the user NAME for RESOURCE."""
    from rocketmq_spark.admin import brokers

    confirm(f"Delete the policy of user {name} for {resource}", yes)
    brokers.delete_policy(target.client(), name, resource)
    output.item(
        {"user": name, "resource": resource, "deleted": True}, f"The policy of {name} for {resource} is deleted"
    )


def _show_policies(output: Output, policies: Iterable[AccessPolicy]) -> None:
    rows = [
        {
            "user": access_policy.user,
            "resource": access_policy.resource,
            "actions": list(access_policy.actions) if output.is_for_programs else ",".join(access_policy.actions),
            "decision": "allow" if access_policy.allowed else "deny",
            "sourceIps": list(access_policy.sources) if output.is_for_programs else ",".join(access_policy.sources),
            "brokers": list(access_policy.brokers) if output.is_for_programs else ",".join(access_policy.brokers),
        }
        for access_policy in policies
    ]
    output.rows(_POLICY_COLUMNS, rows)
