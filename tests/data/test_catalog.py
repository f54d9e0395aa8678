import pytest

from trainkit.data.catalog import DatasetCatalog


@pytest.fixture
def register():
    names = []

    def register(name, func):
        DatasetCatalog.register(name, func)
        names.append(name)

    yield register
    for name in {*names} & {*DatasetCatalog.list()}:
        DatasetCatalog.remove(name)


def test_a_dataset_is_made_when_it_is_asked_for_and_not_before(register):
    calls = []
    register("cat_lazy", lambda: calls.append(None) or [1, 2])

    assert calls == []
    assert DatasetCatalog.get("cat_lazy") == [1, 2]
    assert len(calls) == 1
    assert "cat_lazy" in DatasetCatalog
    assert "cat_lazy" in DatasetCatalog.list()


def test_a_printed_catalog_lists_the_names_alone(register):
    register("cat_train", list)
    assert repr(DatasetCatalog).startswith("DatasetCatalog(")
    assert "cat_train" in repr(DatasetCatalog)
    assert "<class 'list'>" not in repr(DatasetCatalog)


def test_an_unknown_dataset_names_the_registered_ones_the_nearest_and_the_remedy(register):
    register("cat_train", list)
    register("dog_train", list)

    with pytest.raises(KeyError) as error:
        DatasetCatalog.get("cat_trian")

    text = error.value.args[0]
    assert "DatasetCatalog has no 'cat_trian'; did you mean 'cat_train'?" in text
    assert "cat_train, " in text
    assert "dog_train" in text
    assert "Put the module that registers it into IMPORTS" in text


def test_the_key_error_of_a_dataset_function_is_passed_on_as_it_is(register):
    register("cat_broken", lambda: {}["missing"])

    with pytest.raises(KeyError, match=r"^'missing'$"):
        DatasetCatalog.get("cat_broken")


def test_a_name_is_registered_once_and_free_after_removal(register):
    register("cat_twice", list)
    with pytest.raises(ValueError, match="'cat_twice' is registered already"):
        DatasetCatalog.register("cat_twice", list)

    assert DatasetCatalog.pop("cat_twice") is list
    register("cat_twice", tuple)
    DatasetCatalog.remove("cat_twice")

    assert "cat_twice" not in DatasetCatalog
    for forget in (DatasetCatalog.pop, DatasetCatalog.remove):
        with pytest.raises(KeyError, match="DatasetCatalog has no 'cat_twice'"):
            forget("cat_twice")


def test_what_is_registered_must_be_a_function():
    with pytest.raises(TypeError, match="got a list"):
        DatasetCatalog.register("cat_list", [1, 2])
    assert "cat_list" not in DatasetCatalog
