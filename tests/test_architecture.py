"""The rules that keep the code in shape, checked on its syntax trees: import arrows, sizes, signatures, presets."""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "aspire"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FILE_LINES = 300
MAX_BODY_LINES = 60

# Who may import whom inside the package, by first name below `aspire`; every part may import itself.
VALUES = {"request", "stats", "outputs", "totals", "engine_stats", "progress", "samples", "positions"}
ENGINE_PARTS = {"schedule", "speculation", "runtime", "parallel", "model", "attention", "ops", "sampling", "text",
                "config", "loop", "pricing"}
ENGINE = VALUES | ENGINE_PARTS | {"engine", "build", "llm"}
ARROWS = {
    "request": set(),
    "samples": set(),
    "progress": set(),
    "totals": {"request", "schedule", "engine_stats", "stats"},
    "engine_stats": {"request"},
    "outputs": {"request", "text"},
    "stats": {"schedule"},
    "positions": {"stats"},
    "speculation": set(),
    "schedule": {"request", "speculation"},
    "simulate": {"request", "speculation", "schedule"},
    "loop": {"request", "schedule"},
    "pricing": {"schedule", "speculation"},
    "plots": {"stats", "positions", "simulate"},
    "ops": {"attention"},  # the values of attention/rows.py only, see wrong_arrows
    "attention": {"ops"},
    "parallel": {"request", "schedule"},
    "model": {"parallel", "ops"},
    "text": {"request"},
    "sampling": {"request", "schedule", "ops"},
    "runtime": {"request", "schedule", "speculation", "model", "attention", "ops", "sampling", "parallel"},
    "config": {"request", "speculation"},
    "engine": VALUES | ENGINE_PARTS,
    "build": VALUES | ENGINE_PARTS | {"engine"},
    "llm": VALUES | ENGINE_PARTS | {"engine", "build"},
    "async_engine": VALUES | {"config", "engine", "llm"},
    "calibrate": ENGINE | {"simulate", "bench"},
    "bench": ENGINE | {"simulate", "calibrate", "testing", "plots"},
    "testing": ENGINE | {"async_engine"},
    "server": VALUES | {"config", "engine", "llm", "async_engine", "text", "schedule", "speculation", "model"},
    "cli": ENGINE | {"async_engine", "server", "bench", "calibrate", "plots", "simulate"},
}

# Optional or heavy packages, and the only places that import them.
ONE_PLACE = {
    "starlette": "server/",
    "uvicorn": "server/",
    "ray": "parallel/ray.py",
    "flashinfer": "attention/flashinfer.py",
    "matplotlib": "plots/",
    "typer": "cli/",
    "xgrammar": "sampling/",
    "gguf": "model/",
}


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(node: ast.AST) -> Iterator[str]:
    """Dotted names imported anywhere in a tree at run time (imports for the type checker do not count)."""
    if is_type_checking(node):
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imported_names(child)


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_arrows(part: str, names: Iterator[str]) -> list[str]:
    """The imports that a part of the package may not make."""
    wrong = []
    for name in names:
        if not name.startswith("aspire."):
            continue
        target = name.split(".")[1]
        allowed = target == part or target in ARROWS[part]
        if part == "ops" and target == "attention":
            allowed = name.startswith("aspire.attention.rows")
        if not allowed:
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("path", [f for f in FILES if f != PACKAGE / "__init__.py"], ids=relative)
def test_import_arrows(path: Path) -> None:
    """Planted fault: `import aspire.engine` in schedule/blocks.py."""
    assert part_of(path) in ARROWS, "a part without arrows: add it to ARROWS and docs/architecture.md"
    assert wrong_arrows(part_of(path), imported_names(parse(path))) == []


def test_the_arrow_check_sees_upward_imports() -> None:
    """The check itself: an import inside a function counts, one for the type checker does not."""
    tree = ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import aspire.llm\n"
                     "def f():\n    from aspire.engine import Engine\n    import aspire.request\n")
    assert wrong_arrows("schedule", imported_names(tree)) == ["aspire.engine.Engine"]


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_optional_packages_are_imported_in_one_place(path: Path) -> None:
    """Planted fault: `import matplotlib` in stats.py."""
    for name in imported_names(parse(path)):
        home = ONE_PLACE.get(name.split(".")[0])
        assert home is None or relative(path).startswith(home), f"{name} is imported outside {home}"


@pytest.mark.parametrize("module", ["aspire", "aspire.request", "aspire.schedule.plan", "aspire.schedule.blocks",
                                    "aspire.schedule.scheduler", "aspire.speculation.policy", "aspire.stats",
                                    "aspire.cli.main"])
