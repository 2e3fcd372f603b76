"""Asks how backends are found, named and loaded, with distributions on disk as pip would leave them."""

import importlib
import sys

import pytest

import polybridge
from polybridge.core import hookspecs
from polybridge.core.registry import Registry, registry

PLUGIN = """
import polybridge

@polybridge.hookimpl
def polybridge_backends():
    return [polybridge.BackendPlugin({name!r}, load, {module!r}, {aliases!r}, {requirement!r})]

def load():
    import polybridge.core.backend
    {body}
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that puts a distribution with one entry point on sys.path."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name: str, source: str, distribution: str | None = None) -> None:
        module = f"{name}_plugin_for_a_test"
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution or name}_dist-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution or name}-dist\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[polybridge]\n{name} = {module}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        importlib.invalidate_caches()

    return install


def plugin(name: str, module: str = "json", aliases: tuple[str, ...] = (), requirement: str = "", body: str = "pass"):
    return PLUGIN.format(name=name, module=module, aliases=aliases, requirement=requirement, body=body)


def toy_backend(name: str) -> str:
    """Return the body of a `load` that gives an instance of toy's backend under another name."""
    return f"from polybridge_toy.backend import ToyBackend; return type('B', (ToyBackend,), {{'name': {name!r}}})()"


def test_a_third_partys_distribution_is_found():
    assert "toy" in polybridge.list_backends()


def test_listing_names_every_backend_once_by_its_canonical_name():
    names = polybridge.list_backends()
    assert names == sorted(set(names))
    assert {"torch", "tensorflow"} <= set(names)
    assert "tf" not in names


def test_listing_loads_no_backend(install):
    install("lazy", plugin("lazy", body="raise AssertionError('loaded')"))
    fresh = Registry()
    fresh.find()
    assert "lazy" in fresh.plugins
    assert fresh.loaded == {}


def test_a_backend_is_loaded_once():
    assert polybridge.get_backend("toy") is polybridge.get_backend("toy")


def test_an_alias_gives_the_backend_itself(install):
    install("long", plugin("long", aliases=("l",), body=toy_backend("long")))
    fresh = Registry()
    assert fresh.get("l") is fresh.get("long")


def test_an_unknown_name_lists_the_known_ones_and_a_near_one():
    with pytest.raises(
        polybridge.UnknownBackendError, match=r"'troch'.*Did you mean 'torch'.*tensorflow, .*torch, toy"
    ):
        polybridge.get_backend("troch")


def test_a_name_in_another_case_is_unknown_but_near():
    with pytest.raises(polybridge.UnknownBackendError, match="Did you mean 'tensorflow'"):
        polybridge.get_backend("TensorFlow")


def test_a_module_in_place_of_a_name_is_unknown():
    with pytest.raises(polybridge.UnknownBackendError, match="<module 'sys'"):
        polybridge.get_backend(sys)


def test_a_framework_that_is_not_installed_gives_the_pip_command(install):
    install("absent", plugin("absent", module="surely_not_installed", requirement="absent-framework>=3"))
    with pytest.raises(polybridge.BackendNotInstalledError, match=r"'absent'.*`pip install 'absent-framework>=3'`"):
        Registry().get("absent")


def test_without_a_requirement_the_pip_command_has_the_module(install):
    install("absent", plugin("absent", module="surely_not_installed"))
    with pytest.raises(polybridge.BackendNotInstalledError, match="`pip install surely_not_installed`"):
        Registry().get("absent")


def test_a_plugin_that_cannot_be_imported_does_not_take_the_others_along(install):
    install("broken", "1 / 0")
    fresh = Registry()
    fresh.find()
    assert {"torch", "tensorflow", "toy"} <= set(fresh.plugins)


