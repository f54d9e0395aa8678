import pytest

from trainkit.data import Metadata


def test_metadata_is_set_once_and_a_conflict_changes_nothing():
    metadata = Metadata("set_once").set(classes=["a", "b"], ignore=255)
    metadata.classes = ["a", "b"]  # equal: allowed

    with pytest.raises(ValueError, match=r"'classes' of 'set_once' is \['a', 'b'\] and cannot become \['c'\]"):
        metadata.classes = ["c"]

    assert metadata.classes == ["a", "b"]
    assert metadata.as_dict() == {"name": "set_once", "classes": ["a", "b"], "ignore": 255}
    assert metadata.get("ignore") == 255
    assert metadata.get("colors", default=()) == ()
