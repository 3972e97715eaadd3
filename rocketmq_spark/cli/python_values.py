"""Computes the values that expressions of a Python program may have, from the text of the program. Pure; the program is not run.

The order of statements is not considered: a name has the values of all its assignments, and a parameter has the arguments of all
calls.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

# A value that the program's text does not show. Within a string, this character stands for an unknown part.
UNKNOWN = "\0"
# The limits of an expression: its values, the steps to compute them, and the steps for all expressions of a program. Beyond a
# limit, the value of the expression is UNKNOWN.
_MAX_VALUES, _MAX_STEPS, _MAX_TOTAL_STEPS = 32, 5_000, 300_000
# The limits of a computed value: the characters of a string, the items of a list, the values in JSON. Beyond its limit, a value
# is UNKNOWN. One step of the computation may double the size of a value.
_MAX_TEXT_CHARS, _MAX_LIST_ITEMS, _MAX_JSON_VALUES = 100_000, 1_000, 10_000
_MAX_TOTAL_CHARS = 20_000_000  # the limit of characters in the strings of all expressions
# The maximum depth of nested expressions, for which Python's stack has room.
_MAX_DEPTH = 100
# Calls that copy an object and change attributes.
_COPYING_CALLS = ("replace", "_replace", "evolve")
# Base classes of other modules that set no attributes. Any other base class, such as pydantic's ``BaseSettings``, may set
# attributes.
_ENUMS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
_PLAIN_BASES = {"object", "str", "int", "ABC", "Protocol", "Generic", "NamedTuple", "TypedDict", *_ENUMS}


class DictItem(NamedTuple):
    """An item of a dictionary."""

    name: str
    value: ast.expr
    line: int


class ListValue(NamedTuple):
    """A list, tuple or set."""

    nodes: tuple[ast.expr, ...]


class DictValue(NamedTuple):
    """A dictionary. If ``is_open``, it may have further items, whose names the program does not show."""

    items: tuple[DictItem, ...]
    is_open: bool = False


Value = str | bytes | int | float | complex | None | ListValue | DictValue
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class UnpackedItem(NamedTuple):
    """An item of a value that is unpacked, or that a loop iterates over. Without ``position``, it may be any of the items."""

    source: ast.expr | UnpackedItem
    position: int | None


class Parameter(NamedTuple):
    function: Function
    position: int | None
    name: str
    default: ast.expr | None


# What a name is bound to; None stands for a value that the program does not show, such as an import.
Binding = ast.expr | UnpackedItem | Parameter | Function | ast.ClassDef | None


@dataclass(eq=False)
class NameScope:
    """A module, a function or a class, with the bindings of its names.

    ``additions`` and ``removals`` are changes of dictionaries, by the name of the variable.
    """

    parent: NameScope | None
    is_class: bool = False
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    additions: dict[str, list[ast.expr]] = field(default_factory=dict)
    removals: dict[str, list[ast.expr]] = field(default_factory=dict)
    outer_names: dict[str, NameScope] = field(default_factory=dict)  # declared ``global`` or ``nonlocal``

    def owner(self, name: str) -> NameScope | None:
        """Return the scope that binds ``name`` for an expression in this scope; None for a builtin."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.bindings and (scope is self or not scope.is_class):
                return scope
            scope = scope.parent
        return None


