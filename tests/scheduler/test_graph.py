"""Dependency graphs, against sets of bytes and all paths, and those of the real robots."""

import functools
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_streams import streams, unhurried, upstream_of

from brax_concurrent.envs import program
from brax_concurrent.envs.registry import list_envs, make_task
from brax_concurrent.envs.stream import StreamBuilder
from brax_concurrent.kernels.model import load_model
from brax_concurrent.kernels.specialize import specialize, touched
from brax_concurrent.scheduler.footprint import EVERYTHING, Footprint, Segment, conflicts
from brax_concurrent.scheduler.graph import (
    ancestors,
    critical_path,
    dependencies,
    reduced,
    to_dot,
    window_to_dot,
)
from brax_concurrent.scheduler.serial import TileKernel, TileLayout, TileOp, TileProgram
from brax_concurrent.scheduler.simulate import simulate
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import Window, encode


@st.composite
def graphs(draw, max_size=8):
    size = draw(st.integers(0, max_size))
    return [draw(st.sets(st.integers(0, i - 1))) if i else set() for i in range(size)]


def reachable(upstream, i):
    """All that a task waits for, by walking."""
    return set(upstream[i]).union(*(reachable(upstream, j) for j in upstream[i]))


def bits(members):
    return sum(1 << j for j in members)


@unhurried
@given(streams())
def test_dependencies_are_shared_written_bytes(stream):
    assert dependencies(stream) == upstream_of(stream)


@unhurried
@given(graphs())
def test_ancestors_are_what_is_reachable(upstream):
    assert ancestors(upstream) == [bits(reachable(upstream, i)) for i in range(len(upstream))]


@unhurried
@given(graphs())
def test_the_reduction_orders_the_same_with_the_fewest_edges(upstream):
    result = reduced(upstream)
    assert ancestors(result) == ancestors(upstream)
    assert all(kept <= set(older) for kept, older in zip(result, upstream, strict=True))
    for i, kept in enumerate(result):
        for edge in kept:
            fewer = [set(older) - ({edge} if k == i else set()) for k, older in enumerate(result)]
            assert ancestors(fewer) != ancestors(upstream)


@unhurried
@given(graphs(), st.data())
def test_the_critical_path_is_the_longest_of_all_paths(upstream, data):
    times = data.draw(st.lists(st.integers(0, 5), min_size=len(upstream), max_size=len(upstream)))
    length, path = critical_path(upstream, times)

    def longest(i):
        return times[i] + max((longest(j) for j in upstream[i]), default=0)

    assert length == max(map(longest, range(len(upstream))), default=0) == sum(times[i] for i in path)
    assert all(older in upstream[newer] for older, newer in itertools.pairwise(path))
    assert not path or not upstream[path[0]] or times[path[0]] == length  # nothing before it adds time
    assert critical_path(upstream)[0] == critical_path(upstream, [1] * len(upstream))[0]


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="task 1 can only wait for older tasks, got 1"):
        ancestors([set(), {1}])
    with pytest.raises(ValueError, match="task 0 can only wait for older tasks, got -1"):
        reduced([{-1}])
    with pytest.raises(ValueError, match="durations: expected one for each of 2 tasks, got 1"):
        critical_path([set(), {0}], [1.0])


# --- pictures ----------------------------------------------------------------------------------


def parsed(dot):
    """Nodes (number to attributes) and edges (with their labels) of a DOT text."""
    value = r'("(?:[^"\\]|\\.)*"|\w+)'
    nodes, edges = {}, {}
    for line in dot.splitlines():
        attributes = dict(re.findall(rf"(\w+)={value}", line))
        if edge := re.match(r"  t(\d+) -> t(\d+) \[", line):
            edges[int(edge[1]), int(edge[2])] = attributes["label"].strip('"')
        elif node := re.match(r"  t(\d+) \[", line):
            nodes[int(node[1])] = attributes
    return nodes, edges


PREDICATE = Segment(0, 8, 12)
FOUR = [
    Task("find", range(3, 4), Footprint(writes=(Segment(0, 0, 12),))),
    Task('so"lve', range(3, 4), Footprint((Segment(0, 0, 4), PREDICATE), (Segment(0, 0, 4),)), PREDICATE),
    Task("any", range(0), EVERYTHING),
    Task("look", range(3, 6), Footprint(reads=(Segment(0, 0, 4),))),
]


def test_a_picture_has_every_task_and_every_reason():
    dot = to_dot(FOUR, dependencies(FOUR), name="my \\ stream", notes={0: "5 us\nSM 7"}, colors={3: "gold"})
    nodes, edges = parsed(dot)
    assert dot.startswith('digraph "my \\\\ stream" {\n')
    assert dot.endswith("}\n")
    assert dot.count("{") == dot.count("}") == 1
    assert edges == {
        (0, 1): "RAW WAW",
        (0, 2): "RAW WAW",
        (0, 3): "RAW",
        (1, 2): "RAW WAR WAW",
        (1, 3): "RAW",
        (2, 3): "RAW",
    }
    assert [nodes[i]["label"] for i in range(4)] == [
        r'"0 find\nunits 3\n5 us\nSM 7"',
        r'"1 so\"lve\nunits 3"',
        r'"2 any\nunits none"',
        r'"3 look\nunits 3..5"',
    ]
    assert [nodes[i]["peripheries"] for i in range(4)] == ["1", "1", "2", "1"]
    assert [nodes[i]["style"] for i in range(4)] == ["filled", '"filled,dashed"', "filled", "filled"]
    assert nodes[3]["fillcolor"] == '"gold"'
    assert parsed(to_dot([], [])) == ({}, {})


