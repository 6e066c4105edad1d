"""Find what draws random numbers inside of a batch's computation.

A torch function mode sees each call of torch's Python interface, at about a microsecond. Around a call that may draw, a
dispatch mode sees each operator, also those inside of torch's C++, such as a GRU's dropout.

[Note: compiled code]
``torch.compile`` runs without compilation inside of a dispatch mode, so there is none around its calls. It would trace
the function mode, which then does nothing.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ddp_callbacks._torch import TorchDispatchMode, change_function_modes, composite_kernel
from ddp_callbacks.errors import frames
from ddp_callbacks.randomness.dimension import ARRANGING, KNOWN, BatchDims, DrawByRankError, blocks_of
from ddp_callbacks.randomness.dropout import dropout, is_simple
from ddp_callbacks.randomness.generators import (
    are_equal,
    default_generator_of,
    default_generators,
    drawing_by_rank,
    states_of,
)
from ddp_callbacks.randomness.operators import Kind, argument_names, base_name, draws, kind_of, may_draw
from ddp_callbacks.randomness.rows import Rows, memory_order
from ddp_callbacks.randomness.whole import draw_whole, is_of_one, sampled_shape

_BACKWARDS = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}
_CHECKPOINTING = checkpoint.__code__.co_filename
_CALLS = nn.Module.__module__  # where hooks decide which way a layer is called
_HOSTS = ("ddp_callbacks", "lightning", "pytorch_lightning", "torchbearer")
_PERMUTED = "a permutation of the batch needs rows of other processes: mix samples in the data set"
_SEEDS = "compiled code draws in a way of its own: set torch._inductor.config.fallback_random = True"
_UNKNOWN = "how many numbers {} draws depends on rows of other processes"
_NAMES = {"_sample_dirichlet": "Beta or Dirichlet", "_standard_gamma": "Gamma"}  # of distributions, by operator


class DrawingCalls(TorchFunctionMode):
    """Inside, calls that draw random numbers draw for the whole batch.

    Args:
        operators: Draws for the whole batch.
    """

    def __init__(self, operators: DrawingOperators) -> None:
        super().__init__()
        self._operators = operators

    def __enter__(self) -> DrawingCalls:
        """Enter below other modes: a loop's body may enter and leave its own while this one stays."""
        change_function_modes(lambda modes: [*modes, self])
        return self

    def __exit__(self, *_: object) -> None:
        change_function_modes(lambda modes: [mode for mode in modes if mode is not self])

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self._operators.is_aside:
            return func(*args, **kwargs)
        if func in _BACKWARDS:
            with self._operators.backward():
                return func(*args, **kwargs)
        if may_draw(func):
            return self._operators.call(func, args, kwargs)
        found = func(*args, **kwargs)
        if args and (name := getattr(func, "__name__", "")) in ARRANGING:
            self._operators.arrange(name, args[0], found)
        return found


