"""Downloads pinned jars from Maven repositories, with nothing but the standard library.

The repository is the first of these that is configured: the Ivy settings file in ROCKETMQ_SPARK_IVY_SETTINGS; the one in
``spark.jars.ivySettings`` of spark-defaults.conf, as for ``spark-submit --packages``; a mirror of Maven Central in
Maven's own settings.xml; otherwise Maven Central itself. HTTPS_PROXY and NO_PROXY choose the proxies. No repository is
trusted: the caller compares every file with the lock file.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.base import folders
from rocketmq_spark.errors import LocalBrokerError

SETTINGS_VARIABLE = "ROCKETMQ_SPARK_IVY_SETTINGS"
CENTRAL = "https://repo1.maven.org/maven2/"
STALL_TIMEOUT_S = 60.0
_PARALLEL_DOWNLOADS = 4
_CHUNK_BYTES = 1 << 16
_POLL_INTERVAL_S = 0.1
_M2_PATTERN = "[orgPath]/[module]/[revision]/[artifact]-[revision](-[classifier]).[ext]"
_REMEDY = (
    "Check the network and HTTPS_PROXY, or name an Ivy settings file with your mirror in "
    f"{SETTINGS_VARIABLE} (rocketmq-spark help running)"
)


class Repository(NamedTuple):
    """A repository: a URL pattern with Ivy's names for the parts of a coordinate, and the header for authorization."""

    pattern: str
    authorization: str | None = None

    def url(self, coordinate: str) -> str:
        """The address of a jar."""
        group, artifact, version, *classifier = coordinate.split(":")
        values = {
            "organisation": group, "organization": group, "orgPath": group.replace(".", "/"), "module": artifact,
            "artifact": artifact, "revision": version, "type": "jar", "ext": "jar",
            "classifier": classifier[0] if classifier else "",
        }  # fmt: skip

        def expand_optional(part: re.Match[str]) -> str:
            names = re.findall(r"\[(\w+)\]", part[1])
            return part[1] if all(values.get(name) for name in names) else ""

        pattern = re.sub(r"\(([^()]*)\)", expand_optional, self.pattern)
        return re.sub(r"\[(\w+)\]", lambda word: values.get(word[1], word[0]), pattern)


# The maximum size of a downloaded file whose exact size is not given.
MAX_DOWNLOAD_BYTES = 256 << 20


class DownloadTarget(NamedTuple):
    """The path of a file that is downloaded, and its maximum size."""

    file: Path
    max_bytes: int


def download(
    coordinates: Sequence[str], folder: Path, progress: Callable[[int], None], sizes: Mapping[str, int] | None = None
) -> dict[str, Path]:
    """Download ``group:artifact:version[:classifier]`` into ``folder``. Returns the files by coordinate.

    ``progress`` is called with the number of bytes that have arrived. Interrupted downloads are resumed while every round makes
    progress. ``sizes`` has the bytes of files by coordinate; a file that is not in ``sizes`` may have up to
    ``MAX_DOWNLOAD_BYTES`` bytes. Raises ``LocalBrokerError`` if a file is too large, or cannot be downloaded.
    """
    sizes = sizes or {}
    folder.mkdir(parents=True, exist_ok=True)
    files = {coordinate: folder / "_".join(coordinate.split(":")) for coordinate in coordinates}
    repositories, remaining_coordinates, arrived_bytes = _repositories(), list(files), -1
    while remaining_coordinates:
        targets = {
            coordinate: DownloadTarget(files[coordinate], sizes.get(coordinate, MAX_DOWNLOAD_BYTES))
            for coordinate in remaining_coordinates
        }
        errors = _try_each(repositories, targets, progress)
        earlier_bytes, arrived_bytes = (
            arrived_bytes,
            sum(file.stat().st_size for file in files.values() if file.exists()),
        )
        for error in errors.values():
            if isinstance(error, LocalBrokerError):
                raise error
        if errors and arrived_bytes <= max(earlier_bytes, 0):
            coordinate, error = next(iter(errors.items()))
            raise LocalBrokerError(
                f"Could not download RocketMQ: {_reason(error, coordinate)}", remedy=_REMEDY
            ) from error
        remaining_coordinates = list(errors)
    return files


