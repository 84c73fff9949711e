"""The step modules: growth against a brute-force oracle, exact top-k, the acceptance table, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests import oracle, toy
from yggc.export import draft_pass, eager_run, fused_draft
from yggc.graphs import log_acceptance
from yggc.kernels import OPERATORS
from yggrt.artifacts import LOG_Q_MIN, Step
from yggrt.executor import Drafting, Iteration
from yggrt.plan import AcceptanceTable, identity_table
from yggrt.sampling import SamplingOptions, TokenChooser
from yggrt.tree import TreeShape


def with_copied(children: list[tuple[int, float]], token: int, log_rate: float) -> list[tuple[int, float]]:
    """Children with a token that may be copied: in its own place, or where it is likelier in that of the last."""
    tokens = [child for child, _ in children]
    if token in tokens:
        place = tokens.index(token)
    elif log_rate > children[-1][1]:
        place = len(children) - 1
    else:
        return children
    left = math.log(1.0 - math.exp(log_rate))
    shared = [(child, log_a + left) for child, log_a in children]
    shared[place] = (token, max(log_rate, children[place][1]) if token in tokens else log_rate)
    return shared


@pytest.mark.parametrize("copied", [(), toy.COPIED_LOG_A], ids=["drafted", "copied"])
@pytest.mark.parametrize("shape", [TreeShape(8, 4, 16), TreeShape(3, 5, 16), TreeShape(1, 4, 5), TreeShape(12, 2, 9)])
@pytest.mark.parametrize("kind", ["always", "never"])
def test_growth_equals_the_oracle_over_the_whole_pool(verifier, shape, kind, copied):
    drafter = toy.make_drafter(kind, verifier)
    decoder = toy.make_engine(drafter, verifier, shape, copied_log_a=copied).decoder
    prompt = [7, 30, 12, 55, 9, 41, 3, 12, 55]
    after = [9, 41, 3, 12, 55]  # as the text goes on where 12, 55 stood before
    decoder.prefill(prompt)
    tree = decoder.draft_tree(prompt, shape)
    num_children = decoder.draft.limits.num_children

    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        with torch.no_grad():
            logits = drafter(torch.tensor([[*prompt, *path]]), use_cache=False).logits[0, -1]
        best = torch.topk(torch.log_softmax(logits, -1), num_children)
        found = list(zip(best.indices.tolist(), best.values.clamp(min=LOG_Q_MIN).tolist(), strict=True))
        depth = len(path)
        if not copied or list(path) != after[:depth]:
            return found
        rate = copied[min(2 + depth, len(copied)) - 1]
        return with_copied(found, after[depth], rate)

    tokens, parents, values = oracle.grow(children, shape.draft_width, shape.draft_depth, num_children)
    assert tree.tokens.tolist()[1:] == tokens[1:]
    assert tree.parents.tolist() == parents
    assert kind == "always" or not copied or set(after[: shape.draft_depth]) <= set(tokens)
    assert tree.values.tolist() == pytest.approx(values, abs=1e-3)
    assert tree.depths.tolist() == [len(oracle.ancestors(parents, node)) - 1 for node in range(len(parents))]


@pytest.mark.parametrize("shape", [TreeShape(8, 4, 16), TreeShape(3, 2, 5)])
@pytest.mark.parametrize("prompt", [[7], [7, 30, 12, 55, 9, 41], [7, 30, 12, 55, 9, 30, 12]])
@pytest.mark.parametrize("vocabulary", [None, tuple(range(1, 64, 2))])
def test_a_fused_draft_grows_the_tree_of_single_passes(verifier, shape, prompt, vocabulary):
    drafter = toy.make_drafter("sometimes", verifier)
    decoder = toy.make_engine(drafter, verifier, shape, vocabulary=vocabulary, copied_log_a=toy.COPIED_LOG_A).decoder
    limits = decoder.draft.limits
    _, one_pass = toy.make_steps(drafter, verifier, limits, vocabulary=vocabulary)
    fused = fused_draft(one_pass, shape.draft_width, shape.draft_depth)
    decoder.prefill(prompt)
    by_passes = decoder.draft_tree(prompt, shape)
    rows_by_passes = [buffer[:, : len(prompt) + shape.capacity].clone() for buffer in decoder.drafter_cache.buffers]
    step = Step(fused.role, eager_run(fused), fused.inputs, limits)
    step.bind(decoder.drafter_cache.buffers, decoder.drafter_cache.layouts, decoder.drafter_cache.dtype)
    decoder.drafter_cache.reset()
    for buffer in decoder.drafter_cache.buffers:
        buffer.zero_()
    decoder.fused = {shape.draft_depth: step}
    at_once = decoder.draft_tree(prompt, shape)
    for name in ("tokens", "parents", "depths", "values"):
        assert np.array_equal(getattr(at_once, name), getattr(by_passes, name)), name
    for kept, buffer in zip(rows_by_passes, decoder.drafter_cache.buffers, strict=True):
        torch.testing.assert_close(buffer[:, 1 : len(prompt) + shape.capacity], kept[:, 1:])


@pytest.mark.parametrize("shape", [TreeShape(8, 4, 16), TreeShape(3, 2, 5), TreeShape(1, 4, 5)])
@pytest.mark.parametrize("vocabulary", [None, tuple(range(1, 64, 2))])
def test_a_fused_draft_draws_the_tree_of_single_passes(verifier, shape, vocabulary):
    drafter, prompt = toy.make_drafter("sometimes", verifier), [7, 30, 12]
    decoder = toy.make_engine(drafter, verifier, shape, vocabulary=vocabulary).decoder
    limits = decoder.draft.limits
    _, one_pass = toy.make_steps(drafter, verifier, limits, vocabulary=vocabulary)
    fused = fused_draft(one_pass, shape.draft_width, shape.draft_depth)
    step = Step(fused.role, eager_run(fused), fused.inputs, limits)
    step.bind(decoder.drafter_cache.buffers, decoder.drafter_cache.layouts, decoder.drafter_cache.dtype)
    trees = set()
    for seed in range(3):
        found = []
        for graphs in ({}, {shape.draft_depth: step}):
            decoder.fused = graphs
            chooser = TokenChooser(SamplingOptions(temperature=0.8, seed=seed), prompt)
            decoder.reset(Drafting(toy.slot_table(limits), (), 0.8, chooser))
            iteration = Iteration(prompt, shape)
            for stage in ("head", "grow"):
                decoder.stages[stage](iteration)
            laws = [np.concatenate([part.numpy() for part in parts]) for parts in zip(*iteration.laws, strict=True)]
            found.append((iteration.tree, laws))
        (by_passes, laws), (at_once, fused_laws) = found
        for name in ("tokens", "parents", "depths"):
            assert np.array_equal(getattr(at_once, name), getattr(by_passes, name)), name
        np.testing.assert_allclose(at_once.values, by_passes.values, atol=1e-5)
        expanded = 1 + shape.draft_width * (shape.draft_depth - 1)
        assert laws[0].shape == fused_laws[0].shape == (expanded, limits.num_drawn)
        assert np.array_equal(laws[0], fused_laws[0])
        np.testing.assert_allclose(fused_laws[1], laws[1], atol=1e-4)
        np.testing.assert_allclose(np.exp(laws[1]).sum(axis=1), 1.0, atol=1e-5)
        for node in range(1, by_passes.num_nodes):
            assert by_passes.tokens[node] in laws[0][by_passes.parents[node]]
        trees.add(tuple(by_passes.tokens.tolist()))
    assert len(trees) > 1


def test_another_table_holds_from_the_next_draft_on(verifier):
    decoder = toy.make_engine(toy.make_drafter("sometimes", verifier), verifier, TreeShape(4, 1, 5)).decoder
    prompt = [7, 30, 12]
    before = decoder.draft_tree(prompt, TreeShape(4, 1, 5)).values.copy()
    decoder.table = decoder.table - 1.0
    after = decoder.draft_tree(prompt, TreeShape(4, 1, 5)).values
    np.testing.assert_allclose(after[1:], before[1:] - 1.0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_children_are_drawn_from_the_drafters_law_at_the_temperature(verifier, temperature):
    """The first child of the root, over 400 seeds, against softmax(logits / T) over the most likely tokens."""
    drafter, prompt = toy.make_drafter("sometimes", verifier), [7, 30, 12]
    decoder = toy.make_engine(drafter, verifier, TreeShape(2, 1, 3)).decoder
    limits = decoder.draft.limits
    with torch.no_grad():
        logits = drafter(torch.tensor([prompt])).logits[0, -1].double() / temperature
    best = logits.topk(limits.num_drawn)
    expected = torch.softmax(best.values, 0)
    counts = np.zeros(limits.num_drawn)
    for seed in range(400):
        chooser = TokenChooser(SamplingOptions(temperature=temperature, seed=seed), prompt)
        decoder.reset(Drafting(toy.slot_table(limits), (), temperature, chooser))
        tree = decoder.draft_tree(prompt, TreeShape(2, 1, 3))
        first, second = tree.tokens[1:].tolist()
        assert first != second
        counts[best.indices.tolist().index(first)] += 1
    wanted = 400 * expected.numpy()
    likely = wanted >= 5
    square = ((counts - wanted)[likely] ** 2 / wanted[likely]).sum()
    freedom = max(1, int(likely.sum()))
    assert square < freedom + 4.5 * np.sqrt(2 * freedom) + 4


@pytest.mark.parametrize("vocab_size", [9, 64, 2049, 5000])
def test_the_best_children_are_exact(vocab_size):
    torch.manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size) * 4
    logits[1, -1] = 50.0
    logits[2, : vocab_size // 2] += 30.0
    tokens, log_q = OPERATORS.children(logits, 8)
    expected = torch.log_softmax(logits, -1).topk(8)
    assert tokens.tolist() == expected.indices.tolist()
    torch.testing.assert_close(log_q, expected.values)


def test_the_identity_table_gives_back_q():
    table = identity_table(4)
    log_q = torch.tensor([[-0.5, -1.5, -3.0, -20.0], [-1.5, -1.6, -1.7, -1.8]])
    found = log_acceptance(log_q, torch.tensor(table.log_a).view(4, -1))
    torch.testing.assert_close(found, log_q.clamp(min=LOG_Q_MIN))


def test_the_table_is_interpolated_by_rank_and_siblings_sum_to_at_most_one():
    rows = [[-4.0, -1.0, -0.2], [-5.0, -2.0, -0.4], [-6.0, -3.0, -0.8]]
    table = AcceptanceTable(3, 3, LOG_Q_MIN, tuple(value for row in rows for value in row))
    low = torch.tensor([[-2.0, -5.0, -8.0]])
    found = log_acceptance(low, torch.tensor(rows))[0].tolist()
    assert found == pytest.approx([table.log_acceptance(rank, value) for rank, value in enumerate(low[0].tolist())])
    high = log_acceptance(torch.tensor([[-0.01, -0.01, -0.01]]), torch.tensor(rows))
    assert math.isclose(high.exp().sum().item(), 1.0, rel_tol=1e-5)


@pytest.mark.field(13)
def test_the_vocabulary_beyond_the_tokenizer_is_never_drafted(verifier):
    shape = TreeShape(8, 4, 16)
    engine = toy.make_engine(verifier, verifier, shape, vocab_size=40)
    engine.decoder.prefill([3, 4, 5])
    assert int(engine.decoder.draft_tree([3, 4, 5], shape).tokens.max()) < 40


def test_a_model_without_the_attention_interface_is_refused():
    from transformers import BloomConfig, BloomForCausalLM

    from yggrt.errors import CheckpointError

    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises((CheckpointError, ValueError)):
        draft_pass(model, 64, toy.make_limits(TreeShape(2, 2, 3)))
