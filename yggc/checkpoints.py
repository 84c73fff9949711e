"""Checkpoints as they come: a folder, a hub id or a GGUF file, opened without weights and loaded with all of them.

Invariants: nothing of a checkpoint is ever executed (no pickles, no remote code), every file that is read lies in the
checkpoint's own folder, and a model that is returned has every one of its weights from the files.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel, __version__
from transformers.utils import logging

from yggc.gguf_file import GgufFile, gguf_affine_weights, gguf_config, gguf_state_dict, is_gguf, read_gguf
from yggc.gguf_tokenizer import gguf_tokenizer
from yggc.model_support import causal_class, refuse_unsupported
from yggc.packing import AffineWeights
from yggc.text_files import (
    SpecialTokens,
    eos_ids,
    generation_defaults,
    read_chat_template,
    read_special_tokens,
    read_tokenizer,
)
from yggc.weight_files import Fingerprint, WeightFile, find_weight_files, member, one_line, read_json, weight_dtype
from yggrt.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[\w.-]+)?")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
ACCEPTED = "accepted: a folder with config.json and safetensors, a hub id (owner/name), or a .gguf file"

_HARMLESS_KEYS = re.compile(
    r"(rotary_emb\.inv_freq|\brope\.freqs|attn\.bias|attention\.bias|masked_bias|position_ids)$"
)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A checkpoint that was looked at but not loaded.

    source:              as typed: a folder, hub id or GGUF file.
    path:                the folder, or the GGUF file.
    kind:                "folder" or "gguf".
    tokenizer:           without truncation or padding.
    eos_ids:             sorted; empty when the checkpoint names none.
    generation_defaults: (name, value) pairs of its generation config that change the text.
    dtype:               of most of the weights, in torch's words; "float32" for a quantised GGUF.
    fingerprint:         sha256 in hex over configuration, tokenizer files and (sampled) weights.
    weight_bytes:        size of the weight files.
    num_parameters:      elements of all tensors in the files.
    context:             positions the model can be used at.
    """

    source: str
    path: Path
    kind: str
    config: PretrainedConfig
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: SpecialTokens
    bos_id: int | None
    eos_ids: tuple[int, ...]
    generation_defaults: tuple[tuple[str, Any], ...]
    dtype: str
    fingerprint: str
    weight_bytes: int
    num_parameters: int
    context: int

    @property
    def name(self) -> str:
        """A short name for files made from this checkpoint."""
        if self.kind == "gguf":
            return self.path.stem
        return self.source.rsplit("/", 1)[-1] if is_hub_id(self.source) else self.path.resolve().name


def open_checkpoint(source: str) -> Checkpoint:
    """Looks at a checkpoint without loading weights.

    A folder whose configuration names code of its own (`auto_map`) is opened with transformers' own classes when these
    know its model_type; its code never runs.

    Raises CheckpointError, in one line: not there, incomplete, damaged, or of a kind that is not supported.
    """
    try:
        path = resolve(source)
        return _open_gguf(source, read_gguf(path)) if path.is_file() else _open_folder(source, path)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be read: {error.strerror or one_line(error)}.") from error


def is_hub_id(source: str) -> bool:
    return HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def resolve(source: str) -> Path:
    """The folder or GGUF file that a source stands for; a hub id goes through the local hub cache first."""
    path = Path(os.path.expanduser(source))
    if source and path.is_dir():
        return path
    if path.is_file():
        if is_gguf(path):
            return path
        hint = " Give the folder that it lies in." if path.suffix in (".safetensors", ".json") else ""
        raise CheckpointError(f"{source} is a file, but no GGUF file; {ACCEPTED}.{hint}")
    if is_hub_id(source) and path.suffix.lower() not in (".gguf", ".safetensors", ".bin", ".json"):
        return _hub_snapshot(source)
    raise CheckpointError(f"{source or 'an empty path'} does not exist; {ACCEPTED}. Check the spelling of the path.")


def _hub_snapshot(hub_id: str) -> Path:
    patterns: dict[str, Any] = {"allow_patterns": HUB_FILES, "ignore_patterns": ["*/*"]}
    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError, ValueError, OSError):
        folder = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True, **patterns))
        with contextlib.suppress(CheckpointError):
            if (folder / "config.json").exists() and find_weight_files(folder):
                return folder
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            return folder  # what is missing there is said by the checks of the folder
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, **patterns))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        unreachable = isinstance(error, LocalEntryNotFoundError)
        reason = "the hub cannot be reached" if unreachable else f"{type(error).__name__}: {one_line(error)}"
        raise CheckpointError(
            f"{hub_id} is no folder here, is not in the local hub cache, and cannot be fetched ({reason}); {ACCEPTED}. "
            "Download it first, or give a path."
        ) from None


