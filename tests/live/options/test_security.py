"""Who reads, and over which wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request
from rocketmq_spark.client.admin import BaseAdmin, batch_attributes
from rocketmq_spark.errors import AccessDenied, GroupNotFound, OptionError, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from tests.fix_clusters import ADMIN, Certificates, Secured
from tests.live.writes import Writes, frame, numbered, sink_options
from tests.mockbroker import eventually
from tests.reading import Run, bodies, feed, names, read


@pytest.fixture
def locked(secured: Secured) -> tuple[str, set[str]]:
    """A topic of the broker with users, and what is in it."""
    (topic,) = names(1, "locked")
    secured.admin.create_topic(topic, 2)
    return topic, set(feed(secured.mq, topic, 6, connection=ADMIN))


def refused(secured: Secured, **options: object) -> str:
    """The text of the refusal, which is at once, with a cause and without a secret."""
    with pytest.raises(AccessDenied) as e:
        read(secured.mq, **options)
    said = str(e.value)
    assert "access denied" in said
    assert "adminsecret" not in said
    assert "-secret" not in said
    return said


def test_access_key__and_its_secret_open_the_topic(secured, locked):
    topic, sent = locked
    assert Counter(bodies(read(secured.mq, subscribe=topic, **ADMIN))) == Counter(sent)
    assert "username cannot be null" in refused(secured, subscribe=topic)
    said = refused(secured, subscribe=topic, accessKey="nobody", secretKey="adminsecret")
    assert "nobody is not found" in said


def test_secret_key__that_is_wrong_says_access_denied(secured, locked):
    topic, _ = locked
    said = refused(secured, subscribe=topic, accessKey="admin", secretKey="guess")
    assert "check signature failed" in said
    assert "'secretKey'" in said
    assert "guess" not in said


def test_access_key__of_a_reader_needs_sub_and_get_and_the_group(secured, locked):
    topic, sent = locked
    group = f"g-{topic}"
    secured.admin.create_group(group)
    least = secured.user(f"least-{topic}", (f"Topic:{topic}", "Sub,Get"), (f"Group:{group}", "Sub"))
    assert Counter(bodies(read(secured.mq, subscribe=topic, group=group, **least))) == Counter(sent)
    no_get = secured.user(f"noget-{topic}", (f"Topic:{topic}", "Sub"), (f"Group:{group}", "Sub"))
    assert "Sub and Get on the topic" in refused(secured, subscribe=topic, group=group, **no_get)
    no_sub = secured.user(f"nosub-{topic}", (f"Topic:{topic}", "Get"), (f"Group:{group}", "Sub"))
    assert "Sub and Get on the topic" in refused(secured, subscribe=topic, group=group, **no_sub)


@pytest.mark.parametrize(("grants", "entries"), [("Pub", 30), ("Pub,Get", 1)])
def test_access_key__of_writer_needs_get_to_store_batches_whole(secured, monkeypatch, grants, entries):
    """Who may not ask what kind a topic is writes to it all the same; a batch that is one message lies in one place."""
    (topic,) = names(1, "whole")
    secured.admin.create_topic(topic, 1, attributes=batch_attributes())
    user = secured.user(f"writer-{topic}", (f"Topic:{topic}", grants))
    Writes(secured.mq.name_server, monkeypatch)(frame(body=numbered(30)), topic=topic, **user)
    eventually(lambda: len(read(secured.mq, subscribe=topic, **ADMIN)) == 30, 60)
    found = read(secured.mq, subscribe=topic, metadata="full", **ADMIN)
    assert sorted(bodies(found)) == numbered(30)
    assert len({row["commitLogOffset"] for row in found}) == entries


@pytest.mark.parametrize(("grants", "allowed"), [("Create,Get", True), ("Create", False), ("Get", False)])
def test_access_key__needs_create_and_get_to_change_queue_count(secured, locked, grants, allowed):
    topic, _ = locked
    user = secured.user(f"resizer-{topic}-{grants.replace(',', '-')}", (f"Topic:{topic}", grants))
    admin = session.client(sink_options(secured.mq.name_server, **user)).admin
    with nullcontext() if allowed else pytest.raises(AccessDenied):
        admin.resize_topic(topic, 3, secured.mq.brokers)
    assert len(secured.admin.describe_topic(topic)) == (3 if allowed else 2)


def test_group__that_may_not_be_created_raises_error_with_help(secured, locked, monkeypatch):
    topic, _ = locked
    group = f"unknown-{topic}"
    least = secured.user(f"groupless-{topic}", (f"Topic:{topic}", "Sub,Get"), (f"Group:{group}", "Sub"))
    with pytest.raises(RocketMQError, match="Create the consumer group"):
        read(secured.mq, subscribe=topic, group=group, **least)

    def denied(admin: BaseAdmin, name: str, brokers: Sequence[str]) -> None:
        """As brokers before 5 and managed ones answer; a broker 5.5.0 lets any user create groups."""
        raise AccessDenied("access denied", remark=f"no permission to create {name}")

    monkeypatch.setattr(BaseAdmin, "create_group", denied)
    run = Run(secured.mq, subscribe=topic, startingOffsets="earliest", group=group, **least)
    with pytest.raises(GroupNotFound, match=f"mqadmin updateSubGroup -g {group}"):
        run.batch()


def test_group__is_created_when_the_user_may(secured, locked):
    topic, sent = locked
    group = f"new-{topic}"
    run = Run(secured.mq, subscribe=topic, startingOffsets="earliest", group=group, **ADMIN)
    run.drain(sent)
    run.batch()
    assert {q: p.consumer_offset for q, p in secured.admin.consume_stats(group, topic).items()} == run.positions


def test_credentials_file__is_read_where_a_connection_is_made(secured, locked, tmp_path):
    topic, sent = locked
    file = tmp_path / "keys"
    file.write_text("# ours\naccessKey = admin\nsecretKey=adminsecret\n")
    assert Counter(bodies(read(secured.mq, subscribe=topic, credentialsFile=file))) == Counter(sent)
    other = tmp_path / "wrong"
    other.write_text("accessKey=admin\nsecretKey=guess\n")
    assert "check signature failed" in refused(secured, subscribe=topic, credentialsFile=other)
    for wrong in (tmp_path / "absent", tmp_path / "empty"):
        (tmp_path / "empty").touch()
        with pytest.raises(OptionError, match="credentialsFile"):
            read(secured.mq, subscribe=topic, credentialsFile=wrong)


def provided() -> tuple[str, str]:
    return "admin", "adminsecret"


def provided_wrongly() -> dict[str, str]:
    return {"accessKey": "admin", "secretKey": "guess"}


def test_credentials_provider__is_called_on_connecting(secured, locked):
    topic, sent = locked
    assert Counter(bodies(read(secured.mq, subscribe=topic, credentialsProvider=f"{__name__}:provided"))) == Counter(
        sent
    )
    said = refused(secured, subscribe=topic, credentialsProvider=f"{__name__}:provided_wrongly")
    assert "check signature failed" in said


def test_security_token__goes_with_every_request(secured, locked, make_tap):
    topic, sent = locked
    address = secured.mq.address("broker-a")
    tap = make_tap(address)
    mapped = {"addressMap": {address: tap.address}}
    assert Counter(bodies(read(secured.mq, subscribe=topic, securityToken="tok-1", **ADMIN, **mapped))) == Counter(sent)
    assert tap.field("SecurityToken", Request.GET_TOPIC_STATS_INFO) == {"tok-1"}
    assert tap.field("SecurityToken", Request.PULL_MESSAGE) == {"tok-1"}


def mutual(certs: Certificates, **more: object) -> dict[str, object]:
    return {
        "subscribe": "private",
        "tls": True,
        "tlsCaFile": certs.ca,
        "tlsCertFile": certs.cert("client"),
        "tlsKeyFile": certs.key("client"),
        "tlsKeyPassword": "open sesame",
        "numRetries": 0,
        **more,
    }


def failure(mq: LocalBroker, options: dict[str, object]) -> str:
    with pytest.raises(RocketMQError) as e:
        read(mq, **options)
    assert "open sesame" not in str(e.value)
    return str(e.value)


def test_tls__encrypts_all_connections(encrypted, certs, make_tap):
    broker, names_at = encrypted.address("broker-a"), encrypted.name_server
    taps = {address: make_tap(address) for address in (broker, names_at)}
    mapped = {"addressMap": {broker: taps[broker].address}}
    found = read(taps[names_at].address, **mutual(certs, **mapped))
    assert Counter(bodies(found)) == Counter(encrypted.bodies)
    for tap in taps.values():
        assert len(tap.data) > 0
        assert b"private" not in tap.data
    # These servers speak both.
    assert Counter(bodies(read(encrypted, subscribe="private"))) == Counter(encrypted.bodies)


def test_tls_ca_file__says_whom_to_trust(encrypted, certs):
    assert Counter(bodies(read(encrypted, **mutual(certs)))) == Counter(encrypted.bodies)
    assert "tlsCaFile" in failure(encrypted, mutual(certs, tlsCaFile=None))
    assert "tlsCaFile" in failure(encrypted, mutual(certs, tlsCaFile=certs.cert("stranger")))
    assert "tlsCaFile" in failure(encrypted, mutual(certs, tlsCaFile="/no/such/file"))


def test_tls_cert_file__is_shown_to_servers_that_ask(encrypted, certs):
    without = mutual(certs, tlsCertFile=None, tlsKeyFile=None, tlsKeyPassword=None)
    failure(encrypted, without)
    made = {"tlsCertFile": certs.cert("stranger"), "tlsKeyFile": certs.key("stranger"), "tlsKeyPassword": None}
    failure(encrypted, mutual(certs, **made))


def test_tls_key_file__belongs_to_the_certificate(encrypted, certs):
    assert "tlsKeyFile" in failure(encrypted, mutual(certs, tlsKeyFile=certs.key("stranger"), tlsKeyPassword=None))


def test_tls_key_password__opens_the_key(encrypted, certs):
    assert "tlsKeyPassword" in failure(encrypted, mutual(certs, tlsKeyPassword="guess"))


def test_tls_check_hostname__disables_only_the_name_check(elsewhere, certs):
    (topic,) = names(1, "private")
    elsewhere.create_topic(topic, 1)
    sent = feed(elsewhere, topic, 3)
    trusting = {"subscribe": topic, "tls": True, "tlsCaFile": certs.ca, "numRetries": 0}
    assert "tlsCheckHostname" in failure(elsewhere, trusting)
    assert Counter(bodies(read(elsewhere, **trusting, tlsCheckHostname=False))) == Counter(sent)
    stranger = {**trusting, "tlsCaFile": certs.cert("stranger"), "tlsCheckHostname": False}
    assert "tlsCaFile" in failure(elsewhere, stranger)
