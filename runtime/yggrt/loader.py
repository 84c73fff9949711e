"""Compiled files to steps and KV caches, on the device they were compiled for.

Invariant: every file was checked before it comes here, see `yggrt.bundle`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from yggrt.artifacts import (
    DRAFT_OUTPUTS,
    FUSED_DRAFT_OUTPUTS,
    VERIFY_OUTPUTS,
    LayerLayout,
    Step,
    StepLimits,
    TensorSpec,
    draft_inputs,
    fused_draft_inputs,
    load_kernels,
    load_package,
    load_weights,
    verify_inputs,
)
from yggrt.cuda import CudaDevice, DeviceStep, Graphs, extent_buckets
from yggrt.kvcache import EXTENT_BUCKET, KvCache
from yggrt.sampling import REFERENCE, LawKernels
from yggrt.target import Target

SMALLEST_EXTENT = 256
"""Of the buckets on a GPU."""

ROLE = re.compile(r"verify|verify\.w([1-9][0-9]{0,3})|draft|draft\.d([1-9][0-9]{0,2})")
"""What an artifact can be: any number of rows, N rows alone, one pass, N passes at once."""


class StepLoader:
    """Loads the steps of one engine.

    kernels: the library that the CPU's artifacts call; None on a GPU. uses_graphs: on a GPU, whether CUDA graphs are.
    """

    def __init__(self, target: Target, kernels: Path | None, dtype: torch.dtype, uses_graphs: bool = True) -> None:
        self.target, self.dtype, self.uses_graphs = target, dtype, uses_graphs
        self.laws = REFERENCE if kernels is None else LawKernels(load_kernels(kernels))
        self._devices: dict[str, CudaDevice] = {}
        if target.kind == "cuda":
            self._devices = {model: CudaDevice(target.device_index) for model in ("verify", "draft")}
        self._graphs = Graphs()

    def weights(self, path: Path) -> dict[str, Tensor]:
        """A model's constants, once for all its artifacts."""
        found = load_weights(path, self.target.device)
        self._settle()
        return found

    def _settle(self) -> None:
        """What was made on a GPU is there for all streams."""
        if self._devices:
            torch.cuda.synchronize(self.target.device_index)

    def step(
        self,
        role: str,
        package: Path,
        weights: Mapping[str, Tensor],
        limits: StepLimits,
        windows: tuple[int | None, ...],
        hidden_size: int,
    ) -> Step:
        """An artifact. windows, hidden_size: of the verifier."""
        inputs, outputs = interface_of(role, limits, self.dtype, windows, hidden_size)
        if not self._devices:
            return Step(role, load_package(package, weights), inputs, limits)
        run, device = load_package(package, weights, self.target.device_index), self._devices[role.split(".")[0]]
        uses_graphs = self.uses_graphs and is_fixed(role)
        return Step(role, DeviceStep(run, inputs, outputs, device, self._graphs, uses_graphs), inputs, limits)

    def cache(self, layouts: tuple[LayerLayout, ...], limits: StepLimits) -> KvCache:
        """Empty KV buffers of a model, on the device."""
        extents: tuple[int, ...] = ()
        if self._devices:
            extents = extent_buckets(limits.kv_rows - 1, SMALLEST_EXTENT, EXTENT_BUCKET)
        made = KvCache(layouts, limits, self.dtype, torch.device(self.target.device), extents)
        self._settle()
        return made


def is_fixed(role: str) -> bool:
    """Whether an artifact has one size, so that its kinds of inputs are few; the others read prompts."""
    return "." in role


def interface_of(
    role: str, limits: StepLimits, dtype: torch.dtype, windows: tuple[int | None, ...], hidden_size: int
) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    """Inputs ahead of the KV buffers, and outputs, of the artifact of a role."""
    match = ROLE.fullmatch(role)
    assert match is not None, role
    if role.startswith("verify"):
        width = int(match[1]) if match[1] else None
        return verify_inputs(windows, limits, dtype, hidden_size, width), VERIFY_OUTPUTS
    if match[2]:
        return fused_draft_inputs(limits), FUSED_DRAFT_OUTPUTS
    return draft_inputs(limits), DRAFT_OUTPUTS
