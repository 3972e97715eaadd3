"""Options to what every connection needs."""

from __future__ import annotations

import pytest

from rocketmq_spark import options
from rocketmq_spark.client.credentials import credentials_of
from rocketmq_spark.errors import OptionError
from rocketmq_spark.queues.environment import scope_of

SERVER = {"nameServer": "n:1"}


def parsed(**given: object) -> options.Options:
    return options.parse({**SERVER, **given}).for_role("producer")


def test_who_signs_comes_from_the_options_or_a_file(tmp_path):
    assert credentials_of(parsed()) is None
    assert credentials_of(parsed()) is None
    keys = credentials_of(parsed(accessKey="a", secretKey="s", securityToken="t"))
    assert (keys.access_key, keys.secret_key, keys.security_token) == ("a", "s", "t")
    file = tmp_path / "keys"
    file.write_text("accessKey=b\nsecretKey=c\n")
    assert credentials_of(parsed(credentialsFile=str(file))).current().access_key == "b"


def test_a_provider_that_fails_names_its_option():
    with pytest.raises(OptionError, match="credentialsProvider"):
        credentials_of(parsed(credentialsProvider="no.such:module"))


def test_names_stand_in_a_namespace_and_an_environment():
    assert scope_of(parsed(namespace="ns")).name_on_wire("t") == "ns%t"
    assert scope_of(parsed(environment="dev", environmentMode="suffix")).name_on_wire("t") == "t_dev"
