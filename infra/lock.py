"""Write the three lock files, with the sha256 of every file they may install, and a bill of materials.

    python infra/lock.py lock [--upgrade] [--wheels FOLDER] [--index URL]   (`make lock`) pins what pyproject.toml needs
    python infra/lock.py sbom                                  prints a bill of materials (CycloneDX JSON)

requirements.lock holds what the pipeline needs to run (`make demo`, the image), requirements-dev.lock the additional
packages of tests and linters. pip installs them with `--no-deps --require-hashes`, so nothing else is installed and a
replaced file is rejected. uv resolves them, for every platform and Python version at once.

torch has two builds of the same version: PyPI's needs the CUDA packages of infra/cuda.lock (gigabytes), the CPU build
does not. uv knows a version from one index only, so the hashes of the CPU build are added to those of PyPI's: of the
files in `--wheels`, or of PyTorch's CPU index as `--index`. They stay while torch keeps its version.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LOCK, DEV, CUDA = ROOT / "requirements.lock", ROOT / "requirements-dev.lock", ROOT / "infra" / "cuda.lock"
UV = (sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--universal")
OLDEST_PYTHON = "3.11"
ONLY_OF_CUDA = re.compile(r"(cuda|nvidia)-.*|triton")
HASH = re.compile(r"sha256:([0-9a-f]{64})")


def resolve(pins: str, *options: str) -> str:
    """What pyproject.toml needs. uv keeps the versions and hashes of `pins` that still fit."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "lock.txt"
        file.write_text(pins)
        command = [*UV, "pyproject.toml", "--extra", "production", "--generate-hashes", "--output-file", str(file)]
        subprocess.run([*command, "--python-version", OLDEST_PYTHON, *options], cwd=ROOT, check=True)
        return file.read_text()


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and text of each package in a lock."""
    for entry in re.split(r"\n(?=\S)", text.strip()):
        if match := re.match(r"([A-Za-z0-9._-]+)==([^\s;]+)", entry):
            yield match[1], match[2], entry


def read(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Name, version and hashes of each package in a lock."""
    for name, version, entry in entries(path.read_text()):
        yield name, version, HASH.findall(entry)


def cpu_hashes(version: str, wheels: Path | None, index: str | None) -> set[str]:
    """Of the CPU build of torch."""
    files = wheels.glob(f"torch-{version}+cpu-*.whl") if wheels else ()
    hashes = {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    if index:
        command = [*UV, "-", "--no-deps", "--generate-hashes", "--default-index", index]
        wanted = f"torch=={version}"
        hashes |= set(
            HASH.findall(subprocess.run(command, input=wanted, stdout=subprocess.PIPE, text=True, check=True).stdout)
        )
    return hashes


def add_hashes(entry: str, hashes: set[str]) -> str:
    new = sorted(hashes - set(HASH.findall(entry)))
    return " \\\n".join([entry, *(f"    --hash=sha256:{digest}" for digest in new)])


def lock(upgrade: bool, wheels: Path | None, index: str | None) -> None:
    pins = "" if upgrade else "\n".join(path.read_text() for path in (LOCK, DEV, CUDA))
    everything = resolve(pins, "--group", "dev", "--group", "infra")
    to_run = {name for name, _, _ in entries(resolve(everything))}
    texts: dict[Path, list[str]] = {LOCK: [], DEV: [], CUDA: []}
    for name, version, entry in entries(everything):
        if name == "torch":
            entry = add_hashes(entry, cpu_hashes(version, wheels, index))
        texts[CUDA if ONLY_OF_CUDA.fullmatch(name) else LOCK if name in to_run else DEV].append(entry)
    heads = {
        LOCK: "pip installs it with --no-deps --require-hashes: all that is needed is here.",
        DEV: "what tests and linters need beyond requirements.lock.",
        CUDA: "what torch of PyPI needs on Linux beyond requirements.lock. The CPU build needs none.",
    }
    for path, text in texts.items():
        path.write_text("\n".join([f"# Made by `make lock`: {heads[path]}", *text]) + "\n")
        print(f"{path.relative_to(ROOT)}: {len(text)} packages")


def sbom() -> str:
    """CycloneDX without timestamp and serial number: the same locks give the same file."""
    parts = [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}", "scope": scope}
        for path, scope in ((LOCK, "required"), (CUDA, "optional"))
        for name, version, _ in read(path)
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    subject = {"type": "application", "name": project["name"], "version": project["version"]}
    content = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": {"component": subject}}
    return json.dumps({**content, "components": parts}, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["lock", "sbom"])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of torch's CPU build")
    parser.add_argument("--index", help="an index of torch's CPU build: https://download.pytorch.org/whl/cpu")
    arguments = parser.parse_args()
    if arguments.what == "sbom":
        print(sbom())
    else:
        lock(arguments.upgrade, arguments.wheels, arguments.index)


if __name__ == "__main__":
    main()
