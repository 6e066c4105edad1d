"""A write beside training: the thread that writes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ddp_callbacks.errors import say
from ddp_callbacks.process_group.presence import OWN_THREADS


class BackgroundWriter:
    """At most one write at a time, in a thread that the interpreter waits for at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the thread; :meth:`wait` comes first. Doesn't block."""
        self._thread = threading.Thread(target=self._run, args=(action,), name=f"{OWN_THREADS} checkpoint")
        self._thread.start()

    def join(self) -> None:
        """Block until no write is under way."""
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        """Block until the last write is complete.

        Raises:
            Exception: What it has raised; once.
        """
        self.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # wait raises it, but that may be an hour later
            self._failure = error
            say(f"{error}", logging.ERROR)
