"""What holds for the project as a whole: imports, sizes, forbidden things, identity, and pages that follow the code."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("adapter", "fusers")
SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]

# A module may import those of its own rank and below. What is not named stands beside verify and auto.
RANKS = {
    "fusers": 0, "adapter.errors": 1, "adapter._identity": 0, "adapter.backends.call": 1,
    "adapter.backends.capability": 1, "adapter.kernels": 2, "adapter.backends": 3, "adapter.attention": 4,
    "adapter.translate": 4, "adapter.guard": 4, "adapter.masks": 4, "adapter.mask_functions": 4, "adapter.interface": 4,
    "adapter.checkpoint": 4, "adapter.shards": 4, "adapter.pipeline": 4,
    "adapter.report": 5, "adapter.recording": 5, "adapter.adapt": 6, "adapter.auto": 7, "adapter.verify": 7,
    "adapter.cli": 9,
}  # fmt: skip
DEFAULT_RANK, FACADE_RANK = 7, 8


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    """Absolute names of the project's modules that a file imports, at the top or in a function; not for types only."""
    tree = tree_of(path)
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = list(path.relative_to(ROOT).parent.parts)
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found |= {stem if is_attribute(stem, a.name) else f"{stem}.{a.name}" for a in node.names}
    return {name for name in found if name.partition(".")[0] in PACKAGES}


def is_attribute(stem: str, name: str) -> bool:
    base = ROOT.joinpath(*stem.split("."))
    return not (base / f"{name}.py").is_file() and not (base / name).is_dir()


def rank(module: str) -> int:
    if module == "adapter":
        return FACADE_RANK
    parts = module.split(".")
    prefixes = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((RANKS[p] for p in prefixes if p in RANKS), DEFAULT_RANK)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_imports_point_downwards(path: Path) -> None:
    name = module_name(path)
    upwards = [f"{name} imports {found}" for found in imports_of(path) if rank(found) > rank(name)]
    assert not upwards


def test_fusers_never_import_the_adapter() -> None:
    for path in SOURCES:
        if module_name(path).startswith("fusers"):
            assert not [n for n in imports_of(path) if n.startswith("adapter")], path


def test_backends_never_import_each_other() -> None:
    from adapter.backends import registry

    own = {f"adapter.backends.{name}" for name in registry.names()}
    reached = {module_name(p): imports_of(p) for p in SOURCES if module_name(p).startswith("adapter.backends.")}
    for backend in own & reached.keys():
        # contract and proof hold every backend against reference and eager; a backend itself reaches neither
        seen, todo = {backend}, [backend]
        while todo:
            for name in reached.get(todo.pop(), set()) - seen:
                seen.add(name)
                todo.append(name)
        assert not (seen & own) - {backend}, f"{backend} reaches {sorted((seen & own) - {backend})}"


