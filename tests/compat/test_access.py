"""Keys and rights: those of ACL 1.0 in a file of the broker's, and those of ACL 2.0, which 5.3 brought."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark import Admin, Consumer, Message, Producer
from rocketmq_spark.errors import AccessDenied, NotSupported, OptionError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.options import DEFAULT_GROUP
from tests.compat.features import VERSIONS, refused, runs
from tests.fix_clusters import SECURED, WITHOUT_TIMERS
from tests.helpers import awaited
from tests.mockbroker import eventually
from tests.reading import bodies, read

RIGHTS = """
accounts:
  - {accessKey: administrator, secretKey: adminsecret, admin: true}
  - {accessKey: only-writes, secretKey: writersecret, admin: false, defaultTopicPerm: DENY, defaultGroupPerm: DENY,
     topicPerms: [orders=PUB]}
"""
ADMINS = {"access_key": "administrator", "secret_key": "adminsecret"}
WRITER = {"access_key": "only-writes", "secret_key": "writersecret"}


@pytest.fixture(scope="module")
def keyed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that asks who you are: an administrator, or a user who may write to the topic orders."""
    data = tmp_path_factory.mktemp("keyed")
    old = request.param < "5.3"
    if old:
        (data / "broker-a" / "conf").mkdir(parents=True)
        (data / "broker-a" / "conf" / "plain_acl.yml").write_text(RIGHTS)
    named = {name: str(value).replace('"admin"', '"administrator"') for name, value in SECURED.items()}
    conf = {"aclEnable": "true"} if old else {**named, "authenticationEnabled": "true", "authorizationEnabled": "true"}
    with LocalBroker(version=request.param, data=data, conf={**conf, **WITHOUT_TIMERS}, quiet=True) as mq:
        with Admin(mq.name_server, **ADMINS) as admin:
            admin.create_topic("orders", 2)
            admin.create_topic("secrets", 2)
            if not old:
                admin.create_group("g")
                admin.create_group(DEFAULT_GROUP)
                admin.set_user("only-writes", "writersecret")
                admin.set_policy("only-writes", "Topic:orders", ["Pub"])
        yield mq


def check(mq: LocalBroker) -> None:
    with Producer(mq.name_server, "p", **WRITER) as producer:
        producer.send_batch([Message("orders", b"1", tags="a"), Message("orders", b"2", tags="a")])
        producer.send(Message("orders", b"3"))
        with pytest.raises(AccessDenied):
            producer.send(Message("secrets", b"never"))
    for wrong in ({}, {**WRITER, "secret_key": "guessed"}):
        with Producer(mq.name_server, "p", **wrong) as producer, pytest.raises(AccessDenied):
            producer.send(Message("orders", b"never"))
    with Admin(mq.name_server, **WRITER) as admin, pytest.raises(AccessDenied):
        admin.create_topic("more", 1)
    got: list[bytes] = []
    with Consumer(mq.name_server, "g", consume_from_where="earliest", **ADMINS) as consumer:
        consumer.subscribe("orders")
        consumer.start(lambda messages, context: got.extend(message.body for message in messages))
        eventually(lambda: len(got) == 3, 60)
    assert sorted(got) == [b"1", b"2", b"3"]
    assert sorted(
        bodies(read(mq.name_server, subscribe="orders", accessKey="administrator", secretKey="adminsecret"))
    ) == ["1", "2", "3"]
    with pytest.raises(AccessDenied):
        read(mq.name_server, subscribe="orders", accessKey="only-writes", secretKey="writersecret")


@runs("keys and rights of ACL 1.0", VERSIONS[:2], "keyed")
def test_rights_of_acl_1(keyed: LocalBroker) -> None:
    check(keyed)


@runs("keys and rights of ACL 2.0", VERSIONS[2:], "keyed")
def test_rights_of_acl_2(keyed: LocalBroker) -> None:
    check(keyed)


USERS = "users and policies of ACL 2.0: `Admin`, `user`, `policy`"


@runs(USERS, VERSIONS[2:], "keyed")
def test_users_and_policies(keyed: LocalBroker) -> None:
    """Their whole life, each step with what the user may do then."""
    ann = {"access_key": "ann", "secret_key": "a-secret"}
    with Admin(keyed.name_server, **ADMINS) as admin, Admin(keyed.name_server, **ann) as user:
        with pytest.raises(OptionError, match="user ann is not on broker-a; expected a password"):
            admin.set_user("ann", enabled=True)
        (account,) = admin.set_user("ann", "a-secret")
        assert (account.name, account.is_super, account.enabled, account.brokers) == ("ann", False, True, ("broker-a",))
        assert account in admin.users()
        with pytest.raises(AccessDenied):
            user.describe_topic("orders")
        (policy,) = admin.set_policy("ann", "Topic:orders", ["Get"])
        assert (policy.user, policy.actions, policy.allowed, policy.sources) == ("ann", ("Get",), True, ())
        assert awaited(lambda: user.describe_topic("orders").permission) == "RW"
        admin.set_policy("ann", "Topic:orders", ["Get", "Pub"], allowed=False, sources=["127.0.0.1"])
        (policy,) = admin.policies("ann")
        assert (policy.actions, policy.allowed, policy.sources) == (("Get", "Pub"), False, ("127.0.0.1",))
        with pytest.raises(AccessDenied):
            user.describe_topic("orders")
        assert {found.user for found in admin.policies()} >= {"ann", "only-writes"}
        admin.delete_policy("ann", "Topic:orders")
        assert admin.policies("ann") == []
        with pytest.raises(OptionError, match="user ann has no policy for Topic:orders"):
            admin.delete_policy("ann", "Topic:orders")
        for change in ({"password": "another"}, {"is_super": True}, {"enabled": False}):
            with pytest.raises(NotSupported, match=r"broker-a is older than RocketMQ 5\.3\.2.*nothing was changed"):
                admin.set_user("ann", **change)
        assert admin.set_user("ann", enabled=True, is_super=False) == [account]
        admin.set_policy("ann", "Topic:secrets", ["Sub"])
        admin.delete_user("ann")
        assert ("ann" in [found.name for found in admin.users()], admin.policies("ann")) == (False, [])
        with pytest.raises(OptionError, match="there is no user ann"):
            admin.delete_user("ann")


@refused(USERS, VERSIONS[:2])
def test_users_and_policies_are_refused(older: LocalBroker) -> None:
    """By its name, and the remedy says what such a broker has instead."""
    with Admin(older.name_server) as admin:
        for verb in (
            admin.users,
            admin.policies,
            lambda: admin.set_user("ann", "a-secret"),
            lambda: admin.delete_user("ann"),
            lambda: admin.set_policy("ann", "Topic:orders", ["Get"]),
            lambda: admin.delete_policy("ann", "Topic:orders"),
        ):
            with pytest.raises(NotSupported, match=r"broker-a has no users and policies.*plain_acl\.yml"):
                verb()
