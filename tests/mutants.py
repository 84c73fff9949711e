"""Seeded faults that fast tests must find: `make mutants` applies them one by one to a copy of the sources.

Each is the kind of fault that speculative decoders have had in the field. A mutant that no test fails is reported as a
survivor, and the run ends non-zero: then a test is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parent.parent
COPIED = ("yggc", "runtime", "tests", "plans", "pyproject.toml")
LIMIT_S = 600
LOSSLESS = "tests/test_lossless.py::"
OUTPUT = LOSSLESS + "test_output_equals_plain_and_hugging_face"
SCHEDULES = "tests/test_lossless_schedules.py::"
CACHES = LOSSLESS + "test_after_every_iteration_both_caches_equal_a_fresh_prefill"
WALK = "tests/yggc/test_kernels.py::test_trees_are_walked_as_the_reference_walks_them"
ATTENTION = "tests/yggc/test_kernels.py::test_attention_equals_pytorchs"
THREADS = "tests/yggc/test_kernels.py::test_attention_is_the_same_bits_with_any_number_of_threads"
PRODUCTS = "tests/yggc/test_kernels.py::test_linear_equals_the_product_in_float64_at_every_width"
DRAWN = "tests/yggrt/test_sampling.py::test_what_a_seed_draws_depends_on_nothing_but_the_plan"
WINDOWS = LOSSLESS + "test_sliding_windows_count_positions_not_slots"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. old: text that occurs once in the file; new: what replaces it; tests: a test file, or a test of it."""

    name: str
    path: str
    old: str
    new: str
    tests: str = OUTPUT


