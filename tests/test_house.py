"""The house rules as tests; docs/design.md says why. When one fails, the code moves, or the data below says why not."""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rocketmq_spark
from docs import options_page
from rocketmq_spark import options
from rocketmq_spark.base import codes
from rocketmq_spark.wire import rpc
from tests.fix_house import CLUSTERS

ROOT = Path(__file__).parents[1]
PACKAGES = ("rocketmq_spark", "pyspark_rocketmq")

# A module imports from lines above its own only.
RANKS = """
    base daemon
    errors
    base.arguments base.java base.process base.retry base.tls_files
    model
    options ports wire
    queues remoting grpc_proxy
    client
    pull admin
    columnar
    stored
    producer consumer spool
    session
    spark
    delay localbroker notebook aio
    cli testing
    __main__
"""

# Inside a room a module imports from those before it only.
ORDER = {
    "producer": "accumulator retry fault_tolerance outgoing settings at_exit spool_bridge encoding routing housekeeping"
    " futures send_queue ambiguity delays batching engine resender producer tracing transactions request_reply rows"
    " rows.routing rows.sender rows.sent rows.calls rows.inputs bulk",
    "consumer": "process_queue rebalance listener figures member_state listener_pool send_back settings offsets"
    " group_health tracing concurrent assigned reachability prefetch pulling ordered ownership"
    " rebalancing polls broker_requests rows tools pop push"
    " upkeep pull simple",
    "localbroker": "java watchdog maven moved_folders distribution processes servers workspace cluster_servers cluster",
    "pull": "outcomes fetched suspicions pending pacing replica progress_timeout recreated range_reader puller reading"
    " read_ahead",
    "delay": "release portions stream commits envelope_records queue_records service node",
    "spark": "checkpoints monitoring sink source conf workers compat spark_options context_settings"
    " source.kafka_partitions source.offsets source.starting_offsets source.partitioning source.data_loss"
    " source.planning source.progress source.subscription source.checkpoint_identity source.recreated_topics"
    " source.removed_queues source.poll_interval source.subscribed_topics source.owned_queues source.bounds_reader"
    " source.waiting source.partition_numbers source.plan_state source.group_offsets source.partition_reader"
    " source.prefetch source.stream source.batch_starts source.batch_reader source.stream_reader source.checks"
    " map_in_arrow read checkpoints.files checkpoints.offset_log checkpoints.batch_notes checkpoints.owners"
    " checkpoints.rewind sink.report sink.worker_socket sink.exactly_once_checks sink.checks sink.row_checks"
    " sink.exactly_once sink.task sink.writer datasource sink.foreach monitoring.explain monitoring.queries"
    " monitoring.group_offset_listener monitoring.metrics_listener",
    "grpc_proxy": "tables protos channel encoder proxy member transactions sender",
    "columnar": "decode encode arrow java_hashes decode.buffers encode.buffers decode.schema decode.property_names"
    " decode.property_columns decode.stored_messages decode.inner decode.properties decode.rows decode.decoder decode.kafka"
    " encode.properties encode.columns encode.kafka encode.empty_bodies encode.ids encode.batch_tags encode.content_ids"
    " encode.encoder encode.proxy_rows",
    "stored": "ends scan",
    "base": "codes secret logs extras hosts process terminal budget clock folders java threads arguments complaints exposition"
    " tls_files dropped copies"
    " retry",
    "client": "credentials rpc name_servers routes broker_client topic_attributes offsets instance transactions sender send_back"
    " replies admin broker_requests topic_readers pull_source pulled_messages long_polls committer member",
    "spool": "records changes files owner_rights database pending lanes turns recovery store redelivery spool owner_reader"
    " copying",
    "options": "names paths parsing topic_names transport table typed",
    "cli": "output numbers command background connection broker cluster produce lag_view query lag topic_reader tail copy group"
    " checkpoint message spool topic doctor doctor.findings doctor.servers doctor.command python_values kafka_options kafka_text"
    " kafka_chains kafka_frames kafka_columns kafka_lines port demo"
    " demo.accounts demo.process_session demo.order_writer demo.environment demo.batch_totals demo.driver demo.watch"
    " demo.view demo.run demo.job demo.command",
    "queues": "environment selection allocation",
    "remoting": "protocol transport advertised connection bulk pool",
    "session": "proxy_clients spools stored_ids telemetry producers consumers admin",
    "aio": "loop producer consumers",
    "admin": "groups topics messages brokers",
    "model": "membership message pull send admin",
    "wire": "header properties identifiers loose_json names compression rpc stored_fields messages envelope bodies traces",
}

