"""Write the three lock files, with the sha256 of every file they may install, and a bill of materials.

    python infra/lock.py lock [--index URL] [--wheels FOLDER]   (`make lock`) pins the installed versions
    python infra/lock.py sbom                                   prints a bill of materials (CycloneDX JSON)

requirements.lock holds what the pipeline needs to run (`make demo`, the image), requirements-dev.lock the additional
packages of tests and linters. pip installs them with `--no-deps --require-hashes`, so nothing else is installed and a
replaced file is rejected. torch has two builds of the same version: PyPI's needs the CUDA packages of infra/cuda.lock
(gigabytes), the CPU build (`--wheels`, or PyTorch's CPU index as `--index`) does not.
"""

import argparse
import hashlib
import html
import itertools
import json
import re
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
LOCK, DEV, CUDA = ROOT / "requirements.lock", ROOT / "requirements-dev.lock", ROOT / "infra" / "cuda.lock"
OURS = {"dpo-pipeline", "pip"}
FILE = re.compile(r'href="([^"]+?)#sha256=([0-9a-f]{64})')
TRIES = 6  # wheels of a version whose metadata is requested
PYTHONS = ("3.11.0", "3.11.14", "3.12.0", "3.13.0")
PLATFORMS = (("Linux", "linux", "x86_64"), ("Linux", "linux", "aarch64"), ("Darwin", "darwin", "arm64"))
Files = dict[str, tuple[str, str]]  # by file name: sha256 and address
Pins = dict[str, tuple[str, str]]  # by name: version, and for which environments (a marker, or nothing)


def environments() -> Iterator[dict[str, Any]]:
    for full, (system, platform, machine) in itertools.product(PYTHONS, PLATFORMS):
        python = {"python_full_version": full, "python_version": full.rpartition(".")[0]}
        host = {"platform_system": system, "sys_platform": platform, "platform_machine": machine}
        yield {**default_environment(), **python, **host}


class Index:
    """The files of a package, by version, with their hashes; the first index that has a version answers for it."""

    def __init__(self, addresses: list[str], wheels: list[Path]) -> None:
        self.addresses, self.wheels = addresses, wheels
        self.known: dict[str, dict[Version, Files]] = {}
        self.metadata: dict[tuple[str, str], list[str] | None] = {}

    def files(self, name: str) -> dict[Version, Files]:
        if name not in self.known:
            self.known[name] = {}
            for address in reversed(self.addresses):
                self.known[name] |= _listed_files(f"{address.rstrip('/')}/{name}/")
        return self.known[name]

    def hashes(self, name: str, version: str) -> list[str]:
        """Files of this version, including local builds such as torch's +cpu."""
        wanted = Version(version)
        matches = [files for built, files in self.files(name).items() if Version(built.public) == wanted]
        digests = {digest for files in matches for digest, _ in files.values()}
        for folder in self.wheels:
            for path in folder.glob("*.whl"):
                kind, built, *_ = parse_wheel_filename(path.name)
                if kind == name and Version(built.public) == wanted:
                    digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
        if not digests:
            sys.exit(f"error: no index has {name}=={version}. Name one that does: --index URL.")
        return sorted(digests)

    def requires(self, name: str, version: str) -> list[str] | None:
        """From the metadata of one of the first wheels; None if the index serves none."""
        if (name, version) not in self.metadata:
            self.metadata[name, version] = None
            files = self.files(name)[Version(version)]
            wheels = [url for file, (_, url) in sorted(files.items()) if re.search("linux|any.whl$", file)]
            for wheel in wheels[:TRIES]:
                with suppress(urllib.error.URLError):
                    self.metadata[name, version] = re.findall(
                        r"^Requires-Dist: (.+)$", _read(f"{wheel}.metadata"), re.M
                    )
                    break
        return self.metadata[name, version]


def _listed_files(page: str) -> dict[Version, Files]:
    """The files on a package's page of an index; none if the index does not have the package."""
    files: dict[Version, Files] = {}
    with suppress(urllib.error.URLError, IsADirectoryError):
        for link, digest in FILE.findall(_read(page)):
            url = urljoin(page, html.unescape(link))
            file = unquote(url.rpartition("/")[2])
            if version := _version(file):
                files.setdefault(version, {})[file] = (digest, url)
    return files


def _read(address: str) -> str:
    local = address + "index.html" if address.startswith("file:") and address.endswith("/") else address
    with urllib.request.urlopen(local, timeout=60) as answer:
        return str(answer.read().decode())


def _version(file: str) -> Version | None:
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (ValueError, InvalidVersion):
        return None


def installed() -> dict[str, tuple[str, list[str]]]:
    """Version and requirements of each installed package, by name."""
    packages = {canonicalize_name(package.metadata["Name"]): package for package in distributions()}
    return {
        name: (Version(package.version).public, list(package.requires or []))
        for name, package in packages.items()
        if name not in OURS
    }


