"""Downloads pinned jars with the Ivy that ships inside PySpark: no Maven, no repository address of our own.

Where Ivy looks is the user's business first. In this order: the settings file that ROCKETMQ_SPARK_IVY_SETTINGS names;
the one that ``spark.jars.ivySettings`` in spark-defaults.conf names, as for ``spark-submit --packages``; a mirror of
Maven Central in Maven's own settings.xml; else Maven Central itself. Proxies (HTTPS_PROXY) are handed to Java.
Nothing is trusted for coming from there: the caller compares every file with the lock.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.java import find_java

SETTINGS_VARIABLE = "ROCKETMQ_SPARK_IVY_SETTINGS"
STALLED_AFTER_S = 60.0
_POLL_S = 0.1

_SETTINGS = """<ivysettings>
  <property name="ivy.checksums" value=""/>
  <settings defaultResolver="repository"/>
  <timeout-constraints>
    <timeout-constraint name="t" connectionTimeout="15000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers><ibiblio name="repository" m2compatible="true" usepoms="false" useMavenMetadata="false"
    checkmodified="false" timeoutConstraint="t"{root}/></resolvers>
</ivysettings>
"""
_REMEDY = (
    "Check the network and HTTPS_PROXY, or name an Ivy settings file with your mirror in "
    f"{SETTINGS_VARIABLE} (docs/running.md)"
)


def download(coordinates: Sequence[str], folder: Path, progress: Callable[[int], None]) -> dict[str, Path]:
    """Fetch ``group:artifact:version[:classifier]`` into ``folder``; the files by coordinate.

    ``progress`` is called with the number of bytes that have arrived. A try that failed half way is repeated as long as
    each one brings something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = _command(coordinates, folder)
    arrived = 0
    while True:
        output, ok = _run(command, folder, progress)
        if ok:
            break
        before, arrived = arrived, _size(folder / "cache")
        if arrived == before:
            raise LocalBrokerError(f"Could not download RocketMQ: {_reason(output)}", remedy=_REMEDY)
    return {c: folder / "jars" / _file_name(c) for c in coordinates}


def _command(coordinates: Sequence[str], folder: Path) -> list[str]:
    (folder / "ivy.xml").write_text(_ivy_xml(coordinates), encoding="utf-8")
    settings = _user_settings()
    if settings is None:
        settings = folder / "settings.xml"
        mirror = _maven_mirror(Path.home() / ".m2" / "settings.xml")
        root = f" root={quoteattr(mirror)}" if mirror else ""
        settings.write_text(_SETTINGS.format(root=root), encoding="utf-8")
    return [
        str(find_java().path), "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", *_proxy_flags(),
        "-jar", str(_ivy_jar()), "-ivy", str(folder / "ivy.xml"), "-settings", str(settings),
        "-cache", str(folder / "cache"),
        "-retrieve", f"{folder}/jars/[organisation].[artifact]-[revision](-[classifier]).[ext]",
    ]  # fmt: skip


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")
    homes = [Path(p) for p in (spec and spec.submodule_search_locations) or ()]
    if "SPARK_HOME" in os.environ:
        homes.append(Path(os.environ["SPARK_HOME"]))
    for home in homes:
        for jar in home.glob("jars/ivy-*.jar"):
            return jar
    raise LocalBrokerError("PySpark's jars folder has no Ivy", remedy="Install pyspark itself, not only its client")


def _file_name(coordinate: str) -> str:
    group, artifact, version, *classifier = coordinate.split(":")
    return "-".join((f"{group}.{artifact}", version, *classifier)) + ".jar"


def _ivy_xml(coordinates: Sequence[str]) -> str:
    lines = []
    for coordinate in coordinates:
        group, artifact, version, *classifier = coordinate.split(":")
        only = f' m:classifier="{classifier[0]}"' if classifier else ""
        lines.append(
            f'<dependency org="{group}" name="{artifact}" rev="{version}" transitive="false" conf="default->*">'
            f'<artifact name="{artifact}" type="jar" ext="jar"{only}/></dependency>'
        )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="local" module="rocketmq"/><configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(lines)}</dependencies></ivy-module>"
    )


