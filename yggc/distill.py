"""`yggc distill`: makes a small drafter for a verifier, from text that the verifier writes itself.

Two phases: the verifier writes blocks of conversations (`distill_data`), then a small Llama with the verifier's
tokenizer learns to say what it would say next (`distill_training`). What is done lies in a folder beside the output,
saved at least every minute; a run begun again goes on there, and on the CPU gives an unbroken run's weights.
"""

from __future__ import annotations

import ctypes
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from yggc.checkpoints import Checkpoint, load_model, open_checkpoint
from yggc.distill_copying import build_copying_head, can_copy
from yggc.distill_data import ANSWER_LIMIT, ROLE_ANSWER, Block, Decoder, PromptSource, PromptTable
from yggc.distill_training import WARMUP_STEPS, Trainer, drafter_config, make_drafter, mlp_size
from yggc.room import available_memory
from yggc.versions import check_versions
from yggrt.target import detect_target

GENERATE_SHARE = 0.45  # of the hours; the rest trains
TRAIN_SHARE = 0.93  # of the time then left; the rest saves and measures
TRAIN_PASSES = 12  # over the text, where the size is given in tokens
DRAFT_PASS_COST = 0.07  # the most a draft pass may take, of a verifier's step
DRAFT_ROWS = 8  # tokens in a draft pass while its cost is measured
SHAPES = ((1, 64), (1, 128), (2, 128), (2, 192), (2, 256), (2, 384), (3, 512), (4, 768), (4, 1024))  # layers, hidden
SAVE_SECONDS = 40.0
CUDA_LENGTHS, CUDA_ROWS = (768, 768, 768, 768, 2048, 2048), 4096
CPU_LENGTHS, CPU_ROWS = (512, 512, 512, 1536), 128  # products of fewer rows are slow, of more no faster
PROMPTS_PER_ROW = 4
CUDA_CACHE_SHARE, CPU_CACHE_SHARE = 0.5, 0.25  # of the free memory for the verifier's KV rows
MALLOC_OPTIONS = ((-4, 0), (-1, 2**31 - 1), (-2, 1 << 28))  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of glibc
ROPE_THETA = 100_000.0
FAST_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}  # instruction sets that multiply bfloat16
START_RATE = 0.4  # of the learning rates, for a drafter that has learned already


Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """What `yggc distill` was asked for.

    verifier: folder, hub id or GGUF file.       output: folder to write; must not exist.
    hours or tokens: how long to work, or how many tokens the verifier writes (exactly one is given).
    layers, hidden: the drafter's shape, both or neither (chosen by measured cost).
    start: a drafter of the same vocabulary to go on from, instead of a new one; it gives the shape.
    prompts: file of own prompts, see `read_openings`.    device: "auto", "cpu", "cuda" or "cuda:N".
    rows, length: conversations side by side and slots of each; chosen for the device where 0.
    batch_tokens: tokens of a training step; chosen for the device where 0.
    """

    verifier: str
    output: Path
    hours: float | None = None
    tokens: int | None = None
    layers: int | None = None
    hidden: int | None = None
    start: Path | None = None
    prompts: Path | None = None
    device: str = "auto"
    seed: int = 0
    rows: int = 0
    length: int = 0
    batch_tokens: int = 0

    def __post_init__(self) -> None:
        if (self.hours is None) == (self.tokens is None):
            raise ValueError("give either hours or tokens, to say how long to distil")
        if self.hours is not None and not 0 < self.hours < 10_000:
            raise ValueError(f"hours is {self.hours}; a positive number is needed")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}; a positive number is needed")
        if (self.layers is None) != (self.hidden is None):
            raise ValueError("give both layers and hidden, or neither")
        if self.start is not None and self.layers is not None:
            raise ValueError("give a drafter to start from or layers and hidden, not both")
        if self.layers is not None and not 1 <= self.layers <= 128:
            raise ValueError(f"layers is {self.layers}; 1 to 128 is accepted")
        if self.hidden is not None and (self.hidden < 8 or self.hidden % 8 or self.hidden > 64 and self.hidden % 64):
            raise ValueError(f"hidden is {self.hidden}; a multiple of 8 up to 64, or a multiple of 64, is accepted")
        if min(self.rows, self.length, self.batch_tokens) < 0:
            raise ValueError("rows, length and batch_tokens must not be negative")