class DrawingOperators(TorchDispatchMode):
    """Inside, operators that draw random numbers draw for the whole batch and keep this rank's rows.

    Attributes:
        rows: This rank's part of the batch.
        draws: The number of draws since the batch began.
        expected: The states of the default generators after the last draw, while changes by other code are looked for.
        is_unseen: Whether other code has changed them, as compiled code does.
        is_aside: Whether code draws from another random state at the moment, which is not that of the batch.
        recomputes: Whether a backward will compute again what has drawn (``torch.utils.checkpoint``).
        waits: Whether it has not done so yet.
        refusals: Why a layer draws by rank, by its name.
        dims: Which dimensions hold the batch.
        counts_of_layers: In a comparison, how often each layer has drawn.
    """

    def __init__(self, module: nn.Module, rank: int | None, dims: BatchDims | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = Rows(0, 0, 0)
        self.draws = 0
        self.expected: list[torch.Tensor] | None = None
        self.is_unseen = self.is_aside = False
        self.recomputes = self.waits = False
        self.refusals: dict[str, str] = {}
        self.dims = BatchDims() if dims is None else dims
        self.counts_of_layers = Counter[str]()
        self._module, self._rank = module, rank
        self._names = WeakKeyDictionary[nn.Module, str]()  # of the layers, when one drew first
        self._place: Hashable = None
        self._drawn = 0  # number of draws at this place
        self._layer: Any = None  # that draws
        self._owner: Any = None  # of the method that does
        self._known: int | None = None  # the dimension of the batch in what the function draws that was called
        self._counts: dict[Hashable, int] = {}
        self._batch = 0  # the number of the batch in this pass
        self._batches_of: dict[Hashable, tuple[str, int]] = {}  # by place: its layer, a checksum of batches
        self._blocks: dict[int, int] = {}  # by number of rows, see blocks_of
        self._is_again = False  # whether a backward runs in this mode
        self._around: set[FrameType] = set()  # the frames in which the batch began

    def begin(self, rows: Rows) -> None:
        """Draw for a batch of which this rank has these rows."""
        self.rows, self.draws, self._around = rows, 0, set(frames())
        self._batch += 1
        self._counts.clear()
        self._blocks.clear()

    def arrange(self, name: str, given: Any, made: Any) -> None:
        """Note how the function ``name`` has arranged several rows of each sample."""
        is_of_batch = isinstance(made, torch.Tensor) and not isinstance(given, nn.Parameter)
        if is_of_batch and made.dim() and self.rows.samples:
            blocks = blocks_of(name, given, made, self.rows.samples)
            if blocks is not None:
                self._blocks[made.shape[0]] = blocks

    def end(self) -> None:
        """End the batch: its frames hold the user's tensors."""
        self._around = set()

    def call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function that may draw."""
        self.compare()
        try:
            return self._call(function, args, kwargs)
        finally:
            if self.expected is not None:
                self.expected = states_of(default_generators())

    def compare(self) -> None:
        """Note whether the random state has changed since the last draw."""
        if self.expected is not None:
            self.is_unseen = self.is_unseen or not are_equal(self.expected, states_of(default_generators()))

    def _call(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if args and self._is_of_model(function, args[0]):
            self.draws += 1
            return function(*args, **kwargs)  # not a draw for the batch
        self._layer, self._owner, stack, is_recomputed = _caller(self._around)
        if is_recomputed:
            self.recomputes = self.waits = True
        self._known = KNOWN.get(getattr(function, "__name__", ""))
        self._counts[stack] = self._counts.get(stack, 0) + 1
        self._place, self._drawn = (stack, self._counts[stack]), 0
        if function is nn.functional.dropout and is_simple(*args, **kwargs):
            return dropout(self._draw_bernoulli, *args, **kwargs)
        with self:
            return function(*args, **kwargs)

    def _is_of_model(self, function: Any, tensor: Any) -> bool:
        """Whether this is a parameter, or the gradient of one; dropout, called most, is not asked about gradients."""
        if isinstance(tensor, nn.Parameter):
            return True
        if function is nn.functional.dropout or not isinstance(tensor, torch.Tensor) or tensor.grad_fn is not None:
            return False
        return any(tensor is parameter.grad for parameter in self._module.parameters())

    def _draw_bernoulli(self, mask: torch.Tensor, probability: float) -> None:
        self._draw(torch.ops.aten.bernoulli_.float, "filled", {"self": mask, "p": probability})

    def backward(self) -> AbstractContextManager[object]:
        """Surround a backward: a checkpointed forward draws again inside."""
        self.waits = False
        return self._again() if self.recomputes and not self._is_again else nullcontext()

    @contextmanager
    def _again(self) -> Iterator[None]:
        self._layer, self._known, self._place, self._drawn, self._is_again = None, None, "backward", 0, True
        try:
            with self:
                yield
        finally:
            self._is_again = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func):
            return func(*args, **kwargs)
        if (composite := composite_kernel(func)) is not None:  # in inference mode, torch's C++ calls no parts before
            with self:
                return composite(*args, **kwargs)
        arguments = dict(zip(argument_names(func), args, strict=False)) | kwargs
        kind = kind_of(func, arguments)
        if kind == "nothing":
            return func(*args, **kwargs)
        return self._draw(func, kind, arguments)

    def _draw(self, operator: Any, kind: Kind, arguments: Mapping[str, Any]) -> Any:
        """Draw for the whole batch; if this rank can't know how, by rank."""
        try:
            return self._draw_whole(operator, kind, arguments)
        except DrawByRankError as error:
            if self.rows.is_whole:
                return operator(**arguments)
            self.refusals.setdefault(self._name(), str(error))
            generator = arguments.get("generator") or default_generator_of(_device_of(arguments))
            with drawing_by_rank([generator], self._rank):
                return operator(**arguments)

    def _draw_whole(self, operator: Any, kind: Kind, arguments: Mapping[str, Any]) -> Any:
        if kind == "seeds":
            raise DrawByRankError(_SEEDS)
        shape = [arguments["n"]] if kind == "permuted" else sampled_shape(operator, arguments)
        self._drawn += 1
        self.draws += 1
        if self.dims.is_comparing:
            self.counts_of_layers[self._name()] += 1
        tensor = None if is_of_one(operator, arguments) else arguments.get("self")
        order = None if tensor is None else memory_order(tensor)
        place = (self._place, self._drawn)
        blocks = self._blocks.get(shape[0]) if shape else None
        at = None if not shape else self.dims.find(place, self._name, shape, self.rows, self._known, order, blocks)
        if not self.dims.is_in_hook or arguments.get("generator") is None:  # a plot on rank 0 may have one of its own
            self._note(base_name(operator), -1 if at is None else at.dim)
        if at is None or self.rows.is_whole:
            return operator(**arguments)
        if kind != "filled":
            name = base_name(operator)
            raise DrawByRankError(_PERMUTED if kind == "permuted" else _UNKNOWN.format(_NAMES.get(name, name)))
        return draw_whole(operator, arguments, at, self.rows)

    def _note(self, operator: str, dim: int) -> None:
        """Note that an operator draws in this batch, with this dimension of the batch; -1 for none."""
        place = self._place, operator
        layer, batches = self._batches_of.get(place) or (self._name(), zlib.crc32(operator.encode()))
        self._batches_of[place] = layer, zlib.crc32(b"%d %d," % (self._batch, dim), batches)

    def take_batches(self) -> dict[str, int]:
        """Return, for each layer, a checksum of what has drawn in which batches of this pass; begin the next one."""
        found: dict[str, int] = {}
        for layer, batches in sorted(self._batches_of.values()):
            found[layer] = zlib.crc32(b"%d," % batches, found.get(layer, 0))
        self._batch, self._batches_of = 0, {}
        return found

    def _name(self) -> str:
        """Return the name of the layer that draws, or the line; if it is the whole module, or a callback, both."""
        owner = self._owner if self._layer is None else self._layer
        if owner is None:
            return _line()
        kind = type(owner)
        is_of_library = kind.__module__.partition(".")[0] in ("torch", *_HOSTS)
        return self._name_in_module() or kind.__name__ + ("" if is_of_library else f" ({_line()})")

    def _name_in_module(self) -> str:
        if self._layer is None:
            return ""
        if self._layer not in self._names:
            self._names.update({layer: name for name, layer in self._module.named_modules()})
        return self._names.setdefault(self._layer, "")


def _line() -> str:
    """Return the user's file and line that run."""
    outside = (frame for frame in frames() if not _is_of_package(frame.f_globals.get("__name__", "")))
    frame = next(outside, sys._getframe())
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _is_of_package(module: str) -> bool:
    return module.partition(".")[0] in (*_HOSTS, "torch", "contextlib")


def _caller(around: Container[FrameType]) -> tuple[Any, Any, int, bool]:
    """Return the layer that calls, the object whose method does, a hash of the calls, and if backward repeats them.

    Calls of the framework, and those outside of them, do not count: a comparison calls the model by another way.

    Args:
        around: Frames at which the calls began.
    """
    layer, owner, stack, is_recomputed = None, None, [], False
    is_called_by_host = False
    for frame in itertools.islice(frames(), 4, None):  # after those of this module
        code = frame.f_code
        name = frame.f_globals.get("__name__", "")
        is_called_by_host = is_called_by_host or name.partition(".")[0] in _HOSTS
        if not is_called_by_host and name != _CALLS:
            stack.append((code, frame.f_lasti))
        if frame in around:
            break
        is_recomputed = is_recomputed or code.co_filename == _CHECKPOINTING
        if layer is None and code.co_varnames[:1] == ("self",):
            own = frame.f_locals.get("self")
            layer = own if isinstance(own, nn.Module) else None
            owner = own if owner is None and name.partition(".")[0] not in ("torch", "ddp_callbacks") else owner
    return layer, owner, hash(tuple(stack)), is_recomputed


def _device_of(arguments: Mapping[str, Any]) -> torch.device:
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    return tensors[0].device if tensors else torch.device(arguments.get("device") or "cpu")
