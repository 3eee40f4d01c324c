# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Elastic runs on an emulated cluster of four nodes whose nodes are lost at random moments, and return.

    python benchmarks/elastic_faults.py
    python benchmarks/elastic_faults.py --runs 2 --faults 3 --seed 7
    python benchmarks/elastic_faults.py --runs 4 --ranks 2
    python benchmarks/elastic_faults.py --minutes 15

Nodes are killed, switched off (the link is cut before), frozen, cut off from each other in two halves, told to leave;
ranks are killed; two nodes are lost at once; a node is lost while checkpoints are saved, or while another one joins.
Each run has to end with the parameters and the learning rate of one process that trains the same steps. For each fault
it prints after how many seconds the first of the others had noticed it, and after how many they trained on; and in the
end how many steps were lost beside those that were under way, apart for runs in which a fault has ended all nodes that
had the newest state. With several ranks a node, these share its parameters, and keep their state together.

With ``--minutes`` there is one run with a fault every minute, of one node at a time, and it prints the part that was
trained of what the nodes that were there could have trained. It needs root.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from elastic_cluster import COUNT, TOLERANCE, ElasticCluster, best_step_seconds, difference, train_alone
from laboratory.emulated_cluster import Cluster, EmulatedCluster, Link, Node


STEPS, SAVE_EVERY = 1200, 40
KINDS = ("kill", "power", "freeze", "partition", "rank", "leave", "two", "save", "join")
#: Of which the loss of a node has to be noticed by silence.
SILENT = ("kill", "power", "freeze", "partition", "save", "join")
#: Of which nodes lose what they have in memory.
ENDS = ("kill", "power", "rank", "two", "save", "join")
#: Of one node, which the others can do without.
SINGLE = ("kill", "power", "freeze", "rank", "leave")


