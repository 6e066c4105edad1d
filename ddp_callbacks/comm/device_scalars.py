"""All-gather of numbers that are on GPUs, between the GPUs: an operation in a stream, for which no host waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddp_callbacks._torch import all_gather_flat, is_ordered_by_stream
from ddp_callbacks.process_group import resolve_group
from ddp_callbacks.process_group.failures import enter, of_device, wait

_ROOM = 64  # numbers for which there is room at least


class DeviceExchange:
    """All-gathers a vector of float64 per rank, from a GPU of each rank.

    All ranks must launch an all-gather of one size, or none, although no rank knows the others' vectors yet. They
    decide by the lengths that all have noted before for the same purpose: there is room for the longest so far (and for
    somewhat more, as lengths may depend on a batch), and none while a rank has had no numbers on a GPU.

    Every rank must call :meth:`send` and :meth:`note` in the same order, and note the same lengths.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = resolve_group(group)
        self._longest: dict[str, list[int]] = {}
        self._home: torch.device | None = None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` can be sent: it is on this rank's GPU, the first that is asked for. Local."""
        if self._home is None and is_ordered_by_stream(self._group, tensor.device):
            self._home = tensor.device
        return tensor.device == self._home

    def send(self, tensors: Sequence[torch.Tensor], doing: str) -> DeviceVectors:
        """Send this rank's tensors, as one vector. Does not block, and does not wait for the GPU.

        Args:
            tensors: Of any real dtypes and shapes; :meth:`takes` takes them.
            doing: The purpose, for error messages; the same on every rank.
        """
        vectors, longest = DeviceVectors(tensors, self._group, doing), self._longest.get(doing, [0])
        if min(longest):
            assert self._home is not None
            vectors.launch(_room_for(max(longest)), self._home)
        return vectors

    def note(self, lengths: Sequence[int], doing: str) -> None:
        """Make room for vectors of these lengths, by rank, in later exchanges for this purpose. Local."""
        before = self._longest.get(doing, lengths)
        self._longest[doing] = [*map(max, before, lengths)]


class DeviceVectors:
    """Every rank's vector, on its way. The tensors of this rank are kept until it is dropped."""

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, doing: str) -> None:
        self._flat = [tensor.detach().reshape(-1) for tensor in tensors]
        self._group, self._doing = group, doing
        self._received: torch.Tensor | None = None
        self._room = 0  # until an all-gather is launched

    def launch(self, room: int, device: torch.device) -> None:
        """Start the all-gather of the first ``room`` numbers of each rank."""
        length = sum(part.numel() for part in self._flat)
        # At least one zero, which makes all float64: torch.cat converts each part in one operation.
        filling = torch.zeros(max(room - length, 1), dtype=torch.float64, device=device)
        self._room, self._sent = room, torch.cat([*self._flat, filling])[:room]
        self._received = torch.empty(self._group.size() * room, dtype=torch.float64, device=device)
        enter(self._doing)
        work = all_gather_flat(self._group, self._received, self._sent)
        self._work = of_device(work, device, self._group)

    def hold(self, lengths: Sequence[int]) -> bool:
        """Whether :meth:`arrive` gives vectors of these lengths, by rank, as a whole. Local."""
        return max(lengths) <= self._room

    def arrive(self) -> torch.Tensor:
        """Every rank's vector, shape ``[world size, room]``, with zeros behind. The stream waits, not the host.

        Local: it needs no other rank, once all have sent their vectors. Call it once, also where nothing is needed of
        it: memory must not be used again before the stream has waited.
        """
        if self._received is None:
            return torch.zeros(self._group.size(), 0)
        wait(self._work, self._doing, self._group)
        return self._received.view(self._group.size(), self._room)

    def read(self) -> list[float]:
        """This rank's vector. Waits for the GPU."""
        numbers: list[float] = torch.cat([part.double() for part in self._flat]).tolist() if self._flat else []
        return numbers


def _room_for(length: int) -> int:
    """A power of two, so that growing vectors seldom outgrow it."""
    return max(_ROOM, 1 << (length - 1).bit_length())


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor`` on ``device``. The host does not wait where a GPU gets it.

    The copy is made from pinned memory: one from pageable memory would wait. torch's allocator does not use pinned
    memory again before the copies from it are done.
    """
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