# Beyond the ranks: what a room must not know.
BANNED = {
    "pull": "client grpc_proxy",
    "columnar.arrow": "client pull remoting wire model",
    "columnar.java_hashes": "client pull remoting wire model",
    "columnar.encode": "client consumer columnar.decode producer pull remoting spool wire.rpc wire.header",
    "columnar.decode": "client pull.range_reader pull.reading pull.read_ahead pull.pacing pull.replica pull.progress_timeout"
    " pull.pending pull.suspicions pull.puller remoting wire.rpc wire.header",
    "producer": "client remoting grpc_proxy session wire.rpc wire.header",
    "consumer": "client remoting grpc_proxy",
    "spark.source": "consumer remoting grpc_proxy client",
    "spark.sink": "consumer remoting grpc_proxy client",
    "spark.datasource": "consumer remoting grpc_proxy client wire",
    "delay": "consumer remoting grpc_proxy client",
    "grpc_proxy": "wire remoting",
    "localbroker": "producer consumer session",
    "spool": "client remoting grpc_proxy session wire",
    "stored": "client remoting grpc_proxy wire",
}

# Who may import what from outside; what is not named here comes from the standard library and is open to all.
OUTSIDE = {
    "pyspark": "spark.context_settings daemon spark.compat spark.datasource spark.map_in_arrow spark.read"
    " columnar.decode.schema spark.sink"
    " spark.source.prefetch"
    " spark.monitoring.group_offset_listener spark.monitoring.metrics_listener spark.monitoring.queries cli delay.stream"
    " notebook",
    **dict.fromkeys(("matplotlib", "IPython"), "notebook"),
    "opentelemetry": "session.telemetry",
    "py4j": "spark.datasource",
    "pyarrow": "wire.compression columnar stored spark.read spark.source.subscription spark.source.partition_reader"
    " spark.source.prefetch spark.checkpoints.files spark.sink"
    " producer.rows",
    "numpy": "remoting.bulk pull.fetched pull.recreated columnar stored spark.sink producer.rows",
    "xxhash": "columnar.encode.content_ids",
    "prometheus_client": "base.exposition spark.monitoring.metrics_listener",
    "grpc": "grpc_proxy.channel",
    "google": "grpc_proxy.protos",
    "click": "cli",
    "rich": "cli localbroker.distribution",
    "pytest": "testing",
    "socket": "remoting.transport remoting.bulk localbroker.processes base.exposition spark.sink.worker_socket localbroker.maven",
    "ssl": "base.tls_files remoting.transport localbroker.maven",
    "select": "remoting.transport spool.copying spark.sink.worker_socket cli.demo.job",
    "subprocess": "localbroker spool.copying cli.background cli.demo.process_session cli.demo.driver spark.workers",
    "threading": "base.process base.budget base.threads base.dropped base.exposition spark.monitoring.metrics_listener"
    " remoting.transport"
    " remoting.connection remoting.pool client.rpc client.instance client.routes base.copies"
    " producer.batching producer.routing producer.fault_tolerance producer.futures"
    " producer.send_queue producer.ambiguity producer.producer producer.spool_bridge producer.resender base.process"
    " producer.transactions producer.request_reply producer.tracing producer.rows.calls client.replies localbroker"
    " aio.producer consumer.member_state consumer.listener_pool consumer.settings consumer.offsets"
    " grpc_proxy.channel grpc_proxy.sender grpc_proxy.proxy grpc_proxy.member consumer.simple"
    " consumer.pop consumer.concurrent"
    " consumer.rebalancing consumer.broker_requests consumer.push consumer.prefetch grpc_proxy.transactions"
    " consumer.polls consumer.upkeep stored.scan spool.store spool.redelivery notebook",
    "concurrent": "base.threads producer.batching producer.futures producer.producer producer.request_reply localbroker cli"
    " aio.loop"
    " session.telemetry",
    "time": "base.clock base.threads base.retry base.tls_files remoting.transport remoting.connection remoting.pool"
    " client.credentials client.rpc client.routes client.topic_attributes delay.node delay.stream grpc_proxy.channel"
    " grpc_proxy.proxy grpc_proxy.sender client.instance client.send_back spool.spool consumer.broker_requests session.telemetry"
    " localbroker cli spark.monitoring.metrics_listener aio",
    "asyncio": "aio",
    "multiprocessing": "",
}


