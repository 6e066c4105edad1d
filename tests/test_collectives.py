"""Messages between ranks keep every bit, and what is broadcast, compared or drawn is equal on all ranks."""

from __future__ import annotations

import functools
import itertools
import math
import random
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_callbacks.comm.agreement import module_settings, optimizer_settings, require_agreement
from ddp_callbacks.comm.codec import decode, encode, pack, unpack
from ddp_callbacks.comm.collectives import (
    all_gather_json,
    all_gather_tensors,
    all_reduce,
    any_rank,
    broadcast,
    broadcast_tensors,
)
from ddp_callbacks.data.random_state import (
    SharedRandomState,
    broadcast_rng_state,
    get_global_state,
    seed_by_rank,
    set_global_state,
)
from ddp_callbacks.errors import MismatchError
from ddp_callbacks.process_group import join_process_group
from ddp_callbacks.replicas import MESSAGE_NBYTES, broadcast_optimizer_state, broadcast_parameters, merge_buffers

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.shares_results(),
]

WORLD_SIZE = 3
CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex128, torch.complex64, torch.complex32, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]

shapes = st.lists(st.integers(0, 4), max_size=4)
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
json_values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any dtype and shape: NaN, infinities, empty ones and those without dimensions, also transposed."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    count = math.prod(shape)
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=dtype).view(shape)
    size = count * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    tensor = torch.frombuffer(content, dtype=dtype) if size else torch.empty(0, dtype=dtype)
    tensor = tensor.view(shape)
    return tensor.mT if len(shape) >= 2 and draw(st.booleans()) else tensor


def bits(tensor: Tensor) -> tuple[torch.dtype, list[int], list[int]]:
    content = tensor.contiguous().reshape(-1)
    return tensor.dtype, list(tensor.shape), content.view(torch.uint8).tolist() if tensor.numel() else []


# --- without ranks ----------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)  # the machine is shared
@given(json_values, st.lists(tensors(), max_size=4))
def test_decode_is_the_inverse_of_encode_for_every_bit(header: Any, sent: list[Tensor]) -> None:
    message = encode(header, sent)
    assert message.dtype is torch.uint8 and message.dim() == 1
    received_header, received = decode(message, CPU)
    assert received_header == header
    assert [bits(tensor) for tensor in received] == [bits(tensor) for tensor in sent]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)], ids=str)
def test_every_dtype_and_shape_travels(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = torch.ones(shape).to(dtype)
    _, (received,) = decode(encode(None, [sent]), CPU)
    assert bits(received) == bits(sent)


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(torch.arange(6.0).view(2, 3).t(), id="transposed"),
        pytest.param(torch.tensor([1.0, 2.0]).expand(3, 2), id="expanded"),
        pytest.param(torch.arange(10)[::3], id="strided"),
        pytest.param(torch.tensor([1 + 2j, 3 - 4j]).conj(), id="conjugated lazily"),
        pytest.param(torch.tensor([1 + 2j]).conj().imag, id="negated lazily"),
        pytest.param(nn.Parameter(torch.ones(2)), id="parameter"),
        pytest.param(torch.tensor([math.nan, math.inf, -math.inf, -0.0]), id="not finite"),
    ],
)
def test_views_and_special_values_travel(sent: Tensor) -> None:
    _, (received,) = decode(encode("header", [sent]), CPU)
    torch.testing.assert_close(received, sent.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(received.real), torch.signbit(sent.detach().real))


@pytest.mark.parametrize("number", [math.inf, -math.inf, 0.1 + 0.2, 5e-324, -0.0, 2**70])
def test_numbers_in_a_header_keep_every_bit(number: float) -> None:
    header, _ = decode(encode([number], []), CPU)
    assert repr(header) == repr([number])
    assert math.isnan(decode(encode(math.nan, []), CPU)[0])


@settings(max_examples=100, deadline=None)  # the machine is shared
@given(
    st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.one_of(st.integers(), st.text(max_size=3), st.none(), st.booleans()), inner, max_size=3),
        ),
        max_leaves=10,
    )
)
def test_unpack_is_the_inverse_of_pack_also_through_json(value: Any) -> None:
    header, received = decode(encode(pack(value, []), []), CPU)
    unpacked = unpack(header, received)
    assert unpacked == value
    assert repr(unpacked) == repr(value)  # tuples stay tuples, True stays True, and 1 as a key stays a number


