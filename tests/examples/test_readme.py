"""README.md and README.zh-CN.md say only what works: links lead somewhere, all blocks run in one shell from top to bottom, and
print what is shown below them; commands and programs are read by ``tests/test_docs.py`` as well."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from docs import draw_pictures
from rocketmq_spark.cli import background
from rocketmq_spark.localbroker.processes import free_port
from tests.fix_spark import ROOT, environment
from tests.scale import soak

ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
TEXT = {page: (ROOT / page).read_text("utf-8") for page in (ENGLISH, CHINESE)}
INSTALLATION = "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[spark,cli]'"
both = pytest.mark.parametrize("page", TEXT)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", TEXT[page], re.MULTILINE | re.DOTALL)


@both
def test_it_is_short(page: str) -> None:
    assert len(TEXT[page].splitlines()) <= 140


@both
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT[page])
    assert len(links) >= 20
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


@both
def test_make_targets_exist(page: str) -> None:
    targets = re.findall(r"^make (\w+)", TEXT[page], re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@both
def test_its_rates_are_those_of_the_benchmarks(page: str) -> None:
    """As in the picture of performance.md, and in the order of the sentence."""
    reads, writes = "Reads, 100 B, broker with stock limits", "Writes until they can be read, 100 B"
    cases = (
        (reads, "Spark batch read, all columns"),
        (reads, "spark-sql-kafka batch read"),
        (reads, "Java LitePull, 32 a pull"),
        (writes, "Spark batch write"),
        (writes, "spark-sql-kafka batch write"),
        (writes, "Java batches of 1 MiB, 2 threads"),
        (writes, "Spark batch write, batch topic"),
    )
    (line,) = (line for line in TEXT[page].splitlines() if "performance.md" in line and "make bench" in line)
    assert re.findall(r"\d+,000", line) == [f"{draw_pictures.figures(*case)[0]:.0f},000" for case in cases]


def test_the_chinese_page_translates_this_text() -> None:
    """It names the state of README.md that it translates, as ``git hash-object README.md`` does, and has its parts."""
    english, chinese = TEXT[ENGLISH], TEXT[CHINESE]
    blob = english.encode()
    state = hashlib.sha1(b"blob %d\0%s" % (len(blob), blob), usedforsecurity=False).hexdigest()
    assert f"<!-- README.md {state} -->" in chinese, "translate what has changed, then write this state"

    def parts(text: str) -> dict[str, list[str]]:
        links = re.findall(r"\]\(([^)]+)\)", text)
        return {
            "headings": re.findall(r"^#+ ", text, re.MULTILINE),
            "rows": re.findall(r"^\|", text, re.MULTILINE),
            "links": sorted(link for link in links if link not in TEXT),
            "code": sorted(re.findall(r"`[^`\n]+`", text)),
        }

    assert parts(chinese) == parts(english)
    assert [re.sub("#.*", "", text) for _, text in blocks(CHINESE)] == [
        re.sub("#.*", "", text) for _, text in blocks(ENGLISH)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("where", [pytest.param("clone", marks=soak), "wheel"])
def test_it_runs_in_one_shell(where: str, own_cache: Path, installed: Path, tmp_path: Path) -> None:
    """The broker has a free port, and checkpoints have a folder of the test. From a wheel, nothing of the clone is there."""
    port = str(free_port())
    parts = [text for language, text in blocks(ENGLISH) if language in ("", "sh") and not text.startswith("make ")]
    assert parts[0].startswith(INSTALLATION + "\n")
    parts[0] = parts[0].removeprefix(INSTALLATION + "\n")  # the fixtures have done it
    script = "\n".join(["set -e", *parts]).replace("9876", port)
    programs = Path(sys.executable).parent if where == "clone" else installed
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    shell = subprocess.run(
        ["bash", "-c", script], env=environment(PATH=path), cwd=tmp_path, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    try:
        assert shell.returncode == 0, shell.stderr[-4000:]
        shown = [text for language, text in blocks(ENGLISH) if language == "text"]
        assert len(shown) == 2
        positions = [f"\n{shell.stdout}".find(f"\n{text}") for text in shown]
        assert -1 not in positions
        assert positions == sorted(positions)
        assert "RocketMQ has stopped" in shell.stdout
    finally:
        left = background.running_broker()
        if left is not None:
            os.kill(left.pid, signal.SIGKILL)
