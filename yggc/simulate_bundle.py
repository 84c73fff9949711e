"""`yggc simulate`: what trees of some shapes, or a plan's own choices, would do on a file of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic

from yggc.profile import (
    LatencyProfile,
    agreed,
    look_again,
    measure_steps,
    measure_until_steady,
    time_steps,
    wait_until_idle,
)
from yggc.simulate import GrownText, Prices, add_up, grow_text, replay
from yggc.trace import TracedText, trace_text
from yggrt.bench import BenchPrompt, read_prompts, spread_over_categories, use_shape
from yggrt.bundle import load, make_pace, table_tensor
from yggrt.engine import Engine, GenerationStats
from yggrt.kvcache import EXTENT_BUCKET
from yggrt.latency import StepTimes
from yggrt.plan import HostSeconds
from yggrt.tree import TreeShape

RUN_REPEATS = 2
"""Of every step, before and after the engine answers a prompt."""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """What `yggc simulate` was asked for.

    shapes: trees to try; the plan's own choices where empty.
    limit, max_new_tokens: as for `yggrt bench`.
    run: let the engine answer with every shape too, for what it takes beside what was simulated.
    """

    bundle: Path
    prompts: Path
    shapes: tuple[TreeShape, ...] = ()
    limit: int | None = None
    max_new_tokens: int = 128
    run: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit {self.limit}: at least 1 is accepted")
        if self.max_new_tokens < 2:
            raise ValueError(f"max-new-tokens {self.max_new_tokens}: at least 2 are accepted")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all prompts, the first token of each left out: what trees of a shape give, and beside it plain decoding."""

    tokens_per_iteration: float
    tpot_s: float
    plain_tpot_s: float

    @property
    def speedup(self) -> float:
        return self.plain_tpot_s / self.tpot_s


@dataclass(frozen=True, slots=True)
class SimulatedShape:
    """A shape, or the plan's own choices: simulated and, where it was run, measured.

    off: median over the prompts of measured over simulated seconds, less 1.
    """

    shape: str
    simulated: Figures
    measured: Figures | None
    off: float | None


