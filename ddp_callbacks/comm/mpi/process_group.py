"""torch.distributed's collectives over an MPI communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddp_callbacks._torch import Backend, set_timeout_in, timeout_in
from ddp_callbacks.comm.mpi.buffers import CHUNK, Reduction, chunks, copy_back, flat, moved, moved_in_parts, shares
from ddp_callbacks.comm.mpi.progress import Operation, Progress, Work
from ddp_callbacks.comm.mpi.runtime import MPI
from ddp_callbacks.errors import ConfigurationError

Tensors: TypeAlias = list[torch.Tensor]
Finish: TypeAlias = Callable[[list[MPI.Status]], Any]

_SUM: Any = dist.ReduceOp.RedOpType.SUM  # type: ignore[attr-defined]
_UNSET = timedelta(0)  # not positive: use the group's timeout


_ProcessGroup: Any = dist.ProcessGroup  # its methods are overloaded; torch.distributed calls one form of each


class MPIProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group over MPI, for CPU tensors of any strides. No call blocks: each returns a :class:`Work`.

    As with every process group, all ranks must make the same collective calls in the same order. The MPI library
    chooses the order of a sum; float16 and bfloat16 are summed in float32 and rounded once.

    Args:
        comm: The communicator, with the ranks in the order of the group; ``shutdown`` frees it.
        progress: The progress engine of this process.
        store: The group's store.
        timeout: Default timeout of an operation.
    """

    supports_coalescing = False
    supports_splitting = False

    def __init__(self, comm: MPI.Intracomm, progress: Progress, store: dist.Store, timeout: timedelta) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self.options = Backend.Options("mpi4py", timeout)
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._comm: MPI.Intracomm = comm
        self._progress = progress
        self._store = store
        self._names = {"name": "", "desc": ""}
        self._tag_limit = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)

    # --- what torch asks of a group -----------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return "mpi4py"

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, desc: str) -> None:
        self._names["desc"] = desc

    def getGroupDesc(self) -> str:
        return self._names["desc"]

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> MPIProcessGroup:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"backend mpi4py has no collectives for {device}, only for cpu")
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        set_timeout_in(self.options, timeout)

    def shutdown(self) -> None:
        """Free the communicator, unless MPI operations on it are pending. Safe to call twice."""
        with self._progress.lock:
            if self._comm != MPI.COMM_NULL and not MPI.Is_finalized() and not self._progress.works_for(self):
                self._comm.Free()

    # --- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        parts = [_Reduced(tensor, tensor, opts) for tensor in tensors]

        def post() -> list[MPI.Request]:
            return [
                self._comm.Iallreduce(MPI.IN_PLACE, part.reduction.spec(chunk), part.reduction.op)
                for part in parts
                for chunk in chunks(part.input)
            ]

        def finish(_: Any) -> None:
            for part in parts:
                part.finish(self._size)

        return self._start("all-reduce", post, tensors, finish, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,) = tensors
        part, root = _Reduced(tensor, tensor, opts), opts.rootRank
        here = root == self._rank

        def post() -> list[MPI.Request]:
            specs = [part.reduction.spec(chunk) for chunk in chunks(part.input)]
            op = part.reduction.op
            if here:
                return [self._comm.Ireduce(MPI.IN_PLACE, spec, op, root) for spec in specs]
            return [self._comm.Ireduce(spec, None, op, root) for spec in specs]

        def finish(_: Any) -> None:
            if here:
                part.finish(self._size)

        return self._start("reduce", post, tensors, finish, opts)

    # --- the same for all ---------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        staged = [flat(tensor) for tensor in tensors]

        def post() -> list[MPI.Request]:
            return [self._comm.Ibcast(moved(chunk), opts.rootRank) for tensor in staged for chunk in chunks(tensor)]

        return self._start("broadcast", post, tensors, lambda _: _copy_all(staged, tensors), opts)

    def allgather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = None) -> Work:
        for outputs, input in zip(output_tensors, input_tensors, strict=True):
            _require_equal("all_gather", outputs, input, self._size)
        inputs = [flat(tensor) for tensor in input_tensors]
        results = [tensor.new_empty(self._size * tensor.numel()) for tensor in inputs]

        def finish(_: Any) -> None:
            for outputs, result in zip(output_tensors, results, strict=True):
                _copy_all(result.chunk(self._size) if result.numel() else [result] * self._size, outputs)

        return self._all_gather(
            inputs, results, [output for outputs in output_tensors for output in outputs], finish, opts
        )

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        if output.numel() != self._size * input.numel() or output.dtype != input.dtype:
            raise ConfigurationError(
                f"all_gather needs an output of {self._size} x {input.numel()} elements of {input.dtype}, got "
                f"{output.numel()} of {output.dtype}."
            )
        result = flat(output)
        sent = flat(input).clone() if shares(input, output) else flat(input)
        return self._all_gather([sent], [result], [output], lambda _: copy_back(result, output), opts)

    _allgather_base = all_gather_single

    def _all_gather(self, inputs: Tensors, results: Tensors, outputs: Tensors, finish: Finish, opts: Any) -> Work:
        def post() -> list[MPI.Request]:
            return [
                self._comm.Iallgather(moved(input), moved(result, self._size))
                for input, result in zip(inputs, results, strict=True)
            ]

        return self._start("all-gather", post, outputs, finish, opts)

    def barrier(self, opts: Any = None) -> Work:
        return self._start("barrier", lambda: [self._comm.Ibarrier()], [], None, opts)

    # --- to each and from each ----------------------------------------------------------------------------------------

    def gather(self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any) -> Work:
        (input,), root = [flat(tensor) for tensor in input_tensors], opts.rootRank
        outputs = output_tensors[0] if root == self._rank else []
        if root == self._rank:
            _require_equal("gather", outputs, input, self._size)
        result = input.new_empty(len(outputs) * input.numel())

        def post() -> list[MPI.Request]:
            received = moved(result, self._size) if outputs else None
            return [self._comm.Igather(moved(input), received, root)]

        return self._start("gather", post, outputs, lambda _: _copy_all(_split(result, outputs), outputs), opts)

    def scatter(self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        (output,), root = output_tensors, opts.rootRank
        result, sent = flat(output), None
        if root == self._rank:
            _require_equal("scatter", input_tensors[0], output, self._size)
            sent = torch.cat([flat(tensor) for tensor in input_tensors[0]])

        def post() -> list[MPI.Request]:
            return [self._comm.Iscatter(None if sent is None else moved(sent, self._size), moved(result), root)]

        return self._start("scatter", post, output_tensors, lambda _: copy_back(result, output), opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        received, sent = flat(output), flat(input)
        counts = _rows(output, output_split_sizes, self._size), _rows(input, input_split_sizes, self._size)
        sent = sent.clone() if shares(sent, received) else sent
        return self._all_to_all(received, sent, counts, [output], lambda _: copy_back(received, output), opts)

    alltoall_base = all_to_all_single

    def _all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        counts: tuple[list[int], list[int]],
        outputs: Tensors,
        finish: Finish,
        opts: Any,
    ) -> Work:
        def post() -> list[MPI.Request]:
            return [self._comm.Ialltoallv(moved_in_parts(sent, counts[1]), moved_in_parts(received, counts[0]))]

        return self._start("all-to-all", post, outputs, finish, opts)

    # --- point to point -----------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        (tensor,) = [flat(tensor) for tensor in tensors]
        self._check_tag(tag)

        def post() -> list[MPI.Request]:
            return [self._comm.Isend(moved(chunk), dst, tag) for chunk in chunks(tensor)]

        # Don't touch the tensor until MPI is done with it.
        return self._start(f"send to rank {dst} of the group", post, [tensor], None, None)

    def recv(self, tensors: Tensors, src: int, tag: int) -> Work:
        (tensor,) = tensors
        staged = flat(tensor)
        self._check_tag(tag)

        def post() -> list[MPI.Request]:
            return [self._comm.Irecv(moved(chunk), src, tag) for chunk in chunks(staged)]

        def finish(statuses: list[MPI.Status]) -> None:
            came = sum(status.Get_count(MPI.BYTE) for status in statuses)
            if came != staged.nbytes:
                source = statuses[0].Get_source()
                raise RuntimeError(
                    f"rank {source} of the group sent {came} bytes, but {staged.nbytes} were to be received"
                )
            copy_back(staged, tensor)

        whom = "any rank" if src == MPI.ANY_SOURCE else f"rank {src}"
        return self._start(f"receive from {whom} of the group", post, tensors, finish, None, receives=True)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        if tensors[0].numel() > CHUNK:
            raise ConfigurationError(
                f"from any rank, at most {CHUNK} elements can be received at once, got {tensors[0].numel()}. Name the "
                "source."
            )
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._tag_limit:
            raise ConfigurationError(f"tag must lie in [0, {self._tag_limit}] with this MPI library, got {tag}.")

    def _start(
        self,
        name: str,
        post: Callable[[], list[MPI.Request]],
        outputs: Tensors,
        finish: Finish | None,
        opts: Any,
        receives: bool = False,
    ) -> Work:
        timeout = getattr(opts, "timeout", _UNSET)
        operation = Operation(name, post, outputs, finish, receives)
        return self._progress.start(operation, self, timeout if timeout > _UNSET else timeout_in(self.options))


class _Reduced:
    """A tensor to be reduced.

    Attributes:
        input: The tensor that MPI reduces.
        output: The tensor that receives the result.
    """

    def __init__(self, tensor: torch.Tensor, output: torch.Tensor, opts: Any) -> None:
        self.reduction = Reduction.of(_SUM if opts is None else opts.reduceOp.op, tensor.dtype)
        self.input = self.reduction.stage(tensor)
        self.output = output

    def finish(self, size: int) -> None:
        self.reduction.unstage(self.input, self.output, size)


def _copy_all(staged: Sequence[torch.Tensor], tensors: Tensors) -> None:
    for source, tensor in zip(staged, tensors, strict=True):
        copy_back(source, tensor)


def _split(tensor: torch.Tensor, like: Tensors) -> Sequence[torch.Tensor]:
    return tensor.split([other.numel() for other in like]) if like else []


def _rows(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int]:
    """Number of elements for each rank; ``sizes`` counts rows, and empty means equal parts."""
    rows = tensor.size(0) if tensor.dim() else 0
    if (not sizes and rows % ranks) or (sizes and (len(sizes) != ranks or sum(sizes) != rows)):
        raise ConfigurationError(
            f"all_to_all_single splits {rows} rows among {ranks} ranks, and the sizes {list(sizes)} do not add up."
        )
    width = tensor.numel() // rows if rows else 0
    return [size * width for size in sizes or [rows // ranks] * ranks]


def _require_equal(name: str, many: Tensors, one: torch.Tensor, ranks: int) -> None:
    if len(many) != ranks or any((t.numel(), t.dtype) != (one.numel(), one.dtype) for t in many):
        raise ConfigurationError(
            f"{name} needs {ranks} tensors of {one.numel()} elements of {one.dtype}, one for each rank, got "
            f"{[f'{t.numel()} of {t.dtype}' for t in many]}."
        )
