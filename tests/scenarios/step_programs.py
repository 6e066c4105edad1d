"""Small training programs, drawn from a seed: ranks run them with the gradient engine, plain torch in one process.

A program is plain data, and the same on every rank. Each rank trains its own part with a GradientSynchronizer and,
beside it, the parts of all ranks without one. Whenever gradients are synchronized, both must be equal.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from kit.made_up_gpu import CUDA, MadeUpGpu, put_on_gpu
from kit.ranks import live_on_hosts
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint

from ddp_callbacks.comm.group_sums import ProcessGroupAllReduce
from ddp_callbacks.comm.segments import SWITCH
from ddp_callbacks.comm.topology import choose_all_reduce
from ddp_callbacks.gradients import GradientSynchronizer

FEATURES = 4
MANY_BUCKETS = 1e-5  # MiB, so that each parameter has its own

# Of the largest element that a gradient has had since it was zero. Both sides round once per rank and per addition.
RELATIVE = {
    torch.float64: 1e-12,
    torch.complex128: 1e-12,
    torch.float32: 1e-6,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
}
RELATIVE_ON_GPUS = 1e-10  # in double precision: kernels add in an order of their own

# How gradients are synchronized; what ranks on two hosts do is in GROUPS.
WAYS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": MANY_BUCKETS},
    "a few buckets": {"bucket_cap_mb": 2e-4},
    "comm hook": {"bucket_cap_mb": MANY_BUCKETS, "comm_hook": default_hooks.allreduce_hook},
    "gloo": {"bucket_cap_mb": MANY_BUCKETS},
    "two hosts": {"bucket_cap_mb": MANY_BUCKETS},
}
WEIGHINGS = ("total", "no total", "loss", "sums", "never")


@dataclass(frozen=True)
class Backward:
    """One backward of all ranks.

    Attributes:
        samples: By rank. With 0, a rank has a part in it, but its loss is NaN.
        paths: By rank, the layers that its input passes, in order; perhaps none.
        checkpoint: What of them is checkpointed: "", "each", "all", "both" (one in the other) or "some ranks".
        is_reentrant: How.
        is_local: Whether it runs in ``no_sync``.
        special: What else happens: one of ``SPECIALS`` or "raises".
    """

    samples: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]
    checkpoint: str
    is_reentrant: bool
    is_local: bool
    special: str


@dataclass(frozen=True)
class Step:
    """What begins with ``zero_grad`` ("none", "zeros", or "keep": it does not) and ends with an update."""

    zero: str
    frozen: tuple[int, ...]
    backwards: tuple[Backward, ...]

    @property
    def is_lost(self) -> bool:
        """Whether its gradients are thrown away: nobody has synchronized them."""
        return self.backwards[-1].is_local or self.backwards[-1].special == "raises"


@dataclass(frozen=True)
class Program:
    """See the module.

    Attributes:
        device: "cpu", "made-up" (a GPU that there is not) or "cuda".
        layers: Their kinds; the first ``split`` of them have a synchronizer of their own.
        weighing: How the ranks are weighed, one of ``WEIGHINGS``.
        unit: The weight of a sample.
        total: By which the sums are divided, if losses are sums.
        hook: When a hook of the user's, which triples gradients, is put on the first layer: "", "before" or "after".
        is_empty: Whether a rank without samples has an empty batch, or a loss that is NaN.
        is_preset: Whether there are gradients before the synchronizer.
    """

    seed: int
    world_size: int
    device: str
    layers: tuple[str, ...]
    split: int
    way: str
    weighing: str
    unit: float
    total: float
    hook: str
    is_empty: bool
    is_preset: bool
    steps: tuple[Step, ...]

    @property
    def rate(self) -> float:
        """Of learning; none in low precision, in which models that were rounded differently would soon differ."""
        return 0.0 if {"float32", "bfloat16"} & set(self.layers) else 0.01

    def total_of(self, backward: Backward) -> float:
        return self.total if self.weighing == "sums" else sum(backward.samples) * self.unit


# --- drawing ------------------------------------------------------------------------------------------------------

SPECIALS = ("", "", "twice", "two forwards", "penalty", "into", "frozen late")


def draw(seed: int, world_size: int, device: str = "cpu") -> Program:
    return _Drawing(seed, world_size, device).program()


class _Drawing:
    def __init__(self, seed: int, world_size: int, device: str) -> None:
        self.random = random.Random(f"{seed} {world_size} {device}")
        self.seed, self.world_size, self.device = seed, world_size, device
        self.layers = tuple(self.random.choices(KINDS[device], k=self.random.randint(2, 5)))
        self.weighing = self.random.choice(WEIGHINGS)
        self.freezes, self.branches, self.accumulates, self.is_special = (self.chance(0.4) for _ in range(4))
        self.checkpoint = self.random.choice(("", "", "", "each", "all", "both", "some ranks"))
        is_common = not self.branches and self.checkpoint != "some ranks"  # two synchronizers need the same order
        self.is_split = is_common and self.weighing != "loss" and self.chance(0.3)
        self.is_reentrant = self.chance(0.6) or device == "made-up"  # others compare what tensors claim to be
        self.zeros = self.random.choice((("none",), ("zeros",), ("none", "zeros"), ("none", "zeros", "keep")))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def program(self) -> Program:
        unit = self.random.choice((1.0, 1.0, 1 / 7, 1e-3))
        return Program(
            seed=self.seed,
            world_size=self.world_size,
            device=self.device,
            layers=self.layers,
            split=self.random.randint(1, len(self.layers) - 1) if self.is_split else 0,
            way=self.random.choice([way for way in WAYS if self.device != "cuda" or way not in GROUPS]),
            weighing=self.weighing,
            unit=1.0 if self.weighing == "never" else unit,
            total=self.random.choice((0.5, 100.0)) * unit,
            hook=self.random.choice(("", "", "before", "after")),
            is_empty="recurrent" not in self.layers and self.chance(0.5),
            is_preset=self.chance(0.1) and not self.is_special,
            steps=tuple(self.steps()),
        )

    def steps(self) -> Iterator[Step]:
        is_lost = False
        for _ in range(self.random.randint(3, 5)):
            zero = "none" if is_lost else self.random.choice(self.zeros)
            raises = self.is_special and self.chance(0.2)
            frozen = [at for at in range(len(self.layers)) if self.freezes and not raises and self.chance(0.3)]
            backwards = [self.backward(self.samples(), "raises")] if raises else self.backwards(frozen, zero)
            step = Step(zero, tuple(frozen), tuple(backwards))
            is_lost = step.is_lost
            yield step

    def backwards(self, frozen: Sequence[int], zero: str) -> Iterator[Backward]:
        """Some in ``no_sync`` or not, and a last one that usually synchronizes."""
        are_local = [self.chance(0.7) for _ in range(self.random.randint(0, 3))] if self.accumulates else []
        samples = self.samples()
        for is_local in [*are_local, self.accumulates and self.chance(0.1)]:
            if self.weighing != "no total" or not any(are_local):  # without a total, a weight must not change there
                samples = self.samples()
            special = self.random.choice(SPECIALS) if self.is_special else ""
            if special == "frozen late" and are_local:  # gradients that wait would be gone
                special = ""
            yield self.backward(samples, special, is_local, frozen)

    def backward(
        self, samples: tuple[int, ...], special: str, is_local: bool = False, frozen: Sequence[int] = ()
    ) -> Backward:
        path = self.path(at_least=1)
        paths = [self.path(at_least=0) if self.branches and not special else path for _ in range(self.world_size)]
        if special in ("into", "frozen late") and path[0] in frozen:
            special = ""
        checkpoint = "" if special in ("penalty", "into", "frozen late") else self.checkpoint  # torch refuses these
        return Backward(samples, tuple(paths), checkpoint, self.is_reentrant, is_local, special)

    def path(self, at_least: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(len(self.layers)), k=self.random.randint(at_least, 5)))

    def samples(self) -> tuple[int, ...]:
        choice = (1,) if self.weighing == "never" else (0, 1, 2, 3, 5, 7)
        return tuple(self.random.choices(choice, k=self.world_size))


# --- models -------------------------------------------------------------------------------------------------------


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.second = nn.Conv2d(3, 1, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        image = (x[:, :, None] * x[:, None, :])[:, None]
        return self.second(self.first(image).tanh()).mean(2)[:, 0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, 2, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x.reshape(len(x), 2, 2))[0].reshape(len(x), FEATURES)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class OddShapes(nn.Module):
    """A scalar, two parameters without elements, one of them alone in its dtype, and a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Parameter(torch.empty(0, 3, dtype=torch.float32))
        self.empty = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.randn(FEATURES, FEATURES).t())
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.transposed * self.scalar + self.empty.sum() + self.alone.sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES, dtype=torch.complex128))
        self.real = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).abs() * self.real


