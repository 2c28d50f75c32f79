"""The catalog: a static site of what was built, measured and tested, and of what was not.

sources (rows, out/, history/) -> data.py  typed: one Entry per row, with an honest status
                               -> build.py pages, pictures (picture.py), driver answers (driver.py)
"""

from __future__ import annotations

from trainyard.catalog.build import build
from trainyard.catalog.data import SBOM, Sources

__all__ = ["SBOM", "Sources", "build"]
