"""The values that expressions of a Python program may have, as far as the program's text shows them. Pure; nothing is run.

The order of statements is not considered: a name has the values of all its assignments, a parameter those of all calls.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# A value that the program's text does not show; in a text, its place.
UNKNOWN = "\0"
# Limits, beyond which a value is UNKNOWN: values of an expression; steps to compute it; steps for all expressions of a program.
_MOST_VALUES, _MOST_STEPS, _MOST_STEPS_OF_ALL = 32, 5_000, 300_000
# Characters of a computed text; items of a computed list; values in computed JSON. Each step of a program may double them.
_LONGEST_TEXT, _LONGEST_LIST, _MOST_IN_JSON = 100_000, 1_000, 10_000
_MOST_CHARACTERS_OF_ALL = 20_000_000  # in the texts of all expressions of a program; beyond it, a value is UNKNOWN


class DictItem(NamedTuple):
    """An item of a dictionary."""

    name: str
    value: ast.expr
    line: int


class ListValue(NamedTuple):
    """A list, tuple or set."""

    nodes: tuple[ast.expr, ...]


class DictValue(NamedTuple):
    """A dictionary. ``is_open``: it may have items whose names the program does not show."""

    items: tuple[DictItem, ...]
    is_open: bool = False


Value = str | bytes | int | float | complex | None | ListValue | DictValue
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class UnpackedItem(NamedTuple):
    """An item of a value that is unpacked, or over which a loop iterates; ``position`` None is any."""

    of: ast.expr | UnpackedItem
    position: int | None


class Parameter(NamedTuple):
    function: Function
    position: int | None
    name: str
    default: ast.expr | None


# What a name is bound to; None is a value that the program does not show, such as an import.
Binding = ast.expr | UnpackedItem | Parameter | Function | ast.ClassDef | None


@dataclass(eq=False)
class NameScope:
    """A module, a function or a class, with its bindings, and with what is added to and removed from its dictionaries."""

    parent: NameScope | None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    additions: dict[str, list[ast.expr]] = field(default_factory=dict)
    removals: dict[str, list[ast.expr]] = field(default_factory=dict)
    module_names: set[str] = field(default_factory=set)  # declared ``global``

    def owner(self, name: str) -> NameScope | None:
        """The scope whose ``name`` an expression in this scope means; None for a builtin."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


