"""GGUF files: the header, the model configuration it describes, and the weights, dequantised.

The header is read here, in milliseconds and bounds-checked, and the weights are placed here, because transformers' own
GGUF loader needs a further package, ignores rotary scaling and drops tensors that it cannot name in silence. Invariant:
every tensor of the file is either in the model or the file is refused. The tokenizer is in `yggc.gguf_tokenizer`.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from yggc.model_support import causal_class
from yggc.packing import BLOCK, AffineWeights
from yggrt.errors import CheckpointError

MAGIC = b"GGUF"
READABLE_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
DEQUANTISED_CHUNK_BYTES = 64 << 20
"""Rows are dequantised in pieces of about this many float32 bytes, so that no tensor is in memory twice."""

ARCHITECTURES = {"llama": "llama", "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture -> transformers' model_type, for those whose conversion is undone here exactly."""

ROPE_FREQUENCY_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class AffineBlock:
    """How a GGUF type stores a block of 32 weights: a float16 scale, a float16 offset or none, and the levels.

    zero: the level that means 0 where no offset is stored.
    """

    num_bytes: int
    level_bytes: int
    bits: int
    zero: int | None


AFFINE_BLOCKS = {
    gguf.GGMLQuantizationType.Q4_0: AffineBlock(18, 16, 4, 8),
    gguf.GGMLQuantizationType.Q4_1: AffineBlock(20, 16, 4, None),
    gguf.GGMLQuantizationType.Q8_0: AffineBlock(34, 32, 8, 128),
}
"""Types whose blocks are kept as they are (yggc/packing.py); weights of the others are kept in float32."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    shape:     rows first, as torch has it.
    offset:    of its first byte in the file.
    num_bytes: in the file, quantised.
    """

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """The header of a GGUF file: metadata by key, and its tensors in file order.

    header_bytes: length of the header, so of everything before the tensors.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]
    header_bytes: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Metadata of this file's architecture: `get("block_count")` is `llama.block_count` in a llama file."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(
                f"{self.path}: the GGUF metadata lacks {self.architecture}.{key}; the file is incomplete. "
                "Convert or download it again."
            )
        return value


class _Cursor:
    """Reads little-endian values one after another and refuses to pass the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.offset = path, data, 0

    def take(self, length: int) -> bytes:
        if length > len(self.data) - self.offset:
            raise CheckpointError(
                f"{self.path}: the GGUF header ends early, at byte {len(self.data)}; the file is truncated or damaged. "
                "Download it again."
            )
        self.offset += length
        return self.data[self.offset - length : self.offset]

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def count(self, smallest_item: int) -> int:
        """A 64-bit count of items of at least that many bytes each, checked before anything is allocated."""
        count = int(self.number("<Q"))
        if count * smallest_item > len(self.data) - self.offset:
            raise CheckpointError(
                f"{self.path}: the GGUF header announces {count} items at byte {self.offset}, more than the file "
                "can hold; it is truncated or damaged. Download it again."
            )
        return count

    def string(self) -> str:
        return self.take(self.count(1)).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _FLOAT32:  # 1e-5 is to come back as 1e-5, not as 9.999999747378752e-06
            return float(str(np.float32(self.number("<f"))))
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise CheckpointError(f"{self.path}: GGUF value type {kind} is unknown; the file is damaged or too new.")
        item_kind = int(self.number("<I"))
        if item_kind in _SCALARS:
            code = _SCALARS[item_kind]
            size = struct.calcsize(code)
            count = self.count(size)
            return struct.unpack(f"<{count}{code[1]}", self.take(count * size))
        if item_kind != _STRING:
            raise CheckpointError(f"{self.path}: GGUF arrays of value type {item_kind} are not supported.")
        return tuple(self.string() for _ in range(self.count(8)))


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_gguf(path: Path) -> GgufFile:
    """Reads the header and checks that every tensor lies inside the file.

    Raises CheckpointError: not a GGUF file, another version, truncated, one part of several.
    """
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(path, data)


def _read_header(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(path, data)
    cursor.take(4)
    version = cursor.number("<I")
    if version not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{path} has GGUF version {version}; versions {READABLE_VERSIONS[0]} and {READABLE_VERSIONS[-1]} in "
            "little-endian order are read. Convert the model again."
        )
    num_tensors = cursor.count(24)
    num_keys = cursor.count(13)
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(int(cursor.number("<I")))
    if metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts of a split GGUF; only whole files are read. "
            "Join them with llama.cpp's `llama-gguf-split --merge`."
        )
    infos = [_read_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", DEFAULT_ALIGNMENT)) or DEFAULT_ALIGNMENT
    start = -(-cursor.offset // alignment) * alignment
    tensors = tuple(GgufTensor(info.name, info.shape, info.type, start + info.offset, info.num_bytes) for info in infos)
    for tensor in tensors:
        if tensor.offset + tensor.num_bytes > len(data):
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name} ends at byte {tensor.offset + tensor.num_bytes}, the file "
                f"at {len(data)}. Download it again."
            )
    return GgufFile(path, metadata, tensors, cursor.offset)


