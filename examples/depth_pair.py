"""A pair whose best draft depth depends on the context by construction: what a learned depth can win, shown.

python examples/depth_pair.py FOLDER   # prints the commands that build and bench it

The verifier says the words of one long circle in order. The drafter knows the circle in its easy stretches and is
always wrong in the hard ones, so that a deep draft pays in the former and none in the latter. Both are ordinary Llama
checkpoints with weights set by hand: an embedding a word, an output layer that turns each into its successor, and
layers between them that take their time and add nothing.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

STRETCHES = (20, 30, 14, 22, 34, 16, 26, 40, 18, 20)
"""Words of each stretch of the circle: easy, hard, easy, ..."""

NUM_WORDS = sum(STRETCHES)
END = "<end>"
PROMPT_WORDS = 6
VERIFIER = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 8}
DRAFTER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 4}


def is_easy(word: int) -> bool:
    """Whether the drafter knows what follows this word of the circle."""
    for index, length in enumerate(STRETCHES):
        if word < length:
            return index % 2 == 0
        word -= length
    raise ValueError(f"the circle has {NUM_WORDS} words")


def successors(knows_hard: bool) -> list[int]:
    """What a model says after each word: the next of the circle, or for a drafter in a hard stretch one that is not."""
    step = [1 if knows_hard or is_easy(word) else NUM_WORDS // 2 for word in range(NUM_WORDS)]
    return [(word + step[word]) % NUM_WORDS for word in range(NUM_WORDS)]


def make_model(sizes: dict[str, int], following: list[int], seed: int) -> LlamaForCausalLM:
    """A Llama that says `following[word]` after each word. sizes: of its configuration."""
    config = LlamaConfig(
        vocab_size=NUM_WORDS + 1, max_position_embeddings=1024, bos_token_id=NUM_WORDS, eos_token_id=NUM_WORDS,
        pad_token_id=NUM_WORDS, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    embedding = torch.nn.functional.normalize(torch.randn(NUM_WORDS + 1, config.hidden_size), dim=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.zero_()
        for word, follower in enumerate(following):
            model.lm_head.weight[follower] += embedding[word]
    return model.bfloat16()


def make_tokenizer() -> Tokenizer:
    """A token a word."""
    words = {f"w{word}": word for word in range(NUM_WORDS)} | {END: NUM_WORDS}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def write_prompts(path: Path, count: int, seed: int) -> None:
    """Pieces of the circle, as `yggc build --prompts` and `yggrt bench` read them; their kind is what follows them."""
    chance = random.Random(seed)
    lines = []
    for _ in range(count):
        first = chance.randrange(NUM_WORDS)
        words = [(first + place) % NUM_WORDS for place in range(PROMPT_WORDS)]
        kind = "starts easy" if is_easy(words[-1]) else "starts hard"
        lines.append(json.dumps({"category": kind, "prompt": " ".join(f"w{word}" for word in words)}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write both checkpoints and two files of prompts."""
    for role, sizes, seed in (("verifier", VERIFIER, 0), ("drafter", DRAFTER, 1)):
        place = folder / role
        make_model(sizes, successors(role == "verifier"), seed).save_pretrained(place)
        make_tokenizer().save(str(place / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": 1024}
        (place / "tokenizer_config.json").write_text(json.dumps(settings))
    write_prompts(folder / "calibration.jsonl", 60, seed=0)
    write_prompts(folder / "bench.jsonl", 12, seed=1)
    print(
        f"yggc build --drafter {folder}/drafter --verifier {folder}/verifier --prompts {folder}/calibration.jsonl "
        f"-o {folder}/depth.bundle\nyggrt bench {folder}/depth.bundle --prompts {folder}/bench.jsonl"
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
