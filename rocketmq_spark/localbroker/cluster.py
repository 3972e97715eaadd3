"""A real RocketMQ cluster on this machine: name servers, brokers, slaves and a proxy run as children of this Python process.

``with LocalBroker() as mq:`` is ready for messages inside the block and leaves nothing behind after it. Brokers can be
killed, stopped, restarted and added by name, each with its own data and ports, so tests can cause the failures of
production. The methods also accept ``"namesrv"`` (the second is ``"namesrv-2"``) and ``"proxy"`` as a broker's name.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import Closeable
from rocketmq_spark.client.admin import BaseAdmin, batch_attributes
from rocketmq_spark.client.routes import format_queue_counts
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import distribution, processes, servers
from rocketmq_spark.localbroker.cluster_servers import ClusterServers, StartSettings
from rocketmq_spark.localbroker.java import find_java
from rocketmq_spark.localbroker.servers import PROXY, BrokerSpec
from rocketmq_spark.localbroker.workspace import Workspace, reserve

# If more than ``_MAX_DISK_USAGE`` of the disk is used, RocketMQ rejects messages, and no setting raises this limit.
# ``_MIN_FREE_MB`` must also be free, because the operating system kills a server if the disk has no space for the server's
# memory-mapped files.
_MAX_DISK_USAGE = 0.90
_MIN_FREE_MB = 128


class LocalBroker(Closeable):
    """A RocketMQ cluster on this machine. Use it in a ``with`` block, or call ``start()`` and ``close()``.

    Args:
        brokers: Number of masters: ``broker-a``, ``broker-b``, …
        slaves: Number of slaves of each master.
        name_servers: Number of name servers.
        conf: Settings of ``broker.conf`` for every broker, by name.
        data: A folder that is kept. A later cluster with the same folder reuses its data, and its ports if they are free.
            Without ``data``, the data is in a temporary folder that is deleted at the end.
        proxy: Whether to run a Proxy, too, or the fields of its ``rmq-proxy.json`` by name. With ``tlsCertPath`` and
            ``tlsKeyPath``, the Proxy accepts only TLS. With ``proxyMode`` ``LOCAL``, it runs in the process of the only broker,
            as ``mqbroker --enable-proxy`` starts it. Clients of a ``LOCAL`` Proxy can use only the gRPC port, and only groups
            that exist.
        queues: Default number of queues on each broker for topics that ``create_topic`` creates.
        keep: Keep the temporary folder.
        ports: Fixed ports by server name: ``{"namesrv": 9876, "broker-a": 10911}``.
        heap_mb: Heap of each broker's JVM, and of the proxy's, in MiB.
        jvm: More flags for the JVMs of the brokers and the proxy.
        quiet: Print nothing about downloads and starts.
        start_timeout_s: Seconds within which all servers must have started.
        version: Version of RocketMQ: 5.5.0, or for tests of older brokers 4.9.7, 5.1.4 or 5.3.1, which cannot be combined with
            ``proxy``. Brokers of 4.9 listen on all interfaces.

    Raises:
        LocalBrokerError: A server does not start, Java is missing, or the disk is full. The message has a remedy.
    """

    def __init__(
        self,
        brokers: int = 1,
        slaves: int = 0,
        name_servers: int = 1,
        conf: Mapping[str, object] | None = None,
        data: str | os.PathLike[str] | None = None,
        proxy: bool | Mapping[str, object] = False,
        *,
        queues: int = 8,
        keep: bool = False,
        ports: Mapping[str, int] | None = None,
        heap_mb: int = 192,
        jvm: Sequence[str] = (),
        quiet: bool = False,
        start_timeout_s: float = 180.0,
        version: str = distribution.VERSION,
    ) -> None:
        if brokers < 1 or slaves < 0 or name_servers < 1:
            raise LocalBrokerError(
                f"LocalBroker cannot have {brokers} brokers with {slaves} slaves each and {name_servers} name servers",
                remedy="Ask for at least one broker and one name server",
            )
        if version not in (distribution.VERSION, *distribution.OLDER_VERSIONS) or (
            proxy and version != distribution.VERSION
        ):
            raise LocalBrokerError(
                f"LocalBroker cannot run RocketMQ {version}{' with a proxy' if proxy else ''}",
                remedy=f"Ask for {distribution.VERSION}, or without a proxy for one of {', '.join(distribution.OLDER_VERSIONS)}",
            )
        self.version = version
        self.queues = queues
        self._broker_specs = [
            BrokerSpec(name, broker_id) for name in servers.broker_names(brokers) for broker_id in range(slaves + 1)
        ]
        self._name_server_names = servers.name_server_names(name_servers)
        self._conf = servers.checked_conf(conf or {})
        self._data = Path(data).expanduser().absolute() if data is not None else None
        self._has_proxy = isinstance(proxy, Mapping) or proxy
        self._proxy_conf = servers.checked_conf(
            proxy if isinstance(proxy, Mapping) else {}, allowed_settings=["proxyMode"]
        )
        self._has_local_proxy = servers.proxy_mode(self._proxy_conf) == servers.LOCAL
        self._refuse_more_than_one_broker(len(self._broker_specs))
        if self._has_local_proxy and servers.TLS_CERT_FIELD in self._proxy_conf:
            raise LocalBrokerError(
                f"A proxy in LOCAL mode takes no {servers.TLS_CERT_FIELD}: its broker would demand TLS, too",
                remedy="Omit proxyMode, because a proxy in CLUSTER mode takes tlsCertPath",
            )
        if PROXY in (ports or {}) and (self._has_local_proxy or not self._has_proxy):
            raise LocalBrokerError(
                "ports names a proxy, but no proxy has ports of its own here",
                remedy="Omit the proxy in ports: the ports of a proxy in LOCAL mode lie 2 and 3 above its broker's, broker-a"
                if self._has_local_proxy
                else "Pass proxy=True, too, or omit the proxy in ports",
            )
        self._keeps_data = keep or data is not None
        self._ports = dict(ports or {})
        self._heap_mb = heap_mb
        self._jvm_flags = tuple(jvm)
        self._quiet = quiet
        self._start_timeout_s = start_timeout_s
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._servers: ClusterServers | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def _refuse_more_than_one_broker(self, broker_count: int) -> None:
        if self._has_local_proxy and broker_count > 1:
            raise LocalBrokerError(
                f"A proxy in LOCAL mode runs in the process of one broker, but there are {broker_count}",
                remedy="Ask for one broker without slaves, or omit proxyMode",
            )

    # --- life

    def start(self) -> None:
        """Start all servers. Returns when the name server shows every broker. The first start of a user downloads RocketMQ."""
        with self._lock:
            if self._servers is not None:
                raise LocalBrokerError("This LocalBroker is running already")
            self._pid = os.getpid()
            java = find_java()
            processes.check_ports_free(self._ports)
            core_jars = tuple(distribution.fetch(["core"], self._quiet))
            proxy_jars = distribution.fetch(["tls-test", "proxy"], self._quiet) if self._has_proxy else []
            cache = distribution.cache_folder()
            jvm_flags = (*distribution.native_flags(core_jars, cache / "natives"), *self._jvm_flags)
            jars_of_version = (
                ()
                if self.version == distribution.VERSION
                else tuple(distribution.fetch(["core"], self._quiet, self.version))
            )
            has_name_server = any("namesrv" in jar.name for jar in jars_of_version)
            name_server_jars = jars_of_version if has_name_server else core_jars
            start_settings = StartSettings(
                jars_of_version or core_jars,
                name_server_jars,
                (*core_jars, *proxy_jars),
                self._proxy_conf,
                self._conf,
                self._heap_mb,
                jvm_flags,
            )
            with distribution.writing_to(self._data or cache):
                reservation = reserve(cache / "run", self._data, self._keeps_data)
                cluster_workspace = Workspace(reservation, java, cache / "archives", self._ports)
            self._servers = ClusterServers(
                cluster_workspace, start_settings, self._name_server_names, self._broker_specs
            )
            atexit.register(self.close)
            try:
                with distribution.writing_to(reservation.data):
                    if problem := disk_problem(reservation.data):
                        raise LocalBrokerError(
                            problem, remedy="Free some space, or choose a folder on another disk (data=, or TMPDIR)"
                        )
                    self._servers.bring_up_all(Deadline.after(self._start_timeout_s), self._has_proxy)
            except BaseException:
                self.close()
                raise
            cluster_workspace.make_archives()

    def close(self) -> None:
        """Stop all servers; delete the data unless ``data`` or ``keep`` was given. Does nothing the second time, or in a fork."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            cluster_servers, self._servers = self._servers, None
            atexit.unregister(self.close)
            if cluster_servers is not None:
                cluster_servers.close(self._keeps_data)

    # --- what there is

    @property
    def running(self) -> bool:
        """Whether the cluster was started and not closed."""
        return self._servers is not None

    @property
    def name_server(self) -> str:
        """``host:port`` of the name server; several are joined with ``;``."""
        return _running_servers(self).name_server

    @property
    def proxy_server(self) -> str:
        """``host:port`` of the proxy's Remoting port, to be used as a name server."""
        return f"{processes.HOST}:{_running_servers(self).server(PROXY).program.ports[-2]}"

    @property
    def proxy_grpc(self) -> str:
        """``host:port`` of the proxy's gRPC port."""
        return f"{processes.HOST}:{_running_servers(self).server(PROXY).program.ports[-1]}"

    @property
    def brokers(self) -> list[str]:
        """Names of the brokers, running or not, without slaves."""
        return [spec.name for spec in self._broker_specs if spec.broker_id == 0]

    @property
    def slaves(self) -> list[str]:
        """Names of the slaves: ``broker-a-slave-1``."""
        return [spec.name for spec in self._broker_specs if spec.broker_id > 0]

    @property
    def data(self) -> Path:
        """The data folder: one subfolder per server, with its configuration, store and logs."""
        return _running_servers(self).workspace.data

    @property
    def admin(self) -> BaseAdmin:
        """An internal client, closed with the cluster. For administration use ``Admin(mq.name_server)``."""
        return _own_servers(self).registration.admin

    def address(self, broker: str) -> str:
        """``host:port`` where the server named ``broker`` listens; for the proxy, with the Remoting port."""
        return self.proxy_server if broker == PROXY else _running_servers(self).server(broker).address

    def pid(self, broker: str) -> int | None:
        """The process id of ``broker``; None if the broker does not run."""
        return _own_servers(self).server(broker).pid

    def logs(self, broker: str | None = None) -> str:
        """Return what ``broker`` printed and logged; without a name, what all servers printed and logged."""
        if broker is not None:
            return _running_servers(self).server(broker).log()
        return "".join(
            f"===== {name}\n{server.log()}\n"
            for name, server in sorted(_running_servers(self).workspace.servers.items())
        )

    # --- what can be done

    def create_topic(
        self,
        name: str,
        queues: int | None = None,
        broker: str | None = None,
        attributes: Mapping[str, str] | None = None,
        batch: bool = False,
        resize: bool = False,
    ) -> None:
        """Create a topic, and wait until the name server has its route. If the topic exists with this number of queues, nothing
        changes.

        Args:
            name: The topic.
            queues: Number of read queues and of write queues on each broker; by default ``queues`` of the cluster.
            broker: The only broker to create the topic on; by default, all running brokers get the topic.
            attributes: Attributes of the topic, such as ``{"message.type": "FIFO"}``.
            batch: Whether to create a batch topic (attribute ``queue.type=BatchCQ``), which stores batches whole.
            resize: Change the number of queues of an existing topic. The messages of removed queues cannot be read.

        Raises:
            LocalBrokerError: The topic has another number of queues, and ``resize`` is not set.
        """
        attributes = batch_attributes(attributes) if batch else attributes
        queues, brokers = (
            queues or self.queues,
            [broker] if broker else [name for name in self.brokers if self.pid(name)],
        )
        existing_queues = self.admin.queues_of(name, brokers)
        brokers_to_resize = [
            broker
            for broker, queue_data in existing_queues.items()
            if {queue_data.read_queues, queue_data.write_queues} != {queues}
        ]
        if brokers_to_resize and not resize:
            raise LocalBrokerError(
                f"Topic {name} exists with {format_queue_counts(existing_queues)}; expected {queues}",
                remedy="Pass the number of queues that the topic has, or resize=True (with fewer queues, the messages in the "
                "removed queues are not read)",
            )
        new_brokers = [broker for broker in brokers if broker not in existing_queues]
        if brokers_to_resize:
            self.admin.resize_topic(name, queues, brokers_to_resize)
        if new_brokers:
            self.admin.create_topic(name, queues, new_brokers, attributes=attributes)
        for spec in self._broker_specs:
            if spec.broker_id > 0 and spec.broker_name in {*new_brokers, *brokers_to_resize} and self.pid(spec.name):
                _running_servers(self).registration.copy_topic(
                    name, spec.broker_name, _running_servers(self).server(spec.name)
                )

    def kill(self, broker: str) -> None:
        """Kill ``broker`` with SIGKILL, so that the broker does not close its connections or flush its store."""
        _own_servers(self).server(broker).kill()

    def stop(self, broker: str) -> None:
        """Shut ``broker`` down cleanly, which takes about ten seconds."""
        _own_servers(self).workspace.stop([_own_servers(self).server(broker)], is_clean=True)

    def restart(self, broker: str, conf: Mapping[str, object] | None = None) -> None:
        """Restart ``broker`` on the same data and ports. A running broker is killed first.

        ``conf`` changes settings of broker.conf, or fields of the proxy's rmq-proxy.json. In LOCAL mode the broker restarts with
        its proxy.
        """
        if (
            broker == PROXY
            and servers.TLS_CERT_FIELD in (conf or {})
            and servers.TLS_CERT_FIELD not in self._proxy_conf
        ):
            raise LocalBrokerError(
                f"conf sets {servers.TLS_CERT_FIELD}, but this proxy was started without TLS",
                remedy="Pass the fields to LocalBroker(proxy=...)",
            )
        with self._lock, _starting_on(self.data):
            _own_servers(self).restart(broker, servers.checked_conf(conf or {}), Deadline.after(self._start_timeout_s))

    def add_broker(self, conf: Mapping[str, object] | None = None) -> str:
        """Add a broker without slaves, with ``conf`` as settings of its broker.conf. Returns the name of the broker when the
        broker is registered.
        """
        self._refuse_more_than_one_broker(len(self._broker_specs) + 1)
        with self._lock, _starting_on(self.data):
            spec = BrokerSpec(servers.broker_names(len(self.brokers) + 1)[-1], 0)
            _own_servers(self).bring_up(spec, Deadline.after(self._start_timeout_s), servers.checked_conf(conf or {}))
            self._broker_specs.append(spec)
            return spec.name


