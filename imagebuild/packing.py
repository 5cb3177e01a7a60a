"""How the layers of images that leave the engine are written: compression, and one time for all that is younger. Pure.

The same steps then give the same bytes: BuildKit sets every time of a file that is later than the epoch to the epoch,
and compresses layers of base images like its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Literal, get_args

from imagebuild.errors import ConfigError
from imagebuild.rootfs import EPOCH

Compression = Literal["gzip", "zstd"]
MOST: Mapping[str, int] = {"gzip": 9, "zstd": 22}
"""Highest level of each compression."""
VARIABLE = "SOURCE_DATE_EPOCH"


@dataclass(frozen=True)
class Packing:
    """Compression, and the epoch in seconds since 1970."""

    epoch: int = int(EPOCH)
    compression: Compression = "gzip"
    level: int | None = None
    """None: BuildKit's default."""

    @property
    def attributes(self) -> str:
        """What an exporter of BuildKit takes."""
        level = "" if self.level is None else f",compression-level={self.level}"
        # The epoch is the exporter's alone: as an argument of the build it would be a part of what steps depend on.
        return (
            f"compression={self.compression}{level},force-compression=true,"
            f"rewrite-timestamp=true,source-date-epoch={self.epoch}"
        )


def parse_compression(text: str) -> tuple[Compression, int | None]:
    """`zstd:19` to its parts. Raises ConfigError."""
    name, colon, level = text.partition(":")
    for known in get_args(Compression):
        if name == known and not colon:
            return known, None
        if name == known and level.isdigit() and int(level) <= MOST[known]:
            return known, int(level)
    raise ConfigError(f"--compression {text}: gzip or zstd, with a level if you want: gzip:9, zstd:19")


def epoch_of(environ: Mapping[str, str], locked: date | None) -> int:
    """The epoch that the environment sets, else the day in the lock, else when the oldest base image came out.

    Raises ConfigError if the environment's is no number.
    """
    if given := environ.get(VARIABLE):
        if not given.isdigit():
            raise ConfigError(f"{VARIABLE}={given}: seconds since 1970, for example from `git log -1 --format=%ct`")
        return int(given)
    if locked is None:
        return int(EPOCH)
    return int(datetime(locked.year, locked.month, locked.day, tzinfo=UTC).timestamp())
