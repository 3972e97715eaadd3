"""Signatures against those of the Java client's hook."""

import pytest

from rocketmq_spark.base.codes import SerializeType
from rocketmq_spark.wire.header import Command, decode, encode, sign, signed_fields
from tests.harness import unhex, vectors

CASES = vectors("acl_signatures")


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_signatures(case):
    body = unhex(case["body"])
    command = Command(11, dict(case["ext_fields_before"]), body, opaque=7)
    signed = sign(command, case["access_key"], case["secret_key"], case["security_token"])
    assert signed.ext == case["ext_fields_after"]
    assert signed.ext["Signature"] == case["signature"]
    unsigned = {name: value for name, value in signed.ext.items() if name != "Signature"}
    assert (signed_fields(unsigned) + body).hex() == case["signed_content"]
    assert command.ext == case["ext_fields_before"]
    assert (signed.code, signed.opaque, signed.body) == (11, 7, body)


def test_signing_again_gives_the_same():
    signed = sign(Command(11, {"a": "1"}), "key", "secret")
    assert sign(signed, "key", "secret") == signed


def test_a_view_is_signed_like_bytes():
    assert sign(Command(10, body=memoryview(b"body")), "k", "s").ext == sign(Command(10, body=b"body"), "k", "s").ext


def test_names_are_sorted_as_java_does():
    # By code point U+FB00 would come first; by UTF-16 unit the surrogate pair does.
    assert signed_fields({"\ufb00": "1", "\U0001f600": "2"}) == b"21"


@pytest.mark.parametrize("kind", list(SerializeType))
def test_signature_survives_the_wire(kind):
    signed = sign(Command(11, {"topic": "T", "empty": "x"}, opaque=1), "key", "secret")
    arrived = decode(encode(signed, kind)[4:])
    assert sign(arrived, "key", "secret").ext == signed.ext
