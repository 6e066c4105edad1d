"""What travels between ranks keeps every bit, and is only tensors and plain data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ddp_callbacks.comm.checksums import checksum_of
from ddp_callbacks.comm.codec import decode, encode, pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.complex128, torch.complex64, torch.complex32, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]

plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))


def nested() -> st.SearchStrategy[Any]:
    """Plain data in lists and dicts; beyond JSON also in tuples, and under other keys than text."""
    keys = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.booleans())

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.lists(inner, max_size=3)
        return st.one_of(lists, st.dictionaries(keys, inner, max_size=3), lists.map(tuple))

    return st.recursive(plain, around, max_leaves=8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits of any dtype and shape: NaN, infinities, empty ones and those without dimensions, also transposed."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 4), max_size=4))
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


def received(tensor: Tensor) -> Tensor:
    found = sent(tensor)
    assert isinstance(found, Tensor)
    return found


def sent(value: Any) -> Any:
    return decode(encode(*pack(value)))


@settings(max_examples=100, deadline=None)  # the machine is shared
@given(nested(), st.lists(tensors(), max_size=4))
def test_plain_data_and_tensors_keep_every_bit(value: Any, parts: list[Tensor]) -> None:
    """Messages of JSON and raw bytes keep every bit."""
    received_value, found = sent((value, parts))
    assert received_value == value
    assert repr(received_value) == repr(value)  # tuples stay tuples, True stays True, and 1 as a key stays a number
    assert [*map(bits, found)] == [*map(bits, parts)]


@settings(max_examples=100, deadline=None)  # the machine is shared
@given(st.lists(st.floats()) | nested())
def test_values_arrive_alike_in_a_message_of_their_own_and_without_a_message(value: Any) -> None:
    assert repr(sent(value)) == repr(value) == repr(unpack(*pack(value)))


@pytest.mark.parametrize(
    "tensor",
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
def test_views_and_special_values_travel(tensor: Tensor) -> None:
    found = received(tensor)
    torch.testing.assert_close(found, tensor.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(found.real), torch.signbit(tensor.detach().real))


@pytest.mark.parametrize("value", [np.arange(6).reshape(2, 3)[:, ::-1], np.float32(0.1), np.array([math.nan])])
def test_arrays_arrive_as_arrays(value: Any) -> None:
    (found,) = sent([value])
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    ("value", "kind"), [(object(), "object"), ({1, 2}, "set"), (b"bytes", "bytes"), (1j, "complex")]
)
def test_what_cannot_travel_is_refused_with_its_type_and_value(value: Any, kind: str) -> None:
    """Nothing is unpickled; only tensors and plain data travel."""
    with pytest.raises(TypeError) as caught:
        pack({"key": [value]})
    what = "only tensors, arrays and plain data can be sent between processes"
    assert str(caught.value) == f"{what}, got a {kind}: {value!r}"


def test_equal_sets_have_equal_checksums_in_whatever_order_a_process_has_them() -> None:
    assert list({0, 8}) != list({8, 0})
    assert checksum_of([{0, 8}, {"a": frozenset([0, 8])}]) == checksum_of([{8, 0}, {"a": frozenset([8, 0])}])
    assert checksum_of({1, 2}) != checksum_of({1, 3})


def test_a_checksum_sees_every_entry_of_a_long_array() -> None:
    """Data that differ in one entry of a long array have other checksums."""
    long = torch.arange(5000)
    changed = long.index_fill(0, torch.tensor([2500]), 0)
    for one, other in ((long, changed), ([long.numpy()], [changed.numpy()])):
        assert checksum_of(one) != checksum_of(other)


def test_a_checksum_sees_every_bit_of_a_long_array() -> None:
    long = torch.randn(1 << 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).view(torch.int64)
    whole = checksum_of(long)
    for at in range(0, 1024, 31):  # of the columns that are summed
        for bit in range(64):
            flipped = long.clone()
            flipped[at] ^= 1 << bit if bit < 63 else -(1 << 63)
            assert checksum_of(flipped) != whole, f"bit {bit} of word {at}"
