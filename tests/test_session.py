"""Clients of a process: shared by equal connection options, never by processes; and where credentials come from."""

import json
import os
from collections.abc import Iterator

import pytest

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.base.secret import Secret
from rocketmq_spark.client.credentials import Credentials
from rocketmq_spark.consumer.listener import Context, with_replier
from rocketmq_spark.errors import ClosedError, OptionError, RocketMQError, ServerFault
from rocketmq_spark.model import Message, MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.remoting.transport import DropUnsent
from rocketmq_spark.session import consumers, stored_ids
from rocketmq_spark.wire import rpc
from tests.client.test_replies import question
from tests.harness import store
from tests.mockbroker import MockBroker, eventually, ok, route, topic_config
from tests.queues import qs
from tests.queues import read as vectors

# Nobody listens there; clients connect when they are used, not when they are made.
NOWHERE = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    session.close_all()


def parsed(role: str = "batch source", **given: object) -> Options:
    return options.parse({"nameServer": NOWHERE, **given}).for_role(role)


def test_equal_connection_options_share_a_client():
    one = session.client(parsed(subscribe="a", pullDepth="3"))
    assert session.client(parsed(subscribe="b")) is one
    assert session.client(parsed("sink", topic="c")) is one


@pytest.mark.parametrize(
    "different",
    [
        {"nameServer": "127.0.0.1:2"},
        {"addressMap": {"a:1": "b:1"}},
        {"addressMap": "nameServer"},
        {"accessKey": "me", "secretKey": "one"},
        {"connectTimeout": "1s"},
        {"requestTimeout": "1s"},
        {"numRetries": "1"},
        {"retryInterval": "1s"},
        {"tls": "true"},
        {"tls": "false"},
        {"namespace": "ns"},
    ],
    ids=lambda d: next(iter(d)),
)
def test_other_connection_options_get_a_client_of_their_own(different):
    assert session.client(parsed(**different)) is not session.client(parsed())
    assert session.client(parsed(**different)) is session.client(parsed(**different))
    theirs, mine = (session.client(one).rpc_client.pool.connect_options for one in (parsed(**different), parsed()))
    assert theirs.receive_budget is not mine.receive_budget
    assert theirs.waiting_budget is not mine.waiting_budget


def test_bulk_reads_have_the_account_of_their_client():
    account = session.client(parsed()).rpc_client.pool.connect_options.receive_budget
    assert session.puller(parsed()).connect_options.receive_budget is account
    assert session.puller(parsed(pullBatchSize="7"), "slave").connect_options.receive_budget is account
    pullers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_ids, "id_reader", lambda open_puller, on_ranges: pullers.append(open_puller()))
        stored_ids.scan_tools(parsed())
    assert [one.connect_options.receive_budget for one in pullers] == [account]


def test_only_an_explicit_option_allows_secrets_in_plain_text():
    def allows(**given):
        return session.client(parsed(**given)).rpc_client.pool.connect_options.allow_plain_text

    assert (allows(), allows(tls="false"), allows(tls="true")) == (False, True, False)


def test_an_unknown_retention_without_tls_is_logged_once(monkeypatch, caplog):
    """Once for each cluster, however many brokers it has."""

    def refuse(broker):
        raise OptionError(f"the settings of {broker} would cross the network")

    given = parsed()
    monkeypatch.setattr(session.client(given).admin, "broker_config", refuse)
    assert [session.retention_ms(given, broker) for broker in ("a", "b", "a")] == [None, None, None]
    assert caplog.text.count("retention not known without TLS") == 1


@pytest.mark.parametrize(
    ("hours", "retention_ms"), [("72", 72 * 3_600_000), ("abc", None), ("-1", None), ("9" * 5000, None), (None, None)]
)
def test_a_retention_that_is_no_number_is_not_known(monkeypatch, hours, retention_ms):
    given = parsed()
    config = {} if hours is None else {"fileReservedTime": Secret(hours)}
    monkeypatch.setattr(session.client(given).admin, "broker_config", lambda broker: config)
    assert session.retention_ms(given, "a") == retention_ms