def test_tensors_are_packed_aside_and_put_back_in_their_places() -> None:
    one, two = torch.ones(2), torch.tensor(3)
    aside: list[Tensor] = []
    packed = pack({0: {"step": two, "both": (one, [two])}, "tensor": "a word"}, aside)
    assert [id(tensor) for tensor in aside] == [id(two), id(one), id(two)]
    unpacked = unpack(packed, aside)
    assert unpacked == {0: {"step": two, "both": (one, [two])}, "tensor": "a word"} and unpacked[0]["both"][0] is one


@pytest.mark.parametrize(
    ("value", "kind"), [(object(), "object"), ({1, 2}, "set"), (b"bytes", "bytes"), (1j, "complex")]
)
def test_what_cannot_travel_is_refused_with_its_type_and_value(value: Any, kind: str) -> None:
    with pytest.raises(TypeError) as caught:
        pack({"key": [value]}, [])
    assert str(caught.value) == f"only tensors and plain data can be sent between processes, got a {kind}: {value!r}"


def test_in_a_world_of_one_every_collective_is_the_identity() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert all_reduce(tensor, "a test") is tensor
    assert broadcast(tensor, "a test") is tensor
    assert tensor.tolist() == [1, 2]
    assert (any_rank(True, "a test"), any_rank(False, "a test")) == (True, False)
    assert all_gather_json({"a": 1}, "a test") == [{"a": 1}]
    assert all_gather_tensors("header", [tensor], "a test") == [("header", [tensor])]
    assert broadcast_tensors("header", [tensor], "a test") == ("header", [tensor])
    require_agreement({"a": 1}, "a test", "Nothing to do.")
    model = nn.BatchNorm1d(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [buffer.clone() for buffer in model.state_dict().values()], get_global_state(False)
    broadcast_parameters(model)
    merge_buffers(model, 3)
    broadcast_optimizer_state(optimizer)
    seed_by_rank()
    broadcast_rng_state()
    shared = SharedRandomState([SimpleNamespace(generator=torch.Generator())])
    assert str(([*model.state_dict().values()], get_global_state(False))) == str(before)
    torch.manual_seed(5)
    with shared.drawing():
        assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(5)))


# --- on ranks ---------------------------------------------------------------------------------------------------

BODIES: dict[str, Callable[[int], Any]] = {}


def on_ranks(body: Callable[[int], Any]) -> Callable[[int], Any]:
    BODIES[body.__name__] = body
    return body


def run_bodies() -> dict[str, Any]:
    join_process_group()  # tells the hosts' names
    found = {}
    for name, body in BODIES.items():
        try:
            found[name] = body(dist.get_rank())
        except Exception:
            found[name] = traceback.format_exc()  # the others go on
    return found


@functools.cache
def all_results() -> list[dict[str, Any]] | str:
    try:
        return run_distributed(run_bodies, WORLD_SIZE)
    except AssertionError as error:
        return str(error)  # cached as well, so that one failed start is not repeated for every test


def results_of(body: Callable[[int], Any]) -> list[Any]:
    results = all_results()
    assert not isinstance(results, str), results
    found = [result[body.__name__] for result in results]
    for one in found:
        assert not (isinstance(one, str) and one.startswith("Traceback")), one
    return found


@on_ranks
def gathered(rank: int) -> Any:
    own = [torch.full((rank, 2), rank, dtype=DTYPES[rank]), torch.tensor(rank == 1)][: rank + 1]
    return all_gather_tensors({"rank": rank, "nan": math.nan, "text": "ü" * rank}, own, "a test")


def test_all_ranks_get_every_ranks_tensors_though_number_shape_and_dtype_differ() -> None:
    for received in results_of(gathered):
        assert [header["rank"] for header, _ in received] == [0, 1, 2]
        assert [header["text"] for header, _ in received] == ["", "ü", "üü"]
        assert all(math.isnan(header["nan"]) for header, _ in received)
        assert [[(t.dtype, t.tolist()) for t in parts] for _, parts in received] == [
            [(DTYPES[0], [])],
            [(DTYPES[1], [[1, 1]]), (torch.bool, True)],
            [(DTYPES[2], [[2, 2], [2, 2]]), (torch.bool, False)],
        ]