@contextlib.contextmanager
def _starting_on(folder: Path) -> Iterator[None]:
    """Like ``distribution.writing_to``. Also, if the disk is full, an error without a remedy gets the remedy to free some space.
    On a full disk, the operating system kills a server, and the server's log has no room for the cause.
    """
    with distribution.writing_to(folder):
        try:
            yield
        except LocalBrokerError as e:
            if e.remedy is None and (problem := disk_problem(folder)):
                e.remedy = f"{problem}. Free some space"
            raise


def _running_servers(local_broker: LocalBroker) -> ClusterServers:
    if local_broker._servers is None:
        raise LocalBrokerError("This LocalBroker is not running", remedy="Use it in a with block, or call start()")
    return local_broker._servers


def _own_servers(local_broker: LocalBroker) -> ClusterServers:
    """Return the servers of a cluster. Raises an error in a forked process, because only the process that started the servers
    can control them.
    """
    cluster_servers = _running_servers(local_broker)
    if os.getpid() != local_broker._pid:
        raise LocalBrokerError(
            f"This LocalBroker belongs to process {local_broker._pid}, from which this one was forked",
            remedy="Control it in that process. This process can use its name_server: Admin(mq.name_server)",
        )
    return cluster_servers


def disk_problem(folder: Path, for_broker: bool = True) -> str | None:
    """Return a sentence about the disk of a folder if it has too little space; None if there is enough. With ``for_broker``, the
    space must suffice for the data of a broker.
    """
    usage = shutil.disk_usage(folder)
    if for_broker and usage.used / (usage.used + usage.free) > _MAX_DISK_USAGE:
        return (
            f"The disk of {folder} is more than {_MAX_DISK_USAGE:.0%} full, and a RocketMQ broker refuses messages then"
        )
    if usage.free < _MIN_FREE_MB << 20:
        return f"The disk of {folder} has less than {_MIN_FREE_MB} MiB left"
    return None