def test_the_option_replaces_addresses_in_routes():
    assert session.client(parsed(addressMap="nameServer")).rpc_client.pool.connect_options.at_name_server
    assert not session.client(parsed()).rpc_client.pool.connect_options.at_name_server


def one_user():
    return "one", "hush"


def another_user():
    return "another", "hush"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tls": "true"}, {"tls": "true", "tlsCaFile": "ca.pem"}),
        ({"tls": "true", "tlsCaFile": "ca.pem"}, {"tls": "true", "tlsCaFile": "ca.pem", "tlsCheckHostname": "false"}),
        ({"accessKey": "me", "secretKey": "a"}, {"accessKey": "me", "secretKey": "a", "securityToken": "t"}),
        ({"credentialsProvider": f"{__name__}:one_user"}, {"credentialsProvider": f"{__name__}:another_user"}),
        ({"environment": "dev", "environmentMode": "suffix"}, {"environment": "test", "environmentMode": "suffix"}),
    ],
    ids=["authority", "host name", "token", "provider", "environment"],
)
def test_who_is_another_user_or_elsewhere_shares_no_client(first, second):
    """It would send with the rights of the first, or to the topics of its environment."""
    assert session.client(parsed(**first)) is not session.client(parsed(**second))


def test_users_of_two_files_share_no_client(tmp_path):
    files = [tmp_path / name for name in ("one", "other")]
    for file in files:
        file.write_text(f"accessKey={file.name}\nsecretKey=hush\n")
    one, other = (session.client(parsed(credentialsFile=str(file))) for file in files)
    assert one is not other


def test_unconfirmed_requests_end_before_a_scan_has_settled():
    def of(role, **given):
        made = session.client(options.parse({"nameServer": NOWHERE, **given}).for_role(role))
        return made.rpc_client.pool.connect_options.undelivered_policy.max_unconfirmed_s

    once = {"topic": "t", "deliveryGuarantee": "exactly-once"}
    assert of("sink", topic="t") == 15.0
    assert of("sink", **once) == 9.0
    assert of("sink", **once, exactlyOnceSettle="4s") == 3.0
    assert of("sink", **once, exactlyOnceSettle="60s") == 15.0
    assert of("producer", confirmAmbiguous="true", exactlyOnceSettle="5s") == 4.0
    assert of("sink", topic="t") == 15.0


def test_an_exactly_once_sinks_unsent_bytes_end_with_its_process():
    def of(role, **given):
        made = session.client(options.parse({"nameServer": NOWHERE, **given}).for_role(role))
        return made.rpc_client.pool.connect_options.undelivered_policy.drop_unsent

    assert of("sink", topic="t", deliveryGuarantee="exactly-once", exactlyOnceSettle="60s") is DropUnsent.ON_EXIT
    assert of("producer", confirmAmbiguous="true", exactlyOnceSettle="20s", sendTimeout="60s") is DropUnsent.ON_CLOSE
    assert of("sink", topic="t") is DropUnsent.NEVER


def test_another_secret_is_another_client():
    one, two = (session.client(parsed(accessKey="me", secretKey=secret)) for secret in ("one", "two"))
    assert one is not two


def test_a_closed_client_is_made_anew():
    one = session.client(parsed())
    session.close_all()
    assert session.client(parsed()) is not one


