"""From a bundle folder to an engine: checks first, cheapest before dearest, then loading.

Invariant: no compiled file is opened before the machine, the versions and every checksum fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from yggrt.artifacts import Step, attention_windows
from yggrt.engine import Engine, SampledMode
from yggrt.errors import BundleFormatError
from yggrt.executor import Decoder
from yggrt.kvcache import rows_needed
from yggrt.latency import StepTimes
from yggrt.loader import StepLoader
from yggrt.pace import Pace
from yggrt.plan import (
    MANIFEST_FILE,
    PLAN_FILE,
    AcceptanceTable,
    Artifact,
    BundleFile,
    Manifest,
    Plan,
    SampledPolicy,
    read_manifest,
    read_plan,
)
from yggrt.target import Target, check_manifest, detect_target, verify_file
from yggrt.text import TextCodec

TOKENIZER_FILE = "tokenizer.json"
LOG_NEVER = -60.0
"""log a of a child that must not be added: far below every clamped chance, and still a number."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read and fits this machine; nothing of it is loaded yet.

    notices: advisory differences between this machine and the one it was built on.
    """

    path: Path
    manifest: Manifest
    plan: Plan
    notices: tuple[str, ...]

    @property
    def entries(self) -> tuple[Artifact | BundleFile, ...]:
        """All files the manifest lists."""
        return (*self.manifest.artifacts, *self.manifest.files)

    @property
    def num_bytes(self) -> int:
        """Size of all files the manifest lists."""
        return sum(entry.num_bytes for entry in self.entries)


def read_bundle(path: Path) -> Bundle:
    """Manifest and plan of a bundle, whatever machine it is for.

    Raises BundleFormatError or PlanFormatError.
    """
    manifest = read_manifest(path)
    listed = {entry.file for entry in manifest.files}
    for name in (PLAN_FILE, TOKENIZER_FILE):
        if name not in listed:
            raise BundleFormatError(f"{path}: the manifest does not list {name}; build the bundle again")
    return Bundle(path, manifest, read_plan(path / PLAN_FILE), ())


def check_bundle(path: Path, device: str | None = None) -> tuple[Bundle, Target]:
    """Everything that can be said without loading: format, machine, versions, sizes and checksums.

    device: see `load`. Returns the bundle, and the device it would run on.
    Raises the YggError that says why it would not load here.
    """
    bundle = read_bundle(path)
    _check_plan_fits(bundle)
    target = detect_target(device or bundle.manifest.target)
    notices = check_manifest(bundle.manifest, target, torch.__version__)
    for entry in bundle.entries:
        verify_file(path / entry.file, entry.num_bytes, entry.digest)
    return Bundle(path, bundle.manifest, bundle.plan, notices), target


def load(path: str | Path, device: str | None = None, cuda_graphs: bool = True) -> Engine:
    """Load a bundle built by `yggc build`. A bundle is native code: load only what you trust.

    device: `cuda:1` and the like, of the kind that the bundle is for; default the first. cuda_graphs: whether steps on
    a GPU are launched as graphs.
    Raises a YggError in one line when it is malformed, damaged, or was built for another machine or torch.
    """
    started = perf_counter()
    bundle, target = check_bundle(Path(path), device)
    manifest, plan = bundle.manifest, bundle.plan
    threads_before = torch.get_num_threads()
    torch.set_num_threads(manifest.num_threads)
    try:
        decoder = _make_decoder(bundle, target, cuda_graphs)
    finally:
        torch.set_num_threads(threads_before)
    codec = TextCodec.from_file(bundle.path / TOKENIZER_FILE, manifest.text)
    engine = Engine(
        decoder,
        plan.policy.default_shape,
        codec,
        frozenset(manifest.text.eos_ids),
        manifest.verifier.vocab_size,
        manifest.drafter.context,
        manifest.num_threads,
        make_pace(plan),
        plan.schedule,
        tuple(
            make_mode(each, StepTimes(plan.curves), plan.plain_width, plan.policy.draft_vocabulary, follows_clock(plan))
            for each in plan.sampled
            if each.chosen
        ),
    )
    engine.bundle = bundle
    engine.load_s = perf_counter() - started
    return engine


def _check_plan_fits(bundle: Bundle) -> None:
    """Whether plan and artifacts belong together: a larger tree than was compiled for would leave the KV buffers.

    Raises BundleFormatError naming the first thing that differs.
    """
    manifest, plan = bundle.manifest, bundle.plan
    verify, draft = _artifact(bundle, "verify").limits, _artifact(bundle, "draft").limits
    tables = [plan.acceptance_table, *(policy.table for policy in plan.sampled)]
    drafter_context = min(manifest.max_context, manifest.drafter.context)
    same = {
        "drafter": (plan.drafter.fingerprint, manifest.drafter.fingerprint),
        "verifier": (plan.verifier.fingerprint, manifest.verifier.fingerprint),
        "dtype": (plan.dtype, manifest.dtype),
        "max_context": (plan.max_context, manifest.max_context),
    }
    same |= {
        f"ranks of acceptance table {at}": (table.num_ranks, draft.num_children) for at, table in enumerate(tables)
    }
    same |= {f"knots of acceptance table {at}": (table.num_knots, draft.num_knots) for at, table in enumerate(tables)}
    at_most = {"plain width": (plan.plain_width, verify.max_width)}
    policies = {"": plan.policy} | {
        f" at temperature {each.temperature}": each.trees(plan.policy.draft_vocabulary) for each in plan.sampled
    }
    for where, policy in policies.items():
        shape = policy.largest_shape
        at_most |= {
            f"children_per_node{where}": (policy.children_per_node, draft.num_children),
            f"nodes of a tree{where}": (shape.capacity, draft.max_nodes),
            f"candidates{where}": (shape.pool_size, draft.pool_size),
            f"draft depth{where}": (shape.draft_depth, min(verify.max_moves, draft.max_moves)),
            f"draft width{where}": (shape.draft_width, draft.max_width),
            f"verify width{where}": (shape.verify_width, verify.max_width),
            f"KV rows of the verifier{where}": (rows_needed(manifest.max_context, shape.capacity), verify.kv_rows),
            f"KV rows of the drafter{where}": (rows_needed(drafter_context, shape.capacity), draft.kv_rows),
        }
    for graph in plan.draft_graphs:
        if graph.fused:
            limits = _artifact(bundle, f"draft.d{graph.depth}").limits
            at_most[f"nodes of a fused draft of depth {graph.depth}"] = (
                1 + plan.policy.draft_width * graph.depth,
                min(limits.max_nodes, draft.max_nodes),
            )
            same[f"KV rows of the fused draft of depth {graph.depth}"] = (limits.kv_rows, draft.kv_rows)
    wrong = [(name, *pair) for name, pair in same.items() if pair[0] != pair[1]]
    wrong += [(name, *pair) for name, pair in at_most.items() if pair[0] > pair[1]]
    for name, planned, compiled in wrong:
        raise BundleFormatError(
            f"{bundle.path}: the plan does not fit the artifacts: {name} {planned} in the plan, {compiled} in "
            f"{MANIFEST_FILE}. Build the bundle again."
        )


def _make_decoder(bundle: Bundle, target: Target, uses_graphs: bool) -> Decoder:
    manifest, plan = bundle.manifest, bundle.plan
    kernels = None if manifest.kernels is None else bundle.path / manifest.kernels
    loader = StepLoader(target, kernels, getattr(torch, manifest.dtype), uses_graphs)
    weights = {name: loader.weights(bundle.path / name) for name in {entry.weights for entry in manifest.artifacts}}
    windows, hidden_size = attention_windows(manifest.verifier.layers), manifest.verifier.hidden_size

    def step(role: str) -> Step:
        artifact = _artifact(bundle, role)
        package = bundle.path / artifact.file
        return loader.step(role, package, weights[artifact.weights], artifact.limits, windows, hidden_size)

    widths = [artifact.role for artifact in manifest.artifacts if artifact.role.startswith("verify.w")]
    verify, draft = _artifact(bundle, "verify").limits, _artifact(bundle, "draft").limits
    return Decoder(
        step("verify"),
        step("draft"),
        {graph.depth: step(f"draft.d{graph.depth}") for graph in plan.draft_graphs if graph.fused},
        plan.policy.draft_width,
        loader.cache(manifest.verifier.layers, verify),
        loader.cache(manifest.drafter.layers, draft),
        table_tensor(plan.acceptance_table, plan.policy.children_per_node),
        manifest.max_context,
        plan.plain_width,
        plan.depth_network,
        {int(role.removeprefix("verify.w")): step(role) for role in widths},
        loader.laws,
        plan.copied_log_a,
    )


def make_pace(plan: Plan) -> Pace | None:
    """What chooses trees by this plan; None where it always uses its default shape."""
    if plan.token_s is None:
        return None
    return Pace(
        plan.policy, StepTimes(plan.curves), plan.host, plan.plain_width, plan.token_s, plan.depth_network,
        follows_clock(plan),
    )  # fmt: skip


def follows_clock(plan: Plan) -> bool:
    """Whether iterations may go by what they take: where a token has the same logits bit for bit in steps of any width,
    so that it cannot show in a text."""
    return plan.target == "cpu"


def make_mode(
    policy: SampledPolicy,
    times: StepTimes,
    plain_width: int,
    draft_vocabulary: tuple[int, ...] | None,
    follows_clock: bool,
) -> SampledMode:
    """How requests at about a policy's temperature are answered. draft_vocabulary: of the plan's policy."""
    trees = policy.trees(draft_vocabulary)
    pace = Pace(trees, times, policy.host, plain_width, policy.token_s, None, follows_clock)
    table = table_tensor(policy.table, policy.children_per_node)
    return SampledMode(policy.temperature, policy.draws, policy.shape, table, pace, policy.copied_log_a)


def table_tensor(table: AcceptanceTable, children_per_node: int) -> Tensor:
    """float32[ranks, knots], log a as a draft pass takes it: children beyond the node's share are never worth a row."""
    log_a = torch.tensor(table.log_a).view(table.num_ranks, table.num_knots)
    log_a[children_per_node:] = LOG_NEVER
    return log_a


def _artifact(bundle: Bundle, role: str) -> Artifact:
    found = [artifact for artifact in bundle.manifest.artifacts if artifact.role == role]
    if len(found) != 1:
        raise BundleFormatError(f"{bundle.path} holds {len(found)} artifacts for {role}; exactly one is accepted")
    return found[0]
