"""A YAML file with the line of each key, changed by overrides, and read into a type.

Every error names file and line (or the override), key, value and what was expected.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
import yaml

from weightsync.config import texts_of
from weightsync.errors import ConfigError

T = TypeVar("T")
Parts = list[str | int]
_ABSENT = object()
# YAML 1.1 has "1e-5" as text; whoever writes a learning rate means a number.
_FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)[eE][-+]?\d+$")


class Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-5 is a number."""


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads."""


for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def dump(data: Any) -> str:
    """*data* as YAML, keys in their order."""
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100))


@dataclass(frozen=True, slots=True)
class Override:
    """ "a.b=value" of a command line."""

    key: str
    text: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises ConfigError: no key, no value, or the value is no YAML."""
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or "" in key.split("."):
            raise ConfigError(f'override "{text}": expected key=value, for example run.steps=3', key=key or None)
        try:
            return cls(key.strip(), text, yaml.load(value, Loader))
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or str(error)
            raise ConfigError(f'override "{text}": {value!r} is not a YAML value: {problem}', key=key) from None


class Document:
    """A file's data, and where in it each key stands."""

    def __init__(self, path: Path, overrides: list[str]) -> None:
        """Raises ConfigError: the file cannot be read, is no YAML, has a key twice, or an override does not fit."""
        self.path = path
        self._root, self.data = self._read()
        self.overrides = [Override.parse(text) for text in overrides]
        for override in self.overrides:
            self._apply(override)

    def _read(self) -> tuple[yaml.Node | None, Any]:
        file = str(self.path)
        try:
            self._text = self.path.read_text(encoding="utf-8")
            root = yaml.compose(self._text, Loader)
            self._refuse_duplicates(root)
            data = yaml.load(self._text, Loader)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror}", file=file) from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: not YAML: no text in UTF-8 ({error.reason})", file=file) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = mark.line + 1 if mark else 1
            problem = getattr(error, "problem", None) or str(error)
            raise self._at(line, None, f"not YAML: {problem}") from None
        if not isinstance({} if data is None else data, dict):
            line = root.start_mark.line + 1 if root else 1
            raise self._at(
                line, None, f"the file holds {_shown(data)}; expected keys: model, trainer, engines, sync, run"
            )
        return root, data or {}

    def _refuse_duplicates(self, root: yaml.Node | None) -> None:
        todo, seen = [("", root)], set()
        while todo:
            prefix, node = todo.pop()
            if id(node) in seen:  # an alias
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                todo += [(f"{prefix}[{i}]", item) for i, item in enumerate(node.value)]
            elif isinstance(node, yaml.MappingNode):
                lines: dict[str, int] = {}
                for name, value in node.value:
                    key, line = f"{prefix}.{name.value}".lstrip("."), name.start_mark.line + 1
                    if name.value in lines and name.value != "<<":
                        first = lines[name.value]
                        raise self._at(line, key, f"{key}: stands twice, first in line {first}; remove one of them")
                    lines[str(name.value)] = line
                    todo.append((key, value))

    def _apply(self, override: Override) -> None:
        at, parts = self.data, _parts(override.key)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if isinstance(at, list) and isinstance(part, int) and part < len(at):
                if last:
                    at[part] = override.value
                elif at[part] is not None:
                    at = at[part]
            elif isinstance(at, dict) and isinstance(part, str):
                if last:
                    at[part] = override.value
                else:
                    if at.get(part) is None:
                        at[part] = {}
                    at = at[part]
            else:
                inside = _joined(parts[:i])
                raise ConfigError(
                    f'override "{override.text}": {inside} is {_shown(at)}, which has no {part!r}; override {inside} itself',
                    key=override.key,
                )

    def read(self, kind: type[T]) -> T:
        """The data as *kind*.

        Raises:
            ConfigError: an unknown key, a wrong type or a bad value.
        """
        try:
            return msgspec.convert(self.data, kind)
        except ConfigError as error:  # SyncConfig's own checks know only their own key
            key = f"sync.{error.key}"
            raise self.error(key, str(error).removeprefix(f"{error.key}: ")) from None
        except msgspec.ValidationError as error:
            key, problem = _explain(error, kind)
            raise self.error(key, problem) from None

    def has(self, key: str) -> bool:
        """Whether the file, or an override, has *key*."""
        return self._value(key) is not _ABSENT

    def _value(self, key: str) -> Any:
        at = self.data
        for part in _parts(key):
            try:
                at = at[part]
            except (KeyError, IndexError, TypeError):
                return _ABSENT
        return at

    def error(self, key: str, problem: str) -> ConfigError:
        """*problem* of *key*, with its value and its place."""
        value = self._value(key)
        text = f"{key}: {problem}" if value is _ABSENT or key == "" else f"{key}: is {_shown(value)}; {problem}"
        text = text.removeprefix(": ")
        line, found = self._line_of(key)
        for override in reversed(self.overrides):
            inside = key == override.key or key.startswith((f"{override.key}.", f"{override.key}["))
            if inside or (override.key.startswith(f"{key}.") and not found):
                return ConfigError(f'override "{override.text}": {text}', key=key or None, file=str(self.path))
        return self._at(line, key or None, text)

    def _at(self, line: int, key: str | None, text: str) -> ConfigError:
        return ConfigError(f"{self.path}:{line}: {text}", key=key, file=str(self.path), line=line)

    def _line_of(self, key: str) -> tuple[int, bool]:
        """The line of the deepest node on the way to *key*, and whether that is *key* itself."""
        node, line = self._root, (self._root.start_mark.line + 1 if self._root is not None else 1)
        for part in _parts(key):
            found: yaml.Node | None = None
            if isinstance(node, yaml.MappingNode):
                for name, value in node.value:
                    if name.value == part:
                        found, line = value, name.start_mark.line + 1
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                found = node.value[part]
                line = found.start_mark.line + 1
            if found is None:
                return line, False
            node = found
        return line, True


