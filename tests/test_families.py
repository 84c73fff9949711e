"""Model families through compiled steps in fp32: tiny random checkpoints of each, against transformers itself.

Every family is a verifier; drafters of other families, sizes, dtypes, contexts and vocabularies propose to each.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.yggc.checkpoint_makers import make_tokenizer, write_checkpoint
from yggc.checkpoints import load_model, open_checkpoint
from yggc.config import BuildOptions
from yggc.export import draft_pass, eager_run
from yggc.progress import Progress
from yggc.stage_cache import StageCache
from yggc.steps import CompiledStep, WantedStep, compile_kernels_once, compile_one, read_step, step_limits, wanted_step
from yggrt.artifacts import (
    MASK_VALUE,
    Step,
    attention_windows,
    load_kernels,
    load_package,
    load_weights,
    verify_inputs,
)
from yggrt.bundle import table_tensor
from yggrt.engine import Engine
from yggrt.executor import Decoder
from yggrt.kvcache import KvCache
from yggrt.plan import identity_table
from yggrt.target import detect_target
from yggrt.tree import TreeShape

TOKENS = 300
CONTEXT = 160
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.35, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False, "vocab_size": TOKENS + 4,
}  # fmt: skip
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "vocab_size": TOKENS}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.35}
ROPE_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
HALF_SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}


def make(name: str, **settings: object) -> PreTrainedModel:
    """A random model of a transformers class, its biases and norms random too."""
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


VERIFIERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama3": lambda: make("LlamaForCausalLM", **SIZES, rope_parameters=ROPE_LLAMA3),
    "qwen2": lambda: make("Qwen2ForCausalLM", **SIZES | {"tie_word_embeddings": True}),
    "qwen3": lambda: make("Qwen3ForCausalLM", **SIZES, head_dim=16),
    "mistral": lambda: make("MistralForCausalLM", **SIZES, sliding_window=12),
    "gemma3": lambda: make("Gemma3ForCausalLM", **SIZES, head_dim=8, query_pre_attn_scalar=8, **HALF_SLIDING),
    "phi3": lambda: make("Phi3ForCausalLM", **SIZES | {"num_key_value_heads": 4}),
    "gpt2": lambda: make("GPT2LMHeadModel", **GPT2_SIZES, **IDS),
    "opt": lambda: make(
        "OPTForCausalLM", **SIZES | {"tie_word_embeddings": True}, ffn_dim=48, word_embed_proj_dim=32, init_std=0.35
    ),
    "gpt-neox": lambda: make("GPTNeoXForCausalLM", **SIZES),
}

DRAFTERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma3 drafter": lambda: make(
        "Gemma3ForCausalLM", **SIZES | {"hidden_size": 16, "vocab_size": TOKENS + 20}, head_dim=16, **HALF_SLIDING
    ),
    "gpt2 drafter": lambda: make("GPT2LMHeadModel", **GPT2_SIZES | {"n_layer": 1, "n_positions": 70}, **IDS).bfloat16(),
}
PAIRS = list(zip(cycle(DRAFTERS), VERIFIERS, strict=False))


@dataclass(frozen=True, slots=True)
class Families:
    """All checkpoints, and the verifiers' compiled steps, by name."""

    folders: dict[str, Path]
    steps: dict[str, CompiledStep]

    def engine(self, drafter: str, verifier: str) -> Engine:
        """A compiled verifier; the drafter's pass is run eagerly, since compiling it is tested elsewhere."""
        kept = self.steps[verifier]
        assert kept.weights is not None
        verify = load_package(kept.package, load_weights(kept.weights))
        opened = open_checkpoint(str(self.folders[drafter]))
        draft = draft_pass(
            load_model(opened, torch.float32), TOKENS, step_limits("cpu", CONTEXT, opened.context, TOKENS)
        )
        windows = attention_windows(kept.layouts)
        children = draft.limits.num_children
        decoder = Decoder(
            Step("verify", verify, verify_inputs(windows, kept.limits, torch.float32, kept.hidden_size), kept.limits),
            Step("draft", eager_run(draft), draft.inputs, draft.limits),
            {},
            4,
            KvCache(kept.layouts, kept.limits, torch.float32),
            KvCache(draft.layouts, draft.limits, torch.float32),
            table_tensor(identity_table(children, draft.limits.num_knots), children),
            CONTEXT,
            plain_width=1,
        )
        return Engine(decoder, TreeShape(4, 3, 9), None, frozenset(), TOKENS, opened.context, 1)

    def own(self, name: str) -> PreTrainedModel:
        """The checkpoint as transformers loads it."""
        return AutoModelForCausalLM.from_pretrained(self.folders[name], dtype=torch.float32).eval()


