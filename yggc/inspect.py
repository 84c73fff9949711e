"""Do two checkpoints make a pair, and is there room to build it?

A pair is lossless when an id means the same text to both models, so vocabularies, merges and decoding must agree. How
text is cut into tokens is the verifier's business alone: a drafter that cuts otherwise costs acceptance, not truth.
"""

import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from yggc.checkpoints import Checkpoint
from yggc.room import (
    DEVICE_MEMORY_OF_TOOLS,
    DEVICE_PER_WEIGHT_BYTE,
    available_device_memory,
    available_disk,
    available_memory,
    existing_parent,
    readable,
)
from yggrt.errors import BuildError, PairError

PROBE_SEPARATOR = "\n%%\n"

MEMORY_PER_WEIGHT_BYTE = 3.0
"""While one model is compiled there are its weights, the compiler's packed copy, and the file that is being written."""
MEMORY_OF_TOOLS = 1_500_000_000
"""torch, transformers and the compiler themselves."""
BUNDLE_PER_WEIGHT_BYTE = 1.6
CACHE_PER_WEIGHT_BYTE = 3.2
"""The artifacts are kept in the cache, and a compilation writes its constants there once more on the way."""
DISK_OF_TOOLS = 300_000_000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What later stages need to know of one model before it is loaded.

    padded_vocab_size: columns of its logits; those from the pair's vocab_size on are no tokens.
    context:           positions it can be used at.
    dtype:             of its weights as stored.
    """

    source: str
    model_type: str
    padded_vocab_size: int
    context: int
    dtype: str
    hidden_size: int
    num_layers: int
    num_parameters: int
    weight_bytes: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Two checkpoints that fit together.

    vocab_size: ids below it are tokens, for both models.
    eos_ids:    the verifier's, sorted; only these end a text.
    notices:    sentences for the user about what works but is not as it might be expected.
    """

    vocab_size: int
    drafter: ModelSpec
    verifier: ModelSpec
    eos_ids: tuple[int, ...]
    notices: tuple[str, ...]


def inspect_pair(drafter: Checkpoint, verifier: Checkpoint) -> PairSpec:
    """Compares the two and collects what later stages need.

    Raises PairError naming the first id, merge or text on which they disagree.
    """
    vocab_size = _compare_vocabularies(drafter.tokenizer, verifier.tokenizer)
    _compare_models(drafter.tokenizer, verifier.tokenizer)
    probes = probe_corpus(verifier.tokenizer)
    _compare_decoding(drafter.tokenizer, verifier.tokenizer, probes)
    return PairSpec(
        vocab_size=vocab_size,
        drafter=_model_spec(drafter),
        verifier=_model_spec(verifier),
        eos_ids=verifier.eos_ids,
        notices=tuple(_notices(drafter, verifier, probes)),
    )


def _model_spec(checkpoint: Checkpoint) -> ModelSpec:
    config = checkpoint.config
    return ModelSpec(
        source=checkpoint.source,
        model_type=config.model_type,
        padded_vocab_size=config.vocab_size,
        context=checkpoint.context,
        dtype=checkpoint.dtype,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_parameters=checkpoint.num_parameters,
        weight_bytes=checkpoint.weight_bytes,
        fingerprint=checkpoint.fingerprint,
    )


def _compare_vocabularies(drafter: Tokenizer, verifier: Tokenizer) -> int:
    """The number of ids in use, when every id means the same token to both."""
    drafter_tokens = {index: token for token, index in drafter.get_vocab().items()}
    verifier_tokens = {index: token for token, index in verifier.get_vocab().items()}
    vocab_size = 1 + max((*drafter_tokens, *verifier_tokens), default=-1)
    for index in range(vocab_size):
        ours, theirs = drafter_tokens.get(index), verifier_tokens.get(index)
        if ours != theirs:
            raise PairError(
                f"the tokenizers differ at id {index}: {_named(ours)} in the drafter, {_named(theirs)} in the verifier "
                f"({len(drafter_tokens)} and {len(verifier_tokens)} tokens). Both models need one vocabulary: choose a "
                "drafter of the verifier's family."
            )
    return vocab_size


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _compare_models(drafter: Tokenizer, verifier: Tokenizer) -> None:
    """Kind of tokenizer, and its merges as a set: their order among equals does not matter, and the probes show it."""
    ours, theirs = json.loads(drafter.to_str())["model"], json.loads(verifier.to_str())["model"]
    if ours.get("type") != theirs.get("type"):
        raise PairError(
            f"the drafter's tokenizer is of kind {ours.get('type')}, the verifier's of kind {theirs.get('type')}. "
            "Choose a drafter of the verifier's family."
        )
    drafter_merges, verifier_merges = _merges(ours), _merges(theirs)
    if set(drafter_merges) != set(verifier_merges):
        side, lacking = (
            ("verifier", "drafter") if set(verifier_merges) - set(drafter_merges) else ("drafter", "verifier")
        )
        longer, shorter = (verifier_merges, drafter_merges) if side == "verifier" else (drafter_merges, verifier_merges)
        known = set(shorter)
        rank = next(rank for rank, merge in enumerate(longer) if merge not in known)
        raise PairError(
            f"the tokenizers merge differently: the {side}'s merge {rank} ({' + '.join(map(repr, longer[rank]))}) is "
            f"not in the {lacking}'s ({len(drafter_merges)} merges in the drafter, {len(verifier_merges)} in the "
            "verifier). Choose a drafter of the verifier's family."
        )


