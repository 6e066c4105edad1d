"""Find the variables of a program whose values may reach an exchange between the processes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_Flow = tuple[set[str], set[str]]  # names that get a value, and names that this is computed from
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FILLS = {"append", "appendleft", "extend", "add", "update"}  # methods by which a loop collects
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_TAKES_ALL = {"sum", "max", "min", "list", "tuple", "set", "sorted", "mean", "fmean", "stack", "cat"}


def gathered_in(trees: Iterable[ast.AST], exchanges: Iterable[str], results_of: Iterable[str]) -> set[str]:
    """Return the names of variables that are passed to an exchange, or to what calls one, in any way, or come from one.

    A function's own variable is ``"function.name"``; all others, and attributes, have their plain name. A comprehension
    is ``"line 7"``.

    Args:
        trees: The program's files.
        exchanges: Names of functions and methods that exchange.
        results_of: Those whose results are of all processes.
    """
    places = [place for tree in trees for place in _walk(tree, ())]
    functions = {place.node.name: place.node for place in places if isinstance(place.node, _Function)}
    known = _callers(functions, set(exchanges))
    found, flows = set[str](), list[_Flow]()
    for place in places:
        flows += place.flows(functions)
        if isinstance(place.node, ast.Call) and _name_of(place.node) in known:
            found |= place.names(*place.node.args, *place.node.keywords)
    while new := {name for targets, sources in flows if targets & found for name in sources} - found:
        found |= new
    made, results = [flow for place in places for flow in place.made()], _callers(functions, set(results_of))
    while new := {name for targets, sources in made if sources & results for name in targets} - results:
        results |= new
    return found | results


def comprehensions_in(trees: Iterable[ast.AST]) -> set[str]:
    """Return the comprehensions that make one value of all: lists and the like, and the generators of sums."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name_of(node) in _TAKES_ALL]
    given = [each for call in calls for each in call.args if isinstance(each, ast.GeneratorExp)]
    made = [node for node in nodes if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp)]
    return {f"line {each.lineno}" for each in (*given, *made)}


class _Place(NamedTuple):
    """A node of a program, with the names of the functions around it, the innermost last, and their variables."""

    node: ast.AST
    scopes: tuple[tuple[str, set[str]], ...]

    def names(self, *nodes: ast.AST) -> set[str]:
        """Return the names of variables, and of attributes, in expressions at this place."""
        parts = [each for node in nodes for each in ast.walk(node)]
        variables = {self._full_name(each.id) for each in parts if isinstance(each, ast.Name) and each.id != "self"}
        made = {f"line {each.lineno}" for each in parts if isinstance(each, _Comprehension)}
        return variables | made | {each.attr for each in parts if isinstance(each, ast.Attribute)}

    def _full_name(self, name: str) -> str:
        return next((f"{function}.{name}" for function, own in reversed(self.scopes) if name in own), name)

    def made(self) -> Iterator[_Flow]:
        match self.node:
            case ast.Assign(targets=targets, value=value):
                yield self.names(*targets), self.names(value)
            case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
                yield self.names(target), self.names(value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield self.names(target), self.names(value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                yield self.names(target), self.names(value)
            case ast.Return(value=ast.expr() as value) if self.scopes:
                yield {self.scopes[-1][0]}, self.names(value)
            case ast.Call(func=ast.Attribute(attr=filling) as function) as call if filling in _FILLS:
                yield self.names(function.value), self.names(call)

    def flows(self, functions: dict[str, _Function]) -> Iterator[_Flow]:
        yield from self.made()
        if isinstance(self.node, ast.Call) and (called := functions.get(_name_of(self.node))) is not None:
            for parameter, value in _arguments(self.node, called):
                given, parameters = self.names(value), {f"{called.name}.{parameter}"}
                yield parameters, given
                yield given, parameters  # both may be the same object


def _walk(node: ast.AST, scopes: tuple[tuple[str, set[str]], ...]) -> Iterator[_Place]:
    yield _Place(node, scopes)
    if isinstance(node, _Function):
        scopes = (*scopes, (node.name, _variables_of(node)))
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, scopes)


def _variables_of(function: _Function) -> set[str]:
    found, foreign, pending = set(_parameters(function)), set[str](), list[ast.AST](function.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.Global | ast.Nonlocal):
            foreign.update(node.names)
        if not isinstance(node, _Function):
            pending += ast.iter_child_nodes(node)
    return found - foreign


def _parameters(function: _Function) -> list[str]:
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _arguments(call: ast.Call, called: _Function) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function, with what a call gives for them."""
    parameters = _parameters(called)
    is_method = isinstance(call.func, ast.Attribute) and parameters[:1] == ["self"]
    yield from zip(parameters[is_method:], call.args, strict=False)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg is not None)


def _callers(functions: dict[str, _Function], exchanges: set[str]) -> set[str]:
    """Return these functions, and all that call them."""
    calls = {
        name: {_name_of(each) for each in ast.walk(function) if isinstance(each, ast.Call)}
        for name, function in functions.items()
    }
    while new := {name for name, called in calls.items() if called & exchanges} - exchanges:
        exchanges = exchanges | new
    return exchanges


def _name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
