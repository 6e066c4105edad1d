"""Train an unedited script on all processes, ``ddprun --auto train.py``; or say that each process trains all of it.

Under another launcher: ``torchrun --nproc-per-node 4 -m ddp_callbacks.auto train.py`` (or ``-m package.train``), ``srun
python -m ddp_callbacks.auto train.py``. An environment variable alone would not suffice there: Python would read it at
its start only if this library put a file beside all installed packages.

Each rank starts with ``launcher/hook`` in its PYTHONPATH, which calls :func:`watch_imports`. When the script imports
Lightning or Torchbearer, and only then, a Trainer with the default strategy gets ``"ddp_callbacks"``, and a Trial
without a callback of this library gets its ``DDPCallback``, if :data:`AUTO` is set. Without it, rank 0 warns of them.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from ddp_callbacks.cluster.environment import NEWS, SUCCESSOR, WorkerEnv
from ddp_callbacks.errors import say

AUTO = "DDP_CALLBACKS_AUTO"
"""Environment variable: "1" makes a script's Trainers and Trials with default settings train on all processes."""


INDEPENDENT = "DDP_CALLBACKS_INDEPENDENT"
"""Environment variable: "1" says that the processes of a job train apart on purpose."""


def is_on() -> bool:
    """Whether ``--auto`` is on."""
    return os.environ.get(AUTO) == "1"


def is_auto() -> bool:
    """Whether ``--auto`` is on, and there are several processes, or one of ddprun's, which reports its steps."""
    return is_on() and (WorkerEnv.from_environ().world_size > 1 or NEWS in os.environ)


_announced: set[str] = set()  # the kinds of objects announced so far


def announce(what: str, by: str) -> None:
    """Say on rank 0, once per kind of object, that it trains on all processes, and what does not.

    Args:
        what: The kind: ``"Trainer"`` or ``"Trial"``.
        by: The setting that makes it train on all processes.
    """
    env = WorkerEnv.from_environ()
    if env.rank == 0 and env.world_size > 1 and what not in _announced:
        say(
            f"--auto: each {what} of this script trains on {env.world_size} processes, by {by}. All else in the script "
            "runs on each process: loops of your own train apart, and files that it writes itself are written by all."
        )
    _announced.add(what)


def _say_if_unused() -> None:
    is_main = multiprocessing.parent_process() is None
    presence = sys.modules.get("ddp_callbacks.process_group.presence")  # nothing else imports torch here
    is_used = _announced or (presence is not None and presence.has_joined())
    env = WorkerEnv.from_environ()
    if is_main and not is_used and is_auto() and env.world_size > 1 and env.rank == 0:
        _say_if_done(
            "--auto has changed nothing: this script has made no Trainer with the default strategy, and no Trial "
            "without a callback of ddp_callbacks. Each process has run all of it. Leave out the strategy that it "
            'names. Fabric needs strategy="ddp_callbacks", a loop of your own the functions of ddp_callbacks.'
        )


_warn = functools.partial(say, level=logging.WARNING)


def _say_if_done(text: str) -> None:
    """Say at the program's end how it has run, unless it has failed, or shown its help.

    Python does not tell here with which code the program exits. ddprun learns it, so it gets the text to say. A new
    process for a lost one says nothing: if it counts, it was ready to join, though the job may have ended before.
    """
    if hasattr(sys, "last_value") or {"-h", "--help"} & {*sys.argv} or os.environ.get(SUCCESSOR):
        return
    if NEWS not in os.environ:
        return _warn(text)
    with suppress(OSError, KeyError):
        launcher = os.open(os.environ["TORCHELASTIC_ERROR_FILE"], os.O_WRONLY | os.O_NONBLOCK)
        os.write(launcher, f"\n{json.dumps({'if_done': text})}".encode())


