"""The plan and the bundle's manifest: every decision of a build as plain data, and its file format.

`plan.ygg` holds decisions, tables, curves and provenance, and fits every machine of one SKU. `bundle.ygg` says what the
compiled files of one bundle need and what they are. Both are frozen dataclasses that check themselves, so that what
was decoded, or built by hand, never holds an impossible tree, schedule, table or file name.

The names here, and those of TreeShape, StageSchedule, LatencyPoint, DepthNetwork, LayerLayout, StepLimits and TextSpec,
are the format: one that is added, dropped or renamed needs a new FORMAT_VERSION and a new fixture.
"""

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from yggrt import wire
from yggrt.artifacts import LOG_Q_MIN, LayerLayout, StepLimits
from yggrt.depth import DepthNetwork
from yggrt.errors import BundleFormatError, PlanFormatError
from yggrt.latency import LatencyPoint, StepTimes
from yggrt.sampling import GenerationSettings
from yggrt.schedule import COMPILED, STAGES, StageSchedule
from yggrt.text import TextSpec
from yggrt.tree import TreeShape, depths_to_fall_back_to

FORMAT_VERSION = 7
OLDEST_READABLE_VERSION = 7

PLAN_FILE = "plan.ygg"
MANIFEST_FILE = "bundle.ygg"

PLAN_FORMAT = wire.FileFormat("plan", b"YGGPLAN\0", FORMAT_VERSION, OLDEST_READABLE_VERSION, PlanFormatError)
MANIFEST_FORMAT = wire.FileFormat("bundle", b"YGGBNDL\0", FORMAT_VERSION, OLDEST_READABLE_VERSION, BundleFormatError)

TARGETS = ("cpu", "cuda")
DTYPES = ("bfloat16", "float16", "float32")
ROLES = ("verify", "draft")
"""Of an artifact; the role `draft.dN` is N draft passes fused into one graph."""


# ---- what a plan decides ----


@dataclass(frozen=True, slots=True)
class AcceptanceTable:
    """The calibrated a(rank, q): chance that a child is the verifier's choice, given that its parent is.

    rank is the child's place among its siblings (0 is the drafter's favourite), q the drafter's probability of it.
    Row r of `log_a` holds log a(r, q) at `num_knots` values of log q, evenly spaced from `log_q_min` to 0; between
    knots log a is linear in log q, and below `log_q_min` it stays at the first knot's value.

    log_a: row-major [num_ranks, num_knots], natural logs, finite and at most 0.
    """

    num_ranks: int
    num_knots: int
    log_q_min: float
    log_a: tuple[float, ...]

    def __post_init__(self) -> None:
        _require(self.num_ranks >= 1 and self.num_knots >= 2, "an acceptance table has at least 1 rank and 2 knots")
        _require(math.isfinite(self.log_q_min) and self.log_q_min < 0, f"log_q_min={self.log_q_min} must be below 0")
        _require(
            len(self.log_a) == self.num_ranks * self.num_knots,
            f"log_a has {len(self.log_a)} values instead of {self.num_ranks} ranks * {self.num_knots} knots",
        )
        wrong = [value for value in self.log_a if not (math.isfinite(value) and value <= 0)]
        _require(not wrong, f"log_a holds {wrong[:1]}, which is not the log of a chance")

    def log_acceptance(self, rank: int, log_q: float) -> float:
        """log a(rank, exp(log_q)): the reference for what the compiled draft pass computes."""
        _require(0 <= rank < self.num_ranks, f"rank {rank} is not one of the table's {self.num_ranks}")
        row = self.log_a[rank * self.num_knots : (rank + 1) * self.num_knots]
        place = (1 - max(min(log_q, 0.0), self.log_q_min) / self.log_q_min) * (self.num_knots - 1)
        knot = min(int(place), self.num_knots - 2)
        return row[knot] + (place - knot) * (row[knot + 1] - row[knot])


