"""Numbers and names of the wire: each once, and those that the golden vectors show."""

import ast
import inspect

from rocketmq_spark import errors
from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import LanguageCode, Property, Request, Response, SysFlag
from tests.harness import vectors


def test_no_number_has_two_names():
    for numbers in (Request, Response, LanguageCode, codes.SerializeType):
        assert len(numbers.__members__) == len(set(numbers)), numbers


def test_no_property_is_written_twice():
    values = [node.value for node in ast.walk(ast.parse(inspect.getsource(Property))) if isinstance(node, ast.Constant)]
    assert len(values) == len(set(values))


def test_every_property_is_reserved():
    assert {Property.KEYS, Property.UNIQ_KEY, Property.TRANSACTION_ID, Property.CRC32} <= codes.RESERVED_PROPERTIES
    assert "builtins" not in codes.RESERVED_PROPERTIES
    assert not any("codes" in name for name in codes.RESERVED_PROPERTIES)
    assert len(codes.RESERVED_PROPERTIES) == sum(not name.startswith("__") for name in vars(Property))


def test_a_connectors_own_property_is_not_reserved():
    assert "SPARK_ROW_ID" not in codes.RESERVED_PROPERTIES


def test_languages_are_those_of_the_frames():
    for case in vectors("remoting_frames"):
        assert LanguageCode[case["language"]] == case["language_code"]


def test_answers_of_a_live_broker_have_names():
    seen = {case["response_code"] for case in vectors("live_exchanges")}
    assert seen - set(Response) <= set(Request)  # requests that the broker pushed


def test_a_sender_may_set_compression_and_prepared_only():
    assert codes.SENDABLE_SYS_FLAGS == 0x705
    assert not codes.SENDABLE_SYS_FLAGS & (SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6 | SysFlag.INNER_BATCH)


def test_compression_types_are_inside_their_mask():
    assert SysFlag.LZ4 | SysFlag.ZSTD == SysFlag.ZLIB
    assert SysFlag.ZLIB | codes.COMPRESSION_MASK == codes.COMPRESSION_MASK


def test_delay_levels():
    assert len(codes.DELAY_LEVELS) == 18
    assert codes.DELAY_LEVELS[0] == "1s"


def test_every_named_answer_has_an_error_class():
    for code in Response:
        assert issubclass(errors.error_for(code), errors.BrokerError)
    assert errors.error_for(Response.SYSTEM_BUSY).retriable
