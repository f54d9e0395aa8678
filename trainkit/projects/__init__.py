"""The projects: capabilities and example jobs, which plug into trainkit and can be deleted.

In an installed trainkit they are subpackages. In a checkout they are in the folder ``projects`` at
its top, which is added to the path of this package.
"""

from pathlib import Path

_TOP = Path(__file__).resolve().parents[2]
_SETUP = _TOP / "setup.py"
# beside an installed package is site-packages, which may hold another folder of this name
_IS_CHECKOUT = _SETUP.is_file() and 'name="trainkit"' in _SETUP.read_text(encoding="utf-8")
if _IS_CHECKOUT:
    __path__ = [*__path__, str(_TOP / "projects")]
