"""``rocketmq-spark spool``: shown, exported and sent, by real commands on what a producer left."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import Result

from rocketmq_spark import Producer
from rocketmq_spark.cli import spool as spool_commands
from rocketmq_spark.cli.output import Text
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.spool import spool as spool_module
from rocketmq_spark.spool.records import UNKNOWN_OWNER, Dead, Record, SpoolOwner
from rocketmq_spark.spool.spool import SendSpool, record_of, send_of
from rocketmq_spark.spool.store import Store
from tests.cli.conftest import documents
from tests.helpers import stored

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


def test_show_reports_spool_summary_and_each_record(run: Run, folder: Path, topic: str) -> None:
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


def test_a_copy_shows_the_same_records_and_is_sent(
    rocketmq: LocalBroker, run: Run, folder: Path, topic: str, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    (told,) = documents(run("spool", "copy", str(folder), str(copy), "--json").stdout)
    assert told == {
        "path": str(folder), "copy": str(copy), "waiting": 3, "dead": 1, "leftOut": {}, "notesLeftOut": 0,
        "damaged": False,
    }  # fmt: skip
    for command in (("export",), ("show", "--records")):
        rows = [
            documents(run("spool", command[0], str(path), *command[1:], "--json").stdout) for path in (folder, copy)
        ]
        source, copied = ([{**row, "path": "", "oldestDueAge": 0} for row in found] for found in rows)
        assert source == copied
    run("spool", "assign", str(copy))
    (done,) = documents(run("spool", "send", str(copy), "--json").stdout)
    assert (done["sent"], done["left"], done["dead"]) == (3, 0, 1)
    assert sorted(each.body for each in stored(rocketmq, topic, 3)) == [b"any", b"first", b"second"]
    assert documents(run("spool", "show", str(folder), "--json").stdout)[0]["depth"] == 3


def test_spool_of_another_cluster_is_sent_only_after_assign(
    rocketmq: LocalBroker, run: Run, folder: Path, topic: str
) -> None:
    done = run("spool", "send", str(folder))
    assert done.exit_code == 1
    assert "holds records of the cluster of 127.0.0.1:1, not of the cluster of " in " ".join(done.stderr.split())
    assert "rocketmq-spark spool assign" in " ".join(done.stderr.split())
    (summary,) = documents(run("spool", "show", str(folder), "--json").stdout)
    assert (summary["depth"], summary["owner"]) == (3, "the cluster of 127.0.0.1:1")
    (told,) = documents(run("spool", "assign", str(folder), "--json").stdout)
    assert told["before"] == "the cluster of 127.0.0.1:1"
    assert run("spool", "send", str(folder)).exit_code == 0
    assert len(stored(rocketmq, topic, 3)) == 3


@pytest.mark.parametrize("outcome", ["left", "dead"])
def test_send_fails_where_records_are_not_sent(
    run: Run, folder: Path, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who deletes the folder after it, as all was sent, would lose them."""
    assert run("spool", "assign", str(folder)).exit_code == 0
    not_sent: Callable[..., int] = _given_up if outcome == "dead" else lambda spool, *_: len(spool.store)
    asked: list[tuple[float, bool]] = []

    def send_all(spool: SendSpool, *given: Any) -> int:
        asked.append(given)
        return not_sent(spool, *given)

    monkeypatch.setattr(SendSpool, "send_all", send_all)
    monkeypatch.setattr(SendSpool, "finish", lambda spool: spool.store.close() or 0)
    done = run("spool", "send", str(folder), "--json", "--timeout", "7")
    assert asked == [(7.0, False)]
    (told,) = documents(done.stdout)
    assert (told["sent"], told["left"], told["dead"]) == ((0, 3, 1) if outcome == "left" else (0, 0, 4))
    assert done.exit_code == 1
    assert f"3 records of {folder} were not sent" in " ".join(done.stderr.split())
    assert "spool show" in done.stderr


