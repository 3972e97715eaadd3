"""Environment isolation: several environments share a topic, and each owns some of its queues.

One rule serves both directions, so that what an environment sends it also reads, and nothing else. Three layouts:

* a number alone: environment n owns the n-th queue of the sorted list;
* a number of a known count: environment n of c owns the queues whose id modulo c is n - 1, on every broker;
* names: each owns the queue ids listed for it, on every broker or broker by broker.

The first depends on the position in the list, which shifts when a broker joins or leaves; so a process keeps the queues that
it had by position. The other layouts do not need this. A wrong number is an ``OptionError`` that says what was expected, never
an index error and never another environment's queue.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from rocketmq_spark.base.codes import DLQ_PREFIX, RETRY_PREFIX
from rocketmq_spark.base.java import string_order
from rocketmq_spark.errors import BrokerNotFound, OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import json_document, whole_number
from rocketmq_spark.wire.names import Scope

_LAYOUT_FORMS = 'a count, or JSON such as {"dev1": [0, 1], "dev2": {"broker-a": [2]}}'
ANY_BROKER = ""
_GROUP_INFIX = "_env_"


logger = logging.getLogger(__name__)


def queue_order(queue: MessageQueue) -> tuple[bytes, bytes, int]:
    """The order of ``MessageQueue.compareTo``."""
    return string_order(queue.topic), string_order(queue.broker_name), queue.queue_id


def sorted_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Sort in the order of ``MessageQueue.compareTo``, which for names in ASCII is Python's order."""
    queues = list(queues)
    plain = all(queue.topic.isascii() and queue.broker_name.isascii() for queue in queues)
    return sorted(queues, key=None if plain else queue_order)


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment of a layout. Create it with ``of``, which checks both options."""

    name: str
    number: int = 0
    count: int | None = None
    listed: frozenset[tuple[str, int]] | None = None

    @classmethod
    def of(cls, environment: object, environments: object = None, source: str = "option 'environment'") -> Environment:
        """Parse the options ``environment`` and ``environments``, given as text or as Python values.

        ``source`` is the origin of ``environment``, for errors.
        """
        layout = _layout(environments)
        if isinstance(layout, Mapping):
            name = str(environment)
            if name not in layout:
                raise OptionError(f"{source} is {environment!r}; expected one of {', '.join(layout)}")
            return cls(name, listed=layout[name])
        number = _number(environment)
        top = f"from 1 to {layout}, the number of environments" if layout else "of at least 1"
        if number is None or number < 1 or (layout and number > layout):
            raise OptionError(f"{source} is {environment!r}; expected a whole number {top}")
        return cls(str(number), number=number, count=layout)

    def group(self, group: str) -> str:
        """The consumer group of this environment's members of ``group``.

        Each environment has its own group, and so its own retry topic and dead letters: all members of a group share these,
        whatever queues they own.
        """
        return f"{group}{_GROUP_INFIX}{self.name}"

    @property
    def by_position(self) -> bool:
        """Whether the queues depend on the position in the list: a number alone."""
        return self.listed is None and self.count is None

    def owned(
        self,
        queues: Iterable[MessageQueue],
        previous: Collection[MessageQueue] = (),
        may_be_empty: Container[str] = (),
    ) -> list[MessageQueue]:
        """The environment's queues of each topic in ``queues``, sorted; an error for a topic without any. Retry and dead-letter
        topics are returned whole, because their group belongs to one environment.

        ``previous`` are the queues that it had before. By position it keeps them even if the route has changed, because other
        queues take the positions of a broker that is away. Topics in ``may_be_empty`` may currently have none.
        """
        before = {queue.topic for queue in previous} if self.by_position else set()
        queues_owned: list[MessageQueue] = []
        for topic, group in groupby(sorted(queues, key=queue_order), key=lambda q: q.topic):
            of_topic = list(group)
            if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                queues_owned += of_topic
                continue
            mine = [q for q in of_topic if q in previous] if topic in before else self._queues_of_topic(of_topic)
            if not mine and topic not in before and topic not in may_be_empty:
                raise OptionError(self._no_queues_problem(topic, of_topic))
            queues_owned += mine
        return queues_owned

    def writable_queues(self, readable: Iterable[MessageQueue], writable: Iterable[MessageQueue]) -> list[MessageQueue]:
        """The environment's queues that accept messages now.

        Positions are counted among all readable queues, as readers do. So a broker without a master, which is missing from
        ``writable_queues``, does not shift the environment onto queues of another. If no queue is writable, this raises
        ``BrokerNotFound`` if a broker of the environment is away, which may return, else ``OptionError``.
        """
        open_now, readable_queues = set(writable), set(readable)
        try:
            own_queues = self.owned(readable_queues)
        except OptionError as e:
            if unavailable := self._named_brokers - {queue.broker_name for queue in readable_queues}:
                raise _unavailable_error(e.message, unavailable) from e
            raise
        if not own_queues:
            closed = ", ".join(map(str, sorted(open_now, key=queue_order)))
            raise OptionError(
                f"environment {self.name!r} owns none of {closed or 'no queues'}: no environment would read them"
            )
        writable_queues = [queue for queue in own_queues if queue in open_now]
        for topic in sorted({queue.topic for queue in own_queues} - {queue.topic for queue in writable_queues}):
            closed_here = [queue for queue in own_queues if queue.topic == topic]
            text = (
                f"environment {self.name!r} owns {', '.join(map(str, closed_here))}, none of which takes messages now"
            )
            unavailable = {queue.broker_name for queue in closed_here} - {queue.broker_name for queue in open_now}
            raise _unavailable_error(text, unavailable) if unavailable else OptionError(text)
        return writable_queues

    @property
    def _named_brokers(self) -> set[str]:
        return {broker for broker, _ in self.listed or ()} - {ANY_BROKER}

    def _queues_of_topic(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        if self.listed is not None:
            return [
                q for q in queues
                if (q.broker_name, q.queue_id) in self.listed or (ANY_BROKER, q.queue_id) in self.listed
            ]  # fmt: skip
        if self.count:
            return [q for q in queues if q.queue_id % self.count == self.number - 1]
        return list(queues[self.number - 1 : self.number])

    def _no_queues_problem(self, topic: str, queues: Sequence[MessageQueue]) -> str:
        if self.listed is not None:
            listed = ", ".join(f"{broker or '*'}:{i}" for broker, i in sorted(self.listed))
            return f"option 'environments' gives {self.name!r} the queues {listed}; topic {topic!r} has none of them"
        if self.count:
            return (
                f"option 'environments' is {self.count}; expected at most {1 + max(q.queue_id for q in queues)}, the "
                f"queues of a broker for topic {topic!r}, or every environment's queues listed as JSON"
            )
        return (
            f"option 'environment' is {self.number}; expected a whole number from 1 to {len(queues)}, "
            f"the number of queues of topic {topic!r}"
        )


def environment_of_group(group: str) -> str | None:
    """The environment in the name of a group; None if it has none."""
    _, found, name = group.rpartition(_GROUP_INFIX)
    return name if found else None


def owners(queues: Iterable[MessageQueue], environments: object = None) -> dict[MessageQueue, str]:
    """The environment's name by queue of a topic. Queues of no environment are missing."""
    ordered, layout = sorted(queues, key=queue_order), _layout(environments)
    names = layout if isinstance(layout, Mapping) else map(str, range(1, (layout or len(ordered)) + 1))
    return {queue: name for name in names for queue in Environment.of(name, environments)._queues_of_topic(ordered)}


