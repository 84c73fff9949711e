"""The engine: requests in, text out, one at a time, plainly or speculatively.

Invariant: plain and speculative decoding feed the same `OutputStream` token by token, so ids, text and finish reason
cannot depend on how many tokens came from one iteration. A request that ends early for any reason leaves nothing
behind: the next one starts from empty caches.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from yggrt.errors import ArtifactError, TextError, YggError
from yggrt.executor import COMPILED_STAGES, Decoder
from yggrt.sampling import SamplingOptions, TokenChooser
from yggrt.text import OutputStream, TextCodec
from yggrt.tree import TreeShape

if TYPE_CHECKING:
    from yggrt.bundle import Bundle
    from yggrt.pace import Pace

DEFAULT_MAX_NEW_TOKENS = 512

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """Seconds of one request spent in one stage."""

    stage: str
    seconds: float


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """How one request went.

    mode:              "speculative" or "plain", as asked for.
    iterations:        verifier calls after the prefill.
    plain_iterations:  those of them without a draft.
    depth_histogram:   entry i counts the iterations that drafted i passes.
    fallbacks:         how often the draft became shallower, or was left out for a while, because it did not pay.
    drafted, accepted: nodes the drafter added; drafted tokens that were emitted.
    acceptance_length: tokens emitted per iteration, bonus token included; 0 where there was no iteration.
    expected_length:   what the drafted values promised in its place, before anything was verified.
    acceptance_histogram: entry i counts the iterations that emitted i tokens.
    ttft_s, tpot_s:    seconds until the prompt is read and the first token chosen; seconds per token after it (None
                       below two tokens).
    tokens_per_s:      1 / tpot_s.
    host_share:        share of the iterations' time outside compiled steps.
    stages:            seconds by stage.
    notices:           what the user should know, such as falling back to plain decoding.
    """

    mode: str
    prompt_tokens: int
    new_tokens: int
    iterations: int
    plain_iterations: int
    depth_histogram: tuple[int, ...]
    fallbacks: int
    drafted: int
    accepted: int
    acceptance_length: float
    expected_length: float
    acceptance_histogram: tuple[int, ...]
    ttft_s: float | None
    tpot_s: float | None
    tokens_per_s: float | None
    host_share: float | None
    stages: tuple[StageSeconds, ...]
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished request.

    text:          without the stop string and special tokens.
    token_ids:     generated ids, the EOS token included where there was one.
    finish_reason: "eos", "stop" or "length".
    gaps:          top-2 gap of the verifier's logits at each generated token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    gaps: tuple[float, ...]
    stats: GenerationStats


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request may ask for; see `Engine.generate`."""

    max_new_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    plain: bool
    raw: bool
    sampling: SamplingOptions

    def __post_init__(self) -> None:
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.max_new_tokens!r}: an integer from 0 is accepted")


class Stream:
    """Iterator over the text pieces of one request; joined they are `result.text`.

    Closing it, or dropping it, ends the request and frees the engine for the next. `result` is set at the end.

    pieces: gives the text and returns the result. Nothing in it may refer to this stream: a cycle would keep a dropped
            stream, and with it the engine, until Python looks for cycles.
    """

    def __init__(self, pieces: Generator[str, None, GenerationResult]) -> None:
        self._pieces = pieces
        self._closed = False
        self.result: GenerationResult | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        if self._closed:
            self._pieces.close()
        try:
            return next(self._pieces)
        except StopIteration as end:
            if end.value is not None:  # only the first time
                self.result = end.value
            raise

    def close(self) -> None:
        """End the request now; where another thread waits for its next piece, when that piece has come."""
        self._closed = True
        with suppress(ValueError):  # it is at work in another thread
            self._pieces.close()


