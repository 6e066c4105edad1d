"""``python`` as commands find it, but forked from a process that has imported what takes long: 0.05 s for 1 to 5 s.

:func:`make_wrappers` writes ``python``, ``torchrun`` and ``ddprun`` into a folder; each sends what it was given to the
server, see :mod:`warm_client`. The server's child takes on the arguments, the working directory, the environment and
the open descriptors, and runs the program as a fresh interpreter does. What cannot be imitated (``-I``, ``-E``, another
user, a module that would hide one that is imported already) is left to the real interpreter.

It differs in this: the process is the server's child, modules are there that the program has not imported (and whatever
their import would have warned of is past), and all processes hash strings alike. So there are tests that start the
real one: of complete imports, of warnings, of processes that are killed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import linecache
import marshal
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import warm_client

HERE = Path(__file__).parent
SERVER = "server"  # the name of its socket
WRAPPERS = {"python": [], "python3": [], "torchrun": ["torchrun"], "ddprun": ["ddprun"]}
# Variables that modules, or the interpreter itself, have read when they were imported.
READ_AT_IMPORT = ("LANG", "LC_", "LD_PRELOAD", "MKL_", "MPL", "PYTHON", "TORCHDYNAMO_", "TORCH_LOGS", "TQDM_")
_UNDERSTOOD = {"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE"}
_PR_SET_PDEATHSIG = 1

Program = Callable[[], None]


# --- the wrappers -----------------------------------------------------------------------------------------------------


def make_wrappers(folder: Path) -> None:
    """Executables in ``folder``, which look for the server there."""
    for name, words in WRAPPERS.items():
        path = folder / name
        path.write_text(_wrapper(str(folder / SERVER), [str(Path(sys.executable).parent / word) for word in words]))
        path.chmod(0o755)


def _wrapper(server: str, words: list[str]) -> str:
    python = sys.executable
    if len(python) > 100 or " " in python:  # more than the kernel takes there
        return f'#!/bin/sh\nexec {shlex.join([python, *words])} "$@"\n'
    return "\n".join(
        [
            f"#!{python} -SE",
            "import sys",
            f"sys.path[0] = {str(HERE)!r}",
            "import warm_client",
            f"warm_client.main({python!r}, {server!r}, {words!r} + sys.argv[1:])",
            "",
        ]
    )


# --- the server -------------------------------------------------------------------------------------------------------


def listen(wrappers: Path) -> socket.socket:
    """Where the wrappers connect to; they wait for :meth:`Server.serve`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(wrappers / SERVER))
    listener.listen(128)
    return listener


