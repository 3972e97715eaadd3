"""Administration of brokers: the list of brokers, their state and settings, and their users and policies (ACL 2.0).

Brokers have users and policies since RocketMQ 5.3. Each broker stores its own users and policies, so requests go to all masters.
The JSON bodies have the fields of RocketMQ's ``UserInfo`` and ``AclInfo``.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rocketmq_spark.admin import AdminTools, deadline, request_each
from rocketmq_spark.base.arguments import similar_names
from rocketmq_spark.base.codes import FIRST_VERSION_THAT_UPDATES_USERS, Response
from rocketmq_spark.base.secret import Secret
from rocketmq_spark.client.routes import masters_of
from rocketmq_spark.client.rpc import error_from_response
from rocketmq_spark.errors import NotSupported, OptionError, RemoteProtocolError, RocketMQError
from rocketmq_spark.model import BrokerData
from rocketmq_spark.model.admin import AccessPolicy, BrokerState, UserAccount
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Bytes, Command
from rocketmq_spark.wire.loose_json import read_json

logger = logging.getLogger(__name__)

_SUPER, _ENABLED = "super", "enable"
_RESOURCE_TYPES = ("topic", "group", "cluster", "namespace")
_ACTIONS = ("All", "Pub", "Sub", "Create", "Update", "Delete", "Get", "List")


class StoredUser(NamedTuple):
    """A user as one broker stores it, without the password that brokers also return. Unknown properties are None."""

    name: str
    is_super: bool | None
    enabled: bool | None


class StoredPolicy(NamedTuple):
    """The actions on a resource that one broker allows or denies to a subject.

    A policy of kind ``Default`` applies if no ``Custom`` policy does.
    """

    subject: str
    resource: str
    actions: tuple[str, ...]
    allowed: bool
    sources: tuple[str, ...]
    kind: str = "Custom"


def parse_users(body: Bytes) -> list[StoredUser]:
    """Parse the answer to AUTH_LIST_USER. An empty body means no users."""
    return [_stored_user(item) for item in _parse_items(body, "username")]


def parse_user(body: Bytes) -> StoredUser | None:
    """Parse the answer to AUTH_GET_USER. An empty body means that there is no such user."""
    item = read_json(body) if len(body) else None
    if item is not None and not (isinstance(item, dict) and "username" in item):
        raise RemoteProtocolError("Unexpected user: expected an object with 'username'")
    return None if item is None else _stored_user(item)


def _stored_user(item: Mapping[str, Any]) -> StoredUser:
    return StoredUser(
        str(item["username"]),
        str(item.get("userType") or "").lower() == _SUPER,
        str(item.get("userStatus") or _ENABLED).lower() == _ENABLED,
    )


def parse_policies(body: Bytes) -> list[StoredPolicy]:
    """Parse the answer to AUTH_LIST_ACL. An empty body means no policies."""
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
            for item in _parse_items(body, "subject")
            for policy in item.get("policies") or ()
            for entry in policy.get("entries") or ()
        ]
    except (KeyError, TypeError, AttributeError) as e:
        raise RemoteProtocolError(f"Unexpected policies: {type(e).__name__} {e}") from e


def _parse_items(body: Bytes, key: str) -> list[dict[str, Any]]:
    items = read_json(body) if len(body) else []
    if not isinstance(items, list) or not all(isinstance(item, dict) and key in item for item in items):
        raise RemoteProtocolError(f"Unexpected list: expected objects with {key!r}")
    return items


def user_body(name: str, password: str | None, is_super: bool | None, enabled: bool | None) -> bytes:
    """Return the body of AUTH_CREATE_USER and AUTH_UPDATE_USER. A property that is None is left out: an existing user
    keeps its value, and a new user gets the broker's default.
    """
    values = {
        "username": name,
        "password": password,
        "userType": None if is_super is None else "Super" if is_super else "Normal",
        "userStatus": None if enabled is None else "enable" if enabled else "disable",
    }
    return json.dumps({key: value for key, value in values.items() if value is not None}).encode()


def policy_body(subject: str, resource: str, actions: Sequence[str], allowed: bool, sources: Sequence[str]) -> bytes:
    """Return the body of AUTH_UPDATE_ACL: one entry, which replaces the subject's entry for the resource.

    This function checks the values, because brokers silently omit unknown actions, and report a wrong resource or address as
    denied access.
    """
    resource_type, colon, name = resource.partition(":")
    if resource != "*" and (resource_type.lower() not in _RESOURCE_TYPES or not colon or not name):
        raise OptionError(
            f"resource is {resource!r}; expected Topic:NAME, Group:NAME, Cluster:NAME, Namespace:NAME or *"
        )
    if invalid_sources := [source for source in sources if not _is_network(source)]:
        raise OptionError(f"source {invalid_sources[0]!r} is not an IP address, or a network such as 10.0.0.0/8")
    valid_actions = {action.lower() for action in _ACTIONS}
    if invalid_actions := [action for action in actions if action.lower() not in valid_actions] or (
        [] if actions else [""]
    ):
        raise OptionError(f"actions: {', '.join(map(repr, invalid_actions))}; expected some of {', '.join(_ACTIONS)}")
    entry = {
        "resource": resource,
        "actions": list(actions),
        "sourceIps": list(sources),
        "decision": "Allow" if allowed else "Deny",
    }
    return json.dumps({"subject": subject, "policies": [{"policyType": "Custom", "entries": [entry]}]}).encode()


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def cluster(tools: AdminTools) -> list[BrokerData]:
    """Return all brokers, sorted by name."""
    return [data for _, data in sorted(tools.admin.cluster().items())]


def states(tools: AdminTools) -> list[BrokerState]:
    """Return the state that every master and slave reports. Brokers that do not answer have an ``error``. All requests are sent
    in parallel.
    """
    replicas = [
        (data, broker_id, address) for data in cluster(tools) for broker_id, address in sorted(data.addresses.items())
    ]
    requests = [(address, rpc.GET_BROKER_RUNTIME_INFO.request(bname=data.broker_name)) for data, _, address in replicas]
    overall_deadline = deadline(tools)
    answers = tools.rpc_client.invoke_each(requests, overall_deadline)
    start_deadline = overall_deadline.within(_START_TIMEOUT_S)
    while any(_is_starting(answer) for answer in answers) and not start_deadline.expired:
        start_deadline.pause(_START_PAUSE_S)
        answers = tools.rpc_client.invoke_each(requests, overall_deadline)
    return [
        _broker_state(BrokerState(data.broker_name, data.cluster, broker_id, address), answer)
        for (data, broker_id, address), answer in zip(replicas, answers, strict=True)
    ]


# For about a second after its start, a broker has no counts yet, and answers the request for its state with an error.
_START_TIMEOUT_S, _START_PAUSE_S = 5.0, 0.2
_MAX_TIME_DIGITS = 18  # a longer text is not a time, and ``int`` raises an error for a text of thousands of digits


def _is_starting(answer: Command | RocketMQError) -> bool:
    remark = answer.remark or ""
    return getattr(answer, "code", None) == Response.SYSTEM_ERROR and "NoSuchElementException" in remark


def _broker_state(broker: BrokerState, answer: Command | RocketMQError) -> BrokerState:
    identity = broker.broker_name, broker.cluster, broker.broker_id, broker.address
    if isinstance(answer, Command) and answer.code != Response.SUCCESS:
        answer = error_from_response(answer, broker.address)
    if isinstance(answer, RocketMQError):
        return BrokerState(*identity, error=str(answer))
    runtime_info = bodies.runtime_info(answer.body)
    boot_time = runtime_info.get("bootTimestamp", "")
    return BrokerState(
        *identity,
        version=runtime_info.get("brokerVersionDesc"),
        started_ms=int(boot_time) if boot_time.isdecimal() and len(boot_time) <= _MAX_TIME_DIGITS else None,
        put_per_s=_first_number(runtime_info.get("putTps")),
        # RocketMQ 4.9 reports this rate as ``getTransferedTps``.
        get_per_s=_first_number(runtime_info.get("getTransferredTps") or runtime_info.get("getTransferedTps")),
        disk_used=_first_number(runtime_info.get("commitLogDiskRatio")),
        facts=runtime_info,
    )


def _first_number(text: str | None) -> float | None:
    """Return the first number of a text; None if it is negative or no number.

    The text of a rate has three numbers: for the last 10 s, for the last minute, and for the last 10 minutes. A broker reports -1
    for an unknown ratio.
    """
    try:
        number = float((text or "").split()[0])
    except (IndexError, ValueError):
        return None
    return number if 0 <= number < math.inf else None


def update_config(tools: AdminTools, broker: str, values: Mapping[str, str]) -> dict[str, Secret]:
    """Change settings of a running master. The master also writes them to its configuration file. Returns all settings of the
    master.

    Raises ``OptionError`` for unknown names, which a broker silently accepts. Also raises ``OptionError`` if the broker keeps
    an old value, because the broker cannot parse the new value. If others on the network could read the settings, this function
    changes the settings without a check, logs a warning, and returns an empty dict.
    """
    address = masters_of(tools.admin.cluster(), [broker])[broker]
    if not tools.rpc_client.is_private(address):
        logger.warning(
            "without TLS, the settings are not read back, so it is unknown whether broker %s accepted %s",
            broker,
            ", ".join(sorted(values)),
        )
        tools.admin.update_broker_config(broker, values)
        return {}
    old_settings = tools.admin.broker_config(broker)
    if unknown_names := sorted(values.keys() - old_settings.keys()):
        suggestions = similar_names(unknown_names[0], old_settings, 2, 0.6)
        raise OptionError(
            f"broker {broker} has no setting {', '.join(map(repr, unknown_names))}; nothing was changed",
            remedy=f"Did you mean {' or '.join(suggestions)}?" if suggestions else None,
        )
    tools.admin.update_broker_config(broker, values)
    new_settings = tools.admin.broker_config(broker)
    unchanged_names = sorted(
        name
        for name, value in values.items()
        if new_settings.get(name) == old_settings[name] and not _is_same_value(old_settings[name], value)
    )
    if unchanged_names:
        raise OptionError(f"broker {broker} kept its value of {unchanged_names[0]} and rejected the new one")
    return new_settings


def _is_same_value(value: str, other_value: str) -> bool:
    return value.strip().lower() == other_value.strip().lower()


Stored = TypeVar("Stored", StoredUser, StoredPolicy)


def users(tools: AdminTools, name: str | None = None) -> list[UserAccount]:
    """Return all users, or the user ``name``. A user occurs more than once if brokers store the user differently."""
    answers = _request_masters(
        tools, _private_masters(tools), lambda broker: rpc.AUTH_LIST_USER.request(filter=name, bname=broker)
    )
    return _accounts(
        (broker, user) for broker, answer in answers for user in parse_users(answer.body) if name in (None, user.name)
    )


def _accounts(stored_users: Iterable[tuple[str, StoredUser]]) -> list[UserAccount]:
    return [
        UserAccount(user.name, user.is_super, user.enabled, brokers)
        for user, brokers in _items_with_brokers(stored_users)
    ]


def _private_masters(tools: AdminTools) -> dict[str, str]:
    """Return the addresses of all masters. Raises ``OptionError`` if others on the network could read passwords in requests to
    masters.
    """
    masters = _masters(tools)
    for address in masters.values():
        tools.rpc_client.check_private(address, "passwords of users", allow_plain_text=True)
    return masters


_NO_USER_REMARK = "user is not exist"  # the remark of a broker that does not have the user


def _versions_of_masters_with_user(tools: AdminTools, masters: Mapping[str, str], name: str) -> dict[str, int]:
    """Return the RocketMQ versions of the ``masters`` that have the user, by broker name.

    Sends an update without values, which changes nothing. The function reads no users, because the answer would contain their
    passwords.
    """
    body = user_body(name, None, None, None)
    answers = _request_masters(
        tools,
        masters,
        lambda broker: rpc.AUTH_UPDATE_USER.request(body, username=name, bname=broker),
        accepted_codes=(Response.NO_PERMISSION,),
    )
    versions = {}
    for broker, answer in answers:
        if answer.code == Response.SUCCESS:
            versions[broker] = answer.version
        elif _NO_USER_REMARK not in (answer.remark or ""):
            raise error_from_response(answer, masters[broker])
    return versions


def _stored_users(tools: AdminTools, masters: Mapping[str, str], name: str) -> dict[str, StoredUser]:
    """Return the user as ``masters`` store it, by broker name.

    The answer of a master contains the password of the user. Omits a master if others on the network could read its answer, or if
    the master rejects the request.
    """
    requests = {
        broker: (address, rpc.AUTH_GET_USER.request(username=name, bname=broker))
        for broker, address in masters.items()
        if tools.rpc_client.is_private(address)
    }
    answers = tools.rpc_client.invoke_each(list(requests.values()), deadline(tools))
    broker_users = [
        (broker, parse_user(answer.body))
        for broker, answer in zip(requests, answers, strict=True)
        if isinstance(answer, Command) and answer.code == Response.SUCCESS
    ]
    return {broker: user for broker, user in broker_users if user is not None}


def set_user(
    tools: AdminTools,
    name: str,
    password: str | None = None,
    is_super: bool | None = None,
    enabled: bool | None = None,
) -> list[UserAccount]:
    """Create a user on the masters that do not have the user, and change the user on the other masters. Creating a user needs a
    ``password``.

    If a property is not given, its value in the result is read from the broker. The broker's answer also contains the password.
    If others on the network could read this answer, nothing is read, and the property is None in the result.
    """
    if password is not None and not password.strip():  # a broker ignores an empty password and keeps the old one
        raise OptionError("password is empty; expected a text, or no password to keep the current one")
    masters = _private_masters(tools)
    versions = _versions_of_masters_with_user(tools, masters, name)
    masters_without_user = sorted(masters.keys() - versions.keys())
    if masters_without_user and not password:
        raise OptionError(f"user {name} is not on {', '.join(masters_without_user)}; expected a password to create it")
    masters_to_read = {
        broker: masters[broker]
        for broker, version in versions.items()
        if None in (is_super, enabled) or (version < FIRST_VERSION_THAT_UPDATES_USERS and password is None)
    }
    stored_users = _stored_users(tools, masters_to_read, name)
    for broker, version in versions.items():
        if version < FIRST_VERSION_THAT_UPDATES_USERS:
            _check_change(name, stored_users.get(broker), broker, password, is_super, enabled)
    body = user_body(name, password, is_super, enabled)

    def user_request(broker: str) -> Command:
        rpc_row = rpc.AUTH_UPDATE_USER if broker in versions else rpc.AUTH_CREATE_USER
        return rpc_row.request(body, username=name, bname=broker)

    _request_masters(tools, masters, user_request, is_change=True)
    created_user, unknown_user = StoredUser(name, False, True), StoredUser(name, None, None)
    users_before = {broker: stored_users.get(broker, unknown_user) for broker in versions} | dict.fromkeys(
        masters_without_user, created_user
    )
    return _accounts((broker, _changed_user(user, is_super, enabled)) for broker, user in users_before.items())


def _changed_user(user: StoredUser, is_super: bool | None, enabled: bool | None) -> StoredUser:
    return StoredUser(
        user.name, user.is_super if is_super is None else is_super, user.enabled if enabled is None else enabled
    )


def _check_change(
    name: str,
    stored_user: StoredUser | None,
    broker: str,
    password: str | None,
    is_super: bool | None,
    enabled: bool | None,
) -> None:
    """Raise ``NotSupported`` if a broker before 5.3.2 would have to change a user, because such a broker reports success and
    changes nothing.
    """
    is_empty = (password, is_super, enabled) == (None, None, None)
    is_unchanged = (
        password is None and stored_user is not None and _changed_user(stored_user, is_super, enabled) == stored_user
    )
    if not (is_empty or is_unchanged):
        raise NotSupported(
            f"broker {broker} is older than RocketMQ 5.3.2: it would report success without a change; nothing was changed",
            remedy=f"Delete user {name}, which also deletes its policies, and create it again",
        )


def delete_user(tools: AdminTools, name: str) -> None:
    """Delete a user and all of its policies."""
    masters = _private_masters(tools)
    if not _versions_of_masters_with_user(tools, masters, name):
        raise OptionError(f"there is no user {name}")
    _request_masters(
        tools, masters, lambda broker: rpc.AUTH_DELETE_USER.request(username=name, bname=broker), is_change=True
    )


def policies(tools: AdminTools, user: str | None = None) -> list[AccessPolicy]:
    """Return all policies, or the policies of ``user``. A policy occurs more than once if brokers store it differently."""
    return [
        AccessPolicy(p.subject.removeprefix("User:"), p.resource, p.actions, p.allowed, p.sources, brokers)
        for p, brokers in _items_with_brokers(_stored_policies(tools, user))
    ]


def _stored_policies(tools: AdminTools, user: str | None) -> list[tuple[str, StoredPolicy]]:
    """Return pairs of broker and policy."""
    subject = None if user is None else _subject(user)
    answers = _request_masters(
        tools, _masters(tools), lambda broker: rpc.AUTH_LIST_ACL.request(subjectFilter=subject, bname=broker)
    )
    stored_policies = [(broker, policy) for broker, answer in answers for policy in parse_policies(answer.body)]
    return [(broker, policy) for broker, policy in stored_policies if subject is None or policy.subject == subject]


def set_policy(
    tools: AdminTools,
    user: str,
    resource: str,
    actions: Sequence[str],
    allowed: bool = True,
    sources: Sequence[str] = (),
) -> list[AccessPolicy]:
    """Allow or deny actions on a resource. Replaces the user's policy for this resource."""
    body = policy_body(_subject(user), resource, actions, allowed, sources)
    # This call raises an error before anything is changed, if one of the brokers does not support policies.
    _stored_policies(tools, user)
    masters = _masters(tools)
    if masters_without_user := sorted(masters.keys() - _versions_of_masters_with_user(tools, masters, user).keys()):
        raise OptionError(
            f"user {user} is not on {', '.join(masters_without_user)}; nothing was changed",
            remedy=f"Create the missing user: rocketmq-spark user set {user}",
        )
    _request_masters(
        tools,
        masters,
        lambda broker: rpc.AUTH_UPDATE_ACL.request(body, subject=_subject(user), bname=broker),
        is_change=True,
    )
    return policies(tools, user)


