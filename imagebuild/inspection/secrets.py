"""What secrets look like: a table of patterns that hardly match anything else, and a scan of content in pieces."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

OVERLAP = 16 << 10
"""Bytes that are looked at again with the next piece: more than any secret or certificate is long."""
FEWEST_DIFFERENT = 8
"""Characters that a random token has at least; those of examples are mostly one letter, repeated."""


@dataclass(frozen=True)
class Pattern:
    """A kind of secret."""

    name: str
    literals: tuple[bytes, ...]
    """One of these is in every match: they are found much faster than the expression."""
    expression: re.Pattern[bytes]
    binary: bool = False
    """Looked for in files that are not text, too."""


def _pattern(name: str, literals: str, expression: str, *, binary: bool = False) -> Pattern:
    return Pattern(name, tuple(literals.encode().split()), re.compile(expression.encode()), binary)


_B, _E = r"(?<![A-Za-z0-9_-])", r"(?![A-Za-z0-9_-])"
PEM = re.compile(rb"-----BEGIN CERTIFICATE-----\s+([A-Za-z0-9+/=\s]{64,}?)-----END CERTIFICATE-----")
PATTERNS = (
    Pattern(
        "private key",
        (b"PRIVATE KEY",),
        re.compile(
            rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY(?: BLOCK)?-----(?:\\r|\\n|\s)+"
            rb"(?:[A-Za-z-]+: [^\n]*\n)*\s*(?P<body>[A-Za-z0-9+/=]{32})"
        ),
        binary=True,
    ),
    _pattern("PuTTY private key", "Private-Lines:", r"Private-Lines: \d+\s+(?P<body>[A-Za-z0-9+/=]{32})"),
    _pattern("AWS access key", "AKIA ASIA", rf"{_B}(?:AKIA|ASIA)(?P<body>[A-Z2-7]{{16}}){_E}"),
    _pattern("AWS secret key", "aws_secret_access_key", r"aws_secret_access_key\s*[=:]\s*[\"']?(?P<body>[\w/+]{40})\b"),
    _pattern("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_", rf"{_B}gh[pousr]_(?P<body>[A-Za-z0-9]{{36,}}){_E}"),
    _pattern("GitHub token", "github_pat_", rf"{_B}github_pat_(?P<body>\w{{70,}}){_E}"),
    _pattern("GitLab token", "glpat- gldt- glrt-", rf"{_B}gl(?:pat|dt|rt)-(?P<body>[\w-]{{20,}}){_E}"),
    _pattern("Hugging Face token", "hf_", rf"{_B}hf_(?P<body>[A-Za-z]{{34}}){_E}"),
    _pattern("Slack token", "xoxb- xoxp- xoxa- xoxr- xoxs-", rf"{_B}xox[abprs]-(?P<body>\d{{8,}}-[\w-]{{20,}})"),
    _pattern("npm token", "npm_", rf"{_B}npm_(?P<body>[A-Za-z0-9]{{36}}){_E}"),
    _pattern("Python index token", "pypi-AgE", rf"{_B}pypi-AgE(?P<body>[\w-]{{50,}})"),
    _pattern("Google API key", "AIza", rf"{_B}AIza(?P<body>[\w-]{{35}}){_E}"),
    _pattern("NVIDIA API key", "nvapi-", rf"{_B}nvapi-(?P<body>[\w-]{{60,}})"),
    _pattern("OpenAI or Anthropic key", "sk-proj- sk-ant-", rf"{_B}sk-(?:proj|ant)-(?P<body>[\w-]{{40,}})"),
)
CREDENTIALS = re.compile(rb"(?<![\w.])https?://[^\s/:@\"'<>$]+:(?P<body>[^\s/:@\"'<>${}]+)@[\w.-]+")
"""An address with a password: in settings only, as documentation is full of examples."""


def in_text(data: bytes, *, binary: bool = False) -> set[str]:
    """The kinds of secrets in some text."""
    return {
        pattern.name
        for pattern in PATTERNS
        if (pattern.binary or not binary) and any(literal in data for literal in pattern.literals)
        for match in pattern.expression.finditer(data)
        if _random(match["body"])
    }


def _random(body: bytes) -> bool:
    return len(set(body)) >= FEWEST_DIFFERENT and not body.upper().endswith(b"EXAMPLE")


class Scanner:
    """Takes the content of a file in pieces."""

    def __init__(self, *, settings: bool) -> None:
        self.secrets: set[str] = set()
        self.certificates: set[str] = set()
        self._settings = settings
        self._tail = b""
        self._binary: bool | None = None

    def feed(self, piece: bytes) -> None:
        if self._binary is None:
            self._binary = b"\0" in piece[:4096]
        data = self._tail + piece
        self.secrets |= in_text(data, binary=self._binary)
        if not self._binary:
            if self._settings and CREDENTIALS.search(data):
                self.secrets.add("address with a password")
            if b"BEGIN CERTIFICATE" in data:
                self.certificates |= {certificate(match[1]) for match in PEM.finditer(data)}
        self._tail = data[-OVERLAP:]


def certificate(body: bytes) -> str:
    """Names a certificate by what is between its first and last line."""
    return hashlib.sha256(b"".join(body.split())).hexdigest()[:16]
