"""The list of faults of `python -m tests.mutants` fits the code."""

import pytest

from tests.mutants import ROOT, mutants, mutated


@pytest.mark.parametrize("number", range(1, len(mutants()) + 1))
def test_a_fault_can_be_put_in(number: int) -> None:
    mutant = mutants()[number - 1]
    changed = mutated((ROOT / mutant["file"]).read_text(), mutant)
    compile(changed, mutant["file"], "exec")
    assert all((ROOT / test).is_file() for test in mutant["tests"].split())