# Names of classes with more than one definition, and how many. The table may only shrink. Classes of aio/ may have public names.
REUSED_CLASS_NAMES: dict[str, int] = {}
# By room: uses of private attributes of other objects. A number may only go down.
PRIVATE_USES = {
    "aio": 3, "base": 10, "client": 1, "columnar": 2, "consumer": 25, "localbroker": 4, "producer": 17, "queues": 1,
    "remoting": 3, "spark": 9, "spool": 11, "wire": 6,
}  # fmt: skip
# By folder of tests: uses of private attributes and imports of private names. A number may only go down.
PRIVATE_USES_IN_TESTS = {
    ".": 75, "aio": 61, "chaos": 1, "cli": 77, "client": 79, "columnar": 7, "compat": 8, "consumer": 222, "decode": 5,
    "delay": 47, "encode": 1, "fuzz": 2, "grpc_proxy": 92, "live": 44, "localbroker": 38, "producer": 81, "queues": 2,
    "remoting": 51, "sink": 53, "source": 21, "spark": 3, "spool": 44, "wire": 2,
}  # fmt: skip


class Module(NamedTuple):
    """A module with what it imports: full names, at the top level or anywhere."""

    name: str
    path: Path

    @property
    def tree(self) -> ast.Module:
        return _trees(self.name.partition(".")[0])[self.path]

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, in the order of ``ast.walk``."""
        return _nodes(self.tree)

    @property
    def inner(self) -> str:
        """The name without the package's: ``source.batch_reader``; ``__init__`` for the package itself."""
        return self.name.partition(".")[2] or "__init__"

    @property
    def room(self) -> str:
        return self.inner.partition(".")[0]

    def imports(self, top_level: bool = False) -> Iterator[str]:
        for node in self.tree.body if top_level else self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None, f"{self.path}: relative import"
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    yield full if full in _names() else node.module

    def own_imports(self) -> Iterator[str]:
        """Inner names of our modules that this one imports."""
        for name in self.imports():
            package, _, inner = name.partition(".")
            if package in PACKAGES:
                yield inner or "__init__"


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(_name(path) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@functools.cache
def _trees(folder: str) -> dict[Path, ast.Module]:
    """Parsed when a test first asks: most processes that collect the tests run none of these."""
    gc.collect()  # what earlier tests left is not to be frozen with it
    gc.disable()  # all of it stays, and looking for garbage in it would take three times as long
    found = {path: ast.parse(path.read_text("utf-8")) for path in (ROOT / folder).rglob("*.py")}
    gc.freeze()
    gc.enable()
    return found


@functools.cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Noted once: most tests here look at all nodes of many modules, and a walk takes longer than they do."""
    return tuple(ast.walk(tree))


@functools.cache
def modules(folder: str = "rocketmq_spark") -> tuple[Module, ...]:
    return tuple(Module(_name(path), path) for path in sorted((ROOT / folder).rglob("*.py")))


def sources() -> list[Module]:
    return [module for folder in (*PACKAGES, "tests", "benchmarks", "examples", "docs") for module in modules(folder)]


def within(inner: str, places: str) -> bool:
    """Whether a module is, or lies in, one of the places."""
    return any(inner == place or inner.startswith(f"{place}.") for place in places.split())


def test_imports_go_down():
    ranks = {place: rank for rank, line in enumerate(RANKS.strip().splitlines()) for place in line.split()}

    def rank(inner: str) -> int:
        return ranks[inner] if inner in ranks else ranks[inner.partition(".")[0]]

    wrong = [
        f"{module.name} imports {inner}"
        for module in modules()
        if module.inner != "__init__"
        for inner in module.own_imports()
        if inner.partition(".")[0] not in ("__init__", module.room) and rank(inner) >= rank(module.inner)
    ]
    assert not wrong


def test_imports_inside_a_room_go_up_its_list():
    wrong = []
    for module in modules():
        room, _, leaf = module.inner.partition(".")
        if not leaf:
            continue
        order = ORDER.get(room, "").split()
        assert leaf in order, f"write down in ORDER where {module.name} belongs"
        for inner in module.own_imports():
            other_room, _, other = inner.partition(".")
            if other_room == room and other and order.index(other) >= order.index(leaf):
                wrong.append(f"{module.name} imports {other}")
    assert not wrong


def test_the_order_names_modules_that_exist():
    listed = {f"{room}.{leaf}" for room, leaves in ORDER.items() for leaf in leaves.split()}
    assert not listed - {module.inner for module in modules()}


def test_rooms_do_not_know_what_they_must_not():
    wrong = [
        f"{module.name} imports {inner}"
        for module in modules()
        for inner in module.own_imports()
        for place, banned in BANNED.items()
        if within(module.inner, place) and within(inner, banned)
    ]
    assert not wrong


def test_upper_rooms_get_ports_from_the_session_and_no_client():
    """By attribute they would reach everything below it."""
    wrong = [
        f"{module.name}:{node.lineno}: {ast.unparse(node)}"
        for module in modules()
        if module.room == "spark"
        for node in module.nodes
        if (isinstance(node, ast.ImportFrom) and node.module == "rocketmq_spark.session")
        or (isinstance(node, ast.Attribute) and re.fullmatch(r"session\.(client|Client|_.*)", ast.unparse(node)))
    ]
    assert not wrong


def test_imports_from_outside_are_listed():
    used = set()
    wrong = []
    for module in modules():
        for name in {name.partition(".")[0] for name in module.imports()} - set(PACKAGES):
            if name in OUTSIDE:
                used |= {(name, place) for place in OUTSIDE[name].split() if within(module.inner, place)}
            allowed = within(module.inner, OUTSIDE[name]) if name in OUTSIDE else name in sys.stdlib_module_names
            if not allowed:
                wrong.append(f"{module.name} imports {name}")
    assert not wrong
    stale = {(name, place) for name, places in OUTSIDE.items() for place in places.split()} - used
    assert not stale


@pytest.mark.parametrize("package", PACKAGES)
def test_what_spark_imports_is_light(package):
    """Spark imports every pyspark_* package; one that cannot be imported breaks the search for all sources."""
    (init,) = (m for m in modules(package) if m.name == package)
    roots = {name.partition(".")[0] for name in init.imports(top_level=True)}
    assert roots <= sys.stdlib_module_names | {"pyspark" if package == "pyspark_rocketmq" else "rocketmq_spark"}
    assert {name for name in init.imports(top_level=True) if name.startswith("rocketmq_spark")} <= {
        "rocketmq_spark",
        "rocketmq_spark.base.extras",
        "rocketmq_spark.spark.workers",
    }


# Modules, classes and functions where an OSError is a file's or a process's, not a socket's.
_FILES = [
    "client.credentials.from_file",
    "consumer.offsets",
    "consumer.broker_requests.stacks_of_threads",
    "spark.checkpoints",
    "spark.monitoring.metrics_listener.MetricsListener",
    "spark.conf",
    "spark.workers",
]


def test_errors_of_the_operating_system_end_in_remoting():
    """Above it they are RocketMQErrors."""
    caught = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        if module.room in ("client", "pull", "producer", "consumer", "spark")
        for part in module.tree.body
        if not within(f"{module.inner}.{getattr(part, 'name', '')}", " ".join(_FILES))
        for node in ast.walk(part)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        if re.search(r"OSError|ConnectionError|TimeoutError|socket\.", ast.unparse(node.type))
    ]
    assert not caught


_BY_PATH = r"(?:^|\.)(?:l?chmod|l?chown|fchown|set(?:re|res|e)?[ug]id|setgroups|umask)$"


def test_owner_and_mode_change_in_one_place():
    """By path, such a call may reach another file: the owner of the folder can put a link there. ``base.folders`` opens files."""
    calls = {
        f"{module.name}:{node.lineno}": ast.unparse(node.func)
        for module in modules()
        if module.inner != "base.folders"
        for node in module.nodes
        if isinstance(node, ast.Call) and re.search(_BY_PATH, ast.unparse(node.func))
    }
    assert calls == {}


def test_root_gets_its_rights_back_only_after_plain_files():
    """What stays open is used with root's rights then. A database may stay open: who opens one takes rights for good."""
    blocks = {
        module.inner
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("as_user")
    }
    assert blocks == {"spark.checkpoints.files"}


# What may be called while all threads of a process wait: it takes no time.
_AT_ONCE = re.compile(
    r"(process\.)?entries|(\w+|self\._masters|here\.entries_by_kind|here\.entry_locks|process\.entries\(_\w+\))\.(get|setdefault|clear|items|values)"
    r"|(run\.may_equal|self\._masters\.(move_to_end|popitem|values)|contextlib\.suppress|Deadline\.after|threading\.RLock)"
    r"|dict|len|next|iter|sum|', '\.join|OptionError"
)


def test_spark_drivers_of_this_package_ask_who_connects():
    """Every user of the machine may connect to a driver's ports, and Spark then runs what that user sends."""
    tables = [node for module in modules() for node in module.nodes if isinstance(node, ast.Dict)]
    names = [[key.value for key in table.keys if isinstance(key, ast.Constant)] for table in tables]
    sessions = [found for found in names if "spark.driver.bindAddress" in found]
    assert sessions
    assert all("spark.authenticate" in found for found in sessions)


def test_nothing_waits_in_the_registry_of_a_process():
    """All queries, producers and consumers of a process need its lock. What may take long is made in ``get_or_create``, or under
    an ``entry_lock``.
    """
    calls = {
        f"{module.name}:{call.lineno}": ast.unparse(call.func)
        for module in modules()
        for block in module.nodes
        if isinstance(block, ast.With)
        if any(
            re.fullmatch(r"(process\.)?registry_lock\(\)|here\.lock", ast.unparse(item.context_expr))
            for item in block.items
        )
        for statement in block.body
        for call in ast.walk(statement)
        if isinstance(call, ast.Call)
    }
    assert len(calls) > 10
    assert {place: call for place, call in calls.items() if not _AT_ONCE.fullmatch(call)} == {}


def test_another_python_is_started_in_one_way():
    """``process.python_call`` lets it import nothing from the current folder; the guard of servers runs isolated (-I)."""
    commands = {
        module.inner
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.List) and any(ast.unparse(part) == "sys.executable" for part in node.elts)
    }
    assert commands == {"localbroker.processes"}