def _open_folder(source: str, folder: Path) -> Checkpoint:
    _refuse_foreign_folder(folder)
    raw = read_json(member(folder, "config.json"))
    config = _config(folder, raw)
    weights = find_weight_files(folder)
    has_generation_config = (folder / "generation_config.json").exists()
    generation = read_json(member(folder, "generation_config.json")) if has_generation_config else raw
    tokenizer = _quietly(folder, read_tokenizer, folder)
    _check_tokenizer_fits(folder, tokenizer, config)
    bos_id = config.bos_token_id if generation.get("bos_token_id") is None else generation["bos_token_id"]
    return Checkpoint(
        source=source,
        path=folder,
        kind="folder",
        config=config,
        tokenizer=tokenizer,
        chat_template=read_chat_template(folder),
        special_tokens=read_special_tokens(folder),
        bos_id=bos_id if isinstance(bos_id, int) else None,
        eos_ids=eos_ids(folder, generation.get("eos_token_id"), config.eos_token_id),
        generation_defaults=generation_defaults(generation),
        dtype=weight_dtype(weights),
        fingerprint=_folder_fingerprint(folder, weights),
        weight_bytes=sum(file.num_bytes for file in weights),
        num_parameters=sum(file.num_elements for file in weights),
        context=_context(folder, config),
    )


def _refuse_foreign_folder(folder: Path) -> None:
    """Folders that hold something else than one whole transformers checkpoint."""
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        raise CheckpointError(f"{folder} is empty; {ACCEPTED}.")
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{folder} holds an adapter (adapter_config.json), not a whole model; {ACCEPTED}. Merge it into its base "
            "model first (peft's merge_and_unload) and save the result."
        )
    if "config.json" not in names:
        ggufs = [name for name in names if name.endswith(".gguf")]
        hint = f" It holds {ggufs[0]}: give that file itself." if ggufs else ""
        raise CheckpointError(f"{folder} has no config.json (it has {', '.join(names[:4])}); {ACCEPTED}.{hint}")


def _config(folder: Path, raw: dict[str, Any]) -> PretrainedConfig:
    """transformers' configuration object, made without running anything of the folder's."""
    model_type = str(raw.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        reason = (
            "it needs Python code that comes with the checkpoint (auto_map), which is never run"
            if "auto_map" in raw
            else f"transformers {__version__} does not know it; a newer one may"
        )
        raise CheckpointError(f"{folder} has model_type {model_type!r}: {reason}.")
    if method := raw.get("quantization_config"):
        method = method.get("quant_method", "?") if isinstance(method, dict) else method
        raise CheckpointError(
            f"{folder} is quantised ({method}); checkpoints in float32, float16 or bfloat16 and GGUF files are "
            "accepted. Use the original checkpoint."
        )
    if raw.get("transformers_weights"):
        raise CheckpointError(f"{folder}/config.json names a weight file of its own (transformers_weights); remove it.")
    config: PretrainedConfig = _quietly(folder, CONFIG_MAPPING[model_type].from_dict, dict(raw))
    refuse_unsupported(folder, config)
    return config


def _open_gguf(source: str, file: GgufFile) -> Checkpoint:
    config = _quietly(file.path, gguf_config, file)
    tokenizer = _quietly(file.path, gguf_tokenizer, file)
    _check_tokenizer_fits(file.path, tokenizer, config)
    fingerprint = Fingerprint()
    fingerprint.add_file(file.path, [tensor.offset for tensor in file.tensors])
    kinds = {tensor.type.name for tensor in file.tensors if len(tensor.shape) > 1}
    whole = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    end_of_turn = file.metadata.get("tokenizer.ggml.eot_token_id")
    stops = [token for token in (config.eos_token_id, end_of_turn) if token is not None]
    template = file.metadata.get("tokenizer.chat_template")
    return Checkpoint(
        source=source,
        path=file.path,
        kind="gguf",
        config=config,
        tokenizer=tokenizer,
        chat_template=template if isinstance(template, str) else None,
        special_tokens=SpecialTokens(
            bos=_token_text(file, "bos"),
            eos=_token_text(file, "eos"),
            unk=_token_text(file, "unknown"),
            pad=_token_text(file, "padding"),
        ),
        bos_id=config.bos_token_id,
        eos_ids=eos_ids(file.path, stops, None),
        generation_defaults=(),
        dtype=whole.get(next(iter(kinds)), "float32") if len(kinds) == 1 else "float32",
        fingerprint=fingerprint.hexdigest(),
        weight_bytes=sum(tensor.num_bytes for tensor in file.tensors),
        num_parameters=sum(tensor.num_elements for tensor in file.tensors),
        context=_context(file.path, config),
    )


def _token_text(file: GgufFile, role: str) -> str | None:
    index = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def _check_tokenizer_fits(path: Path, tokenizer: Tokenizer, config: PretrainedConfig) -> None:
    token, index = max(tokenizer.get_vocab().items(), key=lambda item: item[1], default=("", -1))
    if index >= config.vocab_size:
        raise CheckpointError(
            f"{path}: the tokenizer has a token {token!r} with id {index}, the model only ids 0 to "
            f"{config.vocab_size - 1}. Resize the model's embedding, or use the tokenizer it was trained with."
        )


def _context(path: Path, config: PretrainedConfig) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise CheckpointError(f"{path} does not say how long its context is: config.json has no max_position_embeddings.")


def _folder_fingerprint(folder: Path, weights: tuple[WeightFile, ...]) -> str:
    fingerprint = Fingerprint()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".model", ".txt") and path.is_file():
            fingerprint.add(path.name, member(folder, path.name).read_bytes())
    for file in weights:
        fingerprint.add_file(file.path, file.starts)
    return fingerprint.hexdigest()


