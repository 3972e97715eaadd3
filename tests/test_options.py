"""The table of options: every row with a good and a bad value, roles, nearest names, secrets, and its documentation."""

import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import options
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import ROLES, TABLE, Options
from rocketmq_spark.options.transport import REQUIRED_OPTIONS
from rocketmq_spark.queues.environment import scope_of
from tests.harness import in_one_test

QUEUE = MessageQueue("orders", "broker-a", 0)
BY_QUEUE = '{"orders":{"broker-a":{"0":17}}}'

OF_GRPC = ("proxy_endpoint", "tls_server_name", "transport")

# field: text, value, bad text, part of what the error says was expected
SAMPLES = {
    "name_server": ("a:9876;b:9876", ("a:9876", "b:9876"), "a", "host:port"),
    "address_map": ('{"a:1":"b:2"}', {"a:1": "b:2"}, '{"a":"b:2"}', "'a' is not host:port"),
    "access_key": ("me", "me", " ", "not empty"),
    "secret_key": ("shh", "shh", None, ""),
    "security_token": ("shh", "shh", None, ""),
    "credentials_file": ("/etc/keys", "/etc/keys", "", "not empty"),
    "credentials_provider": ("my.keys:load", "my.keys:load", "load", "module:callable"),
    "tls": ("TRUE", True, "yes", "true or false"),
    "tls_ca_file": ("ca.pem", "ca.pem", "", "not empty"),
    "tls_cert_file": ("cert.pem", "cert.pem", "", "not empty"),
    "tls_key_file": ("key.pem", "key.pem", "", "not empty"),
    "tls_key_password": ("shh", "shh", None, ""),
    "tls_check_hostname": ("false", False, "0", "true or false"),
    "namespace": (" ns ", "ns", "../a", "letters of ASCII, digits, and the characters %|_-"),
    "proxy_endpoint": ("a:8081;b:8081", ("a:8081", "b:8081"), "a", "host:port"),
    "tls_server_name": ("proxy.example", "proxy.example", "", "not empty"),
    "transport": ("gRPC", "grpc", "http", "one of remoting, grpc"),
    "connect_timeout": ("500ms", 0.5, "0", "above zero"),
    "request_timeout": ("2s", 2.0, "fast", "a duration"),
    "max_connections": ("7", 7, "0", "at least 1"),
    "num_retries": ("0", 0, "-1", "at least 0"),
    "retry_interval": ("1s", 1.0, "0s", "above zero"),
    "route_refresh": ("0", 0.0, "-1", "a duration"),
    "subscribe": ("a, b,a", ("a", "b"), ",", "at least one name"),
    "subscribe_pattern": ("a.*", "a.*", "(", "regular expression"),
    "assign": ('{"orders":{"broker-a":[0]}}', (QUEUE,), '{"orders":[0]}', "JSON such as"),
    "include_internal": ("true", True, "1", "true or false"),
    "tags": ("a || b", "a || b", '{"orders":1}', "a filter"),
    "sql": ('{"orders":"a > 1"}', {"orders": "a > 1"}, " ", "not empty"),
    "starting_offsets": (BY_QUEUE, {QUEUE: 17}, "first", "earliest, latest"),
    "committed_fallback": ("latest", "latest", "none", "one of error, earliest, latest"),
    "starting_timestamp": ("1970-01-01T00:00:01Z", 1000, "today", "ISO-8601"),
    "starting_offsets_by_timestamp": (BY_QUEUE, {QUEUE: 17}, '{"orders":{"broker-a":{"0":-1}}}', "at least 0"),
    "starting_offsets_by_timestamp_strategy": ("latest", "latest", "earliest", "one of error, latest"),
    "ending_offsets": ("Latest", "latest", "earliest", "latest, or JSON"),
    "ending_timestamp": ("1000", 1000, "later", "ISO-8601"),
    "ending_offsets_by_timestamp": (BY_QUEUE, {QUEUE: 17}, "{}", "at least one queue"),
    "fail_on_data_loss": ("false", "ignore", "maybe", "one of fail, warn, ignore"),
    "max_offsets_per_trigger": ("10", 10, "0", "at least 1"),
    "min_offsets_per_trigger": ("10", 10, "0", "at least 1"),
    "max_trigger_delay": ("1m", 60.0, "0", "above zero"),
    "max_bytes_per_trigger": ("1m", 1 << 20, "0", "a size"),
    "allocation_strategy": ("consistenthash", "consistentHash", "fairly", "or module:callable"),
    "allocation_config": ('{"broker-a":[0]}', '{"broker-a":[0]}', "", "not empty"),
    "machine_rooms": ("r1,r2", ("r1", "r2"), "", "at least one name"),
    "partition_rooms": ("r1,r2,r1", ("r1", "r2", "r1"), "r1,,r2", "names separated by commas"),
    "num_partitions": ("4", 4, "10001", "auto, or a whole number from 1 to 10000"),
    "min_partitions": ("4", 4, "0", "at least 1"),
    "max_records_per_partition": ("1000", 1000, "0", "at least 1"),
    "predicate_pushdown": ("true", True, "yes", "true or false"),
    "columns": ("body, tags", ("body", "tags"), "[1", "JSON array"),
    "include_properties": ("ALL", "all", "some", "one of none, user, all"),
    "property_columns": ("n:bigint, s", (("n", "bigint"), ("s", "string")), "n:number", "amount:bigint"),
    "kafka_columns": ("true", True, "yes", "true or false"),
    "empty_bodies": ("Mark", "mark", "keep", "one of refuse, mark"),
    "include_headers": ("true", True, "yes", "true or false"),
    "metadata": ("full", "full", "more", "one of basic, full"),
    "topic_wait": ("1m", 60.0, "-1s", "a duration"),
    "read_from": ("slave", "slave", "both", "one of master, hint, slave"),
    "environment": ("test", "test", "", "not empty"),
    "environments": ("3", "3", "", "not empty"),
    "environment_mode": ("Suffix", "suffix", "prefix", "one of queues, suffix"),
    "group": ("g", "g", " ", "not empty"),
    "max_bytes_in_flight": ("64k", 64 << 10, "257m", "from 65536 to 268435456 bytes"),
    "bad_message": ("NULL", "null", "drop", "one of fail, null, skip"),
    "pull_depth": ("1024", 1024, "1025", "from 1 to 1024"),
    "pull_batch_size": ("1", 1, "100001", "from 1 to 100000"),
    "read_deadline": ("10s", 10.0, "0", "above zero"),
    "topic": ("out", "out", "", "not empty"),
    "topic_names": ("dotstounderscores", "dotsToUnderscores", "dots", "one of exact, dotsToUnderscores"),
    "queue_selector": ("roundrobin", "roundRobin", "best", "or module:callable"),
    "message_id": ("id", "id", "", "not empty"),
    "max_in_flight": ("8", 8, "0", "from 1 to 1024"),
    "send_timeout": ("10s", 10.0, "0", "above zero"),
    "max_message_size": ("1m", 1 << 20, "0", "a size"),
    "send_latency_fault": ("4.x", "4.x", "5.x", "true, false, current or 4.x"),
    "latency_max": ("50ms,1s", (50, 1000), "50ms,soon", "a duration"),
    "not_available_duration": ("0,30s", (0, 30000), "never", "a duration"),
    "auto_batch": ("true", True, "on", "true or false"),
    "batch_max_bytes": ("64k", 64 << 10, "0", "a size"),
    "batch_max_delay": ("20", 0.02, "0", "above zero"),
    "batch_by_tag": ("TRUE", "true", "yes", "one of auto, true, false"),
    "total_batch_max_bytes": ("1m", 1 << 20, "-1", "a size"),
    "compress_above": ("0", 0, "4t", "a size"),
    "long_delay": ("DMQ", "dmq", "later", "one of error, dmq"),
    "delivery_guarantee": ("Exactly-Once", "exactly-once", "at-most-once", "one of at-least-once, exactly-once"),
    "allowed_topics": ("orders, bills", ("orders", "bills"), ",", "at least one name"),
    "exactly_once_settle": ("20s", 20.0, "0", "above zero"),
    "confirm_ambiguous": ("true", True, "perhaps", "true or false"),
    "enable_trace": ("true", True, "perhaps", "true or false"),
    "trace_topic": ("traces", "traces", None, None),
    "open_telemetry": ("true", True, "perhaps", "true or false"),
    "on_send_failure": ("SPOOL", "spool", "drop", "one of fail, spool"),
    "spool_dir": ("/var/spool/orders", "/var/spool/orders", "", "not empty"),
    "spool_sync": ("Batch", "batch", "sometimes", "one of always, batch, never"),
    "spool_max_bytes": ("5m", 5 << 20, "0", "a size"),
    "compression": ("ZSTD", "zstd", "gzip", "one of none, zlib, lz4, zstd"),
    "consume_from_where": ("1970-01-01T00:00:01Z", 1000, "middle", "latest, earliest, or epoch"),
    "auto_commit": ("false", False, "never", "true or false"),
    "auto_commit_interval": ("1s", 1.0, "0", "above zero"),
    "pull_threshold_for_queue": ("1", 1, "65536", "from 1 to 65535"),
    "model": ("Broadcasting", "broadcasting", "both", "one of clustering, broadcasting"),
    "ordered": ("true", True, "yes", "true or false"),
    "arrow": ("true", True, "yes", "true or false"),
    "consume_thread_min": ("1000", 1000, "1001", "from 1 to 1000"),
    "consume_message_batch_max_size": ("1024", 1024, "0", "from 1 to 1024"),
    "pull_batch_size_in_bytes": ("1m", 1 << 20, "0", "a size"),
    "pull_interval": ("1s", 1.0, "-1s", "a duration"),
    "pull_time_delay_when_exception": ("3s", 3.0, "0", "above zero"),
    "pull_threshold_size_for_queue": ("1g", 1 << 30, "0", "a size"),
    "pull_threshold_for_topic": ("1", 1, "0", "from 1 to 6553500"),
    "pull_threshold_size_for_topic": ("1m", 1 << 20, "0", "a size"),
    "consume_concurrently_max_span": ("65535", 65535, "65536", "from 1 to 65535"),
    "max_reconsume_times": ("0", 0, "-2", "from 0 to"),
    "suspend_current_queue_time": ("10s", 10.0, "0", "above zero"),
    "consume_timeout": ("1m", 60.0, "0", "above zero"),
    "persist_consumer_offset_interval": ("1s", 1.0, "0", "above zero"),
    "rebalance_interval": ("1s", 1.0, "0", "above zero"),
    "post_subscription_when_pull": ("true", True, "1", "true or false"),
    "answer_stacks": ("false", False, "no", "true or false"),
    "answer_direct_messages": ("false", False, "no", "true or false"),
    "local_offsets_dir": ("/tmp/o", "/tmp/o", "", "not empty"),
    "require_store_ok": ("ok", "ok", "all", "one of any, ok"),
}
SERVER = {"nameServer": "a:9876"}


