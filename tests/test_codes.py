"""Numbers and names of the wire: each once, and those that the golden vectors show."""

import ast
import inspect

import pytest

from rocketmq_spark import errors
from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import LanguageCode, Property, Request, Response, SysFlag
from tests.harness import vectors

JAVA = {(case["class"], case["name"]): case["value"] for case in vectors("constants")}
RENAMED = {"LITE_QUOTA_EXCEEDED": "LITE_SUBSCRIPTION_QUOTA_EXCEEDED"}


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


# Peers of this client read these numbers and names, and fakes in these tests are made of the same constants: without Java's own,
# a wrong one would be seen by a live broker alone, and most answers of trouble no live broker gives in a test.


def test_requests_have_javas_numbers():
    assert {one.name: one.value for one in Request} == {one.name: JAVA["RequestCode", one.name] for one in Request}


def test_answers_have_javas_numbers():
    answers = {name: value for (of, name), value in JAVA.items() if of in ("ResponseCode", "RemotingSysResponseCode")}
    assert {one.name: one.value for one in Response} == {
        one.name: answers[RENAMED.get(one.name, one.name)] for one in Response
    }


def test_properties_have_javas_names():
    java = {value for (of, _), value in JAVA.items() if of == "MessageConst"}
    assert java >= codes.RESERVED_PROPERTIES
    named = {
        name: JAVA["MessageConst", f"PROPERTY_{name}"]
        for name in vars(Property)
        if ("MessageConst", f"PROPERTY_{name}") in JAVA
    }
    assert len(named) > 30
    assert {name: getattr(Property, name) for name in named} == named


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("COMPRESSED", "COMPRESSED_FLAG"), ("MULTI_TAGS", "MULTI_TAGS_FLAG"), ("BORNHOST_V6", "BORNHOST_V6_FLAG"),
        ("TRANSACTION_PREPARED", "TRANSACTION_PREPARED_TYPE"), ("TRANSACTION_COMMIT", "TRANSACTION_COMMIT_TYPE"),
        ("TRANSACTION_ROLLBACK", "TRANSACTION_ROLLBACK_TYPE"), ("STOREHOST_V6", "STOREHOSTADDRESS_V6_FLAG"),
        ("NEED_UNWRAP", "NEED_UNWRAP_FLAG"), ("INNER_BATCH", "INNER_BATCH_FLAG"), ("LZ4", "COMPRESSION_LZ4_TYPE"),
        ("ZSTD", "COMPRESSION_ZSTD_TYPE"), ("ZLIB", "COMPRESSION_ZLIB_TYPE"),
    ],
)  # fmt: skip
def test_flags_of_messages_are_javas(name: str, of: str):
    assert SysFlag[name] == JAVA["MessageSysFlag", of]


def test_flags_of_pulls_and_topics_are_javas():
    java = {
        name.removeprefix("FLAG_").removesuffix("_MESSAGE"): v for (of, name), v in JAVA.items() if of == "PullSysFlag"
    }
    assert {one.name: one.value for one in codes.PullSysFlag} == java
    assert {one.name: one.value for one in codes.Perm} == {
        one.name: JAVA["PermName", f"PERM_{one.name}"] for one in codes.Perm
    }
