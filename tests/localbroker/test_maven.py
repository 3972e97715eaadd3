"""Where jars are looked for: the user's settings first, in Spark's and Maven's own places; how downloads go on, and fail."""

from __future__ import annotations

import base64
import contextlib
import http.server
import shutil
import socket
import ssl
import threading
import urllib.error
from collections.abc import Callable, Iterator
from email.message import Message as Headers
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.base import folders
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import maven
from rocketmq_spark.localbroker.maven import CENTRAL, Repository
from tests import users

SETTINGS = """<settings xmlns="http://maven.apache.org/SETTINGS/1.2.0"><mirrors>
<mirror><id>a</id><mirrorOf>spark-packages</mirrorOf><url>http://one.example/</url></mirror>
<mirror><id>b</id><mirrorOf>{of}</mirrorOf><url>http://two.example/maven</url></mirror>
</mirrors></settings>"""
JAR, NATIVE = "g.h:a:1", "g:b:2:linux"
BODY = bytes(range(256)) * 2000


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without any settings."""
    for name in (maven.SETTINGS_VARIABLE, "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    for scheme in ("http", "https", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme.upper()}_PROXY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_home_of_another_user_chooses_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with ``sudo -E``."""
    for name in ("theirs", "account"):
        (tmp_path / name / ".m2").mkdir(parents=True)
    (tmp_path / "theirs" / ".m2" / "settings.xml").write_text(SETTINGS.replace("{of}", "*"))
    monkeypatch.setenv("HOME", str(tmp_path / "theirs"))
    assert urls()[0].startswith("http://two.example/maven")
    account = SimpleNamespace(pw_dir=str(tmp_path / "account"), pw_gid=0, pw_name="me")
    monkeypatch.setattr(folders.pwd, "getpwuid", lambda _: account)
    users.give_away(monkeypatch, tmp_path / "theirs")
    assert urls()[0].startswith(CENTRAL)


def urls(coordinate: str = JAR) -> list[str]:
    return [each.url(coordinate) for each in maven._repositories()]


def ivy(path: Path, inside: str, first: str = "ours") -> Path:
    path.write_text(f'<ivysettings><settings defaultResolver="{first}"/>{inside}</ivysettings>')
    return path


def test_maven_central_is_asked_where_nothing_is_set() -> None:
    assert urls() == [f"{CENTRAL}g/h/a/1/a-1.jar"]
    assert urls(NATIVE) == [f"{CENTRAL}g/b/2/b-2-linux.jar"]


def test_named_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ivy(tmp_path / "mine.xml", '<resolvers><ibiblio name="ours" root="http://mine.example/m2"/></resolvers>')
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.jars.ivySettings /other.xml\n")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv(maven.SETTINGS_VARIABLE, "~/mine.xml")
    assert urls() == ["http://mine.example/m2/g/h/a/1/a-1.jar"]


@pytest.mark.parametrize(
    "line", ["spark.jars.ivySettings {}", "spark.jars.ivySettings={}", " spark.jars.ivySettings  {}"]
)
def test_sparks_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    path = ivy(tmp_path / "ivy.settings", '<resolvers><ibiblio name="ours" root="http://spark.example/"/></resolvers>')
    lines = ["# spark.jars.ivySettings /not/this", "spark.master local", line.format(path)]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert urls() == ["http://spark.example/g/h/a/1/a-1.jar"]


def test_the_current_folder_is_not_sparks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ivy(
        tmp_path / "ivy.settings", '<resolvers><ibiblio name="ours" root="http://planted.example/"/></resolvers>'
    )
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(f"spark.jars.ivySettings {path}")
    monkeypatch.chdir(tmp_path)
    for empty in (None, ""):
        if empty is not None:
            monkeypatch.setenv("SPARK_HOME", empty)
        assert urls() == [f"{CENTRAL}g/h/a/1/a-1.jar"]
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert urls() == ["http://planted.example/g/h/a/1/a-1.jar"]


