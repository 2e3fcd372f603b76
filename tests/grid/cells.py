"""The grid of what polybridge promises, as data: run by `test_grid.py`, printed by `tools/support_table.py`.

Source x destination x mode x column. A column is asked for in every way that the destination has, by its own means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

COLUMNS = ("value", "first", "second", "jvp", "vmap", "jacobian", "hessian")


@dataclass(frozen=True)
class Side:
    """A kind of function of a framework, or a mode in which one is called."""

    framework: str
    name: str

    def __str__(self) -> str:
        return f"{self.framework}: {self.name}"


RULE, DIFFERENCES = Side("numpy", "`vjp=(fwd, bwd)`"), Side("numpy", '`vjp="finite-difference"`')
SOURCES = (
    Side("torch", "function"),
    Side("tensorflow", "eager function"),
    Side("tensorflow", "`tf.function`"),
    Side("tensorflow", "TF1 session graph"),
    Side("jax", "function"),
    RULE,
    DIFFERENCES,
)
COMPILED, XLA = Side("torch", "`torch.compile(fullgraph=True)`"), Side("tensorflow", "`tf.function(jit_compile=True)`")
MODES = (
    Side("torch", "eager"),
    COMPILED,
    Side("tensorflow", "eager"),
    Side("tensorflow", "`tf.function`"),
    XLA,
    Side("tensorflow", "TF1 graph"),
    Side("jax", "eager"),
    Side("jax", "`jax.jit`"),
    Side("numpy", "arrays"),
)

_HESSIANS = ("torch.func.hessian", "torch.func.jacrev of torch.func.grad")
_TORCH = {
    "value": ("a call",),
    "first": ("Tensor.backward", "torch.func.grad"),
    "second": ("torch.autograd.grad", "torch.func.grad"),
    "jvp": ("torch.func.jvp", "torch.autograd.forward_ad"),
    "vmap": ("torch.func.vmap",),
    "jacobian": ("torch.func.jacrev", "torch.func.jacfwd", "torch.autograd.functional.jacobian"),
    "hessian": (*_HESSIANS, "torch.autograd.functional.hessian"),
}
_TAPES = {
    "value": ("a call",),
    "first": ("tf.GradientTape.gradient",),
    "second": ("tf.GradientTape.gradient",),
    "jvp": ("tf.autodiff.ForwardAccumulator",),
    "vmap": ("tf.vectorized_map", "tf.map_fn"),
    "jacobian": ("tf.GradientTape.jacobian", "tf.GradientTape.jacobian without pfor"),
    "hessian": ("tf.GradientTape.jacobian",),
}
_JAX = {
    "value": ("a call",),
    "first": ("jax.grad", "jax.vjp"),
    "second": ("jax.grad",),
    "jvp": ("jax.jvp", "jax.linearize"),
    "vmap": ("jax.vmap",),
    "jacobian": ("jax.jacrev", "jax.jacfwd"),
    "hessian": ("jax.hessian", "jax.jacrev of jax.grad"),
}
WAYS: dict[Side, dict[str, tuple[str, ...]]] = dict(
    zip(
        MODES,
        (
            _TORCH,
            # The transforms are compiled; `backward` and `torch.autograd.grad` go through a compiled function. The
            # rest of torch.autograd does not know compiled functions, native ones neither (torch 2.13).
            _TORCH
            | {"jvp": ("torch.func.jvp",), "jacobian": ("torch.func.jacrev", "torch.func.jacfwd")}
            | {"hessian": _HESSIANS},
            _TAPES,
            _TAPES,
            _TAPES,
            {
                "value": ("a call",),
                "first": ("tf.gradients",),
                "second": ("tf.gradients",),
                "jvp": ("tf.gradients of tf.gradients",),
                "vmap": ("tf.vectorized_map", "tf.map_fn"),
                "jacobian": ("tf.gradients of each element",),
                "hessian": ("tf.hessians",),
            },
            _JAX,
            _JAX,
            {
                "value": ("a call",),
                "first": ("f.grad", "f.vjp"),
                "second": ("f.hessian",),
                "jvp": ("f.jvp",),
                "jacobian": ("f.vjp", "f.jvp"),
                "hessian": ("f.hessian",),
            },
        ),
        strict=True,
    )
)
NOT_APPLICABLE = {("numpy", "vmap"): "NumPy has no transform that vectorises a function."}
"""Why a destination has no way to ask for a column."""


@dataclass(frozen=True)
class Case:
    """One way of asking for one cell."""

    src: Side
    mode: Side
    column: str
    way: str

    def __str__(self) -> str:
        return f"{self.src} -> {self.mode} [{self.column}: {self.way}]"


@dataclass(frozen=True)
class Limit:
    """Cases that cannot work, each of which raises an error that says so.

    Args:
        reason: for the docs.
        error: the exception's name; a graph's runtime may wrap it, `polybridge.last_error()` is it.
        match: what the message has, as a regular expression.
        sources: where; everywhere without it, and so on.
        modes: where.
        columns: where.
        ways: where; some ways may work where others do not.
    """

    reason: str
    error: str
    match: str
    sources: tuple[Side, ...] = SOURCES
    modes: tuple[Side, ...] = MODES
    columns: tuple[str, ...] = COLUMNS
    ways: tuple[str, ...] = ()

    def covers(self, case: Case) -> bool:
        """Whether the case is one of these."""
        return (
            case.src in self.sources
            and case.mode in self.modes
            and case.column in self.columns
            and (not self.ways or case.way in self.ways)
        )


LIMITS = (
    Limit("XLA cannot hold a call into Python.", "CompilationError", "jit_compile=True", modes=(XLA,)),
    Limit(
        "torch's compiler differentiates what it has compiled once, as it does native functions. Take the derivatives "
        "inside of the compiled function, by `torch.func.grad`.",
        "RuntimeError",
        "does not currently support double backward",
        modes=(COMPILED,),
        columns=("second",),
        ways=("torch.autograd.grad",),
    ),
    Limit(
        "NumPy does not differentiate, so a rule that is written in it has no derivative of its own.",
        "NotDifferentiableError",
        "to be differentiated twice, but its rule",
        sources=(RULE,),
        columns=("second", "hessian"),
    ),
    Limit(
        "Forward mode is the derivative of the pullback, which a rule in NumPy does not have.",
        "NotDifferentiableError",
        "to be differentiated twice, but its rule",
        sources=(RULE,),
        columns=("jvp", "jacobian"),
        ways=tuple(way for ways in WAYS.values() for way in (*ways["jvp"], "torch.func.jacfwd", "jax.jacfwd")),
    ),
    Limit(
        "Forward over reverse mode is a derivative of third order of the function's differences, which would be noise.",
        "NotDifferentiableError",
        "differentiated three times by finite differences",
        sources=(DIFFERENCES,),
        columns=("hessian",),
        ways=("torch.func.hessian", "jax.hessian"),
    ),
)


def pairs() -> Iterator[tuple[Side, Side]]:
    """Yield every source with every mode of the other frameworks."""
    return ((src, mode) for src in SOURCES for mode in MODES if src.framework != mode.framework)


def cases(src: Side, mode: Side, column: str) -> list[Case]:
    """Return the ways of asking for a cell."""
    return [Case(src, mode, column, way) for way in WAYS[mode].get(column, ())]


def limit_of(case: Case) -> Limit | None:
    """Return why the case cannot work, or None if it does."""
    return next((limit for limit in LIMITS if limit.covers(case)), None)


def status(src: Side, mode: Side, column: str) -> str:
    """Return "yes" where some way works, "no" where none does, "n/a" where there is none."""
    found = [limit_of(case) is None for case in cases(src, mode, column)]
    return ("yes" if any(found) else "no") if found else "n/a"
