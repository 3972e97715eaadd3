"""How far groups and queries are behind, on a real broker."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark import Producer, PullConsumer, session
from rocketmq_spark.admin import groups
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.cli import lag
from rocketmq_spark.cli.command import app
from rocketmq_spark.errors import ConnectionLost, OffsetError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.model.admin import QueueLag
from rocketmq_spark.spark.source.offsets import Offsets
from tests.cli.conftest import Process, documents
from tests.helpers import awaited, killed, total
from tests.mockbroker import NO_ROUTE, MockBroker, ok, refuse, route, topic_config
from tests.source.scripted import cluster, stats
from tests.source.test_checkpoint import entry, named
from tests.test_exposition import get

Run = Callable[..., Result]
Start = Callable[..., Process]


@pytest.fixture
def run(run: Run) -> Run:
    """Each as in a process of its own, which knows no route yet."""

    def fresh(*arguments: str) -> Result:
        session.close_all()
        return run(*arguments)

    return fresh


def feed(mq: LocalBroker, topic: str, count: int) -> None:
    """Messages in queue 1; when it returns the broker counts them."""
    before = total(mq, topic)
    with Producer(name_server=mq.name_server, group="p") as producer:
        for _ in range(count):
            producer.send(Message(topic, b"x"), queue=MessageQueue(topic, "broker-a", 1))
    total(mq, topic, before + count)


@pytest.fixture
def half(rocketmq: LocalBroker, make_topic: Callable[..., str]) -> tuple[str, str]:
    """A topic of two queues with ten messages in the second, and a group that has committed four of them."""
    topic, group = make_topic(queues=2), f"g{uuid.uuid4().hex[:6]}"
    feed(rocketmq, topic, 10)
    with PullConsumer(name_server=rocketmq.name_server, group=group, auto_commit=False) as consumer:
        consumer.assign([MessageQueue(topic, "broker-a", 1)])
        assert consumer.poll(60)  # a broker makes a group at its first pull
        consumer.seek(MessageQueue(topic, "broker-a", 1), 4)
        consumer.commit()
    return topic, group


def test_of_ten_messages_four_are_committed(rocketmq: LocalBroker, half: tuple[str, str], run: Run) -> None:
    topic, group = half
    began_ms = time.time_ns() // 1_000_000
    done = run("lag", "--group", group, "--json")
    assert done.exit_code == 0, done.output
    (found,) = documents(done.stdout)
    assert {name: found[name] for name in ("group", "lag", "lost", "unknownQueues")} == {
        "group": group, "lag": 6, "lost": 0, "unknownQueues": 1,
    }  # fmt: skip
    assert 0 <= found["behindMs"] <= time.time_ns() // 1_000_000 - began_ms + 60_000
    unread, read = found["queues"]
    assert (unread["queueId"], unread["position"], unread["lag"], unread["behindMs"]) == (0, None, None, None)
    assert (read["minOffset"], read["position"], read["maxOffset"], read["lag"]) == (0, 4, 10, 6)
    text = run("lag", "--group", group, "--topic", topic)
    assert text.exit_code == 0
    assert f"group {group}, 6 messages behind in 1 of 2 queues, the oldest for " in text.stderr
    assert (
        "queues whose lag is not known, because they have no offset or their broker does not answer: 1" in text.stderr
    )
    line = next(line for line in text.stdout.splitlines() if " 10 " in line)
    assert line.split()[:7] == [topic, "broker-a", "1", "0", "4", "10", "6"]


def test_of_a_query_by_its_checkpoint(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    topic = make_topic(queues=2)
    feed(rocketmq, topic, 10)
    queues = [MessageQueue(topic, "broker-a", i) for i in range(2)]
    log = Offsets(dict(zip(queues, (0, 9), strict=True)), new_queue_starts={queues[1]: 2, queues[0]: 0})

    def ask() -> dict[str, object]:
        done = run("lag", "--checkpoint", str(tmp_path), "--json")
        assert done.exit_code == 0, done.output
        (found,) = documents(done.stdout)
        return found

    entry(tmp_path, 0, json.dumps(log.to_json()), done=False)
    found = ask()  # nothing is done: all from where it began
    assert (found["batchId"], found["lag"], found["unknownQueues"]) == (None, 8, 0)
    entry(tmp_path, 0, json.dumps(log.to_json()))
    found = ask()
    assert (found["checkpoint"], found["batchId"], found["lag"], found["behindMs"] != 0) == (str(tmp_path), 0, 1, True)
    feed(rocketmq, topic, 3)
    assert ask()["lag"] == 4
    entry(tmp_path, 0, json.dumps(Offsets({queues[1]: 9, MessageQueue("other", "broker-a", 0): 0}).to_json()))
    (part,) = documents(run("lag", "--checkpoint", str(tmp_path), "--topic", topic, "--json").stdout)
    assert [(row["topic"], row["lag"]) for row in part["queues"]] == [(topic, 0), (topic, 4)]
    entry(tmp_path, 0, json.dumps(log.to_json()))
    other = run("lag", "--checkpoint", str(tmp_path), "--topic", "other")
    assert (other.exit_code, other.stdout) == (1, "")
    assert f"the query of {tmp_path} does not read other. It reads: {topic}" in other.stderr


def test_queues_that_no_batch_has_planned_are_behind(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    """They begin at their first message: a queue that a topic got later, and a topic that a pattern matches since."""
    topic = make_topic(queues=2)
    later = f"{topic}-later"
    rocketmq.create_topic(later, 2)
    for name, count in ((topic, 10), (later, 3)):
        feed(rocketmq, name, count)
    planned, other = MessageQueue(topic, "broker-a", 0), MessageQueue(topic, "broker-a", 1)
    reads = {"namespace": "", "subscribePattern": f"{topic}.*"}

    def ask(*more: str) -> dict[str, object]:
        done = run("lag", "--checkpoint", str(tmp_path), "--json", *more)
        assert done.exit_code == 0, done.output
        (found,) = documents(done.stdout)
        return found

    entry(tmp_path, 0, json.dumps(Offsets({planned: 0}, source_identity=reads).to_json()))
    found = ask()
    assert (found["lag"], found["lost"], found["unknownQueues"], found["newQueues"]) == (13, 0, 0, 3)
    assert [(row["topic"], row["queueId"], row["position"], row["lag"]) for row in found["queues"]] == [  # type: ignore[attr-defined]
        (topic, 0, 0, 0), (topic, 1, 0, 10), (later, 0, 0, 0), (later, 1, 0, 3),
    ]  # fmt: skip
    assert ask("--topic", later)["lag"] == 3
    text = run("lag", "--checkpoint", str(tmp_path))
    assert "new queues: 3; no finished batch has read them" in text.stderr
    label = f'{{broker="broker-a",checkpoint="{tmp_path}",queue="1",topic="{later}"}}'
    assert f"reader_lag_messages{label} 3.0\n" in run("lag", "--checkpoint", str(tmp_path), "--prometheus").stdout
    seen = documents(run("doctor", "--checkpoint", str(tmp_path), "--topic", later, "--json").stdout)
    mine = [one for one in seen if one["check"] == f"checkpoint {tmp_path}"]
    assert [one["level"] for one in mine] == ["ok", "ok"], mine
    assert mine[-1]["found"].startswith("13 messages behind")
    diff = documents(run("checkpoint", "diff", str(tmp_path), "--json").stdout)
    assert [(row["topic"], row["queueId"], row["state"], row["offsets"]) for row in diff] == [
        (topic, 0, "read", 0), (topic, 1, "new", 10), (later, 0, "new", 0), (later, 1, "new", 3),
    ]  # fmt: skip
    # Batch 1 has logged where it begins, and is not done.
    unfinished = Offsets({planned: 0, other: 9}, {other: 4}, source_identity=reads)
    entry(tmp_path, 1, json.dumps(unfinished.to_json()), done=False)
    assert (ask()["lag"], ask()["newQueues"]) == (9, 3)
    # Nothing else belongs to a query of these queues alone.
    for reads in ({"namespace": "", "newQueues": False}, {"namespace": "", "environment": "1", "environments": 2}):
        entry(tmp_path, 1, json.dumps(Offsets({planned: 0}, source_identity=reads).to_json()))
        assert (ask()["lag"], ask()["newQueues"]) == (0, 0)


def test_a_source_that_a_named_query_got_later_is_behind(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    """A query with named sources, whose log has version 2: only its unfinished batch has the second source."""
    orders, prices = make_topic(queues=2), make_topic(queues=2)
    for topic in (orders, prices):
        feed(rocketmq, topic, 10)
    read = {MessageQueue(orders, "broker-a", 0): 0, MessageQueue(orders, "broker-a", 1): 7}
    begun = {MessageQueue(prices, "broker-a", 0): 0, MessageQueue(prices, "broker-a", 1): 6}
    logged = json.dumps(Offsets(read).to_json())
    named(tmp_path, 0, orders=logged)
    named(tmp_path, 1, prices=json.dumps(Offsets({**begun}, begun).to_json()), orders=logged, done=False)
    (found,) = documents(run("lag", "--checkpoint", str(tmp_path), "--json").stdout)
    assert (found["lag"], found["newQueues"], found["underWay"]["batchId"]) == (7, 2, 1)
    diff = documents(run("checkpoint", "diff", str(tmp_path), "--json").stdout)
    assert [(row["topic"], row["state"], row["offsets"]) for row in diff] == [
        (orders, "read", 0), (orders, "behind", 3),
    ]  # fmt: skip
    seen = documents(run("doctor", "--checkpoint", str(tmp_path), "--json").stdout)
    assert [one["level"] for one in seen if one["check"] == f"checkpoint {tmp_path}"] == ["ok", "ok", "ok"]


@pytest.fixture
def scripted(no_broker: Path) -> Iterator[MockBroker]:
    """Topics ``t`` and ``u`` with two queues each from 0 to 7."""
    with MockBroker() as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": broker}))
        broker.on(Request.GET_TOPIC_CONFIG, topic_config())
        queues = [MessageQueue(topic, "broker-a", number) for topic in "tu" for number in range(2)]
        broker.on(
            Request.GET_TOPIC_STATS_INFO,
            lambda call: stats({queue: (0, 7) for queue in queues if queue.topic == call.ext("topic")}),
        )
        yield broker
    session.close_all()


def look(broker: MockBroker, *arguments: str) -> Result:
    session.close_all()
    return CliRunner().invoke(app, [*arguments, "--name-server", broker.address])


T, U = ([MessageQueue(topic, "broker-a", number) for number in range(2)] for topic in "tu")
BY_NAME = {"namespace": "", "subscribe": ["t", "u"]}
ASSIGNED = {"namespace": "", "assign": {"t": {"broker-a": [0, 1]}, "u": {"broker-a": [1]}}, "newQueues": False}


@pytest.mark.parametrize(
    ("reads", "strategy", "new"),
    [
        (BY_NAME, "averagely", U),
        (ASSIGNED, "averagely", U[1:]),
        ({**BY_NAME, "newQueues": False}, "config", []),  # which queues the strategy chooses is unknown here
        ({**ASSIGNED, "newQueues": False}, "config", []),
    ],
)
def test_a_topic_created_again_after_its_loss_is_behind(
    scripted: MockBroker, tmp_path: Path, reads: dict[str, object], strategy: str, new: list[MessageQueue]
) -> None:
    """The query accepted the loss: its positions do not name the topic. The next batch reads it from its first message."""
    logged = Offsets(dict.fromkeys(T, 7), source_identity=reads, partitioning_json={"allocationStrategy": strategy})
    entry(tmp_path, 0, json.dumps(logged.to_json()))
    (found,) = documents(look(scripted, "lag", "--checkpoint", str(tmp_path), "--json").stdout)
    assert (found["lag"], found["newQueues"]) == (7 * len(new), len(new))
    text = look(scripted, "lag", "--checkpoint", str(tmp_path), "--prometheus").stdout
    for queue in new:
        label = f'{{broker="broker-a",checkpoint="{tmp_path}",queue="{queue.queue_id}",topic="u"}}'
        assert f"reader_lag_messages{label} 7.0\n" in text
    diff = documents(look(scripted, "checkpoint", "diff", str(tmp_path), "--json").stdout)
    assert [(row["topic"], row["queueId"], row["state"]) for row in diff] == [
        *(("t", number, "read") for number in range(2)),
        *(("u", queue.queue_id, "new") for queue in new),
    ]


@pytest.mark.parametrize("reads", [BY_NAME, ASSIGNED])
def test_a_topic_that_stays_deleted_after_its_loss_is_no_error(
    scripted: MockBroker, tmp_path: Path, reads: dict[str, object]
) -> None:
    there = route(2, {"broker-a": scripted.address})
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda call: there if call.ext("topic") == "t" else NO_ROUTE)
    entry(tmp_path, 0, json.dumps(Offsets(dict.fromkeys(T, 7), source_identity=reads).to_json()))
    for more, lag_of, count in (((), 0, 2), (("--topic", "u"), None, 0)):
        done = look(scripted, "lag", "--checkpoint", str(tmp_path), "--json", *more)
        (found,) = documents(done.stdout)
        assert (done.exit_code, found["lag"], len(found["queues"])) == (0, lag_of, count)
    assert look(scripted, "checkpoint", "diff", str(tmp_path)).exit_code == 0


def test_topics_that_cannot_be_listed_are_an_error(tmp_path: Path, no_broker: Path) -> None:
    """A lag without them would be too small, and no alarm is raised."""
    bounds = json.dumps({"minOffset": 0, "maxOffset": 7, "lastUpdateTimestamp": 0})
    stats = f'{{"offsetTable":{{{{"brokerName":"broker-a","queueId":0,"topic":"t"}}:{bounds}}}}}'
    reads = {"namespace": "", "subscribePattern": "t.*"}
    entry(tmp_path, 0, json.dumps(Offsets({MessageQueue("t", "broker-a", 0): 7}, source_identity=reads).to_json()))
    with MockBroker({Request.GET_TOPIC_STATS_INFO: ok(stats.encode())}) as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, refuse(Response.NO_PERMISSION))
        look = ("lag", "--checkpoint", str(tmp_path), "--name-server", broker.address, "--json")
        done = CliRunner().invoke(app, look)
    (found,) = documents(done.stdout)
    assert (done.exit_code, found["lag"]) == (1, 0)
    assert "[ROCKETMQ_ACCESS_DENIED]" in done.stderr


def test_metrics_that_are_printed_send_no_codes_to_a_terminal(scripted: MockBroker, tmp_path: Path) -> None:
    """Who owns the checkpoint chooses its names."""
    logged = Offsets({MessageQueue("t", "b\x1b[31m", 0): 7})
    entry(tmp_path, 0, json.dumps(logged.to_json()))
    text = look(scripted, "lag", "--checkpoint", str(tmp_path), "--prometheus").stdout
    assert "\x1b" not in text
    assert r'broker="b\\x1b[31m"' in text


def test_for_prometheus(half: tuple[str, str], run: Run) -> None:
    topic, group = half
    done = run("lag", "--group", group, "--prometheus")
    label = f'{{broker="broker-a",group="{group}",queue="1",topic="{topic}"}}'
    assert f"rocketmq_spark_reader_lag_messages{label} 6.0\n" in done.stdout
    assert done.exit_code == 0


def test_served_for_prometheus(rocketmq: LocalBroker, half: tuple[str, str], start: Start, run: Run) -> None:
    topic, group = half
    server = start("lag", "--group", group, "--serve", "0", "--json", "--name-server", rocketmq.name_server)
    url = json.loads(next(server.lines()))["url"]
    lag = f'rocketmq_spark_reader_lag_messages{{broker="broker-a",group="{group}",queue="1",topic="{topic}"}}'
    taken = run("lag", "--group", group, "--serve", str(urlsplit(url).port))
    assert taken.exit_code == 1
    assert "Choose another port" in taken.stderr
    assert f"{lag} 6.0\n" in get(url)[1]
    feed(rocketmq, topic, 2)
    assert f"{lag} 8.0\n" in awaited(lambda: get(url)[1], lambda text: f"{lag} 8" in text)
    server.ctrl_c()
    assert server.code == 0


def test_metrics_fail_if_a_broker_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others alone would be a smaller lag, for which no alarm is raised."""
    look = groups.QueuePositions(
        [QueueLag(MessageQueue("t", "broker-a", 0), 0, 3, 9)], [ConnectionLost("broker-b is away")]
    )
    served: list[object] = []

    def serve(output: object, address: object, text: Callable[[], str]) -> None:
        with pytest.raises(ConnectionLost, match="broker-b is away"):
            text()
        served.append(address)

    monkeypatch.setattr(lag, "_group_lag", lambda *asked: lambda: ({"group": "g"}, look))
    monkeypatch.setattr(lag, "_serve", serve)
    for address in ("9464", "0.0.0.0:9464"):
        done = CliRunner().invoke(app, ["lag", "--group", "g", "--serve", address, "--name-server", "127.0.0.1:1"])
        assert done.exit_code == 0, done.output
    assert served == [("127.0.0.1", 9464), ("0.0.0.0", 9464)], "without a host nobody else can read them"
    for wrong in ("::1", "[1:2:3]:9464", "http://h:9464", "h:9464/metrics", "h", "70000"):
        done = CliRunner().invoke(app, ["lag", "--group", "g", "--serve", wrong, "--name-server", "127.0.0.1:1"])
        assert done.exit_code == 2
        assert f"{wrong!r} is not [HOST:]PORT" in done.output


