"""``Admin`` on real brokers, with RocketMQ's own mqadmin as the witness."""

from __future__ import annotations

import json
import re
import uuid

import pytest
from click.testing import CliRunner

from rocketmq_spark import Admin, Message, Producer, PullConsumer
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import (
    AccessDenied,
    GroupNotFound,
    NotFound,
    OffsetError,
    OptionError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import QueueData
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.bodies import TopicConfig
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.loose_json import read_json
from tests.cli.conftest import documents
from tests.fix_clusters import ADMIN, Certificates, Secured
from tests.fix_spark import ROOT
from tests.helpers import awaited, total
from tests.witness import mqadmin


@pytest.fixture
def name() -> str:
    return f"adm-{uuid.uuid4().hex[:8]}"


def _ask(mq: LocalBroker, command: str, *arguments: str) -> str:
    return mqadmin(command, "-n", mq.name_server, *arguments)


def test_the_life_of_a_topic(rocketmq: LocalBroker, name: str) -> None:
    with Admin(rocketmq.name_server) as admin:
        made = admin.create_topic(name, 4, attributes={"message.type": "FIFO"})
        assert (made.write_queues, list(made.brokers)) == (4, ["broker-a"])
        with pytest.raises(OptionError, match=f"topic {name} exists already"):
            admin.create_topic(name, 8)
        assert name in admin.topics()
        with Producer(rocketmq.name_server, "p") as producer:
            for n in range(8):
                producer.send(Message(name, b"%d" % n))
        total(rocketmq, name, 8)
        found = awaited(lambda: admin.describe_topic(name), lambda there: there.messages == 8)
        assert (found.message_type, found.permission, len(found.queues)) == ("FIFO", "RW", 4)
        lines = [line.split()[:4] for line in _ask(rocketmq, "topicStatus", "-t", name).splitlines()]
        assert sorted(line for line in lines if line[:1] == ["broker-a"]) == sorted(
            [q.broker_name, str(q.queue_id), str(b.min_offset), str(b.max_offset)] for q, b in found.queues.items()
        )
        preview = admin.shrink_topic(name, 1, preview=True)
        assert (preview.hidden, preview.write_queues) == (6, 4)
        assert (admin.shrink_topic(name, 1).hidden, admin.widen_topic(name, 4).write_queues) == (6, 4)
        assert awaited(lambda: admin.describe_topic(name).messages) == 8
        admin.delete_topic(name)
        with pytest.raises(RouteNotFound):
            admin.describe_topic(name)
        assert name not in _ask(rocketmq, "topicList")


def test_a_topic_is_changed_as_mqadmin_sees_it(rocketmq: LocalBroker, name: str) -> None:
    with Admin(rocketmq.name_server) as admin, Producer(rocketmq.name_server, "p", send_timeout="2s") as producer:
        admin.create_topic(name, 2)
        there = admin.update_topic(name, permission="R", order=True, attributes={"message.type": "FIFO"})
        assert (there.permission, there.message_type, there.brokers["broker-a"].order) == ("R", "FIFO", True)
        assert '"perm":4' in re.sub(r"\s", "", _ask(rocketmq, "topicRoute", "-t", name))
        with pytest.raises(RocketMQError):
            producer.send(Message(name, b"refused"))
        assert admin.update_topic(name, 4, permission="RW").brokers["broker-a"].attributes == {"message.type": "FIFO"}
        awaited(lambda: producer.queues(name), lambda queues: len(queues) == 4)
        assert producer.send(Message(name, b"taken"), timeout_s=60.0).queue.topic == name
        _ask(rocketmq, "updateTopic", "-t", name, "-b", rocketmq.address("broker-a"), "-r", "4", "-w", "4", "-p", "2")
        assert awaited(lambda: admin.describe_topic(name), lambda there: there.permission == "W").messages == 1
        with pytest.raises(OptionError, match=r"a broker rejects colour=red.*unsupported key: colour"):
            admin.update_topic(name, attributes={"colour": "red"})


@pytest.mark.parametrize("batch", [False, True])
def test_messages_by_time(rocketmq: LocalBroker, name: str, batch: bool) -> None:
    with Admin(rocketmq.name_server) as admin, Producer(rocketmq.name_server, "p", auto_batch=batch) as producer:
        admin.create_topic(name, 4, batch=batch)
        for burst in range(3):
            producer.send_batch([Message(name, b"%d-%d" % (burst, n), tags="a") for n in range(40)])
            producer.send(Message(name, b"%d-last" % burst))
        assert producer.flush(10)
        total(rocketmq, name, 123)
        found = awaited(lambda: admin.find_messages(name, limit=500), lambda messages: len(messages) == 123)
        times = [message.store_timestamp for message in found]
        assert times == sorted(times)
        assert len({(message.queue, message.queue_offset) for message in found}) == 123
        middle = times[60]
        part = admin.find_messages(name, begin_ms=middle, end_ms=times[100], limit=500)
        assert part == [message for message in found if middle <= message.store_timestamp <= times[100]]
        assert admin.find_messages(name, begin_ms=middle, limit=5) == part[:5]
        assert admin.find_messages(name, begin_ms=times[-1] + 1) == admin.find_messages(name, end_ms=times[0] - 1) == []
        with pytest.raises(OptionError, match="limit is 0"):
            admin.find_messages(name, limit=0)


def test_a_group_its_lag_its_offsets_and_its_end(rocketmq: LocalBroker, name: str) -> None:
    with Admin(rocketmq.name_server) as admin, Producer(rocketmq.name_server, "p") as producer:
        admin.create_topic(name, 2)
        for n in range(10):
            producer.send(Message(name, b"%d" % n))
        total(rocketmq, name, 10)
        with PullConsumer(rocketmq.name_server, name, consume_from_where="earliest", auto_commit=False) as consumer:
            consumer.subscribe(name, "a || b")
            consumer.poll(0.1)
            awaited(lambda: name in admin.groups())
            there = awaited(lambda: admin.describe_group(name), lambda group: len(group.members) == 1)
            assert (there.members[0].client_id, there.members[0].language) == (consumer.client_id, "PYTHON")
            assert there.filters[name].expression == "a || b"
            with pytest.raises(OffsetError, match="has 1 members"):
                admin.delete_group(name)
        changed = admin.reset_offsets(name, "earliest", [name])
        assert [change.after for change in changed] == [0, 0]
        admin.set_offsets(name, {changed[0].queue: 3})
        assert list(admin.offsets(name).values()) == [3, 0]
        assert awaited(lambda: admin.describe_group(name).lag) == 7
        shown = _ask(rocketmq, "consumerProgress", "-g", name)
        assert "Consume Diff Total: 7" in shown
        admin.delete_group(name)
        assert name not in admin.groups()
        with pytest.raises(GroupNotFound):
            admin.describe_group(name)
        with pytest.raises(OffsetError, match="no offsets"):
            admin.offsets(name)


def test_messages_by_id_and_key(rocketmq: LocalBroker, name: str) -> None:
    with Admin(rocketmq.name_server) as admin, Producer(rocketmq.name_server, "p") as producer:
        admin.create_topic(name, 2)
        sent = [producer.send(Message(name, b"body %d" % n, keys=["same", f"k{n}"])) for n in range(3)]
        found = awaited(lambda: admin.find_messages(name, "same"), lambda messages: len(messages) == 3)
        assert [message.msg_id for message in found] == [result.msg_id for result in sent]
        assert [message.body for message in admin.find_messages(name, "k1")] == [b"body 1"]
        assert admin.find_messages(name, "same", end_ms=found[0].store_timestamp - 10_000) == []
        by_client_id, by_place = admin.message(sent[2].msg_id, name), admin.message(found[2].offset_msg_id)
        assert by_client_id == by_place == found[2]
        with pytest.raises(NotFound, match=r"does not belong to a message of these brokers|no message"):
            admin.message(sent[2].msg_id)
        shown = _ask(rocketmq, "queryMsgByKey", "-t", name, "-k", "k1")
        assert sent[1].msg_id in shown
        with pytest.raises(NotFound):
            admin.message(sent[2].msg_id[:-4] + "0000", name)


def test_brokers_and_their_settings(rocketmq: LocalBroker) -> None:
    with Admin(rocketmq.name_server) as admin:
        (state,) = admin.brokers()
        assert (state.broker_name, state.broker_id, state.error) == ("broker-a", 0, None)
        assert str(state.version) in _ask(rocketmq, "clusterList")
        before = admin.broker_config("broker-a")["traceTopicEnable"]
        with pytest.raises(OptionError, match=r"no setting 'traceTopicEnabled'.*Did you mean traceTopicEnable"):
            admin.update_broker_config("broker-a", {"traceTopicEnabled": "true"})
        assert admin.update_broker_config("broker-a", {"traceTopicEnable": before})["traceTopicEnable"] == before


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "admin.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "admin.md", "exec"), {})
    *shown, state = capsys.readouterr().out.splitlines()
    assert shown == re.findall(r"print\(.*\)  # (.*)", program)
    assert state.startswith("broker-a V5")


def test_keys_are_needed_where_brokers_ask_for_them(secured: Secured, name: str) -> None:
    server = secured.mq.name_server
    with Admin(server) as nobody, pytest.raises(AccessDenied):
        nobody.create_topic(name, 1)
    with Admin(server, access_key=ADMIN["accessKey"], secret_key=ADMIN["secretKey"]) as admin:
        admin.create_topic(name, 1)
        with Producer(server, "p", access_key=ADMIN["accessKey"], secret_key=ADMIN["secretKey"]) as producer:
            sent = producer.send(Message(name, b"x", keys=["k"]))
        found = awaited(lambda: admin.find_messages(name, "k"))
        assert admin.message(found[0].offset_msg_id, name).msg_id == sent.msg_id
        assert admin.describe_topic(name).permission == "RW"


def test_tls(encrypted: LocalBroker, certs: Certificates, name: str) -> None:
    client = {
        "tls_cert_file": certs.cert("client"),
        "tls_key_file": certs.key("client"),
        "tls_key_password": "open sesame",
    }
    with Admin(encrypted.name_server, tls=True, tls_ca_file=certs.ca, **client) as admin:
        admin.create_topic(name, 1)
        assert admin.describe_topic(name).messages == 0
        assert [state.error for state in admin.brokers()] == [None]
        admin.delete_topic(name)


def _default_policy(secured: Secured, user: str) -> None:
    """What a broker makes of the ``defaultTopicPerm`` of ACL 1.0."""
    entry = {"resource": "Topic:*", "actions": ["Pub"], "decision": "Allow"}
    body = {"subject": f"User:{user}", "policies": [{"policyType": "Default", "entries": [entry]}]}
    command = rpc.AUTH_UPDATE_ACL.request(json.dumps(body).encode(), subject=body["subject"])
    secured.admin.name_servers.rpc_client.request(secured.mq.address("broker-a"), command)


def test_users_and_policies(secured: Secured, name: str) -> None:
    server = secured.mq.name_server
    with Admin(server, access_key=ADMIN["accessKey"], secret_key=ADMIN["secretKey"]) as admin:
        admin.create_topic(name, 1)
        (account,) = admin.set_user(name, "a-secret")
        assert (account.name, account.is_super, account.enabled) == (name, False, True)
        assert account in admin.users()
        with Admin(server, access_key=name, secret_key="a-secret") as user:
            with pytest.raises(AccessDenied):
                user.describe_topic(name)
            (policy,) = admin.set_policy(name, f"Topic:{name}", ["Get"])
            assert (policy.actions, policy.allowed, policy.user) == (("Get",), True, name)
            assert awaited(lambda: user.describe_topic(name).permission) == "RW"
            admin.set_user(name, enabled=False)
            assert [found.enabled for found in admin.users() if found.name == name] == [False]
        assert admin.policies(name) == [policy]
        admin.delete_policy(name, f"Topic:{name}")
        assert admin.policies(name) == []
        _default_policy(secured, name)
        assert [found.resource for found in admin.policies(name)] == ["Topic:*"]
        admin.delete_policy(name, "Topic:*")
        assert admin.policies(name) == []
        admin.set_policy(name, f"Topic:{name}", ["Get"])
        admin.delete_user(name)
        assert admin.policies(name) == []
        assert name not in [found.name for found in admin.users()]


def test_a_route_that_lost_a_registration_is_set_right(rocketmq: LocalBroker, name: str) -> None:
    """As where two changes at once had one version: the broker has it, and does nothing when it is put again."""
    with Admin(rocketmq.name_server) as admin:
        admin.create_topic(name, 4)
        stale = TopicConfig(name, 2, 1, 6, "SINGLE_TAG", 0, False, {})
        for lost, left in (
            (
                rpc.REGISTER_TOPIC_IN_NAMESRV.request(bodies.topic_registration({"broker-a": stale}), topic=name),
                [(2, 1)],
            ),
            (rpc.DELETE_TOPIC_IN_NAMESRV.request(topic=name), []),
        ):

            def lose(lost: Command = lost) -> list[tuple[int, int]]:
                assert rocketmq.admin.offset_reader.rpc_client.request(rocketmq.name_server, lost).code == 0
                return [(queues.read_queues, queues.write_queues) for queues in _queues(rocketmq, name)]

            awaited(lose, left.__eq__)  # the broker's own registration, every 30 s, may come in between
            rocketmq.admin.create_topic(name, 4)
            assert _queues(rocketmq, name) == [QueueData("broker-a", 4, 4, 6)]
    shown = read_json(_ask(rocketmq, "topicRoute", "-t", name).encode())
    assert [(q["brokerName"], q["readQueueNums"], q["writeQueueNums"], q["perm"]) for q in shown["queueDatas"]] == [
        ("broker-a", 4, 4, 6)
    ]


def _queues(mq: LocalBroker, topic: str) -> list[QueueData]:
    try:
        return list(mq.admin.route(topic).queues)
    except RouteNotFound:
        return []


def test_the_commands_for_users(secured: Secured, name: str) -> None:
    keys = ("--name-server", secured.mq.name_server, "--access-key", "admin", "--secret-key", "adminsecret", "--json")

    def run(*arguments: str) -> list[dict[str, object]]:
        done = CliRunner().invoke(app, [*arguments, *keys])
        assert done.exit_code == 0, done.output
        return documents(done.stdout)

    assert [row["type"] for row in run("user", "set", name, "--password", "a-secret")] == ["normal"]
    assert [row["status"] for row in run("user", "set", name, "--disable")] == ["disabled"]
    (policy,) = run("policy", "set", name, "Topic:x", "Pub", "Get", "--deny", "--source", "10.0.0.1")
    assert (policy["actions"], policy["decision"], policy["sourceIps"]) == (["Pub", "Get"], "deny", ["10.0.0.1"])
    assert run("policy", "list", "--user", name) == [policy]
    run("policy", "delete", name, "Topic:x", "--yes")
    run("user", "delete", name, "--yes")
    assert name not in [row["user"] for row in run("user", "list")]
