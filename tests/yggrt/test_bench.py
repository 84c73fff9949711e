"""The bench's own rules: which prompts are taken, and which differences pass."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests import toy
from yggrt.bench import BenchPrompt, Pair, first_difference, read_prompts, spread_over_categories, use_shape
from yggrt.schedule import sequential_schedule
from yggrt.tree import TreeShape


def test_a_limit_takes_the_groups_in_turn_and_mixes_the_kinds_of_chat():
    prompts = [
        BenchPrompt(category, f"{category} {n}") for category in ("writing", "math", "qa", "rag") for n in range(3)
    ]
    chosen = [prompt.text for prompt in spread_over_categories(prompts, 7)]
    assert chosen == ["writing 0", "qa 0", "rag 0", "math 0", "qa 1", "rag 1", "writing 1"]
    assert spread_over_categories(prompts, None) == prompts


def test_a_difference_passes_only_at_a_near_tie(verifier):
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 2, 3))
    plain = engine.generate([5, 6, 7], max_new_tokens=8, plain=True)
    same = Pair("qa", plain, plain)
    assert first_difference(0, same, 1e-4) is None
    changed = (*plain.token_ids[:3], (plain.token_ids[3] + 1) % 64, *plain.token_ids[4:])
    parted = Pair("qa", plain, replace(plain, token_ids=changed))
    found = first_difference(4, parted, 1e-4)
    assert found is not None and (found.prompt, found.token, found.allowed) == (4, 3, False)
    assert first_difference(4, parted, plain.gaps[3]).allowed
    shorter = Pair("qa", plain, replace(plain, token_ids=plain.token_ids[:5], gaps=plain.gaps[:5]))
    assert first_difference(0, shorter, 1e-4).token == 5


@pytest.mark.parametrize("line", ["[]", "{}", '{"turns": []}', "not json", "7"])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "fine"}) + "\n" + line)
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(path)


def test_a_shape_holds_whatever_width_the_plans_schedule_has(verifier):
    """A fused schedule verifies its own number of rows; a shape that was asked for is taken as it is."""
    engine = toy.make_engine(verifier, verifier, TreeShape(2, 3, 7))
    engine.use_schedule(replace(sequential_schedule(1), verify_width=2))
    narrow = engine.generate([5, 6, 7], max_new_tokens=30, ignore_eos=True).stats
    use_shape(engine, TreeShape(2, 3, 7))
    wide = engine.generate([5, 6, 7], max_new_tokens=30, ignore_eos=True).stats
    assert len(narrow.acceptance_histogram) - 1 <= 2 < len(wide.acceptance_histogram) - 1