def test_light_parts_import_without_torch(module: str) -> None:
    """Planted fault: `import torch` in speculation/cost.py."""
    code = (f"import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['transformers'] = None; "
            f"import {module}")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                            env={"PYTHONPATH": str(PACKAGE.parent)})
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("path", [f for f in FILES if part_of(f) in ("schedule", "speculation", "request", "stats")],
                         ids=relative)
def test_pure_parts_import_the_standard_library_only(path: Path) -> None:
    """Planted fault: `import numpy` in speculation/acceptance.py."""
    foreign = {name.split(".")[0] for name in imported_names(parse(path))} - sys.stdlib_module_names - {"aspire"}
    assert foreign == set()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_have_a_docstring_and_a_size(path: Path) -> None:
    """Planted fault: 301 lines without a reason. A docstring gives its reason in a sentence with "long because"."""
    text = path.read_text(encoding="utf-8")
    docstring = ast.get_docstring(parse(path)) or ""
    if text.strip() and path.name != "__init__.py":
        assert docstring, "a file says in its docstring what it is for"
    assert len(text.splitlines()) <= MAX_FILE_LINES or "long because" in docstring.lower(), (
        f'{len(text.splitlines())} lines need a reason in the docstring ("Long because ..."), or a split')


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_functions_are_small(path: Path) -> None:
    """Planted fault: a body of 61 lines. Kernels are exempt: Triton inlines everything anyway."""
    for function in functions(parse(path)):
        first = function.body[1] if ast.get_docstring(function) and len(function.body) > 1 else function.body[0]
        length = (function.end_lineno or 0) - first.lineno + 1
        assert is_kernel(function) or length <= MAX_BODY_LINES, f"{function.name}: body of {length} lines"


MUTABLE_CALLS = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "bytearray"}


def mutable_globals(tree: ast.Module) -> list[str]:
    """Names of module-level mutable objects that are not constants, and of constants that functions change."""
    found, constants = [], set()
    for node in tree.body:
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or value is None:
            continue
        is_mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp) or (
            isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if is_mutable:
            constants.update(name for name in names if name.isupper())
            found += [name for name in names if not name.isupper() and name != "__all__"]
    for function in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found += node.names
            changed = _changed_name(node)
            if changed in constants:
                found.append(changed)
    return found


def _changed_name(node: ast.AST) -> str | None:
    """The name that a statement or call changes in place, if it is a plain name."""
    if (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
            and isinstance(node.value, ast.Name)):
        return node.value.id
    if (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
            and node.func.attr in {"append", "extend", "insert", "pop", "update", "setdefault", "clear", "add"}):
        return node.func.value.id
    return None


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_module_level_mutable_state(path: Path) -> None:
    """Planted fault: `_cache = {}` at the top of a module."""
    assert mutable_globals(parse(path)) == []


def test_the_state_check_sees_what_it_should() -> None:
    tree = ast.parse("seen = {}\nTABLE = {1: 2}\nQUEUE: list[int] = list()\n"
                     "def f():\n    global count\n    QUEUE.append(1)\n    local = []\n    local.append(TABLE[1])\n")
    assert mutable_globals(tree) == ["seen", "count", "QUEUE"]


OPERATORS = sorted(p for p in (PACKAGE / "ops").iterdir() if p.is_dir() and p.name[0] not in "_.")


def signature(path: Path, name: str) -> str:
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return f"{ast.unparse(node.args)} -> {ast.unparse(node.returns) if node.returns else None}"
    raise AssertionError(f"{relative(path)} must define {name}()")


@pytest.mark.parametrize("folder", OPERATORS, ids=lambda p: p.name)
def test_operators_have_a_reference_and_a_kernel_with_one_signature(folder: Path) -> None:
    """Planted fault: a keyword added to store_kv in triton.py alone."""
    assert (folder / "reference.py").exists()
    assert (folder / "triton.py").exists()
    assert signature(folder / "reference.py", folder.name) == signature(folder / "triton.py", folder.name)


def test_every_preset_is_tested_for_equality_or_declared_lossy() -> None:
    """Planted fault: a preset left out of tests/test_lossless.py."""
    from aspire.speculation.policy import PRESET_NAMES, PRESETS

    text = (ROOT / "tests" / "test_lossless.py").read_text(encoding="utf-8")
    assert [name for name in PRESET_NAMES if PRESETS[name].lossless and f'"{name}"' not in text] == []
