"""How many threads decode beside other processes, in simulated time."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.threads import ThreadCount


class Machine:
    """`cores` cores, `hogs` of them wanted by others as well. A decode of n rows on t threads takes work / t, and where a
    thread has to share its core, each of its barriers may wait for the other process's time slice."""

    def __init__(self, cores: int, seed: int = 0):
        self.cores, self.hogs = cores, 0
        self.random = random.Random(seed)

    def seconds(self, threads: int, rows: int) -> float:
        quiet = 0.008 / threads * (1 + 0.1 * rows)
        shared = max(0, threads + self.hogs - self.cores)
        stalls = 3.5 if shared else 1.0
        return quiet * stalls * self.random.uniform(0.9, 1.1) * (1.5 if shared and self.random.random() < 0.2 else 1.0)


def run(machine: Machine, count: ThreadCount, decodes: int) -> tuple[float, list[int]]:
    total, used = 0.0, []
    for _ in range(decodes):
        rows = machine.random.choice([1, 4])
        used.append(count.now)
        seconds = machine.seconds(count.now, rows)
        total += seconds
        count.record(rows, seconds)
    return total, used


@pytest.mark.parametrize("cores", [2, 8])
def test_a_quiet_machine_keeps_all_threads(cores: int) -> None:
    machine, count = Machine(cores), ThreadCount(cores)
    assert set(run(machine, count, 2000)[1]) == {cores}


@pytest.mark.parametrize("cores", [2, 8])
def test_beside_a_busy_process_it_gives_up_one_and_takes_it_back(cores: int) -> None:
    machine, count = Machine(cores), ThreadCount(cores)
    run(machine, count, 50)
    machine.hogs = 1
    _, used = run(machine, count, 500)
    assert used[-400:].count(cores - 1) > 300
    total, _ = run(machine, count, 500)
    fixed = sum(machine.seconds(cores, machine.random.choice([1, 4])) for _ in range(500))
    assert total < 0.8 * fixed
    machine.hogs = 0
    _, used = run(machine, count, 1000)
    assert used[-400:] == [cores] * 400


def test_more_of_them_bring_it_down_further() -> None:
    machine, count = Machine(8), ThreadCount(8)
    run(machine, count, 50)
    machine.hogs = 1
    run(machine, count, 300)
    machine.hogs = 3
    _, used = run(machine, count, 3000)
    assert min(used[-500:]) <= 5


def test_where_fewer_threads_do_not_help_it_stays_and_asks_ever_more_rarely() -> None:
    count = ThreadCount(2)
    used = []
    for i in range(3000):
        used.append(count.now)
        slow = 1.0 if i < 30 else 4.0  # everything is slower, as by heat or a virtual machine's neighbours
        count.record(1, 0.004 * slow * (2.0 if count.now == 1 else 1.0))
    assert used.count(1) < 0.05 * len(used)


def test_trials_hold_a_decode_against_others_of_its_size() -> None:
    """What was seen only while everything was slow says nothing: decodes that look as quick as ever take threads back."""
    machine, count = Machine(2), ThreadCount(2)
    run(machine, count, 50)
    machine.hogs = 1
    run(machine, count, 100)
    assert count.now == 1
    for rows in (7, 9) * 12:  # with many texts: sizes that are not seen otherwise, at their slowest
        count.record(rows, 4 * machine.seconds(1, rows))
    machine.hogs = 0
    used = []
    for _ in range(1200):
        rows = machine.random.choice([7, 9])
        used.append(count.now)
        count.record(rows, machine.seconds(count.now, rows))
    assert used[-400:] == [2] * 400


def test_one_long_pause_changes_nothing() -> None:
    count = ThreadCount(2)
    for i in range(500):
        count.record(1, 0.4 if i == 200 else 0.004)
        assert count.now == 2


def test_one_thread_is_always_one() -> None:
    count = ThreadCount(1)
    for i in range(100):
        count.record(1, 0.001 * (1 + i % 7))
        assert count.now == 1


_PROGRAM = """
import hashlib, sys
from pathlib import Path
from localspec import native
from localspec.model import Model
from localspec.target import SessionSettings, TargetSession

assert native.use_kernels("localspec") is None
with Model(Path(sys.argv[1]), "target") as model:
    for change in (False, True):
        with TargetSession(model, SessionSettings(256)) as session:
            count, set_to = session._thread_count, []
            count.record = lambda rows, seconds: set_to.append(count.now)
            session.prefill(0, list(range(1000, 1100)))
            found = hashlib.sha256()
            for i in range(24):
                count.now = 1 + i % 2 if change else 2
                found.update(session.decode([(0, [2000 + i] * (1 + i % 3))]).logits.tobytes())
            print(found.hexdigest(), len(set_to))
"""


def test_rows_are_the_same_while_the_number_changes(smollm2: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(smollm2)], capture_output=True, text=True, check=True)
    first, second = (line.split() for line in done.stdout.splitlines())
    assert first == second
    assert first[1] == "24"
