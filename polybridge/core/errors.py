"""Every exception and warning that polybridge raises, as one tree.

PolybridgeError
|-- BackendError
|   |-- UnknownBackendError       (LookupError)   no backend has this name
|   |-- BackendNotInstalledError  (ImportError)   the backend's framework is missing
|   `-- BrokenPluginError         (ImportError)   a plugin could not be loaded
|-- ArgumentError
|   |-- NotCallableError          (TypeError)     what was wrapped cannot be called
|   |-- WrongFrameworkError       (TypeError)     a tensor of a framework that is not expected here
|   |-- UnsupportedTensorError    (TypeError)     a tensor that the other side cannot hold
|   |-- CotangentError            (ValueError)    a cotangent or tangent that does not fit
|   |-- FactoryError              (TypeError)     a module that no name says how to build again
|   |-- UnsupportedModuleError    (TypeError)     a module that cannot compute with weights of another framework
|   `-- WeightsError              (ValueError)    weights or state that are not those of the module
|-- UnbuiltError                  (RuntimeError)  a module whose weights are not made yet
|-- OutputError                   (TypeError)     the function's result cannot cross or be differentiated
|-- NotDifferentiableError        (RuntimeError)  the source has no derivative to give
|-- MutationError                 (RuntimeError)  somebody wrote to memory that is shared
|-- PromisedShapeError            (ValueError)    a result differs from what was promised when tracing
|-- CompilationError              (RuntimeError)  a compiler that cannot hold a Python call
|-- ResidualError                 (RuntimeError)  a backward whose forward is gone
|-- RandomnessError               (RuntimeError)  a module draws random numbers that no key of the caller gives
|-- ForkError                     (RuntimeError)  a framework that ran before the fork cannot run after it
`-- EndingError                   (RuntimeError)  Python is ending, and frameworks with it

PolybridgeWarning (UserWarning)
|-- DetachedStateWarning          trainable state in the source gets no gradient
|-- LoopWarning                   a batch is evaluated example by example
|-- PrecisionWarning              a dtype that the other side narrows
`-- UntracedWarning               a function that its framework cannot compile
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import sys
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING


class PolybridgeError(Exception):
    """Base of every exception of polybridge."""

    # AutoGraph re-raises an exception with its own type only if its constructor is this very object.
    if not TYPE_CHECKING:
        __init__ = Exception.__init__


class BackendError(PolybridgeError):
    """A backend that cannot be had."""


class UnknownBackendError(BackendError, LookupError):
    """No backend has this name."""

    @classmethod
    def named(cls, name: object, known: Iterable[str], broken: Iterable[str]) -> UnknownBackendError:
        """Say which name was asked for, which exist, and which of them is near."""
        known, broken = sorted(known), sorted(broken)
        meant = name if isinstance(name, str) else getattr(name, "__name__", "")  # of a framework's module, say
        hint = did_you_mean(str(meant).lower(), known)
        aside = f" Plugins that failed to load: {', '.join(broken)}." if broken else ""
        return cls(f"No backend is named {name!r}.{hint} Known names: {', '.join(known)}.{aside}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the name that is nearest, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


class BackendNotInstalledError(BackendError, ImportError):
    """The backend is known, its framework is not installed."""

    @classmethod
    def of(cls, name: str, requirement: str) -> BackendNotInstalledError:
        """Say which framework is missing and the command that installs it."""
        command = shlex.join(["pip", "install", *requirement.split()])  # a shell would redirect at `>`
        return cls(f"The backend {name!r} needs a framework that is not installed: `{command}`.")


class BrokenPluginError(BackendError, ImportError):
    """A plugin whose import or hook failed."""

    @classmethod
    def of(cls, name: str, plugin: str, error: BaseException) -> BrokenPluginError:
        """Name the plugin and what it raised."""
        return cls(f"The backend {name!r} of plugin {plugin} failed to load: {type(error).__name__}: {error}")


class ArgumentError(PolybridgeError):
    """A wrong argument of a public call."""


class NotCallableError(ArgumentError, TypeError):
    """`polybridge.wrap` was given something that cannot be called."""

    @classmethod
    def got(cls, fn: object) -> NotCallableError:
        """Say what came instead of a function."""
        return cls(f"`polybridge.wrap` expects a callable, got {fn!r} of type {type(fn).__name__}.")

    @classmethod
    def of_modules(cls, found: type) -> NotCallableError:
        """Say that a class came instead of one of its modules."""
        return cls(
            f"`polybridge.wrap` was given the class {found.__qualname__}, not a module. Wrap an instance of it: "
            f"`polybridge.wrap({found.__qualname__}(...), ...)`."
        )

    @classmethod
    def saved_model(cls, functions: Iterable[str], signatures: Iterable[str]) -> NotCallableError:
        """Say what a SavedModel that is no function has."""
        return cls(
            f"`polybridge.wrap` was given a SavedModel without `__call__`. Its functions: "
            f"{', '.join(functions) or 'none'}; its signatures: {', '.join(signatures) or 'none'}. Save the module "
            f"with a `@tf.function` `__call__`, or wrap one of these, whose variables are then constants: "
            f'`wrap(loaded.signatures[...], src="tf", dst=...)`.'
        )


class WrongFrameworkError(ArgumentError, TypeError):
    """A tensor of a framework that this call does not take."""

    @classmethod
    def argument(cls, call: str, path: str, found: type, expected: str) -> WrongFrameworkError:
        """Name the call, the argument's path or the weight, what came, what was expected and the way out."""
        value = "x" if path.startswith("the ") else path  # a weight by its name
        return cls(
            f"`{call}` takes {expected} tensors, but {path} is a "
            f"{found.__module__}.{found.__qualname__}. Convert it first: "
            f'`polybridge.convert({value}, "{expected}")`.'
        )

    @classmethod
    def random(cls, call: str, path: str, found: type, expected: str) -> WrongFrameworkError:
        """Say that a module of the caller's framework takes its random numbers from there."""
        return cls(
            f"`{call}` takes {expected} tensors, but {path} is a {found.__module__}.{found.__qualname__}. The random "
            f"numbers of a module follow from the seed of {expected}: leave {path} out."
        )

    @classmethod
    def bridged(cls, name: str, own: str, src: str) -> WrongFrameworkError:
        """Say what framework a function belongs to that was wrapped before, where another was named."""
        return cls(
            f"`polybridge.wrap` was given src={src!r}, but `{name}` has been wrapped already, and is a function of "
            f"{own}. Leave src= out."
        )

    @classmethod
    def module(cls, found: type, owner: str, src: str) -> WrongFrameworkError:
        """Say which library a module belongs to, where another was named."""
        return cls(
            f"`polybridge.wrap` was given src={src!r}, but {found.__qualname__} is a module of {owner}. Leave src= out."
        )