def test_messages_removed_before_they_were_read_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    look = groups.QueuePositions([QueueLag(MessageQueue("t", "broker-a", 0), 5, 3, 9)], [])
    monkeypatch.setattr(lag, "_group_lag", lambda *asked: lambda: ({"group": "g"}, look))
    done = CliRunner().invoke(app, ["lag", "--group", "g", "--name-server", "127.0.0.1:1"])
    assert (done.exit_code, "2 messages were removed before they were read" in done.stderr) == (0, True), done.output


def test_what_is_watched_is_asked_again_after_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(lag, "_group_lag", lambda *given: given[1:])
    monkeypatch.setattr(lag, "_watch", lambda output, *given: asked.append(given))
    watch = ["lag", "--group", "g", "--topic", "t", "--watch", "--interval", "9"]
    assert CliRunner().invoke(app, [*watch, "--name-server", "127.0.0.1:1"]).exit_code == 0
    assert asked == [(("g", ("t",)), 9.0)]


def test_a_watch_survives_the_outage_of_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    look = groups.QueuePositions([QueueLag(MessageQueue("t", "broker-a", 0), 0, 3, 9)], [])
    part, found = groups.QueuePositions(look.rows, [ConnectionLost("silent")]), ({"group": "g"}, look)
    watch = ["lag", "--group", "g", "--watch", "--interval", "0.1", "--json", "--name-server", "127.0.0.1:1"]
    away, ended = ConnectionLost("away"), OffsetError("over")
    for answers, shown in ((["away"], 0), (["fine", "away", "part", "fine", "over"], 4)):
        line = iter(answers)

        def ask(line: Iterator[str] = line) -> object:
            given = next(line)
            if given in ("away", "over"):
                raise away if given == "away" else ended
            return found if given == "fine" else (found[0], part)

        monkeypatch.setattr(lag, "_group_lag", lambda *given, ask=ask: ask)
        done = CliRunner().invoke(app, watch)
        assert (done.exit_code, [row["lag"] for row in documents(done.stdout)]) == (1, [6] * shown), done.output
        assert [word in done.stderr for word in ("away", "silent", "over")] == [True, shown > 0, shown > 0]
        assert next(line, None) is None