def refusal(**given_options: object) -> str:
    with pytest.raises(OptionError) as caught:
        options.parse(given_options)
    return caught.value.message


def needed_by(field: str) -> list[str]:
    """The fields that ``field`` says nothing without, one leading to the next."""
    found = [field]
    while field in REQUIRED_OPTIONS and REQUIRED_OPTIONS[field][1] not in found:
        found.append(field := REQUIRED_OPTIONS[field][1])
    return found[1:]


def test_every_row_has_a_sample():
    assert {row.field for row in TABLE} == SAMPLES.keys()


class TestRow:
    @in_one_test("row", TABLE)
    def test_a_good_value_in_every_spelling(self, row):
        text, value, _, _ = SAMPLES[row.field]
        for name in (row.name, row.name.lower(), row.name.upper(), row.field, *row.aliases):
            parsed = options.parse({name: text})
            assert getattr(parsed, row.field) == value
            assert parsed.given_fields == {row.field}

    @in_one_test("row", TABLE)
    def test_a_bad_value_is_shown_with_name_and_expectation(self, row):
        _, _, bad, expected = SAMPLES[row.field]
        if bad is None:
            return
        message = refusal(**{row.name: bad})
        assert message.startswith(f"option {row.name!r} is {bad!r}; expected ")
        assert expected in message

    @in_one_test("row", TABLE)
    def test_a_misspelt_name_leads_to_it(self, row):
        misspelt = row.name[:-1] + "xx" if len(row.name) > 6 else row.name + "x"
        assert refusal(**{misspelt: "1"}).startswith(f"option {misspelt!r} is unknown; did you mean ")

    @in_one_test("row", TABLE)
    def test_it_is_refused_where_it_does_not_belong(self, row):
        through = {"transport": "grpc", "proxyEndpoint": "p:8081"} if row.field in OF_GRPC else {}
        needed = {field: SAMPLES[field][0] for field in needed_by(row.field)}
        if row.field == "tls_check_hostname":  # false is only for an authority of one's own
            needed["tls_ca_file"] = "ca.pem"
        parsed = options.parse({**SERVER, **through, **needed, row.name: SAMPLES[row.field][0]})
        for role in (
            ROLES if row.field not in OF_GRPC else ("sink", "producer", "simple consumer")
        ):  # tests/test_transport.py
            if role in row.roles:
                assert getattr(parsed.for_role(role), row.field) == SAMPLES[row.field][1]
            else:
                with pytest.raises(OptionError, match=f"option '{row.name}' does not belong to a {role}; it is for: "):
                    parsed.for_role(role)


