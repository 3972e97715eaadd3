"""The pages as a site: what ``make site`` is told, without making it."""

from __future__ import annotations

import re

import pytest
import yaml

import rocketmq_spark
from docs import front_page
from rocketmq_spark import aio
from rocketmq_spark.model import admin
from tests.test_house import ROOT

SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))


def pages(nav):
    for entry in nav:
        for below in entry.values():
            yield from [below] if isinstance(below, str) else pages(below)


def test_every_page_is_reached_once():
    assert sorted(pages(SITE["nav"])) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")
    )


@pytest.mark.parametrize("page", front_page.PAGES)
def test_the_first_page_is_the_readme(page):
    text = (ROOT / front_page.PAGES[page]).read_text("utf-8")
    assert (ROOT / "docs" / page).read_text("utf-8") == front_page.front_page(text), "run: make docs"


def test_a_link_of_the_readme_leads_to_the_site_or_becomes_text():
    head = "# Title\n\n[Tutorial](docs/tutorial.md) · [中文](README.zh-CN.md)\n\n"
    page = front_page.front_page(head + "[site](https://example.org/a) [LICENSE](LICENSE) [the job](e.py)\n")
    assert "[Tutorial](tutorial.md) [中文](zh-CN.md)" in page
    assert page.endswith("[site](https://example.org/a) `LICENSE` the job\n")


def test_nothing_comes_from_elsewhere():
    assert SITE["theme"]["font"] is False
    assert not SITE.keys() & {"extra_javascript", "hooks"}
    styles = [(ROOT / "docs" / name).read_text("utf-8") for name in SITE["extra_css"]]
    assert styles
    assert not re.findall(r"url\(|@import|https?:", "".join(styles))
    assert {palette["scheme"] for palette in SITE["theme"]["palette"]} == {"default", "slate"}


def test_the_reference_has_every_exported_name_once():
    told = re.findall(r"^::: rocketmq_spark\.(\S+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(told) == sorted(
        [
            *rocketmq_spark.__all__,
            "notebook.LagChart",
            *(f"aio.{name}" for name in aio.__all__),
            *(f"model.admin.{name}" for name in admin.__all__),
        ]
    )


def test_pages_link_to_pages_so_that_the_site_has_them_all():
    """What lies outside of docs/ is named, not linked: the site does not have it."""
    docs = ROOT / "docs"
    outside = [
        f"{path.name}: {link}"
        for path in docs.rglob("*.md")
        for link in re.findall(r"\]\((\.\./[^)#]+)[^)]*\)", path.read_text("utf-8"))
        if not (path.parent / link).resolve().is_relative_to(docs)
    ]
    assert not outside
