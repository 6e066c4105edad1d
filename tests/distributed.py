"""Run a function on N processes; the only place of the tests that starts ranks.

Ranks are plain subprocesses: in a child of ``multiprocessing`` the workers of a ``DataLoader`` take 5 s to end.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
DEADLINE = 150.0  # seconds; a rank that takes longer is killed and the test fails
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


def run_distributed(body: Callable[..., Any], world_size: int, *args: Any, deadline: float = DEADLINE) -> list[Any]:
    """Call ``body(*args)`` on ``world_size`` ranks that have joined a gloo group; what each returned, by rank.

    ``body`` is a function at the top of a module in ``tests/``; arguments and results are pickled. Warnings are
    errors on the ranks, too.

    Raises:
        AssertionError: With every rank's output, if one raised, died or took longer than ``deadline``.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = Path(sys.modules[body.__module__].__file__ or "").stem
        Path(folder, "call").write_bytes(pickle.dumps((module, body.__name__, args)))
        outputs = [Path(folder, f"output-{rank}").open("w+") for rank in range(world_size)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), str(world_size), folder],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank, output in enumerate(outputs)
        ]
        codes = wait_all(ranks, deadline)
        texts = []
        for rank, output in enumerate(outputs):
            output.seek(0)
            texts.append(f"--- rank {rank}\n{output.read()}")
            output.close()
        assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(texts)
        return [pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)]


def wait_all(processes: list[subprocess.Popen[Any]], deadline: float) -> list[int]:
    """The exit codes; processes that outlive ``deadline`` (seconds) are killed."""
    end = time.monotonic() + deadline
    try:
        for process in processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    return [process.wait() for process in processes]


def _main(rank: int, world_size: int, folder: str) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    warnings.simplefilter("error")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    module, name, args = pickle.loads(Path(folder, "call").read_bytes())
    body = getattr(__import__(module), name)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
    )
    try:
        result = body(*args)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # without waiting for collectives that will never end
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
