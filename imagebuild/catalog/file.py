"""The file `images.json`, read."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from imagebuild import files
from imagebuild.catalog.models import Catalog
from imagebuild.errors import ResultError


def read_catalog(path: Path) -> Catalog:
    """A catalogue that was written before. Raises ConfigError without a file, ResultError if it is something else."""
    try:
        return Catalog.model_validate_json(files.read_text(path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultError(f"{path}: {where}: {first['msg']}; is it an images.json of this imagebuild?") from None
