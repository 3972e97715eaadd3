"""The servers of one running cluster: the order in which they start, and how to detect that each server is up.

A broker that starts fast has a race condition (5.5.0). If the broker has not yet found that the name server can be reached, it
silently skips its registration, and registers ten seconds later. A change of ``brokerPermission`` makes a broker register at
once. So a broker that is up but not registered gets a request to set the permission that it already has.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.folders import replace_file
from rocketmq_spark.client.admin import BaseAdmin, put_topic_request
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import LocalBrokerError, RocketMQError
from rocketmq_spark.localbroker import processes, servers
from rocketmq_spark.localbroker.processes import Program, Server
from rocketmq_spark.localbroker.servers import PROXY, BrokerSpec
from rocketmq_spark.localbroker.workspace import Workspace
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.wire import bodies, rpc

_BOOT_LINE = "boot success"
_PERMISSION_SETTING = "brokerPermission"
_TRIGGER_INTERVAL_S = 0.1


class Registration:
    """The registrations of this cluster's brokers at its running name servers."""

    def __init__(self, name_servers: Sequence[Server]) -> None:
        self.admin = BaseAdmin(";".join(server.address for server in name_servers))
        # One client for each name server, because a client of several name servers uses the first server that answers.
        self._admin_by_server = [(server, BaseAdmin(server.address)) for server in name_servers]
        self._rpc_client = RpcClient(Pool(ConnectOptions()))
        self._last_trigger_s_by_broker: dict[str, float] = {}

    def shows(self, spec: BrokerSpec, server: Server) -> bool:
        """Whether every running name server shows this broker to clients."""
        running_admins = self._running_admins()
        return bool(running_admins) and all(_is_registered(admin, spec, server) for admin in running_admins)

    def hides(self, spec: BrokerSpec, server: Server) -> bool:
        """Whether no name server shows this broker."""
        return not any(_is_registered(admin, spec, server) for admin in self._running_admins())

    def _running_admins(self) -> list[BaseAdmin]:
        return [admin for server, admin in self._admin_by_server if server.pid is not None]

    def shows_or_triggers(self, spec: BrokerSpec, server: Server) -> bool:
        """Like ``shows``, for a starting broker. If the broker is up but no name server shows it, this method makes the broker
        register.
        """
        if self.shows(spec, server):
            return True
        now = time.monotonic()
        if (
            now - self._last_trigger_s_by_broker.get(spec.name, 0.0) > _TRIGGER_INTERVAL_S
            and _BOOT_LINE in server.output_since_start()
        ):
            self._last_trigger_s_by_broker[spec.name] = now
            self._trigger_registration(server)
        return False

    def copy_topic(self, topic: str, broker_name: str, slave: Server) -> None:
        """Make a slave serve a topic now. By itself, a slave copies its master's topics only once a minute."""
        config = self.admin.topic_config(topic, broker_name)
        self._rpc_client.request(slave.address, put_topic_request(topic, broker_name, config))

    def _trigger_registration(self, server: Server) -> None:
        conf_path = server.program.home / "broker.conf"
        text = conf_path.read_text(encoding="utf-8")
        unchanged_permission = {_PERMISSION_SETTING: bodies.read_config(text.encode()).get(_PERMISSION_SETTING, "6")}
        try:
            self._rpc_client.request(
                server.address, rpc.UPDATE_BROKER_CONFIG.request(bodies.write_config(unchanged_permission))
            )
        except RocketMQError:
            return
        finally:
            # The broker has written all its settings, about a thousand, into the file. Restore the short text, because users
            # read this file.
            replace_file(conf_path, text)

    def close(self) -> None:
        for admin in (self.admin, *(server_admin for _, server_admin in self._admin_by_server)):
            admin.close()
        self._rpc_client.pool.close()


def _is_registered(admin: BaseAdmin, spec: BrokerSpec, server: Server) -> bool:
    try:
        broker = admin.cluster().get(spec.broker_name)
    except RocketMQError:
        return False
    return broker is not None and broker.addresses.get(spec.broker_id) == server.address


@dataclasses.dataclass(frozen=True, slots=True)
class StartSettings:
    """The settings with which all servers of a cluster start: jars, and the configuration, heap and JVM flags of the brokers and
    the proxy.
    """

    broker_jars: tuple[Path, ...]
    name_server_jars: tuple[Path, ...]
    proxy_jars: tuple[Path, ...]
    proxy_conf: Mapping[str, object]
    broker_conf: Mapping[str, object]
    heap_mb: int
    jvm_flags: tuple[str, ...]

    @property
    def has_local_proxy(self) -> bool:
        """Whether a proxy runs in the process of the only broker."""
        return servers.proxy_mode(self.proxy_conf) == servers.LOCAL


