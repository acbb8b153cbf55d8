"""The fence: what comes late, twice, or from a coordinator that was replaced is refused, and leaves no trace."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync import messages as m
from weightsync.config import SyncConfig
from weightsync.errors import AgreementError, RestartedError
from weightsync.fence import Fence
from weightsync.manifest import Manifest, TensorMeta

MANIFEST = Manifest((TensorMeta("w", "float32", (1,)),))
OPENING: list[m.Request] = [
    m.Describe(config=SyncConfig()),
    m.OpenReceiver(config=SyncConfig(), manifest=MANIFEST, engine=0),
]
OTHERS: list[m.Request] = [
    m.OpenSender(manifest=MANIFEST, names=("w",), links=()),
    m.Connect(),
    m.Prepare(version=1, staged=True),
    m.Transfer(version=1),
    m.Poll(),
    m.Apply(version=1),
    m.Commit(version=1),
    m.Abort(),
    m.Close(),
]


def call(session: str, number: int, request: m.Request | None = None, *, epoch: int = 0) -> m.Call:
    return m.Call(session=session, epoch=epoch, number=number, request=request or m.Poll())


def opened(session: str = "a", number: int = 1, *, epoch: int = 0) -> Fence:
    fence = Fence()
    fence.admit(call(session, number, OPENING[0], epoch=epoch))
    return fence


def refused(fence: Fence, late: m.Call) -> str | None:
    """The field that is given as the reason, and nothing about the fence has changed."""
    before = vars(fence) | {"_retired": set(fence._retired)}
    with pytest.raises(AgreementError) as caught:
        fence.admit(late)
    assert vars(fence) == before
    return caught.value.field


@pytest.mark.parametrize("request_", OTHERS)
def test_nothing_is_admitted_before_an_opening_call(request_: m.Request) -> None:
    """So that the coordinator of a process that was restarted opens it again."""
    with pytest.raises(RestartedError):
        Fence().admit(call("a", 1, request_))


@pytest.mark.parametrize("opening", OPENING)
def test_either_opening_call_begins_a_weight_sync(opening: m.Request) -> None:
    fence = Fence()
    fence.admit(call("a", 1, opening))
    fence.admit(call("a", 2))


@pytest.mark.parametrize("number", [1, 4, 5])
@pytest.mark.parametrize("request_", [*OPENING, *OTHERS])
def test_a_call_that_comes_late_or_twice_is_refused_whatever_it_asks(number: int, request_: m.Request) -> None:
    fence = opened()
    fence.admit(call("a", 5))
    assert refused(fence, call("a", number, request_)) == "number"
    fence.admit(call("a", 6))


def test_numbers_may_have_gaps() -> None:
    fence = opened()
    fence.admit(call("a", 1000))


@pytest.mark.parametrize("request_", OTHERS)
def test_a_call_of_an_earlier_epoch_is_refused_though_its_number_is_new(request_: m.Request) -> None:
    fence = opened()
    fence.admit(call("a", 2, epoch=3))
    assert refused(fence, call("a", 3, request_, epoch=2)) == "epoch"


def test_a_new_coordinator_learns_the_epoch_from_its_opening_call() -> None:
    fence = opened(epoch=7)
    fence.admit(call("b", 1, OPENING[1], epoch=0))
    assert fence.epoch == 7
    assert refused(fence, call("b", 2, epoch=6)) == "epoch"
    fence.admit(call("b", 2, epoch=8))
    assert fence.epoch == 8


@pytest.mark.parametrize("request_", [*OPENING, *OTHERS])
def test_a_replaced_coordinator_is_refused_for_good_even_with_an_opening_call(request_: m.Request) -> None:
    fence = opened("a", epoch=1)
    fence.admit(call("b", 1, OPENING[0]))
    assert refused(fence, call("a", 99, request_, epoch=99)) == "session"
    fence.admit(call("c", 1, OPENING[0]))
    assert refused(fence, call("a", 100, request_)) == "session"
    assert refused(fence, call("b", 100, request_)) == "session"


@pytest.mark.parametrize("request_", OTHERS)
def test_a_stranger_cannot_go_on_where_another_began(request_: m.Request) -> None:
    assert refused(opened("a"), call("b", 99, request_, epoch=99)) == "session"


def test_an_update_is_known_to_be_under_way_until_it_is_committed_aborted_or_closed() -> None:
    going: list[m.Request] = [m.Prepare(version=1, staged=True), m.Transfer(version=1), m.Poll()]
    for ends in (m.Commit(version=1), m.Abort(), m.Close(), m.Connect(), OPENING[1]):
        fence = opened()
        assert not fence.updating
        for number, asked in enumerate(going, start=2):
            fence.admit(call("a", number, asked))
            assert fence.updating
        heard = fence.heard
        refused(fence, call("a", 4, ends))
        assert fence.updating
        fence.admit(call("a", 5, ends))
        assert not fence.updating
        assert fence.heard >= heard > 0


Calls = st.lists(
    st.builds(
        call,
        st.sampled_from("abc"),
        st.integers(1, 9),
        st.sampled_from([*OPENING, *OTHERS]),
        epoch=st.integers(0, 3),
    ),
    max_size=40,
)


@given(Calls)
def test_in_any_order_of_calls_epochs_and_numbers_only_grow_and_sessions_never_return(calls: list[m.Call]) -> None:
    fence, admitted = Fence(), list[m.Call]()
    for each in calls:
        try:
            fence.admit(each)
        except (AgreementError, RestartedError):
            continue
        admitted.append(each)
    sessions = [each.session for each in admitted]
    assert sorted(sessions, key=sessions.index) == sessions, "one after the other"
    for before, after in itertools.pairwise(admitted):
        if before.session == after.session:
            assert after.number > before.number
        else:
            assert isinstance(after.request, m.Describe | m.OpenReceiver)
    epochs = [each.epoch for each in admitted if not isinstance(each.request, m.Describe | m.OpenReceiver)]
    assert epochs == sorted(epochs)
