"""The path of GPUs, without one: tensors claim to be on a GPU, and what would make the host wait for it raises."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from kit.made_up_gpu import CUDA, HostWaits, MadeUpGpu, put_on_gpu
from shared_worlds import World
from torch import Tensor, nn

from ddp_callbacks import GradientSynchronizer
from ddp_callbacks.comm.collectives import all_gather_object, all_reduce, broadcast
from ddp_callbacks.comm.subgroups import cpu_group
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.process_group import resolve_group

pytestmark = pytest.mark.shares_results()
WORLD = World(__name__)

MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def loss_of(model: nn.Module, *ranks: int) -> Tensor:
    """Of the parts of these ranks; of this one's, on its GPU."""
    parts = [torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)) for rank in ranks or [dist.get_rank()]]
    x = torch.cat(parts).double()
    loss: Tensor = model(x if ranks else x.to(CUDA)).square().mean()
    return loss


@WORLD
def test_what_would_wait_is_noticed() -> None:
    with MadeUpGpu() as gpu:
        model = put_on_gpu(network())
        GradientSynchronizer(model)
        loss_of(model).backward()
        loss = loss_of(model)
        with gpu.forbid_waiting(), pytest.raises(HostWaits, match=r"^item$"):
            loss.item()


@WORLD
def test_half_precision_rounds_what_gpus_sum_once_and_no_host_waits() -> None:
    expected = torch.zeros(1, dtype=torch.bfloat16)
    for rank in range(dist.get_world_size()):
        loss_of(part := network(), rank).backward()
        expected = (
            expected + torch.cat([p.grad.flatten() for p in part.parameters() if p.grad is not None]).bfloat16() / 2
        )
    with MadeUpGpu() as gpu:
        model = put_on_gpu(network())
        GradientSynchronizer(model, compress="bf16")
        loss = loss_of(model)
        with gpu.forbid_waiting():
            loss.backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).cpu()
    assert torch.equal(found, expected.double())


@WORLD
def test_a_gradient_is_in_memory_once() -> None:
    """Gradients are in memory once, even those you keep."""
    found = []  # which parameters have a gradient when the middle layer's backward begins
    with MadeUpGpu():
        model = put_on_gpu(network())
        GradientSynchronizer(model, bucket_cap_mb=MANY_BUCKETS)

        def look(_: nn.Module, __: Any) -> None:
            found.append([parameter.grad is not None for parameter in model.parameters()])

        model[2].register_full_backward_pre_hook(look)
        for _ in range(2):
            model.zero_grad()
            loss_of(model).backward()
    assert found == [[False] * 6] * 2, found  # those of the last layer are in their buffer and nowhere else


@WORLD
def test_random_states_beside_values_on_a_gpu_arrive_on_the_cpu() -> None:
    with MadeUpGpu():
        mine = {"loss": torch.ones(1).to(CUDA), "random": torch.get_rng_state()}
        for found in all_gather_object(mine, "the metrics"):
            assert found["loss"].is_cuda and not found["random"].is_cuda
            torch.default_generator.set_state(found["random"])


@WORLD
def test_a_cuda_graph_of_a_backward_is_refused() -> None:
    """An error refuses a backward in a CUDA graph."""
    with MadeUpGpu():
        model = put_on_gpu(network())
        GradientSynchronizer(model)
        torch.cuda.is_current_stream_capturing = lambda: True
        with pytest.raises(ConfigurationError) as caught:
            loss_of(model).backward()
    assert "a CUDA graph cannot contain the synchronization of gradients" in str(caught.value)
    assert "make_graphed_callables" in str(caught.value)


@WORLD
def test_a_group_for_gpus_alone_gets_one_for_messages() -> None:
    """A GPU group gets one of gloo for messages."""
    from ddp_callbacks import _torch
    from ddp_callbacks.comm import subgroups as module

    real = _torch.devices_of
    world, rank = resolve_group(), dist.get_rank()
    # As after init_process_group("nccl"): the group takes no tensor of the CPU.
    with mock.patch.object(module, "devices_of", lambda group: [CUDA] if group is world else real(group)):
        beside = cpu_group(world)
        assert beside is not world and cpu_group(world) is beside and dist.get_backend(beside) == "gloo"
        assert all_gather_object(rank, "ranks") == [0, 1]
        assert float(all_reduce(torch.tensor([1.0 + rank]), "a sum")) == 3.0
        assert float(broadcast(torch.tensor([7.0 - rank]), "a number")) == 7.0
        with MadeUpGpu():
            model = put_on_gpu(network())
            GradientSynchronizer(model)
            loss_of(model).backward()
            found = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    truth = network()
    loss_of(truth, 0, 1).backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in truth.parameters()], rtol=0, atol=1e-12)
