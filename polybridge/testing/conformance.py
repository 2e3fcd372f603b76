"""Checks a backend against every law of the contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polybridge.core.backend import Backend
from polybridge.testing import derivatives, tensors
from polybridge.testing.subject import Example, LawError, Subject

LAWS: tuple[Callable[[Subject], None], ...] = (
    tensors.has_a_name,
    tensors.tells_its_tensors,
    tensors.tensors_round_trip,
    tensors.takes_any_layout,
    tensors.from_numpy_copies,
    tensors.spec_tells_shape_and_dtype,
    tensors.is_differentiable_as_its_dtype,
    tensors.dense_keeps_dense_tensors,
    tensors.copy_has_memory_of_its_own,
    tensors.reference_has_the_same_values,
    tensors.dlpack_shares_memory,
    tensors.exports_what_is_dense,
    tensors.adopts_the_memory_of_an_array,
    tensors.a_capsule_keeps_its_memory,
    tensors.allocates_as_it_asks,
    tensors.owns_only_what_is_proved,
    tensors.version_tells_writes,
    tensors.same_compares_bytes,
    tensors.run_returns_what_it_runs,
    tensors.decorate_changes_nothing,
    tensors.state_can_be_entered_anywhere,
    tensors.placeholders_have_their_specs,
    derivatives.vjp_evaluates,
    derivatives.pullbacks_are_the_transposed_derivative,
    derivatives.vjp_inside_vjp_is_differentiable,
    derivatives.pullbacks_may_be_repeated,
    derivatives.pullbacks_keep_what_they_need,
    derivatives.absent_cotangents_are_zero,
    derivatives.pullbacks_have_pullbacks,
    derivatives.unused_primals_have_no_influence,
    derivatives.one_tensor_may_be_two_primals,
    derivatives.outputs_may_be_primals,
    derivatives.outputs_may_repeat,
    derivatives.placeholders_run,
    derivatives.native_functions_have_the_values,
    derivatives.native_functions_have_the_derivatives,
    derivatives.native_functions_pass_absent_cotangents,
)
"""Every law; each takes a `Subject` and raises a `LawError` that quotes it."""


def check_backend(backend: Backend, examples: Sequence[Example], **facts: Any) -> None:
    """Check every law on a backend.

    Args:
        backend: an instance of the backend.
        examples: functions of its framework for the laws of derivatives; take one with several inputs and outputs.
        **facts: `dtypes`, `order` and `write`, as `Subject` takes them.

    Raises:
        LawError: with every law that is broken, and what was found.
    """
    subject, broken = Subject(backend, examples, **facts), []
    for check in LAWS:
        try:
            check(subject)
        except LawError as error:
            broken.append(error)
    if broken:
        raise LawError("\n".join(map(str, broken))) from broken[0]
