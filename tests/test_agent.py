"""What torchrun's agent on a node reports, without one that runs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_callbacks.launcher.agent import Reports, _arguments, _tell_of_ends
from ddp_callbacks.launcher.options import parse_options
from ddp_callbacks.launcher.remote import as_hex

RANKS = 200


def ended_with(code: int) -> Any:
    return SimpleNamespace(proc=SimpleNamespace(poll=lambda: code, pid=7))


def test_as_many_long_messages_as_a_node_has_workers_all_arrive(tmp_path: Path) -> None:
    """Together they are too large for one datagram, and were taken for a launcher that is gone."""
    error = tmp_path / "error.json"
    message = {"message": "\N{FIRE}" * 5000, "extraInfo": {"timestamp": "1"}}
    error.write_text(json.dumps({"message": message}))
    context: Any = SimpleNamespace(
        subprocess_handlers={rank: ended_with(rank % 2) for rank in range(RANKS)},
        error_files=dict.fromkeys(range(RANKS), str(error)),
        envs={rank: {"RANK": str(rank + 8)} for rank in range(RANKS)},
    )
    node, agent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with node:
        with agent:
            sender = threading.Thread(target=_tell_of_ends, args=(context, Reports(agent), set()))
            sender.start()
            found = [json.loads(socket.recv_fds(node, 1 << 18, 2)[0])["noticed"] for _ in range(RANKS)]
            sender.join()
        assert socket.recv_fds(node, 1, 2)[0] == b""
    assert [(end["rank"], end["code"]) for end in found] == [(rank + 8, rank % 2) for rank in range(RANKS)]
    assert {end["message"] for end in found} == {"\N{FIRE}" * 4096}


def test_a_flag_that_the_node_s_torch_lacks_is_named(tmp_path: Path) -> None:
    """Unless it is not in use: the flags of a newer torch, where ddprun is typed, do no harm to an older one."""
    values = parse_options(["train.py", "--lr", "1"], {}).torchrun
    job = {"command": [as_hex("train.py"), as_hex("--lr")], "torchrun": {**values, "new_flag": "", "other": None}}
    args = _arguments(job)
    assert (args.training_script, args.training_script_args, args.max_restarts) == ("train.py", ["--lr"], 0)
    job["torchrun"]["new_flag"] = "7"
    with pytest.raises(
        ValueError, match=f"^torchrun of torch {torch.__version__.replace('+', '.')} has no flag --new-flag$"
    ):
        _arguments(job)


FLAG_OF_A_NEWER_TORCH = """
from ddp_callbacks.launcher import torchrun_flags
torchrun_flags.FLAGS += (torchrun_flags._flag("new-flag", "of torch 99"),)
from ddp_callbacks.launcher import options
options.FLAGS = torchrun_flags.FLAGS
from ddp_callbacks.launcher import __main__
__main__.main()
"""


@pytest.mark.cold
def test_ddprun_tells_which_node_lacks_a_flag(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    command = [sys.executable, "-c", FLAG_OF_A_NEWER_TORCH, "--new-flag", "7", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (1, "")
    cause = f"ddprun: localhost: ValueError: torchrun of torch {torch.__version__} has no flag --new-flag"
    assert done.stderr.splitlines()[-2] == cause
