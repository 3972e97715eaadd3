"""Users and policies of ACL 2.0 (RocketMQ 5.3 and newer). Each broker keeps its own: all masters are asked, or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rocketmq_spark.admin.tools import AdminTools, ask_each
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.admin import masters_of
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model.admin import AccessPolicy, UserAccount
from rocketmq_spark.wire import access_bodies, rpc
from rocketmq_spark.wire.header import Command

Kept = TypeVar("Kept")


def users(tools: AdminTools, name: str | None = None) -> list[UserAccount]:
    """All users by name, or the one of that name. Where brokers differ a user is there more than once."""
    answers = _all(tools, lambda broker: rpc.AUTH_LIST_USER.request(filter=name, bname=broker))
    kept = ((broker, user) for broker, body in answers for user in access_bodies.users(body))
    found = _merged((broker, user) for broker, user in kept if name is None or user.name == name)
    return [UserAccount(user.name, user.is_super, user.enabled, brokers) for user, brokers in found]


def set_user(
    tools: AdminTools,
    name: str,
    password: str | None = None,
    is_super: bool | None = None,
    enabled: bool | None = None,
) -> list[UserAccount]:
    """Create a user on the masters that do not have it, which needs a ``password``, and change it on the others."""
    there = {broker for account in users(tools, name) for broker in account.brokers}
    lacking = sorted(_masters(tools).keys() - there)
    if lacking and not password:
        raise OptionError(f"user {name} is not on {', '.join(lacking)}; expected a password to create it")
    body = access_bodies.user(name, password, is_super, enabled)

    def put(broker: str) -> Command:
        row = rpc.AUTH_UPDATE_USER if broker in there else rpc.AUTH_CREATE_USER
        return row.request(body, username=name, bname=broker)

    _all(tools, put)
    return users(tools, name)


def delete_user(tools: AdminTools, name: str) -> None:
    """Delete a user, and with it all of its policies."""
    if not users(tools, name):
        raise OptionError(f"there is no user {name}")
    _all(tools, lambda broker: rpc.AUTH_DELETE_USER.request(username=name, bname=broker))


def policies(tools: AdminTools, user: str | None = None) -> list[AccessPolicy]:
    """All policies, or those of one user. Where brokers differ a policy is there more than once."""
    return [
        AccessPolicy(p.subject.removeprefix("User:"), p.resource, p.actions, p.allowed, p.sources, brokers)
        for p, brokers in _merged(_kept(tools, user))
    ]


def _kept(tools: AdminTools, user: str | None) -> list[tuple[str, access_bodies.StoredPolicy]]:
    """Policies by broker."""
    subject = None if user is None else _subject(user)
    answers = _all(tools, lambda broker: rpc.AUTH_LIST_ACL.request(subjectFilter=subject, bname=broker))
    kept = [(broker, policy) for broker, body in answers for policy in access_bodies.policies(body)]
    return [(broker, policy) for broker, policy in kept if subject is None or policy.subject == subject]


def set_policy(
    tools: AdminTools,
    user: str,
    resource: str,
    actions: Sequence[str],
    allowed: bool = True,
    sources: Sequence[str] = (),
) -> list[AccessPolicy]:
    """Allow or deny a user these actions on a resource, instead of what was said of that resource before."""
    body = access_bodies.policy(_subject(user), resource, actions, allowed, sources)
    _all(tools, lambda broker: rpc.AUTH_UPDATE_ACL.request(body, subject=_subject(user), bname=broker))
    return policies(tools, user)


def delete_policy(tools: AdminTools, user: str, resource: str) -> None:
    """Forget what was said of a user and a resource, where it was, custom and default alike."""
    kept = {(policy.kind, broker) for broker, policy in _kept(tools, user) if policy.resource == resource}
    if not kept:
        raise OptionError(f"user {user} has no policy for {resource}")
    masters, row = _masters(tools), rpc.AUTH_DELETE_ACL
    for kind in sorted({kind for kind, _ in kept}):
        asked = {
            broker: (at, row.request(subject=_subject(user), policyType=kind, resource=resource, bname=broker))
            for broker, at in masters.items()
            if (kind, broker) in kept
        }
        for _ in ask_each(tools, asked, (Response.SUCCESS,)):
            pass


def _subject(user: str) -> str:
    return f"User:{user}"


def _masters(tools: AdminTools) -> dict[str, str]:
    """All of them: where only a slave is registered its master is not known, and what it keeps would stay."""
    return masters_of(tools.admin.cluster())


def _all(tools: AdminTools, make: Callable[[str], Command]) -> list[tuple[str, bytes]]:
    asked = {name: (address, make(name)) for name, address in _masters(tools).items()}
    return [(name, bytes(answer.body)) for name, answer in ask_each(tools, asked, (Response.SUCCESS,))]


def _merged(kept: Iterable[tuple[str, Kept]]) -> list[tuple[Kept, tuple[str, ...]]]:
    """Equal ones of several brokers as one, sorted."""
    brokers: dict[Kept, list[str]] = {}
    for broker, one in kept:
        brokers.setdefault(one, []).append(broker)
    return [(one, tuple(names)) for one, names in sorted(brokers.items())]