def indices(x: Tensor) -> Tensor:
    return (x.detach().abs() * 7).long() % 20


class Words(nn.Module):
    """Sparse gradients, one of which is dense where the layer that shares it is used, too."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.word = nn.Embedding(20, FEATURES, sparse=True)
        self.bag = nn.EmbeddingBag(20, FEATURES, sparse=True)
        self.head = nn.Linear(FEATURES, 20) if is_tied else None
        if self.head is not None:
            self.head.weight = self.word.weight

    def forward(self, x: Tensor) -> Tensor:
        found = self.word(indices(x)).sum(1) + self.bag(indices(x * 2))
        return found if self.head is None else found * self.head(x).mean(1, keepdim=True)


class Table(nn.Module):
    """A plain parameter with a sparse gradient. Nothing tells of it beforehand, so the sum is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return embedding(indices(x), self.table, sparse=True).sum(1)


class Low(nn.Module):
    """In low precision, beside the layers before it: what flows into those is exact."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach().to(self.linear.weight.dtype)).double()


class OnCpu(nn.Module):
    """A layer that stays on the CPU: parameters on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.cpu()).to(x.device)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, FEATURES),
    "convolution": Convolution,
    "recurrent": Recurrent,
    "tied": Tied,
    "odd shapes": OddShapes,
    "complex": Complex,
    "float32": functools.partial(Low, torch.float32),
    "bfloat16": functools.partial(Low, torch.bfloat16),
    "words": Words,
    "tied words": functools.partial(Words, is_tied=True),
    "table": Table,
    "on the CPU": OnCpu,
}
SPARSE = ("words", "tied words", "table")
KINDS = {
    "cpu": [name for name in LAYERS if name != "on the CPU"],
    "made-up": [name for name in LAYERS if name not in (*SPARSE, "recurrent")],  # that one asks for cuDNN
    # cuDNN refuses a second derivative; nobody has seen what gloo does with a GPU's tensor without elements.
    "cuda": [name for name in LAYERS if name not in ("recurrent", "odd shapes")],
}


