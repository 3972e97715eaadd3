"""Models of stateful code, which hypothesis runs, and whose tests fail where next to nothing was done.

Of several rules hypothesis leaves some out in each example, and seldom gives the others what they could work on: of 320 loops
over what was polled 7 got a message, and in most runs of a spool's store nothing followed in a lane. So there is one rule here,
which draws among all steps of a machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

F = TypeVar("F", bound=Callable[..., None])


def step(**given: st.SearchStrategy[Any]) -> Callable[[F], F]:
    """Makes a method a step of a ``SteppingMachine``, with arguments that are drawn."""

    def mark(method: F) -> F:
        method.given = given  # type: ignore[attr-defined]
        return method

    return mark


class SteppingMachine(RuleBasedStateMachine):
    """``did`` is how often what matters was done, in all examples of a test."""

    did: ClassVar[Counter[str]] = Counter()

    @rule(data=st.data())
    def any_step(self, data: st.DataObject) -> None:
        methods = [name for name, value in vars(type(self)).items() if hasattr(value, "given")]
        method = getattr(self, data.draw(st.sampled_from(methods)))
        method(**{name: data.draw(strategy) for name, strategy in method.given.items()})


def model_test(machine: type[SteppingMachine], how: settings, **least: int) -> Any:
    """The test of a machine, which must have done each of these at least so often."""

    class Test(machine.TestCase):  # type: ignore[name-defined,misc]
        settings = how

        def runTest(self) -> None:
            machine.did = Counter()
            super().runTest()
            assert {name: machine.did[name] for name in least if machine.did[name] < least[name]} == {}, "too little"

        runTest.is_hypothesis_test = True  # type: ignore[attr-defined]

    Test.__name__ = Test.__qualname__ = machine.__name__
    return Test