class EnvironmentQueues:
    """Selects the queues of topics that belong to an environment; without an environment, all queues.

    By position, queues that belonged to the environment once stay.
    """

    def __init__(self, environment: Environment | None) -> None:
        self._environment = environment
        self._previous: frozenset[MessageQueue] = frozenset()
        self._missing: set[str] = set()

    def __call__(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        """The environment's queues among ``queues``, all of one topic. Raises ``OptionError`` if there are none."""
        if self._environment is None or not queues:
            return queues
        owned = self._environment.owned(queues, self._previous)
        self._previous |= frozenset(owned)
        topic = queues[0].topic
        if not owned and topic not in self._missing:
            logger.warning(
                "environment %s had %s by its number alone, which topic %s does not have now: nothing of it is read until that "
                "is back. If the topic was made again, or has fewer queues, start anew, better with option 'environments'",
                self._environment.name, ", ".join(str(q) for q in sorted(self._previous) if q.topic == topic), topic,
            )  # fmt: skip
        (self._missing.discard if owned else self._missing.add)(topic)
        return owned


def _unavailable_error(what: str, brokers: Iterable[str]) -> BrokerNotFound:
    return BrokerNotFound(
        f"{what}; {', '.join(sorted(brokers))} cannot accept messages now",
        remedy="Start the broker, or correct options 'environment' and 'environments'",
    )


class EnvironmentOptions(Protocol):
    """The options about environments."""

    @property
    def environment(self) -> str | None: ...
    @property
    def environment_mode(self) -> str: ...
    @property
    def environments(self) -> str | None: ...
    @property
    def environment_source(self) -> str: ...


def is_by_position(choice: EnvironmentOptions) -> bool:
    """Whether these options name an environment by a number alone, whose queues depend on the position in the list."""
    return choice.environment is not None and choice.environments is None and choice.environment_mode == "queues"


def position_problem(choice: EnvironmentOptions, why: str) -> str:
    """The problem of a number alone if no state can keep its positions; ``why`` is the reason."""
    sample = json.dumps({choice.environment: {"broker-a": [0]}})
    return (
        f"{choice.environment_source} is {choice.environment!r} without option 'environments', so it counts the queues that a "
        f"topic has at the moment, and {why}: while a broker is away, that number would select another environment's queue. "
        f"Set option 'environments' to the number of environments, or to their queues, such as {sample}"
    )


def environment_of(choice: EnvironmentOptions) -> Environment | None:
    """The environment of these options whose queues are used; None without one, and for ``environmentMode=suffix``, where an
    environment uses all queues of its own topics."""
    if suffix_of(choice):
        return None
    if choice.environment is None:
        if choice.environments is not None:
            raise OptionError("option 'environments' needs option 'environment', the one to use")
        return None
    mine = Environment.of(choice.environment, choice.environments, choice.environment_source)
    if mine.by_position:
        _warn_of_position(mine.name)
    return mine


def check_environment_set(choice: EnvironmentOptions, option: str) -> None:
    """Raises ``OptionError`` if ``option`` may not be ``environment``."""
    if choice.environment is None:
        raise OptionError(
            f"option {option!r} is 'environment', which needs option 'environment': the environment to use"
        )
    if choice.environment_mode == "suffix":
        raise OptionError(
            f"option {option!r} is 'environment', which chooses among queues; with 'environmentMode' suffix each environment "
            "has topics of its own: omit it"
        )


def suffix_of(choice: EnvironmentOptions) -> str:
    """The suffix of topics and groups in the environment of these options, without the ``_``; empty if there is none."""
    if choice.environment_mode != "suffix":
        return ""
    if choice.environment is None:
        raise OptionError("option 'environmentMode' is 'suffix', which needs option 'environment': the name")
    if choice.environments is not None:
        raise OptionError(
            "option 'environments' shares out the queues of a topic; with 'environmentMode' suffix each environment has "
            "topics of its own: omit it"
        )
    # If a suffix contained '_', 'orders' of 'eu_dev' and 'orders_eu' of 'dev' would be the same topic.
    if not re.fullmatch("[a-zA-Z0-9-]+", choice.environment):
        raise OptionError(
            f"{choice.environment_source} is {choice.environment!r}; expected letters, digits and '-', for names of topics end "
            "with it, and no '_', for that divides both",
            remedy="Topics that exist with such an environment are read and written by their whole names, without option "
            "'environment'",
        )
    return choice.environment


def scope_of(options: Options) -> Scope:
    """The mapping of names to the wire. Topics outside the namespace, or outside the environment's suffix, are not visible."""
    return Scope(options.namespace or "", suffix_of(options))


@functools.cache
def _warn_of_position(name: str) -> None:
    logger.warning(
        "option 'environment' is %s without option 'environments': it counts the queues that a topic has when this starts. "
        "While a broker is away that may be a queue of another environment; say how many there are with 'environments'",
        name,
    )


def layout_text(environments: str) -> str:
    """The option ``environments`` in canonical form."""
    try:
        return json.dumps(json.loads(environments), sort_keys=True)
    except ValueError:
        return environments


def _number(value: object) -> int | None:
    if isinstance(value, str):
        return whole_number(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _layout(environments: object) -> int | dict[str, frozenset[tuple[str, int]]] | None:
    """A count, or each environment's (broker, queue id) pairs; no pair may belong to two environments."""
    value = environments
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        try:
            value = json_document(value)
        except ValueError as e:
            raise _layout_error(environments, f" ({e})") from None
    if value is None:
        return None
    if not isinstance(value, Mapping):
        count = _number(value)
        if count is None or count < 1:
            raise _layout_error(environments)
        return count
    layout = {str(name): frozenset(_pairs(owns, environments)) for name, owns in value.items()}
    if not layout or not all(layout.values()):
        raise _layout_error(environments)
    _check_disjoint(layout)
    return layout


def _pairs(owns: Any, layout: object) -> Iterable[tuple[str, int]]:
    by_broker = owns if isinstance(owns, Mapping) else {ANY_BROKER: owns}
    for broker, ids in by_broker.items():
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise _layout_error(layout)
        for queue_id in ids:
            if not isinstance(queue_id, int) or isinstance(queue_id, bool) or queue_id < 0:
                raise _layout_error(layout)
            yield str(broker), queue_id


def _check_disjoint(layout: Mapping[str, frozenset[tuple[str, int]]]) -> None:
    owner: dict[int, list[tuple[str, str]]] = {}
    for name, pairs in layout.items():
        for broker, queue_id in pairs:
            for other, other_broker in owner.setdefault(queue_id, []):
                if other != name and (broker == other_broker or ANY_BROKER in (broker, other_broker)):
                    raise OptionError(
                        f"option 'environments' gives queue {broker or other_broker or '*'}:{queue_id} to "
                        f"{other!r} and {name!r}; expected each queue to belong to one environment"
                    )
            owner[queue_id].append((name, broker))


def _layout_error(layout: object, why: str = "") -> OptionError:
    return OptionError(f"option 'environments' is {layout!r}; expected {_LAYOUT_FORMS}{why}")
