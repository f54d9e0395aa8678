import pytest

from trainkit.data import Metadata, MetadataCatalog


def test_metadata_is_set_once_and_a_conflict_changes_nothing():
    metadata = Metadata("set_once").set(classes=["a", "b"], ignore=255)
    metadata.classes = ["a", "b"]  # equal: allowed

    with pytest.raises(ValueError, match=r"'classes' of 'set_once' is \['a', 'b'\] and cannot become \['c'\]"):
        metadata.classes = ["c"]

    assert metadata.classes == ["a", "b"]
    assert metadata.as_dict() == {"name": "set_once", "classes": ["a", "b"], "ignore": 255}
    assert metadata.get("ignore") == 255
    assert metadata.get("colors", default=()) == ()


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
