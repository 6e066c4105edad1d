"""The program on a node, between launcher and ranks: it starts and signals them, and ends them with the connection.

The launcher sends this file to the node (see :mod:`ddp_callbacks.launcher.remote`), whose interpreter may lack this
package, so it imports only the standard library. Linux.

Standard input brings messages, each a line with a length and as many bytes of JSON: ``{"do": NAME, ...}`` calls the
method ``do_NAME``. Standard output takes :data:`GREETING`, then frames: a header (:data:`HEADER`: kind, rank, length),
as many bytes, and a newline, without which srun would hold them back.

=====  ==============================================================================================
``r``  the answer to a message, JSON; ``{"problem": TEXT}`` if it could not be done
``o``  standard output of a rank
``e``  the same for standard error
``m``  a report, JSON: ``started``, ``ended``, ``halted``, ``asked`` (a signal came here), ``problem``
``b``  an answer to ``beat``, empty
``i``  rank 0 has taken its standard input so far, empty
``x``  everything here has ended, empty
=====  ==============================================================================================

Standard input is also the lifeline. If it ends for any reason (the launcher has ended or was killed, the connection
broke), or is silent for too long, every process of the job gets SIGTERM and a little later SIGKILL.

A job that is asked to stop is another matter: only the ranks get the signal, and everything gets SIGKILL once their
time is over.

[Note: every process]
A process group is not enough: a rank's children may start sessions of their own. This process is a subreaper
(prctl(2)), so everything that the ranks start stays its descendant, however often it forks. The ranks are killed if
this process dies.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

GREETING = b"\0ddprun\0\n"  # a login shell may print something before it
HEADER = struct.Struct("!ciI")
GRACE = 2.5  # seconds between SIGTERM and SIGKILL, unless the job says otherwise
GRACE_UNHEARD = 1.0  # the same after a silence, which has already taken time
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENOUGH = 1 << 20  # bytes waiting for the launcher; beyond that, the job's writes wait
_MOST = 1 << 16  # bytes of a pipe, as many as it holds
_TICK = 0.02  # seconds between two checks for running processes while the job ends
_LOOK = 0.1  # seconds between two checks whether a rank handles the signal that it is to get
_REQUESTS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # which ask the job to stop if a scheduler sends them here


def main() -> int:
    """Serve the launcher until it has ended the job, or has gone itself."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGHUP, *_REQUESTS):
        # Their sender ends the lifeline, or the launcher decides. Unlike SIG_IGN, the job does not inherit a handler.
        signal.signal(number, lambda *_: None)
    Node(_descriptor_of_signals()).serve()
    return 0


def _descriptor_of_signals() -> int:
    """A descriptor that receives the number of each signal, also when a child ends.

    (Older clusters' kernels lack pidfd_open(2).)
    """
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read


class Refusal(Exception):
    """This node cannot do what the launcher asked for."""


@dataclass
class Rank:
    """A rank that runs here: its number, its process, and the pipe for the record of its failure (both ends)."""

    number: int
    process: subprocess.Popen[bytes]
    record: tuple[int, int]


