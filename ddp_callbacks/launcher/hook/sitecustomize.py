"""Runs when the interpreter of a rank starts, so that an exception that ends the rank is recorded for the launcher.

The record goes to the file that TORCHELASTIC_ERROR_FILE names, in a line of its own: torch's ``@record`` writes there,
too. When the launcher asks by a signal, the stacks of all threads go to it, too. With ``--auto`` this watches the
imports, see :mod:`ddp_callbacks.auto`. The folder of this file comes first in PYTHONPATH; this removes it at once, and
runs the user's own ``sitecustomize``.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import time
from contextlib import suppress
from importlib import import_module
from types import TracebackType

_FOLDER = os.path.dirname(__file__)
_LONGEST = 2000  # characters of a message; a pipe holds 64 KiB


def _leave_no_trace() -> None:
    """Remove this folder from the paths of the program and its children, and import the user's ``sitecustomize``."""
    sys.path[:] = [entry for entry in sys.path if entry != _FOLDER]
    rest = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry != _FOLDER]
    os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    if not rest:
        del os.environ["PYTHONPATH"]
    own = sys.modules.pop("sitecustomize")
    try:
        import_module("sitecustomize")
    except ImportError as error:
        sys.modules["sitecustomize"] = own
        if error.name != "sitecustomize":
            raise


def _write_failures(path: str) -> None:
    rank = os.getpid()  # a child that was forked is another process
    written: list[BaseException] = []

    def write(exception: BaseException | None) -> None:
        if exception is None or written or os.getpid() != rank or isinstance(exception, SystemExit):
            return
        written.append(exception)
        began = time.monotonic()  # before imports, which take time: the rank that failed first is the cause
        with suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w", errors="replace") as file:
            file.write(_record(exception, began))  # fails if the node's program is gone

    def report(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
        write(exception)
        previous(kind, exception, trace)

    previous, sys.excepthook = sys.excepthook, report
    atexit.register(lambda: write(getattr(sys, "last_value", None)))  # if the program has replaced the hook


def _record(exception: BaseException, began: float) -> str:
    import json
    import traceback

    chain = [exception]
    while (before := _before(chain[0])) is not None and before not in chain:
        chain.insert(0, before)
    peer = next((each for each in chain if type(each).__name__ == "PeerError"), None)  # it only reports on other ranks
    told = [*chain[:-1][:1], *chain[-1:]] if peer is None else [peer]
    ends = [traceback.format_exception_only(each) for each in told]
    # The text of a SyntaxError begins with the code.
    lines = [next(text for text in end if text[0] != " ").rstrip("\n")[:_LONGEST] for end in ends]
    record = {"exceptions": lines, "time": began, "blames": getattr(peer, "ranks", None)}
    return "\n" + json.dumps(record, ensure_ascii=False)


def _before(exception: BaseException) -> BaseException | None:
    if exception.__cause__ is not None or exception.__suppress_context__:
        return exception.__cause__
    return exception.__context__


def _write_stacks(path: str) -> None:
    """On SIGQUIT, write the stacks of all threads to ``path``, even while this process hangs in a library's call."""
    with suppress(OSError):  # the node's program is gone, or this process belongs to another user
        faulthandler.register(signal.SIGQUIT, os.open(path, os.O_WRONLY | os.O_NONBLOCK))


def _train_on_all() -> None:
    """Watch the imports, for ``--auto``. If the package is not installed here, take the launcher's."""
    sys.path.append(root := os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER))))
    import_module("ddp_callbacks.auto").watch_imports()
    sys.path.remove(root)


if os.environ.get("DDP_CALLBACKS_AUTO") == "1":
    _train_on_all()
if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
    _write_failures(path)
if path := os.environ.pop("DDP_CALLBACKS_STACKS", ""):
    _write_stacks(path)
_leave_no_trace()
