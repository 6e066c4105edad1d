"""Replace methods and attributes of another library's objects, for a time or for good."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any


class Replaced:
    """A method of one object, replaced until :meth:`undo`. Copies and pickles of the object have the class's method.

    Several may replace the same method, and be undone in any order.

    Attributes:
        before: What the object itself had under the name; ``None``: nothing, the class has the method.
        function: The ``function`` that was passed; ``None`` after :meth:`undo`.

    Args:
        owner: The object.
        name: The method's name.
        function: Is called instead, with the original method and then the arguments.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self.before = vars(owner).get(name)
        self._method = getattr(owner, name)
        self.function: Callable[..., Any] | None = function
        functools.update_wrapper(self, self._method, updated=())  # it may be a Replaced, too
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            return self._method(*args, **kwargs)
        return self.function(self._method, *args, **kwargs)

    def undo(self) -> None:
        """Give the object its original method back. Once is enough."""
        self.function = None
        found = vars(self._owner).get(self._name)
        while isinstance(found, Replaced) and found.function is None:
            found = found.before
        if found is None:
            vars(self._owner).pop(self._name, None)
        else:
            setattr(self._owner, self._name, found)

    def __reduce__(self) -> Any:
        return getattr, (self._owner, self._name)


class Replacements(contextlib.ExitStack):
    """Replaced methods and attributes, and other things to undo, in :meth:`close`."""

    def replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method; see :class:`Replaced`."""
        self.callback(Replaced(owner, name, function).undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def before(self, owner: Any, name: str, first: Callable[[], None]) -> None:
        """Let a method call ``first`` before it does its work."""

        def both(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            first()
            return method(*args, **kwargs)

        self.replace(owner, name, both)

    def replace_once(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace a method for its next call."""

        def call(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            replaced.undo()
            return function(method, *args, **kwargs)

        replaced = Replaced(owner, name, call)
        self.callback(replaced.undo)
