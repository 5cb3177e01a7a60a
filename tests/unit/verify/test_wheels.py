"""The rule about wheels finds files that are not those of their wheel."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Files, data
from tests.unit.image_files import elf
from tests.unit.verify.test_runtime import check_rule

ROWS = [row for row in data("processes") if row["rule"] == "wheels"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_which_files_are_those_of_their_wheels(tmp_path: Path, tiny: Files, row: dict[str, Any]) -> None:
    files = dict(row["files"])
    for name, listed in row["wheels"].items():
        # Without a text, the wheel brings the file as it is.
        contents = {path: elf(**files[f"v/{path}"]) if text is None else text.encode() for path, text in listed.items()}
        rows = [f"{path},sha256={_code(content)},{len(content)}\n" for path, content in contents.items()]
        files[f"v/{name}.dist-info/RECORD"] = "".join([*rows, f"{name}.dist-info/RECORD,,\n"])
    check_rule(tmp_path, tiny, {**row, "files": files})


def _code(content: bytes) -> str:
    return urlsafe_b64encode(sha256(content).digest()).decode().rstrip("=")
