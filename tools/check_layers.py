"""Checks that dependencies point one way: each folder of polybridge imports only what its row allows.

    python tools/check_layers.py [ROOT]

Prints `file:line: what is wrong` for each violation, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path

CARRIERS = frozenset({"numpy", "ml_dtypes"})
CORE = frozenset({"polybridge.core"})
API = CORE | {"polybridge"}  # "polybridge" is its public names, and none of its submodules
LAZY = frozenset(f"polybridge.{name}" for name in ("compat", "keras", "observe", "testing", "tf1"))
FRAMEWORKS = frozenset({"torch", "tensorflow", "keras", "jax"})


@dataclass(frozen=True)
class Row:
    """The roots that a folder may import, beside the standard library and the carriers.

    Args:
        anywhere: roots that may be imported at the top of a file.
        lazily: roots that may be imported inside functions or under TYPE_CHECKING only.
    """

    anywhere: frozenset[str] = frozenset()
    lazily: frozenset[str] = frozenset()


def backend_rows(name: str, *frameworks: str) -> dict[str, Row]:
    """Return the rows of one backend: its files, and its plugin, which starts no framework."""
    own = frozenset({f"polybridge.backends.{name}", *frameworks})
    return {f"backends/{name}": Row(CORE | own), f"backends/{name}/__init__.py": Row(CORE, own)}


TABLE: dict[str, Row] = {
    "__init__.py": Row(CORE, LAZY),
    "core": Row(CORE | {"optree", "pluggy"}),
    "backends/__init__.py": Row(),
    **backend_rows("torch", "torch"),
    **backend_rows("tensorflow", "tensorflow", "keras"),
    **backend_rows("keras", "keras", "tensorflow", "polybridge.backends.tensorflow"),  # its tensors are TensorFlow's
    **backend_rows("jax", "jax"),
    **backend_rows("flax", "flax", "jax"),
    **backend_rows("equinox", "equinox", "jax"),
    **backend_rows("numpy"),
    "keras.py": Row(API),
    "tf1.py": Row(API | {"tensorflow"}),
    "compat": Row(API | {"polybridge.compat"}, FRAMEWORKS),
    "compat/tfpyth.py": Row(API | {"polybridge.compat", "polybridge.tf1", "tensorflow", "torch"}),
    "testing": Row(API | {"polybridge.testing", "pytest", "hypothesis"}, FRAMEWORKS),
    "observe": Row(API | {"polybridge.observe"}, frozenset({"matplotlib"})),
    "cli.py": Row(API | {"polybridge.observe", "click", "rich"}),
}
SUBMODULES = frozenset(key.partition("/")[0].removesuffix(".py") for key in TABLE)


@dataclass(frozen=True)
class Import:
    """One imported name, with where it stands and whether importing the file runs it."""

    target: str
    line: int
    lazy: bool


def main(root: Path) -> int:
    """Print every violation under `root`, and return the exit status."""
    files = sorted((root / "polybridge").rglob("*.py"))
    found = [violation for file in files for violation in violations(file, root)]
    print(*found, f"layers: {len(files)} files, {len(found)} violations", sep="\n")
    return 1 if found or not files else 0


def violations(file: Path, root: Path) -> Iterator[str]:
    """Yield `file:line: message` for each import of `file` that its row does not allow."""
    place = file.relative_to(root)
    row = row_of(file.relative_to(root / "polybridge"))
    if row is None:
        yield f"{place}:1: no row of the table in tools/check_layers.py covers this file"
        return
    package = ".".join(place.with_suffix("").parts[:-1])
    for found in imports(ast.parse(file.read_text("utf-8")), package):
        if not allowed(found, row):
            only = " outside a function" if covers(row.lazily, found.target) else ""
            yield f"{place}:{found.line}: may not import {found.target}{only}"


def row_of(path: Path) -> Row | None:
    """Return the row with the longest key that is `path` or a folder above it."""
    keys = [path.as_posix(), *(folder.as_posix() for folder in path.parents)]
    return next((TABLE[key] for key in keys if key in TABLE), None)


def imports(node: ast.AST, package: str, lazy: bool = False) -> Iterator[Import]:
    """Yield every import under `node`, `importlib.import_module("literal")` included."""
    match node:
        case ast.Import(names=names):
            yield from (Import(alias.name, node.lineno, lazy) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = resolve_name("." * level + (module or ""), package)
            yield from (Import(f"{base}.{alias.name}", node.lineno, lazy) for alias in names)
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(target)), *_],
        ):
            yield Import(target, node.lineno, lazy)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            lazy = True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            lazy = True
    for child in ast.iter_child_nodes(node):
        yield from imports(child, package, lazy)


def allowed(found: Import, row: Row) -> bool:
    """Tell whether the standard library, a carrier or the row allows this import where it stands."""
    if found.target.partition(".")[0] in sys.stdlib_module_names | CARRIERS:
        return True
    return covers(row.anywhere | row.lazily if found.lazy else row.anywhere, found.target)


def covers(roots: frozenset[str], target: str) -> bool:
    """Tell whether `target` is one of `roots` or lies below one; a public name counts as "polybridge"."""
    head, _, rest = target.partition(".")
    if head == "polybridge" and rest.partition(".")[0] not in SUBMODULES:
        target = "polybridge"
    return target in roots or any(target.startswith(f"{root}.") for root in roots - {"polybridge"})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent))
