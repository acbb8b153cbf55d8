"""SyncConfig: every setting of a weight sync, from keywords, a dict or a YAML file.

Unknown keys are refused, sizes may be written as text ("512MiB"), and an error in a file names file, line and key.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
import yaml

from weightsync.errors import ConfigError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CommitStep = Literal["flush_prefix_cache", "reset_mm_cache", "reset_encoder_cache", "set_weight_version"]

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("kMGT", 1)}, **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}}  # fmt: skip


def parse_bytes(value: int | str, *, key: str) -> int:
    """Bytes from a number or from text such as "512MiB" (1024-based) or "2GB" (1000-based).

    Raises:
        ConfigError: not a size, or not positive.
    """
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ConfigError(f'{key}: {value!r} is not a size; write for example 67108864 or "64MiB"', key=key)
        value = int(float(match[1]) * units[match[2].lower()])
    if value <= 0:
        raise ConfigError(f"{key}: must be more than 0 bytes, is {value}", key=key)
    return value


def floating_dtype(name: str, *, key: str) -> torch.dtype:
    """The floating-point dtype of torch that *name* is ("bfloat16", "torch.bfloat16").

    Raises:
        ConfigError: there is none.
    """
    import torch  # where no dtype is named, a config is checked without it

    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"{key}: {name!r} is no floating-point dtype of torch; write bfloat16, for example", key=key)
    return found


class TransportRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which transport serves the pairs that match; the first rule that fits decides."""

    use: str
    same_host: bool | None = None
    """True: only pairs on one host. False: only pairs on two. None: both."""
    same_node: bool | None = None
    """The same for Ray nodes, of which one host may run several."""


class SyncConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one weight sync. All have defaults that work on one machine and on several."""

    transport: str | tuple[TransportRule, ...] = "auto"
    """Name of a transport; "auto": cuda_ipc on one GPU and to a single other GPU that reads the trainer's, shared_memory
    within a host, broadcast otherwise; or rules per pair."""
    apply: Literal["auto", "staged", "streaming"] = "auto"
    """staged: vote over the whole model before the first byte is applied. streaming: groups go into the reload as they
    arrive; least memory, but a failure poisons. auto: staged where that costs no copy or fits the budget."""
    direct_apply: Literal["auto", "off", "audit"] = "auto"
    """Where the engine's own loader only copies, copy instead of reloading, from the second update on: module group by module
    group, once a reload has been seen to do just that. off: always reload. audit: do both now and then, and compare."""
    audit_every: int = 10
    """With direct_apply: audit, every so many updates do both."""
    skip_unchanged: bool = False
    """Neither move nor apply module groups of which no tensor has changed since the version that every engine holds (frozen
    layers, sparse training). Both ends digest what they hold before each update; on a GPU that needs cupy. Without effect for
    a source that makes its tensors as they are sent."""
    timeout_s: float = 120.0
    """Bound of each wait: for an answer, a chunk, room to stage, the end of a phase."""
    staging_limit_bytes: int | str = "4GiB"
    """Staging memory that one rank, trainer or engine, may hold for updates; links that carry slices share it."""
    bucket_bytes: int | str = "8MiB"
    """Size of a transport's bucket in CPU memory, and of the steps in which bytes are announced and verified."""
    gpu_bucket_bytes: int | str = "512MiB"
    """Size of a bucket in GPU memory, where cuda_ipc has two of them and each link of broadcast four."""
    min_bandwidth_bytes: int | str | None = None
    """sharded_rdt: refuse a link that is slower than so many bytes a second when it opens; None: only log what was measured."""
    digest: bool = True
    """Digest every byte on both sides, before the vote."""
    wire_dtype: dict[str, str] = {}
    """Name pattern (as in a shell: "*", "*.bias") -> dtype in which matching floating-point tensors travel; the first
    pattern that fits decides. Empty: tensors keep their dtype."""
    on_commit: tuple[CommitStep, ...] = (
        "flush_prefix_cache",
        "reset_mm_cache",
        "reset_encoder_cache",
        "set_weight_version",
    )
    """What an engine does along with taking new weights, where it can: drop what it had computed with the old ones
    (blocks of the prefix cache, multimodal and encoder outputs), and label outputs with the version."""
    version_salt: bool = False
    """Salt the prefix cache of a vLLM engine with the version, so that blocks of different versions never match, and old ones
    need not be flushed while requests use them: then leave flush_prefix_cache out of on_commit. Requests that bring a salt keep
    it, with the version added."""
    on_failure: Literal["raise", "poison"] = "raise"
    """When an apply fails on some engines: raise: update() raises. poison: update() returns a report that lists them.
    In both cases they hold mixed weights and refuse to generate until a whole update succeeds, and the others commit."""
    on_lost_engine: Literal["raise", "remove"] = "raise"
    """When the process of an engine is gone: raise, or go on without it (the report says so); `add_engine` brings another."""
    retries: int = 0
    """How often a failed update is tried again, from the start; for failures that a retry can cure (a broken link, a
    silent process, a wrong byte, a poisoned engine), not for wrong settings or tensors."""
    version_log: str | None = None
    """A file in which the coordinator notes, durably, each version that it decides to commit; a weight sync that opens
    with it continues there. On the node of whoever calls connect, or on a file system that all nodes share."""
    flight_record: str | None = None
    """A file to which `update()` adds a JSON line for each update, also for one that failed: plan, bytes, when each rank did
    what, and the culprit. On the node of whoever calls `update`."""
    metrics: bool = False
    """Tell Ray's metrics of each update (`weightsync/ray_actors/metrics.py`), from the process that calls `update`."""
    pause: Literal["keep", "wait", "abort"] = "keep"
    """What happens to requests in flight where the engine generates during updates (AsyncLLM): go on with the new
    weights afterwards, finish first, or end."""
    unfed: Literal["report", "error"] = "report"
    """Engine parameters that no trainer tensor feeds: only list them in the report, or refuse to connect."""
    partial: Literal["report", "error"] = "error"
    """Engine parameters that the trainers' tensors write only in part, so that a reload leaves the rest undefined, and
    tensors of which an engine's ranks together read only a part: refuse to connect, or only list them (for engines that
    pad and do not fill the padding, or cut tensors on purpose)."""
    count_changed_values: bool = False
    """Count the values that differ from the update before, where the sender keeps a copy (shared_memory's stage)."""

    def __post_init__(self) -> None:
        for key in ("staging_limit_bytes", "bucket_bytes", "gpu_bucket_bytes"):
            msgspec.structs.force_setattr(self, key, parse_bytes(getattr(self, key), key=key))
        if self.min_bandwidth_bytes is not None:
            nbytes = parse_bytes(self.min_bandwidth_bytes, key="min_bandwidth_bytes")
            msgspec.structs.force_setattr(self, "min_bandwidth_bytes", nbytes)
        if not isinstance(self.wire_dtype, dict):
            raise ConfigError(
                f'wire_dtype: expected a mapping of name pattern to dtype, as {{"*": "bfloat16"}}, got {self.wire_dtype!r}',
                key="wire_dtype",
            )
        for pattern, name in self.wire_dtype.items():
            floating_dtype(name, key=f"wire_dtype.{pattern}")
        for key in ("timeout_s", "audit_every", "retries"):
            value = getattr(self, key)
            if not isinstance(value, int | float):
                raise ConfigError(f"{key}: expected a number, got {value!r}", key=key)
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout_s: must be more than 0 and finite, is {self.timeout_s:g}", key="timeout_s")
        if self.audit_every < 1:
            raise ConfigError(f"audit_every: must be 1 or more, is {self.audit_every}", key="audit_every")
        if self.retries < 0:
            raise ConfigError(f"retries: must be 0 or more, is {self.retries}", key="retries")

    @property
    def staging_limit(self) -> int:
        """`staging_limit_bytes` as a number."""
        return int(self.staging_limit_bytes)

    @property
    def bucket(self) -> int:
        """`bucket_bytes` as a number."""
        return int(self.bucket_bytes)

    @property
    def min_bandwidth(self) -> int:
        """`min_bandwidth_bytes` as a number."""
        return int(self.min_bandwidth_bytes or 0)

    @property
    def gpu_bucket(self) -> int:
        """`gpu_bucket_bytes` as a number."""
        return int(self.gpu_bucket_bytes)

    @classmethod
    def load(cls, source: SyncConfig | str | Path | dict[str, Any] | None) -> SyncConfig:
        """A config from whatever a user has: itself, a path of a YAML file, a dict, or None for the defaults.

        Raises:
            ConfigError: with key, and file and line where there is a file.
        """
        if source is None:
            return cls()
        if isinstance(source, cls):
            return convert(msgspec.to_builtins(source), cls)  # keywords are not checked when it is made
        if isinstance(source, dict):
            return convert(source, cls)
        return load_yaml(Path(str(source)), cls)