def _merges(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Both spellings of a tokenizer file: ["a b", …] and [["a", "b"], …]."""
    return [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model.get("merges", ())]


def _compare_decoding(drafter: Tokenizer, verifier: Tokenizer, probes: tuple[str, ...]) -> None:
    for probe in probes:
        ids = verifier.encode(probe, add_special_tokens=False).ids
        ours = drafter.decode(ids, skip_special_tokens=False)
        theirs = verifier.decode(ids, skip_special_tokens=False)
        if ours != theirs:
            raise PairError(
                f"the tokenizers turn the same ids into different texts: {_first_difference(ours, theirs)}. Choose a "
                "drafter of the verifier's family."
            )


def _first_difference(ours: str, theirs: str) -> str:
    start = next(
        (index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    return f"{ours[start : start + 20]!r} in the drafter, {theirs[start : start + 20]!r} in the verifier"


def _notices(drafter: Checkpoint, verifier: Checkpoint, probes: tuple[str, ...]) -> list[str]:
    notices = []
    if drafter.context < verifier.context:
        notices.append(
            f"The drafter's context is {drafter.context} positions, the verifier's {verifier.context}: past the "
            "drafter's, decoding is plain."
        )
    if drafter.num_parameters >= verifier.num_parameters:
        notices.append(
            f"The drafter has {drafter.num_parameters:,} parameters, no fewer than the verifier's "
            f"{verifier.num_parameters:,}: drafting with it will hardly pay."
        )
    if not verifier.eos_ids:
        notices.append("The verifier names no end-of-sequence token: texts end by length or stop strings only.")
    if verifier.generation_defaults:
        settings = ", ".join(f"{name}={value}" for name, value in verifier.generation_defaults)
        notices.append(
            f"The verifier's own generation settings are applied on request alone (generation_config): {settings}."
        )
    cut_otherwise = [probe for probe in probes if _encode(drafter, probe) != _encode(verifier, probe)]
    if cut_otherwise:
        notices.append(
            f"The drafter's tokenizer cuts {len(cut_otherwise)} of {len(probes)} probe texts otherwise than the "
            f"verifier's (the first begins {cut_otherwise[0][:30]!r}); the verifier's is used, so outputs are right, "
            "but the drafter may have been trained on other tokens."
        )
    return notices


def _encode(checkpoint: Checkpoint, text: str) -> list[int]:
    ids: list[int] = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def probe_corpus(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts on which tokenizers are compared: the shipped ones, and each special token between words."""
    shipped = resources.files("yggc.data").joinpath("probe_corpus.txt").read_text(encoding="utf-8")
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return (*shipped.split(PROBE_SEPARATOR), *(f"before {token} after\n{token}" for token in added))


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a build needs in one place, and bytes that are free there; None: not known."""

    place: str
    required: int
    available: int | None


def preflight(pair: PairSpec, dtype: str, bundle: Path, cache: Path, device: str = "cpu") -> tuple[Room, ...]:
    """Checks memory and disk for building the pair, and that both places can be written.

    dtype:         torch's name of the one that is built.
    bundle, cache: folders that the build writes to; they need not exist yet. device: as torch names it.
    Raises BuildError with required and available bytes.
    """
    bytes_per_weight = getattr(torch, dtype).itemsize
    drafter, verifier = (model.num_parameters * bytes_per_weight for model in (pair.drafter, pair.verifier))
    # The drafter is compiled while nothing of the verifier is in memory, but both are when they are measured.
    memory = int(max(drafter, verifier) * MEMORY_PER_WEIGHT_BYTE) + min(drafter, verifier) + MEMORY_OF_TOOLS
    rooms = [Room("memory", memory, available_memory())]
    if device != "cpu":
        required = int((drafter + verifier) * DEVICE_PER_WEIGHT_BYTE) + DEVICE_MEMORY_OF_TOOLS
        rooms.append(Room(f"memory of {device}", required, available_device_memory(device)))
    needs = [
        (bundle, int((drafter + verifier) * BUNDLE_PER_WEIGHT_BYTE)),
        (cache, int((drafter + verifier) * CACHE_PER_WEIGHT_BYTE) + DISK_OF_TOOLS),
    ]
    folders = [existing_parent(folder) for folder, _ in needs]
    if folders[0].stat().st_dev == folders[1].stat().st_dev:
        needs = [(cache, needs[0][1] + needs[1][1])]
    for folder, required in needs:
        rooms.append(Room(f"disk at {folder}", required, available_disk(folder)))
    for folder in folders:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise BuildError(
                f"{folder} cannot be written. Give another place (-o for the bundle, YGG_CACHE for the cache)."
            )
    for room in rooms:
        if room.available is not None and room.available < room.required:
            raise BuildError(
                f"not enough {room.place}: about {readable(room.required)} are required to build this pair, "
                f"{readable(room.available)} are available. Free some, use a smaller pair or a larger machine."
            )
    return tuple(rooms)
