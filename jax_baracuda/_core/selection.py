"""Which implementation serves a call of an op: its kernel, or plain JAX that XLA compiles.

An argument or a context asks; otherwise a table of measured calls says. What is asked for is a param of the primitives,
so that it is part of what is traced. The choice is made in the lowering, for the device that a program is lowered for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, get_args

import jax

from jax_baracuda._core.scopes import Scope, ScopedValue

if TYPE_CHECKING:
    from jax_baracuda._core.call import OpCall

P = ParamSpec("P")
R = TypeVar("R")

Implementation = Literal["kernel", "xla"]

Interval = tuple[float | None, float | None]
"""The least and the greatest value, None for no bound."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What was faster in calls of one kind."""

    device: str
    """"cpu", "cuda", or a GPU generation, such as "cuda-9.0" for compute capability 9.0."""
    op: str
    implementation: Implementation
    ratio: float
    """The time of plain JAX divided by that of the kernel."""
    measured: str = ""
    """Where and how."""
    dtypes: tuple[str, ...] = ()
    """Of the first operand; empty: any."""
    options: tuple[tuple[str, Any], ...] = ()
    """Params of the op and their values."""
    sizes: tuple[tuple[str, Interval], ...] = ()
    """Intervals of what :meth:`OpCall.sizes` names."""
    fuses: bool = False
    """Whether it holds only where XLA can compute the first operand, or one of the largest, in one fusion with plain
    JAX, as it can what a gather or an elementwise operation makes. A kernel reads it from memory."""

    def holds_for(self, call: OpCall, sizes: Mapping[str, int], fuses: bool) -> bool:
        return (
            self.op == call.op.name
            and fuses >= self.fuses
            and (not self.dtypes or call.dtype.name in self.dtypes)
            and all(name in call.params and call.params[name] == value for name, value in self.options)
            and all(name in sizes and _contains(interval, sizes[name]) for name, interval in self.sizes)
        )

    def to_json(self) -> dict[str, Any]:
        """Without what has its default."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        return {name: dict(value) if name in ("options", "sizes") else value for name, value in fields.items()}

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> Row:
        row = Row(
            **{
                **fields,
                "dtypes": tuple(fields.get("dtypes", ())),
                "options": tuple(fields.get("options", {}).items()),
                "sizes": tuple((name, (low, high)) for name, (low, high) in fields.get("sizes", {}).items()),
            }
        )
        if row.implementation not in get_args(Implementation):
            raise ValueError(f"implementation must be 'kernel' or 'xla', got {row.implementation!r}")
        return row


def _contains(interval: Interval, value: float) -> bool:
    low, high = interval
    return (low is None or low <= value) and (high is None or value <= high)


@dataclasses.dataclass(frozen=True)
class TuningTable:
    """What to pick where nothing is asked for: the first row that holds for a call, and the kernel if none does."""

    rows: tuple[Row, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:  # part of every printed jaxpr
        return f"TuningTable(<{len(self.rows)} rows>)"

    def row_for(self, call: OpCall, device: str, fuses: bool = False) -> Row | None:
        """The row of the GPU generation, or else that of its platform."""
        rows = [row for row in self.rows if row.op == call.op.name]
        sizes = call.sizes() if rows else {}
        for name in dict.fromkeys((device, device.partition("-")[0])):
            for row in rows:
                if row.device == name and row.holds_for(call, sizes, fuses):
                    return row
        return None

    @staticmethod
    def read(path: str | os.PathLike[str]) -> TuningTable:
        rows = []
        for number, fields in enumerate(json.loads(Path(path).read_text())["rows"]):
            try:
                rows.append(Row.from_json(fields))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: row {number} is no row of a tuning table: {error}") from error
        return TuningTable(tuple(rows))

    def write(self, path: str | os.PathLike[str]) -> None:
        """One line for each row."""
        rows = ",\n".join(f"    {json.dumps(row.to_json())}" for row in self.rows)
        Path(path).write_text(f'{{\n  "rows": [\n{rows}\n  ]\n}}\n')


@functools.lru_cache(maxsize=16)
def _table_of(path: str, _modified: int, _size: int) -> TuningTable:
    return TuningTable.read(path)


def table_in(path: str | os.PathLike[str]) -> TuningTable:
    """That of a file, read once as long as it is not written to: programs may enter a context at every step."""
    status = os.stat(path)
    return _table_of(os.path.abspath(path), status.st_mtime_ns, status.st_size)


KERNEL_IF_ANY = TuningTable(())
"""Picks the kernel wherever there is one, faster or not."""


PACKAGED_TABLE = Path(__file__).with_name("tuning.json")


@functools.cache
def packaged_table() -> TuningTable:
    """What ``python -m jax_baracuda tune`` found on the devices that the package was measured on."""
    return TuningTable.read(PACKAGED_TABLE)


# ----------------------------------------------------------------------------------------------------------------------
# What is asked for.

Selection = Implementation | TuningTable | None
"""An implementation, or the table to pick by; None: the packaged table."""

_of_context: ScopedValue[Selection] = ScopedValue("implementation", None)
_of_call = threading.local()


def current_selection() -> Selection:
    """What the running call asks for."""
    selections = getattr(_of_call, "selections", None)
    return selections[-1] if selections else _of_context.value


@contextlib.contextmanager
def selecting(selection: Selection) -> Iterator[None]:
    """Ops that are bound in this context ask for this, whatever the user's context says."""
    selections = _of_call.__dict__.setdefault("selections", [])
    selections.append(selection)
    try:
        yield
    finally:
        selections.pop()