def test_the_resolvers_of_ivy_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = """<property name="host" value="http://ours.example"/>
    <credentials host="ours.example" realm="r" username="me" passwd="secret"/>
    <resolvers>
      <ibiblio name="not asked" root="http://not.example/"/>
      <chain name="ours">
        <url name="plain"><artifact pattern="${host}/[organisation]/[module]/[revision]/[artifact](-[classifier]).[ext]"/></url>
        <chain name="inner"><url name="m" m2compatible="true">
          <artifact pattern="${host}/m/[organisation]/[artifact]-[revision].[ext]"/></url></chain>
        <filesystem name="disk"><artifact pattern="${ivy.settings.dir}/[artifact].[ext]"/></filesystem>
        <ibiblio name="central" m2compatible="true"/>
      </chain>
    </resolvers>"""
    monkeypatch.setenv(maven.SETTINGS_VARIABLE, str(ivy(tmp_path / "ivy.xml", inside)))
    assert urls() == [
        "http://ours.example/g.h/a/1/a.jar",
        "http://ours.example/m/g/h/a-1.jar",
        f"file://{tmp_path}/a.jar",
        f"{CENTRAL}g/h/a/1/a-1.jar",
    ]
    assert urls(NATIVE)[0] == "http://ours.example/g/b/2/b-linux.jar"
    keys = [each.authorization for each in maven._repositories()]
    assert keys == [f"Basic {base64.b64encode(b'me:secret').decode()}"] * 2 + [None] * 2


def test_missing_unreadable_or_empty_ivy_settings_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(maven.SETTINGS_VARIABLE, "/nowhere/ivysettings.xml")
    with pytest.raises(LocalBrokerError, match=r"The Ivy settings file /nowhere/ivysettings\.xml does not exist"):
        urls()
    monkeypatch.setenv(maven.SETTINGS_VARIABLE, str(tmp_path / "ivy.xml"))
    (tmp_path / "ivy.xml").write_text("<ivysettings>")
    with pytest.raises(LocalBrokerError, match=r"ivy\.xml cannot be read"):
        urls()
    ivy(tmp_path / "ivy.xml", '<resolvers><sftp name="ours"/></resolvers>')
    with pytest.raises(LocalBrokerError, match="expected an ibiblio, url or filesystem resolver"):
        urls()


@pytest.mark.parametrize(("of", "used"), [("*", True), ("central", True), ("x, central", True), ("*,!central", False)])
def test_mavens_mirror_of_central(tmp_path: Path, of: str, used: bool) -> None:
    (tmp_path / ".m2").mkdir()
    (tmp_path / ".m2" / "settings.xml").write_text(SETTINGS.format(of=of))
    assert urls() == ["http://two.example/maven/g/h/a/1/a-1.jar" if used else f"{CENTRAL}g/h/a/1/a-1.jar"]


def test_broken_maven_settings_are_not_ours_to_mend(tmp_path: Path) -> None:
    (tmp_path / ".m2").mkdir()
    (tmp_path / ".m2" / "settings.xml").write_text("<settings>")
    assert urls() == [f"{CENTRAL}g/h/a/1/a-1.jar"]


class Server:
    """A repository that does with each request what ``does`` says, and notes path, range and key of all."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.does: Callable[[http.server.BaseHTTPRequestHandler, int], None] = self.serve
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                number = len(outer.asked)
                outer.asked.append((self.path, self.headers["Range"], self.headers["Authorization"]))
                outer.does(self, number)

            def log_message(self, format: str, *args: object) -> None:
                """Not on the terminal."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.root = f"http://127.0.0.1:{self.http.server_port}/"

    def serve(self, request: http.server.BaseHTTPRequestHandler, number: int, upto: int | None = None) -> None:
        """The body, from where it is wanted on; only ``upto`` a byte of it."""
        begin = int((request.headers["Range"] or "bytes=0-")[6:-1])
        request.send_response(206 if begin else 200)
        request.send_header("Content-Length", str(len(BODY) - begin))
        request.end_headers()
        request.wfile.write(BODY[begin:upto])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server()
    monkeypatch.setattr(maven, "_repositories", lambda: [maven._m2_repository(made.root)])
    thread = threading.Thread(target=made.http.serve_forever, args=(0.05,))
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def fetched(folder: Path) -> bytes:
    seen: list[int] = []
    files = maven.download([JAR], folder, seen.append)
    assert seen[-1] <= len(BODY)
    return files[JAR].read_bytes()


