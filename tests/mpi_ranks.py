"""What the tests of ``backend="mpi4py"`` run on each rank: ``mpiexec -n 3 python mpi_ranks.py FUNCTION ARGUMENTS``."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_callbacks import GradientSynchronizer, join_process_group, leave_process_group

Op = dist.ReduceOp
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
EVERY = (*FLOATS, *WHOLE, *COMPLEX, torch.bool)
SIZES = ((), (0,), (3, 5), (40_000,))
PATIENCE = timedelta(seconds=300)  # beside whatever else the machine does

# --- a reference: every rank knows what all have ----------------------------------------------------------------------


def parts(ranks: int, seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """What each of the ranks puts in: whole numbers, whose sums and products are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randint(0, 3, shape, generator=generator) for _ in range(ranks)]
    if dtype.is_complex:
        return [torch.complex(part.double(), -part.double() + 1).to(dtype) for part in made]
    return [part.to(dtype) for part in made]


def reduced(op: Any, parts: list[torch.Tensor]) -> torch.Tensor:
    """In float64 or int64, rounded once."""
    first, dtype = parts[0], parts[0].dtype
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = torch.stack([part.to(wide) for part in parts])
    if op == Op.SUM:
        total = stack.sum(0)
    elif op == Op.AVG and dtype.is_complex:
        total = torch.view_as_complex(torch.view_as_real(stack.sum(0)) / len(parts))
    elif op == Op.AVG:
        total = stack.sum(0) / len(parts)
    elif op == Op.PRODUCT:
        total = stack.prod(0)
    elif op == Op.MIN:
        total = stack.amin(0)
    elif op == Op.MAX:
        total = stack.amax(0)
    else:
        bitwise = {Op.BAND: torch.bitwise_and, Op.BOR: torch.bitwise_or, Op.BXOR: torch.bitwise_xor}
        (combine,) = [function for known, function in bitwise.items() if known == op]
        total = stack[0]
        for part in stack[1:]:
            total = combine(total, part)
    return (total != 0).to(dtype) if first.dtype == torch.bool else total.to(dtype)