def test_dead_letters_that_die_again_are_not_sent(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no more of them than before."""
    assert run("spool", "assign", str(folder)).exit_code == 0
    monkeypatch.setattr(SendSpool, "send_all", _given_up)
    monkeypatch.setattr(SendSpool, "finish", lambda spool: spool.store.close() or 0)
    for more, unsent in (((), 3), (("--dead",), 4)):
        done = run("spool", "send", str(folder), *more)
        said = f"{unsent} records of {folder} were not sent" in " ".join(done.stderr.split())
        assert (done.exit_code, said) == (1, True), done.output


def _given_up(spool: SendSpool, timeout_s: float, dead: bool) -> int:
    """As where brokers reject them for good."""
    while works := spool.store.take(2**62, 10):
        spool.store.settle([(work, Dead("no permission")) for work in works], 1)
    return len(spool.store)


def test_delay_folder_with_lost_owner_is_assigned_by_group_name(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "d", sync="never")
    store.set_owner(UNKNOWN_OWNER)
    store.add([(Record("delayed", b"x", 1), 1)])
    store.close()
    done = run("spool", "assign", str(tmp_path / "d"))
    assert done.exit_code == 1
    assert "Name the group with --delay-group" in " ".join(done.stderr.split())
    (told,) = documents(run("spool", "assign", str(tmp_path / "d"), "--delay-group", "g", "--json").stdout)
    assert told["owner"].startswith("the delay service, group 'g', the cluster of ")
    done = run("spool", "assign", str(tmp_path / "d"), "--delay-group", "h")
    assert "Omit --delay-group" in " ".join(done.stderr.split())


def test_delay_records_keep_purpose_when_assigned_to_environment(run: Run, tmp_path: Path) -> None:
    """Those of a delay service would be sent at once, and without an environment to the queues of all."""
    store = Store(tmp_path / "d", sync="never")
    store.set_owner(SpoolOwner(("old:9876",), purpose="the delay service, group 'g'"))
    store.close()
    where = ("--environment", "dev", "-o", "environmentMode=suffix", "-o", "namespace=shop")
    (told,) = documents(run("spool", "assign", str(tmp_path / "d"), *where, "--json").stdout)
    for text in (told["owner"], documents(run("spool", "show", str(tmp_path / "d"), "--json").stdout)[0]["owner"]):
        assert text.startswith("the delay service, group 'g', the cluster of 127.0.0.1:")
        assert text.endswith(", namespace 'shop', environment 'dev' (suffix)"), text


@pytest.mark.parametrize("command", ["assign", "send"])
def test_folder_in_use_does_not_block_assign_or_send_of_others(run: Run, tmp_path: Path, command: str) -> None:
    others = [Store(tmp_path / name, sync="never") for name in ("worker-1", "worker-2", "worker-3")]
    others[1].close()
    others[2].close()
    done = run("spool", command, str(tmp_path), "--json")
    others[0].close()
    assert done.exit_code == 1
    assert [Path(each["path"]).name for each in documents(done.stdout)] == ["worker-2", "worker-3"]
    assert "worker-1 is in use" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("dead", "wanted"), [(False, {"first", "second", "any"}), (True, {"first", "second", "any", "dead"})]
)
def test_send_sends_what_is_there_whenever_it_is_due(
    rocketmq: LocalBroker, run: Run, folder: Path, topic: str, dead: bool, wanted: set[str]
) -> None:
    assert run("spool", "assign", str(folder)).exit_code == 0
    done = run("spool", "send", str(folder), "--json", *(["--dead"] if dead else []))
    assert done.exit_code == 0, done.output
    (told,) = documents(done.stdout)
    assert (told["sent"], told["left"], told["dead"]) == (len(wanted), 0, 0 if dead else 1)
    assert {message.body.decode() for message in stored(rocketmq, topic, len(wanted))} == wanted
    (summary,) = documents(run("spool", "show", str(folder), "--json").stdout)
    assert (summary["depth"], summary["dead"], summary["giveUps"]) == (0, 0 if dead else 1, 1)


@pytest.mark.parametrize(
    ("share", "least", "depth"),
    [(0.0, 600, None), (0.5, 560, 600), (0.999, 0, None)],
    ids=[
        "the first block, which has the totals",
        "a block in the middle",
        "the footer, without which there is no table",
    ],
)
def test_readable_part_of_damaged_spool_is_shown_and_exported(
    run: Run, tmp_path: Path, share: float, least: int, depth: int | None
) -> None:
    store = Store(tmp_path, sync="never")
    sends = [SendRequest("g_cli", os.urandom(200), properties="UNIQ_KEY\x01A\x02") for _ in range(600)]
    store.add([(record_of(SpooledSend("t", send, None, ("A",)), 1), 1) for send in sends])
    store.close()
    (table,) = tmp_path.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[min(int(share * len(data)), len(data) - 1)] ^= 1
    table.write_bytes(data)
    done = run("spool", "show", str(tmp_path), "--records")
    exported = run("spool", "export", str(tmp_path))
    for one in (done, exported):
        assert one.exit_code == 1, one.output
        said = " ".join(one.stderr.split())
        assert "is damaged, and not all of it could be read" in said
        assert "look again: rocketmq-spark spool repair FOLDER" in said
    assert least <= sum(bool(one.get("body")) for one in documents(exported.stdout)) <= least + 39
    *_, summary = documents(run("spool", "show", str(tmp_path), "--json", "--records").stdout)
    assert (summary["depth"], summary["damaged"]) == (depth, True)
    (told,) = documents(run("spool", "repair", str(tmp_path), "--json").stdout)
    assert told["damages"] == 1
    done = run("spool", "show", str(tmp_path), "--records", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    *records, summary = documents(done.stdout)
    assert (told["waiting"], told["dead"]) == (len(records), 0) == (summary["depth"], summary["dead"])
    assert documents(run("spool", "repair", str(tmp_path), "--json").stdout)[0]["damages"] == 0


@pytest.mark.parametrize("command", [("show", "--records"), ("export",)])
def test_a_record_that_cannot_be_shown_hides_no_other_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """``send`` would send the others."""
    sends = [SpooledSend(topic, SendRequest("g", b"x"), None, ("A",)) for topic in ("crafted", "payments")]
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(record_of(send, 1), 1) for send in sends])

    def fail_once(record: Record) -> SpooledSend:
        if (send := send_of(record)).topic == "crafted":
            raise TypeError("expected str")
        return send

    monkeypatch.setattr(spool_module, "send_of", fail_once)
    first, second, *_ = documents(run("spool", command[0], str(tmp_path), *command[1:], "--json").stdout)
    assert (first["record"], first["error"]) == (1, "TypeError: expected str")
    assert second["topic"] == "payments"


def test_a_spool_in_use_can_be_shown_and_not_sent(run: Run, folder: Path) -> None:
    store = Store(folder)
    assert run("spool", "show", str(folder)).exit_code == 0
    done = run("spool", "send", str(folder))
    assert done.exit_code == 1
    assert "is in use by another process" in done.stderr
    store.close()


def test_spool_send_refuses_environment_number_without_count(run: Run, folder: Path) -> None:
    done = run("spool", "send", str(folder), "--environment", "1")
    assert done.exit_code == 1
    assert "option 'environment' is '1' without option 'environments'" in done.stderr
    assert "a command does not know the count of the programs that filled the spool" in done.stderr


def test_a_folder_without_a_spool_is_said_to_have_none(run: Run, tmp_path: Path) -> None:
    done = run("spool", "show", str(tmp_path))
    assert done.exit_code == 1
    assert f"there is no spool in {tmp_path}" in done.stderr


def test_export_gives_what_is_needed_to_send_a_record_again(run: Run, tmp_path: Path) -> None:
    """Whoever exports a folder may delete it. Records of a delay service are no sends: they come as they are stored."""
    request = SendRequest(
        "g_cli",
        b"packed",
        "UNIQ_KEY\x01A\x02",
        1,
        7,
        5,
        True,
        reconsume_times=9,
        max_reconsume_times=0,
        default_topic_queues=6,
    )
    store = Store(tmp_path, sync="never")
    store.add(
        [
            (record_of(SpooledSend("t", request, None, ("A",), "hash", [1]), 1), 1),
            (Record("delayed", b"envelope", 1), 1),
        ]
    )
    store.close()
    send, other = sorted(documents(run("spool", "export", str(tmp_path)).stdout), key=lambda one: "payload" in one)
    names = ("topic", "flag", "sysFlag", "bornTimestamp", "batch")
    assert [send[name] for name in names] == ["t", 7, 1, 5, True]
    names = ("selector", "arg", "reconsumeTimes", "maxReconsumeTimes", "defaultTopicQueues")
    assert [send[name] for name in names] == ["hash", "[1]", 9, 0, 6]
    known = {"path", "record", "standing", "due", "tries", "reason", "kind", "stored", "queue", "msgIds"}
    fields = {*SendRequest._fields, *(field.name for field in dataclasses.fields(SpooledSend))} - {"request"}
    assert len(send.keys() - known) == len(fields - {"queue", "msg_ids"})  # nothing of a send is left out
    assert (other["kind"], base64.b64decode(other["payload"])) == ("delayed", b"envelope")


@pytest.mark.parametrize("error", [SpoolError("damaged"), LookupError("unknown encoding"), OSError("gone")])
def test_an_error_of_one_folder_ends_no_command(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    """Others may put a folder beside the spools of this user."""
    failed: list[Exception] = []
    for raised in (error, SpoolError("another")):
        with spool_commands._collecting_errors(failed):
            raise raised
    with pytest.raises(type(error)) as caught:
        spool_commands._raise_first(Text(), failed)
    assert caught.value is error
    assert "another" in capsys.readouterr().err


@pytest.mark.parametrize("error", [BrokenPipeError(), click.Abort(), KeyboardInterrupt()])
def test_the_end_of_the_output_ends_a_command(error: BaseException) -> None:
    with pytest.raises(type(error)), spool_commands._collecting_errors([]):
        raise error
