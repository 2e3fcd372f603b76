"""Asks that `import polybridge` stays light: no framework, no backend, few modules."""

import subprocess
import sys

import polybridge

CARRIERS = "numpy, ml_dtypes, optree, pluggy"


def loaded_by(statement: str, after: str = "sys") -> set[str]:
    """Return the modules that `statement` adds in a new process that has imported `after`."""
    code = f"import sys, {after}; seen = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - seen)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def roots(modules: set[str]) -> set[str]:
    """Return the top-level packages of `modules`."""
    return {module.partition(".")[0] for module in modules}


def test_importing_polybridge_imports_no_framework():
    assert not roots(loaded_by("import polybridge")) & {"torch", "tensorflow", "jax", "keras"}


def test_importing_polybridge_imports_its_carriers_and_the_standard_library_only():
    added = roots(loaded_by("import polybridge", after=CARRIERS))
    assert added - sys.stdlib_module_names == {"polybridge"}


def test_importing_polybridge_imports_no_backend():
    modules = loaded_by("import polybridge")
    assert [module for module in modules if module.startswith("polybridge.backends.")] == []


def test_a_shell_completes_submodules_that_nobody_has_imported():
    assert {"wrap", "observe", "tf1", "keras"} <= set(dir(polybridge))
    assert not roots(loaded_by("import polybridge; dir(polybridge)")) & {"torch", "tensorflow", "jax", "keras"}


def test_importing_polybridge_costs_few_modules_beyond_its_carriers():
    """A count, since times vary: importlib.metadata takes about 60, and asyncio alone would add 100."""
    assert len(loaded_by("import polybridge", after=CARRIERS)) <= 120
