"""Mutants of the source are programs, each with one change."""

import ast

from tests.mutation import ROOT, THROUGH_ALL, changes, files_testing, mutants, mutated


def test_an_operator_a_constant_a_branch_or_a_call_is_changed():
    tree = ast.parse("if a < 1 and flag:\n    run(x + 1)")
    found = {ast.unparse(other) for node in ast.walk(tree) for _, other in changes(node)}
    assert found == {"not (a < 1 and flag)", "a < 1 or flag", "a <= 1", "x - 1", "2", "None"}


def test_a_mutant_is_another_program():
    for mutant in [*mutants("data")][::10]:
        source = (ROOT / mutant["file"]).read_bytes()
        changed = mutated(source, mutant)
        assert len(changed) - len(source) == len(mutant["after"].encode()) - len(mutant["before"].encode())
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def test_the_tests_of_a_module_are_its_own_and_those_that_name_it():
    own, through_all, naming = files_testing("trainkit/data/loader.py")
    assert (own, through_all) == (("tests/data/test_loader.py",), THROUGH_ALL)
    assert {*own} <= {*naming}
    assert files_testing("trainkit/utils/events/writers.py")  # of the folder above
