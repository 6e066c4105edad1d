"""A fork server that has imported the slow modules: its ranks and commands start in 0.05 s instead of 1 to 5 s.

:class:`Server` writes ``python``, ``torchrun`` and ``ddprun`` into a folder; these ask for a child in their place, see
:mod:`kit.wrapper`. If a child cannot imitate the command (most options of Python, other namespaces, a module that would
hide an imported one), the real interpreter runs it, and the file "cold-starts" gets the reason.

A child differs from a real start: it is the server's child, has modules that it has not imported, and all children hash
strings alike. So tests of complete imports, of warnings and of what users see start the real interpreter.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
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
import threading
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
# Variables that modules, or the interpreter itself, read when they start.
READ_AT_IMPORT = ("LANG", "LC_", "LD_PRELOAD", "MKL_", "MPL", "PYTHON", "TORCHDYNAMO_", "TORCH_LOGS", "TQDM_")
_UNDERSTOOD = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"}
_PR_SET_PDEATHSIG = 1
_FIRST = 512  # first of a child's temporary descriptors, above all that it is given


# --- in the tests -----------------------------------------------------------------------------------------------------


class Server:
    """Starts the fork server. It lives until :meth:`close`, or until the tests end; its children die with it.

    Attributes:
        running: The server of the session.
        folder: The folder of the wrappers, to be put on a PATH.
    """

    running: Server

    def __init__(self) -> None:
        Server.running = self
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self._socket = str(self.folder / "server")
        self._cold_starts = 0
        for name in ("python", "python3", "torchrun", "ddprun"):
            command = [] if "python" in name else [str(Path(sys.executable).with_name(name))]
            words = [sys.executable, "-IS", str(KIT / "wrapper.py"), self._socket, *command]
            (self.folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            (self.folder / name).chmod(0o755)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(self._socket)
            listener.listen(128)
            program = f"import sys; sys.path[0] = {str(TESTS)!r}; from kit import warm; warm.main()"
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(self.folder)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # more threads than cores spend their time waiting
                stdin=listener.fileno(),
            )
        self.pid = self._process.pid

    def fork(self, words: list[str], folder: Path, environ: dict[str, str], streams: list[int], whole: bool) -> Process:
        """Start ``python WORDS``. ``streams``: standard input, output and error; ``whole``: see :func:`_run`."""
        descriptors, ignored = dict(enumerate(streams)), [int(signal.SIGPIPE)]
        connection, pid = wrapper.ask(self._socket, words, str(folder), environ, descriptors, ignored, whole)
        assert pid is not None, self.cold_starts()

        def wait() -> int:
            with connection:
                return os.waitstatus_to_exitcode(wrapper.answer(connection)["status"])

        process = Process(pid, wait)
        connection.send(b"go")
        return process

    def cold_starts(self) -> list[str]:
        """Return why commands went to the real interpreter since the last call, except ddprun's own, which use -I."""
        path = self.folder / "cold-starts"
        lines = path.read_text().splitlines()[self._cold_starts :] if path.exists() else []
        self._cold_starts += len(lines)
        return [line for line in lines if not line.startswith("the option -I")]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder)


class Process:
    """A started process; the descriptor ``ends`` becomes readable when it has ended."""

    def __init__(self, pid: int, wait: Callable[[], int]) -> None:
        self.pid, self.ends, self._wait = pid, os.pidfd_open(pid), wait

    def wait(self) -> int:
        """Wait for the end; return the exit code. Call it once."""
        os.close(self.ends)
        return self._wait()


# --- in the server ----------------------------------------------------------------------------------------------------

Program = Callable[[], None]


