"""Asks that the exceptions are the tree that their file draws, and that their messages say what to do."""

import builtins
import copy
import inspect
import pickle
import re

import pytest

import polybridge
from polybridge.core import errors

ROOTS = {"PolybridgeError": Exception, "PolybridgeWarning": UserWarning}
LINE = re.compile(r"(?P<indent>(?:\|   |    )*)(?:[|`]-- )?(?P<name>\w+)\s*(?:\((?P<builtin>\w+)\))?(?:\s{2,}.*)?$")


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """Return for each class in the drawing its parent and the builtin beside it."""
    tree, path = {}, []
    for line in errors.__doc__.split("\n\n", 1)[1].splitlines():
        if line:
            found = LINE.match(line)
            depth = len(found["indent"]) // 4 + ("-- " in line)
            path[depth:] = [found["name"]]
            tree[found["name"]] = (path[depth - 1] if depth else None, found["builtin"])
    return tree


TREE = drawn()
CLASSES = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, Exception)}

EXAMPLES = [
    errors.UnknownBackendError.named("troch", ["torch", "toy"], ["jxa"]),
    errors.BackendNotInstalledError.of("torch", "torch"),
    errors.BrokenPluginError.of("torch", "a-dist", OSError("no disk")),
    errors.NotCallableError.got(3),
    errors.WrongFrameworkError.argument("f", "args[0]", int, "torch"),
    errors.UnsupportedTensorError("a tensor of dtype string"),
    errors.UnsupportedTensorError("a tensor of dtype string").at("f", "args[0]"),
    errors.OutputError.foreign("f", "result[1]", int, "torch"),
    errors.OutputError.no_tensor("f", "text"),
    errors.NotDifferentiableError("no derivative"),
    errors.MutationError.written("f", "input 0"),
    errors.PromisedShapeError.differs("f", "result", "float32[2]", "float32[3]"),
    errors.PromisedShapeError.unknown("f", ["float32[2]"], ValueError("no")),
    errors.CompilationError.in_xla("f"),
    errors.ResidualError.gone(),
    errors.ForkError.in_child("f", ["torch"]),
    errors.DetachedStateWarning.naming("f", ["weight"]),
    errors.PrecisionWarning("float64 becomes float32"),
    errors.CotangentError.misfit("f", "the cotangent of result", "float32[2]", "float32[3]"),
    errors.OutputError.of_rule("f", "`bwd` returned", "a float, not a tuple of cotangents"),
    errors.OutputError.not_scalar("f", ["float32[3]"]),
    errors.OutputError.uneven("f", ["float32[3]"], ["float32[2]"]),
    errors.NotDifferentiableError.without_rule("f", "numpy"),
    errors.NotDifferentiableError.beyond_rule("f", "numpy"),
    errors.NotDifferentiableError.forward_only("f"),
    errors.NotDifferentiableError.beyond_differences("f", "three times"),
    errors.NotDifferentiableError.of_argument("f", 0, "holds no floating or complex array"),
    errors.NotDifferentiableError.keywords("f", ["scale"]),
    errors.NotDifferentiableError.run_again("toy"),
    errors.LoopWarning.because("f", ValueError("no rule")),
    errors.NotDifferentiableError.uneven("f"),
    errors.ResidualError.mixed(),
    errors.ResidualError.differs(),
    errors.UntracedWarning.reading("model.py:3", "ConcretizationTypeError"),
    errors.ResidualError.freed(),
    errors.CompilationError.over_processes("f"),
    errors.CompilationError.over_some_axes("f"),
    errors.RandomnessError.recomputed("f", "recompute_grad"),
    errors.FactoryError.missing("Net (src='tensorflow')", "a tf.Module has no file format"),
    errors.FactoryError.unnamed("<lambda>"),
    errors.UnsupportedModuleError.scripted("Net"),
    errors.FactoryError.unsafe("models:make"),
    errors.WeightsError.unlike("f", ["0.weight"], ["1.weight"]),
    errors.WeightsError.misfit("f", "0.weight", (2, 3), (3,)),
    errors.WeightsError.stateful("f"),
    errors.RandomnessError.unseeded("f"),
    errors.RandomnessError.unseedable("f"),
    errors.MutationError.late("f", "calls"),
    errors.FactoryError.other("make", ["w"], ["kernel"]),
    errors.UnbuiltError.before_call("Net"),
    errors.UnbuiltError.before_wrap("Net", "jax"),
    errors.DetachedStateWarning.losses("Net", 2),
    errors.DetachedStateWarning.late("Net", ["w"]),
    errors.MutationError.weight("Net", "mean"),
    errors.MutationError.unlisted("Net"),
    errors.NotCallableError.saved_model([], ["serving_default"]),
    errors.UnsupportedTensorError.weight("Net", "kernel", "float64", "float32", "it says so"),
    errors.UntracedWarning.in_tensorflow("Net", ValueError("no")),
    errors.WeightsError.rebuilt("Net"),
    errors.DetachedStateWarning.made("Net", ["cache"]),
    errors.MutationError.residuals("f"),
    errors.NotDifferentiableError.transposed("f"),
    errors.CompilationError.in_torchscript("f"),
    errors.ResidualError.written("f"),
    errors.NotDifferentiableError.without_argument("f", 2, 1),
    errors.NotCallableError.of_modules(dict),
    errors.UnsupportedTensorError.composite({}),
    errors.UnsupportedModuleError.unbound("Dense"),
    errors.WeightsError.no_mapping("Net", "state", int),
    errors.OutputError.without_state("f", 3),
    errors.UnsupportedModuleError.keras_on("jax"),
    errors.EndingError.of("f"),
    errors.WrongFrameworkError.bridged("f", "torch", "tensorflow"),
    errors.WrongFrameworkError.random("f", "kwargs['key']", int, "torch"),
]
examples = pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)


