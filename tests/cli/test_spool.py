"""``rocketmq-spark spool``: shown, exported and sent, by real commands on what a producer left."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.session import Producer
from rocketmq_spark.spool.store import Dead, Store
from tests.cli.conftest import documents
from tests.live.writes import stored

Run = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path, topic: str) -> Path:
    """What a producer kept that saw no name server: two of one queue, one of any, and a dead one."""
    path = tmp_path / "s"
    nowhere = {"name_server": "127.0.0.1:1", "group": "g_cli", "send_timeout": "200ms"}
    with Producer(**nowhere, on_send_failure="spool", spool_dir=str(path), spool_sync="never") as one:
        dead = one.send(Message(topic, b"dead", tags="d"))
        for text in (b"first", b"second"):
            one.send(Message(topic, text, tags="t", properties={"mine": "1"}), queue=MessageQueue(topic, "broker-a", 1))
        one.send(Message(topic, b"any"))
    store = Store(path)
    (work,) = [each for each in store.take(2**62, 10) if dead.msg_id.encode() in each.record.payload]
    store.settle([(work, Dead("no permission"))], 1)
    store.close()
    return path


def test_3_13_show_tells_how_a_spool_stands_and_each_record(run: Run, folder: Path, topic: str) -> None:
    (summary,) = documents(run("spool", "show", str(folder), "--json").stdout)
    assert (summary["depth"], summary["dead"], summary["giveUps"], summary["path"]) == (3, 1, 1, str(folder))
    *records, _ = documents(run("spool", "show", str(folder), "--records", "--json").stdout)
    assert sorted(one["standing"] for one in records) == ["behind", "dead", "pending", "pending"]
    (behind,) = (one for one in records if one["standing"] == "behind")
    assert (behind["queue"], behind["due"], behind["tries"]) == (f"{topic}/broker-a/1", None, None)
    (dead,) = (one for one in records if one["standing"] == "dead")
    assert (dead["reason"], dead["tries"], dead["topic"]) == ("no permission", 1, topic)
    text = run("spool", "show", str(folder), "--records").stdout
    assert "reason no permission" in text
    assert "WAITING" in text


def test_export_gives_bodies_and_properties_of_all(run: Run, folder: Path) -> None:
    found = documents(run("spool", "export", str(folder)).stdout)
    assert sorted(base64.b64decode(one["body"]) for one in found) == [b"any", b"dead", b"first", b"second"]
    assert all(one["properties"]["UNIQ_KEY"] == one["msgIds"][0] for one in found)
    (first,) = (one for one in found if base64.b64decode(one["body"]) == b"first")
    assert (first["properties"]["TAGS"], first["properties"]["mine"], first["group"]) == ("t", "1", "g_cli")


@pytest.mark.parametrize(
    ("dead", "wanted"), [(False, {"first", "second", "any"}), (True, {"first", "second", "any", "dead"})]
)
def test_send_sends_what_is_there_whenever_it_is_due(
    rocketmq: LocalBroker, run: Run, folder: Path, topic: str, dead: bool, wanted: set[str]
) -> None:
    done = run("spool", "send", str(folder), "--json", *(["--dead"] if dead else []))
    assert done.exit_code == 0, done.output
    (told,) = documents(done.stdout)
    assert (told["sent"], told["left"], told["dead"]) == (len(wanted), 0, 0 if dead else 1)
    assert {message.body.decode() for message in stored(rocketmq, topic, len(wanted))} == wanted
    (summary,) = documents(run("spool", "show", str(folder), "--json").stdout)
    assert summary["depth"] == 0


def test_a_spool_in_use_can_be_shown_and_not_sent(run: Run, folder: Path) -> None:
    store = Store(folder)
    assert run("spool", "show", str(folder)).exit_code == 0
    done = run("spool", "send", str(folder))
    assert done.exit_code == 1
    assert "is in use by another process" in done.stderr
    store.close()


def test_a_folder_without_a_spool_is_said_to_have_none(run: Run, tmp_path: Path) -> None:
    done = run("spool", "show", str(tmp_path))
    assert done.exit_code == 1
    assert f"there is no spool in {tmp_path}" in done.stderr
