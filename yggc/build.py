"""`yggc build`: inspect, export, profile, emit; each finished stage is kept and reused.

Invariant: the bundle is written beside its place and renamed into it, so it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from yggc import __version__, export, graphs, head_cut
from yggc.checkpoints import Checkpoint, load_model, open_checkpoint
from yggc.config import AUTO_DTYPE, DEFAULT_MAX_CONTEXT, DEFAULT_SHAPE, BuildOptions, fastest_dtype
from yggc.inspect import PairSpec, inspect_pair, preflight
from yggc.profile import PLAIN_WIDTHS, PROFILE_EXTENT, time_verify
from yggc.progress import Progress
from yggc.stage_cache import StageCache, cache_folder, place_folder, remove_abandoned
from yggrt import artifacts
from yggrt.artifacts import (
    STEP_ABI_VERSION,
    LayerLayout,
    Step,
    StepLimits,
    attention_windows,
    load_package,
    verify_inputs,
)
from yggrt.bundle import TOKENIZER_FILE
from yggrt.errors import BuildError, YggError
from yggrt.executor import PREFILL_WIDTH
from yggrt.kvcache import KvCache, rows_needed
from yggrt.plan import (
    MANIFEST_FILE,
    PLAN_FILE,
    Artifact,
    BundleFile,
    LatencyPoint,
    Manifest,
    ModelIdentity,
    ModelLayout,
    Plan,
    Provenance,
    TreePolicy,
    identity_table,
    sequential_schedule,
    write_manifest,
    write_plan,
)
from yggrt.target import Target, detect_target, piecewise_sha256, release
from yggrt.text import TextSpec

NUM_KNOTS = 65
PACKAGE_FILE = "step.pt2"
RECORD_FILE = "step.json"
SOURCES = (graphs, export, artifacts)  # a change in these makes kept artifacts worthless


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


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """A kept artifact of one model. layouts and hidden_size describe the model."""

    wanted: WantedStep
    layouts: tuple[LayerLayout, ...]
    hidden_size: int

    @property
    def package(self) -> Path:
        """The compiled file."""
        return self.wanted.entry / PACKAGE_FILE


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
    if options.dtype == AUTO_DTYPE:
        options = replace(options, dtype=fastest_dtype(target))
        progress.say(f"  {options.dtype}, what {target.sku} computes fastest; --dtype chooses another")

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
        _wanted_step(cache, target, options, drafter, "draft", pair.vocab_size, max_context, vocabulary),
    ]
    verify, draft = _compile(cache, progress, options, wanted, pair.vocab_size)
    curves = _profile(cache, progress, options, verify)
    plan = _make_plan(options, target, draft, verify, max_context, curves)
    with progress.stage("emit", 5):
        num_bytes = _emit(output, plan, target, verifier, pair, verify, draft)
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
            text = _text_spec(verifier)
            chosen = head_cut.choose_draft_vocabulary(model, verifier.tokenizer, text, vocab_size, drafter.context)
            (folder / "vocabulary.json").write_text(json.dumps(chosen))

        with progress.stage("cut the drafter's head", 10):
            cache.fill(entry, choose)
    chosen = json.loads((entry / "vocabulary.json").read_text())
    return None if chosen is None else tuple(chosen)


# ---- export ----


def _limits(max_context: int, context: int, vocab_size: int) -> StepLimits:
    shape = DEFAULT_SHAPE
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
        "source": [hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest() for module in SOURCES],
    }
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
        expected = 40 + 5 * step.checkpoint.config.get_text_config().num_hidden_layers
        with progress.stage(name, expected, f"export {step.role} {options.dtype} {step.checkpoint.fingerprint[:16]}"):
            cache.fill(step.entry, partial(_export, options, step, models.pop(step.role), vocab_size))
    return [_read_step(step) for step in wanted]


def _read_step(step: WantedStep) -> CompiledStep:
    record = json.loads((step.entry / RECORD_FILE).read_text())
    layouts = tuple(LayerLayout(**layout) for layout in record["layouts"])
    return CompiledStep(step, layouts, record["hidden_size"])


def _export(options: BuildOptions, wanted: WantedStep, model: PreTrainedModel, vocab_size: int, folder: Path) -> None:
    try:
        if wanted.role == "verify":
            step = export.verify_step(model, vocab_size, wanted.limits)
        else:
            step = export.draft_pass(model, vocab_size, wanted.limits, wanted.vocabulary)
        program = export.export_step(step)
        export.compile_step(program, folder / PACKAGE_FILE, options.threads, folder / "inductor")
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
    cache: StageCache, progress: Progress, options: BuildOptions, verify: CompiledStep
) -> tuple[LatencyPoint, ...]:
    """Seconds of the verifier's step by width: which of them decodes plainly the fastest."""
    entry = cache.entry(
        "profile", {"verify": verify.wanted.entry.name, "widths": PLAIN_WIDTHS, "extent": PROFILE_EXTENT}
    )
    if cache.has(entry):
        progress.reused("profile")
    else:
        with progress.stage("profile", 10):
            cache.fill(entry, lambda folder: _time_plain(folder, options, verify))
    return tuple(LatencyPoint(**point) for point in json.loads((entry / "curves.json").read_text()))