class UnsupportedTensorError(ArgumentError, TypeError):
    """A tensor that cannot cross between the two frameworks."""

    def at(self, call: str, path: str) -> UnsupportedTensorError:
        """Return the error with its place among the arguments or results, which who raised it did not know."""
        return type(self)(f"`{call}`: {path} cannot cross between frameworks: {self}.")

    @classmethod
    def composite(cls, value: object, advice: str = "") -> UnsupportedTensorError:
        """Say that a value has tensors in it that nobody hands over; its place is not known yet."""
        return cls(
            f"a {type(value).__name__} is not a dense tensor, nor a list, tuple, dict, named tuple or dataclass of such"
            f"{advice and '. '}{advice}"
        )

    @classmethod
    def weight(cls, call: str, name: str, found: str, own: str, reason: str) -> UnsupportedTensorError:
        """Say that a weight has another dtype than the source can compute in."""
        return cls(
            f"`{call}` was given {name!r} in {found}, but its source holds it in {own} and cannot compute in "
            f"another dtype: {reason}. Leave the module in {own}, or build the source in {found}."
        )


class CotangentError(ArgumentError, ValueError):
    """A cotangent or tangent that is not like what it belongs to."""

    @classmethod
    def misfit(cls, call: str, where: str, found: object, expected: object) -> CotangentError:
        """Name the leaf, what came and what fits."""
        return cls(f"`{call}`: {where} is {found}, but {expected} is needed there.")


