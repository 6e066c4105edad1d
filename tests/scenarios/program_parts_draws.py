"""Parts that draw random numbers, for both hosts: in layers, losses, hooks and samples."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from program_parts import OTHER_AMOUNT, Build, Change, part
from torch import nn
from torch.distributions import Beta, Categorical, Normal, RelaxedBernoulli
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

UNEQUAL = "combined"  # loaders of different sizes draw by rank
DOUBT = "was taken to hold the batch|holds the batch, but another was taken"  # if sizes are equal
OF_OTHER_ROWS = "depends on rows of other processes"


class Calls(nn.Module):
    """Calls a function, in training, or always."""

    def __init__(self, function: Change, always: bool = False) -> None:
        super().__init__()
        self.function, self.always = function, always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.training or self.always else x


class Shaped(nn.Module):
    """Lets a layer see each sample in another shape."""

    def __init__(self, layer: nn.Module, *shape: int, batch_first: bool = True) -> None:
        super().__init__()
        self.layer, self.shape, self.batch_first = layer, shape, batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = math.prod(self.shape)
        h = x.repeat(1, -(-size // x.shape[1]))[:, :size].unflatten(1, self.shape)
        h = self.layer(h) if self.batch_first else self.layer(h.transpose(0, 1)).transpose(0, 1)
        return x + h.flatten(1)[:, : x.shape[1]].tanh()


def shape(p: Build) -> tuple[int, int]:
    """A part of a batch may have as many samples, or never."""
    return (2, 6) if p.maybe(0.3) else (11, 12)


# --- dropout ----------------------------------------------------------------------------------------------------------

DROPOUTS: dict[str, Callable[[float, int, int], nn.Module]] = {
    "Dropout": lambda p, *_: nn.Dropout(p),
    "inplace": lambda p, *_: Calls(lambda x: F.dropout(x * 1.5, p, inplace=True)),
    "Dropout1d": lambda p, length, width: Shaped(nn.Dropout1d(p), width, length),
    "Dropout2d": lambda p, length, width: Shaped(nn.Dropout2d(p), width, 1, length),
    "Dropout3d": lambda p, length, width: Shaped(nn.Dropout3d(p), width, 1, length, 1),
    "AlphaDropout": lambda p, *_: nn.AlphaDropout(p),
    "FeatureAlphaDropout": lambda p, length, width: Shaped(nn.FeatureAlphaDropout(p), width, length),
    "F.dropout": lambda p, *_: Calls(lambda x: F.dropout(x, p)),
    "F.dropout1d": lambda p, length, width: Shaped(Calls(lambda x: F.dropout1d(x, p)), width, length),
    "F.alpha_dropout": lambda p, *_: Calls(lambda x: F.alpha_dropout(x, p, training=True)),
    "torch.dropout": lambda p, *_: Calls(lambda x: torch.dropout(x, p, True)),
    "torch.feature_dropout": lambda p, length, width: Shaped(
        Calls(lambda x: torch.feature_dropout(x, p, True)), width, length
    ),
    "native_dropout": lambda p, *_: Calls(lambda x: torch.native_dropout(x, p, True)[0]),
    "recomputed": lambda p, *_: Calls(lambda x: checkpoint(lambda h: F.dropout(h, p).sin(), x, use_reentrant=False)),
    "twice": lambda p, *_: nn.Sequential(*[nn.Dropout(p)] * 2),
    "of_weights": lambda p, *_: DropsWeights(p),
    "of_sequences": lambda p, length, width: Shaped(nn.Dropout(p), length, width),
    "of_sequences_first": lambda p, length, width: Shaped(nn.Dropout(p), length, width, batch_first=False),
}


class DropsWeights(nn.Module):
    """The same weights for all samples."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.weight = p, nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * F.dropout(self.weight, self.p, self.training))


@part(each=DROPOUTS, without=UNEQUAL)
def drops(p: Build, kind: str) -> None:
    p.allowed.append(DOUBT)
    share = p.rng.choice([0.1, 0.4])
    sizes = shape(p)
    p.insert(lambda: DROPOUTS[kind](share, *sizes), p.maybe())


class Recurrent(nn.Module):
    def __init__(self, kind: Any, width: int, batch_first: bool) -> None:
        super().__init__()
        self.layer = kind(width, width, 2, dropout=0.3, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Attends(nn.Module):
    def __init__(self, width: int, need_weights: bool, heads: int = 1) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, 0.3, bias=False, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, need_weights=self.need_weights)[0]


