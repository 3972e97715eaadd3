"""The rows of the connection table where one writes: by the sink as Spark calls it, and by a producer."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import Message, Producer, session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import AccessDenied, OptionError, RocketMQError
from rocketmq_spark.grpc_proxy.tables import MessageType
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.spark.datasource import RocketMQDataSource
from tests.fix_clusters import ADMIN, Certificates, Secured, Tap
from tests.grpc_proxy.scripted import acknowledge, route, serving
from tests.live.grpc.proxied import new_topic
from tests.live.options.test_security import mutual
from tests.live.writes import frame
from tests.mockbroker import eventually
from tests.reading import bodies, names, read, text

Write = Callable[..., list[str]]
SENDS = (Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE)


def by_sink(server: str, topic: str, made: Sequence[str], **options: object) -> None:
    rows = frame(body=list(made))
    given = {"nameServer": server, "topic": topic, **options}
    source = RocketMQDataSource({name: text(value) for name, value in given.items()})
    writer = pickle.loads(pickle.dumps(source.writer(from_arrow_schema(rows.schema), overwrite=False)))
    writer.commit([pickle.loads(pickle.dumps(writer)).write(iter([rows]))])


def by_producer(server: str, topic: str, made: Sequence[str], **options: object) -> None:
    given: dict[str, Any] = {"group": "g_writing", "sendTimeout": "20s", **options}
    with Producer(name_server=server, **given) as producer:
        for body in made:
            producer.send(Message(topic, body.encode()))


WRITERS: dict[str, Callable[..., None]] = {"sink": by_sink, "producer": by_producer}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Write:
    """Writes three messages with a server, a topic and options; what they were."""

    def written(mq: LocalBroker | str, topic: str, **options: object) -> list[str]:
        made = names(3)
        WRITERS[request.param](mq if isinstance(mq, str) else mq.name_server, topic, made, **options)
        return made

    return written


def there(mq: LocalBroker, topic: str, sent: Sequence[str], connection: Mapping[str, str] | None = None) -> bool:
    """Whether the topic holds just what was sent, each once: the index is made a moment after the acknowledgement."""
    ask = {"subscribe": topic, **(connection or {})}
    eventually(lambda: len(read(mq, **ask)) >= len(sent), 60)
    return Counter(bodies(read(mq, **ask))) == Counter(sent)


def test_name_server__the_next_one_is_tried_when_one_fails(rocketmq, topic, nobody, write):
    real = rocketmq.name_server
    assert there(rocketmq, topic, [*write(f"{nobody};{real}", topic), *write(f"{real},{nobody}", topic)])
    with pytest.raises(RocketMQError, match="nameServer") as e:
        write(nobody, topic, numRetries=0, sendTimeout="1s")
    assert nobody in str(e.value)


def test_address_map__leads_to_the_reachable_address(rocketmq, topic, make_tap, nobody, write):
    advertised = rocketmq.address("broker-a")
    tap = make_tap(advertised)
    sent = write(rocketmq, topic, addressMap={advertised: tap.address})
    assert there(rocketmq, topic, sent)
    assert all(body.encode() in tap.data for body in sent)
    with pytest.raises(RocketMQError):
        write(rocketmq, topic, addressMap={advertised: nobody}, sendTimeout="1s", numRetries=0)
    assert there(rocketmq, topic, sent)


def test_max_connections__are_the_most_of_a_client(rocketmq, topic, write, caplog):
    """The name server and the broker take turns. The limit is logged once for each client."""
    session.close_all()
    assert there(rocketmq, topic, write(rocketmq, topic, maxConnections=1))
    assert "this client has 1 connections, which is its limit (option 'maxConnections')" in caplog.text


@pytest.fixture
def locked(secured: Secured) -> str:
    """An empty topic of the broker with users."""
    (topic,) = names(1, "written")
    secured.admin.create_topic(topic, 2)
    return topic


def denied(write: Write, mq: LocalBroker, topic: str, **options: object) -> str:
    """The text of the refusal, without a secret."""
    with pytest.raises(AccessDenied) as e:
        write(mq, topic, **options)
    said = str(e.value)
    assert "access denied" in said
    assert "adminsecret" not in said
    assert "-secret" not in said
    return said


def test_access_key__of_a_writer_needs_pub_on_the_topic(secured, locked, write):
    may = secured.user(f"pub-{locked}", (f"Topic:{locked}", "Pub,Get"))
    may_not = secured.user(f"sub-{locked}", (f"Topic:{locked}", "Sub,Get"))
    assert locked in denied(write, secured.mq, locked, **may_not)
    denied(write, secured.mq, locked)
    assert "nobody" in denied(write, secured.mq, locked, accessKey="nobody", secretKey="adminsecret")
    assert there(secured.mq, locked, write(secured.mq, locked, **may), ADMIN)


def test_secret_key__that_is_wrong_says_access_denied(secured, locked, write):
    said = denied(write, secured.mq, locked, accessKey="admin", secretKey="guess")
    assert "check signature failed" in said
    assert "guess" not in said
    assert there(secured.mq, locked, write(secured.mq, locked, **ADMIN), ADMIN)


def test_security_token__goes_with_every_send(secured, locked, make_tap, write):
    address = secured.mq.address("broker-a")
    tap = make_tap(address)
    sent = write(secured.mq, locked, securityToken="tok-2", addressMap={address: tap.address}, **ADMIN)
    assert there(secured.mq, locked, sent, ADMIN)
    assert set().union(*(tap.field("SecurityToken", request) for request in SENDS)) == {"tok-2"}


def test_credentials_file__is_read_where_a_connection_is_made(secured, locked, tmp_path, write):
    (tmp_path / "keys").write_text("# ours\naccessKey = admin\nsecretKey=adminsecret\n")
    (tmp_path / "wrong").write_text("accessKey=admin\nsecretKey=guess\n")
    assert "check signature failed" in denied(write, secured.mq, locked, credentialsFile=tmp_path / "wrong")
    with pytest.raises(OptionError, match="credentialsFile"):
        write(secured.mq, locked, credentialsFile=tmp_path / "absent")
    assert there(secured.mq, locked, write(secured.mq, locked, credentialsFile=tmp_path / "keys"), ADMIN)


def test_credentials_provider__is_called_on_connecting(secured, locked, write):
    where = "tests.live.options.test_security"
    wrong = {"credentialsProvider": f"{where}:provided_wrongly"}
    assert "check signature failed" in denied(write, secured.mq, locked, **wrong)
    sent = write(secured.mq, locked, credentialsProvider=f"{where}:provided")
    assert there(secured.mq, locked, sent, ADMIN)


def over_tls(certs: Certificates, **more: object) -> dict[str, object]:
    given = mutual(certs, **{"sendTimeout": "5s", **more})
    return {name: value for name, value in given.items() if name != "subscribe" and value is not None}


def failure(write: Write, mq: LocalBroker, options: dict[str, object], topic: str = "written") -> str:
    with pytest.raises(RocketMQError) as e:
        write(mq, topic, **options)
    assert "open sesame" not in str(e.value)
    return str(e.value)


@pytest.fixture
def private(encrypted: LocalBroker) -> str:
    (topic,) = names(1, "private")
    encrypted.create_topic(topic, 2)
    return topic


def test_tls__encrypts_all_connections(encrypted, private, certs, make_tap, write):
    broker, names_at = encrypted.address("broker-a"), encrypted.name_server
    taps = {address: make_tap(address) for address in (broker, names_at)}
    mapped = {"addressMap": {broker: taps[broker].address}}
    sent = write(taps[names_at].address, private, **over_tls(certs, **mapped))
    assert there(encrypted, private, sent)
    for tap in taps.values():
        assert len(tap.data) > 0
        assert not [body for body in (private, *sent) if body.encode() in tap.data]


def test_tls_ca_file__says_whom_to_trust(encrypted, private, certs, write):
    # A minute: what is not trusted is not waited for.
    assert "tlsCaFile" in failure(write, encrypted, over_tls(certs, tlsCaFile=None, sendTimeout="1m"))
    assert "tlsCaFile" in failure(write, encrypted, over_tls(certs, tlsCaFile=certs.cert("stranger"), sendTimeout="1m"))
    assert there(encrypted, private, write(encrypted, private, **over_tls(certs)))


def test_tls_cert_file__is_shown_to_servers_that_ask(encrypted, private, certs, write):
    none = {"tlsCertFile": None, "tlsKeyFile": None, "tlsKeyPassword": None}
    strange = {"tlsCertFile": certs.cert("stranger"), "tlsKeyFile": certs.key("stranger"), "tlsKeyPassword": None}
    for wrong in (none, strange):
        failure(write, encrypted, over_tls(certs, **wrong, sendTimeout="1s"), private)
    assert there(encrypted, private, write(encrypted, private, **over_tls(certs)))


def test_tls_key_file__belongs_to_the_certificate(encrypted, certs, write):
    strange = over_tls(certs, tlsKeyFile=certs.key("stranger"), tlsKeyPassword=None)
    assert "tlsKeyFile" in failure(write, encrypted, strange)


def test_tls_key_password__opens_the_key(encrypted, certs, write):
    assert "tlsKeyPassword" in failure(write, encrypted, over_tls(certs, tlsKeyPassword="guess"))


def test_tls_check_hostname__disables_only_the_name_check(elsewhere, certs, write):
    (topic,) = names(1, "private")
    elsewhere.create_topic(topic, 1)
    trusting = {"tls": True, "tlsCaFile": certs.ca, "numRetries": 0, "sendTimeout": "1m"}
    assert "tlsCheckHostname" in failure(write, elsewhere, trusting)
    assert there(elsewhere, topic, write(elsewhere, topic, **trusting, tlsCheckHostname=False))


def test_namespace__is_prefixed_to_topics_and_groups(rocketmq, make_topic, make_tap, write):
    plain = make_topic(queues=2)
    rocketmq.create_topic(f"shop%{plain}", 2)
    address = rocketmq.address("broker-a")
    tap = make_tap(address)
    inside = write(rocketmq, plain, namespace="shop", addressMap={address: tap.address})
    outside = write(rocketmq, plain)
    assert there(rocketmq, f"shop%{plain}", inside)
    assert there(rocketmq, plain, outside)
    fields = {name: set().union(*(tap.field(name, request) for request in SENDS)) for name in ("a", "b")}
    assert fields["b"] == {f"shop%{plain}"}
    assert all(group.startswith("shop%") for group in fields["a"])
    assert fields["a"]


def test_environment_mode__suffix_writes_to_environments_topics(rocketmq, make_topic, make_tap, write):
    plain = make_topic(queues=2)
    rocketmq.create_topic(f"{plain}_dev1", 2)
    address = rocketmq.address("broker-a")
    tap = make_tap(address)
    in_suffix = {"environment": "dev1", "environmentMode": "suffix", "addressMap": {address: tap.address}}
    assert there(rocketmq, f"{plain}_dev1", write(rocketmq, plain, **in_suffix))
    assert there(rocketmq, plain, [])
    groups = {group for request in SENDS for group in tap.field("a", request)}
    assert groups
    assert all(group.endswith("_dev1") for group in groups)


def test_transport__is_remoting_and_grpc_is_refused(rocketmq, topic, write):
    with pytest.raises(OptionError, match="transport"):
        write(rocketmq, topic, transport="grpc")
    assert there(rocketmq, topic, write(rocketmq, topic, transport="Remoting"))


def test_connect_timeout__ends_wait_for_unresponsive_port(black_hole, write):
    for wait_s in (0.2, 1.5):
        started = time.monotonic()
        with pytest.raises(RocketMQError, match="connect"):
            write(black_hole, "t", connectTimeout=f"{wait_s}s", requestTimeout="200s", numRetries=0, sendTimeout="4s")
        assert time.monotonic() - started >= wait_s


def test_request_timeout__ends_the_wait_for_an_answer(rocketmq, topic, make_proxy, write):
    proxy = make_proxy(rocketmq.name_server)
    proxy.black_hole()
    with pytest.raises(RocketMQError, match=r"no answer (to request 105 )?in time"):
        write(proxy.address, topic, requestTimeout="200ms", numRetries=0, sendTimeout="3s")


def asked_for(rocketmq: LocalBroker, tap: Tap, **options: object) -> int:
    """How often a sink asks the name server for a topic that is not there."""
    (unknown,) = names(1, "unknown")
    with pytest.raises(RocketMQError, match=unknown):
        by_sink(tap.address, unknown, ["x"], sendTimeout="60s", **options)
    return tap.data.count(unknown.encode())


def test_num_retries__is_how_often_unknown_topic_is_requested(rocketmq, make_tap):
    once, often = (
        asked_for(rocketmq, make_tap(rocketmq.name_server), numRetries=retries, retryInterval="10ms")
        for retries in (1, 6)
    )
    assert often >= once + 4


def test_retry_interval__is_the_first_pause_and_doubles(rocketmq, make_tap):
    started = time.monotonic()
    asked_for(rocketmq, make_tap(rocketmq.name_server), numRetries=2, retryInterval="800ms")
    assert time.monotonic() - started >= 0.4 + 0.8  # with jitter: each from the upper half


def over_grpc(mq: LocalBroker) -> dict[str, str]:
    return {"transport": "grpc", "proxyEndpoint": mq.proxy_grpc}


def test_proxy_endpoint__is_where_messages_over_grpc_go(proxied, nobody, write):
    topic = new_topic(proxied)
    assert there(proxied, topic, write(nobody, topic, **over_grpc(proxied)))
    with pytest.raises(RocketMQError, match=nobody):
        write(proxied, topic, transport="grpc", proxyEndpoint=nobody, sendTimeout="1s", numRetries=0)


def test_tls_server_name__is_what_the_certificate_bears(certs, write):
    """A certificate for another name than the host; a server of the tests: for a Proxy with TLS see tests/live/grpc."""
    pair = Path(certs.key("elsewhere")).read_bytes(), Path(certs.cert("elsewhere")).read_bytes()
    taken: list[str] = []

    def take(request: Any, context: Any) -> Any:
        taken.extend(message.body.decode() for message in request.messages)
        return acknowledge(request, context)

    answers = {"QueryRoute": route(MessageType.NORMAL), "SendMessage": take}
    with serving(answers, grpc.ssl_server_credentials([pair])) as address:
        given = {"transport": "grpc", "proxyEndpoint": address, "tls": True, "tlsCaFile": certs.ca}
        with pytest.raises(RocketMQError, match="tlsServerName"):
            write("127.0.0.1:1", "t", **given, sendTimeout="5s")
        assert not taken
        assert Counter(write("127.0.0.1:1", "t", **given, tlsServerName="broker.example")) == Counter(taken)
