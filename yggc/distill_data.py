"""Text for distillation, made by the verifier itself: every row of a batch decodes conversation after conversation.

All rows of a block step together and are never padded: a row whose conversation has ended begins its next one in the
next slot, and the attention mask keeps conversations apart. A block depends on the verifier, the prompts, the options
and its own number alone, so an interrupted run makes the same blocks again.
"""

from __future__ import annotations

import inspect
import json
import random
import shutil
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jinja2.sandbox
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from yggc.checkpoints import Checkpoint

ROLE_GIVEN, ROLE_USER, ROLE_ANSWER = 0, 1, 2  # who chooses the next token: the prompt, the verifier as user, as itself
PROMPTS_FILE = Path(__file__).parent / "data" / "distill" / "prompts.json"
GIVEN_SHARE = 0.5  # of the prompts, where the caller brings prompts too
SPAN = 256  # slots of a piece of the KV cache; the attention reads whole pieces
TOP_TOKENS = 24  # teacher probabilities kept for each slot
USER_TEMPERATURE = 0.9
ANSWER_TEMPERATURE = 0.8  # of the rows that do not answer greedily
GREEDY_SHARE = 0.65  # of the rows that answer greedily
ANSWER_LIMIT = 256  # tokens of an answer, which is cut there
LATER_USER_TOKENS = 96  # the most a user says in a later turn
ATTENTION_NAME = "yggc_slots"
CPU_ROWS_AT_ONCE = 16  # of float32 logits, which then stay in the caches


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins.

    text:    what the user says; when `open`, only its beginning, and the verifier writes the rest.
    minimum: tokens the verifier writes as user before it may stop.
    maximum: tokens the verifier may write as user.
    turns:   user turns of the conversation.
    weight:  how often this opening is drawn.
    """

    text: str
    open: bool = False
    minimum: int = 0
    maximum: int = 200
    turns: int = 1
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not (self.text.strip() or self.open):
            raise ValueError("a prompt needs a text that is not empty")
        if not 0 <= self.minimum < self.maximum:
            raise ValueError(f"minimum {self.minimum}, maximum {self.maximum}: 0 <= minimum < maximum is needed")
        if self.turns < 1 or self.weight <= 0:
            raise ValueError(f"turns {self.turns}, weight {self.weight}: both must be positive")


def read_openings(path: Path) -> list[Opening]:
    """Read a prompts file: a line is plain text or a JSON object with the fields of `Opening`."""
    openings = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompts file {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            openings.append(Opening(**json.loads(line)) if line.startswith("{") else Opening(line))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {error}. A line is text, or a JSON object with "
                f"{', '.join(field.name for field in fields(Opening))}"
            ) from error
    if not openings:
        raise ValueError(f"{path} holds no prompts")
    return openings


def fill_slots(text: str, slots: dict[str, list[str]], dice: random.Random) -> str:
    """Replace every {name} by one of that slot's words, which may hold slots again; {number} is a number."""
    while "{" in text:
        head, _, rest = text.partition("{")
        name, _, tail = rest.partition("}")
        if name == "number":
            word = str(dice.choice((dice.randint(2, 12), dice.randint(2, 99), 10 * dice.randint(2, 60))))
        else:
            word = dice.choice(slots[name])
        text = head + word + tail
    return text


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What a chat template puts around the words, as tokens.

    before: up to the first user text; to_answer: from a user text's end to the answer; to_user: from an answer's end to
    the next user text.
    """

    before: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]


def chat_format(checkpoint: Checkpoint) -> ChatFormat:
    """Read the format off a rendered conversation; a checkpoint without a template gets plain text and blank lines."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(checkpoint.tokenizer.encode(text, add_special_tokens=False).ids)

    if checkpoint.chat_template is None:
        beginning = tuple(checkpoint.tokenizer.encode("", add_special_tokens=True).ids)
        return ChatFormat(beginning, encode("\n\n"), encode("\n\n"))
    marks = ("ygguserone", "yggassistant", "yggusertwo")
    bos = getattr(checkpoint.config, "bos_token_id", None)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse_template
    try:
        rendered = environment.from_string(checkpoint.chat_template).render(
            messages=[
                {"role": role, "content": mark} for role, mark in zip(("user", "assistant", "user"), marks, strict=True)
            ],
            add_generation_prompt=True,
            bos_token=(checkpoint.tokenizer.id_to_token(bos) or "") if isinstance(bos, int) else "",
            eos_token=checkpoint.tokenizer.id_to_token(checkpoint.eos_ids[0]) or "",
        )
        before, rest = rendered.split(marks[0])
        to_answer, rest = rest.split(marks[1])
        to_user = rest.split(marks[2])[0]
    except (ValueError, jinja2.TemplateError) as error:
        raise ValueError(f"the verifier's chat template cannot be used to distil: {error}") from error
    return ChatFormat(encode(before), encode(to_answer), encode(to_user))