@on_ranks
def nothing_gathered(rank: int) -> Any:
    return all_gather_tensors(None, [], "a test"), all_gather_json([rank], "a test")


def test_messages_without_tensors_travel() -> None:
    assert results_of(nothing_gathered) == [([(None, [])] * 3, [[0], [1], [2]])] * 3


@on_ranks
def reduced(rank: int) -> Any:
    small = all_reduce(torch.tensor([rank + 1, 10]), "a test")
    # Above and below the size from which gloo's ring takes over from the gather.
    large = [all_reduce(torch.full((n,), rank + 1.5, dtype=torch.float64), "a test") for n in (1000, 200_000)]
    complex_ = all_reduce(torch.tensor([rank + 1j]), "a test")
    empty = all_reduce(torch.empty(0), "a test")
    flags = [any_rank(flag, "a test") for flag in (False, True, rank == 2, rank == 0)]
    return (
        small.tolist(),
        [(part.min().item(), part.max().item()) for part in large],
        complex_.item(),
        len(empty),
        flags,
    )


def test_sums_are_sums_over_the_ranks_at_every_size() -> None:
    assert results_of(reduced) == [([6, 30], [(7.5, 7.5)] * 2, 3 + 3j, 0, [False, True, True, True])] * 3


@on_ranks
def broadcasted(rank: int) -> Any:
    values = [
        torch.tensor(rank + 5),
        torch.full((2, 2), rank + 0.5),
        torch.tensor([rank + 1j]),
        torch.tensor([rank == 0]),
    ]
    received = [broadcast(value, "a test") for value in values]
    same = all(one is other for one, other in zip(values, received, strict=True))
    header, parts = broadcast_tensors({"rank": rank}, [torch.tensor(rank)] * (1 - rank), "a test")
    return same, [value.tolist() for value in received], header, [part.tolist() for part in parts]


def test_a_broadcast_overwrites_in_place_with_the_values_of_rank_0() -> None:
    expected = (True, [5, [[0.5, 0.5], [0.5, 0.5]], [1j], [True]], {"rank": 0}, [0])
    assert results_of(broadcasted) == [expected] * 3


# --- start equal ------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Parameters and buffers of many dtypes, layouts and sizes, one shared, one buffer that is ``None``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.linear.weight
        self.image = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(3)
        self.low = nn.Parameter(torch.randn(2, 2, dtype=torch.bfloat16), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.transposed = nn.Parameter(torch.randn(2, 3).t())
        self.scalar = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.empty = nn.Parameter(torch.randn(0, 2))
        self.register_buffer("flags", torch.rand(5) < 0.5)
        self.register_buffer("count", torch.randint(1000, (2,)))
        self.register_buffer("hidden", torch.randn(2), persistent=False)
        # Views that torch conjugates and negates when they are read.
        self.register_buffer("conjugate", torch.randn(2, dtype=torch.complex128).conj())
        self.register_buffer("negative", torch.randn(1, dtype=torch.complex64).conj().imag)
        self.register_buffer("none", None)


def contents(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


@on_ranks
def parameters_of_rank_0(rank: int) -> Any:
    """In common messages, with some of the tensors alone, and with all of them alone."""
    received = []
    with pytest.MonkeyPatch.context() as patch:
        for nbytes in (MESSAGE_NBYTES, 40, 1):
            patch.setattr("ddp_callbacks.replicas.MESSAGE_NBYTES", nbytes)
            model = Everything(seed=rank)
            before = [(id(tensor), tensor.stride(), tensor.data_ptr()) for tensor in model.parameters()]
            broadcast_parameters(model)
            after = [(id(tensor), tensor.stride(), tensor.data_ptr()) for tensor in model.parameters()]
            received.append((before == after, contents(model)))
    return received


def test_every_parameter_and_buffer_becomes_rank_0s_in_place() -> None:
    expected = contents(Everything(seed=0))
    for unmoved, received in itertools.chain.from_iterable(results_of(parameters_of_rank_0)):
        assert unmoved
        assert list(received) == list(expected)
        for name, value in received.items():
            assert torch.equal(value, expected[name]), name


@on_ranks
def memory_of_large_parameters(rank: int) -> int:
    """Bytes by which the process grew at most while 64 MiB were broadcast."""
    model = nn.Sequential(*(nn.Linear(2048, 4096) for _ in range(2)))
    broadcast_parameters(nn.Linear(8, 8))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    resident = status("VmRSS")
    broadcast_parameters(model)
    return status("VmHWM") - resident


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak of a process's memory")
def test_large_parameters_are_broadcast_without_a_copy() -> None:
    assert max(results_of(memory_of_large_parameters)) < 16 << 20


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True),
    "Adam with a tensor as lr": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.3), foreach=False),
    "two groups": lambda parameters: torch.optim.SGD(
        [{"params": parameters[:1], "lr": 0.4, "name": "first"}, {"params": parameters[1:]}], lr=0.5
    ),
}


