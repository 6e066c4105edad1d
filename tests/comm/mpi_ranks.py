"""What the tests of ``backend="mpi4py"`` run on each rank: ``mpiexec -n 3 python mpi_ranks.py FUNCTION ARGUMENTS``."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
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
from ddp_callbacks.errors import ConfigurationError, RendezvousError
from ddp_callbacks.process_group.control_channel import Connection

Op = dist.ReduceOp
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
ONLY_MOVED = (torch.bool, torch.complex64)
SIZES = ((), (0,), (3, 5), (40_000,))
PATIENCE = timedelta(seconds=300)  # beside whatever else the machine does
RELATIVE = 1e-10
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


def parts(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    """What each of the ranks puts in: whole numbers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(17)
    return [torch.randint(0, 3, shape, generator=generator).to(dtype) for _ in range(dist.get_world_size())]


def scattered(tensor: Tensor) -> Tensor:
    """The same values, but not side by side in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0]


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
    came = scattered(nothing)
    works = [dist.irecv(came, (rank - 1) % ranks, tag=7), dist.isend(scattered(mine[rank]), (rank + 1) % ranks, tag=7)]
    assert all(work is not None and work.wait() and work.is_completed() for work in works)
    yield "irecv before isend", came, mine[rank - 1]


REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    Op.SUM: lambda stack: stack.sum(0),
    Op.PRODUCT: lambda stack: stack.prod(0),
    Op.MIN: lambda stack: stack.amin(0),
    Op.MAX: lambda stack: stack.amax(0),
}


def reductions(rank: int, mine: list[Tensor]) -> Iterator[tuple[str, Any, Any]]:
    last = len(mine) - 1
    for (op, reduced), layout in itertools.product(REDUCTIONS.items(), (torch.clone, scattered)):
        expected = reduced(torch.stack(mine).double()).to(mine[0].dtype)
        dist.all_reduce(tensor := layout(mine[rank]), op)
        yield f"all_reduce {op}", tensor, expected
        dist.reduce(tensor := layout(mine[rank]), last, op)
        yield f"reduce {op}", tensor, expected if rank == last else mine[rank]


@check
def every_operation() -> None:
    assert dist.get_backend() == "mpi4py"
    for dtype, shape in itertools.product((*DTYPES, *ONLY_MOVED), SIZES):
        rank, mine = dist.get_rank(), parts(dtype, shape)
        results = itertools.chain(moves(rank, mine), reductions(rank, mine) if dtype in DTYPES else ())
        for name, actual, expected in results:
            said = f"{name} {dtype} {shape}: "
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text, said=said: said + text)


@check
def halves_are_summed_in_float32() -> None:
    """And rounded once: 256 + 1 + 1 is 258 in bfloat16, but 256 + 1 is 256."""
    own = torch.tensor([256.0 if dist.get_rank() == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(own)
    assert own.item() == 258


@check
def what_it_lacks_is_named() -> None:
    out, many = torch.zeros(1), [torch.zeros(1) for _ in range(dist.get_world_size())]
    for lacking in (
        lambda: dist.reduce_scatter(out, many),
        lambda: dist.all_reduce(out, Op.AVG),
        lambda: dist.all_reduce(torch.zeros(1, dtype=torch.bool)),
        lambda: dist.all_reduce(many[0].int(), Op.BOR),
        lambda: dist.all_to_all_single(torch.zeros(dist.get_world_size()), torch.zeros(dist.get_world_size())),
        lambda: dist.broadcast(torch.zeros(1).to_sparse(), 0),
    ):
        try:
            lacking()
        except ConfigurationError as error:
            assert "gloo" in str(error)
        else:
            raise AssertionError(lacking)


@check
def a_short_message_raises() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(torch.ones(2), (rank + 1) % ranks)
    try:
        dist.recv(torch.zeros(3), (rank - 1) % ranks)
    except RuntimeError as error:
        assert "8 bytes came for a tensor of 12" in str(error)
    else:
        raise AssertionError("the tail is what it was")
    assert sent is not None and sent.wait()


@check
def a_group_that_rank_0_does_not_create() -> None:
    dist.barrier()
    if dist.get_rank() > 0:
        try:
            dist.new_group([0, 1, 2], timeout=timedelta(seconds=1), use_local_synchronization=True)
        except RendezvousError as error:
            assert "but [0" in str(error)
        else:
            raise AssertionError("a group without rank 0")


@check
def who_waits_leaves_the_core_alone() -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(2)
    begin = time.process_time()
    dist.barrier()
    assert time.process_time() - begin < 1


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
            dist.isend(torch.full((size,), float(tag)), (rank + 1) % ranks, tag=tag)  # nobody keeps it
        random.Random(1000 * seed + rank).shuffle(pending)
        for work, tensor, expected in pending:
            work.wait()
            assert (tensor == expected).all()


# --- training ---------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


@check
def gradients() -> None:
    """torch's DDP, and our engine."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.randn(6 * ranks, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    alone, engine = network(), network()
    alone(rows).square().mean().backward()
    GradientSynchronizer(engine)
    for model in (nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001), engine):
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


