from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.consumer.listener_pool import Work
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.consumer.rebalance import ConsumeFrom, ConsumeFromWhere
from rocketmq_spark.consumer.tools import TIMEOUT_S
from rocketmq_spark.errors import CallTimeout, RouteNotFound
from tests.consumer.group import GroupBench
from tests.queues import q, qs


def test_heartbeats_tell_what_the_member_is_and_wants(group: GroupBench) -> None:
    _, port = group.start()
    (first, *_) = port.seen("heartbeat")
    assert set(first.subscriptions) == {"T", "%RETRY%g"}
    assert (first.message_model, first.consume_from_where) == ("CLUSTERING", "CONSUME_FROM_LAST_OFFSET")
    order = [verb for verb, _ in port.calls]
    assert order.index("join") < order.index("heartbeat") < order.index("members")


def test_member_takes_its_queues_without_notification_by_broker(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group.brokers, "told", lambda: None)
    consumer, _ = group.start()
    assert group.owned_queues(consumer) == qs("a:0-1 b:0-1")


def test_an_unknown_topic_is_waited_for(group: GroupBench) -> None:
    consumer, _ = group.consumer()
    consumer.subscribe("LATER")
    consumer.start(lambda messages, context: group.got.append(("me", messages[0].body, 0)))
    group.time.advance(1)
    assert group.owned_queues(consumer, "LATER") == []
    group.brokers.topics["LATER"] = qs("a:0", "LATER")
    group.time.advance(21)
    assert group.owned_queues(consumer, "LATER") == qs("a:0", "LATER")
    group.brokers.send(q("a:0", "LATER"), b"1")
    group.time.advance(0.1)
    assert group.got == [("me", b"1", 0)]


