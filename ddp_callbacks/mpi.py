"""``backend="mpi4py"``: torch's process groups over MPI, for a torch that was built without MPI.

Importing this module registers the backend; it needs the extra ``mpi``. MPI starts with the first group, so processes
that only import your script, such as a loader's workers, don't start MPI. In a script started by ``mpiexec``, write
either of these::

    ddp_callbacks.join_process_group(backend="mpi4py")

    import ddp_callbacks.mpi
    torch.distributed.init_process_group("mpi4py", init_method="mpi://")

An uncaught exception in one process ends the whole job, by MPI_Abort; without that, MPI_Finalize would hang. Operations
that are still pending three seconds after a process has ended its program end the job, too.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ddp_callbacks._torch import Backend, timeout_in
from ddp_callbacks.cluster.environment import WorkerEnv
from ddp_callbacks.errors import ConfigurationError, RendezvousError
from ddp_callbacks.process_group import DEFAULT_TIMEOUT, leave_process_group
from ddp_callbacks.process_group.failures import LINGER, wait
from ddp_callbacks.process_group.members_file import Members
from ddp_callbacks.process_group.rendezvous import meet
from ddp_callbacks.versions import how_to_install

try:
    import mpi4py.run

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
    raise ConfigurationError(
        f'backend="mpi4py" needs mpi4py and an MPI library: {how_to_install("mpi4py", "mpich")}. On a cluster with '
        f"its own MPI, leave out mpich. Cause: {error}"
    ) from error

__all__ = ["MPIProcessGroup"]

Tensors: TypeAlias = list[torch.Tensor]
Copies: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]

_lock = threading.RLock()  # held during MPI calls: some libraries allow only one thread at a time
_ProcessGroup: Any = dist.ProcessGroup  # Any: its methods are overloaded; torch.distributed calls one form of each
_OPS = {getattr(dist.ReduceOp.RedOpType, op): getattr(MPI, op[:4]) for op in ("SUM", "PRODUCT", "MIN", "MAX")}
_TYPES = {getattr(torch, f"int{bits}"): getattr(MPI, f"INT{bits}_T") for bits in (8, 16, 32, 64)}
_TYPES |= {torch.float64: MPI.DOUBLE, torch.float32: MPI.FLOAT, torch.uint8: MPI.UINT8_T}
_HALVES = (torch.float16, torch.bfloat16)  # MPI lacks them: they are reduced in float32, and rounded once


class Work(dist.Work):
    """The work handle of an MPI operation. The operation makes progress while this process calls any work handle.

    Args:
        name: The operation's name, for messages: "all-reduce".
        group: The group that communicates.
        request: MPI's handle.
        copies: Pairs of an output tensor and the buffer in which MPI puts its value.
        buffers: The memory that MPI reads, to keep it until the operation is complete.

    Attributes:
        group: The group that communicates.
    """

    def __init__(self, name: str, group: MPIProcessGroup, request: MPI.Request, copies: Copies, buffers: Any) -> None:
        super().__init__()
        self._name, self.group, self._request = name, group, request
        self._copies, self._buffers = copies, buffers
        self._timeout = timeout_in(group.options)
        self._end = time.monotonic() + self._timeout.total_seconds()
        self._status = MPI.Status()
        self._done = False
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        with _lock:
            try:
                if self._done or not self._request.Test(self._status):
                    return self._done
                for tensor, buffer in self._copies:
                    if self._name.startswith("receive") and (came := self._status.Get_count(MPI.BYTE)) != buffer.nbytes:
                        raise RuntimeError(f"{self._name}: {came} bytes came for a tensor of {buffer.nbytes}")
                    if tensor.data_ptr() != buffer.data_ptr():
                        tensor.detach().copy_(buffer.view(tensor.shape))
            except RuntimeError as error:  # MPI's errors are RuntimeErrors, too
                self._error = error
            self._done = True
            return True

    def wait_slice(self, seconds: float) -> bool:
        """Wait up to ``seconds``; return whether it is complete. Raises RuntimeError on failure, or on timeout."""
        end, pause = time.monotonic() + seconds, 0.0
        while not self.is_completed():
            if time.monotonic() > self._end:
                raise RuntimeError(f"{self._name} over MPI was not complete after {self._timeout}")
            if time.monotonic() > end:
                return False
            time.sleep(pause)  # a late rank should not cost the others a core
            pause = min(pause + 1e-5, 1e-3)
        if self._error is not None:
            raise self._error
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the operation is complete, or for ``timeout`` if that is positive.

        Raises:
            PeerError: Another rank reported a failure, left, or nothing came within the group's timeout.
            RuntimeError: The operation is not complete after ``timeout``; it continues.
        """
        if timeout <= timedelta(0):
            wait(self, f"{self._name} over MPI", self.group)
        elif not self.wait_slice(timeout.total_seconds()):
            raise RuntimeError(f"{self._name} over MPI is not complete after {timeout}")
        return True

    def result(self) -> Tensors:
        return [tensor for tensor, _ in self._copies]

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a completed future of the output tensors. Blocks: a wait for it in C++ would make no progress."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future

    def _source_rank(self) -> int:
        return self._status.Get_source()


class MPIProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group over MPI, for CPU tensors of any strides. Each operation returns a :class:`Work`.

    The MPI library chooses the order of a sum; float16 and bfloat16 are summed in float32 and rounded once.

    Args:
        comm: The communicator, with the ranks in the order of the group; ``shutdown`` frees it.
        timeout: The timeout of each operation.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.options = Backend.Options("mpi4py", timeout)
        self._comm = comm
        self._name = ""

    # --- methods that torch calls -------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "mpi4py"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        return self

    def shutdown(self) -> None:
        """Free the communicator, unless operations are pending. Safe to call twice."""
        with _lock:
            if self._comm != MPI.COMM_NULL and not MPI.Is_finalized() and not _still_pending(self):
                self._comm.Free()

    # --- the operations -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        numbers, *reduction = _reduction(tensors, opts)
        return self._start("all-reduce", [(tensors[0], numbers)], [], self._comm.Iallreduce, MPI.IN_PLACE, *reduction)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        numbers, spec, op = _reduction(tensors, opts)
        if self.rank() != opts.rootRank:
            return self._start("reduce", [], [numbers], self._comm.Ireduce, spec, None, op, opts.rootRank)
        copies = [(tensors[0], numbers)]
        return self._start("reduce", copies, [], self._comm.Ireduce, MPI.IN_PLACE, spec, op, opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        (buffer,) = map(_dense, tensors)
        return self._start("broadcast", [(tensors[0], buffer)], [], self._comm.Ibcast, _spec(buffer), opts.rootRank)

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        (sent,) = map(_dense, input_tensors)
        received = sent.new_empty(self.size(), *sent.shape)
        copies = list(zip(output_tensors[0], received, strict=True))
        return self._start("all-gather", copies, [sent], self._comm.Iallgather, _spec(sent), _spec(received))

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        sent, received = _dense(input).clone(), _dense(output)  # in MPI they must not overlap
        copies = [(output, received)]
        return self._start("all-gather", copies, [sent], self._comm.Iallgather, _spec(sent), _spec(received))

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        (sent,) = map(_dense, input_tensors)
        if self.rank() != opts.rootRank:
            return self._start("gather", [], [sent], self._comm.Igather, _spec(sent), None, opts.rootRank)
        received = sent.new_empty(self.size(), *sent.shape)
        copies = list(zip(output_tensors[0], received, strict=True))
        return self._start("gather", copies, [sent], self._comm.Igather, _spec(sent), _spec(received), opts.rootRank)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        (received,) = map(_dense, output_tensors)
        sent = torch.stack(list(map(_dense, input_tensors[0]))) if self.rank() == opts.rootRank else None
        specs = None if sent is None else _spec(sent), _spec(received)
        copies = [(output_tensors[0], received)]
        return self._start("scatter", copies, [sent], self._comm.Iscatter, *specs, opts.rootRank)

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", [], [], self._comm.Ibarrier)

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        (sent,) = map(_dense, tensors)
        return self._start(f"send to rank {dst} of the group", [], [sent], self._comm.Isend, _spec(sent), dst, tag)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        (received,) = map(_dense, tensors)
        name = f"receive from {'any rank' if src == MPI.ANY_SOURCE else f'rank {src}'} of the group"
        return self._start(name, [(tensors[0], received)], [], self._comm.Irecv, _spec(received), src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    _allgather_base = all_gather_single

    def _start(self, name: str, copies: Copies, buffers: Any, call: Callable[..., Any], *args: Any) -> Work:
        with _lock:
            _pending.append(work := Work(name, self, call(*args), copies, buffers))
            _still_pending()
        return work


_pending: list[Work] = []  # keeps pending operations, whose buffers MPI uses


def _still_pending(group: MPIProcessGroup | None = None) -> bool:
    with _lock:
        _pending[:] = [work for work in _pending if not MPI.Is_finalized() and not work.is_completed()]
        return any(group in (None, work.group) for work in _pending)


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"backend mpi4py has no {what}. Use gloo, which works under mpirun, too: leave out backend."
    )


def _refuse(name: str) -> None:
    def refuse(*_: Any, **__: Any) -> Work:
        raise _refusal(name)

    setattr(MPIProcessGroup, name, refuse)


for _name in ("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base", "allreduce_coalesced"):
    _refuse(_name)
for _name in ("alltoall", "alltoall_base", "all_to_all_single"):
    _refuse(_name)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with these values: the same memory, if it is contiguous. Refuses other layouts."""
    if not tensor.is_cpu or tensor.layout != torch.strided:
        raise ConfigurationError(
            f"backend mpi4py takes dense tensors on the CPU, got {tensor.layout} on {tensor.device}. Use gloo or NCCL."
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _spec(buffer: torch.Tensor, datatype: MPI.Datatype = MPI.BYTE) -> Any:
    """Return mpi4py's description of a dense tensor's memory: as bytes, unless MPI computes with the numbers."""
    return [MPI.buffer.fromaddress(buffer.data_ptr(), buffer.nbytes), datatype]


def _reduction(tensors: Tensors, opts: Any) -> tuple[torch.Tensor, Any, MPI.Op]:
    """Return the numbers to reduce, as a tensor and as mpi4py describes them, and the operation."""
    (numbers,) = map(_dense, tensors)
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp.op
    numbers = numbers.float() if numbers.dtype in _HALVES else numbers
    if numbers.dtype not in _TYPES or op not in _OPS:
        raise _refusal(f"{op} of {tensors[0].dtype}")
    return numbers, _spec(numbers, _TYPES[numbers.dtype]), _OPS[op]


def start(rank: int, size: int) -> MPI.Intracomm:
    """Start MPI, unless it runs, and return its world communicator.

    Raises:
        ConfigurationError: In MPI, this process is not ``rank`` of ``size``.
    """
    if not MPI.Is_initialized():
        MPI.Init_thread()
    world = MPI.COMM_WORLD
    if (rank, size) != (world.Get_rank(), world.Get_size()):
        raise ConfigurationError(
            f"this process is rank {rank} of {size}, but to MPI it is rank {world.Get_rank()} of {world.Get_size()}. "
            f'Start it as "mpiexec -n {max(size, world.Get_size())} python ..." by the mpiexec of '
            f"{MPI.get_vendor()[0]}, which mpi4py has loaded (MPI4PY_LIBMPI sets another library; srun needs "
            "--mpi=pmix or --mpi=pmi2), without variables or arguments that number the processes otherwise; if its "
            "launcher is not known, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; or leave out backend (gloo)."
        )
    return world


def create(options: Any, _: Any = None) -> MPIProcessGroup:
    """Create a group with a communicator of its own. torch calls it on each member; blocks until all have come.

    Raises:
        ConfigurationError: MPI's ranks differ from torch's, or MPI has not started and the group lacks some ranks.
        RendezvousError: Members did not come within the timeout.
    """
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    rank, size = ranks[options.group_rank], dist.get_world_size() if dist.is_initialized() else options.group_size
    if len(ranks) < size and not MPI.Is_initialized():
        raise ConfigurationError(
            f"MPI starts in all {size} processes at once, but this group has only the ranks {ranks}. Join by "
            'join_process_group(backend="mpi4py"), or make a group of all ranks before: new_group(backend="mpi4py").'
        )
    store = options.store
    store.set(f"came/{rank}", "")
    try:  # MPI would wait forever; at its start it holds the GIL, so that rank 0's thread could not report failures
        store.wait([f"came/{each}" for each in ranks], options.timeout)
    except RuntimeError as error:
        missing = [each for each in ranks if not store.check([f"came/{each}"])]
        raise RendezvousError(
            f"rank {rank} waited {options.timeout} for a group of the ranks {ranks}, but {missing} did not come"
        ) from error
    world = start(rank, size)
    with _lock:
        comm = world.Create_group(world.Get_group().Incl(ranks), zlib.crc32(options.group_id.encode()) % 32768)
    return MPIProcessGroup(comm, options.timeout)


def rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store, rank and world size for ``init_method="mpi://"``. torch calls it. Blocks until all have come."""
    env = WorkerEnv.from_environ()
    store: dist.Store = dist.HashStore()
    if env.world_size > 1:
        env, store = meet(Members(env), env, timeout)
    atexit.register(leave_process_group)  # tells the ranks that wait for this one
    yield store, env.rank, env.world_size


_previous_hook = sys.excepthook


def _abort_after(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    mpi4py.run.set_abort_status(error)  # before the previous hook, which may raise
    _previous_hook(kind, error, trace)


def _abort_with_pending_operations() -> None:
    end = time.monotonic() + LINGER
    while (pending := _still_pending()) and time.monotonic() < end:
        time.sleep(0.01)
    if pending:
        mpi4py.run.set_abort_status(1)


dist.Backend.register_backend("mpi4py", create, extended_api=True, devices=["cpu"])
register_rendezvous_handler("mpi", rendezvous)
sys.excepthook = _abort_after
atexit.register(_abort_with_pending_operations)
