"""One process of a world (worlds.py): a fresh interpreter, which joins and then runs the bodies that it is asked for.

python worker.py KIND               joins; answers "ready", then one word for each line of JSON on standard input
python worker.py MODULE BODY ARGS   runs one body, whose arguments are JSON, as a script
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ["TQDM_DISABLE"] = "1"


def to_cpu(found: Any) -> Any:
    """The results of a body, to be unpickled where nothing should use CUDA."""
    import torch

    if isinstance(found, torch.Tensor):
        return found.detach().cpu()
    if isinstance(found, dict):
        return {key: to_cpu(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return type(found)(map(to_cpu, found))
    return found


def run_body(request: dict[str, Any]) -> bool:
    """Whether the body returned; its result is in a file, its traceback on standard error."""
    folder, rank = Path(request["folder"]), os.environ["RANK"]
    os.chdir(folder)
    faulthandler.dump_traceback_later(request["deadline"], exit=True)
    try:
        module, name, arguments = pickle.loads((folder / "call").read_bytes())
        result = getattr(importlib.import_module(module), name)(*arguments)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(to_cpu(result)))
        return True
    except BaseException as error:
        traceback.print_exc()
        tell_the_others(error)
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()


def tell_the_others(error: BaseException) -> None:
    """They stop waiting for this rank."""
    import torch.distributed as dist

    from ddp_callbacks.process_group.failures import report_failure

    if dist.is_initialized():
        report_failure(error)


def serve(kind: str) -> None:
    from device_failures import join_on

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print belongs to the output
    join_on(kind)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print("done" if run_body(json.loads(line)) else "failed", file=answers, flush=True)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        getattr(importlib.import_module(sys.argv[1]), sys.argv[2])(*json.loads(sys.argv[3]))
