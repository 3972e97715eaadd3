"""Whose a thing is."""

from __future__ import annotations

import os

import pytest

from rocketmq_spark.base.process import OwnerProcess
from rocketmq_spark.errors import ClosedError


def test_it_may_be_used_here_until_it_is_closed():
    owner = OwnerProcess("producer")
    owner.check(is_closed=False)
    assert owner.is_current
    with pytest.raises(ClosedError, match="the producer is closed"):
        owner.check(is_closed=True)


def test_a_fork_must_make_its_own(monkeypatch):
    owner, me = OwnerProcess("consumer"), os.getpid()
    monkeypatch.setattr("rocketmq_spark.base.process._pid", [me + 1])
    assert not owner.is_current
    with pytest.raises(ClosedError, match=f"this consumer belongs to process {me}.*Make a consumer in this process"):
        owner.check(is_closed=False)
