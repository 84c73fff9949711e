"""A compiled step on a GPU, as the engine calls it: the host's tensors in, the host's tensors out.

A call is one launch and one wait. What a step takes is written into one block of pinned memory; a CUDA graph copies the
block to the device, runs the step and copies what the host reads back into another block. A step of fixed size has a
graph for every extent that comes a second time; prompts are read by the others, so that no first token waits for a
capture.

Invariant: a call returns when the device has finished, so the next may be given the same blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from yggrt.artifacts import RunStep, TensorSpec

VERIFIED_ON: tuple[str, ...] = ()
"""SKU keys of the GPUs on which `tests/gpu/check.sh` has passed. On others nobody has seen this code run."""

MOST_GRAPHS = 64
"""Kept at a time; the one that was used the longest ago makes room."""

KEPT_ON_DEVICE = ("hidden", "logits")
"""Outputs of `verify` that the host seldom reads: they stay where they are until the step runs again."""

CONSTANT = ("depth_first", "depth_second", "acceptance_table")
"""Inputs that stay the same over many calls: copied again when they have changed."""

ALIGNMENT = 256
"""Bytes; every tensor of a block begins at a multiple of it."""

_CAPTURE = Lock()
"""torch allows one capture at a time in a process. Other lanes go on running meanwhile."""


def unverified(kind: str, sku: str) -> list[str]:
    """What to tell of a device on which the project's own checks have not been run: a line or none."""
    if kind != "cuda" or sku in VERIFIED_ON:
        return []
    return [f"the CUDA target has never been checked on {sku}; tests/gpu/check.sh does that"]


class Device(Protocol):
    """What a step needs of a GPU; in tests, of something that behaves like one."""

    def active(self) -> AbstractContextManager[object]:
        """While in it, what is launched goes to this device."""

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] on the device."""

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] on the host, which the device can copy to and from by itself."""

    def place(self, tensor: Tensor) -> Tensor:
        """A tensor of the host, copied to the device."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What launches the work, captured once, again and again with what its blocks then hold."""

    def wait(self) -> None:
        """Until all that was launched has finished."""


