"""Users and policies: every master is asked and changed, and passwords stay with the brokers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rocketmq_spark.admin import brokers
from rocketmq_spark.base.codes import FIRST_VERSION_THAT_UPDATES_USERS, Request, Response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    ConnectionLost,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
)
from rocketmq_spark.model.admin import AccessPolicy, UserAccount
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.mockbroker import Call, MockBroker, cluster, ok, refuse

USERS, CREATE, UPDATE = Request.AUTH_LIST_USER, Request.AUTH_CREATE_USER, Request.AUTH_UPDATE_USER
GET, DELETE, CONFIG = Request.AUTH_GET_USER, Request.AUTH_DELETE_USER, Request.GET_BROKER_CONFIG
POLICIES = Request.AUTH_LIST_ACL
ANN = {"username": "ann", "password": "secret", "userType": "Normal", "userStatus": "enable"}


# The answer of a broker to an update of a user that it does not have.
ABSENT = refuse(Response.NO_PERMISSION, "The user is not exist")


def listed(*items: object) -> Command:
    return ok(json.dumps(items).encode())


def has(server: MockBroker, user: dict[str, str] | None, version: int = FIRST_VERSION_THAT_UPDATES_USERS) -> None:
    """Let a broker of ``version`` have only this user."""

    def update(call: Call) -> Command:
        name = call.command.ext["username"]
        return replace(ok() if user and name == user["username"] else ABSENT, version=version)

    server.on(UPDATE, update)
    server.on(GET, replace(ok(json.dumps(user).encode() if user else b""), version=version))


def changes(server: MockBroker) -> list[Command]:
    """Updates that change something: one without values asks whether there is such a user."""
    return [command for command in server.seen(UPDATE) if json.loads(command.body).keys() != {"username"}]


@pytest.fixture
def second(broker: MockBroker, tools: Parts) -> Iterator[MockBroker]:
    """``broker-b``; both take all changes."""
    with MockBroker() as other:
        both = {"broker-a": {"0": broker.address}, "broker-b": {"0": other.address}}
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(both))
        for code in (CREATE, UPDATE, Request.AUTH_DELETE_USER, Request.AUTH_UPDATE_ACL, Request.AUTH_DELETE_ACL):
            for server in (broker, other):
                server.on(code, ok())
        yield other


def test_users_of_all_brokers(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    broker.on(USERS, listed(ANN, {"username": "root", "userType": "Super", "userStatus": "enable"}))
    second.on(USERS, listed(ANN, {"username": "root", "userType": "Super", "userStatus": "disable"}))
    assert brokers.users(tools) == [
        UserAccount("ann", False, True, ("broker-a", "broker-b")),
        UserAccount("root", True, False, ("broker-b",)),
        UserAccount("root", True, True, ("broker-a",)),
    ]
    assert "secret" not in repr(brokers.users(tools))
    assert [account.name for account in brokers.users(tools, "ann")] == ["ann"]
    second.on(USERS, ok())
    assert brokers.users(tools, "ann") == [UserAccount("ann", False, True, ("broker-a",))]


def test_set_user_creates_missing_and_changes_existing_users(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    has(broker, ANN)
    has(second, None)
    with pytest.raises(OptionError, match="user ann is not on broker-b; expected a password"):
        brokers.set_user(tools, "ann", enabled=False)
    with pytest.raises(OptionError, match="password is empty"):  # a broker would leave it as it is
        brokers.set_user(tools, "ann", " ")
    assert (changes(broker), changes(second), second.seen(CREATE)) == ([], [], [])
    both = UserAccount("ann", False, False, ("broker-a", "broker-b"))
    assert brokers.set_user(tools, "ann", "new", enabled=False) == [both]
    (changed,), (made,) = changes(broker), second.seen(CREATE)
    for command in (changed, made):
        assert command.ext["username"] == "ann"
        assert json.loads(command.body) == {"username": "ann", "password": "new", "userStatus": "disable"}
    has(second, {**ANN, "userStatus": "disable"})
    assert brokers.set_user(tools, "ann", is_super=True) == [
        UserAccount("ann", True, False, ("broker-b",)),
        UserAccount("ann", True, True, ("broker-a",)),
    ]
    assert json.loads(changes(second)[0].body) == {"username": "ann", "userType": "Super"}


def test_no_stored_password_is_requested_to_create_or_change(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    has(broker, None)
    has(second, None)
    both = ("broker-a", "broker-b")
    assert brokers.set_user(tools, "ann", "new") == [UserAccount("ann", False, True, both)]
    has(broker, ANN)
    has(second, ANN)
    assert brokers.set_user(tools, "ann", "new", True, False) == [UserAccount("ann", True, False, both)]
    assert (len(broker.seen(CREATE)), len(changes(broker))) == (1, 1)
    brokers.delete_user(tools, "ann")
    for server in (broker, second):
        assert (server.seen(USERS), server.seen(GET)) == ([], [])


def test_an_unknown_property_of_a_changed_user_is_null(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    has(broker, ANN)
    has(second, None)
    broker.on(GET, refuse(Response.NO_PERMISSION, "not yours"))
    assert brokers.set_user(tools, "ann", "new") == [
        UserAccount("ann", None, None, ("broker-a",)),
        UserAccount("ann", False, True, ("broker-b",)),
    ]


def test_access_denied_by_one_broker_changes_nothing_anywhere(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    has(broker, ANN)
    second.on(UPDATE, refuse(Response.NO_PERMISSION, "User:me has no permission to access Cluster:DefaultCluster"))
    for verb in (
        lambda: brokers.set_user(tools, "ann", "new"),
        lambda: brokers.delete_user(tools, "ann"),
        lambda: brokers.set_policy(tools, "ann", "Topic:t", ["Pub"]),
    ):
        second.on(POLICIES, ok())
        broker.on(POLICIES, ok())
        with pytest.raises(AccessDenied, match="no permission to access"):
            verb()
    assert (changes(broker), second.seen(CREATE), broker.seen(DELETE)) == ([], [], [])


def test_set_user_refuses_brokers_that_ignore_user_updates(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    """5.3.0 and 5.3.1 put back what they have: a password that leaked, a user that was to be disabled."""
    has(broker, ANN)
    has(second, ANN, FIRST_VERSION_THAT_UPDATES_USERS - 1)
    for change in ({"password": "new"}, {"is_super": True}, {"enabled": False}):
        with pytest.raises(NotSupported, match=r"broker-b is older than RocketMQ 5\.3\.2.*Delete user ann"):
            brokers.set_user(tools, "ann", **change)
    assert (changes(broker), changes(second)) == ([], [])
    has(second, None, FIRST_VERSION_THAT_UPDATES_USERS - 1)
    brokers.set_user(tools, "ann", "new")  # is created there
    assert (len(changes(broker)), len(second.seen(CREATE))) == (1, 1)
    has(second, ANN, FIRST_VERSION_THAT_UPDATES_USERS - 1)
    assert [user.enabled for user in brokers.set_user(tools, "ann", is_super=False, enabled=True)] == [True]
    assert [user.enabled for user in brokers.set_user(tools, "ann")] == [True]
    second.on(GET, refuse(Response.SYSTEM_BUSY, "busy"))  # then it is unknown whether the broker would have to change
    with pytest.raises(NotSupported, match="broker-b is older"):
        brokers.set_user(tools, "ann", enabled=True)


def test_users_and_policies_match_the_exact_user_name(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    joanna, entry = {**ANN, "username": "joanna"}, {"resource": "Topic:t", "actions": ["Pub"], "decision": "Allow"}
    for server in (broker, second):
        server.on(USERS, listed(joanna, ANN))
    assert [user.name for user in brokers.users(tools, "ann")] == ["ann"]
    his = {"subject": "User:joanna", "policies": [{"policyType": "Custom", "entries": [entry]}]}
    for server in (broker, second):
        server.on(POLICIES, listed(his))
    assert [policy.user for policy in brokers.policies(tools)] == ["joanna"]
    assert brokers.policies(tools, "ann") == []


class TestOverANetworkThatOthersCanRead:
    """The brokers' addresses are not loopback, though ``addressMap`` leads to scripted brokers."""

    @pytest.fixture
    def tools(self, broker: MockBroker) -> Iterator[Parts]:
        port = broker.address.rpartition(":")[2]
        one = Parts(broker.address, address_map={"10.0.0.5:10911": f"0.0.0.0:{port}"})
        for code in (CREATE, UPDATE, DELETE, Request.AUTH_UPDATE_ACL, Request.UPDATE_BROKER_CONFIG):
            broker.on(code, ok())
        broker.on(POLICIES, ok())
        broker.on(GET, ok(json.dumps(ANN).encode()))
        broker.on(USERS, listed(ANN))
        broker.on(CONFIG, ok(b'innerClientAuthenticationCredentials={"secretKey":"s3cret"}\n'))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": {"0": "10.0.0.5:10911"}}))
        yield one
        one.close()

    def verbs(self, tools: Parts) -> list[Callable[[], object]]:
        return [
            lambda: brokers.users(tools),
            lambda: brokers.set_user(tools, "ann", "new"),
            lambda: brokers.delete_user(tools, "ann"),
            lambda: tools.admin.broker_config("broker-a", allow_plain_text=True),
        ]

    def test_no_password_crosses_it_unless_the_user_says_so(self, broker: MockBroker, tools: Parts) -> None:
        for verb in self.verbs(tools):
            with pytest.raises(
                OptionError, match=r"would cross the network to 0\.0\.0\.0:.* in clear text.*'tls' to true"
            ):
                verb()
        assert {command.code for command in broker.requests} == {Request.GET_BROKER_CLUSTER_INFO}
        tools.pool.connect_options = replace(tools.pool.connect_options, allow_plain_text=True)
        for verb in self.verbs(tools):
            verb()
        assert len(broker.seen(USERS)) == len(broker.seen(CONFIG)) == 1

    def test_one_broker_elsewhere_is_enough(self, broker: MockBroker, tools: Parts) -> None:
        table = {"broker-a": {"0": broker.address}, "broker-b": {"0": "10.0.0.5:10911"}}
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(table))
        with pytest.raises(OptionError, match="passwords of users would cross the network"):
            brokers.users(tools)
        assert broker.seen(USERS) == []

    def test_addresses_that_were_checked_are_those_that_are_asked(self, broker: MockBroker, tools: Parts) -> None:
        """A name server without TLS may give others a moment later."""
        here, there = ({"broker-a": {"0": address}} for address in (broker.address, "10.0.0.5:10911"))
        for verb in self.verbs(tools):
            broker.on(Request.GET_BROKER_CLUSTER_INFO, [cluster(here), cluster(there)])
            verb()
        assert not tools.pool.is_connected("10.0.0.5:10911")

    def test_a_stored_password_is_not_requested_even_then(self, broker: MockBroker, tools: Parts) -> None:
        tools.pool.connect_options = replace(tools.pool.connect_options, allow_plain_text=True)
        assert brokers.set_user(tools, "ann", enabled=False) == [UserAccount("ann", None, False, ("broker-a",))]
        assert (broker.seen(GET), broker.seen(USERS)) == ([], [])

    def test_policies_need_no_password(self, broker: MockBroker, tools: Parts) -> None:
        assert brokers.set_policy(tools, "ann", "Topic:t", ["Pub"]) == []
        assert len(broker.seen(Request.AUTH_UPDATE_ACL)) == 1
        assert (broker.seen(GET), broker.seen(USERS)) == ([], [])

    @pytest.mark.parametrize("allow_plain_text", [False, True])
    def test_settings_are_changed_without_being_requested(
        self, broker: MockBroker, tools: Parts, caplog: pytest.LogCaptureFixture, allow_plain_text: bool
    ) -> None:
        tools.pool.connect_options = replace(tools.pool.connect_options, allow_plain_text=allow_plain_text)
        assert brokers.update_config(tools, "broker-a", {"fileReservedTime": "72"}) == {}
        assert (len(broker.seen(Request.UPDATE_BROKER_CONFIG)), broker.seen(CONFIG)) == (1, [])
        assert "so it is unknown whether broker broker-a accepted fileReservedTime" in caplog.text


