"""What ``spawn`` does in a script of the user's own. Prints the results as JSON: python spawning.py PORT"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddp_callbacks import spawn
from ddp_callbacks.comm import any_rank

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def sum_of_ranks() -> None:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    Path(f"rank-{dist.get_rank()}").write_text(json.dumps([total.item(), *(int(os.environ[name]) for name in PLACE)]))


def train() -> None:
    """Uses a Trainer inside. It has started no process itself, and no variable says where the processes meet."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    import ddp_callbacks.lightning  # noqa: F401

    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_checkpointing": False, "logger": False}
    made = Trainer(accelerator="cpu", strategy="ddp_callbacks", devices=1, max_steps=2, limit_val_batches=0, **quiet)
    made.fit(BoringModel())
    Path(f"rank-{dist.get_rank()}").write_text(json.dumps([made.global_rank, made.world_size, made.global_step]))


def fail_on_rank_1(how: str) -> None:
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if how == "interrupted" else ValueError("the data of rank 1 are gone")
    any_rank(False, "a barrier")


def leave_a_file_of_an_earlier_run() -> None:
    left = dist.PrefixStore("ddp_callbacks", dist.FileStore("store", 2))
    left.set("part", "old")
    part = dist.PrefixStore("old", left)
    for rank in range(2):
        part.set(f"present/{rank}", f"ticket-{rank}")
        part.set(f"host/{rank}", "{}")
    part.set("admitted", "ticket-0,ticket-1")
    part.set("failure", "{}")


def results() -> list[Any]:
    """What each rank has written, and whether anything else is there."""
    paths = sorted(Path().glob("rank-*"))
    found = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return [*found, sorted(os.listdir())]


def error_of(how: str) -> list[str]:
    try:
        spawn(fail_on_rank_1, 2, (how,))
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        return [type(error).__name__, str(error)]
    return []


def main(port: str) -> None:
    found: dict[str, Any] = {}
    leave_a_file_of_an_earlier_run()
    for method in ("env://", f"tcp://127.0.0.1:{port}", f"file://{Path.cwd()}/store"):
        spawn(sum_of_ranks, 2, init_method=method)
        found[method.partition(":")[0]] = results()
    spawn(train, 2)
    found["trainer"] = results()[:2]
    found |= {how: error_of(how) for how in ("raises", "interrupted", "killed")}
    print("found", json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
