"""Train the depth network: which draft depth pays after each hidden row of the verifier.

The targets are trees grown on the calibration's text: tokens emitted and seconds taken by every depth at every root.
Two things are learned at once: the tokens each depth will give (squared error, so that they are expectations), and the
choice by expected tokens - lambda * seconds with the highest throughput under the measured curves (-log of tokens per
second).

Invariant: the network is at least as fast on held-out text as the best fixed depth there, or the depth stays fixed.
Source: design, section 5, "Depth predictor"; paper, depth prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from yggc.search_tree import Candidate, score, used_widths
from yggc.simulate import GrownText, Outcomes, Prices, Simulated, add_up, outcomes, replay
from yggc.trace import TracedText
from yggrt.artifacts import DEPTH_HEADS, DEPTH_UNITS
from yggrt.depth import DepthNetwork
from yggrt.pace import Pace
from yggrt.plan import DepthFigures, TreePolicy

DEEPER = 3
"""Depths up to this many times the best fixed one are on the menu: where a text is easy, deeper pays."""

VALIDATE_EVERY = 5
"""Of the texts, every fifth tells when to stop training and how far to trust the result."""

FEWEST_ROOTS = 200
"""Roots to learn from below which nothing is learned."""

EPOCHS, PATIENCE, BATCH = 60, 10, 64
LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 2e-3, 0.05, 0.2
SOFTNESS = 0.1
"""Tokens; how sharply the choice follows its worth while it is trained."""
REGRESSION_WEIGHT = 0.5
MOST_GAIN = 1.5
"""What dropout and an early stop keep small may be stretched so far, by what validation says."""

CONFIDENCES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Thresholds tried for a draft that stops when the drafter is unsure."""

ROUNDS = 4


@dataclass(frozen=True, slots=True)
class DepthStudy:
    """What training found. policy: with the depths that may be chosen, or as it was; network: None keeps it fixed."""

    policy: TreePolicy
    token_s: float
    network: DepthNetwork | None
    figures: DepthFigures

    @property
    def reason(self) -> str:
        """Why the depth stays fixed, in one line; empty where it is learned."""
        if self.network is not None:
            return ""
        figures = self.figures
        return (
            f"the depth stays fixed: learned it gives {figures.learned:.3f} times plain decoding on held-out text, a "
            f"fixed depth of {figures.fixed_depth} gives {figures.fixed:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """Roots to learn from: hidden float32[n, H]; tokens, seconds float64[n, D] by depth; text int64[n], its index."""

    hidden: NDArray[np.float32]
    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]
    text: NDArray[np.int64]


def depth_menu(best: int, depths: Sequence[int]) -> tuple[int, ...]:
    """Depths a network may choose from. best: the best fixed one; depths: all that were tried."""
    return (0, *(depth for depth in depths if depth <= DEEPER * best))[:DEPTH_HEADS]


def study_depth(
    texts: Sequence[TracedText],
    grown: Sequence[GrownText],
    held_out: Sequence[TracedText],
    held_out_grown: Sequence[GrownText],
    policy: TreePolicy,
    menu: tuple[int, ...],
    prices: Prices,
) -> DepthStudy | None:
    """Train on texts, compare on those held out, and keep the network where it wins; None with too little text.

    grown, held_out_grown: the trees of each text, as deep as the menu's last depth.
    policy: with a fixed depth above 0. prices: with every measured verify width, and lambda.
    """
    candidate = Candidate(policy.draft_width, policy.children_per_node)
    assert prices.token_s is not None
    samples = gather(texts, grown, menu, prices)
    unseen = gather(held_out, held_out_grown, menu, prices)
    if samples.text.size < FEWEST_ROOTS or not unseen.text.size:
        return None
    network = fit_network(samples, menu, typical_widths(grown, menu, prices), prices.token_s)
    token_s = _settled(prices, lambda priced: _learned(texts, grown, policy, menu, network, priced))
    wide = replace(prices, token_s=token_s)
    learned = _learned(held_out, held_out_grown, policy, menu, network, wide)
    fixed = {depth: _fixed(held_out_grown, candidate, depth, prices) for depth in menu}
    best = min(fixed, key=lambda depth: fixed[depth])
    threshold = min(CONFIDENCES, key=lambda each: _confident(grown, menu, each, prices).tpot_s)
    oracle_s = _settled(prices, lambda priced: _oracle(held_out_grown, menu, priced))
    promised, emitted = _promises(unseen, menu, network, token_s)
    plain_s = learned.plain_tpot_s
    figures = DepthFigures(
        fixed_depth=best,
        fixed=plain_s / fixed[best],
        confident=plain_s / _confident(held_out_grown, menu, threshold, prices).tpot_s,
        learned=plain_s / learned.tpot_s,
        oracle=plain_s / _oracle(held_out_grown, menu, replace(prices, token_s=oracle_s)).tpot_s,
        promised=promised,
        emitted=emitted,
    )
    if figures.learned < figures.fixed:
        return DepthStudy(policy, prices.token_s, None, figures)
    return DepthStudy(_policy_with(policy, menu, grown, wide), token_s, network, figures)


def _policy_with(policy: TreePolicy, menu: tuple[int, ...], grown: Sequence[GrownText], prices: Prices) -> TreePolicy:
    """The policy with the menu's depths, and the verify widths that the deepest of them asks for."""
    widths = used_widths(menu[-1], grown, prices)
    return replace(
        policy,
        draft_depths=tuple(sorted({*policy.draft_depths, *menu})),
        verify_widths=tuple(sorted({*policy.verify_widths, *widths})),
    )


# ---- samples ----


def gather(texts: Sequence[TracedText], grown: Sequence[GrownText], menu: Sequence[int], prices: Prices) -> Samples:
    """What each depth does at every root whose text goes on for as long as the deepest tree."""
    parts = []
    for index, (text, trees) in enumerate(zip(texts, grown, strict=True)):
        cut_off = menu[-1] if len(text.answer_ids) == text.budget else 0  # what would have come is not known
        count = max(0, trees.num_roots - cut_off)
        found = [outcomes(trees, depth, prices) for depth in menu]
        parts.append(
            Samples(
                text.hidden[:count],
                np.stack([each.emitted[:count] for each in found], axis=1).astype(np.float64),
                np.stack([each.seconds[:count] for each in found], axis=1),
                np.full(count, index),
            )
        )
    return Samples(
        np.concatenate([part.hidden for part in parts]),
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.seconds for part in parts]),
        np.concatenate([part.text for part in parts]),
    )