class FactoryError(ArgumentError, TypeError):
    """A module of another framework was to be saved or loaded, but no name says how to build it."""

    @classmethod
    def missing(cls, call: str, reason: object) -> FactoryError:
        """Say that a bridged module cannot be saved without a factory, and why its source cannot be saved itself."""
        return cls(
            f"`{call}` cannot be saved by itself: {reason}. Give `polybridge.wrap` a function that builds the source "
            f"again, `factory=make_model`, which an import finds or `polybridge.register_factory` has named; or save "
            f"its weights only."
        )

    @classmethod
    def not_callable(cls, factory: object) -> FactoryError:
        """Say what came instead of a function."""
        return cls(f"A factory is a function that builds a module, got {factory!r} of type {type(factory).__name__}.")

    @classmethod
    def unnamed(cls, factory: object) -> FactoryError:
        """Say that no import finds the factory."""
        return cls(
            f"The factory {factory!r} cannot be named in a file: no import finds it. Define it at the top of a module, "
            f'or name it: `polybridge.register_factory("my-model", fn)`.'
        )

    @classmethod
    def arguments(cls, factory: object) -> FactoryError:
        """Say that the arguments of a partial cannot be written down."""
        return cls(
            f"The factory {factory!r} cannot be named in a file: its arguments are not what JSON holds (numbers, "
            f"strings, None, lists, dicts with string keys). Give it such arguments."
        )

    @classmethod
    def unsafe(cls, where: str) -> FactoryError:
        """Say that a file wants code to be imported and called, which its reader has not allowed."""
        return cls(
            f"The file has a bridged module whose factory {where!r} would be imported and called. If you trust the "
            f'file, load it with `safe_mode=False`; or call `polybridge.register_factory("my-model", fn)` before it is '
            f"saved and before it is loaded."
        )

    @classmethod
    def other(cls, reference: object, names: Iterable[str], made: Iterable[str]) -> FactoryError:
        """Say that another module was built than the one that was saved."""
        return cls(
            f"What the factory {reference!r} builds is not what was saved: it has the weights and state "
            f"{sorted(made)}, and {sorted(names)} were saved."
        )

    @classmethod
    def unknown(cls, reference: object, error: BaseException) -> FactoryError:
        """Say that a saved name leads nowhere in this process."""
        return cls(
            f"The factory {reference!r} cannot be found here ({type(error).__name__}: {error}). Make its module "
            f"importable, or call `polybridge.register_factory` before loading."
        )


class UnsupportedModuleError(ArgumentError, TypeError):
    """A module that cannot compute with the weights that another framework holds."""

    @classmethod
    def unbound(cls, name: str) -> UnsupportedModuleError:
        """Say that a module of Flax linen holds no weights."""
        return cls(
            f"`polybridge.wrap` cannot bridge {name}: a module of Flax linen holds no weights. Wrap its function: "
            f'`polybridge.wrap(module.apply, src="jax", params=module.init(key, x), dst=...)`.'
        )

    @classmethod
    def keras_on(cls, runs_on: str) -> UnsupportedModuleError:
        """Say that Keras computes with another framework than its modules are bridged with."""
        return cls(
            f"`polybridge.wrap` bridges Keras's layers and models where Keras runs on TensorFlow, but here it runs on "
            f'{runs_on}. Set `KERAS_BACKEND="tensorflow"` in the environment before Keras is imported.'
        )

    @classmethod
    def scripted(cls, name: str) -> UnsupportedModuleError:
        """Say why TorchScript's modules are no source."""
        return cls(
            f"`polybridge.wrap` cannot bridge {name}: TorchScript has compiled it together with its parameters, and it "
            f"computes with no others. Wrap the `nn.Module` that it was made of; or, for a model that is not trained, "
            f"a function that calls it, with src='torch'."
        )


class WeightsError(ArgumentError, ValueError):
    """Weights or state that are not those of the module."""

    @classmethod
    def no_mapping(cls, call: str, name: str, found: type) -> WeightsError:
        """Say that the arguments of `apply` are not in their places."""
        return cls(
            f"`{call}` takes `(params, state, *args)`, first two dicts of arrays by name, but {name} is a "
            f"{found.__module__}.{found.__qualname__}. Give the two that `polybridge.wrap` returned, also where "
            f"`state` is empty."
        )

    @classmethod
    def unlike(cls, call: str, missing: Iterable[str], unknown: Iterable[str]) -> WeightsError:
        """Say which weights a module lacks, and which it does not know."""
        found = [
            f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("does not know", unknown)) if names
        ]
        return cls(
            f"`{call}` {' and '.join(found)}. Give it the trees that `polybridge.wrap` returned, with other values."
        )

    @classmethod
    def misfit(cls, call: str, name: str, found: object, expected: object) -> WeightsError:
        """Name a weight of another shape, or one that has none."""
        return cls(
            f"`{call}`: the weight {name} has shape {found}, but the module's own has {expected}. A stack of weights "
            f"goes through `jax.vmap`."
        )

    @classmethod
    def rebuilt(cls, name: str) -> WeightsError:
        """Say that the source is not what was wrapped."""
        return cls(
            f"`{name}` has other layers, weights or ties between weights than when it was wrapped, so that its bridged "
            f"module holds what it does not compute with. Wrap it again after such a change: "
            f"`polybridge.wrap(module, dst=...)`."
        )

    @classmethod
    def stateful(cls, call: str) -> WeightsError:
        """Say that a module that has state was called without it."""
        return cls(
            f"`{call}` has state, such as statistics or frozen weights, and was called without it. Call "
            f"`model(x, state)`, which returns `(out, state)`; `equinox.nn.State(model)` is its first state."
        )


