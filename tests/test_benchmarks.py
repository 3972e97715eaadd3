"""What the benchmarks conclude from figures; the figures themselves are nobody's test."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from benchmarks import harness, markdown, scale, targets, trips
from benchmarks.harness import Case, Result
from benchmarks.scripted import Layout, Scripted
from benchmarks.targets import Target, Verdict
from rocketmq_spark import options
from rocketmq_spark.wire import properties

FOUND = {
    "stock 100": {
        "ours": {"median": 800.0},
        "slow": {"median": 100.0},
        "fast": {"median": 400.0},
        "raw": {"median": 2000.0, "server_us": 0.6},
        "ceiling": {"median": 2000.0, "python_us": 0.1, "jvm_us": 0.9},
    },
    "latency": {"low": {"p50": 100.0}},
}


def test_a_ratio_is_to_the_best_of_the_peers():
    assert targets.ratio("stock", "ours", "slow", "fast")(FOUND, 100) == 2.0


def test_the_bound_is_what_two_cores_give_an_ideal_client():
    bound = targets.two_core_bound("stock", "raw", ("stock", "ceiling"), "slow", "fast")
    assert bound(FOUND, 100) == pytest.approx(2000 / 1.6 / 400)


@pytest.mark.parametrize(
    ("wanted", "at_most", "bound", "held"),
    [
        (2.0, False, None, True),
        (2.1, False, None, False),
        (2.1, False, 2.05, True),  # the machine gives no more
        (2.5, False, 2.4, False),  # it would give more
        (2.0, True, None, True),
        (1.9, True, None, False),
    ],
)
def test_held_or_not(wanted, at_most, bound, held):
    target = Target("t", (wanted,), lambda *_: 2.0, at_most)
    assert Verdict(target, 100, wanted, 2.0, bound).held is held


def test_what_was_not_measured_is_neither_held_nor_not():
    missing = Target("t", (1.0, 1.0), targets.ratio("stock", "ours", "kafka"))
    results = list(targets.verdicts(FOUND, [missing]))
    assert [(v.size, v.value, v.held) for v in results] == [(100, None, None), (1024, None, None)]


def test_the_quick_run_measures_its_cases_only(monkeypatch):
    ran = []
    cases = [Case(name, lambda name=name: ran.append(name) or Result(1)) for name in (targets.SPARK, targets.PLAIN)]
    monkeypatch.setattr(harness, "ONLY", targets.QUICK)
    harness.rounds(cases, 2)
    assert ran == [targets.SPARK] * 3
    assert harness.report("t", cases, 100).keys() == {targets.SPARK}


def test_the_quick_run_judges_the_ratios_that_users_care_about():
    figures = {"median": 1.0, "server_us": 1.0, "python_us": 1.0, "jvm_us": 1.0, "p50": 1.0}
    quick = {f"{section} {size}": dict.fromkeys(targets.QUICK, figures) for section in ("stock", "write", "consume")
             for size in harness.SIZES}  # fmt: skip
    assert {v.target.name for v in targets.verdicts(quick) if v.value is not None} == {
        "batch read of the best Java consumer, stock",
        "batch read of LitePull defaults, stock",
        "batch read of spark-sql-kafka, stock",
        "AvailableNow of the batch read",
        "batch write of Java's batch producer",
        "batch write of spark-sql-kafka",
        "write by shardingKey of round robin",
        "Consumer of Java's push consumer",
        "poll_arrow of LitePull, 32 a pull",
    }


def test_kafkas_columns_may_cost_a_tenth():
    def found(kafka: float) -> harness.Found:
        names = {
            targets.SPARK: 1.0,
            targets.HASH: 1.0,
            targets.KAFKA_COLUMNS: kafka,
            targets.WRITE_KAFKA_COLUMNS: kafka,
        }
        figures = {name: {"median": median} for name, median in names.items()}
        return {f"{section} {size}": figures for section in ("stock", "write") for size in harness.SIZES}

    for kafka, held in ((0.91, True), (0.89, False)):
        results = [v for v in targets.verdicts(found(kafka)) if "kafkaColumns" in v.target.name]
        assert [v.held for v in results] == [held] * 4


def test_a_wrong_count_ends_the_run():
    harness.expect("fine", 3, 3)
    with pytest.raises(SystemExit, match="5 messages instead of 3"):
        harness.expect("batch read", 5, 3)


def test_cases_take_turns_and_warm_ups_do_not_count():
    order = []

    def case(name: str, warm_up: bool = True) -> harness.Case:
        def run() -> harness.Result:
            order.append(name)
            return harness.Result(10, 2.0)

        return harness.Case(name, run, warm_up)

    cases = [case("a"), case("b", warm_up=False)]
    harness.rounds(cases, 2)
    assert order == ["a", "a", "b", "a", "b"]
    assert [len(c.results) for c in cases] == [2, 2]
    assert cases[0].median() == 5.0


def test_a_peer_that_fails_twice_is_not_measured():
    tries = []

    def fail():
        tries.append(1)
        if len(tries) != 2:
            raise harness.PeerFailed("gave up")
        return Result(5)

    peer = Case("peer", fail, warm_up=False)
    harness.rounds([peer], 2)
    assert (len(tries), len(peer.results)) == (4, 1)
    assert list(harness.report("t", [Case("none", fail), peer], 100)) == ["peer"]


def test_a_proxy_has_a_column_where_there_is_one(capsys):
    without = Case("remoting", lambda: Result(0), results=[Result(10, cpu=harness.Cpu(server=2e-5))])
    through = Case("grpc", lambda: Result(0), results=[Result(10, cpu=harness.Cpu(proxy=5e-5))])
    assert "proxy_us" not in harness.report("t", [without], 100)["remoting"]
    assert "proxy" not in capsys.readouterr().out
    found = harness.report("t", [without, through], 100)
    assert [figures["proxy_us"] for figures in found.values()] == [0.0, pytest.approx(5.0)]
    assert found["remoting"]["server_us"] == pytest.approx(2.0)
    assert "proxy µs" in capsys.readouterr().out


def test_cpu_of_this_process_is_python():
    me = "python", os.getpid()
    before = harness.spent_by([])
    while harness.spent_by([])[me] == before[me]:
        sum(range(100_000))
    assert "server" not in {kind for kind, _ in before}


def test_a_process_counts_although_a_thread_of_it_ends_meanwhile(monkeypatch):
    there = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["no such thread", *there(path)])
    assert ("python", os.getpid()) in list(harness.family([]))


def test_markdown():
    document = {
        "targets": [{"target": "t", "size": None, "wanted": 1.0, "value": None, "two_core_bound": None, "held": None}],
        "figures": {"stock 100": {"ours": {"median": 812.4, "python_us": 0.5}, "theirs": {"cpu": 0.25}}},
    }
    lines = list(markdown.tables(document))
    assert "| t |  | 1 | not measured |  |  |" in lines
    assert "| ours | 812 | 0.50 |  |" in lines
    assert "| theirs |  |  | 0.25 |" in lines
    assert "|  | median | python µs | cpu |" in lines


@pytest.fixture
def counter():
    before, counter = sys.getprofile(), trips.CallCounter()
    sys.setprofile(counter.on_event)
    threading.setprofile(counter.on_event)
    yield counter
    sys.setprofile(before)
    threading.setprofile(before)


def test_calls_and_hops_of_the_package_are_counted(counter):
    """A hop enters a module from another one of the package, so the call by a test is none."""

    def count(times: int) -> trips.Count:
        with counter.counting(caller_only=True) as counts:
            for _ in range(times):
                properties.encode_properties({"a": "b"})
                sorted([1], key=lambda number: -number)
        return counts[0]

    once, thrice = count(1), count(3)
    assert (once.modules, once.hops) == (1, 0)
    assert thrice.calls == 3 * once.calls > 0
    with counter.counting(caller_only=True) as counts:
        options.parse({"nameServer": "h:1"})
    assert 1 < counts[0].modules <= counts[0].hops + 1 <= counts[0].calls


def test_other_threads_count_unless_only_the_caller_does(counter):
    def other() -> None:
        properties.encode_properties({"a": "b"})

    def count(caller_only: bool) -> int:
        with counter.counting(caller_only) as counts:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return counts[0].calls

    assert count(caller_only=True) == 0
    assert count(caller_only=False) > 0


def test_the_driver_at_a_small_scale(monkeypatch):
    """Every case once; which requests a batch costs is exact."""
    monkeypatch.setattr(scale, "REQUEST_TIMEOUT_S", 0.3)
    layout = Layout(brokers=4, topics=3, spread=2, queues=2, first=0)
    found = scale.measured(layout, turns=1, idle_s=0.2, tasks=4)
    assert found["cold"]["requests"] == 2 * layout.topics * layout.spread, "a run that begins knows all queues"
    assert found["warm"]["requests"] == 2 * layout.topics * layout.spread, "bounds, and whether topics are the same"
    assert found["one topic in 100 grows"]["requests"] == layout.topics * layout.spread + layout.spread
    assert found["4 tasks"]["tasks"] == 4
    monkeypatch.setattr(scale, "TASKS", 4)
    # The kernel counts the peak of a process later than its size: of one that has had more before, it may be a little less.
    assert all(value >= 0 for name, value in scale._summary(found).items() if name != "peak MiB")
    assert found["memory"]["connections"] == layout.brokers + 1
    cases = {
        "cold",
        "a broker hangs, first batch",
        "idle",
        "backlog",
        "a broker has moved",
        "a queue more everywhere",
        "restart",
    }
    assert cases <= found.keys()


def test_topics_whose_messages_expired_cost_half_the_requests(monkeypatch):
    monkeypatch.setattr(scale, "REQUEST_TIMEOUT_S", 0.3)
    layout = Layout(brokers=4, topics=3, spread=2, queues=2)
    with Scripted(layout) as cluster:
        _, driver, start = scale._cold(cluster)
        warm, _ = scale._warm(cluster, driver, start, 1)
    scale.session.close_all()
    assert warm["requests"] == layout.topics * layout.spread