class PythonProgram:
    """The bindings of a program, or of the cells of a notebook, which share one module."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.module = NameScope(None)
        self._scopes: dict[ast.AST, NameScope] = {}
        self._attributes: dict[str, list[Binding]] = {}  # by name: what an attribute of any object is set to
        self._methods: dict[str, list[Function]] = {}  # by name, of all classes
        self._returns: dict[ast.AST, list[ast.expr]] = {}  # by function
        self._calls: dict[ast.AST, list[ast.Call]] = {}  # by function
        self._named_calls: list[ast.Call] = []  # all calls, to be resolved when all functions are bound
        self._memo: dict[ast.AST, tuple[tuple[Value, ...], frozenset[ast.Constant]]] = {}
        self._active: set[object] = set()  # being computed; to meet one again is a cycle
        self._visited: set[ast.Constant] = set()  # constants that the current expression uses
        self._cut = False  # whether a cycle or a limit made a value incomplete, which is then not kept in the memo
        self._steps = self._steps_of_all = 0
        self._plain_left = 0  # how much the current JSON may still have
        self._characters = 0  # in all texts so far
        for tree in trees:
            self._bind(tree, self.module, None)
        for call in self._named_calls:
            for function in (*self.functions(call.func), *self._constructors(call.func)):
                self._calls.setdefault(function, []).append(call)

    # Bindings

    def _bind(self, node: ast.AST, scope: NameScope, function: Function | None) -> None:
        self._scopes[node] = scope
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                if not isinstance(node, ast.Lambda):
                    self._bind_name(scope, node.name, node)
                    if scope.is_class:
                        self._methods.setdefault(node.name, []).append(node)
                    for part in (*node.decorator_list, *([node.returns] if node.returns else ())):
                        self._bind(part, scope, function)
                inner = NameScope(scope)
                self._parameters(node, inner, scope)
                if isinstance(node, ast.Lambda):
                    self._returns[node] = [node.body]
                    self._bind(node.body, inner, node)
                else:
                    for statement in node.body:
                        self._bind(statement, inner, node)
                return
            case ast.ClassDef():
                self._bind_name(scope, node.name, node)
                inner = NameScope(scope, is_class=True)
                for child in ast.iter_child_nodes(node):
                    self._bind(child, inner if isinstance(child, ast.stmt) else scope, function)
                for name, bindings in inner.bindings.items():
                    self._attributes.setdefault(name, []).extend(bindings)
                return
            case ast.Return(value=ast.expr() as value) if function is not None:
                self._returns.setdefault(function, []).append(value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._target(target, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._target(target, value, scope)
            case ast.AugAssign(target=ast.Name() as target, op=op, value=value):
                self._target(target, self._synthetic(ast.BinOp(target, op, value), node, scope), scope)
            case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
                self._target(target, UnpackedItem(iterable, None), scope)
            case ast.comprehension(target=target, iter=iterable):
                self._target(target, UnpackedItem(iterable, None), scope)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                self._target(target, value, scope)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    self._bind_name(scope, (alias.asname or alias.name).partition(".")[0], None)
            case ast.Delete(targets=targets):
                for target in targets:
                    match target:
                        case ast.Subscript(value=ast.Name(id=name), slice=key):
                            (scope.owner(name) or scope).removals.setdefault(name, []).append(key)
            case ast.Global(names=names):
                scope.module_names.update(names)
            case ast.Call():
                self._call(node, scope)
        for child in ast.iter_child_nodes(node):
            self._bind(child, scope, function)

    def _synthetic(self, node: ast.expr, place: ast.AST, scope: NameScope) -> ast.expr:
        """``node``, which is not in the program's text, at the place of a node that is."""
        self._scopes[node] = scope
        return ast.copy_location(node, place)

    def _bind_name(self, scope: NameScope, name: str, binding: Binding) -> None:
        scope = self.module if name in scope.module_names else scope
        scope.bindings.setdefault(name, []).append(binding)

    def _target(self, target: ast.expr, value: ast.expr | UnpackedItem, scope: NameScope) -> None:
        match target:
            case ast.Name(id=name):
                self._bind_name(scope, name, value)
            case ast.Attribute(attr=name):
                self._attributes.setdefault(name, []).append(value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for index, part in enumerate(parts):
                    is_plain = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(parts)
                    item = value.elts[index] if isinstance(value, ast.Tuple | ast.List) and is_plain else None
                    self._target(part, item or UnpackedItem(value, index), scope)
            case ast.Subscript(value=ast.Name(id=name), slice=key) if isinstance(value, ast.expr):
                added = self._synthetic(ast.Dict([key], [value]), target, scope)
                (scope.owner(name) or scope).additions.setdefault(name, []).append(added)

    def _parameters(self, function: Function, scope: NameScope, outer: NameScope) -> None:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
        decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
        is_static = any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in decorators)
        is_method = outer.is_class and not is_static
        for index, (argument, default) in enumerate(zip(positional, defaults, strict=True)):
            scope.bindings[argument.arg] = [Parameter(function, index - is_method, argument.arg, default)]
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            scope.bindings[argument.arg] = [Parameter(function, None, argument.arg, default)]
        for rest in (arguments.vararg, arguments.kwarg):
            if rest is not None:
                scope.bindings[rest.arg] = [None]
        for part in ast.walk(arguments):
            if isinstance(part, ast.expr):
                self._scopes[part] = outer
        for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            self._bind(default, outer, None)

    def _call(self, call: ast.Call, scope: NameScope) -> None:
        self._named_calls.append(call)
        match call:
            case ast.Call(func=ast.Attribute(attr="foreachBatch", value=writer), args=[ast.Name() as function, *_]):
                while isinstance(writer, ast.Call | ast.Attribute):
                    inner = writer.func if isinstance(writer, ast.Call) else writer.value
                    if isinstance(writer, ast.Attribute) and writer.attr == "writeStream":
                        batches = ast.Call(function, [writer.value], [])
                        self._named_calls.append(batches)
                        self._scopes[batches] = scope
                        return
                    writer = inner
            case ast.Call(func=ast.Attribute(attr="update" | "setdefault" as method, value=ast.Name(id=name))):
                additions = (scope.owner(name) or scope).additions.setdefault(name, [])
                if method == "setdefault" and len(call.args) == 2:
                    additions.append(self._synthetic(ast.Dict([call.args[0]], [call.args[1]]), call, scope))
                elif method == "update":
                    additions += call.args
                    for keyword in call.keywords:
                        key = None if keyword.arg is None else ast.copy_location(ast.Constant(keyword.arg), keyword)
                        additions.append(self._synthetic(ast.Dict([key], [keyword.value]), keyword, scope))
            case ast.Call(func=ast.Attribute(attr="pop", value=ast.Name(id=name)), args=[key, *_]):
                (scope.owner(name) or scope).removals.setdefault(name, []).append(key)
            case ast.Call(func=ast.Name(id=name)) if name[:1].isupper():
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        self._attributes.setdefault(keyword.arg, []).append(keyword.value)

    # What expressions mean

    def bindings(self, node: ast.expr) -> tuple[object, list[Binding]]:
        """What a name or an attribute is bound to, with a key that is the same for all of its occurrences."""
        match node:
            case ast.Name(id=name):
                owner = self._scopes.get(node, self.module).owner(name)
                return (owner, name), [None] if owner is None else owner.bindings[name]
            case ast.Attribute(attr=name) if name in self._attributes:
                return ("attribute", name), self._attributes[name]
        return node, [None]

    def functions(self, node: ast.expr) -> list[Function]:
        """The functions of the program that a call of ``node`` may call."""
        match node:
            case ast.Name():
                kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
                return [binding for binding in self.bindings(node)[1] if isinstance(binding, kinds)]
            case ast.Attribute(attr=name, value=ast.Name() as owner) if name in self._methods and self._is_object(
                owner
            ):
                return self._methods[name]
        return []

    def _constructors(self, node: ast.expr) -> list[Function]:
        """The ``__init__`` of the classes of the program that ``node`` names."""
        bindings = self.bindings(node)[1] if isinstance(node, ast.Name) else []
        bodies = [part for binding in bindings if isinstance(binding, ast.ClassDef) for part in binding.body]
        return [part for part in bodies if isinstance(part, ast.FunctionDef) and part.name == "__init__"]

    def _is_object(self, node: ast.expr) -> bool:
        """Whether a name is a class of the program, or an object of one. Its methods may have names that Spark's have, too."""
        if not isinstance(node, ast.Name):
            return False
        if node.id in ("self", "cls"):
            return True
        made = [binding.func if isinstance(binding, ast.Call) else binding for binding in self.bindings(node)[1]]
        return any(
            isinstance(one, ast.ClassDef)
            or (isinstance(one, ast.Name) and any(isinstance(b, ast.ClassDef) for b in self.bindings(one)[1]))
            for one in made
        )

    def returned(self, function: Function) -> list[ast.expr]:
        return self._returns.get(function, [])

    def arguments(self, parameter: Parameter) -> list[ast.expr | None]:
        """The expressions that a parameter may stand for: arguments of calls, and its default; None is an unknown one."""
        calls = self._calls.get(parameter.function, [])
        arguments: list[ast.expr | None] = [] if calls else [parameter.default, None]
        for call in calls:
            by_name = [keyword.value for keyword in call.keywords if keyword.arg == parameter.name]
            is_unpacked = any(keyword.arg is None for keyword in call.keywords) or any(
                isinstance(argument, ast.Starred) for argument in call.args
            )
            index = parameter.position
            if is_unpacked:
                arguments += [*by_name, parameter.default, None]
            elif index is not None and 0 <= index < len(call.args):
                arguments.append(call.args[index])
            elif by_name:
                arguments += by_name
            else:
                arguments.append(parameter.default)
        return arguments

    # Values

    def values(self, node: ast.expr | None) -> tuple[Value, ...]:
        """All values that ``node`` may have, with ``UNKNOWN`` if there may be others."""
        return self.traced(node)[0]

    def texts(self, node: ast.expr | None) -> list[str]:
        """The values that are texts, with ``UNKNOWN`` in place of unknown parts and values."""
        return [value for value in self.values(node) if isinstance(value, str)]

    def traced(self, node: ast.expr | None) -> tuple[tuple[Value, ...], frozenset[ast.Constant]]:
        """The values of ``node``, and the constants that they come from."""
        if node is None:
            return (UNKNOWN,), frozenset()
        if node in self._memo:
            self._visited |= self._memo[node][1]
            return self._memo[node]
        if isinstance(node, ast.Constant):
            self._visited.add(node)
            return (UNKNOWN if node.value is Ellipsis else node.value,), frozenset([node])
        self._steps = self._steps + 1 if self._active else 0
        self._steps_of_all += 1
        if node in self._active or self._steps > _MOST_STEPS or self._steps_of_all > _MOST_STEPS_OF_ALL:
            self._cut = True
            return (() if node in self._active else (UNKNOWN,)), frozenset()
        outer, self._visited = self._visited, set()
        self._active.add(node)
        try:
            values = tuple(_distinct(self._evaluated(node)))
            self._characters += sum(len(value) for value in values if isinstance(value, str))
            if self._characters > _MOST_CHARACTERS_OF_ALL:
                values = (UNKNOWN,)
        finally:
            self._active.discard(node)
            traced, self._visited = frozenset(self._visited), outer | self._visited
        if not values and not self._active:
            values = (UNKNOWN,)  # it is made only of itself
        result = values, traced
        if not self._cut or not self._active:
            self._memo[node] = result
        if not self._active:
            self._cut = False
        return result

    def _evaluated(self, node: ast.expr) -> Iterable[Value]:
        match node:
            case ast.Name() | ast.Attribute():
                return self._of_name(node)
            case ast.JoinedStr(values=parts):
                return self._joined("", parts)
            case ast.FormattedValue(value=value):
                return [UNKNOWN if "\n" in text else text for text in map(_as_text, self.values(value))]
            case ast.IfExp(body=body, orelse=other):
                return [*self.values(body), *self.values(other)]
            case ast.BoolOp(values=parts):
                return [value for part in parts for value in self.values(part)]
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.values(value)
            case ast.Starred():
                return self._unpacked(node)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [ListValue(tuple(parts))]
            case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part) | ast.SetComp(elt=part):
                return [ListValue((part,))]
            case ast.Dict(keys=keys, values=values):
                return [self._dictionary(keys, values)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._sums(left, right)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return [self._merged([left, right])]
            case ast.BinOp(left=left, op=ast.Mod()):
                return [re.sub(r"%(?:\(\w+\))?[a-z]", UNKNOWN, text) for text in self.texts(left)] or [UNKNOWN]
            case ast.Subscript(value=value, slice=key):
                return [item for whole in self.values(value) for item in self._item(whole, key)]
            case ast.Call():
                return self._of_call(node)
        return [UNKNOWN]

    def _of_name(self, node: ast.expr) -> Iterable[Value]:
        if isinstance(node, ast.Attribute) and node.attr == "value" and node.attr not in self._attributes:
            return self.values(node.value)  # of a member of an enum
        key, bindings = self.bindings(node)
        if key is node:
            return [UNKNOWN]
        if key in self._active:
            self._cut = True
            return []
        self._active.add(key)
        try:
            found = [value for binding in bindings for value in self._values_of_binding(binding)]
            if isinstance(node, ast.Attribute) and not self._is_object(node.value):
                found.append(UNKNOWN)  # another object may have an attribute of this name
            owner, name = key if isinstance(key, tuple) else (None, "")
            if isinstance(owner, NameScope) and any(isinstance(value, DictValue) for value in found):
                more = self._merged(owner.additions.get(name, []))
                removed = {text for key in owner.removals.get(name, []) for text in self.texts(key)}
                found = [
                    _with_changes(value, more, removed) if isinstance(value, DictValue) else value for value in found
                ]
            return found
        finally:
            self._active.discard(key)

    def _values_of_binding(self, binding: Binding) -> Iterable[Value]:
        match binding:
            case ast.expr():
                return self.values(binding)
            case UnpackedItem(of=whole, position=index):
                return [item for value in self._values_of_binding(whole) for item in self._item_at(value, index)]
            case Parameter():
                return [value for argument in self.arguments(binding) for value in self.values(argument)]
        return [UNKNOWN]

    def _item_at(self, whole: Value, index: int | None) -> Iterable[Value]:
        if isinstance(whole, DictValue):
            return [*(entry.name for entry in whole.items), *([UNKNOWN] if whole.is_open else [])]
        if not isinstance(whole, ListValue):
            return [UNKNOWN]
        is_exact = index is not None and not any(isinstance(part, ast.Starred) for part in whole.nodes)
        if is_exact and index is not None:
            return self.values(whole.nodes[index]) if -len(whole.nodes) <= index < len(whole.nodes) else [UNKNOWN]
        return [value for part in whole.nodes for value in self._unpacked(part)]

    def _unpacked(self, part: ast.expr) -> Iterable[Value]:
        if not isinstance(part, ast.Starred):
            return self.values(part)
        return [item for value in self.values(part.value) for item in self._item_at(value, None)]

    def _item(self, whole: Value, key: ast.expr) -> Iterable[Value]:
        keys = self.values(key)
        if isinstance(whole, ListValue):
            index = keys[0] if len(keys) == 1 and isinstance(keys[0], int) else None
            return self._item_at(whole, index)
        if not isinstance(whole, DictValue):
            return [UNKNOWN]
        names = [text for text in keys if isinstance(text, str)]
        is_unknown = any(UNKNOWN in name for name in names)
        chosen = [entry.value for entry in whole.items if is_unknown or entry.name in names]
        values = [value for node in chosen for value in self.values(node)]
        return [*values, *([UNKNOWN] if whole.is_open or is_unknown or not values else [])]

    def _joined(self, separator: str, parts: Iterable[ast.expr]) -> Iterator[str]:
        parts = list(parts)
        if len(parts) > _LONGEST_LIST or len(separator) > _LONGEST_LIST:
            yield UNKNOWN
            return
        choices = [list(map(_as_text, self.values(part))) or [UNKNOWN] for part in parts]
        for texts in itertools.islice(itertools.product(*choices), _MOST_VALUES):
            size = sum(map(len, texts)) + len(separator) * len(texts)  # before a text of that length is made
            yield separator.join(texts) if size <= _LONGEST_TEXT else UNKNOWN

    def _sums(self, left: ast.expr, right: ast.expr) -> Iterator[Value]:
        for one, other in itertools.product(self.values(left) or [UNKNOWN], self.values(right) or [UNKNOWN]):
            if isinstance(one, ListValue) and isinstance(other, ListValue):
                nodes = (*one.nodes, *other.nodes)
                yield ListValue(nodes) if len(nodes) <= _LONGEST_LIST else UNKNOWN
            elif isinstance(one, str) or isinstance(other, str):
                yield _as_text(one) + _as_text(other) if one != UNKNOWN or other != UNKNOWN else UNKNOWN
            else:
                yield UNKNOWN

    def _dictionary(self, keys: Iterable[ast.expr | None], values: Iterable[ast.expr]) -> DictValue:
        parts = []
        for key, value in zip(keys, values, strict=True):
            if key is None:
                parts.append(self._merged([value]))
                continue
            names = [text for text in self.values(key) if text is not None]
            known = [name for name in names if isinstance(name, str) and UNKNOWN not in name]
            others = any(isinstance(name, str) and UNKNOWN in name for name in names)
            parts.append(DictValue(tuple(DictItem(name, value, key.lineno) for name in known), others))
        return _union(parts)

    def _merged(self, nodes: Iterable[ast.expr]) -> DictValue:
        values = [value for node in nodes for value in self.values(node)]
        return _union([value if isinstance(value, DictValue) else DictValue((), value is not None) for value in values])

    def _of_call(self, call: ast.Call) -> Iterable[Value]:
        arguments, function = call.args, call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        own = self.functions(function)
        if own:
            return [value for one in own for node in self.returned(one) for value in self.values(node)]
        if name == "dict" and isinstance(function, ast.Name):
            keywords = [
                None if word.arg is None else ast.copy_location(ast.Constant(word.arg), word) for word in call.keywords
            ]
            named = self._dictionary(keywords, [word.value for word in call.keywords])
            return [_union([self._merged(arguments), named])]
        if name in ("str", "list", "tuple", "sorted", "set", "lit") and len(arguments) == 1:
            values = self.values(arguments[0])
            return map(_as_text, values) if name == "str" else values
        if name == "dumps" and arguments:
            return [self._as_json(value) for value in self.values(arguments[0])]
        if name == "getattr" and len(arguments) == 3:
            return [*self.values(arguments[2]), UNKNOWN]
        if name in ("get", "getenv", "pop") and arguments:
            return self._looked_up(function, arguments)
        return self._of_method(function, arguments) if isinstance(function, ast.Attribute) else [UNKNOWN]

    def _looked_up(self, function: ast.expr, arguments: list[ast.expr]) -> Iterable[Value]:
        default = self.values(arguments[1]) if len(arguments) > 1 else ()
        wholes = self.values(function.value) if isinstance(function, ast.Attribute) else ()
        known = [whole for whole in wholes if isinstance(whole, DictValue)]
        if not known or len(known) < len(wholes):
            return [*default, UNKNOWN]
        return [*default, *(item for whole in known for item in self._item(whole, arguments[0]))]

    def _of_method(self, function: ast.Attribute, arguments: list[ast.expr]) -> Iterable[Value]:
        values = self.values(function.value)
        match function.attr, arguments:
            case ("lower" | "upper" | "strip" | "casefold" as method, []):
                return [getattr(value, method)() if isinstance(value, str) else UNKNOWN for value in values]
            case "copy", []:
                return values
            case "items", []:
                return [self._pairs(value) for value in values]
            case "values", []:
                entries = [value for value in values if isinstance(value, DictValue) and not value.is_open]
                return [ListValue(tuple(entry.value for entry in value.items)) for value in entries] or [UNKNOWN]
            case "format", _:
                fields = re.compile(r"\{[^{}]*\}")
                return [fields.sub(UNKNOWN, value) if isinstance(value, str) else UNKNOWN for value in values]
            case "replace", [old, new]:
                changes = [(a, b) for a in self.texts(old) for b in self.texts(new) if UNKNOWN not in a]
                texts = [value for value in values if isinstance(value, str)]
                if not changes or not texts:
                    return [UNKNOWN]
                if any(len(text) * len(new) > _LONGEST_TEXT for text in texts for _, new in changes):
                    return [UNKNOWN]
                return (text.replace(*change) for text in texts for change in changes)  # one by one: there may be many
            case "join", [parts]:
                lists = self.values(parts)
                return (
                    text
                    for separator in values
                    for whole in lists
                    for text in (
                        self._joined(_as_text(separator), whole.nodes) if isinstance(whole, ListValue) else [UNKNOWN]
                    )
                )
        return [UNKNOWN]

    def _pairs(self, value: Value) -> Value:
        if not isinstance(value, DictValue) or value.is_open:
            return UNKNOWN
        return ListValue(tuple(ast.Tuple([ast.Constant(entry.name), entry.value], ast.Load()) for entry in value.items))

    def _as_json(self, value: Value) -> str:
        self._plain_left = _LONGEST_TEXT
        try:
            return json.dumps(self._plain(value))
        except (TypeError, ValueError, RecursionError):
            return UNKNOWN

    def _plain(self, value: Value) -> object:
        """A value without nodes. Raises ``ValueError`` if a part is not known, or if there are too many or too long ones."""
        self._plain_left -= _LONGEST_TEXT // _MOST_IN_JSON + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, DictValue):
            self._plain_left -= sum(len(entry.name) for entry in value.items)
        if self._plain_left < 0:
            raise ValueError("there are too many parts, or too long ones")
        if isinstance(value, ListValue):
            return [self._only(node) for node in value.nodes]
        if isinstance(value, DictValue) and not value.is_open:
            return {entry.name: self._only(entry.value) for entry in value.items}
        if isinstance(value, DictValue) or (isinstance(value, str) and UNKNOWN in value):
            raise ValueError("a part is not known")
        return value

    def _only(self, node: ast.expr) -> object:
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
                return -number
        values = self.values(node)
        if len(values) != 1:
            raise ValueError("there are several values, or none")
        return self._plain(values[0])


def _distinct(values: Iterable[Value]) -> Iterator[Value]:
    seen: dict[tuple[type, Value], None] = {}
    for value in values:
        if len(seen) == _MOST_VALUES:
            yield UNKNOWN
            return
        if isinstance(value, str) and len(value) > _LONGEST_TEXT:
            value = UNKNOWN
        if (type(value), value) not in seen:
            seen[type(value), value] = None
            yield value


def _union(parts: Iterable[DictValue]) -> DictValue:
    whole = list(parts)
    items = dict.fromkeys(entry for part in whole for entry in part.items)
    return DictValue(tuple(items), any(part.is_open for part in whole))


def _with_changes(entries: DictValue, added: DictValue, removed: Container[str]) -> DictValue:
    whole = _union([entries, added])
    return DictValue(tuple(entry for entry in whole.items if entry.name not in removed), whole.is_open)


def _as_text(value: Value) -> str:
    return UNKNOWN if isinstance(value, ListValue | DictValue | bytes) else str(value)