def test_rates_are_those_since_the_look_before(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, at_s = MessageQueue("t", "broker-a", 0), [1_000.0]
    rows = iter([QueueLag(queue, 0, 10 * n, 20 * n + 50) for n in range(3)])

    def ask() -> object:
        at_s[0] += 5.0
        row = next(rows, None)
        if row is None:
            raise OffsetError("over")
        return {"group": "g"}, groups.QueuePositions([row], [])

    monkeypatch.setattr(lag, "_group_lag", lambda *given: ask)
    monkeypatch.setattr(lag, "time", SimpleNamespace(monotonic=lambda: at_s[0], time_ns=time.time_ns))
    watch = ["lag", "--group", "g", "--watch", "--interval", "0.1", "--json", "--name-server", "127.0.0.1:1"]
    seen = documents(CliRunner().invoke(app, watch).stdout)
    assert [(one["readPerSecond"], one["writtenPerSecond"]) for one in seen] == [(None, None), (2.0, 4.0), (2.0, 4.0)]


def test_watched(rocketmq: LocalBroker, half: tuple[str, str], start: Start) -> None:
    topic, group = half
    watch = start(
        "lag", "--group", group, "--watch", "--interval", "0.1", "--json", "--name-server", rocketmq.name_server
    )
    looks = map(json.loads, watch.lines())
    first = next(looks)
    assert (first["lag"], first["readPerSecond"], first["catchUpMs"]) == (6, None, None)
    feed(rocketmq, topic, 4)
    written = 0.0
    while (look := next(looks))["lag"] < 10:
        written += look["writtenPerSecond"]
    assert written + look["writtenPerSecond"] > 0
    assert (look["readPerSecond"], look["catchUpMs"]) == (0.0, None)
    watch.ctrl_c()
    assert watch.code == 0


def test_a_batch_that_waits_for_a_dead_broker(pair: LocalBroker, run: Run, tmp_path: Path) -> None:
    topic = f"waits-{uuid.uuid4().hex[:6]}"
    pair.create_topic(topic, 1)
    a, b = (MessageQueue(topic, f"broker-{name}", 0) for name in "ab")
    entry(tmp_path, 0, json.dumps(Offsets({a: 0, b: 0}).to_json()))
    entry(tmp_path, 1, json.dumps(Offsets({a: 2, b: 3}).to_json()), done=False)
    look = ("lag", "--checkpoint", str(tmp_path), "--name-server", pair.name_server)
    (found,) = documents(run(*look, "--json").stdout)
    assert (found["underWay"]["batchId"], found["underWay"]["waitsFor"], found["unknownQueues"]) == (1, [], 0)
    killed(pair, "broker-b")
    done = run(*look, "--json")
    (found,) = documents(done.stdout)
    assert (found["underWay"]["waitsFor"], found["unknownQueues"], done.exit_code) == (["broker-b"], 1, 1)
    assert "batch 1 is begun and not done: broker-b does not answer" in run(*look).stderr
    told = run("doctor", "--checkpoint", str(tmp_path), "--name-server", pair.name_server, "--json")
    assert [one["remedy"].partition(":")[0] for one in documents(told.stdout) if "batch 1" in one["found"]] == [
        "Start broker-b"
    ]
    killed(pair, "broker-a")
    # Once the name server has noticed.
    done = awaited(lambda: run(*look, "--json"), lambda done: "all its brokers are down" in done.stderr)
    (found,) = documents(done.stdout)
    assert (found["underWay"]["waitsFor"], found["unknownQueues"]) == (["broker-a", "broker-b"], 2)
    assert done.exit_code == 1


def test_a_query_is_looked_for_in_its_namespace(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    """A topic of the same name outside of it is another one."""
    topic = make_topic(queues=2)
    rocketmq.create_topic(f"shop%{topic}", 2)
    feed(rocketmq, topic, 9)
    feed(rocketmq, f"shop%{topic}", 4)
    positions = {MessageQueue(topic, "broker-a", 1): 3}
    entry(tmp_path, 0, json.dumps(Offsets(positions, source_identity={"namespace": "shop"}).to_json()))
    (found,) = documents(run("lag", "--checkpoint", str(tmp_path), "--json").stdout)
    assert found["lag"] == 1
    rows = documents(run("checkpoint", "diff", str(tmp_path), "--json").stdout)
    assert [(row["queueId"], row["maxOffset"]) for row in rows] == [(0, 0), (1, 4)]
    seen = documents(run("doctor", "--checkpoint", str(tmp_path), "--json").stdout)[-1]
    assert (seen["level"], seen["found"].startswith("1 messages behind")) == ("ok", True)


def test_queues_of_another_cluster_are_not_searched_in_this_one(
    rocketmq: LocalBroker, make_topic: Callable[..., str], run: Run, tmp_path: Path
) -> None:
    """A query may read two clusters, with topics and brokers of the same names."""
    topic = make_topic(queues=2)
    feed(rocketmq, topic, 4)
    here = Offsets(
        {MessageQueue(topic, "broker-a", 1): 3}, source_identity={"namespace": "", "clusters": ["DefaultCluster"]}
    )
    there = Offsets(
        {MessageQueue(topic, "broker-a", 1): 900, MessageQueue("other", "b", 0): 5},
        source_identity={"namespace": "", "clusters": ["eu"]},
    )
    sources = [json.dumps(offsets.to_json()) for offsets in (here, there)]
    entry(tmp_path, 0, *sources)
    entry(tmp_path, 1, *(line.replace(":5}", ":9}") for line in sources), done=False)
    (found,) = documents(run("lag", "--checkpoint", str(tmp_path), "--json").stdout)
    assert (found["lag"], found["unknownQueues"], found["otherClusters"]) == (1, 0, ["eu"])
    assert found["underWay"]["waitsFor"] == []
    assert "The query reads cluster eu, too" in run("lag", "--checkpoint", str(tmp_path)).stderr
    diff = run("checkpoint", "diff", str(tmp_path))
    assert (diff.exit_code, diff.stderr.splitlines()[1:]) == (0, ["Nothing is lost"])
    assert diff.stderr.startswith("The query reads cluster eu, too, which is not checked")
    seen = documents(run("doctor", "--checkpoint", str(tmp_path), "--json").stdout)
    assert [one["level"] for one in seen if one["check"] == f"checkpoint {tmp_path}"] == ["ok", "advice", "ok", "ok"]
    entry(tmp_path, 0, sources[1])  # none of this cluster: its brokers may all be away
    entry(tmp_path, 1, sources[1])
    alone = run("checkpoint", "diff", str(tmp_path), "--json")
    assert [row["state"] for row in documents(alone.stdout)] == ["not registered", "new", "went back"]


@pytest.mark.parametrize("given", [[], ["--group", "g", "--checkpoint", "."]])
def test_one_of_both_must_be_named(given: list[str]) -> None:
    done = CliRunner().invoke(app, ["lag", *given])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "lag needs either --group NAME or --checkpoint FOLDER" in done.stderr


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--group", "nobody"], "[ROCKETMQ_OFFSET] group nobody has no offsets. A new group starts where option"),
        (["--group", "g", "--topic", "no-such"], "[ROCKETMQ_ROUTE_NOT_FOUND]"),
        (["--checkpoint", "."], f"[ROCKETMQ_OFFSET] {Path.cwd()} is not a checkpoint: it has no folder 'offsets'"),
        (["--checkpoint", "odd://x"], "[ROCKETMQ_OFFSET] odd://x cannot be reached"),
    ],
)
def test_what_cannot_be_said(rocketmq: LocalBroker, run: Run, given: list[str], said: str) -> None:
    done = run("lag", *given)
    assert (done.exit_code, done.stdout) == (1, "")
    assert said in done.stderr