def test_conditions_are_entered_by_their_locks():
    """The steps of a condition's own ``with`` are Python, and Ctrl-C between them leaves its lock held for ever."""
    made, entered = [], []
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("threading.Condition("):
                made.append((ast.unparse(node.targets[0]).rpartition(".")[2], ast.unparse(node.value)))
            if isinstance(node, ast.With):
                entered += [(module.name, ast.unparse(item.context_expr).rpartition(".")[2]) for item in node.items]
    assert len(made) > 4
    assert [each for each in entered if each[1] in dict(made)] == []
    assert [name for name, text in made if text == "threading.Condition()"] == []


def test_numbers_of_the_wire_stand_in_codes_only():
    wrong = [
        f"{module.name}:{node.lineno}: {ast.unparse(node)}"
        for module in modules()
        if module.inner != "base.codes"
        for node in module.nodes
        if isinstance(node, (ast.Compare, ast.Call)) and _has_wire_number(node)
    ]
    assert not wrong


def _has_wire_number(node: ast.Compare | ast.Call) -> bool:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        about_codes = any(re.fullmatch(r"(.*\.)?(broker_)?code", ast.unparse(side)) for side in sides)
        return about_codes and any(_numbers(side) for side in sides)
    named = [keyword.value for keyword in node.keywords if keyword.arg in ("code", "broker_code")]
    first = node.args[:1] if ast.unparse(node.func).endswith(("error_for", "Command")) else []
    return any(_numbers(value) for value in (*named, *first))


