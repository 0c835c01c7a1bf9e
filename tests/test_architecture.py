"""The rules of the house: who may import whom, what a cell may hold, what every notebook must prove.

A rule is a function from a `Module` or a `Notebook` to the problems it finds, one sentence each. Every rule runs over
the library, and over a small bad sample in which it must find something.
"""
import ast
import json
import re
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
LIB = "libai_wb"


class Module(NamedTuple):
    "A module of the library: dotted name inside it (`layers.linear`, `layers.__init__`), source, notebook numbers."
    name: str
    source: str
    order: dict[str, str]


class Cell(NamedTuple):
    "A notebook cell: md or code, its `#|` directives, its source without them, bytes of output."
    kind: str
    flags: tuple[str, ...]
    source: str
    output: int = 0


class Notebook(NamedTuple):
    "A numbered notebook: file stem, cells, notebook numbers."
    stem: str
    cells: list[Cell]
    order: dict[str, str]


def by_hand(name):
    "Is the module `name` one that is written by hand: a package's `__init__` or `__main__`?"
    return name.rpartition(".")[2] in ("__init__", "__main__")


def dotted_name(stem): return stem.partition("_")[2]


def read_notebook(path, order):
    "A notebook file as `Notebook`."
    return Notebook(path.stem, [read_cell(c) for c in json.loads(path.read_text())["cells"]], order)


def read_cell(cell):
    "A raw notebook cell as `Cell`."
    lines = "".join(cell["source"]).splitlines()
    flags = tuple(line[2:].strip() for line in lines if line.startswith("#|"))
    source = "\n".join(line for line in lines if not line.startswith("#|"))
    output = len(json.dumps(cell.get("outputs") or ""))
    return Cell("md" if cell["cell_type"] == "markdown" else "code", flags, source, output)


PATHS = sorted((ROOT/"nbs").glob("[0-9]*.ipynb"))
ORDER = {dotted_name(p.stem): p.stem.partition("_")[0] for p in PATHS}
NOTEBOOKS = [read_notebook(p, ORDER) for p in PATHS]
FILES = {str(p.relative_to(ROOT/LIB)): p for p in sorted((ROOT/LIB).rglob("*.py")) if "configs" not in p.parts}
MODULES = [Module(name[:-3].replace("/", "."), path.read_text(), ORDER)
           for name, path in FILES.items() if name != "_modidx.py"]


# What an ast says

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def absolute(name, node):
    "The dotted path from which an ImportFrom in module `name` imports."
    if not node.level: return node.module
    package = [LIB, *name.split(".")][:-node.level]
    return ".".join([*package, *([node.module] if node.module else [])])


def imports(mod):
    "(line, dotted path, inside a function?) of everything that `mod` imports, `import_module` of a constant included."
    tree = ast.parse(mod.source)
    inner = {id(n) for f in ast.walk(tree) if isinstance(f, FUNCTIONS) for n in ast.walk(f)}
    for node in ast.walk(tree):
        paths = []
        if isinstance(node, ast.Import): paths = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom): paths = [f"{absolute(mod.name, node)}.{a.name}" for a in node.names]
        elif isinstance(node, ast.Call) and called(node) == "import_module":
            paths = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        for path in paths: yield node.lineno, path, id(node) in inner


def called(node): return getattr(node.func, "id", getattr(node.func, "attr", ""))


def within(path, *prefixes): return any(path == p or path.startswith(p + ".") for p in prefixes)


def module_of(path, order):
    "The module of the library to which an imported dotted `path` belongs, None for a package."
    parts = path.split(".")[1:]
    return next((m for i in range(len(parts), 0, -1) if (m := ".".join(parts[:i])) in order), None)


def at_import(tree):
    "Every node that runs when the module is imported: all but the bodies of functions."
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        todo += [n for n in ast.iter_child_nodes(node) if not isinstance(n, FUNCTIONS)]


def public(tree, patched=True):
    "Public functions and classes at the top of a module; methods that `@patch` adds to a class only if `patched`."
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [n for n in tree.body if isinstance(n, kinds) and not n.name.startswith("_")]
    return [n for n in found if patched or not any("patch" in ast.unparse(d) for d in n.decorator_list)]


# Rules for modules

