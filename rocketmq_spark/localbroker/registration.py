"""Whether brokers are registered at the name servers, and how to make them.

A broker that boots fast loses a race with itself (5.5.0): it registers before its own scan has found the name server
reachable, skips that without a word, and tries again ten seconds later. A change of ``brokerPermission`` makes it
register at once, so a broker that is up but not shown is sent the permission that it has already.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rocketmq_spark.client.admin import Admin, put_topic
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker.process import Server
from rocketmq_spark.localbroker.servers import BrokerSpec
from rocketmq_spark.remoting.pool import Dialling, Pool
from rocketmq_spark.wire import bodies, rpc

_BOOTED = "boot success"
_NUDGE_EVERY_S = 0.1


class Registration:
    """What the name servers that run know of our brokers."""

    def __init__(self, name_servers: Sequence[Server], conf: Mapping[str, object]) -> None:
        self.admin = Admin(";".join(server.address for server in name_servers))
        # Each is asked alone: with several in a list, a client asks the first that answers.
        self._views = [(server, Admin(server.address)) for server in name_servers]
        self._calls = Calls(Pool(Dialling()))
        self._permission = {"brokerPermission": str(conf.get("brokerPermission", 6))}
        self._nudged: dict[str, float] = {}

    def shows(self, spec: BrokerSpec, server: Server) -> bool:
        """Whether clients are led to this broker, whichever name server they ask."""
        running = self._running()
        return bool(running) and all(_shown(view, spec, server) for view in running)

    def hides(self, spec: BrokerSpec, server: Server) -> bool:
        """Whether no client is led to this broker."""
        return not any(_shown(view, spec, server) for view in self._running())

    def _running(self) -> list[Admin]:
        return [view for server, view in self._views if server.pid is not None]

    def shows_or_nudges(self, spec: BrokerSpec, server: Server) -> bool:
        """The same for a broker that starts; if not, and it is up, it is made to register."""
        if self.shows(spec, server):
            return True
        now = time.monotonic()
        if now - self._nudged.get(spec.name, 0.0) > _NUDGE_EVERY_S and _BOOTED in server.printed():
            self._nudged[spec.name] = now
            self._nudge(server)
        return False

    def copy_topic(self, topic: str, broker_name: str, slave: Server) -> None:
        """Make a slave serve a topic now: by itself it asks its master once a minute."""
        known = self.admin.topic_config(topic, broker_name)
        self._calls.ask(slave.address, put_topic(topic, broker_name, known))

    def _nudge(self, server: Server) -> None:
        conf = server.program.home / "broker.conf"
        text = conf.read_text(encoding="utf-8")
        try:
            self._calls.ask(server.address, rpc.UPDATE_BROKER_CONFIG.request(bodies.write_config(self._permission)))
        except RocketMQError:
            return
        finally:
            # The broker has written all its thousand settings into the file; ours is the one people should find.
            conf.write_text(text, encoding="utf-8")

    def close(self) -> None:
        for admin in (self.admin, *(view for _, view in self._views)):
            admin.close()
        self._calls.pool.close()


def _shown(view: Admin, spec: BrokerSpec, server: Server) -> bool:
    try:
        group = view.cluster().get(spec.broker_name)
    except RocketMQError:
        return False
    return group is not None and group.addresses.get(spec.broker_id) == server.address