def identity_table(num_ranks: int, num_knots: int = 65, log_q_min: float = LOG_Q_MIN) -> AcceptanceTable:
    """The table that returns q itself (from exp(log_q_min) up), at every rank: what is used before a calibration."""
    row = tuple(log_q_min * (num_knots - 1 - knot) / (num_knots - 1) for knot in range(num_knots))
    return AcceptanceTable(num_ranks, num_knots, log_q_min, row * num_ranks)


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """Which trees may be grown and verified.

    draft_width:       W_d, nodes added by one draft pass.
    draft_depths:      menu of D_d, ascending; 0 is plain decoding and may be the only one.
    verify_widths:     menu of W_v, ascending, root included.
    children_per_node: K, best children an expanded node offers to the pool; at most as many as were compiled.
    draft_vocabulary:  tokens the drafter's cut head scores, ascending; None for all of them.
    default_shape:     used where nothing chooses per iteration.
    """

    draft_width: int
    draft_depths: tuple[int, ...]
    verify_widths: tuple[int, ...]
    children_per_node: int
    draft_vocabulary: tuple[int, ...] | None
    default_shape: TreeShape

    def __post_init__(self) -> None:
        _require_ascending("draft_depths", self.draft_depths, 0)
        _require_ascending("verify_widths", self.verify_widths, 1)
        _require(self.children_per_node >= 1, f"children_per_node={self.children_per_node} must be at least 1")
        largest = TreeShape(self.draft_width, self.draft_depths[-1], self.verify_widths[-1])
        default = self.default_shape
        _require(
            default.draft_width == largest.draft_width and default.draft_depth in self.draft_depths,
            f"default shape {default} is not on the menu of width {self.draft_width} and depths {self.draft_depths}",
        )
        _require(
            default.draft_depth == 0 or default.verify_width in self.verify_widths,
            f"default shape {default} is not on the menu of verify widths {self.verify_widths}",
        )
        if self.draft_vocabulary is not None:
            _require_ascending("draft_vocabulary", self.draft_vocabulary, 0)
            self._require_children_within(len(self.draft_vocabulary))

    @property
    def largest_shape(self) -> TreeShape:
        """The largest tree on the menu: what buffers are made for."""
        return TreeShape(self.draft_width, self.draft_depths[-1], self.verify_widths[-1])

    def require_vocabulary(self, vocab_size: int) -> None:
        """Raises ValueError where the policy does not fit a drafter of this vocabulary."""
        self._require_children_within(vocab_size)
        if self.draft_vocabulary is not None:
            last = self.draft_vocabulary[-1]
            _require(last < vocab_size, f"draft_vocabulary holds {last}; the drafter has {vocab_size} tokens")

    def _require_children_within(self, num_tokens: int) -> None:
        _require(
            self.children_per_node <= num_tokens,
            f"children_per_node={self.children_per_node} exceeds the {num_tokens} tokens of the drafter's vocabulary",
        )


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a stage takes, measured: a mean without the outermost tenths.

    cores:        of its lane; 0 for a stage that runs nothing compiled.
    verify_width, looks_ahead: of the schedules that it was measured with, see `yggrt.schedule.StageSchedule`.
    """

    stage: str
    cores: int
    verify_width: int | None
    looks_ahead: bool
    seconds: float

    def __post_init__(self) -> None:
        _require_member("stage", self.stage, STAGES)
        _require(self.cores >= 0 and self.seconds >= 0, f"stage {self.stage}: {self.seconds} s on {self.cores} cores")


@dataclass(frozen=True, slots=True)
class TriedSchedule:
    """A schedule that was run: seconds of an iteration by the stages' times, and measured, with what that may be off by
    against the others (two standard errors, over turns in which all of them were run)."""

    schedule: StageSchedule
    tokens_per_iteration: float
    predicted_s: float
    measured_s: float
    error_s: float

    def __post_init__(self) -> None:
        _require(self.tokens_per_iteration >= 1, f"{self.tokens_per_iteration} tokens per iteration; at least 1 comes")
        _require(min(self.predicted_s, self.measured_s) > 0 and self.error_s >= 0, "seconds of a schedule are above 0")

    @property
    def token_s(self) -> float:
        """Measured seconds per token."""
        return self.measured_s / self.tokens_per_iteration


@dataclass(frozen=True, slots=True)
class ScheduleStudy:
    """How the schedule was chosen.

    times:         of stages, by the cores they had.
    handoff_s:     what it takes one lane to see that another has come so far.
    tail_hits, hits: share of iterations whose next root would be guessed rightly, with the tail draft and without.
    tried:         those that were run, the fastest predicted first; the plan's own among them.
    """

    times: tuple[StageTime, ...]
    handoff_s: float
    tail_hits: float
    hits: float
    tried: tuple[TriedSchedule, ...]

    def __post_init__(self) -> None:
        _require(self.handoff_s >= 0, f"handoff_s={self.handoff_s} must be at least 0")
        shares = (self.tail_hits, self.hits)
        _require(min(shares) >= 0 and max(shares) <= 1, f"hit rates of {shares} are not shares")

    def seconds(self, schedule: StageSchedule) -> dict[str, float]:
        """By stage, on the cores that the schedule gives it. Raises KeyError for a stage that was not measured so."""
        return seconds_of(self.times, schedule)


def seconds_of(times: tuple[StageTime, ...], schedule: StageSchedule) -> dict[str, float]:
    """By stage of a schedule, on its cores and in its way. Raises KeyError for one that was not measured so."""
    way = (schedule.verify_width, schedule.looks_ahead)
    known = {(time.stage, time.cores): time.seconds for time in times if (time.verify_width, time.looks_ahead) == way}
    return {
        stage.name: known[stage.name, schedule.lanes[stage.lane] if stage.name in COMPILED else 0]
        for stage in schedule.stages
    }


# ---- what a plan was made for, and from ----


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """One model of the pair, as the plan's decisions depend on it.

    fingerprint: sha256, hex, over the checkpoint's configuration, weights and tokenizer.
    dtype:       of the weights as they run. vocab_size: rows of the output layer, padding included.
    context:     positions the model can attend to.
    """

    name: str
    architecture: str
    fingerprint: str
    dtype: str
    vocab_size: int
    context: int
    num_layers: int
    hidden_size: int
    num_key_value_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _require(bool(self.name) and bool(self.architecture), "a model needs a name and an architecture")
        _require_sha256("fingerprint", self.fingerprint)
        _require_member("dtype", self.dtype, DTYPES)
        for name in ("vocab_size", "context", "num_layers", "hidden_size", "num_key_value_heads", "head_dim"):
            _require(getattr(self, name) >= 1, f"model {self.name}: {name}={getattr(self, name)} must be at least 1")


@dataclass(frozen=True, slots=True)
class HostSeconds:
    """Time of an iteration outside compiled steps, by kind."""

    plain_s: float
    speculative_s: float

    def __post_init__(self) -> None:
        _require(min(self.plain_s, self.speculative_s) >= 0, "host seconds start at 0")


@dataclass(frozen=True, slots=True)
class DraftGraph:
    """How trees of one depth are drafted: pass by pass, or by one graph with all passes fused, and what each took.

    passes_s, fused_s: measured seconds of a whole draft, medians.
    """

    depth: int
    fused: bool
    passes_s: float
    fused_s: float

    def __post_init__(self) -> None:
        _require(self.depth >= 1, f"a draft of depth {self.depth}")
        _require(min(self.passes_s, self.fused_s) > 0, f"draft of depth {self.depth}: a measured time is above 0")


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the search expects on text like the calibration's held-out part, with the runtime's own choices.

    tpot_s, plain_tpot_s: seconds per output token, speculatively and plainly.
    tokens_per_iteration: tokens per verifier call, plain iterations included.
    """

    tpot_s: float
    plain_tpot_s: float
    tokens_per_iteration: float

    def __post_init__(self) -> None:
        _require(self.tpot_s > 0 and self.plain_tpot_s > 0, "a predicted time per token must be above 0")
        _require(self.tokens_per_iteration >= 1, f"{self.tokens_per_iteration} tokens per iteration; at least 1 comes")

    @property
    def speedup(self) -> float:
        """Plain over speculative seconds per token."""
        return self.plain_tpot_s / self.tpot_s