@pytest.mark.parametrize("role", ROLES)
def test_shown_defaults_of_each_role_parse_to_actual_defaults(role):
    """A default is a value of the kind that the row's parser gives: shown defaults are read back."""
    plain = options.parse(SERVER).for_role(role)
    for row in TABLE:
        shown = row.default_text.strip("`")
        if role in row.roles and not {" ", "–"} & set(shown) and shown not in ("required", "adaptive"):
            default = getattr(plain, row.field)
            assert default is None or default == row.parse(shown), row.name


def test_defaults_differ_by_role():
    parsed = options.parse(SERVER)
    assert parsed.for_role("batch source").starting_offsets == "earliest"
    assert parsed.for_role("stream source").starting_offsets == "latest"
    assert parsed.for_role("sink").send_timeout == 120.0
    assert parsed.for_role("producer").send_timeout == 3.0


def test_what_a_user_gave_beats_the_defaults_of_a_role():
    parsed = options.parse({**SERVER, "startingOffsets": "earliest"})
    assert parsed.for_role("stream source").starting_offsets == "earliest"


def test_all_problems_come_in_one_error():
    message = refusal(nameServer="nowhere", tls="perhaps", subscrib="t")
    assert message.count("\n  - ") == 3
    for part in ("'nameServer' is 'nowhere'", "'tls' is 'perhaps'", "did you mean 'subscribe'?"):
        assert part in message


