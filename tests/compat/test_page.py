"""The table of versions and features in the pages is what the marks of these tests say."""

from __future__ import annotations

from tests.compat import test_access, test_groups, test_messages, test_newer
from tests.compat.features import SHOWN, VERSIONS, table
from tests.fix_spark import ROOT

TESTS = (test_messages, test_groups, test_newer, test_access)  # they wrote down what they show


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "where-it-runs.md").read_text("utf-8")
    assert table() in page, f"docs/where-it-runs.md must have:\n{table()}"


def test_each_feature_is_shown_with_each_version() -> None:
    """But for rights, which there were of one kind or of the other."""
    rights = {feature for feature in SHOWN if feature.startswith("keys and rights")}
    assert len(rights) == 2
    assert {feature for feature, shown in SHOWN.items() if set(shown) != set(VERSIONS)} == rights