def excerpt(error: ConfigError) -> str:
    """The line of the file that *error* is about, with its number; empty where there is none."""
    if error.file is None or error.line is None:
        return ""
    try:
        lines = Path(error.file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return f"{error.line:5} | {lines[error.line - 1][:140]}" if 0 < error.line <= len(lines) else ""


def near(name: str, known: list[str]) -> str:
    """A hint: the name of *known* that was meant, or all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _parts(key: str) -> Parts:
    return [int(p[1:-1]) if p.startswith("[") and p != "[...]" else p for p in re.findall(r"\[[^\]]*\]|[^.\[\]]+", key)]


def _joined(parts: Parts) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".") or "the file"


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else dump(value).removesuffix("\n").removesuffix("\n...")
    if isinstance(value, dict | list):
        text = f"{'a mapping' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(error: msgspec.ValidationError, kind: Any) -> tuple[str, str]:
    """(key, what is wrong with it and what was expected)."""
    text, _, place = str(error).partition(" - at `")
    key = place.rstrip("`").lstrip("$").lstrip(".")
    if place.startswith("key` in"):
        return place.rpartition("`$")[2].rstrip("`").lstrip("."), "all keys must be texts"
    if unknown := re.search(r"unknown field `(.+?)`", text):
        name = unknown[1]
        full = f"{key}.{name}" if key else name
        known = [
            field.encode_name for struct in _structs(_type_at(kind, key)) for field in msgspec.structs.fields(struct)
        ]
        hint = near(name, known)
        elsewhere = [other for other in _all_keys(kind) if other.rpartition(".")[2] == name]
        if "did you mean" not in hint and len(elsewhere) == 1:
            hint = f"did you mean {elsewhere[0]}?"
        return full, f"unknown key; {hint}"
    if missing := re.search(r"missing required field `(.+?)`", text):
        full = f"{key}.{missing[1]}" if key else missing[1]
        expected = _description(_type_at(kind, full))
        return full, "is missing" + (f"; expected {expected}" if expected else "")
    at = _type_at(kind, key)
    if "Invalid enum value" in text:
        options = texts_of(at)
        close = difflib.get_close_matches(text.split("'")[1] if "'" in text else "", options, 1)
        return key, f"expected one of {', '.join(options)}" + (f"; did you mean {close[0]!r}?" if close else "")
    text = text.partition(", got")[0].replace("`", "").replace("object", "mapping").replace("array", "list")
    described = _description(at)
    text += _bounds(at) if "=" not in text else ""
    return key, f"{text[:1].lower()}{text[1:]}" + (f" ({described})" if described else "")


def _type_at(kind: Any, key: str) -> Any:
    """The type that *kind* has at *key*, with its Annotated; None where that cannot be said."""
    for part in _parts(key):
        found: Any = None
        for struct in _structs(kind):
            for field in msgspec.structs.fields(struct):
                if field.encode_name == part:
                    found = field.type
        if found is None:
            items = [get_args(t) for t in _flat(kind) if get_origin(t) in (list, tuple, dict)]
            found = next((args[-1] if args[-1] is not Ellipsis else args[0] for args in items if args), None)
        kind = found
    return kind


def _flat(kind: Any) -> Iterator[Any]:
    """Members of unions, out of their Annotated."""
    if get_origin(kind) is Annotated:
        yield from _flat(get_args(kind)[0])
    elif get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _flat(member)
    else:
        yield kind


def _structs(kind: Any) -> list[type[msgspec.Struct]]:
    return [t for t in _flat(kind) if isinstance(t, type) and issubclass(t, msgspec.Struct)]


def _description(kind: Any) -> str:
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((m.description for m in reversed(metas) if isinstance(m, msgspec.Meta) and m.description), "")


def _bounds(kind: Any) -> str:
    """ " >= 1" of a number that must be."""
    metas = [m for m in get_args(kind)[1:] if isinstance(m, msgspec.Meta)] if get_origin(kind) is Annotated else []
    return "".join(
        f" {sign} {bound}" for m in metas for sign, bound in ((">=", m.ge), (">", m.gt)) if bound is not None
    )


def _all_keys(kind: Any, prefix: str = "") -> Iterator[str]:
    for struct in _structs(kind):
        for field in msgspec.structs.fields(struct):
            yield prefix + field.encode_name
            yield from _all_keys(field.type, f"{prefix}{field.encode_name}.")
