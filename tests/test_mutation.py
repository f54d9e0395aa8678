"""Mutants of the source are programs, each with one change."""

import ast

import pytest

from tests.mutation import ROOT, changes, chosen, mutants, mutated, runs_for


def test_an_operator_a_constant_a_branch_or_a_call_is_changed():
    tree = ast.parse("if a < 1 and flag:\n    run(x + 1)")
    found = {ast.unparse(other) for node in ast.walk(tree) for _, other in changes(node)}
    assert found == {"not (a < 1 and flag)", "a < 1 or flag", "a <= 1", "x - 1", "2", "None"}


def test_a_mutant_is_another_program():
    for mutant in [*mutants("data")][::10]:
        source = (ROOT / mutant["file"]).read_bytes()
        changed = mutated(source, mutant)
        assert len(changed) - len(source) == len(mutant["after"].encode()) - len(
            mutant["before"].encode()
        )
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


@pytest.mark.slow
def test_a_seed_chooses_the_same_mutants_whatever_their_number():
    names = [mutant["name"] for mutant in mutants("data")]
    assert len({*names}) == len(names)
    assert chosen("data", 9, 0)[:5] == chosen("data", 5, 0) != chosen("data", 5, 1)


def test_the_tests_of_a_module_are_its_own_and_then_those_of_its_folder_of_the_core_and_slow_ones():
    own, beside, others, *slow = runs_for("trainkit/data/loader.py")
    assert own == ("tests/data/test_loader.py",)
    assert {*own} < {*beside} == {*beside} - {*others}
    assert ("-m", "slow", "tests/data/test_workers.py") in slow
    assert runs_for("trainkit/modeling/build.py")  # which has no folder of tests
