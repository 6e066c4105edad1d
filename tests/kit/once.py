"""Compute a result that several tests share only once, even if that fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def once(function: Function) -> Function:
    """Like ``functools.cache``, but keep an exception, too: the next test fails at once, with the same one."""

    @functools.cache
    def ended(*args: Any, **options: Any) -> tuple[Any, Exception | None]:
        try:
            return function(*args, **options), None
        except Exception as error:
            return None, error

    @functools.wraps(function)
    def shared(*args: Any, **options: Any) -> Any:
        result, error = ended(*args, **options)
        if error is not None:
            raise error
        return result

    return shared  # type: ignore[return-value]