def test_a_picture_of_some_tasks_has_the_arrows_among_them():
    nodes, edges = parsed(to_dot(FOUR, reduced(dependencies(FOUR)), only=[3, 1, 2]))
    assert list(nodes) == [1, 2, 3]
    assert list(edges) == [(1, 2), (2, 3)]


def test_a_picture_of_a_window_shows_what_waits_for_what_is_left():
    apart = Task("apart", range(1), Footprint(writes=(Segment(5, 0, 4),)))
    stream = [FOUR[0], apart, FOUR[1], FOUR[3], FOUR[0]]
    window = Window(encode(stream), 4)
    for i in range(4):
        window.insert(i)
    window.issue(0)
    nodes, edges = parsed(window_to_dot(window, stream))
    assert list(edges) == [(0, 2), (0, 3), (2, 3)]
    assert [nodes[i]["fillcolor"] for i in range(4)] == ['"gold"', '"palegreen"', '"white"', '"white"']
    window.retire(0)
    window.insert(4)  # into the slot of task 0
    nodes, edges = parsed(window_to_dot(window, stream))
    assert list(edges) == [(2, 3), (2, 4), (3, 4)]
    assert [nodes[i]["fillcolor"] for i in range(1, 5)] == ['"palegreen"', '"palegreen"', '"white"', '"white"']
    assert nodes[4]["label"].endswith(r'\nslot 0"')


# --- the robots --------------------------------------------------------------------------------


@functools.cache
def robot_program(name):
    """A robot's control step with the footprints that its kernels have when compiled, without compiling them."""
    task = make_task(name)
    stream = StreamBuilder(task, load_model(task.model, nconmax=task.nconmax)).control_step()
    special = specialize(stream.kernels, stream.view, stream.fields, stream.user, "f32")
    layout = TileLayout(special.layout.arena_bytes, program.buffers_of(stream, "float32"))
    kernels = {n: TileKernel(n, 1, n, layout.footprint(*touched(p))) for n, p in special.programs.items()}
    ops = [TileOp(kernels[k.name]) for k in stream.kernels if special.programs[k.name].root.body]
    return TileProgram(layout, tuple(ops))


INDEPENDENT = [
    # What a stage of the forward pass shares no order with, though it comes later in the stream.
    ("collision", {"com", "inertia", "factor_inertia"}),
    ("velocity", {"inertia", "factor_inertia", "collision"}),
    ("bias", {"inertia", "factor_inertia", "collision"}),
    ("passive", {"kinematics", "com", "inertia", "factor_inertia", "collision", "velocity", "bias"}),
    ("actuation", {"kinematics", "com", "inertia", "factor_inertia", "collision", "velocity", "bias", "passive"}),
    ("acceleration", {"collision"}),
    ("constraints", {"inertia", "factor_inertia", "velocity", "bias", "passive", "actuation", "acceleration"}),
    ("solve", set()),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", list_envs())
def test_a_robots_stages_are_as_independent_as_its_mathematics(name):
    stream = list(robot_program(name).tasks(32))
    before = ancestors(dependencies(stream))
    names = [task.kernel for task in stream]
    first = names.index("kinematics")
    second = names.index("kinematics", first + 1)
    third = names.index("kinematics", second + 1)
    for start, stop in ((first, second), (second, third)):  # arenas are reused: also against writes after reads
        place = {names[i]: i for i in range(start, stop)}
        for stage, others in INDEPENDENT:
            i = place[stage]
            assert {n for n, j in place.items() if j < i and not before[i] >> j & 1} - {"check_state"} == others, stage
    place = {n: i for i, n in enumerate(names) if i < second}
    assert before[place["solve"]] >> place["acceleration"] & 1
    assert before[place["solve"]] >> place["constraints"] & 1
    assert before[second] >> place["solve"] & 1  # the next position needs this acceleration
    assert before[names.index("reset_kinematics")] >> names.index("outcome") & 1


@pytest.mark.slow
@pytest.mark.parametrize("name", list_envs())
def test_a_robots_tiles_are_independent(name):
    tiles = robot_program(name)
    assert tiles.tiles_are_independent
    stream = list(tiles.tasks(70))  # the last tile is partly filled
    length = len(stream) // 3
    one, two, last = stream[:length], stream[length : 2 * length], stream[2 * length :]
    for a, b in ((one, two), (two, last)):
        assert not any(conflicts(older.footprint, newer.footprint) for older in set(a) for newer in set(b))
    assert dependencies(two) == dependencies(one)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_envs())
def test_a_window_finds_a_robots_independence(name):
    tiles = robot_program(name)
    stream = list(tiles.tasks(32))
    longest, _ = critical_path(dependencies(stream))
    schedule = simulate(stream, [1] * len(stream), lanes=4, window=32)
    assert schedule.makespan == longest  # 32 tasks are enough to see all that one tile has
    assert schedule.concurrency > 1.7
    # Tiles side by side keep four lanes busy; one after the other they are too far apart for the window.
    cut = TileProgram(tiles.layout, tiles.ops[:60])
    side_by_side, in_turn = (
        simulate(each, [1] * len(each), lanes=4, window=32).concurrency
        for each in (list(cut.tasks(128, interleave=4)), list(cut.tasks(128)))
    )
    assert side_by_side > 3.9 > 3.0 > in_turn