class CudaDevice:
    """A GPU as one model has it.

    A stream of its own, so that lanes with different models run beside each other, and one pool of memory for its
    graphs, no two of which run at a time. Streams need no events between them, since every call waits for its own.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def active(self) -> Iterator[None]:
        """See `Device`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def allocate(self, num_bytes: int) -> Tensor:
        """See `Device`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> Tensor:
        """See `Device`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def place(self, tensor: Tensor) -> Tensor:
        """See `Device`."""
        return tensor.to(self.device)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device`."""
        graph = torch.cuda.CUDAGraph()
        self.wait()
        with _CAPTURE, torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def wait(self) -> None:
        """See `Device`."""
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in a block of bytes."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, block: Tensor) -> Tensor:
        return block[self.begin : self.end].view(self.dtype).view(self.shape)


def lay_out_block(tensors: Sequence[Tensor]) -> tuple[list[_Place], int]:
    """Places of tensors in one block, and its size in bytes."""
    places, begin = [], 0
    for tensor in tensors:
        end = begin + tensor.numel() * tensor.element_size()
        places.append(_Place(begin, end, tensor.dtype, tuple(tensor.shape)))
        begin = -(-end // ALIGNMENT) * ALIGNMENT
    return places, max(begin, ALIGNMENT)


class _Constants:
    """Constant inputs of one step on the device, by name."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placed: dict[str, Tensor] = {}
        self._of: dict[str, tuple[Tensor, int]] = {}  # the tensor itself: another may lie where it lay

    def bring(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor on the device: always at the same place, so that graphs may read it."""
        if name not in self._placed:
            self._placed[name] = self._device.place(tensor)
        else:
            source, version = self._of[name]
            if source is tensor and version == tensor._version:
                return self._placed[name]
            self._placed[name].copy_(tensor)
        self._of[name] = (tensor, tensor._version)
        return self._placed[name]


class _Captured:
    """A step captured for one kind of inputs."""

    def __init__(self, step: DeviceStep, inputs: Sequence[Tensor], rest: Sequence[Tensor], outputs: Sequence[Tensor]):
        """inputs: of the host; rest: the KV buffers; outputs: of a run of this kind."""
        device = step.device
        moving = [place for place, spec in enumerate(step.inputs) if spec.name not in CONSTANT]
        places, num_bytes = lay_out_block([inputs[place] for place in moving])
        self._given, arrived = device.pinned(num_bytes), device.allocate(num_bytes)
        self._given_views = [(place, at.view(self._given)) for place, at in zip(moving, places, strict=True)]
        on_device = {place: at.view(arrived) for place, at in zip(moving, places, strict=True)}
        arguments = [
            on_device[place] if place in on_device else step.constants.bring(spec.name, inputs[place])
            for place, spec in enumerate(step.inputs)
        ]
        read = [place for place, name in enumerate(step.outputs) if name not in KEPT_ON_DEVICE]
        self._places, num_bytes = lay_out_block([outputs[place] for place in read])
        packed, self._read = device.allocate(num_bytes), device.pinned(num_bytes)
        self._kept = {
            place: torch.empty_like(output, memory_format=torch.contiguous_format)
            for place, output in enumerate(outputs)
            if place not in read
        }
        self._order = [(place, read.index(place) if place in read else None) for place in range(len(outputs))]

        def work() -> None:
            arrived.copy_(self._given, non_blocking=True)
            found = step.run([*arguments, *rest])
            for place, at in zip(read, self._places, strict=True):
                at.view(packed).copy_(found[place])
            for place, kept in self._kept.items():
                kept.copy_(found[place])
            self._read.copy_(packed, non_blocking=True)

        self._launch = device.capture(work)
        self._device = device

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for place, view in self._given_views:
            view.copy_(inputs[place])
        self._launch()
        self._device.wait()
        block = self._read.clone()  # the next call writes there again
        return [self._kept[place] if index is None else self._places[index].view(block) for place, index in self._order]


class Graphs:
    """The captured steps of an engine, MOST_GRAPHS at most."""

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._captured: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()

    def __len__(self) -> int:
        return len(self._captured)

    def get(self, key: tuple[object, ...]) -> _Captured | None:
        """The graph of a step and a kind of inputs, now the one used last."""
        found = self._captured.get(key)
        if found is not None:
            self._captured.move_to_end(key)
        return found

    def keep(self, key: tuple[object, ...], captured: _Captured) -> None:
        """Another graph; the one used the longest ago makes room."""
        while len(self._captured) >= self._most:
            self._captured.popitem(last=False)
        self._captured[key] = captured


class DeviceStep:
    """A step as `yggrt.artifacts.Step` runs it: inputs of the host, then KV buffers of the device.

    outputs: their names. uses_graphs: whether anything is captured.
    """

    def __init__(
        self,
        run: RunStep,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[str, ...],
        device: Device,
        graphs: Graphs,
        uses_graphs: bool = True,
    ) -> None:
        self.run, self.inputs, self.outputs = run, inputs, outputs
        self.device, self.constants = device, _Constants(device)
        self._graphs, self._uses_graphs = graphs, uses_graphs
        self._symbolic = [place for place, spec in enumerate(inputs) if any(isinstance(s, str) for s in spec.sizes)]
        self._seen: set[tuple[torch.Size, ...]] = set()

    def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run once, and wait until it has."""
        with self.device.active():
            return self._call(tensors)

    def _call(self, tensors: list[Tensor]) -> list[Tensor]:
        count = len(self.inputs)
        inputs, rest = tensors[:count], tensors[count:]
        for spec, tensor in zip(self.inputs, inputs, strict=True):
            if spec.name in CONSTANT:
                self.constants.bring(spec.name, tensor)
        kind = tuple(inputs[place].shape for place in self._symbolic)
        captured = self._graphs.get((id(self), kind))
        if captured is not None:
            return captured(inputs)
        outputs = self._run_uncaptured(inputs, rest)
        if self._uses_graphs and kind in self._seen:
            host = [output.cpu() for output in outputs]  # capturing runs nothing, and may reuse memory of this run
            self._graphs.keep((id(self), kind), _Captured(self, inputs, rest, outputs))
            outputs = host
        self._seen.add(kind)
        return [
            output if name in KEPT_ON_DEVICE else output.cpu()
            for name, output in zip(self.outputs, outputs, strict=True)
        ]

    def _run_uncaptured(self, inputs: Sequence[Tensor], rest: Sequence[Tensor]) -> list[Tensor]:
        arguments = [
            self.constants.bring(spec.name, tensor) if spec.name in CONSTANT else self.device.place(tensor)
            for spec, tensor in zip(self.inputs, inputs, strict=True)
        ]
        outputs = self.run([*arguments, *rest])
        self.device.wait()
        return outputs


def extent_buckets(longest: int, smallest: int, unit: int, most: int = 6) -> tuple[int, ...]:
    """Extents to read, each twice the one below it or less: at most `most` of them, so that graphs come again.

    longest: of all, and the last of them; smallest: the least worth having; unit: all but the last are multiples of it.
    """
    buckets, extent = [longest], longest
    while len(buckets) < most and extent > smallest:
        extent = max(-(-(extent // 2) // unit) * unit, smallest)
        if extent >= buckets[-1]:
            break
        buckets.append(extent)
    return tuple(reversed(buckets))
