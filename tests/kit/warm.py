"""A process that has imported what takes long, from which ranks and commands are forked: 0.05 s for 1 to 5 s.

:class:`Server` writes ``python``, ``torchrun`` and ``ddprun`` into a folder; these ask for a child in their place, see
:mod:`kit.wrapper`. What a child cannot imitate (most options of Python, other namespaces, a module that would hide
one that is imported already) is left to the real interpreter, with the reason in the file "cold-starts".

A child differs in this: it is the server's child, modules are there that it has not imported, and all hash strings
alike. So there are tests that start the real one: of complete imports, of warnings, of what users see.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import importlib.machinery
import io
import marshal
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kit import wrapper
from kit.paths import KIT, TESTS

# Imported by the first optimizer (dynamo), by ROC AUC (scikit-learn) and by the modules of the tests.
PRELOADED = (
    "torch._dynamo",
    "sklearn.metrics",
    "ddp_callbacks.torchbearer",
    "lightning.pytorch",
    "ddp_callbacks.lightning",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "sklearn.datasets",
    "kit.ranks",  # and pytest
)
# Variables that modules, or the interpreter itself, have read when they were imported.
READ_AT_IMPORT = ("LANG", "LC_", "LD_PRELOAD", "MKL_", "MPL", "PYTHON", "TORCHDYNAMO_", "TORCH_LOGS", "TQDM_")
_UNDERSTOOD = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
_PR_SET_PDEATHSIG = 1


# --- in the tests -----------------------------------------------------------------------------------------------------


class Server:
    """It lives until :meth:`close`, or until the tests end in another way; its children die with it.

    Attributes:
        folder: Of the wrappers, to be put on a PATH.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self._socket = str(self.folder / "server")
        self._cold_starts = 0
        commands = Path(sys.executable).parent
        for name, words in {"python": [], "python3": [], "torchrun": ["torchrun"], "ddprun": ["ddprun"]}.items():
            client = [sys.executable, "-IS", str(KIT / "wrapper.py"), self._socket]
            path, command = self.folder / name, [*client, *(str(commands / word) for word in words)]
            path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
            path.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._socket)
            listener.listen(128)
            program = f"import sys; sys.path[0] = {str(TESTS)!r}; from kit import warm; warm.main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(self.folder), str(listener.fileno())],
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # more threads than cores spend their time waiting
                stdin=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        self.pid = self._process.pid

    def fork(self, words: list[str], folder: Path, environ: dict[str, str], streams: list[int], whole: bool) -> Child:
        """Start ``python WORDS`` with these for standard input, output and error; see :class:`Ending` for ``whole``."""
        connection = wrapper.connect(self._socket)
        assert connection is not None, "the fork server has died"
        descriptors = dict(enumerate(streams))
        kind, pid = wrapper.ask(connection, words, str(folder), environ, descriptors, [int(signal.SIGPIPE)], whole)
        assert kind == wrapper.STARTED, self.cold_starts()
        connection.sendall(b"\n")
        return Child(pid, connection)

    def cold_starts(self) -> list[str]:
        """Why commands were left to the real interpreter since the last call; ddprun's own, with -I, need no torch."""
        path = self.folder / "cold-starts"
        lines = path.read_text().splitlines()[self._cold_starts :] if path.exists() else []
        self._cold_starts += len(lines)
        return [line for line in lines if not line.startswith("the option -I")]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder)


