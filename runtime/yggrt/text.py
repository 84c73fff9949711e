"""Text in and out: chat template, tokenizer, streaming detokenizer, stop conditions.

Invariant: what a request gives depends only on its token ids in order, never on how many arrived at once. Plain and
speculative decoding push every token through the same OutputStream, so they stop at the same token with the same text,
and the pieces of a stream always join to the text of the whole.
"""

import codecs
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

from yggrt.errors import TextError

FinishReason = Literal["eos", "stop", "length"]

# Byte-level vocabularies write each byte as one printable character: itself, or the next one free from U+0100 on.
_PRINTABLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHER_BYTES = [byte for byte in range(0x100) if byte not in set(_PRINTABLE_BYTES)]
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE_BYTES} | {
    chr(0x100 + index): byte for index, byte in enumerate(_OTHER_BYTES)
}


@dataclass(frozen=True, slots=True)
class TextSpec:
    """What the tokenizer file does not say about turning text into tokens and back.

    chat_template: Jinja source in Hugging Face's dialect; None where the verifier has none.
    *_token:       special tokens as the template may name them; None where not set.
    eos_ids:       tokens that end a generation, ascending; empty where nothing does.
    """

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    eos_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.eos_ids) != sorted(set(self.eos_ids)) or any(token < 0 for token in self.eos_ids):
            raise ValueError(f"eos_ids must be ascending, unique token ids, not {self.eos_ids}")


class TextCodec:
    """One tokenizer with its chat template. Takes the tokenizer over: truncation and padding are switched off."""

    def __init__(self, tokenizer: Tokenizer, spec: TextSpec) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.spec = spec
        added = tokenizer.get_added_tokens_decoder().values()
        self._special_tokens = frozenset(token.content for token in added if token.special)

    @classmethod
    def from_file(cls, path: Path, spec: TextSpec) -> "TextCodec":
        """Read a `tokenizer.json`. Raises TextError."""
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise TextError(f"cannot read the tokenizer {path}: {_one_line(error)}") from None
        return cls(tokenizer, spec)

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the tokenizer itself adds, as Hugging Face does."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer starts.

        messages: one mapping a message, with `role` and `content` strings.
        Raises ValueError for messages of another shape, TextError where there is no template or it refuses them.
        """
        return self._encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The text that encode_chat encodes; it already holds its special tokens. Raises as encode_chat does."""
        conversation = _checked_messages(messages)
        if self.spec.chat_template is None:
            raise TextError("this model has no chat template: give a raw prompt instead (yggrt run --raw)")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        special_tokens = {name: getattr(self.spec, name) for name in names if getattr(self.spec, name) is not None}
        try:
            return _compiled_template(self.spec.chat_template).render(
                messages=conversation, tools=None, documents=None, add_generation_prompt=True, **special_tokens
            )
        except Exception as error:  # a template is a program: it may fail in any way
            raise TextError(f"the chat template refuses these messages: {_one_line(error)}") from None

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of token ids, special tokens left out and spaces left alone."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def visible_token(self, token_id: int) -> str | None:
        """The vocabulary's entry for a token; None where `decode` leaves it out: special, or not in the vocabulary."""
        token: str | None = self.tokenizer.id_to_token(token_id)
        return None if token is None or token in self._special_tokens else token

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"a prompt is a string, not a {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not valid Unicode: {error.reason} at {error.start}") from None
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


class StreamDecoder:
    """Turns tokens into text one by one: the pieces, and what `flush` adds, join to `codec.decode` of all tokens.

    Text is held back only while later tokens could still change it: an unfinished UTF-8 character, or a run of byte
    tokens, which decodes as a whole or not at all. The work per token does not grow with the text, but for a tokenizer
    whose decoder is of an unknown kind: its text comes with `flush`.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._steps = _decoder_steps(codec.tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Only for decoders that work token by token. The context is a part of the history that ends where the pending
        # tokens start, and has text of its own, so that the pending ones decode in it as they do in the whole.
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that this token makes final; often all of its own, sometimes none."""
        token = self._codec.visible_token(token_id)
        if token is None:
            return ""
        if self._steps == "bytes":
            return self._utf8.decode(_token_bytes(token))
        self._pending.append(token_id)
        return "" if self._steps == "unknown" or _is_byte_token(token) else self._advance()

    def preview(self) -> str:
        """The text of whole characters held back: what would follow if these were all tokens."""
        if not self._pending:
            return ""
        return self._codec.decode(self._context + self._pending)[len(self._context_text) :]

    def flush(self) -> str:
        """The text still held back, an unfinished character as U+FFFD. No token may follow."""
        return self._utf8.decode(b"", final=True) if self._steps == "bytes" else self._advance()

    def _advance(self) -> str:
        piece = self.preview()
        text = self._codec.decode(self._pending)
        if text:
            self._context, self._context_text = self._pending, text
        else:
            self._context = self._context + self._pending
            self._context_text += piece
        self._pending = []
        return piece


