"""Overlap and conflict rules against the plainest model: sets of bytes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brax_concurrent.scheduler.footprint import (
    EVERYTHING,
    Footprint,
    Hazard,
    Segment,
    conflicts,
    hazards,
    merged,
    together,
    without,
)

MEMORY = {(buffer, byte) for buffer in range(2) for byte in range(12)}


@st.composite
def segments(draw):
    start, stop = sorted(draw(st.tuples(st.integers(0, 11), st.integers(0, 11))))
    return Segment(draw(st.integers(0, 1)), start, stop)


FOOTPRINTS = st.one_of(
    st.just(EVERYTHING),
    st.builds(Footprint, *[st.lists(segments(), max_size=4).map(tuple)] * 2),
)


def bytes_of(parts):
    return {(part.buffer, byte) for part in parts for byte in range(part.start, part.stop)}


def memory_of(footprint):
    """The bytes read and the bytes written."""
    if footprint.everything:
        return MEMORY, MEMORY
    return bytes_of(footprint.reads), bytes_of(footprint.writes)


@given(segments(), segments())
def test_segments_overlap_when_they_share_a_byte(one, other):
    assert one.overlaps(other) == bool(bytes_of([one]) & bytes_of([other]))
    assert one.overlaps(other) == other.overlaps(one)


@given(st.lists(segments()), st.lists(segments()))
def test_what_others_do_not_cover_is_left(parts, others):
    left = without(parts, others)
    assert bytes_of(left) == bytes_of(parts) - bytes_of(others)
    assert left == merged(left)


@given(st.lists(segments()))
def test_merging_keeps_the_bytes_in_the_fewest_segments(parts):
    result = merged(parts)
    assert bytes_of(result) == bytes_of(parts)
    assert list(result) == sorted(result)
    for one, following in itertools.pairwise(result):
        assert one.buffer < following.buffer or one.stop < following.start
    assert all(part.start < part.stop for part in result)


@given(FOOTPRINTS, FOOTPRINTS)
def test_hazards_are_shared_bytes_of_which_one_is_written(older, newer):
    (old_reads, old_writes), (new_reads, new_writes) = memory_of(older), memory_of(newer)
    found = hazards(older, newer)
    assert (Hazard.RAW in found) == bool(old_writes & new_reads)
    assert (Hazard.WAR in found) == bool(old_reads & new_writes)
    assert (Hazard.WAW in found) == bool(old_writes & new_writes)
    assert conflicts(older, newer) == (found != Hazard.NONE)


@given(FOOTPRINTS, FOOTPRINTS)
def test_conflicts_do_not_depend_on_who_came_first(one, other):
    assert conflicts(one, other) == conflicts(other, one)


@given(FOOTPRINTS, FOOTPRINTS)
def test_the_normal_form_conflicts_with_the_same(one, other):
    assert hazards(one.normal(), other) == hazards(one, other)


@given(FOOTPRINTS, FOOTPRINTS, FOOTPRINTS)
def test_a_gang_conflicts_where_one_of_it_does(one, other, third):
    gang = together([one, other])
    assert conflicts(gang, third) == (conflicts(one, third) or conflicts(other, third))


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        (([], [(0, 4)]), ([(0, 4)], []), Hazard.RAW),
        (([(0, 4)], []), ([], [(3, 8)]), Hazard.WAR),
        (([], [(0, 4)]), ([], [(0, 1)]), Hazard.WAW),
        (([(0, 4)], []), ([(0, 4)], []), Hazard.NONE),  # reads never conflict
        (([], [(0, 4)]), ([(4, 8)], [(8, 9)]), Hazard.NONE),  # touching is not overlapping
        (([(0, 4)], [(0, 4)]), ([(0, 4)], [(0, 4)]), Hazard.RAW | Hazard.WAR | Hazard.WAW),
        (([], [(0, 8)]), ([(3, 3)], []), Hazard.NONE),  # an empty segment holds no byte
    ],
)
def test_hazards_by_example(older, newer, expected):
    def footprint(parts):
        return Footprint(*[tuple(Segment(0, *part) for part in side) for side in parts])

    assert hazards(footprint(older), footprint(newer)) == expected


def test_an_unknown_footprint_is_all_memory():
    reader = Footprint(reads=(Segment(3, 1000, 1001),))
    assert hazards(EVERYTHING, reader) == Hazard.RAW
    assert hazards(reader, EVERYTHING) == Hazard.WAR
    assert hazards(EVERYTHING, EVERYTHING) == Hazard.RAW | Hazard.WAR | Hazard.WAW
    assert not conflicts(EVERYTHING, Footprint())
    assert together([reader, EVERYTHING]) is EVERYTHING


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 3)])
def test_a_segment_that_makes_no_sense_is_refused(start, stop):
    with pytest.raises(ValueError, match=rf"segment of buffer 7: .* got \[{start}, {stop}\)"):
        Segment(7, start, stop)
