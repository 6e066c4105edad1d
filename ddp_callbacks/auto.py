"""Train an unedited script on all processes: ``ddprun --auto train.py``.

Under another launcher: ``torchrun --nproc-per-node 4 -m ddp_callbacks.auto train.py`` (or ``-m package.train``), ``srun
python -m ddp_callbacks.auto train.py``. An environment variable alone would not suffice there: Python would read it at
its start only if this library put a file beside all installed packages.

Each rank starts with :data:`AUTO` set and ``launcher/hook`` in its PYTHONPATH, which calls :func:`watch_imports`. When
the script imports Lightning or Torchbearer, and only then, a Trainer with the default strategy gets
``"ddp_callbacks"``, and a Trial without a callback of this library gets its ``DDPCallback``.
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

from ddp_callbacks.environment import WorkerEnv
from ddp_callbacks.errors import say

AUTO = "DDP_CALLBACKS_AUTO"
"""Environment variable: "1" makes a script's Trainers and Trials with default settings train on all processes."""


def is_auto() -> bool:
    """Whether ``--auto`` is on, and there are several processes."""
    return os.environ.get(AUTO) == "1" and WorkerEnv.from_environ().world_size > 1


_announced: set[str] = set()  # the kinds of objects announced so far


def announce(what: str, by: str) -> None:
    """Say on rank 0, once per kind of object, that it trains on all processes, and what does not.

    Args:
        what: The kind: ``"Trainer"`` or ``"Trial"``.
        by: The setting that makes it train on all processes.
    """
    env = WorkerEnv.from_environ()
    if env.rank == 0 and what not in _announced:
        say(
            f"--auto: each {what} of this script trains on {env.world_size} processes, by {by}. All else in the script "
            "runs on each process: loops of your own train apart, and files that it writes itself are written by all."
        )
    _announced.add(what)


def _say_if_unused() -> None:
    is_main = multiprocessing.parent_process() is None
    if is_main and not _announced and is_auto() and WorkerEnv.from_environ().rank == 0:
        say(
            "--auto has changed nothing: this script has made no Trainer with the default strategy, and no Trial "
            "without a callback of ddp_callbacks. Each process has run all of it. Leave out the strategy that it "
            "names; a loop of your own needs the functions of ddp_callbacks.",
            logging.WARNING,
        )


def watch_imports() -> None:
    """From now on, after the first import of Lightning or Torchbearer, make it train on all processes."""
    atexit.register(_say_if_unused)
    sys.meta_path.insert(0, _Then({
        "lightning.pytorch": lambda: _import_ours("lightning"),
        "pytorch_lightning": lambda: _import_ours("pytorch_lightning"),
        "torchbearer": _give_trials_the_callback,
    }))  # fmt: skip


class _Then(MetaPathFinder):
    """Calls a function after the first import of each of these modules."""

    def __init__(self, functions: dict[str, Callable[[], None]]) -> None:
        self._functions = functions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._functions:
            return None
        others = (finder.find_spec for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (find_spec(fullname, path, target) for find_spec in others)), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._functions[fullname]()

            loader.exec_module = exec_module
        return spec


def _import_ours(package: str) -> None:
    ours = import_module(f"ddp_callbacks.{package}")
    vars(ours).get("__getattr__", lambda _: None)("DDPCallback")  # makes the classes, if a program uses both packages


def _give_trials_the_callback() -> None:
    trial_class = import_module("torchbearer").Trial
    make = trial_class.__init__
    parameters = signature(make)

    @functools.wraps(make)
    def init(*args: Any, **options: Any) -> None:
        given = parameters.bind(*args, **options).arguments
        make(**(given | {"callbacks": _with_ours(given.get("callbacks", ()))}))

    trial_class.__init__ = init


def _with_ours(callbacks: Sequence[Any]) -> list[Any]:
    from torchbearer.callbacks import CallbackList

    from ddp_callbacks.torchbearer import DDPCallback
    from ddp_callbacks.torchbearer.base import DistributedCallback

    given = CallbackList([*callbacks]).callback_list  # flattens nested lists
    if not is_auto() or any(isinstance(callback, DistributedCallback) for callback in given):
        return [*callbacks]
    announce("Trial", "DDPCallback()")
    return [DDPCallback(), *callbacks]


def main() -> None:
    """Replace this process by the interpreter that runs the script, with ``--auto`` switched on."""
    hook = str(Path(__file__).parent / "launcher" / "hook")
    path = os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, AUTO: "1", "PYTHONPATH": path})


if __name__ == "__main__":
    main()
