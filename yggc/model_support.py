"""Which kinds of model can be decoded speculatively: decoders whose cache is rows that can be dropped again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from yggrt.errors import CheckpointError

REWINDABLE_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
POSITION_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary scalings whose frequencies change with the length of the text, so that cached keys would need recomputing."""

ENCODERS = frozenset(
    (
        *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
        *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
        *("xlm-roberta", "xlm-roberta-xl", "xmod"),
    )
)
"""Read in both directions unless their configuration says is_decoder."""

LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel")
"""How the names of transformers' causal language models end."""

NOT_REWINDABLE = frozenset(("lfm2", "lfm2_moe", "moshi", "reformer", "xlm", "xlnet", "zaya"))
"""Last resort, for models whose configuration and class do not tell."""


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """transformers' own class with a language-model head for this configuration."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes: tuple[type[PreTrainedModel], ...] = found if isinstance(found, tuple) else (found,)
    named = getattr(config, "architectures", None) or ()
    return next((each for each in classes if each.__name__ in named), classes[0])


def refuse_unsupported(path: Path, config: PretrainedConfig) -> None:
    """Raises CheckpointError naming the kind of model that cannot be used, and why."""
    model_type = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(path, model_type, "is an encoder-decoder; decoder-only language models are accepted")
    if any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config", "vq_config")):
        raise _refusal(
            path, model_type, "takes images or sound; text-only language models are accepted. Save its text part alone"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refusal(
            path, model_type, "is no causal language model; models of transformers' AutoModelForCausalLM are"
        )
    if model_type in ENCODERS and not getattr(config, "is_decoder", False):
        raise _refusal(path, model_type, "reads text in both directions; causal language models are accepted")
    for architecture in getattr(config, "architectures", None) or ():
        if not architecture.endswith(LANGUAGE_HEADS):
            raise _refusal(path, model_type, f"was saved as {architecture}, which has no language-model head")
    _refuse_recurrent(path, config)
    if config.get_text_config() is not config or not causal_class(config).__name__.endswith(LANGUAGE_HEADS):
        raise _refusal(path, model_type, "is made of several models; text-only language models are accepted")
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") in POSITION_DEPENDENT_ROPE:
            raise _refusal(
                path,
                model_type,
                f"scales its rotary positions by {parameters['rope_type']!r}, which changes with the text's length and "
                "cannot be compiled ahead of time; accepted are fixed scalings (default, linear, yarn, llama3)",
            )


def _refuse_recurrent(path: Path, config: PretrainedConfig) -> None:
    advice = "cannot be rewound after a rejected draft; models of full or sliding attention layers are accepted"
    layers: set[str] = set()
    for name in ("layer_types", "layers_block_type", "block_types"):
        layers.update(getattr(config, name, None) or ())
    if others := sorted(layers - REWINDABLE_LAYERS):
        raise _refusal(path, config.model_type, f"has {', '.join(others)} layers, whose cache {advice}")
    if config.model_type in NOT_REWINDABLE or getattr(causal_class(config), "_is_stateful", False):
        raise _refusal(path, config.model_type, f"keeps a state that {advice}")


def _rope_parameters(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary settings: one set, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))


def _refusal(path: Path, model_type: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path}: model_type {model_type} {reason}.")
