"""Programs compile before they are needed, once, and only those announced."""

import threading

import pytest

from dataeff_jax import training


class Compiler:
    """Counts what it compiles; each compilation waits for a permit where asked."""

    def __init__(self, permits=None):
        self.compiled, self.threads = [], set()
        self.permits = permits

    def __call__(self, key):
        if self.permits is not None and key in self.permits:
            assert self.permits[key].wait(timeout=30)
        self.threads.add(threading.current_thread())
        self.compiled.append(key)
        return f"program {key}"


def test_every_program_is_compiled_once_in_the_order_of_use():
    compiler = Compiler()
    with training.Executables(compiler, [3, 1, 2]) as programs:
        found = [programs.get(key) for key in (3, 3, 1, 3, 2, 1)]
    assert found == [f"program {key}" for key in (3, 3, 1, 3, 2, 1)]
    assert compiler.compiled == [3, 1, 2]
    assert set(programs.seconds) == {1, 2, 3}


def test_the_next_program_compiles_while_this_one_is_used():
    permits = {2: threading.Event()}
    with training.Executables(Compiler(permits), [1, 2], ahead=1) as programs:
        assert programs.get(1) == "program 1"
        assert programs.get(1) == "program 1", "does not wait for the second"
        permits[2].set()
        assert programs.get(2) == "program 2"


def test_it_stays_so_many_programs_ahead():
    compiler = Compiler()
    with training.Executables(compiler, range(9), ahead=2) as programs:
        programs.get(0)
        programs.get(2)
    assert set(compiler.compiled) <= {0, 1, 2, 3, 4}
    assert {0, 1, 2} <= set(compiler.compiled)


def test_compilations_run_in_another_thread_one_at_a_time():
    compiler = Compiler()
    with training.Executables(compiler, range(4), ahead=3) as programs:
        for key in range(4):
            programs.get(key)
    assert len(compiler.threads) == 1
    assert threading.current_thread() not in compiler.threads


def test_nothing_else_is_ever_compiled():
    compiler = Compiler()
    with training.Executables(compiler, [1]) as programs:
        with pytest.raises(KeyError, match="none of the shapes announced"):
            programs.get(2)
    assert compiler.compiled == []


def test_a_failed_compilation_is_told_where_the_program_is_needed():
    def fail(key):
        if key == 2:
            raise ValueError("too large")
        return key

    with training.Executables(fail, [1, 2]) as programs:
        assert programs.get(1) == 1
        with pytest.raises(ValueError, match="too large"):
            programs.get(2)


def test_a_program_that_was_discarded_is_not_compiled_again():
    compiler = Compiler()
    with training.Executables(compiler, [1, 2], ahead=0) as programs:
        programs.get(1)
        programs.discard(1)
        with pytest.raises(KeyError, match="discarded"):
            programs.get(1)
    assert compiler.compiled == [1]


@pytest.mark.parametrize("settings", [{"keys": [1, 1]}, {"keys": [1], "ahead": -1}])
def test_arguments_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        training.Executables(Compiler(), **settings)