def test_policies(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    entry = {"resource": "Topic:t", "actions": ["Sub", "Get"], "sourceIps": None, "decision": "Allow"}
    there = {"subject": "User:ann", "policies": [{"policyType": "Custom", "entries": [entry]}]}
    for server in (broker, second):
        has(server, ANN)
    broker.on(POLICIES, listed(there))
    second.on(POLICIES, listed(there))
    both = ("broker-a", "broker-b")
    assert brokers.set_policy(tools, "ann", "Topic:t", ["Sub", "Get"]) == [
        AccessPolicy("ann", "Topic:t", ("Sub", "Get"), True, (), both)
    ]
    for server in (broker, second):
        (command,) = server.seen(Request.AUTH_UPDATE_ACL)
        sent = {**entry, "sourceIps": []}
        assert command.ext["subject"] == "User:ann"
        assert json.loads(command.body) == {**there, "policies": [{"policyType": "Custom", "entries": [sent]}]}
    with pytest.raises(OptionError, match="user ann has no policy for Topic:other"):
        brokers.delete_policy(tools, "ann", "Topic:other")
    brokers.delete_policy(tools, "ann", "Topic:t")
    assert second.seen(Request.AUTH_DELETE_ACL)[0].ext["resource"] == "Topic:t"


def test_a_policy_is_deleted_of_its_kind_and_where_it_is(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    """A broker deletes custom ones unless it is told, and says that it did; one without any policy of the user refuses."""
    entries = [{"resource": "Topic:*", "actions": ["Pub"], "sourceIps": None, "decision": "Allow"}]
    custom, default = ({"policyType": kind, "entries": entries} for kind in ("Custom", "Default"))
    broker.on(POLICIES, listed({"subject": "User:ann", "policies": [custom, default]}))
    second.on(POLICIES, listed({"subject": "User:ann", "policies": [default]}))
    brokers.delete_policy(tools, "ann", "Topic:*")
    assert [c.ext["policyType"] for c in broker.seen(Request.AUTH_DELETE_ACL)] == ["Custom", "Default"]
    assert [c.ext["policyType"] for c in second.seen(Request.AUTH_DELETE_ACL)] == ["Default"]
    second.on(POLICIES, ok())
    brokers.delete_policy(tools, "ann", "Topic:*")
    assert len(second.seen(Request.AUTH_DELETE_ACL)) == 1


@pytest.mark.parametrize("actions", [["Sub", "Publish"], [], "Pub", ["Pub,Sub"], ["Any"]])
def test_an_action_that_no_broker_knows_is_refused(
    actions: list[str], broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    """They leave it out: what is to be denied would stay allowed."""
    with pytest.raises(OptionError, match=r"actions: '.*'; expected some of All, Pub, Sub, Create"):
        brokers.set_policy(tools, "ann", "Topic:t", actions, allowed=False)
    assert broker.seen(Request.AUTH_UPDATE_ACL) == []
    for server in (broker, second):
        server.on(POLICIES, ok())
        has(server, ANN)
    brokers.set_policy(tools, "ann", "Topic:t", ["pub", "LIST"])


@pytest.mark.parametrize(
    ("resource", "sources", "said"),
    [
        ("orders", (), "resource is 'orders'; expected Topic:NAME"),
        ("Topics:orders", (), "resource is 'Topics:orders'"),
        ("Topic:", (), "resource is 'Topic:'"),
        ("Topic", (), "resource is 'Topic'"),
        ("Topic:t", ("10.0.0.0/8", "10.0.0.0/33"), "source '10.0.0.0/33' is not an IP address"),
        ("Topic:t", ("host",), "source 'host' is not an IP address"),
    ],
)
def test_a_wrong_resource_is_not_called_a_lack_of_rights(
    resource: str, sources: tuple[str, ...], said: str, broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    """Brokers do, and the user looks for the mistake in keys and policies."""
    with pytest.raises(OptionError, match=said):
        brokers.set_policy(tools, "ann", resource, ["Pub"], sources=sources)
    assert broker.seen(Request.AUTH_UPDATE_ACL) == []
    for fine in ("*", "Topic:*", "group:g*", "Cluster:c"):
        policy_body = brokers.policy_body("User:ann", fine, ["Pub"], True, ["10.0.0.1", "10.0.0.1/8", "::1"])
        assert json.loads(policy_body)["policies"][0]["entries"][0]["resource"] == fine


def test_a_policy_of_a_user_that_one_broker_lacks_is_set_nowhere(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    """That broker refuses it as a matter of rights, and the other one would have it."""
    for server in (broker, second):
        server.on(POLICIES, ok())
    has(broker, ANN)
    has(second, {**ANN, "username": "anne"})
    with pytest.raises(OptionError, match="user ann is not on broker-b; nothing was changed"):
        brokers.set_policy(tools, "ann", "Topic:t", ["Pub"])
    assert broker.seen(Request.AUTH_UPDATE_ACL) == second.seen(Request.AUTH_UPDATE_ACL) == []


def test_error_names_brokers_that_did_and_did_not_apply_change(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    entry = {"resource": "Topic:t", "actions": ["Pub"], "sourceIps": None, "decision": "Deny"}
    there = {"subject": "User:ann", "policies": [{"policyType": "Custom", "entries": [entry]}]}
    for server in (broker, second):
        has(server, ANN)
        server.on(POLICIES, listed(there))
    for code in (Request.AUTH_UPDATE_ACL, Request.AUTH_DELETE_ACL, Request.AUTH_DELETE_USER):
        broker.on(code, refuse(Response.SYSTEM_BUSY, "busy"))
    busy = refuse(Response.SYSTEM_BUSY, "busy")
    broker.on(UPDATE, lambda call: busy if b"new" in bytes(call.command.body) else ok())
    for verb in (
        lambda: brokers.set_user(tools, "ann", "new"),
        lambda: brokers.set_policy(tools, "ann", "Topic:t", ["Pub"], allowed=False),
        lambda: brokers.delete_policy(tools, "ann", "Topic:t"),
        lambda: brokers.delete_user(tools, "ann"),
    ):
        with pytest.raises(RocketMQError, match=r"busy.*It is done on broker-b, and not on broker-a"):
            verb()
    broker.on(Request.AUTH_DELETE_ACL, ok())
    second.on(Request.AUTH_DELETE_ACL, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(RocketMQError, match=r"busy.*It is done on broker-a, and not on broker-b"):
        brokers.delete_policy(tools, "ann", "Topic:t")
    broker.on(Request.AUTH_DELETE_USER, lambda call: broker.drop())  # it has taken it, and its answer does not come
    with pytest.raises(ConnectionLost, match=r"It is done on broker-b, and perhaps on broker-a"):
        brokers.delete_user(tools, "ann")
    second.on(Request.AUTH_DELETE_USER, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(RocketMQError, match="It is done perhaps on broker-a, and not on broker-b"):
        brokers.delete_user(tools, "ann")
    broker.on(USERS, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(RocketMQError) as asked:  # a question changes nothing
        brokers.users(tools)
    assert "done" not in str(asked.value)


def test_delete_user_deletes_nothing_while_a_master_is_missing(
    broker: MockBroker, second: MockBroker, tools: Parts
) -> None:
    table = {"broker-a": {"0": broker.address}, "broker-b": {"1": second.address}}
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(table))
    has(broker, ANN)
    with pytest.raises(BrokerNotFound, match="no master of broker-b is registered"):
        brokers.delete_user(tools, "ann")
    assert broker.seen(Request.AUTH_DELETE_USER) == []


def test_a_broker_that_has_no_users_keeps_all_as_they_are(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    """As while a cluster is upgraded to 5.3."""
    has(broker, ANN)
    broker.on(USERS, listed(ANN))
    broker.on(POLICIES, ok())
    for code in (USERS, CREATE, UPDATE, POLICIES, Request.AUTH_UPDATE_ACL, Request.AUTH_DELETE_USER):
        second.on(code, refuse(Response.REQUEST_CODE_NOT_SUPPORTED, f" request type {code} not supported"))
    for verb in (
        lambda: brokers.users(tools),
        lambda: brokers.set_user(tools, "ann", "new"),
        lambda: brokers.delete_user(tools, "ann"),
        lambda: brokers.policies(tools),
        lambda: brokers.set_policy(tools, "ann", "Topic:t", ["Pub"]),
        lambda: brokers.delete_policy(tools, "ann", "Topic:t"),
    ):
        with pytest.raises(NotSupported, match=r"broker-b has no users and policies: it is older than RocketMQ 5\.3"):
            verb()
    assert changes(broker) == []
    assert {command.code for command in broker.requests} <= {
        USERS, UPDATE, POLICIES, Request.GET_BROKER_CLUSTER_INFO, Request.GET_ROUTEINFO_BY_TOPIC,
    }  # fmt: skip


def test_who_is_not_there_is_not_deleted(broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    for server in (broker, second):
        has(server, None)
    with pytest.raises(OptionError, match="there is no user ann"):
        brokers.delete_user(tools, "ann")
    assert broker.seen(Request.AUTH_DELETE_USER) == []


@pytest.mark.parametrize("odd", [b"{}", b'["x"]', b'[{"subject":"User:a","policies":[{"entries":[1]}]}]', b"[{}]"])
def test_odd_answers(odd: bytes, broker: MockBroker, tools: Parts) -> None:
    broker.on(POLICIES, ok(odd))
    with pytest.raises(RemoteProtocolError):
        brokers.policies(tools)


@pytest.mark.parametrize("odd", [b"[]", b'"ann"', b"{}", b"7"])
def test_an_odd_user(odd: bytes, broker: MockBroker, second: MockBroker, tools: Parts) -> None:
    has(broker, ANN)
    has(second, ANN)
    broker.on(GET, ok(odd))
    with pytest.raises(RemoteProtocolError):
        brokers.set_user(tools, "ann", "new")
    assert changes(second) == []