class _Recorder:
    """Counts one request; the consumer's own time between pieces is left out."""

    def __init__(self, prompt_tokens: int, plain: bool) -> None:
        self.mode = "plain" if plain else "speculative"
        self.prompt_tokens = prompt_tokens
        self.histogram: Counter[int] = Counter()
        self.depths: Counter[int] = Counter()
        self.drafted = self.accepted = self.fallbacks = 0
        self.expected = 0.0
        self.ttft_s: float | None = None
        self.compiled_before_s = 0.0  # inside compiled steps until the first token
        self.decode_s = 0.0
        self.gaps: list[float] = []
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        if text not in self.notices:
            self.notices.append(text)

    def stats(self, new_tokens: int, stages: Mapping[str, float]) -> GenerationStats:
        iterations = sum(self.histogram.values())
        emitted = sum(length * count for length, count in self.histogram.items())
        tpot = self.decode_s / (new_tokens - 1) if new_tokens > 1 else None
        plain_iterations = self.depths[0]
        if self.fallbacks and plain_iterations:
            self.notice("a part was decoded plainly, since drafts did not pay on this text")
        compiled = sum(stages[stage] for stage in COMPILED_STAGES) - self.compiled_before_s
        return GenerationStats(
            mode=self.mode,
            prompt_tokens=self.prompt_tokens,
            new_tokens=new_tokens,
            iterations=iterations,
            plain_iterations=plain_iterations,
            depth_histogram=_as_tuple(self.depths),
            fallbacks=self.fallbacks,
            drafted=self.drafted,
            accepted=self.accepted,
            acceptance_length=emitted / iterations if iterations else 0.0,
            expected_length=self.expected / iterations if iterations else 0.0,
            acceptance_histogram=_as_tuple(self.histogram),
            ttft_s=self.ttft_s,
            tpot_s=tpot,
            tokens_per_s=1 / tpot if tpot else None,
            host_share=1 - compiled / self.decode_s if self.decode_s else None,
            stages=tuple(StageSeconds(stage, seconds) for stage, seconds in stages.items()),
            notices=tuple(self.notices),
        )


def _as_tuple(histogram: Counter[int]) -> tuple[int, ...]:
    """Counts by index, from 0 on."""
    return tuple(histogram[index] for index in range(max(histogram, default=0) + 1))