def _try_each(
    repositories: Sequence[Repository], targets: Mapping[str, DownloadTarget], progress: Callable[[int], None]
) -> dict[str, Exception]:
    """Try once to download each file. Return the errors of failed files by coordinate."""
    stop_event = threading.Event()
    pool = ThreadPoolExecutor(_PARALLEL_DOWNLOADS, "rocketmq-jars")
    try:
        futures: dict[str, Future[None]] = {
            coordinate: pool.submit(_download_from_first, repositories, coordinate, target, stop_event)
            for coordinate, target in targets.items()
        }
        pending_futures = set(futures.values())
        while pending_futures:
            pending_futures = wait(pending_futures, _POLL_INTERVAL_S).not_done
            progress(sum(target.file.stat().st_size for target in targets.values() if target.file.exists()))
    finally:
        stop_event.set()  # set so that Ctrl-C does not wait for running downloads
        pool.shutdown(wait=False, cancel_futures=True)
    errors: dict[str, Exception] = {}
    for coordinate, future in futures.items():
        error = future.exception()
        if isinstance(error, Exception):
            errors[coordinate] = error
    return errors


def _download_from_first(
    repositories: Sequence[Repository], coordinate: str, target: DownloadTarget, stop_event: threading.Event
) -> None:
    """Download a file from the first repository that has it."""
    for number, repository in enumerate(repositories, 1):
        try:
            _download_file(repository, coordinate, target, stop_event)
            return
        except urllib.error.URLError as e:
            if not _is_missing(e) or number == len(repositories):
                raise


def _is_missing(error: urllib.error.URLError) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        return error.code == http.HTTPStatus.NOT_FOUND
    return isinstance(error.reason, FileNotFoundError)


def _download_file(
    repository: Repository, coordinate: str, target: DownloadTarget, stop_event: threading.Event
) -> None:
    file = target.file
    existing_bytes = file.stat().st_size if file.exists() else 0
    request = urllib.request.Request(repository.url(coordinate), headers={"User-Agent": "rocketmq-spark"})
    handlers: list[urllib.request.BaseHandler] = []  # added to urllib's default handlers, which use the current proxies
    if repository.authorization:  # this header is not sent to the target of a redirect
        _refuse_clear_text(request.full_url)
        request.add_unredirected_header("Authorization", repository.authorization)
        if request.type == "http":  # the repository is on this machine, and needs no proxy
            handlers.append(urllib.request.ProxyHandler({}))
    if existing_bytes:
        request.add_header("Range", f"bytes={existing_bytes}-")
    try:
        answer = urllib.request.build_opener(*handlers).open(request, timeout=STALL_TIMEOUT_S)
    except urllib.error.HTTPError as e:
        if existing_bytes and e.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # the file is complete
            return
        raise
    with (
        answer,
        file.open("ab" if existing_bytes and answer.status == http.HTTPStatus.PARTIAL_CONTENT else "wb") as output_file,
    ):
        length = answer.headers.get("Content-Length")
        bytes_left = None if length is None else int(length)
        while not stop_event.is_set() and (chunk := answer.read(_CHUNK_BYTES)):
            if output_file.tell() + len(chunk) > target.max_bytes:
                raise LocalBrokerError(
                    f"{request.full_url} has more than {target.max_bytes} bytes, the size limit of {coordinate}, and is not used",
                    remedy="Check the mirror, or the proxy that changes downloads",
                )
            output_file.write(chunk)
            bytes_left = None if bytes_left is None else bytes_left - len(chunk)
        if bytes_left:
            raise ConnectionError("the connection ended before the file did")


def _refuse_clear_text(url: str) -> None:
    """Raise ``LocalBrokerError`` if the credentials of a repository would cross the network in clear text."""
    url_parts = urllib.parse.urlsplit(url)
    host = url_parts.hostname or ""
    if url_parts.scheme == "http" and host not in ("localhost", "::1") and not re.fullmatch(r"127(\.\d+){3}", host):
        raise LocalBrokerError(
            f"The credentials for {host} would be sent to {url} in clear text",
            remedy="Use https in the Ivy settings file, or remove the credentials",
        )


def _repositories() -> list[Repository]:
    ivy_settings_path = _ivy_settings_path()
    if ivy_settings_path is not None:
        return _ivy_repositories(ivy_settings_path)
    mirror = _maven_mirror(folders.home() / ".m2" / "settings.xml")
    return [_m2_repository(mirror or CENTRAL)]


def _m2_repository(root_url: str, authorization: str | None = None) -> Repository:
    return Repository(root_url.rstrip("/") + "/" + _M2_PATTERN, authorization)


