"""What a step draws for a batch is drawn for the whole batch, by parts in one process: the ranks' rows are one's."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ddp_callbacks.data.shares import Divider, slice_samples
from ddp_callbacks.errors import ConfigurationError
from ddp_callbacks.randomness import Rows, WholeDraws, bernoulli
from ddp_callbacks.randomness.rows import BatchDim

TOTAL, LENGTH, WIDTH = 9, 7, 8
PARTS = [(0, 5, 9), (0, 3, 6, 9), (0, 1, 5, 9), (0, 2, 4, 6, 8, 9)]
Step = Callable[[torch.Tensor], torch.Tensor]


class Layers(nn.Module):
    """A model of layers that draw, batch first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"batch_first": True, "dtype": torch.float64}
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, **options)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.2, **options)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, **options)
        self.gru = nn.GRU(WIDTH, WIDTH, 3, dropout=0.3, bidirectional=True, **options)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.3, dtype=torch.float64)
        self.rnn = nn.RNN(WIDTH, WIDTH, 2, dropout=0.3, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.encoder(x) + self.decoder(x, x) + self.gru(x)[0][..., :WIDTH] + self.rnn(x)[0]
        h = h + self.lstm(x.transpose(0, 1))[0].transpose(0, 1)
        return h + self.attention(h, h, h)[0] + self.attention(h, h, h, need_weights=False)[0]


def stochastic_depth(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand(len(x), 1, 1, dtype=x.dtype) > 0.3)


def into_a_view(x: torch.Tensor) -> torch.Tensor:
    noise = torch.zeros(len(x), LENGTH, WIDTH, dtype=x.dtype)
    noise[:, 2].normal_()
    noise[..., 3].uniform_()
    return x + noise


def constants(x: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(LENGTH + 4, 2, dtype=x.dtype).sum() + torch.rand(()) + torch.rand(11).sum()
    return x * weights


def probabilities(x: torch.Tensor) -> torch.Tensor:
    chosen = torch.multinomial(x[:, 0].softmax(1), 3) + torch.multinomial(x[:, 1].softmax(1), 3, replacement=True)
    mask = torch.bernoulli(x.sigmoid()) + torch.empty_like(x).bernoulli_(x.sigmoid()[:, :1])
    return mask + chosen.sum(1)[:, None, None] + torch.normal(x, x.abs() + 1) + torch.normal(x, 0.3)


def sizes(x: torch.Tensor) -> torch.Tensor:
    n = len(x)
    rows = torch.rand(n) + torch.randint(5, (n,)) + torch.randint(2, 9, (n,)) + torch.normal(0.0, 1.0, (n,))
    out = torch.randn(n, LENGTH, WIDTH, out=torch.empty(n, LENGTH, WIDTH, dtype=x.dtype))
    return out + rows[:, None, None] + x.new_empty(n, 1, 1).exponential_() + x.new_empty(n, 1, 1).cauchy_()


def of_one_distribution(x: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, 21, dtype=x.dtype)
    found = [torch.multinomial(weights, len(x), replacement=True), torch.multinomial(weights, len(x))]
    found += [torch.multinomial(weights[:4], len(x), True), torch.multinomial(weights, 5).sum()]
    return x + sum(found)[:, None, None]  # type: ignore[index]


def layouts(x: torch.Tensor) -> torch.Tensor:
    images = x.reshape(len(x), LENGTH, 2, 4).contiguous(memory_format=torch.channels_last)
    images = F.dropout2d(images) + F.dropout(images) + torch.randn_like(images)
    first = F.dropout(x.transpose(0, 1).contiguous()).transpose(0, 1)
    return images.reshape(len(x), LENGTH, WIDTH) + first + torch.rand_like(x.expand(2, *x.shape)[0])


LEARNED = {"constants": constants, "layouts": layouts}  # a part of one sample alone tells too little of these
STEPS: dict[str, Step] = {
    "layers of torch": Layers(),
    "dropouts": nn.Sequential(
        *(
            nn.Dropout(0.4),
            nn.Dropout1d(0.3),
            nn.AlphaDropout(0.2),
            nn.FeatureAlphaDropout(0.2),
            nn.Dropout(inplace=True),
        )
    ),
    "likes": lambda x: (
        x + torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 5) + torch.randint_like(x, 1, 3)
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0],
    "samples": lambda x: torch.distributions.Normal(x, 0.1).rsample() + torch.distributions.Laplace(x, 0.1).rsample(),
    "gumbel noise": lambda x: F.gumbel_softmax(x) + F.gumbel_softmax(x, hard=True),
    "of each sample by vmap": lambda x: torch.func.vmap(F.dropout, randomness="different")(x),
    "flattened": lambda x: F.dropout(x.flatten(0, 1), 0.3).view_as(x),
    "two views": lambda x: sum(F.dropout(torch.cat([x, 2 * x]), 0.3).chunk(2)),
    "stacked views": lambda x: F.dropout(torch.stack([x] * 8).flatten(0, 1)).unflatten(0, (8, -1)).sum(0),
    "repeated": lambda x: torch.randn_like(x.repeat(2, 1, 1)).unflatten(0, (2, -1)).sum(0),
    "repeated one by one": lambda x: F.dropout(x.repeat_interleave(3, 0)).unflatten(0, (-1, 3)).sum(1),
    "sizes of two views": lambda x: torch.rand(len(torch.cat((x, x))), dtype=x.dtype).view(2, -1, 1, 1).sum(0) + x,
    "stochastic depth": stochastic_depth,
    "views": into_a_view,
    "probabilities": probabilities,
    "sizes": sizes,
    "of one distribution": of_one_distribution,
}


def batch(samples: int = TOTAL) -> torch.Tensor:
    return torch.randn(samples, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def by_parts(
    step: Step,
    parts: Sequence[int],
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    draws: Callable[[], WholeDraws] = lambda: WholeDraws(nn.Identity(), 0),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the outputs of all ranks, and their random states afterwards."""
    x, outputs, states = batch(parts[-1]), [], []
    for start, end in itertools.pairwise(parts):
        torch.manual_seed(5)
        with draws().batch(Rows(start, end - start, parts[-1])), around():
            outputs.append(step(x[start:end].clone()))
        states.append(torch.get_rng_state())
    return torch.cat(outputs), states


def require_one_process(
    step: Step, parts: Sequence[int], around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> None:
    torch.manual_seed(5)
    with around():
        whole = step(batch(parts[-1]))
    state = torch.get_rng_state()
    outputs, states = by_parts(step, parts, around)
    torch.testing.assert_close(outputs, whole, rtol=1e-10, atol=1e-10)
    assert all(torch.equal(each, state) for each in states)


@pytest.mark.parametrize("parts", PARTS, ids=str)
@pytest.mark.parametrize("name", [*STEPS, *LEARNED])
def test_parts_draw_what_the_whole_batch_draws(name: str, parts: Sequence[int]) -> None:
    """Parts of a batch draw one process's numbers."""
    if name in STEPS:
        require_one_process(STEPS[name], parts)
    elif min(end - start for start, end in itertools.pairwise(parts)) > 1:
        require_one_process(LEARNED[name], parts)


LAYERS = Layers()
KNOWN: dict[str, tuple[Step, int]] = {  # and the number of samples of a part
    "steps of a gru": (lambda x: LAYERS.gru(x)[0], LENGTH),
    "steps of a lstm": (lambda x: LAYERS.lstm(x.transpose(0, 1))[0].transpose(0, 1), LENGTH),
    "length of attention": (STEPS["attention"], LENGTH),
    "heads of attention": (lambda x: LAYERS.attention(x, x, x)[0], 5),
    "one sample": (lambda x: stochastic_depth(x) + torch.rand(len(x), 1, 1, dtype=x.dtype), 1),
    "draws of one sample": (lambda x: x + torch.distributions.Normal(x[:, :1], 0.1).sample((3,)).sum(0), 1),
    "a weight of Mixup": (lambda x: x * torch.distributions.Beta(0.4, 0.4).sample(), 2),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_size_that_another_dimension_has_as_well_is_not_doubted_if_the_function_tells(name: str) -> None:
    step, samples = KNOWN[name]
    everyone = [WholeDraws(nn.Identity(), rank) for rank in range(2)]
    torch.manual_seed(5)
    whole = step(batch(2 * samples))
    outputs, _ = by_parts(step, (0, samples, 2 * samples), draws=iter(everyone).__next__)
    torch.testing.assert_close(outputs, whole, rtol=1e-10, atol=1e-10)
    for each in everyone:
        each.warn()


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, Mode, FunctionMode], ids=lambda each: each.__name__
)
def test_contexts_of_the_program_change_no_number(around: Callable[[], AbstractContextManager[object]]) -> None:
    require_one_process(STEPS["layers of torch"], PARTS[0], around)


def gradient(step: Step, x: torch.Tensor, times: int = 1) -> torch.Tensor:
    inputs = x.requires_grad_()
    outputs = step(inputs).pow(2)
    for _ in range(times):
        (outputs,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return outputs.detach()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_backward_draws_again_what_its_forward_drew(reentrant: bool) -> None:
    layers = STEPS["dropouts"]

    def step(x: torch.Tensor) -> torch.Tensor:
        inputs = x.requires_grad_()
        checkpoint(layers, inputs, use_reentrant=reentrant).pow(2).sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    require_one_process(step, PARTS[0])
    plain = lambda x: gradient(layers, x)  # noqa: E731
    assert torch.equal(by_parts(plain, PARTS[0])[0], by_parts(step, PARTS[0])[0])


def test_a_backward_outside_of_its_batch_may_not_draw_again() -> None:
    with (
        pytest.raises(ConfigurationError, match="Call backward inside"),
        WholeDraws(nn.Identity(), 0).batch(Rows(0, 4, 9)),
    ):
        checkpoint(STEPS["dropouts"], batch(4).requires_grad_(), use_reentrant=False)


def test_double_backward_and_several_forwards_keep_their_draws() -> None:
    require_one_process(
        lambda x: gradient(lambda y: STEPS["dropouts"](y.sin()) + STEPS["samples"](y.sin()), x, 2), PARTS[1]
    )


class Places(nn.Module):
    """Draws that one batch leaves in doubt: the length equals the part's samples, or the batch is not first."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.noise(x)


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x + F.dropout(x.new_ones(LENGTH, len(x), WIDTH), 0.5).transpose(0, 1) + torch.rand(12, 1, dtype=x.dtype)[3]
        )


def drawn(draws: WholeDraws, step: Step, samples: int, total: int) -> torch.Tensor:
    torch.manual_seed(5)
    given = batch(samples)
    with draws.batch(Rows(0, samples, total)):
        return step(given)


def test_batches_of_different_sizes_tell_which_dimension_holds_the_batch() -> None:
    model = Places()
    draws = WholeDraws(model, 0)
    torch.manual_seed(5)
    whole = model(batch(9))
    for number, samples in enumerate((4, 5, 7, 4, 1)):
        torch.manual_seed(5)
        with draws.batch(Rows(0, samples, 9)):
            part = model(batch(samples))
        if number == 0:
            with pytest.warns(
                UserWarning, match=r"noise: of \[12, 1\] for 4 samples, no dimension was taken to hold the batch"
            ):
                draws.warn()
        if number > 1:
            torch.testing.assert_close(part, whole[:samples])


def test_batches_of_different_sizes_tell_that_a_draw_is_not_for_the_batch() -> None:
    draws = WholeDraws(nn.Identity(), 0)
    constant = lambda x: torch.rand(4, dtype=x.dtype)  # noqa: E731
    drawn(draws, constant, 4, 9)
    found = drawn(draws, constant, 5, 9)
    torch.manual_seed(5)
    assert torch.equal(found, constant(found))
    with pytest.warns(UserWarning, match="no dimension of what it draws holds the batch, but another was taken"):
        draws.warn()


def own_generator() -> Step:
    generator = torch.Generator().manual_seed(3)
    return lambda x: x + torch.randn(x.shape, generator=generator, dtype=x.dtype)


def seeded(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return F.dropout(x)


@pytest.mark.parametrize("make", [own_generator, lambda: seeded], ids=["a generator", "a seed"])
def test_draws_that_leave_the_random_state_are_one_processs_in_every_batch(make: Callable[[], Step]) -> None:
    draws, step, expected = WholeDraws(nn.Identity(), 0), make(), make()
    for _ in range(3):
        torch.testing.assert_close(drawn(draws, step, 4, 9), expected(batch(9))[:4])
    draws.warn()


def wide_noise(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(WIDTH, dtype=x.dtype) + torch.rand(len(x), 1, WIDTH, dtype=x.dtype)


@pytest.mark.parametrize("is_later", [False, True])
def test_a_batch_that_is_computed_whole_and_in_part_tells_which_dimension_holds_it(is_later: bool) -> None:
    draws, module = WholeDraws(nn.Identity(), 0), nn.Identity()
    call: Step = eval("lambda x: noise(x)", {"__name__": "lightning", "noise": wide_noise})  # from where does not count
    with draws.learning_nothing() if is_later else nullcontext():
        for rows in (Rows(0, 16, 16), Rows(0, 11, 16)):
            with draws.comparing(rows, module):
                call(batch(rows.samples))
    found = drawn(draws, call, WIDTH, 16)
    torch.manual_seed(5)
    expected = drawn(WholeDraws(nn.Identity(), 0), call, WIDTH, 16) if is_later else wide_noise(batch(16))[:WIDTH]
    torch.testing.assert_close(found, expected)
    if not is_later:
        draws.warn()


def test_a_rank_tells_what_another_one_could_not_draw_whole() -> None:
    draws = WholeDraws(nn.Identity(), 0)
    draws.compare([[7, 7], [7, 7]], [[False, {}, {}, {}, {}], [False, {"noise": "it permutes the batch"}, {}, {}, {}]])
    with pytest.warns(UserWarning, match=r"noise: it permutes the batch \(rank 1\)"):
        draws.warn()


@pytest.mark.parametrize(("told", "warns"), [({"noise": 1}, False), ({"noise": 0}, True), ({}, True)])
def test_a_doubt_ends_if_another_rank_knows_the_dimension(told: dict[str, int], warns: bool) -> None:
    draws = WholeDraws(nn.Identity(), 0)
    reports = [[False, {}, {"noise": ["dimension 1 was taken", 1]}, {}, {}], [False, {}, {}, told, {}]]
    draws.compare([[7, 7], [7, 7]], reports)
    with pytest.warns(UserWarning, match="dimension 1 was taken") if warns else nullcontext():
        draws.warn()


BY_SAMPLES: dict[str, Step] = {  # x is 1 in the first rows of the whole batch, or 0
    "for each sample": lambda x: x + torch.stack([torch.rand(()) for _ in x])[:, None, None],
    "in some batches": lambda x: x + torch.randn_like(x) if x.any() else x,
    "one or the other": lambda x: x + torch.randn_like(x) if x.any() else x + torch.rand_like(x),
}


@pytest.mark.parametrize("name", BY_SAMPLES)
def test_lines_that_draw_by_what_the_samples_of_a_rank_are_are_named(name: str) -> None:
    everyone = [WholeDraws(nn.Identity(), rank) for rank in range(2)]
    for rank, draws in enumerate(everyone):
        torch.manual_seed(5)
        for number in range(2):  # a first rank has the ones of the first batch, the second one those of the second
            with draws.batch(Rows(5 * rank, 5 - rank, 9)):
                BY_SAMPLES[name](torch.full((5 - rank, LENGTH, WIDTH), float(number == rank)))
    everyone[0].compare([[7, 7], [7, 7]], [each.report() for each in everyone])  # as many draws on both
    with pytest.warns(UserWarning, match=r"whole_draws.py, line \d+: when, how often or how much it draws depends"):
        everyone[0].warn()


@pytest.mark.parametrize("second", [Rows(5, 4, 9), Rows(0, 9, 9)], ids=["parts", "a whole batch on one rank"])
def test_layers_that_all_ranks_call_in_some_batches_are_not_named(second: Rows) -> None:
    everyone = [WholeDraws(nn.Identity(), rank) for rank in range(2)]
    for _ in range(2):
        for rank, draws in enumerate(everyone):
            rows = second if rank else Rows(0, 5, 9)
            for number in range(3):
                with draws.batch(rows):
                    F.dropout(torch.ones(rows.samples, WIDTH), 0.5 if number != 1 else 0.0)
        everyone[0].compare([[7, 7], [7, 7]], [each.report() for each in everyone])
    everyone[0].warn()


@pytest.mark.parametrize(
    ("digests", "skips", "says"),
    [
        ([[7, 7], [7, 8]], False, "rank 1 has drawn another amount than rank 0 by random or NumPy in a pass"),
        ([[7, 7], [8, 8]], True, ""),
    ],
    ids=["by random", "a rank without a sample"],
)
def test_only_ranks_that_compute_all_batches_must_draw_the_same_amount(
    digests: list[list[int]], skips: bool, says: str
) -> None:
    draws = WholeDraws(nn.Identity(), 0)
    draws.compare(digests, [[False, {}, {}, {}, {}], [skips, {}, {}, {}, {"noise": 1} if skips else {}]])
    with pytest.warns(UserWarning, match=says) if says else nullcontext():
        draws.warn()


@pytest.mark.parametrize(
    ("begins_before", "says"), [(True, r"dimension 1 of .* but another was taken in earlier batches"), (False, "")]
)
def test_a_comparison_does_not_excuse_what_was_drawn_otherwise_before(begins_before: bool, says: str) -> None:
    draws, module = WholeDraws(nn.Identity(), 0), nn.Dropout()
    whole, part = Rows(0, 5, 5), Rows(0, 3, 5)
    before = [(part, draws.batch(part))] * begins_before
    for rows, context in (*before, *((rows, draws.comparing(rows, module)) for rows in (whole, part))):
        with context:
            module(torch.ones(3, rows.samples, 6))
    draws.confirm()
    with pytest.warns(UserWarning, match=says) if says else nullcontext():
        draws.warn()


def latent(samples: int, size: int) -> torch.Tensor:
    return torch.randn(samples, size)


@pytest.mark.parametrize(("size", "says"), [(4, ""), (2, r"of \[4, 2, 4\] for 4 samples, dimension 0 was taken")])
def test_a_square_that_another_place_has_drawn_in_a_right_comparison_is_not_doubted(size: int, says: str) -> None:
    # The second model of a GAN draws after the first backward, where the comparison ends.
    draws = WholeDraws(nn.Identity(), 0)
    for rows in (Rows(0, 8, 8), Rows(0, 4, 8)):
        with draws.comparing(rows, nn.Identity()):
            latent(rows.samples, 4)
    draws.confirm()
    with draws.batch(Rows(0, 4, 8)):
        latent(4, 4)
        torch.randn(4, 4) if size == 4 else torch.randn(4, 2, 4)
    with pytest.warns(UserWarning, match=says) if says else nullcontext():
        draws.warn()


def test_a_warning_of_many_layers_counts_most_of_them() -> None:
    draws = WholeDraws(nn.Identity(), 0)
    refusals = {f"layer {number}": "draws by rank" for number in range(7)}
    draws.compare([[7, 7]], [[False, refusals, {}, {}, {}]])
    with pytest.warns(UserWarning, match="layer 3: draws by rank; and 3 more.$"):
        draws.warn()


def test_a_layer_that_draws_for_parts_padded_to_other_lengths_is_named() -> None:
    draws, module = WholeDraws(nn.Identity(), 0), nn.Dropout()
    for rows, length in ((Rows(0, 16, 16), 7), (Rows(0, 11, 16), 5)):
        with draws.comparing(rows, module):
            module(torch.ones(rows.samples, length))
    assert draws.refused == {
        "Dropout": "it draws [11, 5] for a part, [16, 7] for the whole first batch: let collate_fn pad all samples to "
        "one length"
    }


def test_a_layer_whose_lengths_differ_between_ranks_after_the_first_batch_is_named() -> None:
    draws, module = WholeDraws(nn.Identity(), 0), nn.Dropout()
    for rows, length in ((Rows(0, 4, 16), 7), (Rows(0, 3, 11), 7), (Rows(0, 4, 16), 5)):
        with draws.batch(rows):
            module(torch.ones(rows.samples, length))
    draws.compare([[7, 7], [8, 7]], [draws.report()] * 2)
    with pytest.warns(UserWarning, match="rank 1 has drawn another amount .* Dropout draws for a size that changes"):
        draws.warn()


def test_a_backward_elsewhere_draws_again_what_its_forward_drew() -> None:
    layers, gradients = STEPS["dropouts"], []
    for elsewhere in (False, True):
        inputs, draws = batch(4).requires_grad_(), WholeDraws(nn.Identity(), 0)
        torch.manual_seed(5)
        with draws.forward(Rows(0, 4, 9)):
            loss = (checkpoint(layers, inputs, use_reentrant=False) if elsewhere else layers(inputs)).pow(2).sum()
        with draws.backward():
            loss.backward()
        gradients.append(inputs.grad)
    assert torch.equal(*gradients)


REFUSED: dict[str, tuple[Step, str]] = {
    "permutation": (lambda x: x + x[torch.randperm(len(x))], "a permutation of the batch needs rows"),
    "poisson": (lambda x: torch.poisson(x.abs()), "poisson draws depends on rows of other processes"),
    "rrelu": (nn.RReLU(), "rrelu_with_noise draws depends"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_draws_by_rank_and_keeps_one_random_state(name: str) -> None:
    step, message = REFUSED[name]
    everyone = [WholeDraws(step if isinstance(step, nn.Module) else nn.Identity(), rank) for rank in range(2)]
    outputs, states = by_parts(step, PARTS[0], draws=iter(everyone).__next__)
    assert torch.equal(*states)
    assert not torch.equal(outputs[:4], by_parts(step, (0, 4, 9))[0][5:])
    with pytest.warns(UserWarning, match=message):
        everyone[0].warn()


def test_attention_that_draws_nothing_in_an_evaluation_is_no_draw() -> None:
    attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True, dtype=torch.float64).eval()
    draws = WholeDraws(attention, 0)
    with torch.no_grad():
        drawn(draws, lambda x: attention(x, x, x, need_weights=False)[0], 4, 9)
        drawn(draws, lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]), 4, 9)
    draws.warn()


def test_an_epoch_of_a_model_with_many_dropout_layers_looks_for_their_names_once() -> None:
    walks: list[nn.Module] = []

    class Layered(nn.Sequential):
        def named_modules(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Module]]:
            walks.append(self)
            return super().named_modules(*args, **kwargs)

    model = Layered(*(nn.Dropout(0.5) for _ in range(50)))
    draws = WholeDraws(model, 0)
    for _ in range(3):
        drawn(draws, model, 4, 9)
        assert [*draws.report()[-1]] == sorted(str(number) for number in range(50))
    assert len(walks) == 1


def test_a_model_that_draws_nothing_is_only_watched() -> None:
    draws = WholeDraws(nn.Identity(), 0)
    drawn(draws, torch.sin, 4, 9)
    with draws.batch(Rows(0, 4, 9)):
        assert torch._C._len_torch_function_stack() == 0
    drawn(draws, F.dropout, 4, 9)
    with pytest.warns(UserWarning, match="in the first batch that drew, .*: begin to draw with an epoch"):
        draws.warn()
    torch.manual_seed(5)
    whole = F.dropout(batch(9))
    torch.testing.assert_close(drawn(draws, F.dropout, 4, 9), whole[:4])


def test_a_model_that_draws_from_a_later_epoch_on_draws_as_one_process() -> None:
    draws, own = WholeDraws(nn.Identity(), 0), torch.Generator().manual_seed(5)
    drawn(draws, torch.sin, 4, 9)
    drawn(draws, torch.sin, 4, 9)
    draws.report()
    noise = lambda x: x + torch.randn(len(x), 1, 1, generator=own)  # noqa: E731
    found = drawn(draws, noise, 4, 9)
    own.manual_seed(5)
    torch.testing.assert_close(found, noise(batch(9))[:4])
    draws.warn()


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        (4, r"of \[4, 2\] for 4 samples, dimension 0 was taken to hold the batch; if wrong, let the batch be"),
        (3, "no dimension of what it draws holds the batch, but another was taken in earlier batches"),
    ],
)
def test_what_a_hook_draws_in_the_size_of_a_part_is_doubted_until_other_sizes_tell(samples: int, says: str) -> None:
    draws = WholeDraws(nn.Identity(), 0)
    drawn(draws, lambda x: torch.randn(4, 2), 4, 9)
    draws.warn()  # a step draws for its samples
    for size in (4, samples):
        with draws.batch(Rows(0, size, 9), "Plots.on_train_batch_end"):
            torch.randn(4, 2)
    with pytest.warns(UserWarning, match=says):
        draws.warn()


def test_a_part_of_as_many_images_as_these_have_rows_is_not_doubted() -> None:
    # 32 of 64 images of 32 x 32.
    draws = WholeDraws(nn.Identity(), 0)
    images = torch.zeros(8, 3, 8, 8)
    torch.manual_seed(5)
    whole = torch.rand(16, 3, 8, 8)
    torch.manual_seed(5)
    with warnings.catch_warnings(), draws.batch(Rows(0, 8, 16)):
        warnings.simplefilter("error")
        found = torch.rand_like(images)
        draws.warn()
    torch.testing.assert_close(found, whole[:8])


class Mixes:
    def mix(self, images: torch.Tensor) -> torch.Tensor:
        return images + images[torch.randperm(len(images))]


def test_what_draws_in_a_callback_is_named_not_the_model() -> None:
    draws = WholeDraws(nn.Identity(), 0)
    drawn(draws, Mixes().mix, 4, 9)
    with pytest.warns(UserWarning, match=r"Mixes \(test_whole_draws.py, line \d+\): a permutation of the batch"):
        draws.warn()


def test_parts_draw_their_own_numbers_on_wish() -> None:
    everyone = [WholeDraws(nn.Identity(), rank, by_rank=True) for rank in range(3)]
    outputs, states = by_parts(lambda x: F.dropout(torch.ones_like(x)), (0, 3, 6, 9), draws=iter(everyone).__next__)
    first, second, third = outputs.split(3)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    assert torch.equal(states[0], states[1]) and torch.equal(states[1], states[2])


def dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.ones_like(x))


def test_code_that_no_mode_sees_draws_by_rank() -> None:
    with warnings.catch_warnings(action="ignore"):
        step = torch.jit.script(dropout)
    x, parts = batch(3), []
    for rank in range(2):
        draws = WholeDraws(nn.Identity(), rank)
        for _ in range(2):
            torch.manual_seed(5)
            with draws.batch(Rows(3 * rank, 3, 9)):
                part = step(x)
        parts.append(part)
    assert not torch.equal(*parts)
    with pytest.warns(UserWarning, match="compiled code, or code that is not Python, draws random numbers"):
        draws.warn()


def test_compiled_code_stays_compiled() -> None:
    graphs = []

    def backend(graph, _):  # type: ignore[no-untyped-def]
        graphs.append(graph)
        return graph.forward

    step = torch.compile(dropout, backend=backend)
    draws = WholeDraws(nn.Identity(), 0)
    for start in (0, 3, 6):
        drawn(draws, step, 3, 9)
        with draws.batch(Rows(start, 3, 9)):
            step(batch(3))
    assert len(graphs) == 1


def compiled_dropout(x: torch.Tensor) -> torch.Tensor:
    """Draw from a seed, by number of element, as the code of torch._inductor does (ir.RandomSeeds)."""
    limits = torch.iinfo(torch.int64)
    seeds = torch.ops.aten.randint.low_out(limits.min, limits.max, [1], out=torch.empty(1, dtype=torch.int64))
    return x * torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seeds)))


def test_compiled_dropout_is_not_alike_on_all_ranks_and_is_named() -> None:
    ranks = [WholeDraws(nn.Identity(), rank) for rank in range(2)]
    drawing = iter(ranks)
    outputs, states = by_parts(lambda x: compiled_dropout(torch.ones_like(x)), (0, 3, 6), draws=lambda: next(drawing))
    assert not torch.equal(*outputs.split(3)) and torch.equal(*states)
    with pytest.warns(UserWarning, match=r"compiled code .* set torch\._inductor\.config\.fallback_random = True"):
        ranks[1].warn()


def test_the_rows_of_other_ranks_of_a_large_batch_are_passed_over() -> None:
    whole = torch.empty(2, 9, 5000).bernoulli_(0.3, generator=torch.Generator().manual_seed(1))
    part, at = torch.empty(2, 4, 5000), BatchDim(1, 1)
    if not bernoulli.is_drawn_from_bits(part, at):
        pytest.skip("MKL draws")
    bernoulli.fill(part, 0.3, at, Rows(3, 4, 9), torch.Generator().manual_seed(1))
    assert torch.equal(part, whole[:, 3:7])


def test_whole_batches_in_turn_are_the_rows_of_one_large_batch() -> None:
    steps = Divider("per_process", 1, 2).steps(iter([[1, 2, 3], [4, 5]]), len, lambda batch, part: batch[part])
    assert next(steps).share.rows == Rows(3, 2, 5)


def test_a_batch_of_as_many_tensors_as_samples_is_divided_by_samples() -> None:
    x = torch.arange(2)
    assert [each.tolist() for each in slice_samples([x, -x], 2, slice(1, 2))] == [[1], [-1]]