class Node:
    def __init__(self, signals: int) -> None:
        self._signals = signals  # a descriptor, see above
        self._inbox = b""
        self._outbox = bytearray(GREETING)
        self._streams: dict[int, tuple[bytes, int]] = {}  # descriptor: kind of frame, rank
        self._listener: socket.socket | None = None
        self._address = ""
        self._ranks: dict[int, Rank] = {}  # by process id
        self._store: subprocess.Popen[bytes] | None = None
        self._input: int | None = None  # rank 0's standard input
        self._unread = b""  # what is to go there
        self._foreign: set[int] = set()  # processes that the job runs as another user (sudo): we cannot end them
        self._connected = True
        self._heard = time.monotonic()
        self._silence: float | None = None  # seconds
        self._grace: float | None = None  # seconds from a request to stop to SIGKILL; None: as for any other end
        self._kill_at: float | None = None  # set once the ranks must end
        self._terminated = False  # whether all processes have got SIGTERM
        self._leaves = False  # whether this program ends with them
        self._next_port: int | None = None  # where to listen for the ranks that are started next
        self._request = signal.SIGTERM  # what the ranks get that are asked to stop
        self._is_patient = False  # whether to wait until a rank handles it
        self._to_ask: set[int] = set()  # process ids of ranks
        self._asked: set[int] = set()

    def serve(self) -> None:
        for descriptor in (0, 1):
            os.set_blocking(descriptor, False)
        self._hear()  # data that was read ahead with this program
        while not (self._leaves and self._is_quiet()):
            self._wait()
            self._watch_job()
        self._end_store()
        for descriptor in list(self._streams):
            while self._pass_on(descriptor):
                pass
        self._put(b"x", -1, b"")
        while self._connected and self._outbox:
            self._wait()

    # --- requests of the launcher -------------------------------------------------------------------------------------

    def do_hello(self, silence: float, grace: float | None) -> dict[str, Any]:
        """Describe this node; ``address`` is the one that ssh reached. From now on, ``silence`` seconds end the job."""
        self._silence, self._grace = silence, grace
        connection = os.environ.get("SSH_CONNECTION", "").split()
        with open("/proc/sys/kernel/random/boot_id") as file:
            machine = [file.read().strip(), socket.gethostname(), os.readlink("/proc/self/ns/pid")]
        return {"machine": machine, "address": connection[2] if len(connection) == 4 else None}

    def do_enter(self, cwd: str, environ: dict[str, str]) -> dict[str, Any]:
        """Change to the working directory, and set variables for all that is started here."""
        os.environb.update({bytes.fromhex(name): bytes.fromhex(value) for name, value in environ.items()})
        folder = os.fsdecode(bytes.fromhex(cwd))
        try:
            os.chdir(folder)
        except OSError as error:
            raise Refusal(f"cannot enter the working directory {folder}: {error.strerror}") from None
        return {}

    def do_find(self, path: str) -> dict[str, Any]:
        """Check that a file exists."""
        name = os.fsdecode(bytes.fromhex(path))
        if not os.path.exists(name):
            raise Refusal(f"file not found: {name} (working directory {os.getcwd()})")
        return {}

    def do_route(self, address: str) -> dict[str, Any]:
        """This node's address on the route to another."""
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 1))  # sends nothing
            return {"address": probe.getsockname()[0]}

    def do_listen(self, address: str, port: int) -> dict[str, Any]:
        """Hold a port for the store; 0 finds a free one."""
        family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        self._address, self._listener = address, socket.socket(family, kind, proto)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind(where)
        except OSError as error:
            raise Refusal(f"cannot listen on {address} port {port}: {error.strerror}") from None
        self._listener.listen(4096)
        return {"port": self._listener.getsockname()[1]}

    def do_reach(self, addresses: list[tuple[str, int]], seconds: float) -> dict[str, Any]:
        """Connect to ports that other nodes hold; for each, why it cannot be reached, or ``null``."""
        with ThreadPoolExecutor(max(1, len(addresses))) as pool:
            return {"problems": list(pool.map(lambda at: _cannot_reach(at[0], at[1], seconds), addresses))}

    def do_output(self, argv: list[str], seconds: float) -> dict[str, Any]:
        """The output of a short command."""
        words = [bytes.fromhex(word) for word in argv]
        try:
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Refusal(f"{os.fsdecode(words[0])} took longer than {seconds:g} s") from None
        return {"code": done.returncode, "out": done.stdout.decode(), "err": done.stderr.decode(errors="replace")}

    def do_start(
        self, argv: list[str], ranks: list[int], environ: dict[str, str], defaults: dict[str, str], store: list[str]
    ) -> None:
        """Start these ranks, and on the first node the program that hosts their store on the port that is held.

        ``defaults`` are variables that are set only where this node has not set them; of PYTHONPATH the value is put in
        front of this node's.
        """
        found = {**defaults, **os.environ, **environ}
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (environ["PYTHONPATH"], os.environ.get("PYTHONPATH"))))
        try:
            self._start_store([bytes.fromhex(word) for word in store])
            for local_rank, rank in enumerate(ranks):
                of_rank = {"RANK": rank, "LOCAL_RANK": local_rank, "ROLE_RANK": rank}
                own = found | {name: str(value) for name, value in of_rank.items()}
                self._start_rank(rank, [bytes.fromhex(word) for word in argv], own)
        except OSError as error:
            self._report(problem=f"cannot start {os.fsdecode(bytes.fromhex(argv[0]))}: {error.strerror}")
            return
        threads, interface = found["OMP_NUM_THREADS"], found.get("GLOO_SOCKET_IFNAME", "")
        self._report(started={"ranks": ranks, "threads": threads, "interface": interface})
        if self._kill_at is not None:  # they were asked to stop before they were there
            self._stop(self._request)

    def do_input(self, data: str) -> None:
        """Pass on what goes to rank 0's standard input; nothing at its end. It is taken when the rank has room."""
        self._unread = bytes.fromhex(data)
        if self._unread or self._input is None:
            return
        os.close(self._input)
        self._input = None

    def do_halt(self, port: int, seconds: float) -> None:
        """End the ranks, report it, and wait for others to be started; the first node listens anew, on ``port``."""
        self._next_port = port
        self._end(seconds)

    def do_beat(self) -> None:
        """Answer a heartbeat."""
        self._put(b"b", -1, b"")

    def do_ask(self, number: int) -> None:
        """Ask the ranks to stop, those that handle the signal; the launcher may start them again."""
        self._ask(signal.Signals(number), patient=True)

    def do_stop(self, number: int) -> None:
        """Ask the ranks to stop, and end everything when their time is over."""
        self._stop(signal.Signals(number))

    def do_end(self, seconds: float) -> None:
        """End the job: SIGTERM, and SIGKILL after ``seconds``."""
        self._leaves = True
        self._end(seconds)

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start_store(self, words: list[bytes]) -> None:
        if not words or self._listener is None:
            return
        port, descriptor = str(self._listener.getsockname()[1]), self._listener.fileno()
        self._store = subprocess.Popen(
            [*words, self._address.encode(), port.encode(), str(descriptor).encode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=[descriptor],
            start_new_session=True,
            preexec_fn=partial(_die_with, os.getpid(), _REQUESTS),
        )

    def _start_rank(self, rank: int, words: list[bytes], environ: dict[str, str]) -> None:
        record = os.pipe()
        environ["TORCHELASTIC_ERROR_FILE"] = f"/proc/{os.getpid()}/fd/{record[1]}"
        process = subprocess.Popen(
            words,
            env=environ,
            stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=partial(_die_with, os.getpid()),
        )
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)
            self._input = os.dup(process.stdin.fileno())
            process.stdin.close()
        self._ranks[process.pid] = Rank(rank, process, record)
        for stream, kind in ((process.stdout, b"o"), (process.stderr, b"e")):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._streams[os.dup(stream.fileno())] = (kind, rank)
            stream.close()

    def _reap(self) -> None:
        """Collect ended children, including orphans of the job; report ranks after what they have written."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._ranks:
                self._report_end(self._ranks.pop(pid), os.waitstatus_to_exitcode(status))
            elif self._store is not None and pid == self._store.pid:
                self._report_end_of_store(os.waitstatus_to_exitcode(status))

    def _report_end(self, rank: Rank, code: int) -> None:
        for descriptor in [each for each, (_, number) in self._streams.items() if number == rank.number]:
            self._pass_on(descriptor)  # as much as a pipe holds; its orphans may still write
        os.set_blocking(rank.record[0], False)
        record = b""
        with suppress(BlockingIOError):
            record = os.read(rank.record[0], _MOST)
        for descriptor in rank.record:
            os.close(descriptor)
        name = signal.Signals(-code).name if code < 0 else None
        text = record.decode(errors="replace")
        self._report(
            ended={"rank": rank.number, "code": code if code >= 0 else 128 - code, "signal": name, "record": text},
            now=time.monotonic(),
        )

    def _report_end_of_store(self, code: int) -> None:
        assert self._store is not None and self._store.stderr is not None
        said = self._store.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
        self._store = None
        if self._kill_at is None and self._ranks:
            self._report(problem=f"the process that hosts the ranks' store ended with exit code {code}: {said}")

    def _end_store(self) -> None:
        if self._store is not None:
            self._store.kill()
            self._store.wait()
            self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # --- the event loop -----------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for an event, and pass on what has come meanwhile."""
        poll = select.poll()
        ready = self._what_may_come()
        for descriptor in ready:
            poll.register(descriptor, select.POLLOUT if descriptor in (1, self._input) else select.POLLIN)
        came = [descriptor for descriptor, _ in poll.poll(self._patience() * 1000)]
        if 0 not in came:
            self._watch_launcher()
        for descriptor in came:
            ready[descriptor]()

    def _what_may_come(self) -> dict[int, Callable[[], Any]]:
        """The handler of each descriptor."""
        ready: dict[int, Callable[[], Any]] = {}
        if self._connected:
            ready[0] = self._hear
            if self._outbox:
                ready[1] = self._speak
        if self._input is not None and self._unread:
            ready[self._input] = self._feed
        if len(self._outbox) < _ENOUGH:
            ready |= {descriptor: partial(self._pass_on, descriptor) for descriptor in self._streams}
        ready[self._signals] = self._hear_signals
        return ready

    def _patience(self) -> float:
        if self._kill_at is not None:
            return max(_TICK, min(_LOOK, self._kill_at - time.monotonic())) if self._ranks else _TICK
        if self._to_ask:
            return _LOOK
        return 0.25 if self._silence is not None else 60

    def _hear_signals(self) -> None:
        """Tell the launcher of requests to stop; the children are checked in any case."""
        came = os.read(self._signals, _MOST)
        for number in _REQUESTS:
            if number in came:
                self._report(asked=number.name)

    def _hear(self) -> None:
        # None if there is no data. Not os.read: some may have been read ahead with this program.
        data: bytes | None = sys.stdin.buffer.read(_MOST)
        if data == b"":
            self._lose_launcher(GRACE)
        if not data:
            return
        self._heard = time.monotonic()
        self._inbox += data
        while True:
            length, newline, rest = self._inbox.partition(b"\n")
            if not newline or len(rest) < int(length):
                return
            self._inbox = rest[int(length) :]
            self._obey(json.loads(rest[: int(length)]))

    def _obey(self, message: dict[str, Any]) -> None:
        try:
            answer = getattr(self, "do_" + message.pop("do"))(**message)
        except (Refusal, OSError) as error:
            answer = {"problem": str(error)}
        if answer is not None:
            self._put(b"r", -1, json.dumps(answer).encode())

    def _report(self, **values: Any) -> None:
        self._put(b"m", -1, json.dumps(values).encode())

    def _put(self, kind: bytes, rank: int, data: bytes) -> None:
        if self._connected:
            self._outbox += HEADER.pack(kind, rank, len(data)) + data + b"\n"

    def _speak(self) -> None:
        try:
            del self._outbox[: os.write(1, self._outbox[:_MOST])]
        except BlockingIOError:
            pass
        except OSError:
            self._lose_launcher(GRACE)

    def _feed(self) -> None:
        """Write to rank 0's standard input."""
        assert self._input is not None
        try:
            self._unread = self._unread[os.write(self._input, self._unread) :]
        except OSError:  # it has closed it
            os.close(self._input)
            self._input = None
            return
        if not self._unread:
            self._put(b"i", -1, b"")

    def _pass_on(self, descriptor: int) -> bool:
        """Pass on available output; return whether there was any."""
        kind, rank = self._streams[descriptor]
        try:
            data = os.read(descriptor, _MOST)
        except BlockingIOError:
            return False
        if data:
            self._put(kind, rank, data)
        else:
            os.close(descriptor)
            del self._streams[descriptor]
        return bool(data)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _watch_launcher(self) -> None:
        if self._connected and self._silence is not None and time.monotonic() - self._heard > self._silence:
            self._lose_launcher(GRACE_UNHEARD)

    def _lose_launcher(self, grace: float) -> None:
        self._connected, self._leaves = False, True
        self._outbox.clear()
        if self._grace is None:
            self._end(grace)
        else:
            self._stop(signal.SIGTERM)

    def _ask(self, number: signal.Signals, patient: bool) -> None:
        self._request, self._is_patient = number, patient
        self._to_ask |= self._ranks.keys() - self._asked
        self._ask_ranks()

    def _ask_ranks(self) -> None:
        """Signal the ranks that handle it by now. A program that starts would only be ended by it."""
        for pid in list(self._to_ask):
            handled = _handled_by(pid)
            found = [number for number in (self._request, signal.SIGTERM) if number in (handled or ())]
            if not found and self._is_patient and handled is not None:
                continue
            self._to_ask.discard(pid)
            self._asked.add(pid)
            with suppress(OSError):  # it has ended, or belongs to another user
                os.kill(pid, found[0] if found else signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        """Ask the ranks to stop, and kill them when their time is over."""
        self._ask(number, patient=self._grace is not None)
        self._kill_within(GRACE if self._grace is None else self._grace)

    def _end(self, seconds: float) -> None:
        """Send SIGTERM to every process of the job, and ``seconds`` later SIGKILL."""
        if not self._terminated and seconds:
            self._terminated = True
            self._signal(signal.SIGTERM)
        self._kill_within(seconds)

    def _kill_within(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._kill_at = end if self._kill_at is None else min(self._kill_at, end)

    def _watch_job(self) -> None:
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._signal(signal.SIGKILL)
        if self._to_ask:
            self._ask_ranks()
        self._reap()
        if self._next_port is not None and not self._leaves and self._is_quiet():
            self._get_ready(self._next_port)

    def _is_quiet(self) -> bool:
        """Whether nothing of the job runs here, but for the store."""
        return not (self._ranks.keys() | self._descendants()) - self._foreign

    def _get_ready(self, port: int) -> None:
        """Forget the ranks that have ended, and report that others can be started."""
        is_first = self._listener is not None
        self._end_store()
        self._next_port = self._kill_at = None
        self._terminated = False
        self._to_ask.clear()
        self._asked.clear()
        if self._input is not None:
            os.close(self._input)
            self._input = None
        try:
            self._report(halted=self.do_listen(self._address, port)["port"] if is_first else 0)
        except Refusal as refusal:
            self._report(problem=str(refusal))

    def _signal(self, number: int) -> None:
        for pid in self._descendants():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass  # it has ended
            except PermissionError:
                self._foreign.add(pid)

    def _descendants(self) -> set[int]:
        """The process ids of all running descendants but the store."""
        children = _children()
        found = list(children.get(os.getpid(), []))
        for pid in found:
            found += children.get(pid, [])
        return set(found) - ({self._store.pid} if self._store is not None else set())


def _die_with(parent: int, ignored: tuple[int, ...] = ()) -> None:
    """In a new process, before its program: it is killed if the parent dies, and ignores these signals."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != parent:
        os._exit(1)


def _cannot_reach(address: str, port: int, seconds: float) -> str | None:
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except OSError as error:
        return f"cannot connect to {address} port {port}: {error.strerror or error}"
    return None


def _children() -> dict[int, list[int]]:
    """The running processes of each parent, by process id."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has ended
            if state not in (b"Z", b"X"):
                children.setdefault(int(parent), []).append(int(entry))
    return children


def _handled_by(pid: int) -> set[int] | None:
    """The signals for which a process has a handler; ``None`` if it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            (mask,) = (int(line.split()[1], 16) for line in file if line.startswith("SigCgt:"))
    except (OSError, ValueError):
        return None
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


if __name__ == "__main__":
    sys.exit(main())
