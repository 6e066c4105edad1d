"""Ranks that fail, on CPUs and on GPUs alike: bodies for the nursery, and for fresh interpreters where there is a GPU.

Each takes the kind of world (worlds.py): ``cpu``, ``gloo`` or ``nccl``, the latter two with the model on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
from datetime import timedelta

import torch
from device_bodies import (
    MANY_BUCKETS,
    add_gradients_of_one_process,
    assert_near,
    batch,
    gradients,
    loss_on,
    mlp,
    samples,
    values,
)
from kit.ranks import HOSTNAME, Rank, note, noting_errors
from torch import nn
from torch.nn.functional import mse_loss

from ddp_callbacks import (
    GradientSynchronizer,
    PowerSGD,
    broadcast_parameters,
    join_process_group,
    leave_process_group,
    replicas,
)
from ddp_callbacks.comm import all_reduce, any_rank
from ddp_callbacks.process_group import resolve_group

STEP = 5  # in which something happens
STEPS = 20_000  # so many that a rank does not come to the end by itself


def my_rank() -> int:
    return int(os.environ["RANK"])


def join_on(kind: str, timeout: float = 120.0) -> str:
    """Join a world of this kind; the device to compute on."""
    device = "cpu" if kind == "cpu" else "cuda"
    if kind == "nccl":
        share_the_gpu()
    backend = "gloo" if kind == "gloo" else None
    join_process_group(backend=backend, device=device, timeout=timedelta(seconds=timeout))
    return device


def share_the_gpu() -> None:
    """Two ranks of these tests compute on one GPU, under NCCL, too: it takes them for hosts (worlds.py)."""
    assert hasattr(replicas, "_require_own_gpus"), "what refuses two ranks on one GPU has another name now"
    replicas._require_own_gpus = lambda module, group: None


# --- failures ---------------------------------------------------------------------------------------------------------


class TheCause(Exception):
    """An exception class of the user's own."""


