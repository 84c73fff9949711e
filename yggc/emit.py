"""The last stage of a build: the plan, and the bundle that holds it.

Invariant: the bundle is written beside its place and renamed into it, so it is complete or absent.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from yggc import __version__
from yggc.checkpoints import Checkpoint
from yggc.config import BuildOptions
from yggc.decide import ChosenSchedule, Decision, Forecast
from yggc.depth_onnx import ONNX_FILE, write_onnx
from yggc.profile import plain_width
from yggc.stage_cache import place_folder, remove_abandoned
from yggc.steps import KERNELS_FILE, CompiledStep
from yggc.text_files import generation_settings
from yggc.train_depth import DepthStudy
from yggrt.artifacts import STEP_ABI_VERSION
from yggrt.bundle import TOKENIZER_FILE
from yggrt.errors import BuildError
from yggrt.plan import (
    PLAN_FILE,
    Artifact,
    BundleFile,
    CalibrationRecord,
    HostSeconds,
    Manifest,
    ModelIdentity,
    ModelLayout,
    Plan,
    Prediction,
    Provenance,
    SampledPolicy,
    write_manifest,
    write_plan,
)
from yggrt.schedule import StageSchedule, sequential_schedule
from yggrt.target import Target, piecewise_sha256, release
from yggrt.text import TextSpec


def make_plan(
    options: BuildOptions,
    target: Target,
    steps: Sequence[CompiledStep],
    pair: tuple[Checkpoint, Checkpoint],
    max_context: int,
    decision: Decision,
    study: DepthStudy | None,
    forecast: Forecast,
    host: HostSeconds,
    calibration: CalibrationRecord,
    chosen: ChosenSchedule,
    sampled: tuple[SampledPolicy, ...],
) -> Plan:
    """The decisions of a build, with the measurements they rest on. pair: drafter and verifier; study: of the depth."""
    verify, draft = steps[:2]
    policy = decision.policy
    network = None if study is None else study.network
    return Plan(
        sku=target.sku,
        target=target.kind,
        dtype=options.dtype,
        num_threads=options.threads,
        max_context=max_context,
        drafter=_identity(draft, pair[0], options.dtype),
        verifier=_identity(verify, pair[1], options.dtype),
        policy=policy,
        schedule=chosen.schedule,
        schedule_study=chosen.study,
        acceptance_table=decision.table,
        copied_log_a=decision.copied_log_a,
        plain_width=plain_width(forecast.points),
        draft_graphs=forecast.draft_graphs,
        curves=forecast.points,
        host=host,
        token_s=decision.token_s,
        depth_network=network,
        depth_figures=None if study is None else study.figures,
        sampled=sampled,
        calibration=calibration,
        prediction=_predicted(forecast.prediction, chosen, sequential_schedule(options.threads, network is not None)),
        provenance=Provenance(__version__, str(torch.__version__), datetime.now(UTC).isoformat(timespec="seconds")),
    )


def _predicted(prediction: Prediction, chosen: ChosenSchedule, sequential: StageSchedule) -> Prediction:
    """The forecast, which is of the sequential schedule, with what the stages' times say that the chosen one saves."""
    if chosen.study is None:
        return prediction
    token_s = {each.schedule: each.predicted_s / each.tokens_per_iteration for each in chosen.study.tried}
    return replace(prediction, tpot_s=prediction.tpot_s * token_s[chosen.schedule] / token_s[sequential])


def emit_bundle(
    output: Path,
    plan: Plan,
    target: Target,
    verifier: Checkpoint,
    vocab_size: int,
    steps: list[CompiledStep],
    kernels: Path | None,
) -> int:
    """Write the bundle beside its place, then rename it into it. Returns its size in bytes.

    steps: `verify` and `draft`, then those that use their weights. kernels: None but for the CPU.
    """
    output = output.resolve()
    scratch = output.with_name(f".{output.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    remove_abandoned(output.parent, re.escape(output.name))
    verify, draft = steps[:2]
    try:
        scratch.mkdir()
        artifacts = tuple(_place_artifact(scratch, step) for step in steps)
        for step in (verify, draft):
            assert step.weights is not None
            shutil.copyfile(step.weights, scratch / _weights_file(step.role))
        verifier.tokenizer.save(str(scratch / TOKENIZER_FILE))
        write_plan(scratch / PLAN_FILE, plan)
        others = [PLAN_FILE, TOKENIZER_FILE, *(_weights_file(step.role) for step in (verify, draft))]
        if kernels is not None:
            shutil.copyfile(kernels, scratch / KERNELS_FILE)
            others.append(KERNELS_FILE)
        if plan.depth_network is not None:
            write_onnx(scratch / ONNX_FILE, plan.depth_network)
            others.append(ONNX_FILE)
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
            drafter=_layout(plan.drafter, draft, vocab_size),
            verifier=_layout(plan.verifier, verify, vocab_size),
            artifacts=artifacts,
            files=tuple(_listed(scratch / name) for name in others),
            driver=target.driver,
            kernels=None if kernels is None else KERNELS_FILE,
            text=text_spec(verifier),
            generation=generation_settings(verifier.generation_defaults),
        )
        write_manifest(scratch, manifest)
        place_folder(scratch, output)
    except OSError as error:
        raise BuildError(f"the bundle cannot be written to {output}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return sum(entry.num_bytes for entry in manifest.artifacts) + sum(entry.num_bytes for entry in manifest.files)


def text_spec(verifier: Checkpoint) -> TextSpec:
    """How the verifier's text is encoded and where it ends."""
    special = verifier.special_tokens
    return TextSpec(
        chat_template=verifier.chat_template,
        bos_token=special.bos,
        eos_token=special.eos,
        unk_token=special.unk,
        pad_token=special.pad,
        eos_ids=verifier.eos_ids,
    )


def _identity(step: CompiledStep, checkpoint: Checkpoint, dtype: str) -> ModelIdentity:
    layer = step.layouts[0]
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


def _weights_file(role: str) -> str:
    return f"{role.split('.')[0]}.weights"


def _place_artifact(folder: Path, step: CompiledStep) -> Artifact:
    path = folder / f"{step.role}.pt2"
    shutil.copyfile(step.package, path)
    listed = _listed(path)
    return Artifact(step.role, listed.file, listed.num_bytes, listed.digest, step.limits, _weights_file(step.role))


def _listed(path: Path) -> BundleFile:
    return BundleFile(path.name, path.stat().st_size, piecewise_sha256(path))


def _layout(identity: ModelIdentity, step: CompiledStep, vocab_size: int) -> ModelLayout:
    return ModelLayout(identity.fingerprint, vocab_size, identity.hidden_size, identity.context, step.layouts)