def _numbers(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Constant) and type(part.value) is int for part in ast.walk(node))


def test_property_names_of_the_wire_stand_in_codes_only():
    wrong = [
        f"{module.name}:{node.lineno}: {node.value}"
        for module in modules()
        if module.inner != "base.codes"
        for node in module.nodes
        if isinstance(node, ast.Constant) and node.value in codes.RESERVED_PROPERTIES
    ]
    assert not wrong


def test_every_request_has_one_row():
    assert set(rpc.row_by_code) == set(codes.Request)
    assert all(getattr(rpc, code.name) is row for code, row in rpc.row_by_code.items())


def test_the_documented_options_are_the_table():
    page = (ROOT / "docs" / "options.md").read_text("utf-8")
    assert page[page.index("## Connection") :] == options_page.markdown(), "run: make docs"


def test_what_is_called_an_option_is_one():
    wrong = [
        f"{module.name}:{node.lineno}: {name}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for name in re.findall(r"option '(\w+)'", node.value)
        if name not in {row.name for row in options.TABLE}
    ]
    assert not wrong


def test_what_starts_a_cluster_has_a_name_of_its_own():
    """Marks, and which tests share a process, are given by names of fixtures, and of parameters."""
    functions = (node for module in sources() for node in module.nodes if isinstance(node, ast.FunctionDef))
    made = Counter(name for node in functions for call in node.decorator_list for name in _named(call, node.name))
    assert {name: made[name] for name in CLUSTERS} == dict.fromkeys(CLUSTERS, 1)