def test_the_drawing_has_every_class():
    assert set(TREE) == set(CLASSES)


def test_the_drawing_was_read():
    assert TREE["UnknownBackendError"] == ("BackendError", "LookupError")
    assert TREE["PrecisionWarning"] == ("PolybridgeWarning", None)
    assert len(TREE) > 15


@pytest.mark.parametrize("name", sorted(TREE))
def test_a_class_inherits_as_it_is_drawn(name):
    parent, builtin = TREE[name]
    expected = [CLASSES[parent]] if parent else [ROOTS[name]]
    if builtin and parent:
        expected.append(getattr(builtins, builtin))
    assert list(CLASSES[name].__bases__) == expected


@pytest.mark.parametrize("name", sorted(TREE))
def test_every_class_is_public(name):
    assert getattr(polybridge, name) is CLASSES[name]
    assert name in polybridge.__all__


def test_every_leaf_of_the_tree_has_an_example():
    leaves = set(TREE) - {parent for parent, _ in TREE.values()}
    assert leaves == {type(error).__name__ for error in EXAMPLES}


@examples
def test_an_error_survives_pickling(error):
    """As it has to on its way out of a worker process."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


@examples
def test_an_error_survives_copying(error):
    assert str(copy.copy(error)) == str(error)


@pytest.mark.parametrize("name", sorted(set(TREE) - {n for n, c in CLASSES.items() if issubclass(c, Warning)}))
def test_an_exceptions_constructor_is_exceptions_own(name):
    """AutoGraph keeps the type of such exceptions, and of no others."""
    assert CLASSES[name].__init__ is Exception.__init__


@examples
def test_a_message_is_one_sentence_or_more(error):
    message = str(error)
    assert len(message.splitlines()) == 1
    assert "  " not in message


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (EXAMPLES[0], r"'troch'\. Did you mean 'torch'\? Known names: torch, toy\. Plugins that failed to load: jxa\."),
        (EXAMPLES[1], "`pip install torch`"),
        (EXAMPLES[2], "'torch' of plugin a-dist failed to load: OSError: no disk"),
        (EXAMPLES[3], r"expects a callable, got 3 of type int"),
        (EXAMPLES[4], r'args\[0\] is a builtins.int.*`polybridge.convert\(args\[0\], "torch"\)`'),
        (EXAMPLES[6], r"`f`: args\[0\] cannot cross between frameworks: a tensor of dtype string"),
        (EXAMPLES[7], r"`f` wraps a torch function.* at result\[1\]\. Return torch tensors"),
        (EXAMPLES[8], "got str: 'text'.*Return a tensor, or call it where gradients are off"),
        (EXAMPLES[10], "`f` wrote in place to input 0.*`copy=True`"),
        (EXAMPLES[11], r"float32\[2\] at result, but float32\[3\] was promised.*`output_specs=`|output_specs="),
        (EXAMPLES[12], r"ValueError: no.*`output_specs=`"),
        (EXAMPLES[13], "`jit_compile=False`"),
        (EXAMPLES[15], '"spawn" or "forkserver"'),
        (EXAMPLES[16], "weight.*Pass it as an argument"),
        (EXAMPLES[18], r"`f`: the cotangent of result is float32\[2\], but float32\[3\] is needed there"),
        (EXAMPLES[19], "`f`.*`bwd` returned a float, not a tuple of cotangents"),
        (EXAMPLES[20], r"not one real number, but float32\[3\]\. Use `f\.vjp`"),
        (EXAMPLES[21], r"returned float32\[3\] right beside inputs where it returned float32\[2\].*vjp=\(fwd, bwd\)"),
        (EXAMPLES[22], r'numpy does not differentiate.*`vjp=\(fwd, bwd\)`.*`vjp="finite-difference"`'),
        (EXAMPLES[23], 'differentiated twice.*`vjp="finite-difference"`'),
        (EXAMPLES[24], "`jvp=` alone.*Give `vjp=` as well"),
        (EXAMPLES[25], "three times by finite differences.*Give `polybridge.wrap` a rule"),
        (EXAMPLES[26], r"args\[0\], which holds no floating or complex array.*numpy.asarray"),
        (EXAMPLES[27], "scale.*Pass them by position"),
        (EXAMPLES[28], "'toy' gave other values when it was run again.*take its random numbers as an argument"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_message_says_what_was_found_and_what_to_do(error, hint):
    assert re.search(hint, str(error))


def test_a_long_result_is_cut_in_a_message():
    assert len(str(errors.OutputError.no_tensor("f", "x" * 10_000))) < 400


def test_an_unsupported_tensor_keeps_what_is_wrong_when_it_gets_a_place():
    error = errors.UnsupportedTensorError("a tensor of dtype string").at("f", "args[0]")
    assert str(error) == "`f`: args[0] cannot cross between frameworks: a tensor of dtype string."


def test_a_name_like_no_other_gets_no_suggestion():
    assert "Did you mean" not in str(errors.UnknownBackendError.named("zzzzzz", ["torch"], []))


def test_the_last_error_is_the_one_that_was_remembered(monkeypatch):
    monkeypatch.setattr(errors, "_last", None)
    assert polybridge.last_error() is None
    error = ValueError("inside a graph")
    errors.remember(error)
    assert polybridge.last_error() is error
