import copy
import pickle

import pytest

from trainkit.data.catalog import DatasetCatalog, Metadata, MetadataCatalog


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


def test_metadata_is_set_once_and_a_conflict_changes_nothing():
    metadata = Metadata("set_once").set(classes=["a", "b"], ignore=255)
    metadata.classes = ["a", "b"]  # equal: allowed

    with pytest.raises(ValueError, match=r"'classes' of 'set_once' is \['a', 'b'\] and cannot become \['c'\]"):
        metadata.classes = ["c"]

    assert metadata.classes == ["a", "b"]
    assert metadata.as_dict() == {"name": "set_once", "classes": ["a", "b"], "ignore": 255}
    assert metadata.get("ignore") == 255
    assert metadata.get("colors", default=()) == ()


def test_a_missing_metadata_attribute_says_which_exist():
    with pytest.raises(AttributeError, match=r"'facts' has no attribute 'colors'; it has: classes, name"):
        _ = Metadata("facts").set(classes=[]).colors


def test_metadata_can_be_copied_and_pickled():
    metadata = Metadata("copied").set(classes=["a"])

    assert copy.deepcopy(metadata).as_dict() == metadata.as_dict()
    assert pickle.loads(pickle.dumps(metadata)).as_dict() == metadata.as_dict()


def test_the_metadata_catalog_gives_one_object_per_name_until_it_is_removed():
    first = MetadataCatalog.get("one_object")

    assert MetadataCatalog.get("one_object") is first
    assert "one_object" in MetadataCatalog.list()

    MetadataCatalog.remove("one_object")
    assert "one_object" not in MetadataCatalog
    assert MetadataCatalog.get("one_object") is not first
    MetadataCatalog.pop("one_object")
    with pytest.raises(KeyError, match="MetadataCatalog has no 'one_object'"):
        MetadataCatalog.remove("one_object")