def test_clusters_start_in_fixtures_that_marks_know():
    """So ``-m "not live"`` leaves them all out. Rooms of their own start what they want: LocalBroker's, the plug-in's, chaos."""
    free = {
        "localbroker",
        "chaos",
        "test_testing.py",
        "test_packaging.py",
        "older_pyspark.py",
        "checkpoints_of_versions.py",
    }
    started = {
        f"{module.inner}: {node.name}"
        for module in sources()
        if module.path.is_relative_to(ROOT / "tests")
        and free.isdisjoint(module.path.parts)
        and not module.path.name.startswith("fix_")
        for node in module.nodes
        if isinstance(node, ast.FunctionDef) and node.name not in CLUSTERS | {"broker"}  # within brokers
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "LocalBroker"
    }
    assert started == set()


def _named(decorator: ast.expr, function: str) -> list[str]:
    """The name of the fixture that a decorator makes, or of the parameters that it gives."""
    if "parametrize" in ast.unparse(decorator) and isinstance(decorator, ast.Call):
        names, indirect = decorator.args[0], any(keyword.arg == "indirect" for keyword in decorator.keywords)
        return [] if indirect else re.findall(r"\w+", ast.unparse(names))
    if "fixture" not in ast.unparse(decorator):
        return []
    given = {keyword.arg: keyword.value for keyword in getattr(decorator, "keywords", ())}
    return [ast.literal_eval(given["name"]) if "name" in given else function]


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def class_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of classes, inner ones too; those under TYPE_CHECKING are only seen by type checkers."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from class_names(node.orelse)
            continue
        if isinstance(node, ast.ClassDef):
            yield node.name
        yield from class_names(ast.iter_child_nodes(node))


def test_a_class_name_is_used_once():
    names = [
        name
        for module in (*modules(), *modules("pyspark_rocketmq"))
        for name in class_names([module.tree])
        if not (module.room == "aio" and name in rocketmq_spark.__all__)
    ]
    assert {name: count for name, count in Counter(names).items() if count > 1} == REUSED_CLASS_NAMES


def test_classes_for_type_checkers_alone_are_left_out():
    source = "class A:\n class B: pass\nif TYPE_CHECKING:\n class C: pass\nelse:\n class D: pass\ndef f():\n class E: 1"
    assert list(class_names([ast.parse(source)])) == ["A", "B", "D", "E"]