@dataclass(frozen=True, slots=True)
class SampledPolicy:
    """A way to draft at a temperature above 0.

    chosen: whether requests are drafted so, those whose temperature is nearest to this one.
    draws:  whether children are drawn, and the tree is traversed; else they are the drafter's favourites, through which
            the verifier's own draws walk.
    shape:  of the trees; depth 0 is plain decoding. verify_widths: menu of W_v, a single one for trees that are drawn.
    table:  by rank and log q for favourites; by place and minus the entropy of the drafter's law for drawn children.
    copied_log_a: as the plan's; empty for trees that are drawn, which hold nothing else.
    host:   measured at this temperature. token_s: 1 / lambda. prediction: as the plan's.
    """

    temperature: float
    chosen: bool
    draws: bool
    shape: TreeShape
    verify_widths: tuple[int, ...]
    children_per_node: int
    table: AcceptanceTable
    copied_log_a: tuple[float, ...]
    host: HostSeconds
    token_s: float
    prediction: Prediction

    def __post_init__(self) -> None:
        _require(math.isfinite(self.temperature) and self.temperature > 0, f"a temperature of {self.temperature}")
        _require(self.token_s > 0, f"token_s={self.token_s} must be above 0")
        _require(
            not self.draws or len(self.verify_widths) == 1,
            f"trees that are drawn have one verify width, not the menu {self.verify_widths!s:.80}",
        )
        _require(not (self.draws and self.copied_log_a), "copied_log_a is given for trees that are drawn")
        _require_rates(self.copied_log_a)
        self.trees(None)

    def trees(self, draft_vocabulary: tuple[int, ...] | None) -> TreePolicy:
        """The trees it may grow."""
        depths = depths_to_fall_back_to(self.shape.draft_depth)
        return TreePolicy(
            self.shape.draft_width, depths, self.verify_widths, self.children_per_node, draft_vocabulary, self.shape
        )


