"""Levels of quantised GGUF files: they give the loaded weights, whatever the bytes of the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.yggc.checkpoint_makers import make_llama, make_tokenizer, write_gguf, write_llama
from yggc.checkpoints import affine_weights, load_model, open_checkpoint
from yggc.gguf_file import AFFINE_BLOCKS, gguf_affine_weights, read_gguf
from yggc.packing import AffineWeights, Format, pack, unpack

TYPES = {"Q4_0": Format.AFFINE4, "Q4_1": Format.AFFINE4, "Q8_0": Format.AFFINE8}
MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MATRICES += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = {f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in MATRICES}
NAMES |= {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


def write_quantised(path: Path, tokenizer: Tokenizer, kind: str, **changes: object) -> Path:
    model = make_llama(0, hidden_size=64, intermediate_size=96, **changes)
    return write_gguf(path, model, tokenizer, gguf.GGMLQuantizationType[kind])


def scramble(path: Path) -> None:
    """Give every quantised tensor random levels, all that its type has, with scales and offsets of both signs."""
    generator = np.random.default_rng(0)
    with path.open("r+b") as file:
        for tensor in read_gguf(path).tensors:
            if tensor.type not in AFFINE_BLOCKS:
                continue
            num_bytes = gguf.GGML_QUANT_SIZES[tensor.type][1]
            num_halves = 2 if tensor.type is gguf.GGMLQuantizationType.Q4_1 else 1
            blocks = generator.integers(0, 256, (tensor.num_bytes // num_bytes, num_bytes), np.uint8)
            blocks[0, -2:] = (0x80, 0x7F)  # -128 and 127; as two halves each, 0 and 8, 15 and 7
            blocks[-1, -2:] = (0x0F, 0xF0)
            halves = (generator.normal(size=(len(blocks), num_halves)) / 64).astype(np.float16)
            halves[1, 0] = 0.0
            blocks[:, : 2 * num_halves] = halves.view(np.uint8)
            file.seek(tensor.offset)
            file.write(blocks.tobytes())


def assert_levels_give_the_weights(path: Path, names: set[str], format: Format) -> dict[str, AffineWeights]:
    """Every named matrix has levels that give its weights and are packed; +0 and -0 count as the same."""
    checkpoint = open_checkpoint(str(path))
    found = gguf_affine_weights(read_gguf(path), checkpoint.config)
    weights = load_model(checkpoint, torch.float32).state_dict()
    assert set(found) == names
    for name, affine in found.items():
        assert torch.equal(affine.values(), weights[name]), name
        matrix = pack(weights[name], affine)
        assert matrix.format is format
        assert torch.equal(unpack(matrix), weights[name]), name
    return found


@pytest.mark.parametrize("kind", TYPES)
def test_levels_give_the_weights_of_a_quantised_llama(tmp_path, tokenizer, kind):
    path = write_quantised(tmp_path / "model.gguf", tokenizer, kind)
    assert_levels_give_the_weights(path, NAMES, TYPES[kind])


@pytest.mark.parametrize("kind", TYPES)
def test_levels_give_the_weights_whatever_the_file_holds(tmp_path, tokenizer, kind):
    path = write_quantised(tmp_path / "model.gguf", tokenizer, kind)
    scramble(path)
    for affine in assert_levels_give_the_weights(path, NAMES, TYPES[kind]).values():
        levels = affine.levels.unique()
        assert (int(levels[0]), int(levels[-1])) == (0, 2**affine.bits - 1)
        assert affine.bits == (4 if TYPES[kind] is Format.AFFINE4 else 8)
        assert affine.scales.dtype == affine.offsets.dtype == torch.float16
        assert bool((affine.scales < 0).any()) and bool((affine.scales == 0).any())


def scales_by_layer_part(path: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales [N, K / 32] of the second layer's q, k or v: (as they lie in the file, as they are found)."""
    file = read_gguf(path)
    tensor = next(tensor for tensor in file.tensors if tensor.name == f"blk.1.attn_{part}.weight")
    stored = np.frombuffer(path.read_bytes(), np.uint8, tensor.num_bytes, tensor.offset).reshape(tensor.shape[0], 2, -1)
    found = gguf_affine_weights(file, open_checkpoint(str(path)).config)[f"model.layers.1.self_attn.{part}_proj.weight"]
    return torch.from_numpy(stored[:, :, :2].copy()).view(torch.float16)[:, :, 0], found.scales


