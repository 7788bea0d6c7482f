"""The engine computes with one thread while other processes use the cores."""

from __future__ import annotations

from eagle_server.engine.assembly.cores import SharedCores


class Machine:
    """The clocks of a machine on which each thread gets a `share` of the time."""

    def __init__(self) -> None:
        self.now = self.ran = 0.0
        self.share, self.threads = 1.0, 2
        self.history: list[int] = []
        self.cores = SharedCores(2, wall=lambda: self.now, cpu=lambda: self.ran, compute_with=self._compute_with)

    def _compute_with(self, threads: int) -> None:
        self.threads = threads
        self.history.append(threads)

    def compute(self, seconds: float, cycle: float = 0.01) -> None:
        for _ in range(round(seconds / cycle)):
            with self.cores:
                self.now += cycle
                self.ran += cycle * self.threads * (self.share if self.threads > 1 else 1.0)


def test_threads_that_get_their_cores_are_not_reduced() -> None:
    machine = Machine()
    machine.compute(10.0)
    machine.now += 60.0  # idle time must not count as waiting for a core
    machine.compute(10.0)
    assert machine.history == []


def test_threads_without_free_cores_become_one_until_the_cores_are_free() -> None:
    machine = Machine()
    machine.share = 0.5
    machine.compute(0.2)
    assert machine.threads == 1
    machine.compute(30.0)
    assert machine.threads == 1
    assert machine.history.count(2) < 20  # it tries two threads again from time to time
    machine.share = 1.0
    machine.compute(5.0)
    assert machine.threads == 2
    assert machine.history[-1] == 2


def test_trials_cost_little_for_any_length_of_a_cycle() -> None:
    machine = Machine()
    machine.share = 0.3
    spent = {1: 0.0, 2: 0.0}
    for _ in range(1000):
        with machine.cores:
            seconds = 5.0 if machine.threads > 1 else 0.3
            spent[machine.threads] += seconds
            machine.now += seconds
            machine.ran += seconds * (machine.threads * 0.3 if machine.threads > 1 else 1.0)
    assert spent[2] < 0.06 * (spent[1] + spent[2])