def test_all_wrong_places_come_in_one_error():
    with pytest.raises(OptionError) as caught:
        options.parse({"topic": "t", "autoBatch": "true"}).for_role("stream source")
    for name in ("'nameServer' is required", "'topic' does not belong", "'autoBatch' does not belong"):
        assert name in caught.value.message


def test_unlike_names_get_no_guess():
    for name in ("zzzzzz", "machine_time", "limit_rooms"):
        assert refusal(**{name: "1"}) == f"option {name!r} is unknown; docs/options.md lists all options"


def test_a_name_and_its_alias_are_one_option():
    assert refusal(nameServer="a:1", namesrvAddr="b:1") == "option 'nameServer' is given twice"


def test_what_spark_passes_is_tolerated():
    assert options.parse({"checkpointLocation": "c", "QueryName": "q", **SERVER}).given_fields == {"name_server"}


def test_none_is_not_given():
    assert options.parse({"subscribe": None, **SERVER}).given_fields == {"name_server"}


def test_python_values_take_the_same_road():
    parsed = options.parse({"subscribe": ["a", "b"], "tls": True, "num_retries": 5, "address_map": {"a:1": "b:1"}})
    assert (parsed.subscribe, parsed.tls, parsed.num_retries) == (("a", "b"), True, 5)
    assert parsed.address_map == {"a:1": "b:1"}


def test_secrets_do_not_show():
    secrets = {"secretKey": "hush-1", "securityToken": "hush-2", "tlsKeyPassword": "hush-3"}
    parsed = options.parse({**SERVER, **secrets})
    for shown in (repr(parsed), str(parsed), f"{parsed}", f"{parsed.secret_key} {parsed.secret_key!r}"):
        assert "hush" not in shown
        assert "***" in shown
    assert "hush" not in refusal(**secrets, tls="what", secretKy="hush-4")
    with pytest.raises(OptionError) as caught:
        parsed.for_role("sink").for_role("no such role")
    assert "hush" not in str(caught.value)
    assert parsed.secret_key is not None
    assert parsed.secret_key.reveal() == "hush-1"