OPTIONS = BuildOptions(drafter="", verifier="", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def families(tmp_path_factory, kept_stages) -> Families:
    """Checkpoints of all families, compiled two at a time."""
    root = tmp_path_factory.mktemp("families")
    cache = StageCache(kept_stages)
    target, tokenizer = detect_target("cpu"), make_tokenizer()
    kernels = compile_kernels_once(cache, Progress(quiet=True), target)
    folders: dict[str, Path] = {}
    wanted: dict[str, WantedStep] = {}
    for name, maker in (VERIFIERS | DRAFTERS).items():
        torch.manual_seed(len(folders))
        folders[name] = write_checkpoint(root / name.replace(" ", "-"), maker(), tokenizer)
        if name in VERIFIERS:
            checkpoint = open_checkpoint(str(folders[name]))
            wanted[name] = wanted_step(cache, target, OPTIONS, checkpoint, "verify", TOKENS, CONTEXT, None)
    missing = [step for step in wanted.values() if not cache.has(step.entry)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as compilers:
        list(compilers.map(compile_and_keep, [cache.root] * len(missing), missing, [kernels] * len(missing)))
    load_kernels(kernels)
    return Families(folders, {name: read_step(step) for name, step in wanted.items()})


def compile_and_keep(root: Path, step: WantedStep, kernels: Path) -> None:
    torch.set_num_threads(1)
    StageCache(root).fill(step.entry, lambda folder: compile_one(step, folder, kernels))


def prompt_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(3, TOKENS, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", VERIFIERS)
def test_compiled_logits_are_the_models_at_widths_and_extents_never_traced(families, name):
    engine = families.engine("gpt2 drafter", name)
    tokens = prompt_of(90, 1)
    with torch.no_grad():
        expected = families.own(name)(tokens[None]).logits[0, :, :TOKENS]
    windows = attention_windows(families.steps[name].layouts)
    verify, found, begin = engine.decoder.verify, [], 0
    for width, extent in ((31, 33), (1, 40), (2, 47), (17, 61), (39, 101)):
        rows = torch.arange(begin, begin + width)
        begin += width
        distance = rows[:, None] - torch.arange(extent)[None, :] + 1  # position p lies at slot p + 1
        masks = []
        for window in windows:
            visible = (distance >= 0) & (distance < (window or extent))
            visible[:, 0] = False
            masks.append(torch.where(visible, 0.0, MASK_VALUE))
        still = torch.zeros(verify.limits.max_moves, dtype=torch.int64)
        outputs = verify(tokens[rows], rows, rows + 1, *masks, still, still, *engine.decoder.depth_layers)
        found.append(outputs[3])
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.field(18)
@pytest.mark.parametrize("drafter, verifier", PAIRS)
def test_the_output_of_any_pair_is_that_of_transformers_past_any_window(families, drafter, verifier):
    engine = families.engine(drafter, verifier)
    model = families.own(verifier)
    beyond = list(range(TOKENS, model.config.vocab_size)) or None
    for seed, length in enumerate((1, 6, 40)):
        prompt = prompt_of(length, seed)
        expected = model.generate(
            prompt[None], attention_mask=torch.ones(1, length, dtype=torch.int64), do_sample=False, max_new_tokens=60,
            eos_token_id=None, pad_token_id=0, suppress_tokens=beyond,
        )[0, length:].tolist()  # fmt: skip
        for shape in (TreeShape(4, 3, 9), TreeShape(1, 2, 3)):
            engine.shape = shape
            found = engine.generate(prompt.tolist(), max_new_tokens=60, ignore_eos=True)
            assert list(found.token_ids) == expected
