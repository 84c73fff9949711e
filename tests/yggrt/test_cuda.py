"""Steps on a GPU, without one: on a device that keeps its own memory and replays what it captured."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import toy
from tests.test_lossless import make_sliding, prompt_of
from tests.yggrt.test_plan import sample_manifest, sample_plan
from yggc.export import draft_pass, eager_run, fused_draft, hidden_size, verify_step
from yggrt import cuda
from yggrt.artifacts import DRAFT_OUTPUTS, FUSED_DRAFT_OUTPUTS, VERIFY_OUTPUTS, Step, TensorSpec, attention_windows
from yggrt.bundle import Bundle
from yggrt.cuda import MOST_GRAPHS, DeviceStep, Graphs, extent_buckets
from yggrt.engine import Engine, SampledMode
from yggrt.executor import Decoder
from yggrt.kvcache import KvCache
from yggrt.loader import interface_of, is_fixed
from yggrt.plan import decode_manifest, encode_manifest
from yggrt.show import describe
from yggrt.tree import TreeShape

SHAPE = TreeShape(2, 3, 6)


class PretendDevice:
    """Captured work runs when it is launched, never when it is captured, and launches count."""

    def __init__(self) -> None:
        self.captures = self.launches = self.waits = self.placed = 0

    @contextmanager
    def active(self):
        yield

    def allocate(self, num_bytes):
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def pinned(self, num_bytes):
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def place(self, tensor):
        self.placed += 1
        return tensor.clone()

    def capture(self, work):
        self.captures += 1

        def launch() -> None:
            self.launches += 1
            work()

        return launch

    def wait(self) -> None:
        self.waits += 1


def make_engine(drafter, verifier, shape: TreeShape, uses_graphs: bool = True, most: int = MOST_GRAPHS):
    """(engine over device steps, device, graphs); fused drafts of all depths, and every verify width of its own."""
    drafter, verifier = copy.deepcopy(drafter), copy.deepcopy(verifier)  # they are other tests' too
    limits = toy.make_limits(shape, toy.MAX_CONTEXT)
    device, graphs = PretendDevice(), Graphs(most)
    verify = verify_step(verifier, toy.VOCAB_SIZE, limits)
    draft = draft_pass(drafter, toy.VOCAB_SIZE, limits)

    windows, hidden = attention_windows(verify.layouts), hidden_size(verifier)

    def on_device(step, outputs) -> Step:
        inputs, names = interface_of(step.role, limits, verify.dtype, windows, hidden)
        assert inputs == step.inputs and names == outputs
        run = DeviceStep(eager_run(step), inputs, outputs, device, graphs, uses_graphs and is_fixed(step.role))
        return Step(step.role, run, step.inputs, limits)

    fused = {depth: fused_draft(draft, shape.draft_width, depth) for depth in range(1, shape.draft_depth + 1)}
    fixed = {width: verify_step(verifier, toy.VOCAB_SIZE, limits, width) for width in (1, shape.verify_width)}
    extents = extent_buckets(limits.kv_rows - 1, 64, 64)
    decoder = Decoder(
        on_device(verify, VERIFY_OUTPUTS),
        on_device(draft, DRAFT_OUTPUTS),
        {depth: on_device(step, FUSED_DRAFT_OUTPUTS) for depth, step in fused.items()},
        shape.draft_width,
        KvCache(verify.layouts, limits, verify.dtype, extents=extents),
        KvCache(draft.layouts, limits, draft.dtype, extents=extents),
        toy.table(limits),
        toy.MAX_CONTEXT,
        1,
        by_width={width: on_device(step, VERIFY_OUTPUTS) for width, step in fixed.items()},
    )
    engine = Engine(decoder, shape, None, frozenset(), toy.VOCAB_SIZE, 512, torch.get_num_threads())
    return engine, device, graphs


@pytest.mark.parametrize("uses_graphs", [True, False])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_what_is_said_is_what_the_model_says(verifier, uses_graphs, kind):
    model = make_sliding(window=3, seed=3) if kind == "sliding" else verifier
    engine, device, graphs = make_engine(toy.make_drafter("sometimes", model), model, SHAPE, uses_graphs)
    for seed in range(3):
        prompt = prompt_of(5 + 7 * seed, seed)
        expected = toy.hf_greedy(model, prompt, 40)
        assert list(engine.generate(prompt, max_new_tokens=40).token_ids) == expected
        assert list(engine.generate(prompt, max_new_tokens=40, plain=True).token_ids) == expected
    assert (device.captures > 0) == (device.launches > 20) == uses_graphs == (len(graphs) > 0)


def test_drawn_text_is_the_same_with_the_same_seed(verifier):
    """Logits stay on the device until they are asked for, and are those of the step that was run last."""
    engine, _, _ = make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE)
    plain = toy.make_engine(verifier, verifier, SHAPE)
    for seed in range(3):
        options = {"max_new_tokens": 30, "temperature": 0.9, "seed": seed}
        expected = plain.generate(prompt_of(6), plain=True, **options).token_ids
        assert engine.generate(prompt_of(6), **options).token_ids == expected


def test_trees_that_are_drawn_on_the_device_are_those_drawn_here(verifier):
    drafter = toy.make_drafter("sometimes", verifier)
    engine, device, _ = make_engine(drafter, verifier, SHAPE)
    here = toy.make_engine(drafter, verifier, SHAPE)
    limits = engine.decoder.draft.limits
    _, one_pass = toy.make_steps(drafter, verifier, limits)
    steps = {depth: fused_draft(one_pass, SHAPE.draft_width, depth) for depth in range(1, SHAPE.draft_depth + 1)}
    here.decoder.fused = {depth: Step(s.role, eager_run(s), s.inputs, limits) for depth, s in steps.items()}
    for step in here.decoder.fused.values():
        step.bind(
            here.decoder.drafter_cache.buffers, here.decoder.drafter_cache.layouts, here.decoder.drafter_cache.dtype
        )
    for each in (engine, here):
        each.modes = (SampledMode(1.0, True, SHAPE, toy.slot_table(limits), None),)
    for seed in range(4):
        asked = {"max_new_tokens": 30, "temperature": 0.9, "seed": seed}
        found = engine.generate(prompt_of(6), **asked)
        assert found.token_ids == here.generate(prompt_of(6), **asked).token_ids
        assert found.stats.drafted > 20
    assert device.launches > 20


def test_a_launch_has_one_wait_and_constants_are_copied_once(verifier):
    engine, device, _ = make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE)
    for _ in range(2):
        engine.generate(prompt_of(6), max_new_tokens=30, ignore_eos=True)
    before = copy.copy(device)
    stats = engine.generate(prompt_of(6), max_new_tokens=30, ignore_eos=True).stats
    launches, waits = device.launches - before.launches, device.waits - before.waits
    assert device.captures == before.captures  # everything came before
    assert stats.iterations < launches <= 2 * stats.iterations  # a draft and a verify each
    assert waits - launches <= 4  # the prompt, and trees that the end cuts short
    assert device.placed - before.placed <= (waits - launches) * len(engine.decoder.draft.inputs)


def test_nothing_is_captured_before_the_first_token(verifier):
    """Not even where a prompt has as many tokens as one before, or as a tree has nodes."""
    engine, device, _ = make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE)
    for length in (1, SHAPE.verify_width, 6, 20) * 3:
        engine.decoder.reset()
        engine.decoder.prefill(prompt_of(length))
        engine.decoder.prefill_drafter(prompt_of(length))
    assert device.captures == 0


def test_the_graph_that_was_used_the_longest_ago_makes_room(verifier):
    engine, device, graphs = make_engine(toy.make_drafter("sometimes", verifier), verifier, SHAPE, most=2)
    prompt = prompt_of(5)
    expected = toy.hf_greedy(verifier, prompt, 60)
    for _ in range(2):
        assert list(engine.generate(prompt, max_new_tokens=60).token_ids) == expected
        assert list(engine.generate(prompt, max_new_tokens=60, plain=True).token_ids) == expected
    assert len(graphs) == 2 and device.captures > 2


def counting_step(device: PretendDevice, graphs: Graphs) -> DeviceStep:
    """Gives its inputs back, added up: what lies in the blocks decides."""

    def run(tensors):
        rows, table = tensors
        return [rows * 2, rows.float().sum()[None] + table.sum()]

    inputs = (TensorSpec("rows", torch.int64, ("W",)), TensorSpec("acceptance_table", torch.float32, (2,)))
    return DeviceStep(run, inputs, ("doubled", "added"), device, graphs)


def test_a_captured_step_reads_what_it_is_given_now():
    step = counting_step(PretendDevice(), Graphs())
    table = torch.ones(2)
    kept = []
    for first in range(6):
        rows = torch.arange(first, first + 3)
        doubled, added = step([rows, table])
        assert doubled.tolist() == (2 * rows).tolist() and added.tolist() == [float(rows.sum() + table.sum())]
        kept.append((doubled, (2 * rows).tolist()))
        if first == 3:
            table = torch.full((2,), 5.0)  # another tensor
        if first == 4:
            table += 1  # the same, changed
    assert all(found.tolist() == expected for found, expected in kept)  # no call writes into another's results


def test_a_constant_that_lies_where_another_lay_is_another():
    """Tables come and go while trees are tried, and memory is used again."""
    step = counting_step(PretendDevice(), Graphs())
    rows, memory = torch.zeros(3, dtype=torch.int64), np.zeros(2, dtype=np.float32)
    for value in range(5):
        memory[:] = value
        _, added = step([rows, torch.from_numpy(memory)])
        assert added.tolist() == [2.0 * value]


def test_kinds_of_inputs_have_graphs_of_their_own():
    device, graphs = PretendDevice(), Graphs()
    step, other = counting_step(device, graphs), counting_step(device, graphs)
    for each in (step, other):
        for _ in range(3):
            for width in (1, 2):
                each([torch.arange(width), torch.ones(2)])
    assert len(graphs) == 4 and device.captures == 4


@pytest.mark.parametrize(
    "longest, expected",
    [
        (8256, (320, 576, 1088, 2112, 4160, 8256)),
        (2048, (256, 512, 1024, 2048)),
        (200, (200,)),
        (300, (256, 300)),
        (131136, (4160, 8256, 16448, 32832, 65600, 131136)),
    ],
)
def test_extents_are_few_and_geometric(longest, expected):
    found = extent_buckets(longest, 256, 64)
    assert found == expected and len(found) <= 6
    assert all(bucket % 64 == 0 for bucket in found[:-1])


def test_a_cache_reads_the_smallest_extent_that_holds_its_rows():
    limits = toy.make_limits(SHAPE, 512)
    cache = KvCache((), limits, torch.float32, extents=extent_buckets(limits.kv_rows - 1, 64, 64))
    assert [cache.extent(rows) for rows in (1, 64, 65, 200, limits.kv_rows - 1)] == sorted(
        cache.extent(rows) for rows in (1, 64, 65, 200, limits.kv_rows - 1)
    )
    assert all(cache.extent(rows) >= rows for rows in range(1, limits.kv_rows))
    assert {cache.extent(rows) for rows in range(1, limits.kv_rows)} == set(cache.extents)


def test_a_card_on_which_nothing_was_checked_is_told_of(monkeypatch):
    plan, manifest = sample_plan(), sample_manifest()
    assert "unverified" not in describe(Bundle(Path("b"), manifest, plan, ()))
    plan = replace(plan, target="cuda", sku="nvidia-h200")
    assert "checked on nvidia-h200; tests/gpu/check.sh does that" in describe(Bundle(Path("b"), manifest, plan, ()))
    monkeypatch.setattr(cuda, "VERIFIED_ON", ("nvidia-h200",))
    assert "unverified" not in describe(Bundle(Path("b"), manifest, plan, ()))


def test_a_bundle_for_a_gpu_has_steps_of_fixed_width_and_no_kernels():
    manifest = sample_manifest()
    verify = replace(manifest.artifacts[0], role="verify.w8", file="verify.w8.pt2")
    found = replace(
        manifest, target="cuda", architecture="sm_90", instruction_set=(), kernels=None, driver="580.65.06",
        artifacts=(*manifest.artifacts, verify),
    )  # fmt: skip
    assert decode_manifest(encode_manifest(found)) == found
    for target, kernels in (("cpu", None), ("cuda", "kernels.so")):
        with pytest.raises(ValueError, match="a bundle for the CPU names its kernels, no other does"):
            replace(manifest, target=target, kernels=kernels)
    with pytest.raises(ValueError, match="role 'verify.w0'; known: verify, verify.wN, draft, draft.dN"):
        replace(verify, role="verify.w0")
