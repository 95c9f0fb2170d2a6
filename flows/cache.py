"""Find damaged objects of DVC's cache, --fix removes them: `python -m flows.cache [--fix]` (`make check-cache`).

An object is damaged when its content is not what its name says. DVC checks protected objects out without reading them.
A damaged one comes back as often as a workspace file is deleted, since DVC does not write an object that is there
already: it must be removed from the cache.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

from flows.workspace import cache_folder
from tasks.output import as_command


def damaged(cache: Path) -> list[Path]:
    objects = sorted((cache / "files" / "md5").glob("??/*"))
    return [path for path in objects if (name := _name(path)) and _md5(path) != name]


def _name(path: Path) -> str | None:
    """The hash that an object is named by; None for a file that is no object."""
    name = f"{path.parent.name}{path.name}".removesuffix(".dir")
    return name if re.fullmatch("[0-9a-f]{32}", name) else None


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


@as_command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.cache", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fix", action="store_true", help="remove damaged objects")
    asked = parser.parse_args()
    found = damaged(Path(cache_folder()))
    for path in found:
        if asked.fix:
            path.unlink()
        print(f"{'removed' if asked.fix else 'damaged'}  {path}")
    if found and not asked.fix:
        sys.exit("error: these objects are not what their names say. `make check-cache FIX=1` removes them.")
    print("No damaged object is left in DVC's cache." if found else "Every object of DVC's cache is as its name says.")


if __name__ == "__main__":
    main()
