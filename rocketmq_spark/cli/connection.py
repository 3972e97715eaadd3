"""The connection options of commands: from the command line, from environment variables, or of the local broker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rocketmq_spark.cli.output import Output
from rocketmq_spark.errors import LocalBrokerError, OptionError
from rocketmq_spark.model.admin import GROUP

if TYPE_CHECKING:
    from rocketmq_spark.options import Options
    from rocketmq_spark.producer.producer import BaseProducer
    from rocketmq_spark.session import Client


@dataclass(frozen=True, slots=True)
class Target:
    """The connection options of a command. Connections open at the first use.

    With ``allows_query_options``, options of queries are accepted, because the command examines a query.
    """

    given_options: dict[str, Any] = field(repr=False)
    allows_query_options: bool = False

    def options(self, role: str = "batch source") -> Options:
        """Return the parsed options. Also raises ``OptionError`` for options that only queries have, because a command would
        ignore them.
        """
        from rocketmq_spark import options

        parsed_options = options.parse(self.settings()).for_role(role)
        problems = [
            f"option {row.name!r} is not accepted by commands, which have their own arguments (--help); it is for: "
            f"{', '.join(row.roles)}{_COMMAND_HINTS.get(row.field, '')}"
            for row in options.TABLE
            if not self.allows_query_options
            and row.field in parsed_options.given_fields
            and _SPARK_ROLES.issuperset(row.roles)
            and row.field not in _READ_FIELDS
        ]
        if problems:
            raise OptionError.of(problems)
        return parsed_options

    def for_role(self, role: str) -> Target:
        """Return a target with only the options of a role. The target always has a name server."""
        from rocketmq_spark import options

        row_by_name = {name.lower(): row for row in options.TABLE for name in (row.name, row.field, *row.aliases)}
        all_options = self.settings()
        accepted_options = {
            n: v for n, v in all_options.items() if n.lower() not in row_by_name or role in row_by_name[n.lower()].roles
        }
        return replace(self, given_options=accepted_options)

    def without_fields(self, fields: Collection[str]) -> Target:
        """Return a target without the options of these fields."""
        return replace(
            self,
            given_options={
                name: value for name, value in self.given_options.items() if _field_name(name) not in fields
            },
        )

    def in_checkpoint_scope(self, identities: Sequence[Mapping[str, object]]) -> Target:
        """Return a target with the namespace of a checkpoint's sources, and with the environment of the sources if that
        environment has its own topics. Returns this target unchanged if the checkpoint does not record namespaces, or if its
        sources have different namespaces or environments.
        """
        recorded_scopes = [record for record in identities if "namespace" in record]
        scopes = [
            {"namespace": record["namespace"], **_topic_environment_options(record)}
            for record in recorded_scopes
            if len(recorded_scopes) == len(identities)
        ]
        if not scopes or any(other != scopes[0] for other in scopes):
            return self
        other_options = {
            name: value
            for name, value in self.given_options.items()
            if name.replace("_", "").lower() not in _SCOPE_OPTIONS
        }
        return replace(
            self, given_options={**other_options, **{name: value for name, value in scopes[0].items() if value}}
        )

    def client(self) -> Client:
        from rocketmq_spark import session

        return session.client(self.options())

    def producer(self, **overrides: object) -> BaseProducer:
        from rocketmq_spark import options
        from rocketmq_spark.queues.environment import is_by_position, position_problem
        from rocketmq_spark.session.producers import Producer

        producer_options = {"group": GROUP, **self.settings(), **overrides}
        parsed_options = options.parse(producer_options)
        if is_by_position(parsed_options):
            raise OptionError(position_problem(parsed_options, "a command does not know the count of earlier senders"))
        return Producer(**producer_options)

    def note_environment(self, output: Output) -> None:
        """Print a note about the environment to which the command is restricted, if any."""
        from rocketmq_spark import options

        parsed_options = options.parse(self.given_options)
        if parsed_options.environment is not None:
            output.note(parsed_options.environment_text)

    def settings(self) -> dict[str, Any]:
        """Return the given options, with the name server of the local broker if none is given."""
        if any(value and _field_name(name) == "name_server" for name, value in self.given_options.items()):
            return self.given_options
        from rocketmq_spark.cli import background

        problem_text = ""
        try:
            local_broker = background.running_broker()
        except LocalBrokerError as e:  # other users may write to the cache
            local_broker, problem_text = None, f" that can be used: {e.message}"
        if local_broker is None:
            raise OptionError(
                f"no name server is given, and no local broker is running{problem_text}",
                remedy="Use --name-server host:port, set ROCKETMQ_NAMESRV, or run: rocketmq-spark broker start",
            )
        return {**self.given_options, "name_server": local_broker.name_server}


_SPARK_ROLES = frozenset({"stream source", "batch source", "sink"})
# For options that only queries have, by field: a hint about what a command accepts instead.
_COMMAND_HINTS = {"topic_names": "; a command needs RocketMQ's name of the topic, with _ for dots"}
# Options of a source that also apply to commands, because commands read messages as a source does.
_READ_FIELDS = frozenset({"route_refresh", "max_bytes_in_flight", "pull_depth", "read_deadline"})
ENVIRONMENT_OPTIONS = ("environment", "environmentmode", "environments")
_SCOPE_OPTIONS = ("namespace", *ENVIRONMENT_OPTIONS)


def _topic_environment_options(record: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of a recorded environment that has its own topics. An environment that shares topics needs no options,
    because the recorded positions name its queues.
    """
    has_suffix = record.get("environmentMode") == "suffix" and "environment" in record
    return {"environment": record["environment"], "environmentMode": "suffix"} if has_suffix else {}