def convert(data: Any, kind: type[T]) -> T:
    """*data* as *kind*; errors name the key and suggest the nearest known one.

    Raises:
        ConfigError: wrong type, unknown key or bad value.
    """
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise _explain(error, kind) from None


def load_yaml(path: Path, kind: type[T]) -> T:
    """The YAML file at *path* as *kind*.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or does not fit; with the line of the culprit.
    """
    try:
        text = path.read_text()
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not YAML: no text in UTF-8 ({error.reason})", file=str(path)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        problem = getattr(error, "problem", None) or str(error)
        place = f"{path}:{line}" if line else path
        raise ConfigError(f"{place}: not YAML: {problem}", file=str(path), line=line) from error
    try:
        return convert({} if data is None else data, kind)
    except ConfigError as error:
        line = _line_of(root, error.key or "")
        raise ConfigError(f"{path}:{line}: {error}", key=error.key, file=str(path), line=line) from None


def _explain(error: msgspec.ValidationError, kind: type) -> ConfigError:
    text, _, path = str(error).partition(" - at `$")
    key = path.rstrip("`").lstrip(".") if path else ""
    unknown = re.search(r"unknown field `(.+?)`", text)
    if unknown:
        key = f"{key}.{unknown[1]}" if key else unknown[1]
        struct = TransportRule if path.startswith(".transport[") else kind
        known = [field.name for field in msgspec.structs.fields(struct)] if issubclass(struct, msgspec.Struct) else []
        near = difflib.get_close_matches(unknown[1], known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return ConfigError(f"{key}: unknown key; {hint}", key=key)
    if value := re.fullmatch(r"Invalid enum value '(.*)'", text):
        options = texts_of(get_type_hints(kind).get(key.partition("[")[0]))
        near = difflib.get_close_matches(value[1], options, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ConfigError(f"{key}: expected one of {', '.join(options)}, got {value[1]!r}{hint}", key=key or None)
    return ConfigError(f"{key or 'config'}: {text[:1].lower()}{text[1:]}", key=key or None)


def texts_of(hint: Any) -> list[str]:
    """The texts that a type allows, itself or as its items."""
    return [hint] if isinstance(hint, str) else [text for part in get_args(hint) for text in texts_of(part)]


def _line_of(root: yaml.Node | None, key: str) -> int:
    """The line of the deepest node on the way to *key* ("a.b[0].c")."""
    node, line = root, (root.start_mark.line + 1 if root is not None else 1)
    for part in re.findall(r"[^.\[\]]+", key):
        found: yaml.Node | None = None
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if name.value == part:
                    found, line = value, name.start_mark.line + 1
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            found = node.value[int(part)]
            line = found.start_mark.line + 1
        if found is None:
            break
        node = found
    return line
