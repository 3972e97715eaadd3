import json
import re

import pytest

from tests.cli.conftest import documents, eventually


@pytest.fixture
def stored(run):
    """The messages of a topic, once there are so many."""

    def read(topic, count):
        return eventually(
            lambda: documents(run("tail", topic, "--no-follow", "--json").stdout), lambda found: len(found) >= count
        )

    return read


def test_lines_of_standard_input(run, topic, stored):
    done = run("produce", topic, input=b"one\r\n\ntwo  \n\xff\xfe\nlast without end")
    assert re.fullmatch(rf"Sent 4 messages to {topic} in \d+\.\d s\n", done.stdout)
    bodies = [message.get("body") or message["bodyBase64"] for message in stored(topic, 4)]
    assert sorted(bodies) == sorted(["one", "two  ", "//4=", "last without end"])


def test_a_file_with_tags_keys_and_properties(run, topic, tmp_path, stored):
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\nc\n")
    marks = ["--tags", "vip", "--key", "k1", "--key", "k2", "--property", "a=1=2", "--property", "b="]
    assert run("produce", topic, "--file", str(path), "--count", "2", *marks).exit_code == 0
    found = stored(topic, 2)
    assert sorted(message["body"] for message in found) == ["a", "b"]
    assert {(m["tags"], tuple(m["keys"]), m["properties"]["a"]) for m in found} == {("vip", ("k1", "k2"), "1=2")}


def test_json_names_every_message(run, topic, stored):
    sent = documents(run("produce", topic, "--json", input="a\nb\n").stdout)
    ids = {(m["msgId"], m["brokerName"], m["queueId"], m["queueOffset"]) for m in sent}
    assert ids == {(m["msgId"], m["brokerName"], m["queueId"], m["queueOffset"]) for m in stored(topic, 2)}


def test_orders_at_a_rate(run, topic, stored):
    assert run("produce", topic, "--rate", "500/s", "--count", "20", "--property", "x=y").exit_code == 0
    found = stored(topic, 20)
    assert len({json.loads(message["body"])["order_id"] for message in found}) == 20
    assert {message["properties"]["x"] for message in found} == {"y"}
    assert all(message["tags"] and message["keys"] for message in found)


def test_ctrl_c_ends_a_rate_and_says_how_much_was_sent(rocketmq, topic, start, stored):
    process = start("produce", topic, "--rate", "200/s", "--json", "--name-server", rocketmq.name_server)
    process.until("msgId")
    out, err = process.ctrl_c()
    assert (process.code, err) == (130, "")
    sent = 1 + len(documents(out))
    assert len(stored(topic, sent)) == sent


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--rate", "fast"], "is not a rate"),
        (["--rate", "1", "--file", "/dev/null"], "leave --file out"),
        (["--property", "x"], "NAME=VALUE"),
        (["--file", "/no/such/file"], "No such file"),
        (["--count", "0"], "0 is not in the range"),
    ],
)
def test_wrong_usage(run, topic, arguments, problem):
    done = run("produce", topic, *arguments)
    assert done.exit_code == 2
    assert problem in done.stderr


def test_a_misspelt_topic_is_told_before_anything_is_read(run, topic):
    done = run("produce", topic + "x", input="line\n")
    assert done.exit_code == 1
    assert f"Did you mean {topic}" in done.stderr


def test_what_a_broker_would_refuse_is_said_with_what_was_sent(run, topic):
    done = run("produce", topic, "--property", "KEYS=x", input="a\n")
    assert done.exit_code == 1
    assert re.search(r"Sent 0 messages.*\nError: \[ROCKETMQ_MESSAGE_REFUSED\]", done.stderr)
