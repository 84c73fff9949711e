"""On a GPU: a toy pair built for it says what its verifier says, however it is launched."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import yggrt
from tests import toy
from tests.yggc.checkpoint_makers import make_tokenizer, write_checkpoint
from tests.yggrt.test_plan import sample_plan
from yggc.checkpoints import open_checkpoint
from yggc.cli import main
from yggc.steps import step_limits
from yggrt.engine import SampledMode
from yggrt.errors import TargetMismatchError
from yggrt.plan import DraftGraph, ModelIdentity, Plan, TreePolicy, identity_table, write_plan
from yggrt.schedule import sequential_schedule
from yggrt.target import detect_target
from yggrt.tree import TreeShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DEPTHS = (1, 2, 4, 8)
CONTEXT = 512
NEAR_TIE = 1e-3
"""Top-2 gap under which texts may part: a GPU adds up in another order at every width."""


def make_plan(drafter: Path, verifier: Path) -> Plan:
    """Trees of width 4 in fused drafts of all depths; nothing of it is measured, so that minutes go to the tests."""
    models = {}
    for role, source in (("drafter", drafter), ("verifier", verifier)):
        checkpoint = open_checkpoint(str(source))
        config = checkpoint.config
        models[role] = ModelIdentity(
            source.name, config.model_type, checkpoint.fingerprint, "float32", config.vocab_size, checkpoint.context,
            config.num_hidden_layers, config.hidden_size, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
    limits = step_limits("cuda", CONTEXT, CONTEXT, models["drafter"].vocab_size)
    widest = TreeShape(4, max(DEPTHS), 32)
    return replace(
        sample_plan(), sku=detect_target("cuda").sku, target="cuda", dtype="float32", num_threads=1,
        max_context=CONTEXT, **models, draft_graphs=tuple(DraftGraph(depth, True, 0.002, 0.001) for depth in DEPTHS),
        policy=TreePolicy(4, (0, *DEPTHS), (1, 2, 4, 8, 16, 32), limits.num_children, None, widest),
        acceptance_table=identity_table(limits.num_children, limits.num_knots), plain_width=1, token_s=None,
        depth_network=None, depth_figures=None, sampled=(), calibration=None, prediction=None,
        schedule=sequential_schedule(1), schedule_study=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(bundle, folder of the verifier)."""
    folder = tmp_path_factory.mktemp("gpu")
    tokenizer = make_tokenizer()
    verifier = toy.make_llama(0, vocab_size=tokenizer.get_vocab_size() + 4)
    write_checkpoint(folder / "verifier", verifier, tokenizer)
    write_checkpoint(folder / "drafter", toy.make_drafter("sometimes", verifier), tokenizer)
    write_plan(folder / "plan.ygg", make_plan(folder / "drafter", folder / "verifier"))
    arguments = ["--drafter", str(folder / "drafter"), "--verifier", str(folder / "verifier"), "--target", "cuda:0"]
    arguments += ["--compile-options", "default", "--plan", str(folder / "plan.ygg")]
    assert main(["build", *arguments, "-o", str(folder / "toy.bundle")]) == 0
    return folder / "toy.bundle", folder / "verifier"


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "no graphs"])
def engine(pair, request):
    return yggrt.load(pair[0], "cuda:0", request.param)


@pytest.fixture(scope="module")
def model(pair):
    return AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32).eval().cuda()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 300) for _ in range(length)]


def assert_same(found, expected, gaps) -> None:
    """The same tokens, up to a near tie."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            assert gaps[place] < NEAR_TIE, f"token {place} differs where the two best logits are {gaps[place]} apart"
            return


@pytest.mark.parametrize("length", [1, 5, 40, 300])
def test_plain_decoding_says_what_transformers_says(engine, model, length):
    prompt, vocab_size = prompt_of(length, length), 300
    found = engine.generate(prompt, max_new_tokens=40, ignore_eos=True, plain=True)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(40):
            logits = model(torch.tensor([ids], device="cuda"), use_cache=False).logits[0, -1, :vocab_size]
            ids.append(int(logits.argmax()))
    assert_same(found.token_ids, ids[length:], found.gaps)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("length", [1, 40, 300])
def test_every_depth_says_what_plain_decoding_says(engine, depth, length):
    engine.pace = None
    prompt = prompt_of(length, length)
    plain = engine.generate(prompt, max_new_tokens=120, ignore_eos=True, plain=True)
    for width in (2, 4, 8, 32):
        engine.shape = TreeShape(4, depth, min(width, 1 + 4 * depth))
        for _ in range(3):  # run, captured, launched
            found = engine.generate(prompt, max_new_tokens=120, ignore_eos=True)
            assert_same(found.token_ids, plain.token_ids, plain.gaps)
        assert found.stats.acceptance_length > 1.0


def test_drawn_text_is_that_of_plain_decoding(engine):
    engine.pace, engine.shape = None, TreeShape(4, 4, 16)
    for seed in range(3):
        options = {"max_new_tokens": 40, "temperature": 0.8, "seed": seed, "ignore_eos": True}
        plain = engine.generate(prompt_of(9, seed), plain=True, **options)
        assert engine.generate(prompt_of(9, seed), **options).token_ids == plain.token_ids


def test_trees_that_are_drawn_have_the_law_of_plain_decoding(engine):
    """Two samples of three tokens, of which all but the first come out of trees."""
    shape = TreeShape(4, 4, 16)
    before, engine.modes = engine.modes, (
        SampledMode(1.0, True, shape, toy.slot_table(engine.decoder.draft.limits), None),
    )  # fmt: skip
    asked = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 1.0, "top_k": 3}
    try:
        plain, drawn = (
            Counter(engine.generate(prompt_of(9), plain=plain, seed=seed, **asked).token_ids for seed in seeds)
            for plain, seeds in ((True, range(300)), (False, range(300, 600)))
        )
        texts = {engine.generate(prompt_of(9), seed=7, **(asked | {"max_new_tokens": 30})).token_ids for _ in range(3)}
    finally:
        engine.modes = before
    assert len(texts) == 1  # run, captured, launched
    common = [text for text in set(plain) | set(drawn) if plain[text] + drawn[text] >= 10]
    square = sum((plain[text] - drawn[text]) ** 2 / (plain[text] + drawn[text]) for text in common)
    assert square < len(common) + 4.5 * (2 * len(common)) ** 0.5 + 4


def test_devices_are_honoured(pair):
    last = torch.cuda.device_count() - 1
    engine = yggrt.load(pair[0], f"cuda:{last}")
    assert engine.decoder.device == torch.device("cuda", last)
    assert len(engine.generate(prompt_of(5), max_new_tokens=20, ignore_eos=True).token_ids) == 20
    with pytest.raises(TargetMismatchError, match=f"cuda:{last + 1} was asked for"):
        yggrt.load(pair[0], f"cuda:{last + 1}")
    with pytest.raises(TargetMismatchError, match="compiled for cuda"):
        yggrt.load(pair[0], "cpu")


def test_a_bundle_is_its_weights_and_code(pair):
    model = AutoModelForCausalLM.from_pretrained(pair[1], dtype=torch.float32)
    unique = sum({each.data_ptr(): each.numel() * 4 for each in model.parameters()}.values())
    with safe_open(pair[0] / "verify.weights", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.offset_keys()]
    kept = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert kept <= 1.1 * unique
