from datetime import date

import pytest

from imagebuild.build import LayerFormat, epoch_of, parse_compression
from imagebuild.core import ConfigError
from imagebuild.oci import EPOCH


@pytest.mark.parametrize(
    ("text", "parsed"), [("gzip", ("gzip", None)), ("gzip:9", ("gzip", 9)), ("zstd:22", ("zstd", 22))]
)
def test_compressions(text: str, parsed: tuple[str, int | None]) -> None:
    assert parse_compression(text) == parsed


@pytest.mark.parametrize("text", ["", "xz", "gzip:", "gzip:10", "zstd:23", "zstd:-1", "zstd:19:1", "zstd,x=y"])
def test_compressions_that_there_are_not(text: str) -> None:
    with pytest.raises(ConfigError, match="--compression"):
        parse_compression(text)


def test_without_a_level_buildkit_chooses_it() -> None:
    assert "level" not in LayerFormat().attributes
    assert "compression=zstd,compression-level=0," in LayerFormat(1, "zstd", 0).attributes


def test_the_epoch_is_the_environments_the_locks_or_the_oldest_base_images() -> None:
    day = date(2026, 11, 21)
    assert epoch_of({"SOURCE_DATE_EPOCH": "12"}, day) == 12
    assert epoch_of({}, day) == epoch_of({"SOURCE_DATE_EPOCH": ""}, day) == 1795219200
    assert epoch_of({}, None) == int(EPOCH)
    with pytest.raises(ConfigError, match="SOURCE_DATE_EPOCH=now: must be seconds since 1970"):
        epoch_of({"SOURCE_DATE_EPOCH": "now"}, day)
