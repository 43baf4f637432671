"""All code that depends on JAX's version, and all imports from ``jax._src``: no other file has either.

Private names are imported in the functions that use them. If a new JAX lacks a name, only the calls that need it fail,
not ``import jax_baracuda``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

import jax
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, Mesh

from jax_baracuda._core.identity import digest

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Primitive


P = ParamSpec("P")
R = TypeVar("R")


def _core() -> Any:
    """What ``jax.extend.core`` exports.

    Importing ``jax.extend`` is slow: it imports Pallas. In the middle of a program, it also adds settings that JAX's
    caches compare, and the program is traced again.
    """
    try:
        return importlib.import_module("jax._src.core")
    except ImportError:
        return importlib.import_module("jax.extend.core")


def new_primitive(name: str) -> Primitive:
    """A primitive that returns a list, still without rules."""
    primitive: Primitive = _core().Primitive(name)
    primitive.multiple_results = True
    return primitive


def primitive_of(
    name: str,
    run: Callable[..., Any],
    types: Callable[..., Any],
    *,
    batch: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
) -> Primitive:
    """A primitive for a function in plain JAX, with these rules. `run` and `types` return lists."""
    primitive = new_primitive(name)
    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), cacheable=False)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    return primitive


def program_primitive(name: str, **rules: Callable[..., Any]) -> Primitive:
    """A primitive that runs the traced program in its param `jaxpr`, with the rules of :func:`primitive_of`."""

    def run(*operands: Any, jaxpr: ClosedJaxpr, **_: Any) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*operands)

    return primitive_of(name, run, lambda *_, jaxpr, **__: jaxpr.out_avals, **rules)


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """Caches the results of a function until ``jax.clear_caches`` is called."""
    cached_function: Any = functools.lru_cache(maxsize=4096)(function)
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import util

        util.register_cache(cached_function, function.__name__)
    return cached_function


def is_staging() -> bool:
    """Whether JAX traces a program here that it lowers later."""
    from jax._src import core
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace

    trace: Any = core.trace_ctx.trace
    while trace is not None and not isinstance(trace, DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def jaxpr_as_fun(jaxpr: ClosedJaxpr) -> Callable[..., list[Any]]:
    """A traced program as a function."""
    function: Callable[..., list[Any]] = _core().jaxpr_as_fun(jaxpr)
    return function


def apply_primitive(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Compiles and runs a primitive: its implementation outside of ``jax.jit``."""
    from jax._src import dispatch

    return dispatch.apply_primitive(primitive, *operands, **params)


def lower_with_sharding_in_types(ctx: Any, value: Any, aval: Any) -> Any:
    """Annotates a value under lowering with the explicit sharding of its type."""
    from jax._src.interpreters import mlir

    return mlir.lower_with_sharding_in_types(ctx, value, aval)


def canonicalize_sharding(sharding: Any, name: str) -> Any:
    """Returns a sharding as it is, and a partition spec as a sharding over the mesh in context."""
    from jax._src.sharding_impls import canonicalize_sharding

    return canonicalize_sharding(sharding, name)


def require_devices_during_lowering(primitive: Primitive) -> None:
    """Tells JAX that the primitive's lowering must know its devices, as ``custom_partitioning`` does."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def register_dead_code_rule(primitive: Primitive, rule: Callable[[Sequence[bool], Any], Any]) -> None:
    """Registers what removes unused results: ``(whether each is used, equation)`` -> (operands used, what is left)."""
    # Since JAX 0.12, rules get one more argument between these.
    partial_eval.dce_rules[primitive] = lambda are_used, *others: rule(are_used, others[-1])


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes (of ``shard_map`` with ``check_vma``) over which a value varies."""
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(aval.vma)