def with_connection_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the connection options to a command, which receives them as ``target``."""

    @functools.wraps(function)
    def run(*args: Any, option: dict[str, str], **kwargs: Any) -> None:
        ctx = click.get_current_context()
        options = {name: value for name in _PARAMETER_NAMES if (value := kwargs.pop(name))}
        target = Target(_merge_options(ctx, options, read_secret_files(ctx.obj, "-o", option)))
        target.note_environment(ctx.obj)
        function(*args, target=target, **kwargs)

    return functools.reduce(lambda decorated, add: add(decorated), reversed(_CLICK_OPTIONS), run)


def _merge_options(ctx: click.Context, options: dict[str, Any], further_options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a command, merged with ``further_options``, the options of ``-o``. Options of the command line
    override environment variables.

    Raises ``OptionError`` for an option that the command line gives twice, in any spelling.
    """
    command_line_names = {name for name in options if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    merged_options = {name: value for name, value in options.items() if name in command_line_names}
    for name, value in further_options.items():
        if _field_name(name) in merged_options:
            raise OptionError(f"option {name!r} is given twice", remedy="Omit one of them")
        merged_options[_field_name(name)] = value
    return {**options, **merged_options}


def read_secret_files(output: Output, flag: str, given_options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the command line's ``flag`` (``-o``), with each secret ``@FILE`` replaced by the first line of FILE.

    Warns of a secret that is not in a file, because every user of the machine can read command lines. Raises ``OptionError`` for
    a file that cannot be read.
    """
    from rocketmq_spark import options
    from rocketmq_spark.options.parsing import secret

    secret_name_by_field = {row.field: row.name for row in options.TABLE if row.parse is secret}
    values = dict(given_options)
    for name, value in given_options.items():
        public_name = secret_name_by_field.get(_field_name(name))
        if public_name is None:
            continue
        if value.startswith("@"):
            values[name] = _first_line(f"{flag} {name}", Path(value[1:]))
        else:
            output.warning(
                f"{flag} {public_name}=… can be read by other users of this machine, in the list of processes; give a file as "
                f"{flag} {public_name}=@FILE, or use option 'credentialsFile'"
            )
    return values


def _first_line(option: str, path: Path) -> str:
    try:
        return path.expanduser().read_text("utf-8").partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is no text"
        raise OptionError(f"{option} names file {str(path)!r}; it cannot be read: {reason}") from e


def _field_name(name: str) -> str:
    """Return the field of an option, for any spelling of its name. Returns an unknown name unchanged."""
    from rocketmq_spark import options

    field_by_spelling = {
        spelling.lower(): row.field for row in options.TABLE for spelling in (row.name, row.field, *row.aliases)
    }
    return field_by_spelling.get(name.lower(), name)


def parse_pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """Callback of options such as ``--property name=value``."""
    value_by_name = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{value!r} is not NAME=VALUE")
        value_by_name[name] = text
    return value_by_name


_PARAMETER_NAMES = ("name_server", "access_key", "secret_key", "tls", "tls_ca_file", "environment")
_CLICK_OPTIONS = (
    click.option(
        "-n",
        "--name-server",
        envvar="ROCKETMQ_NAMESRV",
        metavar="HOST:PORT",
        help="Name server; separate several by ';' [env: ROCKETMQ_NAMESRV; default: the local broker of 'broker start']",
    ),
    click.option(
        "--access-key", envvar="ROCKETMQ_ACCESS_KEY", help="Access key (user name) [env: ROCKETMQ_ACCESS_KEY]"
    ),
    click.option(
        "--secret-key",
        envvar="ROCKETMQ_SECRET_KEY",
        help="Secret key of that user. Other users of this machine can see it on the command line, but not in the variable "
        "[env: ROCKETMQ_SECRET_KEY]",
    ),
    click.option("--tls", is_flag=True, help="Use TLS."),
    click.option("--tls-ca-file", type=click.Path(), help="PEM file of the certificate authorities to trust."),
    click.option(
        "--environment",
        metavar="NAME",
        help="Use only the topics, queues and groups of this environment, one of several in the cluster. NAME is its number or,"
        " with -o environments=JSON or -o environmentMode=suffix, its name [env: ROCKETMQ_ENVIRONMENT]",
    ),
    click.option(
        "-o",
        "--option",
        multiple=True,
        callback=parse_pairs,
        metavar="NAME=VALUE",
        help="Another option that says how to connect, such as requestTimeout=10s (docs/options.md; may be repeated). A "
        "secret can be given as a file: secretKey=@FILE",
    ),
)
