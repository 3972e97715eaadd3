"""``Admin`` as users make it: its options, its end, and offsets that it sets. What its verbs ask is tested beside this file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from rocketmq_spark import Admin, session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import ClosedError, OffsetError, OptionError
from rocketmq_spark.model import MessageQueue
from tests.client.conftest import Parts
from tests.mockbroker import Call, MockBroker, ok, refuse

COMMITTED, COMMIT, MEMBERS = (
    Request.QUERY_CONSUMER_OFFSET, Request.UPDATE_CONSUMER_OFFSET, Request.GET_CONSUMER_LIST_BY_GROUP,
)  # fmt: skip
QUEUES = [MessageQueue("t", "broker-a", n) for n in (0, 1)]


@pytest.fixture
def served(broker: MockBroker, tools: Parts) -> Iterator[MockBroker]:
    """Two queues with offsets 2 to 9, and a group that is at 5 in both, keeps what is set, and has no member."""
    kept = {"0": 5, "1": 5}

    def commit(call: Call) -> object:
        kept[call.ext("queueId")] = int(call.ext("commitOffset"))
        return ok()

    rows = (
        f'{{"brokerName":"broker-a","queueId":{n},"topic":"t"}}:{json.dumps({"minOffset": 2, "maxOffset": 9})}'
        for n in (0, 1)
    )
    broker.on(Request.GET_TOPIC_STATS_INFO, ok(('{"offsetTable":{' + ",".join(rows) + "}}").encode()))
    broker.on(COMMITTED, lambda call: ok(offset=kept[call.ext("queueId")]))
    broker.on(COMMIT, commit)
    broker.on(MEMBERS, refuse(Response.SYSTEM_ERROR, "no consumer"))
    yield broker
    session.close_all()


def test_admin_connects_on_first_use_but_never_once_closed(served: MockBroker) -> None:
    with Admin(served.address) as admin:
        assert served.requests == []
        assert [data.broker_name for data in admin.cluster()] == ["broker-a"]
    admin.close()
    with pytest.raises(ClosedError, match="the admin is closed"):
        admin.cluster()
    with Admin(nameServer=served.address) as other:  # connections are the process's
        assert other.cluster()


def test_a_fork_must_make_its_own(served: MockBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = Admin(served.address)
    with monkeypatch.context() as forked:
        forked.setattr("rocketmq_spark.base.process._pid", [-1])
        for call in (admin.cluster, admin.topics, lambda: admin.reset_offsets("g", "latest", ["t"])):
            with pytest.raises(ClosedError, match="from which this one was forked"):
                call()
    assert served.requests == []
    assert admin.cluster()


def test_options_are_those_of_connections() -> None:
    with pytest.raises(OptionError) as caught:
        Admin("h:1", send_timeout="3s", request_timeou=1, tls_ca_file="ca.pem")  # type: ignore[call-arg]
    text = str(caught.value)
    assert "option 'request_timeou' is unknown; did you mean 'request_timeout'?" in text
    with pytest.raises(OptionError, match="option 'send_timeout' does not belong to a cluster admin"):
        Admin("h:1", send_timeout="3s")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match=r"'tlsCaFile'.*tls"):
        Admin("h:1", tls_ca_file="ca.pem")
    with pytest.raises(OptionError, match="'nameServer' is required"):
        Admin()
    with pytest.raises(OptionError, match="a cluster admin sends requests that a Proxy rejects"):
        Admin(transport="grpc", proxy_endpoint="h:1")
    Admin("h:1", namespace="ns", access_key="a", secret_key="b", tls=True, connect_timeout="1s").close()


def test_offsets_are_shown_before_they_are_set(served: MockBroker) -> None:
    with Admin(served.address) as admin:
        shown = admin.set_offsets("g", {QUEUES[0]: 7, QUEUES[1]: -2}, preview=True)
        assert [(c.queue, c.before, c.after, c.effect) for c in shown] == [
            (QUEUES[0], 5, 7, "skips 2"), (QUEUES[1], 5, 2, "reads 3 again"),
        ]  # fmt: skip
        assert served.seen(COMMIT) == []
        assert admin.set_offsets("g", {QUEUES[0]: 7, QUEUES[1]: -2}) == shown
        assert admin.offsets("g", ["t"]) == {QUEUES[0]: 7, QUEUES[1]: 2}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({QUEUES[0]: 10}, "the queue has 2 to 9"),
        ({MessageQueue("t", "broker-a", 7): 1}, "offsets names queues that do not exist: t/broker-a/7"),
    ],
)
def test_offsets_that_a_queue_does_not_have(wrong: dict[MessageQueue, int], said: str, served: MockBroker) -> None:
    with Admin(served.address) as admin, pytest.raises(OffsetError, match=said):
        admin.set_offsets("g", wrong)
    assert served.seen(COMMIT) == []


def test_a_group_with_members_keeps_its_offsets_unless_forced(served: MockBroker) -> None:
    served.on(MEMBERS, ok(b'{"consumerIdList":["c1"]}'))
    with Admin(served.address) as admin:
        with pytest.raises(OffsetError, match=r"group g has 1 members.*c1"):
            admin.reset_offsets("g", "earliest", ["t"])
        assert served.seen(COMMIT) == []
        admin.reset_offsets("g", "latest", ["t"], force=True)
        assert set(admin.offsets("g", ["t"]).values()) == {9}


def test_offsets_by_time(served: MockBroker) -> None:
    served.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, lambda call: ok(offset=int(call.ext("timestamp")) % 10))
    with Admin(served.address) as admin:
        for moment in (1_700_000_000_006, datetime.fromtimestamp(1_700_000_000.006, UTC)):
            assert {c.after for c in admin.reset_offsets("g", moment, ["t"], preview=True)} == {6}
        assert {c.after for c in admin.reset_offsets("g", 1_700_000_000_001, ["t"], preview=True)} == {
            2
        }  # within bounds
        with pytest.raises(OptionError, match="expected a datetime with a zone"):
            admin.reset_offsets("g", datetime(2026, 1, 1), ["t"])
        with pytest.raises(OffsetError, match="to is 'soon'"):
            admin.reset_offsets("g", "soon", ["t"])


@pytest.mark.parametrize(("mark", "word"), [(-1, "latest"), (-2, "earliest")])
def test_marks_mean_the_same_in_all_methods(served: MockBroker, mark: int, word: str) -> None:
    with Admin(served.address) as admin:
        expected = admin.reset_offsets("g", word, ["t"], preview=True)
        assert admin.reset_offsets("g", mark, ["t"], preview=True) == expected
        assert admin.set_offsets("g", dict.fromkeys(QUEUES, mark), preview=True) == expected
    assert not served.seen(Request.SEARCH_OFFSET_BY_TIMESTAMP)


def test_a_time_before_1970_is_no_mark(served: MockBroker) -> None:
    served.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, lambda call: ok(offset=0 if call.ext("timestamp") == "0" else 9))
    with Admin(served.address) as admin:
        before = datetime(1969, 12, 31, 23, 59, 59, 999_000, UTC)
        assert {c.after for c in admin.reset_offsets("g", before, ["t"], preview=True)} == {2}


@pytest.mark.parametrize("to", [None, 1.5, True, b"latest", ["t"], -3, "Latest", "-1"])
def test_where_a_reset_goes_is_checked(served: MockBroker, to: Any) -> None:
    refused = pytest.raises((OptionError, OffsetError), match=rf"to is {re.escape(repr(to))}; expected earliest")
    with Admin(served.address) as admin, refused:
        admin.reset_offsets("g", to, ["t"])
    assert served.seen(COMMIT) == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda admin: admin.reset_offsets("g", "latest", "t"), "topics is 't'; expected a list of names of topics"),
        (lambda admin: admin.reset_offsets(b"g", "latest"), "group is b'g'; expected the name of a consumer group"),
        (lambda admin: admin.offsets("g", "t"), "topics is 't'; expected a list of names of topics"),
        (lambda admin: admin.set_offsets("g", [QUEUES[0]]), "offsets is .*; expected a dict of offsets"),
        (
            lambda admin: admin.set_offsets("g", {QUEUES[0]: None}),
            "offsets of t/broker-a/0 is None; expected an offset",
        ),
        (lambda admin: admin.set_offsets("g", {QUEUES[0]: 1.5}), "offsets of t/broker-a/0 is 1.5; expected an offset"),
        (lambda admin: admin.set_offsets("g", {"t": 1}), "a queue of offsets is 't'; expected a MessageQueue"),
        (lambda admin: admin.describe_topic(5), "topic is 5; expected the name of a topic"),
        (lambda admin: admin.delete_topic(None), "topic is None; expected the name of a topic"),
        (lambda admin: admin.create_topic("t", "8"), "queues is '8'; expected a whole number"),
        (lambda admin: admin.create_topic("t", 8, "broker-a"), "brokers is 'broker-a'; expected a list of names"),
        (lambda admin: admin.find_messages("t", 5), "key is 5; expected a str"),
        (lambda admin: admin.message(None), "message_id is None; expected the id of a message"),
        (lambda admin: admin.describe_group(["g"]), r"group is .*; expected the name of a consumer group"),
    ],
)
def test_arguments_of_wrong_types_are_refused(served: MockBroker, call: Any, text: str) -> None:
    with Admin(served.address) as admin, pytest.raises(OptionError, match=text):
        call(admin)
    assert served.requests == []


def test_in_an_environment_groups_and_queues_are_its_own(served: MockBroker) -> None:
    with Admin(served.address, environment="2", environments=2) as admin:
        (change,) = admin.reset_offsets("g", "latest", ["t"])
    assert change.queue == QUEUES[1]
    assert {command.ext["consumerGroup"] for command in served.seen(COMMIT)} == {"g_env_2"}


def test_every_admin_verb_uses_group_and_queues_of_environment(served: MockBroker) -> None:
    """The group of the plain name is the one of those who have no environment."""
    table = {name: {"groupName": name} for name in ("g", "g_env_2")}
    served.on(Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, ok(json.dumps({"subscriptionGroupTable": table}).encode()))
    served.on(Request.GET_CONSUMER_CONNECTION_LIST, refuse(Response.CONSUMER_NOT_ONLINE, "not online"))
    served.on(Request.GET_CONSUME_STATS, ok(b'{"offsetTable":{}}'))
    served.on(Request.PULL_MESSAGE, refuse(Response.PULL_NOT_FOUND, nextBeginOffset=9, minOffset=2, maxOffset=9))
    for code in (Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, Request.DELETE_SUBSCRIPTIONGROUP):
        served.on(code, ok())
    with Admin(served.address, environment="2", environments=2) as admin:
        admin.create_group("g")
        assert admin.describe_group("g").group == "g_env_2"
        assert set(admin.offsets("g", ["t"]).values()) == {5}
        admin.delete_group("g")
        assert admin.find_messages("t") == []
    (made,) = served.seen(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    assert json.loads(bytes(made.body))["groupName"] == "g_env_2"
    assert {command.ext["consumerGroup"] for command in served.seen(COMMITTED)} == {"g_env_2"}
    (gone,) = served.seen(Request.DELETE_SUBSCRIPTIONGROUP)
    assert gone.ext["groupName"] == "g_env_2"
    assert {command.ext["queueId"] for command in served.seen(Request.PULL_MESSAGE)} == {"1"}