def happen(misfortune: str) -> None:
    note("happens")
    if misfortune == "raises":
        raise TheCause("sensor 7 gave nothing")
    os.kill(os.getpid(), {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[misfortune])


def train_until(kind: str, misfortune: str, unlucky: int, reads: bool, timeout: float = 120.0) -> None:
    """Ordinary steps, until something happens to one rank; with ``reads``, the host waits for each loss."""
    device = join_on(kind, timeout)
    net = mlp(device, torch.float32)
    broadcast_parameters(net)
    synchronizer = GradientSynchronizer(net, bucket_cap_mb=MANY_BUCKETS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with noting_errors():
        for step in range(STEPS):
            if step == STEP and my_rank() == unlucky:
                happen(misfortune)
            x, y = batch(my_rank(), step % 4, device, torch.float32)
            synchronizer.weigh(*samples(step))
            optimizer.zero_grad()
            loss = mse_loss(net(x), y)
            if reads:
                loss.item()
            loss.backward()
            optimizer.step()
    note("finished")


def assert_named(ranks: list[Rank], misfortune: str, within: float) -> None:
    """The survivor, rank 0, says who failed and why, ``within`` seconds, and ends."""
    survivor, unlucky = ranks
    output = f"{survivor.notes}\n--- rank 0\n{survivor.stderr}\n--- rank 1\n{unlucky.stderr}"
    assert "happens" in unlucky.notes and "error" in survivor.notes, output
    kind, text = survivor.notes["error"]
    assert kind == "PeerError", output
    assert f"rank 1 (host {HOSTNAME}, pid {unlucky.pid})" in text, output
    if misfortune == "raises":
        assert "failed with TheCause: sensor 7 gave nothing" in text, output
    else:
        assert "died or went silent" in text, output
    assert survivor.noted_at["error"] - unlucky.noted_at["happens"] < within * survivor.slowness, output
    assert survivor.code == 1 and survivor.ended - survivor.noted_at["error"] < 15 * survivor.slowness, output


def meet_in_different_exchanges(kind: str) -> None:
    """After two ordinary steps rank 0 trains on, and rank 1 votes."""
    device = join_on(kind)
    net = mlp(device)
    synchronizer = GradientSynchronizer(net)
    for step in range(2):
        synchronizer.weigh(*samples(step))
        loss_on(device)(net, my_rank(), step).backward()
    note("happens")
    with noting_errors():
        if my_rank() == 1:
            any_rank(False, "the vote of rank 1")
        net.zero_grad()
        loss_on(device)(net, my_rank(), 2).backward()
        float(gradients(net)[0].sum())
        any_rank(False, "the end of the step")


def assert_lost_ranks_are_named(ranks: list[Rank], within: float) -> None:
    for rank in ranks:
        output = f"{rank.notes}\n{rank.stderr}"
        kind, text = rank.notes["error"]
        assert kind == "MismatchError", output
        assert "the vote of rank 1" in text and "gradients" in text, output
        assert all(f"pid {other.pid})" in text for other in ranks), output
        assert "Every rank must make the same calls in the same order" in text, output
        assert rank.noted_at["error"] - rank.noted_at["happens"] < within * rank.slowness, output


# --- the CPU of a machine with a GPU ----------------------------------------------------------------------------------


def contexts_of_cuda() -> list[int]:
    """The GPUs on which this process has a context, by the driver; none where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, active = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for number in range(count.value):
        device, flags, state = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        assert not driver.cuDeviceGet(ctypes.byref(device), number)
        assert not driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(state))
        active += [number] if state.value else []
    return active


def train_on_cpus() -> None:
    """As a script does that knows nothing of GPUs: no device is given anywhere."""
    env = join_process_group()
    net, truth = mlp("cpu"), mlp("cpu")
    broadcast_parameters(net)
    synchronizer = GradientSynchronizer(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        x, y = batch(0, step, "cpu")
        for each in (net, truth):
            each.zero_grad()
            mse_loss(each(x), y).backward()  # equal batches: the mean is that of each
        assert_near(gradients(net), gradients(truth), f"step {step}")
        optimizer.step()
        truth.load_state_dict(net.state_dict())
    synchronizer.close()
    total = all_reduce(torch.tensor([env.rank + 1.0]), "a sum")
    note("found", [float(total), torch.cuda.is_available(), torch.cuda.is_initialized(), contexts_of_cuda()])
    leave_process_group()


def assert_trained_on_cpus(ranks: list[Rank], has_gpu: bool) -> None:
    assert [rank.code for rank in ranks] == [0] * len(ranks), [rank.stderr for rank in ranks]
    total = len(ranks) * (len(ranks) + 1) / 2
    assert [rank.notes["found"] for rank in ranks] == [[total, has_gpu, False, []]] * len(ranks)
    assert "summing CPU tensors using shared memory" in ranks[0].stderr


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 8)).double()


def compress_between_made_up_hosts() -> None:
    """compress=PowerSGD on CPUs, each rank on a host of its own; 8 columns hold the gradient of up to 8 samples."""
    from kit.ranks import live_on_hosts

    assert importlib.util.find_spec("numpy"), "PowerSGD needs numpy"
    join_process_group()
    live_on_hosts((1, 1), resolve_group())
    net, truth, loss = wide(), wide(), loss_on("cpu")
    synchronizer = GradientSynchronizer(net, compress=PowerSGD(rank=8, start=2))
    with noting_errors():
        for step in range(4):
            net.zero_grad()
            truth.zero_grad()
            synchronizer.weigh(*samples(step))
            loss(net, my_rank(), step).backward()
            add_gradients_of_one_process(truth, loss, step)
            assert_near(gradients(net), gradients(truth), f"step {step}", 1e-4)
    note("contexts", contexts_of_cuda())
    synchronizer.close()
    leave_process_group()


def assert_compressed(ranks: list[Rank]) -> None:
    assert [rank.code for rank in ranks] == [0, 0], [rank.stderr for rank in ranks]
    assert [rank.notes for rank in ranks] == [{"contexts": []}] * 2


# --- devices ----------------------------------------------------------------------------------------------------------


def take_the_only_gpu(kind: str) -> None:
    """Each process sees one GPU: it is number 0 for both local ranks."""
    device = join_on(kind)
    net = mlp(device)
    broadcast_parameters(net)
    synchronizer = GradientSynchronizer(net)
    synchronizer.weigh(*samples(0))
    loss_on(device)(net, my_rank(), 0).backward()
    found = {str(tensor.device) for tensor in [*values(net), *gradients(net)]}
    note("found", [torch.cuda.device_count(), torch.cuda.current_device(), sorted(found)])
    synchronizer.close()
    leave_process_group()


def ask_for_more_processes_than_gpus() -> None:
    """By NCCL, as a user's script does."""
    with noting_errors():
        join_process_group(device="cuda")
        net = mlp("cuda")
        broadcast_parameters(net)
        GradientSynchronizer(net)


def assert_both_are_counted(ranks: list[Rank]) -> None:
    for rank in ranks:
        assert "error" in rank.notes, rank.stderr
        kind, text = rank.notes["error"]
        assert kind == "ConfigurationError", text
        assert re.search(r"\b2 (process|rank)", text) and re.search(r"\b1 GPU|\bone GPU", text), text
