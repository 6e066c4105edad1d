"""Runs when the interpreter of a rank starts, so that an exception that ends the rank is recorded for the launcher.

The record goes to the file that TORCHELASTIC_ERROR_FILE names, in a line of its own: torch's ``@record`` writes there,
too. When the launcher asks by a signal, the stacks of all threads go to it, too. So does the whole of a long traceback:
the terminal gets its end. If there are several processes, this watches the imports, see :mod:`ddp_callbacks.auto`. The
folder of this file comes first in PYTHONPATH; this removes it at once, and runs the user's own ``sitecustomize``.
"""

from __future__ import annotations

import faulthandler
import io
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from types import TracebackType

_FOLDER = os.path.dirname(__file__)
_LONGEST = 2000  # characters of a message; a pipe holds 64 KiB
_LINES = 40  # of a traceback on the terminal


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


def _write_failures(path: str, log: int) -> None:
    rank = os.getpid()  # a child that was forked is another process
    written: list[BaseException] = []

    def send(**what: object) -> None:
        import json

        with suppress(OSError), open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w", -1, "utf-8", "replace") as file:
            file.write("\n" + json.dumps(what, ensure_ascii=False))  # fails if the node's program is gone

    def write(exception: BaseException | None, is_over: bool) -> None:
        if exception is None or written or os.getpid() != rank or isinstance(exception, SystemExit):
            return
        written.append(exception)
        began = time.monotonic()  # before imports, which take time: the rank that failed first is the cause
        send(**_record(exception), time=began, is_over=is_over)

    def report(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
        write(exception, _is_over())
        given, sys.stderr = sys.stderr, io.StringIO()
        try:
            previous(kind, exception, trace)
        finally:
            text, sys.stderr = sys.stderr.getvalue(), given
        if given is not None:
            given.write(_shorten(text, exception, log))

    def end() -> None:
        last = getattr(sys, "last_value", None)
        write(last, True)  # the program may have replaced the hook
        if isinstance(last, KeyboardInterrupt):
            with suppress(KeyboardInterrupt):  # Python ends by SIGINT if this came last: imports make it forget
                exec("raise KeyboardInterrupt")
        if not written and os.getpid() == rank and (names := _threads_left()):
            send(kept_by=names)
        shutdown()

    previous, sys.excepthook = sys.excepthook, report
    # Python calls it first once the program is over, and waits for the program's threads there.
    shutdown, threading._shutdown = threading._shutdown, end  # type: ignore[attr-defined]


def _threads_left() -> list[str]:
    """Return the names of the threads that keep this process alive."""
    return [each.name for each in threading.enumerate() if not (each.daemon or each is threading.main_thread())]


def _is_over() -> bool:
    """Whether the exception that the hook got has left the program; a thread or a console may call the hook, too."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and frame.f_code.co_name not in ("<module>", "_run_module_as_main")


def _shorten(text: str, exception: BaseException, log: int) -> str:
    """Return the end of a traceback, from a whole frame.

    Only the last line if it tells of another rank's failure, or of a Ctrl-C while the program still imports modules.
    Long lines lose their middle. All of it goes to ``log``, a descriptor.
    """
    is_of_another = type(exception).__name__ == "PeerError"
    is_early = isinstance(exception, KeyboardInterrupt) and _imports(exception.__traceback__)
    lines = [_cut(line) for line in text.splitlines(keepends=True)]
    if len(lines) <= _LINES and "".join(lines) == text and not is_of_another and not is_early:
        return text
    with suppress(OSError):
        os.set_blocking(log, True)  # it may be more than a pipe holds
        os.write(log, text.encode(errors="replace"))
    if is_of_another:
        message = str(exception).partition("\nThis is rank ")[0]
        return f"{type(exception).__module__}.{type(exception).__name__}: {message}\n"
    if is_early:
        return lines[-1]
    if (cut := len(lines) - _LINES) <= 0:
        return "".join(lines)
    start = next((cut + number for number, line in enumerate(lines[cut:]) if line.startswith('  File "')), cut)
    return "".join([lines[0], f"  ... {start - 1} more lines are in the log\n", *lines[start:]])


def _imports(trace: TracebackType | None) -> bool:
    """Whether the traceback leads from the script into a module that is being imported."""
    import traceback

    return [frame.f_code.co_name for frame, _ in traceback.walk_tb(trace)].count("<module>") > 1


def _record(exception: BaseException) -> dict[str, object]:
    import traceback

    chain = [exception]
    while (before := _before(chain[0])) is not None and before not in chain:
        chain.insert(0, before)
    peer = next((each for each in chain if type(each).__name__ == "PeerError"), None)  # it only reports on other ranks
    told = [*chain[:-1][:1], *chain[-1:]] if peer is None else [peer]
    ends = [traceback.format_exception_only(each) for each in told]
    # The text of a SyntaxError begins with the code.
    lines = [_cut(next(text for text in end if text[0] != " ").rstrip("\n")) for end in ends]
    return {"exceptions": lines, "blames": getattr(peer, "ranks", None)}


def _cut(text: str) -> str:
    """Return a message without its middle if it is long: it may hold another traceback, which ends with the reason."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...\n...{text[-_LONGEST // 2 :]}"


def _before(exception: BaseException) -> BaseException | None:
    if exception.__cause__ is not None or exception.__suppress_context__:
        return exception.__cause__
    return exception.__context__


def _write_stacks(path: str) -> int:
    """On SIGQUIT, write the stacks of all threads to ``path``, even while this process hangs in a library's call."""
    log = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    faulthandler.register(signal.SIGQUIT, log)
    known = signal.getsignal  # it would say SIG_DFL, which a Trainer would set again after each fit

    def getsignal(number: int) -> object:
        handler = known(number)
        return None if number == signal.SIGQUIT and handler is signal.SIG_DFL else handler

    signal.getsignal = getsignal  # type: ignore[assignment]
    return log


def _watch_imports() -> None:
    """Let the script train on all processes, or be told. If the package is not installed here, take the launcher's."""
    sys.path.append(root := os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER))))
    import_module("ddp_callbacks.auto").watch_imports()
    sys.path.remove(root)


on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # an early Ctrl-C shows nobody a traceback of this file
is_told = os.environ.get("RANK") == "0" and os.environ.get("DDP_CALLBACKS_INDEPENDENT") != "1"
if os.environ.get("DDP_CALLBACKS_AUTO") == "1" or (is_told and os.environ.get("WORLD_SIZE") != "1"):
    _watch_imports()
with suppress(OSError, KeyError):  # the node's program is gone, or this process belongs to another user
    _write_failures(os.environ["TORCHELASTIC_ERROR_FILE"], _write_stacks(os.environ.pop("DDP_CALLBACKS_STACKS")))
signal.signal(signal.SIGINT, on_interrupt)
_leave_no_trace()