class Dots(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3 if self.training else 0.0)


def _encoder(width: int, batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 3, 5, 0.2, batch_first=batch_first, bias=False)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "GRU": lambda length, width: Shaped(Recurrent(nn.GRU, width, True), length, width),
    "LSTM": lambda length, width: Shaped(Recurrent(nn.LSTM, width, True), length, width),
    "RNN": lambda length, width: Shaped(Recurrent(nn.RNN, width, True), length, width),
    "GRU_sequence_first": lambda length, width: Shaped(
        Recurrent(nn.GRU, width, False), length, width, batch_first=False
    ),
    "LSTM_sequence_first": lambda length, width: Shaped(
        Recurrent(nn.LSTM, width, False), length, width, batch_first=False
    ),
    "MultiheadAttention": lambda length, width: Shaped(Attends(width, True), length, width),
    "MultiheadAttention_without_weights": lambda length, width: Shaped(Attends(width, False, 3), length, width),
    "sdpa": lambda length, width: Shaped(Dots(), length, width),
    "Transformer": lambda length, width: Shaped(_encoder(width, True), length, width),
    "Transformer_sequence_first": lambda length, width: Shaped(
        _encoder(width, False), length, width, batch_first=False
    ),
}


@part(each=LAYERS, without=UNEQUAL)
def drops_inside(p: Build, layer: str) -> None:
    p.allowed.append(DOUBT)
    sizes = shape(p)
    p.insert(lambda: LAYERS[layer](*sizes), True)


# --- noise ------------------------------------------------------------------------------------------------------------


def _gumbel(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 0.2 * F.gumbel_softmax(x, tau=0.7, dim=1))


def _stochastic_depth(x: torch.Tensor) -> torch.Tensor:
    kept = torch.rand(x.shape[0], *[1] * (x.dim() - 1), dtype=x.dtype) < 0.8
    return x + kept * x.sin() / 0.8


def _drop_path(x: torch.Tensor) -> torch.Tensor:
    return x + x.cos() * x.new_empty(x.shape[0], 1).bernoulli_(0.7).div_(0.7)


def _now_and_then(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x) if random.random() < 0.5 else x * (1 + 0.1 * torch.rand((), dtype=x.dtype))


def _as_often_as_drawn(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(torch.randint(0, 3, ()))):
        x = x + 0.05 * torch.randn_like(x)
    return x


NOISE: dict[str, Change] = {
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "rand": lambda x: x * torch.rand(x.shape, dtype=x.dtype),
    "rand_like": lambda x: x * (1 + torch.rand_like(x)),
    "normal_": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "normal": lambda x: torch.normal(x, 0.1),
    "normal_of_both": lambda x: x + torch.normal(x.detach(), x.detach().abs() * 0.1),
    "uniform_": lambda x: x + x.new_zeros(x.shape).uniform_(-0.1, 0.1),
    "exponential_": lambda x: x * (1 + 0.1 * torch.empty_like(x).exponential_()),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.8)),
    "bernoulli_of_rows": lambda x: x * (1 + torch.bernoulli(x.detach().sigmoid())),
    "randint": lambda x: x * (1 + torch.randint(0, 3, (x.shape[0], 1))),
    "randint_like": lambda x: x * (1 + 0.1 * torch.randint_like(x, 3)),
    "of_time_steps": lambda x: x + 0.1 * torch.randn(x.shape[0], dtype=x.dtype)[:, None],
    "transposed": lambda x: x + 0.1 * torch.randn_like(x.t()).t(),
    "gumbel": _gumbel,
    "rsample": lambda x: Normal(x, 0.1 + x.detach().abs()).rsample(),
    "rsample_of_several": lambda x: Normal(x, 0.1).rsample(torch.Size([3])).mean(0),
    "relaxed": lambda x: x * RelaxedBernoulli(torch.tensor(0.5, dtype=x.dtype), logits=x).rsample(),
    "categorical": lambda x: x * (1 + 0.1 * Categorical(logits=x.detach()).sample()[:, None]),
    "stochastic_depth": _stochastic_depth,
    "drop_path": _drop_path,
    "numpy_beta": lambda x: x * (0.5 + float(numpy.random.beta(0.8, 0.8))),
    "beta": lambda x: x * (0.5 + Beta(torch.tensor(0.8), torch.tensor(0.8)).sample().double()),
    "python": lambda x: x * (0.5 + random.random()),
    "scalar": lambda x: x * (0.5 + torch.rand((), dtype=x.dtype)),
    "item": lambda x: x * (0.5 + torch.rand(1).item()),
    "of_features": lambda x: x * (1 + 0.1 * torch.randn(x.shape[1], dtype=x.dtype)),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "poisson": lambda x: x * torch.poisson(1 + x.detach().abs()),
    "gamma": lambda x: x * (1 + 0.1 * Beta(1 + x.detach().abs(), 2.0).sample()),
    "now_and_then": _now_and_then,
    "as_often_as_drawn": _as_often_as_drawn,
}
NOT_TOLD = ("rrelu", "poisson", "gamma", "beta")  # how much they draw, depends on the rows


