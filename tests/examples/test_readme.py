"""README.md and the site's first page say only what works: their links lead somewhere, and each runs in one shell, from top to
bottom; commands are read by ``tests/test_docs.py`` as well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.cli import background
from rocketmq_spark.localbroker.process import free_port
from tests.examples.test_orders_pipeline import EXAMPLE
from tests.fix_spark import ROOT, environment
from tests.scale import soak

TEXT = (ROOT / "README.md").read_text("utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
INSTALLATION = "python3 -m venv .venv && . .venv/bin/activate && pip install '.[spark,cli]'"


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 120


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) >= 6
    assert [link for link in links if not (ROOT / link.partition("#")[0]).exists()] == []


def test_make_targets_exist() -> None:
    targets = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert targets == ["demo", "test"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_job_takes_the_arguments_that_are_shown() -> None:
    shown = re.findall(r"--[a-z-]+", TEXT.partition("python examples/orders_pipeline.py")[2].partition("\n")[0])
    assert set(shown) >= {"--name-server", "--input", "--output", "--checkpoint"}
    assert all(f'"{name}"' in EXAMPLE.read_text() for name in shown)


def test_the_job_is_the_example() -> None:
    code = (ROOT / "examples" / "upper.py").read_text("utf-8").partition('"""\n\n')[2]
    assert PROGRAMS[0] == code


def script(page: str) -> list[str]:
    """Shell lines and programs of a page, in their order. It is installed here; a program that is an example runs once."""
    text = (ROOT / page).read_text("utf-8")
    parts = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "python" and block != PROGRAMS[0]:
            parts.append(f"python - <<'END'\n{block}END\n")
        elif not language and not block.startswith("make "):
            parts.append(block.removeprefix(INSTALLATION + "\n"))
    return parts


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("page", "seen"),
    [("README.md", ('"ORDER_ID"', '"window_start"')), pytest.param("docs/index.md", ('"ORDER_ID"',), marks=soak)],
)
def test_a_page_runs_in_one_shell(page: str, seen: tuple[str, ...], own_cache: Path, tmp_path: Path) -> None:
    """The broker has a free port, and checkpoints have a folder of the test."""
    assert INSTALLATION in (ROOT / page).read_text("utf-8")
    port = str(free_port())

    def here(text: str) -> str:
        return text.replace("9876", port).replace("/tmp/", f"{tmp_path}/")

    (tmp_path / "examples").mkdir()
    for name in ("upper.py", "orders_pipeline.py"):
        (tmp_path / "examples" / name).write_text(here((ROOT / "examples" / name).read_text("utf-8")), "utf-8")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = subprocess.run(
        ["bash", "-c", here("\n".join(["set -e", *script(page)]))],
        env=environment(PATH=path), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    try:
        assert shell.returncode == 0, shell.stderr[-4000:]
        assert [shell.stdout.count(text) for text in seen] == [3] * len(seen), shell.stdout
        assert "RocketMQ has stopped" in shell.stdout
        assert ("SEND_OK\norders b'one'\n" in shell.stdout) == (page == "README.md")
    finally:
        left = background.running()
        if left is not None:
            os.kill(left.pid, signal.SIGKILL)
