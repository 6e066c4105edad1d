"""The callback that lets a fit stop anywhere and resume at the next batch, on any number of processes.

============  =====================================================  ===================================================
place         the fit was cut                                        hooks that run again in the resumed fit
============  =====================================================  ===================================================
``training``  after a training batch, before the validation or       those that open the run and the epoch, and those of
              the plateau schedulers that follow it; or in that      the validation
              validation
``epoch``     between two epochs                                     those that open the run
============  =====================================================  ===================================================

To resume, Lightning's loop runs as in a new fit, in the epoch that was cut or in the next one, until it is about to
train. Then everything is restored. A fit that is over begins and ends once more, without an epoch: callbacks that put
averaged weights in place do so in ``on_train_end``, after the last file was written.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from ddp_callbacks.checkpoints import LocalStates, Saved, require_same
from ddp_callbacks.checkpoints.format import describe_loader, describe_model
from ddp_callbacks.checkpoints.recovery import Recovery, Savers
from ddp_callbacks.checkpoints.resume import Content, ResumeOptions
from ddp_callbacks.checkpoints.saved_attributes import set_attributes
from ddp_callbacks.checkpoints.settings import follow_settings, settings_of
from ddp_callbacks.data.attributes import Checksums, checksums_of
from ddp_callbacks.data.resuming import Resumable, resumable_loader
from ddp_callbacks.data.sharding import is_distributed
from ddp_callbacks.errors import ConfigurationError, say
from ddp_callbacks.lightning import _parts, _progress, checkpoint_files, loggers, own_state
from ddp_callbacks.lightning.packages import require
from ddp_callbacks.process_group import get_rank, get_world_size
from ddp_callbacks.replacement import Replacements

_Callbacks: Any = object  # stands for either package's class, which follows in the MRO


Place = Literal["training", "epoch"]


class ResumeMixin(ResumeOptions, _Callbacks):  # type: ignore[misc]
    """Mixin of a ``Callback`` of either package; see ``Resume``."""

    package: str

    def require_host(self) -> None:
        """Raise :class:`ImportError` if Lightning lacks a private name that only this callback uses."""
        require(self.package, _progress.PRIVATE, _progress.PRIVATE_OF_LOGGERS)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer at the beginning of a run.

        Raises:
            ConfigurationError: The run is a fit, and the Trainer has another strategy.
        """
        if stage == "fit" and not hasattr(trainer.strategy, "resume") and not trainer.fast_dev_run:
            raise ConfigurationError(
                'Resume needs Trainer(strategy="ddp_callbacks"), with a single process, too; this Trainer has '
                f"{type(trainer.strategy).__name__}."
            )


