"""Keys for the stand-in's package repositories, and signatures of Release files."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ran

CUDA, CUDA_NEW, DOCA, DOCA_NEW, STRANGER, EXPIRED = "cuda", "cuda-new", "doca", "doca-new", "stranger", "expired"
"""Names of keys. The public key of STRANGER is not published. EXPIRED was valid only in the first days of 2020."""
PAST = "20200102T000000!"


@dataclass(frozen=True)
class Keys:
    """A GnuPG home with one key for each name, without passphrases."""

    home: Path

    @property
    def public(self) -> Path:
        """The folder with the public keys in both formats: `<name>.asc` and `<name>.gpg`."""
        return self.home / "public"

    @classmethod
    def make(cls, folder: Path) -> None:
        """Make the keys in an empty folder."""
        folder.chmod(0o700)
        keys = cls(folder)
        for name in (CUDA, CUDA_NEW, DOCA, DOCA_NEW, STRANGER):
            keys._create(name, "0")
        keys._create(EXPIRED, "3d", "--faked-system-time", PAST)
        keys.public.mkdir()
        for name in (CUDA, CUDA_NEW, DOCA, DOCA_NEW, STRANGER, EXPIRED):
            for ending, form in (("asc", ("--armor",)), ("gpg", ())):
                keys._gpg(*form, "--output", f"{keys.public / name}.{ending}", "--export", keys.fingerprint(name))

    def fingerprint(self, name: str) -> str:
        """Return the fingerprint of a key: 40 hex digits."""
        listing = self._gpg("--with-colons", "--list-keys", _address(name))
        return next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr:"))

    def sign(self, release: bytes, *names: str) -> dict[str, bytes]:
        """Return the files `InRelease` and `Release.gpg` for the content of a Release file, signed by keys."""
        when = ("--faked-system-time", PAST) if EXPIRED in names else ()
        by = [word for name in names for word in ("--local-user", _address(name))]
        options = (*when, *by, "--armor", "--digest-algo", "SHA512")
        kinds = {"InRelease": "--clear-sign", "Release.gpg": "--detach-sign"}
        return {file: self._gpg(*options, kind, input=release.decode()).encode() for file, kind in kinds.items()}

    def publish(self, suite: Path, files: Mapping[str, bytes], by: str = CUDA, more: str = "") -> None:
        """Write the index files of a suite, and its signed InRelease file. `more` are further lines of InRelease."""
        lines = []
        for name, content in files.items():
            (suite / name).parent.mkdir(parents=True, exist_ok=True)
            (suite / name).write_bytes(content)
            lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}")
        release = "\n".join(["Origin: test", *more.splitlines(), "SHA256:", *lines, ""])
        (suite / "InRelease").write_bytes(self.sign(release.encode(), by)["InRelease"])

    def _create(self, name: str, expires: str, *when: str) -> None:
        self._gpg(*when, "--passphrase", "", "--quick-generate-key", _address(name), "ed25519", "sign", expires)

    def _gpg(self, *words: str, input: str = "") -> str:  # noqa: A002 - as of subprocess.run
        # The path of the agent's socket is limited to 107 bytes, so a short symbolic link names the home.
        with tempfile.TemporaryDirectory(prefix="k") as folder:
            link = Path(folder) / "h"
            link.symlink_to(self.home.absolute())
            try:
                command = ("gpg", "--homedir", link, "--batch", "--yes", "--quiet", *words)
                return ran(*command, check=True, stderr=None, input=input).stdout
            finally:
                # Every call that needs a secret key starts a new agent.
                ran("gpgconf", "--homedir", link, "--kill", "all", check=True)


def _address(name: str) -> str:
    return f"imagebuild stand-in, not the vendor ({name}) <{name}@localhost>"