# Public names that begin with an underscore: of named tuples, and of the standard library.
_PUBLIC_UNDERSCORE = {"_replace", "_asdict", "_fields", "_make", "_field_defaults", "_exit", "_getframe"}


def private_uses(tree: ast.AST) -> list[str]:
    """Imports of private names, and private attributes but those of ``self``, ``cls``, ``super()`` and the module's classes."""
    nodes = _nodes(tree)
    own = {"self", "cls", "super()", *(node.name for node in nodes if isinstance(node, ast.ClassDef))}
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in nodes
        if (isinstance(node, ast.Attribute) and _private(node.attr) and ast.unparse(node.value) not in own)
        or (isinstance(node, ast.ImportFrom) and any(_private(alias.name) for alias in node.names))
    ]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC_UNDERSCORE


def test_private_uses_are_those_of_other_objects():
    source = "import m\nfrom m import _a, b\nclass K:\n def f(self, k):\n  self._x, K._x, super()._x, k._asdict(), k.__dict__\n"
    assert private_uses(ast.parse(source)) == ["2: from m import _a, b"]
    uses = private_uses(ast.parse(source + "  k._x, self.k._x, m._x"))
    assert uses == ["2: from m import _a, b", "6: k._x", "6: self.k._x", "6: m._x"]


def test_private_attributes_are_used_by_their_object_alone():
    """Another object uses a method. Where a number is too high here, lower it."""
    found = {module.name: private_uses(module.tree) for module in modules()}
    rooms = Counter(module.room for module in modules() for _ in found[module.name])
    for module in modules():
        if rooms[module.room] > PRIVATE_USES.get(module.room, 0):
            print(module.name, *found[module.name], sep="\n  ")  # pytest shows it with the failure
    assert dict(rooms) == PRIVATE_USES


_MOST_STATE = 8
_CONSTANTS = {"None", "True", "False", "int"}