def _refuse_template(message: str) -> None:
    raise ValueError(message)


@dataclass(frozen=True, slots=True)
class PromptTable:
    """Prompts of a block: tokens int64[N + 2, P], lengths int64[N + 2], rules int64[N + 2, 4].

    A row's rules: the role that goes on after it, minimum, maximum, turns. The last two rows hold what leads to an
    answer and to a user's next turn.
    """

    tokens: Tensor
    lengths: Tensor
    rules: Tensor

    @property
    def num_prompts(self) -> int:
        return len(self.lengths) - 2


class PromptSource:
    """Prompts as tokens; the same seed and block number give the same prompts."""

    def __init__(self, checkpoint: Checkpoint, path: Path | None, seed: int) -> None:
        shipped = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
        self._slots: dict[str, list[str]] = shipped["slots"]
        self._shipped = [Opening(**opening) for opening in shipped["openings"]]
        self._given = read_openings(path) if path else []
        self._tokenizer, self._seed = checkpoint.tokenizer, seed
        self.format = chat_format(checkpoint)

    def draw(self, block: int, count: int, shortest: int, longest: int) -> PromptTable:
        """Draw `count` prompts for a block that reach from `shortest` (where possible) to `longest` tokens."""
        dice = random.Random(f"{self._seed} {block}")
        rows: list[list[int]] = []
        rules: list[tuple[int, int, int, int]] = []
        for attempt in range(64):
            openings = self._draw_openings(dice, count)
            texts = self._tokenizer.encode_batch([opening.text for opening in openings], add_special_tokens=False)
            for opening, text in zip(openings, texts, strict=True):
                tokens = [*self.format.before, *text.ids, *(() if opening.open else self.format.to_answer)]
                reach = len(tokens) + opening.minimum
                if tokens and (shortest if attempt < 32 else 0) <= reach <= longest:
                    rows.append(tokens)
                    role = ROLE_USER if opening.open else ROLE_ANSWER
                    rules.append((role, opening.minimum, opening.maximum, opening.turns))
            if len(rows) >= count:
                break
        if not rows:
            raise ValueError(f"no prompt fits into {longest} tokens; give shorter ones or a longer context")
        rows = [*rows[:count], list(self.format.to_answer), list(self.format.to_user)]
        rules = [*rules[:count], (ROLE_ANSWER, 0, 1, 1), (ROLE_USER, 0, 1, 1)]
        table = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        for index, row in enumerate(rows):
            table[index, : len(row)] = torch.tensor(row)
        return PromptTable(table, torch.tensor([len(row) for row in rows]), torch.tensor(rules))

    def _draw_openings(self, dice: random.Random, count: int) -> list[Opening]:
        given = sum(dice.random() < GIVEN_SHARE for _ in range(count)) if self._given else 0
        openings = dice.choices(self._given, [opening.weight for opening in self._given], k=given) if given else []
        for opening in dice.choices(self._shipped, [opening.weight for opening in self._shipped], k=count - given):
            text = fill_slots(opening.text, self._slots, dice)
            openings.append(Opening(text, opening.open, opening.minimum, opening.maximum, opening.turns))
        dice.shuffle(openings)
        return openings