def load_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the CPU in evaluation mode, without gradients, every weight from the checkpoint.

    Raises CheckpointError naming the tensor that is missing, has another shape, or has no place in the model.
    """
    config = checkpoint.config
    model_class = causal_class(config)
    options: dict[str, Any] = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": "sdpa" if model_class._supports_sdpa else "eager",
        "ignore_mismatched_sizes": True,  # reported here instead, by name
        "output_loading_info": True,
    }
    if checkpoint.kind == "gguf":
        weights = _quietly(checkpoint.path, gguf_state_dict, read_gguf(checkpoint.path), config, dtype)
        model, info = _quietly(checkpoint.path, model_class.from_pretrained, None, state_dict=weights, **options)
    else:
        find_weight_files(checkpoint.path)
        options |= {"use_safetensors": True, "local_files_only": True}
        model, info = _quietly(checkpoint.path, model_class.from_pretrained, str(checkpoint.path), **options)
    _check_loading(checkpoint, type(model).__name__, info)
    loaded: PreTrainedModel = model.eval()
    return loaded.requires_grad_(False)


def affine_weights(checkpoint: Checkpoint, model: PreTrainedModel) -> dict[str, AffineWeights]:
    """The levels that a quantised checkpoint's matrices were read from, under every name the model has for them."""
    if checkpoint.kind != "gguf":
        return {}
    found = gguf_affine_weights(read_gguf(checkpoint.path), checkpoint.config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_memory = {parameters[name].data_ptr(): weights for name, weights in found.items()}
    return {name: by_memory[value.data_ptr()] for name, value in parameters.items() if value.data_ptr() in by_memory}


def _check_loading(checkpoint: Checkpoint, model_name: str, info: dict[str, Any]) -> None:
    missing = sorted(info["missing_keys"])
    if missing:
        tied = " (tie_word_embeddings is false, so it must be there)" if missing[0].startswith("lm_head") else ""
        raise CheckpointError(
            f"{checkpoint.path} lacks tensor {missing[0]}{tied}{_and_more(missing)}; {model_name} needs it. "
            "Download the checkpoint again, or save the whole model again."
        )
    mismatched = sorted(info["mismatched_keys"], key=str)
    if mismatched:
        name, found, needed = mismatched[0]
        raise CheckpointError(
            f"{checkpoint.path}: tensor {name} has shape {tuple(found)}, {model_name} needs {tuple(needed)}"
            f"{_and_more(mismatched)}; config.json and the weights do not belong together."
        )
    unexpected = sorted(name for name in info["unexpected_keys"] if not _HARMLESS_KEYS.search(name))
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path} holds tensor {unexpected[0]}{_and_more(unexpected)}, which {model_name} has no place "
            "for; config.json and the weights do not belong together."
        )
    for message in info.get("error_msgs") or ():
        raise CheckpointError(f"{checkpoint.path} cannot be loaded: {str(message).splitlines()[0]}")


def _and_more(names: list[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _quietly(path: Path, function: Any, *arguments: Any, **options: Any) -> Any:
    """Calls a library, silent, and turns its errors into one line.

    These libraries raise nearly everything, bare Exception included, for damaged input.
    """
    try:
        with silence_libraries():
            return function(*arguments, **options)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {one_line(error)}).") from error


@contextlib.contextmanager
def silence_libraries() -> Iterator[None]:
    """transformers without progress bars and advice; its settings are as before afterwards."""
    transformers_logging: Any = logging  # its functions carry no types
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    hub_bars_off = are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        if not hub_bars_off and os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS") is None:
            enable_progress_bars()
        elif hub_bars_off:
            disable_progress_bars()
