"""Every public name is exported, documented and shown at work, and the examples run."""

import ast
import doctest
import importlib
import inspect
import pathlib
import subprocess
import sys
import tempfile
import types

import pytest

import dataeff_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMESPACES = [name for name in dataeff_jax.__all__ if name != "__version__"]


def namespace_of(name: str) -> types.ModuleType:
    return getattr(dataeff_jax, name)


SYMBOLS = [
    pytest.param(namespace, name, id=f"{namespace}.{name}")
    for namespace in NAMESPACES
    if namespace != "typing"  # aliases of other people's classes
    for name in namespace_of(namespace).__all__
]


def modules_with_examples():
    """Dotted names, found in the text so that collecting imports none of them."""
    for package in ("dataeff_jax", "pallas_kernels", "experiments"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>> " in path.read_text():
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_editors_see_the_namespaces_that_load_on_first_use():
    tree = ast.parse(pathlib.Path(dataeff_jax.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    (imports,) = block.body
    assert [alias.name for alias in imports.names] == NAMESPACES


@pytest.mark.parametrize(
    ("namespace", "unwanted"),
    [
        ("__version__", ["jax", "flax", "optax", "orbax", "grain", "ml_collections"]),
        # Ready-made GPU images have jax, flax, optax and orbax, but not these.
        ("training", ["grain", "tokenizers", "matplotlib", "ml_collections"]),
    ],
)
def test_an_import_brings_no_more_than_it_needs(namespace, unwanted):
    code = f"import sys, dataeff_jax as de; de.{namespace}; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True
    )
    assert not set(unwanted) & set(found.stdout.decode().split())


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_namespace_exports_what_it_imports(namespace):
    module = namespace_of(namespace)
    if not hasattr(module, "__path__"):
        return  # one file: its __all__ chooses among what it defines
    bound = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert bound == set(module.__all__)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_a_namespace_has_a_page_in_the_docs(namespace):
    page = (ROOT / "docs" / "api" / f"{namespace}.md").read_text()
    assert f".. automodule:: dataeff_jax.{namespace}\n" in page
    assert f"\napi/{namespace}\n" in (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize(("namespace", "name"), SYMBOLS)
def test_a_public_name_has_a_docstring_with_an_example(namespace, name):
    symbol = getattr(namespace_of(namespace), name)
    if not (inspect.isclass(symbol) or inspect.isroutine(symbol)):
        return  # constants and aliases are explained where they stand
    text = vars(symbol).get("__doc__") if inspect.isclass(symbol) else symbol.__doc__
    assert text, f"{name} has no docstring of its own"
    if hasattr(symbol, "_fields"):
        return  # a NamedTuple is a result; the function that returns it shows it
    assert doctest.DocTestParser().get_examples(text), f"{name} has no example"


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_the_examples_print_what_they_say(name, tmp_path, monkeypatch):
    # What examples write goes away with the test.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed
