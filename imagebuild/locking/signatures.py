"""Is this text signed by one of these keys? gpg answers, with a keyring of its own for each question."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from imagebuild.apt import Run
from imagebuild.errors import CommandError

TIMEOUT_S = 60
WHY = {
    "BADSIG": "the signature is not of this text",
    "EXPSIG": "the signature has expired",
    "EXPKEYSIG": "the key has expired",
    "REVKEYSIG": "the key was revoked",
    "ERRSIG": "the key is not in the file",
}


@dataclass(frozen=True)
class Signed:
    """What a key vouches for."""

    text: str
    fingerprints: tuple[str, ...]
    """Of the primary keys whose signatures are good, 40 hex digits."""


def verify(run: Run, key: bytes, content: bytes, signature: bytes | None = None) -> Signed:
    """The text that is signed: `content` without its signature, or all of it if the signature is separate.

    `key` holds one or more public keys, armoured or not. Raises CommandError that names the keys if none of them
    made a good signature.
    """
    with tempfile.TemporaryDirectory(prefix="imagebuild-gpg-") as folder:
        home = Path(folder)
        (home / "key").write_bytes(key)
        (home / "content").write_bytes(content)
        if signature is not None:
            (home / "signature").write_bytes(signature)
        _gpg(run, home, "--import", str(home / "key"))
        held = _held(run("gpg", *_options(home), "--with-colons", "--list-keys", timeout=TIMEOUT_S))
        if not held:
            raise CommandError("the file of the key holds no OpenPGP key")
        if signature is None:
            status = _gpg(run, home, "--output", str(home / "text"), "--decrypt", str(home / "content"))
        else:
            status = _gpg(run, home, "--verify", str(home / "signature"), str(home / "content"))
        found = tuple(_signatures(status))
        good = tuple(dict.fromkeys(s.primary for s in found if s.kind == "GOODSIG" and s.primary))
        if any(s.kind == "BADSIG" for s in found) or not good:
            raise CommandError(_complaint(found, held))
        text = content if signature is not None else (home / "text").read_bytes()
        return Signed(text.decode(errors="replace"), good)


@dataclass(frozen=True)
class _Signature:
    kind: str
    key: str
    """Id of the key that made it, 16 hex digits, or its fingerprint."""
    primary: str = ""
    """Fingerprint of the primary key, if the signature could be checked."""


def _options(home: Path) -> tuple[str, ...]:
    return ("--homedir", str(home), "--batch", "--no-options", "--no-autostart", "--trust-model", "always")


def _gpg(run: Run, home: Path, *words: str) -> str:
    """What gpg says to programs. Its exit status says less: a second signature by an unknown key is a failure to it."""
    status = home / "status"
    status.unlink(missing_ok=True)
    try:
        run("gpg", *_options(home), "--status-file", str(status), *words, timeout=TIMEOUT_S)
    except CommandError as error:
        if not status.exists():
            raise CommandError(f"signatures are checked by gpg (package gnupg): {error}") from None
    return status.read_text(errors="replace") if status.exists() else ""


def _signatures(status: str) -> Iterator[_Signature]:
    for part in re.split(r"^\[GNUPG:\] NEWSIG.*$", status, flags=re.MULTILINE)[1:]:
        said = {words[1]: words[2:] for line in part.splitlines() if len(words := line.split()) > 1}
        kind = next((kind for kind in ("BADSIG", *WHY, "GOODSIG") if kind in said), None)
        if kind:
            valid = said.get("VALIDSIG", [])
            yield _Signature(kind, valid[0] if valid else said[kind][0], valid[-1] if valid else "")


def _held(listing: str) -> dict[str, str]:
    """Fingerprint → remark, of the primary keys that a listing by `--with-colons` shows."""
    found: dict[str, str] = {}
    remark: str | None = None
    for row in (line.split(":") for line in listing.splitlines()):
        if row[0] == "pub":
            remark = {"e": " (expired)", "r": " (revoked)"}.get(row[1], "")
        elif row[0] == "fpr" and remark is not None:
            found[row[9]] = remark
            remark = None
    return found


def _complaint(found: tuple[_Signature, ...], held: dict[str, str]) -> str:
    keys = ", ".join(f"{fingerprint}{remark}" for fingerprint, remark in held.items())
    if not found:
        return f"there is no signature; the file of the key holds {keys}"
    made = "; ".join(f"signed by {s.key}: {WHY.get(s.kind, 'not good')}" for s in found if s.kind != "GOODSIG")
    return f"{made}; the file of the key holds {keys}"
