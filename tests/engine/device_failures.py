"""Ranks that fail, on CPUs and on GPUs alike: bodies for the nursery, and for fresh interpreters where there is a GPU.

Each takes the kind of ranks (kit/ranks.py): ``cpu``, ``gloo`` or ``nccl``, the latter two with the model on a GPU.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
from device_bodies import MANY_BUCKETS, loss_of, mlp, samples
from kit.ranks import HOSTNAME, Rank, note, noting_errors

from ddp_callbacks import (
    GradientSynchronizer,
    broadcast_parameters,
    join_process_group,
    leave_process_group,
)
from ddp_callbacks.comm import any_rank
from ddp_callbacks.replicas import parameters as replicas

STEP = 5  # in which something happens
STEPS = 20_000  # so many that a rank does not come to the end by itself


def my_rank() -> int:
    return int(os.environ["RANK"])


def join_on(kind: str, timeout: float = 120.0) -> str:
    """Join a world of this kind; the device to compute on."""
    device = "cpu" if kind == "cpu" else "cuda"
    if kind == "nccl":  # which takes the two ranks on one GPU for hosts (kit/ranks.py)
        assert hasattr(replicas, "_require_own_gpus"), "what refuses two ranks on one GPU has another name now"
        replicas._require_own_gpus = lambda module, group: None
    backend = "gloo" if kind == "gloo" else None
    join_process_group(backend=backend, device=device, timeout=timedelta(seconds=timeout))
    return device


class TheCause(Exception):
    """An exception class of the user's own."""


def happen(misfortune: str) -> None:
    note("happens")
    if misfortune == "raises":
        raise TheCause("sensor 7 gave nothing")
    if misfortune == "votes":
        any_rank(False, "the vote of rank 1")
    os.kill(os.getpid(), {"is killed": signal.SIGKILL, "is stopped": signal.SIGSTOP}[misfortune])


def train_until(kind: str, misfortune: str, reads: bool, timeout: float = 120.0) -> None:
    """Ordinary steps, until something happens to rank 1; with ``reads``, the host waits for each loss."""
    net = mlp(join_on(kind, timeout), torch.float32)
    broadcast_parameters(net)
    synchronizer = GradientSynchronizer(net, bucket_cap_mb=MANY_BUCKETS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with noting_errors():
        for step in range(STEPS):
            if step == STEP and my_rank() == 1:
                happen(misfortune)
            synchronizer.weigh(*samples(step))
            optimizer.zero_grad()
            loss = loss_of(net, my_rank(), step)
            if reads:
                loss.item()
            loss.backward()
            optimizer.step()


SAYS = {
    "raises": ("PeerError", "failed with TheCause: sensor 7 gave nothing"),
    "is killed": ("PeerError", "died or went silent"),
    "is stopped": ("PeerError", "died or went silent"),
    "votes": ("MismatchError", "waits for the vote of rank 1"),
}


def assert_named(ranks: list[Rank], misfortune: str, within: float) -> None:
    """Rank 0 says ``within`` seconds what has happened to rank 1, and ends."""
    assert_says(ranks, misfortune, within)
    first = ranks[0]
    assert first.code == 1 and first.ended - first.noted_at["error"] < 15 * first.slowness, first.stderr


def assert_says(ranks: list[Rank], misfortune: str, within: float) -> None:
    first, unlucky = ranks
    output = f"{first.notes}\n--- rank 0\n{first.stderr}\n--- rank 1\n{unlucky.stderr}"
    assert "happens" in unlucky.notes and "error" in first.notes, output
    kind, text = first.notes["error"]
    says = SAYS[misfortune]
    assert kind == says[0] and says[1] in text, output
    assert f"rank 1 (host {HOSTNAME}, pid {unlucky.pid})" in text, output
    assert first.noted_at["error"] - unlucky.noted_at["happens"] < within * first.slowness, output


# --- devices ----------------------------------------------------------------------------------------------------------


def train_on_cpus() -> None:
    """As a script does that knows nothing of GPUs: no device is given anywhere."""
    join_process_group()
    net = mlp("cpu")
    broadcast_parameters(net)
    synchronizer = GradientSynchronizer(net)
    for step in range(5):
        synchronizer.weigh(*samples(step))
        loss_of(net, my_rank(), step).backward()
    note("uses a GPU", torch.cuda.is_initialized())
    leave_process_group()


def share_a_gpu() -> None:
    """By NCCL, as a user's script does."""
    with noting_errors():
        join_process_group(device="cuda")
        net = mlp("cuda")
        broadcast_parameters(net)
        GradientSynchronizer(net)