def simulate_bundle(options: SimulateOptions, say: Callable[[str], object]) -> list[SimulatedShape]:
    """What each shape would do on a file of prompts.

    The verifier answers every prompt once, plainly; the rest is simulated, with steps timed before and after, since the
    machine may be faster or slower now than when the bundle was built. With `run` they are timed right before and after
    everything that is run, so that what was simulated and what was measured had the same machine.
    Raises ValueError for a shape that is larger than the artifacts hold.
    """
    chosen = spread_over_categories(read_prompts(options.prompts), options.limit)
    engine = load(options.bundle)
    simulation = _Simulation(engine, options)
    busy = wait_until_idle(say)
    first, unsteady = measure_until_steady(simulation.measure_steps, say)
    started = monotonic()
    for index, prompt in enumerate(chosen):
        if simulation.answer(prompt) and options.run:
            simulation.run_all(first.host)
        left = (monotonic() - started) / (index + 1) * (len(chosen) - index - 1)
        say(f"  {index + 1}/{len(chosen)} prompts answered and drafted, about {left:.0f} s left")
    if not simulation.texts:
        raise ValueError(
            f"no prompt of {options.prompts} fits the context of {engine.max_context} tokens and has an answer"
        )
    now = first if options.run else look_again(first, simulation.measure_steps, say)
    say(f"  {simulation.beside_plan(now)}")
    for notice in (busy, unsteady):
        if notice:
            say(f"note: {notice}")
    return simulation.figures(now)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What the engine took for an answer from its first to its last token, and its steps around that."""

    iterations: int
    seconds: float
    plain_s: float
    steps: LatencyProfile


class _Simulation:
    """One run of `yggc simulate`: the engine, the texts, and what was drafted and run on them."""

    def __init__(self, engine: Engine, options: SimulateOptions) -> None:
        assert engine.bundle is not None
        self._engine, self._options, self._plan = engine, options, engine.bundle.plan
        policy = self._plan.policy
        self._table = table_tensor(self._plan.acceptance_table, policy.children_per_node)
        self._shapes = options.shapes or (policy.default_shape,)
        self.texts: list[TracedText] = []
        self._grown: list[list[GrownText]] = [[] for _ in self._shapes]
        self._ran: list[list[_Ran]] = [[] for _ in self._shapes]
        for shape in options.shapes:
            use_shape(engine, shape)

    def _sizes(self, shapes: Sequence[TreeShape]) -> tuple[list[int], list[TreeShape]]:
        """Verify widths and drafts of some shapes, or of the plan's choices, and of plain decoding."""
        plan, policy = self._plan, self._plan.policy
        widths = {plan.plain_width, *(shape.verify_width for shape in shapes)}
        drafts = {(shape.draft_width, depth) for shape in shapes for depth in (1, shape.draft_depth)}
        if not self._options.shapes:
            widths |= {*policy.verify_widths}
            drafts = {(policy.draft_width, depth) for depth in (1, *policy.draft_depths)}
        return sorted(widths), [TreeShape(width, depth, 1) for width, depth in sorted(drafts) if depth]

    def measure_steps(self) -> LatencyProfile:
        """All that is simulated."""
        widths, drafts = self._sizes(self._shapes)
        return measure_steps(self._engine, None, widths, drafts)

    def answer(self, prompt: BenchPrompt) -> bool:
        """Answer a prompt plainly, and draft along the answer; whether there is one."""
        with self._engine.its_threads():
            text = trace_text(self._engine, prompt, False, self._options.max_new_tokens)
        if text is None or len(text.answer_ids) < 2:
            return False
        self.texts.append(text)
        for shape, grown in zip(self._shapes, self._grown, strict=True):
            depth = shape.draft_depth if self._options.shapes else self._plan.policy.draft_depths[-1]
            deepest, copied = TreeShape(shape.draft_width, depth, 1), self._plan.copied_log_a
            grown.append(grow_text(self._engine, text, deepest, self._table, copied))
        return True

    def run_all(self, host: HostSeconds) -> None:
        """Let the engine answer the last prompt with every shape and plainly, its steps timed before and after."""
        engine, text = self._engine, self.texts[-1]
        first, last = len(text.prompt_ids) + 1, len(text.prompt_ids) + len(text.answer_ids)
        extents = sorted(
            {min(engine.decoder.verifier_cache.extent(rows), engine.max_context) for rows in (first, last)}
        )
        for shape, ran in zip(self._shapes, self._ran, strict=True):
            if self._options.shapes:
                use_shape(engine, shape)
            time = partial(time_steps, engine, *self._sizes([shape]), extents, repeats=RUN_REPEATS)
            before, _ = time()
            speculative, plain = (
                engine.generate(text.prompt_ids, max_new_tokens=text.budget, plain=way).stats for way in (False, True)
            )
            after, _ = time()
            steps = agreed([LatencyProfile(points, host, ()) for points in (before, after)])
            ran.append(_Ran(speculative.iterations, _decode_s(speculative), _decode_s(plain), steps))

    def beside_plan(self, now: LatencyProfile) -> str:
        """A line on how fast the machine is."""
        rows, plan_s = [self._plan.plain_width], StepTimes(self._plan.curves)
        before, after = (float(times.verify_s(rows, EXTENT_BUCKET)[0]) for times in (plan_s, StepTimes(now.points)))
        return f"a plain step takes {1e3 * after:.2f} ms now; it took {1e3 * before:.2f} ms when the plan was made"

    def figures(self, now: LatencyProfile) -> list[SimulatedShape]:
        """Of every shape. now: what steps take, where they were not timed around what was run."""
        plan, shapes = self._plan, self._options.shapes
        pace = None if shapes else make_pace(plan)
        network = None if pace is None else plan.depth_network
        planned = StepTimes(plan.curves)
        found: list[SimulatedShape] = []
        for shape, of_texts, ran in zip(self._shapes, self._grown, self._ran, strict=True):
            fixed = shape.verify_width if shapes else plan.schedule.verify_width
            widths = plan.policy.verify_widths if fixed is None else (fixed,)
            token_s = plan.token_s if fixed is None else None
            parts = []
            for index, (grown, text) in enumerate(zip(of_texts, self.texts, strict=True)):
                steps = ran[index].steps if ran else now
                prices = Prices(StepTimes(steps.points), steps.host, plan.plain_width, widths, token_s, planned)
                expected = None if network is None else network.expected_tokens(text.hidden)
                parts.append(replay(grown, shape.draft_depth, prices, pace, expected))
            total = add_up(parts)
            simulated = Figures(total.tokens_per_iteration, total.tpot_s, total.plain_tpot_s)
            name = name_of(shape) if shapes else "the plan's"
            off = (
                median(each.seconds / part.seconds for each, part in zip(ran, parts, strict=True)) - 1 if ran else None
            )
            found.append(SimulatedShape(name, simulated, _measured(ran, total.tokens) if ran else None, off))
        return found


def _measured(ran: Sequence[_Ran], tokens: int) -> Figures:
    return Figures(
        tokens / sum(each.iterations for each in ran),
        sum(each.seconds for each in ran) / tokens,
        sum(each.plain_s for each in ran) / tokens,
    )


def _decode_s(stats: GenerationStats) -> float:
    """Seconds from the first to the last token."""
    return (stats.tpot_s or 0.0) * (stats.new_tokens - 1)


def name_of(shape: TreeShape) -> str:
    """W_d,D_d,W_v."""
    return f"{shape.draft_width},{shape.draft_depth},{shape.verify_width}"


def format_simulations(found: Sequence[SimulatedShape]) -> str:
    """For people: a line a shape, and one more where it was run."""
    lines = [f"{'shape':<14}{'tokens/iteration':>17}{'TPOT, ms':>10}{'plain, ms':>11}{'speedup':>9}"]
    for each in found:
        lines.append(f"{each.shape:<14}{_cells(each.simulated)}")
        if each.measured is not None:
            off = f"   TPOT off by {each.off:+.1%} (median of prompts)"
            lines.append(f"{'  measured':<14}{_cells(each.measured)}{off}")
    return "\n".join(lines)


def _cells(figures: Figures) -> str:
    return (
        f"{figures.tokens_per_iteration:>17.3f}{figures.tpot_s * 1e3:>10.2f}{figures.plain_tpot_s * 1e3:>11.2f}"
        f"{figures.speedup:>8.2f}x"
    )


def json_of(found: Sequence[SimulatedShape]) -> list[dict[str, object]]:
    """Plain JSON data."""
    data = []
    for each in found:
        made: dict[str, object] = {"shape": each.shape, **asdict(each.simulated), "speedup": each.simulated.speedup}
        if each.measured is not None:
            made["measured"] = {**asdict(each.measured), "speedup": each.measured.speedup, "off": each.off}
        data.append(made)
    return data
