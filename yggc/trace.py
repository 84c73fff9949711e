"""The calibration trace: what the verifier says on the calibration prompts, and what the drafter would have proposed.

At temperature 0 acceptance depends on the verifier's own text alone, so the trace serves every tree shape. It is kept
as one safetensors file; its arrays are listed in `_ARRAYS`, lengths and names in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from yggrt.artifacts import LOG_Q_MIN
from yggrt.bench import BenchPrompt, read_prompts
from yggrt.bundle import table_tensor
from yggrt.engine import Engine
from yggrt.errors import TraceFormatError
from yggrt.plan import identity_table
from yggrt.text import OutputStream
from yggrt.tree import PLAIN, TreeShape

TRACE_VERSION = 1
ANSWER_TOKENS = 48
HELD_OUT_EVERY = 5
"""Of prompts that do not say so themselves, every fifth is held out."""

_ARRAYS = {
    "prompt_tokens": "int64",
    "answer_tokens": "int64",
    "lengths": "int64",
    "hidden": "float32",
    "gaps": "float32",
    "children": "int64",
    "child_log_q": "float32",
}
_FORMAT = "yggc-trace"


@dataclass(frozen=True, slots=True)
class TracedText:
    """One prompt and the verifier's answer, with what is known at each of its T tokens before the token was said.

    budget:      tokens that were asked for; T is less where the answer ended by itself.
    hidden:      float32[T, H], the verifier's last hidden state where the token was chosen.
    gaps:        float32[T], between its two best logits there.
    children:    int64[T, K], the drafter's best next tokens there; child_log_q: float32[T, K], not below LOG_Q_MIN.
    """

    category: str
    held_out: bool
    budget: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    hidden: NDArray[np.float32]
    gaps: NDArray[np.float32]
    children: NDArray[np.int64]
    child_log_q: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CalibrationTrace:
    """All texts of a calibration. name, sha256: of the prompts."""

    name: str
    sha256: str
    texts: tuple[TracedText, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(text.answer_ids) for text in self.texts)

    @property
    def fit(self) -> tuple[TracedText, ...]:
        """Texts that tables and choices are made from."""
        return tuple(text for text in self.texts if not text.held_out)

    @property
    def held_out(self) -> tuple[TracedText, ...]:
        """Texts that predictions are made from; the others where none were held out."""
        return tuple(text for text in self.texts if text.held_out) or self.texts


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts to calibrate on. held_out: for each of them."""

    name: str
    sha256: str
    prompts: tuple[BenchPrompt, ...]
    held_out: tuple[bool, ...]


def shipped_prompts() -> PromptSet:
    """The calibration set that ships with yggc."""
    return read_prompt_set(Path(str(files("yggc") / "data" / "calibration" / "prompts.jsonl")), "yggc's own")


def read_prompt_set(path: Path, name: str | None = None) -> PromptSet:
    """A file as `yggrt bench` reads it; "held_out": true keeps a prompt for predictions alone.

    Raises ValueError in one line.
    """
    prompts = tuple(read_prompts(path))
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if any("held_out" in entry for entry in entries):
        held_out = tuple(bool(entry.get("held_out")) for entry in entries)
    else:
        held_out = tuple(index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index in range(len(prompts)))
    if all(held_out):
        raise ValueError(f"{path}: every prompt is held out; some must be left to calibrate on")
    return PromptSet(name or path.name, hashlib.sha256(path.read_bytes()).hexdigest(), prompts, held_out)


def make_trace(
    engine: Engine,
    prompts: PromptSet,
    answer_tokens: int = ANSWER_TOKENS,
    on_text: Callable[[int, int], object] = lambda done, total: None,
) -> CalibrationTrace:
    """Let the verifier answer every prompt plainly, and the drafter propose at every position of the answer.

    Prompts that leave no room for an answer in the context are left out. on_text: told (done, all) after each prompt.
    Raises ValueError when no prompt fits.
    """
    texts = []
    for index, (prompt, held_out) in enumerate(zip(prompts.prompts, prompts.held_out, strict=True)):
        with engine.its_threads():
            text = trace_text(engine, prompt, held_out, answer_tokens)
        if text is not None:
            texts.append(text)
        on_text(index + 1, len(prompts.prompts))
    if not any(not text.held_out for text in texts):
        raise ValueError(f"no calibration prompt of {prompts.name} fits a context of {engine.max_context} tokens")
    return CalibrationTrace(prompts.name, prompts.sha256, tuple(texts))


def trace_text(engine: Engine, prompt: BenchPrompt, held_out: bool, answer_tokens: int) -> TracedText | None:
    """One text, or None where the context leaves no room for an answer."""
    try:
        prompt_ids = engine.encode_prompt(prompt.text, engine.takes_raw_text)
    except ValueError:  # empty, or longer than the context
        return None
    deepest = engine.decoder.draft.limits.max_moves  # no tree grown from this text may pass the drafter's context
    room = min(engine.max_context, engine.drafter_context - deepest) - len(prompt_ids)
    budget = min(answer_tokens, room)
    if budget < 2:
        return None
    decoder = engine.decoder
    decoder.reset()
    output = OutputStream(None, engine.eos_ids, (), budget)
    tokens = list(prompt_ids)
    rounds = [decoder.prefill(tokens)]
    finished = output.push(rounds[0].tokens[0])
    tokens += rounds[0].tokens
    hidden = [rounds[0].hidden.float().numpy().copy()]
    while not finished:
        rounds.append(decoder.decode(tokens, PLAIN))
        hidden.append(rounds[-1].hidden.float().numpy().copy())
        tokens += rounds[-1].tokens
        finished = output.push(rounds[-1].tokens[0])
    children, log_q = drafted_children(engine, tokens, len(prompt_ids))
    return TracedText(
        category=prompt.category,
        held_out=held_out,
        budget=budget,
        prompt_ids=tuple(prompt_ids),
        answer_ids=tuple(tokens[len(prompt_ids) :]),
        hidden=np.stack(hidden),
        gaps=np.array([each.gaps[0] for each in rounds], dtype=np.float32),
        children=children,
        child_log_q=log_q,
    )


