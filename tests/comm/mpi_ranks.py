"""What the tests of ``backend="mpi4py"`` run on each rank: ``mpiexec -n 3 python mpi_ranks.py FUNCTION ARGUMENTS``."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_callbacks import GradientSynchronizer, join_process_group, leave_process_group

Op = dist.ReduceOp
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
COMPLEX = (torch.complex64, torch.complex128)
SIZES = ((), (0,), (3, 5), (40_000,))
PATIENCE = timedelta(seconds=300)  # beside whatever else the machine does
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def all_checks(folder: str) -> None:
    """Each for itself; a file holds the traceback of each, or nothing."""
    rank = join_process_group(backend="mpi4py", timeout=PATIENCE).rank
    found = dict.fromkeys(CHECKS, "")
    for name, function in CHECKS.items():
        try:
            function()
        except Exception:
            found[name] = traceback.format_exc()
    Path(folder, f"rank-{rank}").write_text(json.dumps(found))
    leave_process_group()


# --- every operation, beside a reference that knows what all ranks have -----------------------------------------------


def parts(seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """What each of the ranks puts in: whole numbers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 3, shape, generator=generator) for _ in range(dist.get_world_size())]
    if dtype.is_complex:
        return [torch.complex(part.double(), -part.double() + 1).to(dtype) for part in made]
    return [part.to(dtype) for part in made]