def stepped(name: str, seed: int, steps: int, lr_factor: float) -> torch.optim.Optimizer:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * lr_factor
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


@on_ranks
def optimizer_states(rank: int) -> Any:
    found = {}
    for name in OPTIMIZERS:
        # Rank 1 has another state and other hyperparameters, rank 2 has not stepped at all.
        optimizer = stepped(name, seed=rank, steps=(3, 5, 0)[rank], lr_factor=rank + 1)
        broadcast_optimizer_state(optimizer)
        found[name] = optimizer.state_dict()
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_hyperparameters_of_the_optimizer_become_rank_0s(name: str) -> None:
    expected = stepped(name, seed=0, steps=3, lr_factor=1).state_dict()
    for found in results_of(optimizer_states):
        assert str(found[name]) == str(expected)
        for index, state in expected["state"].items():
            for key, value in state.items():
                received = found[name]["state"][index][key]
                assert value is None or torch.equal(received, value), (index, key)


@on_ranks
def optimizers_that_do_not_fit(rank: int) -> str:
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(1 + rank)]
    try:
        broadcast_optimizer_state(torch.optim.SGD(parameters, 0.1))
    except ValueError as error:
        return str(error)
    return "fits"


def test_an_optimizer_with_other_groups_raises_as_load_state_dict_does() -> None:
    first, *others = results_of(optimizers_that_do_not_fit)
    assert first == "fits"
    assert all("loaded state dict contains a parameter group that doesn't match" in text for text in others)


# --- buffers before an evaluation -------------------------------------------------------------------------------


def norm(rank: int, shift: float = 0.0) -> nn.Sequential:
    model = nn.Sequential(nn.BatchNorm1d(2, dtype=torch.float64), nn.InstanceNorm1d(2), nn.Linear(2, 2))
    model[0].running_mean.copy_(torch.tensor([rank + 1.0, 10.0 * rank + shift]))
    model[0].running_var.copy_(torch.tensor([rank + 2.0, 1.0]))
    model[0].num_batches_tracked.fill_(rank + 40)
    model.register_buffer("count", torch.tensor([rank, 7]))
    return model


@on_ranks
def merged(rank: int) -> Any:
    model = norm(rank)
    merge_buffers(model, (7, 3, 0)[rank])
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def test_running_statistics_are_averaged_by_samples_and_other_buffers_are_rank_0s() -> None:
    for found in results_of(merged):
        assert found["0.running_mean"] == pytest.approx([1.3, 3.0], rel=1e-14)
        assert found["0.running_var"] == pytest.approx([2.3, 1.0], rel=1e-14)
        assert found["0.num_batches_tracked"] == 40
        assert found["count"] == [0, 7]


@on_ranks
def merged_with_nan(rank: int) -> Any:
    model = norm(rank, shift=math.nan if rank == 2 else 0.0)
    merge_buffers(model, (7, 3, 0)[rank])
    return model[0].running_mean.tolist()


def test_nan_in_the_statistics_of_a_rank_without_samples_reaches_nobody() -> None:
    for found in results_of(merged_with_nan):
        assert found == pytest.approx([1.3, 3.0], rel=1e-14)


@on_ranks
def merged_without_samples(rank: int) -> Any:
    model = norm(rank)
    merge_buffers(model, 0)
    return model[0].running_mean.tolist()


def test_where_no_rank_has_seen_a_sample_the_statistics_stay() -> None:
    assert results_of(merged_without_samples) == [[1.0, 0.0], [2.0, 10.0], [3.0, 20.0]]