class UnbuiltError(PolybridgeError, RuntimeError):
    """Weights were asked for that a module makes at its first call."""

    @classmethod
    def before_call(cls, name: str) -> UnbuiltError:
        """Say that the native module has to be called once."""
        return cls(
            f"`{name}` makes its weights at its first call, so it has none yet that an optimiser could take, or a file "
            f"fill. Call it once, without gradients if you like, or build the source before you wrap it."
        )

    @classmethod
    def before_wrap(cls, name: str, dst: str) -> UnbuiltError:
        """Say that the source has to be called once."""
        return cls(
            f"`{name}` makes its weights at its first call, and a module of {dst} takes them when it is made. Call "
            f"or build it once before you wrap it."
        )


class OutputError(PolybridgeError, TypeError):
    """The wrapped function returned something that cannot be handed over."""

    @classmethod
    def foreign(cls, call: str, path: str, found: type, expected: str) -> OutputError:
        """Name the leaf of the result that belongs to another framework."""
        return cls(
            f"`{call}` wraps a {expected} function, but its result has a "
            f"{found.__module__}.{found.__qualname__} at {path}. Return {expected} tensors."
        )

    @classmethod
    def no_tensor(cls, call: str, found: object) -> OutputError:
        """Say that a derivative was asked of a result without a tensor."""
        return cls(
            f"`{call}` was called with inputs that need gradients, but the function returned no tensor "
            f"(got {type(found).__name__}: {found!r:.80}). Return a tensor, or call it where gradients are off."
        )

    @classmethod
    def without_state(cls, call: str, found: object) -> OutputError:
        """Say that a function with a state returned none."""
        return cls(
            f"`{call}` was wrapped with `state=`, so it is to return `(out, state)`, but it returned a value of type "
            f"{type(found).__name__}. Return the new state too, or leave `state=` out."
        )

    @classmethod
    def of_rule(cls, call: str, returned: str, problem: str) -> OutputError:
        """Say which of the functions given as `vjp=` or `jvp=` returned something wrong, where and what."""
        return cls(f"`{call}` was wrapped with a rule for its derivative, but {returned} {problem}.")

    @classmethod
    def not_scalar(cls, call: str, found: Iterable[object]) -> OutputError:
        """Say that a gradient was asked of something else than one real number."""
        return cls(
            f"`{call}` has no gradient: its result is not one real number, but {', '.join(map(str, found))}. "
            f"Use `{call}.vjp`, which takes a cotangent."
        )

    @classmethod
    def uneven(cls, call: str, found: Iterable[object], promised: Iterable[object]) -> OutputError:
        """Say that a function's results changed shape or dtype when its inputs were moved a little."""
        one, other = (", ".join(map(str, specs)) for specs in (found, promised))
        return cls(
            f"`{call}` is differentiated by finite differences, but returned {one} right beside inputs where it "
            f"returned {other}. Give `polybridge.wrap` a rule, `vjp=(fwd, bwd)`."
        )


