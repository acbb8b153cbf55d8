"""Ranks over replicas, pipeline and tensor parallelism, receivers and groups: one set of numbers, there and back."""

from __future__ import annotations

import itertools
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from weightsync.ranks import SENDER, EngineShape, group_rank, rank_in_engine, receiver_of, receivers

shapes = st.builds(EngineShape, data=st.integers(1, 4), pipeline=st.integers(1, 4), tensor=st.integers(1, 8))
fleets = st.lists(shapes, min_size=1, max_size=5)


@given(shapes)
def test_ranks_of_an_engine_are_dense_and_lead_back_to_their_places(shape: EngineShape) -> None:
    places = list(itertools.product(range(shape.data), range(shape.pipeline), range(shape.tensor)))
    assert [shape.rank(*place) for place in places] == list(range(shape.size))
    assert [shape.place(rank) for rank in range(shape.size)] == places


@given(shapes)
def test_a_worker_has_the_rank_that_vllm_gives_it(shape: EngineShape) -> None:
    """vLLM counts a replica's workers over pipeline and tensor parallelism, the latter innermost."""
    for data, pipeline, tensor in itertools.product(range(shape.data), range(shape.pipeline), range(shape.tensor)):
        worker = pipeline * shape.tensor + tensor
        assert rank_in_engine(data, worker, shape.world_size) == shape.rank(data, pipeline, tensor)


@given(fleets)
def test_a_group_numbers_the_sender_first_and_then_every_rank_once(fleet: list[EngineShape]) -> None:
    engines = {f"engine {i}": range(shape.size) for i, shape in enumerate(fleet)}
    found = receivers(engines)
    assert len(found) == len(set(found)) == sum(shape.size for shape in fleet)
    ranks = [group_rank(index) for index in range(len(found))]
    assert [SENDER, *ranks] == list(range(len(found) + 1))
    assert [receiver_of(rank) for rank in ranks] == list(range(len(found)))
    assert receiver_of(SENDER) is None


@given(fleets, st.randoms(use_true_random=False))
def test_the_order_depends_neither_on_that_of_answers_nor_on_later_engines(
    fleet: list[EngineShape], random: Random
) -> None:
    engines = {f"engine {i}": range(shape.size) for i, shape in enumerate(fleet)}
    shuffled = {name: random.sample(ranks, len(ranks)) for name, ranks in engines.items()}
    assert receivers(shuffled) == receivers(engines)
    fewer = dict(list(engines.items())[:-1])
    assert receivers(engines)[: len(receivers(fewer))] == receivers(fewer)


def test_two_engines_of_unlike_shapes() -> None:
    one, other = EngineShape(data=2, tensor=2), EngineShape(pipeline=2)
    order = receivers({"engine 0": range(one.size), "engine 1": range(other.size)})
    assert order.index(("engine 0", one.rank(1, 0, 1))) == 3
    assert order.index(("engine 1", other.rank(0, 1, 0))) == 5
    assert group_rank(5) == 6