def imports_downward(mod, same=False):
    "A module imports from lower numbers only, and from the defining module; a package only from its own modules."
    package = mod.name.rpartition(".")[0]
    for line, path, inner in imports(mod):
        if not within(path, LIB) or path == f"{LIB}.__version__": continue
        target = module_of(path, mod.order)
        if by_hand(mod.name):
            if not within(path, f"{LIB}.{package}".rstrip(".")):
                yield f"line {line}: package {package} imports {path}"
        elif target is None: yield f"line {line}: {path} is imported from a package, not from its module"
        elif mod.order[target] > mod.order[mod.name] or (target == mod.name and not same):
            yield f"line {line}: {mod.order[mod.name]}_{mod.name} imports upward from {mod.order[target]}_{target}"


ALLOWED = {  # package: who may import it
    "torch.distributed": lambda m: m in ("engine.checkpoint", "align.merge", "notebook.workers")
                                   or (m.startswith("mesh.") and m != "mesh.rng"),
    "IPython": lambda m: m.startswith("notebook."),
    "ipywidgets": lambda m: m.startswith("notebook."),
    "ipykernel": lambda m: m.startswith("notebook."),
    "jupyter_client": lambda m: m.startswith("notebook."),
    "omegaconf": lambda m: m.startswith("config."),
    "oneflow": lambda m: False,
}
FLOORS = {  # floor: the only modules of the mesh that it may know
    "layers.": ("mesh.collectives", "mesh.rng"),
    "models.": ("mesh.topology", "mesh.rng"),  # topology: the plain tuples Unit and ModelFacts
    "data.": ("mesh.topology", "mesh.rng", "mesh.processes"),  # processes: how workers are started
}
EXCEPTIONS = {  # module: what it may know of the mesh besides
    "models.registry": ("mesh.parallelize",),  # the factory draws weights by path; a model itself may not
}


def imports_permitted(mod):
    "torch.distributed, IPython, omegaconf and the mesh are imported only where the design allows it."
    used = [(n.lineno, ast.unparse(n), False) for n in ast.walk(ast.parse(mod.source)) if isinstance(n, ast.Attribute)]
    for line, path, _ in [*imports(mod), *(u for u in used if u[1] == "torch.distributed")]:
        for package, may in ALLOWED.items():
            if within(path, package) and not may(mod.name):
                yield f"line {line}: {mod.name} may not use {path}"
        floor = next((f for f in FLOORS if mod.name.startswith(f)), None)
        known = [f"{LIB}.{m}" for m in (*FLOORS.get(floor, ()), *EXCEPTIONS.get(mod.name, ()))]
        if floor and within(path, f"{LIB}.mesh") and not within(path, *known):
            yield f"line {line}: {floor[:-1]} may not know {path}"


def draws_lazily(mod):
    "matplotlib and plotly are imported inside the function that draws."
    for line, path, inner in imports(mod):
        if within(path, "matplotlib", "plotly") and not inner:
            yield f"line {line}: {path} is imported at module level"


def no_star(mod):
    "No star imports in the library."
    for line, path, _ in imports(mod):
        if path.endswith(".*"): yield f"line {line}: from {path[:-2]} import *"


GROUP = re.compile(r"(^|_)(mesh|device_mesh|group|process_group|pg)$", re.I)
MAKERS = {"init_device_mesh", "init_process_group", "new_group", "make_mesh", "init_group", "DeviceMesh"}


