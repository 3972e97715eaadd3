"""Texts of other clients and servers, where they are shown or passed on."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import click
import pytest

from rocketmq_spark import options
from rocketmq_spark.base import arguments
from rocketmq_spark.base.arguments import similar_names
from rocketmq_spark.base.codes import INNER_BATCH_MASK, MAX_PROPERTIES_BYTES, Property
from rocketmq_spark.base.logs import escaped
from rocketmq_spark.base.threads import start_thread
from rocketmq_spark.base.tls_files import check_authorities
from rocketmq_spark.cli import group as group_commands
from rocketmq_spark.cli import kafka_lines
from rocketmq_spark.cli.output import Text
from rocketmq_spark.client.send_back import retry_copy
from rocketmq_spark.consumer.offsets import cluster_folder
from rocketmq_spark.errors import LocalProtocolError
from rocketmq_spark.model import Message, ReceivedMessage
from rocketmq_spark.options.parsing import instance_of
from rocketmq_spark.spark.monitoring.explain import explain
from rocketmq_spark.wire import bodies, traces
from rocketmq_spark.wire.messages import BatchItem, decode_messages, encode_batch
from rocketmq_spark.wire.names import legal_name, read_problem
from rocketmq_spark.wire.properties import decode_properties, encode_properties, message_properties
from tests.harness import peak_bytes, store


def test_a_note_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Text().note("7F00\n3 sent\n\x1b]0;owned\x07")
    assert capsys.readouterr().err == "7F00\\n3 sent\\n\\x1b]0;owned\\x07\n"


def test_what_a_broker_says_of_a_group_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    there = SimpleNamespace(
        group="g", members=[SimpleNamespace(client_id="c", address="a", language="J", version="V", subscriptions={})],
        consume_type="X\x1b]0;owned\x07\nG", message_model="M", queues=[], lag=None,
    )  # fmt: skip
    for name in ("_member_rows", "_subscription_rows", "_queue_rows"):
        assert hasattr(group_commands, name)
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_member_rows", "_subscription_rows", "_queue_rows"):
            patched.setattr(group_commands, name, lambda there: [])
        patched.setattr(Text, "rows", lambda *given: click.echo("rows"))
        group_commands._print_description(Text(), there)  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[0] == "Group g: 1 members, X\\x1b]0;owned\\x07\\nG, M"


def test_the_name_of_a_thread_has_no_line_breaks() -> None:
    names: list[str] = []
    start_thread("rocketmq-aside-b\nforged", lambda: names.append(threading.current_thread().name)).join(30)
    assert names == ["rocketmq-aside-b\\nforged"]


def test_the_error_of_a_setting_does_not_have_its_value() -> None:
    with pytest.raises(LocalProtocolError, match="aclSecret") as caught:
        bodies.write_config({"aclSecret": "s3cr3t\n"})
    assert "s3cr3t" not in str(caught.value)


def test_an_expression_is_left_to_re2_where_code_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = "(?i)" + "".join(f"[{chr(i)}-\U0010ffff]" for i in range(1, 800) if chr(i) not in "[]\\^-")
    monkeypatch.setenv("ROCKETMQ_SPARK_ALLOW_CALLABLES", "0")
    begun = time.process_time()
    options.parse({"nameServer": "127.0.0.1:1", "subscribePattern": pattern})
    assert time.process_time() - begun < 1


def test_an_id_of_another_client_does_not_spoil_other_traces() -> None:
    hostile = traces.TracedMessage.from_properties(
        "orders", decode_properties("UNIQ_KEY\x01A\x01B\x02KEYS\x01k\x01l\x02")
    )
    usual = traces.TracedMessage.from_properties("orders", {"UNIQ_KEY": "id"})
    ((body, keys, count),) = traces.trace_messages(
        [traces.consume_start_record(one, "g", "r", 1, 0) for one in (usual, hostile)]
    )
    assert (count, keys) == (2, ("id", "A?B", "k?l"))
    assert body.count("\x02") == 2
    assert encode_properties(message_properties(Message("RMQ_SYS_TRACE_TOPIC", body.encode(), keys=list(keys))))


def test_budget_compares_names_with_same_first_letter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_MAX_PAIRS", 120)
    assert set(similar_names("orders", ["ordres", "xrders", "z"], 3, 0.5)) == {"ordres", "xrders"}
    monkeypatch.setattr(arguments, "_MAX_PAIRS", 60)
    assert similar_names("orders", ["xrders", "a", "b", "c", "ordres"], 3, 0.5) == ["ordres"]
    assert similar_names("orders", [*(f"o{n}" for n in range(3)), "ordres"], 3, 0.5) == []


def item(text: str) -> ReceivedMessage:
    (found,) = decode_messages(
        store("t", encode_batch([BatchItem(b"x", text, 0)]), sys_flag=int(INNER_BATCH_MASK)), "b"
    )
    return found


def test_batch_message_with_any_properties_can_be_retry_copied(caplog: pytest.LogCaptureFixture) -> None:
    found = decode_properties(retry_copy("g", item("a\x01b\x01c\x02"), 3, str, 0).properties)
    assert found["a"] == "b?c"
    long = "".join(f"n{n}\x01{'v' * 100}\x02" for n in range(310)) + "TAGS\x01t\x02"
    request = retry_copy("g", item(long), 3, str, 0)
    assert len(request.properties.encode()) < MAX_PROPERTIES_BYTES
    assert decode_properties(request.properties)[Property.TAGS] == "t"
    assert "has only RocketMQ's own" in caplog.text


def test_a_body_of_control_characters_is_escaped_in_pieces() -> None:
    text = "\0" * (1 << 20)
    assert peak_bytes(lambda: escaped(text)) < 15 * len(text)
    assert escaped(text) == "\\x00" * len(text)


_BEGIN, _END = b"-----BEGIN CERTIFICATE-----\n", b"-----END CERTIFICATE-----\n"


@pytest.mark.parametrize(
    "looked_at",
    [
        lambda: check_authorities(_BEGIN * 150_000),
        lambda: instance_of(("MQ_INST_" + "_" * 400_000,)),
        lambda: legal_name("a" + "!" * 400_000 + "a"),
        lambda: read_problem("!" * 400_000 + "a"),
        lambda: cluster_folder(f"host-{i}:9876" for i in range(100_000)),
        lambda: similar_names("a" * 100_000, ["b" * 100_000, "ab" * 50_000], 3, 0.5),
        lambda: similar_names("a" * 100, ["ab" * 10_000_000], 3, 0.1),
        lambda: kafka_lines.port_report("a.py", repr("create " * 100_000)),
        lambda: kafka_lines.port_report("a.sql", "startingoffsets [" * 50_000),
        lambda: kafka_lines.port_report("a.sql", "topic " + " " * 100_000),
        lambda: kafka_lines.port_report("a.scala", ".format(x" * 30_000),
        lambda: kafka_lines.port_report(
            "a.py", 'spark.read.format("kafka").load().where("' + "topic " * 30_000 + "'" + '")'
        ),
        lambda: kafka_lines.port_report(
            "a.py",
            "a = 'x.' * 9\n"
            + "a = a + a\n" * 9
            + "".join(f"a{i + 1} = a{i} + a{i}\nl{i + 1} = [l{i}, l{i}]\nm{i + 1} = m{i} + m{i}\n" for i in range(60))
            + "a0 = 'x'\nl0 = m0 = ['x']\nspark.read.format(a60).option('subscribe', json.dumps(l60) + ','.join(m60)).load()",
        ),
        lambda: kafka_lines._parse_cell("\n" * 100_000 + "1"),
        lambda: explain(RuntimeError("[UNSUPPORTED_DATA_SOURCE_SAVE_MODE]" * 50_000)),
        lambda: explain(RuntimeError("[UNRESOLVED_COLUMN with name `a`." * 50_000)),
        lambda: explain(RuntimeError("[UNRESOLVED_COLUMN " * 30_000 + " with name `" * 30_000)),
    ],
)
def test_long_texts_of_others_take_linear_time(looked_at: Callable[[], object]) -> None:
    """Quadratic time would be minutes, in which no other thread of the process runs."""
    begun = time.process_time()
    looked_at()
    assert time.process_time() - begun < 5.0


def test_a_certificate_with_bytes_that_are_no_text_is_damaged() -> None:
    with pytest.raises(ssl.SSLError):
        check_authorities(_BEGIN + b"\xff\n" + _END)
