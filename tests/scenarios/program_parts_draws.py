"""Parts that draw random numbers, for both hosts: in layers, losses, hooks and samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from program_parts import Build, Change, part
from torch import nn
from torch.distributions import Beta, Categorical, Normal, RelaxedBernoulli
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

UNEQUAL = "combined"  # loaders of different sizes draw by rank
DOUBT = "was taken to hold the batch"  # while all batches have one size
OF_OTHER_ROWS = "depends on rows of other processes"
NO_SAMPLE = "has had no sample of a batch of an evaluation"


class Calls(nn.Module):
    """Calls a function, in training, or always."""

    def __init__(self, function: Change, always: bool = False) -> None:
        super().__init__()
        self.function, self.always = function, always

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) if self.training or self.always else x


def inside(shape: tuple[int, ...], layer: nn.Module) -> nn.Module:
    """A layer that sees each sample in this shape."""
    return nn.Sequential(nn.Unflatten(1, shape), layer, nn.Flatten())


# --- dropout ----------------------------------------------------------------------------------------------------------

DROPOUTS: dict[str, Callable[[float], nn.Module]] = {
    "Dropout": nn.Dropout,
    "inplace": lambda p: Calls(lambda x: F.dropout(x * 1.5, p, inplace=True)),
    "Dropout1d": lambda p: inside((-1, 2), nn.Dropout1d(p)),
    "Dropout2d": lambda p: inside((-1, 1, 2), nn.Dropout2d(p)),
    "Dropout3d": lambda p: inside((-1, 1, 2, 1), nn.Dropout3d(p)),
    "AlphaDropout": nn.AlphaDropout,
    "FeatureAlphaDropout": lambda p: inside((-1, 2), nn.FeatureAlphaDropout(p)),
    "F.dropout": lambda p: Calls(lambda x: F.dropout(x, p)),
    "F.dropout1d": lambda p: inside((-1, 2), Calls(lambda x: F.dropout1d(x, p))),
    "F.alpha_dropout": lambda p: Calls(lambda x: F.alpha_dropout(x, p, training=True)),
    "torch.dropout": lambda p: Calls(lambda x: torch.dropout(x, p, True)),
    "torch.feature_dropout": lambda p: inside((-1, 2), Calls(lambda x: torch.feature_dropout(x, p, True))),
    "native_dropout": lambda p: Calls(lambda x: torch.native_dropout(x, p, True)[0]),
    "recomputed": lambda p: Calls(lambda x: checkpoint(lambda h: F.dropout(h, p).sin(), x, use_reentrant=False)),
    "twice": lambda p: nn.Sequential(*[nn.Dropout(p)] * 2),
    "of_weights": lambda p: DropsWeights(p),
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
    p.insert(lambda: DROPOUTS[kind](share), p.maybe())


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(3, 3, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x.view(len(x), 2, 3))[0].flatten(1)


class SequenceFirst(Recurrent):
    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.layer.batch_first = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x.view(len(x), 2, 3).transpose(0, 1))[0].transpose(0, 1).flatten(1)


class Attends(nn.Module):
    def __init__(self, heads: int = 1, of_torch: bool = True) -> None:
        super().__init__()
        self.layer, self.of_torch = nn.MultiheadAttention(3, heads, 0.3, bias=False, batch_first=True), of_torch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.view(len(x), 2, 3)
        if self.of_torch:
            return x + self.layer(h, h, h, need_weights=False)[0].flatten(1).tanh()
        attended = F.scaled_dot_product_attention(h, h, h, dropout_p=0.3 if self.training else 0.0)
        return x + attended.flatten(1).tanh()


class Encodes(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(3, 3, 5, 0.2, batch_first=batch_first, bias=False)
        self.layers, self.batch_first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), batch_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.view(len(x), 2, 3)
        h = self.layers(h) if self.batch_first else self.layers(h.transpose(0, 1)).transpose(0, 1)
        return x + h.flatten(1).tanh()


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "GRU": lambda: Recurrent(nn.GRU),
    "LSTM": lambda: Recurrent(nn.LSTM),
    "RNN": lambda: Recurrent(nn.RNN),
    "GRU_sequence_first": lambda: SequenceFirst(nn.GRU),
    "LSTM_sequence_first": lambda: SequenceFirst(nn.LSTM),
    "MultiheadAttention": Attends,
    "MultiheadAttention_3": lambda: Attends(3),
    "sdpa": lambda: Attends(of_torch=False),
    "Transformer": lambda: Encodes(True),
    "Transformer_sequence_first": lambda: Encodes(False),
}


@part(each=LAYERS, without=UNEQUAL)
def drops_inside(p: Build, layer: str) -> None:
    p.allowed.append(DOUBT)
    p.insert(LAYERS[layer], True)


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
NOT_TOLD = ("rrelu", "poisson", "gamma")  # how much they draw, depends on the rows


def noise_of(p: Build, kind: str) -> Change:
    p.allowed.append(DOUBT)
    if kind in NOT_TOLD:
        p.allowed.append(OF_OTHER_ROWS)
    return NOISE[kind]


@part(each=NOISE, without=UNEQUAL)
def noise_in_training(p: Build, kind: str) -> None:
    function = noise_of(p, kind)
    p.insert(lambda: Calls(function), p.maybe())


@part(each=NOISE, without=f"tested_and_predicted {UNEQUAL}")
def noise_in_validation_too(p: Build, kind: str) -> None:
    p.allowed.append(NO_SAMPLE)
    function = noise_of(p, kind)
    p.insert(lambda: Calls(function, always=True), p.maybe())


@part(each=NOISE, without=f"tested_and_predicted {UNEQUAL}")
def noise_in_batches(p: Build, kind: str) -> None:
    """In a hook that gets the batch before a step of training or validation."""
    p.allowed.append(NO_SAMPLE)
    p.change_batches(noise_of(p, kind))


@part(each=("randn_like", "rand", "stochastic_depth", "numpy_beta", "rsample", "item"), without=f"loss {UNEQUAL}")
def noise_in_the_loss(p: Build, kind: str) -> None:
    p.allowed.append(NO_SAMPLE)
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


AUGMENTATIONS: dict[str, Change] = {
    "torch": lambda x: x + 0.2 * torch.randn_like(x),
    "numpy": lambda x: x * float(numpy.random.uniform(0.5, 1.5)),
    "python": lambda x: x * random.uniform(0.5, 1.5),
    "permutation": lambda x: x[torch.randperm(len(x))],
    "varying": _varying,
    "sometimes": _sometimes,
}


STREAMS = (  # they have loaded their samples before
    "iterable iterable_without_length iterable_with_other_workers_after_a_cut validation_stream "
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