# --- agreement --------------------------------------------------------------------------------------------------


def disagreement(settings_: dict[str, Any], subject: str) -> str:
    try:
        require_agreement(settings_, subject, "Build it from the same code on every rank.")
    except MismatchError as error:
        return str(error)
    return "agreed"


@on_ranks
def models_that_differ(rank: int) -> str:
    model = nn.Sequential(nn.Linear(2, 4 if rank == 1 else 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(rank != 2)
    return disagreement(module_settings(model), "the model")


def test_models_that_differ_raise_the_same_text_on_every_rank_with_parameter_ranks_and_values() -> None:
    first, *others = results_of(models_that_differ)
    assert others == [first] * 2
    head, *lines, remedy, ranks = first.splitlines()
    assert head == "the ranks disagree about the model:"
    assert lines == [
        "  parameter 0.weight: [3, 2] float32 on ranks 0, 2; [4, 2] float32 on rank 1",
        "  parameter 0.bias: [3] float32 on rank 0; [4] float32 on rank 1; [3] float32 frozen on rank 2",
    ]
    assert remedy == "Build it from the same code on every rank."
    assert ranks.startswith("Ranks: rank 0 (host ") and "rank 2 (host " in ranks and "pid" in ranks


@on_ranks
def parameters_that_are_missing(rank: int) -> str:
    layers = [nn.Linear(1, 1, bias=rank != 1)] + [nn.Linear(1, 1, bias=False) for _ in range(9 if rank == 0 else 1)]
    return disagreement(module_settings(nn.Sequential(*layers)), "the model")


def test_a_parameter_that_a_rank_lacks_is_named_and_a_long_list_is_cut() -> None:
    first, *others = results_of(parameters_that_are_missing)
    assert others == [first] * 2
    lines = first.splitlines()
    assert lines[1] == "  parameter 0.bias: [1] float32 on ranks 0, 2; (none) on rank 1"
    assert lines[2] == "  parameter 2.weight: [1, 1] float32 on rank 0; (none) on ranks 1, 2"
    assert lines[6] == "  ... and 5 more"  # seven more weights, of which four are shown, and the order


@on_ranks
def optimizers_that_differ(rank: int) -> str:
    parameters = list(nn.Linear(2, 2).parameters())[: 2 - (rank == 2)]
    lr = torch.tensor(0.5) if rank == 0 else 0.5
    return disagreement(optimizer_settings(torch.optim.SGD(parameters, lr, momentum=rank / 2)), "the optimizer")


def test_optimizers_that_differ_raise_with_group_option_and_values() -> None:
    first, *others = results_of(optimizers_that_differ)
    assert others == [first] * 2
    assert "  optimizer group 0: momentum: 0.0 on rank 0; 0.5 on rank 1; 1.0 on rank 2\n" in first
    assert "  optimizer group 0: number of parameters: 2 on ranks 0, 1; 1 on rank 2\n" in first
    assert " lr:" not in first  # equal numbers, one of them in a tensor


@on_ranks
def what_agrees(rank: int) -> str:
    model = Everything(seed=rank)
    optimizer = torch.optim.Adam([{"params": model.parameters(), "schedule": [SimpleNamespace(at=object())]}], lr=0.1)
    return disagreement(module_settings(model) | optimizer_settings(optimizer) | {"nan": math.nan}, "everything")


def test_equal_settings_agree_whatever_the_values_of_parameters_and_the_addresses_of_objects() -> None:
    assert results_of(what_agrees) == ["agreed"] * 3


# --- random state -----------------------------------------------------------------------------------------------


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand()), torch.randn(()).item(), random.gauss(0, 1)]


def draws(seed: int, count: int) -> list[list[float]]:
    """What one process draws."""
    before = get_global_state(False)
    seed_all(seed)
    found = [draw() for _ in range(count)]
    set_global_state(before)
    return found


@on_ranks
def shared_and_own(rank: int) -> Any:
    seed_all(100 + rank)
    draw()
    shared = SharedRandomState()
    with shared.drawing():
        first = draw()
    own = draw()  # on rank 0 from the shared state, which is its own
    with shared.drawing():
        second = draw()
    return {"shared": [first, second], "own": [own, draw()]}


