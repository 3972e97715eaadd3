"""Environment isolation: several environments share a topic, and each owns some of its queues.

Producers and consumers use the same rule, so that an environment reads the messages that it sends, and no others. There are three
layouts:

* a number alone: environment n owns the n-th queue of the sorted list;
* a number of a known count: environment n of c owns the queues whose id modulo c is n - 1, on every broker;
* names: each environment owns the queue ids that are listed for it, on every broker or broker by broker.

In the first layout, a queue's position in the list shifts when a broker joins or leaves. So a process that has once determined
the queues of its environment keeps these queues. The other layouts do not depend on positions. A wrong number is an
``OptionError`` that says what was expected, never an index error and never another environment's queue.
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
from rocketmq_spark.base.java import string_sort_key
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
    return string_sort_key(queue.topic), string_sort_key(queue.broker_name), queue.queue_id


def sorted_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Sort in the order of ``MessageQueue.compareTo``, which for names in ASCII is Python's order."""
    queues = list(queues)
    is_ascii = all(queue.topic.isascii() and queue.broker_name.isascii() for queue in queues)
    return sorted(queues, key=None if is_ascii else queue_order)


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment of a layout. ``Environment.of`` creates an environment, and checks the options ``environment`` and
    ``environments``.
    """

    name: str
    number: int = 0
    environment_count: int | None = None
    listed_queues: frozenset[tuple[str, int]] | None = None

    @classmethod
    def of(cls, environment: object, environments: object = None, source: str = "option 'environment'") -> Environment:
        """Parse the options ``environment`` and ``environments``, given as text or as Python values.

        Errors name ``source`` as the origin of ``environment``.
        """
        layout = _layout(environments)
        if isinstance(layout, Mapping):
            name = str(environment)
            if name not in layout:
                raise OptionError(f"{source} is {environment!r}; expected one of {', '.join(layout)}")
            return cls(name, listed_queues=layout[name])
        number = _number(environment)
        expected_range = f"from 1 to {layout}, the number of environments" if layout else "of at least 1"
        if number is None or number < 1 or (layout and number > layout):
            raise OptionError(f"{source} is {environment!r}; expected a whole number {expected_range}")
        return cls(str(number), number=number, environment_count=layout)

    def group(self, group: str) -> str:
        """The consumer group of this environment's members of ``group``.

        All members of a group share its retry topic and its dead letters, whatever queues they own. So each environment has a
        group of its own.
        """
        return f"{group}{_GROUP_INFIX}{self.name}"

    @property
    def is_by_position(self) -> bool:
        """Whether the environment is a number alone, so that its queues depend on their positions in the list."""
        return self.listed_queues is None and self.environment_count is None

    def owned(
        self,
        queues: Iterable[MessageQueue],
        previous_queues: Collection[MessageQueue] = (),
        possibly_empty_topics: Container[str] = (),
    ) -> list[MessageQueue]:
        """Return the environment's queues of each topic in ``queues``, sorted. Raises ``OptionError`` for a topic in which the
        environment has no queues. All queues of retry and dead-letter topics are returned, because the group of such a topic
        belongs to one environment.

        ``previous_queues`` are the queues that the environment had before. If the environment is chosen by position, it keeps
        these queues even if the route has changed, because while a broker is away, other environments' queues may have the
        positions of this environment's queues. Topics in ``possibly_empty_topics`` may currently have no queues of the
        environment.
        """
        topics_before = {queue.topic for queue in previous_queues} if self.is_by_position else set()
        queues_owned: list[MessageQueue] = []
        for topic, queue_group in groupby(sorted(queues, key=queue_order), key=lambda q: q.topic):
            topic_queues = list(queue_group)
            if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                queues_owned += topic_queues
                continue
            own_queues = (
                [q for q in topic_queues if q in previous_queues]
                if topic in topics_before
                else self._queues_of_topic(topic_queues)
            )
            if not own_queues and topic not in topics_before and topic not in possibly_empty_topics:
                raise OptionError(self._no_queues_problem(topic, topic_queues))
            queues_owned += own_queues
        return queues_owned

    def writable_queues(
        self, readable_queues: Iterable[MessageQueue], writable_queues: Iterable[MessageQueue]
    ) -> list[MessageQueue]:
        """Return the environment's queues that accept messages now.

        Positions are counted in the list of all readable queues, because readers count in the same list. So a broker without a
        master, which is missing from ``writable_queues``, does not shift the environment onto queues of another environment.
        Raises an error if no queue of the environment is writable: ``BrokerNotFound`` if a broker of the environment is away,
        because this broker may return, otherwise ``OptionError``.
        """
        writable_set, readable_set = set(writable_queues), set(readable_queues)
        try:
            own_queues = self.owned(readable_set)
        except OptionError as e:
            if unavailable_brokers := self._named_brokers - {queue.broker_name for queue in readable_set}:
                raise _unavailable_error(e.message, unavailable_brokers) from e
            raise
        if not own_queues:
            queues_text = ", ".join(map(str, sorted(writable_set, key=queue_order)))
            raise OptionError(
                f"environment {self.name!r} owns none of {queues_text or 'no queues'}: no environment would read them"
            )
        own_writable_queues = [queue for queue in own_queues if queue in writable_set]
        for topic in sorted({queue.topic for queue in own_queues} - {queue.topic for queue in own_writable_queues}):
            unwritable_queues = [queue for queue in own_queues if queue.topic == topic]
            text = f"environment {self.name!r} owns {', '.join(map(str, unwritable_queues))}, none of which takes messages now"
            unavailable_brokers = {queue.broker_name for queue in unwritable_queues} - {
                queue.broker_name for queue in writable_set
            }
            raise _unavailable_error(text, unavailable_brokers) if unavailable_brokers else OptionError(text)
        return own_writable_queues

    @property
    def _named_brokers(self) -> set[str]:
        return {broker for broker, _ in self.listed_queues or ()} - {ANY_BROKER}

    def _queues_of_topic(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        if self.listed_queues is not None:
            return [
                q for q in queues
                if (q.broker_name, q.queue_id) in self.listed_queues or (ANY_BROKER, q.queue_id) in self.listed_queues
            ]  # fmt: skip
        if self.environment_count:
            return [q for q in queues if q.queue_id % self.environment_count == self.number - 1]
        return list(queues[self.number - 1 : self.number])

    def _no_queues_problem(self, topic: str, queues: Sequence[MessageQueue]) -> str:
        if self.listed_queues is not None:
            queues_text = ", ".join(f"{broker or '*'}:{i}" for broker, i in sorted(self.listed_queues))
            return (
                f"option 'environments' gives {self.name!r} the queues {queues_text}; topic {topic!r} has none of them"
            )
        if self.environment_count:
            return (
                f"option 'environments' is {self.environment_count}; expected at most {1 + max(q.queue_id for q in queues)}, the "
                f"queues of a broker for topic {topic!r}, or every environment's queues listed as JSON"
            )
        return (
            f"option 'environment' is {self.number}; expected a whole number from 1 to {len(queues)}, "
            f"the number of queues of topic {topic!r}"
        )


def environment_of_group(group: str) -> str | None:
    """Return the environment in the name of a group; None if the name has no environment."""
    _, infix, name = group.rpartition(_GROUP_INFIX)
    return name if infix else None


def owners(queues: Iterable[MessageQueue], environments: object = None) -> dict[MessageQueue, str]:
    """Return the name of the environment that owns each queue of a topic. Queues that no environment owns are left out."""
    queue_list, layout = sorted(queues, key=queue_order), _layout(environments)
    names = layout if isinstance(layout, Mapping) else map(str, range(1, (layout or len(queue_list)) + 1))
    return {queue: name for name in names for queue in Environment.of(name, environments)._queues_of_topic(queue_list)}


class EnvironmentQueues:
    """Selects the queues of topics that belong to an environment; without an environment, all queues.

    If the environment is chosen by position, it keeps the queues that it once had.
    """

    def __init__(self, environment: Environment | None) -> None:
        self._environment = environment
        self._previous_queues: frozenset[MessageQueue] = frozenset()
        self._topics_without_queues: set[str] = set()

    def __call__(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        """Return the environment's queues among ``queues``, which are of one topic. Raises ``OptionError`` if no queue is the
        environment's.
        """
        if self._environment is None or not queues:
            return queues
        owned_queues = self._environment.owned(queues, self._previous_queues)
        self._previous_queues |= frozenset(owned_queues)
        topic = queues[0].topic
        if not owned_queues and topic not in self._topics_without_queues:
            logger.warning(
                "environment %s, a number alone, had %s. Topic %s lacks its queues of the environment now, and is not read until "
                "they are back. If the topic was created again, or has fewer queues now, start again, better with option "
                "'environments'",
                self._environment.name, ", ".join(str(q) for q in sorted(self._previous_queues) if q.topic == topic), topic,
            )  # fmt: skip
        (self._topics_without_queues.discard if owned_queues else self._topics_without_queues.add)(topic)
        return owned_queues


def _unavailable_error(problem: str, brokers: Iterable[str]) -> BrokerNotFound:
    return BrokerNotFound(
        f"{problem}; {', '.join(sorted(brokers))} cannot accept messages now",
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


def is_by_position(options: EnvironmentOptions) -> bool:
    """Whether these options name an environment by a number alone, whose queues depend on the position in the list."""
    return options.environment is not None and options.environments is None and options.environment_mode == "queues"


def position_problem(options: EnvironmentOptions, why: str) -> str:
    """Return the sentence that rejects an environment that is a number alone, because the program cannot remember the queues of
    the environment. ``why`` is a clause that says why it cannot.
    """
    sample = json.dumps({options.environment: {"broker-a": [0]}})
    return (
        f"{options.environment_source} is {options.environment!r} without option 'environments', so it counts the queues that a "
        f"topic has at the moment, and {why}: while a broker is away, that number would select another environment's queue. "
        f"Set option 'environments' to the number of environments, or to their queues, such as {sample}"
    )


def environment_of(options: EnvironmentOptions) -> Environment | None:
    """Return the environment whose queues are used with these options. Returns None if the options name no environment. Also
    returns None with ``environmentMode=suffix``, because an environment with a suffix uses all queues of its topics.
    """
    if suffix_of(options):
        return None
    if options.environment is None:
        if options.environments is not None:
            raise OptionError("option 'environments' needs option 'environment', the environment to use")
        return None
    environment = Environment.of(options.environment, options.environments, options.environment_source)
    if environment.is_by_position:
        _warn_of_position(environment.name)
    return environment


def check_environment_set(options: EnvironmentOptions, option: str) -> None:
    """Raises ``OptionError`` if the value ``environment`` is not allowed for option ``option``."""
    if options.environment is None:
        raise OptionError(
            f"option {option!r} is 'environment', which needs option 'environment': the environment to use"
        )
    if options.environment_mode == "suffix":
        raise OptionError(
            f"option {option!r} is 'environment', which chooses among queues; with 'environmentMode' suffix each environment "
            "has topics of its own: omit it"
        )


def suffix_of(options: EnvironmentOptions) -> str:
    """The suffix of topics and groups in the environment of these options, without the ``_``; empty if there is none."""
    if options.environment_mode != "suffix":
        return ""
    if options.environment is None:
        raise OptionError("option 'environmentMode' is 'suffix', which needs option 'environment': the name")
    if options.environments is not None:
        raise OptionError(
            "option 'environments' divides the queues of a topic among environments; with 'environmentMode' suffix each "
            "environment has topics of its own: omit 'environments'"
        )
    # If a suffix contained '_', 'orders' of 'eu_dev' and 'orders_eu' of 'dev' would be the same topic.
    if not re.fullmatch("[a-zA-Z0-9-]+", options.environment):
        raise OptionError(
            f"{options.environment_source} is {options.environment!r}; expected only letters, digits and '-': names of "
            "topics end with the environment, after a '_'",
            remedy="If the environment's topics exist already, use their full names, without option 'environment'",
        )
    return options.environment


def scope_of(options: Options) -> Scope:
    """The mapping of names to the wire. Topics outside the namespace, or outside the environment's suffix, are not visible."""
    return Scope(options.namespace or "", suffix_of(options))