@dataclass(frozen=True, slots=True)
class DepthFigures:
    """Ways to choose the draft depth, simulated on the calibration's held-out part.

    fixed_depth:      the depth that is best there when it never changes.
    fixed, confident, learned, oracle: speed over plain decoding with that depth; stopping when the drafter is unsure;
                      by the depth network; knowing what will be accepted.
    promised, emitted: tokens per iteration that the network expected of its choices, and what came.
    """

    fixed_depth: int
    fixed: float
    confident: float
    learned: float
    oracle: float
    promised: float
    emitted: float

    def __post_init__(self) -> None:
        _require(self.fixed_depth >= 0, f"a fixed depth of {self.fixed_depth}")
        speeds = (self.fixed, self.confident, self.learned, self.oracle, self.promised, self.emitted)
        _require(min(speeds) > 0, "depth figures are above 0")


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """The text that the tables were estimated from.

    name:        of the prompts file; sha256: of its content.
    num_prompts: the held-out ones included.
    num_tokens:  the verifier wrote on them.
    """

    name: str
    sha256: str
    num_prompts: int
    num_tokens: int

    def __post_init__(self) -> None:
        _require_sha256("calibration sha256", self.sha256)
        _require(self.num_prompts >= 1 and self.num_tokens >= 1, "a calibration has at least one prompt and token")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Who made the plan, advisory. created: ISO 8601 with a UTC offset."""

    yggc_version: str
    torch_version: str
    created: str

    def __post_init__(self) -> None:
        try:
            moment = datetime.fromisoformat(self.created)
        except ValueError:
            moment = None
        _require(moment is not None and moment.tzinfo is not None, f"created={self.created!r} is not an ISO 8601 time")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a build decided for one pair on one SKU.

    sku, target, dtype, num_threads: the machine and the number format it was made for; see yggrt.target.
    max_context: positions a request may reach, prompt included.
    schedule_study: what the schedule was chosen by; None where nothing was tried.
    copied_log_a: by how many of a text's last tokens stood there before, from 1: log of how often what followed them
                 then is the verifier's choice now; see `yggrt.copying`. Empty where nothing is copied.
    plain_width: rows of the verify step that decodes plainly the fastest; all but one are padding.
    draft_graphs: by depth, ascending; depths that are not named are drafted pass by pass.
    curves:      measured steps: `verify` by width, drafts by width and depth, each at several extents.
    host:        measured beside them.
    token_s:     1 / lambda, seconds a token is worth where depth and verify width are chosen per iteration; None where
                 the default shape is always used.
    depth_network: chooses the depth of each iteration; None where it is fixed.
    depth_figures: what it was compared by; None where nothing was learned.
    sampled:     ways to draft above temperature 0, by ascending temperature, of which one is chosen at each; none where
                 requests are answered there as at 0.
    calibration, prediction: None where nothing was calibrated.
    """

    sku: str
    target: str
    dtype: str
    num_threads: int
    max_context: int
    drafter: ModelIdentity
    verifier: ModelIdentity
    policy: TreePolicy
    schedule: StageSchedule
    schedule_study: ScheduleStudy | None
    acceptance_table: AcceptanceTable
    copied_log_a: tuple[float, ...]
    plain_width: int
    draft_graphs: tuple[DraftGraph, ...]
    curves: tuple[LatencyPoint, ...]
    host: HostSeconds
    token_s: float | None
    depth_network: DepthNetwork | None
    depth_figures: DepthFigures | None
    sampled: tuple[SampledPolicy, ...]
    calibration: CalibrationRecord | None
    prediction: Prediction | None
    provenance: Provenance

    def __post_init__(self) -> None:
        _require_member("target", self.target, TARGETS)
        _require_member("dtype", self.dtype, DTYPES)
        _require(bool(self.sku), "a plan names its SKU")
        _require(self.num_threads >= 1, f"num_threads={self.num_threads} must be at least 1")
        _require(self.plain_width >= 1, f"plain_width={self.plain_width} must be at least 1")
        _require(
            1 <= self.max_context <= self.verifier.context,
            f"max_context={self.max_context} is not within the verifier's context of {self.verifier.context}",
        )
        depths = tuple(graph.depth for graph in self.draft_graphs)
        if depths:
            _require_ascending("depths of draft_graphs", depths, 1)
            unknown = sorted(set(depths) - set(self.policy.draft_depths))
            _require(not unknown, f"draft_graphs names depths {unknown!s:.80}, which are not on the menu")
        self.policy.require_vocabulary(self.drafter.vocab_size)
        if self.token_s is not None:
            _require(self.token_s > 0, f"token_s={self.token_s} must be above 0")
            _require_curves(self.curves, self.policy)
        warmth = [each.temperature for each in self.sampled]
        chosen = [each.temperature for each in self.sampled if each.chosen]
        _require(warmth == sorted(warmth), f"the temperatures of sampled are not ascending: {warmth!s:.80}")
        _require(chosen == sorted(set(warmth)), f"of sampled, one is chosen at each temperature, not at {chosen!s:.80}")
        _require(not warmth or self.token_s is not None, "sampled needs token_s, what a token is worth")
        for each in self.sampled:
            trees = each.trees(self.policy.draft_vocabulary)
            trees.require_vocabulary(self.drafter.vocab_size)
            _require_curves(self.curves, trees)
            _require_table(each.table, trees)
        if self.depth_network is not None:
            _require_depths(self.depth_network, self)
        _require_schedule(self)
        _require_table(self.acceptance_table, self.policy)
        _require_rates(self.copied_log_a)