class Faults:
    """What happens to a run, and when.

    Args:
        run: to which it happens.
        draw: says what and when.
        away: seconds for which a node is at least, and at most, away.

    Attributes:
        told: a word or two about each fault.
        noticed: seconds until the first of the others had noticed that a node was silent.
        went_on: seconds until the others trained on.
        waited: the same from when those that were lost were there again, where the others had to wait for them.
        missed: how many of the faults were of members.
        stood_still: how many of the faults nobody trained on after, while the benchmark waited.
        ended_all: how many of the faults have ended all nodes that had the newest state.
        presence: when nodes were lost (False) and there again (True).
    """

    def __init__(self, run: ElasticCluster, draw: random.Random, away: tuple[float, float]) -> None:
        self._run = run
        self._draw = draw
        self._away = away
        self.told: list[str] = []
        self.noticed: list[float] = []
        self.went_on: list[float] = []
        self.waited: list[float] = []
        self.missed = self.stood_still = self.ended_all = 0
        self.presence: list[tuple[float, int, bool]] = []

    def happen(self, kind: str) -> None:
        """Lets something happen, and what was lost return."""
        run, draw = self._run, self._draw
        node = draw.randrange(COUNT)
        if kind == "save":
            found = self._at_save(node)
        elif kind == "join":
            node = found = self._at_join(node)
        elif kind == "rank":
            found = node if node in run.newest()[1] else None  # a launcher that is about to join has none
        else:
            found = node
        if found is None:
            self.told.append(f"{kind} (none)")
            return
        lost = {node, (node + draw.randrange(1, COUNT)) % COUNT} if kind in ("two", "partition") else {node}
        number, members = run.newest()
        may_go_on = run.may_go_on_without(lost)
        marks = [run.told_bytes(each) for each in range(COUNT)]
        self.ended_all += kind in ENDS and run.newest_state_is_lost_with(lost)
        began = time.time()
        self._lose(kind, lost)
        if kind == "save":
            kind += "" if run.output(node).endswith("saves\n") else " (had ended)"
        others = [each for each in range(COUNT) if each not in lost or kind == "partition"]

        def changed() -> bool:
            return run.newest()[0] > number

        def heard() -> bool:
            return changed() or any("nothing is heard" in run.output(each, marks[each]) for each in others)

        # A launcher that is only about to join is missed by nobody: the others train on, and tell of no change.
        # Nor does anybody miss launchers that are cut off together with all members, or with none.
        missed = bool(lost & members) and (kind != "partition" or bool(members - lost))
        self.missed += missed
        noticed = time.time() - began if missed and run.wait(heard, 30) else None
        away = 20.0 if kind == "freeze" else draw.uniform(*((0.0, 3.0) if kind == "two" else self._away))
        comes_back = kind != "rank"
        has_to_wait = missed and comes_back and kind not in ("partition", "leave") and not may_go_on
        if has_to_wait or kind == "two":
            time.sleep(max(0.0, began + away - time.time()))
            self._return(kind, lost)
            comes_back = False
        if has_to_wait:  # of one that was frozen nobody tells a change
            went_on = self._until_steps(time.time())
        else:
            went_on = self._until_steps(began) if not missed or run.wait(changed, 40) else None
        self.stood_still += went_on is None and not run.has_trained
        if kind.split()[0] in SILENT and noticed is not None and lost <= members:
            self.noticed.append(noticed)
        if went_on is not None and has_to_wait:
            self.waited.append(went_on)
        elif went_on is not None and missed and kind != "leave":
            self.went_on.append(went_on)
        of_member = "(had to wait) " if has_to_wait else "" if missed else "(no member) "
        seconds = "/".join("-" if each is None else f"{each:.1f}" for each in (noticed, went_on))
        self.told.append(f"{kind} {of_member}{seconds}")
        if comes_back:
            time.sleep(max(0.0, began + away - time.time()))
            self._return(kind, lost)

    def _lose(self, kind: str, lost: set[int]) -> None:
        run, node = self._run, min(lost)
        if kind == "partition":
            run.split(lost)
        elif kind == "rank":
            run.kill_rank(node)
        elif kind == "leave":
            run.launchers[node].send_signal(signal.SIGTERM)
        elif kind == "freeze":
            run.signal(node, signal.SIGSTOP)
        else:
            if kind == "power":
                run.cluster.cut_link(node)
                time.sleep(0.3)
            for each in lost:
                run.cluster.kill_node(each)
        if kind not in ("partition", "rank"):
            self.presence += [(time.time(), each, False) for each in lost]

    def _return(self, kind: str, lost: set[int]) -> None:
        run = self._run
        if kind == "partition":
            run.split(set())
            return
        for node in sorted(lost):
            if kind == "freeze":
                run.signal(node, signal.SIGCONT)
            else:
                run.cluster.restore_link(node)
                with suppress(subprocess.TimeoutExpired):
                    run.launchers[node].wait(90)
                if run.has_trained:
                    return
                run.start(node)
            self.presence.append((time.time(), node, True))

    def _until_steps(self, began: float) -> float | None:
        changed_at, run = time.time(), self._run

        def go_on() -> bool:
            return any(run.last_step(each)[1] > changed_at for each in range(COUNT))

        return time.time() - began if run.wait(go_on, 60) else None

    def _at_save(self, node: int) -> int | None:
        """Waits until a node saves; None: it does not any more."""
        file = self._run.folder / f"output{node}"
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not self._run.has_trained:
            for _ in range(50):  # a checkpoint takes milliseconds
                with file.open("rb") as output:
                    output.seek(-min(file.stat().st_size, 7), 2)
                    if output.read().endswith(b"saves\n"):
                        time.sleep(self._draw.uniform(0, 0.02))
                        return node
                time.sleep(0.002)
        return None

    def _at_join(self, node: int) -> int | None:
        """Has a node leave and come back, and waits until it is let in; the one to be lost then, None: it was not."""
        run = self._run
        if not run.wait(lambda: node in run.newest()[1], 30):
            return None
        number = run.newest()[0]
        self.ended_all += run.newest_state_is_lost_with({node})  # it is killed for this, which is a fault as well
        run.cluster.kill_node(node)
        run.launchers[node].wait(90)
        # Where the others have to wait for it, its return is what they hear of.
        if run.may_go_on_without({node}):
            run.wait(lambda: run.newest()[0] > number, 30)
            number = run.newest()[0]
        if run.has_trained:
            return None
        run.start(node)
        if not run.wait(lambda: run.newest()[0] > number and node in run.newest()[1], 30):
            return None
        time.sleep(self._draw.uniform(0, 1.5))
        return self._draw.randrange(COUNT)


