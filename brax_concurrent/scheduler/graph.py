"""The dependency graph of a stream: what the footprints allow, however large the window.

A graph is given by its `upstream` sets: for each task, the older tasks that it waits for, all by their place in the
stream. Here it is found the plain way, every pair compared; windows are tested against it, and traces draw it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from brax_concurrent.scheduler.footprint import Hazard, conflicts, hazards
from brax_concurrent.scheduler.task import Task
from brax_concurrent.scheduler.window import Window

Upstream = Sequence[Collection[int]]
"""For each task, the older tasks that it waits for."""


def dependencies(tasks: Sequence[Task]) -> list[frozenset[int]]:
    """Each task's upstream set: all older tasks that it conflicts with."""
    return [
        frozenset(j for j in range(i) if conflicts(tasks[j].footprint, task.footprint)) for i, task in enumerate(tasks)
    ]


def reduced(upstream: Upstream) -> list[frozenset[int]]:
    """The transitive reduction: without the tasks that another upstream task waits for, directly or not.

    Raises:
      ValueError: see `ancestors`.
    """
    before = ancestors(upstream)
    result = []
    for older in upstream:
        kept, covered = set(), 0
        for j in sorted(older, reverse=True):  # the path that makes an edge superfluous leads over a newer task
            if not covered >> j & 1:
                kept.add(j)
                covered |= before[j]
        result.append(frozenset(kept))
    return result


def ancestors(upstream: Upstream) -> list[int]:
    """All that each task waits for, directly or not, as the bits of an int.

    Raises:
      ValueError: a task waits for one that is not older.
    """
    result: list[int] = []
    for i, older in enumerate(upstream):
        bits = 0
        for j in older:
            if not 0 <= j < i:
                raise ValueError(f"upstream: task {i} can only wait for older tasks, got {j}")
            bits |= result[j] | 1 << j
        result.append(bits)
    return result


def critical_path(upstream: Upstream, durations: Sequence[float] | None = None) -> tuple[float, list[int]]:
    """The longest chain of tasks that wait for each other: no number of lanes is faster than that.

    Args:
      upstream: the graph.
      durations: of each task; None: 1 each.

    Returns:
      Its duration, and its tasks in order. Of chains of the same duration, that of the older tasks.

    Raises:
      ValueError: the graph and the durations are not of one length, or see `ancestors`.
    """
    ancestors(upstream)
    times = [1] * len(upstream) if durations is None else durations
    if len(times) != len(upstream):
        raise ValueError(f"durations: expected one for each of {len(upstream)} tasks, got {len(times)}")
    ends: list[float] = []
    last: list[int | None] = []  # whom each task waits for longest
    for older, time in zip(upstream, times, strict=True):
        last.append(max(sorted(older), key=ends.__getitem__, default=None))
        ends.append(time + (0 if last[-1] is None else ends[last[-1]]))
    at = max(range(len(ends)), key=ends.__getitem__, default=None)
    length, path = 0 if at is None else ends[at], []
    while at is not None:
        path.append(at)
        at = last[at]
    return length, path[::-1]


# --- pictures ----------------------------------------------------------------------------------


def to_dot(
    tasks: Sequence[Task],
    upstream: Upstream,
    *,
    name: str = "stream",
    only: Iterable[int] | None = None,
    notes: Mapping[int, str] | None = None,
    colors: Mapping[int, str] | None = None,
) -> str:
    """The graph in the DOT language, for Graphviz. Arrows lead from the older task and are named for their hazards.

    Tasks with a predicate have a dashed outline, those whose footprint is unknown a double one.

    Args:
      tasks: the stream.
      upstream: the arrows to draw, such as `reduced(dependencies(tasks))`.
      name: title of the graph.
      only: the tasks to draw; None: all. Arrows from others are left out.
      notes: further lines for some tasks, such as their times.
      colors: fill colours of some tasks, by Graphviz's names.
    """
    drawn = sorted(range(len(tasks)) if only is None else set(only))
    lines = [f"digraph {_quoted(name)} {{", f"  label={_quoted(name)};", "  node [shape=box, style=filled];"]
    for i in drawn:
        task = tasks[i]
        label = [f"{i} {task.kernel}", f"units {_span(task.units)}", *(notes or {}).get(i, "").splitlines()]
        style = '"filled,dashed"' if task.predicate is not None else "filled"
        outline = 2 if task.footprint.everything else 1
        color = _quoted((colors or {}).get(i, "white"))
        text = _quoted("\n".join(label))
        lines.append(f"  t{i} [label={text}, style={style}, peripheries={outline}, fillcolor={color}];")
    inside = set(drawn)
    for i in drawn:
        for j in sorted(inside.intersection(upstream[i])):
            found = hazards(tasks[j].footprint, tasks[i].footprint)
            text = _quoted(" ".join(str(h.name) for h in Hazard if h in found))
            lines.append(f"  t{j} -> t{i} [label={text}];")
    return "\n".join([*lines, "}"]) + "\n"


def window_to_dot(window: Window, tasks: Sequence[Task], *, name: str = "window") -> str:
    """What a window holds, in the DOT language: running tasks are gold, ready ones green, the others wait.

    `tasks` is the stream that the window was made for.
    """
    slots = window.by_age(window.occupied)
    upstream: list[list[int]] = [[] for _ in tasks]
    notes, colors = {}, {}
    for slot in slots:
        i = window.task(slot)
        upstream[i] = [window.task(older) for older in window.by_age(window.upstream(slot))]
        notes[i] = f"slot {slot}"
        ready, runs = window.ready >> slot & 1, window.issued >> slot & 1
        colors[i] = "gold" if runs else "palegreen" if ready else "white"
    return to_dot(tasks, upstream, name=name, only=notes, notes=notes, colors=colors)


def _span(units: range) -> str:
    if len(units) == 1:
        return str(units.start)
    return f"{units.start}..{units[-1]}" if units else "none"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