class Net(nn.Module):
    """Each layer of a path adds to its input."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[kind]() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(range(len(self.layers)), x)

    def visit(self, at: int, x: Tensor) -> Tensor:
        return x + self.layers[at](x).tanh()

    def walk(self, path: Sequence[int], x: Tensor, how: str = "", is_reentrant: bool = False) -> Tensor:
        if how in ("all", "both"):
            inner = functools.partial(self.walk, path, how="each" if how == "both" else "", is_reentrant=is_reentrant)
            return checkpoint(inner, x, use_reentrant=is_reentrant, preserve_rng_state=False)
        for at in path:
            if how == "each":
                x = checkpoint(self.visit, at, x, use_reentrant=is_reentrant, preserve_rng_state=False)
            else:
                x = self.visit(at, x)
        return x


def build(kinds: Sequence[str], seed: int) -> Net:
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return Net(kinds)
    finally:
        torch.set_default_dtype(before)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("in the middle of backward")


# --- running ------------------------------------------------------------------------------------------------------


class OneProcess:
    """Plain torch, with the parts of all ranks."""

    device: Any = "cpu"
    moves: ClassVar[dict[str, tuple[Callable[..., Any], Any]]] = {"cuda": (nn.Module.cuda, "cuda")}

    def __init__(self, program: Program) -> None:
        self.program, self.net = program, build(program.layers, program.seed)
        self.largest: dict[str, float] = {}  # of each gradient, since it was zero
        self.put()
        if program.is_preset:
            for parameter in self.net.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
        if program.hook == "before":
            self.hook()
        self.freeze(program.steps[0].frozen)

    def put(self) -> None:
        """Move the layers to where they compute."""
        if self.program.device in self.moves:
            move, self.device = self.moves[self.program.device]
            for layer in self.net.layers:
                if not isinstance(layer, OnCpu):
                    move(layer)

    def hook(self) -> None:
        for parameter in self.net.layers[0].parameters():
            parameter.requires_grad_(True).register_hook(lambda gradient: gradient * 3)

    def freeze(self, frozen: Sequence[int]) -> None:
        for at, layer in enumerate(self.net.layers):
            layer.requires_grad_(at not in frozen)

    def begin(self, number: int, step: Step) -> None:
        if number == 0 and self.program.hook == "after":
            self.hook()
        if step.zero != "keep" and not (number == 0 and self.program.is_preset):
            self.net.zero_grad(set_to_none=step.zero == "none")
            self.largest.clear()
        self.freeze(step.frozen)

    def backward(self, backward: Backward, place: str) -> None:
        if backward.special == "raises":
            return
        total = self.program.total_of(backward)
        for rank, samples in enumerate(backward.samples):
            share = samples * self.program.unit / total if total else 0.0
            self.differentiate(self.loss(backward, place, rank, samples or 2) * share, backward)
            self.note_largest()

    def note_largest(self) -> None:
        for name, parameter in self.net.named_parameters():
            if parameter.grad is not None and parameter.grad.numel():
                largest = float(to_plain(parameter.grad).abs().max())
                self.largest[name] = max(self.largest.get(name, 0.0), largest)

    def differentiate(self, loss: Tensor, backward: Backward) -> None:
        if backward.special == "into":
            loss.backward(inputs=list(self.net.layers[backward.paths[0][0]].parameters()))
            return
        if backward.special == "twice":
            loss.backward(retain_graph=True)
        loss.backward()

    def loss(self, backward: Backward, place: str, rank: int, samples: int) -> Tensor:
        """The mean over the samples of a rank."""
        x = inputs(f"{self.program.seed} {place} {rank}", samples).to(self.device).requires_grad_()
        late = self.net.layers[backward.paths[rank][0]] if backward.special == "frozen late" else nn.Identity()
        late.requires_grad_(True)
        output = self.forward(backward, rank, x)
        if backward.special == "two forwards":
            output = torch.cat([output, self.forward(backward, rank, x * 2)])
        loss = (output - 1).square().mean()
        if backward.special == "penalty":
            loss = loss + torch.autograd.grad(output.sum(), x, create_graph=True)[0].square().mean()
        late.requires_grad_(False)  # autograd calls the hooks, but gives no gradient
        return loss

    def forward(self, backward: Backward, rank: int, x: Tensor) -> Tensor:
        return self.net.walk(backward.paths[rank], x)

    @torch.no_grad()
    def descend(self, step: Step) -> None:
        for parameter in self.net.parameters() if not step.is_lost else ():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.to_dense(), alpha=self.program.rate)


class OnRank(OneProcess):
    """With the engine, the part of this rank."""

    moves: ClassVar[dict[str, tuple[Callable[..., Any], Any]]] = OneProcess.moves | {"made-up": (put_on_gpu, CUDA)}

    def __init__(self, program: Program, gpu: MadeUpGpu | None) -> None:
        super().__init__(program)
        self.gpu, self.rank = gpu, dist.get_rank()
        layers, split = self.net.layers, program.split
        parts = [layers[:split], layers[split:]] if split else [self.net]
        self.synchronizers = [synchronizer_of(part, program.way) for part in parts]

    def close(self) -> None:
        for synchronizer in self.synchronizers:
            synchronizer.close()

    def backward(self, backward: Backward, place: str) -> None:
        samples = backward.samples[self.rank]
        rounds = [synchronizer.rounds for synchronizer in self.synchronizers]
        with contextlib.ExitStack() as stack:
            if backward.is_local:
                for synchronizer in self.synchronizers:
                    stack.enter_context(synchronizer.no_sync())
            loss = self.loss(backward, place, self.rank, samples or (0 if self.program.is_empty else 2))
            if not samples:
                loss = loss * float("nan")
            stack.callback(self.weigh(loss, backward))
            if backward.special == "raises":
                stack.enter_context(contextlib.suppress(ZeroDivisionError))
            with self.waiting():
                self.differentiate(loss, backward)
            for synchronizer, before in zip(self.synchronizers, rounds, strict=True):
                if synchronizer.rounds == before and not backward.is_local:
                    assert synchronizer.skip()[self.rank]
                assert (synchronizer.rounds == before) == backward.is_local

    def checksum(self, before: int) -> int:
        gradients = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        numbers = [torch.view_as_real(one) if one.is_complex() else one for one in map(to_plain, gradients)]
        return zlib.crc32(b"".join(one.double().numpy().tobytes() for one in numbers), before)

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """After the first synchronization, the host must not wait for its GPU."""
        is_steady = all(synchronizer.rounds for synchronizer in self.synchronizers)
        if self.gpu is None or not is_steady or "on the CPU" in self.program.layers:
            return contextlib.nullcontext()
        return self.gpu.forbid_waiting()

    def weigh(self, loss: Tensor, backward: Backward) -> Callable[[], None]:
        weight, total = backward.samples[self.rank] * self.program.unit, self.program.total_of(backward)
        if self.program.weighing == "loss":
            return self.synchronizers[0].weigh_loss(loss, weight, total)
        for synchronizer in self.synchronizers if self.program.weighing != "never" else ():
            synchronizer.weigh(weight, None if self.program.weighing == "no total" else total)
        return lambda: None

    def forward(self, backward: Backward, rank: int, x: Tensor) -> Tensor:
        path = backward.paths[rank]
        if backward.special == "raises":
            half = len(path) // 2
            return self.net.walk(path[half:], Explodes.apply(self.net.walk(path[:half], x)))
        how = backward.checkpoint
        if how == "some ranks":
            how = "" if rank % 2 else "each"
        return self.net.walk(path, x, how, backward.is_reentrant)


def inputs(seed: str, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(samples, FEATURES, generator=generator, dtype=torch.float64)


@functools.cache
def group_without_shared_memory() -> dist.ProcessGroup:
    group = dist.new_group()
    os.environ[SWITCH] = "0"
    assert isinstance(choose_all_reduce(group, [torch.device("cpu")]), ProcessGroupAllReduce)
    del os.environ[SWITCH]
    return group


@functools.cache
def group_on_two_hosts() -> dist.ProcessGroup:
    group = dist.new_group()
    live_on_hosts((dist.get_world_size() - 1, 1), group)
    return group


GROUPS = {"gloo": group_without_shared_memory, "two hosts": group_on_two_hosts}


def synchronizer_of(module: nn.Module, way: str, **options: Any) -> GradientSynchronizer:
    group = GROUPS[way]() if way in GROUPS else None
    return GradientSynchronizer(module, process_group=group, **WAYS[way], **options)


def run(program: Program) -> tuple[str, int]:
    """Train on this rank; how it differs from one process, and a checksum of its gradients."""
    differences, checksum = [], 0
    with MadeUpGpu() if program.device == "made-up" else contextlib.nullcontext() as gpu:
        truth, ours = OneProcess(program), OnRank(program, gpu)
        for number, step in enumerate(program.steps):
            truth.begin(number, step)
            ours.begin(number, step)
            for index, backward in enumerate(step.backwards):
                for side in (truth, ours):
                    side.backward(backward, f"{number} {index}")
                    side.freeze(step.frozen)
                if not backward.is_local and backward.special != "raises":
                    found = compare(ours, truth)
                    differences += [f"step {number}, backward {index}: {difference}" for difference in found]
                    checksum = ours.checksum(checksum)
            for side in (truth, ours):
                side.descend(step)
        ours.close()
    return "\n".join(differences), checksum


def compare(ours: OnRank, truth: OneProcess) -> Iterator[str]:
    """How gradients differ: one that nobody reaches is ``None``."""
    expected = dict(truth.net.named_parameters())
    for name, parameter in ours.net.named_parameters():
        found, right = parameter.grad, expected[name].grad
        if found is None or right is None:
            if found is not right:
                yield f"{name} is {found}, not {right}"
            continue
        if traits_of(found, name) != traits_of(right, name):
            yield f"{name} is {traits_of(found, name)}, not {traits_of(right, name)}"
        if right.numel():
            error = float((to_plain(found) - to_plain(right)).abs().max())
            bound = relative(ours.program, right.dtype) * truth.largest[name]
            if not error <= bound:
                yield f"{name} is off by {error:.3g}, {bound:.3g} is rounding"


def to_plain(gradient: Tensor) -> Tensor:
    return gradient.cpu().to_dense()


def traits_of(gradient: Tensor, name: str) -> tuple[Any, ...]:
    if name.endswith(".table"):
        return gradient.dtype, gradient.shape
    strides = [] if gradient.is_sparse else gradient.stride()
    matter = [stride for stride, size in zip(strides, gradient.shape, strict=False) if size > 1]
    return gradient.dtype, gradient.shape, gradient.layout, matter


def relative(program: Program, dtype: torch.dtype) -> float:
    is_exact = dtype in (torch.float64, torch.complex128)
    return RELATIVE_ON_GPUS if program.device == "cuda" and is_exact else RELATIVE[dtype]


def run_all(seeds: Sequence[int], device: str) -> dict[int, tuple[str, int]]:
    """By seed, how a program on this rank differs from one process, and a checksum that all ranks must have.

    An exception ends them all: the ranks would not be in the same exchange any more.
    """
    found = {}
    for seed in seeds:
        program = draw(seed, dist.get_world_size(), device)
        try:
            with warnings.catch_warnings():
                # The inner one of two checkpoints says so in its first pass, which is without gradients.
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
                found[seed] = run(program)
        except Exception as error:
            error.add_note(str(program))
            raise
    return found