def _read_tensor_info(cursor: _Cursor) -> GgufTensor:
    """One tensor's entry; its offset still counts from the start of the data."""
    name = cursor.string()
    num_dimensions = cursor.number("<I")
    if num_dimensions > 4:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {num_dimensions} dimensions; the file is damaged.")
    shape = tuple(reversed([int(cursor.number("<Q")) for _ in range(num_dimensions)])) or (1,)
    type_number, offset = cursor.number("<I"), int(cursor.number("<Q"))
    try:
        kind = gguf.GGMLQuantizationType(type_number)
    except ValueError:
        raise CheckpointError(
            f"{cursor.path}: tensor {name} has quantisation type {type_number}, which this version of the gguf "
            "package does not know. Upgrade it, or use a Q4, Q5, Q8, F16, BF16 or F32 file."
        ) from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(f"{cursor.path}: rows of tensor {name} are no multiple of {block}; the file is damaged.")
    return GgufTensor(name, shape, kind, offset, math.prod(shape) // block * block_bytes)


def gguf_config(file: GgufFile) -> PretrainedConfig:
    """The transformers configuration that the metadata describes.

    Raises CheckpointError where a part of it could only be guessed.
    """
    if file.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} holds a model of GGUF architecture {file.architecture or '(none)'!r}; "
            f"accepted in GGUF: {', '.join(ARCHITECTURES)}. Use the model's safetensors checkpoint instead."
        )
    if file.get("expert_count", 0):
        raise CheckpointError(
            f"{file.path} holds a mixture of {file.get('expert_count')} experts, which is not read from GGUF. "
            "Use the model's safetensors checkpoint instead."
        )
    names = {tensor.name for tensor in file.tensors}
    shapes = {tensor.name: tensor.shape for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{file.path} has no tensor token_embd.weight: it holds no language model.")
    hidden_size, heads = int(file.require("embedding_length")), int(file.require("attention.head_count"))
    head_dim = int(file.get("attention.key_length", hidden_size // heads))
    settings: dict[str, Any] = {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": hidden_size,
        "intermediate_size": int(file.require("feed_forward_length")),
        "num_hidden_layers": int(file.require("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.get("attention.head_count_kv", heads)),
        "max_position_embeddings": int(file.require("context_length")),
        "rms_norm_eps": float(file.require("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": _rope_parameters(file, head_dim),
    }
    rotated = int(file.get("rope.dimension_count", head_dim))
    if file.architecture == "phi3":
        settings["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
        settings["sliding_window"] = file.get("attention.sliding_window")
    elif rotated != head_dim:
        raise CheckpointError(
            f"{file.path} rotates {rotated} of {head_dim} dimensions per head, which is not read from GGUF for "
            f"{file.architecture}. Use the model's safetensors checkpoint instead."
        )
    if file.architecture == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in names
        settings["mlp_bias"] = "blk.0.ffn_gate.bias" in names
    if file.architecture in ("llama", "qwen3"):
        settings["head_dim"] = head_dim
    config = CONFIG_MAPPING[ARCHITECTURES[file.architecture]](**settings)
    config.architectures = [causal_class(config).__name__]
    return config


def _rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta = float(file.get("rope.freq_base", 10000.0))
    scaling = file.get("rope.scaling.type", "none")
    factors = next((tensor for tensor in file.tensors if tensor.name == ROPE_FREQUENCY_FACTORS), None)
    if factors is not None and scaling == "none":
        return _llama3_rope(file, factors, theta, head_dim)
    if factors is None and scaling == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if factors is None and scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(file.require("rope.scaling.factor"))}
    if factors is None and scaling == "yarn" and file.get("rope.scaling.attn_factor", 1.0) == 1.0:
        return {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": float(file.require("rope.scaling.factor")),
            "original_max_position_embeddings": int(file.require("rope.scaling.original_context_length")),
        }
    raise CheckpointError(
        f"{file.path} scales its rotary positions by {scaling!r}, which is not read from GGUF (none, linear, yarn and "
        "llama3's frequency factors are). Use the model's safetensors checkpoint instead."
    )


def _llama3_rope(file: GgufFile, factors: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF stores as one divisor per frequency; the parameters behind it are recovered.

    Every published model has low, high and original length 1, 4 and 8192; other divisors are refused.
    """
    stored = torch.cat(list(_dequantised_chunks(file.path, factors))).double()
    low, high, original = 1.0, 4.0, 8192
    factor = float(stored.max())
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    turns = original * inverse / (2 * torch.pi)
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not torch.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: the frequency factors in {ROPE_FREQUENCY_FACTORS} are not those of llama3's rotary scaling. "
            "Use the model's safetensors checkpoint instead."
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def gguf_state_dict(file: GgufFile, config: PretrainedConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights by transformers' names, dequantised and converted to dtype.

    Raises CheckpointError naming a tensor of the file that the model has no place for, or of another shape than the
    model's; a tensor that the model lacks is left to the caller.
    """
    with torch.device("meta"):
        model = causal_class(config)(config)
    names = _transformers_names(file, model)
    weights = {}
    expected = model.state_dict()
    for tensor in file.tensors:
        if tensor.name == ROPE_FREQUENCY_FACTORS:
            continue  # already in the configuration
        name = names.get(tensor.name)
        if name is None:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name} has no place in {type(model).__name__}; the file holds another "
                "kind of model than its architecture says. Use the model's safetensors checkpoint instead."
            )
        if tuple(expected[name].shape) != tensor.shape:
            raise CheckpointError(
                f"{file.path}: tensor {tensor.name} has shape {tensor.shape}, the model needs "
                f"{tuple(expected[name].shape)}; the metadata and the tensors do not belong together."
            )
        weight = torch.cat([chunk.to(dtype) for chunk in _dequantised_chunks(file.path, tensor)]).view(tensor.shape)
        weights[name] = _heads_unpermuted(file, tensor.name, weight)
    return weights


def gguf_affine_weights(file: GgufFile, config: PretrainedConfig) -> dict[str, AffineWeights]:
    """By transformers' names, the levels, scales and offsets of those matrices whose blocks are simple enough."""
    with torch.device("meta"):
        names = _transformers_names(file, causal_class(config)(config))
    found = {}
    for tensor in file.tensors:
        if tensor.type in AFFINE_BLOCKS and len(tensor.shape) == 2 and tensor.name in names:
            levels, scales, offsets = (
                _heads_unpermuted(file, tensor.name, part) for part in _affine_parts(file.path, tensor)
            )
            bits = AFFINE_BLOCKS[tensor.type].bits
            found[names[tensor.name]] = AffineWeights(levels, scales, offsets, bits)
    return found


def _affine_parts(path: Path, tensor: GgufTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Levels uint8[N, K], scales and offsets float16[N, K / 32]."""
    layout = AFFINE_BLOCKS[tensor.type]
    rows, features = tensor.shape
    blocks = torch.from_numpy(
        np.memmap(path, np.uint8, "c", tensor.offset, (rows, features // BLOCK, layout.num_bytes))
    )
    scales = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0]
    stored = blocks[:, :, layout.num_bytes - layout.level_bytes :]
    is_signed_bytes = layout.level_bytes == BLOCK  # adding 128 wraps around: -128 becomes 0
    levels = stored + 128 if is_signed_bytes else torch.cat((stored & 15, stored >> 4), dim=2)
    if layout.zero is None:
        offsets = blocks[:, :, 2:4].contiguous().view(torch.float16)[:, :, 0]
    else:
        offsets = scales * -layout.zero
    return levels.reshape(rows, features).contiguous(), scales.contiguous(), offsets.contiguous()


def _transformers_names(file: GgufFile, model: torch.nn.Module) -> dict[str, str]:
    """GGUF name -> transformers' name, for every entry of the model's state."""
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == file.architecture)
    mapping = gguf.get_tensor_name_map(architecture, int(file.require("block_count")))
    names = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        found = mapping.get_name(stem)
        if found is not None:
            names[f"{found}.{suffix}"] = name
    return names


def _heads_unpermuted(file: GgufFile, name: str, weight: torch.Tensor) -> torch.Tensor:
    """llama files interleave the two halves of every query and key head; transformers keeps them apart."""
    if file.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return weight
    heads = int(file.require("attention.head_count"))
    if ".attn_k." in name:
        heads = int(file.get("attention.head_count_kv", heads))
    split = weight.view(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return split.transpose(1, 2).reshape(weight.shape)


def _dequantised_chunks(path: Path, tensor: GgufTensor) -> Iterator[torch.Tensor]:
    """The tensor's values, flat float32, a bounded number of rows at a time."""
    rows = math.prod(tensor.shape[:-1])
    stored = np.memmap(path, np.uint8, "r", tensor.offset, (rows, tensor.num_bytes // rows))
    step = max(1, DEQUANTISED_CHUNK_BYTES // (4 * tensor.shape[-1]))
    for first in range(0, rows, step):
        try:
            values = _dequantise(np.ascontiguousarray(stored[first : first + step]), tensor.type)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} is quantised as {tensor.type.name}, which the gguf package cannot "
                "dequantise. Use a Q4, Q5, Q8, F16, BF16 or F32 file."
            ) from None
        yield torch.from_numpy(values).flatten()


def _dequantise(stored: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of whole rows -> float32 values, in memory of their own."""
    if kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
        return stored.view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.float16).astype(np.float32)
    return np.array(gguf.dequantize(stored, kind), np.float32)
