"""The search for schedules: as good as trying everything, deterministic, and it finds an overlap where there is one."""

from __future__ import annotations

import itertools
import random
import time

import networkx as nx
import pytest

from yggc.stages import (
    CHAIN,
    LEAST_HITS,
    Mode,
    StageCosts,
    best_order,
    rank_schedules,
    stage_graph,
)
from yggrt.lanes import LaneExecutor
from yggrt.plan import StageTime
from yggrt.schedule import COMPILED, DEPENDENCIES, STAGES, Stage, StageSchedule, round_seconds, sequential_schedule

SECONDS = {"head": 0.0015, "grow": 0.003, "tail": 0.0015, "prune": 0.00008, "verify": 0.0095, "accept": 0.00004,
           "depth": 0.00001, "next_head": 0.0015, "move": 0.00002, "emit": 0.00005}  # fmt: skip


def costs(
    seconds: dict[str, float] = SECONDS,
    slowdown: float = 1.5,
    threads: int = 2,
    hits: tuple[float, float] = (0.5, 0.3),
    depth: bool = True,
    modes: tuple[Mode, ...] = (Mode(None, 1.5),),
    handoff_s: float = 0.00004,
) -> StageCosts:
    """slowdown: of a compiled stage, for each halving of its cores."""
    times = []
    for mode, ahead in itertools.product(modes, (False, True)):
        for name, taken in seconds.items():
            for cores in range(1, threads + 1) if name in COMPILED else (0,):
                factor = slowdown ** (threads / cores - 1) if cores else 1.0
                times.append(StageTime(name, cores, mode.verify_width, ahead, taken * factor))
    return StageCosts(threads, tuple(times), handoff_s, *hits, depth, modes)


def all_schedules(**given) -> list[StageSchedule]:
    return rank_schedules(costs(**given), 10**6)


def brute_force(graph: nx.DiGraph, lane_of: dict[str, int], seconds: dict[str, float], handoff_s: float, caller: int):
    """Least seconds of a round over all permutations of the stages, each simulated from nothing."""
    best = float("inf")
    for order in itertools.permutations(graph):
        place = {name: index for index, name in enumerate(order)}
        if any(place[before] > place[after] for before, after in graph.edges):
            continue
        ends: dict[str, float] = {}
        free = {lane: 0.0 if lane == caller else handoff_s for lane in lane_of.values()}
        for name in order:
            begin = free[lane_of[name]]
            for before in graph.predecessors(name):
                begin = max(begin, ends[before] + handoff_s * (lane_of[before] != lane_of[name]))
            ends[name] = free[lane_of[name]] = begin + seconds[name]
        best = min(best, max(end + handoff_s * (lane_of[name] != caller) for name, end in ends.items()))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_best_order_is_that_of_brute_force(seed):
    chance = random.Random(seed)
    names = "abcdef"[: chance.randint(3, 6)]
    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from(pair for pair in itertools.combinations(names, 2) if chance.random() < 0.35)
    lane_of = {name: chance.randrange(3) for name in names}
    seconds = {name: chance.choice((0.0, 1.0, 2.0, 5.0)) * chance.random() for name in names}
    handoff_s, caller = chance.choice((0.0, 0.3)), chance.choice(sorted(set(lane_of.values())))
    found, order = best_order(graph, lane_of, seconds, handoff_s, caller)
    assert found == pytest.approx(brute_force(graph, lane_of, seconds, handoff_s, caller))
    assert sorted(order) == sorted(names)


def every_schedule(given: StageCosts) -> list[StageSchedule]:
    """All sound schedules of the full set of stages: every lane, order and lag, with all waits that are true."""
    names = tuple(name for name in STAGES if name not in ("tail", "depth"))  # small enough to try everything
    free = [name for name in names if name not in CHAIN]
    found = []
    for lanes in ((2,), (2, 0), (1, 1), (1, 1, 0)):
        for chosen in itertools.product(range(len(lanes)), repeat=len(free)):
            lane_of = dict.fromkeys(names, 0) | dict(zip(free, chosen, strict=True))
            for places in itertools.product(range(len(CHAIN) + 1), repeat=len(free)):
                for swap in (False, True):
                    order = list(CHAIN)
                    pairs = sorted(zip(places, free, strict=True), key=lambda pair: pair[0], reverse=True)
                    for place, name in pairs[::-1] if swap and places[0] == places[1] else pairs:
                        order.insert(place, name)
                    for lag in (0, 1):
                        stages = []
                        for name in order:
                            needed = [
                                each.before for each in DEPENDENCIES if each.after == name and not each.iterations
                            ]
                            waits = [each for each in needed if each in names and lane_of[each] != lane_of[name]]
                            late = name == "emit" and lag
                            stages.append(Stage(name, lane_of[name], int(late), () if late else tuple(waits)))
                        try:
                            found.append(StageSchedule(lanes, None, tuple(stages)))
                        except ValueError:
                            continue
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_best_schedule_is_that_of_brute_force(seed):
    chance = random.Random(seed)
    seconds = {name: chance.choice((0.2, 1.0, 3.0)) * chance.random() for name in STAGES}
    given = costs(seconds, 1.2, hits=(0.0, 0.6), depth=False, handoff_s=0.02)
    everything = [each for each in every_schedule(given) if not each.has("tail")]
    everything.append(sequential_schedule(2))
    least = min(given.token_s(each) for each in everything)
    assert given.token_s(rank_schedules(given, 1)[0]) <= least * (1 + 1e-9)
    without = [each for each in rank_schedules(given, 10**6) if each.looks_ahead]
    drafted = min(given.token_s(each) for each in every_schedule(given))
    assert given.token_s(without[0]) == pytest.approx(drafted)


