"""``copy``: what is sent and committed in memory, and the whole of it on real brokers."""

from __future__ import annotations

import random
import signal
import subprocess
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from rocketmq_spark import Admin, Message, Producer
from rocketmq_spark.cli import copy as copying
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.copy import Copier, chunks, copy_of, queue_for, remapped_queues
from rocketmq_spark.cli.output import Json, Text
from rocketmq_spark.consumer import pull
from rocketmq_spark.consumer.pull import PolledMessages
from rocketmq_spark.errors import DecodeError, MessageIllegal, MessageRefused, OffsetError, OptionError, SendFailed
from rocketmq_spark.model import MessageQueue, QueueBounds, ReceivedMessage, SendResult
from rocketmq_spark.model.send import SendStatus
from rocketmq_spark.queues.selection import select_by_hash
from rocketmq_spark.wire.messages import decode_messages
from tests.cli.conftest import COMMAND, documents
from tests.consumer.pull_bench import AT_ONCE, A, B, made
from tests.decode.fetching import stored as on_disk
from tests.decode.fetching import text
from tests.fakes.group_member import QueueMember
from tests.helpers import stored, total
from tests.scale import scaled

SOURCE = [MessageQueue("src", "broker-a", n) for n in range(3)]
TARGET = [MessageQueue("dst", "broker-b", n) for n in range(2)]


def message(offset: int, queue: int = 0, **properties: str) -> ReceivedMessage:
    (one,) = decode_messages(on_disk(b"%d" % offset, text(UNIQ_KEY=f"U{offset}", **properties), topic="src"))
    return replace(one, queue=SOURCE[queue], queue_offset=offset)


class Cluster:
    """Both sides of a copy: records what is sent and what is committed, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.refuse: dict[bytes, Exception] = {}
        self.fail: set[bytes] = set()
        self.status = SendStatus.SEND_OK
        self.finished: dict[MessageQueue, int] = {}
        self.now = 0.0
        monkeypatch.setattr(copying.time, "monotonic", lambda: self.now)

    def copier(self, **how: Any) -> Copier:
        given = {"source": "src", "destination": "dst", "rate": None, "mark": None, "skip_bad": False, **how}
        return Copier(self, self, given, threading.Event())  # type: ignore[arg-type]

    def polled(self, *messages: ReceivedMessage) -> Any:
        """What a poll returned; ``finished`` moves what ``commit`` records."""

        def finished(count: int) -> None:
            self.finished[messages[0].queue] = messages[count - 1].queue_offset + 1

        return SimpleNamespace(messages=list(messages), mark_finished=finished, is_current=True)

    def commit(self) -> None:
        self.log.append(("commit", self.finished))
        self.finished = {}

    def queues(self, topic: str) -> list[MessageQueue]:
        return TARGET

    def send(self, message: Message, queue: MessageQueue) -> SendResult:
        return self.send_batch([message], queue)

    def send_batch(self, messages: Sequence[Message], queue: MessageQueue) -> SendResult:
        bodies = [message.body for message in messages]
        if self.fail & set(bodies):
            raise SendFailed("no answer")
        for body in self.refuse.keys() & bodies:
            raise self.refuse[body]
        self.log.append((queue.queue_id, *map(int, bodies)))
        return SendResult(self.status, "", queue, None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


FEW = [MessageQueue("dst", "broker-a", n) for n in range(4)]


def test_a_queue_keeps_its_destination_when_others_come_and_go() -> None:
    """A broker that is stopped is not in the route, and a topic that is widened has more queues before the others."""
    sources = [MessageQueue("src", name, n) for name in ("broker-a", "broker-b", "broker-c") for n in range(4)]
    chosen = {source: queue_for(source, FEW) for source in sources}
    assert {chosen[MessageQueue("src", "broker-a", n)] for n in range(4)} == set(FEW)
    assert {chosen[MessageQueue("src", "broker-b", n)] for n in range(4)} == set(FEW)
    assert chosen[MessageQueue("src", "broker-b", 0)] != chosen[MessageQueue("src", "broker-c", 0)]
    assert chosen[MessageQueue("src", "broker-b", 0)].queue_id == 2  # what is stored must go on like that


def test_queue_keeps_broker_and_id_that_destination_has() -> None:
    """Also when another broker is away, which the same cluster's destination lacks then, too, or either topic is widened."""
    queues = [MessageQueue("dst", name, n) for name in ("broker-a", "broker-b") for n in range(3)]
    for there in (queues, queues[3:], [*queues, MessageQueue("dst", "broker-b", 3)]):
        assert queue_for(MessageQueue("src", "broker-b", 1), there) == queues[4]
    assert remapped_queues([MessageQueue("src", q.broker_name, q.queue_id) for q in queues], queues) == {}