class NotDifferentiableError(PolybridgeError, RuntimeError):
    """The source function has no derivative to give."""

    @classmethod
    def uneven(cls, call: str) -> NotDifferentiableError:
        """Say that the examples of a batch depend on different inputs."""
        return cls(
            f"`{call}` was evaluated example by example, and its derivative does not depend on the same inputs in "
            f"each, so that the batch has no second derivative. Make the function depend on all of them, if only by "
            f"`+ 0 * x`."
        )

    @classmethod
    def without_rule(cls, call: str, framework: str) -> NotDifferentiableError:
        """Say that the framework differentiates nothing, and the two ways out."""
        return cls(
            f"`{call}` has no derivative: {framework} does not differentiate its functions. Give `polybridge.wrap` "
            f"one, either `vjp=(fwd, bwd)`, where `fwd(*args)` returns `(out, residuals)` and `bwd(residuals, ct)` a "
            f'tuple with one cotangent for each argument, or `vjp="finite-difference"`.'
        )

    @classmethod
    def beyond_rule(cls, call: str, framework: str) -> NotDifferentiableError:
        """Say that a rule has no derivative of its own where the framework differentiates nothing."""
        return cls(
            f"`{call}` was to be differentiated twice, but its rule `vjp=(fwd, bwd)` is made of {framework} functions, "
            f"which have no derivative. Write the rule in a framework that differentiates, or use "
            f'`vjp="finite-difference"`, which has a second derivative.'
        )

    @classmethod
    def forward_only(cls, call: str) -> NotDifferentiableError:
        """Say that only a forward rule was given."""
        return cls(
            f"`{call}` was wrapped with `jvp=` alone, which gives no cotangents. Give `vjp=` as well, as "
            f'`(fwd, bwd)` or "finite-difference".'
        )

    @classmethod
    def beyond_differences(cls, call: str, times: str) -> NotDifferentiableError:
        """Say where finite differences end."""
        return cls(
            f"`{call}` was to be differentiated {times} by finite differences, which would be noise. Give "
            f"`polybridge.wrap` a rule in a framework that differentiates, `vjp=(fwd, bwd)`, or use a wider dtype. "
            f"`jax.hessian` and `torch.func.hessian`, forward over reverse mode, differentiate three times: take "
            f"reverse mode twice, as in `jax.jacrev(jax.jacrev(f))`."
        )

    @classmethod
    def transposed(cls, call: str) -> NotDifferentiableError:
        """Say that nobody knows whether a function is linear."""
        return cls(
            f"`{call}` was to be transposed (`jax.linear_transpose`, `jax.lax.custom_linear_solve`), but nobody knows "
            f"whether it is linear. If it is, `jax.linearize(f, zeros)[1]` is the same function, and has a transpose."
        )

    @classmethod
    def of_argument(cls, call: str, number: int, found: str) -> NotDifferentiableError:
        """Say that an argument is nothing that a derivative can be taken in."""
        return cls(f"`{call}` was to be differentiated in args[{number}], which {found}. Give `numpy.asarray(...)`.")

    @classmethod
    def without_argument(cls, call: str, number: int, count: int) -> NotDifferentiableError:
        """Say that there is no such argument."""
        return cls(
            f"`{call}` was to be differentiated in args[{number}] (`argnums=`), and was called with {count} positional "
            f"arguments. Pass that argument by position."
        )

    @classmethod
    def keywords(cls, call: str, names: Iterable[str]) -> NotDifferentiableError:
        """Say that a forward rule takes positional arguments only."""
        return cls(
            f"`{call}` was called with the keyword arguments {', '.join(names)}, which a rule "
            f"`jvp(primals, tangents)` has no place for. Pass them by position."
        )

    @classmethod
    def run_again(cls, framework: str) -> NotDifferentiableError:
        """Say that a second run, for a second derivative, gave other values."""
        return cls(
            f"A function of the backend {framework!r} gave other values when it was run again for its "
            f"second derivative, as a random one does. The backend has to return a `polybridge.Pullback`, which "
            f"keeps the first run; in a rule `vjp=(fwd, bwd)` fwd has to take its random numbers as an argument."
        )


class MutationError(PolybridgeError, RuntimeError):
    """Somebody wrote to a tensor whose memory is shared between two frameworks."""

    @classmethod
    def written(cls, call: str, path: str) -> MutationError:
        """Say which input was written to and how to prevent it."""
        return cls(
            f"`{call}` wrote in place to {path}, whose memory it shares with the caller's tensor, although it "
            f"had not done so in earlier calls. That tensor may have changed. Wrap the function with `copy=True`, "
            f"or do not write to its inputs."
        )

    @classmethod
    def residuals(cls, call: str) -> MutationError:
        """Say that what a rule has kept for its backward is no longer what it was."""
        return cls(
            f"Somebody wrote in place to what `fwd` of the rule of `{call}` had returned as residuals, before `bwd` "
            f"was called. Return a `.clone()` of a tensor that is written to later."
        )

    @classmethod
    def weight(cls, call: str, name: str) -> MutationError:
        """Say that a module changes what an optimiser is to change."""
        return cls(
            f"`{call}` assigned to its trainable variable {name!r} during a call. What a module changes by itself is "
            f"state: make it `tf.Variable(..., trainable=False)`."
        )

    @classmethod
    def unlisted(cls, call: str) -> MutationError:
        """Say that a module changes what it does not tell of."""
        return cls(
            f"`{call}` assigned to a variable that none of its layers lists or holds as an attribute, and what it has "
            f"assigned would be lost. Make the variable by `add_weight`, or an attribute of its layer."
        )

    @classmethod
    def late(cls, call: str, name: str) -> MutationError:
        """Say that a module has made a variable while it ran."""
        return cls(
            f"`{call}` made the variable {name} in a call, and what it holds would be lost: the next call would make "
            f"it again. Make it where the module is made, or call the module once before `polybridge.wrap`."
        )

    @classmethod
    def refused(cls, call: str, error: BaseException) -> MutationError:
        """Say that a write was stopped, and what happens next."""
        return cls(
            f"`{call}` tried to write in place to an input whose memory it shares with the caller's tensor, although "
            f"it had not done so in earlier calls ({error}). Nothing was written, and later calls get copies. Wrap "
            f"the function with `copy=True`, or do not write to its inputs."
        )


