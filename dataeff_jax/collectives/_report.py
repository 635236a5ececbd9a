"""What a compiled program sends over the wire, read from its optimized HLO.

The text is the one authority: XLA combines, splits and drops collectives after jax has
written them, and a compressed payload that arrives there as float32 is not compressed.
"""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_KINDS = (
    "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|"
    "collective-permute|collective-broadcast"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>.*?) (?P<op>[a-z][\w\-]*)"
    r"\((?P<operands>[^)]*)\)(?P<rest>.*)$"
)
_COLLECTIVE = re.compile(rf"^({_KINDS})(-start)?$")
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "s1": 1, "u1": 1}


class Collective(NamedTuple):
    """One collective of a compiled program."""

    op: str  # such as "all-reduce"
    dtype: str  # of what it carries; "bf16+f32" where several arrays were combined
    group_size: int  # devices that take part together
    payload_bytes: int  # bytes a device puts in, each time
    wire_bytes: int  # bytes a device sends, each time, by the ring algorithm
    times: int | None  # runs per step; None inside a loop of unknown length
    conditional: bool  # inside one branch of a `lax.cond`
    source: str  # the jax operation it came from


class _Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    operands: list[str]
    rest: str


def collective_report(compiled: Any) -> list[Collective]:
    """Every collective of a compiled program, with the bytes it sends.

    With N devices in a group and p bytes put in by each, a device sends by the ring
    algorithm: all-reduce 2 p (N-1)/N, reduce-scatter and all-to-all p (N-1)/N,
    all-gather p (N-1), permute and broadcast p.

    Args:
        compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.

    Returns:
        The collectives in the order of the program; one inside a loop appears once,
        with the number of times that it runs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> add = jax.shard_map(
        ...     lambda x: jax.lax.psum(x, "data"), mesh=mesh, out_specs=jax.P()
        ... )
        >>> x = jax.ShapeDtypeStruct(
        ...     (8, 100), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("data"))
        ... )
        >>> [found] = collective_report(jax.jit(add).lower(x).compile())
        >>> found.op, found.dtype, found.group_size, found.wire_bytes
        ('all-reduce', 'f32', 8, 700)
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    entry, computations = _parse(text)
    return list(
        _walk(computations, entry, times=1, conditional=False, total=_total(text))
    )


def collective_bytes(report: Iterable[Collective]) -> int:
    """Bytes that a device sends in one run of the program, branches not taken included.

    Args:
        report: what `collective_report` returned. A collective in a loop of unknown
            length counts once.

    Returns:
        The sum of all bytes.

    Example:
        >>> one = Collective("all-reduce", "f32", 8, 400, 700, 3, False, "psum")
        >>> collective_bytes([one, one])
        4200
    """
    return sum(item.wire_bytes * (item.times or 1) for item in report)


def check_collectives(compiled: Any, plan: Any, *, other_bytes: int = 0) -> None:
    """Raises unless a compiled program sends exactly the bytes that a plan declares.

    Args:
        compiled: as of `collective_report`, or a report.
        plan: of `compression_plan`, for the one compressed mean in the program; None
            where there is none.
        other_bytes: what is sent besides, such as `2 * 4 * (N - 1) / N` for the mean of
            one float32.

    Raises:
        ValueError: if packed bytes or all bytes differ, with a table of what was found.

    Example:
        >>> check_collectives("HloModule alone\\n", None)
        >>> check_collectives("HloModule alone\\n", None, other_bytes=4)
        Traceback (most recent call last):
        ...
        ValueError: sent are 0 bytes a device, 0 of them packed; declared 4 and 0:
    """
    report = compiled if isinstance(compiled, list) else collective_report(compiled)
    found = collective_bytes(report)
    packed = collective_bytes([item for item in report if item.dtype == "u8"])
    declared = (plan.wire_bytes if plan is not None else 0) + other_bytes
    declared_packed = plan.packed_bytes if plan is not None else 0
    if (found, packed) != (declared, declared_packed):
        lines = "".join(
            f"\n  {item.op} of {item.dtype} between {item.group_size}:"
            f" {item.wire_bytes} bytes x {item.times} ({item.source})"
            for item in report
        )
        raise ValueError(
            f"sent are {found} bytes a device, {packed} of them packed; declared"
            f" {declared} and {declared_packed}:{lines}"
        )


def _parse(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """The name of the entry computation, and all computations by name."""
    entry, computations, current = "", {}, []
    for line in text.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif (found := _INSTRUCTION.match(line)) is not None:
            listed = re.sub(r"/\*.*?\*/", "", found["operands"])  # /*index=5*/
            operands = [name.split()[-1] for name in listed.split(",") if name.strip()]
            operands = [name.lstrip("%") for name in operands]
            current.append(
                _Instruction(
                    found["name"], found["shape"], found["op"], operands, found["rest"]
                )
            )
    return entry, computations


def _walk(
    computations, name: str, *, times: int | None, conditional: bool, total: int
) -> Iterator[Collective]:
    """The collectives of a computation and of all that it calls."""
    shapes = {item.name: item.shape for item in computations.get(name, ())}
    for item in computations.get(name, ()):
        if _COLLECTIVE.match(item.op):
            yield _describe(item, shapes, times, conditional, total)
            continue
        inner = times
        if item.op == "while":
            trips = _TRIPS.search(item.rest)
            inner = times * int(trips[1]) if trips and times is not None else None
        for called in _CALLED.findall(item.rest):
            yield from _walk(
                computations, called, times=inner, conditional=conditional, total=total
            )
        for many, one in _BRANCHES.findall(item.rest):
            for called in (many or one).split(","):
                yield from _walk(
                    computations,
                    called.strip().lstrip("%"),
                    times=times,
                    conditional=True,
                    total=total,
                )


def _describe(item, shapes, times, conditional, total) -> Collective:
    kind = item.op.removesuffix("-start")
    arrays = [a for name in item.operands for a in _ARRAY.findall(shapes.get(name, ""))]
    payload = sum(_num_bytes(dtype, dims) for dtype, dims in arrays)
    size = _group_size(item.rest, total)
    source = re.search(r'op_name="([^"]*)"', item.rest)
    return Collective(
        op=kind,
        dtype="+".join(sorted({dtype for dtype, _ in arrays})),
        group_size=size,
        payload_bytes=payload,
        wire_bytes=_wire_bytes(kind, payload, size),
        times=times,
        conditional=conditional,
        source=source[1].rsplit("/", 1)[-1] if source else "",
    )


def _wire_bytes(kind: str, payload: int, size: int) -> int:
    if kind == "all-reduce":
        return 2 * payload * (size - 1) // size
    if kind == "all-gather":
        return payload * (size - 1)
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return payload * (size - 1) // size
    return payload


def _num_bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype)
    if bits is None:  # the first number in the name, as in bf16, f8e4m3fn, s32
        number = re.search(r"\d+", dtype)
        bits = int(number[0]) if number else 0  # tokens carry nothing
    return math.ceil(bits * math.prod(int(d) for d in dims.split(",") if d) / 8)


def _group_size(rest: str, total: int) -> int:
    """Size of the first group: {{0,1},{2,3}}, [2,4]<=[8] (2 groups of 4), {} (all)."""
    if (found := re.search(r"replica_groups=\{\{([\d,]+)\}", rest)) is not None:
        return found[1].count(",") + 1
    if (found := re.search(r"replica_groups=\[\d+,(\d+)\]", rest)) is not None:
        return int(found[1])
    if (found := re.search(r"source_target_pairs=\{(.*?)\}\}", rest)) is not None:
        return _ring_length(re.findall(r"(\d+),(\d+)", found[1]))
    return total


def _ring_length(pairs: list[tuple[str, str]]) -> int:
    """Devices on the path that begins at the first source."""
    following, here, seen = dict(pairs), pairs[0][0], set()
    while here is not None and here not in seen:
        seen.add(here)
        here = following.get(here)
    return len(seen)


def _total(text: str) -> int:
    """Number of devices of the program."""
    header = text.split("\n", 1)[0]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(int(count) for count in counts)
