"""Paths in options: the folder that confines them, checked when options are parsed and wherever a file is opened."""

from __future__ import annotations

import os
import platform
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark import Consumer, options, session
from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.credentials import credentials_of
from rocketmq_spark.consumer.push import RunningConsumer
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options, paths
from rocketmq_spark.options.paths import PATHS_VARIABLE, check_safe
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.remoting.transport import TlsSettings, connect
from rocketmq_spark.session.spools import SpoolSettings, open_store, worker_spool
from rocketmq_spark.spool.store import Store
from tests import users
from tests.fix_clusters import certificates
from tests.mockbroker import MockBroker

FIELDS = ("credentialsFile", "tlsCaFile", "tlsCertFile", "tlsKeyFile", "spoolDir", "localOffsetsDir")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that options may name, with a file in it and links that lead out of it."""
    made = tmp_path / "allowed"
    made.mkdir()
    (made / "keys").write_text("accessKey=me\nsecretKey=hush\n")
    (tmp_path / "secret").write_text("accessKey=other\nsecretKey=hush\n")
    (made / "link").symlink_to(tmp_path / "secret")
    (made / "up").symlink_to(tmp_path)
    (tmp_path / "allowed-too").mkdir()
    monkeypatch.setenv(PATHS_VARIABLE, str(made))
    monkeypatch.setenv("HOME", str(tmp_path))
    return made


@pytest.mark.parametrize("option", FIELDS)
def test_a_path_outside_is_an_error_of_its_option(folder: Path, option: str) -> None:
    outside = ["/etc/passwd", "../secret", "~/secret", f"{folder}-too/x", f"{folder}/../secret", f"{folder}/link"]
    for path in [*outside, f"{folder}/up/secret", f"{folder}/up/new/folder", "keys", "~nobody-here/x"]:
        with pytest.raises(OptionError) as e:
            options.parse({"nameServer": "a:1", option: path})
        assert f"option {option!r} is {path!r}; " in str(e.value)
        assert PATHS_VARIABLE in str(e.value)
    for path in (f"{folder}/keys", f"{folder}/new/folder", "~/allowed/keys", f"{folder}/up/allowed/keys", str(folder)):
        options.parse({"nameServer": "a:1", option: path})


def test_without_the_variable_a_path_may_lead_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PATHS_VARIABLE)
    for option in FIELDS:
        options.parse({"nameServer": "a:1", option: "../secret"})


@pytest.mark.parametrize("value", ["", " ", "allowed", "./allowed"])
def test_a_variable_that_names_no_absolute_folder_allows_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(PATHS_VARIABLE, value)
    monkeypatch.chdir(folder.parent)
    with pytest.raises(OptionError, match="expected the absolute path of a folder"):
        options.parse({"nameServer": "a:1", "credentialsFile": f"{folder}/keys"})


def test_the_folder_itself_may_be_a_link(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "mounted").symlink_to(folder)
    monkeypatch.setenv(PATHS_VARIABLE, f"{folder.parent}/mounted")
    assert check_safe(folder / "keys", "credentialsFile") == folder / "keys"


@pytest.mark.parametrize("variable", [True, False])
@pytest.mark.parametrize("option", FIELDS)
def test_a_path_that_is_too_long_is_not_resolved(
    folder: Path, monkeypatch: pytest.MonkeyPatch, option: str, variable: bool
) -> None:
    """The time and memory to resolve a path grow with the square of its length."""
    if not variable:
        monkeypatch.delenv(PATHS_VARIABLE)
    longest = f"{folder}/" + "a/" * 2048
    for path in (longest[: paths.MAX_PATH_BYTES], f"{folder}/{'b' * paths.MAX_NAME_BYTES}/c"):
        options.parse({"nameServer": "a:1", option: path})
    resolved: list[Path] = []
    monkeypatch.setattr(Path, "resolve", lambda path, strict=False: resolved.append(path) or path)
    for path, problem in (
        (longest[: paths.MAX_PATH_BYTES + 1], "it has 4097 bytes; expected at most 4096"),
        (str(folder) + "/a" * 5_000_000, f"it has {10_000_000 + len(str(folder))} bytes; expected at most 4096"),
        (f"~/{'é' * 128}/c", "its part '" + "é" * 32 + "…' has 256 bytes; expected at most 255"),
    ):
        with pytest.raises(OptionError) as e:
            options.parse({"nameServer": "a:1", option: path})
        assert f"option {option!r} is '{path[:32]}…'; {problem}" in str(e.value)
        assert len(str(e.value)) < 300
    assert resolved == []


def parsed(role: str, **given: object) -> Options:
    return options.parse({"nameServer": "a:1", **given}, {}).for_role(role)


def _spool(path: Path) -> object:
    return SpoolSettings.of(parsed("producer", onSendFailure="spool", spoolDir=str(path)))


def _offsets(path: Path) -> object:
    return ConsumerSettings.from_options(parsed("consumer", group="g", localOffsetsDir=str(path)))


def _tls(path: Path) -> object:
    return connect("127.0.0.1:1", Deadline.after(1), TlsSettings(cert_file=str(path)))


def _keys(path: Path) -> object:
    credentials = credentials_of(parsed("producer", credentialsFile=str(path)))
    assert credentials is not None
    return credentials.current()


@pytest.mark.parametrize(
    ("opened", "option"),
    [(_spool, "spoolDir"), (_offsets, "localOffsetsDir"), (_tls, "tlsCertFile"), (_keys, "credentialsFile")],
)
def test_a_task_checks_a_path_where_it_opens_it(folder: Path, opened: Callable[[Path], Any], option: str) -> None:
    """Options come to it as values, and links may have changed since they were parsed."""
    with pytest.raises(OptionError, match=f"option '{option}' is .*{PATHS_VARIABLE}"):
        opened(folder / "link")


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".", "a.b", "ä"])
def test_a_namespace_leads_no_path_elsewhere(name: str) -> None:
    """Broadcasting consumers have a folder of their group, whose name begins with the namespace."""
    with pytest.raises(OptionError, match="option 'namespace' is"):
        options.parse({"nameServer": "a:1", "namespace": name})


def test_consumer_start_checks_whole_path_of_local_offsets(folder: Path) -> None:
    settings = ConsumerSettings.from_options(
        parsed("consumer", group="g", model="broadcasting", localOffsetsDir=f"{folder}/offsets")
    )
    begin = SimpleNamespace(_settings=settings, state=None)
    assert f"{folder}/offsets" in str(RunningConsumer._new_offset_store(begin)._file)  # type: ignore[arg-type, attr-defined]
    (folder / "offsets").mkdir()
    (folder / "offsets" / f"{platform.node()}@DEFAULT").symlink_to(folder.parent)
    with pytest.raises(OptionError, match=f"option 'localOffsetsDir' is .*{PATHS_VARIABLE}"):
        RunningConsumer._new_offset_store(begin)  # type: ignore[arg-type]


def test_a_file_of_tls_over_grpc_is_checked_where_it_is_opened(folder: Path) -> None:
    from rocketmq_spark.grpc_proxy import channel

    with pytest.raises(OptionError, match="option 'tlsCaFile' is"):
        channel._read_pem("tlsCaFile", str(folder / "link"), b"")


def test_a_link_that_is_replaced_is_followed_again(folder: Path) -> None:
    """As Kubernetes replaces mounted secrets."""
    (folder / "current").symlink_to(folder / "keys")
    credentials = credentials_of(parsed("producer", credentialsFile=f"{folder}/current"))
    assert credentials is not None
    assert credentials.current().access_key == "me"
    (folder / "current").unlink()
    (folder / "current").symlink_to(folder.parent / "secret")
    credentials._max_age_s = -1.0  # type: ignore[union-attr]
    credentials._cached_credentials = None  # type: ignore[union-attr]
    with pytest.raises(OptionError, match=PATHS_VARIABLE):
        credentials.current()


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object = None) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(Path, "expanduser", lambda path: unknown() if str(path).startswith("~") else path)


def test_a_user_without_a_home_consumes_all_the_same(homeless: None, tmp_path: Path) -> None:
    """As with DynamicUser of systemd. Only the file of a broadcasting consumer needs a home."""
    Consumer("a:1", group="g").close()
    begin = SimpleNamespace(
        _settings=ConsumerSettings.from_options(parsed("consumer", group="g", model="broadcasting")), state=None
    )
    with pytest.raises(
        OptionError, match=r"option 'localOffsetsDir' is '~/.rocketmq_offsets'; that home is not known"
    ) as e:
        RunningConsumer._new_offset_store(begin)  # type: ignore[arg-type]
    assert e.value.remedy == "Give an absolute path, or set HOME"


@pytest.mark.parametrize("option", ["spoolDir", "credentialsFile"])
def test_a_path_in_an_unknown_home_is_an_error_of_its_option(homeless: None, option: str) -> None:
    with pytest.raises(OptionError, match=f"option '{option}' is '~/x'; that home is not known"):
        (_spool if option == "spoolDir" else _keys)(Path("~/x"))


def _grpc(path: Path) -> object:
    from rocketmq_spark.grpc_proxy import channel

    return channel._read_pem("tlsCaFile", str(path), b"")


READERS = [_keys, _tls, _grpc]


def _exchange(path: Path, target: Path) -> None:
    """As another user does who may write to the folder above."""
    if not path.is_symlink():
        path.rename(path.with_name(f"{path.name}-before"))
        path.symlink_to(target)


@pytest.mark.parametrize("opened", READERS)
@pytest.mark.parametrize("part", ["keys", "."])
def test_what_is_exchanged_after_the_check_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[Path], Any], part: str
) -> None:
    theirs, outside = folder / "theirs", folder.parent / "outside"
    for place in (theirs, outside):
        place.mkdir()
        (place / "keys").write_text(f"accessKey={place.name}\nsecretKey=hush\n")
    inside = folders.open_subfolder

    def exchanged(top: Path, below: Any = ()) -> Any:
        _exchange(theirs / part, outside / part)
        return inside(top, below)

    monkeypatch.setattr(folders, "open_subfolder", exchanged)
    with pytest.raises(OptionError, match="it is a link"):
        opened(theirs / "keys")


def test_what_is_exchanged_after_the_file_is_open_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_regular = folders.open_regular

    def exchanged(name: str, folder_descriptor: int) -> int:
        opened = open_regular(name, folder_descriptor=folder_descriptor)
        _exchange(folder / "keys", folder.parent / "secret")
        return opened

    monkeypatch.setattr(folders, "open_regular", exchanged)
    assert _keys(folder / "keys").access_key == "me"  # type: ignore[attr-defined]


def test_link_replaced_while_being_resolved_is_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = paths.check_confined

    def exchanged(path: Path, *given: Any) -> None:
        check(path, *given)
        _exchange(folder / "keys", folder.parent / "secret")

    monkeypatch.setattr(paths, "check_confined", exchanged)
    with pytest.raises(OptionError, match=r"it leads to '.*secret' now"):
        _keys(folder / "keys")


@pytest.mark.parametrize("opened", READERS)
def test_a_second_name_of_a_file_outside_is_not_read(folder: Path, opened: Callable[[Path], Any]) -> None:
    os.link(folder.parent / "secret", folder / "mine")
    with pytest.raises(OptionError, match="it has another name"):
        opened(folder / "mine")


@pytest.mark.parametrize("opened", READERS)
def test_a_pipe_in_the_folder_keeps_nobody_waiting(folder: Path, opened: Callable[[Path], Any]) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(OptionError, match="it is no file"):
        opened(folder / "pipe")


@pytest.mark.parametrize("change", ["given away", "writable", "writable above", "itself", "shared"])
@pytest.mark.parametrize(("opened", "option"), [(_spool, "spoolDir"), (_offsets, "localOffsetsDir")])
def test_a_folder_that_others_may_exchange_is_not_used(
    folder: Path, opened: Callable[[Path], Any], option: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB, and a consumer for a long time, open files in it by their names: a link could lead them elsewhere at any time."""
    theirs = folder / "theirs"
    (theirs / "inner" / "mine").mkdir(parents=True)
    assert opened(theirs / "inner" / "mine") is not None
    if change in ("itself", "shared"):
        (theirs / "inner" / "mine").chmod(0o777 if change == "itself" else 0o1777)
    elif change == "given away":
        users.give_away(monkeypatch, theirs)
    else:
        (theirs if change == "writable above" else theirs / "inner").chmod(0o777)
    for name in ("mine", "mine/new") if change in ("itself", "shared") else ("mine", "new"):
        with pytest.raises(OptionError, match=f"option '{option}' is .* may replace .*{PATHS_VARIABLE}"):
            opened(theirs / "inner" / name)
    monkeypatch.delenv(PATHS_VARIABLE)
    opened(theirs / "inner" / "mine")  # without untrusted options, a warning when it is opened


