"""`yggc build`: inspect, head cut, kernels, compile, profile, calibrate, search, train depth, emit, report.

Each finished stage is kept and reused; a stage that needs another one runs it first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from yggc import (
    calibrate,
    decide,
    head_cut,
    profile,
    schedule,
    search_tree,
    simulate,
    stages,
    steps,
    temperatures,
    trace,
    train_depth,
)
from yggc.checkpoints import Checkpoint, load_model, open_checkpoint
from yggc.config import COMPILE_OPTIONS, DEFAULT_MAX_CONTEXT, MEASURED, SIZES, BuildOptions, Sizes
from yggc.decide import ChosenSchedule, Decision, Forecast, SampledPolicies, TriedTree
from yggc.emit import emit_bundle, make_plan, text_spec
from yggc.inspect import PairSpec, inspect_pair, preflight
from yggc.profile import LatencyProfile, Timing, wait_until_idle
from yggc.progress import Progress
from yggc.self_check import BOUNDS
from yggc.sources import remember_source
from yggc.stage_cache import StageCache, cache_folder
from yggc.steps import (
    CompiledStep,
    PairLoader,
    WantedStep,
    compile_kernels_once,
    compile_steps,
    load_engine,
    wanted_step,
)
from yggc.trace import CalibrationTrace, PromptSet, make_trace, read_prompt_set, read_trace, shipped_prompts
from yggc.train_depth import DepthStudy
from yggc.versions import check_versions
from yggrt import accept, copying, depth, executor, lanes, latency, pace, sampling, wire
from yggrt import schedule as rt_schedule
from yggrt.artifacts import Step
from yggrt.bundle import table_tensor
from yggrt.cuda import unverified
from yggrt.engine import Engine
from yggrt.errors import ArtifactError, BuildError, PairError
from yggrt.plan import MANIFEST_FILE, CalibrationRecord, Plan, SampledPolicy, TreePolicy, read_plan
from yggrt.target import Target, detect_target

PROFILE_FORMAT = wire.FileFormat("profile", b"YGGPROF\0", 1, 1, BuildError)
SAMPLED_FORMAT = wire.FileFormat("sampled policies", b"YGGSMPL\0", 1, 1, BuildError)
SCHEDULE_FORMAT = wire.FileFormat("schedule", b"YGGSCHD\0", 1, 1, BuildError)
FORECAST_FORMAT = wire.FileFormat("forecast", b"YGGFCST\0", 1, 1, BuildError)
DEPTH_FORMAT = wire.FileFormat("depth network", b"YGGDPTH\0", 1, 1, BuildError)
DECISION_FORMAT = wire.FileFormat("search result", b"YGGSRCH\0", 1, 1, BuildError)


@dataclass(frozen=True, slots=True)
class BuildReport:
    """What a build made.

    num_bytes: size of the bundle. tried, study: of the search and the depth; empty and None where a plan was given.
    """

    output: Path
    plan: Plan
    num_bytes: int
    notices: tuple[str, ...]
    tried: tuple[TriedTree, ...]
    study: DepthStudy | None


def build(options: BuildOptions, progress: Progress) -> BuildReport:
    """Compile a pair into a bundle.

    Raises a YggError in one line when the pair, a checkpoint or this machine does not allow it.
    """
    return Build(options, progress).emit()


class Build:
    """One build; its stages run when they are asked for."""

    def __init__(self, options: BuildOptions, progress: Progress) -> None:
        check_versions()
        self.given = None if options.plan is None else read_plan(options.plan)
        self.options = options if self.given is None else _options_of(self.given, options)
        self.progress = progress
        self.cache = StageCache(cache_folder())
        self.target: Target = detect_target(self.options.target)
        self.notices: list[str] = []
        if self.options.prompts is not None:
            _ = self.prompts  # what is wrong with them is said before minutes are spent

    # ---- the pair ----

    @cached_property
    def pair(self) -> PairSpec:
        with self.progress.stage("inspect", 3):
            pair = inspect_pair(self.drafter, self.verifier)
            place = self.output.resolve().parent
            place = place if place.is_dir() else self.cache.root
            preflight(pair, self.options.dtype, place, self.cache.root, self.target.device)
        for checkpoint in (self.drafter, self.verifier):
            remember_source(self.cache.root, checkpoint.fingerprint, checkpoint.source)
        for notice in [*pair.notices, *unverified(self.target.kind, self.target.sku)]:
            self._notice(notice)
        if self.given is not None:
            _check_plan(self.given, self.drafter, self.verifier)
            if self.given.sku != self.target.sku:
                self._notice(f"the plan was made for {self.given.sku}; this machine is {self.target.sku}")
        return pair

    @cached_property
    def drafter(self) -> Checkpoint:
        return open_checkpoint(self.options.drafter)

    @cached_property
    def verifier(self) -> Checkpoint:
        return open_checkpoint(self.options.verifier)

    @property
    def output(self) -> Path:
        return self.options.output or Path(f"{self.drafter.name}+{self.verifier.name}.bundle")

    @property
    def max_context(self) -> int:
        wanted, most = self.options.max_context, self.verifier.context
        if wanted is None:
            return min(most, DEFAULT_MAX_CONTEXT)
        if wanted > most:
            raise ValueError(f"max-context {wanted}: the verifier's context of {most} is the most")
        return wanted

    def _notice(self, notice: str) -> None:
        self.notices.append(notice)
        self.progress.say(f"  note: {notice}")

    def _kept(self, entry: Path, name: str, expected_s: float, run: Callable[[Path], None]) -> Path:
        """Run a stage, or reuse what it left before."""
        if self.cache.has(entry):
            self.progress.reused(name)
        else:
            with self.progress.stage(name, expected_s):
                self.cache.fill(entry, run)
        return entry

    # ---- artifacts ----

    @cached_property
    def vocabulary(self) -> tuple[int, ...] | None:
        """Ids the drafter's output layer keeps, or None for all of them."""
        pair = self.pair
        if self.given is not None:
            return self.given.policy.draft_vocabulary
        key: dict[str, object] = {
            "drafter": self.drafter.fingerprint,
            "verifier": self.verifier.fingerprint,  # its tokenizer and template
            "vocab_size": pair.vocab_size,
            "torch": torch.__version__,
            "source": steps.source_digests(head_cut),
        }

        def choose(folder: Path) -> None:
            model = load_model(self.drafter, torch.float32)
            chosen = head_cut.choose_draft_vocabulary(
                model, self.verifier.tokenizer, text_spec(self.verifier), pair.vocab_size, self.drafter.context
            )
            (folder / "vocabulary.json").write_text(json.dumps(chosen))

        entry = self._kept(self.cache.entry("head", key), "cut the drafter's head", 10, choose)
        chosen = json.loads((entry / "vocabulary.json").read_text())
        return None if chosen is None else tuple(chosen)

    def _wanted(
        self,
        role: str,
        vocabulary: tuple[int, ...] | None,
        draft_width: int | None = None,
        compile_options: str = COMPILE_OPTIONS[0],
    ) -> WantedStep:
        checkpoint = self.verifier if role.startswith("verify") else self.drafter
        return wanted_step(
            self.cache, self.target, self.options, checkpoint, role, self.pair.vocab_size, self.max_context,
            vocabulary, draft_width, compile_options,
        )  # fmt: skip

    def _tuned(self, role: str, vocabulary: tuple[int, ...] | None = None, draft_width: int | None = None) -> str:
        """The compile options for the steps of a model that are like this one: on a GPU those that ran it fastest."""
        if self.target.kind == "cpu":
            return COMPILE_OPTIONS[0]
        if self.options.compile_options != MEASURED:
            return self.options.compile_options
        wanted = [
            self._wanted("verify", None),
            self._wanted("draft", vocabulary if role.startswith("draft") else self.vocabulary),
            *(self._wanted(role, vocabulary, draft_width, name) for name in COMPILE_OPTIONS),
        ]
        try:
            verify, draft, *alternatives = compile_steps(self.cache, self.progress, wanted, self.kernels)
        except BuildError as error:
            self._notice(f"{role} was not compiled in other ways than the default one: {error}")
            return COMPILE_OPTIONS[0]
        key: dict[str, object] = {
            "steps": [step.package.parent.name for step in alternatives],
            "source": steps.source_digests(profile),
        }

        def measure(folder: Path) -> None:
            pair = PairLoader(self.kernels, self.options, self.target, verify, draft)
            engine = self._engine(pair, (verify, draft))
            engine.decoder.draft_width = draft_width or 1
            loaded = self._usable(pair, dict(zip(COMPILE_OPTIONS, alternatives, strict=True)))
            beside = profile.Alternatives(engine, role, loaded)
            bound = BOUNDS[getattr(torch, self.options.dtype)]
            wrong = {name: share for name, share in beside.deviations().items() if not share <= bound}
            for name, share in wrong.items():
                self._notice(f"{role} compiled with {name} is not used: its logits are {100 * share:.1f} % off")
            timings = {name: each for name, each in beside.time().items() if name not in wrong}
            (folder / "tuned.json").write_text(json.dumps({name: asdict(each) for name, each in timings.items()}))

        entry = self._kept(self.cache.entry("tune", key), f"tune {role}", 10, measure)
        found = {name: Timing(**each) for name, each in json.loads((entry / "tuned.json").read_text()).items()}
        chosen = profile.fastest(found)
        times = ", ".join(f"{name} {1e3 * each.seconds:.3f} ms" for name, each in found.items())
        self.progress.say(f"  {role} compiled with {times}: {chosen} is taken for all of its kind")
        return chosen

    def _usable(self, pair: PairLoader, alternatives: dict[str, CompiledStep]) -> dict[str, Step]:
        """Those that can be given the model's weights; what the compiler made of them for one step is no weight."""
        loaded: dict[str, Step] = {}
        for name, step in alternatives.items():
            try:
                loaded[name] = pair.step(step)
            except ArtifactError:
                if name == COMPILE_OPTIONS[0]:
                    raise
                self._notice(f"{step.role} compiled with {name} is not used: it needs more than the model's weights")
        return loaded

    @cached_property
    def kernels(self) -> Path | None:
        """The library that the CPU's steps call; None for other targets."""
        return compile_kernels_once(self.cache, self.progress, self.target) if self.target.kind == "cpu" else None

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.target.kind]

    @cached_property
    def compiled(self) -> tuple[CompiledStep, ...]:
        """`verify`, `draft`, where the drafter's output layer is cut the `draft` that is not, and every `verify.wN`."""
        wanted = [self._wanted("verify", None), self._wanted("draft", self.vocabulary)]
        if self.given is None and self.vocabulary is not None:
            wanted.append(self._wanted("draft", None))
        widths = self.sizes.fixed_widths
        if widths:
            tuned = self._tuned(f"verify.w{widths[len(widths) // 2]}")
            wanted += [self._wanted(f"verify.w{width}", None, None, tuned) for width in widths]
        return tuple(compile_steps(self.cache, self.progress, wanted, self.kernels))

    @property
    def drafts(self) -> list[CompiledStep]:
        """With the output layer cut, and the one that is not where there are two."""
        return [step for step in self.compiled if step.role == "draft"]

    def _with_verify(self, draft: CompiledStep) -> tuple[CompiledStep, ...]:
        """The steps of an engine: `verify`, this draft, and every `verify.wN`."""
        return (self.compiled[0], draft, *(step for step in self.compiled if step.width is not None))

    @property
    def steps(self) -> tuple[CompiledStep, ...]:
        """`verify` and the `draft` that the decision, or the plan that was given, asks for; then every `verify.wN`."""
        whole = self.given is None and self.decision.policy.draft_vocabulary is None
        return self._with_verify(self.drafts[-1 if whole else 0])

    def engine(self, compiled: Sequence[CompiledStep]) -> Engine:
        """Over `verify`, `draft` and steps that use their weights."""
        return self._engine(PairLoader(self.kernels, self.options, self.target, *compiled[:2]), compiled)

    def _engine(self, pair: PairLoader, compiled: Sequence[CompiledStep]) -> Engine:
        return load_engine(
            pair, compiled, self.options, self.verifier, self.drafter, self.pair.vocab_size, self.max_context,
            text_spec(self.verifier),
        )  # fmt: skip

    @cached_property
    def step_engine(self) -> Engine:
        """Over single passes of the drafter."""
        return self.engine(self._with_verify(self.drafts[0]))

    @cached_property
    def whole_head_engine(self) -> Engine | None:
        """The same with the drafter's output layer uncut; None where it is not cut anyway."""
        return self.engine(self._with_verify(self.drafts[1])) if len(self.drafts) > 1 else None

    # ---- measure ----

    @cached_property
    def first_profile(self) -> LatencyProfile:
        def measure() -> LatencyProfile:
            measured, notice = profile.measure_until_steady(self._measure_steps, self.progress.say)
            if notice:
                self._notice(notice)
            return measured

        return self._profile("profile", self._measured("profile", profile, latency), measure)

    @cached_property
    def profile(self) -> LatencyProfile:
        """Looked at again after the calibration, which takes a while."""
        first, _ = self.first_profile, self.trace
        entry = self._measured("profile-again", profile, latency, first=repr(first))
        return self._profile(
            "profile again", entry, lambda: profile.look_again(first, self._measure_steps, self.progress.say)
        )

    def _profile(self, name: str, entry: Path, measure: Callable[[], LatencyProfile]) -> LatencyProfile:
        """A stage that times steps: on a machine that it waits to be idle."""

        def run(folder: Path) -> None:
            (folder / "profile.ygg").write_bytes(wire.encode(PROFILE_FORMAT, measure()))

        if not self.cache.has(entry):
            self._wait_until_idle()
        self._kept(entry, name, 25, run)
        return wire.read_file(PROFILE_FORMAT, LatencyProfile, entry / "profile.ygg")

    def _measure_steps(self) -> LatencyProfile:
        return profile.measure_steps(self.step_engine, self.whole_head_engine, self.sizes.verify_widths)

    def _measured(self, stage: str, *sources: object, **more: object) -> Path:
        """The entry of a stage that depends on the compiled steps."""
        key: dict[str, object] = {
            "steps": [step.package.parent.name for step in self.compiled],
            "kernels": None if self.kernels is None else self.kernels.parent.name,
            "source": steps.source_digests(*sources),  # type: ignore[arg-type]
            **more,
        }
        return self.cache.entry(stage, key)

    def _wait_until_idle(self) -> None:
        notice = wait_until_idle(self.progress.say)
        if notice:
            self._notice(notice)

    @cached_property
    def prompts(self) -> PromptSet:
        return shipped_prompts() if self.options.prompts is None else read_prompt_set(self.options.prompts)

    @cached_property
    def trace(self) -> CalibrationTrace:
        prompts = self.prompts
        entry = self._measured("trace", trace, prompts=prompts.sha256, tokens=trace.ANSWER_TOKENS)

        def run(folder: Path) -> None:
            made = make_trace(self.step_engine, prompts)
            trace.write_trace(folder / "trace.safetensors", made)

        self._kept(entry, "calibrate", 1.2 * len(prompts.prompts), run)
        return read_trace(entry / "trace.safetensors")

    # ---- decide ----

    @cached_property
    def decision(self) -> Decision:
        measured, traced = self.profile, self.trace
        entry = self._measured(
            "search",
            decide,
            calibrate,
            simulate,
            search_tree,
            copying,
            pace,
            prompts=self.prompts.sha256,
            profile=repr(measured),
        )

        def run(folder: Path) -> None:
            decision = decide.search(self.step_engine, measured, traced, self.vocabulary, self.whole_head_engine)
            (folder / "decision.ygg").write_bytes(wire.encode(DECISION_FORMAT, decision))

        self._kept(entry, "search", 60, run)
        return wire.read_file(DECISION_FORMAT, Decision, entry / "decision.ygg")

    @cached_property
    def depth_study(self) -> DepthStudy | None:
        """The depth network and what it was compared with; None without a draft, or with too little text to learn."""
        decision, measured = self.decision, self.profile
        if decision.policy.default_shape.draft_depth == 0:
            return None
        entry = self._measured(
            "train-depth", decide, train_depth, simulate, search_tree, copying, pace, depth, decision=repr(decision),
            profile=repr(measured),
        )  # fmt: skip

        def run(folder: Path) -> None:
            uncut = decision.policy.draft_vocabulary is None
            engine = self.whole_head_engine if uncut and self.whole_head_engine else self.step_engine
            study = decide.learn_depth(engine, decision, measured, self.trace)
            if study is not None:
                (folder / "depth.ygg").write_bytes(wire.encode(DEPTH_FORMAT, study))

        kept = self._kept(entry, "train depth", 25, run) / "depth.ygg"
        return wire.read_file(DEPTH_FORMAT, DepthStudy, kept) if kept.exists() else None

    @property
    def settled(self) -> Decision:
        """The search's decision, with what the depth network adds where it is kept."""
        study = self.depth_study
        if study is None or study.network is None:
            return self.decision
        return replace(self.decision, policy=study.policy, token_s=study.token_s)

    @cached_property
    def fused_steps(self) -> tuple[CompiledStep, ...]:
        """The fused draft of the chosen depth, where it has more than one pass; on a GPU of every depth."""
        policy = self.settled.policy
        depths = [policy.default_shape.draft_depth] if self.target.kind == "cpu" else policy.draft_depths
        fewest = 2 if self.target.kind == "cpu" else 1
        return self._fused(policy, [depth for depth in depths if depth >= fewest])

    def _fused(self, policy: TreePolicy, depths: Sequence[int]) -> tuple[CompiledStep, ...]:
        """Fused drafts of these depths, all compiled as the deepest ran fastest."""
        if not depths:
            return ()
        shape = policy.draft_vocabulary, policy.draft_width
        tuned = self._tuned(f"draft.d{max(depths)}", *shape)
        wanted = [self._wanted(f"draft.d{depth}", *shape, tuned) for depth in depths]
        return tuple(compile_steps(self.cache, self.progress, wanted, self.kernels))

    @cached_property
    def forecast(self) -> Forecast:
        decision, measured = self.settled, self.profile
        network = None if self.depth_study is None else self.depth_study.network
        fused = self.fused_steps
        entry = self._measured(
            "forecast", decide, profile, simulate, copying, pace, depth, decision=repr(decision),
            network=repr(network), profile=repr(measured),
            fused=[step.package.parent.name for step in fused],
        )  # fmt: skip

        def run(folder: Path) -> None:
            engine = self.engine((*self.steps, *fused))
            engine.decoder.draft_width = decision.policy.draft_width
            made = decide.forecast(engine, decision, network, measured, self.trace)
            (folder / "forecast.ygg").write_bytes(wire.encode(FORECAST_FORMAT, made))

        self._kept(entry, "predict", 15, run)
        return wire.read_file(FORECAST_FORMAT, Forecast, entry / "forecast.ygg")

    @cached_property
    def chosen_schedule(self) -> ChosenSchedule:
        """How the stages of an iteration run: what was fastest of what the search found."""
        decision, measured, made = self.settled, self.profile, self.forecast
        network = None if self.depth_study is None else self.depth_study.network
        fused = [step for step in self.fused_steps if any(graph.fused for graph in made.draft_graphs)]
        entry = self._measured(
            "schedule", decide, schedule, stages, lanes, rt_schedule, executor, copying, forecast=repr(made),
            decision=repr(decision), network=repr(network),
        )  # fmt: skip

        def run(folder: Path) -> None:
            engine = self.engine((*self.steps, *fused))
            engine.decoder.draft_width = decision.policy.draft_width
            engine.decoder.table = table_tensor(decision.table, decision.policy.children_per_node)
            engine.decoder.copied_log_a = decision.copied_log_a
            engine.decoder.plain_width = profile.plain_width(made.points)
            chosen = decide.choose_schedule(engine, decision, network, made, measured, self.trace, self.progress.say)
            (folder / "schedule.ygg").write_bytes(wire.encode(SCHEDULE_FORMAT, chosen))

        self._kept(entry, "schedule", 20, run)
        return wire.read_file(SCHEDULE_FORMAT, ChosenSchedule, entry / "schedule.ygg")

    @cached_property
    def sampled(self) -> tuple[SampledPolicy, ...]:
        """How to draft above temperature 0; nothing where there is no draft at 0 either."""
        decision, made = self.settled, self.forecast
        if decision.policy.default_shape.draft_depth == 0:
            return ()
        entry = self._measured(
            "temperatures", decide, temperatures, calibrate, simulate, search_tree, pace, executor, accept, sampling,
            forecast=repr(made), decision=repr(decision),
        )  # fmt: skip

        def run(folder: Path) -> None:
            engine = self.engine(self.steps)
            engine.decoder.plain_width = profile.plain_width(made.points)
            found = decide.draft_at_temperatures(engine, decision, made, self.profile, self.trace, self.progress.say)
            (folder / "sampled.ygg").write_bytes(wire.encode(SAMPLED_FORMAT, found))

        self._kept(entry, "temperatures", 50, run)
        return wire.read_file(SAMPLED_FORMAT, SampledPolicies, entry / "sampled.ygg").policies

    # ---- emit ----

    def plan(self) -> Plan:
        """The decisions: those of the plan that was given, or of the search."""
        if self.given is not None:
            return self.given
        decision, made = self.settled, self.forecast
        record = CalibrationRecord(self.trace.name, self.trace.sha256, len(self.trace.texts), self.trace.num_tokens)
        return make_plan(
            self.options, self.target, self.steps, (self.drafter, self.verifier), self.max_context, decision,
            self.depth_study, made, self.profile.host, record, self.chosen_schedule, self.sampled,
        )  # fmt: skip

    def emit(self) -> BuildReport:
        """Everything, and the bundle."""
        _check_output(self.output)
        pair = self.pair
        plan = self.plan()
        kept = [*self.steps]
        fused = [graph.depth for graph in plan.draft_graphs if graph.fused]
        if fused:
            made = self._fused(plan.policy, fused) if self.given else self.fused_steps
            kept += [step for step in made if step.depth in fused]
        with self.progress.stage("emit", 5):
            num_bytes = emit_bundle(self.output, plan, self.target, self.verifier, pair.vocab_size, kept, self.kernels)
        tried = () if self.given is not None else self.decision.tried
        if self.given is None and self.decision.reason:
            self._notice(self.decision.reason)
        study = None if self.given is not None else self.depth_study
        return BuildReport(self.output, plan, num_bytes, tuple(self.notices), tried, study)