def state_of_classes(tree: ast.AST) -> dict[str, set[str]]:
    """The attributes of each class that its methods assign after construction."""
    state: dict[str, set[str]] = {}
    for class_ in _nodes(tree):
        if not isinstance(class_, ast.ClassDef):
            continue
        methods = [node for node in class_.body if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
        state[class_.name] = {
            node.attr
            for method in methods
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
    return state


def identity_comparisons(tree: ast.AST) -> list[str]:
    """Comparisons with ``is``, but those with a constant or with a member of an enum."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in _nodes(tree)
        if isinstance(node, ast.Compare)
        for operator, right in zip(node.ops, node.comparators, strict=True)
        if isinstance(operator, ast.Is | ast.IsNot)
        and ast.unparse(right) not in _CONSTANTS
        and not re.fullmatch(r"[A-Z]\w+\.[A-Z_]+", ast.unparse(right))
    ]


def test_state_and_identity_comparisons_are_found():
    source = (
        "class K:\n def __init__(self):\n  self.a = self.b = 1\n def f(self, k):\n  self.b, k.c = 1, 2\n  self.d += 1\n"
    )
    assert state_of_classes(ast.parse(source)) == {"K": {"b", "d"}}
    compared = ast.parse("a is None\na is b\na is Kind.OF_A\na is not b.c\na == b\n")
    assert identity_comparisons(compared) == ["2: a is b", "4: a is not b.c"]


def test_classes_of_the_source_have_little_state():
    """More state is a second object. Values are compared by their content, because an equal offset may be another object."""
    source = [module for module in modules() if module.name.startswith("rocketmq_spark.spark.source.")]
    state = {name: names for module in source for name, names in state_of_classes(module.tree).items()}
    assert len(state["Stream"]) > 3
    assert {name: sorted(names) for name, names in state.items() if len(names) > _MOST_STATE} == {}
    assert {module.name: found for module in source if (found := identity_comparisons(module.tree))} == {}


# ``4_31``, ``3_h`` and ``rule_6`` are points of lists, ``flink_19`` is an issue of another project.
_PROJECTS = "seatunnel|externals|flink|rocketmq|awslabs|kinesis_sql|client_python"
_LISTED = re.compile(rf"test_(g?\d+_(\d+|[a-z])|rule_\d+|({_PROJECTS})_\d+)_")
_LONGEST_NAME = 60


def names_of_tests(tree: ast.AST) -> list[str]:
    return [node.name for node in _nodes(tree) if isinstance(node, _DEFINITIONS[1:]) and node.name.startswith("test_")]


def unfit_names(tree: ast.AST) -> list[str]:
    """Names of tests that are too long, or have the number of a list that is not in the repository."""
    return [name for name in names_of_tests(tree) if len(name) > _LONGEST_NAME or _LISTED.match(name)]


def test_points_of_lists_are_told_from_other_numbers():
    listed = ("4_31_a_b", "3_h_a", "g2_10_a", "rule_6_a", "seatunnel_6665_a", "1_1_1_6_a")
    plain = ("batch_0_goes_on", "brokers_before_5_0", "codes_17_and_29", "rights_of_acl_1", "4_times_a_day", "to_utf_8")
    named = "".join(f"def test_{name}(): pass\n" for name in (*listed, *plain, "x" * 56))
    assert unfit_names(ast.parse(named)) == [f"test_{name}" for name in (*listed, "x" * 56)]


def test_names_of_tests_are_short_and_have_no_list_numbers():
    """House rule of ``CONTRIBUTING.md``."""
    unfit = {module.name: unfit_names(module.tree) for module in modules("tests")}
    assert {name: names for name, names in unfit.items() if names} == {}


def test_private_uses_in_tests_only_go_down():
    """House rule of ``CONTRIBUTING.md``. Where a number is too high here, lower it."""
    found: Counter[str] = Counter()
    for module in modules("tests"):
        folder = module.path.relative_to(ROOT / "tests").parts[0] if module.path.parent != ROOT / "tests" else "."
        found[folder] += len(private_uses(module.tree))
    assert {folder: number for folder, number in found.items() if number} == PRIVATE_USES_IN_TESTS


# Settings of Spark, and its session, which programs call ``spark``.
_OF_SPARK = re.compile(r"spark\.(sql|jars|kryo|python|read|streams|speculation)\b")
_REFERENCE = re.compile(r"`(?:rocketmq_spark[./])?(\w+(?:[./]\w+)+)")


def unknown_modules(text: str) -> list[str]:
    """References between backticks that begin with a room, but name neither a module nor something in a module."""
    inners = {name.partition(".")[2] for name in _names()}
    unknown = []
    for reference in _REFERENCE.findall(text):
        parts = re.split(r"[./]", reference.removesuffix(".py"))
        if parts[0] not in inners or _OF_SPARK.match(reference):
            continue
        depth = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in inners)
        if depth < len(parts) and parts[depth] not in _defined(".".join(parts[:depth])):
            unknown.append(reference)
    return unknown


@functools.cache
def _defined(inner: str) -> frozenset[str]:
    """Names that a module defines or imports, with those of its classes and functions."""
    (module,) = (module for module in modules() if module.inner == inner)
    nodes = module.nodes
    made = {node.name for node in nodes if isinstance(node, (*_DEFINITIONS, ast.alias))}
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    return frozenset(made | {getattr(node, "id", getattr(node, "attr", "")) for node in stored})


def test_unknown_modules_are_told_from_names_in_modules():
    known = "``base.clock``, ``base/clock.Deadline``, `rocketmq_spark/base/clock.py`, ``spark.jars.ivySettings``, ``other.thing``"
    assert unknown_modules(known) == []
    gone = "``base.clocks``, `base/clocks.Deadline`, ``spark.source.offset``, ``spark/sinks``, ``rocketmq_spark.wire.rpcs.x``"
    references = ["base.clocks", "base/clocks.Deadline", "spark.source.offset", "spark/sinks", "wire.rpcs.x"]
    assert unknown_modules(gone) == references


def test_modules_that_docstrings_and_comments_name_exist():
    unknown = {module.name: unknown_modules(module.path.read_text("utf-8")) for module in modules()}
    assert {name: references for name, references in unknown.items() if references} == {}
