"""What goes wrong for users of speculative decoders and ahead-of-time compilers, and the tests that stand against it.

`make field` prints a row for each kind of fault: its number, what it is, and the tests marked with it or why it waits.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parent

KINDS = {
    1: "an end of text inside an accepted block",
    2: "stop strings, length cap and end of text in one block",
    3: "a budget met exactly",
    4: "committed KV rows of a tree are a fresh prefill's",
    5: "the drafter's cache after a rejection",
    6: "acceptance by the distribution drawn from",
    7: "siblings without residual update",
    8: "other shapes, other greedy text",
    9: "prefill split differently",
    10: "seeds",
    11: "a residual of zero",
    12: "penalties of the generation settings",
    13: "logits padded to other sizes",
    14: "vocabularies that differ by a token",
    15: "an output layer that is missing",
    16: "a drafter of shorter context",
    17: "mixed dtypes, logits that are not finite",
    18: "other sizes of everything",
    19: "code for another machine",
    20: "wrong inputs to a compiled step",
    21: "a dynamic size frozen at its example",
    22: "shared weights stored or loaded twice",
    23: "another version of torch",
    24: "KV writes lost or reordered",
    25: "another version of transformers",
    26: "CUDA graphs that freeze positions",
    27: "a CUDA device that is not the first",
    28: "files beyond 4 GiB",
    29: "slower than plain decoding",
    30: "timings without warm-up or synchronisation",
    31: "an impossible tree in a plan",
    32: "the wrong tree chosen",
    33: "text unlike the calibration's",
    34: "paths that leave their folder",
    35: "values that do not come back from a file",
    36: "characters split over tokens",
    37: "pickled or other foreign code",
    38: "an empty prompt",
    39: "memory that is not there",
    40: "the acceptance rate cannot be found",
    41: "a long silence, something partial left behind",
    42: "silent falling back",
    43: "options that change nothing",
}

WAITING = {
    26: "waits for the CUDA target",
}


def marked_tests() -> dict[int, list[str]]:
    """Names of the tests marked `field(number, …)`, read off their sources."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.field":
                    for number in map(ast.literal_eval, decorator.args):
                        found.setdefault(number, []).append(f"{path.relative_to(TESTS.parent)}::{node.name}")
    return found


def faults(found: dict[int, list[str]]) -> list[str]:
    """What is wrong with the marks, a line each: kinds without a test or a reason to wait, numbers that are no kind."""
    missing = [f"kind {number} ({KINDS[number]}) has no test" for number in KINDS if number not in {*found, *WAITING}]
    unknown = [
        f"{tests[0]} is marked with {number}, which is no kind"
        for number, tests in found.items()
        if number not in KINDS
    ]
    return missing + unknown


def main() -> int:
    found = marked_tests()
    for number, what in KINDS.items():
        tests = found.get(number, [])
        rest = [*tests, *([WAITING[number]] if number in WAITING else [])] or ["NO TEST"]
        print(f"{number:>2}  {what:<56}{rest[0]}")
        for line in rest[1:]:
            print(f"{'':<60}{line}")
    wrong = faults(found)
    for line in wrong:
        print(f"field: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