def selectable(function: Callable[P, R]) -> Callable[P, R]:
    """A public function whose keyword argument `implementation` asks for one of its ops."""

    @functools.wraps(function)
    def selectable_function(*args: P.args, **kwargs: P.kwargs) -> R:
        asked_for = kwargs.get("implementation")
        if asked_for is None:
            return function(*args, **kwargs)
        with selecting(_checked(function.__name__, asked_for)):
            return function(*args, **kwargs)

    return selectable_function


def _checked(function: str, asked_for: Any) -> Implementation:
    if not isinstance(asked_for, str) or asked_for not in get_args(Implementation):
        raise ValueError(f"{function}: implementation must be 'kernel', 'xla' or None, got {asked_for!r}")
    return cast(Implementation, asked_for)


def implementation(
    name: Implementation | None = None, *, table: str | os.PathLike[str] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Context in which all functions of this package use one implementation, or pick it by another table.

    An argument ``implementation=`` of a function goes before the context, and an inner context before an outer one. The
    context belongs to the thread that enters it, and can be left in any order with others. What counts is where a
    function is called, that is, traced; its gradient uses what the function itself was called with. ``jax.jit`` keeps
    one trace for each context.

    Args:
      name: "kernel": the kernels of this package, and an error where there is none for a call. "xla": plain JAX, which
        XLA can fuse with what surrounds it and give any layout. None: what was faster where it was measured.
      table: a file that ``python -m jax_baracuda tune`` has written, to pick by instead of the packaged one.

    Returns:
      The context manager.

    Raises:
      ValueError: the name is unknown, or both arguments are given, or the file is no tuning table.
      RuntimeError: the context is left more often than it was entered in the thread.

    Example:
      >>> import jax, jax.numpy as jnp, jax_baracuda as jb
      >>> with jb.implementation("xla"):
      ...     program = jax.make_jaxpr(jb.rope)(jnp.ones((1, 2, 16, 8)))
      >>> print("implementation=xla" in str(program))
      True
    """
    if name is not None and table is not None:
        raise ValueError("implementation: one of name and table can be given, got both")
    if table is not None:
        return Scope(_of_context, table_in(table))
    return Scope(_of_context, None if name is None else _checked("implementation", name))


# ----------------------------------------------------------------------------------------------------------------------
# The choice.


def table_of(selection: TuningTable | None) -> TuningTable:
    """The table to pick by."""
    return packaged_table() if selection is None else selection


class Choice(NamedTuple):
    """What serves a call, and why."""

    implementation: Implementation
    reason: str


def choose(call: OpCall, platform: str, device: str | None = None, fuses: bool = False) -> Choice:
    """What serves a call on a platform.

    Args:
      device: as in the rows of tables; None: the one here.
      fuses: whether XLA can compute the first operand, or one of the largest, in one fusion with it.

    Raises:
      ValueError: a kernel is asked for, and there is none; or plain JAX, which on GPUs adds up rows in an order that
        varies from run to run, and that is forbidden.
    """
    if call.selection == "xla":
        if forbids_xla(call, platform):
            raise ValueError(
                f"{call.op.name}: implementation='xla' is asked for and deterministic=True, but XLA adds up rows in an "
                "order that varies from run to run; leave one of the two out"
            )
        return Choice("xla", "asked for")
    reason = call.unsupported_reason(platform)
    if call.selection == "kernel":
        if reason is not None:
            raise missing_kernel(call, [platform], reason)
        return Choice("kernel", "asked for")
    if reason is not None:
        return Choice("xla", reason)
    row = table_of(call.selection).row_for(call, device or device_name(platform), fuses)
    if row is None:
        return Choice("kernel", "no row of the table says otherwise")
    if forbids_xla(call, platform):
        return Choice("kernel", "deterministic=True is asked for")
    return Choice(row.implementation, f"XLA takes {row.ratio:.2f} of the kernel's time ({row.device}: {row.measured})")


def forbids_xla(call: OpCall, platform: str) -> bool:
    """Whether an order of additions is asked for, which XLA on GPUs does not keep from run to run."""
    return platform == "cuda" and bool(call.params.get("deterministic"))


def missing_kernel(call: OpCall, platforms: Sequence[str], reason: str) -> ValueError:
    """The error where a kernel is asked for that is not there."""
    return ValueError(
        f"{call.op.name}: implementation='kernel' is asked for, but there is no kernel for this call of dtype "
        f"{call.dtype.name} on {' and '.join(platforms)}: {reason}"
    )


def device_name(platform: str) -> str:
    """The name that tables have for the first device of a platform here; the platform's where there is none."""
    if platform != "cuda":
        return platform
    try:
        [device, *_] = jax.devices(platform)
    except RuntimeError:  # JAX's way to say that there is no such backend
        return platform
    return f"{platform}-{device.compute_capability}"
