import base64
import json
import re
from dataclasses import replace

import pytest
from click.testing import CliRunner

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli import topic_reader
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.tail import message_document, message_line
from rocketmq_spark.model import MessageQueue, OffsetRange, ReceivedMessage, SendRequest
from rocketmq_spark.options import parse
from rocketmq_spark.pull.outcomes import Cause
from tests.cli.conftest import documents
from tests.helpers import awaited

MESSAGE = ReceivedMessage(
    topic="t", queue=MessageQueue("t", "broker-a", 1), queue_offset=7, commit_log_offset=0, body=b"a\nb",
    properties={"TAGS": "x", "KEYS": "k1 k2", "UNIQ_KEY": "ID", "WAIT": "true", "mine": "1"}, flag=0, sys_flag=0,
    born_timestamp=1_000, store_timestamp=2_500, born_host="h:1", store_host="h:2", reconsume_times=0,
    prepared_transaction_offset=0, store_size=100, offset_msg_id="OFF",
)  # fmt: skip


@pytest.mark.parametrize("command", [("tail", "t", "--no-follow"), ("dlq", "show", "g")])
@pytest.mark.parametrize(("form", "told"), [((), "{}\n"), (("--json",), '{{"warning": "{}"}}\n')])
def test_messages_that_are_gone_are_told_in_each_form(monkeypatch, command, form, told):
    class Reader:
        def __init__(self, options, topic, on_loss, tags=None):
            self.on_loss = on_loss

        def seek(self, start):
            pass

        def messages(self, follow=False):
            self.on_loss(OffsetRange(MESSAGE.queue, 3, 8), Cause.TRUNCATED)
            return iter(())

    monkeypatch.setattr(topic_reader, "TopicReader", Reader)
    done = CliRunner().invoke(app, [*command, *form, "--name-server", "127.0.0.1:1"])
    gone = f"5 messages of t/broker-a/1 from offset 3 are gone: {Cause.TRUNCATED.value}"
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr.startswith(told.format(gone))


@pytest.fixture
def filled(run, topic):
    """A topic with the messages 0 to 9, one after the other in one queue after the other."""
    for tags, numbers in (("even", range(0, 10, 2)), ("odd", range(1, 10, 2))):
        run("produce", topic, "--tags", tags, input="".join(f"{i}\n" for i in numbers))
    awaited(lambda: len(bodies(run("tail", topic, "--no-follow"))), lambda count: count == 10)
    return topic


def bodies(done):
    assert done.exit_code == 0, done.output
    return [text.split()[-1] for text in done.stdout.splitlines()]


def test_a_line():
    expected = "1970-01-01T00:00:02.500Z  broker-a/1@7  tags=x keys=k1,k2 mine=1  a\\nb"
    assert message_line(MESSAGE) == expected


def test_a_line_stays_one_whatever_a_message_holds():
    foreign = replace(
        MESSAGE,
        body=b"\x1b[2Ja\n1970-01-01 forged",
        properties={"TAGS": "x\ny", "KEYS": "k\r\n", "mine\n": "\x1b]52;c;aGk=\x07"},
    )
    shown = message_line(foreign)
    assert shown.isprintable()
    assert "\\x1b[2Ja\\n1970-01-01 forged" in shown


@pytest.mark.parametrize("never", [2**63 - 1, -(2**63), 253_402_300_800_000])
def test_a_time_that_no_calendar_has_is_shown_as_its_number(never):
    message = replace(MESSAGE, store_timestamp=never, born_timestamp=never)
    assert message_line(message).startswith(f"@{never}  broker-a/1@7")
    assert (message_document(message)["storeTimestamp"], message_document(message)["bornTimestamp"]) == (
        f"@{never}",
        f"@{never}",
    )


def test_a_document_has_the_names_of_the_columns():
    assert message_document(MESSAGE) == {
        "topic": "t", "brokerName": "broker-a", "queueId": 1, "queueOffset": 7, "body": "a\nb", "tags": "x",
        "keys": ["k1", "k2"], "bornTimestamp": "1970-01-01T00:00:01.000Z",
        "storeTimestamp": "1970-01-01T00:00:02.500Z", "msgId": "ID", "properties": {"mine": "1"},
    }  # fmt: skip


def test_an_undecodable_message_is_shown_raw_with_its_flags():
    bad = replace(MESSAGE, body=b"\x00no zlib", sys_flag=0x101, decode_error="Not a lz4 body")
    assert message_line(bad).endswith("sysFlag=0x101  <cannot be decoded: Not a lz4 body> b'\\x00no zlib'")
    shown = message_document(bad)
    assert (shown["bodyBase64"], shown["sysFlag"], shown["decodeError"]) == ("AG5vIHpsaWI=", 0x101, "Not a lz4 body")
    assert "body" not in shown