MUTANTS = (
    Mutant(
        "what may be copied is offered to nodes beside its path too",
        "yggc/graphs.py",
        "~(sees & (tree_tokens != copied_tokens[tree_depths])).any(dim=1)",
        "expand_nodes >= 0",
        "tests/yggc/test_graphs.py::test_growth_equals_the_oracle_over_the_whole_pool",
    ),
    Mutant(
        "siblings of a copied token keep all of their worth",
        "yggc/graphs.py",
        "    left = torch.where(offered, torch.log1p(-log_rate.exp()), 0.0)\n",
        "    left = torch.zeros_like(log_rate)\n",
        "tests/yggc/test_graphs.py::test_growth_equals_the_oracle_over_the_whole_pool",
    ),
    Mutant(
        "the first of several matches is copied from instead of the last",
        "runtime/yggrt/copying.py",
        "    return (int(ends[-1]) + 1, length) if length else (text.size, 0)\n",
        "    return (int(ends[0]) + 1, length) if length else (text.size, 0)\n",
        "tests/yggrt/test_copying.py",
    ),
    Mutant(
        "a request copies from the text of the one before",
        "runtime/yggrt/executor.py",
        "        self._guessed = None\n        self._copies.reset()\n",
        "        self._guessed = None\n",
        LOSSLESS + "test_a_request_copies_from_its_own_text_alone",
    ),
    Mutant(
        "what a captured step gave is overwritten by its next launch",
        "runtime/yggrt/cuda.py",
        "        block = self._read.clone()  # the next call writes there again\n",
        "        block = self._read\n",
        "tests/yggrt/test_cuda.py",
    ),
    Mutant(
        "a constant input that changed is not copied to the device again",
        "runtime/yggrt/cuda.py",
        "            if source is tensor and version == tensor._version:\n",
        "            if source is tensor:\n",
        "tests/yggrt/test_cuda.py",
    ),
    Mutant(
        "prompts are read by steps that are captured, so that a first token waits for it",
        "runtime/yggrt/executor.py",
        "            outputs = self._run_verify(self.verify, rows, masks)\n",
        "            outputs = self._run_verify(self.by_width.get(last - first, self.verify), rows, masks)\n",
        "tests/yggrt/test_cuda.py::test_nothing_is_captured_before_the_first_token",
    ),
    Mutant(
        "rows of one KV head's queries are mixed up in attention by groups",
        "yggc/graphs.py",
        "    grouped = query.reshape(kv_heads, sharing * width, dim)\n",
        "    grouped = query.transpose(1, 2).reshape(kv_heads, sharing * width, dim)\n",
        "tests/yggc/test_cuda_steps.py::test_attention_by_groups_is_attention",
    ),
    Mutant(
        "columns of a block are taken for those of the vocabulary in a GPU's search for the best children",
        "yggc/graphs.py",
        "        columns = columns.gather(2, places[:, :, :count]).flatten(1)\n",
        "        columns = places[:, :, :count].flatten(1)\n",
        "tests/yggc/test_cuda_steps.py::test_children_and_order_are_the_kernels",
    ),
    Mutant(
        "products that were made one leave the parameters in memory beside them",
        "yggc/lowering.py",
        "                product.matrix.data = part\n",
        "                pass\n",
        "tests/yggc/test_cuda_steps.py::test_products_of_one_input_are_one_product_in_the_parameters_memory",
    ),
    Mutant(
        "more steps are compiled at a time than a GPU has room for",
        "yggc/steps.py",
        "        most = min(most, int(available_device_memory(device) // each))\n",
        "        pass\n",
        "tests/yggc/test_cuda_steps.py::test_as_many_steps_are_compiled_at_a_time_as_the_gpu_has_room_for",
    ),
    Mutant(
        "only an iteration's last token is looked at for the end of the text",
        "runtime/yggrt/text.py",
        "if token_id in self._eos_ids:",
        "if token_id in self._eos_ids and len(self._token_ids) % 2:",
        LOSSLESS + "test_every_token_in_turn_as_eos_stops_at_its_first_occurrence",
    ),
    Mutant(
        "the text's end that is still to be emitted is forgotten",
        "runtime/yggrt/engine.py",
        "                request.emit(last)\n",
        "",
        SCHEDULES + "test_ends_are_where_they_were",
    ),
    Mutant(
        "gaps are told of tokens that were not emitted",
        "runtime/yggrt/stats.py",
        "        self.gaps += outcome.gaps[:num_emitted]\n",
        "        self.gaps += outcome.gaps\n",
        LOSSLESS + "test_every_token_in_turn_as_eos_stops_at_its_first_occurrence",
    ),
    Mutant(
        "trees grow past the context's end",
        "runtime/yggrt/request.py",
        "depth = min(shape.draft_depth, self._remaining - 1)",
        "depth = shape.draft_depth",
        LOSSLESS + "test_no_node_of_a_tree_has_a_position_beyond_the_context",
    ),
    Mutant(
        "the drafter is asked beyond its context",
        "runtime/yggrt/request.py",
        "if depth > 0 and num_tokens + depth > self.drafter_context:",
        "if depth > 0 and num_tokens > 2 * self.drafter_context:",
        LOSSLESS + "test_past_the_drafters_context_it_decodes_plainly_and_says_so",
    ),
    Mutant(
        "logits that are not numbers pass",
        "runtime/yggrt/request.py",
        "    if any(gap != gap for gap in gaps):",
        "    if any(gap < 0 for gap in gaps):",
        LOSSLESS + "test_a_verifier_with_logits_that_are_not_numbers_is_an_error",
    ),
    Mutant(
        "a wrong guess of the next root is taken for right",
        "runtime/yggrt/executor.py",
        "        came_true = guess is not None and",
        "        came_true = guess is not None or",
        SCHEDULES + "test_every_kind_says_the_same_of_other_pairs",
    ),
    Mutant(
        "a guessed root's rows keep the places they were drafted at",
        "runtime/yggrt/executor.py",
        "            moved += depth\n",
        "            moved += 0\n",
        SCHEDULES + "test_a_guess_drafts_the_tree_that_a_head_draft_would",
    ),
    Mutant(
        "moves that no draft pass applied are overwritten",
        "runtime/yggrt/executor.py",
        "        if self.drafter_cache.has_moves:  # no draft pass has run since: the guess was the whole draft\n",
        "        if self.drafter_cache.has_moves and not path:\n",
        SCHEDULES + "test_a_guess_that_was_the_whole_draft_has_its_moves_applied",
    ),
    Mutant(
        "rows may be moved before drafts ahead of time have ended",
        "runtime/yggrt/schedule.py",
        '    Dependency("tail", "move"),',
        '    Dependency("prune", "move"),',
        "tests/yggrt/test_schedule.py",
    ),
    Mutant(
        "a lane does not wait for another",
        "runtime/yggrt/lanes.py",
        "                self._done[name].wait()\n",
        "                pass\n",
        "tests/yggrt/test_lanes.py::test_waits_hold_under_any_delay",
    ),
    Mutant(
        "lanes keep their threads beside steps that are called from outside",
        "runtime/yggrt/engine.py",
        "        self.executor.close()\n        with _threads(self.num_threads):\n",
        "        with _threads(self.num_threads):\n",
        SCHEDULES + "test_steps_called_from_outside_have_no_other_lanes_threads_beside_them",
    ),
    Mutant(
        "a round given up leaves stages running",
        "runtime/yggrt/lanes.py",
        "            last = max(last, self._wait_for_lanes())\n",
        "            last = max(last, 0.0)\n",
        "tests/yggrt/test_lanes.py::test_a_round_given_up_between_pieces_leaves_no_stage_running",
    ),
    Mutant(
        "the search's bound leaves out what is best",
        "yggc/stages.py",
        "        left[name] = seconds[name] + max([end, *after])\n",
        "        left[name] = 3 * seconds[name] + max([end, *after])\n",
        "tests/yggc/test_stages.py::test_the_best_order_is_that_of_brute_force",
    ),
    Mutant(
        "accepted KV rows are not moved",
        "runtime/yggrt/kvcache.py",
        "        self._src[:count] = sources\n",
        "        self._src[:count] = range(first_target, first_target + count)\n",
        CACHES,
    ),
    Mutant(
        "moves of an earlier step are applied again",
        "runtime/yggrt/kvcache.py",
        "            self._src[:] = 0\n            self._dst[:] = 0\n",
        "",
    ),
    Mutant(
        "the drafter's rows are taken in sorted order",
        "runtime/yggrt/executor.py",
        "        nodes = [int(cut.nodes[row]) for row in path]\n",
        "        nodes = list(path)\n",
        CACHES,
    ),
    Mutant(
        "the verifier's rows are taken in growth order",
        "runtime/yggrt/executor.py",
        "[num_tokens + row for row in path]",
        "[num_tokens + int(cut.nodes[row]) for row in path]",
        CACHES,
    ),
    Mutant(
        "a drafter row that never ran counts as committed",
        "runtime/yggrt/executor.py",
        "        elif nodes and nodes[-1] >= iteration.num_run:\n",
        "        elif not nodes:\n",
        CACHES,
    ),
    Mutant(
        "rows get places for positions",
        "runtime/yggrt/executor.py",
        "        rows.array[1] = cut.depths + (num_tokens - 1)\n",
        "        rows.array[1] = rows.places + (num_tokens - 1)\n",
    ),
    Mutant(
        "a tree sees one committed row too few",
        "runtime/yggrt/masks.py",
        "            self._show_committed(num_tokens, num_tokens + width)\n",
        "            self._show_committed(num_tokens - 1, num_tokens + width)\n",
    ),
    Mutant(
        "what a mask showed is never hidden",
        "runtime/yggrt/masks.py",
        "        if end < self._end:\n",
        "        if end < 0:\n",
        "tests/yggrt/test_masks.py",
    ),
    Mutant(
        "a window counts slots in the verifier's tree",
        "runtime/yggrt/masks.py",
        "ancestors & (depths[:, None] - depths[None, :] < self._window)",
        "ancestors & (np.arange(width)[:, None] - np.arange(width)[None, :] < self._window)",
        WINDOWS,
    ),
    Mutant(
        "a prompt's window is one position too wide",
        "runtime/yggrt/masks.py",
        "        visible &= back < window\n",
        "        visible &= back <= window\n",
        WINDOWS,
    ),
    Mutant(
        "a window counts slots in the drafter's tree",
        "yggc/graphs.py",
        "torch.where(in_tree, root_position + tree_depths[node], extent - 1)",
        "extent - 1",
        CACHES,
    ),
    Mutant(
        "a prompt is read into the drafter as if an earlier tree were there",
        "runtime/yggrt/executor.py",
        "        self._root_array[:] = 0, extent.numel()",
        "        pass",
        CACHES,
    ),
    Mutant(
        "a drafter's row does not see the token before it",
        "yggc/graphs.py",
        "visible = (slots >= 1) & (slots <= num_visible[:, None])",
        "visible = (slots >= 1) & (slots < num_visible[:, None])",
        LOSSLESS + "test_a_drafter_that_is_the_verifier_is_always_accepted",
    ),
    Mutant(
        "nodes see their siblings",
        "runtime/yggrt/tree.py",
        "    ancestor = nodes\n    for _ in range(depth + 1):",
        "    matrix[:, 1:2] = True\n    ancestor = nodes\n    for _ in range(depth + 1):",
    ),
    Mutant(
        "the cut is in growth order",
        "runtime/yggrt/tree.py",
        '    return np.argsort(-tree.values, kind="stable")\n',
        "    return np.arange(tree.num_nodes)\n",
        "tests/yggrt/test_tree.py",
    ),
    Mutant(
        "a node is accepted below a parent that was not",
        "runtime/yggrt/accept.py",
        "        if parents[row + 1] == path[-1]:",
        "        if parents[row + 1] >= 0:",
    ),
    Mutant(
        "a node is compared with the choice after itself",
        "runtime/yggrt/accept.py",
        "choices[parents[1:]]",
        "choices[1:]",
    ),
    Mutant(
        "a child that was turned down can be drawn again",
        "runtime/yggrt/accept.py",
        "        self.drafted[place] = 0.0\n",
        "",
        "tests/yggrt/test_sampling_law.py",
    ),
    Mutant(
        "what is left of the verifier's law forgets how likely its node was",
        "runtime/yggrt/accept.py",
        "        left = self.accept * self.inside - self.drafted\n",
        "        left = self.inside - self.drafted\n",
        "tests/yggrt/test_sampling_law.py",
    ),
    Mutant(
        "the token after a tree ignores what was turned down",
        "runtime/yggrt/accept.py",
        "        weights[self.ids] = self.inside / self.scale\n",
        "",
        "tests/yggrt/test_sampling_law.py",
    ),
    Mutant(
        "children are verified as if drawn at temperature 1",
        "runtime/yggrt/sampling.py",
        "        chances = self.log_q[node].double().exp()\n",
        "        chances = (0.7 * self.log_q[node].double()).exp()\n",
        WALK,
    ),
    Mutant(
        "the kernels' attention leaves out the last block that is seen",
        "yggc/kernels/kernels.cpp",
        "!sees(sizes.end_block - 1)) --sizes.end_block;\n",
        "!sees(sizes.end_block - 2)) --sizes.end_block;\n",
        ATTENTION,
    ),
    Mutant(
        "the kernels' attention shares the rows of few heads out wrongly",
        "yggc/kernels/kernels.cpp",
        "    offset = kv_head * group * sizes.width + first;\n",
        "    offset = kv_head * group + first;\n",
        THREADS,
    ),
    Mutant(
        "the kernels forget the rows beyond the first that are multiplied together",
        "yggc/kernels/kernels.cpp",
        "inputs += ROWS_TOGETHER * features, outputs",
        "outputs",
        PRODUCTS,
    ),
    Mutant(
        "the kernels' walk draws a child that was turned down again",
        "yggc/kernels/kernels.cpp",
        "    node.drafted[place] = 0;\n",
        "",
        WALK,
    ),
    Mutant(
        "the kernels' walk forgets what was turned down when it draws the last token",
        "yggc/kernels/kernels.cpp",
        "    node.law.exchange(ids, left);\n",
        "",
        WALK,
    ),
    Mutant(
        "the kernels' walk penalizes what the prompt said alone",
        "yggc/kernels/kernels.cpp",
        " row > 0; row = tree.parents[row]) penalize(",
        " row > tree.width; row = tree.parents[row]) penalize(",
        WALK,
    ),
    Mutant(
        "a drawn tree is cut by what its tokens turned out to be worth",
        "runtime/yggrt/request.py",
        "        elif pace is not None and not self.draws:\n",
        "        elif pace is not None:\n",
        DRAWN,
    ),
    Mutant(
        "what a seed draws depends on the clock",
        "runtime/yggrt/request.py",
        "            clock = None if self.draws else compiled_s\n",
        "            clock = compiled_s\n",
        DRAWN,
    ),
    Mutant(
        "children are not drawn but the favourites",
        "yggc/kernels/__init__.py",
        "    keys = torch.where(draws, law + noise, log_q)\n",
        "    keys = torch.where(draws, law, log_q)\n",
        "tests/yggc/test_graphs.py::test_children_are_drawn_from_the_drafters_law_at_the_temperature",
    ),
    Mutant(
        "a machine that drifts is not noticed",
        "runtime/yggrt/pace.py",
        "                seconds *= self._drift.of_drafts\n",
        "                pass\n",
        "tests/yggrt/test_pace.py",
    ),
    Mutant(
        "the acceptance table is read upside down",
        "yggc/graphs.py",
        "    rank = torch.arange(table.shape[0], device=table.device)[None, :].expand_as(index)\n",
        "    rank = torch.arange(table.shape[0], device=table.device)[None, :].expand_as(index).flip(1)\n",
        "tests/yggc/test_graphs.py",
    ),
    Mutant(
        "a node's siblings never come back from the pool",
        "yggc/graphs.py",
        "        candidate_values = torch.cat((pool_values, child_values.reshape(-1)))\n",
        "        candidate_values = torch.cat((pool_values - torch.inf, child_values.reshape(-1)))\n",
        "tests/yggc/test_graphs.py",
    ),
    Mutant(
        "tokens that only pad the logits may be chosen",
        "yggc/graphs.py",
        "        return output.logits[0, :, : self.vocab_size], hidden[0]\n",
        "        return output.logits[0], hidden[0]\n",
        "tests/yggc/test_graphs.py",
    ),
    Mutant(
        "columns of a cut head pass for token ids",
        "yggc/graphs.py",
        "        return self.ids[columns]\n",
        "        return columns\n",
        "tests/yggc/test_head_cut.py",
    ),
    Mutant(
        "the length is looked at before stop strings",
        "runtime/yggrt/text.py",
        "        elif self._cut_at_stop_string():\n",
        "        elif len(self._token_ids) < self._max_new_tokens and self._cut_at_stop_string():\n",
        "tests/yggrt/test_text.py::test_the_output_equals_the_brute_force_reading",
    ),
    Mutant(
        "a stop string over two tokens is not seen",
        "runtime/yggrt/text.py",
        "            self._release(len(self._held) - self._num_characters_at_risk())\n",
        "            self._release(len(self._held))\n",
        LOSSLESS + "test_stop_strings_cut_the_same_text_wherever_they_fall",
    ),
    Mutant(
        "a difference passes at any gap",
        "runtime/yggrt/bench.py",
        "    return Difference(index, token, gap, gap <= near_tie)\n",
        "    return Difference(index, token, gap, True)\n",
        "tests/yggrt/test_bench.py",
    ),
    Mutant(
        "the runtime never falls back to plain decoding",
        "runtime/yggrt/pace.py",
        "        elif self._balance < -self._limit:\n",
        "        elif self._balance < -1e9:\n",
        "tests/yggrt/test_pace.py",
    ),
    Mutant(
        "as much as possible is verified, whatever it costs",
        "runtime/yggrt/pace.py",
        "        worth = np.cumsum(np.exp(values))[menu - 1] - self._costs[key]\n",
        "        worth = np.cumsum(np.exp(values))[menu - 1]\n",
        "tests/yggrt/test_pace.py",
    ),
    Mutant(
        "measured times are made to rise with the width",
        "runtime/yggrt/latency.py",
        "    found: NDArray[np.float64] = np.interp(at, xs, ys)\n",
        "    found: NDArray[np.float64] = np.interp(at, xs, np.maximum.accumulate(ys))\n",
        "tests/yggrt/test_latency.py",
    ),
    Mutant(
        "plain decoding is never chosen",
        "yggc/search_tree.py",
        "    if best.speedup < SMALLEST_GAIN:\n        return plain\n",
        "",
        "tests/yggc/test_search_tree.py",
    ),
    Mutant(
        "the simulator verifies nodes in growth order",
        "yggc/simulate.py",
        "    in_order = np.take_along_axis(on_path, order, axis=1)\n",
        "    in_order = on_path\n",
        "tests/yggc/test_simulate.py",
    ),
    Mutant(
        "a simulation chooses by today's times instead of the plan's",
        "yggc/simulate.py",
        "        return (self.planned or self.times).verify_s(verify_widths, extent)\n",
        "        return self.times.verify_s(verify_widths, extent)\n",
        "tests/yggc/test_simulate.py",
    ),
    Mutant(
        "the copying head is taught to look at every place of the next token",
        "yggc/distill_copying.py",
        "    copied = seen & (previous[:, None, :] == tokens[:, :, None]) & ",
        "    copied = seen & ",
        "tests/yggc/test_distill_copying.py",
    ),
    Mutant(
        "the first timed calls are not left out",
        "yggc/profile.py",
        "    for repeat in range(repeats + WARM_UPS):\n",
        "    for repeat in range(WARM_UPS, repeats + WARM_UPS):\n",
        "tests/yggc/test_profile.py",
    ),
    Mutant(
        "a damaged plan is read",
        "runtime/yggrt/wire.py",
        "    if zlib.crc32(body, zlib.crc32(data[: _HEADER.size])) != checksum:",
        "    if checksum < 0:",
        "tests/yggrt/test_wire.py",
    ),
    Mutant(
        "code for another CPU is loaded",
        "runtime/yggrt/target.py",
        "    missing = [flag for flag in manifest.instruction_set if flag not in target.instruction_set]\n",
        "    missing: list[str] = []\n",
        "tests/yggrt/test_target.py",
    ),
    Mutant(
        "a missing output layer is left at random",
        "yggc/checkpoints.py",
        '    missing = sorted(info["missing_keys"])\n',
        '    missing = sorted(key for key in info["missing_keys"] if not key.startswith("lm_head"))\n',
        "tests/yggc/test_checkpoints.py",
    ),
    Mutant(
        "one more real token is no difference between vocabularies",
        "yggc/inspect.py",
        "    vocab_size = 1 + max((*drafter_tokens, *verifier_tokens), default=-1)\n",
        "    vocab_size = 1 + min(max(drafter_tokens), max(verifier_tokens))\n",
        "tests/yggc/test_inspect.py",
    ),
    Mutant(
        "the depth is chosen by the root's hidden row instead of the row accepted last",
        "runtime/yggrt/executor.py",
        "        row: NDArray[np.float32] = self.by_depth[self.row]\n",
        "        row: NDArray[np.float32] = self.by_depth[0]\n",
        "tests/yggrt/test_depth.py::test_the_row_that_counts_is_the_one_accepted_last",
    ),
    Mutant(
        "a depth network that is always wrong is always believed",
        "runtime/yggrt/pace.py",
        "            if self._level + 1 < len(self.depths):  # none",
        "            if not self.depths:  # none",
        "tests/yggrt/test_depth.py::test_promises_that_are_not_kept_bound_the_depth_and_then_pause_it",
    ),
    Mutant(
        "a depth network that loses on held-out text is kept",
        "yggc/train_depth.py",
        "    if figures.learned < figures.fixed:\n",
        "    if figures.learned < 0:\n",
        "tests/yggc/test_train_depth.py::test_a_network_that_loses_is_not_kept_and_says_so",
    ),
)