@dataclass(frozen=True, slots=True)
class DistillReport:
    """What was made: agreement is with the verifier's own first choice on held-out answers, top 1 and top 8."""

    folder: Path
    layers: int
    hidden: int
    num_parameters: int
    written_tokens: int
    trained_tokens: int
    agreement_top1: float
    agreement_top8: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come, as it lies in the run's folder. Zeros are what is not yet decided."""

    identity: str
    layers: int
    hidden: int
    block_shapes: tuple[tuple[int, int], ...]
    num_blocks: int = 0
    num_steps: int = 0
    seconds: float = 0.0


def distill(options: DistillOptions, progress: Callable[[str], None] = lambda line: None) -> DistillReport:
    """Make a drafter for a verifier and write it as a Hugging Face folder.

    Raises ValueError for bad options, and what `open_checkpoint` raises. Interrupted, it goes on when called again.
    """
    if options.output.exists():
        raise ValueError(f"{options.output} exists; remove it or name another folder")
    check_versions()
    keep_freed_memory()
    return _Run(options, progress).finish()


def keep_freed_memory() -> None:
    """Have glibc reuse freed memory instead of returning it: without the page faults a CPU trains twice as fast."""
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    for option, value in MALLOC_OPTIONS:
        set_option(option, value)


class _Run:
    """One run of `distill`: its folder, its clock and its phases."""

    def __init__(self, options: DistillOptions, progress: Callable[[str], None]) -> None:
        self._options, self._say = options, progress
        self._checkpoint = open_checkpoint(options.verifier)
        if not self._checkpoint.eos_ids:
            raise ValueError(f"{options.verifier} names no token that ends an answer (eos_token_id)")
        self._device = choose_device(options.device)
        self._source = PromptSource(self._checkpoint, options.prompts, options.seed)
        self._folder = options.output.with_name(options.output.name + ".distill")
        self._state_file = self._folder / "progress.json"
        self._started = time.monotonic()
        self._verifier = _to(load_model(self._checkpoint, product_dtype(self._device)), self._device)
        self._decoder_now: Decoder | None = None
        self._state = self._open_state()

    def finish(self) -> DistillReport:
        blocks = self._write_text()
        drafter = self._begin_drafter()
        if can_copy(drafter.config):
            build_copying_head(drafter, blocks)
        self._decoder_now = None
        del self._verifier
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        rate = 1.0 if self._options.start is None else START_RATE
        trainer = Trainer(
            _to(drafter, self._device),
            blocks,
            self._options.seed,
            self._options.batch_tokens,
            product_dtype(self._device),
            rate,
        )
        self._train(trainer)
        top1, top8 = trainer.agreement()
        self._export(drafter)
        shutil.rmtree(self._folder)
        self._say(f"{self._clock()} wrote {self._options.output}: agreement top 1 {top1:.3f}, top 8 {top8:.3f}")
        return DistillReport(
            folder=self._options.output,
            layers=self._state.layers,
            hidden=self._state.hidden,
            num_parameters=sum(parameter.numel() for parameter in drafter.parameters()),
            written_tokens=sum(block.tokens.numel() for block in blocks),
            trained_tokens=self._state.num_steps * trainer.batch_tokens,
            agreement_top1=top1,
            agreement_top8=top8,
            seconds=self._seconds(),
        )

    def _begin_drafter(self) -> LlamaForCausalLM:
        """The drafter before training, in float32 on the CPU."""
        if self._options.start is not None:
            drafter = load_model(open_checkpoint(str(self._options.start)), torch.float32)
            assert isinstance(drafter, LlamaForCausalLM)  # `start_shape` has looked
            return drafter.requires_grad_(True)
        config = drafter_config(
            self._state.layers,
            self._state.hidden,
            self._verifier.config.get_text_config().vocab_size,
            self._checkpoint.context,
            self._checkpoint.bos_id,
            self._checkpoint.eos_ids,
            ROPE_THETA,
        )
        embedding: Any = self._verifier.get_input_embeddings().weight
        return make_drafter(config, embedding.float(), self._options.seed)

    # --- state ---

    def _open_state(self) -> Progress:
        asked = asdict(self._options) | {"output": "", "verifier": self._checkpoint.fingerprint}
        if self._options.prompts:
            asked["prompts"] = f"{self._options.prompts.stat().st_size} bytes"
        identity = json.dumps(asked | {"device": self._device.type, "torch": torch.__version__}, default=str)
        if self._state_file.exists():
            try:
                state = Progress(**json.loads(self._state_file.read_text(encoding="utf-8")))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self._state_file} is damaged; remove {self._folder} to begin anew") from error
            if state.identity != identity:
                raise ValueError(
                    f"{self._folder} holds a run with other options ({state.identity}); give the same ones "
                    f"({identity}), or remove it to begin anew"
                )
            self._started -= state.seconds
            self._say(f"{self._clock()} going on in {self._folder}")
            return state
        if self._options.start is not None:
            shape = start_shape(self._options.start, self._verifier)
        elif self._options.layers is None or self._options.hidden is None:
            shape = choose_shape(self._verifier, self._device, self._say)
        else:
            shape = (self._options.layers, self._options.hidden)
        self._folder.mkdir(parents=True, exist_ok=True)
        state = Progress(identity, *shape, choose_block_shapes(self._options, self._checkpoint, self._verifier))
        self._save_state(state)
        return state

    def _save_state(self, state: Progress, **changes) -> Progress:
        named = {field.name: getattr(state, field.name) for field in fields(Progress)}
        state = Progress(**(named | {"seconds": self._seconds()} | changes))
        unfinished = self._state_file.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(state)), encoding="utf-8")
        unfinished.replace(self._state_file)
        return state

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def _clock(self) -> str:
        return f"[{self._seconds():.0f} s]"

    def _budget(self) -> float:
        return math.inf if self._options.hours is None else 3600 * self._options.hours

    # --- phase 1 ---

    def _write_text(self) -> list[Block]:
        """All blocks of the run: those that lie there are read, the others are decoded."""
        blocks: list[Block] = []
        written = 0
        # a CUDA block takes less than a minute and its cache is large: it is made again
        unfinished = None if self._device.type == "cuda" else self._folder / "unfinished"
        with ThreadPoolExecutor(max_workers=1) as drawer:  # the next block's prompts are drawn during this one
            table = None
            while not self._enough(len(blocks), written):
                index = len(blocks)
                path = self._folder / f"block-{index:05}.safetensors"
                if path.exists():
                    block = Block.load(path, self._device)
                else:
                    began = time.monotonic()
                    drawn = (table or drawer.submit(self._draw, index)).result()
                    table = drawer.submit(self._draw, index + 1)
                    block = self._decoder(*self._shape(index)).decode(
                        drawn, self._options.seed * 100_003 + index, unfinished, SAVE_SECONDS
                    )
                    block.save(path)
                    self._state = self._save_state(self._state)
                    self._say(self._text_line(index, written, block, time.monotonic() - began))
                blocks.append(block)
                written += block.tokens.numel()
        if not self._state.num_blocks:
            self._state = self._save_state(self._state, num_blocks=len(blocks))
        return blocks

    def _enough(self, num_blocks: int, written: int) -> bool:
        if self._state.num_blocks:
            return num_blocks >= self._state.num_blocks
        if self._options.tokens is not None:
            return written >= self._options.tokens
        rows, length = self._shape(num_blocks)
        return is_enough_text(self._seconds(), written, rows * length, self._budget())

    def _text_line(self, index: int, written: int, block: Block, seconds: float) -> str:
        written += block.tokens.numel()
        answers = (block.roles == ROLE_ANSWER).float().mean().item()
        share = (
            written / self._options.tokens
            if self._options.tokens
            else self._seconds() / (GENERATE_SHARE * self._budget())
        )
        return (
            f"{self._clock()} text: block {index + 1}, {written / 1e6:.3g} M tokens, "
            f"{block.tokens.numel() / seconds:.0f} tokens/s, {100 * answers:.0f} % answers, "
            f"about {self._seconds() * max(0.0, 1 / share - 1):.0f} s of text left"
        )

    def _shape(self, index: int) -> tuple[int, int]:
        rows, length = self._state.block_shapes[index % len(self._state.block_shapes)]
        return rows, length

    def _draw(self, index: int) -> PromptTable:
        """Prompts of a block: long blocks take the long ones."""
        rows, length = self._shape(index)
        shorter = [other for _, other in self._state.block_shapes if other < length]
        shortest = max(shorter) // 2 if shorter else 0
        return self._source.draw(index, rows * PROMPTS_PER_ROW, shortest, max(length // 2, length - ANSWER_LIMIT))

    def _decoder(self, rows: int, length: int) -> Decoder:
        """The decoder of this shape; only one is kept, since its KV rows fill the device."""
        if (self._decoder_now is None) or (self._decoder_now.rows, self._decoder_now.length) != (rows, length):
            self._decoder_now = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            self._decoder_now = Decoder(
                self._verifier, self._checkpoint.eos_ids, special_ids(self._checkpoint), rows, length
            )
        return self._decoder_now

    # --- phase 2 ---

    def _train(self, trainer: Trainer) -> None:
        path = self._folder / "trainer.safetensors"
        step = trainer.load(path) if path.exists() else 0
        num_steps = self._state.num_steps
        if not num_steps and self._options.tokens is not None:
            num_steps = max(1, TRAIN_PASSES * trainer.num_tokens // trainer.batch_tokens)
            self._state = self._save_state(self._state, num_steps=num_steps)
        saved = began = time.monotonic()
        begin_step = step
        while not num_steps or step < num_steps:
            trainer.step(step, num_steps)
            step += 1
            if not num_steps and step == WARMUP_STEPS // 4:
                began, begin_step = trainer.synchronized(), step
            if not num_steps and step >= WARMUP_STEPS // 2:
                step_seconds = (trainer.synchronized() - began) / (step - begin_step)
                left = TRAIN_SHARE * (self._budget() - self._seconds())
                num_steps = max(WARMUP_STEPS, step + int(left / step_seconds))
                self._state = self._save_state(self._state, num_steps=num_steps)
            if time.monotonic() - saved > SAVE_SECONDS and step < (num_steps or step + 1):
                saved = trainer.synchronized()
                trainer.save(path, step)
                self._state = self._save_state(self._state)
                self._say(self._training_line(trainer, step, num_steps, (saved - began) / max(1, step - begin_step)))
        trainer.save(path, step)

    def _training_line(self, trainer: Trainer, step: int, num_steps: int, step_seconds: float) -> str:
        top1, top8 = trainer.agreement()
        return (
            f"{self._clock()} training: step {step} of {num_steps or 'a number not yet known'}, "
            f"loss {trainer.recent_loss():.3f}, agreement top 1 {top1:.3f}, top 8 {top8:.3f}, "
            f"{trainer.batch_tokens / step_seconds:.0f} tokens/s, "
            f"about {max(0, num_steps - step) * step_seconds:.0f} s left"
        )

    def _export(self, drafter: LlamaForCausalLM) -> None:
        """Write the folder beside its place, then rename: complete or absent."""
        unfinished = self._options.output.with_name(self._options.output.name + ".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        _to(drafter, torch.bfloat16).save_pretrained(unfinished)
        write_tokenizer(self._checkpoint, unfinished)
        unfinished.replace(self._options.output)


def _to(model: Model, place: torch.device | torch.dtype) -> Model:
    """`model.to`, whose type transformers hides."""
    nn.Module.to(model, place)
    return model


def is_enough_text(seconds: float, written: int, next_tokens: int, budget: float) -> bool:
    """Whether another block of `next_tokens` would end later than half of it beyond the text's share of the budget.

    seconds: since the run began; written: tokens so far; budget: seconds of the whole run.
    """
    return written > 0 and seconds * (1 + next_tokens / written / 2) >= GENERATE_SHARE * budget


def choose_device(name: str) -> torch.device:
    """The device that a name stands for; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device {name!r} is not known; auto, cpu, cuda and cuda:N are accepted") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {name!r} is not supported; auto, cpu, cuda and cuda:N are accepted")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there; this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def product_dtype(device: torch.device) -> torch.dtype:
    """What a device multiplies in, to write and to train: bfloat16 where that is faster."""
    is_fast = device.type == "cuda" or not FAST_BFLOAT16.isdisjoint(detect_target().instruction_set)
    return torch.bfloat16 if is_fast else torch.float32


def start_shape(start: Path, verifier: PreTrainedModel) -> tuple[int, int]:
    """(layers, hidden) of a drafter to start from, if it is one that can be trained here."""
    config = open_checkpoint(str(start)).config
    vocabulary = verifier.config.get_text_config().vocab_size
    if config.model_type != "llama" or not config.tie_word_embeddings or config.vocab_size != vocabulary:
        raise ValueError(
            f"{start} is a {config.model_type} with {config.vocab_size} tokens; a drafter to start from is a llama "
            f"with tied embeddings and the verifier's {vocabulary} tokens"
        )
    return config.num_hidden_layers, config.hidden_size


def choose_shape(verifier: PreTrainedModel, device: torch.device, say: Callable[[str], None]) -> tuple[int, int]:
    """The largest of SHAPES whose matrix products take at most DRAFT_PASS_COST of the verifier's (measured)."""
    step = products_seconds(
        [(weight.shape[0], weight.shape[1]) for weight in _matrices(verifier)], verifier.dtype, device
    )
    vocabulary = verifier.config.get_text_config().vocab_size
    chosen, chosen_seconds = SHAPES[0], 0.0
    for layers, hidden in SHAPES:
        mlp = mlp_size(hidden)
        layer = [(4 * hidden, hidden), (2 * mlp, hidden), (hidden, mlp)]
        seconds = products_seconds([*layer * layers, (vocabulary, hidden)], verifier.dtype, device)
        if chosen_seconds and seconds > DRAFT_PASS_COST * step:
            break
        chosen, chosen_seconds = (layers, hidden), seconds
    say(
        f"drafter of {chosen[0]} layers, hidden {chosen[1]}: products take {1e3 * chosen_seconds:.2f} ms a pass, "
        f"{100 * chosen_seconds / step:.0f} % of the verifier's {1e3 * step:.2f} ms"
    )
    return chosen


def _matrices(verifier: PreTrainedModel) -> Iterator[Tensor]:
    for module in verifier.modules():
        if isinstance(module, nn.Linear):
            yield module.weight


def products_seconds(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> float:
    """Median seconds of one pass of DRAFT_ROWS tokens through matrices of these shapes (outputs, inputs)."""
    weights = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    inputs = {size: torch.randn(DRAFT_ROWS, size, device=device).to(dtype) for _, size in shapes}
    timings = []
    for _ in range(7):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        for weight in weights:
            nn.functional.linear(inputs[weight.shape[1]], weight)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        timings.append(time.perf_counter() - began)
    return sorted(timings[1:])[3]


def choose_block_shapes(
    options: DistillOptions, checkpoint: Checkpoint, verifier: PreTrainedModel
) -> tuple[tuple[int, int], ...]:
    """(rows, length) of the blocks, taken in turn: as many rows as the device's memory holds."""
    config = verifier.config.get_text_config()
    context = min(checkpoint.context, getattr(config, "sliding_window", None) or checkpoint.context)
    if context < 64:
        raise ValueError(f"the verifier reads {context} tokens; at least 64 are needed to distil")
    if verifier.device.type == "cuda":
        lengths, most_rows = list(CUDA_LENGTHS), CUDA_ROWS
        room = CUDA_CACHE_SHARE * torch.cuda.mem_get_info(verifier.device)[0]
    else:
        lengths, most_rows = list(CPU_LENGTHS), CPU_ROWS
        available = available_memory()
        room = math.inf if available is None else CPU_CACHE_SHARE * available
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slots = room / (2 * config.num_hidden_layers * heads * head_size * verifier.dtype.itemsize)
    lengths = [options.length] if options.length else lengths
    return tuple(
        (options.rows or max(8, int(min(most_rows, slots / length)) // 8 * 8), length)
        for length in (min(context, length) for length in lengths)
    )


def special_ids(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Tokens that no text holds, which the verifier may not write."""
    added = checkpoint.tokenizer.get_added_tokens_decoder()
    return tuple(token for token, entry in added.items() if entry.special)


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The verifier's tokenizer and chat template, as transformers reads them from a folder."""
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": checkpoint.context}
    for name in ("bos", "eos", "unk", "pad"):
        token = getattr(checkpoint.special_tokens, name)
        if token is not None:
            config[f"{name}_token"] = token
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if checkpoint.chat_template is not None:
        (folder / "chat_template.jinja").write_text(checkpoint.chat_template, encoding="utf-8")