def test_a_plugin_that_cannot_be_imported_is_named_when_it_is_asked_for(install):
    install("broken", "1 / 0")
    with pytest.raises(polybridge.BrokenPluginError, match=r"'broken' of plugin broken-dist .*ZeroDivisionError") as e:
        Registry().get("broken")
    assert isinstance(e.value.__cause__, ZeroDivisionError)


def test_a_broken_plugin_is_named_beside_an_unknown_name(install):
    install("broken", "1 / 0")
    with pytest.raises(polybridge.UnknownBackendError, match=r"failed to load: broken\."):
        Registry().get("surely_unknown")


def test_a_hook_that_fails_is_kept_aside(install):
    install("broken", "import polybridge\n@polybridge.hookimpl\ndef polybridge_backends(): raise OSError('no disk')")
    with pytest.raises(polybridge.BrokenPluginError, match="OSError: no disk"):
        Registry().get("broken")


def test_a_hook_that_returns_one_plugin_without_a_list_is_kept_aside(install):
    source = plugin("broken").replace("[polybridge.Back", "polybridge.Back").replace(")]", ")")
    install("broken", source)
    with pytest.raises(polybridge.BrokenPluginError, match="TypeError"):
        Registry().get("broken")


def test_a_misspelt_hook_is_reported_and_does_not_take_the_others_along(install):
    install("astray", "import polybridge\n@polybridge.hookimpl\ndef polybridge_backend(): return []")
    install("fine", plugin("fine", body=toy_backend("fine")))
    fresh = Registry()
    with pytest.raises(polybridge.BrokenPluginError, match="polybridge_backend"):
        fresh.get("astray")
    assert fresh.get("fine").name == "fine"


def test_a_framework_that_fails_to_import_names_the_plugin(install):
    install("late", plugin("late", body="raise OSError('libmissing.so')"))
    with pytest.raises(polybridge.BrokenPluginError, match=r"'late' of plugin late_plugin_for_a_test .*libmissing"):
        Registry().get("late")


def test_a_load_that_returns_no_backend_names_the_plugin(install):
    install("empty", plugin("empty", body="return None"))
    with pytest.raises(polybridge.BrokenPluginError, match=r"'empty'.*None"):
        Registry().get("empty")


def test_a_load_that_returns_the_class_names_the_plugin(install):
    install("klass", plugin("klass", body="from polybridge_toy.backend import ToyBackend; return ToyBackend"))
    with pytest.raises(polybridge.BrokenPluginError, match=r"'klass'.*ToyBackend"):
        Registry().get("klass")


def test_a_third_party_replaces_a_built_in_backend(install):
    install("mine", plugin("torch", body=toy_backend("torch")))
    assert type(Registry().get("torch")).__name__ == "B"


def test_a_replaced_backend_keeps_its_aliases(install):
    install("mine", plugin("torch", body=toy_backend("torch")))
    assert type(Registry().get("pytorch")).__name__ == "B"


def test_the_owner_of_a_tensor_is_found(two):
    assert registry.owner(two) is polybridge.get_backend("toy")


def test_a_value_of_nobody_has_no_owner():
    assert registry.owner(object()) is None


def test_asking_for_an_owner_imports_no_framework(install, two):
    install("asleep", plugin("asleep", module="surely_not_imported", body="raise AssertionError('loaded')"))
    assert Registry().owner(two).name == "toy"


def test_a_plugin_that_fails_to_load_owns_nothing_and_is_no_error(install, two):
    install("aaa", plugin("aaa", body="raise OSError('libmissing.so')"))
    assert Registry().owner(two).name == "toy"


def test_a_framework_whose_import_is_blocked_owns_nothing(install, two, monkeypatch):
    install("aaa", plugin("aaa", module="surely_blocked"))
    monkeypatch.setitem(sys.modules, "surely_blocked", None)
    assert Registry().owner(two).name == "toy"


def test_the_hook_specification_has_two_hooks():
    hooks = [name for name in vars(hookspecs) if name.startswith("polybridge_")]
    assert hooks == ["polybridge_backends", "polybridge_modules"]
