"""Dotted paths."""

import pytest
import torch

from trainkit.utils.registry import locate


def test_a_dotted_path_leads_to_modules_classes_and_their_attributes():
    assert locate("torch.optim.SGD") is torch.optim.SGD
    assert locate("torch.nn") is torch.nn
    assert locate("torch.nn.Module.forward") is torch.nn.Module.forward


def test_a_path_to_nowhere_says_where_it_ends(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "located_broken.py").write_text("1 / 0")
    (tmp_path / "located_needy.py").write_text("import gone_module")
    for name, message in {
        "torch.optim.SGDD": "torch.optim.* has no attribute 'SGDD'",
        "torch.nn.Module.gone.x": "'Module' has no attribute 'gone'",
        "": "cannot locate",
        "located_broken.x": "ZeroDivisionError",
        "located_needy.x": "No module named 'gone_module'",
    }.items():
        with pytest.raises(ImportError, match=message):
            locate(name)
