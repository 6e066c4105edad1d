"""Small scripts in which a hook does something, for every hook of Lightning and every action of a user.

The hooks are those that Lightning's classes have, so that one of a later version appears by itself. Each cell is a
small run of a Trainer in which one hook of the module, of a callback or of the datamodule does one thing.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning_utilities.core.inheritance import get_all_subclasses
from torch.utils.data import BatchSampler, DataLoader
from trainers import Net, data, halving, loader, outcome, quiet, trainer

from ddp_callbacks.errors import PeerError
from ddp_callbacks.lightning import CallbackStrategy

BY_HAND = "by_hand.ckpt"
_WRAPPED = [f"{old}{name}" for name in ("__init__", "__setattr__", "__delattr__") for old in ("", "__old")]

# --- the table --------------------------------------------------------------------------------------------------------

NOT_HOOKS = {
    # of a LightningModule
    *("all_gather", "clip_gradients", "freeze", "load_from_checkpoint", "log", "log_dict", "lr_schedulers"),
    *("manual_backward", "optimizers", "print", "to_onnx", "to_tensorrt", "to_torchscript", "toggle_optimizer"),
    *("toggled_optimizer", "unfreeze", "untoggle_optimizer"),
    # of a LightningDataModule
    "from_datasets",
    # deprecated, and refused beside configure_model
    "configure_sharded_model",
}


def methods(*classes: type) -> list[str]:
    """Of the classes themselves, without what they inherit, in their order."""
    named = {name: value for kind in classes for name, value in vars(kind).items() if not name.startswith("_")}
    return [name for name, value in named.items() if inspect.isfunction(value) and name not in NOT_HOOKS]


HOOKS = {
    "module": methods(ModelHooks, DataHooks, CheckpointHooks, pl.LightningModule),
    "callback": methods(pl.Callback),
    "datamodule": methods(DataHooks, pl.LightningDataModule),
}


IN_A_STEP = {
    *("backward", "configure_gradient_clipping", "lr_scheduler_step", "on_after_backward", "on_before_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "optimizer_zero_grad"),
}
"""Called between ``training_step`` and the end of its batch, where what it has logged is the process's own value."""


class Raised(Exception):
    """By a user's hook."""


