"""Imports point down the layers only, and third-party packages stay in their rooms."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# The rooms of the building, lowest floor first; a room imports from lower floors only.
FLOORS = [
    {"pallas_kernels"},
    {"typing"},
    {"schedules"},
    {"models", "quantization", "distributed", "data"},
    {"collectives"},
    {"token_dropping", "curriculum"},
    {"optimizers"},
    {"training"},
    {"aot"},
    {"testing"},
    {"__init__"},
    {"configs"},
    {"experiments"},
]
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

# Who may import a third-party package (or one of its parts); others may not.
FENCES = {
    "grain": {"data", "curriculum", "experiments"},
    "flax": {"models", "token_dropping", "training", "testing", "aot", "experiments"},
    "optax": {"schedules", "optimizers", "training", "testing", "aot", "experiments"},
    "orbax": {"training"},
    "ml_collections": {"configs", "experiments"},
    "absl": {"configs", "experiments"},
    "chex": {"testing"},
    "tokenizers": {"data"},
    "matplotlib": {"training", "experiments"},
}


TOP = ("pallas_kernels", "dataeff_jax", "configs", "experiments")


def room_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[1] if parts[0] == "dataeff_jax" else parts[0]


def sources():
    for top in TOP:
        yield from sorted((ROOT / top).rglob("*.py"))


def imports_of(path: pathlib.Path):
    """Absolute dotted names that a file imports, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_room(name: str) -> str | None:
    parts = name.split(".")
    if parts[0] == "dataeff_jax":
        return parts[1] if len(parts) > 1 and parts[1] in HEIGHT else "__init__"
    # Not `typing` of the standard library, which has the name of a room.
    return parts[0] if parts[0] in TOP else None


@pytest.mark.parametrize(
    "path", list(sources()), ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_point_down(path):
    room = room_of(path)
    assert room in HEIGHT, f"{room} has no floor: add it to FLOORS"
    for name in imports_of(path):
        other = imported_room(name)
        if other is None or other == room:
            continue
        assert HEIGHT[other] < HEIGHT[room], (
            f"{room} imports {name} from above or beside"
        )


@pytest.mark.parametrize(
    "path", list(sources()), ids=lambda p: str(p.relative_to(ROOT))
)
def test_third_party_packages_stay_in_their_rooms(path):
    room = room_of(path)
    for name in imports_of(path):
        allowed = FENCES.get(name.split(".")[0])
        assert allowed is None or room in allowed, f"{room} imports {name}"
