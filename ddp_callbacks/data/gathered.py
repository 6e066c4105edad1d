"""Find the variables of a program whose values may reach an exchange between the processes."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

_Flow = tuple[set[str], set[str]]  # names that get a value, and names that this is computed from
FILLS = {"append", "appendleft", "extend", "add", "update"}
"""Methods by which a loop collects."""


def gathered_in(trees: Iterable[ast.AST], exchanges: Iterable[str]) -> set[str]:
    """Return the names of variables that are passed to these functions, or to what calls them, in any way.

    Names are not told apart by where they are defined, so that rather too many are found.

    Args:
        trees: The program's files.
        exchanges: Names of functions and methods.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    known = _callers(nodes, set(exchanges))
    calls = [node for node in nodes if isinstance(node, ast.Call) and _name_of(node) in known]
    found = {name for call in calls for given in [*call.args, *call.keywords] for name in _names(given)}
    flows = [flow for node in nodes for flow in _flows(node)]
    while new := {name for targets, sources in flows if targets & found for name in sources} - found:
        found |= new
    return found


def _callers(nodes: list[ast.AST], exchanges: set[str]) -> set[str]:
    """Return these functions, and all that call them."""
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    calls = {function.name: set(map(_name_of, _calls_in(function))) for function in functions}
    while new := {name for name, called in calls.items() if called & exchanges} - exchanges:
        exchanges = exchanges | new
    return exchanges


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Call))


def _name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _flows(node: ast.AST) -> Iterator[_Flow]:
    match node:
        case ast.Assign(targets=targets, value=value):
            yield set().union(*map(_names, targets)), _names(value)
        case ast.AugAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            yield _names(target), _names(value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield _names(target), _names(value)
        case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
            yield _names(target), _names(value)
        case ast.Call(func=ast.Attribute(value=owner, attr=attr)) as call if attr in FILLS:
            yield _names(owner), _names(call)
        case ast.FunctionDef(name=name):
            for each in ast.walk(node):
                if isinstance(each, ast.Return) and each.value is not None:
                    yield {name}, _names(each.value)


def _names(node: ast.AST) -> set[str]:
    """Return the names of variables, and of attributes, in an expression."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} | {
        each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)
    }