def test_inside_all_ranks_draw_what_one_process_draws_and_outside_each_its_own() -> None:
    found = results_of(shared_and_own)
    one_process = draws(100, 5)
    for one in found:
        assert one["shared"] == one_process[1:3]
    for rank in (1, 2):
        assert found[rank]["own"] == draws(100 + rank, 3)[1:]
    # Rank 0 has drawn in between, so from then on its own state and the shared one go apart.
    assert found[0]["own"] == one_process[2:4]


@on_ranks
def shared_while_rank_0_draws_nothing_else(rank: int) -> Any:
    seed_all(200 + rank)
    shared = SharedRandomState()
    found = []
    for _ in range(3):
        with shared.drawing():
            found.append(draw())
    return found, draw()


def test_rank_0_moves_on_with_the_shared_state_as_one_process_does() -> None:
    found = results_of(shared_while_rank_0_draws_nothing_else)
    one_process = draws(200, 4)
    assert [shared for shared, _ in found] == [one_process[:3]] * 3
    assert [own for _, own in found] == [one_process[3], draws(201, 1)[0], draws(202, 1)[0]]


@on_ranks
def shared_torch_only(rank: int) -> Any:
    seed_all(300 + rank)
    shared = SharedRandomState(torch_only=True)
    with shared.drawing():
        drawn = torch.rand(3).tolist()
    return drawn, random.random(), torch.rand(2).tolist()


def test_sharing_torchs_state_alone_leaves_the_others_in_their_places() -> None:
    found = results_of(shared_torch_only)
    generator = torch.Generator().manual_seed(300)
    expected = torch.rand(3, generator=generator).tolist()
    assert [drawn for drawn, _, _ in found] == [expected] * 3
    assert [python for _, python, _ in found] == [random.Random(300 + rank).random() for rank in range(3)]
    assert found[0][2] == torch.rand(2, generator=generator).tolist()
    for rank in (1, 2):
        assert found[rank][2] == torch.rand(2, generator=torch.Generator().manual_seed(300 + rank)).tolist()


@on_ranks
def shared_with_an_exception(rank: int) -> Any:
    seed_all(400 + rank)
    shared = SharedRandomState()
    try:
        with shared.drawing():
            draw()
            raise KeyError
    except KeyError:
        pass
    own = draw()
    with shared.drawing():
        return own, draw()


def test_after_an_exception_inside_each_rank_has_its_own_state_back() -> None:
    found = results_of(shared_with_an_exception)
    assert [own for own, _ in found[1:]] == [draws(400 + rank, 1)[0] for rank in (1, 2)]
    assert [shared for _, shared in found] == [draws(400, 2)[1]] * 3


@on_ranks
def own_generators_of_sources(rank: int) -> Any:
    sampler = SimpleNamespace(generator=torch.Generator().manual_seed(rank), python=random.Random(rank), other="text")
    dataset = SimpleNamespace(new=np.random.default_rng(rank), old=np.random.RandomState(rank))
    SharedRandomState([sampler, dataset, object()])
    return [
        torch.rand(2, generator=sampler.generator).tolist(),
        sampler.python.random(),
        dataset.new.random(),
        dataset.old.rand(),
    ]


def test_generators_of_the_sources_get_rank_0s_state_for_good() -> None:
    expected = [
        torch.rand(2, generator=torch.Generator().manual_seed(0)).tolist(),
        random.Random(0).random(),
        np.random.default_rng(0).random(),
        np.random.RandomState(0).rand(),
    ]
    assert results_of(own_generators_of_sources) == [expected] * 3


@on_ranks
def distinct(rank: int) -> Any:
    found = []
    for _ in range(2):
        seed_all(500)
        seed_by_rank()
        found.append(draw())
    return found


def test_distinct_states_differ_repeat_themselves_and_leave_rank_0s_alone() -> None:
    found = results_of(distinct)
    assert all(first == again for first, again in found)
    assert found[0][0] == draws(500, 1)[0]
    for drawn in zip(*(first for first, _ in found), strict=True):
        assert len(set(drawn)) == WORLD_SIZE


@on_ranks
def equal(rank: int) -> Any:
    seed_all(600 + rank)
    draw()
    broadcast_rng_state()
    return draw()


def test_equal_states_are_rank_0s() -> None:
    assert results_of(equal) == [draws(600, 2)[1]] * 3