def main() -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end with it, and the server with them
    fresh = Fresh(Path(sys.argv[1]))
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would write to shared memory pages
    with socket.socket(fileno=0) as listener:
        connection = _serve(listener)
        listener.detach()
    _run(*fresh.become(connection))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _serve(listener: socket.socket) -> int:
    """Fork a child for each connection, and report its end there. Return in a child, with its connection."""
    children: dict[int, tuple[int, int, int]] = {}  # process id, its descriptor, its connection; by each of these two
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        descriptor, _ = poll.poll()[0]  # one at a time: a closed descriptor's number is used again
        if descriptor == listener.fileno():
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                return connection.detach()
            child = (pid, os.pidfd_open(pid), connection.detach())
            children |= dict.fromkeys(child[1:], child)
            poll.register(child[1], select.POLLIN)
            poll.register(child[2], 0)  # only its closing: the child reads the data
        else:
            pid, process, talk = children[descriptor]
            if descriptor == talk:  # nobody waits for the child any more
                with suppress(ProcessLookupError):  # a child without its group yet ends by itself
                    os.killpg(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            with suppress(OSError):  # the other side is gone
                os.write(talk, marshal.dumps({"status": status}))
            for each in (process, talk):
                poll.unregister(each)
                os.close(each)
                del children[each]


# --- in a child -------------------------------------------------------------------------------------------------------


class CannotImitate(Exception):
    """The real interpreter must run the command."""


class Fresh:
    """Notes the state of a fresh Python process, and gives a child that state with its caller's environment."""

    def __init__(self, folder: Path) -> None:
        """Note the state. Call it before importing anything else."""
        self._folder = folder
        self._environ = dict(os.environ)
        self._path = [entry for entry in sys.path[1:] if entry not in _search_path(self._environ)]
        self._filters = list(warnings.filters)

    def become(self, connection: int) -> tuple[Program, bool]:
        """Become the requested process; return its program, and whether it must end as a whole, see :func:`_run`."""
        _die_with_parent()
        os.setpgid(0, 0)
        caller = socket.socket(fileno=connection)
        data, received, _, _ = socket.recv_fds(caller, wrapper.LARGEST, _FIRST)
        if not data:
            os._exit(0)  # the other side is gone
        words, folder, environ, numbers, ignored, place, is_whole = marshal.loads(data)
        try:
            if place != wrapper.place():
                raise CannotImitate("another user, or other namespaces")
            flags, filters, rest = parse(words)
            os.chdir(folder)
            path = self._check(flags, rest, environ)
        except CannotImitate as error:
            with (self._folder / "cold-starts").open("a") as file:
                file.write(f"{error}: python {' '.join(words)!r:.100}\n")
            os._exit(0)
        talk, *received = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _FIRST) for each in (caller.detach(), *received)]
        os.closerange(0, _FIRST)  # close the server's descriptors; make room for the received ones
        for descriptor, number in zip(received, numbers, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        self._adopt(environ, path, filters, "B" in flags)
        _open_streams("u" in flags or bool(environ.get("PYTHONUNBUFFERED")))
        program = _program(rest)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in ignored else usual)
        os.write(talk, marshal.dumps({"pid": os.getpid()}))
        os.read(talk, len(b"go"))
        os.close(talk)
        return program, is_whole

    def _check(self, flags: set[str], rest: list[str], environ: dict[str, str]) -> list[str]:
        """Return the folders that come first on the module search path; raise if a child cannot imitate this."""
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
        if any(os.path.isfile(os.path.join(entry, "sitecustomize.py")) for entry in _search_path(environ)):
            sys.modules.pop("sitecustomize", None)
            importlib.import_module("sitecustomize")
        sys.executable = str(self._folder / "python")
        sys.dont_write_bytecode = no_bytecode or bool(environ.get("PYTHONDONTWRITEBYTECODE"))
        importlib.invalidate_caches()
        tempfile.tempdir = None
        if filters:  # put them behind those that modules added when they were imported
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
    """Return the flags, the warning filters, and the program: ``-c``, ``-m`` or a script, with all words after it.

    Raises:
        CannotImitate: There is another option, or no program.
    """
    flags: set[str] = set()
    filters: list[str] = []
    rest = list(words)
    while rest and rest[0] not in ("-c", "-m") and rest[0].startswith("-"):
        option = rest.pop(0)
        if option == "-W" and rest:
            filters.append(rest.pop(0))
        elif len(option) > 1 and set(option[1:]) <= set("PBu"):  # spawned processes have -B if their parent has
            flags |= set(option[1:])
        elif option != "-Xutf8":  # so are texts here
            raise CannotImitate(f"the option {option}")
    if len(rest) < (2 if rest and rest[0] in ("-c", "-m") else 1):
        raise CannotImitate("no script")
    return flags, filters, rest


def _search_path(environ: dict[str, str]) -> list[str]:
    return [os.path.abspath(entry) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _refuse_to_hide(folder: str) -> None:
    """Raise if a module in ``folder`` would be found before an imported one of the same name."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        stem = name.removesuffix(".py")
        path = os.path.join(folder, name if stem != name else f"{name}/__init__.py")
        known = getattr(sys.modules.get(stem), "__file__", None) or ""
        if stem in sys.modules and os.path.isfile(path) and os.path.realpath(known) != os.path.realpath(path):
            raise CannotImitate(f"{path} is another module than the one that is imported")


def _open_streams(unbuffered: bool) -> None:
    """Open the standard streams as Python does when it starts. Imported modules may still use the old ones."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        was, writes = getattr(sys, name), descriptor > 0
        binary: Any = open(descriptor, "wb" if writes else "rb", 0 if unbuffered and writes else -1, closefd=False)
        by_line = not unbuffered and (os.isatty(descriptor) or name == "stderr")
        stream = io.TextIOWrapper(binary, was.encoding, was.errors, line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _program(words: list[str]) -> Program:
    """Return the program as a function, which runs in a new ``__main__``."""
    first, *arguments = words
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.argv[:] = arguments
        sys.modules.pop(arguments[0], None)  # the module runs as if nobody had imported it
        return lambda: runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    sys.argv[:] = words
    if first == "-c":
        name, source = "<string>", sys.argv.pop(1).encode()
    else:
        main.__file__ = name = os.path.abspath(first)
        source = Path(name).read_bytes()
    return lambda: exec(compile(source, name, "exec", dont_inherit=True), main.__dict__)


def _run(program: Program, is_whole: bool) -> None:
    """Run the program as the interpreter does, up to its exit handlers. If ``is_whole``, finalize: 0.3 to 4 s more."""
    code: Any = None
    try:
        program()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_value = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)
        code = error if isinstance(error, KeyboardInterrupt) else 1
    if is_whole or "PMI_FD" in os.environ:  # MPICH reports to mpiexec in an exit handler of C
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized() and sys.modules["mpi4py"].rc.finalize is not False:
        mpi.Finalize()  # removes files in /dev/shm: Lightning has asked MPI whether it started the job
    if isinstance(code, str):
        print(code, file=sys.stderr)
    files = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    for each in (sys.stdout, sys.stderr, *(found for found in gc.get_objects() if type(found) in files)):
        with suppress(Exception):  # the file is closed, or its reader is gone
            each.flush()
    if isinstance(code, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF if isinstance(code, int) else int(code is not None))