def delete_policy(tools: AdminTools, user: str, resource: str) -> None:
    """Delete the custom and default policies of a user for a resource, on the brokers that have them."""
    kinds_and_brokers = {
        (policy.kind, broker) for broker, policy in _stored_policies(tools, user) if policy.resource == resource
    }
    if not kinds_and_brokers:
        raise OptionError(f"user {user} has no policy for {resource}")
    masters, rpc_row = _masters(tools), rpc.AUTH_DELETE_ACL
    for kind in sorted({kind for kind, _ in kinds_and_brokers}):
        requests = {
            broker: (address, rpc_row.request(subject=_subject(user), policyType=kind, resource=resource, bname=broker))
            for broker, address in masters.items()
            if (kind, broker) in kinds_and_brokers
        }
        for _ in request_each(tools, requests, (Response.SUCCESS,), is_change=True):
            pass


def _subject(user: str) -> str:
    return f"User:{user}"


def _masters(tools: AdminTools) -> dict[str, str]:
    """Return the addresses of all masters by broker name. Raises ``BrokerNotFound`` if the master of a broker is not registered,
    because requests would not reach the users and policies of this master.
    """
    return masters_of(tools.admin.cluster())


def _request_masters(
    tools: AdminTools,
    masters: Mapping[str, str],
    make_request: Callable[[str], Command],
    is_change: bool = False,
    accepted_codes: Sequence[int] = (),
) -> list[tuple[str, Command]]:
    """Send a request to each of ``masters``. Returns pairs of broker and answer. Raises an error for an answer whose code is
    neither success nor in ``accepted_codes``.
    """
    requests = {name: (address, make_request(name)) for name, address in masters.items()}
    answers = []
    codes = (Response.SUCCESS, Response.REQUEST_CODE_NOT_SUPPORTED, *accepted_codes)
    for name, answer in request_each(tools, requests, codes, is_change):
        if answer.code == Response.REQUEST_CODE_NOT_SUPPORTED:
            raise NotSupported(
                f"broker {name} has no users and policies: it is older than RocketMQ 5.3, which introduced ACL 2.0",
                requests[name][0],
                answer.code,
                remedy="Use newer brokers, or edit conf/plain_acl.yml of the broker (ACL 1.0)",
            )
        answers.append((name, answer))
    return answers


def _items_with_brokers(stored_items: Iterable[tuple[str, Stored]]) -> list[tuple[Stored, tuple[str, ...]]]:
    """Return each different user or policy once, with the brokers that store it. The result is sorted, with None before other
    values.
    """
    brokers_of_item: dict[Stored, list[str]] = {}
    for broker, item in stored_items:
        brokers_of_item.setdefault(item, []).append(broker)
    sorted_items = sorted(brokers_of_item.items(), key=lambda entry: [(part is not None, part) for part in entry[0]])
    return [(item, tuple(names)) for item, names in sorted_items]