def test_files_are_short() -> None:
    lengths = {module_name(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lengths.items() if n > 400} == {}
    assert statistics.median(lengths.values()) < 120


def test_functions_are_short() -> None:
    lengths = {
        f"{module_name(path)}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in SOURCES
        if "kernels" not in path.parts
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    ordered = sorted(lengths.values())
    assert statistics.median(ordered) <= 10
    assert ordered[int(0.95 * len(ordered))] <= 45


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_nothing_is_executed_from_text(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("exec", "eval", "compile", "__import__"), f"{path}:{node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "builtins":
            assert not {a.name for a in node.names} & {"exec", "eval", "compile"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_no_exception_is_swallowed(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            only_passes = all(isinstance(s, ast.Pass) for s in node.body)
            assert not (broad and only_passes), f"{path}:{node.lineno}"


# Words that are model types of transformers and mean something else here.
ORDINARY = {"align", "encoder-decoder"}


def test_no_model_is_named() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    names = {n for n in CONFIG_MAPPING_NAMES if len(n) > 3 and n not in ORDINARY}
    names |= {n.replace("_", "") for n in names} | {"flintattention", "gptoss", "gpt-oss"}
    for path in SOURCES:
        words = {w.lower() for w in re.findall(r"[A-Za-z][A-Za-z0-9_\-]+", path.read_text())}
        assert not words & names, f"{path} names {sorted(words & names)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


def test_json_and_markers_are_installed_with_the_packages() -> None:
    config = (ROOT / "pyproject.toml").read_text()
    assert '"cli/*.json"' in config
    assert config.count('"py.typed"') == len(PACKAGES)


def run(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with `path` before the project on sys.path."""
    setup = f"import sys; sys.path[:0] = [{str(path)!r}, {str(ROOT)!r}]\n"
    command = [sys.executable, "-I", "-c", setup + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("form", ["package", "module", "folder"])
def test_foreign_adapter_is_named_with_remedies(tmp_path: Path, form: str) -> None:
    foreign = tmp_path / "adapter.py" if form == "module" else tmp_path / "adapter" / "__init__.py"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("cli = None\n")
    code = "import sinkhold; sinkhold.main()"
    if form == "folder":
        # A folder without __init__.py loses to a package; it is in the way only where the project is not on the path.
        foreign.unlink()
        code = f"sys.path.remove({str(ROOT)!r}); import importlib.util as u\n" + (
            f"s = u.spec_from_file_location('sinkhold', {str(ROOT / 'sinkhold.py')!r})\n"
            "m = u.module_from_spec(s); s.loader.exec_module(m); m.main()"
        )
    done = run(code, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: sinkhold needs its own package 'adapter'")
    assert str(foreign if form != "folder" else foreign.parent) in last
    assert "Rename or move what is in the way" in last
    assert "pip uninstall NAME" in last


def test_foreign_fusers_is_named_with_remedies(tmp_path: Path) -> None:
    (tmp_path / "fusers").mkdir()
    (tmp_path / "fusers" / "__init__.py").touch()
    done = run("import adapter", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: sinkhold needs its own package 'fusers' in {ROOT / 'fusers'}")
    assert str(tmp_path / "fusers" / "__init__.py") in last
    assert "rename or move it" in last


OPTIONAL = ("flash_attn", "flashinfer", "kernels", "triattention", "peft", "matplotlib")


def test_optional_packages_are_not_imported_eagerly() -> None:
    # transformers requires and imports kernels since 5.25.
    needed = {Requirement(r).name for r in metadata.requires("transformers") or [] if "extra ==" not in r}
    optional = [name for name in OPTIONAL if name not in needed]
    done = run(f"import adapter, adapter.verify; print([m for m in {optional!r} if m in sys.modules])", ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_error_codes_are_documented_and_not_double(tables: ModuleType) -> None:
    classes = tables.error_classes()
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes), "two classes share a code"
    assert all(re.fullmatch(r"SINK-[1-7]\d\d", code) for code in codes)
    assert all(cls.__doc__ for cls in classes)
    page = (ROOT / "docs" / "errors.md").read_text()
    assert re.findall(r"^\| (SINK-\d{3}) \|", page, re.MULTILINE) == codes
    assert [cls.__name__ for cls in classes] == re.findall(r"^\| SINK-\d{3} \| `(\w+)`", page, re.MULTILINE)


def test_tables_say_what_the_code_says(tables: ModuleType) -> None:
    assert_current("errors", tables.TABLES["errors"](), tables.PAGES)


def test_the_backends_table_says_what_the_code_says(tables: ModuleType) -> None:
    # Kernels that are interpreted, as here, also run on the CPU; the table is about an ordinary process.
    code = "import sys; sys.path.insert(0, 'docs'); import tables; sys.stdout.write(tables.TABLES['backends']())"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_current("backends", done.stdout, tables.PAGES)


@pytest.mark.parametrize("name", ["families", "report"])
def test_tables_of_models_say_what_the_code_says(tables: ModuleType, name: str) -> None:
    if f"transformers {transformers.__version__}." not in (ROOT / "README.md").read_text():
        pytest.skip("the tables were made with another transformers")
    if name == "report" and torch.cuda.is_available():
        pytest.skip("the report was made on a CPU")
    assert_current(name, tables.TABLES[name](), tables.PAGES)


def assert_current(name: str, expected: str, pages: Iterable[str]) -> None:
    shown = 0
    for page in pages:
        found = re.findall(rf"<!-- table {name} -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL)
        assert found == [expected] * len(found), f"{page} is out of date: run python docs/tables.py"
        shown += len(found)
    assert shown


def test_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```bash([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks[:2] == [
        (" {.run}", "pip install . && sinkhold demo\n"),
        (" {.test}", 'pip install -e ".[test]" && pytest\n'),
    ]
    assert text.index("```python") > text.index("{.test}")


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not re.match(r"https?:", target):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_contributing_maps_every_module() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {p.relative_to(ROOT).parts[1] for p in SOURCES} - {"__init__.py"}
    assert not [room for room in rooms if f"`{room}" not in text]
