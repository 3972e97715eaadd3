"""Where Ivy looks: the user's settings first, in Spark's and Maven's own places, and what its failures are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import ivy

SETTINGS = """<settings xmlns="http://maven.apache.org/SETTINGS/1.2.0"><mirrors>
<mirror><id>a</id><mirrorOf>spark-packages</mirrorOf><url>http://one.example/</url></mirror>
<mirror><id>b</id><mirrorOf>{of}</mirrorOf><url>http://two.example/maven</url></mirror>
</mirrors></settings>"""


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user without any settings."""
    for name in (ivy.SETTINGS_VARIABLE, "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    for scheme in ("http", "https", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme.upper()}_PROXY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def _command(folder: Path) -> list[str]:
    return ivy._command(["g.h:a:1", "g:b:2:linux"], folder)


def _settings_of(command: list[str]) -> Path:
    return Path(command[command.index("-settings") + 1])


def test_our_settings_name_no_host(tmp_path: Path) -> None:
    settings = _settings_of(_command(tmp_path)).read_text()
    assert "root=" not in settings
    assert "://" not in settings


def test_the_module_asks_for_the_jars_alone(tmp_path: Path) -> None:
    _command(tmp_path)
    module = (tmp_path / "ivy.xml").read_text()
    assert '<dependency org="g.h" name="a" rev="1" transitive="false"' in module
    assert 'm:classifier="linux"' in module


def test_named_settings_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.xml").touch()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.jars.ivySettings /other.xml\n")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv(ivy.SETTINGS_VARIABLE, "~/mine.xml")
    assert _settings_of(_command(tmp_path)) == tmp_path / "mine.xml"


@pytest.mark.parametrize(
    "line", ["spark.jars.ivySettings {}", "spark.jars.ivySettings={}", " spark.jars.ivySettings  {}"]
)
def test_sparks_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "ivy.settings").touch()
    lines = ["# spark.jars.ivySettings /not/this", "spark.master local", line.format(tmp_path / "ivy.settings")]
    (tmp_path / "spark-defaults.conf").write_text("\n".join(lines))
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert _settings_of(_command(tmp_path)) == tmp_path / "ivy.settings"


def test_settings_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ivy.SETTINGS_VARIABLE, "/nowhere/ivysettings.xml")
    with pytest.raises(LocalBrokerError, match=r"The Ivy settings file /nowhere/ivysettings\.xml does not exist"):
        _command(tmp_path)


@pytest.mark.parametrize(("of", "used"), [("*", True), ("central", True), ("x, central", True), ("*,!central", False)])
def test_mavens_mirror_of_central(tmp_path: Path, of: str, used: bool) -> None:
    (tmp_path / ".m2").mkdir()
    (tmp_path / ".m2" / "settings.xml").write_text(SETTINGS.format(of=of))
    settings = _settings_of(_command(tmp_path)).read_text()
    assert ('root="http://two.example/maven"' in settings) == used
    assert "one.example" not in settings


def test_broken_maven_settings_are_not_ours_to_mend(tmp_path: Path) -> None:
    (tmp_path / ".m2").mkdir()
    (tmp_path / ".m2" / "settings.xml").write_text("<settings>")
    assert "root=" not in _settings_of(_command(tmp_path)).read_text()


def test_proxies_are_handed_to_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "localhost, .inside.example")
    command = _command(tmp_path)
    assert "-Dhttps.proxyHost=proxy.example" in command
    assert "-Dhttps.proxyPort=3128" in command
    assert "-Dhttp.nonProxyHosts=localhost|*.inside.example" in command
    assert not [word for word in command if "secret" in word]


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("java.net.UnknownHostException: repo", "the host name of the repository is unknown; is there a network?"),
        ("java.net.ConnectException: Connection refused", "no connection to the repository"),
        ("Server access error: Connect timed out", "the repository did not answer in time"),
        ("javax.net.ssl.SSLHandshakeException: PKIX path", "Java does not trust the repository's certificate"),
        ("FAILED DOWNLOADS", "some jars were not found"),
        ("one\n\ntwo\n", "two"),
        ("", "nothing arrived for a minute"),
    ],
)
def test_reasons(output: str, sentence: str) -> None:
    assert ivy._reason(output) == sentence


def test_a_network_that_swallows_packets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ivy, "STALLED_AFTER_S", 0.3)
    output, ok = ivy._run(["/bin/sleep", "60"], tmp_path, lambda arrived: None)
    assert (output, ok) == ("", False)
