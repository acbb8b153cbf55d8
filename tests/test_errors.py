"""Errors keep their attributes through pickle and over the wire, and the docstring's tree is the real one."""

from __future__ import annotations

import inspect
import pickle
import re

import msgspec
import pytest

import weightsync
from weightsync import errors
from weightsync.errors import ErrorInfo, IncompleteUpdateError, WeightSyncError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, WeightSyncError)]

VALUES: dict[str, object] = {
    "line": 3,
    "needed_bytes": 2**40,
    "limit_bytes": 7,
    "missing": ["a", "b"],
    "duplicated": [],
    "unexpected": ["c"],
}


def full(kind: type[WeightSyncError]) -> WeightSyncError:
    """An error with every attribute set."""
    return kind("what happened", **{field: VALUES.get(field, f"the {field}") for field in kind.fields})


def attributes(error: WeightSyncError) -> dict[str, object]:
    return {field: getattr(error, field) for field in error.fields}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling_with_its_attributes(kind: type[WeightSyncError]) -> None:
    for error in (full(kind), kind("only words"), kind()):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error)
        assert attributes(again) == attributes(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_the_wire_with_its_attributes(kind: type[WeightSyncError]) -> None:
    error = full(kind)
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(ErrorInfo.of(error, rank="ignored")), type=ErrorInfo)
    again = info.to_error()
    assert type(again) is kind
    assert str(again) == "the rank: what happened"
    assert attributes(again) == attributes(error)
    twice = ErrorInfo.of(again).to_error()
    assert (str(twice), attributes(twice)) == (str(again), attributes(again))


def test_the_rank_where_an_error_was_answered_is_added_where_it_has_none() -> None:
    again = ErrorInfo.of(IncompleteUpdateError("missing: w", missing=["w"]), rank="engine 1 rank 0").to_error()
    assert isinstance(again, IncompleteUpdateError)
    assert (str(again), again.rank, again.missing) == ("engine 1 rank 0: missing: w", "engine 1 rank 0", ["w"])
    assert again.unexpected is None


def test_a_foreign_error_keeps_its_type_and_text() -> None:
    again = ErrorInfo.of(ZeroDivisionError("by zero"), rank="trainer 0").to_error()
    assert type(again) is WeightSyncError
    assert str(again) == "trainer 0: ZeroDivisionError: by zero"


def test_a_kind_or_attribute_of_a_newer_peer_is_no_obstacle() -> None:
    again = ErrorInfo("NewerError", "words", {"rank": "trainer 0", "colour": "red"}).to_error()
    assert type(again) is WeightSyncError
    assert str(again) == "trainer 0: words"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_told_by_the_wire_and_has_a_docstring(kind: type[WeightSyncError]) -> None:
    assert type(ErrorInfo(kind.__name__, "").to_error()) is kind
    assert kind.__doc__


def test_the_tree_in_the_docstring_is_the_real_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__)
    assert set(drawn) == {kind.__name__ for kind in KINDS} - {"WeightSyncError"}
    parents = dict(re.findall(r"\n    [├└]── (\w+)[^\n]*\n    │   └── (\w+)", errors.__doc__))
    children = {child: parent for parent, child in parents.items()}
    assert all(getattr(errors, name).__base__.__name__ == children.get(name, "WeightSyncError") for name in drawn)


def test_every_error_is_public() -> None:
    assert {kind.__name__ for kind in KINDS} <= set(weightsync.__all__)
    assert all(getattr(weightsync, kind.__name__) is kind for kind in KINDS)