class Engine:
    """Answers requests with one bundle. Threads are served in turn; engines are independent of each other.

    decoder:         drafter and verifier with their caches.
    shape:           the tree grown each iteration where there is no pace; depth 0 decodes plainly.
    pace:            chooses depth and verify width iteration by iteration; None where the plan was not calibrated.
    codec:           text to ids and back; None allows token ids only.
    eos_ids:         tokens that end a text.
    drafter_context: positions the drafter can attend to.
    num_threads:     CPU threads of the compiled steps; the caller's setting is restored.
    bundle, load_s:  where it was loaded from, and the seconds that took; None for an engine made by hand.
    """

    def __init__(
        self,
        decoder: Decoder,
        shape: TreeShape,
        codec: TextCodec | None,
        eos_ids: frozenset[int],
        vocab_size: int,
        drafter_context: int,
        num_threads: int,
        pace: Pace | None = None,
    ) -> None:
        self.decoder = decoder
        self.shape = shape
        self.pace = pace
        self.codec = codec
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.drafter_context = drafter_context
        self.num_threads = num_threads
        self.bundle: Bundle | None = None
        self.load_s: float | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def max_context(self) -> int:
        """Tokens a request may reach, prompt included."""
        return self.decoder.max_context

    @property
    def takes_raw_text(self) -> bool:
        """Whether there is no chat template, so that texts are prompts as they stand."""
        return self.codec is not None and self.codec.spec.chat_template is None

    @contextmanager
    def its_threads(self) -> Iterator[None]:
        """The compiled steps' number of threads while in it; the caller's afterwards."""
        threads_before = torch.get_num_threads()
        try:
            if threads_before != self.num_threads:
                torch.set_num_threads(self.num_threads)
            yield
        finally:
            if threads_before != self.num_threads:
                torch.set_num_threads(threads_before)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        plain: bool = False,
        raw: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        on_piece: Callable[[str], object] | None = None,
    ) -> GenerationResult:
        """Answer a prompt: exactly what the verifier alone would say, greedily or drawn from its law.

        prompt:     a text (through the chat template unless `raw`), {"role", "content"} messages, or token ids.
        stop:       strings that end the text; they are cut off.
        ignore_eos: go on after an end-of-sequence token.
        plain:      without the drafter.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: see `yggrt.sampling.SamplingOptions`.
        on_piece:   called with every piece of text as it comes.
        Raises ValueError for a prompt or option that cannot be served, TextError where the bundle has no tokenizer or
        chat template for it.
        """
        stream = self.stream(
            prompt, max_new_tokens=max_new_tokens, stop=stop, ignore_eos=ignore_eos, plain=plain, raw=raw,
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed,
        )  # fmt: skip
        try:
            for piece in stream:
                if on_piece is not None:
                    on_piece(piece)
        finally:
            stream.close()
        assert stream.result is not None  # the stream ended without an exception
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        plain: bool = False,
        raw: bool = False,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> Stream:
        """As `generate`, but gives the text piece by piece; `result` of the stream is set at its end."""
        if not isinstance(stop, Iterable):
            raise ValueError(f"stop={stop!r}: a string or several of them are accepted")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = SamplingOptions(temperature, top_k, top_p, min_p, repetition_penalty, seed)
        options = RequestOptions(max_new_tokens, stops, ignore_eos, plain, raw, sampling)
        prompt_ids = self.encode_prompt(prompt, raw)
        budget = min(options.max_new_tokens, self.max_context - len(prompt_ids))
        eos_ids = frozenset() if ignore_eos else self.eos_ids
        output = OutputStream(self.codec, eos_ids, options.stop, budget)
        return Stream(self._serve(prompt_ids, output, budget, options))

    def encode_prompt(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Raises ValueError when it is empty, too long, or no text, messages or token ids."""
        if isinstance(prompt, str):
            codec = self._codec()
            ids = codec.encode(prompt) if raw else codec.encode_chat([{"role": "user", "content": prompt}])
        elif isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise ValueError(
                f"the prompt is of type {type(prompt).__name__}; accepted: a text, a list of messages or of token ids"
            )
        elif any(isinstance(part, Mapping) for part in prompt):
            if raw:
                raise ValueError("raw: messages go through the chat template; give a text, or leave raw out")
            ids = self._codec().encode_chat(list(prompt))  # type: ignore[arg-type]
        else:
            ids = [_token_id(token, self.vocab_size) for token in prompt]
        if not ids:
            raise ValueError("the prompt is empty; at least one token is needed")
        if len(ids) >= self.max_context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens; at most {self.max_context - 1} fit this bundle's context of "
                f"{self.max_context} with room for an answer. Shorten it, or build with a larger --max-context."
            )
        return ids

    def _codec(self) -> TextCodec:
        if self.codec is None:
            raise TextError("this engine has no tokenizer; token ids are accepted")
        return self.codec

    def _serve(
        self, prompt_ids: list[int], output: OutputStream, budget: int, options: RequestOptions
    ) -> Generator[str, None, GenerationResult]:
        """The request itself: holds the engine from the first piece asked for until the end or `close`."""
        if self._lock.locked() and self._owner == threading.get_ident():
            raise YggError("this thread has an unfinished stream on this engine; exhaust or close it first")
        with self._lock:  # its own `with`, which leaves no moment at which Ctrl-C could keep it taken
            try:
                self._owner = threading.get_ident()
                return (yield from self._answer(prompt_ids, output, budget, options))
            finally:
                self._owner = None

    def _answer(
        self, prompt_ids: list[int], output: OutputStream, budget: int, options: RequestOptions
    ) -> Generator[str, None, GenerationResult]:
        """All pieces of a request and its result, with the compiled steps' threads only while they run."""
        recorder = _Recorder(len(prompt_ids), options.plain)
        rounds = self._decode(prompt_ids, output, budget, options, recorder)
        while True:
            with self.its_threads():
                finished = next(rounds, True)
            if finished:
                output.finish()
            piece = output.take_piece()
            if piece:
                yield piece
            if finished:
                break
        return GenerationResult(
            text=output.text,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason or "length",
            gaps=tuple(recorder.gaps),
            stats=recorder.stats(output.num_tokens, self.decoder.clock.seconds),
        )

    def _decode(
        self, prompt_ids: list[int], output: OutputStream, budget: int, options: RequestOptions, recorder: _Recorder
    ) -> Iterator[bool]:
        """Prefill, then iterations, until the output is finished; yields whether it is after every iteration."""
        decoder = self.decoder
        decoder.reset()
        if output.finished:  # nothing was asked for
            return
        tokens = list(prompt_ids)
        plain, choose = options.plain, None
        if not options.sampling.is_argmax:
            choose = TokenChooser(options.sampling, prompt_ids).choose
        pace = None if plain else self.pace
        if pace is not None:
            pace.start()
        started = perf_counter()
        first = decoder.prefill(tokens, choose)
        tokens += first.tokens
        _require_finite(first.gaps)
        recorder.gaps += first.gaps
        finished = output.push(first.tokens[0])
        if not finished and self._within_limits(self.shape, len(tokens), budget - 1, plain, recorder).draft_depth:
            decoder.prefill_drafter(tokens)  # whatever the first depth will be
        recorder.ttft_s = perf_counter() - started
        recorder.compiled_before_s = sum(decoder.clock.seconds[stage] for stage in COMPILED_STAGES)
        yield finished
        next_tokens = first.next_tokens
        while not finished:
            started = perf_counter()
            remaining = budget - output.num_tokens
            shape = self.shape
            if pace is not None:
                shape = pace.shape(next_tokens, decoder.verifier_cache.extent(len(tokens) + 1))
            shape = self._within_limits(shape, len(tokens), remaining, plain, recorder)
            if shape.draft_depth == 0:
                outcome = decoder.decode_plain(tokens, choose)
            else:
                choose_width = None if pace is None else pace.verify_width
                outcome = decoder.decode_speculative(tokens, shape, choose_width, choose)
            _require_finite(outcome.gaps)
            emitted = 0
            for token in outcome.tokens:
                emitted += 1
                finished = output.push(token)
                if finished:
                    break
            tokens += outcome.tokens[:emitted]
            next_tokens = outcome.next_tokens
            if pace is not None:
                pace.observe(shape.draft_depth, outcome.num_verified, outcome.extent, emitted)
                recorder.fallbacks = pace.num_fallbacks
            recorder.gaps += outcome.gaps[:emitted]
            recorder.histogram[emitted] += 1
            recorder.depths[shape.draft_depth] += 1
            recorder.drafted += outcome.num_drafted
            recorder.accepted += min(emitted, len(outcome.tokens) - 1)
            recorder.expected += outcome.expected
            recorder.decode_s += perf_counter() - started
            yield finished

    def _within_limits(
        self, shape: TreeShape, num_tokens: int, remaining: int, plain: bool, recorder: _Recorder
    ) -> TreeShape:
        """A tree no deeper than the drafter and the budget allow.

        The budget ends with the context at the latest, so no node's position is beyond it.
        """
        depth = 0 if plain else min(shape.draft_depth, remaining - 1)
        if depth > 0 and num_tokens + depth > self.drafter_context:
            depth = 0
            recorder.notice(f"decoded plainly past the drafter's context of {self.drafter_context} tokens")
        if depth == shape.draft_depth:
            return shape
        return TreeShape(shape.draft_width, depth, min(shape.verify_width, 1 + depth * shape.draft_width))


def _require_finite(gaps: tuple[float, ...]) -> None:
    """A gap is not a number exactly where the verifier's logits are not."""
    if any(gap != gap for gap in gaps):
        raise ArtifactError(
            "the verifier's logits are not finite here; its weights or this dtype do not hold. Try --dtype float32."
        )


def _token_id(token: object, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ValueError(f"token id {token!r}: integers from 0 to {vocab_size - 1} are accepted")
    return token