class Child:
    """One of the server's: ``ends`` is a descriptor that becomes readable when it has ended."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.ends, self._connection = pid, connection.fileno(), connection

    def wait(self) -> int:
        status = wrapper.answer(self._connection)[1]
        self._connection.close()
        return os.waitstatus_to_exitcode(status)


_servers: list[Server] = []  # the session's, see conftest


def set_server(server: Server) -> None:
    _servers[:] = [server]


def server() -> Server:
    return _servers[0]


# --- in the server ----------------------------------------------------------------------------------------------------

Program = Callable[[], None]


def main() -> None:
    folder, listener = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end with it, and the server with them
    fresh, ending = Fresh(folder), Ending()
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would write to what they share
    program, ending.is_whole = _serve(listener, fresh)
    ending.run(program)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(listener: socket.socket, fresh: Fresh) -> tuple[Program, bool]:
    """Fork a child for each that connects, and tell how it has ended. Returns in a child."""
    running: dict[int, tuple[int, int, socket.socket]] = {}  # by each of two descriptors: process, and connection
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poll.poll()}
        for descriptor in ready & set(running):
            if descriptor not in running:
                continue  # this child's other one was ready, too
            pid, process, connection = running[descriptor]
            if descriptor != process:  # nobody waits for it any more
                _kill(pid)
            status = os.waitpid(pid, 0)[1]
            with suppress(OSError):
                connection.sendall(wrapper.ENDED + status.to_bytes(4, "little"))
            for each in (process, connection.fileno()):
                poll.unregister(each)
                del running[each]
            os.close(process)
            connection.close()
        if listener.fileno() in ready:  # last: a number that was closed is given again
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                listener.close()
                for _, process, other in set(running.values()):
                    os.close(process)
                    other.close()
                return fresh.become(connection)
            process = os.pidfd_open(pid)
            running[process] = running[connection.fileno()] = (pid, process, connection)
            poll.register(process, select.POLLIN)
            poll.register(connection, 0)  # when it is closed; the child reads what comes


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # it has not come to make its group; nobody has waited for it yet


# --- in a child -------------------------------------------------------------------------------------------------------


class CannotImitate(Exception):
    """The real interpreter must do it."""


class Fresh:
    """What a process has when Python has started, and what it is given in place of that."""

    def __init__(self, folder: Path) -> None:
        """Before anything else is imported."""
        self._folder = folder
        self._environ = dict(os.environ)
        self._path = [entry for entry in sys.path[1:] if entry not in _search_path(self._environ)]
        self._filters = list(warnings.filters)

    def become(self, connection: socket.socket) -> tuple[Program, bool]:
        """What the other side has asked for, and whether its end is to be whole."""
        _die_with_parent()
        os.setpgid(0, 0)
        request, received, connection = _receive(connection)
        words, folder, environ, numbers, ignored, place, is_whole = request
        try:
            if place != wrapper.place():
                raise CannotImitate("another user, or other namespaces")
            flags, filters, rest = parse(words)
            os.chdir(folder)
            path = self._check(flags, rest, environ)
        except CannotImitate as error:
            with (self._folder / "cold-starts").open("a") as file:
                file.write(f"{error}: python {' '.join(words)!r:.100}\n")
            _tell(connection, wrapper.REFUSED, 0)
            os._exit(0)
        for descriptor, number in zip(received, numbers, strict=True):
            os.dup2(descriptor, number, inheritable=True)
            os.close(descriptor)
        self._adopt(environ, path, filters, "B" in flags)
        _open_streams("u" in flags or bool(environ.get("PYTHONUNBUFFERED")))
        program = _program(rest)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in ignored else usual)
        _tell(connection, wrapper.STARTED, os.getpid())
        if not connection.recv(1):
            os._exit(0)  # the other side is gone
        connection.close()
        return program, is_whole

    def _check(self, flags: set[str], rest: list[str], environ: dict[str, str]) -> list[str]:
        """The path on which modules are found first."""
        for name in {*environ, *self._environ} - _UNDERSTOOD:
            if name.startswith(READ_AT_IMPORT) and environ.get(name) != self._environ.get(name):
                raise CannotImitate(f"the variable {name}")
        path = _search_path(environ)
        if rest[0] not in ("-c", "-m") and not os.path.isfile(rest[0]):
            raise CannotImitate(f"{rest[0]} is no file")
        if "P" not in flags:
            first = {"-c": "", "-m": os.getcwd()}.get(rest[0])
            path.insert(0, os.path.dirname(os.path.realpath(rest[0])) if first is None else first)
        for entry in path:
            _refuse_to_hide(entry or os.getcwd())
        return path

    def _adopt(self, environ: dict[str, str], path: list[str], filters: list[str], no_bytecode: bool) -> None:
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:] = [*path, *self._path]
        sys.executable = str(self._folder / "python")
        sys.dont_write_bytecode = no_bytecode or bool(environ.get("PYTHONDONTWRITEBYTECODE"))
        importlib.invalidate_caches()
        tempfile.tempdir = None
        if filters:  # behind those that modules have added in front when they were imported
            added = warnings.filters[: len(warnings.filters) - len(self._filters)]
            sys.warnoptions[:] = filters
            warnings.filters[:] = self._filters  # type: ignore[index]
            warnings._processoptions(filters)  # type: ignore[attr-defined]
            warnings.filters[:0] = added  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        import multiprocessing

        import numpy
        import torch

        multiprocessing.set_executable(sys.executable)
        numpy.random.seed()
        torch.default_generator.seed()
        wanted = environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0)))


def parse(words: list[str]) -> tuple[set[str], list[str], list[str]]:
    """Flags, filters of warnings, and what is to run: ``-c``, ``-m`` or a script, with what follows.

    Raises:
        CannotImitate: It has another option, or none of these.
    """
    flags: set[str] = set()
    filters: list[str] = []
    rest = list(words)
    while rest and rest[0] not in ("-c", "-m") and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-W" and rest:
            filters.append(rest.pop(0))
        elif len(option) > 1 and set(option[1:]) <= set("PBu"):  # spawned processes have -B where their parent has
            flags |= set(option[1:])
        else:
            raise CannotImitate(f"the option {option}")
    if len(rest) < (2 if rest and rest[0] in ("-c", "-m") else 1):
        raise CannotImitate("no script")
    return flags, filters, rest


def _search_path(environ: dict[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _refuse_to_hide(folder: str) -> None:
    """A module there would be found before one of the same name that has been imported already."""
    with suppress(OSError):
        for name in os.listdir(folder):
            stem, dot, _ = name.partition(".")
            path = os.path.join(folder, name, *([] if dot else ["__init__.py"]))
            if stem in sys.modules and name.endswith((stem, ".py", ".so")) and os.path.isfile(path):
                known = getattr(sys.modules[stem], "__file__", None)
                if known is None or os.path.realpath(known) != os.path.realpath(path):
                    raise CannotImitate(f"{path} is another module than the one that is imported")


def _receive(connection: socket.socket) -> tuple[Any, list[int], socket.socket]:
    """What is asked for; descriptors, and the connection itself, have numbers above all that are wanted."""
    head, received, _, _ = socket.recv_fds(connection, 4, wrapper.LARGEST)
    data = connection.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
    try:
        request = marshal.loads(data)
    except (EOFError, ValueError):
        os._exit(0)  # the other side is gone
    above = max([2, *request[3]]) + 1
    moved = [_move(descriptor, above) for descriptor in (connection.detach(), *received)]
    return request, moved[1:], socket.socket(fileno=moved[0])


def _move(descriptor: int, above: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(descriptor)
    return moved


def _tell(connection: socket.socket, kind: bytes, number: int) -> None:
    with suppress(OSError):  # the other side is gone
        connection.sendall(kind + number.to_bytes(4, "little"))


def _open_streams(unbuffered: bool) -> None:
    """As Python does when it starts. What was imported already may go on with those before."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        was, reads = getattr(sys, name), descriptor == 0
        binary: Any = open(descriptor, "rb" if reads else "wb", 0 if unbuffered and not reads else -1, closefd=False)
        stream = io.TextIOWrapper(
            binary,
            was.encoding,
            was.errors,
            line_buffering=not unbuffered and (os.isatty(descriptor) or name == "stderr"),
            write_through=unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _program(words: list[str]) -> Program:
    """In a ``__main__`` of its own."""
    sys.argv[:] = words
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={}, __loader__=importlib.machinery.BuiltinImporter)
    sys.modules["__main__"] = main
    if words[0] == "-m":
        name = words.pop(1)
        sys.argv[:] = words
        sys.modules.pop(name, None)  # it runs as if nobody had imported it
        return lambda: runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    if words[0] == "-c":
        source = words[1]
        del sys.argv[1]
        return lambda: _exec(source, "<string>", main)
    path = os.path.abspath(words[0])
    main.__file__, main.__cached__ = path, None  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    return lambda: _exec(Path(path).read_bytes(), path, main)