def test_a_group_without_a_retry_topic_is_no_line_of_the_log(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    """The first failed message creates it; the line looked like a failure. A missing topic of the user is still named."""
    caplog.set_level("INFO")
    consumer, _ = group.consumer()
    consumer.subscribe("LATER")
    consumer.start(lambda messages, context: None)
    assert "topic LATER has no route yet" in caplog.text
    assert "%RETRY%g has no route yet" not in caplog.text


def test_a_name_server_that_is_gone_stops_nobody(group: GroupBench) -> None:
    consumer, _ = group.start()
    group.time.advance(1)
    group.brokers.failing["queues"] = RouteNotFound("no name server answers")
    for i in range(10):
        group.time.advance(30)
        group.brokers.send(q("a:0"), str(i).encode())
    group.time.advance(1)
    assert group.bodies() == [str(i).encode() for i in range(10)]
    assert group.owned_queues(consumer) == qs("a:0-1 b:0-1")


def test_figures_are_a_line_of_the_log_each_minute(group: GroupBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    group.start()
    group.time.advance(61)
    assert "group g: ConsumerStats(consumed=0, failed=0, sent_back=0, cached=0, lag=0, rebalances=1)" in caplog.text


def test_offsets_are_stored_as_often_as_it_is_told(group: GroupBench) -> None:
    group.start(persist_interval_s=1.0)
    group.time.advance(11)
    for i in range(3):
        group.brokers.send(q("a:0"), b"x")
        group.time.advance(1.1)
        assert group.brokers.offsets[q("a:0")] == i + 1


def test_so_many_threads_call_listeners(group: GroupBench) -> None:
    consumer, _ = group.start(threads=7)
    assert group.counts == [7]
    assert consumer.settings.threads == 7


@pytest.mark.parametrize("bound", [Thresholds(max_count=50), Thresholds(max_bytes=50), Thresholds(max_span=50)])
def test_every_bound_of_the_cache_stops_the_pulls(group: GroupBench, bound: Thresholds) -> None:
    consumer, _ = group.start(thresholds=bound, pull_batch_size=10)
    group.workers[0].held = True
    group.time.advance(1)
    group.brokers.send(q("a:0"), *(b"x" for _ in range(200)))
    group.time.advance(1)
    cached = consumer.stats().cached
    assert cached is not None
    assert 50 < cached <= 60 + 2


def test_lag_of_queue_that_is_not_pulled_grows_with_sends(group: GroupBench) -> None:
    """Its cache is full because its listener stands still: that is when the lag is looked at."""
    consumer, _ = group.start(thresholds=Thresholds(max_count=50), pull_batch_size=10)
    group.workers[0].held = True
    group.time.advance(12)
    group.brokers.send(q("a:0"), *(b"x" for _ in range(200)))
    group.time.advance(60)
    assert consumer.stats().lag == 200
    group.brokers.send(q("a:0"), *(b"x" for _ in range(1000)))
    group.time.advance(21)
    assert consumer.stats().lag == 1200
    group.workers[0].let_go()
    group.time.advance(5)
    assert consumer.stats().lag == 0


def test_lag_is_unknown_while_no_broker_reports_queue_ends(group: GroupBench) -> None:
    consumer, port = group.start()
    group.time.advance(60)
    assert consumer.stats().lag == 0
    assert not port.seen("bounds"), "pulls say it"
    group.brokers.failing |= dict.fromkeys(("pull a", "bounds a"), CallTimeout("no answer"))
    group.brokers.parked.clear()
    group.time.advance(60)
    assert consumer.stats().lag is None
    asked = [queue.broker_name for queue in port.seen("bounds")]
    assert 1 <= asked.count("a") <= 3, "a broker that does not answer is waited for once in a look"


@pytest.mark.parametrize("verb", ["queues", "committed b"])
def test_the_lag_is_unknown_until_all_queues_are(group: GroupBench, verb: str) -> None:
    group.brokers.failing[verb] = RouteNotFound("away")
    consumer, _ = group.start()
    group.time.advance(40)
    assert consumer.stats().lag is None
    del group.brokers.failing[verb]
    group.time.advance(40)
    assert consumer.stats().lag == 0


def test_bytes_of_a_topic_count_for_all_its_queues_together(group: GroupBench) -> None:
    consumer, _ = group.start(topic_max_bytes=200, pull_batch_size=10)
    group.workers[0].held = True
    group.time.advance(1)
    group.brokers.send(q("a:0"), *(b"x" for _ in range(200)))
    group.time.advance(1)
    assert consumer.stats().cached == 60


def test_pulls_say_how_much_they_want(group: GroupBench) -> None:
    _, port = group.start(pull_batch_size=7, pull_batch_size_in_bytes=77)
    group.time.advance(1)
    assert {(request.count, request.max_bytes) for request in port.seen("pull")} == {(7, 77)}


def test_errors_are_waited_out_for_as_long_as_it_is_told(group: GroupBench) -> None:
    group.brokers.failing["pull"] = RouteNotFound("gone")
    _, port = group.start(pull_delay_on_error_s=4.0)
    group.time.advance(0.6 + 4 * 3)
    assert sum(request.queue == q("a:0") for request in port.seen("pull")) == 4


@pytest.mark.parametrize(("wire", "folder"), [(None, "g"), ("INST%g_dev", "INST%g_dev")])
def test_broadcasting_offsets_file_is_named_by_wire_group(
    group: GroupBench, tmp_path: Path, wire: str | None, folder: str
) -> None:
    consumer, _ = group.start(clustering=False, offsets_folder=tmp_path, wire_group=wire)
    group.time.advance(1)
    group.brokers.send(q("a:0"), b"1")
    group.time.advance(0.1)
    consumer.stop()
    (file,) = tmp_path.rglob("offsets.json")
    assert (file.parents[1].name, file.parent.name) == (folder, "ns:9876")


def test_broadcasting_member_under_new_name_warns_of_new_start(
    group: GroupBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a container has after each restart: what was sent meanwhile is not read. So it is with name servers of other names."""
    steps = [
        ("one", "a:1", 0),
        ("one", "a:1", 0),
        ("two", "a:1", 1),
        ("two", "a:1", 0),
        ("one", "b:1", 1),
        ("one", "b:1", 0),
    ]
    for host, server, expected in steps:
        monkeypatch.setattr("platform.node", lambda host=host: host)
        caplog.clear()
        how: dict[str, Any] = {"offsets_folder": tmp_path, "consume_from": ConsumeFrom(ConsumeFromWhere.EARLIEST)}
        consumer, _ = group.start(clustering=False, name_servers=(server,), **how)
        assert caplog.text.count(f"other hosts or name servers: {tmp_path}/one@DEFAULT/g/a:1/offsets.json") == expected
        consumer.stop()
    for n in range(20):  # another user may make a million of them in a shared folder
        (tmp_path / f"planted-{n:02}" / "g").mkdir(parents=True)
        (tmp_path / f"planted-{n:02}" / "g" / "offsets.json").touch()
    monkeypatch.setattr("platform.node", lambda: "three")
    consumer, _ = group.start(clustering=False, name_servers=("a:1",), offsets_folder=tmp_path)
    (warning,) = [line for line in caplog.messages if "starts without offsets" in line]
    assert (warning.count("offsets.json,") + warning.count("offsets.json and"), " and 13 more." in warning) == (
        10,
        True,
    )
    consumer.stop()


def test_an_ordered_queue_waits_for_as_long_as_it_is_told(group: GroupBench) -> None:
    group.start(lambda messages, context: context.suspend(), ordered=True, suspend_time_s=4.0)
    group.time.advance(1.6)
    group.brokers.send(q("a:0"), b"x")
    group.time.advance(4 * 3 + 0.1)
    assert len(group.got) == 4


@pytest.mark.parametrize("ordered", [False, True])
def test_reset_of_idle_queue_kept_by_broker_outlives_member(group: GroupBench, ordered: bool) -> None:
    """Brokers from 5.2 hand it out with the next pull, and the last one waits for messages when the member stops."""
    queue = q("a:0")
    group.brokers.send(queue, *(b"x",) * 5)
    group.brokers.offsets[queue] = 5
    consumer, _ = group.start(ordered=ordered)
    group.time.advance(12)
    group.brokers.offsets[queue] = 1
    consumer.stop(0.1)
    assert group.brokers.offsets[queue] == 1


def test_final_commit_of_immediate_stop_has_its_own_timeout(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a broker that needs a moment does not store what is finished, and it comes again."""
    consumer, port = group.start()
    commit, left = port.commit, list[float]()
    group.time.advance(3)
    group.brokers.send(q("a:0"), b"x")
    group.time.advance(0.1)
    assert group.bodies() == [b"x"]
    monkeypatch.setattr(port, "commit", lambda *given: (left.append(given[2].end_s), commit(*given))[1])
    began = group.time.monotonic()
    consumer.stop(0)
    assert group.brokers.offsets[q("a:0")] == 1
    assert all(at >= began + TIMEOUT_S for at in left)
    assert left


def test_message_that_lacked_listener_thread_is_consumed_later(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full queue is not pulled: without another try it would stand for ever."""
    group.start()
    group.time.advance(1)
    workers, waiting = group.workers[0], list[Work]()
    monkeypatch.setattr(workers, "submit", lambda *work: waiting.extend(work))  # as ``Workers`` without a thread
    monkeypatch.setattr(workers, "start_missing_threads", lambda: [waiting.pop(0)() for _ in range(len(waiting))])
    group.brokers.send(q("a:0"), b"x")
    group.time.advance(1)
    assert (len(waiting), group.bodies()) == (1, [])
    group.time.advance(60)
    assert group.bodies() == [b"x"]
