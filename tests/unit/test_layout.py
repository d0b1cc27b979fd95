"""The tree is what its maps say, and no module needs one that needs it."""

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(init.parent for init in (ROOT / "hvkit").rglob("__init__.py"))


def modules_in(folder):
    """The names of the modules and packages in a folder."""
    files = {file.stem for file in folder.glob("*.py")} - {"__init__", "__main__"}
    return files | {each.name for each in folder.iterdir() if (each / "__init__.py").exists()}


def names(module, text):
    return re.search(rf"(?<![\w.]){module}(?![\w])", text)


@pytest.mark.parametrize("folder", PACKAGES[1:], ids=lambda f: str(f.relative_to(ROOT)))
def test_a_package_names_all_of_its_modules(folder):
    described = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert [each for each in sorted(modules_in(folder)) if not names(each, described)] == []


def test_the_picture_in_the_docs_names_what_is_at_the_top():
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```")[1]
    assert [m for m in sorted(modules_in(ROOT / "hvkit")) if not names(m, picture)] == []
    named = set(re.findall(r"^  (\w+)(?:/|\.py)", picture, re.MULTILINE)) - {"__init__"}
    assert named <= modules_in(ROOT / "hvkit")


def test_no_module_imports_one_that_imports_it():
    """Also inside functions; not for types alone."""
    modules = {module_of(file): file for file in (ROOT / "hvkit").rglob("*.py")}
    imports = {m: imports_of(file, modules.keys()) - {m} for m, file in modules.items()}
    while leaves := {m for m, needs in imports.items() if not needs & imports.keys()}:
        imports = {m: needs for m, needs in imports.items() if m not in leaves}
    while tops := imports.keys() - set().union(*imports.values()):  # they only lead to a circle
        imports = {m: needs for m, needs in imports.items() if m not in tops}
    assert sorted(imports) == []


def test_a_class_name_means_one_thing():
    """The core and the modules for two frameworks may name alike what is alike."""
    found = {}
    for file in sorted((ROOT / "hvkit").rglob("*.py")):
        place = re.search(r"pytorch|keras|hvkit/(sync|pipeline)/", str(file))
        for node in statements_in(tree_of(file)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(place and place[0])
    several = {name: of for name, of in found.items() if len(of) > 1}
    assert [n for n, of in several.items() if None in of or len(set(of)) < len(of)] == []


@pytest.mark.parametrize("folder", ["sync", "pipeline", "strategies", "compression"])
def test_shared_folders_import_no_framework(folder):
    for file in (ROOT / "hvkit" / folder).glob("*.py"):
        for node in imports_in(file):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            found = [prefix + alias.name for alias in node.names]
            assert not any(re.match(r"torch|tensorflow|keras|hvkit\.frameworks", n) for n in found)


def module_of(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports_of(file, modules):
    """Those of these modules that a file imports, or of which it imports a name."""
    found = set()
    for node in imports_in(file):
        for alias in node.names:
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            whole = prefix + alias.name
            found.add(whole if whole in modules else prefix.removesuffix("."))
    return found & modules


def imports_in(file):
    """Import statements, without those for types alone."""
    return [s for s in statements_in(tree_of(file)) if isinstance(s, ast.Import | ast.ImportFrom)]


@functools.cache
def tree_of(file):
    return ast.parse(file.read_text())


def statements_in(tree):
    """All statements, without those for types alone."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if isinstance(child, ast.stmt):
            yield child
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from statements_in(child)