class PromisedShapeError(PolybridgeError, ValueError):
    """A result differs from what was promised when the graph was traced."""

    @classmethod
    def differs(cls, call: str, path: str, found: object, promised: object) -> PromisedShapeError:
        """Name the leaf, what came and what the trace promised."""
        return cls(
            f"`{call}` returned {found} at {path}, but {promised} was promised when the graph was traced. "
            f"Give `output_specs=` to `polybridge.wrap`, with None for a dimension that varies. Where the function has "
            f"changed since (a mode, autocast, a variable that it closes over), trace it again: in a new `jax.jit` or "
            f"`tf.function`."
        )

    @classmethod
    def unknown(cls, call: str, specs: Iterable[object], error: BaseException) -> PromisedShapeError:
        """Say that the result's shapes could not be found while tracing, and how to give them."""
        return cls(
            f"`{call}` is being traced into a graph. To find the shapes of its result it was run on placeholders "
            f"{', '.join(map(str, specs))}, and needs values, which these have not ({type(error).__name__}: {error}). "
            f"Give `output_specs=` to `polybridge.wrap`."
        )

    @classmethod
    def open_in_jax(cls, call: str, specs: Iterable[object]) -> PromisedShapeError:
        """Say that JAX compiles for shapes that are known."""
        return cls(
            f"`{call}` is being traced by JAX, which compiles for known shapes, but its result has the specs "
            f"{', '.join(map(str, specs))}. Give `output_specs=` to `polybridge.wrap` with every dimension."
        )


class CompilationError(PolybridgeError, RuntimeError):
    """A compiler that cannot hold a call into Python."""

    @classmethod
    def in_xla(cls, call: str) -> CompilationError:
        """Say why XLA cannot compile the call and how to go on."""
        return cls(
            f"`{call}` was called inside a function that XLA compiles (`jit_compile=True`): it runs in another "
            f"framework, and XLA cannot hold a call into Python. Use `jit_compile=False` for the function that has "
            f"the call (in Keras: `compile(jit_compile=False)`); other functions may keep `jit_compile=True`."
        )

    @classmethod
    def in_export(cls, call: str) -> CompilationError:
        """Say why an exported program cannot hold the call."""
        return cls(
            f"`{call}` was called inside a function that `jax.export` serialises: it runs in another framework of this "
            f"process, and a call into Python cannot be written to a file. Export the functions around it."
        )

    @classmethod
    def in_saved_model(cls, call: str) -> CompilationError:
        """Say why the call cannot be exported and what can."""
        return cls(
            f"`{call}` is in a function that is being exported as a SavedModel: it runs in another framework, in this "
            f"Python process, and a SavedModel cannot hold it. Export the parts without the call, or save weights only "
            f"(`tf.train.Checkpoint`; in Keras `save_weights`) and build the model again in Python."
        )

    @classmethod
    def over_processes(cls, call: str) -> CompilationError:
        """Say why a program over several processes cannot hold the call on whole arrays."""
        return cls(
            f"`{call}` was called on arrays that are spread over several processes: it takes whole arrays, which no "
            f"process has. Call it in `jax.shard_map`, where each device calls it with its own part."
        )

    @classmethod
    def over_some_axes(cls, call: str) -> CompilationError:
        """Say why a `jax.shard_map` over some axes of a mesh cannot hold the call."""
        return cls(
            f"`{call}` was called in a `jax.shard_map` over some axes of the mesh: XLA would split the call along the "
            f"others, and cannot split a call into Python. Map over all axes (without `axis_names=`)."
        )

    @classmethod
    def in_torchscript(cls, call: str) -> CompilationError:
        """Say why TorchScript cannot hold the call and what can."""
        return cls(
            f"`{call}` was called while `torch.jit.trace` (or an ONNX export by it) records a graph: it runs in "
            f"another framework, and the trace would keep its result as a constant. Trace the functions around it, "
            f"or use `torch.compile` or `torch.export`."
        )

    @classmethod
    def elsewhere(cls, call: str) -> CompilationError:
        """Say that a graph has left the process that has its function."""
        return cls(
            f"A graph calls `{call}`, which belongs to the process that compiled or exported it: a wrapped function "
            f"is Python code of another framework, which no file holds. Export the graph again where it runs."
        )


