"""README.md says only what works: its links lead somewhere, its programs run; its commands are read by ``tests/test_docs.py``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark import Message
from rocketmq_spark.session import Producer
from tests.examples.test_orders_pipeline import EXAMPLE
from tests.fix_spark import ROOT, environment

TEXT = (ROOT / "README.md").read_text("utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_make_targets_exist() -> None:
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_job_takes_the_arguments_that_are_shown() -> None:
    shown = re.findall(r"--[a-z-]+", TEXT.partition("spark-submit examples/orders_pipeline.py")[2].partition("```")[0])
    assert set(shown) == {"--name-server", "--input", "--output", "--checkpoint"}
    assert all(f'"{name}"' in EXAMPLE.read_text() for name in shown)


def execute(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), cwd=folder, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(1200)
def test_the_ten_lines_run(rocketmq, make_topic, tmp_path: Path) -> None:
    source, sink = make_topic(), make_topic()
    with Producer(name_server=rocketmq.name_server, group="readme") as producer:
        producer.send(Message(source, b"hello", tags="vip", keys=["1"]))
    program = PROGRAMS[0]
    for shown, meant in (
        ("127.0.0.1:9876", rocketmq.name_server),
        ('"orders-upper"', repr(sink)),
        ('"orders"', repr(source)),
        ("/tmp/orders-upper", str(tmp_path / "checkpoint")),
        ("query.awaitTermination()", "query.processAllAvailable()"),
    ):
        assert shown in program
        program = program.replace(shown, meant)
    read_back = f"""
found = spark.read.format("rocketmq").option("nameServer", "{rocketmq.name_server}").option("subscribe", "{sink}")
print(found.load().selectExpr("cast(body as string)", "tags", "keys").collect())
"""
    assert "[Row(body='HELLO', tags='vip', keys=['1'])]" in execute(program + read_back, tmp_path)


def test_the_client_alone_runs(tmp_path: Path) -> None:
    assert execute(PROGRAMS[1], tmp_path).startswith("SEND_OK orders/broker-a/")


def test_the_member_of_a_group_runs(tmp_path: Path) -> None:
    assert execute(PROGRAMS[2], tmp_path) == "orders b'one'\n"


def test_the_rest_of_the_programs_are_one_line_that_imports() -> None:
    assert PROGRAMS[3:] == ["from rocketmq_spark import register\n\nregister(spark)\n"]
