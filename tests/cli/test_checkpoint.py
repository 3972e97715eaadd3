"""Folders of queries, as Spark writes them, next to a real broker. Spark's own: tests/spark/test_restart.py."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from rocketmq_spark import admin, session
from rocketmq_spark.cli.checkpoint import compare_with_brokers
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.checkpoints import rewind
from rocketmq_spark.spark.checkpoints.offset_log import LoggedBatch
from rocketmq_spark.spark.checkpoints.rewind import DriftState
from rocketmq_spark.spark.source import recreated_topics
from rocketmq_spark.spark.source.offsets import Offsets
from tests.cli.conftest import documents
from tests.cli.test_lag import feed
from tests.helpers import killed
from tests.mockbroker import eventually
from tests.reading import names
from tests.source.test_checkpoint import entry

Run = Callable[..., Result]


@pytest.fixture
def query(tmp_path: Path) -> Path:
    """Three batches over two queues, the last not done; nothing was changed for two minutes."""
    folder = tmp_path / "query"
    folder.mkdir()
    for number, (a, b) in enumerate(((5, 5), (10, 5), (12, 9))):
        start = {} if number else {queue(0): 2, queue(1): 0}
        text = json.dumps(Offsets({queue(0): a, queue(1): b}, start).to_json())
        entry(folder, number, text, done=number < 2, begun_ms=1_800_000_000_000 + 60_000 * number)
    quiet(folder)
    return folder


def queue(number: int, topic: str = "orders") -> MessageQueue:
    return MessageQueue(topic, "broker-a", number)


def quiet(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 120))


def test_what_each_batch_read_and_what_is_next(run: Run, query: Path) -> None:
    batches = documents(run("checkpoint", "show", str(query), "--json").stdout)
    assert [(b["batchId"], b["begun"], b["done"] is None, b["offsets"]) for b in batches] == [
        (0, "2027-01-15T08:00:00.000Z", False, 8), (1, "2027-01-15T08:01:00.000Z", False, 5),
        (2, "2027-01-15T08:02:00.000Z", True, 6),
    ]  # fmt: skip
    assert batches[0]["ranges"] == [
        {"topic": "orders", "brokerName": "broker-a", "queueId": 0, "start": 2, "end": 5, "offsets": 3},
        {"topic": "orders", "brokerName": "broker-a", "queueId": 1, "start": 0, "end": 5, "offsets": 5},
    ]
    text = run("checkpoint", "show", str(query), "--last", "2")
    assert [line.split()[0] for line in text.stdout.splitlines()] == ["BATCH", "1", "2"]
    assert text.stderr == "Next: batch 2 again with the same ranges, 6 offsets\n"
    one = run("checkpoint", "show", str(query), "--batch", "1")
    assert [line.split() for line in one.stdout.splitlines()[1:]] == [["orders", "broker-a", "0", "5", "10", "5"]]
    tail = """rocketmq-spark tail orders --from '{"orders": {"broker-a": {"0": 5}}}' --to '{"orders": {"broker-a": {"0": 10}}}'"""
    assert one.stderr.splitlines()[0] == f"Its messages: {tail}"
    (query / "offsets" / "2").unlink()
    assert "Next: batch 2, from where batch 1 ended in orders" in run("checkpoint", "show", str(query)).stderr
    (query / "offsets" / "0").unlink()
    notes = run("checkpoint", "show", str(query)).stderr
    assert "Batch 1: the checkpoint no longer has the start offsets of 2 queues" in notes


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (["show", "{}", "--batch", "9"], 1, "batch 9 is not kept in {}. Name a batch from 0 to 2"),
        (["show", "{}-not"], 1, "{}-not is not a checkpoint"),
        (["diff", "{}-not"], 1, "{}-not is not a checkpoint"),
        (["rewind", "{}"], 2, "rewind needs either --to-batch N or --to-time TIME"),
        (
            ["rewind", "{}", "--to-batch", "0", "--to-time", "1h"],
            2,
            "rewind needs either --to-batch N or --to-time TIME",
        ),
        (["rewind", "{}", "--to-batch", "2"], 1, "there is no batch 2 to go back to: batches 0 to 1 are kept and done"),
        (["rewind", "{}", "--to-time", "soon"], 2, "'soon' is not a time: ISO-8601"),
        (["rewind", "{}", "--to-batch", "0", "--quiet-for", "long"], 2, "'long' is not"),
    ],
)
def test_what_cannot_be_said(run: Run, query: Path, given: list[str], code: int, said: str) -> None:
    done = run("checkpoint", *(word.replace("{}", str(query)) for word in given))
    assert (done.exit_code, done.stdout) == (code, "")
    assert said.replace("{}", str(query)) in done.stderr


def test_a_query_of_other_sources_has_no_visible_differences(run: Run, tmp_path: Path) -> None:
    entry(tmp_path, 0, '{"logOffset":1}')
    done = run("checkpoint", "diff", str(tmp_path))
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"batch 0 in {tmp_path} reads no RocketMQ topic" in done.stderr


@pytest.mark.parametrize("word", ["--apply", "--execute", "--dry-run"])
def test_other_words_for_yes_are_refused(run: Run, query: Path, word: str) -> None:
    for command in (("checkpoint", "rewind", str(query), "--to-batch", "0"), ("offsets", "set", "g", "--to", "latest")):
        refused = run(*command, word)
        assert refused.exit_code == 2
        assert (
            f"There is no {word}: without --yes the command only previews the change, and --yes applies it"
            in refused.stderr
        )


def test_rewound_with_a_backup(run: Run, query: Path) -> None:
    before = {path.name for path in (query / "offsets").iterdir()}
    dry = run("checkpoint", "rewind", str(query), "--to-time", "2027-01-15T08:00:30Z")
    assert dry.stdout.splitlines() == [
        "The query reads the 11 offsets of batches 1 to 2 again, in new batches from number 1 on:",
        "  orders/broker-a/0  from 5, before 12  (7)",
        "  orders/broker-a/1  from 5, before 9  (4)",
        "Nothing was changed: use --yes to apply",
    ]
    assert "This command cannot see: whether the query runs" in dry.stderr
    (told,) = documents(run("checkpoint", "rewind", str(query), "--to-batch", "0", "--json").stdout)
    assert (told["rewound"], told["backup"], told["again"]) == (False, None, [1, 2])
    assert {path.name for path in (query / "offsets").iterdir()} == before
    (told,) = documents(run("checkpoint", "rewind", str(query), "--to-batch", "0", "--yes", "--json").stdout)
    assert (told["rewound"], told["batchId"], told["again"]) == (True, 0, [1, 2])
    assert [(part["start"], part["end"]) for part in told["ranges"]] == [(5, 12), (5, 9)]
    assert {path.name for path in Path(told["backup"], "offsets").iterdir()} == before
    again = run("checkpoint", "rewind", str(query), "--to-batch", "0")
    assert (again.exit_code, again.stdout) == (0, "Batch 0 is the last: nothing to do\n")


def test_nothing_is_removed_where_the_epoch_could_not_be_raised(run: Run, query: Path) -> None:
    (query / "rocketmq").mkdir()
    (query / "rocketmq" / "epoch").write_text("what")
    done = run("checkpoint", "rewind", str(query), "--to-batch", "0", "--yes", "--force")
    assert (done.exit_code, "rocketmq/epoch is not a number" in done.stderr) == (1, True)
    assert (query / "offsets" / "2").exists()
    assert [path.name for path in query.parent.iterdir()] == ["query"]


def test_a_folder_that_just_changed_is_left_alone(run: Run, query: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (query / "offsets" / "2").touch()
    back = ("checkpoint", "rewind", str(query), "--to-batch", "1", "--yes")
    refused = run(*back)
    assert (refused.exit_code, "s ago, and the query may still run. Stop it, wait until 60 s" in refused.stderr) == (
        1,
        True,
    )
    with monkeypatch.context() as patched:  # an object store
        patched.setattr(rewind, "changed_ms", lambda *asked: None)
        assert "its file system does not report when files changed" in run(*back).stderr
    assert (query / "offsets" / "2").exists()
    assert "wait until 3600 s" in run(*back, "--quiet-for", "1h").stderr
    assert run(*back, "--force").exit_code == 0
    assert not (query / "offsets" / "2").exists()


def test_differences_to_the_broker(
    run: Run, rocketmq: LocalBroker, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    """One query over topics that fared differently: one goes on, one shrank, one was made again, one is gone."""
    fine, shrunk, remade = (make_topic(queues=2) for _ in range(3))
    for topic in (fine, shrunk, remade):
        feed(rocketmq, topic, 4)
    last_ms = rocketmq.admin.describe_topic(remade)[queue(1, remade)].last_update_ms
    rocketmq.admin.delete_topic(remade)
    rocketmq.create_topic(remade, 2)
    feed(rocketmq, remade, 6)
    positions = {queue(1, fine): 3, queue(1, shrunk): 9, queue(1, remade): 4, queue(0, "gone-" + fine): 1}
    entry(tmp_path, 0, json.dumps(Offsets(positions, newest_store_ms={queue(1, remade): last_ms}).to_json()))
    session.close_all()
    done = run("checkpoint", "diff", str(tmp_path), "--json")
    found = {(row["topic"], row["queueId"]): (row["state"], row["offsets"]) for row in documents(done.stdout)}
    assert found == {
        (fine, 0): ("new", 0), (fine, 1): ("behind", 1), (shrunk, 0): ("new", 0), (shrunk, 1): ("went back", 5),
        (remade, 0): ("new", 0), (remade, 1): ("made again", 6), ("gone-" + fine, 0): ("gone", None),
    }  # fmt: skip
    assert done.exit_code == 1
    text = run("checkpoint", "diff", str(tmp_path))
    assert (
        "3 of 7 queues have lost what was to be read next. With failOnDataLoss=warn the query continues" in text.stderr
    )
    assert f"gone-{fine}" in text.stderr
    entry(tmp_path, 0, json.dumps(Offsets({queue(0, fine): 0, queue(1, fine): 3}).to_json()))
    well = run("checkpoint", "diff", str(tmp_path))
    assert (well.exit_code, well.stderr) == (0, "Nothing is lost\n")
    own = Offsets({queue(1, fine): 3}, source_identity={"namespace": "", "environment": "dev", "environments": {}})
    entry(tmp_path, 0, json.dumps(own.to_json()))
    of_environment = documents(run("checkpoint", "diff", str(tmp_path), "--json").stdout)
    assert [row["queueId"] for row in of_environment] == [1], "the other queue is that of another environment"


def test_a_broker_that_is_down_is_no_loss(run: Run, lone: LocalBroker, tmp_path: Path) -> None:
    (topic,) = names(1, "down")
    lone.create_topic(topic, 2)
    entry(tmp_path, 0, json.dumps(Offsets({queue(1, topic): 0}).to_json()))
    killed(lone, "broker-a")
    eventually(lambda: not lone.admin.cluster(), 60)
    session.close_all()
    given = ("checkpoint", "diff", str(tmp_path), "--name-server", lone.name_server)
    (row,) = documents(run(*given, "--json").stdout)
    assert (row["queueId"], row["state"], row["offsets"]) == (1, "not registered", None)
    text = run(*given)
    assert (text.exit_code, "have lost" in text.stderr) == (1, False)
    assert "1 of 1 queues wait for broker-a: start it on its data, and nothing of them is lost" in text.stderr


def client_of(queues: list[MessageQueue], bounds: Callable[..., dict[MessageQueue, QueueBounds]]) -> Any:
    """Whose topic has these queues on two registered brokers, which answer ``bounds``."""
    return SimpleNamespace(
        rpc_client=SimpleNamespace(request_timeout_s=1.0),
        routes=SimpleNamespace(
            get_existing=lambda *asked: SimpleNamespace(readable_queues=lambda: queues),
            cluster=lambda: {"broker-a": None, "broker-b": None},
        ),
        offset_reader=SimpleNamespace(bounds=bounds),
    )


def test_an_unanswered_check_of_recreation_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has answered where its queues end: nothing is lost, for all that these say."""
    silent, other = queue(0), MessageQueue("orders", "broker-b", 0)
    answers = recreated_topics.RecreationResult([], {("orders", "broker-a"): CallTimeout("no answer in time")})
    monkeypatch.setattr(recreated_topics.RecreationWatch, "check", lambda *asked: answers)
    monkeypatch.setattr(admin, "with_kept_minimums", lambda client, bounds, *more: bounds)
    client = client_of([silent, other], lambda queues, *more: dict.fromkeys(queues, QueueBounds(0, 7, 0)))
    found, errors = compare_with_brokers(client, LoggedBatch(0, {0: Offsets({silent: 5, other: 7})}))
    assert [one.state for one in found] == [DriftState.UNAVAILABLE, DriftState.READ]
    assert ["no answer in time" in error for error in errors] == [True]


def test_a_registered_broker_that_is_silent_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    here, silent = queue(0), MessageQueue("orders", "broker-b", 0)

    def bounds(queues: object, within: object, note: Callable[..., None]) -> dict[MessageQueue, QueueBounds]:
        note(CallTimeout("no answer in time"), silent)
        return {here: QueueBounds(0, 7, 0)}

    monkeypatch.setattr(
        recreated_topics.RecreationWatch, "check", lambda *asked: recreated_topics.RecreationResult([], {})
    )
    monkeypatch.setattr(admin, "with_kept_minimums", lambda client, bounds, *more: bounds)
    client = client_of([here, silent], bounds)
    found, errors = compare_with_brokers(client, LoggedBatch(0, {0: Offsets({here: 7, silent: 3})}))
    assert [one.state for one in found] == [DriftState.READ, DriftState.UNAVAILABLE]
    assert len(errors) == 1
