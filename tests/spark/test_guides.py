"""The tutorial and the how-to pages: each runs as it stands, from top to bottom, and prints what it shows."""

from __future__ import annotations

import re

import pytest

from tests.fix_spark import ROOT
from tests.spark.guides import Guide

pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning")

DOCS = ROOT / "docs"
INDEX = (DOCS / "how-to.md").read_text("utf-8")
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_does_what_it_says(path, spark, rocketmq, tmp_path):
    guide = Guide(path, spark, rocketmq, tmp_path)
    guide.run()
    assert guide.differences() == []
    assert guide.outputs, "a page shows what its program prints"


def test_every_how_to_page_stands_in_the_index_once():
    assert sorted(re.findall(r"\]\(how-to/([^)#]+)\)", INDEX)) == [path.name for path in PAGES[1:]]


def test_each_page_has_topics_of_its_own():
    """So pages can be tried one after the other with one broker."""
    made = [re.findall(r"^rocketmq-spark topic create (\S+)", path.read_text("utf-8"), re.MULTILINE) for path in PAGES]
    names = [name for page in made for name in set(page)]
    assert len(names) == len(set(names))