def scattered(tensor: Tensor) -> Tensor:
    """The same values, but not side by side in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def require(actual: Any, expected: Any, *what: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def moves(rank: int, mine: list[Tensor]) -> Iterator[tuple[str, Any, Any]]:
    """The name of each operation that only moves values, what it gave, and what it must give."""
    ranks, nothing = len(mine), torch.zeros_like(mine[0])
    for root in range(ranks):
        dist.broadcast(given := scattered(mine[rank]), root)
        yield "broadcast", given, mine[root]
        collected = [scattered(nothing) for _ in mine] if rank == root else None
        dist.gather(mine[rank], collected, root)
        yield "gather", collected, mine if rank == root else None
        dist.scatter(taken := scattered(nothing), [*map(scattered, mine)] if rank == root else None, root)
        yield "scatter", taken, mine[rank]
    dist.all_gather(collected := [scattered(nothing) for _ in mine], scattered(mine[rank]))
    yield "all_gather", collected, mine
    whole = torch.stack([nothing] * ranks)
    for source in (mine, whole):  # the second time in place
        dist.all_gather_single(whole.view(-1), source[rank].reshape(-1))
        yield "all_gather_single", whole, torch.stack(mine)
    sizes = [(rank + 1) * (other + 1) for other in range(ranks)]
    rows = torch.cat([torch.arange(size) for size in sizes])
    dist.all_to_all_single(received := torch.zeros_like(rows), rows, sizes, sizes)
    yield "all_to_all_single", received, rows  # what one sends to the other is what that sends back
    came = scattered(nothing)
    works = [dist.irecv(came, (rank - 1) % ranks, tag=7), dist.isend(scattered(mine[rank]), (rank + 1) % ranks, tag=7)]
    assert all(work is not None and work.wait() and work.is_completed() for work in works)
    yield "send and recv", came, mine[rank - 1]


REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    Op.SUM: lambda stack: stack.sum(0),
    Op.AVG: lambda stack: stack.sum(0) / len(stack),
    Op.PRODUCT: lambda stack: stack.prod(0),
    Op.MIN: lambda stack: stack.amin(0),
    Op.MAX: lambda stack: stack.amax(0),
    Op.BAND: lambda stack: functools.reduce(torch.bitwise_and, stack),
    Op.BOR: lambda stack: functools.reduce(torch.bitwise_or, stack),
    Op.BXOR: lambda stack: functools.reduce(torch.bitwise_xor, stack),
}
OF_KIND = {  # the operations that there are for each kind of dtype
    FLOATS: (Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX),
    WHOLE: (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR),
    COMPLEX: (Op.SUM, Op.AVG),
}


def reduced(op: Any, mine: list[Tensor]) -> Tensor:
    """In float64 or int64, rounded once."""
    dtype = mine[0].dtype
    stack = torch.stack(mine)
    if dtype.is_complex:
        return torch.view_as_complex(REDUCTIONS[op](torch.view_as_real(stack).double())).to(dtype)
    total = REDUCTIONS[op](stack.to(torch.float64 if dtype.is_floating_point else torch.int64))
    return (total != 0) if dtype == torch.bool else total.to(dtype)


@check
def every_operation() -> None:
    assert dist.get_backend() == "mpi4py"
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    for kind, operations in OF_KIND.items():
        for dtype, shape in itertools.product(kind, SIZES):
            mine = parts(17, dtype, shape)
            for name, actual, expected in moves(rank, mine):
                require(actual, expected, name, dtype, shape)
            for op, layout in itertools.product(operations, (torch.clone, scattered)):
                work = dist.all_reduce(tensor := layout(mine[rank]), op, async_op=True)
                assert work is not None
                work.wait()
                require(tensor, reduced(op, mine), "all_reduce", op, dtype, shape)
                dist.reduce(tensor := layout(mine[rank]), last, op)
                require(tensor, reduced(op, mine) if rank == last else mine[rank], "reduce", op, dtype, shape)


@check
def halves_are_summed_in_float32() -> None:
    """And rounded once: 256 + 1 + 1 is 258 in bfloat16, but 256 + 1 is 256."""
    own = torch.tensor([256.0 if dist.get_rank() == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(own)
    assert own.item() == 258
    dist.all_reduce(large := torch.full((1,), 60_000.0, dtype=torch.float16), Op.AVG)
    assert large.item() == torch.tensor(60_000.0, dtype=torch.float16).item(), "the sum is beyond float16"


# --- order ------------------------------------------------------------------------------------------------------------


@check
def any_order() -> None:
    """Many operations of three groups at once; each rank waits for its own in an order of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    members = [range(ranks), (0, ranks - 1), range(ranks)]
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for seed in range(20):
        chosen, pending = random.Random(seed), []
        for tag in range(6):
            where, size = chosen.randrange(3), chosen.choice((0, 1, 100, 70_000))
            if rank in members[where]:
                work = dist.all_reduce(own := torch.full((size,), 10.0**rank), group=groups[where], async_op=True)
                pending.append((work, own, sum(10.0**member for member in members[where])))
            pending.append((dist.irecv(came := torch.zeros(size), (rank - 1) % ranks, tag=tag), came, tag))
            pending.append(
                (dist.isend(sent := torch.full((size,), float(tag)), (rank + 1) % ranks, tag=tag), sent, tag)
            )
        random.Random(1000 * seed + rank).shuffle(pending)
        for work, tensor, expected in pending:
            (work.get_future() if chosen.random() < 0.5 else work).wait()
            assert (tensor == expected).all()


# --- training ---------------------------------------------------------------------------------------------------------

RELATIVE = 1e-10


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


