"""The text side of a checkpoint folder: tokenizer, chat template, special tokens, generation settings."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from yggc.weight_files import member, one_line, read_json
from yggrt.errors import CheckpointError
from yggrt.sampling import GenerationSettings, SamplingOptions

NEUTRAL_SETTINGS: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": None,
    "top_p": 1.0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "min_length": 0,
    "min_new_tokens": None,
    "stop_strings": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "watermarking_config": None,
}
"""Generation settings that change the text, and the value at which each does nothing."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Texts of the special tokens, as a chat template uses them."""

    bos: str | None = None
    eos: str | None = None
    unk: str | None = None
    pad: str | None = None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The fast tokenizer, without truncation and padding; a slow one is converted by transformers.

    Tokens that only tokenizer_config.json lists are added, as transformers does.
    Raises CheckpointError: no tokenizer, or one that cannot be read.
    """
    if (folder / "tokenizer.json").exists():
        path = member(folder, "tokenizer.json")
        try:
            tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{path} is no tokenizer: {one_line(error)}. Download it again.") from None
        _add_listed_tokens(folder, tokenizer)
    else:
        tokenizer = _converted_tokenizer(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _converted_tokenizer(folder: Path) -> Tokenizer:
    slow_files = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
    if not slow_files:
        raise CheckpointError(
            f"{folder} has no tokenizer (no tokenizer.json). Copy the tokenizer files of the checkpoint there."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        return Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and {slow_files[0]} cannot be converted ({one_line(error)}). "
            "Save the tokenizer with transformers' AutoTokenizer(...).save_pretrained and copy its tokenizer.json."
        ) from None


def _add_listed_tokens(folder: Path, tokenizer: Tokenizer) -> None:
    listed = _optional_json(folder, "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for index, entry in sorted((int(key), value) for key, value in listed.items() if key.isdigit()):
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(content, str) or tokenizer.token_to_id(content) is not None:
            continue
        flags = {name: bool(entry[name]) for name in ("single_word", "lstrip", "rstrip", "normalized") if name in entry}
        special = bool(entry.get("special", False))
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(content, special=special, **flags)])
        if tokenizer.token_to_id(content) != index:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives token {content!r} the id {index}, tokenizer.json leaves it "
                f"{tokenizer.token_to_id(content)}. Use the tokenizer files of one checkpoint."
            )


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(member(folder, name)) if (folder / name).exists() else {}


def read_chat_template(folder: Path) -> str | None:
    """chat_template.jinja, else tokenizer_config.json's (of several the one named "default"), else the older file's."""
    if (folder / "chat_template.jinja").exists():
        path = member(folder, "chat_template.jinja")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}.") from None
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = _optional_json(folder, name).get("chat_template")
        if isinstance(template, list):
            named = {
                entry["name"]: entry["template"]
                for entry in template
                if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
            }
            template = named.get("default", next(iter(named.values()), None))
        if isinstance(template, str):
            return template
    return None


def read_special_tokens(folder: Path) -> SpecialTokens:
    """From tokenizer_config.json, and special_tokens_map.json for what it lacks."""
    entries = _optional_json(folder, "special_tokens_map.json") | {
        key: value for key, value in _optional_json(folder, "tokenizer_config.json").items() if value is not None
    }

    def text(role: str) -> str | None:
        value = entries.get(f"{role}_token")
        if isinstance(value, dict):
            value = value.get("content")
        return value if isinstance(value, str) else None

    return SpecialTokens(bos=text("bos"), eos=text("eos"), unk=text("unk"), pad=text("pad"))


def eos_ids(path: Path, preferred: Any, fallback: Any) -> tuple[int, ...]:
    """The end-of-sequence ids, sorted; `preferred` counts when it is given at all, an int or a list of them.

    Negative ones, by which some configurations say that there is none, are left out.
    """
    value = fallback if preferred is None else preferred
    if value is None:
        return ()
    values = [value] if isinstance(value, int) else value
    if not isinstance(values, Iterable) or not all(isinstance(item, int) for item in values):
        raise CheckpointError(
            f"{path} has the end-of-sequence id {value!r}; a number or a list of numbers is accepted."
        )
    return tuple(sorted({item for item in values if item >= 0}))


def generation_defaults(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Those of a checkpoint's generation settings that change the text, by name, lists as tuples."""
    return tuple(
        (name, _hashable(settings[name]))
        for name in sorted(NEUTRAL_SETTINGS)
        if settings.get(name) is not None and settings[name] != NEUTRAL_SETTINGS[name]
    )


HONOURED_SETTINGS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
TOP_K_WHERE_UNSAID = 50
"""transformers' own, where a config samples and does not name it."""


def generation_settings(defaults: tuple[tuple[str, Any], ...]) -> GenerationSettings:
    """The options that a request needs to follow a checkpoint's settings; of those that are nonsense, none.

    defaults: of `generation_defaults`.
    """
    known = dict(defaults)
    samples = bool(known.get("do_sample", False))
    try:
        options = SamplingOptions(
            temperature=known.get("temperature", 1.0) if samples else 0.0,
            top_k=known.get("top_k", TOP_K_WHERE_UNSAID) if samples else 0,
            top_p=known.get("top_p", 1.0) if samples else 1.0,
            min_p=known.get("min_p", 0.0) if samples else 0.0,
            repetition_penalty=known.get("repetition_penalty", 1.0),
        )
        unsupported = [name for name in known if name not in HONOURED_SETTINGS]
    except ValueError:
        options, unsupported = SamplingOptions(), list(known)
    return GenerationSettings(
        float(options.temperature),
        options.top_k,
        float(options.top_p),
        float(options.min_p),
        float(options.repetition_penalty),
        tuple(f"{name}={known[name]}" for name in unsupported),
    )


def _hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in sorted(value.items()))
    if isinstance(value, list):
        return tuple(_hashable(item) for item in value)
    return value
