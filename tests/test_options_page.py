from __future__ import annotations

import pytest

from docs import options_page
from docs.options_page import markdown
from rocketmq_spark import errors
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, DECODE_ERROR, FULL_COLUMNS
from rocketmq_spark.options import TABLE, Option
from rocketmq_spark.spark.sink import checks
from tests.test_house import ROOT


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_option_stands_there_once(row: Option) -> None:
    options = markdown().partition("## Columns")[0]
    assert options.count(f"\n| `{row.name}`") == 1
    assert row.help
    assert row.default_text


def table(heading: str) -> list[list[str]]:
    """The cells of a table's rows."""
    lines = markdown().partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


def test_page_lists_all_source_columns_in_order_with_types() -> None:
    every = (*BASIC_COLUMNS, *FULL_COLUMNS, DECODE_ERROR)
    assert [(name, kind) for name, kind, _ in table("Columns of the source")] == [(f"`{c.name}`", c.ddl) for c in every]
    full = [name for name, _, meaning in table("Columns of the source") if "`metadata=full`" in meaning]
    assert full == [f"`{c.name}`" for c in every[len(BASIC_COLUMNS) :]]
    assert options_page.SOURCE_COLUMNS.keys() == {c.name for c in every}


def test_every_column_of_the_sink_stands_there_with_its_types() -> None:
    assert [(name, kind) for name, kind, _ in table("Columns of the sink")] == [
        (f"`{n}`", k) for n, k in checks.COLUMNS.items()
    ]
    assert options_page.SINK_COLUMNS.keys() == checks.COLUMNS.keys()


def test_every_code_of_an_error_stands_on_the_page_once() -> None:
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    assert page[page.index("## Codes") :] == options_page.errors_markdown(), "run: make docs"
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RocketMQError)
    ]
    assert len(kinds) > 25
    assert {kind.__name__ for kind in kinds} == options_page.REMEDIES.keys()
    for kind in kinds:
        assert page.count(f"\n| `{kind.code}` |") == 1


def test_the_types_of_keywords_are_those_of_the_table() -> None:
    written = (ROOT / "rocketmq_spark" / "options" / "typed.py").read_text("utf-8")
    assert written == options_page.typed_keywords(), "run: make docs"
