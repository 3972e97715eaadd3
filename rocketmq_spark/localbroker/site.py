"""Where one cluster lives: its data folder, its ports, its children, and how a child is brought up.

Knows servers only as programs with ports; what they are to each other is the cluster's business. Starting is where
things go wrong for no fault of the user, so it is tried again when a port chosen at random was taken in the meantime,
and without the class-data archive when there was one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import loopback
from rocketmq_spark.localbroker.archive import Archive
from rocketmq_spark.localbroker.java import Java
from rocketmq_spark.localbroker.leftovers import Claim
from rocketmq_spark.localbroker.process import Program, Server, port_in_use, spawn

_TRIES = 4
_STOP_WITHIN_S = 20.0


class Site:
    """The children of one cluster by name, in the order of their first start."""

    def __init__(self, claim: Claim, java: Java, archives: Path, wished_ports: Mapping[str, int]) -> None:
        self.data = claim.data
        self.servers: dict[str, Server] = {}
        self._claim = claim
        self._java = java
        self._archives = archives
        self._by_jars: dict[tuple[Path, ...], Archive] = {}
        self._ports = loopback.PortBook(claim.data / "ports.json", wished_ports)

    def bring_up(
        self,
        name: str,
        around: tuple[int, ...],
        make: Callable[[int], Program],
        ready: Callable[[Server], bool],
        deadline: Deadline,
    ) -> Server:
        """Start the server that ``make`` describes for a port, and return when it is ready."""
        port = self._ports.assign(name, around)
        for left in reversed(range(_TRIES)):
            program = make(port)
            server = self.servers[name] = Server(program, self._java, self._archive(program.jars), self.data)
            try:
                self._start(server, ready, deadline)
                return server
            except LocalBrokerError as e:
                del self.servers[name]
                if not left or deadline.expired or not self._may_help(name, port, around, program, e):
                    raise
                port = self._ports.assign(name, around)
        raise AssertionError

    def _may_help(
        self, name: str, port: int, around: tuple[int, ...], program: Program, failure: LocalBrokerError
    ) -> bool:
        """Whether another try can end otherwise: on other ports, or without the archive if nothing else is to blame."""
        if not loopback.all_free(port, around):
            return self._ports.may_change(name)
        return failure.remark is not None and self._archive(program.jars).discard()

    def restart(self, server: Server, ready: Callable[[Server], bool], deadline: Deadline) -> None:
        """Start a server that has ended, on its old ports: clients know them."""
        self._start(server, ready, deadline)

    def _start(self, server: Server, ready: Callable[[Server], bool], deadline: Deadline) -> None:
        if not all(map(loopback.is_free, server.program.ports)):
            raise port_in_use(server.program)
        server.start()
        try:
            server.wait_until(lambda: ready(server), deadline)
        except BaseException:
            server.kill()
            raise

    def make_archives(self) -> None:
        """In the background, for the next starts."""
        for jars, archive in self._by_jars.items():
            homes = [s.program.home for s in self.servers.values() if s.program.jars == jars]
            archive.make_from(homes, spawn)

    def stop(self, servers: Iterable[Server], gently: bool) -> None:
        """All at once: gently they write down what they hold in memory, otherwise they are just killed."""
        servers, deadline = list(servers), Deadline.after(_STOP_WITHIN_S if gently else 0.0)
        try:
            for server in servers if gently else ():
                server.ask_to_stop()
            for server in servers if gently else ():
                server.wait_stopped(deadline)
        finally:  # an impatient user's second Ctrl-C too
            for server in servers:
                server.kill()

    def close(self, keep: bool) -> None:
        """End every child and give the folder back; a folder that is not kept needs no gentle end."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._claim.release, delete=not keep)
            for archive in self._by_jars.values():
                stack.callback(archive.stop)
            self.stop(self.servers.values(), gently=keep)

    def _archive(self, jars: tuple[Path, ...]) -> Archive:
        return self._by_jars.setdefault(jars, Archive(self._archives, self._java, jars))