@dataclass(frozen=True, slots=True)
class Block:
    """Conversations and what the verifier thought at every slot.

    tokens:       int32[rows, length].
    starts:       int32[rows, length], slot at which the token's conversation begins.
    roles:        int8[rows, length], who chose the token that follows (ROLE_*).
    top_ids:      int32[rows, length, TOP_TOKENS], the verifier's likeliest next tokens, likeliest first.
    top_logprobs: float16[rows, length, TOP_TOKENS], at temperature 1 over the whole vocabulary.
    """

    tokens: Tensor
    starts: Tensor
    roles: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def save(self, path: Path) -> None:
        """Write the block beside its place, then rename: complete or absent."""
        unfinished = path.with_suffix(".part")
        save_file({field.name: getattr(self, field.name).contiguous().cpu() for field in fields(self)}, unfinished)
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path, device: torch.device) -> Block:
        return cls(**load_file(path, device=str(device)))


def run_rows(drafter: LlamaForCausalLM, block: Block) -> Tensor:
    """Last hidden states of a drafter at every slot of a block, float[rows, length, hidden]."""
    starts = block.starts.long()
    length = starts.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=starts.device).tril()
    mask = (starts[:, None, :, None] == starts[:, None, None, :]) & causal
    hidden: Tensor = drafter.model(
        input_ids=block.tokens.long(),
        position_ids=torch.arange(length, device=starts.device) - starts,
        attention_mask=mask,
        use_cache=False,
    ).last_hidden_state
    return hidden


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Exact top-k in two steps, several times faster than `topk` over a whole vocabulary.

    logits: float[B, V]. Returns values float32[B, count] and ids int64[B, count], largest first.
    """
    columns = 64
    padding = -logits.shape[1] % columns
    if padding:
        logits = torch.nn.functional.pad(logits, (0, padding), value=float("-inf"))
    groups = logits.view(logits.shape[0], logits.shape[1] // columns, columns)
    if groups.shape[1] <= count:
        values, ids = logits.topk(count)
        return values.float(), ids
    best = groups.amax(dim=2).topk(count).indices
    few = groups.gather(1, best[:, :, None].expand(-1, -1, columns)).flatten(1)
    values, places = few.topk(count)
    return values.float(), best.gather(1, places // columns) * columns + places % columns


def slot_attention(module, query, key, value, attention_mask, scaling=None, softcap=None, s_aux=None, **_):
    """Attention of one token a row as two batched products: grouped heads never repeat their keys.

    query: [B, heads, 1, D]; key, value: [S, B, groups, SPAN, D], contiguous: a CPU's products copy all else;
    attention_mask: additive [B, 1, 1, S * SPAN].
    """
    if s_aux is not None:
        raise ValueError("verifiers with attention sinks cannot be distilled yet")
    rows, heads, _, size = query.shape
    spans, _, groups, span, _ = key.shape
    scaling = size**-0.5 if scaling is None else scaling
    shared = heads // groups
    grouped = (query * scaling).view(1, rows * groups, shared, size).expand(spans, -1, -1, -1).flatten(0, 1)
    scores = torch.bmm(grouped, key.view(-1, span, size).transpose(1, 2))
    scores = scores.view(spans, rows, heads, span).permute(1, 2, 0, 3).reshape(rows, heads, 1, spans * span)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores + attention_mask, dim=-1)
    weights = weights.view(rows, heads, spans, span).permute(2, 0, 1, 3).reshape(-1, shared, span)
    mixed = torch.bmm(weights, value.view(-1, span, value.shape[-1]))
    return mixed.view(spans, rows, 1, heads, -1).sum(dim=0), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)


class SlotCache(Cache):
    """KV rows for a batch whose rows all write the same slot, in spans of which the first `spans` are read."""

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        super().__init__(layers=[])
        self.rows, self.capacity, self.spans = rows, -(-length // SPAN), 1
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def buffers(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's K and V, [spans, rows, groups, SPAN, D], made when first asked for."""
        if layer not in self.pairs:
            keys, values = (
                states.new_zeros(self.capacity, self.rows, states.shape[1], SPAN, states.shape[3])
                for states in (keys, values)
            )
            self.pairs[layer] = keys, values
        return self.pairs[layer]

    def update(self, key_states, value_states, layer_idx, *_, **__):
        keys, values = self.buffers(layer_idx, key_states, value_states)
        place = self.slot % SPAN
        keys[self.spans - 1].index_copy_(2, place, key_states)
        values[self.spans - 1].index_copy_(2, place, value_states)
        return keys[: self.spans], values[: self.spans]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def span_parts(begin: int, end: int) -> list[tuple[int, slice]]:
    """Where slots from `begin` to `end` lie: spans, and the slots of each."""
    spans = range(begin // SPAN, -(-end // SPAN))
    return [(span, slice(max(begin - span * SPAN, 0), min(end - span * SPAN, SPAN))) for span in spans]


class Decoder:
    """Makes blocks of `rows` by `length` tokens; on CUDA every step is the replay of a graph."""

    def __init__(
        self, verifier: PreTrainedModel, eos_ids: tuple[int, ...], banned_ids: tuple[int, ...], rows: int, length: int
    ) -> None:
        self._verifier, self.rows, self.length = verifier, rows, length
        verifier.set_attn_implementation(ATTENTION_NAME)
        device, vocabulary = verifier.device, verifier.config.get_text_config().vocab_size
        self._top = min(TOP_TOKENS, vocabulary)
        self._cache = SlotCache(rows, length, device)
        named = inspect.signature(type(verifier).forward).parameters
        self._cache_argument = "cache" if "cache" in named else "past_key_values"  # renamed in transformers 5.24
        self._is_eos = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._is_eos[list(eos_ids)] = True
        self._bias = torch.zeros(vocabulary, device=device)
        self._bias[[token for token in banned_ids if token not in eos_ids and token < vocabulary]] = float("-inf")
        greedy = torch.arange(rows, device=device) < round(GREEDY_SHARE * rows)
        self._temperature = torch.where(greedy, 0.0, ANSWER_TEMPERATURE)
        names = ("token", "start", "source", "cursor", "number", "role", "count", "minimum", "maximum", "turns")
        self._state = {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in names}
        self._noise = torch.zeros(rows, self._top, device=device)
        self._block = Block(
            tokens=torch.zeros(length, rows, dtype=torch.int32, device=device),
            starts=torch.zeros(length, rows, dtype=torch.int32, device=device),
            roles=torch.zeros(length, rows, dtype=torch.int8, device=device),
            top_ids=torch.zeros(length, rows, self._top, dtype=torch.int32, device=device),
            top_logprobs=torch.zeros(length, rows, self._top, dtype=torch.float16, device=device),
        )
        self._rows_at_once = rows if device.type == "cuda" else CPU_ROWS_AT_ONCE
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._warm: set[int] = set()
        self._graph_pool: Any = None
        self._table = PromptTable(*(torch.zeros(0, dtype=torch.int64, device=device) for _ in fields(PromptTable)))
        self._num_prompts = 0

    @torch.inference_mode()
    def decode(self, table: PromptTable, seed: int, unfinished: Path | None = None, save_seconds: float = 0.0) -> Block:
        """Returns a block of conversations that begin with the table's prompts, row r taking r, r + rows, ...

        unfinished: folder to which the slots made since the last time are added every `save_seconds`, and from which
        an interrupted block is gone on with.
        """
        device = self._noise.device
        self._load_table(table)
        generator = torch.Generator(device).manual_seed(seed)
        done = self._restore(unfinished, seed, generator) if unfinished else 0
        if not done:
            self._begin()
            if unfinished:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
        begin, saved = done, time.monotonic()
        for slot in range(begin, self.length):
            self._noise.exponential_(generator=generator).log_().neg_()
            self._step(slot // SPAN + 1)
            if unfinished and time.monotonic() - saved > save_seconds:
                self._save(unfinished, done, slot + 1, seed, generator)
                done, saved = slot + 1, time.monotonic()
        return Block(*(getattr(self._block, field.name).transpose(0, 1).contiguous() for field in fields(Block)))

    def _begin(self) -> None:
        """Every row at the first token of its first prompt."""
        first = torch.arange(self.rows, device=self._noise.device) % self._num_prompts
        rules = self._table.rules[first]
        start = {
            "source": first,
            "number": first,
            "token": self._table.tokens[first, 0],
            "role": rules[:, 0],
            "minimum": rules[:, 1],
            "maximum": rules[:, 2],
            "turns": rules[:, 3],
        }
        for name, tensor in self._state.items():
            tensor.copy_(start[name]) if name in start else tensor.fill_(name == "cursor")
        self._cache.slot.zero_()

    def _save(self, folder: Path, begin: int, end: int, seed: int, generator: torch.Generator) -> None:
        """Add a file with slots `begin` to `end` and all that the next one needs; complete or absent."""
        slots = slice(begin, end)
        tensors = {f"state.{name}": tensor for name, tensor in self._state.items()}
        tensors |= {f"block.{field.name}": getattr(self._block, field.name)[slots] for field in fields(Block)}
        for layer, pair in self._cache.pairs.items():
            for part, buffer in enumerate(pair):
                made = [buffer[span, :, :, inside] for span, inside in span_parts(begin, end)]
                tensors[f"cache.{layer}.{part}"] = torch.cat(made, dim=2)
        tensors |= {"seed": torch.tensor(seed), "end": torch.tensor(end), "generator": generator.get_state()}
        beside = folder / "part"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, beside)
        beside.replace(folder / f"{begin:06}.safetensors")

    def _restore(self, folder: Path, seed: int, generator: torch.Generator) -> int:
        """Go on from what `_save` left; returns the slots that are done, 0 if they are another block's."""
        done = 0
        while (path := folder / f"{done:06}.safetensors").exists():
            tensors = load_file(path, device=str(self._noise.device))
            if int(tensors["seed"]) != seed:
                return 0
            slots = slice(done, int(tensors["end"]))
            for field in fields(Block):
                getattr(self._block, field.name)[slots] = tensors[f"block.{field.name}"]
            for layer in range(sum(name.startswith("cache.") for name in tensors) // 2):
                pair = tensors[f"cache.{layer}.0"], tensors[f"cache.{layer}.1"]
                for buffer, saved in zip(self._cache.buffers(layer, *pair), pair, strict=True):
                    parts = span_parts(slots.start, slots.stop)
                    sizes = [inside.stop - inside.start for _, inside in parts]
                    for (span, inside), part in zip(parts, saved.split(sizes, dim=2), strict=True):
                        buffer[span, :, :, inside] = part
            done = slots.stop
        if done:
            for name, tensor in self._state.items():
                tensor.copy_(tensors[f"state.{name}"])
            generator.set_state(tensors["generator"].cpu())
            self._cache.slot.fill_(done)
        return done

    def _load_table(self, table: PromptTable) -> None:
        """Copy the prompts into buffers that keep their place, since graphs remember places."""
        device = self._noise.device
        if len(self._table.lengths) != len(table.lengths):
            self._graphs.clear()
            self._table = PromptTable(
                torch.zeros(len(table.lengths), self.length, dtype=torch.int64, device=device),
                torch.zeros_like(table.lengths, device=device),
                torch.zeros_like(table.rules, device=device),
            )
        self._num_prompts = table.num_prompts
        self._table.tokens[:, : table.tokens.shape[1]].copy_(table.tokens)
        self._table.lengths.copy_(table.lengths)
        self._table.rules.copy_(table.rules)

    def _step(self, spans: int) -> None:
        """One token for every row. On CUDA the first step of an extent warms up, the second is captured."""
        if self._noise.device.type != "cuda" or spans not in self._warm:
            self._warm.add(spans)
            self._decode_slot(spans)
            return
        if spans not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._graph_pool):
                self._decode_slot(spans)
            self._graph_pool = graph.pool()
            self._graphs[spans] = graph
        self._graphs[spans].replay()

    def _decode_slot(self, spans: int) -> None:
        """Run the verifier on every row's token, record what it thinks, and choose the next tokens. No host sync."""
        state, slot = self._state, self._cache.slot
        self._cache.spans = spans
        columns = torch.arange(spans * SPAN, device=slot.device)
        visible = (columns >= state["start"][:, None]) & (columns <= slot)
        dtype = self._verifier.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=slot.device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        logits = self._verifier(
            input_ids=state["token"][:, None],
            position_ids=(slot - state["start"])[:, None],
            attention_mask=mask[:, None, None, :],
            use_cache=True,
            **{self._cache_argument: self._cache},
        ).logits[:, -1]
        values, ids = top_tokens(logits, self._top)
        total = torch.cat([torch.logsumexp(part.float(), dim=1) for part in logits.split(self._rows_at_once)])
        logprobs = values - total[:, None]
        forced = state["cursor"] < self._table.lengths[state["source"]]
        recorded = (state["token"], state["start"], torch.where(forced, ROLE_GIVEN, state["role"]), ids, logprobs)
        for field, tensor in zip(fields(Block), recorded, strict=True):
            buffer = getattr(self._block, field.name)
            buffer.index_copy_(0, slot, tensor[None].to(buffer.dtype))
        self._advance(forced, self._sample(values, ids))
        slot.add_(1)

    def _sample(self, values: Tensor, ids: Tensor) -> Tensor:
        """Draw a token a row from the kept ones by the Gumbel trick; temperature 0 takes the likeliest."""
        state = self._state
        user = state["role"] == ROLE_USER
        too_early = (user & (state["count"] < state["minimum"]))[:, None] & self._is_eos[ids]
        scores = (values + self._bias[ids]).masked_fill(too_early, float("-inf"))
        temperature = torch.where(user, USER_TEMPERATURE, self._temperature)
        choice = (scores + temperature[:, None] * self._noise).argmax(dim=1, keepdim=True)
        return ids.gather(1, choice)[:, 0]

    def _advance(self, forced: Tensor, sampled: Tensor) -> None:
        """Move every row to its next token: given, sampled, or the first of what follows a turn or a conversation."""
        state, table = self._state, self._table
        user = ~forced & (state["role"] == ROLE_USER)
        answer = ~forced & (state["role"] == ROLE_ANSWER)
        ended = self._is_eos[sampled]
        count = state["count"] + 1
        to_answer = user & (ended | (count >= state["maximum"]))
        to_user = answer & ended & (state["turns"] > 1)
        to_next = answer & (ended | (count >= ANSWER_LIMIT)) & ~to_user
        number = state["number"] + to_next * self.rows
        prompt = number % self._num_prompts
        rules = table.rules[prompt]
        jump = to_answer | to_user | to_next
        source = torch.where(to_answer, self._num_prompts, state["source"])
        source = torch.where(to_user, self._num_prompts + 1, source)
        source = torch.where(to_next, prompt, source)
        given = table.tokens[source, torch.where(jump, 0, state["cursor"]).clamp(max=self.length - 1)]
        role = torch.where(to_next, rules[:, 0], state["role"])
        following = {
            "token": torch.where(jump | forced, given, sampled),
            "start": torch.where(to_next, self._cache.slot + 1, state["start"]),
            "source": source,
            "cursor": torch.where(jump, 1, state["cursor"] + forced),
            "number": number,
            "role": torch.where(to_answer, ROLE_ANSWER, torch.where(to_user, ROLE_USER, role)),
            "count": torch.where(jump, 0, torch.where(forced, state["count"], count)),
            "minimum": torch.where(to_next, rules[:, 1], torch.where(to_user, 0, state["minimum"])),
            "maximum": torch.where(to_next, rules[:, 2], torch.where(to_user, LATER_USER_TOKENS, state["maximum"])),
            "turns": torch.where(to_next, rules[:, 3], state["turns"] - to_user.long()),
        }
        for name, tensor in following.items():
            state[name].copy_(tensor)