def test_what_earlier_releases_sent_elsewhere_is_listed() -> None:
    """They took the place of the queue in the route."""
    sources = [MessageQueue("src", name, n) for name in ("broker-a", "broker-c") for n in range(2)]
    assert remapped_queues(sources, FEW) == {sources[2]: (FEW[2], FEW[0]), sources[3]: (FEW[3], FEW[1])}
    assert remapped_queues(sources[:2], FEW) == {}


def test_known_group_is_warned_of_changed_queues_before_copying(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only of queues of which it may have copied something: a new group begins at their first messages."""
    sources = [MessageQueue("src", "broker-c", n) for n in range(3)]
    offsets = {sources[0]: 7, sources[1]: 0, sources[2]: None}
    monkeypatch.setattr(Target, "producer", lambda target: nullcontext(SimpleNamespace(queues=lambda topic: FEW[1:])))
    monkeypatch.setattr(copying, "_locations", lambda target, topic: {(topic, topic, None)})
    monkeypatch.setattr(copying, "copied_offsets", lambda target, group, source: offsets)
    monkeypatch.setattr(copying, "subscribed_consumer", lambda *given: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(copying, "_copy_all", lambda *given: print("the first message"))
    words = ["copy", "src", "dst", "--group", "g", "--name-server", "127.0.0.1:1"]
    said = CliRunner().invoke(app, words).output
    assert "If such a release copied for group g, and the topics still have the same queues, new copies" in " ".join(
        said.split()
    )
    assert "src/broker-c/0 to dst/broker-a/2, earlier to dst/broker-a/1" in " ".join(said.split())
    assert said.index("broker-c/0") < said.index("the first message")
    assert "broker-c/1" not in said
    assert "broker-c/2" not in said
    offsets[sources[0]] = None
    assert "copied for group" not in CliRunner().invoke(app, words).output


def test_queues_keep_order_and_commits_follow_acknowledgements(cluster: Cluster) -> None:
    copier = cluster.copier()
    assert copier.send(cluster.polled(*(message(n, 1) for n in range(3)))) == 3
    copier.send(cluster.polled(*(message(n, 2) for n in range(2))))
    assert cluster.log == [(1, 0, 1, 2), (0, 0, 1)]
    copier.commit()
    assert cluster.log[2:] == [("commit", {SOURCE[1]: 3, SOURCE[2]: 2})]
    assert copier.send(cluster.polled(*(message(n, 1) for n in range(3, 6))), 2) == 2
    copier.commit()
    assert cluster.log[3:] == [(1, 3, 4), ("commit", {SOURCE[1]: 5})]
    assert copier.copied_count == 7


def test_unsent_messages_of_revoked_queue_are_left_to_next_owner(cluster: Cluster) -> None:
    copier = cluster.copier(rate=20.0)  # two at a time
    cluster.now = copier._last_commit_s = 10.0
    send_batch, polled = cluster.send_batch, cluster.polled(*(message(n) for n in range(6)))

    def moved(messages: Sequence[Message], queue: MessageQueue) -> SendResult:
        polled.is_current = b"2" not in {one.body for one in messages}
        return send_batch(messages, queue)

    cluster.send_batch = moved  # type: ignore[method-assign]
    assert copier.send(polled) == 4
    assert cluster.log == [(0, 0, 1), (0, 2, 3)]


class Consuming(Cluster):
    """With the consumer of the command, over queues in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.brokers = QueueMember([A, B], 6)
        self.consumer = made(self.brokers, auto_commit=False)
        self.consumer.assign([A])
        self.meanwhile: Callable[[], object] = lambda: None

    def run(self, most: int | None = None) -> None:
        """Copy until there is nothing more, two messages at a time."""
        copier = self.copier(rate=20.0)
        copier._stop_latch.wait = lambda seconds: setattr(self, "now", self.now + seconds)  # type: ignore[method-assign, assignment, func-returns-value]
        copier._consumer = self.consumer  # type: ignore[assignment]
        while copier.send(PolledMessages(self.consumer, AT_ONCE), most):
            copier.commit()

    def send_batch(self, messages: Sequence[Message], queue: MessageQueue) -> SendResult:
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        return super().send_batch(messages, queue)


@pytest.mark.parametrize("others", [4, 6])
def test_queue_regained_during_send_resumes_from_stored_offset(monkeypatch: pytest.MonkeyPatch, others: int) -> None:
    """The offset must not go back behind what another command copied, and what that copied is not sent again."""
    cluster = Consuming(monkeypatch)

    def lost_and_regained() -> None:
        cluster.consumer.assign([B])
        cluster.brokers.stored[A] = others
        cluster.brokers.commits.clear()
        cluster.consumer.assign([A])

    cluster.meanwhile = lost_and_regained
    cluster.run()
    assert cluster.log == [(1, 0, 1), *[(1, 4, 5)][: 6 - others]]
    assert [commit[A] for commit in cluster.brokers.commits if A in commit] == [6] * (others < 6)
    assert cluster.brokers.stored[A] == 6


def test_an_operators_reset_while_a_send_blocks_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit of what was sent since would replace it."""
    cluster = Consuming(monkeypatch)
    cluster.meanwhile = lambda: cluster.consumer._polls.reset({A: 5})
    cluster.run()
    assert cluster.log == [(1, 0, 1), (1, 5)]


def test_it_commits_now_and_then(cluster: Cluster) -> None:
    copier = cluster.copier()
    copier.send(cluster.polled(message(0)))
    cluster.now += copying.COMMIT_INTERVAL_S
    copier.send(cluster.polled(message(1)))
    assert cluster.log == [(0, 0), (0, 1), ("commit", {SOURCE[0]: 2})]


def running(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, copier: Copier, poll: Callable[[], list[ReceivedMessage]]
) -> None:
    how = {"source": "src", "group": "g", "count": None, "follow": False}
    monkeypatch.setattr(pull, "PolledMessages", lambda *asked: cluster.polled(*poll()))
    monkeypatch.setattr(copying, "_end_offsets", lambda *asked: {})
    copying._copy_all(copier, SimpleNamespace(), SimpleNamespace(), how, copier._stop_latch)  # type: ignore[arg-type]


def test_copy_ends_despite_unmatched_queue_and_busy_queue(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a commit of all that polls went over says that the first is done, and no poll comes back empty."""
    copier, polls = cluster.copier(), iter(range(100))

    def poll() -> list[ReceivedMessage]:
        cluster.now += 0.1
        return [message(next(polls))]

    monkeypatch.setattr(copying, "_has_reached", lambda *asked: cluster.log[-1][0] == "commit")
    running(cluster, monkeypatch, copier, poll)
    assert 0 < copier.copied_count < 100


def test_what_fails_is_not_committed(cluster: Cluster) -> None:
    copier = cluster.copier()
    copier.send(cluster.polled(message(0)))
    cluster.fail = {b"2"}
    with pytest.raises(SendFailed):
        copier.send(cluster.polled(*(message(n) for n in (1, 2, 3))))
    copier.commit()
    assert cluster.log == [(0, 0), ("commit", {SOURCE[0]: 1})]


@pytest.mark.parametrize("kind", [MessageIllegal, MessageRefused])
def test_bad_message_of_refused_batch_is_named_or_skipped(cluster: Cluster, kind: Any) -> None:
    cluster.refuse = {b"1": kind("the message is illegal", remark="no")}
    with pytest.raises(kind, match=r"src/broker-a/0 offset 1 cannot be copied.*: no. Use --skip-bad"):
        cluster.copier().send(cluster.polled(*(message(n) for n in range(3))))
    cluster.log.clear()
    copier = cluster.copier(skip_bad=True)
    copier.send(cluster.polled(*(message(n) for n in range(3))))
    assert (cluster.log, copier.copied_count, copier.skipped_count) == ([(0, 0), (0, 2)], 2, 1)


def test_copies_that_went_to_the_spool_are_counted_and_told(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    copier = cluster.copier()
    copier.send(cluster.polled(message(0)))
    cluster.status = SendStatus.SPOOLED
    copier.send(cluster.polled(*(message(n) for n in (1, 2))))
    copying._report(Text(), copier, {"source": "src", "destination": "dst"}, 1.0)
    told = capsys.readouterr()
    assert told.out == "Copied 3 messages from src to dst in 1.0 s; 2 of them went to the spool\n"
    assert "rocketmq-spark spool show" in told.err
    copying._report(Json(), copier, {"source": "src", "destination": "dst"}, 1.0)
    assert documents(capsys.readouterr().out)[0]["spooled"] == 2


def test_undecodable_message_is_error_or_skipped(cluster: Cluster) -> None:
    bad = replace(message(1), decode_error="its body does not match its CRC")
    with pytest.raises(DecodeError, match="offset 1 cannot be copied: it cannot be decoded: its body"):
        cluster.copier().send(cluster.polled(message(0), bad))
    copier = cluster.copier(skip_bad=True)
    copier.send(cluster.polled(bad))
    assert copier.skipped_count == 1


def test_messages_of_sharding_key_go_to_hashed_queue_in_order(cluster: Cluster) -> None:
    """They were sent without waiting for one another, and brokers with several threads stored them in another order."""
    copier = cluster.copier()
    keyed = (message(n, __SHARDINGKEY="ab"[n % 2]) for n in range(1, 6))
    copier.send(cluster.polled(message(0), *keyed, message(6)))
    even, odd = select_by_hash(TARGET, "a").queue_id, select_by_hash(TARGET, "b").queue_id
    assert (even, odd) == (1, 0)
    assert cluster.log == [(0, 0, 1, 3, 5, 6), (1, 2, 4)]
    copier.commit()
    assert copier.copied_count == 7


def test_failed_message_with_sharding_key_is_not_committed(cluster: Cluster) -> None:
    copier = cluster.copier()
    cluster.fail = {b"1"}
    copier.send(cluster.polled(message(0)))
    with pytest.raises(SendFailed):
        copier.send(cluster.polled(message(1, __SHARDINGKEY="k")))
    copier.commit()
    assert cluster.log == [(0, 0), ("commit", {SOURCE[0]: 1})]


def test_a_copy_to_a_proxy_is_an_error() -> None:
    """It would reject each copy, and with --skip-bad all messages were skipped."""
    to = ("--to-option", "transport=grpc", "--to-option", "proxyEndpoint=127.0.0.1:2")
    done = CliRunner().invoke(app, ["copy", "src", "dst", "--group", "g", "-n", "127.0.0.1:1", *to])
    assert done.exit_code == 1
    assert "destination is 'grpc', but over gRPC the Proxy chooses" in done.stderr
    assert "--to-name-server" in done.stderr


def test_it_stops_between_messages(cluster: Cluster) -> None:
    """What a poll returned and was not sent is not committed."""
    copier = cluster.copier()
    copier.send(cluster.polled(message(0)))
    copier._stop_latch.set()
    copier.send(cluster.polled(message(1)))
    copier.commit()
    assert cluster.log == [(0, 0), ("commit", {SOURCE[0]: 1})]


def test_polled_messages_unsent_at_ctrl_c_are_not_committed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long after the last look, when all that polls returned is committed otherwise."""
    copier, send_batch = cluster.copier(rate=20.0), cluster.send_batch  # two at a time

    def interrupted(messages: Sequence[Message], queue: MessageQueue) -> SendResult:
        copier._stop_latch.set()
        cluster.now += 10 * copying._END_CHECK_INTERVAL_S
        return send_batch(messages, queue)

    cluster.send_batch = interrupted  # type: ignore[method-assign]
    running(cluster, monkeypatch, copier, lambda: [message(n) for n in range(6)])
    assert cluster.log == [(0, 0, 1), ("commit", {SOURCE[0]: 2}), ("commit", {})]


def test_a_rate_is_kept(cluster: Cluster) -> None:
    copier = cluster.copier(rate=50.0)
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        cluster.now += seconds
        return False

    copier._stop_latch.wait = wait  # type: ignore[method-assign, assignment]
    copier.send(cluster.polled(*(message(n) for n in range(100))))
    assert 1.85 < cluster.now < 2.0
    assert [entry for entry in cluster.log if entry[0] == "commit"]  # also in the midst of a poll
    assert max(len(entry) for entry in cluster.log) == 6  # a tenth of a second at once
    cluster.now = began = 600.0  # nothing to copy for ten minutes
    copier.send(cluster.polled(*(message(n) for n in range(100))))
    assert 0.85 < cluster.now - began < 1.0  # a second of them counts


def test_chunks() -> None:
    large = replace(message(2), store_size=600_000)
    keyed = message(5, __SHARDINGKEY="k")
    row = [message(0), message(1), large, message(3), message(4), keyed, message(6)]
    assert [[m.queue_offset for m in chunk] for chunk in chunks(row, 2)] == [[0, 1], [2], [3, 4], [5, 6]]
    assert [len(chunk) for chunk in chunks([message(n) for n in range(5)], 2)] == [2, 2, 1]
    many = [replace(message(n), store_size=300_000) for n in range(3)]
    assert [len(chunk) for chunk in chunks(many, 9)] == [1, 1, 1]


def test_a_copy_has_what_the_user_gave() -> None:
    original = replace(message(3, TAGS="a", KEYS="k1 k2", mine="1", CLUSTER="c", MSG_REGION="r"), flag=7)
    made = copy_of(original, "dst", "orig")
    assert (made.topic, made.body, made.tags, made.keys, made.flag) == ("dst", b"3", "a", ["k1", "k2"], 7)
    assert made.properties == {"mine": "1", "orig": "U3"}
    assert copy_of(original, "dst", None).properties == {"mine": "1"}
    assert made.sharding_key is None
    assert copy_of(message(3, __SHARDINGKEY="k"), "dst", None).sharding_key == "k"


OWN = {"environment": "dev", "environments": "2"}
THERE = {"name_server": "there:9876"}


@pytest.mark.parametrize(
    ("given", "to_name_server", "to_options", "destination"),
    [
        (OWN, None, {}, {"name_server": "here:9876", **OWN}),
        (OWN, "there:9876", {}, {**THERE, **OWN}),
        ({"accessKey": "k", "requestTimeout": "9s"}, "there:9876", {}, THERE),
        ({"environment": "dev", "environment_mode": "suffix"}, "there:9876", {"environmentMode": "queues"},
         {**THERE, "environment": "dev", "environmentMode": "queues"}),
        (OWN, "there:9876", {"environment": "prod", "tls": "true"},
         {**THERE, "environment": "prod", "environments": "2", "tls": "true"}),
        (OWN, "there:9876", {"environment": ""}, THERE),
        (OWN, None, {"Environment": ""}, {"name_server": "here:9876"}),
    ],
)  # fmt: skip
def test_copies_stay_in_the_environment(
    given: dict[str, str], to_name_server: str | None, to_options: dict[str, str], destination: dict[str, str]
) -> None:
    """Others share the queues of the destination."""
    how = {"to_name_server": to_name_server, "to_options": to_options}
    assert copying._destination_target(Target({"name_server": "here:9876", **given}), how).given_options == destination


@pytest.mark.parametrize("tls", ["tls", "TLS"])
def test_tls_source_is_not_copied_in_plain_text_unless_requested(tls: str) -> None:
    here = Target({"name_server": "here:9876", tls: "true"})
    with pytest.raises(OptionError, match=r"read with TLS.*--to-option tls=true, or tls=false to send in plain text"):
        copying._destination_target(here, {"to_name_server": "there:9876", "to_options": {}})
    for said in ("true", "false"):
        to = copying._destination_target(here, {"to_name_server": "there:9876", "to_options": {"tls": said}})
        assert to.given_options == {"name_server": "there:9876", "tls": said}
    assert copying._destination_target(here, {"to_name_server": None, "to_options": {}}).given_options[tls] == "true"


QUEUE = MessageQueue("src", "broker-a", 0)


@pytest.mark.parametrize(
    ("committed", "now", "said"),
    [(9, None, True), (8, 12, False), (None, 9, False), (3, 8, "now ends at 8"), (3, None, "now is gone")],
)
def test_an_end_that_is_not_reached_any_more(committed: int | None, now: int | None, said: bool | str) -> None:
    """It would wait for it without end: the topic was created again, or has fewer queues."""
    bounds = {} if now is None else {QUEUE: QueueBounds(0, now, 0)}
    brokers = SimpleNamespace(committed=lambda *asked: {QUEUE: committed}, bounds=lambda *asked: bounds)
    rpc_client = SimpleNamespace(request_timeout_s=1.0)
    target: Any = SimpleNamespace(
        client=lambda: SimpleNamespace(offset_reader=brokers, rpc_client=rpc_client),
        settings=lambda: {"name_server": "here:9876"},
    )
    if isinstance(said, bool):
        assert copying._has_reached(target, "g", {QUEUE: 9}) is said
    else:
        with pytest.raises(OffsetError, match=f"src/broker-a/0 ended at 9 when the copy began, and {said}"):
            copying._has_reached(target, "g", {QUEUE: 9})


def test_a_source_that_was_created_again_between_two_runs_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer would continue at the end of the queue, and commit that."""
    offsets = {QUEUE: 9}
    brokers = SimpleNamespace(committed=lambda *asked: offsets, bounds=lambda *asked: {QUEUE: QueueBounds(0, 8, 0)})
    route = SimpleNamespace(readable_queues=lambda: [QUEUE])
    client = SimpleNamespace(
        offset_reader=brokers,
        rpc_client=SimpleNamespace(request_timeout_s=1.0),
        routes=SimpleNamespace(get_existing=lambda *asked: route),
    )
    target: Any = SimpleNamespace(client=lambda: client, settings=lambda: {"name_server": "here:9876"})
    monkeypatch.setattr("rocketmq_spark.queues.environment.environment_of", lambda parsed: None)
    target.options = lambda: None
    with pytest.raises(OffsetError, match="group g has copied src/broker-a/0 up to 9, and the queue ends at 8"):
        copying.copied_offsets(target, "g", "src")
    offsets[QUEUE] = 8
    assert copying.copied_offsets(target, "g", "src") == {QUEUE: 8}


# --- on real brokers


@pytest.fixture
def topics(rocketmq, make_topic):
    """A source with 60 messages in four queues, tags in turn, and an empty destination with two."""
    source, destination = make_topic(queues=4), make_topic(queues=2)
    with Producer(rocketmq.name_server, "p") as producer:
        queues = producer.queues(source)
        for n in range(60):
            producer.send(
                Message(source, b"%d" % n, tags="ab"[n % 2], keys=[f"k{n}"], properties={"n": str(n)}),
                queue=queues[n % 4],
            )
    total(rocketmq, source, 60)
    return source, destination


@pytest.fixture
def group():
    return f"g{uuid.uuid4().hex[:6]}"


def test_all_of_it_in_order_and_then_what_is_new(rocketmq, run, topics, group):
    source, destination = topics
    command = ("copy", source, destination, "--group", group, "--mark", "orig")
    assert documents(run(*command, "--json").stdout) == [
        {"source": source, "destination": destination, "copied": 60, "skipped": 0, "spooled": 0}
    ]
    copies = stored(rocketmq, destination, 60)
    by_queue = defaultdict(list)
    for one in sorted(copies, key=lambda m: m.queue_offset):
        by_queue[one.queue_id, int(one.body) % 4].append(int(one.body))
        assert (one.keys, one.tags) == ([f"k{int(one.body)}"], "ab"[int(one.body) % 2])
    assert [len(bodies) for bodies in by_queue.values()] == [15] * 4
    assert all(bodies == sorted(bodies) for bodies in by_queue.values())
    originals = {m.msg_id for m in stored(rocketmq, source, 60)}
    assert {one.properties["orig"] for one in copies} == originals
    assert run(*command).stdout.startswith(f"Copied 0 messages from {source} to {destination}")
    with Producer(rocketmq.name_server, "p") as producer:
        producer.send(Message(source, b"100"))
    total(rocketmq, source, 61)
    assert run(*command).stdout.startswith("Copied 1 messages")


def test_copies_keep_sharding_keys_and_order_of_originals(rocketmq, run, group, make_topic):
    source, destination = make_topic(queues=1), make_topic(queues=4)
    with Producer(rocketmq.name_server, "p") as producer:
        sent = producer.send_many(
            [Message(source, b"%d" % n) for n in range(2000)], key=lambda m: f"k{int(m.body) % 3}"
        )
    sent.raise_for_failed()
    total(rocketmq, source, 2000)
    run("copy", source, destination, "--group", group)
    by_key = defaultdict(list)
    for one in sorted(stored(rocketmq, destination, 2000), key=lambda m: m.queue_offset):
        by_key[one.queue_id, one.properties["__SHARDINGKEY"]].append(int(one.body))
    assert {key: bodies for (_, key), bodies in by_key.items()} == {f"k{n}": list(range(n, 2000, 3)) for n in range(3)}
    assert len(by_key) == 3


def test_copy_from_latest_misses_no_message_between_two_runs(rocketmq, run, topics, group):
    """Of a queue, too, of which the first run read nothing."""
    source, destination = topics
    command = ("copy", source, destination, "--group", group, "--from", "latest", "--json")
    assert [row["copied"] for row in documents(run(*command).stdout)] == [0]
    with Producer(rocketmq.name_server, "p") as producer:
        for n in range(100, 108):
            producer.send(Message(source, b"%d" % n))
    total(rocketmq, source, 68)
    assert [row["copied"] for row in documents(run(*command).stdout)] == [8]
    assert sorted(int(m.body) for m in stored(rocketmq, destination, 8)) == list(range(100, 108))


def test_it_ends_while_others_go_on_writing(rocketmq, run, topics, group):
    """At the end that the topic had when it began, or a little later: not one poll of it came back empty."""
    source, destination = topics
    ended = threading.Event()

    def write() -> None:
        with Producer(rocketmq.name_server, "p") as producer:
            while not ended.wait(0.001):
                producer.send(Message(source, b"more"))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        (row,) = documents(run("copy", source, destination, "--group", group, "--json").stdout)
    finally:
        ended.set()
        writer.join()
    assert row["copied"] >= 60
    assert {m.body for m in stored(rocketmq, destination, row["copied"])} >= {b"%d" % n for n in range(60)}


def test_a_source_that_nobody_may_read_is_not_copied_to_its_end(rocketmq, run, topics, group):
    source, destination = topics
    assert run("topic", "update", source, "--permission", "W").exit_code == 0
    done = run("copy", source, destination, "--group", group)
    assert (done.exit_code, f"topic {source} has no read permission on broker-a" in done.stderr) == (1, True), (
        done.output
    )


def test_tags_count_and_resume(rocketmq, run, topics, group):
    source, destination = topics
    command = ("copy", source, destination, "--group", group, "--tags", "a", "--json")
    assert [row["copied"] for row in documents(run(*command, "--count", "7").stdout)] == [7]
    assert [row["copied"] for row in documents(run(*command).stdout)] == [23]
    bodies = sorted(int(m.body) for m in stored(rocketmq, destination, 30))
    assert bodies == list(range(0, 60, 2))
    with Admin(rocketmq.name_server) as admin:
        assert set(admin.offsets(group, [source]).values()) == {15}


def test_killed_and_resumed_nothing_is_missing(rocketmq, run, group, make_topic):
    """200,000 messages in a soak."""
    count, source, destination = scaled(200_000), make_topic(queues=4), make_topic(queues=4)
    with Producer(rocketmq.name_server, "p", auto_batch=True) as producer:
        for future in [producer.send_async(Message(source, b"%d" % n)) for n in range(count)]:
            future.result()
    total(rocketmq, source, count)
    command = [*COMMAND, "copy", source, destination, "--name-server", rocketmq.name_server, "--group", group]
    with Admin(rocketmq.name_server) as admin:
        for _ in range(3):
            before = admin.describe_topic(destination).messages
            # So slow that most is left for seconds, also where a look at the destination takes one of them.
            with subprocess.Popen([*command, "--rate", "2000/s"], stdout=subprocess.PIPE, text=True) as child:
                while admin.describe_topic(destination).messages < before + random.randrange(1, count // 10):
                    assert child.poll() is None
                child.kill()
            assert child.returncode == -signal.SIGKILL, "there was nothing left to kill"
    assert run(*command[len(COMMAND) :]).exit_code == 0
    found = Counter(int(m.body) for m in stored(rocketmq, destination, count))
    assert sorted(found) == list(range(count))
    # What was sent since the last commit of each, one batch, and how late a commit may be on a machine that is busy.
    assert found.total() - count <= 3 * (2000 * 4 + copying.MAX_IN_FLIGHT)


def test_another_cluster_ctrl_c_and_follow(rocketmq, lone, start, topics, group):
    source, _ = topics
    destination = f"copied-{group}"
    lone.create_topic(destination, 2)
    process = start(
        "copy", source, destination, "--group", group, "--follow", "--name-server", rocketmq.name_server,
        "--to-name-server", lone.name_server, "--to-option", "sendTimeout=5s",
    )  # fmt: skip
    assert sorted(int(m.body) for m in stored(lone, destination, 60)) == list(range(60))
    out, err = process.ctrl_c()
    assert (process.code, err) == (130, "")
    assert out.startswith(f"Copied 60 messages from {source}")
    with Admin(rocketmq.name_server) as admin:
        assert set(admin.offsets(group, [source]).values()) == {15}


def test_wrong_usage(run, topics, group, rocketmq):
    source, destination = topics
    there = ("--to-name-server", rocketmq.name_server)
    part = ("--to-option", "environment=1", "--to-option", "environments=2")  # of what is read
    all_of_it = ("--environment", "1", "-o", "environments=2", *there)
    for to in ((), ("--to-option", "sendTimeout=9s"), there, part, (*there, *part), all_of_it):
        done = run("copy", source, source, "--group", group, *to)
        assert (done.exit_code, "would be copied to itself" in done.stderr) == (1, True)
    assert run("copy", source, destination).exit_code == 2
    for wrong in ((source + "x", destination), (source, destination + "x")):
        done = run("copy", *wrong, "--group", group)
        assert (done.exit_code, "Did you mean" in done.stderr) == (1, True)
    assert run("copy", source, destination, "--group", group, "--rate", "fast").exit_code == 2