def test_a_topic_that_was_made_again(tmp_path: Path, no_broker: Path) -> None:
    """It is not 0 behind: its new messages are not read."""
    bounds = json.dumps({"minOffset": 0, "maxOffset": 75, "lastUpdateTimestamp": 0})
    stats = ",".join(f'{{"brokerName":"broker-a","queueId":{n},"topic":"t"}}:{bounds}' for n in range(2))
    entry(tmp_path, 0, json.dumps(Offsets({MessageQueue("t", "broker-a", n): 1205 for n in range(2)}).to_json()))
    with MockBroker({Request.GET_TOPIC_STATS_INFO: ok(f'{{"offsetTable":{{{stats}}}}}'.encode())}) as broker:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, refuse(Response.NO_PERMISSION))
        look = ("lag", "--checkpoint", str(tmp_path), "--name-server", broker.address)
        done = CliRunner().invoke(app, [*look, "--json"])
        (found,) = documents(done.stdout)
        assert (found["lag"], found["lost"], found["unknownQueues"], found["wentBackQueues"]) == (None, None, 2, 2)
        text = CliRunner().invoke(app, look)
        assert "lag unknown in 2 queues, 2 queues went back" in text.stderr
        assert f"See: rocketmq-spark checkpoint diff {tmp_path}" in text.stderr
        assert "because they have no offset" not in text.stderr
        told = CliRunner().invoke(app, ["doctor", *look[1:], "--topic", "other", "--json"])
        prometheus = CliRunner().invoke(app, [*look, "--prometheus"])
    assert [one.exit_code for one in (done, text, told, prometheus)] == [1, 1, 1, 1]
    assert [(one["level"], one["found"].split(":")[0]) for one in documents(told.stdout) if "checkpoint" in one["check"]] == [
        ("advice", "its query reads t, not other"), ("broken", "2 of 2 queues do not match what brokers have"),
    ]  # fmt: skip
