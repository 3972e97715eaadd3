from __future__ import annotations

import json
from typing import Any

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.allocation import fixed_queues
from tests.queues import qs


@pytest.mark.parametrize(
    "config",
    [
        [MessageQueue("T", "a", 0), MessageQueue("T", "b", 1)],
        ["T/a/0", "T/b/1"],
        {"T": {"a": [0], "b": [1]}},
        {"p0": ["T/a/0", "T/b/1"], "p1": []},
        {"p0": {"T": {"a": [0], "b": [1]}}, "p1": []},
    ],
)
def test_every_shape_in_python_and_as_json(config: Any) -> None:
    assert fixed_queues(config)("p0") == qs("a:0 b:1")
    if not isinstance(config, list) or isinstance(config[0], str):
        assert fixed_queues(json.dumps(config))("p0") == qs("a:0 b:1")


def test_a_consumer_that_is_left_out_gets_none() -> None:
    assert fixed_queues({"p0": ["T/a/0"]})("p1") == []


@pytest.mark.parametrize(
    "config",
    ["nonsense", '["T/a"]', '["T/a/x"]', '["T/a/²"]', '{"T": {"a": ["0"]}}', '{"p": 3}', "[1]", '{"T": {"a": 1}}', 7],
)
def test_invalid_allocation_config_error_names_expected_value(config: Any) -> None:
    with pytest.raises(OptionError, match=r"option 'allocationConfig' is .*expected a list of queues"):
        fixed_queues(config)("p")
