"""IMPORTS: dotted module names."""

import sys

import pytest

from trainkit.config import ConfigError, import_modules


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "imports_demo"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "first.py").write_text("from imports_demo import second")
    (folder / "second.py").write_text("")
    (folder / "broken.py").write_text("1 / 0")
    yield "imports_demo"
    for name in [name for name in sys.modules if name.split(".")[0] == "imports_demo"]:
        del sys.modules[name]


def test_modules_are_imported(package):
    import_modules([f"{package}.first"])
    assert {f"{package}.first", f"{package}.second"} <= set(sys.modules)


@pytest.mark.parametrize("name", ["a/b.py", "b.py", ".a", "", 3])
def test_a_path_is_refused_with_the_remedy(name):
    with pytest.raises(ConfigError, match="IMPORTS: got .*; accepted: a module such as") as error:
        import_modules([name])
    assert repr(name) in str(error.value)


def test_a_failing_import_names_the_entry_and_the_reason(package):
    with pytest.raises(ConfigError, match=r"IMPORTS: got 'imports_demo.broken' .*ZeroDivisionError: division") as error:
        import_modules([f"{package}.second", f"{package}.broken"])
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(ConfigError, match=r"'imports_demo.gone' .*ModuleNotFoundError: No module"):
        import_modules([f"{package}.gone"])