def no_global_mesh(mod):
    "No mesh and no process group is made at import or kept in a module global."
    tree = ast.parse(mod.source)
    for node in at_import(tree):
        if isinstance(node, ast.Call) and called(node) in MAKERS:
            yield f"line {node.lineno}: {called(node)} is called at import"
    targets = [t for node in at_import(tree) if isinstance(node, ast.Assign) for t in node.targets]
    kept = [n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    for node in kept:
        if GROUP.search(node.id): yield f"line {node.lineno}: the module global {node.id}"
    for node in ast.walk(tree):
        names = node.names if isinstance(node, ast.Global) else []
        for name in filter(GROUP.search, names): yield f"line {node.lineno}: global {name}"


def sized(mod):
    "Functions have at most 50 lines, modules at most 400 (300 is the goal)."
    lines = len(mod.source.splitlines())
    if lines > 400: yield f"{lines} lines in the module"
    elif lines > 300: warnings.warn(f"{mod.name} has {lines} lines; the goal is 300.")
    for node in ast.walk(ast.parse(mod.source)):
        if isinstance(node, FUNCTIONS) and (n := node.end_lineno - node.lineno + 1) > 50:
            yield f"line {node.lineno}: a function of {n} lines"


def documented(mod):
    "Every public function and class has a docstring."
    for node in public(ast.parse(mod.source)):
        if not ast.get_docstring(node): yield f"line {node.lineno}: {node.name} has no docstring"


def no_shadow(mod):
    "A package gives out no function under the name of one of its own sub-modules."
    if not mod.name.endswith("__init__"): return
    package = mod.name.removesuffix("__init__")
    below = {m.removeprefix(package).partition(".")[0] for m in mod.order if m.startswith(package)}
    for node in ast.walk(ast.parse(mod.source)):
        given = []
        if isinstance(node, ast.ImportFrom): given = [a.asname or a.name for a in node.names if node.module]
        elif isinstance(node, ast.Dict): given = [k.value for k in node.keys if isinstance(k, ast.Constant)]
        for name in below.intersection(given):
            yield f"line {node.lineno}: {name} is a sub-module and a public name of {package or LIB}"


# Rules for notebooks

def named(nb):
    "`NN_dotted.module.ipynb` exports to `dotted/module.py`."
    if not re.fullmatch(r"\d\d[a-z]?_[a-z]\w*(\.[a-z]\w*)*", nb.stem):
        yield f"{nb.stem} is not NN_dotted.module"
    target = [f.split()[1] for c in nb.cells for f in c.flags if f.startswith("default_exp ")]
    if target != [dotted_name(nb.stem)]: yield f"{nb.stem} exports to {target}"


def cells_down(nb):
    "The examples of a notebook import from lower numbers too, and from its own module."
    for cell in nb.cells:
        if cell.kind != "code" or "export" in cell.flags: continue
        try: yield from imports_downward(Module(dotted_name(nb.stem), cell.source, nb.order), same=True)
        except SyntaxError: continue  # a cell with a magic


def exports_small(nb):
    "An export cell: at most 50 lines, two public symbols, imports apart from code; any line: at most 120 characters."
    for cell in nb.cells:
        if cell.kind != "code": continue
        lines = cell.source.strip().splitlines()
        for line in lines:
            if len(line) > 120: yield f"a line of {len(line)} characters: {line[:60]} …"
        if "export" not in cell.flags: continue
        if len(lines) > 50: yield f"an export cell of {len(lines)} lines: {lines[0]}"
        body = ast.parse(cell.source)
        if (n := len(public(body, patched=False))) > 2: yield f"{n} public symbols in one cell: {lines[0]}"
        if {isinstance(n, ast.Import | ast.ImportFrom) for n in body.body} == {True, False}:
            yield f"imports beside code: {lines[0]}"


def stars_hidden(nb):
    "A star import stands in a hidden cell and names fastcore."
    for cell in nb.cells:
        for line in re.findall(r"^from .* import \*", cell.source if cell.kind == "code" else "", re.M):
            if "hide" not in cell.flags or not line.startswith("from fastcore."): yield line


ASSERTS = re.compile(r"^\s*(assert |test_\w+\(|with expect_fail\(|(torch\.testing\.)?assert_\w+\()", re.M)


def proves(nb):
    "At least one cell that is not exported asserts."
    code = [c.source for c in nb.cells if c.kind == "code" and "export" not in c.flags]
    if not any(ASSERTS.search(source) for source in code): yield "no cell asserts anything"


def parsed(source):
    "The ast of a code cell, its magics left out; None for what is not Python."
    for text in (source, re.sub(r"^(\s*)[%!].*", r"\1pass", source, flags=re.M)):
        try: return ast.parse(text)
        except SyntaxError: continue


def fails_within(nb):
    "`expect_fail(...)` stands after `with`: called alone it only makes a context manager, and checks nothing."
    for cell in nb.cells:
        tree = parsed(cell.source) if cell.kind == "code" else None
        if tree is None: continue
        entered = {id(n.context_expr) for n in ast.walk(tree) if isinstance(n, ast.withitem)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and called(node) == "expect_fail" and id(node) not in entered:
                yield f"checks nothing, write test_fail or `with`: {ast.unparse(node)[:60]}"


def outputs_small(nb):
    "No cell keeps more than 50 kB of output."
    for cell in nb.cells:
        if cell.output > 50_000: yield f"{cell.output} bytes of output below: {cell.source[:60]}"


WE = re.compile(r"\b(we|we're|we've|we'll|our|ours|let's)\b", re.I)


def speaks_to_you(text):
    "Prose speaks to the reader (you); code spans and blocks do not count."
    prose = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
    for match in WE.finditer(prose):
        yield f"{match[0]!r} in: … {prose[max(0, match.start() - 40):match.end() + 30].strip()} …"


def prose_to_you(nb):
    "The markdown cells of a notebook speak to the reader."
    for cell in nb.cells:
        if cell.kind == "md": yield from speaks_to_you(cell.source)


# The rules over the library

MODULE_RULES = [imports_downward, imports_permitted, draws_lazily, no_star, no_global_mesh, sized, documented,
                no_shadow]
NOTEBOOK_RULES = [named, cells_down, exports_small, stars_hidden, proves, fails_within, outputs_small, prose_to_you]


@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda r: r.__name__)
def test_modules(rule):
    assert MODULES
    assert [f"{m.name}: {p}" for m in MODULES for p in rule(m)] == []


@pytest.mark.parametrize("rule", NOTEBOOK_RULES, ids=lambda r: r.__name__)
def test_notebooks(rule):
    assert NOTEBOOKS
    assert [f"{n.stem}: {p}" for n in NOTEBOOKS for p in rule(n)] == []


def misplaced(names, files):
    "A module comes from exactly one notebook; only `__init__` and `__main__` are written by hand."
    for name in {n for n in names if names.count(n) > 1}: yield f"two notebooks export to {name}"
    made = {name.replace(".", "/") + ".py" for name in names}
    written = {f for f in files if not by_hand(f[:-3].replace("/", ".")) and f != "_modidx.py"}
    for file in sorted(written - made): yield f"{file} has no notebook"
    for file in sorted(made - written): yield f"{file} is not exported"


def test_every_module_has_one_notebook():
    assert list(misplaced([dotted_name(p.stem) for p in PATHS], FILES)) == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_documents_speak_to_you(name):
    assert list(speaks_to_you((ROOT/name).read_text())) == []


@pytest.mark.parametrize("rule", [fails_within, outputs_small, prose_to_you], ids=lambda r: r.__name__)
def test_experiments(rule):
    assert [p for path in (ROOT/"experiments").glob("*.ipynb") for p in rule(read_notebook(path, {}))] == []


# The rules can fail

SAMPLE_ORDER = {"mesh.topology": "10", "mesh.collectives": "12", "mesh.launch": "13", "mesh.parallelize": "14",
                "layers.linear": "21", "layers.mlp": "24", "models.registry": "30", "models.vit": "31",
                "engine.build": "54", "engine.inspection": "54a", "engine.events": "55"}
BAD_MODULES = [
    (imports_downward, "layers.linear", "from libai_wb.models.vit import VisionTransformer"),
    (imports_downward, "layers.linear", "def f():\n    from ..models.vit import VisionTransformer"),
    (imports_downward, "layers.linear", "from importlib import import_module\nimport_module('libai_wb.layers.mlp')"),
    (imports_downward, "layers.mlp", "from libai_wb.layers import Linear"),
    (imports_downward, "layers.mlp", "from . import Linear"),
    (imports_downward, "layers.__init__", "from ..models.vit import VisionTransformer"),
    (imports_downward, "engine.build", "from libai_wb.engine.inspection import inspect_config"),
    (imports_downward, "engine.inspection", "from libai_wb.engine.events import Events"),
    (imports_permitted, "layers.linear", "import torch.distributed as dist"),
    (imports_permitted, "mesh.rng", "from torch import distributed"),
    (imports_permitted, "data.loaders", "import torch\nrank = lambda: torch.distributed.get_rank()"),
    (imports_permitted, "engine.step", "def f():\n    from IPython.display import display"),
    (imports_permitted, "mesh.launch", "from omegaconf import OmegaConf"),
    (imports_permitted, "models.vit", "from ..mesh.collectives import copy_to"),
    (imports_permitted, "models.vit", "from libai_wb.mesh.parallelize import materialise"),
    (imports_permitted, "models.registry", "from libai_wb.mesh.launch import make_mesh"),
    (imports_permitted, "layers.linear", "from libai_wb.mesh.launch import run_ranks"),
    (draws_lazily, "notebook.plots", "import matplotlib.pyplot as plt"),
    (no_star, "layers.linear", "from torch.nn import *"),
    (no_global_mesh, "mesh.launch", "from torch.distributed import new_group\nPAIRS = [new_group([0, 1])]"),
    (no_global_mesh, "mesh.launch", "_DEVICE_MESH = None"),
    (no_global_mesh, "mesh.launch", "def init(m):\n    global tp_group\n    tp_group = m"),
    (sized, "layers.linear", "def f():\n" + "    x = 1\n" * 50),
    (sized, "layers.linear", "x = 1\n" * 401),
    (documented, "layers.linear", "class Linear: pass"),
    (no_shadow, "layers.__init__", "from .linear import linear"),
    (no_shadow, "layers.__init__", "_where = {'mlp': 'mlp'}"),
]


@pytest.mark.parametrize("rule, name, source", BAD_MODULES, ids=lambda value: getattr(value, "__name__", ""))
def test_module_rule_finds_the_bad_sample(rule, name, source):
    assert list(rule(Module(name, source, SAMPLE_ORDER)))


GOOD_MODULE = """
import torch
from libai_wb.mesh.collectives import copy_to
from ..mesh.topology import can_cut
mesh_axes = ("pp", "dp", "tp")

def draw(mesh):
    "Draws."
    import matplotlib.pyplot as plt
    group = mesh.get_group("tp")
    return group
"""


GOOD_MODULES = [
    ("mesh.launch", GOOD_MODULE),
    ("models.registry", "from libai_wb.mesh.parallelize import materialise"),
    ("engine.inspection", "from libai_wb.engine.build import build_plain"),  # 54a after 54
]


@pytest.mark.parametrize("name, source", GOOD_MODULES, ids=lambda value: value if "\n" not in value else "")
@pytest.mark.parametrize("rule", MODULE_RULES, ids=lambda r: r.__name__)
def test_module_rule_passes_the_good_sample(rule, name, source):
    assert list(rule(Module(name, source, SAMPLE_ORDER))) == []


def code(source, *flags, output=0): return Cell("code", flags, source, output)


BAD_NOTEBOOKS = [
    (named, "21_layers.linear", [code("", "default_exp layers.mlp")]),
    (named, "layers.linear", [code("", "default_exp linear")]),
    (named, "21ab_layers.linear", [code("", "default_exp layers.linear")]),
    (cells_down, "54_engine.build", [code("from libai_wb.engine.inspection import inspect_config")]),
    (cells_down, "21_layers.linear", [code("from libai_wb.models.vit import VisionTransformer")]),
    (exports_small, "21_layers.linear", [code("x = 1\n" * 51, "export")]),
    (exports_small, "21_layers.linear", [code("x = '" + "x" * 120 + "'")]),
    (exports_small, "21_layers.linear", [code("import torch\ndef f(): pass", "export")]),
    (exports_small, "21_layers.linear", [code("def f(): pass\ndef g(): pass\nclass H: pass", "export")]),
    (stars_hidden, "21_layers.linear", [code("from fastcore.test import *")]),
    (stars_hidden, "21_layers.linear", [code("from torch.nn import *", "hide")]),
    (proves, "21_layers.linear", [code("assert True", "export"), code("print('assert')")]),
    (fails_within, "21_layers.linear", [code("expect_fail(lambda: f(), 'no')")]),
    (fails_within, "21_layers.linear", [code("for x in y:\n    test.expect_fail(ValueError)", "hide")]),
    (fails_within, "21_layers.linear", [code("%time f()\nexpect_fail(f)")]),
    (fails_within, "21_layers.linear", [code("with expect_fail(): expect_fail(f)")]),
    (outputs_small, "21_layers.linear", [code("plot()", output=60_000)]),
    (prose_to_you, "21_layers.linear", [Cell("md", (), "Now we cut the weight. `we` is fine.")]),
]


@pytest.mark.parametrize("rule, stem, cells", BAD_NOTEBOOKS, ids=lambda value: getattr(value, "__name__", ""))
def test_notebook_rule_finds_the_bad_sample(rule, stem, cells):
    assert list(rule(Notebook(stem, cells, SAMPLE_ORDER)))


def test_notebook_rules_pass_a_good_notebook():
    cells = [Cell("md", (), "# Linear\n> Cut by column or row: you choose.\n```\nwe = 1\n```"),
             code("", "default_exp layers.linear"), code("import torch", "export"),
             code("from fastcore.test import *", "hide"), code("class Linear:\n    'Cut.'", "export"),
             code("%%distributed\nfrom libai_wb.models.vit import x"),
             code("from libai_wb.layers.linear import Linear\ntest_eq(1, 1)"),
             code("with expect_fail(ValueError, contains='no'): f()\nwith open(p), expect_fail(): f()")]
    assert [p for rule in NOTEBOOK_RULES for p in rule(Notebook("21_layers.linear", cells, SAMPLE_ORDER))] == []


def test_a_notebook_number_may_have_a_letter():
    cells = [code("", "default_exp engine.inspection"), code("from libai_wb.engine.build import f\nassert f")]
    assert [p for rule in NOTEBOOK_RULES for p in rule(Notebook("54a_engine.inspection", cells, SAMPLE_ORDER))] == []


def test_a_module_without_a_notebook_is_found():
    assert len(list(misplaced(["a.b", "a.b", "a.c"], ["a/b.py", "a/d.py", "a/__init__.py"]))) == 3
