"""A Proxy that speaks nothing but TLS and asks who is there; and its broker that has too much to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rocketmq_spark import Message, Producer, PullConsumer, SimpleConsumer, errors, options, session
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_clusters import ADMIN, SECURED, Certificates, Secured
from tests.live.grpc.proxied import forgotten, known, producer, write
from tests.live.writes import frame, numbered
from tests.mockbroker import eventually
from tests.reading import names, read

__all__ = ["forgotten"]
_SAME = {name: value for name, value in SECURED.items() if name.endswith(("Enabled", "ationProvider", "Credentials"))}
_AUTH = "org.apache.rocketmq.proxy.auth.Proxy"
ASKS_WHO = {
    **_SAME,
    "enableAclRpcHookForClusterMode": True,
    "authenticationMetadataProvider": f"{_AUTH}AuthenticationMetadataProvider",
    "authorizationMetadataProvider": f"{_AUTH}AuthorizationMetadataProvider",
}
# A Proxy whose own threads are busy says 42900 to nobody (5.5.0: whom it rejects it does not answer); it passes on a broker's.
TINY = {"sendMessageThreadPoolNums": 1, "sendThreadPoolQueueCapacity": 1}
NOBODY = {"accessKey": "nobody", "secretKey": "nobody-secret"}


@dataclass(frozen=True, slots=True)
class Guarded:
    mq: LocalBroker
    tls: dict[str, Any]

    @property
    def admin(self) -> BaseAdmin:
        signed = options.parse({"nameServer": self.mq.name_server, **ADMIN}).for_role("producer")
        return session.client(signed).admin

    @property
    def right(self) -> dict[str, Any]:
        return {**self.tls, **ADMIN}

    def topic(self, kind: str = "NORMAL") -> str:
        (topic,) = names(1, "guarded")
        self.admin.create_topic(topic, 4, self.mq.brokers, attributes={"message.type": kind})
        eventually(lambda: known(self.mq, topic, **self.right), 60)
        return topic


@pytest.fixture(scope="module")
def guarded(certs: Certificates) -> Iterator[Guarded]:
    conf = {**SECURED, "autoCreateSubscriptionGroup": True}
    certificate = {"tlsCertPath": certs.cert("server"), "tlsKeyPath": certs.key("server")}
    with LocalBroker(conf=conf, proxy={**ASKS_WHO, **certificate}, quiet=True) as mq:
        yield Guarded(mq, {"tls": True, "tlsCaFile": certs.ca})


def consumer(guarded: Guarded, **how: Any) -> SimpleConsumer:
    return SimpleConsumer(proxy_endpoint=guarded.mq.proxy_grpc, group="reads", **how)


def test_rows_go_in_and_out_with_tls_and_a_signature(guarded):
    topic, count = guarded.topic(), 1000
    rows = frame(body=numbered(count), keys=[[f"k{n}"] for n in range(count)])
    written = write(guarded.mq, rows, topic=topic, batchMaxBytes="8k", sendTimeout="30s", **guarded.right)
    assert written.rows == count
    eventually(lambda: len(read(guarded.mq, subscribe=topic, **ADMIN)) >= count, 60)  # the index comes a moment later
    there = read(guarded.mq, subscribe=topic, includeProperties="all", **ADMIN)
    assert Counter(row["body"].decode() for row in there) == Counter(numbered(count))
    got: Counter[str] = Counter()
    with consumer(guarded, **guarded.right) as one:
        one.subscribe(topic)

        def all_came() -> bool:
            for message in one.receive():
                one.ack(message)
                got[message.msg_id] += 1
            return got.total() >= count

        eventually(all_came, 120)
    assert got == Counter(row["msgId"] for row in there)


def test_the_remoting_port_has_the_same_tls_and_users(guarded):
    topic, other = guarded.topic(), guarded.topic()
    rights = [(f"Topic:{topic}", "Pub,Sub,Get"), ("Group:reads-*", "Sub")]
    given = {**guarded.tls, **Secured(guarded.mq, guarded.admin).user("remotes", *rights)}
    server, sent = guarded.mq.proxy_server, set()
    with Producer(server, "writes", **given) as sends:
        sent |= {sends.send(Message(topic, text.encode())).msg_id for text in numbered(20)}
        with pytest.raises(errors.AccessDenied, match=server):
            sends.send(Message(other, b"x"))
    eventually(lambda: len(read(server, subscribe=topic, group="reads-1", **given)) == 20, 60)
    assert {row["msgId"] for row in read(server, subscribe=topic, group="reads-1", **given)} == sent
    with pytest.raises(errors.AccessDenied):
        read(server, subscribe=other, group="reads-1", numRetries=0, **given)
    wrong = ({**ADMIN, "secretKey": "wrong-secret"}, NOBODY, {})
    for keys in wrong:
        with pytest.raises(errors.AccessDenied, match=server) as said:
            read(server, subscribe=topic, numRetries=0, **guarded.tls, **keys)
        assert "accessKey" in str(said.value)
    got: set[str] = set()
    with PullConsumer(server, "reads-2", consume_from_where="earliest", **given) as pulls:
        pulls.subscribe(topic)
        eventually(lambda: got.update(message.msg_id for message in pulls.poll(1.0)) or got == sent, 60)


def test_who_may_write_one_topic_writes_no_other(guarded):
    his, other = guarded.topic(), guarded.topic()
    user = Secured(guarded.mq, guarded.admin).user("writes", (f"Topic:{his}", "Pub"))
    write(guarded.mq, frame(body=["x"]), topic=his, **guarded.tls, **user)
    with pytest.raises(errors.AccessDenied, match=guarded.mq.proxy_grpc):
        write(guarded.mq, frame(body=["x"]), topic=other, **guarded.tls, **user)
    eventually(lambda: len(read(guarded.mq, subscribe=his, **ADMIN)) == 1, 60)
    assert not read(guarded.mq, subscribe=other, **ADMIN)


def test_read_only_topic_does_not_end_transactions_of_others(guarded):
    """A Proxy shows its route, and refuses all topics because of it."""
    his, other = (guarded.topic("TRANSACTION") for _ in range(2))
    user = Secured(guarded.mq, guarded.admin).user("shops", (f"Topic:{his}", "Pub"), (f"Topic:{other}", "Sub"))
    with producer(guarded.mq, transaction_check=lambda message: "UNKNOWN", **guarded.tls, **user) as shop:
        for topic in (his, other, his, other, his):
            if topic == his:
                shop.send_half(Message(topic, b"x")).commit()
            else:
                with pytest.raises(errors.AccessDenied):
                    shop.send_half(Message(topic, b"x"))
    eventually(lambda: len(read(guarded.mq, subscribe=his, **ADMIN)) == 3, 60)


def refused(guarded: Guarded, certs: Certificates) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """What does not get in: with which options, and what must be said."""
    wrong_key = {**ADMIN, "secretKey": "wrong-secret"}
    ca, name = "tlsCaFile", "tlsServerName"
    return {
        "another name": ({**guarded.right, name: "broker.example"}, errors.CertificateRefused, name),
        "another authority": ({**guarded.right, ca: certs.cert("stranger")}, errors.CertificateRefused, ca),
        "a wrong key": ({**guarded.tls, **wrong_key}, errors.AccessDenied, "secretKey"),
        "a user that is unknown": ({**guarded.tls, **NOBODY}, errors.AccessDenied, "User:nobody"),
        "no key": (guarded.tls, errors.AccessDenied, "accessKey"),
    }


def test_who_does_not_get_in_is_told_why(guarded, certs):
    topic = guarded.topic()
    for given, kind, words in refused(guarded, certs).values():
        with pytest.raises(kind) as said:
            write(guarded.mq, frame(body=["x"]), topic=topic, numRetries=1, retryInterval="100ms", **given)
        with pytest.raises(kind) as heard, consumer(guarded, **given) as one:
            one.subscribe(topic)
        for error in (said.value, heard.value):
            assert guarded.mq.proxy_grpc in str(error)
            assert words in str(error)
            assert "\n" not in str(error)
    assert not read(guarded.mq, subscribe=topic, **ADMIN)


def test_plain_text_is_told_of_tls(guarded):
    with pytest.raises(errors.ConnectionLost, match=r"if it requires TLS, set option 'tls'") as said:
        write(guarded.mq, frame(body=["x"]), topic="t", sendTimeout="1s", numRetries=0, **ADMIN)
    assert guarded.mq.proxy_grpc in str(said.value)


def test_too_many_requests_are_sent_again_or_told(guarded):
    """The last test: from now on the broker has one thread for all who send, and room for one request that waits."""
    topic = guarded.topic()
    session.close_all()
    guarded.mq.restart("broker-a", TINY)
    eventually(lambda: known(guarded.mq, topic, **guarded.right), 60)
    taken, refusals = set(), []
    with producer(guarded.mq, send_timeout="3s", **guarded.right) as sends:
        for _ in range(20):  # a machine may be too slow to send more than one thread takes
            for future in [sends.send_async(Message(topic, f"async {n}".encode())) for n in range(300)]:
                if (error := future.exception(60)) is None:
                    taken.add(future.result().msg_id)
                else:
                    refusals.append(str(error))
            if any("42900" in error for error in refusals):
                break
    write(guarded.mq, frame(body=numbered(40)), topic=topic, batchMaxBytes="200", sendTimeout="60s", **guarded.right)

    def found() -> dict[str, str]:
        return {row["msgId"]: row["body"].decode() for row in read(guarded.mq, subscribe=topic, **ADMIN)}

    eventually(lambda: len(found()) >= 40 + len(taken), 60)
    there = found()
    assert sorted(body for body in there.values() if not body.startswith("async")) == numbered(40)
    assert taken <= there.keys()
    told = [error for error in refusals if "42900" in error]
    assert told
    for error in told:
        assert "\n" not in error
        assert all(words in error for words in (guarded.mq.proxy_grpc, "[OVERLOAD]", "send less, or give it more"))
