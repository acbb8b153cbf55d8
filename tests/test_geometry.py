"""Runs and coverage against a tensor that counts how often each element is touched."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.geometry import Coverage, Region, coverage

shapes = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def views(draw: st.DrawFn, base: torch.Tensor) -> torch.Tensor:
    """A view of *base* by some narrows, steps, selects and transposes."""
    view = base
    for _ in range(draw(st.integers(0, 5))):
        if view.dim() == 0:
            break
        dim = draw(st.integers(0, view.dim() - 1))
        match draw(st.sampled_from(["narrow", "step", "select", "transpose"])):
            case "narrow":
                start = draw(st.integers(0, view.shape[dim]))
                view = view.narrow(dim, start, draw(st.integers(0, view.shape[dim] - start)))
            case "step":
                view = view[(slice(None),) * dim + (slice(None, None, draw(st.integers(1, 3))),)]
            case "select" if view.shape[dim]:
                view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
            case "transpose":
                view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
    return view


@settings(max_examples=200)
@given(data=st.data())
def test_runs_are_the_elements_of_the_view_in_its_order(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    base = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape)
    view = data.draw(views(base))
    starts, length = Region.of(view).runs()
    elements = [int(start) + i for start in starts for i in range(length)]
    assert elements == view.reshape(-1).tolist()
    assert Region.of(view).numel == view.numel()


@settings(max_examples=200)
@given(data=st.data())
def test_coverage_counts_what_a_counting_tensor_counts(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    counts = torch.zeros(shape, dtype=torch.int64)
    regions = []
    for _ in range(data.draw(st.integers(0, 4))):
        view = data.draw(views(counts))
        view += 1
        regions.append(Region.of(view))
    found = coverage(counts.numel(), regions)
    assert found == Coverage(
        once=int((counts == 1).sum()), never=int((counts == 0).sum()), repeated=int((counts > 1).sum())
    )
    assert found.exact == bool((counts == 1).all())


@settings(max_examples=100)
@given(data=st.data())
def test_a_region_finds_its_elements_again_in_another_storage(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    base = torch.randn(shape)
    view = data.draw(views(base))
    assert torch.equal(Region.of(view).view_in(base), view)
    within = torch.cat([torch.zeros(5), base.reshape(-1)])[5:]
    assert torch.equal(Region.of(view).view_in(within), view)


@pytest.mark.parametrize("numel", [0, 7])
def test_no_regions_cover_nothing(numel: int) -> None:
    assert coverage(numel, []) == Coverage(once=0, never=numel, repeated=0)
    assert coverage(numel, [Region.of(torch.empty(0, 3))]) == Coverage(once=0, never=numel, repeated=0)


def test_a_broadcast_source_is_one_element_many_times() -> None:
    starts, length = Region.of(torch.zeros(4)[1].expand(3)).runs()
    assert [int(start) + i for start in starts for i in range(length)] == [1, 1, 1]


def test_a_large_slice_costs_as_many_runs_as_it_has_rows() -> None:
    starts, length = Region.of(torch.empty(4096, 4096, device="meta")[:, 1024:2048]).runs()
    assert (len(starts), length) == (4096, 1024)
    assert coverage(2**40, [Region.of(torch.empty(2**20, 2**20, device="meta"))]).exact