class Server:
    """Forks a child for each wrapper that connects, and tells it how the child has ended."""

    def __init__(self, listener: socket.socket, fresh: Fresh) -> None:
        self._listener = listener
        self._fresh = fresh
        self._poll = select.poll()
        self._pids: dict[int, int] = {}  # by a descriptor that becomes readable when the process ends
        self._wrappers: dict[int, socket.socket] = {}  # by process id

    def serve(self) -> Program | None:
        """Until SIGTERM, or until the process that has forked this one ends. Returns in a child, with its program."""
        parent = os.pidfd_open(os.getppid())
        asked, ask = os.pipe()
        signal.signal(signal.SIGTERM, lambda *_: os.write(ask, b"\0"))
        for descriptor in (self._listener.fileno(), parent, asked):
            self._poll.register(descriptor, select.POLLIN)
        self._fresh.remember()
        gc.collect()
        gc.freeze()  # a collection in a child would write to what they share
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if ready & {parent, asked}:
                self._kill_all()
                return None
            for descriptor in ready & set(self._pids):
                self._report(descriptor)
            for pid, connection in list(self._wrappers.items()):
                if connection.fileno() in ready:
                    self._kill(pid)
            if self._listener.fileno() in ready:  # last: a number that was closed is given again
                connection, _ = self._listener.accept()
                pid = os.fork()
                if pid == 0:
                    return self._become(connection)
                self._watch(pid, connection)

    def _watch(self, pid: int, connection: socket.socket) -> None:
        ends = os.pidfd_open(pid)
        self._pids[ends] = pid
        self._wrappers[pid] = connection
        self._poll.register(ends, select.POLLIN)
        self._poll.register(connection.fileno(), 0)  # when it is closed; the child reads what comes

    def _report(self, ends: int) -> None:
        pid = self._pids.pop(ends)
        self._poll.unregister(ends)
        os.close(ends)
        status = os.waitpid(pid, 0)[1]
        if pid in self._wrappers:
            _tell(self._wrappers[pid].fileno(), warm_client.STATUS, status)
            self._forget(pid)

    def _kill(self, pid: int) -> None:
        """Its wrapper is gone."""
        self._forget(pid)
        _kill(pid)

    def _forget(self, pid: int) -> None:
        connection = self._wrappers.pop(pid)
        self._poll.unregister(connection.fileno())
        connection.close()

    def _kill_all(self) -> None:
        for pid in self._pids.values():
            _kill(pid)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _become(self, connection: socket.socket) -> Program:
        """In the child: take the place of the wrapper."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setpgid(0, 0)
        request, received = _receive(connection)
        for held in (self._listener, *self._wrappers.values()):
            held.detach()  # or their end would close a descriptor that is another's by then
        channel = connection.detach()
        try:
            command = self._fresh.command(request, received)
        except CannotImitate as error:
            self._fresh.note_cold_start(error)
            _tell(channel, warm_client.COLD_START, 0)
            os._exit(0)
        channel = _take_on_descriptors(received, request["descriptors"], channel)
        program = self._fresh.become(command, request)
        _tell(channel, warm_client.PROCESS, os.getpid())
        os.close(channel)
        _take_on_signals(request)
        return program


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it has not come to make its group; nobody has waited for it yet


def _tell(channel: int, kind: bytes, number: int) -> None:
    try:
        os.write(channel, kind + number.to_bytes(4, "little"))
    except OSError:
        pass  # the wrapper is gone


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    head, received, _, _ = socket.recv_fds(connection, 4, warm_client.LARGEST)
    size, data = int.from_bytes(head, "little"), b""
    while len(head) == 4 and len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    if len(head) < 4 or len(data) < size:
        os._exit(0)  # the wrapper is gone
    return marshal.loads(data), received


def _take_on_descriptors(received: list[int], numbers: list[int], channel: int) -> int:
    """Give them the numbers that they have in the wrapper; close all others but ``channel``, whose number changes."""
    above = max([2, *numbers]) + 1
    channel, *moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in (channel, *received)]
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (channel, *moved):
            with contextlib.suppress(OSError):  # that of the listing
                os.close(int(name))
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    return channel


def _take_on_signals(request: dict[str, Any]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else usual)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


# --- the command line -------------------------------------------------------------------------------------------------


class CannotImitate(Exception):
    """The real interpreter must do it."""


@dataclass
class Command:
    """What a command line of ``python`` says: ``kind`` is ``-c``, ``-m``, ``-`` or empty for a script."""

    kind: str
    what: str
    argv: list[str]
    flags: set[str]
    warnings: list[str]


def parse(words: list[str]) -> Command:
    """As Python reads it; only options that can be taken on in a process that runs already."""
    flags: set[str] = set()
    filters: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        letters = rest.pop(0)[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "PBqu":
                flags.add(letter)
                continue
            if letter not in "cmW" or not (letters or rest):
                raise CannotImitate(f"the option -{letter}")
            value, letters = letters or rest.pop(0), ""
            if letter != "W":
                return Command(f"-{letter}", value, [f"-{letter}", *rest], flags, filters)
            filters.append(value)
    if not rest or rest[0] == "-":
        return Command("-", "", rest or [""], flags, filters)
    return Command("", rest[0], rest, flags, filters)


# --- a fresh interpreter ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let OpenMP take one where it is loaded now. With more threads than cores they spend their time waiting."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


class Fresh:
    """What a process had when Python had started, and what it is given in place of that."""

    def __init__(self, wrappers: Path) -> None:
        """Before anything else is imported."""
        self._wrappers = wrappers
        self._environ = dict(os.environ)
        self._path = [entry for entry in sys.path[1:] if entry not in _search_path(self._environ)]
        self._filters = list(warnings.filters)
        self._ours: list[str] = []

    def remember(self) -> None:
        """The modules that are the server's own; to look through all costs each child 20 ms."""
        files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
        self._ours = [name for name, path in files.items() if path.startswith(f"{HERE}{os.sep}")]

    def note_cold_start(self, error: CannotImitate) -> None:
        with (self._wrappers / "cold-starts").open("a") as file:
            file.write(f"{error}\n")

    def command(self, request: dict[str, Any], received: list[int]) -> Command:
        """What is to run; goes to its working directory.

        Raises:
            CannotImitate: The real interpreter must do it.
        """
        command = parse([os.fsdecode(word) for word in request["words"]])
        environ = _decoded(request["environ"])
        if request["place"] != warm_client.place():
            raise CannotImitate("another user, or other namespaces")
        for name in {*environ, *self._environ} - _UNDERSTOOD:
            if name.startswith(READ_AT_IMPORT) and environ.get(name) != self._environ.get(name):
                raise CannotImitate(f"the variable {name}")
        os.chdir(request["cwd"])
        if command.kind == "" and (command.what.endswith(".pyc") or not os.path.isfile(command.what)):
            raise CannotImitate(f"{command.what} is no file of source code")
        if command.kind == "-" and os.isatty(dict(zip(request["descriptors"], received, strict=True)).get(0, -1)):
            raise CannotImitate("a terminal")
        for entry in (*_first_of_path(command, environ), *_search_path(environ)):
            _refuse_to_hide(entry or os.getcwd())
        return command

    def become(self, command: Command, request: dict[str, Any]) -> Program:
        """Let nothing of the server be seen; what runs the program."""
        environ = _decoded(request["environ"])
        os.umask(request["umask"])
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, request["cores"])
        os.environ.clear()
        os.environ.update(environ)
        time.tzset()
        executable = str(self._wrappers / "python")
        sys.executable = executable
        sys.argv[:] = command.argv
        sys.orig_argv[:] = [executable, *(os.fsdecode(word) for word in request["words"])]
        sys.path[:] = [*_first_of_path(command, environ), *_search_path(environ), *self._path]
        sys.dont_write_bytecode = "B" in command.flags or bool(environ.get("PYTHONDONTWRITEBYTECODE"))
        self._filter_warnings([*filter(None, environ.get("PYTHONWARNINGS", "").split(",")), *command.warnings])
        _open_streams("u" in command.flags or bool(environ.get("PYTHONUNBUFFERED")))
        _forget(self._ours, executable)
        _set_threads(environ.get("OMP_NUM_THREADS"))
        return _program(command)

    def _filter_warnings(self, options: list[str]) -> None:
        """Behind the filters that modules have added in front when they were imported."""
        added = warnings.filters[: len(warnings.filters) - len(self._filters)]
        sys.warnoptions[:] = options
        if options:
            warnings.filters[:] = self._filters  # type: ignore[index]
            warnings._processoptions(options)  # type: ignore[attr-defined]
            warnings.filters[:0] = added  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