def test_a_poisoned_topic_is_shown_as_a_whole(rocketmq, run, topic):
    sender = session.client(parse({"nameServer": rocketmq.name_server})).sender
    queue = sender.publish_queues(topic, Deadline.after(10))[0]
    for body, flag in ((b"before", 0), (b"poison", 1), (b"behind", 0)):
        sender.send(queue, SendRequest("g", body, sys_flag=flag), Deadline.after(10))
    shown = awaited(
        lambda: documents(run("tail", topic, "--no-follow", "--json").stdout), lambda found: len(found) == 3
    )
    assert [one.get("body") for one in shown] == ["before", None, "behind"]
    assert (base64.b64decode(shown[1]["bodyBase64"]), shown[1]["sysFlag"]) == (b"poison", 1)
    assert "zlib" in shown[1]["decodeError"]


def test_from_and_count(run, filled):
    assert sorted(bodies(run("tail", filled, "--no-follow"))) == [str(i) for i in range(10)]
    assert len(bodies(run("tail", filled, "--from", "earliest", "--count", "3"))) == 3
    assert bodies(run("tail", filled, "--from", "latest", "--no-follow")) == []
    offsets = [m["queueOffset"] for m in documents(run("tail", filled, "--no-follow", "--json").stdout)]
    assert len(bodies(run("tail", filled, "--from", "1", "--no-follow"))) == sum(offset >= 1 for offset in offsets) > 0
    assert bodies(run("tail", filled, "--from", "2100-01-01", "--no-follow")) == []
    assert len(bodies(run("tail", filled, "--from", "@0", "--no-follow"))) == 10
    assert len(bodies(run("tail", filled, "--from", "2020-01-01T00:00:00+01:00", "--no-follow"))) == 10


def test_offsets_by_queue_show_these_queues_only(run, filled):
    stored = documents(run("tail", filled, "--no-follow", "--json").stdout)
    last = max(stored, key=lambda message: message["queueOffset"])
    queue, offset = last["queueId"], last["queueOffset"]

    def by_queue(at):
        return json.dumps({filled: {"broker-a": {str(queue): at}}})

    done = run("tail", filled, "--from", by_queue(offset), "--to", by_queue(offset + 1), "--json")
    assert [message["body"] for message in documents(done.stdout)] == [last["body"]]
    assert bodies(run("tail", filled, "--from", by_queue(offset), "--to", by_queue(offset))) == []
    found = documents(run("tail", filled, "--from", by_queue(-2), "--no-follow", "--json").stdout)
    assert [message["queueOffset"] for message in found] == list(range(offset + 1))
    behind = run("tail", filled, "--from", by_queue(offset + 2), "--to", by_queue(offset + 3))
    assert (behind.exit_code, f"ends at {offset + 1}, before {offset + 2}" in behind.stderr) == (1, True)
    other = run("tail", filled, "--from", '{"others":{"broker-a":{"0":0}}}', "--no-follow")
    assert (other.exit_code, f"{filled} has no such queues" in other.stderr) == (1, True)


def test_tags(run, filled):
    assert sorted(bodies(run("tail", filled, "--tags", "odd", "--no-follow"))) == ["1", "3", "5", "7", "9"]


def test_json(run, filled):
    found = documents(run("tail", filled, "--no-follow", "--json").stdout)
    assert sorted(message["body"] for message in found) == [str(i) for i in range(10)]
    assert all(re.fullmatch(r"[0-9A-F]{32}", message["msgId"]) for message in found)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--from", "yesterday"],
        ["--from", "²"],
        ["--from", "@x"],
        ["--from", "@" + "9" * 19],
        ["--from", "9" * 400 + "h"],
        ["--tags", "||"],
        ["--count", "x"],
        ["--from", '{"t":1}'],
        ["--to", "9"],
        ["--from", "0", "--to", '{"t":{"b":{"0":1}}}'],
        ["--from", '{"t":{"b":{"0":1}}}', "--to", '{"t":{"b":{"1":1}}}'],
    ],
)
def test_wrong_usage(run, topic, arguments):
    assert run("tail", topic, *arguments).exit_code == 2


def test_a_misspelt_topic(run, topic):
    done = run("tail", topic + "x", "--no-follow")
    assert (done.exit_code, f"Did you mean {topic}" in done.stderr) == (1, True)


def test_an_empty_topic_is_told(run, topic):
    """It printed nothing, as if nothing had been looked at."""
    done = run("tail", topic, "--no-follow")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", f"{topic} has no messages\n")
    for narrower, where in ((("--tags", "even"), "with these tags"), (("--from", "latest"), "from that position on")):
        assert run("tail", topic, "--no-follow", *narrower).stderr == f"{topic} has no messages {where}\n"
    assert run("tail", topic, "--no-follow", "--json").output == ""


def test_it_follows_until_ctrl_c(rocketmq, run, filled, start):
    process = start("tail", filled, "--from", "earliest", "--json", "--name-server", rocketmq.name_server)
    for _ in range(10):
        json.loads(process.child.stdout.readline())
    run("produce", filled, input="new\n")
    process.until('"body": "new"')
    out, err = process.ctrl_c()
    assert (out, "Traceback" in err) == ("", False)
    assert process.code == 130