class ResidualError(PolybridgeError, RuntimeError):
    """A backward was asked for whose forward is gone."""

    @classmethod
    def gone(cls) -> ResidualError:
        """Say what drops a residual too early."""
        return cls(
            "A gradient was asked for of a wrapped function whose forward is gone: it was thousands of calls ago, or "
            "polybridge's token was copied instead of passed on, by a loop or by a saved-tensor hook. Compute the "
            "gradient in the loop, function or transform that has the call, put parts of a long loop into "
            "`jax.checkpoint`, and leave int64 tensors out of hooks."
        )

    @classmethod
    def mixed(cls) -> ResidualError:
        """Say that a batch of derivatives is not that of one batch of evaluations."""
        return cls(
            "A batch of gradients was asked for of wrapped functions that were not evaluated as this batch: pullbacks "
            "of several calls were stacked, or those of one batch were taken apart. Differentiate inside of the `vmap`."
        )

    @classmethod
    def differs(cls) -> ResidualError:
        """Say that the forward cannot be had again."""
        return cls(
            "A gradient was asked for of a wrapped function long after its forward, whose residual had made room for "
            "those of later calls. Another evaluation gave other values, as a random function does. Compute gradients "
            "in smaller loops, or sooner after the forward."
        )

    @classmethod
    def freed(cls) -> ResidualError:
        """Say that an input's memory is no longer what the forward has saved."""
        return cls(
            "A gradient was asked for of a wrapped function one of whose inputs has been freed since the forward, as "
            "FSDP frees weights (`reshard_after_forward`): the other framework has saved what was there. Pass a copy "
            "(`weight.clone()`), or wrap a module, which copies such weights."
        )

    @classmethod
    def written(cls, call: str) -> ResidualError:
        """Say that an input has other values than the forward has saved."""
        return cls(
            f"A gradient was asked for of `{call}` after one of its weights was changed in place, which the forward "
            f"had saved. Take the gradient before the change, or pass a copy (`weight.clone()`)."
        )


class RandomnessError(PolybridgeError, RuntimeError):
    """A module draws random numbers, and the call gave it nothing from which they follow."""

    @classmethod
    def unseeded(cls, call: str) -> RandomnessError:
        """Say what draws, and how the caller gives a key."""
        return cls(
            f"`{call}` draws random numbers, and was given no key from which they follow. Pass one: `rng=key` to the "
            f"function that `polybridge.wrap` returned, `rngs=` to a module of Flax, `key=` to one of Equinox."
        )

    @classmethod
    def unseedable(cls, call: str) -> RandomnessError:
        """Say that no key reaches the generator, and what one does reach."""
        return cls(
            f"`{call}` draws random numbers from its framework's own generator, which follow from no key: the same "
            f"call would give others each time. Let it draw from a generator that is part of its state, such as "
            f"`tf.random.Generator`, or call it as in evaluation."
        )

    @classmethod
    def recomputed(cls, call: str, function: str) -> RandomnessError:
        """Say that the backward would see other numbers than the forward."""
        return cls(
            f"`{call}` draws random numbers, and was called in a function of `{function}`, which is run again in the "
            f"backward and would draw others. Call it outside of that function."
        )


class ForkError(PolybridgeError, RuntimeError):
    """A framework that had started before the fork cannot be used in the child."""

    @classmethod
    def in_child(cls, call: str, names: Iterable[str]) -> ForkError:
        """Name the frameworks and the start methods that work."""
        return cls(
            f"`{call}` was called in a forked process, but {', '.join(sorted(names))} had started before the fork and "
            f'would hang here. Start the process with "spawn" or "forkserver" '
            f'(`multiprocessing_context="spawn"` in a DataLoader).'
        )


class EndingError(PolybridgeError, RuntimeError):
    """Python is being taken down, and frameworks cannot be called any more."""

    @classmethod
    def of(cls, call: str) -> EndingError:
        """Say who calls so late, and when to call instead."""
        return cls(
            f"`{call}` was called when Python was ending, by the `__del__` of an object that was left over: frameworks "
            f"abort or hang there. Delete the object before, or call from a function given to `atexit.register`."
        )


class PolybridgeWarning(UserWarning):
    """Base of every warning of polybridge."""


class DetachedStateWarning(PolybridgeWarning):
    """Trainable state that the wrapped function closes over gets no gradient."""

    @classmethod
    def naming(cls, call: str, names: Iterable[str]) -> DetachedStateWarning:
        """Name the state and say how to pass it as an input."""
        return cls(
            f"`{call}` closes over trainable state that gets no gradient through the wrapped function: "
            f"{', '.join(names)}. Pass it as an argument, for example `f(weights, x)` with "
            f"`weights` a list or dict of tensors, so that its gradient comes back with the others."
        )

    @classmethod
    def losses(cls, call: str, count: int) -> DetachedStateWarning:
        """Say that regularisers and the like have no place in the destination."""
        return cls(
            f"`{call}` adds {count} terms to the loss (regularisers, `add_loss`), which this destination has no place "
            f"for: its gradient lacks them. Compute them yourself from the weights and results."
        )

    @classmethod
    def late(cls, call: str, names: Iterable[str]) -> DetachedStateWarning:
        """Say that an optimiser made before the first call lacks weights."""
        return cls(
            f"`{call}` has made weights at its first call: {', '.join(names)}. They are parameters now, but an "
            f"optimiser that was made before does not have them: make it after the first call."
        )

    @classmethod
    def made(cls, call: str, names: Iterable[str]) -> DetachedStateWarning:
        """Say that state that a module has made later is no state of the destination."""
        return cls(
            f"`{call}` has made buffers since it was wrapped: {', '.join(names)}. They stay in the source: its bridged "
            f"modules share them, and do not save or copy them. Call the module once before you wrap it."
        )


