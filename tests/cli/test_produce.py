import json
import re
import threading
from concurrent.futures import Future

import pytest

from rocketmq_spark.cli import produce as producing
from rocketmq_spark.cli.output import Json, Text
from rocketmq_spark.cli.produce import SendReport, _orders, _send_all
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.model import Message, MessageQueue, SendResult, SendStatus
from tests.cli.conftest import documents
from tests.helpers import awaited


@pytest.fixture
def stored(run):
    """The messages of a topic, once there are so many."""

    def read(topic, count):
        return awaited(
            lambda: documents(run("tail", topic, "--no-follow", "--json").stdout), lambda found: len(found) >= count
        )

    return read


def test_lines_of_standard_input(run, topic, stored):
    done = run("produce", topic, input=b"one\r\n\ntwo  \n\xff\xfe\nlast without end")
    assert re.fullmatch(rf"Sent 4 messages to {topic} in \d+\.\d s\n", done.stdout)
    bodies = [message.get("body") or message["bodyBase64"] for message in stored(topic, 4)]
    assert sorted(bodies) == sorted(["one", "two  ", "//4=", "last without end"])


def test_no_lines_are_not_a_success_without_a_word(run, topic):
    """``--count`` alone, where standard input is empty, as under cron: somebody may have expected orders."""
    done = run("produce", topic, "--count", "2000", input=b"")
    assert done.stdout.startswith("Sent 0 messages")
    assert "To send generated orders: --rate 100/s" in done.stderr


def test_a_file_with_tags_keys_and_properties(run, topic, tmp_path, stored):
    path = tmp_path / "lines.txt"
    path.write_text("a\nb\nc\n")
    marks = ["--tags", "vip", "--key", "k1", "--key", "k2", "--property", "a=1=2", "--property", "b=2"]
    assert run("produce", topic, "--file", str(path), "--count", "2", *marks).exit_code == 0
    found = stored(topic, 2)
    assert sorted(message["body"] for message in found) == ["a", "b"]
    assert [(m["tags"], m["keys"]) for m in found] == [("vip", ["k1", "k2"])] * 2
    assert [(m["properties"]["a"], m["properties"]["b"]) for m in found] == [("1=2", "2")] * 2


def test_json_names_every_message(run, topic, stored):
    sent = documents(run("produce", topic, "--json", input="a\nb\n").stdout)
    places = ("msgId", "brokerName", "queueId", "queueOffset")
    assert len(sent) == 2
    assert sorted([m[name] for name in places] for m in sent) == sorted(
        [m[name] for name in places] for m in stored(topic, 2)
    )


def test_orders_at_a_rate(run, topic, stored, monkeypatch):
    asked, due_counts = [], producing.due_counts
    monkeypatch.setattr(producing, "due_counts", lambda *given: asked.append(given[:2]) or due_counts(*given))
    assert run("produce", topic, "--rate", "500/s", "--count", "20", "--property", "x=y").exit_code == 0
    assert asked == [(500.0, 20)]
    found = stored(topic, 20)
    assert len(found) == len({json.loads(message["body"])["order_id"] for message in found}) == 20
    assert {message["properties"]["x"] for message in found} == {"y"}
    assert all(message["tags"] and message["keys"] for message in found)
    assert run("produce", topic, "--rate", "500/s", "--count", "1", "--tags", "vip", "--key", "k").exit_code == 0
    assert [m["keys"] for m in stored(topic, 21) if m["tags"] == "vip"] == [["k"]]


def test_a_stop_takes_effect_if_the_rate_is_too_high(monkeypatch):
    """What is due grows meanwhile: the next lot may take minutes, the one after it hours."""
    stop = threading.Event()
    monkeypatch.setattr(producing, "due_counts", lambda *asked: iter([1_000]))
    orders = _orders("t", 1e6, None, stop)
    next(orders)
    stop.set()
    assert list(orders) == []


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
        (["--rate", "1", "--file", "/dev/null"], "omit --file"),
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


@pytest.mark.parametrize(("given", "named"), [("KEYS=x", "KEYS"), ("b=", "Property 'b' is empty")])
def test_what_a_broker_would_refuse_is_said_with_what_was_sent(run, topic, given, named):
    done = run("produce", topic, "--property", given, input="a\n")
    assert done.exit_code == 1
    assert "Message 1 failed" in done.stderr
    assert re.search(rf"Sent 0 messages.*\nError: \[ROCKETMQ_MESSAGE_REFUSED\].*{named}", done.stderr)


class Late(Future):
    """A future without a result until somebody waits for it."""

    def __init__(self, value):
        super().__init__()
        self._value = value

    def _wait(self):
        if not self.done():
            self.set_result(self._value)

    def result(self, timeout=None):
        self._wait()
        return super().result(timeout)

    def exception(self, timeout=None):
        self._wait()
        return super().exception(timeout)


class Answers:
    """A producer whose sends end as it is told: True is an acknowledgement, False none, None one that comes late."""

    def __init__(self, topic, *ends):
        self._queue = MessageQueue(topic, "broker-a", 0)
        self._ends = iter(ends)

    def send_async(self, message):
        future = Future()
        end = next(self._ends)
        if end is False:
            future.set_exception(CallTimeout(f"no answer to {message.body!r}"))
        elif end is None:
            return Late(self._result(message))
        else:
            future.set_result(self._result(message))
        return future

    def _result(self, message):
        return SendResult(SendStatus.SEND_OK, message.body.decode(), self._queue, 7)


@pytest.mark.parametrize("output", [Text(), Json()], ids=["text", "json"])
def test_what_was_acknowledged_when_a_send_fails_is_counted(capsys, output):
    """Also what was under way behind the one that failed."""
    ends = [None, True, False, None, False, True]
    report = SendReport(output, "t")
    with pytest.raises(CallTimeout, match="no answer to b'2'"):
        _send_all(Answers("t", *ends), (Message("t", str(i).encode()) for i in range(len(ends))), report)
    printed = capsys.readouterr()
    assert report.sent_count == 4
    assert ("Sent 4 messages to t" in printed.err) is not output.is_for_programs
    assert [m["msgId"] for m in documents(printed.out)] == (["0", "1", "3", "5"] if output.is_for_programs else [])
    assert "Message 3 failed (empty lines do not count)" in printed.err


def test_ctrl_c_while_a_send_fails_still_counts(capsys):
    def messages():
        yield Message("t", b"0")
        yield Message("t", b"1")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _send_all(Answers("t", None, False), messages(), SendReport(Text(), "t"))
    assert "Sent 1 messages to t" in capsys.readouterr().err


def test_what_went_to_the_spool_is_told(capsys):
    kept = SendResult(SendStatus.SPOOLED, "ID", None, None)
    for output in (Text(), Json()):
        report = SendReport(output, "t")
        report.add_acknowledged(kept)
        report.end()
    text, told = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Sent 1 messages to t in \d+\.\d s, 1 of them to the spool", text)
    assert (json.loads(told)["msgId"], json.loads(told)["status"]) == ("ID", "SPOOLED")
