"""Keys: where they come from, when they are asked for again, that they are not shown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client import credentials
from rocketmq_spark.client.credentials import Credentials, RotatingCredentials, from_file, from_provider
from rocketmq_spark.errors import LocalProtocolError, OptionError
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.helpers import raising
from tests.mockbroker import PING, ping


def test_secrets_are_not_shown() -> None:
    assert "s3cret" not in repr(Credentials("key", "s3cret", "s3cret"))


def test_what_cannot_be_signed_is_an_error_of_ours() -> None:
    with pytest.raises(LocalProtocolError):
        Credentials("key", "secret").sign(Command(PING, {"a": "\ud800"}))


def test_rotating_credentials_are_fetched_again_when_old() -> None:
    fetched = (Credentials(f"key-{i}", "secret") for i in range(9))
    often, seldom = (RotatingCredentials(lambda: next(fetched), age) for age in (-1.0, 60.0))
    assert [often.sign(ping()).ext["AccessKey"] for _ in range(2)] == ["key-0", "key-1"]
    assert [seldom.current().access_key for _ in range(2)] == ["key-2", "key-2"]


def test_keys_go_on_while_nobody_gives_new_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, store = [1000.0], [Credentials("old", "secret")]
    monkeypatch.setattr(credentials, "time", SimpleNamespace(monotonic=lambda: now[0]))
    rotating = RotatingCredentials(lambda: store[0])
    assert rotating.current().access_key == "old"
    store.clear()
    now[0] += 61
    assert [rotating.sign(ping()).ext["AccessKey"] for _ in range(3)] == ["old"] * 3
    assert caplog.text.count("the previous keys stay in use: ") == 1
    store.append(Credentials("new", "secret"))
    now[0] += credentials.FETCH_RETRY_PAUSE_S + 1
    assert rotating.current().access_key == "new"


@pytest.mark.parametrize("error", [KeyError("hunter2"), SystemExit("hunter2")], ids=["error", "exit"])
def test_credentials_that_cannot_be_fetched_are_an_option_error(
    error: BaseException,
) -> None:
    broken = RotatingCredentials(raising(error))
    with pytest.raises(OptionError, match=type(error).__name__) as caught:
        broken.sign(ping())
    assert "hunter2" not in str(caught.value)
    parts = Parts("127.0.0.1:1", credentials=broken)
    results: list[object] = []
    parts.rpc_client.invoke_async("127.0.0.1:1", ping(), Deadline.after(30.0), results.append)
    assert isinstance(results[0], OptionError)


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\naccessKey = me\nsecretKey=a=b\nsecurityToken=t\n", "utf-8")
    assert from_file(path) == Credentials("me", "a=b", "t")
    path.write_text("accessKey=me\n", "utf-8")
    with pytest.raises(OptionError, match="expected lines accessKey=… and secretKey=…"):
        from_file(path)
    with pytest.raises(OptionError, match="it cannot be read"):
        from_file(tmp_path / "none")


def test_what_a_function_gives() -> None:
    named = {"accessKey": "me", "secretKey": "hush", "securityToken": "t"}
    assert from_provider(named) == from_provider(("me", "hush", "t")) == Credentials("me", "hush", "t")
    assert from_provider(["me", "hush"]) == Credentials("me", "hush")
    with pytest.raises(OptionError, match="returned no credentials"):
        from_provider("me")