def scattered(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, but not side by side in memory."""
    return torch.stack([tensor, tensor], -1)[..., 0] if tensor.numel() else tensor


def require(actual: Any, expected: Any, what: object) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


# --- every collective -------------------------------------------------------------------------------------------------


def every_collective() -> None:
    env = join_process_group(backend="mpi4py", timeout=PATIENCE)
    assert dist.get_backend() == "mpi4py"
    for index, dtype in enumerate(EVERY):
        for shape in SIZES:
            moves(env.rank, env.world_size, 100 * index, dtype, shape)
            reductions(env.rank, env.world_size, 100 * index, dtype, shape)
    average_of_halves(env.rank, env.world_size)
    refusals(env.rank)
    objects(env.rank, env.world_size)


def moves(rank: int, ranks: int, seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mine, what = parts(ranks, seed, dtype, shape), (dtype, shape)
    for root in range(ranks):
        given = scattered(mine[rank].clone())
        dist.broadcast(given, root)
        require(given, mine[root], ("broadcast", what))
        collected = [scattered(torch.zeros_like(mine[0])) for _ in range(ranks)] if rank == root else None
        dist.gather(mine[rank], collected, root)
        require(collected, mine if rank == root else None, ("gather", what))
        taken = scattered(torch.zeros_like(mine[0]))
        dist.scatter(taken, [scattered(part) for part in mine] if rank == root else None, root)
        require(taken, mine[rank], ("scatter", what))
    collected = [scattered(torch.zeros_like(part)) for part in mine]
    dist.all_gather(collected, scattered(mine[rank]))
    require(collected, mine, ("all_gather", what))
    whole = torch.zeros(ranks, *shape, dtype=dtype)
    dist.all_gather_single(whole.view(-1), mine[rank].reshape(-1))
    require(whole, torch.stack(mine), ("all_gather_single", what))
    dist.all_gather_single(whole.view(-1), whole[rank].reshape(-1))
    require(whole, torch.stack(mine), ("all_gather_single in place", what))
    rows = [torch.arange((rank + 1) * (other + 1), dtype=torch.float64) for other in range(ranks)]
    received = torch.zeros(sum((other + 1) * (rank + 1) for other in range(ranks)), dtype=torch.float64)
    dist.all_to_all_single(
        received,
        torch.cat(rows),
        [(other + 1) * (rank + 1) for other in range(ranks)],
        [(rank + 1) * (other + 1) for other in range(ranks)],
    )
    require(received, torch.cat([torch.arange((o + 1) * (rank + 1), dtype=torch.float64) for o in range(ranks)]), what)
    # Around the ring, all at once.
    came = scattered(torch.zeros_like(mine[0]))
    works = [dist.irecv(came, (rank - 1) % ranks, tag=7), dist.isend(scattered(mine[rank]), (rank + 1) % ranks, tag=7)]
    for work in works:
        assert work is not None and work.wait() and work.is_completed()
    require(came, mine[rank - 1], ("send and recv", what))


def reductions(rank: int, ranks: int, seed: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    operations = [Op.SUM]
    if not dtype.is_complex:
        operations += [Op.PRODUCT, Op.MIN, Op.MAX]
    if dtype.is_complex or dtype.is_floating_point:
        operations += [Op.AVG]
    elif not dtype.is_complex:
        operations += [Op.BAND, Op.BOR, Op.BXOR]
    for op in operations:
        mine, what = parts(ranks, seed, dtype, shape), (op, dtype, shape)
        for layout in (torch.clone, scattered):
            tensor = layout(mine[rank])
            work = dist.all_reduce(tensor, op, async_op=True)
            assert work is not None
            work.wait()
            require(tensor, reduced(op, mine), ("all_reduce", what))
        tensor = mine[rank].clone()
        dist.reduce(tensor, ranks - 1, op)
        require(tensor, reduced(op, mine) if rank == ranks - 1 else mine[rank], ("reduce", what))


def average_of_halves(rank: int, ranks: int) -> None:
    """Summed in float32 and rounded once: 256 + 1 + 1 is 258 in bfloat16, but 256 + 1 is 256."""
    for dtype in (torch.bfloat16, torch.float16):
        large = 2.0 ** (8 if dtype == torch.bfloat16 else 11)
        tensor = torch.tensor([large if rank == 0 else 2.0 / (ranks - 1)], dtype=dtype)
        dist.all_reduce(tensor)
        assert tensor.item() == large + 2
        tensor = torch.full((1,), 60_000.0, dtype=torch.float16)
        dist.all_reduce(tensor, Op.AVG)
        assert tensor.item() == torch.tensor(60_000.0, dtype=torch.float16).item(), "the sum is beyond float16"


def refusals(rank: int) -> None:
    """Before anything is sent, so that the next collective works."""
    ones, tag = torch.ones(2), 2**31 - 1
    for call, says in (
        (lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), Op.AVG), "cannot reduce torch.int32 by AVG"),
        (lambda: dist.all_reduce(ones, Op.BAND), "cannot reduce torch.float32 by BAND"),
        (lambda: dist.all_reduce(ones.to("meta")), "dense tensors on the CPU"),
        (lambda: dist.all_gather([ones, torch.ones(3)], ones), "one for each rank"),
        (lambda: dist.all_to_all_single(ones.clone(), ones, [9, 9], [9, 9]), "do not add up"),
        (lambda: dist.isend(ones, 1 - min(rank, 1), tag=tag), "tag must lie in"),
    ):
        if "tag" in says and dist.group.WORLD._tag_limit >= tag:  # type: ignore[union-attr]
            continue
        try:
            call()
        except ValueError as error:
            assert says in str(error), error
        else:
            raise AssertionError(f"not refused: {says}")


def objects(rank: int, ranks: int) -> None:
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, {"rank": rank})
    assert found == [{"rank": other} for other in range(ranks)]
    listed = [rank, "of", ranks]
    dist.broadcast_object_list(listed, 1)
    assert listed == [1, "of", ranks]


# --- order ------------------------------------------------------------------------------------------------------------


def any_order(seeds: int) -> None:
    """Many operations of three groups at once; each rank waits for its own in an order of its own."""
    env = join_process_group(backend="mpi4py", timeout=PATIENCE)
    last = env.world_size - 1
    groups = [None, dist.new_group([0, last]), dist.new_group(list(range(env.world_size)))]
    if env.rank in (0, last):
        groups.append(dist.new_group([0, last], use_local_synchronization=True))
    for seed in range(seeds):
        batch = [started for started in start(env.rank, env.world_size, seed, groups) if started]
        random.Random(1000 * seed + env.rank).shuffle(batch)
        for work, check in batch:
            if work.get_future().done() or random.Random(seed).random() < 0.5:
                work.get_future().wait()
            else:
                work.wait()
            check()
    late_partner(env.rank)
    leave_process_group()
    again = join_process_group(backend="mpi4py")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == again.world_size == env.world_size


def start(rank: int, ranks: int, seed: int, groups: list[Any]) -> list[tuple[Any, Callable[[], None]] | None]:
    chosen, last = random.Random(seed), ranks - 1
    started: list[tuple[Any, Callable[[], None]] | None] = []
    for index in range(12):
        kind, where = chosen.choice(("reduce", "broadcast", "gather", "pair")), chosen.randrange(len(groups[:3]))
        shape = (chosen.choice((0, 1, 100, 70_000)),)
        members = [0, last] if where == 1 else list(range(ranks))
        values = parts(ranks, 100 * seed + index, torch.float32, shape)
        if rank not in members:
            continue
        started.append(OPERATIONS[kind](rank, members, values, groups[where], index))
    return started


def start_reduce(rank: int, members: list[int], values: list[torch.Tensor], group: Any, _: int) -> Any:
    tensor = values[rank].clone()
    expected = reduced(Op.SUM, [values[member] for member in members])
    return dist.all_reduce(tensor, group=group, async_op=True), lambda: require(tensor, expected, "all_reduce")


def start_broadcast(rank: int, members: list[int], values: list[torch.Tensor], group: Any, _: int) -> Any:
    tensor, root = values[rank].clone(), members[-1]
    work = dist.broadcast(tensor, root, group=group, async_op=True)
    return work, lambda: require(tensor, values[root], "broadcast")


def start_gather(rank: int, members: list[int], values: list[torch.Tensor], group: Any, _: int) -> Any:
    collected = [torch.zeros_like(values[0]) for _ in members]
    work = dist.all_gather(collected, values[rank].clone(), group=group, async_op=True)
    return work, lambda: require(collected, [values[member] for member in members], "all_gather")


def start_pair(rank: int, members: list[int], values: list[torch.Tensor], group: Any, tag: int) -> Any:
    """From the last member to the first; the tag finds the message, not the order."""
    if rank == members[0]:
        tensor = torch.zeros_like(values[0])
        work = dist.irecv(tensor, members[-1], group=group, tag=tag)
        return work, lambda: require(tensor, values[members[-1]], "recv")
    if rank == members[-1]:
        return dist.isend(values[rank], members[0], group=group, tag=tag), lambda: None
    return None


OPERATIONS = {"reduce": start_reduce, "broadcast": start_broadcast, "gather": start_gather, "pair": start_pair}


def late_partner(rank: int) -> None:
    """A receive that is not answered does not stand in the way of others, can be waited for in slices, by any rank."""
    tensor = torch.zeros(3)
    if rank == 0:
        work = dist.irecv(tensor, 1, tag=5)
        assert work is not None
        dist.all_reduce(torch.ones(100_000))
        begin = time.monotonic()
        try:
            work.wait(timedelta(seconds=0.2))
        except RuntimeError as error:
            assert "receive from rank 1 of the group over MPI is not complete after 0:00:00.2" in str(error), error
        assert 0.2 <= time.monotonic() - begin < PATIENCE.total_seconds() / 4 and not work.is_completed()
        dist.send(torch.ones(3), 1)
        work.wait()
        assert tensor.tolist() == [5, 5, 5]
        assert dist.recv(tensor, tag=6) == 1 and tensor.tolist() == [6, 6, 6]
    else:
        dist.all_reduce(torch.ones(100_000))
        if rank == 1:
            dist.recv(tensor, 0)
            dist.send(torch.full((3,), 5.0), 0, tag=5)
            dist.send(torch.full((3,), 6.0), 0, tag=6)


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(folder: str) -> None:
    """Plain DDP, DDP with hooks that wait inside callbacks, and our engine."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    env = join_process_group(backend="mpi4py", timeout=PATIENCE)
    batch = slice(env.rank * 6, env.rank * 6 + 6)
    found: dict[str, Any] = {}
    wrapped = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    for _ in range(3):
        wrapped.zero_grad()
        loss(wrapped, batch).backward()
    found["DDP"] = [parameter.grad for parameter in wrapped.parameters()]
    hooked = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.001)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    loss(hooked, batch).backward()
    found["DDP with a hook"] = [parameter.grad for parameter in hooked.parameters()]
    powers = nn.parallel.DistributedDataParallel(network().float())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    powers.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(5):
        loss(powers, batch, torch.float32).backward()
    os.environ["DDP_CALLBACKS_SHARED_MEMORY"] = "0"
    model = network()
    GradientSynchronizer(model)
    loss(model, batch).backward()
    found["GradientSynchronizer"] = [parameter.grad for parameter in model.parameters()]
    if env.rank == 0:
        Path(folder, "gradients").write_bytes(pickle.dumps(found))


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def loss(model: nn.Module, batch: slice, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(18, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(dtype)
    return model(x[batch]).square().mean()


# --- hosts ------------------------------------------------------------------------------------------------------------


TRIALS = ("shuffled_ragged_adam", "batches_of_one", "workers", "clipping_and_decay", "early_stopping", "regression")


def torchbearer_scenarios(folder: str, switch: int) -> None:
    from scenarios import SCENARIOS

    from ddp_callbacks.torchbearer import DDPCallback

    os.environ["DDP_CALLBACKS_SHARED_MEMORY"] = str(switch)
    env = join_process_group(backend="mpi4py", timeout=PATIENCE)
    results = {name: SCENARIOS[name]([DDPCallback()]) for name in TRIALS}
    assert dist.get_backend() == "mpi4py"
    Path(folder, f"rank-{env.rank}").write_bytes(pickle.dumps(results))


def forks_workers() -> None:
    """Loaders' workers are forked after MPI was initialized."""
    from torch.utils.data import DataLoader, TensorDataset

    env = join_process_group(backend="mpi4py", timeout=PATIENCE)
    for _ in range(2):
        rows = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, num_workers=2)
        total = torch.zeros(1)
        for (batch,) in rows:
            part = batch.sum()
            dist.all_reduce(part)
            total += part
        assert total.item() == 276 * env.world_size


def lightning(folder: str) -> None:
    from lightning_scenarios import Net, loader, quiet, trainer

    from ddp_callbacks.lightning import CallbackStrategy

    with quiet():
        module = Net()
        trained = trainer(CallbackStrategy(process_group_backend="mpi4py"))  # type: ignore[arg-type]
        trained.fit(module, loader())
    assert dist.get_backend() == "mpi4py"
    if dist.get_rank() == 0:
        Path(folder, "lightning").write_bytes(pickle.dumps([p.detach() for p in module.parameters()]))


# --- plain torch ------------------------------------------------------------------------------------------------------


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


def sleeps() -> None:
    """Neither a group with nothing to do nor a rank that waits for another takes a core."""
    env = join_process_group(backend="mpi4py", timeout=PATIENCE)
    dist.barrier()
    time.sleep(0.1)
    before = time.process_time()
    time.sleep(1.0)
    idle = time.process_time() - before
    dist.barrier()
    before, begin = time.process_time(), time.monotonic()
    if env.rank == 0:
        time.sleep(1.5)
    dist.all_reduce(torch.ones(1))
    used, waited = time.process_time() - before, time.monotonic() - begin
    assert idle < 0.05, f"{idle:.3f} s of a core in 1 s"
    assert env.rank == 0 or used < 0.25 * waited, f"{used:.3f} s of a core in {waited:.3f} s"


# --- what goes wrong --------------------------------------------------------------------------------------------------


def misfortune(how: str, whose: int, waits_in: str) -> None:
    """Rank ``whose`` comes to grief while the others wait for it."""
    if waits_in == "DDP":
        import ddp_callbacks.mpi  # noqa: F401

        dist.init_process_group("mpi4py", init_method="mpi://")
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    else:
        join_process_group(backend="mpi4py", timeout=timedelta(seconds=2) if how == "is stuck" else PATIENCE)
    dist.barrier()
    if how == "is killed":
        from ddp_callbacks.comm.mpi.ending import _unlink_segments

        _unlink_segments()  # nobody else would
    dist.barrier()
    if dist.get_rank() == whose:
        print(f"happens at {time.time()}", flush=True)
        HAPPENS[how]()
    elif waits_in == "DDP":
        model(torch.ones(1, 2)).sum().backward()
    else:
        dist.all_reduce(torch.ones(4))


def raises() -> None:
    raise ValueError("sensor 7 gave nothing")


HAPPENS: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "exits with 3": lambda: sys.exit(3),
    "exits with 0": lambda: sys.exit(0),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "is stuck": lambda: time.sleep(30),
    "returns": lambda: None,
}


def ends_last(rank: int) -> None:
    """One rank ends seconds after the others, which have caught an exit before."""
    join_process_group(backend="mpi4py", timeout=PATIENCE)
    try:
        sys.exit(7)
    except SystemExit as error:
        assert error.code == 7
    pending = dist.irecv(torch.zeros(1), (dist.get_rank() + 1) % 2)  # is never answered
    dist.barrier()
    if dist.get_rank() == rank:
        time.sleep(3.5)  # longer than a rank that fails waits for the others
    print(f"last line of {dist.get_rank()}", flush=True)
    assert pending is not None


def joins() -> None:
    join_process_group(backend="mpi4py", timeout=timedelta(seconds=3))


def one_stays_away() -> None:
    from ddp_callbacks.mpi import place

    if os.environ.get("PMI_RANK") == "1":
        place.__globals__["initialize"]()
        time.sleep(10)
    joins()


def needs_the_default_group() -> None:
    join_process_group(backend="gloo", timeout=PATIENCE)
    import ddp_callbacks.mpi  # noqa: F401

    dist.new_group([0, 1], backend="mpi4py")


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = [int(text) if text.isdigit() else text for text in sys.argv[2:]]
    globals()[sys.argv[1]](*arguments)