@check
def gradients() -> None:
    """Plain DDP, DDP with a hook that waits inside callbacks, and our engine."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.randn(6 * ranks, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    alone, engine = network(), network()
    alone(rows).square().mean().backward()
    plain, hooked = (nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001) for _ in range(2))
    hooked.register_comm_hook(None, allreduce_hook)
    GradientSynchronizer(engine)
    for model in (plain, hooked, engine):
        for _ in range(2):
            model.zero_grad()
            model(rows.chunk(ranks)[rank]).square().mean().backward()
        for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad, rtol=RELATIVE, atol=1e-14)


@check
def a_trial() -> None:
    """With loaders whose workers are forked after MPI was initialized."""
    from kit.compare import assert_equal
    from trials import data, train, trial

    from ddp_callbacks.torchbearer import DDPCallback

    loader = DataLoader(data(23), 5, shuffle=True, num_workers=2)
    assert_equal(train(trial([DDPCallback()]), loader), train(trial([]), loader), RELATIVE)


@check
def sleeps() -> None:
    """Neither a group with nothing to do nor a rank that waits for another takes a core."""
    dist.barrier()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    idle = time.process_time() - before
    dist.barrier()
    before, begin = time.process_time(), time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(1.5)
    dist.all_reduce(torch.ones(1))
    used, waited = time.process_time() - before, time.monotonic() - begin
    assert idle < 0.05, f"{idle:.3f} s of a core in 1 s"
    assert dist.get_rank() == 0 or used < 0.25 * waited, f"{used:.3f} s of a core in {waited:.3f} s"


def a_trainer() -> None:
    from kit.compare import assert_equal
    from trainers import Net, loader, quiet, trainer

    from ddp_callbacks.lightning import CallbackStrategy

    found = []
    for strategy in (CallbackStrategy(process_group_backend="mpi4py"), "auto"):  # type: ignore[arg-type]
        with quiet():
            module = Net()
            trainer(strategy).fit(module, loader())
        found.append([parameter.detach() for parameter in module.parameters()])
    assert dist.get_backend() == "mpi4py"
    assert_equal(*found, RELATIVE)


def tutorial() -> None:
    """The program of torch's tutorials, with "mpi4py" for "mpi"."""
    import ddp_callbacks.mpi  # noqa: F401

    dist.init_process_group(backend="mpi4py", init_method="mpi://")
    if dist.get_rank() == 0:
        x = torch.tensor([1.0, -1.0])
        dist.send(x, dst=1)
    elif dist.get_rank() == 1:
        z = torch.tensor([0.0, 0.0])
        dist.recv(z, src=0)
        print("received", z.tolist(), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def misfortune(how: str, waits_in: str) -> None:
    """Rank 1 comes to grief while rank 0 waits for it."""
    if waits_in == "DDP":
        import ddp_callbacks.mpi  # noqa: F401

        dist.init_process_group("mpi4py", init_method="mpi://")
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    else:
        join_process_group(backend="mpi4py", timeout=timedelta(seconds=2) if how == "is stuck" else PATIENCE)
    dist.barrier()
    if dist.get_rank() == 1:
        print(f"happens at {time.time()}", flush=True)
        HAPPENS[how]()
    elif waits_in == "DDP":
        model(torch.ones(1, 2)).sum().backward()
    else:
        dist.all_reduce(torch.ones(4))


def raises() -> None:
    raise ValueError("sensor 7 gave nothing")


def is_killed() -> None:
    """Without the files of MPICH in /dev/shm, which nobody else would remove."""
    for path in set(re.findall(r"/dev/shm/mpich_shm_\w+$", Path("/proc/self/maps").read_text(), re.MULTILINE)):
        Path(path).unlink(missing_ok=True)
    os.kill(os.getpid(), signal.SIGKILL)


HAPPENS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "exits with 3": lambda: sys.exit(3),
    "is killed": is_killed,
    "is interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "is stuck": lambda: time.sleep(30),
    "returns": lambda: None,
}


def ends_last() -> None:
    """Rank 0 ends seconds after the other; both have caught an exit before."""
    join_process_group(backend="mpi4py", timeout=PATIENCE)
    try:
        sys.exit(7)
    except SystemExit as error:
        assert error.code == 7
    pending = dist.irecv(torch.zeros(1), (dist.get_rank() + 1) % 2)  # is never answered
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(3.5)  # longer than a rank that fails waits for the others
    print(f"last line of {dist.get_rank()}", flush=True)
    assert pending is not None


def joins() -> None:
    join_process_group(backend="mpi4py", timeout=timedelta(seconds=3))


def joins_without_mpi4py() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    joins()


def one_stays_away() -> None:
    if os.environ.get("PMI_RANK") == "1":
        from mpi4py import MPI

        assert MPI.Is_initialized()
        time.sleep(10)
    joins()


def needs_the_default_group() -> None:
    join_process_group(backend="gloo", timeout=PATIENCE)
    import ddp_callbacks.mpi  # noqa: F401

    dist.new_group([0, 1], backend="mpi4py")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("kit.paths").find_tests()
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