def elsewhere(here: dict[str, tuple[str, list[str]]], index: Index) -> Pins:
    """Additional packages on other platforms and Python versions, each in the newest version that fits."""
    missing: dict[str, list[Requirement]] = {}
    for _, requirements in here.values():
        for requirement in map(Requirement, requirements):
            name = canonicalize_name(requirement.name)
            if name not in here and any(_applies(requirement, where) for where in environments()):
                missing.setdefault(name, []).append(requirement)
    pins: Pins = {}
    for name, wanted in missing.items():
        markers = sorted({str(requirement.marker) for requirement in wanted})
        pins[name] = newest(index, name, wanted), " or ".join(markers)
    return pins


def needed_to_run(here: dict[str, tuple[str, list[str]]]) -> set[str]:
    """Names of the packages that pyproject.toml requires outside its dependency groups, with their dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [*project["dependencies"], *project["optional-dependencies"]["production"]]
    todo, extras = list(map(Requirement, direct)), dict[str, set[str]]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in extras and requirement.extras <= extras[name]:
            continue
        extras.setdefault(name, set()).update(requirement.extras)
        below = map(Requirement, here[name][1] if name in here else [])
        todo += [more for more in below if any(_applies(more, where, extras[name]) for where in environments())]
    return set(extras)


def _applies(requirement: Requirement, where: dict[str, Any], extras: Iterable[str] = ()) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**where, "extra": extra}) for extra in ("", *extras))


def newest(index: Index, name: str, wanted: list[Requirement]) -> str:
    releases = [version for version in index.files(name) if not version.local]
    fits = [version for version in releases if all(part.specifier.contains(version) for part in wanted)]
    if not fits:
        names = ", ".join(map(str, wanted))
        sys.exit(f"error: no version of {name} suits {names}. Name an index with one: --index URL.")
    return str(max(fits))


def newest_known(index: Index, name: str, wanted: list[Requirement]) -> str:
    """The newest version whose metadata can be read: an index may list files that it does not serve."""
    best = newest(index, name, wanted)
    while index.requires(name, best) is None:
        best = newest(index, name, [*wanted, Requirement(f"{name}<{best}")])
    return best


def cuda(here: dict[str, tuple[str, list[str]]], index: Index) -> Pins:
    """Packages that PyPI's torch needs on Linux and that are not installed here, resolved in rounds."""
    linux = next(environments())
    if index.requires("torch", here["torch"][0]) is None:
        sys.exit(f"error: no index has the metadata of torch=={here['torch'][0]}. Name one that does: --index URL.")
    pins: dict[str, str] = {}
    extras: dict[str, set[str]] = {}
    while True:
        missing: dict[str, list[Requirement]] = {}
        for name, version in [("torch", here["torch"][0]), *pins.items()]:
            for requirement in map(Requirement, index.requires(name, version) or []):
                required = canonicalize_name(requirement.name)
                if required not in here and _applies(requirement, linux, extras.get(name, ())):
                    missing.setdefault(required, []).append(requirement)
        before, pins = pins, {name: newest_known(index, name, wanted) for name, wanted in missing.items()}
        extras = {name: set().union(*(part.extras for part in wanted)) for name, wanted in missing.items()}
        if pins == before:
            return {name: (version, "") for name, version in pins.items()}


def write(path: Path, pins: Pins, index: Index, head: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(index.files, pins))
    lines = [head]
    for name, (version, marker) in sorted(pins.items()):
        start = f"{name}=={version}" + (f" ; {marker}" if marker else "")
        lines.append(" \\\n    ".join([start, *(f"--hash=sha256:{digest}" for digest in index.hashes(name, version))]))
    path.write_text("\n".join(lines) + "\n")
    print(f"{path.relative_to(ROOT)}: {len(pins)} packages")


def lock(addresses: list[str], wheels: list[Path]) -> None:
    index, here = Index(addresses, wheels), installed()
    pins: Pins = {name: (version, "") for name, (version, _) in here.items()}
    pins, run = {**pins, **elsewhere(here, index)}, needed_to_run(here)
    head = "# Made by `make lock`. pip installs it with --no-deps --require-hashes: all that is needed is here."
    write(LOCK, {name: pin for name, pin in pins.items() if name in run}, index, head)
    head = "# Made by `make lock`: what tests and linters need beyond requirements.lock."
    write(DEV, {name: pin for name, pin in pins.items() if name not in run}, index, head)
    head = (
        "# Made by `make lock`: what torch of PyPI needs on Linux beyond requirements.lock. The CPU build needs none."
    )
    write(CUDA, cuda(here, index), index, head)


def read(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Name, version and hashes of each package in a lock."""
    for entry in re.split(r"\n(?=\S)", path.read_text()):
        if match := re.match(r"([A-Za-z0-9._-]+)==(\S+)", entry):
            yield match[1], match[2], re.findall(r"sha256:([0-9a-f]{64})", entry)


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
    parser.add_argument("--index", action="append", default=[], help="besides PyPI; several are searched in order")
    parser.add_argument("--wheels", action="append", type=Path, default=[], help="a folder of wheels")
    arguments = parser.parse_args()
    if arguments.what == "sbom":
        print(sbom())
    else:
        lock(["https://pypi.org/simple", *arguments.index], arguments.wheels)


if __name__ == "__main__":
    main()
