import pytest

from trainkit.data.catalog import DatasetCatalog

pytestmark = pytest.mark.usefixtures("catalogs")


def test_a_dataset_is_made_when_it_is_asked_for_and_an_unknown_one_names_the_others():
    calls = []
    DatasetCatalog.register("cat_train", lambda: calls.append(None) or [1, 2])
    DatasetCatalog.register("cat_broken", lambda: {}["missing"])
    assert calls == []
    assert DatasetCatalog.get("cat_train") == [1, 2]
    assert len(calls) == 1
    with pytest.raises(
        KeyError, match="no 'cat_trian'; did you mean 'cat_train'.*cat_broken, cat_train"
    ):
        DatasetCatalog.get("cat_trian")
    with pytest.raises(KeyError, match=r"^'missing'$"):  # the function's own error
        DatasetCatalog.get("cat_broken")


def test_a_name_is_registered_once_and_free_after_removal():
    DatasetCatalog.register("cat_twice", list)
    with pytest.raises(ValueError, match="'cat_twice' is registered already"):
        DatasetCatalog.register("cat_twice", list)
    assert DatasetCatalog.pop("cat_twice") is list
    DatasetCatalog.register("cat_twice", tuple)
    DatasetCatalog.remove("cat_twice")
    assert "cat_twice" not in DatasetCatalog.list()
    with pytest.raises(KeyError, match="DatasetCatalog has no 'cat_twice'"):
        DatasetCatalog.remove("cat_twice")