def noise_of(p: Build, kind: str) -> Change:
    p.allowed.append(DOUBT)
    if kind in NOT_TOLD:
        p.allowed += [OF_OTHER_ROWS, OTHER_AMOUNT]
    if kind == "item":
        p.allowed.append(OTHER_AMOUNT)  # one number looks like one of a part of a single sample
    return NOISE[kind]


@part(each=NOISE, without=UNEQUAL)
def noise_in_training(p: Build, kind: str) -> None:
    function = noise_of(p, kind)
    p.insert(lambda: Calls(function), p.maybe())


@part(each=NOISE, without=f"tested_and_predicted {UNEQUAL}")
def noise_in_validation_too(p: Build, kind: str) -> None:
    function = noise_of(p, kind)
    p.insert(lambda: Calls(function, always=True), p.maybe())


@part(each=NOISE, without=f"tested_and_predicted {UNEQUAL}")
def noise_in_batches(p: Build, kind: str) -> None:
    """In a hook that gets the batch before a step of training or validation."""
    p.change_batches(noise_of(p, kind))


@part(each=("randn_like", "rand", "stochastic_depth", "numpy_beta", "rsample", "item"), without=f"loss {UNEQUAL}")
def noise_in_the_loss(p: Build, kind: str) -> None:
    p.change_predictions(noise_of(p, kind))


@part(each=("torch", "numpy"))
def noise_in_gradients(p: Build, kind: str) -> None:
    def noise(parameters: Any) -> None:
        for q in parameters:
            if q.grad is not None and kind == "torch":
                q.grad.add_(torch.randn_like(q.grad), alpha=0.01)
            elif q.grad is not None:
                q.grad.mul_(0.9 + 0.2 * numpy.random.rand())

    p.change_gradients(noise)


# --- samples ----------------------------------------------------------------------------------------------------------


def _varying(x: torch.Tensor) -> torch.Tensor:
    while random.random() < 0.6:
        x = x + 0.1 * torch.randn_like(x)
    for _ in range(numpy.random.poisson(1.0)):
        x = x * (1 + 0.1 * float(torch.rand(())))
    return x


def _sometimes(x: torch.Tensor) -> torch.Tensor:
    """Flips most samples without a draw."""
    return x + 0.2 * torch.randn_like(x) if float(x[0]) > 0 else -x


class _Noise:
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.generators: list[Any] = [torch.Generator(), numpy.random.default_rng()]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        own, numpys = self.generators
        return x * numpys.uniform(0.5, 1.5) + 0.2 * torch.randn(x.shape, generator=own, dtype=x.dtype)


AUGMENTATIONS: dict[str, Change] = {
    "own generators": _Noise(),
    "torch": lambda x: x + 0.2 * torch.randn_like(x),
    "numpy": lambda x: x * float(numpy.random.uniform(0.5, 1.5)),
    "python": lambda x: x * random.uniform(0.5, 1.5),
    "permutation": lambda x: x[torch.randperm(len(x))],
    "varying": _varying,
    "sometimes": _sometimes,
}


STREAMS = (  # they have loaded their samples before
    "iterable iterable_that_counts iterable_that_draws iterable_without_length validation_stream "
    "batches_that_are_made_already"
)


class Augmented(TensorDataset):
    """Its samples draw when they are loaded."""

    function: Change

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return self.function(x), y


@part(each=AUGMENTATIONS, without=STREAMS, samples_draw=True)
def augments(p: Build, kind: str) -> None:
    plain = p.data

    def data(*args: Any) -> Augmented:
        made = Augmented(*plain(*args).tensors)
        made.function = AUGMENTATIONS[kind]
        return made

    p.data = data
    p.train, p.validation = DataLoader(data(29), 8, shuffle=True), DataLoader(data(13, 9), 5)
