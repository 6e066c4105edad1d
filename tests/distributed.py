"""Run a function on N ranks that have joined a gloo group, and get what each returned."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nursery import Nursery

DEADLINE = 600.0  # seconds, beside other work; a rank that takes longer is killed and the test fails
COLLECTIVE_TIMEOUT = timedelta(seconds=300)

_nurseries: list[Nursery] = []  # the session's, see conftest


def set_nursery(nursery: Nursery) -> None:
    """Where ranks are started from now on."""
    _nurseries[:] = [nursery]


def run_distributed(body: Callable[..., Any], world_size: int, *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Call ``body(*args)`` on ``world_size`` ranks that have joined a gloo group; what each returned, by rank.

    ``body`` is a function at the top of a module in ``tests/``; arguments and results are pickled. Warnings are
    errors on the ranks, too.

    Raises:
        AssertionError: With every rank's output, if one raised, died or took longer than ``deadline``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = Path(sys.modules[body.__module__].__file__ or "").stem
        (folder / "call").write_bytes(pickle.dumps((module, body.__name__, args)))
        ranks = _nurseries[0].run(call, world_size, folder, deadline=deadline)
        codes = [rank.code for rank in ranks]
        texts = "\n".join(f"--- rank {index}\n{rank.stdout}{rank.stderr}" for index, rank in enumerate(ranks))
        assert codes == [0] * world_size, f"exit codes {codes}\n{texts}"
        torch.sparse.check_sparse_tensor_invariants.disable()  # or torch 2.11 warns where it unpickles a sparse tensor
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def call() -> None:
    """On a rank: join, call the body that the file names, and leave its result in a file."""
    warnings.simplefilter("error")
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path("call").read_bytes())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = f"file://{Path.cwd()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)
    try:
        result = getattr(__import__(module), name)(*args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives that will never end
    Path(f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