class Fit:
    """One fit that can stop and resume.

    Args:
        recovery: Keeps copies of the fit in memory; ``None``: nothing does.
        options: Those of the callback ``Resume``; ``None``: there is none.
    """

    def __init__(self, trainer: Any, recovery: Recovery | None, options: ResumeOptions | None) -> None:
        self._trainer, self._recovery = trainer, recovery
        self._on_signal = options is not None and options.on_signal
        self._savers = Savers(recovery, options)
        self._saved: Saved | None = None
        self._mine: dict[str, Any] = {}  # this rank's state in the file, or rank 0's
        self._taken = {"train": 0, "val": 0}  # number of loaders that Lightning has asked for
        self._attributes: Checksums = {}  # of the module, before the fit's hooks
        self._settings: dict[str, str] = {}  # of the optimizers and schedulers, when the fit began
        self._exit = Replacements()
        self._handled = sys.exc_info()[1]  # by the user's code, around this fit
        self._is_out_of_time = False  # since the last batch

    def begin(self) -> None:
        """Read the file, if there is one, and listen for requests to stop. A collective.

        Raises:
            CheckpointError: The file belongs to another job or run, or cannot be read.
        """
        trainer, loop = self._trainer, self._trainer.fit_loop
        self._exit.enter_context(self._savers.opened())
        self._saved = self._savers.read()
        self._exit.replace(loop.epoch_loop, _progress.SHOULD_VALIDATE, self._end_batch)
        self._exit.replace(loop.epoch_loop.val_loop, _progress.EVALUATION_STEP, self._end_validation_batch)
        self._exit.replace(loop, "on_advance_end", self._end_epoch)
        self._exit.replace(_parts.connector(trainer, "checkpoint"), _parts.RESUME_START, self._resume_start)
        self._exit.replace(loop, "on_save_checkpoint", _without_loaders)
        if self._on_signal:
            self._exit.replace(_parts.connector(trainer, "signal"), _progress.REGISTER_SIGNALS, lambda _: None)
        if self._saved is None:
            self._exit.replace_once(loop, "on_run_start", self._begin_new_run)
        else:
            self._mine = self._states().mine
            loggers.go_on(trainer.loggers, self._saved.own(0)["loggers"])
            self._exit.set(trainer, "num_sanity_val_steps", 0)  # a sanity check is a pass of the validation's loaders
            self._exit.replace(loop, "run", self._run)

    def end(self) -> None:
        """End the fit, whether or not it has failed. A collective, if it has ended normally or was preempted."""
        failure = sys.exc_info()
        self._exit.__exit__(*(failure if failure[1] is not self._handled else (None, None, None)))

    def note_start(self) -> None:
        """Note the module's attributes and the optimizers' settings, before the hooks of the fit run.

        Raises:
            CheckpointError: The file has the states of other optimizers or schedulers.
        """
        parts = [*self._trainer.optimizers, *(config.scheduler for config in self._trainer.lr_scheduler_configs)]
        self._settings = settings_of(parts)  # a callback may give the fit another scheduler
        if saved := self._mine.get("settings"):
            self._settings = saved
            follow_settings(saved, parts, self._savers.path, get_rank())
        module = self._trainer.lightning_module
        found = own_state.attributes_with_metrics(module)
        if self._recovery is not None:
            device = self._trainer.strategy.root_device
            before = self._recovery.at_start({"module": found}, device).get("module", {})
            set_attributes(module, before)
            found |= before
        self._attributes = checksums_of(found)

    # --- going on -----------------------------------------------------------------------------------------------------

    def take_loader(self, stage: str, loader: Any) -> None:
        """Let a loader that Lightning asks for begin where the fit was cut."""
        index = self._taken.get(stage, 0)
        self._taken[stage] = index + 1
        may_differ = self._trainer.reload_dataloaders_every_n_epochs and self._mine.get("place") == "epoch"
        if self._saved is not None and stage == "train" and index == 0 and not may_differ:
            self._require_same(self._about([loader]))
        if self._recovery is not None and isinstance(loader, Resumable):
            name = f"{stage} {index}"
            before = self._recovery.at_start({name: loader.attributes.plain()}, "cpu")
            loader.attributes.start_from(before.get(name, {}))
        if index < len(self._mine.get("loaders", {}).get(stage, ())):
            self._set_loader(stage, index, loader)

    def take_undivided(self, stage: str, loader: Any) -> Any:
        """Like :meth:`take_loader`, for a loader that the user divides (``use_distributed_sampler=False``).

        Returns:
            The loader, made resumable.

        Raises:
            ConfigurationError: There are several processes, and the loader has no ``DistributedSampler``.
        """
        if get_world_size() > 1 and not is_distributed(loader):
            raise ConfigurationError(
                "Resume and ddprun --keep-going cannot tell what each process has of a loader without a "
                "DistributedSampler, as Trainer(use_distributed_sampler=False) leaves it. Leave out that option, or "
                "give the loader that sampler."
            )
        found = resumable_loader(loader)
        self.take_loader(stage, found)
        return found

    def _set_loader(self, stage: str, index: int, loader: Any) -> None:
        state = self._mine["loaders"][stage][index]
        if not isinstance(loader, Resumable) or state is None:
            return
        if state["pass"] is not None and (stage != "train" or self._mine["place"] == "epoch"):
            ended = stage != "train" or self._begins_passes()  # Lightning never drew its end
            part = {"last": state["pass"]} if ended else {"attributes": state["pass"]["attributes"]}
            state = {**state, **part, "pass": None, "passes": state["passes"] + ended}
        elif stage == "train":
            _set_epoch(loader, self._trainer.current_epoch)  # Lightning does it later, when the pass has begun
        loader.load_state_dict(state)

    def _resume_start(self, resume: Callable[..., None], path: Any = None, *args: Any, **kwargs: Any) -> None:
        if self._saved is None:
            resume(path, *args, **kwargs)
            return
        self._require_same(self._about(()))
        _progress.set_checkpoint(self._trainer, dict(self._saved.shared), self._savers.path)

    def _require_same(self, about: dict[str, str]) -> None:
        """Raise unless ``about`` equals the file's, as far as the file has these names."""
        assert self._saved is not None
        known = {name: self._saved.about.get(name, value) for name, value in about.items()}
        require_same(known, about, self._savers.path)

    def _run(self, run: Callable[[], None]) -> None:
        loop = self._trainer.fit_loop
        _progress.let_begin(loop)
        self._put_limits_back = _progress.lift_limits(loop)
        if self._mine["place"] == "epoch":
            self._exit.replace_once(loop, "on_run_start", self._begin_run)
        else:
            _progress.begin_epoch_again(loop)
            self._exit.replace_once(loop, "on_advance_start", self._begin_epoch)
            self._exit.replace_once(loop.epoch_loop, "on_run_start", self._begin_pass)
        run()

    def _begin_new_run(self, begin: Callable[[], None]) -> None:
        begin()
        self._savers.save_at_begin(functools.partial(self._take, "epoch"))

    def _begin_run(self, begin: Callable[[], None]) -> None:
        begin()
        self._put_back()

    def _begin_epoch(self, begin: Callable[[], None]) -> None:
        with Replacements() as muted:  # loggers have the rows of these hooks already
            for logger in self._trainer.loggers:
                muted.replace(logger, "log_metrics", lambda *_, **__: None)
            begin()

    def _begin_pass(self, begin: Callable[..., None], data_fetcher: Any) -> None:
        begin(data_fetcher)
        self._put_back()
        fit_loop, states = self._trainer.fit_loop, self._mine["loaders"]["train"]
        combined, loop = _parts.loader_of(fit_loop), fit_loop.epoch_loop
        _progress.set_position(data_fetcher, combined, self._mine["training_position"])
        _progress.end_loaders(combined, [n for n, state in enumerate(states) if state and state["pass"] is None])
        self._exit.replace_once(loop, _progress.SHOULD_VALIDATE, lambda *_: self._mine["validates"])
        loop.on_advance_end(data_fetcher)

    def _put_back(self) -> None:
        assert self._saved is not None
        self._put_limits_back()
        states = self._mine["loaders"]["train"]
        for index, (loader, state) in enumerate(zip(self._loaders("train"), states, strict=False)):
            ends = self._mine["place"] == "epoch" and self._begins_passes()
            if ends or (state is not None and state["pass"] is None):
                self._set_loader("train", index, loader)  # Lightning has begun a pass, which it does not use
        val_loop = self._trainer.fit_loop.epoch_loop.val_loop
        if not _parts.loaders_of(val_loop):
            self._exit.replace_once(val_loop, "setup_data", functools.partial(_progress.keep_count, val_loop))
        own_state.put_back(self._trainer, self._states(), self._saved.shared)
        of_rank_zero = self._saved.own(0)
        loggers.cut_back(self._trainer.loggers, of_rank_zero["loggers"])
        checkpoint_files.replace_newer(self._trainer, of_rank_zero.get("checkpoints", {}), self._exit)
        self._tell_if_over()
        self._saved = None  # frees as much memory as the model and its optimizer have

    def _tell_if_over(self) -> None:
        """Say that nothing is left to train if it was no limit that has ended the run; Lightning tells of limits."""
        if self._trainer.should_stop and _progress.is_done(self._trainer.fit_loop) and get_rank() == 0:
            say(
                f"nothing is left to train: trainer.should_stop has ended the run in {self._savers.path}, as "
                "EarlyStopping does. Remove the file to train again."
            )

    def _begins_passes(self) -> bool:
        """Whether the first epoch of this fit begins a pass. Epoch 0 uses the one that begins with the fit."""
        return bool(self._trainer.current_epoch > 0)

    def _states(self) -> LocalStates:
        assert self._saved is not None
        return self._saved.local_states(get_rank(), get_world_size())

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _end_batch(self, decide: Callable[[Any], bool], data_fetcher: Any) -> bool:
        """After a training batch, write and stop if due. Return whether a validation comes next.

        If the time is over, the next run with more of it continues here, before the validation and the hooks of an end.
        """
        with _progress.with_more_time(self._trainer) as self._is_out_of_time:
            validates = decide(data_fetcher)
            take = functools.partial(self._take, "training", validates)
            accumulates = _parts.is_accumulating(self._trainer)
            is_at = {"ends_batch": True, "validates": validates, "is_over": self._is_out_of_time}
            self._savers.save_if_due(take, accumulates, **is_at)
        return bool(decide(data_fetcher)) if self._is_out_of_time else validates

    def _end_validation_batch(self, step: Callable[..., None], *args: Any) -> None:
        step(*args)
        if not self._trainer.sanity_checking:
            self._savers.stop_in_validation()

    def _end_epoch(self, end: Callable[[], None]) -> None:
        """Between two epochs, write and stop if due."""
        end()
        is_over = _progress.is_done(self._trainer.fit_loop)
        if not self._is_out_of_time:
            with _progress.with_more_time(self._trainer):
                self._savers.save_if_due(functools.partial(self._take, "epoch"), ends_epoch=True, is_over=is_over)

    @contextlib.contextmanager
    def _take(self, place: Place, validates: bool = False) -> Iterator[Content]:
        trainer, train = self._trainer, self._loaders("train")
        position = _progress.position_in_training(trainer.fit_loop)
        own = own_state.take(trainer, self._attributes) | {
            "place": place,
            "validates": validates,
            "settings": self._settings,
            "training_position": position,
            "loaders": {
                "train": [self._state_of(loader, position) for loader in train],
                "val": [self._state_of(loader) for loader in self._loaders("val")],
            },
        }
        checkpoint = _progress.dump_checkpoint(trainer)  # closes a window of local steps
        if trainer.strategy.takes_local_steps:
            trainer.strategy.load_own_state([own["strategy"]] * get_world_size(), True)
        own |= {"loggers": loggers.places_of(trainer.loggers), "checkpoints": checkpoint_files.names_of(trainer)}
        yield checkpoint, own, self._about(train)

    def _state_of(self, loader: Any, position: dict[str, Any] | None = None) -> dict[str, Any] | None:
        if not isinstance(loader, Resumable):
            return None
        if position is None:
            return loader.state_dict()
        if len(position["consumed"]) < 2:
            return loader.state_dict(position["used"])
        state = loader.state_dict()  # of several loaders, the shorter ones begin again
        if position["ahead"] and state["pass"] is not None:
            state = loader.state_dict(state["pass"]["batches"] - position["ahead"])
        return state

    def _loaders(self, stage: str) -> list[Any]:
        fit_loop = self._trainer.fit_loop
        return _parts.loaders_of(fit_loop if stage == "train" else fit_loop.epoch_loop.val_loop)

    def _about(self, loaders: Sequence[Any]) -> dict[str, str]:
        """Return what must be equal in the resumed run."""
        about = {"model": describe_model(self._trainer.lightning_module)}
        return about | (describe_loader(loaders[0], "the training") if loaders else {})


def keep_logs(trainer: Any, options: ResumeOptions) -> None:
    """Let a call in front of the fit log to where the fit that was cut has logged, and lose nothing. A collective."""
    saved = Savers(None, options).read()
    if saved is not None:
        loggers.go_on(trainer.loggers, saved.own(0)["loggers"])


def _without_loaders(save: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Leave out the loaders' states: only this run has such loaders, and other Trainers refuse their states."""
    return {name: value for name, value in save().items() if name != "combined_loader"}


def _set_epoch(loader: Any, epoch: int) -> None:
    for sampler in (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