def _exec(source: str | bytes, name: str, main: types.ModuleType) -> None:
    exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


class Ending:
    """Ends a child as the interpreter does, up to its exit handlers: to take all apart would cost 0.3 to 4 s.

    Exit handlers run in reverse order, so this one comes before any other: before ``multiprocessing`` is imported.
    """

    def __init__(self) -> None:
        self.is_whole = False
        self._code = 0
        atexit.register(self._end)

    def run(self, program: Program) -> None:
        """SystemExit goes on to the interpreter, which prints what it has to say."""
        try:
            program()
        except SystemExit as error:
            self._code = 0 if error.code is None else error.code & 0xFF if isinstance(error.code, int) else 1
            raise
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            self._code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            raise SystemExit(1) from None

    def _end(self) -> None:
        """Lose nothing that was written, and be gone."""
        if self.is_whole or "PMI_FD" in os.environ:  # MPICH takes its leave of mpiexec in an exit handler of C
            return
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and sys.modules["mpi4py"].rc.finalize is not False:
            mpi.Finalize()  # Lightning has asked MPI whether it started the job; what that left in /dev/shm goes
        files = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
        for each in (sys.stdout, sys.stderr, *(found for found in gc.get_objects() if type(found) in files)):
            with suppress(Exception):  # closed, or nobody reads it
                each.flush()
        if self._code < 0:
            signal.signal(-self._code, signal.SIG_DFL)
            os.kill(os.getpid(), -self._code)
        os._exit(self._code)