class LoopWarning(PolybridgeWarning):
    """A batch is evaluated example by example."""

    @classmethod
    def because(cls, call: str, error: BaseException) -> LoopWarning:
        """Say what the source's own vectorisation raised."""
        reason = (str(error).strip().splitlines() or [""])[0]
        return cls(
            f"`{call}` is evaluated for one example of a batch after the other, which is right but slow: its framework "
            f"could not vectorise it ({type(error).__name__}: {reason})."
        )


class PrecisionWarning(PolybridgeWarning):
    """A dtype that the other side narrows."""

    @classmethod
    def in_jax(cls) -> PrecisionWarning:
        """Say that JAX computes in 32 bits, and how to switch 64 on."""
        return cls(
            "JAX has 64 bits switched off: float64 and complex128 tensors reach its functions as float32 and "
            'complex64. `jax.config.update("jax_enable_x64", True)` switches them on. This is said once.'
        )


class UntracedWarning(PolybridgeWarning):
    """A function that its framework cannot compile, and that runs operation by operation."""

    @classmethod
    def reading(cls, line: str, error: str) -> UntracedWarning:
        """Say which line asks for values that a trace has not, and what to do."""
        return cls(
            f"JAX cannot compile this function, which needs the values of its inputs at {line} ({error}). It runs "
            f"operation by operation from now on, and is traced at every call, which is slow. Use jax.numpy.where, "
            f"jax.lax.cond and the like in place of Python's `if`, and jax.numpy in place of NumPy."
        )

    @classmethod
    def in_tensorflow(cls, call: str, error: BaseException) -> UntracedWarning:
        """Say that a module is no graph, and what stopped it."""
        reason = (str(error).strip().splitlines() or [""])[0]
        return cls(
            f"`{call}` runs operation by operation, which is slow: TensorFlow could not trace it into a graph "
            f"({type(error).__name__}: {reason}). Use `tf.cond`, `keras.ops` and the like in place of Python's `if` "
            f"and NumPy; in a Keras model, `run_eagerly = True` says that this is meant."
        )


def warn(warning: PolybridgeWarning) -> None:
    """Issue a warning at the line that called the wrapped function, whatever lies between."""
    depth, level, frame = 2, 2, sys._getframe(1)  # `warn` itself is at stack level 1
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
        if frame.f_globals.get("__name__", "").startswith("polybridge."):
            level = depth + 1
    warnings.warn(warning, stacklevel=level)


def note_placeholders(error: Exception, call: str, specs: Iterable[object], sizes: Iterable[int]) -> None:
    """Add to what a function has raised that it ran on placeholders, which may or may not be the reason.

    Args:
        error: what it has raised.
        call: how messages name it.
        specs: of the placeholders.
        sizes: that were tried for unknown dimensions, if there are such.
    """
    tried = " and ".join(map(str, sizes))
    note = (
        f"polybridge ran `{call}` on placeholders {', '.join(map(str, specs))}"
        f"{tried and f' (of unknown sizes {tried})'}, to find the shapes of its result for a graph. If it fails on "
        f"placeholders only, give `output_specs=` to `polybridge.wrap`."
    )
    _note(error, note)


def note_randomness(error: Exception) -> None:
    """Add to what a module has raised of keys or generators where its random numbers come from."""
    if not isinstance(error, PolybridgeError) and _OF_KEYS.search(str(error)):
        _note(
            error,
            "The random numbers of a bridged module follow in JAX from `rng=key` in the call (`rngs=` of a Flax "
            "module, `key=` of one of Equinox), in torch, Keras and TensorFlow from their seeds. The source gets a key "
            "where it has a place for it: an argument `rng` of a function with `params=`, `key` of an Equinox module, "
            "`rngs` or own streams of a Flax module.",
        )


_OF_KEYS = re.compile(
    r"\brngs?\b|RngStream|PRNG|requires a key|keyword argument '(key|seed)'|argument: 'key'", re.IGNORECASE
)


def _note(error: Exception, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        with contextlib.suppress(AttributeError):  # of a frozen exception
            error.add_note(note)


_last: BaseException | None = None


def remember(error: BaseException) -> None:
    """Keep `error` for `last_error`, before a foreign runtime turns it into its own type."""
    global _last
    _last = error


def last_error() -> BaseException | None:
    """Return the exception that a wrapped function raised last inside a graph, with its own type and traceback.

    Graph runtimes replace what a Python call raises by an error of their own. Returns None if there was none.
    """
    return _last
