"""Fewer threads compute tokens while they are preempted and fewer are faster; more are tried again."""

from itertools import pairwise

from llmcli.runtime.engine.thread_team import FIRST_WAIT, MAX_WAIT, ThreadTeam


class Machine:
    """A processor whose passes take `seconds[threads]`, and that preempts `preempted` of them."""

    def __init__(self, seconds: dict[int, float], preempted: set[int]) -> None:
        self.seconds, self.preempted = seconds, preempted
        self.now, self.preemptions = 0.0, 0
        self.used: list[tuple[float, int]] = []
        self.may_change = True
        self.team = ThreadTeam(
            max(seconds),
            lambda count: self.used.append((self.now, count)),
            lambda: self.may_change,
            lambda: self.now,
            lambda: self.preemptions,
        )

    def run(self, seconds: float, rows: int = 1) -> None:
        """Compute passes for so long."""
        end = self.now + seconds
        while self.now < end:
            took = self.seconds[self.team.count]
            self.now += took
            self.preemptions += self.team.count in self.preempted
            self.team.observe_pass(rows, took)


def test_a_quiet_processor_keeps_all_threads() -> None:
    machine = Machine({1: 0.02, 2: 0.01}, preempted=set())
    machine.run(20)
    assert machine.used == []


def test_beside_another_program_the_faster_number_is_used() -> None:
    machine = Machine({1: 0.012, 2: 0.02}, preempted={2})
    machine.run(1)
    assert machine.team.count == 1
    before = len(machine.used)
    machine.run(60)
    # more threads are tried again, ever more seldom, and given up
    assert {count for _, count in machine.used[before:]} == {1, 2}
    assert machine.team.count == 1
    trials = [now for now, count in machine.used if count == 2]
    assert all(later - earlier <= MAX_WAIT + 1 for earlier, later in pairwise(trials))
    assert len(trials) < 60 / FIRST_WAIT / 4


def test_all_threads_are_used_again_when_the_other_program_ends() -> None:
    machine = Machine({1: 0.012, 2: 0.02}, preempted={2})
    machine.run(30)
    machine.seconds, machine.preempted = {1: 0.012, 2: 0.007}, set()
    machine.run(MAX_WAIT + 1)
    assert machine.team.count == 2


def test_several_steps_are_taken() -> None:
    machine = Machine({1: 0.03, 2: 0.016, 3: 0.02, 4: 0.03}, preempted={3, 4})
    machine.run(10)
    assert machine.team.count == 2


def test_preemptions_alone_do_not_take_a_thread_away() -> None:
    machine = Machine({1: 0.02, 2: 0.015}, preempted={2})
    machine.run(10)
    assert machine.team.count == 2


def test_a_fixed_number_is_kept() -> None:
    machine = Machine({1: 0.012, 2: 0.02}, preempted={2})
    machine.may_change = False
    machine.run(5)
    assert machine.used == []


def test_passes_of_several_rows_change_the_number_too() -> None:
    machine = Machine({1: 0.012, 2: 0.02}, preempted={2})
    machine.run(1, rows=4)
    assert machine.team.count == 1


def test_passes_are_compared_with_passes_of_as_many_rows() -> None:
    """Long passes of a prompt during a trial do not look like slow passes of one row."""
    machine = Machine({1: 0.02, 2: 0.015}, preempted={2})
    machine.run(0.07)
    assert machine.team.count == 1  # a trial
    machine.team.observe_pass(512, 9.0)
    assert machine.team.count == 2  # given up
    for _ in range(50):  # no window is ever complete
        machine.run(0.01)
        machine.team.observe_pass(512, 9.0)
    assert machine.team.count == 2