def encode_plan(plan: Plan) -> bytes:
    return wire.encode(PLAN_FORMAT, plan)


def decode_plan(data: bytes) -> Plan:
    """Raises PlanFormatError for whatever is wrong with the bytes."""
    return wire.decode(PLAN_FORMAT, Plan, data)


def read_plan(path: Path) -> Plan:
    """Raises PlanFormatError, naming the path."""
    return wire.read_file(PLAN_FORMAT, Plan, path)


def write_plan(path: Path, plan: Plan) -> None:
    """Atomic: the file is the old one or the whole new one. Raises OSError."""
    wire.write_atomically(path, encode_plan(plan))


# ---- what a bundle holds and needs ----


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What the runtime must know of a model to feed its artifacts.

    fingerprint: as in the plan's ModelIdentity.
    layers:      what each layer keeps in the KV cache, first layer first.
    """

    fingerprint: str
    vocab_size: int
    hidden_size: int
    context: int
    layers: tuple[LayerLayout, ...]

    def __post_init__(self) -> None:
        _require_sha256("fingerprint", self.fingerprint)
        _require(min(self.vocab_size, self.hidden_size, self.context) >= 1, "a model's sizes start at 1")
        _require(len(self.layers) >= 1, "a model has at least one layer")
        for layer in self.layers:
            sizes = (layer.num_heads, layer.key_dim, layer.value_dim, 1 if layer.window is None else layer.window)
            _require(min(sizes) >= 1, "heads, dimensions and window of a layer start at 1")


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled file and the static sizes it was compiled with; the runtime checks every call against them.

    digest:  see yggrt.target.piecewise_sha256.
    weights: file of the bundle that holds its constants; artifacts of one model share it.
    role:    `verify`, `draft`; `verify.wN` runs N rows alone, `draft.dN` N passes at once.
    """

    role: str
    file: str
    num_bytes: int
    digest: str
    limits: StepLimits
    weights: str

    def __post_init__(self) -> None:
        is_special = re.fullmatch(r"draft\.d[1-9][0-9]{0,2}|verify\.w[1-9][0-9]{0,3}", self.role) is not None
        _require(
            is_special or self.role in ROLES,
            f"unknown artifact role {self.role!r:.80}; known: verify, verify.wN, draft, draft.dN",
        )
        _require_file(self.file, self.num_bytes, self.digest)


