"""`yggc build`: inspect, head cut, kernels, export, profile, emit; each finished stage is kept and reused."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedModel

from yggc import export, graphs, head_cut, lowering, packing, profile
from yggc import kernels as kernels_module
from yggc.checkpoints import Checkpoint, affine_weights, load_model, open_checkpoint
from yggc.config import DEFAULT_MAX_CONTEXT, DEFAULT_SHAPE, LARGEST_SHAPE, BuildOptions
from yggc.emit import KERNELS_FILE, CompiledStep, Measured, emit_bundle, make_plan, text_spec
from yggc.inspect import inspect_pair, preflight
from yggc.kernels import TAG, compile_kernels
from yggc.lowering import lower_to_kernels
from yggc.progress import Progress
from yggc.stage_cache import StageCache, cache_folder
from yggrt import artifacts
from yggrt.artifacts import LayerLayout, StepLimits
from yggrt.errors import BuildError, YggError
from yggrt.executor import PREFILL_WIDTH
from yggrt.kvcache import rows_needed
from yggrt.plan import MANIFEST_FILE, DraftGraph, LatencyPoint, Plan
from yggrt.target import Target, detect_target

NUM_KNOTS = 65
FUSED_DEPTHS = (DEFAULT_SHAPE.draft_depth,) if DEFAULT_SHAPE.draft_depth > 1 else ()
PACKAGE_FILE = "step.pt2"
WEIGHTS_FILE = "weights.safetensors"
RECORD_FILE = "step.json"
SOURCES = (
    graphs,
    export,
    lowering,
    packing,
    kernels_module,
    artifacts,
)  # a change in these makes kept artifacts worthless


@dataclass(frozen=True, slots=True)
class WantedStep:
    """An artifact that the build needs, and the cache entry that holds it once it is compiled.

    vocabulary: ids the output layer is cut to; None keeps it whole.
    """

    role: str
    checkpoint: Checkpoint
    limits: StepLimits
    vocabulary: tuple[int, ...] | None
    entry: Path

    @property
    def depth(self) -> int | None:
        """Passes of a fused draft; None for the others."""
        return int(self.role.removeprefix("draft.d")) if "." in self.role else None


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made. num_bytes: size of the bundle."""

    output: Path
    plan: Plan
    num_bytes: int
    notices: tuple[str, ...]


def build(options: BuildOptions, progress: Progress) -> BuildReport:
    """Compile a pair into a bundle.

    Raises a YggError in one line when the pair, a checkpoint or this machine does not allow it.
    """
    cache = StageCache(cache_folder())
    target = detect_target(options.target)
    with progress.stage("inspect", 3):
        drafter, verifier = open_checkpoint(options.drafter), open_checkpoint(options.verifier)
        pair = inspect_pair(drafter, verifier)
        output = options.output or Path(f"{drafter.name}+{verifier.name}.bundle")
        _check_output(output)
        preflight(pair, options.dtype, output.resolve().parent, cache.root)
    for notice in pair.notices:
        progress.say(f"  note: {notice}")
    max_context = _max_context(options, verifier)
    vocabulary = _choose_head(cache, progress, options, drafter, verifier, pair.vocab_size)
    wanted = [
        _wanted_step(cache, target, options, verifier, "verify", pair.vocab_size, max_context, None),
        *(
            _wanted_step(cache, target, options, drafter, role, pair.vocab_size, max_context, vocabulary)
            for role in ("draft", *(f"draft.d{depth}" for depth in FUSED_DEPTHS))
        ),
    ]
    kernels = _kernels(cache, progress, target)
    steps = _compile(cache, progress, options, wanted, pair.vocab_size)
    measured = _profile(cache, progress, options, kernels, steps)
    verify, draft = steps[:2]
    plan = make_plan(options, target, draft, verify, max_context, measured)
    faster = {f"draft.d{graph.depth}" for graph in measured.draft_graphs if graph.fused}
    with progress.stage("emit", 5):
        kept = [step for step in steps if not step.is_fused or step.role in faster]
        num_bytes = emit_bundle(output, plan, target, verifier, pair.vocab_size, kept, kernels)
    return BuildReport(output, plan, num_bytes, pair.notices)