def _time_plain(folder: Path, options: BuildOptions, verify: CompiledStep) -> None:
    dtype = getattr(torch, options.dtype)
    limits = verify.wanted.limits
    inputs = verify_inputs(attention_windows(verify.layouts), limits, dtype)
    step = Step("verify", load_package(verify.package), inputs, limits)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        extent = min(PROFILE_EXTENT, limits.kv_rows - 1)
        points = time_verify(step, KvCache(verify.layouts, limits, dtype), PLAIN_WIDTHS, extent)
    finally:
        torch.set_num_threads(threads_before)
    (folder / "curves.json").write_text(json.dumps([asdict(point) for point in points]))


# ---- emit ----


def _identity(step: CompiledStep, dtype: str) -> ModelIdentity:
    layer, checkpoint = step.layouts[0], step.wanted.checkpoint
    return ModelIdentity(
        name=checkpoint.name,
        architecture=str(checkpoint.config.model_type),
        fingerprint=checkpoint.fingerprint,
        dtype=dtype,
        vocab_size=checkpoint.config.get_text_config().vocab_size,
        context=checkpoint.context,
        num_layers=len(step.layouts),
        hidden_size=step.hidden_size,
        num_key_value_heads=layer.num_heads,
        head_dim=layer.key_dim,
    )


def _make_plan(
    options: BuildOptions,
    target: Target,
    draft: CompiledStep,
    verify: CompiledStep,
    max_context: int,
    curves: tuple[LatencyPoint, ...],
) -> Plan:
    shape = DEFAULT_SHAPE
    children = draft.wanted.limits.num_children
    vocabulary = draft.wanted.vocabulary
    return Plan(
        sku=target.sku,
        target=target.kind,
        dtype=options.dtype,
        num_threads=options.threads,
        max_context=max_context,
        drafter=_identity(draft, options.dtype),
        verifier=_identity(verify, options.dtype),
        policy=TreePolicy(shape.draft_width, (shape.draft_depth,), (shape.verify_width,), children, vocabulary, shape),
        schedule=sequential_schedule(),
        acceptance_table=identity_table(children, NUM_KNOTS),
        plain_width=min(curves, key=lambda point: point.seconds).width,
        prediction=None,
        curves=curves,
        calibration=None,
        provenance=Provenance(__version__, str(torch.__version__), datetime.now(UTC).isoformat(timespec="seconds")),
    )


def _emit(
    output: Path,
    plan: Plan,
    target: Target,
    verifier: Checkpoint,
    pair: PairSpec,
    verify: CompiledStep,
    draft: CompiledStep,
) -> int:
    """Write the bundle beside its place, then rename it into it. Returns its size in bytes."""
    output = output.resolve()
    scratch = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    remove_abandoned(output.parent, re.escape(output.name))
    try:
        scratch.mkdir()
        compiled = tuple(_place_artifact(scratch, step) for step in (verify, draft))
        verifier.tokenizer.save(str(scratch / TOKENIZER_FILE))
        write_plan(scratch / PLAN_FILE, plan)
        manifest = Manifest(
            step_abi_version=STEP_ABI_VERSION,
            torch_version=release(torch.__version__),
            target=target.kind,
            architecture=target.architecture,
            instruction_set=target.instruction_set,
            sku=target.sku,
            num_threads=plan.num_threads,
            dtype=plan.dtype,
            max_context=plan.max_context,
            drafter=_layout(plan.drafter, draft, pair.vocab_size),
            verifier=_layout(plan.verifier, verify, pair.vocab_size),
            artifacts=compiled,
            files=tuple(_listed(scratch / name) for name in (PLAN_FILE, TOKENIZER_FILE)),
            text=_text_spec(verifier),
        )
        write_manifest(scratch, manifest)
        place_folder(scratch, output)
    except OSError as error:
        raise BuildError(f"the bundle cannot be written to {output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sum(entry.num_bytes for entry in manifest.artifacts) + sum(entry.num_bytes for entry in manifest.files)


def _place_artifact(folder: Path, step: CompiledStep) -> Artifact:
    role = step.wanted.role
    path = folder / f"{role}.pt2"
    shutil.copyfile(step.package, path)
    listed = _listed(path)
    return Artifact(role, listed.file, listed.num_bytes, listed.digest, step.wanted.limits)


def _listed(path: Path) -> BundleFile:
    return BundleFile(path.name, path.stat().st_size, piecewise_sha256(path))


def _layout(identity: ModelIdentity, step: CompiledStep, vocab_size: int) -> ModelLayout:
    return ModelLayout(identity.fingerprint, vocab_size, identity.hidden_size, identity.context, step.layouts)


def _text_spec(verifier: Checkpoint) -> TextSpec:
    special = verifier.special_tokens
    return TextSpec(
        chat_template=verifier.chat_template,
        bos_token=special.bos,
        eos_token=special.eos,
        unk_token=special.unk,
        pad_token=special.pad,
        eos_ids=verifier.eos_ids,
    )