@pytest.mark.parametrize("kind", TYPES)
def test_the_query_and_key_heads_of_a_llama_are_turned_back(tmp_path, tokenizer, kind):
    path = write_quantised(tmp_path / "model.gguf", tokenizer, kind)
    scramble(path)
    for part, heads in (("q", 4), ("k", 2)):
        stored, found = scales_by_layer_part(path, part)
        head_dim = len(stored) // heads
        for row in range(len(stored)):  # the file has the rows of a head's two halves in turns
            head, half, index = row // head_dim, row % head_dim // (head_dim // 2), row % (head_dim // 2)
            assert torch.equal(found[row], stored[head * head_dim + 2 * index + half])
    stored, found = scales_by_layer_part(path, "v")
    assert torch.equal(found, stored)


@pytest.mark.parametrize("kind", TYPES)
def test_heads_of_other_families_stay_as_they_are_and_biases_have_no_levels(tmp_path, tokenizer, kind):
    torch.manual_seed(1)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=300, num_hidden_layers=2, max_position_embeddings=128, **sizes)
    config.tie_word_embeddings = False
    model = Qwen2ForCausalLM(config).eval()
    path = tmp_path / "model.gguf"
    write_gguf(path, model, tokenizer, gguf.GGMLQuantizationType[kind], architecture="qwen2")
    scramble(path)
    assert_levels_give_the_weights(path, NAMES, TYPES[kind])
    for part in "qkv":
        stored, found = scales_by_layer_part(path, part)
        assert torch.equal(found, stored)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_0", "Q5_1"])
def test_other_types_have_no_levels(tmp_path, tokenizer, kind):
    path = write_quantised(tmp_path / "model.gguf", tokenizer, kind)
    assert gguf_affine_weights(read_gguf(path), open_checkpoint(str(path)).config) == {}


def test_the_types_with_levels_are_those_of_two_numbers_a_block():
    assert {kind.name for kind in AFFINE_BLOCKS} == set(TYPES)
    for kind, block in AFFINE_BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[kind] == (32, block.num_bytes)
        assert block.level_bytes == 32 * block.bits // 8


@pytest.mark.parametrize("tied", [False, True])
def test_levels_are_found_under_every_name_of_a_matrix(tmp_path, tokenizer, tied):
    path = write_quantised(tmp_path / "model.gguf", tokenizer, "Q8_0", tie_word_embeddings=tied)
    checkpoint = open_checkpoint(str(path))
    model = load_model(checkpoint, torch.float32)
    found = affine_weights(checkpoint, model)
    assert set(found) == NAMES
    assert (found["lm_head.weight"] is found["model.embed_tokens.weight"]) == tied
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, affine in found.items():
        assert torch.equal(affine.values(), parameters[name]), name


def test_a_folder_has_no_levels(tmp_path, tokenizer):
    checkpoint = open_checkpoint(str(write_llama(tmp_path / "model", 0, tokenizer)))
    assert affine_weights(checkpoint, load_model(checkpoint, torch.float32)) == {}


def test_scales_too_large_for_an_offset_in_float16_leave_the_weights_as_they_are(tmp_path, tokenizer):
    path = write_quantised(tmp_path / "model.gguf", tokenizer, "Q8_0")
    tensor = next(tensor for tensor in read_gguf(path).tensors if tensor.name == "blk.0.ffn_down.weight")
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.float16(600.0).tobytes())  # 128 times that is beyond float16
    checkpoint = open_checkpoint(str(path))
    name = "model.layers.0.mlp.down_proj.weight"
    weight = load_model(checkpoint, torch.float32).state_dict()[name]
    matrix = pack(weight, gguf_affine_weights(read_gguf(path), checkpoint.config)[name])
    assert matrix.format not in (Format.AFFINE4, Format.AFFINE8)
    assert torch.equal(unpack(matrix), weight)
