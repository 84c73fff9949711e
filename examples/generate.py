"""Compile a pair and answer with it: python examples/generate.py DRAFTER VERIFIER BUNDLE "prompt" """

from __future__ import annotations

import sys
from pathlib import Path

import yggrt
from yggc.build import build
from yggc.config import BuildOptions
from yggc.progress import Progress


def main(drafter: str, verifier: str, bundle: str, prompt: str) -> None:
    """Build once, then answer as a whole, in pieces, and as a conversation."""
    if not Path(bundle).exists():
        build(BuildOptions(drafter, verifier, Path(bundle), dtype="float32"), Progress())
    engine = yggrt.load(bundle)

    result = engine.generate(prompt, max_new_tokens=32)
    print(result.text)
    print(f"{result.finish_reason}, {result.stats.acceptance_length:.2f} tokens per verifier call")

    for piece in engine.stream(prompt, max_new_tokens=32):
        print(piece, end="", flush=True)
    print()

    messages = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": result.text},
        {"role": "user", "content": "Say it shorter."},
    ]
    print(engine.generate(messages, max_new_tokens=16).text)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit('usage: generate.py DRAFTER VERIFIER BUNDLE "prompt"')
    main(*sys.argv[1:])
