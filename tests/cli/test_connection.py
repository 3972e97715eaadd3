import json

import click
import pytest
from click.testing import CliRunner

from rocketmq_spark import session
from rocketmq_spark.cli import background
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.connection import GROUP, Target, parse_pairs, read_secret_files, with_connection_options
from rocketmq_spark.cli.output import Json
from rocketmq_spark.errors import OptionError
from rocketmq_spark.session import producers


@click.command()
@with_connection_options
def show(target):
    options = target.options()
    shown = (options.name_server, options.access_key, options.secret_key, options.tls, options.request_timeout)
    click.echo(repr((target, shown)))


def shown(*arguments, **env):
    done = CliRunner(env=env).invoke(show, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_options_beat_the_environment(no_broker):
    assert "(('h:2',), None, None, False, 3.0)" in shown("--name-server", "h:2", ROCKETMQ_NAMESRV="h:1")
    assert "(('h:1',)" in shown(ROCKETMQ_NAMESRV="h:1")


def commands(group, ctx):
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        yield from commands(command, ctx) if isinstance(command, click.Group) else [command]


def test_every_command_with_a_name_server_has_the_option_n():
    found = [p.opts for c in commands(app, click.Context(app)) for p in c.params if "--name-server" in p.opts]
    assert len(found) > 30
    assert all(opts == ["-n", "--name-server"] for opts in found)


def test_secrets_come_from_the_environment_and_are_never_shown(no_broker):
    text = shown("--name-server", "h:1", ROCKETMQ_ACCESS_KEY="me", ROCKETMQ_SECRET_KEY="hush")
    assert "'me'" in text
    assert "hush" not in text


@pytest.mark.parametrize("name", ["secretKey", "secret_key", "securityToken", "tlsKeyPassword"])
def test_a_secret_is_read_from_a_file_or_warned_of(no_broker, tmp_path, capsys, name):
    """Every user of the machine sees command lines, with ``ps``."""
    (tmp_path / "key").write_text("hush=1\nanother line\n")
    out = Json()
    assert read_secret_files(out, "-o", {name: "hush", "requestTimeout": "7s"}) == {
        name: "hush",
        "requestTimeout": "7s",
    }
    (warned,) = capsys.readouterr().err.splitlines()
    assert "can be read by other users of this machine" in json.loads(warned)["warning"]
    assert "hush" not in warned
    given = {name: f"@{tmp_path}/key", "accessKey": "@me"}
    assert read_secret_files(out, "--to-option", given) == {name: "hush=1", "accessKey": "@me"}
    assert capsys.readouterr().err == ""
    for missing in (f"@{tmp_path}/none", "@", f"@{tmp_path}"):
        with pytest.raises(OptionError, match=f"--to-option {name} names file .*; it cannot be read"):
            read_secret_files(out, "--to-option", {name: missing})


def test_a_command_reads_secrets_from_files(no_broker, tmp_path):
    (tmp_path / "key").write_text("hush\n")
    given = ("--name-server", "h:1", "-o", "accessKey=me", "-o", f"secretKey=@{tmp_path}/key")
    assert "(('h:1',), 'me', '***'" in shown(*given)


def test_any_other_option_goes_through_the_table(no_broker):
    assert shown("--name-server", "h:1", "--tls", "-o", "requestTimeout=7s").rstrip().endswith("True, 7.0))")
    with pytest.raises(OptionError, match="'requestTimeoute' is unknown; did you mean 'requestTimeout'"):
        shown("--name-server", "h:1", "-o", "requestTimeoute=7s")


def test_what_a_query_reads_is_no_option_of_a_command(no_broker):
    """It was ignored, and a command showed what was not asked for."""
    with pytest.raises(OptionError) as told:
        shown(
            *("--name-server", "h:1", "-o", "subscribe=t", "-o", "startingOffsets=latest", "-o", "readFrom=slave"),
            *("-o", "kafkaColumns=true", "-o", "topicNames=dotsToUnderscores"),
        )
    assert "; a command needs RocketMQ's name of the topic, with _ for dots" in str(told.value)
    for name in ("subscribe", "startingOffsets", "readFrom", "kafkaColumns", "topicNames"):
        assert f"option {name!r} is not accepted by commands, which have their own arguments (--help)" in str(
            told.value
        )
    pace = ("readDeadline=5s", "routeRefresh=5s", "pullDepth=2", "maxBytesInFlight=1mb", "group=g")
    assert "(('h:1',)" in shown("--name-server", "h:1", *(word for option in pace for word in ("-o", option)))


def test_without_a_name_server_the_error_says_how(no_broker):
    with pytest.raises(OptionError, match=r"--name-server host:port.*ROCKETMQ_NAMESRV.*rocketmq-spark broker start"):
        shown()


def test_without_a_name_server_an_unsafe_cache_is_no_other_error(no_broker):
    """In a pod, the folder of temporary files may be one of everyone; the command needs no cache."""
    no_broker.mkdir(exist_ok=True)
    (no_broker / "theirs").mkdir()
    (no_broker / "theirs").chmod(0o777)
    done = CliRunner(env={"ROCKETMQ_SPARK_CACHE": str(no_broker / "theirs" / "cache")}).invoke(app, ["topic", "list"])
    assert done.exit_code == 1
    assert "no name server is given, and no local broker is running that can be used: The cache" in done.output
    assert "Use --name-server host:port" in done.output


def test_a_local_broker_is_the_default(no_broker, monkeypatch):
    found = background.RunningBroker(1, "127.0.0.1:9876", "/data", 0, {})
    monkeypatch.setattr(background, "running_broker", lambda: found)
    assert "(('127.0.0.1:9876',)" in shown()
    assert "(('127.0.0.1:9876',), 'me'," in shown("--access-key", "me", "--secret-key", "hush"), (
        "what else is given stays"
    )


SHOP, SUFFIXED = {"namespace": "shop"}, {"namespace": "", "environment": "dev", "environmentMode": "suffix"}


@pytest.mark.parametrize(
    ("given", "reads", "expected"),
    [
        ({}, [SHOP, SHOP], {"namespace": "shop"}),
        ({"namespace": "other", "tags": "a"}, [SHOP], {"namespace": "shop", "tags": "a"}),
        ({"namespace": "other"}, [{"namespace": ""}], {}),
        ({"namespace": "other"}, [{"tags": "a"}], {"namespace": "other"}),  # of a version that did not write it down
        ({"namespace": "other"}, [SHOP, {}], {"namespace": "other"}),
        ({"namespace": "other"}, [SHOP, SUFFIXED], {"namespace": "other"}),
        ({"environment_mode": "suffix"}, [SUFFIXED], {"environment": "dev", "environmentMode": "suffix"}),
        ({}, [{"namespace": "", "environmentMode": "suffix"}], {}),  # damaged
        ({"environment": "x"}, [{"namespace": "", "environment": "dev"}], {}),
        ({"environment": "x"}, [], {"environment": "x"}),
    ],
)
def test_a_checkpoint_says_where_its_query_reads(given, reads, expected):
    assert Target(given).in_checkpoint_scope(reads).given_options == expected


def test_the_producer_has_a_group_of_its_own():
    with Target({"name_server": "127.0.0.1:1"}).producer() as producer:
        assert producer.settings.group == GROUP


def test_pairs():
    assert parse_pairs(None, None, ("a=b", "c==")) == {"a": "b", "c": "="}
    for bad in ("a", "=b"):
        with pytest.raises(click.BadParameter, match="NAME=VALUE"):
            parse_pairs(None, None, (bad,))


def test_a_name_server_in_either_spelling_is_one(no_broker):
    """copy --to-option nameServer=… was said to be none."""
    assert Target({"nameServer": "h:1"}).options().name_server == ("h:1",)


@pytest.mark.parametrize("name", ["nameServer", "name_server", "NAMESERVER", "namesrvAddr"])
def test_an_option_is_the_same_in_either_spelling(no_broker, name):
    """-o nameServer was refused as given twice, by a variable too, or overridden without a word by its spelling."""
    assert "(('h:2',)" in shown("-o", f"{name}=h:2")
    assert "(('h:2',)" in shown("-o", f"{name}=h:2", ROCKETMQ_NAMESRV="h:1")
    with pytest.raises(OptionError, match=f"option '{name}' is given twice"):
        shown("--name-server", "h:1", "-o", f"{name}=h:2")
    with pytest.raises(OptionError, match="is given twice"):
        shown("-o", "NameServer=h:1", "-o", f"{name}=h:2")
    with pytest.raises(OptionError, match="option 'tls' is given twice"):
        shown("--name-server", "h:1", "--tls", "-o", "tls=false")


# Each makes its client by itself.
ADMINISTRATION = (
    "cluster", "topic create t", "topic list", "topic describe t", "topic delete t --yes", "topic widen t --queues 9",
    "topic shrink t --queues 1 --yes", "topic update t --permission RW", "environment show t", "group list",
    "group describe g", "group delete g --yes", "message get 7F000001000077AA0000000000000000 --topic t",
    "message find --topic t --key k", "user list", "user set u", "user delete u --yes", "policy list",
    "policy set u Topic:t Sub", "policy delete u Topic:t --yes", "offsets show g", "offsets set g --to latest --yes",
    "lag --group g", "dlq show g", "dlq resend g --yes", "tail t", "produce t",
    "consume t --group g", "copy t u --group g",
)  # fmt: skip


@pytest.mark.parametrize("command", ADMINISTRATION)
def test_a_command_works_where_it_is_told_to(monkeypatch, no_broker, command):
    """Without its environment or namespace it would change, or delete, what belongs to another."""
    seen = []

    def client(options):
        seen.append(options)
        raise OptionError("it has come as far as that")

    monkeypatch.setattr(session, "client", client)
    where = ("-n", "h:1", "--access-key", "me", "--secret-key", "hush", "--tls", "--tls-ca-file", "/ca.pem")
    apart = ("--environment", "dev", "-o", "environmentMode=suffix", "-o", "namespace=shop")
    done = CliRunner().invoke(app, [*command.split(), *where, *apart], input="x\n")
    assert (done.exit_code, "it has come as far as that" in done.stderr) == (1, True), done.output
    assert {
        (
            o.name_server,
            o.access_key,
            o.secret_key,
            o.tls,
            o.tls_ca_file,
            o.namespace,
            o.environment,
            o.environment_mode,
        )
        for o in seen
    } == {(("h:1",), "me", "hush", True, "/ca.pem", "shop", "dev", "suffix")}


def test_what_a_command_sends_is_sent_as_who_it_is_told_to_be(monkeypatch):
    """A producer connects when it sends."""
    made = []
    monkeypatch.setattr(producers, "Producer", lambda **options: made.append(options))
    given = {"name_server": "h:1", "access_key": "me", "secret_key": "hush", "tls": True, "namespace": "shop"}
    Target(given).producer(num_retries=1)
    assert made == [{"group": GROUP, **given, "num_retries": 1}]
