"""What goes with which transport."""

from __future__ import annotations

import dataclasses

import pytest

from rocketmq_spark import SimpleConsumer, options
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import transport

GRPC = {"transport": "grpc", "proxyEndpoint": "p:8081"}


@pytest.mark.parametrize("role", ["sink", "producer", "simple consumer"])
def test_who_sends_or_takes_messages_needs_no_name_server(role):
    assert options.parse(GRPC).for_role(role).cluster == ("p:8081",)


@pytest.mark.parametrize("role", ["batch source", "stream source", "pull consumer"])
def test_who_needs_offsets_is_told_why_not_and_the_way_out(role):
    with pytest.raises(OptionError, match=rf"(?s)a {role} .*UNIMPLEMENTED.*Remoting port"):
        options.parse(GRPC).for_role(role)


def test_queue_options_are_refused_for_consumer_over_grpc():
    of_consumers = {
        row.field: row for row in options.TABLE if row.roles in (("consumer",), ("consumer", "pull consumer"))
    }
    understood = {
        "ordered",
        "consume_thread_min",
        "pull_time_delay_when_exception",
        "suspend_current_queue_time",
        "consume_timeout",
    }
    refused = set(transport._CONSUMER_PROBLEMS)
    assert of_consumers.keys() - refused == understood
    for field in refused:
        name = next(row.name for row in options.TABLE if row.field == field)
        given = dataclasses.replace(options.parse(GRPC), given_fields=frozenset({field}))
        with pytest.raises(OptionError, match=f"option '{name}' cannot be used with transport=grpc"):
            given.for_role("consumer")


def test_a_consumer_takes_what_a_proxy_hands_out():
    given = {"ordered": "true", "consumeThreadMin": "3", "pullBatchSize": "8", "group": "g"}
    assert options.parse({**GRPC, **given}).for_role("consumer").ordered
    with pytest.raises(OptionError, match="'proxyEndpoint' is required"):
        options.parse({"transport": "grpc", **given}).for_role("consumer")


@pytest.mark.parametrize(
    ("role", "given", "said"),
    [
        ("sink", {"proxyEndpoint": None}, "'proxyEndpoint' is required"),
        ("sink", {"queueSelector": "column"}, "the Proxy chooses the queue"),
        ("sink", {"queueSelector": "machineRoom", "machineRooms": "a"}, "the Proxy chooses the queue"),
        ("sink", {"queueSelector": "some.module:choose"}, "the Proxy chooses the queue"),
        ("producer", {"environment": "dev"}, "environmentMode=suffix"),
        ("producer", {"longDelay": "dmq"}, "'longDelay' is 'dmq'"),
        ("producer", {"addressMap": '{"a:1":"b:1"}'}, "'addressMap' has no effect"),
        ("producer", {"enableTrace": "true"}, "'enableTrace' is true, but clients of a Proxy write no traces"),
        ("consumer", {"enableTrace": "true"}, "'enableTrace' is true, but clients of a Proxy write no traces"),
        ("producer", {"tlsKeyPassword": "x"}, "without a password"),
        ("producer", {"tlsCheckHostname": "false"}, "'tlsServerName'"),
    ],
)
def test_what_cannot_be_done_over_grpc(role, given, said):
    with pytest.raises(OptionError, match=said):
        options.parse({**GRPC, **given}).for_role(role)


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("batch source", r"\(POP\), but the same batch never twice; .*the Remoting port of a Proxy \(8080"),
        ("stream source", r"\(POP\), but the same batch never twice; .*the Remoting port of a Proxy \(8080"),
        ("pull consumer", r"rejects pulls and requests about offsets .*the Remoting port of a Proxy \(8080"),
        ("cluster admin", r"with the brokers' name server as nameServer$"),
    ],
)
def test_a_role_that_cannot_use_grpc_is_shown_the_other_port(role, said):
    given = {"subscribe": "t"} if "source" in role else {}
    with pytest.raises(OptionError, match=said):
        options.parse({**GRPC, **given}).for_role(role)


@pytest.mark.parametrize("server", [{"nameServer": "n:1"}, GRPC])
@pytest.mark.parametrize("role", ["sink", "producer", "consumer"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tlsCaFile": "ca.pem"}, "'tlsCaFile' has no effect without 'tls': set tls=true, or tls=false"),
        ({"tlsCertFile": "c.pem", "tlsKeyFile": "k.pem"}, "'tlsCertFile' has no effect without 'tls'"),
        (
            {"tls": True, "tlsKeyFile": "k.pem"},
            "'tlsKeyFile' has no effect without 'tlsCertFile': give tlsCertFile, too",
        ),
        ({"tlsKeyPassword": "x"}, "'tlsKeyPassword' has no effect without 'tlsCertFile'"),
        ({"tlsCheckHostname": False}, "'tlsCheckHostname' has no effect without 'tls'"),
        ({"tlsServerName": "n"}, "'tlsServerName' has no effect without"),
        ({"accessKey": "me"}, "'accessKey' has no effect without 'secretKey': give secretKey, too"),
        ({"secretKey": "shh"}, "'secretKey' has no effect without 'accessKey'"),
        ({"securityToken": "t"}, "'securityToken' has no effect without 'accessKey'"),
    ],
)
def test_tls_and_keys_are_never_half_on(server, role, given, said):
    with pytest.raises(OptionError, match=said) as caught:
        options.parse({**server, **given}).for_role(role)
    assert "shh" not in str(caught.value)


@pytest.mark.parametrize("role", ["sink", "producer", "consumer", "cluster admin"])
def test_unchecked_tls_host_names_require_own_ca_file(role):
    """With those of the system, everybody has a certificate that is accepted."""
    given = {"nameServer": "n:1", "tls": True, "tlsCheckHostname": False}
    with pytest.raises(OptionError, match=r"'tlsCheckHostname' is false without option 'tlsCaFile'.*public authority"):
        options.parse(given).for_role(role)
    assert not options.parse({**given, "tlsCaFile": "ca.pem"}).for_role(role).tls_check_hostname
    assert not options.parse({**given, "tls": False}).for_role(role).tls


def test_plain_text_that_is_asked_for_keeps_its_files():
    given = {"tls": False, "tlsCaFile": "ca.pem", "tlsCheckHostname": True}
    assert not options.parse({"nameServer": "n:1", **given}).for_role("sink").tls


@pytest.mark.parametrize("selector", ["roundRobin", "random", "hash"])
def test_selectors_that_leave_the_choice(selector):
    assert options.parse({**GRPC, "queueSelector": selector}).for_role("sink")


@pytest.mark.parametrize("name", ["proxyEndpoint", "tlsServerName"])
def test_what_is_said_to_a_proxy_means_nothing_to_brokers(name):
    with pytest.raises(OptionError, match=f"'{name}' has no effect without transport=grpc"):
        options.parse({"nameServer": "n:1", name: "a:1"}).for_role("sink")


def test_a_simple_consumer_speaks_with_a_proxy():
    with pytest.raises(OptionError, match="connects to a Proxy"):
        SimpleConsumer(name_server="n:1", transport="remoting", group="g")


def test_over_remoting_the_name_servers_are_the_cluster():
    assert options.parse({"nameServer": "n:1"}).for_role("sink").cluster == ("n:1",)
