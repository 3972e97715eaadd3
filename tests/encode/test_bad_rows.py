"""Bad rows in one error."""

import numpy as np
import pytest

from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import MessageRefused


def test_bad_rows_error_names_ten_rows_with_first_reason_each():
    bad_rows = BadRows(first_row=100)
    bad_rows.add(np.arange(20) % 2 == 1, lambda i: f"odd {i}")
    bad_rows.add_rows(np.arange(5), "low")
    bad_rows.add(np.arange(20) == 6, "six")
    with pytest.raises(
        MessageRefused, match="14 rows of partition 7 cannot be sent, and nothing of their Arrow batch"
    ) as e:
        bad_rows.raise_if_any(partition=7)
    text = e.value.message
    assert "row 100: low; row 101: odd 1; row 102: low" in text
    assert "row 105: odd 5; row 106: six; row 107: odd 7" in text
    assert text.count("row 1") == 10
    assert text.endswith("; and 4 more")


def test_nothing_is_no_error():
    bad_rows = BadRows()
    bad_rows.add(np.zeros(3, bool), lambda i: "never")
    bad_rows.raise_if_any()
    assert bad_rows.reasons_by_row() == []
