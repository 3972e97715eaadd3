"""The demo as a user runs it: a process, a real broker, Spark."""

import itertools
import json
import re
import shutil

import pytest
from click.testing import CliRunner

from rocketmq_spark.cli.command import app
from tests.cli.conftest import documents
from tests.fix_wheel import outside
from tests.reading import read
from tests.scale import soak

SMALL = ("--seconds", "4", "--rate", "200")


@soak
@pytest.mark.timeout(1200)
def test_from_a_wheel_counts_agree_and_next_commands_work(start, own_cache, installed, tmp_path):
    """Away from the clone, as a user runs it after ``pip install``."""
    process = start("demo", *SMALL, command=[str(installed / "rocketmq-spark")], cwd=tmp_path, env=outside())
    out, err = process.end()
    assert process.code == 0, out + err
    assert "Starting RocketMQ" in out.splitlines()[0]
    assert "All agree." in out
    progress_lines = [line for line in out.splitlines() if " s  " in line[:8]]
    assert progress_lines
    assert not any(a[7:] == b[7:] for a, b in itertools.pairwise(progress_lines)), "nothing is said twice"
    assert re.search(
        r"^kill -9 of Spark's driver in batch \d+, \d+ of its totals stored \.\.\. Spark starts again$", out, re.M
    )
    assert "none of them stored twice" in out
    assert err == ""
    run_1 = own_cache / "demo" / "run-1"
    assert list((run_1 / "tmp").glob("spark-*")), "what the killed driver left is in the folder of the run"
    assert list((run_1 / "local").iterdir())
    assert f"Data, checkpoint and Spark's log: {run_1}" in out
    assert out.partition("Try next:\n")[2].splitlines()[:3] == [
        f"  rocketmq-spark broker start --data {run_1 / 'broker'}",
        "  rocketmq-spark tail order-totals --from earliest --no-follow",
        "  rocketmq-spark topic describe orders",
    ]
    assert (f"(rocketmq-spark is in {installed}:" in out) == (shutil.which("rocketmq-spark") is None)
    written = int(out.partition("orders written to the broker")[2].split()[0].replace(",", ""))

    def cli(*arguments):
        return CliRunner().invoke(app, arguments)

    assert cli("broker", "start", "--data", str(run_1 / "broker")).exit_code == 0
    try:
        totals = documents(cli("tail", "order-totals", "--from", "earliest", "--no-follow", "--json").stdout)
        assert sum(json.loads(total["body"])["orders"] for total in totals) == written >= 700
        queues = documents(cli("topic", "describe", "orders", "--json").stdout)
        assert sum(queue["messages"] for queue in queues) == written + 1
    finally:
        cli("broker", "stop")


def through_proxy(mq):
    return "--name-server", mq.name_server, "--transport", "grpc", "--proxy-endpoint", mq.proxy_grpc


@soak
@pytest.mark.timeout(1200)
def test_on_a_cluster_that_exists_through_its_proxy_as_json(start, proxied, own_cache):
    process = start("demo", *SMALL, "--json", *through_proxy(proxied))
    out, err = process.end()
    assert (process.code, err) == (0, "")
    *progress, result = documents(out)
    assert {document["event"] for document in progress} == {"progress", "note"}
    assert result["kill"]["stored"] > 0
    accounts = result["accounts"]
    assert accounts["balanced"] is True
    assert accounts["ordersWritten"] == accounts["ordersReturned"] >= 700
    assert accounts["totalsReturned"] > 0
    assert set(result["topics"]) <= set(proxied.admin.topics())
    totals = read(proxied, subscribe=result["topics"][1], includeProperties="all")
    assert len(totals) == accounts["totalsReturned"]
    assert all("__BORNHOST" in dict(total["properties"]) for total in totals), "what a Proxy adds over gRPC"
    assert all("--name-server " + proxied.name_server in command for command in result["next"])


@pytest.mark.timeout(1200)
def test_ctrl_c_ends_it_cleanly(start, proxied, own_cache):
    process = start("demo", "--seconds", "300", *through_proxy(proxied))
    process.until("writing orders: ")
    out, err = process.ctrl_c()
    assert process.code == 130
    stopping, topics = err.splitlines()
    assert stopping == "Stopping ..."
    assert topics.count("rocketmq-spark topic delete demo-") == 2
    assert "All agree" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--proxy-endpoint", "p:1"),
        ("--transport", "grpc", "--proxy-endpoint", "p:1"),
        ("--transport", "grpc", "--name-server", "n:1"),
    ],
)
def test_a_proxy_requires_its_cluster_and_the_reverse(arguments):
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert "--proxy-endpoint requires --transport grpc and --name-server, and these two together" in done.stderr


def test_without_java_the_first_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(app, ["demo"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "Java 17 or newer is needed" in done.stderr.splitlines()[0]
    assert "apt install openjdk" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--rate", "0"], ["--rate", "x"]])
def test_wrong_usage(arguments):
    assert CliRunner().invoke(app, ["demo", *arguments]).exit_code == 2
