"""How much staging memory module groups need, and in which order they need least. Pure arithmetic over a manifest."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from weightsync.chunk import aligned
from weightsync.errors import StagingLimitError
from weightsync.loadmap import ModuleGroup
from weightsync.manifest import Manifest


def group_bytes(manifest: Manifest, group: ModuleGroup) -> int:
    """Staging bytes of one group; ties share their bytes."""
    return sum(aligned(manifest.by_name[name].nbytes) for name in group.names if name in manifest.by_name)


def check_budget(
    manifest: Manifest, groups: Sequence[ModuleGroup], *, copied: Container[str], limit_bytes: int, whole_model: bool
) -> None:
    """Refuse a budget that cannot hold what has to be held at one time.

    Args:
        copied: names whose bytes are copied here; stable chunks need no staging.
        whole_model: all groups must be held together, for a vote over the whole model.

    Raises:
        StagingLimitError: naming the largest group, or the model, and its need.
    """
    staged = [group for group in groups if any(name in copied for name in group.names)]
    sizes = {f"module group {group.key}": group_bytes(manifest, group) for group in staged}
    if whole_model:
        sizes = {"the whole model (apply: staged)": sum(sizes.values())}
    what, needed = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    if needed > limit_bytes:
        raise StagingLimitError(
            f"{what} needs {needed} bytes of staging, staging_limit_bytes allows {limit_bytes}; "
            f"raise it to {needed} or more",
            group=what.removeprefix("module group "),
            needed_bytes=needed,
            limit_bytes=limit_bytes,
        )


def regroup(manifest: Manifest, groups: Iterable[ModuleGroup]) -> tuple[str, ...]:
    """All canonical names, group by group, then those in no group: the order that keeps least staging open."""
    names = [name for group in groups for name in group.names if name in manifest.by_name]
    placed = set(names)
    return (*names, *(meta.name for meta in manifest.tensors if meta.name not in placed))
