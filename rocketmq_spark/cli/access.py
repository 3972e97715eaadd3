"""``rocketmq-spark user`` and ``policy``: users and policies of ACL 2.0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliGroup, confirm
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rocketmq_spark.model.admin import AccessPolicy, UserAccount

_USER = {"user": "USER", "type": "TYPE", "status": "STATUS", "brokers": "BROKERS"}
_POLICY = {
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
@connected
@click.pass_obj
def list_users(output: Output, target: Target) -> None:
    """List the users. Passwords are not shown."""
    from rocketmq_spark.admin import access

    _show_users(output, access.users(target.client()))


@user.command("set")
@click.argument("name")
@click.option(
    "--password",
    envvar="ROCKETMQ_NEW_PASSWORD",
    help="The new password [env: ROCKETMQ_NEW_PASSWORD, which others do not see]",
)
@click.option("--super/--normal", "is_super", default=None, help="Whether the user may do everything.")
@click.option("--enable/--disable", "enabled", default=None, help="Whether the user may connect.")
@connected
@click.pass_obj
def set_user(
    output: Output, target: Target, name: str, password: str | None, is_super: bool | None, enabled: bool | None
) -> None:
    """Create the user NAME, or change it. What is not given stays."""
    from rocketmq_spark.admin import access

    _show_users(output, access.set_user(target.client(), name, password, is_super, enabled))


@user.command("delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def delete_user(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete the user NAME and its policies."""
    from rocketmq_spark.admin import access

    confirm(f"Delete user {name} and its policies", yes)
    access.delete_user(target.client(), name)
    output.item({"user": name, "deleted": True}, f"User {name} is deleted")


def _show_users(output: Output, found: Iterable[UserAccount]) -> None:
    rows = [
        {
            "user": account.name,
            "type": "super" if account.is_super else "normal",
            "status": "enabled" if account.enabled else "disabled",
            "brokers": list(account.brokers),
        }
        for account in found
    ]
    output.rows(_USER, rows)


@click.group(cls=CliGroup)
def policy() -> None:
    """List, set and delete what users may do, on a cluster with ACL 2.0."""


@policy.command("list")
@click.option("--user", "name", help="Only of this user.")
@connected
@click.pass_obj
def list_policies(output: Output, target: Target, name: str | None) -> None:
    """List the policies."""
    from rocketmq_spark.admin import access

    _show_policies(output, access.policies(target.client(), name))


@policy.command("set")
@click.argument("name")
@click.argument("resource")
@click.argument("actions", nargs=-1, required=True)
@click.option("--deny", is_flag=True, help="Deny these actions instead of allowing them.")
@click.option("--source", "sources", multiple=True, help="Only from this address or network (may be repeated).")
@connected
@click.pass_obj
def set_policy(
    output: Output, /, target: Target, name: str, resource: str, actions: tuple[str, ...], **how: object
) -> None:
    """Allow the user NAME the ACTIONS on RESOURCE, such as Topic:orders Sub Get, or 'Group:billing*' Sub.

    Replaces the user's policy for that resource. ACTIONS: All, Pub, Sub, Create, Update, Delete, Get, List.
    """
    from rocketmq_spark.admin import access

    sources = how["sources"]
    assert isinstance(sources, tuple)
    _show_policies(output, access.set_policy(target.client(), name, resource, actions, not how["deny"], sources))


@policy.command("delete")
@click.argument("name")
@click.argument("resource")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def delete_policy(output: Output, target: Target, name: str, resource: str, yes: bool) -> None:
    """Delete the policy of the user NAME for RESOURCE."""
    from rocketmq_spark.admin import access

    confirm(f"Delete the policy of user {name} for {resource}", yes)
    access.delete_policy(target.client(), name, resource)
    output.item(
        {"user": name, "resource": resource, "deleted": True}, f"The policy of {name} for {resource} is deleted"
    )


def _show_policies(output: Output, found: Iterable[AccessPolicy]) -> None:
    rows = [
        {
            "user": one.user,
            "resource": one.resource,
            "actions": list(one.actions) if output.machine else ",".join(one.actions),
            "decision": "allow" if one.allowed else "deny",
            "sourceIps": list(one.sources) if output.machine else ",".join(one.sources),
            "brokers": list(one.brokers) if output.machine else ",".join(one.brokers),
        }
        for one in found
    ]
    output.rows(_POLICY, rows)
