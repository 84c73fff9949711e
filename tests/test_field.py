"""Every kind of field fault has a test, or says what it waits for."""

from tests.field import faults, marked_tests


def test_every_kind_has_a_test_or_a_reason_to_wait():
    assert faults(marked_tests()) == []


def test_a_kind_without_a_test_and_a_number_without_a_kind_are_told():
    found = marked_tests()
    del found[4]
    found[99] = ["tests/test_x.py::test_y"]
    assert faults(found) == [
        "kind 4 (committed KV rows of a tree are a fresh prefill's) has no test",
        "tests/test_x.py::test_y is marked with 99, which is no kind",
    ]