def test_certificates_in_the_folder_are_used(folder: Path) -> None:
    """OpenSSL opens files by their names, also a certificate's file for its key."""
    certs = certificates(folder)
    both = folder / "both.pem"
    both.write_bytes(Path(certs.cert("server")).read_bytes() + Path(certs.key("server")).read_bytes())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certs.cert("server"), certs.key("server"))
    with MockBroker(tls=server) as broker:
        own = [certs.ca, certs.cert("server"), certs.key("server")]
        at_home = [path.replace(str(folder), "~/allowed") for path in own]
        for files in (own, (certs.ca, str(both)), (certs.ca,), at_home):
            connect(broker.address, Deadline.after(30), TlsSettings(*files)).close()


def test_a_readable_certificate_inside_is_used(folder: Path) -> None:
    assert TlsSettings(ca_file=str(folder / "keys")).checked().ca_file == str(folder / "keys")
    with pytest.raises((OptionError, ssl.SSLError), match="cannot be used"):
        connect("127.0.0.1:1", Deadline.after(1), TlsSettings(ca_file=str(folder / "keys")))


def test_worker_folder_writable_by_others_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RocksDB would follow them out of the folder of the variable."""
    (spool := folder / "spool").mkdir()
    Store(spool / "worker-1").close()
    (spool / "worker-1").chmod(0o777)
    given = parsed("sink", topic="t", onSendFailure="spool", spoolDir=str(spool))
    made = worker_spool(given, ProducerSettings.of(given))
    session.close_all()
    assert made is not None
    assert [path for path in spool.iterdir() if path.stat().st_mode & 0o022] == [spool / "worker-1"]
    assert f"skipping the spool in {spool / 'worker-1'}: " in caplog.text
    assert "may replace" in caplog.text
    with pytest.raises(OptionError, match="may replace"):
        open_store(spool / "worker-1", given, SpoolSettings.of(given))


@pytest.mark.parametrize("opened", [_keys, _grpc])
@pytest.mark.parametrize("confined_to", [True, False])
def test_a_file_with_holes_is_not_read_into_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[Path], Any], confined_to: bool
) -> None:
    """It needs no disk, whatever its size is."""
    if not confined_to:
        monkeypatch.delenv(PATHS_VARIABLE)
    (folder / "keys").write_bytes(b"x")
    os.truncate(folder / "keys", 1 << 40)
    with pytest.raises(OptionError, match=f"it has more than {paths.MAX_FILE_BYTES} bytes"):
        opened(folder / "keys")
