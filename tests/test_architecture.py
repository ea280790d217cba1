"""The shape of the project: which package may import which, what start-up loads, how long files
are, what they must not mention. Reads the sources and imports none of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = 350
SOURCES = sorted(
    path
    for top in ("seqmoe_cli", "kernels", "weights", "tests", "tools", "benchmarks")
    for path in (ROOT / top).rglob("*.py")
)

# What each package may import besides itself and the standard library.
CALM = {"seqmoe_cli", "seqmoe_cli.errors", "seqmoe_cli.settings", "seqmoe_cli.paths"}
ENGINE = {"torch", "seqmoe_kernels", "seqmoe_weights", *CALM}
LAYERS = {
    "seqmoe_kernels": {"torch", "triton"},
    "seqmoe_weights": {"torch", "numpy", "safetensors", "huggingface_hub", "seqmoe_kernels"},
    "seqmoe_cli.errors": {"seqmoe_weights"},
    "seqmoe_cli.settings": {"seqmoe_cli.errors"},
    "seqmoe_cli.paths": set[str](),
    "seqmoe_cli.environment": set[str](),
    "seqmoe_cli.residency": ENGINE | {"numpy"},
    "seqmoe_cli.models": ENGINE,
    "seqmoe_cli.forecast": ENGINE | {"seqmoe_cli.residency", "numpy"},
    "seqmoe_cli.engine": ENGINE
    | {"seqmoe_cli.models", "seqmoe_cli.residency", "seqmoe_cli.forecast"},
    "seqmoe_cli.text": {"seqmoe_cli.errors", "seqmoe_cli.settings", "tokenizers"},
    "seqmoe_cli.terminal": {"seqmoe_weights", "rich"},
    "seqmoe_cli.chat": CALM
    | {"seqmoe_cli.engine", "seqmoe_cli.forecast", "seqmoe_cli.text", "seqmoe_cli.terminal"}
    | {"seqmoe_weights", "jinja2", "rich", "prompt_toolkit"},
    "seqmoe_cli.bench": CALM
    | {"seqmoe_cli.engine", "seqmoe_cli.forecast", "seqmoe_cli.residency"}
    | {"seqmoe_cli.text", "seqmoe_cli.terminal", "seqmoe_weights"}
    | {"torch", "numpy", "safetensors"},
}
HEAVY = ["torch", "triton", "numpy", "tokenizers", "jinja2", "prompt_toolkit", "huggingface_hub"]
ABOVE = {"seqmoe_cli.commands", "seqmoe_cli.main", "seqmoe_cli.__main__"}  # may import all of them


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] in ("kernels", "weights") else parts
    return ".".join(parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    """`seqmoe_cli.chat.repl` -> `seqmoe_cli.chat`, `torch.nn` -> `torch`."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "seqmoe_cli" else parts[0]


MODULES = {module_of(path): path for path in SOURCES}
PRODUCT = sorted(name for name in MODULES if name.startswith("seqmoe_"))


def imported_by(module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in names)


def test_of_the_kernels_weights_know_the_formats_alone() -> None:
    leaf = [module for module in PRODUCT if module.startswith("seqmoe_weights")]
    names = {name for module in leaf for name in imported_by(module)}
    assert {n for n in names if n.startswith("seqmoe_kernels")} == {"seqmoe_kernels.formats"}


def test_every_package_has_a_layer() -> None:
    assert {package_of(module) for module in PRODUCT} - ABOVE - {"seqmoe_cli"} == set(LAYERS)


@pytest.mark.parametrize("module", PRODUCT)
def test_imports_follow_the_arrows(module: str) -> None:
    package = package_of(module)
    used = {package_of(name) for name in imported_by(module)} - sys.stdlib_module_names
    if package in ABOVE:
        assert not used & {"tests", "tools", "benchmarks", "transformers"}
    else:
        assert used - {package} <= LAYERS.get(package, set())


def test_the_simulator_needs_no_engine() -> None:
    """It uses the product's traces, policies and terminal; the tests above hold the other way."""
    allowed = CALM | {"seqmoe_cli.forecast", "seqmoe_cli.residency", "seqmoe_cli.terminal"}
    allowed |= ABOVE | {"tools", "numpy", "torch", "typer", "rich"}
    modules = [name for name in MODULES if name.startswith("tools.simulator.")]
    used = {package_of(name) for module in modules for name in imported_by(module)}
    assert len(modules) > 10 and used - sys.stdlib_module_names <= allowed


@pytest.mark.parametrize(
    "command",
    ["", "chat", "bench", "convert", "info", "doctor", "perplexity", "trace", "train"],
)
def test_help_loads_nothing_heavy(command: str) -> None:
    program = f"""
import sys
from seqmoe_cli.main import main
assert main({[*command.split(), "--help"]}) == 0
print(*sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout.startswith("Usage: seqmoe")


@pytest.mark.parametrize("folder", ["kernels", "weights"])
def test_source_roots_are_no_packages(folder: str) -> None:
    # A package called `kernels` on sys.path would hide the one that transformers imports.
    assert (ROOT / folder / f"seqmoe_{folder}" / "__init__.py").is_file()
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_is_long() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert not {module: length for module, length in lengths.items() if length > MAX_LINES}


def test_tests_share_nothing_but_modules_of_helpers() -> None:
    named = [name for m in MODULES if m.startswith("tests.") for name in imported_by(m)]
    assert not [name for name in named if re.search(r"(^|\.)test_", name)]


def test_every_module_says_what_it_does() -> None:
    assert not [m for m in PRODUCT if not ast.get_docstring(ast.parse(MODULES[m].read_text()))]


def test_files_speak_of_the_project_alone() -> None:
    """No paths of the authors' machines, no numbers of a tracker, no unfinished business."""
    words = ["/[w]ork/", "[T]ODO", "[F]IXME", "[X]XX", r"\bissue #?[0-9]+", r"pypi\.or[g]"]
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    found = []
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", "") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found += [f"{name}: {match[0]}" for match in re.finditer("|".join(words), text)]
    assert not found
