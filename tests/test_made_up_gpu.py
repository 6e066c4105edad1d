"""The path of GPUs, without one: tensors claim to be on a GPU, and what would make the host wait for it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from made_up_gpu import CUDA, HostWaits, MadeUpGpu, put_on_gpu
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.comm.collectives import all_gather_json, all_reduce, broadcast
from ddp_callbacks.comm.cpu_group import cpu_group
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import resolve_group

SAMPLES = ((5, 3), (2, 6), (4, 4))  # by step and rank
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)]
    return nn.Sequential(*layers).double()


def part(step: int, rank: int) -> Tensor:
    return torch.randn(SAMPLES[step][rank], 6, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


Step = Callable[[GradientSynchronizer, nn.Module, int, Tensor], None]


def with_total(sync: GradientSynchronizer, model: nn.Module, step: int, x: Tensor) -> None:
    sync.weigh(len(x), sum(SAMPLES[step]))
    loss_of(model, x).backward()


def without_total(sync: GradientSynchronizer, model: nn.Module, step: int, x: Tensor) -> None:
    sync.weigh(len(x))
    loss_of(model, x).backward()


def at_the_root(sync: GradientSynchronizer, model: nn.Module, step: int, x: Tensor) -> None:
    loss = loss_of(model, x)
    undo = sync.weigh_loss(loss, len(x), sum(SAMPLES[step]))
    loss.backward()
    undo()


def accumulated(sync: GradientSynchronizer, model: nn.Module, step: int, x: Tensor) -> None:
    sync.weigh(1, sum(SAMPLES[step]))
    with sync.no_sync():
        (loss_of(model, x[:1])).backward()
    sync.weigh(len(x) - 1, sum(SAMPLES[step]))
    loss_of(model, x[1:]).backward()


STEPS: dict[str, tuple[Step, dict[str, Any]]] = {
    "one bucket": (with_total, {}),
    "many buckets": (with_total, {"bucket_cap_mb": MANY_BUCKETS}),
    "total unknown": (without_total, {"bucket_cap_mb": MANY_BUCKETS}),
    "weighed loss": (at_the_root, {}),
    "accumulated": (accumulated, {"bucket_cap_mb": MANY_BUCKETS}),
    "comm hook": (with_total, {"bucket_cap_mb": MANY_BUCKETS, "comm_hook": default_hooks.allreduce_hook}),
}


def gradients_on_a_gpu(name: str, set_to_none: bool) -> list[list[Tensor]]:
    """The gradients of each step; from the second step on, the host must not wait for the GPU."""
    step, options = STEPS[name]
    found = []
    with MadeUpGpu() as gpu:
        model = put_on_gpu(network())
        sync = GradientSynchronizer(model, **options)
        for index in range(len(SAMPLES)):
            x = part(index, dist.get_rank()).to(CUDA)
            model.zero_grad(set_to_none=set_to_none)
            if index:
                with gpu.forbid_waiting():
                    step(sync, model, index, x)
            else:
                step(sync, model, index, x)
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert {gradient.device for gradient in gradients} == {CUDA}
            found.append([gradient.cpu().clone() for gradient in gradients])
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_the_engine_gives_the_gradients_of_one_process_and_its_host_never_waits_for_the_gpu(
    name: str, set_to_none: bool
) -> None:
    for found in run_distributed(gradients_on_a_gpu, 2, name, set_to_none):
        for index, gradients in enumerate(found):
            model = network()
            loss_of(model, torch.cat([part(index, rank) for rank in range(2)])).backward()
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=1e-12)


def waits_in_a_hook() -> str:
    """A hook of the user's reads its contribution, in the third backward."""
    with MadeUpGpu() as gpu:
        model = put_on_gpu(network())
        sync = GradientSynchronizer(model)
        for index in range(2):
            with_total(sync, model, index, part(index, dist.get_rank()).to(CUDA))
        x = part(2, dist.get_rank()).to(CUDA)
        with gpu.forbid_waiting(), pytest.raises(HostWaits) as caught:
            loss_of(model, x).item()
        return str(caught.value)