def _set_threads(wanted: str | None) -> None:
    """OpenMP has read the variable in the server, see :func:`one_thread`."""
    first = (wanted or "").partition(",")[0]
    threads = int(first) if first.isdigit() else len(os.sched_getaffinity(0))
    if threads == 1:
        return
    import threadpoolctl
    import torch

    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(threads)


def _decoded(environ: dict[bytes, bytes]) -> dict[str, str]:
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}


def _search_path(environ: dict[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _first_of_path(command: Command, environ: dict[str, str]) -> list[str]:
    if "P" in command.flags or environ.get("PYTHONSAFEPATH"):
        return []
    if command.kind == "":
        return [os.path.dirname(os.path.realpath(command.what))]
    return [os.getcwd() if command.kind == "-m" else ""]


def _refuse_to_hide(folder: str) -> None:
    """A module there would be found before one of the same name that has been imported already."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        stem, dot, _ = name.partition(".")
        path = os.path.join(folder, name, *([] if dot else ["__init__.py"]))
        if stem in sys.modules and name.endswith((stem, ".py", ".so")) and os.path.isfile(path):
            known = getattr(sys.modules[stem], "__file__", None)
            if known is None or os.path.realpath(known) != os.path.realpath(path):
                raise CannotImitate(f"{path} is another module than the one that is imported")


def _forget(ours: list[str], executable: str) -> None:
    """Modules of the server, and what others keep that belongs to one process."""
    for name in ours:
        del sys.modules[name]
    importlib.invalidate_caches()
    linecache.clearcache()
    tempfile.tempdir = None
    if multiprocessing := sys.modules.get("multiprocessing"):
        multiprocessing.process.ORIGINAL_DIR = os.getcwd()
        multiprocessing.current_process().authkey = os.urandom(32)
        multiprocessing.set_executable(executable)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _open_streams(unbuffered: bool) -> None:
    """As Python does when it starts."""
    before = {stream: name for name in ("stdout", "stderr") if (stream := getattr(sys, name)) is not None}
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(descriptor, name, unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    logging = sys.modules["logging"]
    for known in logging._handlerList:
        handler = known()
        if isinstance(handler, logging.StreamHandler) and handler.stream in before:
            handler.setStream(getattr(sys, before[handler.stream]))


def _stream(descriptor: int, name: str, unbuffered: bool) -> io.TextIOWrapper | None:
    try:
        os.fstat(descriptor)
    except OSError:
        return None
    reads, was = name == "stdin", getattr(sys, f"__{name}__")
    binary: Any = open(descriptor, "rb" if reads else "wb", 0 if unbuffered and not reads else -1, closefd=False)
    getattr(binary, "raw", binary).name = f"<{name}>"
    stream = io.TextIOWrapper(
        binary,
        was.encoding,
        was.errors,
        newline=None if reads else "\n",
        line_buffering=not unbuffered and (os.isatty(descriptor) or name == "stderr"),
        write_through=unbuffered,
    )
    stream.mode = "r" if reads else "w"  # type: ignore[attr-defined]
    return stream


def _program(command: Command) -> Program:
    """In a ``__main__`` of its own."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    sys.modules["__main__"] = main
    if command.kind == "-m":
        _forget_module(command.what)
        return lambda: runpy._run_module_as_main(command.what)  # type: ignore[attr-defined]
    if command.kind == "-c":
        return lambda: _exec(command.what, "<string>", main)
    if command.kind == "-":
        main.__file__, main.__cached__ = "<stdin>", None  # type: ignore[attr-defined]
        return lambda: _exec(sys.stdin.buffer.read(), "<stdin>", main)
    path = os.path.join(os.getcwd(), command.what)
    main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return lambda: _exec(Path(path).read_bytes(), path, main)


def _exec(source: str | bytes, name: str, main: types.ModuleType) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _forget_module(name: str) -> None:
    """So that it runs as ``__main__`` as if nobody had imported it."""
    if name in sys.modules:
        package, _, last = name.rpartition(".")
        del sys.modules[name]
        if package:
            vars(sys.modules[package]).pop(last, None)


# --- the end ----------------------------------------------------------------------------------------------------------


class Ending:
    """Ends a child as the interpreter does, up to its exit handlers; to take all apart would cost 0.3 to 4 s.

    Exit handlers run in reverse order, so this one must come before any other. That is why this module does not import
    ``multiprocessing`` and ``logging``, which add some.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        self._streams = (sys.stdout, sys.stderr)
        atexit.register(self._end)

    def run(self, program: Program) -> None:
        """SystemExit goes on to the interpreter: it prints what it has to say, and some hooks tell its look at it."""
        self._code = 0
        try:
            program()
        except SystemExit as error:
            self._code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
            raise
        except BaseException as error:
            sys.excepthook(type(error), error.with_traceback(_without_ours(error.__traceback__)), error.__traceback__)
            self._code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            raise SystemExit(1) from None

    def _end(self) -> None:
        if self._code is None:
            return  # in the server
        vanish(self._code, self._streams)


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def vanish(code: int, streams: tuple[Any, ...] = ()) -> NoReturn:
    """After the exit handlers: lose nothing that was written, and be gone."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and sys.modules["mpi4py"].rc.finalize is not False:
        mpi.Finalize()  # Lightning has asked MPI whether it started the job; what that left in /dev/shm goes
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            code = 120
            print(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}", file=sys.stderr)
        except (ValueError, AttributeError):
            pass  # closed, or none
    for stream in (*streams, *_open_files()):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if mpi and "PMI_FD" in os.environ:
        ctypes.PyDLL(None).exit(code)  # MPICH takes its leave of mpiexec in an exit handler of C
    os._exit(code)


def _open_files() -> list[Any]:
    """What a script has opened and left to be closed with it."""
    return [each for each in gc.get_objects() if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)]