class PythonProgram:
    """A program, or the cells of a notebook, which share one module: its bindings, and the values of its expressions."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.module_scope = NameScope(None)
        self._scopes: dict[ast.AST, NameScope] = {}
        self._attributes: dict[str, list[Binding]] = {}  # bindings of the attributes of all objects, by attribute name
        self._sets_any_attribute = False  # whether the program sets attributes whose names its text does not show
        self._attribute_changes = NameScope(None)  # holds the changes of dictionaries that are in attributes
        self._classes: list[tuple[ast.ClassDef, NameScope]] = []
        self._methods: dict[str, list[Function]] = {}  # functions of the methods of all classes, by method name
        self._returned_nodes: dict[ast.AST, list[ast.expr]] = {}  # by function
        self._calls_by_function: dict[ast.AST, list[ast.Call]] = {}
        self._all_calls: list[ast.Call] = []  # resolved when all functions are bound
        self._memo: dict[object, tuple[tuple[Value, ...], frozenset[ast.Constant]]] = {}
        self._evaluated_keys: set[object] = set()  # keys of the values that are being computed, to detect cycles
        self._used_constants: set[ast.Constant] = set()  # constants that the current expression uses
        # Whether a cycle or a limit made a value incomplete. An incomplete value is not kept in the memo.
        self._is_incomplete = False
        self._step_count = self._total_step_count = 0
        self._json_budget = 0  # how many more characters the JSON that is computed now may have
        self._total_chars = 0  # characters in all strings that were computed so far
        for tree in trees:
            self._bind_all(tree)
        for _, scope in self._classes:
            for name, bindings in scope.bindings.items():
                self._attributes.setdefault(name, []).extend(bindings)
        for call in self._all_calls:
            for function in (*self.functions(call.func), *self._constructors(call.func)):
                self._calls_by_function.setdefault(function, []).append(call)
        self._add_unknown_field_values()
        self._propagate_changes()

    # Bindings

    def _bind_all(self, tree: ast.AST) -> None:
        """Bind all nodes, each node before its parts. This method is not recursive, because a chain of a thousand calls would
        exceed Python's recursion limit.
        """
        pending_parts: list[tuple[ast.AST, NameScope, Function | None]] = [(tree, self.module_scope, None)]
        while pending_parts:
            pending_parts += reversed(list(self._bind(*pending_parts.pop())))

    def _bind(
        self, node: ast.AST, scope: NameScope, function: Function | None
    ) -> Iterable[tuple[ast.AST, NameScope, Function | None]]:
        """Record the scope of a node, and bind the names that the node defines. Returns the parts of the node, each with its
        scope and function.
        """
        self._scopes[node] = scope
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                return self._bind_function(node, scope, function)
            case ast.ClassDef():
                self._bind_name(scope, node.name, node)
                inner_scope = NameScope(scope, is_class=True)
                self._classes.append((node, inner_scope))
                children = ast.iter_child_nodes(node)
                return [(child, inner_scope if isinstance(child, ast.stmt) else scope, function) for child in children]
            case ast.Return(value=ast.expr() as value) if function is not None:
                self._returned_nodes.setdefault(function, []).append(value)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind_target(target, value, scope)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                self._bind_target(target, value, scope)
            case ast.AugAssign(target=target, op=op, value=value):
                self._bind_target(target, self._added_node(ast.BinOp(target, op, value), node, scope), scope)
            case ast.For(target=target, iter=iterable) | ast.AsyncFor(target=target, iter=iterable):
                self._bind_target(target, UnpackedItem(iterable, None), scope)
            case ast.comprehension(target=target, iter=iterable):
                self._bind_target(target, UnpackedItem(iterable, None), scope)
            case ast.withitem(optional_vars=ast.expr() as target, context_expr=value):
                self._bind_target(target, value, scope)
            case ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
                self._bind_name(scope, name, None)
            case ast.MatchMapping(rest=str() as name):
                self._bind_name(scope, name, None)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for alias in names:
                    self._bind_name(scope, (alias.asname or alias.name).partition(".")[0], None)
            case ast.Delete(targets=targets):
                for target in targets:
                    match target:
                        case ast.Subscript(value=dictionary, slice=key):
                            self._record_change(dictionary, scope, removed_keys=[key])
            case ast.Global(names=names):
                scope.outer_names.update(dict.fromkeys(names, self.module_scope))
            case ast.Nonlocal(names=names):
                for name in names:
                    scope.outer_names[name] = (scope.parent and scope.parent.owner(name)) or scope.parent or scope
            case ast.Attribute(attr="__dict__"):
                self._sets_any_attribute = True
            case ast.Call():
                self._bind_call(node, scope)
        return [(child, scope, function) for child in ast.iter_child_nodes(node)]

    def _bind_function(
        self, node: Function, scope: NameScope, function: Function | None
    ) -> Iterable[tuple[ast.AST, NameScope, Function | None]]:
        parts: list[tuple[ast.AST, NameScope, Function | None]] = []
        if not isinstance(node, ast.Lambda):
            self._bind_name(scope, node.name, node)
            if scope.is_class:
                self._methods.setdefault(node.name, []).append(node)
            outside_nodes = (*node.decorator_list, *([node.returns] if node.returns else ()))
            parts += [(part, scope, function) for part in outside_nodes]
        inner_scope = NameScope(scope)
        self._bind_parameters(node, inner_scope, scope)
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        parts += [(default, scope, None) for default in defaults]
        if isinstance(node, ast.Lambda):
            self._returned_nodes[node] = [node.body]
        return [
            *parts,
            *((part, inner_scope, node) for part in ([node.body] if isinstance(node, ast.Lambda) else node.body)),
        ]

    def _added_node(self, node: ast.expr, nearby_node: ast.AST, scope: NameScope) -> ast.expr:
        """Return ``node``, which is not in the program's text, with the line of ``nearby_node``, which is in the text."""
        self._scopes[node] = scope
        return ast.copy_location(node, nearby_node)

    def _bind_name(self, scope: NameScope, name: str, binding: Binding) -> None:
        scope = scope.outer_names.get(name, scope)
        scope.bindings.setdefault(name, []).append(binding)

    def _bind_target(self, target: ast.expr, value: ast.expr | UnpackedItem, scope: NameScope) -> None:
        match target:
            case ast.Name(id=name):
                self._bind_name(scope, name, value)
            case ast.Attribute(attr=name):
                self._attributes.setdefault(name, []).append(value)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for index, element in enumerate(elements):
                    is_plain = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(elements)
                    item = value.elts[index] if isinstance(value, ast.Tuple | ast.List) and is_plain else None
                    self._bind_target(element, item or UnpackedItem(value, index), scope)
            case ast.Subscript(value=dictionary, slice=key):
                entry = value if isinstance(value, ast.expr) else self._added_node(ast.Constant(...), target, scope)
                self._record_change(
                    dictionary, scope, added_nodes=[self._added_node(ast.Dict([key], [entry]), target, scope)]
                )

    def _record_change(
        self,
        dictionary: ast.expr,
        scope: NameScope,
        added_nodes: Iterable[ast.expr] = (),
        removed_keys: Iterable[ast.expr] = (),
    ) -> None:
        """Record additions and removals of a dictionary. If the dictionary is an item of another dictionary, the value of the
        other dictionary is then unknown.
        """
        match dictionary:
            case ast.Name(id=name):
                owner = scope.outer_names.get(name) or scope.owner(name) or scope
            case ast.Attribute(attr=name):
                owner = self._attribute_changes
            case ast.Subscript(value=outer):
                while isinstance(outer, ast.Subscript):
                    outer = outer.value
                if isinstance(outer, ast.Name):
                    (scope.owner(outer.id) or scope).bindings.setdefault(outer.id, []).append(None)
                elif isinstance(outer, ast.Attribute):
                    self._attributes.setdefault(outer.attr, []).append(None)
                return
            case _:
                return
        owner.additions.setdefault(name, []).extend(added_nodes)
        owner.removals.setdefault(name, []).extend(removed_keys)

    def _propagate_changes(self) -> None:
        """Apply the changes of a dictionary to all of its names, because a change through one name is visible through the other
        names.
        """
        scopes = {*self._scopes.values(), self._attribute_changes}
        pending_names = [(scope, name) for scope in scopes for name in {*scope.additions, *scope.removals}]
        while pending_names:
            scope, name = pending_names.pop()
            bindings = (
                self._attributes.get(name, []) if scope is self._attribute_changes else scope.bindings.get(name, [])
            )
            for source in self._aliases(bindings):
                key, _ = self.bindings(source)
                if not isinstance(key, tuple) or key[0] is None:
                    continue
                owner, other_name = (self._attribute_changes if key[0] == "attribute" else key[0]), key[1]
                if self._add_changes(scope.additions, name, owner.additions, other_name) | self._add_changes(
                    scope.removals, name, owner.removals, other_name
                ):
                    pending_names.append((owner, other_name))

    def _aliases(self, bindings: Iterable[Binding]) -> Iterator[ast.expr]:
        """Yield the names and attributes that may refer to the same object as a name with these bindings."""
        for binding in bindings:
            for source in self.arguments(binding) if isinstance(binding, Parameter) else [binding]:
                if isinstance(source, ast.Name | ast.Attribute):
                    yield source

    @staticmethod
    def _add_changes(
        source: Mapping[str, list[ast.expr]], name: str, target: dict[str, list[ast.expr]], target_name: str
    ) -> bool:
        """Add the changes of ``name`` in ``source`` to the changes of ``target_name`` in ``target``. Return whether any change
        was new.
        """
        earlier_nodes = dict.fromkeys(target.get(target_name, []))
        merged_nodes = {**earlier_nodes, **dict.fromkeys(source.get(name, []))}
        if len(merged_nodes) == len(earlier_nodes):
            return False
        target[target_name] = list(merged_nodes)
        return True

    def _add_unknown_field_values(self) -> None:
        """Add an unknown value to the attributes of classes whose objects may have values that the program does not show.

        Such values come from a base class of another module, or from arguments that the program does not assign to an attribute.
        """
        constructed_classes: set[ast.ClassDef] = set()
        for call in self._all_calls:
            is_check = isinstance(call.func, ast.Name) and call.func.id in ("isinstance", "issubclass", "super")
            receivers = [] if is_check else [*call.args]
            if call.args or any(keyword.arg is None for keyword in call.keywords):
                receivers.append(call.func)
            if isinstance(call.func, ast.Attribute) and call.func.attr not in self._methods:
                receivers.append(call.func.value)  # such as ``Settings.from_dict(…)``, a method that a decorator adds
            constructed_classes.update(cls for node in receivers for cls in self._classes_of(node))
        for definition, _ in self._classes:
            lineage = [definition, *self._ancestors(definition)]
            bases = {_last_name(base) for cls in lineage for base in cls.bases if not self._classes_of(base)}
            has_fields = not (bases & _ENUMS) and not any(map(self._constructor_of, lineage))
            if bases - _PLAIN_BASES or (has_fields and definition in constructed_classes):
                for part in (part for cls in lineage for part in cls.body):
                    match part:
                        case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                            self._attributes.setdefault(name, []).append(None)

    def _classes_of(self, node: ast.expr) -> list[ast.ClassDef]:
        """Return the classes of the program that a name may mean; ``cls`` may mean any class."""
        if isinstance(node, ast.Name) and node.id == "cls":
            return [definition for definition, _ in self._classes]
        bindings = self.bindings(node)[1] if isinstance(node, ast.Name | ast.Attribute) else []
        return [binding for binding in bindings if isinstance(binding, ast.ClassDef)]

    def _ancestors(self, definition: ast.ClassDef) -> list[ast.ClassDef]:
        """Return the direct and indirect base classes that are in the program."""
        ancestors: dict[ast.ClassDef, None] = {}
        pending_classes = [definition]
        while pending_classes:
            bases = [
                cls for base in pending_classes.pop().bases for cls in self._classes_of(base) if cls not in ancestors
            ]
            ancestors.update(dict.fromkeys(bases))
            pending_classes += bases
        return list(ancestors)

    @staticmethod
    def _constructor_of(definition: ast.ClassDef) -> ast.FunctionDef | None:
        methods = (part for part in definition.body if isinstance(part, ast.FunctionDef))
        return next((method for method in methods if method.name == "__init__"), None)

    def _bind_parameters(self, function: Function, scope: NameScope, outer_scope: NameScope) -> None:
        arguments = function.args
        positional_arguments = [*arguments.posonlyargs, *arguments.args]
        defaults = [*[None] * (len(positional_arguments) - len(arguments.defaults)), *arguments.defaults]
        decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
        is_static = any(isinstance(decorator, ast.Name) and decorator.id == "staticmethod" for decorator in decorators)
        is_method = outer_scope.is_class and not is_static
        for index, (argument, default) in enumerate(zip(positional_arguments, defaults, strict=True)):
            scope.bindings[argument.arg] = [Parameter(function, index - is_method, argument.arg, default)]
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            scope.bindings[argument.arg] = [Parameter(function, None, argument.arg, default)]
        for rest_argument in (arguments.vararg, arguments.kwarg):
            if rest_argument is not None:
                scope.bindings[rest_argument.arg] = [None]
        for part in ast.walk(arguments):
            if isinstance(part, ast.expr):
                self._scopes[part] = outer_scope

    def _bind_call(self, call: ast.Call, scope: NameScope) -> None:
        self._all_calls.append(call)
        match call:
            case ast.Call(func=ast.Attribute(attr="foreachBatch", value=writer), args=[ast.Name() as function, *_]):
                while isinstance(writer, ast.Call | ast.Attribute):
                    inner_node = writer.func if isinstance(writer, ast.Call) else writer.value
                    if isinstance(writer, ast.Attribute) and writer.attr == "writeStream":
                        batch_call = ast.Call(function, [writer.value], [])
                        self._all_calls.append(batch_call)
                        self._scopes[batch_call] = scope
                        return
                    writer = inner_node
            case ast.Call(func=ast.Attribute(attr="setdefault", value=dictionary), args=[key, value]):
                self._record_change(
                    dictionary, scope, added_nodes=[self._added_node(ast.Dict([key], [value]), call, scope)]
                )
            case ast.Call(func=ast.Attribute(attr="update", value=dictionary)):
                self._record_change(dictionary, scope, added_nodes=call.args)
                for keyword in call.keywords:
                    key_name = None if keyword.arg is None else ast.copy_location(ast.Constant(keyword.arg), keyword)
                    self._record_change(
                        dictionary, scope, [self._added_node(ast.Dict([key_name], [keyword.value]), keyword, scope)]
                    )
            case ast.Call(func=ast.Attribute(attr="pop", value=dictionary), args=[key, *_]):
                self._record_change(dictionary, scope, removed_keys=[key])
            case ast.Call(func=ast.Name(id="setattr"), args=[_, ast.Constant(value=str() as name), value]):
                self._attributes.setdefault(name, []).append(value)
            case ast.Call(func=ast.Name(id="setattr")):
                self._sets_any_attribute = True
            case ast.Call(func=function) if (name := _last_name(function))[:1].isupper() or name in _COPYING_CALLS:
                for keyword in call.keywords:
                    if keyword.arg is not None:
                        self._attributes.setdefault(keyword.arg, []).append(keyword.value)

    # Names and functions

    def bindings(self, node: ast.expr) -> tuple[object, list[Binding]]:
        """Return the bindings of a name or an attribute, and a key that is the same for all of its occurrences."""
        match node:
            case ast.Name(id=name):
                owner = self._scopes.get(node, self.module_scope).owner(name)
                return (owner, name), [None] if owner is None else owner.bindings[name]
            case ast.Attribute(attr=name) if name in self._attributes:
                return ("attribute", name), self._attributes[name]
        return node, [None]

    def functions(self, node: ast.expr) -> list[Function]:
        """Return the functions of the program that a call of ``node`` may call."""
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
        """Return the ``__init__`` of the classes of the program that ``node`` names, or of their base classes."""
        constructors: list[Function] = []
        for definition in self._classes_of(node) if isinstance(node, ast.Name) and node.id != "cls" else []:
            lineage = [definition, *self._ancestors(definition)]
            constructors += [own for own in map(self._constructor_of, lineage) if own is not None][:1]
        return constructors

    def _is_object(self, node: ast.expr) -> bool:
        """Whether a name is a class of the program, or an object of one. A class of the program may have methods with the names
        of Spark's methods.
        """
        if not isinstance(node, ast.Name):
            return False
        if node.id in ("self", "cls"):
            return True
        sources = [binding.func if isinstance(binding, ast.Call) else binding for binding in self.bindings(node)[1]]
        return any(
            isinstance(source, ast.ClassDef)
            or (isinstance(source, ast.Name) and any(isinstance(b, ast.ClassDef) for b in self.bindings(source)[1]))
            for source in sources
        )

    def returned_nodes(self, function: Function) -> list[ast.expr]:
        return self._returned_nodes.get(function, [])

    def arguments(self, parameter: Parameter) -> list[ast.expr | None]:
        """Return the expressions that a parameter may have: arguments of calls, and its default. An entry is None if the
        expression is unknown.
        """
        calls = self._calls_by_function.get(parameter.function, [])
        arguments: list[ast.expr | None] = [] if calls else [parameter.default, None]
        for call in calls:
            named_values = [keyword.value for keyword in call.keywords if keyword.arg == parameter.name]
            is_unpacked = any(keyword.arg is None for keyword in call.keywords) or any(
                isinstance(argument, ast.Starred) for argument in call.args
            )
            index = parameter.position
            if is_unpacked:
                arguments += [*named_values, parameter.default, None]
            elif index is not None and 0 <= index < len(call.args):
                arguments.append(call.args[index])
            elif named_values:
                arguments += named_values
            else:
                arguments.append(parameter.default)
        return arguments

    # Values

    def values(self, node: ast.expr | None) -> tuple[Value, ...]:
        """Return all values that ``node`` may have, with ``UNKNOWN`` if it may have other values."""
        return self.values_and_constants(node)[0]

    def texts(self, node: ast.expr | None) -> list[str]:
        """Return the values that are texts, with ``UNKNOWN`` for unknown parts and values."""
        return [value for value in self.values(node) if isinstance(value, str)]

    def values_and_constants(self, node: ast.expr | None) -> tuple[tuple[Value, ...], frozenset[ast.Constant]]:
        """Return the values of ``node``, and the constants from which they are computed."""
        if node is None:
            return (UNKNOWN,), frozenset()
        memo_key = self._memo_key(node)
        if memo_key in self._memo:
            self._used_constants |= self._memo[memo_key][1]
            return self._memo[memo_key]
        if isinstance(node, ast.Constant):
            self._used_constants.add(node)
            return (UNKNOWN if node.value is Ellipsis else node.value,), frozenset([node])
        self._step_count = self._step_count + 1 if self._evaluated_keys else 0
        self._total_step_count += 1
        is_over_limit = self._step_count > _MAX_STEPS or self._total_step_count > _MAX_TOTAL_STEPS
        if memo_key in self._evaluated_keys or is_over_limit or len(self._evaluated_keys) > _MAX_DEPTH:
            self._is_incomplete = True
            return (() if memo_key in self._evaluated_keys else (UNKNOWN,)), frozenset()
        outer_constants, self._used_constants = self._used_constants, set()
        self._evaluated_keys.add(memo_key)
        try:
            values = tuple(_distinct_values(self._evaluate(node)))
            self._total_chars += sum(len(value) for value in values if isinstance(value, str))
            if self._total_chars > _MAX_TOTAL_CHARS:
                values = (UNKNOWN,)
        finally:
            self._evaluated_keys.discard(memo_key)
            constants, self._used_constants = (
                frozenset(self._used_constants),
                outer_constants | self._used_constants,
            )
        if not values and not self._evaluated_keys:
            values = (UNKNOWN,)  # the value depends only on itself
        result = values, constants
        if not self._is_incomplete or not self._evaluated_keys:
            self._memo[memo_key] = result
        if not self._evaluated_keys:
            self._is_incomplete = False
        return result

    def _memo_key(self, node: ast.expr) -> object:
        """Return a key that is the same for all expressions with the same values."""
        key, _ = self.bindings(node)
        return (key, self._is_object(node.value)) if isinstance(node, ast.Attribute) and key is not node else key

    def _evaluate(self, node: ast.expr) -> Iterable[Value]:
        match node:
            case ast.Name() | ast.Attribute():
                return self._values_of_name(node)
            case ast.JoinedStr(values=parts):
                return self._joined_texts("", parts)
            case ast.FormattedValue(value=value):
                return [UNKNOWN if "\n" in text else text for text in map(_as_text, self.values(value))]
            case ast.IfExp(body=body, orelse=other):
                return [*self.values(body), *self.values(other)]
            case ast.BoolOp(values=parts):
                return [value for part in parts for value in self.values(part)]
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                return self.values(value)
            case ast.Starred(value=value):
                return [item for container in self.values(value) for item in self._values_at_index(container, None)]
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                return [ListValue(tuple(parts))]
            case ast.ListComp(elt=part) | ast.GeneratorExp(elt=part) | ast.SetComp(elt=part):
                return [ListValue((part,))]
            case ast.Dict(keys=keys, values=values):
                return [self._dictionary(keys, values)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._sum_values(left, right)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return [self._merged_dictionaries([left, right])]
            case ast.BinOp(left=left, op=ast.Mod()):
                return [re.sub(r"%(?:\(\w+\))?[a-z]", UNKNOWN, text) for text in self.texts(left)] or [UNKNOWN]
            case ast.Subscript(value=value, slice=key):
                return [item for container in self.values(value) for item in self._values_at_key(container, key)]
            case ast.Call():
                return self._values_of_call(node)
        return [UNKNOWN]

    def _values_of_name(self, node: ast.expr) -> Iterable[Value]:
        if isinstance(node, ast.Attribute) and node.attr == "value" and node.attr not in self._attributes:
            return self.values(node.value)  # ``node.value`` may be a member of an enum
        key, bindings = self.bindings(node)
        if key is node or not isinstance(key, tuple):
            return [UNKNOWN]
        values = [value for binding in bindings for value in self._values_of_binding(binding)]
        if isinstance(node, ast.Attribute) and (self._sets_any_attribute or not self._is_object(node.value)):
            values.append(UNKNOWN)  # another object may have an attribute of this name
        changed_scope, name = (self._attribute_changes if isinstance(node, ast.Attribute) else key[0]), key[1]
        if changed_scope is not None and any(isinstance(value, DictValue) for value in values):
            added_items = self._merged_dictionaries(changed_scope.additions.get(name, []))
            removed_names = {text for key in changed_scope.removals.get(name, []) for text in self.texts(key)}
            values = [
                _with_changes(value, added_items, removed_names) if isinstance(value, DictValue) else value
                for value in values
            ]
        return values

    def _values_of_binding(self, binding: Binding) -> Iterable[Value]:
        match binding:
            case ast.expr():
                return self.values(binding)
            case UnpackedItem(source=container, position=index):
                return [
                    item for value in self._values_of_binding(container) for item in self._values_at_index(value, index)
                ]
            case Parameter():
                return [value for argument in self.arguments(binding) for value in self.values(argument)]
        return [UNKNOWN]

    def _values_at_index(self, container: Value, index: int | None) -> Iterable[Value]:
        if isinstance(container, DictValue):
            return [*(entry.name for entry in container.items), *([UNKNOWN] if container.is_open else [])]
        if not isinstance(container, ListValue):
            return [UNKNOWN]
        is_exact = index is not None and not any(isinstance(part, ast.Starred) for part in container.nodes)
        if is_exact and index is not None:
            return (
                self.values(container.nodes[index])
                if -len(container.nodes) <= index < len(container.nodes)
                else [UNKNOWN]
            )
        return [value for part in container.nodes for value in self.values(part)]

    def _values_at_key(self, container: Value, key: ast.expr) -> Iterable[Value]:
        keys = self.values(key)
        if isinstance(container, ListValue):
            index = keys[0] if len(keys) == 1 and isinstance(keys[0], int) else None
            return self._values_at_index(container, index)
        if not isinstance(container, DictValue):
            return [UNKNOWN]
        names = [text for text in keys if isinstance(text, str)]
        is_unknown = any(UNKNOWN in name for name in names)
        chosen_nodes = [entry.value for entry in container.items if is_unknown or entry.name in names]
        values = [value for node in chosen_nodes for value in self.values(node)]
        return [*values, *([UNKNOWN] if container.is_open or is_unknown or not values else [])]

    def _joined_texts(self, separator: str, parts: Iterable[ast.expr]) -> Iterator[str]:
        parts = list(parts)
        if len(parts) > _MAX_LIST_ITEMS or len(separator) > _MAX_LIST_ITEMS:
            yield UNKNOWN
            return
        choices = [list(map(_as_text, self.values(part))) or [UNKNOWN] for part in parts]
        for texts in itertools.islice(itertools.product(*choices), _MAX_VALUES):
            # The size is computed before the text, because the text may be too long.
            size = sum(map(len, texts)) + len(separator) * len(texts)
            yield separator.join(texts) if size <= _MAX_TEXT_CHARS else UNKNOWN

    def _sum_values(self, left: ast.expr, right: ast.expr) -> Iterator[Value]:
        for first, second in itertools.product(self.values(left) or [UNKNOWN], self.values(right) or [UNKNOWN]):
            if isinstance(first, ListValue) and isinstance(second, ListValue):
                nodes = (*first.nodes, *second.nodes)
                yield ListValue(nodes) if len(nodes) <= _MAX_LIST_ITEMS else UNKNOWN
            elif isinstance(first, str) or isinstance(second, str):
                yield _as_text(first) + _as_text(second) if first != UNKNOWN or second != UNKNOWN else UNKNOWN
            else:
                yield UNKNOWN

    def _dictionary(self, keys: Iterable[ast.expr | None], values: Iterable[ast.expr]) -> DictValue:
        parts = []
        for key, value in zip(keys, values, strict=True):
            if key is None:
                parts.append(self._merged_dictionaries([value]))
                continue
            names = [text for text in self.values(key) if text is not None]
            known_names = [name for name in names if isinstance(name, str) and UNKNOWN not in name]
            has_unknown_name = any(isinstance(name, str) and UNKNOWN in name for name in names)
            parts.append(DictValue(tuple(DictItem(name, value, key.lineno) for name in known_names), has_unknown_name))
        return _union_of_dictionaries(parts)

    def _merged_dictionaries(self, nodes: Iterable[ast.expr]) -> DictValue:
        values = [value for node in nodes for value in self.values(node)]
        return _union_of_dictionaries(
            [value if isinstance(value, DictValue) else DictValue((), value is not None) for value in values]
        )

    def _values_of_call(self, call: ast.Call) -> Iterable[Value]:
        arguments, function = call.args, call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        called_functions = self.functions(function)
        if called_functions:
            return [
                value
                for called_function in called_functions
                for node in self.returned_nodes(called_function)
                for value in self.values(node)
            ]
        if name == "dict" and isinstance(function, ast.Name):
            keywords = [
                None if keyword.arg is None else ast.copy_location(ast.Constant(keyword.arg), keyword)
                for keyword in call.keywords
            ]
            keyword_items = self._dictionary(keywords, [keyword.value for keyword in call.keywords])
            return [_union_of_dictionaries([self._merged_dictionaries(arguments), keyword_items])]
        if name in ("str", "list", "tuple", "sorted", "set", "lit") and len(arguments) == 1:
            values = self.values(arguments[0])
            return map(_as_text, values) if name == "str" else values
        if name == "dumps" and arguments:
            return [self._as_json(value) for value in self.values(arguments[0])]
        if name == "getattr" and len(arguments) == 3:
            return [*self.values(arguments[2]), UNKNOWN]
        if name in ("get", "getenv", "pop") and arguments:
            return self._values_of_lookup(function, arguments)
        return self._values_of_method_call(function, arguments) if isinstance(function, ast.Attribute) else [UNKNOWN]

    def _values_of_lookup(self, function: ast.expr, arguments: list[ast.expr]) -> Iterable[Value]:
        default = self.values(arguments[1]) if len(arguments) > 1 else ()
        containers = self.values(function.value) if isinstance(function, ast.Attribute) else ()
        dictionaries = [dictionary for dictionary in containers if isinstance(dictionary, DictValue)]
        if not dictionaries or len(dictionaries) < len(containers):
            return [*default, UNKNOWN]
        return [
            *default,
            *(item for dictionary in dictionaries for item in self._values_at_key(dictionary, arguments[0])),
        ]

    def _values_of_method_call(self, function: ast.Attribute, arguments: list[ast.expr]) -> Iterable[Value]:
        values = self.values(function.value)
        match function.attr, arguments:
            case ("lower" | "upper" | "strip" | "casefold" as method, []):
                return [getattr(value, method)() if isinstance(value, str) else UNKNOWN for value in values]
            case "copy", []:
                return values
            case "items", []:
                return [self._item_pairs(value) for value in values]
            case "values", []:
                entries = [value for value in values if isinstance(value, DictValue) and not value.is_open]
                return [ListValue(tuple(entry.value for entry in value.items)) for value in entries] or [UNKNOWN]
            case "format", _:
                field_pattern = re.compile(r"\{[^{}]*\}")
                return [field_pattern.sub(UNKNOWN, value) if isinstance(value, str) else UNKNOWN for value in values]
            case "replace", [old, new]:
                changes = [(a, b) for a in self.texts(old) for b in self.texts(new) if UNKNOWN not in a]
                texts = [value for value in values if isinstance(value, str)]
                if not changes or not texts:
                    return [UNKNOWN]
                if any(len(text) * len(new) > _MAX_TEXT_CHARS for text in texts for _, new in changes):
                    return [UNKNOWN]
                return (text.replace(*change) for text in texts for change in changes)  # lazy: there may be many texts
            case "join", [parts]:
                lists = self.values(parts)
                return (
                    text
                    for separator in values
                    for value_list in lists
                    for text in (
                        self._joined_texts(_as_text(separator), value_list.nodes)
                        if isinstance(value_list, ListValue)
                        else [UNKNOWN]
                    )
                )
        return [UNKNOWN]

    def _item_pairs(self, value: Value) -> Value:
        if not isinstance(value, DictValue) or value.is_open:
            return UNKNOWN
        return ListValue(tuple(ast.Tuple([ast.Constant(entry.name), entry.value], ast.Load()) for entry in value.items))

    def _as_json(self, value: Value) -> str:
        self._json_budget = _MAX_TEXT_CHARS
        try:
            return json.dumps(self._plain_value(value))
        except (TypeError, ValueError, RecursionError):
            return UNKNOWN

    def _plain_value(self, value: Value) -> object:
        """Return a value without nodes. Raises ``ValueError`` if a part is unknown, or if the parts are too many or too long."""
        self._json_budget -= _MAX_TEXT_CHARS // _MAX_JSON_VALUES + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, DictValue):
            self._json_budget -= sum(len(entry.name) for entry in value.items)
        if self._json_budget < 0:
            raise ValueError("there are too many parts, or too long ones")
        if isinstance(value, ListValue):
            return [self._only_plain_value(node) for node in value.nodes]
        if isinstance(value, DictValue) and not value.is_open:
            return {entry.name: self._only_plain_value(entry.value) for entry in value.items}
        if isinstance(value, DictValue) or (isinstance(value, str) and UNKNOWN in value):
            raise ValueError("a part is not known")
        return value

    def _only_plain_value(self, node: ast.expr) -> object:
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
                return -number
        values = self.values(node)
        if len(values) != 1:
            raise ValueError("there are several values, or none")
        return self._plain_value(values[0])


def _last_name(base: ast.expr) -> str:
    """Return the name of a base class without its module and its parameters."""
    base = base.value if isinstance(base, ast.Subscript) else base
    return base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")


def _distinct_values(values: Iterable[Value]) -> Iterator[Value]:
    seen_values: dict[tuple[type, Value], None] = {}
    for value in values:
        if len(seen_values) == _MAX_VALUES:
            yield UNKNOWN
            return
        if isinstance(value, str) and len(value) > _MAX_TEXT_CHARS:
            value = UNKNOWN
        if (type(value), value) not in seen_values:
            seen_values[type(value), value] = None
            yield value


def _union_of_dictionaries(parts: Iterable[DictValue]) -> DictValue:
    dictionaries = list(parts)
    items = dict.fromkeys(entry for part in dictionaries for entry in part.items)
    return DictValue(tuple(items), any(part.is_open for part in dictionaries))


def _with_changes(entries: DictValue, added_items: DictValue, removed_names: Container[str]) -> DictValue:
    dictionary = _union_of_dictionaries([entries, added_items])
    return DictValue(tuple(entry for entry in dictionary.items if entry.name not in removed_names), dictionary.is_open)


def _as_text(value: Value) -> str:
    return UNKNOWN if isinstance(value, ListValue | DictValue | bytes) else str(value)