def _ivy_repositories(path: Path) -> list[Repository]:
    """The repositories of an Ivy settings file, in the order in which Ivy tries them."""
    try:
        root = ET.parse(path).getroot()
    except (OSError, ET.ParseError) as e:
        raise LocalBrokerError(
            f"The Ivy settings file {path} cannot be read: {e}", remedy=f"Correct {SETTINGS_VARIABLE}"
        ) from e
    values = {"ivy.settings.dir": str(path.parent), "user.home": str(folders.home())}
    values |= {element.get("name", ""): element.get("value", "") for element in root.iter("property")}

    def expand(word: str | None) -> str:
        return re.sub(r"\$\{([^${}]+)\}", lambda name: values.get(name[1], name[0]), word or "")

    credentials = {
        expand(element.get("host")): f"{expand(element.get('username'))}:{expand(element.get('passwd'))}"
        for element in root.iter("credentials")
    }
    settings_element = root.find("settings")
    default_resolver = "" if settings_element is None else expand(settings_element.get("defaultResolver"))
    resolvers = [
        element
        for element in root.iterfind("resolvers/*")
        if not default_resolver or element.get("name") == default_resolver
    ]
    repositories = []
    for resolver in (leaf_resolver for element in resolvers for leaf_resolver in _leaf_resolvers(element)):
        patterns = [expand(element.get("pattern")) for element in resolver.iterfind("artifact")]
        if resolver.tag == "ibiblio":
            patterns = [_m2_repository(expand(resolver.get("root")) or CENTRAL).pattern]
        elif resolver.tag == "filesystem":
            patterns = [f"file://{pattern}" for pattern in patterns]
        if resolver.get("m2compatible") == "true":
            patterns = [re.sub(r"\[organi[sz]ation\]", "[orgPath]", pattern) for pattern in patterns]
        for pattern in patterns:
            user_and_password = credentials.get(urllib.parse.urlsplit(pattern).hostname or "")
            repositories.append(
                Repository(
                    pattern,
                    f"Basic {base64.b64encode(user_and_password.encode()).decode()}" if user_and_password else None,
                )
            )
    if not repositories:
        raise LocalBrokerError(
            f"The Ivy settings file {path} names no repository that jars could come from; expected an ibiblio, url or "
            "filesystem resolver as its defaultResolver",
            remedy=f"Correct {SETTINGS_VARIABLE}",
        )
    return repositories


def _leaf_resolvers(resolver: ET.Element) -> Iterator[ET.Element]:
    if resolver.tag == "chain":
        for child in resolver:
            yield from _leaf_resolvers(child)
    else:
        yield resolver


def _ivy_settings_path() -> Path | None:
    configured_path = os.environ.get(SETTINGS_VARIABLE) or _spark_default("spark.jars.ivySettings")
    if not configured_path:
        return None
    path = Path(configured_path).expanduser()
    if not path.is_file():
        raise LocalBrokerError(f"The Ivy settings file {path} does not exist", remedy=f"Correct {SETTINGS_VARIABLE}")
    return path


def _spark_default(key: str) -> str | None:
    home = os.environ.get("SPARK_HOME")
    conf_folder = os.environ.get("SPARK_CONF_DIR") or (home and os.path.join(home, "conf"))
    if not conf_folder:  # the current folder is not searched, because another user may own it
        return None
    try:
        lines = Path(conf_folder, "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if name == key:
            return value.strip().removeprefix("file://")
    return None


def _maven_mirror(settings_path: Path) -> str | None:
    """The address of a mirror of Maven Central in Maven's settings, or None."""
    try:
        root = ET.parse(settings_path).getroot()
    except (OSError, ET.ParseError):
        return None
    for mirror in root.iterfind(".//{*}mirror"):
        mirrored_ids = (mirror.findtext("{*}mirrorOf") or "").replace(" ", "").split(",")
        if {"*", "central", "external:*"}.intersection(mirrored_ids) and "!central" not in mirrored_ids:
            return mirror.findtext("{*}url")
    return None


def _reason(error: Exception, coordinate: str) -> str:
    """The reason of a failure as text for users."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.URLError) and _is_missing(error):
        return f"the repository lacks some jars ({coordinate}, ...)"
    if isinstance(error, urllib.error.HTTPError):
        return f"the repository answers with HTTP {error.code} ({error.reason}) when it is asked for {coordinate}"
    for error_type, text in (
        (socket.gaierror, "the host name of the repository is unknown; is there a network?"),
        (ConnectionRefusedError, "no connection to the repository"),
        (TimeoutError, "the repository did not answer in time"),
        (
            ssl.SSLError,
            f"Python does not trust the repository's certificate ({cause}); name its authority in SSL_CERT_FILE",
        ),
    ):
        if isinstance(cause, error_type):
            return text
    return f"{type(error).__name__}: {error}"