@dataclass(frozen=True, slots=True)
class BundleFile:
    """Another file of the bundle: plan, tokenizer, weights, kernels. digest: see yggrt.target.piecewise_sha256."""

    file: str
    num_bytes: int
    digest: str

    def __post_init__(self) -> None:
        _require_file(self.file, self.num_bytes, self.digest)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle is made of and what it needs; fatal where it does not fit, see yggrt.target.

    torch_version:   major.minor.patch; compiled code is bound to it.
    architecture:    `x86_64`, `aarch64`, or a compute capability such as `sm_90`.
    instruction_set: CPU features the compiled code uses, of yggrt.target's names.
    num_threads:     the compiled loops were split for.
    driver:          version of the GPU's driver, advisory; empty for the CPU.
    generation:      the verifier's own settings, applied on request.
    kernels:         file of the library that the artifacts call; None for a GPU.
    """

    step_abi_version: int
    torch_version: str
    target: str
    architecture: str
    instruction_set: tuple[str, ...]
    sku: str
    num_threads: int
    dtype: str
    max_context: int
    drafter: ModelLayout
    verifier: ModelLayout
    artifacts: tuple[Artifact, ...]
    files: tuple[BundleFile, ...]
    driver: str
    kernels: str | None
    text: TextSpec
    generation: GenerationSettings

    def __post_init__(self) -> None:
        _require_member("target", self.target, TARGETS)
        _require_member("dtype", self.dtype, DTYPES)
        _require(bool(self.sku) and bool(self.architecture), "a bundle names its SKU and architecture")
        _require(self.num_threads >= 1, f"num_threads={self.num_threads} must be at least 1")
        _require(
            1 <= self.max_context <= self.verifier.context,
            f"max_context={self.max_context} is not within the verifier's context of {self.verifier.context}",
        )
        names = [artifact.file for artifact in self.artifacts] + [entry.file for entry in self.files]
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        _require(not twice, f"a bundle lists twice: {', '.join(twice):.200}")
        _require(MANIFEST_FILE not in names, f"{MANIFEST_FILE} lists itself")
        needed = {artifact.weights for artifact in self.artifacts}
        _require(
            (self.kernels is None) == (self.target != "cpu"), "a bundle for the CPU names its kernels, no other does"
        )
        if self.kernels is not None:
            needed.add(self.kernels)
        missing = sorted(needed - {entry.file for entry in self.files})
        _require(not missing, f"the files of the bundle lack {', '.join(missing):.200}")
        roles = [artifact.role for artifact in self.artifacts]
        _require(len(set(roles)) == len(roles), f"a bundle has two artifacts of one role: {', '.join(roles):.200}")
        _require("verify" in roles, "a bundle needs an artifact of the role verify")


def encode_manifest(manifest: Manifest) -> bytes:
    return wire.encode(MANIFEST_FORMAT, manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Raises BundleFormatError for whatever is wrong with the bytes."""
    return wire.decode(MANIFEST_FORMAT, Manifest, data)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle folder. Raises BundleFormatError, naming the path."""
    if not os.path.isfile(folder / MANIFEST_FILE):  # unlike Path's, false for a name that no file can have
        raise BundleFormatError(f"{folder} is not a bundle: it has no {MANIFEST_FILE}. Build one with yggc build.")
    return wire.read_file(MANIFEST_FORMAT, Manifest, folder / MANIFEST_FILE)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Atomic; written last, it makes the folder a bundle. Raises OSError."""
    wire.write_atomically(folder / MANIFEST_FILE, encode_manifest(manifest))


