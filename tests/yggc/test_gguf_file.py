"""GGUF: the header is checked, the weights come back by their right names, the tokenizer cuts as the original did."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import (
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.yggc.checkpoint_makers import CHAT_TEMPLATE, SPECIAL_TOKENS, make_llama, make_tokenizer, write_gguf
from yggc.checkpoints import load_model, open_checkpoint
from yggc.gguf_file import read_gguf
from yggc.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from yggc.text_files import SpecialTokens
from yggrt.errors import CheckpointError

IDS = torch.arange(3, 60).unsqueeze(0)
TEXTS = (
    "the world tree, in 1066: 12345 knights!",
    "  two  spaces   three\n\n\ttab\n    indented 7",
    "It's DON'T naïve café ÅÉ",
    "日本語 и русский 😀👩‍👩‍👧",
    "<|im_start|>user\nhi<|im_end|>\n",
    "CamelCase snake_case a/b//c ²½ ١٢٣",
)


def refusal(path: Path, load: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(str(path))
        if load:
            load_model(checkpoint, torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def requantised(model: PreTrainedModel, kind: gguf.GGMLQuantizationType) -> PreTrainedModel:
    """The model whose matrices went through that quantisation and back."""
    for parameter in model.parameters():
        if parameter.ndim == 2:
            values = gguf.dequantize(gguf.quantize(parameter.detach().numpy(), kind), kind)
            parameter.data = torch.from_numpy(values).view(parameter.shape)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0", "Q5_1"])
def test_logits_equal_the_source_model(tmp_path: Path, tokenizer: Tokenizer, kind: str) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", make_llama(0), tokenizer, quantisation)
    expected = requantised(make_llama(0), quantisation)(IDS).logits
    loaded = load_model(open_checkpoint(str(path)), torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    torch.testing.assert_close(loaded(IDS).logits, expected, rtol=0, atol=1e-5)


def test_a_gguf_checkpoint_is_opened_without_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", make_llama(0, vocab_size=320), tokenizer, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(str(path))
    assert (checkpoint.kind, checkpoint.name, checkpoint.path) == ("gguf", "tiny", path)
    assert (checkpoint.bos_id, checkpoint.eos_ids, checkpoint.context) == (1, (2,), 128)
    assert checkpoint.special_tokens == SpecialTokens(bos="<|im_start|>", eos="<|im_end|>")
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.config.vocab_size == 320
    assert checkpoint.tokenizer.get_vocab() == tokenizer.get_vocab()  # the padding rows are no tokens
    assert checkpoint.num_parameters == make_llama(0, vocab_size=320).num_parameters()
    assert checkpoint.config.rms_norm_eps == make_llama(0).config.rms_norm_eps


def test_a_second_end_token_counts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "t.gguf", make_llama(0), tokenizer, tokenizer__ggml__eot_token_id=0)
    assert open_checkpoint(str(path)).eos_ids == (0, 2)


def test_a_tied_head_stays_tied(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "tied.gguf", make_llama(4, tie_word_embeddings=True), tokenizer)
    model = load_model(open_checkpoint(str(path)), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(IDS).logits, make_llama(4, tie_word_embeddings=True)(IDS).logits)


SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3"])
def test_other_families_come_back(tmp_path: Path, tokenizer: Tokenizer, family: str) -> None:
    torch.manual_seed(5)
    models = {
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
        "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    }
    model = models[family]().eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer, architecture=family)
    loaded = load_model(open_checkpoint(str(path)), torch.float32)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "scaling, metadata",
    [
        ({"rope_type": "linear", "factor": 2.0}, {"factor": 2.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"factor": 4.0, "original_context_length": 32},
        ),
    ],
)
def test_rotary_scaling_is_kept(
    tmp_path: Path, tokenizer: Tokenizer, scaling: dict[str, Any], metadata: dict[str, Any]
) -> None:
    model = make_llama(6, rope_parameters=scaling | {"rope_theta": 10000.0})
    path = tmp_path / "model.gguf"
    entries = {f"llama__rope__scaling__{key}": value for key, value in metadata.items()}
    write_gguf(path, model, tokenizer, rope_scaling=scaling["rope_type"], **entries)
    loaded = load_model(open_checkpoint(str(path)), torch.float32)
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_llama3_frequency_factors_become_its_scaling(tmp_path: Path, tokenizer: Tokenizer) -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = make_llama(7, hidden_size=64, head_dim=16, rope_parameters=scaling)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq
    assert len(factors.unique()) > 2
    path = write_gguf(tmp_path / "model.gguf", model, tokenizer, rope_factors=factors)
    checkpoint = open_checkpoint(str(path))
    assert {key: checkpoint.config.rope_parameters[key] for key in scaling} == scaling
    torch.testing.assert_close(load_model(checkpoint, torch.float32)(IDS).logits, model(IDS).logits)
    write_gguf(path, model, tokenizer, rope_factors=factors * 1.1)
    assert "not those of llama3" in refusal(path)


# Refusals


def test_every_truncation_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_llama(0), tokenizer)
    content = path.read_bytes()
    header = read_gguf(path).header_bytes
    for length in (5, 8, 20, 24, 100, header // 2, header - 1, header, header + 1000, len(content) - 1):
        path.write_bytes(content[:length])
        assert "Download it again" in refusal(path)


def test_a_damaged_header_gives_our_error_or_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "model.gguf", make_llama(0), tokenizer)
    content = path.read_bytes()
    header = read_gguf(path).header_bytes
    generator = torch.Generator().manual_seed(0)
    for position in torch.randint(4, header, (60,), generator=generator).tolist():
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x81]) + content[position + 1 :])
        try:
            open_checkpoint(str(path))
        except CheckpointError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "version, part", [(1, "GGUF version 1"), (struct.unpack("<I", b"\0\0\0\3")[0], "little-endian")]
)
def test_other_versions_and_byte_orders_are_refused(tmp_path: Path, version: int, part: str) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    assert part in refusal(path)


def test_an_architecture_that_is_not_known_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer, architecture="stablelm")
    assert "GGUF architecture 'stablelm'; accepted in GGUF: llama" in refusal(path)


def test_a_tensor_that_is_missing_or_has_no_place_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer, leave_out="blk.1.ffn_up.weight")
    assert "lacks tensor model.layers.1.mlp.up_proj.weight" in refusal(path, load=True)
    path = write_gguf(tmp_path / "n.gguf", make_llama(0), tokenizer, extra="blk.0.ffn_gate_inp.weight")
    assert "tensor blk.0.ffn_gate_inp.weight has no place in LlamaForCausalLM" in refusal(path, load=True)


def test_one_part_of_several_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer, split__count=3)
    assert "one of 3 parts" in refusal(path)


# Tokenizers


@pytest.mark.parametrize("pre, single_digits", [("gpt-2", False), ("default", False), ("smollm", True)])
def test_the_named_pre_tokenizer_cuts_as_the_original(tmp_path: Path, pre: str, single_digits: bool) -> None:
    original = make_tokenizer(single_digits=single_digits)
    path = write_gguf(tmp_path / "m.gguf", make_llama(0), original, pre=pre)
    rebuilt = open_checkpoint(str(path)).tokenizer
    for text in TEXTS:
        assert rebuilt.encode(text).tokens == original.encode(text).tokens
        assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == text


PIECES = {
    "gpt-2": ["It", "'s", "ĠĠ", "Ġ1234", "ĠDON", "'", "T", "Ċ", "Ċ", "x", "./", "AbC"],
    "smollm": ["It", "'s", "ĠĠĠ", "1", "2", "3", "4", "ĠDON", "'", "T", "Ċ", "Ċ", "x", "./", "AbC"],
    "llama-bpe": ["It", "'s", "ĠĠ", "Ġ", "123", "4", "ĠDON", "'T", "ĊĊ", "x", "./", "AbC"],
    "qwen2": ["It", "'s", "ĠĠ", "Ġ", "1", "2", "3", "4", "ĠDON", "'T", "ĊĊ", "x", "./", "AbC"],
    "tekken": ["It", "'s", "ĠĠ", "Ġ", "1", "2", "3", "4", "ĠDON", "'T", "ĊĊ", "x", "./", "Ab", "C"],
    "gpt-4o": ["It's", "ĠĠ", "Ġ", "123", "4", "ĠDON'T", "ĊĊ", "x", "./", "Ab", "C"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_where_each_pre_tokenizer_cuts(tmp_path: Path, tokenizer: Tokenizer, pre: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer, pre=pre)
    cut = gguf_tokenizer(read_gguf(path)).pre_tokenizer.pre_tokenize_str("It's   1234 DON'T\n\nx./AbC")
    assert [piece for piece, _ in cut] == PIECES[pre]


def test_special_tokens_are_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rebuilt = gguf_tokenizer(read_gguf(write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer)))
    assert rebuilt.encode("a<|im_end|>b").tokens == ["a", "<|im_end|>", "b"]
    assert [token.content for token in rebuilt.get_added_tokens_decoder().values()] == list(SPECIAL_TOKENS)
    assert rebuilt.decode(rebuilt.encode("a<|im_end|>b").ids) == "ab"


@pytest.mark.parametrize(
    "pre, stated, expected", [("gpt-2", True, True), ("llama-bpe", None, True), ("gpt-2", None, False)]
)
def test_the_first_token_follows_the_file(
    tmp_path: Path, tokenizer: Tokenizer, pre: str, stated: bool | None, expected: bool
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer, pre=pre, add_bos=stated)
    tokens = gguf_tokenizer(read_gguf(path)).encode("the tree").tokens
    assert (tokens[0] == "<|im_start|>") == expected


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    message = refusal(write_gguf(tmp_path / "m.gguf", make_llama(0), tokenizer, pre="my-own"))
    assert "'my-own'" in message
    assert all(name in message for name in PRE_TOKENIZERS)


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = ["▁t", "he", "▁the", "re", "▁there", "▁", "t", "h", "e", "r"]
    scores = [0.0] * len(pieces) + [-float(index) for index in range(len(words))]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(words)
    path = tmp_path / "spm.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + words)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    rebuilt = gguf_tokenizer(read_gguf(path))
    assert rebuilt.encode("the there").tokens == ["<s>", "▁the", "▁there"]
    assert rebuilt.encode("thé", add_special_tokens=False).tokens == ["▁t", "h", "<0xC3>", "<0xA9>"]
    for text in ("the there", " the  é 😀 there "):
        assert rebuilt.decode(rebuilt.encode(text).ids) == text
    assert json.loads(rebuilt.to_str())["model"]["byte_fallback"]
