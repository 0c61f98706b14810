"""Modules import only from layers below their own, as CONTRIBUTING.md draws them."""

from __future__ import annotations

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "cuattn"
MODULES = {
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted(PACKAGE.rglob("*.py"))
}
#: Beginnings of the names of each layer's modules, lowest first; what is left is public.
LAYERS = (
    ("cuattn._dlpack",),
    ("cuattn._arrays", "cuattn._errors", "cuattn._philox", "cuattn._typing"),
    ("cuattn._quantized",),
    ("cuattn._spec", "cuattn._sampling_types"),
    ("cuattn._decoding_spec",),
    ("cuattn.reference", "cuattn.gpu"),
    ("cuattn._backend", "cuattn._repeat"),
    ("cuattn._mla_spec", "cuattn._sampling_spec"),
)
PUBLIC = len(LAYERS)


def part_of(module: str) -> tuple[int, str]:
    """The layer of a module, and the part of it that it belongs to."""
    if module in ("cuattn", "cuattn.__main__", "cuattn._config"):  # what users start from
        return PUBLIC + 1, module
    for layer, parts in enumerate(LAYERS):
        for part in parts:
            if module == part or module.startswith(f"{part}."):
                return layer, part
    return PUBLIC, ".".join(module.split(".")[:2])


def imports(module: str) -> set[str]:
    """The modules of cuattn that a module imports, anywhere in its text."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else str(node.module))
    return {name for name in found if name.split(".")[0] == "cuattn"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    layer, part = part_of(module)
    for name in imports(module):
        below, other = part_of(name)
        within = below == layer and (part == other or layer >= PUBLIC)
        assert below < layer or within, f"{module} imports {name}"


def test_public_modules_do_not_import_each_other_in_a_ring():
    needs = {
        part_of(module)[1]: {part_of(name)[1] for name in imports(module)}
        for module in MODULES
        if part_of(module)[0] == PUBLIC
    }
    while needs:
        ready = [module for module, names in needs.items() if not names & needs.keys() - {module}]
        assert ready, f"each imports another: {sorted(needs)}"
        for module in ready:
            del needs[module]