def _cast_to_varying(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    if hasattr(jax.lax, "pcast"):  # jax >= 0.8.2
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


def unify_varying(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Makes all arrays vary over the union of their manual axes; the transpose of the cast is a ``psum``."""
    axes_of_each = [varying_axes(jax.typeof(x)) for x in arrays]
    union = frozenset[str]().union(*axes_of_each)
    return tuple(
        _cast_to_varying(x, tuple(sorted(union - axes))) if union - axes else x
        for x, axes in zip(arrays, axes_of_each, strict=True)
    )


def explicit_spec(aval: Any) -> tuple[Any, ...] | None:
    """The partition spec in the array's type, one entry per dimension; None outside explicit sharding."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or not sharding.mesh.explicit_axes:
        return None
    spec = tuple(sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def result_aval(like: Any, shape: Sequence[int], dtype: Any, spec: Sequence[Any] | None) -> Any:
    """The type of a result: this shape, dtype and partition spec, and the varying axes and mesh of `like`."""
    entries = tuple(spec) if spec is not None else (None,) * len(shape)
    sharding = like.sharding.update(spec=like.sharding.spec.update(partitions=entries))
    return like.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=sharding)


def as_weak(array: jax.Array) -> jax.Array:
    """The array with a weak type. No public function of JAX makes a strongly typed array weak."""
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def is_static_shape(shape: Sequence[Any]) -> bool:
    """Whether every dimension is a number (and not symbolic, as in ``jax.export``)."""
    from jax._src import core

    return core.is_constant_shape(tuple(shape))


def keeps_barriers() -> bool:
    """Whether XLA's CPU back end keeps fusions apart at an ``optimization_barrier``."""
    return jax.__version_info__ >= (0, 11)


def platforms_of(ctx: Any) -> Sequence[str]:
    """The platforms that a lowering is for: several if ``jax.export`` is called for several."""
    from jax._src.interpreters import mlir

    return mlir._platforms_for_eqn(ctx)


def lower_by_platform(
    name: str,
    rules: Mapping[str, Callable[..., Any]],
    default: Callable[..., Any],
    ctx: Any,
    /,
    *operands: Any,
    **params: Any,
) -> Any:
    """Like ``register_lowering`` with one rule per platform, but also works in programs for several platforms.

    There, JAX (0.8.0 to 0.12) fails if a lowering is not cacheable: it adds a list to a tuple of results.
    """
    from jax._src import effects
    from jax._src.interpreters import mlir

    ctx = ctx.replace(avals_out=list(ctx.avals_out))
    return mlir.lower_per_platform(ctx, name, dict(rules), default, effects.no_effects, *operands, **params)


def hide_frames_of(folder: str) -> None:
    """Leaves the files of a folder out of the tracebacks that JAX filters, as JAX does with its own files.

    ``JAX_TRACEBACK_FILTERING=off`` shows them again. Profiles, and JAX's errors, name the line that calls the folder.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import source_info_util, traceback_util

        traceback_util.register_exclusion(folder)
        source_info_util.register_exclusion(os.path.join(folder, ""))  # not a folder whose name starts with this one


def line_of(ctx: Any) -> tuple[str, int] | None:
    """The file and the line of the program that an operation comes from, in its lowering; None if JAX does not know."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import source_info_util

        for frame in source_info_util.user_frames(ctx.traceback):
            return frame.file_name, frame.start_line
    return None


def hiding_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Filters the tracebacks of what a function raises, as JAX does for its own functions."""
    try:
        from jax._src.traceback_util import api_boundary
    except ImportError:
        return function
    return api_boundary(function)


def concrete_or_error(value: Any, context: str) -> Any:
    """`value` as an index; raises ``ConcretizationTypeError`` if it is traced."""
    from jax._src import core

    return core.concrete_dim_or_error(value, context)


def partitioner_splits(axis_context: Any) -> bool:
    """Whether JAX's partitioner splits the program of a lowering over all its devices, and asks ops how.

    False inside ``shard_map``: see :func:`automatic_axis`.
    """
    return isinstance(axis_context, mlir.ShardingContext) and axis_context.num_devices > 1


def knows_devices(axis_context: Any) -> bool:
    """Whether a lowering knows the devices of the program, as it must to split a call over them."""
    return is_in_shard_map(axis_context) or getattr(axis_context, "device_assignment", None) is not None


def automatic_axis(axis_context: Any) -> Mesh | None:
    """The one axis that a ``shard_map`` leaves automatic, as a mesh of its own; None if there are none or several.

    The partitioner splits the program of each group of devices along the automatic axes, and numbers these devices in
    an unknown order. With several axes, it is thus unknown which of them splits an array.
    """
    mesh = axis_context.mesh if is_in_shard_map(axis_context) else None
    if not isinstance(mesh, Mesh):
        return None
    is_automatic = [mesh.shape[name] > 1 and name not in axis_context.manual_axes for name in mesh.axis_names]
    if sum(is_automatic) != 1:
        return None
    devices = mesh.devices[tuple(slice(None) if automatic else 0 for automatic in is_automatic)]
    return Mesh(devices, mesh.axis_names[is_automatic.index(True)])


@contextlib.contextmanager
def partitioning_over(mesh: Mesh | None) -> Iterator[None]:
    """Context in which ``custom_partitioning`` splits calls over `mesh`, not the program's mesh; None: no effect."""
    from jax._src.mesh import thread_resources

    outer = thread_resources.env
    if mesh is not None:
        thread_resources.env = outer.with_mesh(mesh)
    try:
        yield
    finally:
        thread_resources.env = outer


PARTITIONED_CALL = "jax_baracuda.partitioned"
"""The name under which :func:`_register_partitioner` registers its callbacks with XLA's partitioner."""


def finish_partitioned_call(ctx: Any, call: Any, name: str, *content: Any) -> None:
    """Has a call of ``custom_partitioning`` split under the current settings, and makes its program cacheable.

    The call holds the address of a Python object. This replaces the address by a name that identifies what is run. Two
    processes then lower a program to the same module, so JAX's persistent compilation cache finds it.

    Args:
      ctx: the lowering's context.
      call: the operation that ``custom_partitioning`` became.
      name: a name for people who read the program.
      content: values that determine what is run, together with the types of operands and results and the devices.
    """
    from jax._src import config, custom_partitioning
    from jax._src.lib.mlir import ir

    callbacks = custom_partitioning._sharding_callbacks
    _register_partitioner()
    call.attributes["call_target_name"] = ir.StringAttr.get(PARTITIONED_CALL)
    info = callbacks[call.attributes["backend_config"].value.encode()]
    # Settings with other names, such as check_vma, are JAX's internal state.
    user_settings = [setting for name, setting in config.config_states.items() if name.startswith("jax_")]
    info.settings = [(setting, setting.value) for setting in user_settings]
    axis_context = ctx.module_context.axis_context
    program = (
        (_mesh_content(axis_context.mesh), sorted(axis_context.manual_axes))
        if is_in_shard_map(axis_context)
        else [device.id for device in axis_context.device_assignment]
    )
    types_of_arrays = [(x.shape, x.dtype) for x in (*ctx.avals_in, *ctx.avals_out)]
    settings = [x for x in config.trace_context() if x is None or isinstance(x, bool | int | float | str)]
    identity = digest(content, types_of_arrays, platforms_of(ctx), _mesh_content(info.mesh), program, settings)
    if identity is None:
        return
    full_name = f"{name} {identity}"
    # JAX holds it weakly. Equal programs share one name, so it must live until the last of them is compiled.
    ctx.module_context.add_keepalive(callbacks.setdefault(full_name.encode(), info))
    call.attributes["backend_config"] = ir.StringAttr.get(full_name)


def _mesh_content(mesh: Mesh) -> tuple[Any, ...]:
    if mesh.empty:  # has None for a device
        return ()
    types_of_axes = [str(axis_type) for axis_type in mesh.axis_types]
    return mesh.axis_names, types_of_axes, mesh.devices.shape, [device.id for device in mesh.devices.flat]


@functools.cache
def _register_partitioner() -> None:
    """Has XLA split :data:`PARTITIONED_CALL` as JAX does, but under the settings in force at lowering.

    XLA compiles later, and with jax 0.10 splits programs in a thread of its own. A context of the user, such as
    ``jax.enable_x64``, may then have ended, or belong to another thread.
    """
    from jax._src import custom_partitioning, xla_bridge
    from jax._src.lib import xla_client

    def partition(*arguments: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for setting, value in custom_partitioning._sharding_callbacks[arguments[-1]].settings:
                if setting.value is not value:
                    stack.enter_context(setting(value))
            return custom_partitioning._custom_partitioning_partition(*arguments)

    register = functools.partial(
        xla_client.register_custom_call_partitioner,
        name=PARTITIONED_CALL,
        prop_user_sharding=custom_partitioning._custom_partitioning_propagate_user_sharding,
        partition=partition,
        infer_sharding_from_operands=custom_partitioning._custom_partitioning_infer_sharding_from_operands,
        can_side_effecting_have_replicated_sharding=True,
    )
    register()
    xla_bridge.register_plugin_callbacks(register)


def is_in_shard_map(axis_context: Any) -> bool:
    """Whether a lowering is inside ``shard_map``."""
    return isinstance(axis_context, mlir.SPMDAxisContext)


def without_abstract_mesh() -> contextlib.AbstractContextManager[Any]:
    """Context for collectives inside a partitioned program.

    With a mesh with explicit axes in context, the types of collectives refer to it, and the partitioner refuses them
    ("Unsupported reduction computation", jax 0.11).
    """
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def zero_tangent(primal: jax.Array) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


class Patch(NamedTuple):
    """Replaces something of JAX for a while. Making one takes longer than applying it.

    The functions that make one raise ImportError, AttributeError or KeyError if this JAX keeps the thing elsewhere.
    """

    is_current: Callable[[], bool]
    """Whether JAX still has what the patch was made for, while it is not applied."""
    apply: Callable[[], Any]
    undo: Callable[[], Any]


Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes one of JAX's functions and returns its replacement."""


def _patch(table: dict[Any, Any], keys: Sequence[Any], wrap: Callable[[Any, Any], Any]) -> Patch:
    """Replaces the values of these keys by what `wrap` makes of a key and its value."""

    def values() -> dict[Any, Any]:
        return {key: table[key] for key in keys if key in table}

    own = values()
    wrapped = {key: wrap(key, value) for key, value in own.items()}
    apply, undo = (functools.partial(table.update, these) for these in (wrapped, own))
    return Patch(lambda: values() == own, apply, undo)


def _patch_of_function(module: Any, name: str, wrap: Wrap) -> Patch:
    if not hasattr(module, name):
        raise AttributeError(f"{module.__name__} has no {name}")
    return _patch(vars(module), [name], lambda _, own: wrap(own))


def patch_of_segment_functions(wrap: Wrap) -> Patch:
    """`wrap` replaces the function that all ``jax.ops.segment_*`` call."""
    from jax._src.ops import scatter

    return _patch_of_function(scatter, "_segment_update", wrap)


def patch_of_transposed_gathers(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Patch:
    """JAX transposes gathers inside ``context()``."""
    from jax._src.interpreters import ad

    def wrap(_: Any, own: Callable[..., Any]) -> Callable[..., Any]:
        def rule(*args: Any, **params: Any) -> Any:
            with context():
                return own(*args, **params)

        return rule

    gather_p = jax.lax.gather_p
    rules: Any = ad.primitive_transposes if gather_p in ad.primitive_transposes else ad.fancy_transposes  # jax >= 0.11
    if gather_p not in rules:
        raise KeyError("no rule transposes gathers")
    return _patch(rules, [gather_p], wrap)


WrapLowering = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""Takes the name of a primitive and the rule that lowers it, and returns the rule's replacement."""


def patches_of_lowering(primitives: Sequence[Any], wrap: WrapLowering) -> list[Patch]:
    """`wrap` replaces the rules that lower these primitives.

    Meanwhile each call is lowered where it stands. Otherwise JAX lowers equal calls once, in a function that hides the
    origin of the operands. The rules also get to know the devices of the program.
    """
    from jax._src import dispatch
    from jax._src.interpreters import mlir

    def wrap_entry(primitive: Any, entry: Any) -> Any:
        return type(entry)(wrap(primitive.name, entry.rule), entry.inline)

    tables: list[Any] = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    if missing := [primitive for primitive in primitives if not any(primitive in table for table in tables)]:
        raise KeyError(f"no rules for {missing}")
    return [
        *(_patch(table, primitives, wrap_entry) for table in tables),
        _patch_of_members(mlir._uncacheable_primitives, primitives),
        _patch_of_members(dispatch.prim_requires_devices_during_lowering, primitives),
    ]


def patch_of_lowering_by_platform() -> Patch:
    """Lets JAX lower calls where they stand in programs for several platforms, too.

    There, JAX adds a list to the types of the results, which are a tuple if a call is lowered where it stands.
    """
    from jax._src.interpreters import mlir

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        def lower(ctx: Any, *args: Any, **kwargs: Any) -> Any:
            if len(platforms_of(ctx)) > 1:
                ctx = ctx.replace(avals_out=list(ctx.avals_out))
            return own(ctx, *args, **kwargs)

        return lower

    return _patch_of_function(mlir, "lower_per_platform", wrap)


def _patch_of_members(members: set[Any], more: Sequence[Any]) -> Patch:
    added = set(more) - members
    apply, undo = (functools.partial(change, added) for change in (members.update, members.difference_update))
    return Patch(lambda: members.isdisjoint(added), apply, undo)


def patch_of_slice_update(wrap: Wrap) -> Patch:
    """`wrap` replaces ``jax.lax.dynamic_update_slice``.

    Replaces the function's code, because programs may have imported the function before. The functions
    ``dynamic_update_slice_in_dim`` and ``dynamic_update_index_in_dim`` call it.
    """
    function = jax.lax.dynamic_update_slice
    code, defaults, signature = function.__code__, function.__kwdefaults__, inspect.signature(function)
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = defaults
    with_wrapped = {**(defaults or {}), "_wrapped": wrap(own)}

    def call(*args: Any, _wrapped: Callable[..., Any], **kwargs: Any) -> Any:
        return _wrapped(*args, **kwargs)

    def apply() -> None:
        function.__signature__ = signature
        # Set the default first: another thread may call the function in between, and the old code ignores it.
        function.__kwdefaults__ = with_wrapped
        function.__code__ = call.__code__

    def undo() -> None:
        function.__code__ = code
        function.__kwdefaults__ = defaults
        del function.__signature__

    return Patch(lambda: function.__code__ is code, apply, undo)


def patch_of_lowering_inside(context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Patch:
    """JAX lowers programs inside ``context()``, so that it applies to code traced during lowering.

    For example, JAX then traces how ``scan`` stacks its results. Such code must not be redirected.
    """
    from jax._src.interpreters import mlir

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def lower(*args: Any, **kwargs: Any) -> Any:
            with context():
                return own(*args, **kwargs)

        return lower

    return _patch_of_function(mlir, "lower_jaxpr_to_module", wrap)