def _user_settings() -> Path | None:
    named = os.environ.get(SETTINGS_VARIABLE) or _spark_default("spark.jars.ivySettings")
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_file():
        raise LocalBrokerError(f"The Ivy settings file {path} does not exist", remedy=f"Correct {SETTINGS_VARIABLE}")
    return path


def _spark_default(key: str) -> str | None:
    conf = os.environ.get("SPARK_CONF_DIR") or os.path.join(os.environ.get("SPARK_HOME", ""), "conf")
    try:
        lines = Path(conf, "spark-defaults.conf").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.strip().replace("=", " ", 1).partition(" ")
        if name == key:
            return value.strip().removeprefix("file://")
    return None


def _maven_mirror(settings: Path) -> str | None:
    """The address of a mirror that stands for Maven Central, when Maven's settings name one."""
    try:
        root = ET.parse(settings).getroot()
    except (OSError, ET.ParseError):
        return None
    for mirror in root.iterfind(".//{*}mirror"):
        of = (mirror.findtext("{*}mirrorOf") or "").replace(" ", "").split(",")
        if {"*", "central", "external:*"}.intersection(of) and "!central" not in of:
            return mirror.findtext("{*}url")
    return None


def _proxy_flags() -> list[str]:
    """Java does not read the proxy variables that pip and curl obey."""
    flags = []
    for scheme in ("https", "http"):
        value = os.environ.get(f"{scheme}_proxy") or os.environ.get(f"{scheme.upper()}_PROXY")
        proxy = urllib.parse.urlsplit(value or "")
        if proxy.hostname:
            flags += [f"-D{scheme}.proxyHost={proxy.hostname}", f"-D{scheme}.proxyPort={proxy.port or 80}"]
    direct = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    if flags and direct:
        hosts = (f"*{h}" if h.startswith(".") else h for h in direct.replace(" ", "").split(","))
        flags.append(f"-Dhttp.nonProxyHosts={'|'.join(hosts)}")
    return flags


def _run(command: list[str], folder: Path, progress: Callable[[int], None]) -> tuple[str, bool]:
    log = folder / "ivy.log"
    with log.open("w") as out, subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out) as ivy:
        try:
            _watch(ivy, folder / "cache", progress)
        finally:
            ivy.kill()
    return log.read_text(errors="replace"), ivy.returncode == 0


def _watch(ivy: subprocess.Popen[bytes], cache: Path, progress: Callable[[int], None]) -> None:
    """Returns when Ivy ended or nothing has arrived for a minute (a network that swallows packets)."""
    size, since = 0, time.monotonic()
    while ivy.poll() is None:
        now = _size(cache)
        if now != size:
            size, since = now, time.monotonic()
            progress(size)
        elif time.monotonic() - since > STALLED_AFTER_S:
            return
        time.sleep(_POLL_S)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.jar*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # a part file that has just got its final name
            continue
    return total


def _reason(output: str) -> str:
    if "UnknownHostException" in output:
        return "the host name of the repository is unknown; is there a network?"
    if "Connection refused" in output or "ConnectException" in output:
        return "no connection to the repository"
    if "timed out" in output.lower():
        return "the repository did not answer in time"
    if "SSLHandshakeException" in output or "PKIX" in output:
        return "Java does not trust the repository's certificate"
    if "UNRESOLVED DEPENDENCIES" in output or "FAILED DOWNLOADS" in output:
        missing = [line.strip(" :\t") for line in output.splitlines() if "not found" in line]
        return f"the repository lacks some jars ({missing[0]}, ...)" if missing else "some jars were not found"
    last = [line for line in output.splitlines() if line.strip()][-1:]
    return last[0].strip() if last else "nothing arrived for a minute"
