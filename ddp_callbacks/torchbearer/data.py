"""Give each rank its part of the data, and a matching random state; join predictions; flatten samples.

All events draw from one random state on all ranks: they may prune parameters. Forward, criterion and what comes between
draw for the whole batch, of which each rank keeps its rows, as do the events that get its samples; see
:class:`ddp_callbacks.WholeDraws`. The message that merges the metrics of a pass gives all ranks rank 0's state again,
if a callback has drawn on some ranks only; so does the one that compares the replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
import torchbearer
from torchbearer import Callback
from torchbearer.callbacks import AggregatePredictions as Aggregate

from ddp_callbacks.batch_norm.layers import samples_needed
from ddp_callbacks.checkpoints.recovery import is_wanted
from ddp_callbacks.data.iterator import ShardedIterator
from ddp_callbacks.data.nested import length_of, map_arrays, without_rows
from ddp_callbacks.data.outputs import gather_outputs
from ddp_callbacks.data.random_state import RunRandomState, drawing_apart
from ddp_callbacks.data.resuming import resumable_loader
from ddp_callbacks.data.sharding import ShardedLoader, deal_next_pass, shard_loader
from ddp_callbacks.data.shares import BatchSize, Share, check_batch_size, common_size, note_part, slice_batch
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.randomness import Rows, WholeDraws
from ddp_callbacks.randomness.draws import PREDICTED
from ddp_callbacks.randomness.option import Randomness, check_randomness
from ddp_callbacks.replacement import Replaced, Replacements
from ddp_callbacks.reporting.recorder import end_validation
from ddp_callbacks.torchbearer.base import Call, DistributedCallback, aggregator_of, handles
from ddp_callbacks.torchbearer.state import (
    DATA_KEYS,
    ROWS,
    RUN_RANDOM_STATE,
    SHARE,
    WEIGHS_LOSS,
    Event,
    State,
    share_of,
)

_EVALUATED = "on_step_validation"
STEPS_KEYS = (torchbearer.TRAIN_STEPS, torchbearer.VALIDATION_STEPS, torchbearer.TEST_STEPS)


class ShardData(DistributedCallback):
    """Replace the Trial's generators by this rank's part of them while it runs.

    The loaders are not changed, except that another Trial continues an endless pass of theirs. In each step,
    ``state[SHARE]`` has this rank's number of samples. With a custom loader (``with_loader``) that reads no generator,
    every rank makes the batch under rank 0's random state and keeps its slice. A Trial without data has nothing to
    divide: every rank computes the same step as a single process.

    All ranks continue with rank 0's random state, in ``run`` and after it.

    In ``predict`` each rank computes whole batches in turn, and every rank gets the outputs of all, in the loader's
    order. Outputs that are not tensors are pickled.

    Args:
        batch_size: ``"global"``: the loader's batch is the global batch, divided among the ranks. ``"per_process"``:
            each rank takes whole batches in turn, so a step has ``world_size`` batches. ``None``: the loaders are
            divided already, for example by a data set that splits itself; each rank keeps its own.
        randomness: ``"global"``: a step draws dropout and noise for the global batch, as one process does, and on
            several processes each sample of a map-style data set draws its augmentation under a seed of its own.
            ``"by_sample"``: the same, and such seeds on one process, too, so that one and many draw the same.
            ``"by_process"``: each process draws its own numbers in a step, which costs less time.

    Raises:
        ConfigurationError: ``batch_size`` or ``randomness`` is invalid, or ``batch_size`` is ``None`` with
            :class:`Resume`. An output of ``predict`` cannot be pickled.
    """

    def __init__(self, batch_size: BatchSize | None = "global", randomness: Randomness = "global") -> None:
        super().__init__()
        if batch_size is not None:
            check_batch_size(batch_size)
        check_randomness(randomness)
        self.batch_size, self._randomness = batch_size, randomness
        self._sharded: dict[int, tuple[Any, Any]] = {}
        self._undivided: dict[Any, Any] = {}  # the Trial's data and steps, while it runs
        self._is_resumable = False
        self.random_state = RunRandomState()
        self._draws: WholeDraws | None = None
        self._evaluating = ExitStack()  # the computation of a batch of an evaluation
        self._is_mine: list[bool] = []  # whether this rank computed each batch of the prediction
        self._has_evaluated = False  # whether this rank has had a sample in this pass

    def make_resumable(self) -> None:
        """From the next run on, use loaders that can resume in the middle of a pass, also with a single process."""
        if self.batch_size is None:
            raise ConfigurationError(
                "Resume and ddprun --keep-going cannot know the position in loaders that are divided already "
                "(batch_size=None). Save the Trial's state_dict at the end of epochs instead."
            )
        if not self._is_resumable:
            self._is_resumable = True
            self.divide_again()  # loaders of an earlier evaluation

    def divide_again(self) -> None:
        """Forget how the loaders were divided; from the next call on, there may be other ranks."""
        self._sharded.clear()

    def on_init(self, state: State) -> None:
        super().on_init(state)
        callbacks = state[torchbearer.CALLBACK_LIST]
        for name in ("on_sample", "on_sample_validation"):
            Replaced(callbacks, name, self._begin_batch)
        if self._may_be_several:
            Replaced(callbacks, "on_end", self._synchronize)
            Replaced(callbacks, "on_backward", self._aside)
            Replaced(callbacks, "on_sample_validation", self._begin_evaluating)
            Replaced(callbacks, _EVALUATED, self._end_evaluating)
            Replaced(callbacks, "on_end_epoch", self._end_epoch)

    @property
    def _may_be_several(self) -> bool:
        """Whether there are other processes, or may be: they may join."""
        return self.world_size > 1 or is_wanted()

    @property
    def _divides_alone(self) -> bool:
        """Whether a single process, too, iterates over parts of loaders: to resume, or to seed each sample."""
        return self._is_resumable or (self.world_size == 1 and self._randomness == "by_sample")

    def _synchronize(self, event: Event, state: State) -> None:
        """Continue from rank 0's random state, if callbacks before have drawn on some ranks only. A collective."""
        self.random_state.synchronize("the end of the run")
        event(state)

    def on_start(self, state: State) -> None:
        if self.world_size > 1 or self._divides_alone:
            self._divide_all(state)
        if self._draws is None:
            self._draws = WholeDraws(state[torchbearer.MODEL], by_rank=self._randomness == "by_process")
        self._draws.report()  # forgets a pass that has been cut, of which a new process knows nothing
        self.random_state.draws = self._draws
        self.random_state.synchronize()
        state[RUN_RANDOM_STATE] = self.random_state

    def on_start_training(self, state: State) -> None:
        is_own = self.batch_size is None or (self.batch_size == "per_process" and state[torchbearer.GENERATOR] is None)
        if self.world_size > 1 and is_own:  # each rank makes batches of its own
            state[torchbearer.SAMPLER] = functools.partial(self._load_apart, state[torchbearer.SAMPLER])

    def _load_apart(self, load: Callable[[State], Any], state: State) -> Any:
        with drawing_apart():
            return load(state)

    def _divide_all(self, state: State) -> None:
        trial_state = state[torchbearer.SELF].state
        for key, steps_key in zip(DATA_KEYS, STEPS_KEYS, strict=True):
            if (data := trial_state[key]) is not None:
                needed = self._samples_needed(state, data[0]) if key is torchbearer.TRAIN_DATA else 1
                trial_state[key] = self._shard(data[0], data[1], needed)
                trial_state[steps_key] = trial_state[key][1]
        # evaluate() and predict() have read the generator before this event; run() reads it afterwards.
        if self.world_size > 1 and self.batch_size is not None and aggregator_of(state) is not None:
            self._deal_out(state)
        elif torchbearer.GENERATOR in state:
            data = self._shard(state[torchbearer.GENERATOR], state[torchbearer.STEPS])
            state[torchbearer.GENERATOR], state[torchbearer.STEPS] = data

    def _deal_out(self, state: State) -> None:
        """Let ``predict()`` compute whole batches in turn. A Trial may repeat a loader to get all its steps."""
        loader, steps = state[torchbearer.GENERATOR], state[torchbearer.STEPS]
        divided, _ = self._shard(loader, steps)
        if isinstance(divided, ShardedLoader) and steps:
            part = deal_next_pass(divided)
            length = length_of(loader) or steps
            passes, rest = divmod(steps, length)
            state[torchbearer.STEPS] = passes * -(-length // self.world_size) + -(-rest // self.world_size)
            part.limit, state[torchbearer.GENERATOR] = steps, part

    def _begin_batch(self, event: Event, state: State) -> None:
        """Note this rank's share of a batch; then callbacks get its samples, and may augment them."""
        if self.world_size > 1 or isinstance(state[torchbearer.ITERATOR], ShardedIterator):
            state[SHARE] = self._take_share(state)
        with nullcontext() if self.world_size == 1 else self._drawing_whole(state, "sample"):
            event(state)

    def _drawing_whole(self, state: State, stage: str = "step") -> AbstractContextManager[None]:
        """Inside, draw for the whole batch."""
        assert self._draws is not None
        share = state.get(SHARE)
        return self._draws.batch(None if share is None else share.rows, stage)

    def _aside(self, event: Event, state: State) -> None:
        """Inside, callbacks change gradients, alike on all ranks."""
        with nullcontext() if self._draws is None else self._draws.aside():
            event(state)

    def _computing(self, closure: Callable[[State], Any], state: State) -> Any:
        with self._drawing_whole(state):
            try:
                return closure(state)
            except Exception as error:
                note_part(error, share_of(state))
                raise

    def _begin_evaluating(self, event: Event, state: State) -> None:
        """After all callbacks of ``on_sample_validation``: what follows computes the batch."""
        event(state)
        self._evaluating.enter_context(self._drawing_whole(state))

    def _end_evaluating(self, event: Event, state: State) -> None:
        """End a batch. Of a padding batch, the user's callbacks get no row; or no event, if they have had rows."""
        self._evaluating.close()
        with Replacements() as skipped:
            if share_of(state).local:
                self._has_evaluated = True
            elif not self._has_evaluated:  # so that they have a list of each to join at the end
                state.update({key: without_rows(state[key]) for key in ROWS if key in state})
            else:
                for callback in state[torchbearer.CALLBACK_LIST]:
                    if handles(callback, (_EVALUATED,)):
                        skipped.replace(callback, _EVALUATED, lambda *_: None)
            event(state)

    def _end_epoch(self, event: Event, state: State) -> None:
        event(state)
        if self._draws is not None:
            self._draws.note_apart(PREDICTED if aggregator_of(state) is not None else "")
            self._draws.warn()

    def on_start_validation(self, state: State) -> None:
        self.on_start_training(state)
        self._has_evaluated = False
        if aggregator_of(state) is not None:  # not in an evaluation within the prediction
            self._is_mine = []

    def on_step_validation(self, state: State) -> None:
        if aggregator_of(state) is not None:
            self._is_mine.append(share_of(state).local > 0)

    def on_end_validation(self, state: State) -> None:
        end_validation()
        aggregator = aggregator_of(state)
        if self.world_size > 1 and aggregator is not None:
            both = zip(aggregator.predictions_list, self._is_mine, strict=False)
            gathered = gather_outputs([output if is_mine else ... for output, is_mine in both])
            limit = getattr(state[torchbearer.GENERATOR], "limit", None)
            predictions = [output for output in gathered if output is not ...][:limit]
            for each in [aggregator, *(own for own in state[torchbearer.CALLBACK_LIST] if isinstance(own, Aggregate))]:
                each.predictions_list = predictions
                each.on_end_validation(state)

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Let each call divide the user's own loaders; at its end, also after an exception, restore those it found.

        If a callback evaluates within a run, it finds divided loaders. The run then keeps these, and its random state.
        """
        trial_state = call.trial.state
        found = {key: trial_state[key] for key in DATA_KEYS + STEPS_KEYS}
        is_outermost = not self._undivided
        self._undivided = self._undivided or found
        trial_state.update(self._undivided)
        try:
            with Replacements() as replacements:
                if self._may_be_several and is_outermost:
                    replacements.replace(call.trial, "closure", self._computing)
                yield
        finally:
            self._evaluating.close()
            trial_state.update(found)
            if is_outermost:
                self._end_call([(found[key] or (None,))[0] for key in DATA_KEYS])

    def _end_call(self, generators: list[Any]) -> None:
        """After the outermost call, forget a pass that has raised.

        Args:
            generators: Those that the Trial has now; others are forgotten, with their data.
        """
        self._undivided = {}
        ids = set(map(id, generators))
        self._sharded = {key: divided for key, divided in self._sharded.items() if key in ids}
        for loader in self.divided:
            loader.steps.clear()
            if "tb_iter" in vars(loader):
                with suppress(AttributeError):  # a list has none
                    loader.loader.tb_iter = loader.tb_iter

    @property
    def divided(self) -> list[ShardedLoader]:
        """The divided loaders, of this call and of earlier ones."""
        return [loader for _, loader in self._sharded.values() if isinstance(loader, ShardedLoader)]

    def _shard(self, generator: Any, steps: int | None, needed: int = 1) -> tuple[Any, int | None]:
        if self.batch_size is None:
            return generator, steps
        if id(generator) not in self._sharded:
            divide = resumable_loader if self._divides_alone and generator is not None else shard_loader
            sharded = divide(generator, self.batch_size, at_least=needed)
            self._sharded[id(generator)] = (generator, sharded)
        sharded = self._sharded[id(generator)][1]
        if self.batch_size == "per_process" and sharded is not generator and steps == length_of(generator):
            steps = length_of(sharded)
        return sharded, steps

    def _take_share(self, state: State) -> Share:
        iterator, batch = state[torchbearer.ITERATOR], (state[torchbearer.X], state.get(torchbearer.Y_TRUE))
        if isinstance(iterator, ShardedIterator):
            if share := iterator.take_share():
                return share
            iterator = None  # a loader of the user's (with_loader) reads nothing
        size = common_size(batch)
        if self.batch_size != "global" or iterator is not None:  # already a part, as of a DistributedSampler
            return Share(1 if size is None else size, None)
        if size is None:
            return Share(int(self.rank == 0), 1, Rows(0, 1, 1))  # all ranks compute the whole
        needed = self._samples_needed(state, None) if state[torchbearer.MODEL].training else 1
        part, share = slice_batch(batch, size, self.rank, self.world_size, needed)
        state[torchbearer.X], state[torchbearer.Y_TRUE] = part
        return share

    def _samples_needed(self, state: State, generator: Any) -> int:
        if WEIGHS_LOSS in state:  # BatchNorm layers are synchronized
            return 1
        return samples_needed(state[torchbearer.MODEL], getattr(generator, "batch_size", None), self.world_size)


class Flatten(Callback):  # type: ignore[misc]
    """Flatten each sample to one dimension, in training, validation and prediction.

    ``state[X]`` of shape ``[batch, ...]`` becomes ``[batch, features]``. Tensors inside lists, tuples and dicts are
    flattened too. Tensors with fewer than two dimensions are not changed.
    """

    def on_sample(self, state: State) -> None:
        state[torchbearer.X] = map_arrays(state[torchbearer.X], _flatten)

    on_sample_validation = on_sample


def _flatten(samples: Any) -> Any:
    return samples.flatten(1) if isinstance(samples, torch.Tensor) and samples.dim() > 1 else samples
