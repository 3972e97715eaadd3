"""Options to what speaks gRPC."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from configparser import ConfigParser
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.client.sender import ItemEncoder
from rocketmq_spark.errors import OptionError
from rocketmq_spark.grpc_proxy.channel import SigningKeys, Tls
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.tables import Code, MessageType
from rocketmq_spark.model import Message, SendRequest, SendStatus
from rocketmq_spark.options.transport import FEATURES, GRPC
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session import proxy_clients
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.wire.compression import compress
from tests.grpc_proxy.scripted import acknowledge, route, serving, status
from tests.live.writes import frame

OVER_GRPC = {"transport": "grpc", "proxyEndpoint": "p:8081"}
SETTINGS = ProducerSettings(group="g", features=FEATURES[GRPC])


@pytest.fixture(autouse=True)
def _forgotten_routes():
    yield
    session.close_all()


def parsed(**given: object) -> options.Options:
    return options.parse({**OVER_GRPC, **given}).for_role("producer")


def test_equal_connections_share_a_client_until_it_is_closed():
    made = session.sender(parsed())
    assert session.sender(parsed(group="other")) is made
    assert session.sender(parsed(accessKey="a", secretKey="b")) is not made
    session.close_all()
    assert session.sender(parsed()) is not made


def one_user() -> tuple[str, str]:
    return "one", "hush"


@pytest.mark.parametrize(
    "different",
    [
        {"proxyEndpoint": "q:8081"},
        {"accessKey": "a", "secretKey": "b"},
        {"credentialsProvider": f"{__name__}:one_user"},
        {"credentialsFile": "keys"},
        {"tls": "true"},
        {"namespace": "ns"},
        {"environment": "dev", "environmentMode": "suffix"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_who_is_another_user_or_elsewhere_shares_no_client(different):
    """It would send with the rights of the first, or to the topics of its namespace."""
    assert session.sender(parsed(**different)) is not session.sender(parsed())


@pytest.mark.parametrize(
    ("given", "group", "topic"),
    [
        ({"namespace": "ns"}, "ns%g", "ns%t"),
        ({"environment": "dev", "environmentMode": "suffix"}, "g_dev", "t_dev"),
    ],
    ids=["namespace", "suffix"],
)
def test_a_proxy_hears_names_with_their_namespace_or_suffix(given, group, topic):
    """Or messages would go to, and come from, the topic of that name outside."""
    sent, asked = queue.Queue[Any](), queue.Queue[Any]()

    def store(request, context):
        sent.put(request)
        return acknowledge(request, context)

    def assign(request, context):
        asked.put(request)
        made = proto("QueryAssignmentResponse")(status=status(Code.OK))
        made.assignments.add()
        return made

    with serving({"SendMessage": store, "QueryRoute": route(MessageType.NORMAL), "QueryAssignment": assign}) as address:
        with Producer(group="g", transport="grpc", proxy_endpoint=address, **snake(given)) as producer:
            producer.send(Message("t", b"x"))
        assert [message.topic.name for message in sent.get(timeout=60).messages] == [topic]
        member = session.pop_member(parsed(proxyEndpoint=address, group="g", **given))
        assert member.target_count("t", Deadline.after(60)) == 1
        member.close(Deadline.after(10))
        request = asked.get(timeout=60)
        assert (request.group.name, request.topic.name) == (group, topic)


@pytest.mark.parametrize("verb", [session.client, session.routes, session.offsets, session.committer, session.member])
def test_what_asks_brokers_is_refused_with_the_way_out(verb):
    with pytest.raises(OptionError, match=r"UNIMPLEMENTED.*transport=remoting"):
        verb(parsed())


def test_each_consumer_is_a_client_of_its_own():
    made = [session.pop_member(parsed()) for _ in range(2)]
    assert len({member.client_id for member in made}) == 2


def test_a_batch_that_was_spooled_is_read():
    prepared = [encoding.prepare(Message("t", f"{n}".encode(), tags="a"), f"ID{n}", SETTINGS) for n in range(3)]
    request = encoding.explicit_batch(prepared, "B", SETTINGS, 5, ItemEncoder())
    parts = proxy_clients.sent_messages(request)
    assert [(part.body, part.properties["TAGS"], part.properties["UNIQ_KEY"]) for part in parts] == [
        (f"{n}".encode(), "a", f"ID{n}") for n in range(3)
    ]


def test_tls_keys_and_order_of_the_options_reach_the_client():
    """Without them it would be in plain text, for whom nobody checks, or with the rights of others; and a group in any order."""
    files = {"tls": "true", "tlsCaFile": "ca", "tlsCertFile": "cert", "tlsKeyFile": "key", "tlsServerName": "name"}
    keys = {"accessKey": "a", "secretKey": "s", "securityToken": "t"}
    given = options.parse({**OVER_GRPC, **files, **keys, "group": "g", "ordered": "true"}).for_role("consumer")
    for client in (session.pop_member(given), session.sender(given)):
        access = client._proxy.connect_options
        assert (access.tls, access.keys()) == (Tls("ca", "cert", "key", "name"), SigningKeys("a", "s", "t"))
    member, plain = session.pop_member(given), session.pop_member(parsed(group="g"))
    assert (plain._proxy.connect_options.tls, plain._proxy.connect_options.keys()) == (None, None)
    assert [each._settings().subscription.fifo for each in (member, plain)] == [True, False]
    assert member._unpack is proxy_clients.decompress_body


@pytest.mark.parametrize("kind", [SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD])
def test_what_was_compressed_is_opened(kind):
    """A spool may have kept it so, and other producers send it so."""
    packed = compress(b"body" * 100, kind)
    (part,) = proxy_clients.sent_messages(
        SendRequest("g", packed, "a\x01b\x02", sys_flag=int(SysFlag.COMPRESSED | kind), flag=4)
    )
    assert (part.body, part.properties, part.flag) == (b"body" * 100, {"a": "b"}, 4)
    assert proxy_clients.decompress_body(packed) == b"body" * 100


def test_a_batch_that_was_spooled_arrives_as_it_was_sent(tmp_path: Path) -> None:
    """Whether a producer put it together or the sink: in the layout that spools keep, and back."""
    refused, arrived = threading.Event(), queue.SimpleQueue[Any]()

    def store(request: Any, context: Any) -> Any:
        if not refused.is_set():
            return proto("SendMessageResponse")(status=status(Code.TOO_MANY_REQUESTS, "busy"))
        for message in request.messages:
            arrived.put(message)
        return acknowledge(request, context)

    given = {"onSendFailure": "spool", "spoolDir": str(tmp_path), "sendTimeout": "1s", "autoBatch": "true"}
    with serving({"SendMessage": store, "QueryRoute": route(MessageType.NORMAL)}) as address:
        over = {"transport": "grpc", "proxyEndpoint": address, "topic": "t"}
        rows = frame(body=["0", "1"], tags=["a", "a"], keys=[["k"], ["k", "l"]], properties=[[("größe", "ß")]] * 2)
        names = {name: name for name in rows.schema.names}
        done = TaskWriter(options.parse({**given, **over}).for_role("sink"), names).write([rows])
        assert done.spooled == 2
        with Producer(
            group="g",
            transport="grpc",
            proxy_endpoint=address,
            **snake(given, spool_dir=str(tmp_path / "of a producer")),
        ) as producer:
            sent = [producer.send_async(Message("t", f"{n}".encode(), tags="a", keys=["k"])) for n in (2, 3)]
            assert {each.result(60).status for each in sent} == {SendStatus.SPOOLED}
            refused.set()
            found = sorted((arrived.get(timeout=60) for _ in range(4)), key=lambda message: message.body)
    assert [message.body for message in found] == [b"0", b"1", b"2", b"3"]
    assert [list(message.system_properties.keys) for message in found] == [["k"], ["k", "l"], ["k"], ["k"]]
    assert {message.system_properties.tag for message in found} == {"a"}
    assert [dict(message.user_properties) for message in found] == [{"größe": "ß"}] * 2 + [{}] * 2
    ids = [message.system_properties.message_id for message in found]
    assert ids[2:] == [each.result().msg_id for each in sent]
    assert len(set(ids)) == 4


def snake(given: dict[str, str], **more: str) -> dict[str, str]:
    named = {re.sub("[A-Z]", lambda found: "_" + found[0].lower(), name): value for name, value in given.items()}
    return {**named, **more}


def test_over_grpc_nothing_is_compressed_and_no_topic_is_made():
    settings = ProducerSettings.of(parsed(compressAbove="0"))
    assert (settings.compression, settings.auto_create_topics, settings.features) == ("none", False, FEATURES[GRPC])


def test_without_the_extra_the_error_says_what_to_install():
    """In a process of its own: modules that were imported once keep what they had."""
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "from rocketmq_spark import options\n"
        "from rocketmq_spark.session import proxy_clients\n"
        f"proxy_clients.sender(options.parse({OVER_GRPC}).for_role('producer'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    error = done.stderr.splitlines()[-1]
    assert error.startswith("rocketmq_spark.errors.OptionError: ")
    assert "pip install 'grpcio>=1.76' 'protobuf>=6.33.5'" in error


def test_nobody_imports_grpc_who_does_not_ask_for_it():
    code = (
        "import sys, rocketmq_spark.session, rocketmq_spark.spark.datasource, rocketmq_spark.cli\n"
        "import rocketmq_spark.spark.sink.task\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('grpc', 'google')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


_CONNECT = (
    "from pyspark.sql.connect.client import SparkConnectClient\n"
    "from pyspark.sql.connect.proto import Plan\n"
    "assert Plan.FromString(Plan().SerializeToString()) == Plan()\n"
)
_OURS = (
    "from rocketmq_spark.grpc_proxy import member, sender\n"
    "from rocketmq_spark.grpc_proxy.protos import proto\n"
    "one = proto('Resource')(name='orders')\n"
    "assert proto('Resource').FromString(one.SerializeToString()).name == 'orders'\n"
)


@pytest.mark.parametrize("code", [_CONNECT + _OURS, _OURS + _CONNECT], ids=["connect first", "ours first"])
def test_it_goes_with_spark_connect_in_one_interpreter(code):
    """Which wants gRPC and protobuf, too, and registers its messages in the pool that all libraries share."""
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_extra_asks_for_no_older_grpc_than_spark_connect():
    wanted = {
        (name, version)
        for line in requires("pyspark") or ()
        for name, version in re.findall(r"^(grpcio)>=([\d.]+).*connect", line)
    }
    setup = ConfigParser()
    setup.read(Path(__file__).parents[1] / "setup.cfg", "utf-8")
    own = dict(line.split(">=") for line in setup["options.extras_require"]["grpc"].split())
    assert wanted
    for name, version in wanted:
        assert [int(part) for part in own[name].split(".")] >= [int(part) for part in version.split(".")[:2]]
