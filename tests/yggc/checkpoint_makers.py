"""Tiny checkpoints, made from nothing and the same every time, for tests of the compiler's first stages."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = (
    "the world tree holds nine worlds in its branches and its roots",
    "a small model drafts and a large model decides what to keep",
    "in 1066 there were 12 kings, 345 knights and 6789 ravens",
    "def add(a, b):\n    return a + b\n",
    "the roots of the tree are in the well of the wise",
)


def make_tokenizer(vocab_size: int = 300, single_digits: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer with ChatML's special tokens first.

    From 260 tokens on it can write every byte; a smaller one only the characters of TEXT.
    """
    tokenizer = Tokenizer(models.BPE())
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_only]) if single_digits else bytes_only
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if vocab_size >= 260 else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    assert tokenizer.get_vocab_size() == vocab_size, f"TEXT gives {tokenizer.get_vocab_size()} tokens"
    return tokenizer


def make_llama(seed: int, vocab_size: int = 300, **changes: Any) -> LlamaForCausalLM:
    """A random float32 Llama of two layers; its logits have clear winners."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def write_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: Tokenizer, **save_options: Any) -> Path:
    """Saves as `save_pretrained` does, with the text files that go with it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, **save_options)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


def write_llama(folder: Path, seed: int, tokenizer: Tokenizer | None = None, **changes: Any) -> Path:
    """A folder with a random Llama; changes go to its configuration (vocab_size may exceed the tokenizer's)."""
    tokenizer = tokenizer or make_tokenizer()
    changes.setdefault("vocab_size", tokenizer.get_vocab_size())
    return write_checkpoint(folder, make_llama(seed, **changes), tokenizer)


def write_pair(folder: Path, **drafter_changes: Any) -> tuple[Path, Path]:
    """An unrelated drafter of one layer and a verifier of two, with one tokenizer: (drafter, verifier)."""
    tokenizer = make_tokenizer()
    drafter = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32} | drafter_changes
    return (
        write_llama(folder / "drafter", 1, tokenizer, **drafter),
        write_llama(folder / "verifier", 2, tokenizer),
    )


def edit_json(path: Path, **changes: Any) -> None:
    """Sets entries of a JSON file; None removes one."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not None}))


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    pre: str = "gpt-2",
    add_bos: bool | None = False,
    rope_scaling: str | None = None,
    rope_factors: torch.Tensor | None = None,
    leave_out: str | None = None,
    extra: str | None = None,
    **metadata: float,
) -> Path:
    """The model as llama.cpp's converter writes it: its names, interleaved heads, quantised matrices.

    add_bos: None leaves the entry out. leave_out, extra: a tensor not to write, one more to write.
    metadata: further entries, "__" for each dot of the key.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
    if rope_scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling)
    _add_gguf_tokenizer(writer, tokenizer, config.vocab_size, pre)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for key, value in metadata.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key.replace("__", "."), value)
    tensors = {name: tensor for name, tensor in _gguf_tensors(model, architecture).items() if name != leave_out}
    if rope_factors is not None:
        tensors["rope_freqs.weight"] = rope_factors
    if extra is not None:
        tensors[extra] = torch.zeros(4, 32)
    for name, tensor in tensors.items():
        used = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(tensor.contiguous().numpy(), used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocab_size: int, pre: str) -> None:
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    padding = range(len(tokens), vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in padding])
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens] + [5 for _ in padding])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_tensors(model: PreTrainedModel, architecture: str) -> dict[str, torch.Tensor]:
    config = model.config
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        target = f"{names.get_name(stem)}.{suffix}"
        if architecture == "llama" and (".attn_q." in target or ".attn_k." in target):
            heads = config.num_attention_heads if ".attn_q." in target else config.num_key_value_heads
            halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[target] = tensor
    return tensors
