"""Steps against their own models: families that are decoded as they are, and families that must not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from tests import toy
from yggc.export import eager_run, verify_step
from yggc.model_support import causal_class, refuse_unsupported
from yggc.self_check import check_compiled, check_module, make_probe
from yggrt.errors import BuildError, CheckpointError
from yggrt.tree import TreeShape

LIMITS = toy.make_limits(TreeShape(3, 2, 4), max_context=60)

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "embedding_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8, "attention_head_dim": 8, "sliding_window": 7,
    "max_position_embeddings": 128, "rotary_dim": 8, "word_embed_proj_dim": 32, "ffn_dim": 48, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
"""Settings that make a model tiny, whatever its family; each takes those it has."""

LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3", "minicpm3")
"""Their keys have as many heads as their queries."""

DECODED = (
    "apertus", "arcee", "biogpt", "codegen", "cohere", "cohere2", "exaone4", "gemma", "gemma3_text", "glm", "glm4",
    "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "llama", "ministral",
    "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2", *LATENT_ATTENTION,
)  # fmt: skip

DECODED_BY_NEWER = ("codegen", "gptj", "nemotron")
"""Families that call the attention interface only in later versions of transformers."""

REFUSED = {
    "bloom": "0 of them use", "mpt": "0 of them use", "falcon": "0 of them use", "diffllama": "of them use",
    "gemma2": "softcap", "gpt_oss": "s_aux", "doge": "its logits differ from its own", "mamba": "cannot be rewound",
    "rwkv": "cannot be rewound", "jamba": "cannot be rewound", "t5": "encoder-decoder", "whisper": "encoder-decoder",
    "llava": "takes images or sound", "bert": "reads text in both directions",
}  # fmt: skip


def make_model(model_type: str) -> PreTrainedModel:
    """A random tiny model of a family, every weight of it used. Raises CheckpointError where it is refused."""
    config_class = CONFIG_MAPPING[model_type]
    usual = config_class()
    sizes = {name: size for name, size in SIZES.items() if hasattr(usual, name)}
    if getattr(usual, "sliding_window", None) is None:
        sizes.pop("sliding_window", None)
    if getattr(usual, "layer_types", None) is not None:
        sizes["layer_types"] = [usual.layer_types[0], usual.layer_types[-1]]
    if model_type in LATENT_ATTENTION:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    while True:
        try:
            config = config_class(**sizes)
            break
        except AttributeError as error:  # a setting that follows from others
            del sizes[next(name for name in sizes if f"'{name}'" in str(error))]
    refuse_unsupported(Path(model_type), config)
    torch.manual_seed(0)
    model = causal_class(config)(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter += (0.25 if parameter.dim() > 1 or name.endswith("bias") else 0.1) * torch.randn_like(parameter)
    return model


@pytest.fixture(autouse=True)
def known(request):
    name = request.node.callspec.params.get("model_type") if hasattr(request.node, "callspec") else None
    if name is not None and name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")


@pytest.mark.parametrize("model_type", DECODED)
def test_families_that_are_decoded_as_they_are(model_type):
    model = make_model(model_type)
    probe = make_probe(model, 60)
    try:
        step = verify_step(model, 60, LIMITS)
    except CheckpointError as error:
        assert model_type in DECODED_BY_NEWER and "0 of them use" in str(error)
        return
    check_module(step, probe)


@pytest.mark.parametrize("model_type", REFUSED)
def test_families_that_cannot_be_decoded_are_refused_by_name(model_type):
    with pytest.raises(CheckpointError, match=REFUSED[model_type]) as caught:
        model = make_model(model_type)
        probe = make_probe(model, 60)
        check_module(verify_step(model, 60, LIMITS), probe)
    assert "\n" not in str(caught.value)


def test_what_a_compiler_gets_wrong_is_not_kept(verifier):
    probe = make_probe(verifier, 60)
    step = verify_step(toy.make_drafter("always", verifier), 60, LIMITS)
    check_compiled(step, eager_run(step), probe)

    def wrong(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = eager_run(step)(inputs)
        outputs[3][-1, 5] += 40 * outputs[3].abs().max()
        return outputs

    with pytest.raises(BuildError, match="the compiler errs"):
        check_compiled(step, wrong, probe)


def test_weights_that_give_no_numbers_are_refused(verifier):
    model = toy.make_drafter("always", verifier)
    with torch.no_grad():
        model.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(CheckpointError, match="not finite"):
        make_probe(model, 60)