def redrafted(engine: Engine, text: TracedText) -> TracedText:
    """The same text with the children that this engine's drafter proposes."""
    engine.decoder.reset()
    with engine.its_threads():
        children, log_q = drafted_children(engine, [*text.prompt_ids, *text.answer_ids], len(text.prompt_ids))
    return replace(text, children=children, child_log_q=log_q)


def drafted_children(
    engine: Engine, tokens: Sequence[int], num_prompt: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The drafter's best children at every position of the answer: one pass from each, valued by q itself."""
    decoder, limits = engine.decoder, engine.decoder.draft.limits
    table, decoder.table = decoder.table, table_tensor(
        identity_table(limits.num_children, limits.num_knots), limits.num_children
    )  # fmt: skip
    children, log_q = [], []
    width = min(limits.num_children, limits.max_nodes - 1)
    try:
        for place in range(num_prompt, len(tokens)):
            tree = decoder.draft_tree(tokens[:place], TreeShape(width, 1, 1))
            children.append(tree.tokens[1:].copy())
            log_q.append(tree.values[1:].copy())
    finally:
        decoder.table = table
    return np.stack(children), np.maximum(np.stack(log_q), np.float32(LOG_Q_MIN))


# ---- the file ----


def write_trace(path: Path, trace: CalibrationTrace) -> None:
    """Raises OSError."""
    texts = trace.texts
    arrays = {
        "prompt_tokens": np.array([token for text in texts for token in text.prompt_ids], dtype=np.int64),
        "answer_tokens": np.array([token for text in texts for token in text.answer_ids], dtype=np.int64),
        "lengths": np.array(
            [[len(text.prompt_ids), len(text.answer_ids), text.budget, text.held_out] for text in texts]
        ),
        "hidden": np.concatenate([text.hidden for text in texts]),
        "gaps": np.concatenate([text.gaps for text in texts]),
        "children": np.concatenate([text.children for text in texts]),
        "child_log_q": np.concatenate([text.child_log_q for text in texts]),
    }
    metadata = {
        "format": _FORMAT,
        "version": str(TRACE_VERSION),
        "name": trace.name,
        "sha256": trace.sha256,
        "categories": json.dumps([text.category for text in texts], ensure_ascii=False),
    }
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, scratch, metadata)
        scratch.replace(path)
    except SafetensorError as error:  # what its own writer makes of an OSError
        raise OSError(f"{path} cannot be written: {error}") from None
    finally:
        scratch.unlink(missing_ok=True)


def read_trace(path: Path) -> CalibrationTrace:
    """Raises TraceFormatError in one line for whatever is wrong with the file."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise TraceFormatError(f"{path} is not a calibration trace; `yggc calibrate` writes one")
            if metadata.get("version") != str(TRACE_VERSION):
                raise TraceFormatError(
                    f"{path} has trace version {metadata.get('version')!r:.20}; this yggc reads {TRACE_VERSION}. "
                    "Calibrate again."
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _assemble(path, metadata, arrays)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceFormatError(f"{path} cannot be read as a calibration trace: {error!s:.200}") from None


def _assemble(path: Path, metadata: dict[str, str], arrays: dict[str, NDArray]) -> CalibrationTrace:
    if {name: str(array.dtype) for name, array in arrays.items()} != _ARRAYS:
        raise TraceFormatError(f"{path} does not hold the arrays of a calibration trace, {', '.join(_ARRAYS)}")
    categories = json.loads(metadata["categories"])
    lengths = arrays["lengths"]
    if lengths.shape != (len(categories), 4) or not len(categories) or (lengths < 0).any():
        raise TraceFormatError(f"{path} holds lengths of shape {list(lengths.shape)} for {len(categories)} texts")
    prompts, answers = lengths[:, 0].sum(), lengths[:, 1].sum()
    per_token = ("answer_tokens", "hidden", "gaps", "children", "child_log_q")
    found = {name: arrays[name].shape[:1] for name in per_token}
    if arrays["prompt_tokens"].shape != (prompts,) or set(found.values()) != {(answers,)}:
        raise TraceFormatError(f"{path} says {prompts} prompt and {answers} answer tokens, its arrays differ")
    if arrays["children"].ndim != 2 or arrays["children"].shape != arrays["child_log_q"].shape:
        raise TraceFormatError(f"{path}: children and child_log_q differ in shape")
    texts: list[TracedText] = []
    prompt, answer = 0, 0
    for category, (num_prompt, num_answer, budget, held_out) in zip(categories, lengths.tolist(), strict=True):
        part = slice(answer, answer + num_answer)
        texts.append(
            TracedText(
                str(category),
                bool(held_out),
                budget,
                tuple(arrays["prompt_tokens"][prompt : prompt + num_prompt].tolist()),
                tuple(arrays["answer_tokens"][part].tolist()),
                arrays["hidden"][part],
                arrays["gaps"][part],
                arrays["children"][part],
                arrays["child_log_q"][part],
            )
        )
        prompt, answer = prompt + num_prompt, answer + num_answer
    return CalibrationTrace(metadata["name"], metadata["sha256"], tuple(texts))