# --- plain torch, and what goes wrong ---------------------------------------------------------------------------------


def tutorial() -> None:
    """The program of torch's tutorials, with "mpi4py" for "mpi"."""
    import ddp_callbacks.mpi  # noqa: F401

    dist.init_process_group(backend="mpi4py", init_method="mpi://")
    if dist.get_rank() == 0:
        x = torch.tensor([1.0, -1.0])
        dist.send(x, dst=1)
    else:
        z = torch.tensor([0.0, 0.0])
        dist.recv(z, src=0)
        print("received", z.tolist(), flush=True)


def misfortune(how: str) -> None:
    """Rank 1 comes to grief while rank 0 waits for it."""
    join_process_group(backend="mpi4py", timeout=PATIENCE)
    dist.barrier()
    if dist.get_rank() == 1:
        HAPPENS[how]()
    else:
        dist.recv(torch.ones(4), src=1)


def raises() -> None:
    raise ValueError("sensor 7 gave nothing")


HAPPENS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "exits with 3": lambda: sys.exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "returns": lambda: None,
}


def through_gloo() -> None:
    env = join_process_group(timeout=PATIENCE)
    dist.all_reduce(ranks := torch.tensor([env.rank + 1, env.local_rank + 1, 1]))
    assert dist.get_backend() == "gloo" and ranks.tolist() == [6, 6, 3]


def joins() -> None:
    join_process_group(backend="mpi4py", timeout=PATIENCE)


def joins_alone() -> None:
    joins()
    assert not dist.is_initialized()


def joins_without_variables() -> None:
    from mpi4py import MPI

    assert MPI.COMM_WORLD.Get_size() == 2
    os.environ.clear()
    joins()


def ends_apart() -> None:
    joins()
    dist.barrier()
    time.sleep(4 * dist.get_rank())  # longer than rank 0 lingers


def hears_late_that_all_have_come() -> None:
    """Rank 0 must be able to tell it, while it starts MPI itself."""
    send = Connection.send

    def send_late(to: Connection, message: dict[str, Any]) -> None:
        time.sleep(to.rank * (message["event"] == "names"))  # on rank 0, this is its thread
        send(to, message)

    Connection.send = send_late  # type: ignore[method-assign]
    joins()


def makes_groups_beside_gloo() -> None:
    """A group of some ranks would wait for ever: MPI starts in all of them at once."""
    rank = join_process_group(timeout=PATIENCE).rank
    importlib.import_module("ddp_callbacks.mpi")
    if rank == 0:
        try:
            dist.new_group([0], backend="mpi4py", use_local_synchronization=True)
        except ConfigurationError as error:
            assert "MPI starts in all 2 processes at once, but this group has only the ranks [0]" in str(error)
        else:
            raise AssertionError("a group of some ranks")
    dist.all_reduce(number := torch.ones(1), group=dist.new_group(backend="mpi4py"))
    assert number.item() == 2


def gives_up() -> None:
    joins()
    if dist.get_rank() == 0:
        work = dist.barrier(async_op=True)
        try:
            work.wait(timedelta(seconds=0.1))
        except RuntimeError:
            return


def loads_with_spawned_workers() -> None:
    from ddp_callbacks.mpi import _still_pending  # so that workers import it, too

    joins()
    loader = DataLoader(range(4), None, num_workers=1, multiprocessing_context="spawn", worker_init_fn=_still_pending)  # type: ignore
    assert [*loader] == [0, 1, 2, 3]


def joins_without_mpi4py() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    joins()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    importlib.import_module("kit.paths").find_tests()
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