def test_options_travel_between_processes():
    keys = {"accessKey": "me", "secretKey": "hush"}
    parsed = options.parse({**SERVER, **keys, "startingOffsets": BY_QUEUE}).for_role("stream source")
    for twin in (pickle.loads(pickle.dumps(parsed)), copy.deepcopy(parsed)):
        assert twin == parsed
        assert twin.secret_key.reveal() == "hush"
        assert repr(twin.secret_key) == "'***'"


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.parse(SERVER).tls = True


def test_names_are_unique():
    names = [name.lower() for row in TABLE for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    assert not set(names) & options.TOLERATED_OPTIONS


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_the_instance_of_a_hosted_cluster_is_the_namespace(scheme):
    """As in Java: ClientConfig.getNamespace and getNamesrvAddr."""
    server = f"{scheme}MQ_INST_1_a.host:80"
    found = options.parse({"nameServer": server})
    assert (found.name_server, found.namespace) == (("MQ_INST_1_a.host:80",), "MQ_INST_1_a")
    assert (
        scope_of(found).name_on_wire("orders")
        == scope_of(found).name_on_wire("MQ_INST_1_a%orders")
        == "MQ_INST_1_a%orders"
    )
    assert options.parse({"nameServer": server, "namespace": "mine"}).namespace == "mine"
    assert options.parse({"nameServer": server, "namespace": ""}).namespace is None
    assert options.parse({"nameServer": f"{scheme}host:80"}).namespace is None
    for role in ROLES:
        if role != "simple consumer":
            assert options.parse({"nameServer": server}).for_role(role).namespace == "MQ_INST_1_a"


def test_wrong_addresses_are_errors_of_their_option():
    for name in ("nameServer", "namesrvAddr", "proxyEndpoint"):
        with pytest.raises(OptionError, match=f"option '{name.replace('namesrvAddr', 'nameServer')}' is 'tcp://a:1'"):
            options.parse({name: "tcp://a:1"})
    with pytest.raises(OptionError, match=r"option 'addressMap' is .*has a scheme"):
        options.parse({"addressMap": {"a:1": "http://b:1"}})
    assert options.parse({"transport": "grpc", "proxyEndpoint": "http://a:8081"}).proxy_endpoint == ("a:8081",)


def test_the_public_name_of_a_field():
    assert options.option_name("name_server") == "nameServer"


@given(st.dictionaries(st.sampled_from([row.name for row in TABLE]), st.text(max_size=20), max_size=5))
def test_any_text_is_a_value_or_one_option_error(texts):
    try:
        assert isinstance(options.parse(texts), Options)
    except OptionError as e:
        message = e.message
    else:
        return
    assert message.startswith(("option ", "\n  - option "))
    assert any(f"option '{name}'" in message for name in texts)


@pytest.mark.parametrize(
    ("given", "variables", "environment", "source"),
    [
        ({}, {"ROCKETMQ_ENVIRONMENT": "dev"}, "dev", "variable ROCKETMQ_ENVIRONMENT"),
        ({"environment": "2"}, {"ROCKETMQ_ENVIRONMENT": "dev"}, "2", "option 'environment'"),
        ({"environment": "2"}, {}, "2", "option 'environment'"),
    ],
)
def test_environment_option_beats_variable_and_source_is_logged(caplog, given, variables, environment, source):
    caplog.set_level("INFO")
    parsed = options.parse({**SERVER, **given}, variables)
    for role in ROLES:
        caplog.clear()
        assert parsed.for_role(role).environment == environment
        assert caplog.messages == [f"{role}: environment {environment!r} ({source}), environmentMode queues"]


@pytest.mark.parametrize("variables", [{}, {"ROCKETMQ_ENVIRONMENT": ""}])
def test_without_option_and_variable_there_is_no_environment(caplog, variables):
    caplog.set_level("INFO")
    parsed = options.parse(SERVER, variables).for_role("producer")
    assert (parsed.environment, parsed.fields_from_variables, caplog.messages) == (None, frozenset(), [])


def test_the_variable_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("ROCKETMQ_ENVIRONMENT", "3")
    assert options.parse(SERVER).environment == "3"


def test_a_bad_variable_is_named_beside_the_bad_options():
    with pytest.raises(OptionError) as caught:
        options.parse({"tls": "maybe"}, {"ROCKETMQ_ENVIRONMENT": " "})
    assert "option 'tls' is 'maybe'" in caught.value.message
    assert "variable ROCKETMQ_ENVIRONMENT is ' '; expected" in caught.value.message
