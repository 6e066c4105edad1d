"""The callback that lets a fit stop anywhere and go on at the next batch, on any number of processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ddp_callbacks.checkpoints import CheckpointFile, Saved, require_same
from ddp_callbacks.checkpoints.intervals import Every, Interval, make_interval
from ddp_callbacks.data.resuming import Resumable, resumable_loader
from ddp_callbacks.data.sharding import is_distributed
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.lightning import loggers, own_state
from ddp_callbacks.lightning._lightning import (
    REGISTER_SIGNALS,
    RESUME_START,
    checkpoint_connector,
    dump_checkpoint,
    forget_loaders,
    is_done,
    loader_of,
    position_in_evaluation,
    position_in_training,
    require_resume,
    set_checkpoint,
    signal_connector,
)
from ddp_callbacks.lightning.moments import GoingOn, Moments, Place
from ddp_callbacks.lightning.replacement import Replaced
from ddp_callbacks.lightning.saved_attributes import Checksums, checksums_of_attributes
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.process_group.preemption import SIGNALS, Preemption

_Callbacks: Any = object  # of either package: the class comes after this one


class ResumeMixin(_Callbacks):  # type: ignore[misc]
    """Mixed into a ``Callback`` of either package; see ``Resume``."""

    package: str

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: Every = None,
        on_signal: bool = True,
        time_limit: timedelta | None = None,
        async_save: bool = False,
        weights_only: bool = True,
    ) -> None:
        require_resume(self.package)
        make_interval(every, None)  # raises if it is invalid
        self.path = os.path.abspath(path)
        self._every = every
        self._on_signal = on_signal
        self._time_limit = time_limit
        self._async_save = async_save
        self._weights_only = weights_only
        self.preemption = self._make_preemption()
        self._fit: Fit | None = None

    def _make_preemption(self) -> Preemption:
        return Preemption(SIGNALS if self._on_signal else (), self._time_limit)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """At the beginning of a run.

        Raises:
            ConfigurationError: Of a fit: the Trainer has another strategy.
        """
        if stage == "fit" and self._fit is None and not trainer.fast_dev_run:
            raise ConfigurationError(
                'Resume needs Trainer(strategy="ddp_callbacks"), with a single process, too; this Trainer has '
                f"{type(trainer.strategy).__name__}."
            )

    def begin_fit(self, trainer: Any) -> None:
        """The strategy has met the other processes: read the file, if there is one. A collective.

        Raises:
            CheckpointError: The file belongs to another job or run, or cannot be read.
        """
        file = CheckpointFile(self.path, async_save=self._async_save, weights_only=self._weights_only)
        self._fit = Fit(trainer, file, self.preemption, make_interval(self._every, None))
        trainer.strategy.resume = self._fit
        self._fit.begin(self._on_signal)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The random state is that of a run that begins."""
        if self._fit is not None:
            self._fit.note_start()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit has ended."""
        self._fit = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Likewise."""
        self._fit = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "preemption"} | {"_fit": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.preemption = self._make_preemption()


class Fit:
    """One fit that can stop and go on."""

    def __init__(self, trainer: Any, file: CheckpointFile, preemption: Preemption, interval: Interval) -> None:
        self._trainer = trainer
        self._file = file
        self.preemption = preemption
        self._interval = interval
        self._saved: Saved | None = None
        self._mine: dict[str, Any] = {}  # of the file: this rank's, or rank 0's
        self._going_on: GoingOn | None = None
        self._taken = {"train": 0, "val": 0}  # loaders that Lightning has asked for
        self._start: dict[str, Any] = {}  # the random state, when hooks began
        self._attributes: Checksums = {}  # of the module, then
        self._exit = contextlib.ExitStack()

    def begin(self, on_signal: bool) -> None:
        """Read the file, and stand ready to be asked to stop. A collective."""
        trainer = self._trainer
        self._exit.push(self._file)
        self._file.open()
        self._exit.push(self.preemption)
        self.preemption.__enter__()
        self._saved = self._file.read()
        self._moments = Moments(trainer, self._pass_moment)
        self._exit.callback(self._moments.close)
        self._replace(checkpoint_connector(trainer), RESUME_START, self._resume_start)
        self._replace(trainer.fit_loop, "on_save_checkpoint", self._without_loaders)
        if on_signal:
            self._replace(signal_connector(trainer), REGISTER_SIGNALS, lambda _: None)
        if self._saved is not None:
            self._mine = self._own()[0]
            loggers.go_on(trainer.loggers, self._saved.own(0)["loggers"])
            if self._mine["place"] != "start":
                self._going_on = GoingOn(trainer, self._mine, self._restore, self._set_loader)
                self._exit.callback(self._going_on.close)

    def end(self) -> None:
        """The fit has ended, well or not. A collective, if well or preempted."""
        fit_loop = self._trainer.fit_loop
        for loop in (fit_loop, fit_loop.epoch_loop.val_loop):
            combined = loader_of(loop)
            if combined is not None:
                combined.flattened = [_original(loader) for loader in combined.flattened]
        self._exit.__exit__(*sys.exc_info())

    def note_start(self) -> None:
        """Hooks of the fit begin: keep the random state, or go on with that of the file."""
        state = own_state.random_state_of(self._trainer)
        if self._mine.get("place") == "start":
            state.load_state_dict(self._mine["random"])
        self._start = state.state_dict()
        self._attributes = checksums_of_attributes(self._trainer.lightning_module)

    # --- going on -----------------------------------------------------------------------------------------------------

    def take_loader(self, stage: str, loader: Any) -> None:
        """Lightning has asked for a loader: let it begin where it was cut."""
        index = self._taken.get(stage, 0)
        self._taken[stage] = index + 1
        may_differ = self._trainer.reload_dataloaders_every_n_epochs and self._mine.get("place") == "epoch"
        if self._saved is not None and stage == "train" and index == 0 and not may_differ:
            self._require_same(self._about(loader))
        if index < len(self._mine.get("loaders", {}).get(stage, ())):
            self._set_loader(stage, index, loader)

    def take_undivided(self, stage: str, loader: Any) -> Any:
        """The same of a loader that the user divides (``use_distributed_sampler=False``).

        Raises:
            ConfigurationError: There are several processes, and it has no ``DistributedSampler``.
        """
        if get_world_size() > 1 and not is_distributed(loader):
            raise ConfigurationError(
                "Resume cannot tell what each process has of a loader without a DistributedSampler, as "
                "Trainer(use_distributed_sampler=False) leaves it. Leave out that option, or give the loader that "
                "sampler."
            )
        found = resumable_loader(loader)
        self.take_loader(stage, found)
        return found

    def _set_loader(self, stage: str, index: int, loader: Any = None) -> None:
        if loader is None:
            loader = self._loaders(stage)[index]
        state = self._mine["loaders"][stage][index]
        if not isinstance(loader, Resumable) or state is None:
            return
        if stage == "train":
            under_way = self._mine["place"] != "epoch"
        else:
            position = self._mine["evaluation_position"]
            under_way = position is not None and index in (position["loader"], position["drawing"])
        if state["pass"] is not None and not under_way:  # Lightning doesn't draw from a loader until it has ended
            state = {**state, "pass": None, "passes": state["passes"] + 1}
        elif stage == "train":
            _set_epoch(loader, self._trainer.current_epoch)  # Lightning does it later, when the pass has begun
        loader.load_state_dict(state)

    def _resume_start(self, resume: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._saved is None:
            resume(path, *args, **kwargs)
            return
        checkpoint = dict(self._saved.shared)
        if self._mine["place"] == "start":
            del checkpoint["loops"]  # or Lightning leaves out the sanity check
        self._require_same(_about_module(self._trainer.lightning_module))
        set_checkpoint(self._trainer, checkpoint, self._file.path)

    def _require_same(self, about: dict[str, str]) -> None:
        """Of what the file tells."""
        assert self._saved is not None
        known = self._saved.about
        require_same(
            {name: known[name] for name in about if name in known},
            {name: value for name, value in about.items() if name in known},
            self._file.path,
        )

    def _restore(self) -> None:
        assert self._saved is not None
        taken = own_state.Taken(self._own(), self._saved.shared, get_rank(), self._is_same, get_world_size())
        for index, state in enumerate(self._mine["loaders"]["train"]):
            if self._mine["place"] == "epoch" or (state is not None and state["pass"] is None):
                self._set_loader("train", index)  # Lightning has begun a pass
        taken.put_back(self._trainer)
        forget_loaders(self._trainer)

    @property
    def _is_same(self) -> bool:
        return self._saved is not None and self._saved.world_size == get_world_size()

    def _own(self) -> list[dict[str, Any]]:
        """The states of all ranks that wrote the file; this rank's alone, if there were as many."""
        assert self._saved is not None
        ranks = [get_rank()] if self._is_same else range(self._saved.world_size)
        return [self._saved.own(rank) for rank in ranks]

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _pass_moment(self, place: Place) -> None:
        is_over = place == "epoch" and is_done(self._trainer.fit_loop)
        if not is_over and self.preemption.is_requested():
            if place != "start" or self._mine.get("place", place) == place:  # else the file has come further
                self._write(place)
            self._file.close()  # a thread may still write it
            self.preemption.exit(self._file.path)
        is_due = place != "start" and self._interval.is_due(place == "training", place == "epoch")
        if is_over or is_due:
            self._write(place)
            self._interval.note_written()

    def _write(self, place: Place) -> None:
        trainer = self._trainer
        own = self._place(place) | (
            own_state.take(trainer, self._attributes) if place != "start" else {"random": self._start}
        )
        checkpoint = dump_checkpoint(trainer)  # closes a window of local steps
        forget_loaders(trainer, checkpoint)
        if trainer.strategy.takes_local_steps and place != "start":
            trainer.strategy.load_own_state([own["strategy"]] * get_world_size(), True)
        own["loggers"] = loggers.places_of(trainer.loggers)
        train = self._loaders("train")
        about = self._about(train[0]) if train else _about_module(trainer.lightning_module)
        self._file.write(checkpoint, own, about)

    def _place(self, place: Place) -> dict[str, Any]:
        """Where the fit is, and its loaders."""
        fit_loop = self._trainer.fit_loop
        training = evaluation = None
        if place != "start":
            training = position_in_training(fit_loop)
        if place == "evaluation":
            evaluation = position_in_evaluation(fit_loop.epoch_loop.val_loop, self._moments.step)
        loaders = {"train": [self._state_of(loader, training) for loader in self._loaders("train")], "val": []}
        for index, loader in enumerate(self._loaders("val")):
            position = None
            if evaluation is not None and index == evaluation["loader"]:
                position = evaluation
            elif evaluation is not None and index == evaluation["drawing"]:
                position = {"used": 0}
            loaders["val"].append(self._state_of(loader, position))
        return {
            "place": place,
            "training_position": training,
            "evaluation_position": evaluation,
            "first_of_epoch": self._moments.first_of_epoch,
            "loaders": loaders if place != "start" else {},
        }

    def _state_of(self, loader: Any, position: dict[str, Any] | None) -> dict[str, Any] | None:
        if not isinstance(loader, Resumable):
            return None
        if position is None:
            return loader.state_dict()
        if len(position.get("consumed", ())) < 2:
            return loader.state_dict(position["used"])
        state = loader.state_dict()  # of several loaders, the shorter ones begin again
        if position["ahead"] and state["pass"] is not None:
            state = loader.state_dict(state["pass"]["batches"] - position["ahead"])
        return state

    def _loaders(self, stage: str) -> list[Any]:
        fit_loop = self._trainer.fit_loop
        combined = loader_of(fit_loop if stage == "train" else fit_loop.epoch_loop.val_loop)
        return [] if combined is None else list(combined.flattened)

    def _about(self, loader: Any) -> dict[str, str]:
        """What must be the same in the run that goes on."""
        about = _about_module(self._trainer.lightning_module)
        with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
            about["samples of the training"] = str(len(loader.dataset))
        return about | {"batch size of the training": str(getattr(loader, "batch_size", None))}

    def _without_loaders(self, save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Lightning would save the states of loaders that only this run has, and other Trainers refuse them."""
        state = save()
        state.pop("combined_loader", None)
        return state

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._exit.callback(Replaced(owner, name, function).undo)


def _original(loader: Any) -> Any:
    """The user's loader; the workers of the last pass have ended."""
    if not isinstance(loader, Resumable):
        return loader
    loader.end()
    return loader.loader


def _set_epoch(loader: Any, epoch: int) -> None:
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _about_module(module: Any) -> dict[str, str]:
    numbers = [parameter.numel() for parameter in module.parameters()]
    return {"model": f"{type(module).__name__} with {sum(numbers)} numbers in {len(numbers)} parameters"}