def disturbed(arguments: argparse.Namespace) -> int:
    """Several runs with several faults each; returns 1 if one was not exact."""
    draw = random.Random(arguments.seed)
    bad = faults = missed = stood_still = lost = ended_all = lost_with_all = 0
    noticed: list[float] = []
    went_on: list[float] = []
    waited: list[float] = []
    with tempfile.TemporaryDirectory() as alone:
        expected = train_alone(Path(alone), STEPS, arguments.ranks)
    for number in range(arguments.runs):
        description = Cluster((Node(arguments.ranks, cores=2.0),) * COUNT, Link(1e9))
        with tempfile.TemporaryDirectory() as folder, EmulatedCluster(description) as cluster:
            run = ElasticCluster(cluster, Path(folder), STEPS, save_every=SAVE_EVERY, ranks=arguments.ranks)
            happened = Faults(run, draw, (3.0, 8.0))
            run.wait(lambda run=run: bool(run.steps(0)), 120)
            for _ in range(arguments.faults):
                time.sleep(draw.uniform(0.2, 3))
                if run.has_trained:
                    break
                happened.happen(draw.choice(arguments.kinds.split(",")))
                faults += 1
            codes = run.end(180)
            apart = difference(Path(folder), expected)
            bad += apart >= TOLERANCE
            word = "exact" if apart < TOLERANCE else "WRONG"
            lost += 0 if happened.ended_all else run.steps_lost()
            lost_with_all += run.steps_lost() if happened.ended_all else 0
            ended_all += happened.ended_all
            print(f"run {number}: {word} ({apart:.1e}), codes {codes}: {', '.join(happened.told)}", flush=True)
            is_odd = run.steps_lost() > 0 and not happened.ended_all
            if apart >= TOLERANCE or any(codes) or happened.stood_still or is_odd:
                for node in range(COUNT):
                    print(f"--- node {node}\n{run.output(node)[-30000:]}", flush=True)
            missed += happened.missed
            stood_still += happened.stood_still
            noticed += happened.noticed
            went_on += happened.went_on
            waited += happened.waited
    of_members = f"{faults} faults, {missed} of them of members"
    print(f"{arguments.runs} runs, {of_members}; {bad} runs that are not exact, {lost} steps lost")
    if ended_all:
        ends = f"{ended_all} faults have ended all nodes that had the newest state"
        print(f"{ends}: {lost_with_all} more steps lost in those runs, back to what other nodes or checkpoints had")
    print(f"after {stood_still} faults nobody trained on for 40 s or longer")
    had_to_wait = "trained on once those were back for whom they had to wait"
    for what, seconds in (("noticed", noticed), ("trained on", went_on), (had_to_wait, waited)):
        if seconds:
            middle, most = statistics.median(seconds), max(seconds)
            print(f"{what} after {middle:.1f} s in the median, {most:.1f} s at most ({len(seconds)} faults)")
    return 1 if bad else 0


def kept(arguments: argparse.Namespace) -> int:
    """One run with a fault every minute; returns 0."""
    draw = random.Random(arguments.seed)
    description = Cluster((Node(1, cores=2.0),) * COUNT, Link(1e9))
    with tempfile.TemporaryDirectory() as folder, EmulatedCluster(description) as cluster:
        run = ElasticCluster(cluster, Path(folder), 10**6, save_every=0)
        happened = Faults(run, draw, (5.0, 25.0))
        run.wait(lambda: len(run.steps(0)) > 50, 120)
        began, step_at_first = time.time(), max(step for step, _ in run.steps(0))
        for minute in range(arguments.minutes):
            time.sleep(max(0.0, began + 60 * (minute + draw.random() / 2) - time.time()))
            happened.happen(draw.choice(SINGLE))
        time.sleep(max(0.0, began + 60 * arguments.minutes - time.time()))
        ended = time.time()
        steps = max(step for node in range(COUNT) for step, at in run.steps(node) if at <= ended) - step_at_first
        possible = _possible_steps(run, happened.presence, began, ended)
        print(f"faults: {', '.join(happened.told)}")
        print(
            f"{steps} steps of {possible:.0f} that the nodes that were there could have made: {steps / possible:.1%}"
        )
    return 0


def _possible_steps(run: ElasticCluster, presence: list[tuple[float, int, bool]], began: float, ended: float) -> float:
    """Steps that the nodes could have made which were there, at the pace at which they have made theirs."""
    # Longer than their samples take: the processors of this machine are shared, and there is a network.
    by_members: dict[frozenset[int], list[float]] = {}
    for node in range(COUNT):
        for change in run.changes(node):
            members = run.nodes_of(change.names)
            late = change.steps[len(change.steps) // 2 :]
            pairs = zip(late, late[1:], strict=False)
            by_members.setdefault(members, []).extend(after - before for before, after in pairs)
    pace = {members: statistics.median(seconds) for members, seconds in by_members.items() if len(seconds) > 20}
    longer = statistics.median(seconds / best_step_seconds(sorted(members)) for members, seconds in pace.items())
    there, at, possible = set(range(COUNT)), began, 0.0
    for moment, node, is_there in [*sorted(presence), (ended, 0, True)]:
        members = frozenset(there)
        seconds = pace.get(members, longer * best_step_seconds(sorted(members)))
        possible += max(0.0, min(moment, ended) - at) / seconds
        at = min(moment, ended)
        there = there | {node} if is_there else there - {node}
    return possible


def main() -> int:
    """Runs and prints what the docstring of this module says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--faults", type=int, default=5, help="in each run")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of faults")
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--minutes", type=int, default=0, help="one run of so many minutes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.minutes and arguments.ranks > 1:
        parser.error("found --minutes with --ranks, expected one of them: it knows the pace of one rank a node")
    return kept(arguments) if arguments.minutes else disturbed(arguments)


if __name__ == "__main__":
    sys.exit(main())