def typical_widths(grown: Sequence[GrownText], menu: Sequence[int], prices: Prices) -> tuple[int, ...]:
    """Rows verified by trees of each depth, on average: what prices a depth before it is drafted."""
    means = [np.mean(np.concatenate([outcomes(trees, depth, prices).verified for trees in grown])) for depth in menu]
    return tuple(max(1, round(float(mean))) for mean in means)


# ---- the network ----


class _Layers(nn.Module):
    """The network on standardised rows, its output beyond the mean of each depth."""

    def __init__(self, num_features: int, means: Tensor) -> None:
        super().__init__()
        self.first = nn.Linear(num_features, DEPTH_UNITS)
        self.second = nn.Linear(DEPTH_UNITS, means.numel())
        self.dropout = nn.Dropout(DROPOUT)
        nn.init.zeros_(self.second.weight)
        with torch.no_grad():
            self.second.bias.copy_(means)

    def forward(self, rows: Tensor) -> Tensor:
        return self.second(self.first(self.dropout(rows)).relu())


def fit_network(
    samples: Samples, menu: tuple[int, ...], verify_widths: tuple[int, ...], token_s: float, seed: int = 0
) -> DepthNetwork:
    """Train, stop where validation stops improving, and scale each head to what it is worth there.

    It begins with the mean tokens of each depth, which choose the best fixed one, and stays there where rows tell
    nothing. samples: at least FEWEST_ROOTS.
    """
    is_validation = np.unique(samples.text, return_inverse=True)[1] % VALIDATE_EVERY == VALIDATE_EVERY - 1
    if not is_validation.any() or is_validation.all():
        is_validation = np.arange(samples.text.size) % VALIDATE_EVERY == VALIDATE_EVERY - 1
    mean, spread = samples.hidden.mean(axis=0), samples.hidden.std(axis=0) + 1e-6
    rows = torch.from_numpy((samples.hidden - mean) / spread).float()
    tokens = torch.from_numpy(samples.tokens).float()
    cost = torch.from_numpy(samples.seconds / token_s).float()
    typical = cost.mean(dim=0)
    scale = tokens.var(dim=0) + 1e-2
    train, check = (torch.from_numpy(np.flatnonzero(part)) for part in (~is_validation, is_validation))

    def loss_of(found: Tensor, these: Tensor) -> Tensor:
        chances = torch.softmax((found - typical) / SOFTNESS, dim=1)
        rate = (chances * tokens[these]).sum() / (chances * cost[these]).sum()
        return -rate.log() + REGRESSION_WEIGHT * ((found - tokens[these]) ** 2 / scale).mean()

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = _Layers(rows.shape[1], tokens[train].mean(dim=0))
        optimizer = torch.optim.AdamW(layers.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        best_loss, best, waited = float("inf"), layers.state_dict(), 0
        for _ in range(EPOCHS + 1):
            layers.eval()
            with torch.no_grad():
                loss = float(loss_of(layers(rows[check]), check))
            waited += 1
            if loss < best_loss:
                best_loss, waited = loss, 0
                best = {name: value.clone() for name, value in layers.state_dict().items()}
            if waited > PATIENCE:
                break
            layers.train()
            for batch in train[torch.randperm(len(train), generator=generator)].split(BATCH):
                optimizer.zero_grad()
                loss_of(layers(rows[batch]), batch).backward()
                optimizer.step()
    layers.load_state_dict(best)
    layers.eval()
    with torch.no_grad():
        gains, offsets = _calibration(layers(rows[check]), tokens[check])
        first = layers.first.weight / torch.from_numpy(spread)
        first_bias = layers.first.bias - first @ torch.from_numpy(mean)
        second, second_bias = layers.second.weight * gains[:, None], layers.second.bias * gains + offsets
    return DepthNetwork.of_arrays(
        menu,
        verify_widths,
        torch.cat((first.T, first_bias[None])).numpy(),
        torch.cat((second.T, second_bias[None])).numpy(),
    )


def _calibration(found: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Gain and offset of each head, [D], with which it expects what came: least squares, no gain above MOST_GAIN."""
    centered = found - found.mean(dim=0)
    covariance = (centered * (tokens - tokens.mean(dim=0))).mean(dim=0)
    gains = (covariance / centered.square().mean(dim=0).clamp(min=1e-12)).clamp(0.0, MOST_GAIN)
    return gains, tokens.mean(dim=0) - gains * found.mean(dim=0)


# ---- ways to choose ----


def _settled(prices: Prices, simulate: Callable[[Prices], Simulated]) -> float:
    """What a token costs, and so is worth, where a way to choose uses that very worth."""
    token_s = prices.token_s
    best = float("inf")
    for _ in range(ROUNDS):
        found = simulate(replace(prices, token_s=token_s)).tpot_s
        if found >= best:
            break
        best = token_s = found
    assert token_s is not None
    return token_s


def _fixed(grown: Sequence[GrownText], candidate: Candidate, depth: int, prices: Prices) -> float:
    """Seconds per token at one depth, with the lambda it reaches itself; falling back or not, whichever is faster."""
    falling_back = score(candidate, depth, grown, prices)
    steady = add_up([replay(trees, depth, replace(prices, token_s=falling_back.token_s)) for trees in grown])
    return min(falling_back.simulated.tpot_s, steady.tpot_s)


def _learned(
    texts: Sequence[TracedText],
    grown: Sequence[GrownText],
    policy: TreePolicy,
    menu: tuple[int, ...],
    network: DepthNetwork,
    prices: Prices,
) -> Simulated:
    """The network's choices, falling back as the runtime does."""
    assert prices.token_s is not None
    open_policy = replace(policy, draft_depths=tuple(sorted({*policy.draft_depths, *menu})))
    pace = Pace(open_policy, prices.times, prices.host, prices.plain_width, prices.token_s, network)
    return add_up(
        [
            replay(trees, policy.default_shape.draft_depth, prices, pace, network.expected_tokens(text.hidden))
            for text, trees in zip(texts, grown, strict=True)
        ]
    )


def _by_depth(trees: GrownText, menu: Sequence[int], prices: Prices) -> list[Outcomes]:
    return [outcomes(trees, depth, prices) for depth in menu]


def _oracle(grown: Sequence[GrownText], menu: Sequence[int], prices: Prices) -> Simulated:
    """At every root the depth that turns out to be worth most."""
    assert prices.token_s is not None
    parts = []
    for trees in grown:
        worth = [each.emitted - each.seconds / prices.token_s for each in _by_depth(trees, menu, prices)]
        parts.append(replay(trees, np.array(menu)[np.argmax(np.stack(worth), axis=0)], prices))
    return add_up(parts)


def _confident(grown: Sequence[GrownText], menu: Sequence[int], threshold: float, prices: Prices) -> Simulated:
    """Draft on while the best node added last has at least this value."""
    parts = []
    for trees in grown:
        depths = np.full(trees.num_roots, menu[-1])
        for depth in reversed(menu[1:-1]):
            last = slice(1 + trees.draft_width * (depth - 1), 1 + trees.draft_width * depth)
            depths[trees.values[:, last].max(axis=1) < np.log(threshold)] = depth
        parts.append(replay(trees, depths, prices))
    return add_up(parts)


def _promises(samples: Samples, menu: Sequence[int], network: DepthNetwork, token_s: float) -> tuple[float, float]:
    """Tokens per iteration that the network expects of its choices, and what comes, over all roots."""
    expected = network.expected_tokens(samples.hidden)[:, : len(menu)]
    chosen = np.argmax(expected - samples.seconds.mean(axis=0) / token_s, axis=1)
    rows = np.arange(chosen.size)
    return float(expected[rows, chosen].mean()), float(samples.tokens[rows, chosen].mean())
