"""Run a function on N processes; the only place of the tests that starts ranks."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

DEADLINE = 200.0  # seconds; a rank that takes longer is killed and the test fails
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def run_distributed(body: Callable[..., Any], world_size: int, *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Call ``body(*args)`` on ``world_size`` ranks that have joined a gloo group; what each returned, by rank.

    Raises:
        AssertionError: With every rank's traceback, if one raised, died or took longer than ``deadline``.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, body, args)) for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            _join(ranks, deadline)
        finally:
            for rank in ranks:
                if rank.is_alive():
                    rank.kill()
                rank.join()
        errors = [path.read_text() for path in sorted(Path(folder).glob("error-*"))]
        codes = [rank.exitcode for rank in ranks]
        assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(errors)
        return [torch.load(Path(folder, f"result-{rank}"), weights_only=False) for rank in range(world_size)]


def _join(ranks: list[Any], deadline: float) -> None:
    limit = time.monotonic() + deadline
    for rank in ranks:
        rank.join(max(0.0, limit - time.monotonic()))


def _rank(rank: int, world_size: int, folder: str, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        result = body(*args)
        torch.save(result, Path(folder, f"result-{rank}"))
        dist.barrier()  # the store is a file, but gloo's connections are not
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"--- rank {rank}\n{traceback.format_exc()}")
        raise SystemExit(1) from None