def main() -> int:
    """Run all mutants, or those whose number is given; print a line each and the survivors at the end."""
    wanted = [int(number) - 1 for number in sys.argv[1:]] or range(len(MUTANTS))
    started = monotonic()
    survivors = []
    with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
        chosen = [MUTANTS[number] for number in wanted]
        for done, (mutant, found) in enumerate(zip(chosen, pool.map(try_mutant, chosen), strict=True), start=1):
            left = (monotonic() - started) / done * (len(chosen) - done)
            print(
                f"{done}/{len(chosen)} {found or 'SURVIVED':<60.60} {mutant.name} (about {left:.0f} s left)", flush=True
            )
            if found is None:
                survivors.append(mutant)
    for mutant in survivors:
        print(f"survived: {mutant.name}; {mutant.tests} passes with this fault in {mutant.path}")
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} faults were found in {monotonic() - started:.0f} s")
    return 1 if survivors else 0


def try_mutant(mutant: Mutant) -> str | None:
    """The test that fails with the fault, or None. Raises RuntimeError where its tests cannot be run at all."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        copy = Path(place)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
            else:
                shutil.copy(source, copy / name)
        path = copy / mutant.path
        path.write_text(mutated(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", mutant.tests]
        result = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    if result.returncode == 0:
        return None
    failed = [line for line in result.stdout.splitlines() if line.startswith("FAILED ")]
    if result.returncode != 1 or not failed:
        raise RuntimeError(f"{mutant.name}: {mutant.tests} could not be run: {result.stdout[-1000:]}")
    return failed[0].removeprefix("FAILED ").partition(" - ")[0].rpartition("::")[2]


def mutated(mutant: Mutant, source: str) -> str:
    """The source with the fault in it. Raises ValueError where the text to replace does not occur exactly once."""
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: {mutant.path} holds the text to replace {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


if __name__ == "__main__":
    sys.exit(main())