# ---- rules ----


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _require_member(noun: str, value: str, members: tuple[str, ...]) -> None:
    _require(value in members, f"unknown {noun} {value!r:.80}; known: {', '.join(members)}")


def _require_ascending(name: str, values: tuple[int, ...], smallest: int) -> None:
    _require(
        len(values) >= 1 and values[0] >= smallest and all(a < b for a, b in zip(values, values[1:], strict=False)),
        f"{name} must be ascending, from {smallest} or more, and not empty; found {str(values):.80}",
    )


def _require_curves(curves: tuple[LatencyPoint, ...], policy: TreePolicy) -> None:
    """Whether every tree of the policy has a price."""
    widths = sorted({point.width for point in curves if point.role == "verify"})
    _require(bool(widths), "token_s is given, but the curves hold no verify step")
    _require(
        policy.verify_widths[-1] <= widths[-1],
        f"the verify width {policy.verify_widths[-1]} is on the menu, the curves end at {widths[-1]}",
    )
    if policy.draft_depths[-1] > 0:
        StepTimes(curves).draft_s(policy.draft_width, policy.draft_depths[-1], 1)


def _require_table(table: AcceptanceTable, policy: TreePolicy) -> None:
    """Whether the draft pass can use a table, and it speaks of all children."""
    _require(
        math.isclose(table.log_q_min, LOG_Q_MIN),
        f"the acceptance table starts at log q = {table.log_q_min}; the draft pass at {LOG_Q_MIN}",
    )
    _require(
        policy.children_per_node <= table.num_ranks,
        f"children_per_node={policy.children_per_node} exceeds the {table.num_ranks} ranks of the acceptance table",
    )


def _require_rates(copied_log_a: tuple[float, ...]) -> None:
    wrong = [value for value in copied_log_a if not (math.isfinite(value) and value < 0)]
    _require(not wrong, f"copied_log_a holds {wrong[:1]}, which is not the log of a chance below 1")


def _require_depths(network: DepthNetwork, plan: Plan) -> None:
    """Whether a depth network fits its plan."""
    unknown = sorted(set(network.depths) - set(plan.policy.draft_depths))
    _require(not unknown, f"the depth network speaks of depths {unknown!s:.80}, which are not on the menu")
    _require(plan.token_s is not None, "a depth network needs token_s, what a token is worth")
    _require(
        network.hidden_size == plan.verifier.hidden_size,
        f"the depth network reads {network.hidden_size} features, the verifier gives {plan.verifier.hidden_size}",
    )


def _require_schedule(plan: Plan) -> None:
    """Whether a schedule fits its plan. That it is sound in itself, it has checked."""
    schedule, policy = plan.schedule, plan.policy
    cores = sum(schedule.lanes)
    _require(cores <= plan.num_threads, f"the schedule's lanes have {cores} cores, the plan {plan.num_threads} threads")
    learned = plan.depth_network is not None
    _require(learned == schedule.has("depth"), "the stage depth is there where a depth network is, and only there")
    width = schedule.verify_width
    _require(
        width is None or width in policy.verify_widths,
        f"the schedule's verify width {width} is not on the menu {policy.verify_widths}",
    )
    if plan.schedule_study is not None:
        tried = [each.schedule for each in plan.schedule_study.tried]
        _require(schedule in tried, "the schedule is not among those that were tried")
        try:
            for each in tried:
                plan.schedule_study.seconds(each)
        except KeyError as missing:
            raise ValueError(f"schedule_study has no time for the stage and cores {missing}") from None


def _require_sha256(noun: str, digest: str) -> None:
    is_sha256 = re.fullmatch(r"[0-9a-f]{64}", digest) is not None
    _require(is_sha256, f"{noun} {digest!r:.80} is not a sha256 in lower-case hex")


def _require_file(file: str, num_bytes: int, digest: str) -> None:
    """A bare name only: a bundle never reaches outside its own folder."""
    _require(
        re.fullmatch(r"[A-Za-z0-9_+][A-Za-z0-9._+-]{0,199}", file) is not None and ".." not in file,
        f"{file!r:.80} is not a bare file name of letters, digits, '.', '_', '+' and '-'",
    )
    _require(num_bytes >= 0, f"{file} has {num_bytes} bytes")
    _require_sha256(f"digest of {file}", digest)
