"""The seeded faults of `make mutants` still fit the sources."""

import pytest

from tests.mutants import MUTANTS, ROOT, mutated


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_changes_its_file_and_its_test_exists(mutant):
    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    changed = mutated(mutant, source)
    assert changed != source
    if mutant.path.endswith(".py"):
        compile(changed, mutant.path, "exec")
    file, _, name = mutant.tests.partition("::")
    assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")