def watch_imports() -> None:
    """From now on, after the first import of Lightning or Torchbearer, make it train on all processes, or warn."""
    if is_on():
        atexit.register(_say_if_unused)
        functions: dict[str, Callable[[], None]] = {
            "lightning.pytorch": lambda: _import_ours("lightning"),
            "pytorch_lightning": lambda: _import_ours("pytorch_lightning"),
            "torchbearer": _give_trials_the_callback,
        }
    else:
        alone = _Alone(WorkerEnv.from_environ().world_size)
        atexit.register(alone.say_at_the_end)
        functions = {
            "torch.distributed.distributed_c10d": alone.watch_groups,
            "lightning.pytorch": lambda: alone.watch("lightning.pytorch", "Trainer", lambda made: made.world_size > 1),
            "pytorch_lightning": lambda: alone.watch("pytorch_lightning", "Trainer", lambda made: made.world_size > 1),
            "torchbearer": lambda: alone.watch("torchbearer", "Trial", lambda made: _has_ours(_callbacks_of(made))),
        }
    for name in functions.keys() & sys.modules.keys():  # the user's sitecustomize may import them before this
        functions.pop(name)()
    sys.meta_path.insert(0, _Then(functions))


class _Alone:
    """Says on rank 0 that a script on several processes joins no process group: forgetting our line is silent.

    Args:
        processes: Their number.
    """

    _REMEDIES: ClassVar = {
        "Trainer": 'Give it strategy="ddp_callbacks" (ddp_callbacks.lightning)',
        "Trial": "Give it a DDPCallback() (ddp_callbacks.torchbearer)",
        "script": 'A Trainer needs strategy="ddp_callbacks", a Trial a DDPCallback(), a loop a GradientSynchronizer',
    }

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._has_joined, self._told = False, ""  # whether a group was joined, and what the user was told

    def watch_groups(self) -> None:
        """Note when the script joins any process group of torch's."""
        join = import_module("torch.distributed.distributed_c10d").init_process_group

        @functools.wraps(join)
        def noted(*args: Any, **options: Any) -> Any:
            self._has_joined = True
            return join(*args, **options)

        for name in ("torch.distributed.distributed_c10d", "torch.distributed"):
            if hasattr(sys.modules.get(name), "init_process_group"):  # torch.distributed may not have it yet
                vars(sys.modules[name])["init_process_group"] = noted

    def watch(self, module: str, kind: str, is_distributed: Callable[[Any], bool]) -> None:
        """Say when the script makes a Trainer or Trial that is not distributed."""
        watched = getattr(import_module(module), kind)
        make = watched.__init__

        @functools.wraps(make)
        def init(made: Any, *args: Any, **options: Any) -> None:
            make(made, *args, **options)
            if not self._told and not is_distributed(made):
                self._say(kind, "trains")

        watched.__init__ = init

    def say_at_the_end(self) -> None:
        is_told = self._told and NEWS not in os.environ  # ddprun repeats it in its last line
        if "torch" in sys.modules and not is_told:
            self._say("script", "has run", _say_if_done)

    def _say(self, what: str, does: str, tell: Callable[[str], None] = _warn) -> None:
        if not self._has_joined and multiprocessing.parent_process() is None:
            self._told = self._told or (
                f"this {what} {does} on each of the {self._processes} processes by itself: they have joined no process "
                f"group. {self._REMEDIES[what]}, or start the script with ddprun --auto. If it is meant: ddprun "
                "--independent."
            )
            tell(self._told)


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
    from ddp_callbacks.torchbearer import DDPCallback

    if not is_auto() or _has_ours(callbacks):
        return [*callbacks]
    announce("Trial", "DDPCallback()")
    return [DDPCallback(), *callbacks]


def _has_ours(callbacks: Sequence[Any]) -> bool:
    from torchbearer.callbacks import CallbackList

    from ddp_callbacks.torchbearer import Resume
    from ddp_callbacks.torchbearer.base import DistributedCallback

    given = CallbackList([*callbacks]).callback_list  # flattens nested lists
    return any(isinstance(callback, DistributedCallback) and not isinstance(callback, Resume) for callback in given)


def _callbacks_of(trial: Any) -> Sequence[Any]:
    found: Sequence[Any] = trial.state[import_module("torchbearer").CALLBACK_LIST].callback_list
    return found


def main() -> None:
    """Replace this process by the interpreter that runs the script, with ``--auto`` switched on."""
    hook = str(Path(__file__).parent / "launcher" / "hook")
    path = os.pathsep.join(filter(None, (hook, os.environ.get("PYTHONPATH"))))
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {**os.environ, AUTO: "1", "PYTHONPATH": path})


if __name__ == "__main__":
    main()
