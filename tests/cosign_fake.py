"""A stand-in for cosign, without cryptography. tests/docker/test_attest.py uses the real program."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from imagebuild.core.errors import CommandError
from imagebuild.publish.signatures import Cosign

CLAIMS = ("identity", "oidc-issuer", "github-workflow-repository", "github-workflow-ref")
REFUSED = "`cosign verify` failed (1): Error: x\nerror during command execution: "


class FakeCosign:
    """A fake cosign that identifies keys by file name: `k.pub` is the public key of `k.key`; contents do not matter."""

    def __init__(self, version: int = 2) -> None:
        self.version = version
        self.signed: set[tuple[str, str]] = set()
        """Pairs of an image digest and the name of a key that signed it."""
        self.calls: list[tuple[str, ...]] = []
        self.down = ""
        """The error message of every call. Empty: calls succeed."""

    def cosign(self, **environ: str) -> Cosign:
        return Cosign({"COSIGN_PASSWORD": "", **environ}, self.run, program="cosign")

    def run(self, _program: str, command: str, *args: str, env: Mapping[str, str]) -> str:
        self.calls.append((command, *args))
        if command == "version":
            return ""
        if args == ("--help",):
            return "--new-bundle-format" if self.version == 2 else "--signing-config"
        if self.down and command != "public-key":
            raise CommandError(f"`cosign` failed (1): {self.down}")
        given = self.option("--key", args) or env.get("IDENTITY") or "keyless"
        key = Path(env[given.removeprefix("env://")] if given.startswith("env://") else given).stem
        key = given if "|" in given else key
        if command == "public-key":
            return f"{key}.pub"
        if command == "sign":
            self.signed.add((args[-1].partition("@")[2], key))
        elif command == "attest-blob":
            Path(self.option("--bundle", args)).write_text(json.dumps(self._bundle(key, args)))
        elif command == "verify":
            if not any(
                self._trusts(by, key, args) for digest, by in self.signed if digest == args[-1].partition("@")[2]
            ):
                raise CommandError(f"{REFUSED}no signatures found")
        else:
            envelope = json.loads(Path(self.option("--bundle", args)).read_text())["dsseEnvelope"]
            by, _, payload = str((envelope.get("signatures") or [{}])[0].get("sig")).rpartition(" ")
            if payload != envelope["payload"] or not self._trusts(by, key, args):
                raise CommandError(f"{REFUSED}could not verify envelope")
            statement = json.loads(base64.b64decode(payload))
            manifest = hashlib.sha256(Path(args[-1]).read_bytes()).hexdigest()
            if manifest not in (subject["digest"]["sha256"] for subject in statement["subject"]):
                raise CommandError(f"{REFUSED}provided artifact digest does not match any digest in statement")
        return ""

    def _bundle(self, key: str, args: tuple[str, ...]) -> dict[str, object]:
        subject = Path(args[-1])
        statement = {
            "_type": "https://in-toto.io/Statement/v0.1",
            "subject": [{"name": subject.name, "digest": {"sha256": hashlib.sha256(subject.read_bytes()).hexdigest()}}],
            "predicateType": self.option("--type", args),
            "predicate": json.loads(Path(self.option("--predicate", args)).read_text()),
        }
        payload = base64.b64encode(json.dumps(statement).encode()).decode()
        envelope = {
            "payloadType": "application/vnd.in-toto+json",
            "payload": payload,
            "signatures": [{"sig": f"{key} {payload}"}],
        }
        return {"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json", "dsseEnvelope": envelope}

    def _trusts(self, signed: str, key: str, args: tuple[str, ...]) -> bool:
        """Return whether a signature is by the key, or by the identity `ID|ISSUER|REPOSITORY|REF` in the options.
        As in cosign, an option that is not used is not compared."""
        if "|" not in signed:
            return signed == key
        wanted = [self.option(f"--certificate-{name}", args) for name in CLAIMS]
        pattern = self.option("--certificate-identity-regexp", args)
        claims = signed.split("|")
        named = re.search(pattern, claims[0]) is not None if pattern else wanted[0] == claims[0]
        return named and all(want in ("", claim) for want, claim in zip(wanted[1:], claims[1:], strict=True))

    @staticmethod
    def option(name: str, args: tuple[str, ...]) -> str:
        return args[args.index(name) + 1] if name in args else ""


if __name__ == "__main__":
    # Each call is a separate process, and several run in parallel, so signatures are appended to a shared file.
    state, fake = Path(os.environ["STANDIN_LOG"] + ".signed"), FakeCosign()
    lines = state.read_text().splitlines() if state.exists() else []
    known = {(digest, key) for digest, _, key in (line.partition(" ") for line in lines)}
    fake.signed = set(known)
    sys.stdout.write(fake.run("cosign", *sys.argv[1:], env={}))
    with state.open("a") as file:
        file.writelines(f"{digest} {key}\n" for digest, key in fake.signed - known)