class ClusterServers:
    """The servers of a workspace, by name. ``broker_specs`` are the brokers and slaves that belong to the cluster, running or
    not.
    """

    def __init__(
        self,
        workspace: Workspace,
        start_settings: StartSettings,
        name_server_names: Sequence[str],
        broker_specs: Sequence[BrokerSpec],
    ) -> None:
        self.workspace = workspace
        self.start_settings = start_settings
        self._name_server_names = name_server_names
        self._broker_specs = broker_specs
        self._registration: Registration | None = None

    @property
    def registration(self) -> Registration:
        if self._registration is None:
            raise LocalBrokerError("The name servers are not up yet", remedy="Wait for start() to return")
        return self._registration

    @property
    def name_server(self) -> str:
        return ";".join(self.server(name).address for name in self._name_server_names)

    def server(self, name: str) -> Server:
        servers_by_name = self.workspace.servers
        if name == PROXY and self.start_settings.has_local_proxy:
            name = self._broker_specs[0].name
        if name not in servers_by_name:
            raise LocalBrokerError(f"There is no {name!r} here", remedy=f"Known: {', '.join(sorted(servers_by_name))}")
        return servers_by_name[name]

    def bring_up_all(self, deadline: Deadline, with_proxy: bool) -> None:
        """Start name servers, masters, slaves and the proxy, in this order."""
        workspace = self.workspace
        name_servers = [
            workspace.bring_up(
                name,
                (0,),
                functools.partial(
                    servers.prepare_name_server, workspace.data, self.start_settings.name_server_jars, name
                ),
                self._readiness_check(None),
                deadline,
            )
            for name in self._name_server_names
        ]
        self._registration = Registration(name_servers)
        with ThreadPoolExecutor(len(self._broker_specs)) as pool:
            # The masters start first, because a slave that registers before its master finds the master only ten seconds later.
            for is_slave in (False, True):
                specs = [spec for spec in self._broker_specs if (spec.broker_id > 0) is is_slave]
                list(pool.map(lambda spec: self.bring_up(spec, deadline), specs))
        if with_proxy and not self.start_settings.has_local_proxy:
            workspace.bring_up(
                PROXY,
                processes.PROXY_PORT_DISTANCES,
                lambda port: self._with_flags(
                    servers.prepare_proxy(
                        workspace.data,
                        self.start_settings.proxy_jars,
                        port,
                        self.name_server,
                        self.start_settings.proxy_conf,
                    )
                ),
                self._readiness_check(None),
                deadline,
            )

    def bring_up(self, spec: BrokerSpec, deadline: Deadline, conf: Mapping[str, object] | None = None) -> None:
        """Start a broker or slave for the first time. Returns when the name servers show the broker."""
        settings = {**self.start_settings.broker_conf, **(conf or {})}

        def make_program(port: int) -> Program:
            program = servers.prepare_broker(
                self.workspace.data, self.start_settings.broker_jars, spec, port, self.name_server, settings
            )
            if self.start_settings.has_local_proxy:
                program = servers.with_local_proxy(
                    program, self.start_settings.proxy_jars, self.name_server, self.start_settings.proxy_conf
                )
            return self._with_flags(program)

        distances = (
            processes.LOCAL_PROXY_PORT_DISTANCES
            if self.start_settings.has_local_proxy
            else processes.BROKER_PORT_DISTANCES
        )
        self.workspace.bring_up(spec.name, distances, make_program, self._readiness_check(spec), deadline)

    def _with_flags(self, program: Program) -> Program:
        return dataclasses.replace(
            program, heap_mb=self.start_settings.heap_mb, flags=(*program.flags, *self.start_settings.jvm_flags)
        )

    def restart(self, name: str, conf: Mapping[str, object], deadline: Deadline) -> None:
        """Restart a server. A running server is killed first. ``conf`` changes settings of broker.conf, or a proxy's fields."""
        server = self.server(name)
        server.kill()
        if conf:
            servers.change_conf(server.program.home, servers.PROXY_CONF if name == PROXY else servers.BROKER_CONF, conf)
        spec = next((spec for spec in self._broker_specs if spec.name == server.program.name), None)
        if spec is not None and (name_server := self._running_name_server()):
            # Wait until the old registration is gone, because it would be mistaken for the new registration.
            name_server.wait_until(functools.partial(self.registration.hides, spec, server), deadline)
        self.workspace.restart(server, self._readiness_check(spec), deadline)
        if name in self._name_server_names:
            self._await_registrations(deadline)

    def close(self, keeps_data: bool) -> None:
        if self._registration is not None:
            self._registration.close()
        self.workspace.close(keeps_data)

    def _readiness_check(self, spec: BrokerSpec | None) -> Callable[[Server], bool]:
        """Return a function that says whether a server is up. A broker is up when it is registered, because a broker first opens
        its store and ports, and then registers.
        """
        if spec is None or self._running_name_server() is None:
            return lambda server: (
                "success" in server.output_since_start() and all(map(processes.is_listening, server.program.ports))
            )
        return functools.partial(self.registration.shows_or_triggers, spec)

    def _running_name_server(self) -> Server | None:
        return next((server for name in self._name_server_names if (server := self.server(name)).pid is not None), None)

    def _await_registrations(self, deadline: Deadline) -> None:
        """Wait until brokers have registered at a restarted name server. By itself, a broker may take ten seconds to register."""
        for spec in self._broker_specs:
            server = self.server(spec.name)
            if server.pid is not None:
                server.wait_until(functools.partial(self._readiness_check(spec), server), deadline)
