from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rocketmq_spark.errors import OptionError
from rocketmq_spark.producer.fault_tolerance import CURRENT_RELEASE, RELEASE_4, FaultTable, FaultTables, fault_tables
from rocketmq_spark.queues.selection import RoundRobin
from tests.queues import names, q, qs, read

CASES = read("fault_strategy")
NOW = 1_000_000


def table(**options: Any) -> FaultTable:
    return FaultTable(enabled=True, **options)


@pytest.mark.parametrize("case", CASES["durations"], ids=lambda c: str(c["latency_ms"]))
def test_durations_of_the_java_class(case: dict[str, int]) -> None:
    assert CURRENT_RELEASE.duration_ms(case["latency_ms"]) == case["not_available_ms"]


@pytest.mark.parametrize("case", CASES["sequences"], ids=lambda c: str(c["index_before_first"]))
def test_sequences_of_the_java_class(case: dict[str, Any]) -> None:
    faults = table(detecting=True)
    for broker in {*case["unavailable"], *case["unreachable"]}:
        away, reachable = broker in case["unavailable"], broker not in case["unreachable"]
        faults.report(broker, 0, NOW, isolated=away, reachable=reachable)
    faults.enabled = case["latency_fault_enabled"]
    queues = [q(text) for text in case["queues"]]
    index = RoundRobin(counter=case["index_before_first"])
    for step in case["steps"]:
        assert names([faults.pick(queues, index, step["last_broker"], NOW)]) == step["selected"]


SIX = "a:0-1 b:0-1 c:0-1"
STATES: list[tuple[dict[str, bool], str | None, str, int]] = [
    ({}, None, "a:0 a:1 b:0 b:1", 3),
    ({}, "b", "a:0 a:1 c:0", 4),
    ({"a": True}, None, "b:0 b:1 c:0 c:1", 5),
    ({"a": True}, "b", "c:0 c:1 c:0", 10),
    ({"a": True, "b": True, "c": False}, None, "a:0 a:1 b:0 b:1", 27),
    ({"a": True, "b": True, "c": False}, "b", "a:0 a:1 a:0", 24),
    ({"a": False, "b": False, "c": False}, None, "a:0 a:1 b:0 b:1", 51),
    ({"a": False, "b": False, "c": False}, "b", "a:0 a:1 b:0", 38),
]


@pytest.mark.parametrize(("isolated", "last", "picks", "after"), STATES)
def test_and_0_28_available_then_reachable_then_any(
    isolated: dict[str, bool], last: str | None, picks: str, after: int
) -> None:
    faults, index, queues = table(detecting=True), RoundRobin(counter=-1), qs(SIX)
    for broker, reachable in isolated.items():
        faults.report(broker, 3, NOW, isolated=True, reachable=reachable)
    assert names([faults.pick(queues, index, last, NOW + 1) for _ in picks.split()]) == picks
    assert index.counter == after


OLD = [(549, 0), (550, 30000), (999, 30000), (1000, 60000), (1999, 60000), (2000, 120000), (2999, 120000),
       (3000, 180000), (14999, 180000), (15000, 600000)]  # fmt: skip
NEW = [(0, 0), (49, 0), (99, 0), (549, 0), (550, 2000), (1799, 2000), (1800, 5000), (2999, 5000), (3000, 6000),
       (4999, 6000), (5000, 10000), (14999, 10000), (15000, 30000), (100000, 30000)]  # fmt: skip


@pytest.mark.parametrize(("preset", "rows"), [(RELEASE_4, OLD), (CURRENT_RELEASE, NEW)])
def test_both_tables(preset: FaultTables, rows: list[tuple[int, int]]) -> None:
    assert [(latency, preset.duration_ms(latency)) for latency, _ in rows] == rows


@pytest.mark.parametrize(("preset", "isolation"), [("current", 10_000), ("4.x", 600_000)])
def test_failure_isolates_for_the_presets_time(preset: str, isolation: int) -> None:
    faults = table(tables=fault_tables(preset))
    faults.report("a", 1, NOW, isolated=True)
    assert not faults.available("a", NOW + isolation - 1)
    assert faults.available("a", NOW + isolation)


def test_broker_is_available_again_at_its_time() -> None:
    faults = table()
    faults.report("a", 600, NOW)
    assert [faults.available("a", NOW + d) for d in (0, 1999, 2000)] == [False, False, True]
    assert faults.available("never reported", NOW)


def test_isolation_lasts_its_duration_and_keeps_real_latency() -> None:
    faults = table()
    faults.report("a", 7, NOW, isolated=True)
    assert (faults.faults["a"].latency_ms, faults.faults["a"].available_at_ms) == (7, NOW + 10_000)


def test_a_fast_success_does_not_end_an_isolation() -> None:
    faults = table()
    faults.report("a", 3000, NOW)
    faults.report("a", 1, NOW + 10)
    assert not faults.available("a", NOW + 5999)
    assert faults.available("a", NOW + 6000)


def test_the_published_list_is_never_changed() -> None:
    faults, index, queues = table(), RoundRobin(random.Random(1)), qs(SIX)
    published = tuple(queues)
    for i in range(1000):
        faults.report("abc"[i % 3], 20_000, NOW, isolated=bool(i % 2), reachable=bool(i % 5))
        assert faults.pick(queues, index, "abc"[i % 3], NOW) in published
    assert tuple(queues) == published


