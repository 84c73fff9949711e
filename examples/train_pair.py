"""A pair made from nothing: a tokenizer, a verifier and a drafter that learn Python from Python's own library.

python examples/train_pair.py FOLDER [SECONDS]   # then: yggc build --drafter FOLDER/drafter --verifier FOLDER/verifier

The two are of different families and sizes; all they share is the tokenizer.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 2048
END = "<|end|>"
CONTEXT = 1024
LENGTH, ROWS = 128, 8  # tokens of a training example, examples of a step


def read_corpus() -> str:
    """The modules of Python's standard library, the same on every machine with this Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py")))


def train_tokenizer(corpus: str) -> Tokenizer:
    """Byte-level BPE, so that any text can be a prompt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(corpus[:2_000_000].splitlines(keepends=True), trainer)
    return tokenizer


def make_models() -> dict[str, PreTrainedModel]:
    """The untrained pair, by role."""
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": VOCAB_SIZE}
    verifier = Qwen3Config(
        hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, max_position_embeddings=CONTEXT, **ids,
    )  # fmt: skip
    drafter = LlamaConfig(
        hidden_size=64, intermediate_size=192, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    return {"verifier": Qwen3ForCausalLM(verifier), "drafter": LlamaForCausalLM(drafter)}


def train(model: PreTrainedModel, tokens: torch.Tensor, seconds: float, name: str) -> None:
    """Next-token prediction on random windows of the corpus, for so long."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    started = told = time.monotonic()
    step = 0
    while (elapsed := time.monotonic() - started) < seconds or step == 0:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * max(0.05, 1 - elapsed / seconds)
        begins = torch.randint(len(tokens) - LENGTH - 1, (ROWS, 1), generator=generator)
        rows = tokens[begins + torch.arange(LENGTH + 1)]
        logits = model(input_ids=rows[:, :-1]).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if time.monotonic() - told > 5:
            told = time.monotonic()
            print(f"  {name}: step {step}, loss {loss.item():.2f}, {seconds - elapsed:.0f} s left", file=sys.stderr)


def main(folder: Path, seconds: float) -> None:
    corpus = read_corpus()
    print("  training a tokenizer", file=sys.stderr)
    tokenizer = train_tokenizer(corpus)
    tokens = torch.tensor(tokenizer.encode(corpus[:4_000_000]).ids)
    for name, model in make_models().items():
        train(model, tokens, seconds * (0.75 if name == "verifier" else 0.25), name)
        model.save_pretrained(folder / name)
        tokenizer.save(str(folder / name / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": CONTEXT}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    print(f"yggc build --drafter {folder / 'drafter'} --verifier {folder / 'verifier'} -o {folder / 'pair.bundle'}")
    print(f"yggrt run {folder / 'pair.bundle'} --raw 'def main(arguments):'")


if __name__ == "__main__":
    if not 2 <= len(sys.argv) <= 3:
        sys.exit("usage: train_pair.py FOLDER [SECONDS]")
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else 120.0)