def _max_context(options: BuildOptions, verifier: Checkpoint) -> int:
    if options.max_context is None:
        return min(verifier.context, DEFAULT_MAX_CONTEXT)
    if options.max_context > verifier.context:
        raise ValueError(f"max-context {options.max_context}: the verifier's context of {verifier.context} is the most")
    return options.max_context


def _check_output(output: Path) -> None:
    """The bundle's place: absent, or an older bundle to be replaced; its parent writable."""
    parent = output.resolve().parent
    if not parent.is_dir():
        raise BuildError(f"{parent} does not exist; make it, or give another place with -o")
    if not os.access(parent, os.W_OK):
        raise BuildError(f"{parent} cannot be written to; give another place with -o")
    if output.exists() and not (output / MANIFEST_FILE).is_file():
        raise BuildError(f"{output} exists and is not a bundle; it will not be replaced. Give another place with -o.")


# ---- head cut ----


def _choose_head(
    cache: StageCache,
    progress: Progress,
    options: BuildOptions,
    drafter: Checkpoint,
    verifier: Checkpoint,
    vocab_size: int,
) -> tuple[int, ...] | None:
    """Ids the drafter's output layer keeps, or None for all of them."""
    source = Path(str(head_cut.__file__)).read_bytes()
    key = {
        "drafter": drafter.fingerprint,
        "verifier": verifier.fingerprint,  # its tokenizer and template
        "vocab_size": vocab_size,
        "torch": torch.__version__,
        "source": hashlib.sha256(source).hexdigest(),
    }
    entry = cache.entry("head", key)
    if cache.has(entry):
        progress.reused("cut the drafter's head")
    else:

        def choose(folder: Path) -> None:
            model = load_model(drafter, torch.float32)
            text = text_spec(verifier)
            chosen = head_cut.choose_draft_vocabulary(model, verifier.tokenizer, text, vocab_size, drafter.context)
            (folder / "vocabulary.json").write_text(json.dumps(chosen))

        with progress.stage("cut the drafter's head", 10):
            cache.fill(entry, choose)
    chosen = json.loads((entry / "vocabulary.json").read_text())
    return None if chosen is None else tuple(chosen)


# ---- kernels and export ----


def _digest(*modules: ModuleType) -> list[str]:
    return [hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest() for module in modules]


def _kernels(cache: StageCache, progress: Progress, target: Target) -> Path:
    """The library of kernels, compiled now or kept from before."""
    key: dict[str, object] = {"tag": TAG, "sku": target.sku, "isa": target.instruction_set, "torch": torch.__version__}
    entry = cache.entry("kernels", key | {"source": _digest(kernels_module)})
    if cache.has(entry):
        progress.reused("compile kernels")
    else:
        with progress.stage("compile kernels", 8):
            cache.fill(entry, lambda folder: compile_kernels(folder / KERNELS_FILE))
    return entry / KERNELS_FILE


def _limits(max_context: int, context: int, vocab_size: int) -> StepLimits:
    shape = LARGEST_SHAPE
    return StepLimits(
        kv_rows=rows_needed(min(max_context, context), shape.capacity),
        max_width=PREFILL_WIDTH,
        max_moves=shape.draft_depth,
        max_nodes=shape.capacity,
        pool_size=shape.pool_size,
        num_children=min(max(shape.draft_width, 8), vocab_size),
        num_knots=NUM_KNOTS,
    )


def _wanted_step(
    cache: StageCache,
    target: Target,
    options: BuildOptions,
    checkpoint: Checkpoint,
    role: str,
    vocab_size: int,
    max_context: int,
    vocabulary: tuple[int, ...] | None,
) -> WantedStep:
    """Where the artifact of one model is kept, under a key of all that could change it."""
    limits = _limits(max_context, checkpoint.context, len(vocabulary or range(vocab_size)))
    key = {
        "fingerprint": checkpoint.fingerprint,
        "role": role,
        "dtype": options.dtype,
        "vocab_size": vocab_size,
        "vocabulary": vocabulary,
        "limits": asdict(limits),
        "threads": options.threads,
        "sku": target.sku,
        "isa": target.instruction_set,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "source": [TAG, *_digest(*SOURCES)],
    }
    if "." in role:  # a fused draft has its width built in
        key["draft_width"] = DEFAULT_SHAPE.draft_width
    return WantedStep(role, checkpoint, limits, vocabulary, cache.entry(role, key))


