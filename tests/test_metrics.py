"""Figures of queries: Prometheus text, JSON lines, and the dashboard that shows them; with a real query in tests/spark."""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import yaml

from rocketmq_spark.base import exposition, extras
from rocketmq_spark.errors import OptionError
from rocketmq_spark.spark.monitoring import metrics_listener
from rocketmq_spark.spark.monitoring.metrics_listener import (
    METRICS,
    MetricsListener,
    QueryMetrics,
    metric_families,
    metrics_table,
)
from rocketmq_spark.spark.sink.report import BrokerCounts, Written
from tests.test_exposition import get

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "conf" / "grafana-dashboard.json").read_text("utf-8"))
WRITER = SimpleNamespace(total=Written(7, 700, 2, 1, {"broker-a": BrokerCounts(7, 700, 2, 1)}, 3, 11, 2, 4))


def told(batch=0, rows=5, sink_rows=-1, **more):
    report = {"lag": 4, "behindMs": 70, "queues": 2, "queuesAway": 1, "brokersAway": ["b"], "losses": {}, **more}
    return {
        "batchId": batch,
        "timestamp": "2026-01-31T12:00:00.000Z",
        "numInputRows": rows,
        "durationMs": {"triggerExecution": 50},
        "sources": [{"latestOffset": json.dumps({**report, "topics": {}, "v": 1})}],
        "sink": {"numOutputRows": sink_rows},
    }


def samples(figures):
    return {
        (name.removeprefix("rocketmq_spark_"), *labels.values()): value for name, labels, value in figures.samples()
    }


def event(name="orders", ident="id-1", progress=None, run=1):
    of = SimpleNamespace(id=ident, name=name, runId=f"{ident}-{run}", json=json.dumps(progress))
    return SimpleNamespace(id=ident, name=name, runId=of.runId, progress=of)


def test_figures_that_spark_does_not_ask_for_have_no_samples() -> None:
    figures = QueryMetrics("q")
    figures.record_progress({**told(), "sources": [{"latestOffset": '{"topics": {}, "v": 1}'}]}, 1.0)
    names = {name.split("_", 2)[-1] for name, _, _ in figures.samples()}
    assert names == {"query_active", "progress_timestamp_seconds", "rows_total", "batches_total", "batch_seconds"}


def test_a_progress_as_figures():
    figures = QueryMetrics("orders")
    figures.record_progress(told(sink_rows=5, losses={"truncated": {"ranges": 1, "offsets": 9}}), 17.5)
    found = samples(figures)
    assert found["query_active",] == 1
    assert found["progress_timestamp_seconds",] == 17.5
    assert (found["lag_messages",], found["behind_seconds",]) == (4, 0.07)
    assert (found["queues",], found["queues_away",], found["brokers_away",]) == (2, 1, 1)
    assert (found["rows_total",], found["batches_total",], found["batch_seconds",]) == (5, 1, 0.05)
    assert found["sink_rows_total",] == 5
    assert (found["lost_ranges_total", "truncated"], found["lost_offsets_total", "truncated"]) == (1, 9)
    assert (found["lost_ranges_total", "queue_gone"], found["lost_offsets_total", "queue_gone"]) == (0, 0)


def test_counters_add_up_and_a_batch_counts_once():
    figures = QueryMetrics("orders")
    for batch, rows in ((0, 5), (1, 3), (1, 0), (2, 2)):
        figures.record_progress(told(batch, rows, sink_rows=rows), 1.0)
    found = samples(figures)
    assert (found["rows_total",], found["batches_total",], found["sink_rows_total",]) == (10, 3, 10)


def test_what_is_not_known_has_no_line():
    figures = QueryMetrics("orders")
    figures.record_progress(told(lag=None, behindMs=None, losses={"went_back": {"ranges": 1, "offsets": None}}), 1.0)
    found = samples(figures)
    assert (
        not {("lag_messages",), ("behind_seconds",), ("sink_rows_total",), ("lost_offsets_total", "went_back")}
        & found.keys()
    )
    assert found["lost_ranges_total", "went_back"] == 1


def test_before_a_progress_only_that_it_runs_is_known():
    assert samples(QueryMetrics("orders")) == {("query_active",): 1}


