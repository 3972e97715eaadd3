"""Administration through a Proxy: what it does not forward is refused with the reason, and offsets of named topics work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from rocketmq_spark import Admin, session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import NotSupported, OffsetError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.header import Command
from tests.mockbroker import NO_ROUTE, MockBroker, of_proxy, ok, refuse, route

QUEUE = MessageQueue("t", "broker-a", 0)


@pytest.fixture
def proxy() -> Iterator[MockBroker]:
    """A group is at 5 in the only queue of topic t, which ends at 9."""
    with MockBroker() as one:
        known = of_proxy(route(1, {"broker-a": one.address}))
        one.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda call: known if call.ext("topic") == "t" else of_proxy(NO_ROUTE))
        one.on(Request.QUERY_CONSUMER_OFFSET, of_proxy(ok(offset=5)))
        one.on(Request.GET_MIN_OFFSET, of_proxy(ok(offset=2)))
        one.on(Request.GET_MAX_OFFSET, of_proxy(ok(offset=9)))
        yield one
    session.close_all()


@pytest.fixture
def admin(proxy: MockBroker) -> Iterator[Admin]:
    with Admin(proxy.address, num_retries=0) as one:
        yield one


@pytest.mark.parametrize(
    "ask",
    [
        lambda admin: admin.topics(),
        lambda admin: admin.cluster(),
        lambda admin: admin.brokers(),
        lambda admin: admin.create_topic("u"),
        lambda admin: admin.delete_topic("t"),
        lambda admin: admin.groups(),
        lambda admin: admin.create_group("g"),
        lambda admin: admin.delete_group("g"),
        lambda admin: admin.describe_group("g"),
        lambda admin: admin.broker_config("broker-a"),
        lambda admin: admin.update_broker_config("broker-a", {"a": "b"}),
        lambda admin: admin.users(),
        lambda admin: admin.policies(),
        lambda admin: admin.find_messages("t", key="k"),
        lambda admin: admin.message("7F0000010D9C18B4AAC2000000000000", "t"),
    ],
)
def test_what_a_proxy_does_not_forward_is_named(admin: Admin, ask: Callable[[Admin], object]) -> None:
    for _ in range(2):  # the first answer may be the first sign of a Proxy
        with pytest.raises(NotSupported, match="the server is a Proxy, which does not forward this request") as caught:
            ask(admin)
        assert caught.value.remedy == "Give the brokers' name server as option 'nameServer'"


def test_a_known_proxy_is_asked_once(admin: Admin, proxy: MockBroker) -> None:
    for _ in range(2):
        before = len(proxy.requests)
        with pytest.raises(NotSupported, match="is a Proxy"):
            admin.cluster()
    assert len(proxy.requests) - before == 1


@pytest.mark.parametrize(
    "ask",
    [lambda admin: admin.offsets("g"), lambda admin: admin.reset_offsets("g", to="earliest", preview=True)],
)
def test_offsets_need_named_topics(admin: Admin, ask: Callable[[Admin], object]) -> None:
    with pytest.raises(NotSupported, match="which does not forward") as caught:
        ask(admin)
    assert "topics=" in (caught.value.remedy or "")
    assert "--topic" in (caught.value.remedy or "")


def test_offsets_of_named_topics(admin: Admin, proxy: MockBroker) -> None:
    assert admin.offsets("g", ["t"]) == {QUEUE: 5}
    (change,) = admin.reset_offsets("g", topics=["t"], to="earliest", preview=True)
    assert (change.before, change.after) == (5, 2)
    proxy.on(Request.QUERY_CONSUMER_OFFSET, of_proxy(refuse(Response.QUERY_NOT_FOUND)))
    with pytest.raises(OffsetError, match="group g has no offsets in t"):
        admin.offsets("g", ["t"])


def test_offsets_that_members_at_brokers_may_overwrite(
    admin: Admin, proxy: MockBroker, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.on(Request.GET_CONSUMER_LIST_BY_GROUP, of_proxy(refuse(Response.SYSTEM_ERROR)))
    proxy.on(Request.UPDATE_CONSUMER_OFFSET, of_proxy(ok()))
    proxy.on(Request.QUERY_CONSUMER_OFFSET, of_proxy(ok(offset=2)))
    admin.reset_offsets("g", topics=["t"], to="earliest", preview=True)
    assert not caplog.records
    text = "through a Proxy, which does not see members that are connected to brokers"
    admin.reset_offsets("g", topics=["t"], to="earliest")
    assert caplog.text.count(text) == 1
    command = ["offsets", "set", "g", "--topic", "t", "--to", "earliest", "--name-server", proxy.address]
    for more, warnings in ([], 1), (["--yes"], 2):
        assert CliRunner().invoke(app, [*command, *more]).exit_code == 0
        assert caplog.text.count(text) == warnings


@pytest.mark.parametrize(
    ("members", "shown"),
    [
        (
            refuse(Response.SYSTEM_ERROR),
            "The group has no member now at this Proxy, which does not see members at brokers",
        ),
        (ok(b'{"consumerIdList":["me@7"]}'), "1 members at this Proxy, which does not see members at brokers: me@7"),
    ],
)
def test_members_that_are_shown_are_those_of_the_proxy(proxy: MockBroker, members: Command, shown: str) -> None:
    proxy.on(Request.GET_CONSUMER_LIST_BY_GROUP, of_proxy(members))
    done = CliRunner().invoke(app, ["offsets", "show", "g", "--topic", "t", "-n", proxy.address])
    assert shown in done.output + done.stderr


def test_offsets_are_not_set_beside_members_at_the_proxy(admin: Admin, proxy: MockBroker) -> None:
    proxy.on(Request.GET_CONSUMER_LIST_BY_GROUP, of_proxy(ok(b'{"consumerIdList":["10.0.0.1@7"]}')))
    with pytest.raises(OffsetError, match=r"has 1 members, which would overwrite these offsets: 10\.0\.0\.1@7"):
        admin.reset_offsets("g", topics=["t"], to="earliest")
    assert not proxy.seen(Request.UPDATE_CONSUMER_OFFSET)