def test_what_broke_off_goes_on_where_it_did(server: Server, tmp_path: Path) -> None:
    server.does = lambda request, number: server.serve(
        request, number, upto=100_000 * (number + 1) if number < 3 else None
    )
    assert fetched(tmp_path) == BODY
    assert [begin for _, begin, _ in server.asked] == [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]


def test_a_server_that_knows_no_ranges_sends_it_anew(server: Server, tmp_path: Path) -> None:
    def does(request: http.server.BaseHTTPRequestHandler, number: int) -> None:
        request.headers.replace_header("Range", "bytes=0-") if request.headers["Range"] else None
        server.serve(request, number, upto=100_000 if number == 0 else None)

    server.does = does
    assert fetched(tmp_path) == BODY
    assert len(server.asked) == 2


def test_a_repository_that_brings_nothing_more_is_given_up(server: Server, tmp_path: Path) -> None:
    server.does = lambda request, number: server.serve(request, number, upto=100_000)
    with pytest.raises(LocalBrokerError, match="the connection ended before the file did"):
        fetched(tmp_path)
    assert [begin for _, begin, _ in server.asked] == [None, "bytes=100000-"]


def test_the_next_repository_is_asked_for_what_the_first_lacks(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Repository(f"file://{tmp_path}/[artifact].[ext]")
    monkeypatch.setattr(
        maven,
        "_repositories",
        lambda: [first, maven._m2_repository(f"{server.root}no"), maven._m2_repository(server.root)],
    )

    def does(request: http.server.BaseHTTPRequestHandler, number: int) -> None:
        if request.path.startswith("/no"):
            request.send_error(404)
        else:
            server.serve(request, number)

    server.does = does
    assert fetched(tmp_path) == BODY
    (tmp_path / "a.jar").write_bytes(b"here")
    assert maven.download([JAR], tmp_path / "other", lambda arrived: None)[JAR].read_bytes() == b"here"


def test_a_refusal_is_not_asked_elsewhere(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        maven,
        "_repositories",
        lambda: [maven._m2_repository(server.root, "Basic x"), maven._m2_repository(server.root)],
    )
    server.does = lambda request, number: request.send_error(401, "who are you")
    with pytest.raises(LocalBrokerError, match=r"the repository answers with HTTP 401 \(who are you\)"):
        fetched(tmp_path)
    assert [key for _, _, key in server.asked] == ["Basic x"]


def test_more_bytes_than_a_jar_has_are_not_read(server: Server, tmp_path: Path) -> None:
    """The hash is compared only when all have arrived."""
    sent: list[int] = []

    def endless(request: http.server.BaseHTTPRequestHandler, number: int) -> None:
        request.send_response(200)
        request.end_headers()
        with contextlib.suppress(OSError):
            while sum(sent) < 1 << 30:
                request.wfile.write(BODY)
                sent.append(len(BODY))

    server.does = endless
    message = rf"g/h/a/1/a-1\.jar has more than {len(BODY)} bytes, the size limit of {JAR}"
    with pytest.raises(LocalBrokerError, match=message):
        maven.download([JAR], tmp_path, lambda arrived: None, {JAR: len(BODY)})
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= len(BODY)
    assert len(server.asked) == 1
    server.does = server.serve
    shutil.rmtree(tmp_path)
    assert maven.download([JAR], tmp_path, lambda arrived: None, {JAR: len(BODY)})[JAR].read_bytes() == BODY


def test_keys_do_not_cross_the_network_in_clear_text(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", server.root)  # where it would arrive
    for root in ("http://repository.example/m2", "http://127.0.0.1.example/m2", "HTTP://repository.example/m2"):
        monkeypatch.setattr(maven, "_repositories", lambda root=root: [maven._m2_repository(root, "Basic x")])
        with pytest.raises(
            LocalBrokerError, match=r"credentials for .*\.example would be sent to (http|HTTP).* in clear text"
        ):
            fetched(tmp_path)
    assert server.asked == []


def test_keys_for_this_machine_are_not_given_to_a_proxy(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(maven, "_repositories", lambda: [maven._m2_repository(server.root, "Basic x")])
    assert fetched(tmp_path) == BODY
    assert [key for _, _, key in server.asked] == ["Basic x"]


def test_keys_do_not_go_where_a_redirect_leads(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maven, "_repositories", lambda: [maven._m2_repository(server.root, "Basic x")])

    def does(request: http.server.BaseHTTPRequestHandler, number: int) -> None:
        if request.path.startswith("/there"):
            server.serve(request, number)
            return
        request.send_response(302)
        request.send_header("Location", f"{server.root}there")
        request.end_headers()

    server.does = does
    assert fetched(tmp_path) == BODY
    assert [(path, key) for path, _, key in server.asked] == [("/g/h/a/1/a-1.jar", "Basic x"), ("/there", None)]


def test_the_proxy_of_the_environment_is_used(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.root)
    monkeypatch.setattr(maven, "_repositories", lambda: [maven._m2_repository("http://inside.example/m2")])
    assert fetched(tmp_path) == BODY
    assert server.asked[0][0] == "http://inside.example/m2/g/h/a/1/a-1.jar"


def test_a_network_that_swallows_packets(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maven, "STALL_TIMEOUT_S", 0.3)
    gone = threading.Event()
    server.does = lambda request, number: gone.wait(60) and None
    try:
        with pytest.raises(LocalBrokerError, match="the repository did not answer in time"):
            fetched(tmp_path)
    finally:
        gone.set()


def interrupted_when(begun: threading.Event) -> Callable[[int], None]:
    """What shows progress, and is interrupted there."""

    def progress(arrived: int) -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    return progress


def test_ctrl_c_does_not_wait_for_the_network(server: Server, tmp_path: Path) -> None:
    begun, gone, over = threading.Event(), threading.Event(), threading.Event()

    def does(request: http.server.BaseHTTPRequestHandler, number: int) -> None:
        begun.set()
        gone.wait(60)
        over.set()

    server.does = does
    try:
        with pytest.raises(KeyboardInterrupt):
            maven.download([JAR], tmp_path, interrupted_when(begun))
        assert not over.is_set()
    finally:
        gone.set()


def test_a_download_ends_after_ctrl_c(server: Server, tmp_path: Path) -> None:
    """Python waits for its thread when it ends."""
    begun, gone = threading.Event(), threading.Event()

    def does(request: http.server.BaseHTTPRequestHandler, number: int) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(BODY)))
        request.end_headers()
        request.wfile.write(BODY[:1000])
        request.wfile.flush()
        begun.set()
        gone.wait(60)
        with contextlib.suppress(OSError):
            request.wfile.write(BODY[1000:])

    server.does = does
    with pytest.raises(KeyboardInterrupt):
        maven.download([JAR], tmp_path, interrupted_when(begun))
    gone.set()
    for thread in threading.enumerate():
        if thread.name.startswith("rocketmq-jars"):
            thread.join()
    assert (tmp_path / "g.h_a_1").stat().st_size < len(BODY)


def http_error(code: int, text: str) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://r.example", code, text, Headers(), None)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (urllib.error.URLError(socket.gaierror(-2, "x")), "the host name of the repository is unknown; is there a network?"),
        (urllib.error.URLError(ConnectionRefusedError()), "no connection to the repository"),
        (TimeoutError(), "the repository did not answer in time"),
        (urllib.error.URLError(ssl.SSLCertVerificationError("self-signed")), "Python does not trust the repository's"),
        (http_error(404, "x"), "the repository lacks some jars (g.h:a:1, ...)"),
        (urllib.error.URLError(FileNotFoundError()), "the repository lacks some jars (g.h:a:1, ...)"),
        (http_error(503, "busy"), "the repository answers with HTTP 503 (busy) when it is asked for g.h:a:1"),
        (ValueError("odd"), "ValueError: odd"),
    ],
)  # fmt: skip
def test_reasons(error: Exception, sentence: str) -> None:
    assert maven._reason(error, JAR).startswith(sentence)