@functools.cache
def _warn_of_position(name: str) -> None:
    logger.warning(
        "option 'environment' is %s without option 'environments': it is a position in the list of queues that a topic has when "
        "the program starts. If a broker is away at the start, another environment's queue may have this position. Set option "
        "'environments' to the number of environments",
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
    layout = {str(name): frozenset(_brokers_and_ids(queues, environments)) for name, queues in value.items()}
    if not layout or not all(layout.values()):
        raise _layout_error(environments)
    _check_disjoint(layout)
    return layout


def _brokers_and_ids(queues: Any, layout: object) -> Iterable[tuple[str, int]]:
    ids_by_broker = queues if isinstance(queues, Mapping) else {ANY_BROKER: queues}
    for broker, ids in ids_by_broker.items():
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise _layout_error(layout)
        for queue_id in ids:
            if not isinstance(queue_id, int) or isinstance(queue_id, bool) or queue_id < 0:
                raise _layout_error(layout)
            yield str(broker), queue_id


def _check_disjoint(layout: Mapping[str, frozenset[tuple[str, int]]]) -> None:
    owners_by_id: dict[int, list[tuple[str, str]]] = {}
    for name, pairs in layout.items():
        for broker, queue_id in pairs:
            for other_name, other_broker in owners_by_id.setdefault(queue_id, []):
                if other_name != name and (broker == other_broker or ANY_BROKER in (broker, other_broker)):
                    raise OptionError(
                        f"option 'environments' gives queue {broker or other_broker or '*'}:{queue_id} to "
                        f"{other_name!r} and {name!r}; expected each queue to belong to one environment"
                    )
            owners_by_id[queue_id].append((name, broker))


def _layout_error(layout: object, why: str = "") -> OptionError:
    return OptionError(f"option 'environments' is {layout!r}; expected {_LAYOUT_FORMS}{why}")