def _compile(
    cache: StageCache, progress: Progress, options: BuildOptions, wanted: list[WantedStep], vocab_size: int
) -> list[CompiledStep]:
    """The artifacts, compiled now or kept from before; all models are read before the first is compiled."""
    missing = [step for step in wanted if not cache.has(step.entry)]
    models: dict[str, PreTrainedModel] = {}
    if missing:
        with progress.stage("read weights", 1 + sum(step.checkpoint.weight_bytes for step in missing) / 2e7):
            for step in missing:
                models[step.role] = load_model(step.checkpoint, getattr(torch, options.dtype))
    for step in wanted:
        name = f"export {step.role} ({step.checkpoint.name})"
        if step.role not in models:
            progress.reused(name)
            continue
        layers = step.checkpoint.config.get_text_config().num_hidden_layers
        expected = 25 + 3 * layers + 8 * (step.depth or 0)
        with progress.stage(name, expected, f"export {step.role} {options.dtype} {step.checkpoint.fingerprint[:16]}"):
            cache.fill(step.entry, partial(_export, options, step, models.pop(step.role), vocab_size))
    entries = {step.role: step.entry for step in wanted}
    return [_read_step(step, entries[step.role.split(".")[0]] / WEIGHTS_FILE) for step in wanted]


def _read_step(step: WantedStep, weights: Path) -> CompiledStep:
    record = json.loads((step.entry / RECORD_FILE).read_text())
    return CompiledStep(
        role=step.role,
        checkpoint=step.checkpoint,
        limits=step.limits,
        vocabulary=step.vocabulary,
        package=step.entry / PACKAGE_FILE,
        weights=weights,
        layouts=tuple(LayerLayout(**layout) for layout in record["layouts"]),
        hidden_size=record["hidden_size"],
    )


def _export(options: BuildOptions, wanted: WantedStep, model: PreTrainedModel, vocab_size: int, folder: Path) -> None:
    try:
        if wanted.role == "verify":
            step = export.verify_step(model, vocab_size, wanted.limits)
        else:
            step = export.draft_pass(model, vocab_size, wanted.limits, wanted.vocabulary)
        if wanted.depth is not None:
            step = export.fused_draft(step, DEFAULT_SHAPE.draft_width, wanted.depth)
        levels = affine_weights(wanted.checkpoint, model)
        program = lower_to_kernels(
            export.export_step(step), {f"model.{name}": weights for name, weights in levels.items()}
        )
        export.compile_step(program, folder / PACKAGE_FILE, options.threads, folder / "inductor")
        if wanted.depth is None:  # a fused draft uses the weights of the draft pass
            save_file(export.constants(program), folder / WEIGHTS_FILE)
    except YggError:
        raise
    except Exception as error:  # torch's exporters raise whatever their internals do
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise BuildError(
            f"{wanted.checkpoint.name} ({type(model).__name__}) cannot be compiled with torch {torch.__version__}: "
            f"{type(error).__name__}: {reason}"
        ) from error
    record = {
        "layouts": [asdict(layout) for layout in step.layouts],
        "hidden_size": model.config.get_text_config().hidden_size,
    }
    (folder / RECORD_FILE).write_text(json.dumps(record))


# ---- profile ----


def _profile(
    cache: StageCache, progress: Progress, options: BuildOptions, kernels: Path, steps: list[CompiledStep]
) -> Measured:
    """How fast the steps are, kept under what they are."""
    key: dict[str, object] = {
        "steps": [str(step.package.parent.name) for step in steps],
        "kernels": kernels.parent.name,
        "source": _digest(profile),
    }
    entry = cache.entry("profile", key)

    def measure(folder: Path) -> None:
        measured = profile.measure_steps(steps, kernels, getattr(torch, options.dtype), options.threads)
        (folder / "measured.json").write_text(json.dumps(asdict(measured)))

    if cache.has(entry):
        progress.reused("profile")
    else:
        with progress.stage("profile", 10):
            cache.fill(entry, measure)
    record = json.loads((entry / "measured.json").read_text())
    return Measured(
        tuple(LatencyPoint(**point) for point in record["curves"]),
        tuple(DraftGraph(**graph) for graph in record["draft_graphs"]),
    )