def test_what_would_wait_is_noticed() -> None:
    assert run_distributed(waits_in_a_hook, 2) == ["item"] * 2


def gradients_while_backward_runs() -> list[list[bool]]:
    """Of each step: which parameters have a gradient when the middle layer's backward begins."""
    found = []
    with MadeUpGpu():
        model = put_on_gpu(network())
        sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS)

        def look(_: nn.Module, __: Any) -> None:
            found.append([parameter.grad is not None for parameter in model.parameters()])

        model[2].register_full_backward_pre_hook(look)
        for index in range(2):
            model.zero_grad()
            with_total(sync, model, index, part(index, dist.get_rank()).to(CUDA))
    return found


def test_a_gradient_is_in_memory_once() -> None:
    """When the middle layer's backward begins, those of the last one are in their buffer and nowhere else."""
    for found in run_distributed(gradients_while_backward_runs, 2):
        assert found == [[False] * 6] * 2


def power_sgd() -> list[Tensor]:
    group = resolve_group()
    found = []
    for on_gpu in (False, True):
        with MadeUpGpu() as gpu:
            model = put_on_gpu(network()) if on_gpu else network()
            state = PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
            sync = GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS, comm_hook=powerSGD_hook, comm_state=state)
            for index in (0, 1, 2, 1, 2):
                x = part(index, dist.get_rank())
                model.zero_grad()
                with_total(sync, model, index, x.to(CUDA) if on_gpu else x)
            sync.close()
            found += [torch.cat([p.grad.cpu().view(-1) for p in model.parameters() if p.grad is not None])]
            del gpu
    return found


def test_a_hook_whose_futures_communicate_gives_the_same_on_a_gpu() -> None:
    for on_cpu, on_gpu in run_distributed(power_sgd, 2):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-12)


def capture() -> str:
    with MadeUpGpu():
        model = put_on_gpu(network())
        GradientSynchronizer(model)
        torch.cuda.is_current_stream_capturing = lambda: True
        with pytest.raises(ConfigurationError) as caught:
            loss_of(model, part(0, dist.get_rank()).to(CUDA)).backward()
        return str(caught.value)


def test_a_cuda_graph_of_a_backward_is_refused() -> None:
    for text in run_distributed(capture, 2):
        assert "a CUDA graph cannot contain the synchronization of gradients" in text
        assert "make_graphed_callables" in text


def messages_beside_a_group_for_gpus_alone() -> list[Any]:
    """As after ``init_process_group("nccl")``: the group takes no tensor of the CPU."""
    from ddp_callbacks import _torch
    from ddp_callbacks.comm import cpu_group as module

    real = _torch.devices_of
    world = resolve_group()
    module.devices_of = lambda group: [CUDA] if group is world else real(group)
    rank = dist.get_rank()
    beside = cpu_group(world)
    found = [beside is not world, cpu_group(world) is beside, dist.get_backend(beside)]
    found += [all_gather_json(rank, "ranks"), float(all_reduce(torch.tensor([1.0 + rank]), "a sum"))]
    found += [float(broadcast(torch.tensor([7.0 - rank]), "a number"))]
    with MadeUpGpu():
        model = put_on_gpu(network())
        sync = GradientSynchronizer(model)
        with_total(sync, model, 0, part(0, rank).to(CUDA))
        found.append(float(sum(p.grad.cpu().sum() for p in model.parameters() if p.grad is not None)))
    return found


def test_a_group_for_gpus_alone_gets_one_for_messages() -> None:
    model = network()
    loss_of(model, torch.cat([part(0, rank) for rank in range(2)])).backward()
    total = float(sum(p.grad.sum() for p in model.parameters() if p.grad is not None))
    for *found, gradients in run_distributed(messages_beside_a_group_for_gpus_alone, 2):
        assert found == [True, True, "gloo", [0, 1], 3.0, 7.0]
        assert gradients == pytest.approx(total, abs=1e-12)
