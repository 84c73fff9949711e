"""The engine: requests in, text out, one at a time, plainly or speculatively.

Invariant: plain and speculative decoding feed the same `OutputStream` token by token, so ids, text and finish reason
cannot depend on how many tokens came from one iteration. A request that ends early for any reason leaves nothing
behind: the next one starts from empty caches.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from yggrt.errors import TextError, YggError
from yggrt.executor import Decoder, Drafting, Iteration
from yggrt.lanes import LaneExecutor, Span
from yggrt.pace import Pace
from yggrt.request import Request
from yggrt.sampling import SamplingOptions, TokenChooser
from yggrt.schedule import Stage, StageSchedule, sequential_schedule
from yggrt.stats import GenerationStats, Recorder
from yggrt.text import OutputStream, TextCodec
from yggrt.tree import PLAIN, TreeShape

if TYPE_CHECKING:
    from yggrt.bundle import Bundle

DEFAULT_MAX_NEW_TOKENS = 512

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


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


@dataclass(frozen=True, slots=True)
class SampledMode:
    """How requests above temperature 0 are answered, those of the temperatures nearest to this one.

    draws: whether trees are drawn and traversed; else they are the drafter's favourites, and the verifier's own draws
           walk through them.
    table, copied_log_a: of `yggrt.executor.Drafting`; shape, pace: as of `Engine`.
    """

    temperature: float
    draws: bool
    shape: TreeShape
    table: Tensor
    pace: Pace | None
    copied_log_a: tuple[float, ...] = ()


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


class Engine:
    """Answers requests with one bundle. Threads are served in turn; engines are independent of each other.

    decoder:         drafter and verifier with their caches.
    shape:           the tree grown each iteration where there is no pace; depth 0 decodes plainly.
    pace:            chooses depth and verify width iteration by iteration; None where the plan was not calibrated.
    codec:           text to ids and back; None allows token ids only.
    eos_ids:         tokens that end a text.
    drafter_context: positions the drafter can attend to.
    num_threads:     CPU threads of the compiled steps; the caller's setting is restored.
    modes:           for requests above temperature 0; where there are none, they are answered as at 0.
    schedule:        how the stages of an iteration share lanes; None runs them one after the other.
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
        schedule: StageSchedule | None = None,
        modes: tuple[SampledMode, ...] = (),
    ) -> None:
        self.decoder = decoder
        self.shape = shape
        self.pace = pace
        self.modes = modes
        self.codec = codec
        self.eos_ids = eos_ids
        self.vocab_size = vocab_size
        self.drafter_context = drafter_context
        self.num_threads = num_threads
        self.bundle: Bundle | None = None
        self.load_s: float | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None
        self.executor = LaneExecutor(schedule or sequential_schedule(num_threads, depth=True))

    def use_schedule(self, schedule: StageSchedule) -> None:
        """Run iterations by this schedule from the next request on."""
        self.executor.close()
        self.executor = LaneExecutor(schedule)

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
        """For calls of compiled steps, or of another engine, from this thread and outside of any request: while in it
        the steps' number of threads is set, and the threads of other lanes, which would slow them down, have ended."""
        self.executor.close()
        with _threads(self.num_threads):
            yield

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        plain: bool = False,
        raw: bool = False,
        generation_config: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        on_piece: Callable[[str], object] | None = None,
    ) -> GenerationResult:
        """Answer a prompt: exactly what the verifier alone would say, greedily or drawn from its law.

        prompt:     a text (through the chat template unless `raw`), {"role", "content"} messages, or token ids.
        stop:       strings that end the text; they are cut off.
        ignore_eos: go on after an end-of-sequence token.
        plain:      without the drafter.
        temperature, top_k, top_p, min_p, repetition_penalty, seed: see `yggrt.sampling.SamplingOptions`, whose defaults
                    hold for None.
        generation_config: None stands for what the checkpoint's own generation config says.
        on_piece:   called with every piece of text as it comes.
        Raises ValueError for a prompt or option that cannot be served, TextError where the bundle has no tokenizer or
        chat template for it.
        """
        stream = self.stream(
            prompt, max_new_tokens=max_new_tokens, stop=stop, ignore_eos=ignore_eos, plain=plain, raw=raw,
            generation_config=generation_config, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, seed=seed,
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
        generation_config: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
    ) -> Stream:
        """As `generate`, but gives the text piece by piece; `result` of the stream is set at its end."""
        if not isinstance(stop, Iterable):
            raise ValueError(f"stop={stop!r}: a string or several of them are accepted")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        given = {
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty,
        }  # fmt: skip
        sampling = SamplingOptions(**self._settings(given, generation_config), seed=seed)
        options = RequestOptions(max_new_tokens, stops, ignore_eos, plain, raw, sampling)
        prompt_ids = self.encode_prompt(prompt, raw)
        budget = min(options.max_new_tokens, self.max_context - len(prompt_ids))
        eos_ids = frozenset() if ignore_eos else self.eos_ids
        output = OutputStream(self.codec, eos_ids, options.stop, budget)
        return Stream(self._serve(prompt_ids, output, budget, options))

    def _settings(self, given: dict[str, Any], generation_config: bool) -> dict[str, Any]:
        """Sampling options that were given, and where they were not those of the checkpoint, if it is asked."""
        known = {name: value for name, value in given.items() if value is not None}
        if not generation_config:
            return known
        if self.bundle is None:
            raise ValueError("generation_config: this engine was made by hand; give the options themselves")
        settings = self.bundle.manifest.generation
        settings.require_supported()
        return {name: getattr(settings, name) for name in given} | known

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
        recorder = Recorder(len(prompt_ids), options.plain)
        rounds = self._decode(prompt_ids, output, budget, options, recorder)
        cores = self.num_threads  # for the prompt
        try:
            while True:
                with _threads(cores or self.num_threads):
                    finished = next(rounds, True)
                if finished:
                    output.finish()
                piece = output.take_piece()
                if piece:
                    yield piece
                if finished:
                    break
                cores = self.executor.cores
        finally:
            rounds.close()
        return GenerationResult(
            text=output.text,
            token_ids=output.token_ids,
            finish_reason=output.finish_reason or "length",
            gaps=tuple(recorder.gaps),
            stats=recorder.stats(
                output.num_tokens, sum(self.executor.rounds), self.decoder.compiled_s, self.executor.seconds
            ),
        )

    def _decode(
        self, prompt_ids: list[int], output: OutputStream, budget: int, options: RequestOptions, recorder: Recorder
    ) -> Generator[bool, None, None]:
        """Prefill, then rounds, until the output is finished; yields whether it is whenever there may be text."""
        decoder, executor, sampling = self.decoder, self.executor, options.sampling
        chooser = None if sampling.is_argmax else TokenChooser(sampling, prompt_ids, decoder.laws)
        schedule = executor.schedule
        shape, pace, drafting, verify_width = self.shape, self.pace, None, schedule.verify_width
        if not sampling.is_greedy and self.modes:
            assert chooser is not None
            mode = min(self.modes, key=lambda mode: abs(math.log(mode.temperature / sampling.temperature)))
            shape, pace, verify_width = mode.shape, mode.pace, None
            drafting = Drafting(mode.table, mode.copied_log_a)
            if shape.draft_depth == 0 and not options.plain:
                recorder.notice("decoded plainly, since drafts were not found to pay at this temperature")
            if mode.draws:
                drafting = Drafting(mode.table, (), sampling.temperature, chooser)
        decoder.reset(drafting)
        executor.reset()
        if output.finished:  # nothing was asked for
            return
        request = Request(
            decoder=decoder,
            tokens=list(prompt_ids),
            output=output,
            eos_ids=frozenset() if options.ignore_eos else self.eos_ids,
            budget=budget,
            shape=PLAIN if options.plain else shape,
            pace=None if options.plain else pace,
            chooser=chooser,
            draws=drafting is not None and drafting.draws,
            drafter_context=self.drafter_context,
            verify_width=verify_width,
            looks_ahead=schedule.looks_ahead,
            recorder=recorder,
        )
        started = perf_counter()
        executor.on_lane("verify", self.num_threads, request.read_prompt)
        if executor.spans is not None:
            executor.spans.append(Span("prefill", schedule.lane_of("verify"), -1, started, perf_counter()))
        yield output.finished
        last: Iteration | None = None
        while not output.finished:
            if request.ended:  # and the schedule emits a round later
                assert last is not None
                request.emit(last)
                yield True
                return
            current, before = request.next_iteration(), last

            def run(stage: Stage, current: Iteration = current, before: Iteration | None = before) -> None:
                iteration = before if stage.lag else current
                if iteration is not None:
                    request.stages[stage.name](iteration)

            for _ in executor.round(run):
                yield output.finished
            last = current


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    """So many threads for this thread's parallel loops while in it; as many as there were afterwards."""
    before = torch.get_num_threads()
    try:
        if before != wanted:
            torch.set_num_threads(wanted)
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)


def _token_id(token: object, vocab_size: int) -> int:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ValueError(f"token id {token!r}: integers from 0 to {vocab_size - 1} are accepted")
    return token