def test_the_counts_of_a_writer():
    figures = QueryMetrics("orders", WRITER)
    line = figures.record_progress(told(), 1.0)
    found = samples(figures)
    assert {name[0]: value for name, value in found.items() if len(name) == 1 and name[0].startswith("sink")} == {
        "sink_rows_total": 7,
        "sink_bytes_total": 700,
        "sink_batches_total": 2,
        "sink_retries_total": 1,
        "sink_spooled_total": 3,
        "sink_already_stored_total": 11,
        "sink_confirmed_total": 2,
        "sink_unmatched_total": 4,
    }
    assert (found["sink_broker_rows_total", "broker-a"], found["sink_broker_failures_total", "broker-a"]) == (7, 1)
    assert line["sink"]["brokers"]["broker-a"]["failures"] == 1
    assert [line["sink"][name] for name in ("rows", "sent", "already_stored", "confirmed", "unmatched")] == [
        7,
        5,
        11,
        2,
        4,
    ]


def test_prometheus_text():
    figures = QueryMetrics('o"r\\d\ners', WRITER)
    figures.record_progress(told(), 1.0)
    lines = exposition.text(metric_families([figures, QueryMetrics("other")])).splitlines()
    assert "# TYPE rocketmq_spark_query_active gauge" in lines
    assert 'rocketmq_spark_query_active{query="other"} 1.0' in lines
    assert r'rocketmq_spark_lost_ranges_total{cause="truncated",query="o\"r\\d\ners"} 0.0' in lines
    shape = re.compile(
        r'# (HELP \w+ .+|TYPE \w+ (gauge|counter))|\w+\{\w+="([^"\\]|\\["\\n])*"(,\w+="([^"\\]|\\["\\n])*")?\} [0-9.e+]+'
    )
    assert [line for line in lines if not shape.fullmatch(line)] == []


def test_every_figure_has_a_row_and_can_be_seen():
    figures = QueryMetrics("orders", WRITER)
    figures.record_progress(told(), 1.0)
    figures.record_idle(2.0)
    assert {name for name, *_ in figures.samples()} == {metric.name for metric in METRICS}