def _options_of(plan: Plan, options: BuildOptions) -> BuildOptions:
    """The build that a plan asks for. Raises ValueError where an option says otherwise."""
    asked = {"max-context": (options.max_context, plan.max_context), "threads": (options.num_threads, plan.num_threads)}
    for name, (wanted, planned) in asked.items():
        if wanted and wanted != planned:
            raise ValueError(
                f"--{name} {wanted} was given, the plan says {planned}; leave it out, or build without --plan"
            )
    target = options.target if options.target.split(":")[0] == plan.target else plan.target  # with its index
    return replace(options, target=target, dtype=plan.dtype, max_context=plan.max_context, num_threads=plan.num_threads)


def _check_plan(plan: Plan, drafter: Checkpoint, verifier: Checkpoint) -> None:
    """Raises PairError or ValueError where the plan is for another pair or asks for more than is compiled."""
    for role, planned, found in (("drafter", plan.drafter, drafter), ("verifier", plan.verifier, verifier)):
        if planned.fingerprint != found.fingerprint:
            raise PairError(
                f"the plan is for the {role} {planned.name} (fingerprint {planned.fingerprint[:12]}); {found.source} "
                f"has {found.fingerprint[:12]}. Build without --plan, or give the checkpoint it was made for."
            )
    shape = plan.policy.largest_shape
    limits = steps.step_limits(plan.target, plan.max_context, drafter.context, plan.drafter.vocab_size)
    if shape.capacity > limits.max_nodes or shape.draft_depth > limits.max_moves or shape.pool_size > limits.pool_size:
        raise ValueError(
            f"the plan asks for trees of width {shape.draft_width} and depth {shape.draft_depth}; up to "
            f"{limits.max_nodes} nodes, {limits.max_moves} passes and {limits.pool_size} candidates between them are "
            "compiled"
        )


def _check_output(output: Path) -> None:
    """The bundle's place: absent, or an older bundle to be replaced; its parent writable."""
    parent = output.resolve().parent
    if not parent.is_dir():
        raise BuildError(f"{parent} does not exist; make it, or give another place with -o")
    if not os.access(parent, os.W_OK):
        raise BuildError(f"{parent} cannot be written to; give another place with -o")
    if output.exists() and not (output / MANIFEST_FILE).is_file():
        raise BuildError(f"{output} exists and is not a bundle; it will not be replaced. Give another place with -o.")
