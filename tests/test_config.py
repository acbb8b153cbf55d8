"""Settings from keywords, dicts and YAML; each mistake is told with file, line, key and a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from weightsync.config import SyncConfig, TransportRule, parse_bytes
from weightsync.errors import ConfigError


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "sync.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        ("64", 64),
        ("64B", 64),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1KiB", 1024),
        (" 1.5 MiB ", 3 << 19),
        ("2gb", 2 * 10**9),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_as_written(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text, key="k") == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "1 potato", "-1", "1e9", "0x10", "1MiBs", "1 2", "nan", "0.1"])
def test_what_is_no_size_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^bucket_bytes: ") as caught:
        parse_bytes(text, key="bucket_bytes")
    assert caught.value.key == "bucket_bytes"


def test_the_defaults_stand_and_sizes_become_numbers() -> None:
    config = SyncConfig.load(None)
    assert config == SyncConfig()
    assert (config.staging_limit, config.bucket) == (4 << 30, 8 << 20)
    assert SyncConfig(staging_limit_bytes="1MiB").staging_limit_bytes == 1 << 20


def test_a_config_survives_the_wire() -> None:
    config = SyncConfig(
        transport=(TransportRule(use="broadcast", same_host=False), TransportRule(use="shared_memory")),
        bucket_bytes="1MiB",
        wire_dtype={"*.bias": "float32", "*": "bfloat16"},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=SyncConfig) == config
    assert list(config.wire_dtype) == ["*.bias", "*"]
    assert SyncConfig.load(config) == config


def test_a_file_is_read_in_full(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """\
transport:
  - use: broadcast
    same_host: false
  - use: shared_memory
apply: staged
staging_limit_bytes: 512MiB
wire_dtype: {"*.bias": float32}
""",
    )
    expected = SyncConfig(
        transport=(TransportRule(use="broadcast", same_host=False), TransportRule(use="shared_memory")),
        apply="staged",
        staging_limit_bytes=512 << 20,
        wire_dtype={"*.bias": "float32"},
    )
    assert SyncConfig.load(path) == SyncConfig.load(str(path)) == expected


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert SyncConfig.load(written(tmp_path, "# nothing yet\n")) == SyncConfig()


@pytest.mark.parametrize("key", ["timeout_s", "audit_every", "retries"])
def test_a_keyword_that_is_no_number_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: expected a number, got '60'"):
        SyncConfig(**{key: "60"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "key", "match"),
    [
        ({"timeout": 3}, "timeout", "unknown key; did you mean 'timeout_s'"),
        ({"zzz": 3}, "zzz", "unknown key; known keys: transport, apply, direct_apply"),
        ({"timeout_s": "soon"}, "timeout_s", "expected `float`, got `str`"),
        ({"timeout_s": 0}, "timeout_s", "must be more than 0"),
        ({"timeout_s": float("nan")}, "timeout_s", "must be more than 0"),
        ({"timeout_s": float("inf")}, "timeout_s", "finite"),
        ({"apply": "stagd"}, "apply", "expected one of auto, staged, streaming, got 'stagd'; did you mean 'staged'?"),
        ({"digest": "yes"}, "digest", "expected `bool`"),
        ({"bucket_bytes": "16 cows"}, "bucket_bytes", "'16 cows' is not a size; write for example"),
        ({"bucket_bytes": 0}, "bucket_bytes", "must be more than 0 bytes, is 0"),
        ({"staging_limit_bytes": True}, "staging_limit_bytes", "got `bool`"),
        ({"transport": [{"use": 3}]}, "transport[0].use", "expected `str`"),
        ({"transport": [{"use": "a"}, {"usee": "b"}]}, "transport[1].usee", "did you mean 'use'"),
        ({"transport": [{"zzz": 1, "use": "a"}]}, "transport[0].zzz", "known keys: use, same_host"),
        (
            {"on_commit": ["flush"]},
            "on_commit[0]",
            "expected one of flush_prefix_cache, reset_mm_cache, .*, got 'flush'",
        ),
        ({"wire_dtype": {"*": "bf16"}}, "wire_dtype.*", "'bf16' is no floating-point dtype of torch; write bfloat16"),
        ({"wire_dtype": {"*": "int8"}}, "wire_dtype.*", "'int8' is no floating-point dtype"),
    ],
)
def test_a_mistake_is_told_with_its_key_and_a_hint(data: dict[str, Any], key: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        SyncConfig.load(data)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"{key}: ")


def test_keywords_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="apply: expected one of auto, staged, streaming, got 'stagd'"):
        SyncConfig.load(SyncConfig(apply="stagd"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bucket_bytes"):
        SyncConfig(bucket_bytes="much")
    with pytest.raises(ConfigError, match="timeout_s"):
        SyncConfig(timeout_s=-1)


@pytest.mark.parametrize(
    ("text", "line", "key", "match"),
    [
        ("apply: auto\n\ntimeout: 3\n", 3, "timeout", "did you mean"),
        ("transport:\n  - use: broadcast\n  - same_host: true\n    usee: x\n", 4, "transport[1].usee", "unknown key"),
        ("transport:\n  - use: broadcast\n  - use: 3\n", 3, "transport[1].use", "expected `str`"),
        ("timeout_s: 1\nbucket_bytes: 1 zb\n", 2, "bucket_bytes", "not a size"),
        ("timeout_s: -1\n", 1, "timeout_s", "more than 0"),
        ("- 1\n", 1, None, "expected `object`, got `array`"),
        ("apply: auto\nwire_dtype: {\n", 3, None, "not YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, None, "not YAML"),
        ("--- 1\n--- 2\n", 2, None, "not YAML"),
    ],
)
def test_a_mistake_in_a_file_is_told_with_file_and_line(
    tmp_path: Path, text: str, line: int, key: str | None, match: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=match) as caught:
        SyncConfig.load(path)
    assert (caught.value.file, caught.value.line, caught.value.key) == (str(path), line, key)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: \x01"])
def test_a_file_that_is_no_text_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match="not YAML") as caught:
        SyncConfig.load(path)
    assert caught.value.file == str(path)
    assert "None" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            SyncConfig.load(path)
        assert caught.value.file == str(path)


def test_wire_dtype_is_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"wire_dtype: expected a mapping of name pattern to dtype.*got 'bfloat16'"):
        SyncConfig(wire_dtype="bfloat16")  # type: ignore[arg-type]