def test_switched_off_it_neither_records_nor_avoids() -> None:
    faults = FaultTable()
    faults.report("a", 60_000, NOW, isolated=True)
    assert faults.faults == {}
    assert names([faults.pick(qs("a:0-1"), RoundRobin(counter=-1), None, NOW)]) == "a:0"


def test_switching_back_and_forth_keeps_what_was_learned() -> None:
    faults, queues = table(), qs("a:0 b:0")
    faults.report("a", 60_000, NOW)
    index = RoundRobin(counter=-1)
    assert names([faults.pick(queues, index, None, NOW) for _ in range(3)]) == "b:0 b:0 b:0"
    faults.enabled = False
    assert names([faults.pick(queues, index, None, NOW) for _ in range(2)]) == "a:0 b:0"
    faults.enabled = True
    assert names([faults.pick(queues, index, None, NOW) for _ in range(2)]) == "b:0 b:0"
    faults.tables = RELEASE_4
    faults.report("b", 600, NOW)
    assert not faults.available("b", NOW + 29_999)


def test_reachability_counts_only_while_a_detector_keeps_it_up() -> None:
    faults = table()
    faults.report("a", 1, NOW, isolated=True, reachable=False)
    assert faults.reachable("a")
    faults.detecting = True
    assert not faults.reachable("a")
    faults.record_probe("a", has_answered=False)
    assert not faults.reachable("a")
    faults.record_probe("a", has_answered=True)
    assert faults.reachable("a")
    assert not faults.available("a", NOW + 1)  # a probe never ends an isolation
    faults.record_probe("unknown", has_answered=True)
    assert "unknown" not in faults.faults


def test_probes_are_due_once_an_interval() -> None:
    faults = table(detecting=True)
    faults.report("a", 1, NOW)
    assert faults.brokers_to_probe(NOW, 2000) == ["a"]
    assert faults.brokers_to_probe(NOW + 1999, 2000) == []
    assert faults.brokers_to_probe(NOW + 2000, 2000) == ["a"]


def test_brokers_of_no_route_are_forgotten() -> None:
    faults = table()
    for broker in "abc":
        faults.report(broker, 1, NOW)
    faults.retain({"b"})
    assert set(faults.faults) == {"b"}


def test_custom_tables_and_what_is_wrong_with_them() -> None:
    assert fault_tables("current", [10, 20], [1, 2]).duration_ms(15) == 1
    assert fault_tables("4.x", durations_ms=[1] * 7).failure_latency_ms == 30_000
    with pytest.raises(OptionError, match=r"names '5.x'"):
        fault_tables("5.x")
    with pytest.raises(OptionError, match=r"'notAvailableDuration' is \[1\]; expected 2 durations"):
        fault_tables("current", [10, 20], [1])
    for bad in ([20, 10], [10, 10], [-1, 5]):
        with pytest.raises(OptionError, match=r"'latencyMax' is .*expected growing"):
            fault_tables("current", bad, [1, 2])
    with pytest.raises(OptionError, match="'notAvailableDuration'"):
        fault_tables("current", [10, 20], [1, -2])


class FaultModel(RuleBasedStateMachine):
    """The table against a dictionary of end times and a set of unreachable brokers."""

    brokers = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.table = table(detecting=True)
        self.index = RoundRobin(random.Random(0))
        self.now = NOW
        self.ends: dict[str, int] = {}
        self.unreachable: set[str] = set()

    @rule(broker=brokers, latency=st.integers(0, 40_000), isolated=st.booleans(), reachable=st.booleans())
    def report(self, broker: str, latency: int, isolated: bool, reachable: bool) -> None:
        self.table.report(broker, latency, self.now, isolated, reachable)
        counted = 10_000 if isolated else latency
        duration = max(
            [
                d
                for t, d in zip(CURRENT_RELEASE.latency_max_ms, CURRENT_RELEASE.not_available_ms, strict=True)
                if counted >= t
            ]
            or [0]
        )
        self.ends[broker] = max(self.ends.get(broker, 0), self.now + duration if duration else 0)
        (self.unreachable.discard if reachable else self.unreachable.add)(broker)

    @rule(ms=st.integers(0, 12_000))
    def wait(self, ms: int) -> None:
        self.now += ms

    @rule(broker=brokers)
    def probe(self, broker: str) -> None:
        self.table.record_probe(broker, has_answered=True)
        self.unreachable.discard(broker)

    @rule(kept=st.sets(brokers))
    def route(self, kept: set[str]) -> None:
        self.table.retain(kept)
        self.ends = {b: end for b, end in self.ends.items() if b in kept}
        self.unreachable &= kept

    @rule(last=st.none() | brokers)
    def pick(self, last: str | None) -> None:
        others = set("abc") - {last}
        good = {b for b in others if self.now >= self.ends.get(b, 0)} or others - self.unreachable or set("abc")
        assert self.table.pick(qs(SIX), self.index, last, self.now).broker_name in good

    @invariant()
    def agree(self) -> None:
        for broker in "abc":
            assert self.table.available(broker, self.now) == (self.now >= self.ends.get(broker, 0))
            assert self.table.reachable(broker) == (broker not in self.unreachable)


TestFaultModel = FaultModel.TestCase
TestFaultModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