def test_a_forked_process_makes_its_own_client():
    mine = session.client(parsed())
    child = os.fork()
    if child == 0:
        # Nothing of pytest may run here: the answer is the exit code.
        theirs = session.client(parsed())
        session.close_all()
        os._exit(0 if theirs is not mine and session.client(parsed()) is not theirs else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert session.client(parsed()) is mine


def test_a_forked_listener_does_not_reply_for_its_parent():
    """Its answer would come to the parent, as that to one of the parent's own requests."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        broker.on(Request.SEND_REPLY_MESSAGE_V2, ok(msgId="0", queueId="0", queueOffset="0"))
        consumer = consumers.Consumer(broker.address, "g")
        context = with_replier(Context(MessageQueue("t", "broker-a", 0)), [question()], consumer._tools.replier)
        context.reply(b"yes")
        child = os.fork()
        if child == 0:
            try:
                context.reply(b"yes")
            except ClosedError:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        context.reply(b"yes")
        assert len(broker.seen(Request.SEND_REPLY_MESSAGE_V2)) == 2


def test_nothing_is_dialled_before_it_is_needed():
    client = session.client(parsed(connectTimeout="50ms", requestTimeout="50ms", numRetries="0"))
    with pytest.raises(RocketMQError, match=NOWHERE):
        client.routes.get("t", 0.0)


def test_secrets_do_not_show_in_a_client():
    given = {
        "accessKey": "me",
        "secretKey": "hush-1",
        "securityToken": "hush-2",
        "tls": "true",
        "tlsCertFile": "client.pem",
        "tlsKeyPassword": "hush",
    }
    assert "hush" not in repr(session.client(parsed(**given)))


class TestCredentials:
    def current(self, **given: object) -> Credentials | None:
        found = session.client(parsed(**given)).rpc_client.credentials
        return found.current() if found is not None else None

    def test_none_without_keys(self):
        assert self.current() is None

    def test_from_options(self):
        assert self.current(accessKey="me", secretKey="hush") == Credentials("me", "hush", None)
        with_token = self.current(accessKey="me", secretKey="hush", securityToken="t")
        assert with_token == Credentials("me", "hush", "t")

    def test_from_a_file(self, tmp_path):
        path = tmp_path / "keys"
        path.write_text("# for the tests\naccessKey = me\nsecretKey=a=b\n\n", "utf-8")
        assert self.current(credentialsFile=str(path)) == Credentials("me", "a=b", None)

    def test_a_file_without_keys_is_reported(self, tmp_path):
        path = tmp_path / "keys"
        path.write_text("accessKey=me\n", "utf-8")
        with pytest.raises(
            OptionError, match=r"option 'credentialsFile' is .*; expected lines accessKey=… and secretKey=…"
        ):
            self.current(credentialsFile=str(path))

    def test_a_missing_file_is_reported(self, tmp_path):
        with pytest.raises(OptionError, match=r"option 'credentialsFile' is .*none'; it cannot be read: No such file"):
            self.current(credentialsFile=str(tmp_path / "none"))

    @pytest.mark.parametrize(
        "found",
        [("me", "hush", "t"), ["me", "hush", "t"], {"accessKey": "me", "secretKey": "hush", "securityToken": "t"}],
    )
    def test_from_a_function(self, monkeypatch, found):
        monkeypatch.setattr(session, "provider_of_tests", lambda: found, raising=False)
        given = {"credentialsProvider": "rocketmq_spark.session:provider_of_tests"}
        assert self.current(**given) == Credentials("me", "hush", "t")

    @pytest.mark.parametrize("found", [None, "me", ("me",), ("me", 1), {"accessKey": "me"}])
    def test_a_function_that_gives_something_else_is_reported(self, monkeypatch, found):
        monkeypatch.setattr(session, "provider_of_tests", lambda: found, raising=False)
        with pytest.raises(OptionError, match="returned no credentials; expected"):
            self.current(credentialsProvider="rocketmq_spark.session:provider_of_tests")

    def test_an_unknown_function_is_reported(self):
        with pytest.raises(OptionError, match="credentialsProvider"):
            self.current(credentialsProvider="no.such.module:function")


def test_a_producer_needs_a_group():
    with pytest.raises(OptionError, match="option 'group' is required"):
        Producer(name_server=NOWHERE)


def test_producers_of_a_process_share_client_id_and_heartbeat():
    with MockBroker({Request.HEART_BEAT: ok(), Request.UNREGISTER_CLIENT: ok()}) as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        with (
            Producer(name_server=broker.address, group="g1") as one,
            Producer(name_server=broker.address, group="g2") as two,
        ):
            assert one.client_id == two.client_id
            assert one.queues("t") == two.queues("t")
            broker.wait_for(lambda: bool(broker.seen(Request.HEART_BEAT)))
        session.close_all()
        (beat,) = [json.loads(bytes(command.body)) for command in broker.seen(Request.HEART_BEAT)]
        assert (beat["clientID"], beat["producerDataSet"]) == (
            one.client_id,
            [{"groupName": "g1"}, {"groupName": "g2"}],
        )
        left = [command.ext["producerGroup"] for command in broker.seen(Request.UNREGISTER_CLIENT)]
        assert left == ["g2", "g1"]


def test_a_producer_stays_in_the_environment_of_its_options(rocketmq, topic):
    given = {"name_server": rocketmq.name_server, "group": "g_environment"}
    with Producer(environment="2", environments="4", **given) as producer:
        assert {producer.send(Message(topic, b"x")).queue.queue_id for _ in range(8)} == {1, 5}
    with pytest.raises(OptionError, match="option 'environments' needs option 'environment'"):
        Producer(environments="4", **given)


def _version(calls, address):
    """A broker that has just started fails over its own statistics, of which there are none yet."""
    try:
        answer = calls.request(address, rpc.GET_BROKER_RUNTIME_INFO.request())
    except ServerFault:
        return None
    return json.loads(bytes(answer.body))["table"]["brokerVersionDesc"]


def test_the_broker_of_these_tests_is_the_pinned_release(rocketmq, record_property):
    client = session.client(parsed(nameServer=rocketmq.name_server))
    for broker in client.admin.cluster().values():
        eventually(lambda master=broker.master: _version(client.rpc_client, master) is not None, 60)
        version = _version(client.rpc_client, broker.master)
        record_property("broker version", version)
        assert version == "V5_5_0"


@pytest.mark.parametrize("kind", [consumers.Consumer, consumers.PullConsumer])
def test_consumers_share_queues_by_their_names_on_the_wire(kind: type) -> None:
    (case,) = (
        case
        for case in vectors("wire_allocation")
        if (case["strategy"], case["wire"]) == ("CONSISTENT_HASH", "INST%orders")
    )
    made = kind(name_server=NOWHERE, group="g", namespace="INST", allocation_strategy="consistentHash")
    settings = made.settings if kind is consumers.Consumer else made._settings
    queues = qs("broker-a:0-3 broker-b:0-3", "orders")
    for member, expected in case["result"].items():
        found = settings.allocate(member, queues, list(case["result"]))
        assert [f"{queue.broker_name}:{queue.queue_id}" for queue in found] == expected
    if kind is consumers.Consumer:
        assert settings.wire_group == "INST%g"
    made.close()


def test_a_backlog_of_a_retry_topic_has_the_original_topic():
    """A listener that goes by the topic would take it for another's."""
    reader = consumers._backlog_reader(parsed("consumer", namespace="ns", group="g"), "g")
    assert reader is not None
    stored = store("%RETRY%ns%g", b"x", "RETRY_TOPIC\x01ns%t\x02", queue_offset=5)
    (message,) = reader.decode(MessageQueue("%RETRY%g", "broker-a", 0), 5, 6, stored)
    assert (message.topic, message.queue.topic) == ("t", "%RETRY%g")


def test_a_backlog_is_read_as_the_group_of_the_environment():
    """The rights, and the settings, are those of that group."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        broker.on(Request.GET_TOPIC_CONFIG, topic_config())
        broker.on(Request.PULL_MESSAGE, ok(store("t", b"x"), nextBeginOffset=1, minOffset=0, maxOffset=1))
        ahead = consumers._backlog_reader(parsed("consumer", nameServer=broker.address, group="g"), "g_env_1")
        assert ahead is not None
        run = ahead.start([OffsetRange(MessageQueue("t", "broker-a", 0), 0, 1)], 100, 1 << 20)
        assert [part.ends for parts in run.fetch() for part in parts]
        assert {command.ext["consumerGroup"] for command in broker.seen(Request.PULL_MESSAGE)} == {"g_env_1"}
