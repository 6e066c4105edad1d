"""Exceptions, warnings and notices of the library.

::

    DDPCallbacksError
    ├── ConfigurationError (ValueError)     a setting is invalid; the message has the rule, the value and the remedy
    │   └── RendezvousError                 the processes could not meet within the timeout
    ├── MismatchError (ValueError)          the ranks hold different models, settings, data or metrics
    ├── PeerError (RuntimeError)            another rank failed, died or went silent
    ├── CheckpointError (RuntimeError)      a checkpoint cannot be written or read, or belongs to another run
    └── SkippedBatchError (RuntimeError)    a batch has a loss on some ranks only, or no batch of an epoch has one

    NonFiniteLossWarning (RuntimeWarning)   the first loss that is NaN or infinite

    Preempted (SystemExit)                  all ranks were asked to stop, and the checkpoint is written
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from types import FrameType
from typing import Any

EXIT_PREEMPTED = 75
"""The exit code of a process that was asked to stop and has written a checkpoint (EX_TEMPFAIL of sysexits.h)."""

_HOSTS = ("lightning", "pytorch_lightning", "torchbearer", "torchmetrics")
_AROUND = ("contextlib", "functools", "importlib", "runpy", "tqdm", "rich")  # what a loop or a script may run in
_OURS = frozenset(("ddp_callbacks", "torch", *_HOSTS, *_AROUND))
_report = os.environ.get("DDP_CALLBACKS_REPORT")  # the pipe to ddprun; the recorder of times takes the variable away
_MOST = 1000  # characters of a warning for ddprun; a pipe takes 4096 bytes whole or not at all
_log = logging.getLogger("ddp_callbacks")
_showing = RLock()


class DDPCallbacksError(Exception):
    """Base class of every exception that this library raises on purpose."""


class ConfigurationError(DDPCallbacksError, ValueError):
    """A setting, argument or environment variable is invalid."""


class RendezvousError(ConfigurationError):
    """The processes could not meet: nothing answers at the address, or a rank never joined."""


class MismatchError(DDPCallbacksError, ValueError):
    """The ranks disagree about something that must be equal. Every rank raises it with the same text."""


class PeerError(DDPCallbacksError, RuntimeError):
    """Another rank raised, died, left or went silent. The message names the rank and its host.

    Attributes:
        ranks: The global ranks that the error is about, usually one; empty if unknown.
    """

    def __init__(self, message: str = "", *ranks: int) -> None:
        super().__init__(message)
        self.ranks = ranks


class CheckpointError(DDPCallbacksError, RuntimeError):
    """A checkpoint cannot be written or read, or belongs to another job or run. Every rank raises it."""


class SkippedBatchError(DDPCallbacksError, RuntimeError):
    """Some ranks skip a batch and others do not, or all batches of an epoch were skipped."""


class Preempted(SystemExit):
    """All ranks were asked to stop and have written a checkpoint. Ends the process with :data:`EXIT_PREEMPTED`.

    It is no ``Exception``, so programs that go on after errors still stop. Every rank raises it.

    Args:
        reason: Who asked to stop, and how.
        path: The path of the checkpoint.
    """

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.reason, self.path = reason, path

    def __str__(self) -> str:
        return f"stopped by {self.reason}; {self.path} is written, from which the next run resumes"


class NonFiniteLossWarning(RuntimeWarning):
    """The loss of a rank is NaN or infinite. Only the first such rank warns, once per run."""


def say(text: str, level: int = logging.INFO) -> None:
    """Print to standard error. If the program logs ``level``, or has set the logger ``ddp_callbacks``, log instead.

    A root logger of level ``WARNING`` may be a package's: it does not hide the text.
    """
    is_set = _log.level or _log.manager.disable
    if _log.hasHandlers() and (is_set or _log.isEnabledFor(level)):
        _log.log(level, text)
    else:
        print(f"ddp_callbacks: {text}", file=sys.stderr)


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and show as its place the innermost line of the user's: not of this library, torch or a host.

    Filters find it by the module that calls this. ddprun shows it, too, if it shows no rank that has the same.
    """
    frame, module = sys._getframe(), sys._getframe(1).f_globals["__name__"]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    with _telling_ddprun(text):
        warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def frames() -> Iterator[FrameType]:
    """Yield the caller's frame, its caller's and so on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def reader_of(name: str) -> str | None:
    """Return the code that reads a property ``name``, which calls this; ``None`` if it is ours or a host's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name == name:
        frame = frame.f_back
    code, root = frame.f_code, frame.f_globals.get("__name__", "").partition(".")[0]
    return None if root in _OURS else f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


def is_called_by_us(depth: int = 1) -> bool:
    """Whether the code that calls the caller of this is ours, or, with a greater ``depth``, that caller's caller."""
    return str(sys._getframe(depth + 1).f_globals.get("__name__")).startswith("ddp_callbacks.")


@contextmanager
def _telling_ddprun(text: str) -> Iterator[None]:
    """Inside, tell ddprun that the warning ``text`` is shown, unless a filter of the program suppresses it."""
    if not _report:
        yield
        return

    def show_and_tell(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        show(message, category, filename, lineno, file, line)
        if str(message) == text:
            told = {"warning": f"{filename}:{lineno}: {category.__name__}: {text}"[:_MOST]}
            with suppress(OSError), open(os.open(_report, os.O_WRONLY | os.O_NONBLOCK), "wb", 0) as pipe:
                pipe.write(json.dumps(told, ensure_ascii=False).encode(errors="replace") + b"\n")  # if anybody reads

    with _showing:
        show, warnings.showwarning = warnings.showwarning, show_and_tell
        try:
            yield
        finally:
            warnings.showwarning = show