def log(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    module.log("same", float(made.global_step))
    module.log("own", module.mean)


def log_synchronized(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    module.log("same_of_all", float(made.global_step), sync_dist=True)
    module.log("own_of_all", module.mean, sync_dist=True)


def read(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    seen.append(dict(sorted(made.callback_metrics.items())))


def count_steps(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    seen.append(float(made.estimated_stepping_batches))


def stop(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    made.should_stop = True


def save(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    made.save_checkpoint(Path(made.default_root_dir, BY_HAND))


def fail(made: pl.Trainer, module: Any, seen: list[Any]) -> None:
    raise Raised("in a hook")


Action = Callable[[pl.Trainer, Any, list[Any]], None]
ALWAYS: list[Action] = [log, log_synchronized, read, count_steps]
ONCE: list[Action] = [stop, save, fail]  # in the middle of the calls
ACTIONS = {action.__name__: action for action in [*ALWAYS, *ONCE]}
IN_ONE_RUN = [read, log, log_synchronized, count_steps, save]  # read first: what a rank has just logged is its own


def use(made: pl.Trainer, module: Any, seen: list[Any], is_middle: bool) -> None:
    """All that a hook may do and go on; what Lightning refuses there is noted."""
    for action in IN_ONE_RUN:
        if action in ALWAYS or is_middle:
            try:
                action(made, module, seen)
            except Exception as error:
                seen.append(name_of(error))


# --- the scripts ------------------------------------------------------------------------------------------------------


class Loaders:
    def train_dataloader(self) -> Any:
        return loader(18, 6)

    def val_dataloader(self) -> Any:
        return loader(6, 6, 1)

    def test_dataloader(self) -> Any:
        return loader(12, 6, 2)

    def predict_dataloader(self) -> Any:
        return DataLoader(data(12, 3), batch_size=6)


class HasState:
    def state_dict(self) -> dict[str, Any]:
        return {"own": 1}


class Data(HasState, Loaders, pl.LightningDataModule):
    pass


class Module(Net):
    def __init__(self) -> None:
        super().__init__(scheduler=halving)
        self.mean = torch.zeros(())  # over the samples of this rank's part
        self.fails = False

    def loss(self, batch: Any) -> torch.Tensor:
        self.mean = batch[0].mean()
        return super().loss(batch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and batch_idx == 1:
            raise Raised("in a step")
        return super().training_step(batch, batch_idx)


class WithLoaders(Loaders, Module):
    pass


class Calls(HasState, pl.Callback):
    pass


OWNERS: dict[str, type] = {"module": WithLoaders, "callback": Calls, "datamodule": Data}


def acting(kind: str, hook: str, act: Callable[[pl.Trainer, Any], None]) -> Any:
    """An object of this kind of which the hook acts before it does what it does otherwise."""
    base = OWNERS[kind]
    before = getattr(base, hook)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = args[0] if args and isinstance(args[0], pl.Trainer) else Script.trainer
        assert made is not None
        act(made, made.lightning_module)
        return before(self, *args, **kwargs)

    return type(base.__name__, (base,), {hook: method})()


class Script:
    """A user's, whose hook does something.

    Attributes:
        trainer: The last one; hooks of checkpoints are not given it.
    """

    trainer: pl.Trainer | None = None

    def __init__(self, strategy: Any, folder: str, owners: dict[str, Any]) -> None:
        self.module = owners.get("module") or (WithLoaders() if "datamodule" not in owners else Module())
        self.options = {"datamodule": owners["datamodule"]} if "datamodule" in owners else {}
        is_ours = strategy == "ddp_callbacks"  # without the comparison of the first batch, which calls forward again
        self.made = Script.trainer = trainer(
            CallbackStrategy(verify=None) if is_ours else strategy,
            num_sanity_val_steps=1,
            callbacks=[*filter(None, [owners.get("callback")]), ModelCheckpoint(folder, save_top_k=-1)],
            enable_checkpointing=True,
            default_root_dir=folder,
        )

    def run(self, function: str) -> None:
        options = dict(self.options)
        if function == "resume":
            self.made.fit(self.module, **options)
            options["ckpt_path"] = Path(self.made.default_root_dir, "epoch=0-step=3.ckpt")
        if function in ("validate", "test"):
            options["verbose"] = False
        self.module.fails = function == "failing fit"
        getattr(self.made, "fit" if function in ("resume", "failing fit") else function)(self.module, **options)


FUNCTIONS = ["fit", "validate", "test", "predict", "resume", "failing fit"]


def call_counts() -> dict[str, Counter[tuple[str, str]]]:
    """How often each hook is called, on one process, in each function."""
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for function in FUNCTIONS:
        counts[function] = counter = Counter[tuple[str, str]]()
        for with_data in (False, True):
            kinds = [kind for kind in HOOKS if (kind == "datamodule") == with_data]
            owners = {kind: OWNERS[kind]() for kind in kinds}
            for kind, owner in owners.items():
                for hook in HOOKS[kind]:
                    setattr(owner, hook, counting(getattr(owner, hook), counter, (kind, hook)))
            with tempfile.TemporaryDirectory() as folder:
                script = Script("auto", folder, owners)
                try:
                    script.run(function)
                except Raised:
                    assert function == "failing fit"
    return counts


def counting(method: Callable[..., Any], counter: Counter[tuple[str, str]], key: tuple[str, str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counter[key] += 1
        return method(*args, **kwargs)

    return counted


class Cell(NamedTuple):
    """An action in a hook, in a function of the Trainer; one of ``ONCE`` in the call ``middle``."""

    kind: str
    hook: str
    function: str
    middle: int
    action: str


def cells(actions: list[str]) -> list[Cell]:
    counts = call_counts()
    found: list[Cell] = []
    for kind, hooks in HOOKS.items():
        for hook in hooks:
            function = next((each for each in FUNCTIONS if counts[each][kind, hook]), None)
            if function is not None:
                middle = 0 if function == "predict" else counts[function][kind, hook] // 2
                found += [Cell(kind, hook, function, middle, action) for action in actions]
    return found


def name_of(error: BaseException) -> str:
    """Its class and first line, on the others also of what they hear of it."""
    heard = re.search(r"failed with (\w+): (.*)", str(error)) if isinstance(error, PeerError) else None
    kind, text = heard.groups() if heard else (type(error).__name__, str(error).partition("\n")[0])
    return kind if kind == "RecursionError" else f"{kind}: {text}"  # whose text depends on where the depth was reached


@contextlib.contextmanager
def loaders_as_they_were() -> Iterator[None]:
    """Lightning wraps methods of the loaders' classes while it asks for loaders; an exception there leaves them so."""
    classes = {DataLoader, BatchSampler, *get_all_subclasses(DataLoader), *get_all_subclasses(BatchSampler)}
    before = {kind: {name: vars(kind).get(name) for name in _WRAPPED} for kind in classes}
    try:
        yield
    finally:
        for kind, methods_ in before.items():
            for name, method in methods_.items():
                if method is not None:
                    setattr(kind, name, method)
                elif name in vars(kind):
                    delattr(kind, name)


def run_cell(cell: Cell, strategy: Any, folder: Path) -> dict[str, Any]:
    kind, hook, function, middle, action = cell
    seen: list[Any] = []
    calls = iter(range(10**6))
    using: list[bool] = []  # counting the steps asks for the loaders, in a hook, too

    def act(made: pl.Trainer, module: Any) -> None:
        is_middle = next(calls) == middle
        if action == "stop_on_one":
            made.should_stop |= is_middle and made.global_rank == made.world_size - 1
        elif action != "use":
            if is_middle or ACTIONS[action] in ALWAYS:
                ACTIONS[action](made, module, seen)
        elif not using:
            using.append(True)
            use(made, module, seen, is_middle)
            using.clear()

    errors: list[str] = []
    script = Script(strategy, str(folder), {kind: acting(kind, hook, act)})
    for again in range(1 + (action == "fail")):
        try:
            with loaders_as_they_were():
                script.run("fit" if again and function == "failing fit" else function)
        except Exception as error:
            errors.append(name_of(error))
    if hook in IN_A_STEP:
        seen = [[*each] if isinstance(each, dict) else each for each in seen]
    return {"errors": errors, "seen": seen, **outcome(script.made, script.module)}


def run_cells(found: list[Cell], strategy: Any, root: Path) -> list[dict[str, Any]]:
    """Every cell on this rank, one after another in one process."""
    import ddp_callbacks.lightning  # noqa: F401

    with quiet():
        # What a hook logs there is the mean of a part; with parts of equal size their mean is that of one process.
        warnings.filterwarnings("ignore", "'own(_of_all)?' is logged at the end of an epoch")
        return [run_cell(cell, strategy, root / str(index)) for index, cell in enumerate(found)]