def test_the_listener_writes_both_files(tmp_path):
    prometheus, lines = tmp_path / "q.prom", tmp_path / "q.jsonl"
    listener = MetricsListener(prometheus, lines, WRITER, "orders")
    listener.onQueryStarted(event())
    listener.onQueryStarted(event("other", "id-2"))
    listener.onQueryProgress(event(progress=told()))
    listener.onQueryProgress(event("other", "id-2", told(1)))
    listener.onQueryTerminated(event())
    found = prometheus.read_text()
    assert 'rocketmq_spark_query_active{query="orders"} 0.0' in found
    assert 'rocketmq_spark_query_active{query="other"} 1.0' in found
    assert re.findall(r"sink_rows_total\{.*", found) == ['sink_rows_total{query="orders"} 7.0']
    first, second = map(json.loads, lines.read_text().splitlines())
    assert (first["query"], first["lag"], first["sink"]["rows"]) == ("orders", 4, 7)
    assert (second["query"], second["batchId"], "sink" in second) == ("other", 1, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.jsonl", "q.prom"]


def test_a_port_serves_the_same_until_it_is_closed(tmp_path):
    listener = MetricsListener(tmp_path / "q.prom", port=0)
    listener.onQueryStarted(event())
    listener.onQueryProgress(event(progress=told()))
    assert get(listener.url) == (200, (tmp_path / "q.prom").read_text(), "text/plain; version=0.0.4; charset=utf-8")
    with pytest.raises(OptionError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*in use"):
        MetricsListener(port=int(listener.url.split(":")[2].split("/")[0]))
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        get(listener.url)
    listener.close()


def test_a_registry_has_the_figures_among_its_own():
    listener = MetricsListener(port=0)
    listener.onQueryStarted(event())
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("mine", "Of the program", registry=registry).set(3)
    registry.register(listener)
    listener.onQueryProgress(event(progress=told()))
    assert registry.get_sample_value("mine") == 3
    assert registry.get_sample_value("rocketmq_spark_lag_messages", {"query": "orders"}) == 4
    assert registry.get_sample_value("rocketmq_spark_rows_total", {"query": "orders"}) == 5
    listener.close()


def test_without_prometheus_client_only_json_lines_are_written(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "prometheus_client")
    for given in ({"prometheus": tmp_path / "q.prom"}, {"port": 0}):
        with pytest.raises(OptionError, match=r"needs prometheus-client.*pip install 'prometheus-client>="):
            MetricsListener(**given)
    listener = MetricsListener(json_lines=tmp_path / "q.jsonl")
    listener.onQueryProgress(event(progress=told()))
    assert json.loads((tmp_path / "q.jsonl").read_text())["lag"] == 4


def test_invalid_unicode_name_is_replaced_in_world_readable_file(tmp_path):
    (tmp_path / ".q.prom.part").symlink_to(tmp_path / "victim")  # a name that others could foresee
    listener = MetricsListener(tmp_path / "q.prom")
    listener.onQueryStarted(event("\ud800"))
    assert 'query="?"' in (tmp_path / "q.prom").read_text()
    assert not (tmp_path / "victim").exists()
    assert stat.S_IMODE((tmp_path / "q.prom").stat().st_mode) == 0o644
    (tmp_path / "q.prom").unlink()
    (tmp_path / "q.prom").mkdir()  # cannot be replaced
    listener.onQueryIdle(event("\ud800"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".q.prom.part", "q.prom"], "nothing is left behind"


def test_a_query_that_ran_already_is_heard(tmp_path):
    listener = MetricsListener(json_lines=tmp_path / "q.jsonl")
    listener.onQueryProgress(event(None, "id-7", told()))
    listener.onQueryIdle(event())
    assert json.loads((tmp_path / "q.jsonl").read_text())["query"] == "id-7"


def test_an_idle_query_is_told_from_one_whose_batch_takes_long(tmp_path):
    listener = MetricsListener(tmp_path / "q.prom")
    listener.onQueryStarted(event())
    assert "idle_timestamp" not in (tmp_path / "q.prom").read_text()
    listener.onQueryIdle(event("nobody", "id-2"))
    assert "idle_timestamp" not in (tmp_path / "q.prom").read_text()
    listener.onQueryIdle(event())
    assert 'rocketmq_spark_idle_timestamp_seconds{query="orders"} ' in (tmp_path / "q.prom").read_text()


def test_a_query_that_starts_again_begins_at_nothing(tmp_path):
    listener = MetricsListener(tmp_path / "q.prom")
    for _ in range(2):
        listener.onQueryStarted(event())
        listener.onQueryProgress(event(progress=told()))
    assert 'rocketmq_spark_rows_total{query="orders"} 5.0' in (tmp_path / "q.prom").read_text()


def test_late_end_of_earlier_run_leaves_later_run_active(tmp_path):
    """Spark tells of a start at once, and of an end through a queue in which other listeners take their time."""
    prometheus, lines = tmp_path / "q.prom", tmp_path / "q.jsonl"
    listener = MetricsListener(prometheus, lines)
    listener.onQueryStarted(event())
    listener.onQueryStarted(event(run=2))
    listener.onQueryProgress(event(progress=told(0, rows=2), run=2))
    listener.onQueryProgress(event(progress=told(7, rows=3)))
    listener.onQueryIdle(event())
    listener.onQueryTerminated(event())
    listener.onQueryProgress(event(progress=told(8), run=2))
    found = prometheus.read_text()
    assert 'rocketmq_spark_query_active{query="orders"} 1.0' in found
    assert 'rocketmq_spark_rows_total{query="orders"} 7.0' in found
    assert "idle_timestamp" not in found
    assert [json.loads(line)["batchId"] for line in lines.read_text().splitlines()] == [0, 7, 8]
    listener.onQueryTerminated(event(run=2))
    assert 'rocketmq_spark_query_active{query="orders"} 0.0' in prometheus.read_text()


def test_query_with_new_checkpoint_writes_each_figure_once(tmp_path):
    """Who reads the file refuses it where a figure stands twice."""
    listener = MetricsListener(tmp_path / "q.prom")
    for ident in ("id-1", "id-2"):
        listener.onQueryStarted(event(ident=ident))
        listener.onQueryProgress(event(ident=ident, progress=told()))
        listener.onQueryTerminated(event(ident=ident))
    listener.onQueryStarted(event(ident="id-3"))
    names = [line.rpartition(" ")[0] for line in (tmp_path / "q.prom").read_text().splitlines() if line[0] != "#"]
    assert sorted(names) == sorted(set(names))
    assert 'rocketmq_spark_query_active{query="orders"} 1.0' in (tmp_path / "q.prom").read_text()


def test_queries_that_ended_long_ago_are_forgotten(tmp_path):
    listener = MetricsListener(tmp_path / "q.prom")
    for number in range(150):
        listener.onQueryStarted(event(None, f"id-{number}"))
        listener.onQueryTerminated(event(None, f"id-{number}"))
    found = re.findall(r'query="id-(\d+)"', (tmp_path / "q.prom").read_text())
    assert sorted(map(int, found)) == list(range(50, 150))


def test_a_file_that_cannot_be_written_disturbs_nobody(tmp_path, caplog):
    listener = MetricsListener(tmp_path / "gone" / "q.prom")
    listener.onQueryStarted(event())
    assert "the metrics of queries cannot be written" in caplog.text


def test_a_file_is_needed():
    with pytest.raises(OptionError, match="prometheus=… or json_lines=…"):
        MetricsListener()


def expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_every_figure_stands_on_the_page():
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert page[page.index("## Figures") :] == metrics_table(), "run: make docs"
    assert all(page.count(f"| `{metric.name}` | {metric.kind} |") == 1 for metric in METRICS)


def test_the_dashboard_shows_every_figure_and_no_other():
    shown = {name for expression in expressions() for name in re.findall(r"rocketmq_spark_\w+", expression)}
    assert shown == {metric.name for metric in METRICS}


def test_dashboard_rates_only_counters_and_filters_by_query_name():
    counters = {metric.name for metric in METRICS if metric.kind == "counter"}
    for expression in expressions():
        for name in re.findall(r"rocketmq_spark_\w+", expression):
            assert re.search(rf'{name}\{{query=~"\$query"\}}', expression), expression
            rated = re.search(rf"(rate|increase)\({name}\{{", expression)
            assert bool(rated) == (name in counters), expression


def test_panels_of_the_dashboard_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_alerts_are_about_figures_that_there_are():
    """conf/alerts.yml as Prometheus reads it; promtool, which would check the expressions, cannot be had here."""
    groups = yaml.safe_load((ROOT / "conf" / "alerts.yml").read_text("utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 7
    known = {metric.name for metric in METRICS}
    page = (ROOT / "docs" / "monitoring.md").read_text("utf-8")
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        names = set(re.findall(r"rocketmq_spark_\w+", rule["expr"]))
        assert names, rule["alert"]
        assert names <= known, rule["alert"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert {"summary", "description"} == set(rule["annotations"])
        assert rule["labels"]["severity"] in {"critical", "warning"}
    assert all(f"`{rule['alert']}`" in page for rule in rules[:3])


@pytest.mark.parametrize("bits", [0o700, 0o777, 0o1777])
def test_lines_follow_no_link_that_others_may_have_put_there(tmp_path, caplog, bits):
    """A link of the user's own, as to standard output, is followed."""
    folder, precious = tmp_path / "folder", tmp_path / "precious"
    folder.mkdir()
    folder.chmod(bits)
    precious.write_text("important\n")
    lines = folder / "q.jsonl"
    lines.symlink_to(precious)
    listener = MetricsListener(json_lines=lines)
    listener.onQueryProgress(event(progress=told()))
    followed = len(precious.read_text().splitlines()) == 2
    assert (followed, "it is a link" in caplog.text) == (bits != 0o777, bits == 0o777)


def test_the_mode_of_a_file_that_is_exchanged_stays(tmp_path, monkeypatch):
    """The folder may belong to another account, as that of node_exporter does."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    real = tempfile.mkstemp

    def exchanged(**how):
        number, part = real(**how)
        os.unlink(part)
        os.symlink(secret, part)
        return number, part

    monkeypatch.setattr(tempfile, "mkstemp", exchanged)
    metrics_listener.replace_readable_file(tmp_path / "q.prom", b"1")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