class OutputStream:
    """What one request has generated so far, and whether it is finished.

    After every token the conditions are tested in this order: the token is an EOS; the text since the prompt contains a
    stop string, which may start and end inside tokens and span any number of them; max_new_tokens is reached.

    codec:          None for token ids only; then the text stays empty and stop strings are refused.
    eos_ids:        tokens that end the output; the one met is part of the token ids. Empty to ignore EOS.
    stop_strings:   the text is cut before the first of them.
    max_new_tokens: the EOS counts as one.
    """

    def __init__(
        self, codec: TextCodec | None, eos_ids: frozenset[int], stop_strings: tuple[str, ...], max_new_tokens: int
    ) -> None:
        if isinstance(stop_strings, str) or not all(isinstance(stop, str) and stop for stop in stop_strings):
            raise ValueError(f"stop strings must be a tuple of strings that are not empty, not {stop_strings!r}")
        if stop_strings and codec is None:
            raise ValueError("stop strings need a tokenizer, and this engine has none")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be 0 or more")
        self._eos_ids = eos_ids
        self._stop_strings = stop_strings
        self._max_new_tokens = max_new_tokens
        self._decoder = None if codec is None else StreamDecoder(codec)
        self._token_ids: list[int] = []
        self._released: list[str] = []  # pieces of text that nothing can cut any more
        self._num_taken = 0  # of those pieces
        self._held = ""  # final text that could still be the start of a stop string
        self._finished = False
        self._finish_reason: FinishReason | None = None
        if max_new_tokens == 0:
            self._finish("length")

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens up to the one that finished the output, that one included."""
        return tuple(self._token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def text(self) -> str:
        """The text so far; once finished, all of it, without a stop string and what follows it."""
        return "".join(self._released) + self._held

    @property
    def finished(self) -> bool:
        return self._finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """Which condition finished the output; None while there is none, or where the caller ended it."""
        return self._finish_reason

    def push(self, token_id: int) -> bool:
        """Take the next token; True when it finishes the output. Raises ValueError where it was finished before."""
        if self._finished:
            raise ValueError("the output is finished; no token may follow")
        self._token_ids.append(token_id)
        if self._decoder is not None:
            self._held += self._decoder.push(token_id)
        if token_id in self._eos_ids:
            self._finish("eos")
        elif self._cut_at_stop_string():
            self._finished, self._finish_reason = True, "stop"
        elif len(self._token_ids) >= self._max_new_tokens:
            self._finish("length")
        else:
            self._release(len(self._held) - self._num_characters_at_risk())
        return self._finished

    def finish(self) -> None:
        """End the output before a condition does: the caller wants no more. No effect once finished."""
        if not self._finished:
            self._finish(None)

    def take_piece(self) -> str:
        """The text that became certain since the last call; all pieces join to `text` at the end."""
        piece = "".join(self._released[self._num_taken :])
        self._num_taken = len(self._released)
        return piece

    def _finish(self, reason: FinishReason | None) -> None:
        if self._decoder is not None:
            self._held += self._decoder.flush()
        self._release(len(self._held))
        self._finished, self._finish_reason = True, reason

    def _release(self, num_characters: int) -> None:
        if num_characters > 0:
            self._released.append(self._held[:num_characters])
            self._held = self._held[num_characters:]

    def _cut_at_stop_string(self) -> bool:
        # Earlier text cannot be part of a match: what could start one is held.
        if not self._stop_strings or self._decoder is None:
            return False
        candidate = self._held + self._decoder.preview()
        places = [place for stop in self._stop_strings if (place := candidate.find(stop)) >= 0]
        if not places:
            return False
        self._held = candidate[: min(places)]
        self._release(len(self._held))
        return True

    def _num_characters_at_risk(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        return max(
            (size for stop in self._stop_strings for size in range(1, len(stop)) if self._held.endswith(stop[:size])),
            default=0,
        )


# ---- chat templates, in Hugging Face's dialect ----


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's tokens for training; here its body is just rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compiled_template(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _checked_messages(messages: object) -> list[dict[str, str]]:
    """Fresh plain dictionaries: a template comes from a model hub and must not reach the caller's objects."""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a list of at least one {'role': …, 'content': …}")
    conversation = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
            raise ValueError(f"message {index} must be a mapping such as {{'role': 'user', 'content': 'Hello'}}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"message {index} has no {key!r}")
        for key, value in message.items():
            if not isinstance(value, str):
                raise ValueError(f"message {index}: {key!r} must be a string, not a {type(value).__name__}")
        conversation.append({str(key): str(value) for key, value in message.items()})
    return conversation


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# ---- how tokenizers decode ----


def _decoder_steps(tokenizer: Tokenizer) -> Literal["bytes", "tokens", "unknown"]:
    """How a tokenizer's decoder joins tokens, which says from where on earlier text can no longer change.

    bytes:   the bytes of all tokens are joined, then read as UTF-8.
    tokens:  every token gives text of its own, but the first may lose leading spaces, and a run of byte tokens is one.
    unknown: anything else.
    """
    if tokenizer.decoder is None:
        return "tokens"
    steps = _flat_steps(json.loads(tokenizer.decoder.__getstate__()))
    names = [str(step["type"]) for step in steps]
    if names[:1] == ["ByteLevel"] and set(names[1:]) <= {"Fuse"}:
        return "bytes"
    first_fuse = names.index("Fuse") if "Fuse" in names else len(names)
    by_token, after = steps[:first_fuse], steps[first_fuse:]
    if all(step["type"] in _STEPS_BY_TOKEN for step in by_token) and all(
        step["type"] == "Fuse" or (step["type"] == "Strip" and step["stop"] == 0) for step in after
    ):
        return "tokens"
    return "unknown"


_STEPS_BY_TOKEN = ("Replace", "ByteFallback", "Metaspace", "WordPiece", "BPEDecoder", "Strip")


def _flat_steps(step: dict[str, object]) -> list[dict[str, object]]:
    inner = step.get("decoders")
    return [flat for each in inner for flat in _flat_steps(each)] if isinstance(inner, list) else [step]


def _token_bytes(token: str) -> bytes:
    """The bytes of an entry of a byte-level vocabulary; an added token may hold any text and stands for itself."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _is_byte_token(token: str) -> bool:
    """Whether an entry such as `<0xE2>` stands for one byte."""
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