def test_the_graph_holds_the_true_dependencies_and_what_each_stage_needs():
    graph = stage_graph(STAGES)
    assert nx.is_directed_acyclic_graph(graph)
    assert list(nx.topological_sort(graph.subgraph(CHAIN))) == list(CHAIN)
    assert {name for name, kind in graph.nodes(data="resource") if kind == "cores"} == set(COMPILED)
    assert set(stage_graph(STAGES, lagging=True).predecessors("emit")) == set()


def test_the_search_is_deterministic_and_quick():
    given = costs(threads=16, modes=(Mode(None, 1.5), Mode(4, 1.45)))
    started = time.perf_counter()
    first = rank_schedules(given, 5)
    assert time.perf_counter() - started < 10
    assert rank_schedules(given, 5) == first and 5 <= len(set(first)) == len(first) <= 6
    predicted = [given.token_s(each) for each in first[:5]]
    assert predicted == sorted(predicted)
    assert sequential_schedule(16, True) in first


def test_where_nothing_is_gained_one_stage_after_the_other_is_best():
    given = costs(depth=False)
    assert rank_schedules(given, 1) == [sequential_schedule(2)]
    assert rank_schedules(given, 5)[0] == sequential_schedule(2)


def test_few_right_guesses_drop_the_drafts_ahead_of_time():
    few = all_schedules(hits=(LEAST_HITS - 0.01, 0.0))
    assert few and not any(each.looks_ahead for each in few)
    with_tail = all_schedules(hits=(LEAST_HITS, 0.0))
    assert all(each.has("tail") for each in with_tail if each.has("next_head"))
    assert any(each.has("next_head") for each in with_tail)
    assert any(each.has("next_head") and not each.has("tail") for each in all_schedules(hits=(0.0, LEAST_HITS)))


def test_the_fused_mode_wins_where_fixed_widths_cost_less_than_they_lose():
    modes = (Mode(None, 1.5), Mode(4, 1.49))
    given = costs(modes=modes, depth=False)
    assert rank_schedules(given, 1)[0].mode == "split"
    cheap = tuple(
        StageTime(t.stage, t.cores, t.verify_width, t.looks_ahead, t.seconds * (0.9 if t.verify_width else 1))
        for t in given.times
    )
    faster = StageCosts(2, cheap, given.handoff_s, 0.0, 0.0, False, modes)
    assert rank_schedules(faster, 1)[0].verify_width == 4


WAITS = {"head": 0.005, "grow": 0.005, "tail": 0.005, "prune": 0.0, "verify": 0.02, "accept": 0.0, "depth": 0.0,
         "next_head": 0.005, "move": 0.0, "emit": 0.005}  # fmt: skip


def test_stages_of_known_length_are_overlapped_and_take_what_was_predicted():
    """Waits of 5 ms that share nothing: text and the next head draft go beside the verifier's step."""
    given = costs(WAITS, slowdown=1.0, hits=(1.0, 0.0), depth=False)
    best = rank_schedules(given, 1)[0]
    assert len(best.lanes) > 1 and best.has("next_head") and best.lane_of("next_head") != best.lane_of("verify")
    assert best.lane_of("emit") != best.lane_of("verify")
    guessed = dict(WAITS, head=0.0)  # every guess is right here
    for schedule, seconds in ((best, guessed), (sequential_schedule(2), WAITS)):
        executor = LaneExecutor(schedule)
        for _ in range(8):
            list(executor.round(lambda stage, seconds=seconds: time.sleep(seconds[stage.name])))
        predicted = round_seconds(schedule, seconds, given.handoff_s)
        assert predicted * 0.95 < min(executor.rounds[1:]) < predicted * 1.05 + 0.002
        assert given.predicted_s(schedule) == pytest.approx(predicted)
    assert given.predicted_s(best) < 0.8 * given.predicted_s(sequential_schedule(2))
