from __future__ import annotations

import os.path

import pytest

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options.names import resolve, unknown_value


def test_a_callable_is_itself_and_a_name_is_imported() -> None:
    assert resolve(len, "o") is len
    assert resolve("os.path:join", "o") is os.path.join
    assert resolve("collections:Counter.fromkeys", "o").__name__ == "fromkeys"


@pytest.mark.parametrize("given", ["no.such.module:f", "os.path:nothing", "os.path:", ":f", "os:sep"])
def test_uncallable_selector_error_names_option_and_expectation(given: str) -> None:
    with pytest.raises(OptionError, match=r"option 'queueSelector' is .*expected") as e:
        resolve(given, "queueSelector")
    assert given in str(e.value)


def test_nearest_offers_the_name_that_was_meant() -> None:
    text = unknown_value("allocationStrategy", "avaragely", ("averagely", "config"))
    assert (
        text
        == "option 'allocationStrategy' is 'avaragely'; expected one of averagely, config; did you mean 'averagely'?"
    )
    assert "did you mean" not in unknown_value("o", "zzz", ("averagely",))


@pytest.mark.parametrize("value", ["", " ", "n", "disabled", "never", "None", "0.0", "False;", "2"])
def test_a_typing_error_in_the_switch_allows_no_code(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_ALLOW_CALLABLES", value)
    with pytest.raises(OptionError) as e:
        resolve("os:getcwd", "queueSelector")
    assert f"variable ROCKETMQ_SPARK_ALLOW_CALLABLES is {value!r}; expected 1, true, yes, on to allow" in str(e.value)
    assert resolve(len, "queueSelector") is len


@pytest.mark.parametrize("value", ["1", "true", "YES", " on "])
def test_the_switch_may_allow_code_explicitly(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_ALLOW_CALLABLES", value)
    assert resolve("os:getcwd", "queueSelector")()


@pytest.mark.parametrize("value", ["0", "false", "No", "off", " OFF "])
def test_environment_variable_forbids_options_that_name_code(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ROCKETMQ_SPARK_ALLOW_CALLABLES", value)
    with pytest.raises(
        OptionError, match="'queueSelector' is 'os:getcwd', which names code to run, but variable ROCKETMQ_SPARK_ALLOW"
    ):
        resolve("os:getcwd", "queueSelector")
    assert resolve(len, "queueSelector") is len, "who has the function could call it as well"
    monkeypatch.setenv("ROCKETMQ_SPARK_ALLOW_CALLABLES", "1")
    assert resolve("os:getcwd", "queueSelector")()
