"""The `apt-get` that build steps get as a secret where packages come from mirrors or a bundle. Pure.

It exists while a step runs. What it writes lies in memory (/dev/shm, which no layer has), so neither the image nor
the cache key knows of mirrors and passwords.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

WRAPPER = r"""#!/bin/sh
# apt-get through mirrors: rewrites where packages come from, for this one call.
set -eu
etc=$(mktemp -d /dev/shm/imagebuild-apt.XXXXXX)
trap 'rm -rf "$etc"' EXIT
trap 'exit 143' HUP INT TERM
chmod 755 "$etc"
mkdir "$etc/sources" "$etc/preferences"
touch "$etc/netrc"
chmod 600 "$etc/netrc"
cat > "$etc/netrc" <<'NETRC'
@NETRC@
NETRC
cat > "$etc/sources.sed" <<'RULES'
@SOURCES@
RULES
cat > "$etc/preferences.sed" <<'RULES'
@PREFERENCES@
RULES
copy() { # RULES FILE TARGET
  if [ -f "$2" ]; then sed -f "$etc/$1.sed" "$2" > "$3"; fi
}
copy sources /etc/apt/sources.list "$etc/sources.list"
for file in /etc/apt/sources.list.d/*; do copy sources "$file" "$etc/sources/${file##*/}"; done
copy preferences /etc/apt/preferences "$etc/preferences.list"
for file in /etc/apt/preferences.d/*; do copy preferences "$file" "$etc/preferences/${file##*/}"; done
@BEFORE@
/usr/bin/apt-get -o Dir::Etc::SourceList="$etc/sources.list" -o Dir::Etc::SourceParts="$etc/sources" \
  -o Dir::Etc::Preferences="$etc/preferences.list" -o Dir::Etc::PreferencesParts="$etc/preferences" \
  -o Dir::Etc::netrc="$etc/netrc" @OPTIONS@"$@"
"""

FORGET = r"""case " $* " in
*" update "*) rm -rf @WHAT@ ;;
esac"""
LISTS = "/var/lib/apt/lists/*"
ARCHIVES = "/var/cache/apt/archives/*.deb"

# Addresses in apt's sources may lack the slash at the end.
SLASHES = (
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)\([[:space:]]\)|\1/\2|g",
    r"s|\(https\{0,1\}://[^[:space:]]*[^/[:space:]]\)$|\1/|",
)
# A proxy sees the whole address of http only, so port 443 tells it that the address was one of https.
TO_PROXY = r"s|https://\([^/: ]*\)/|http://\1:443/|g"


def for_mirrors(downloads: Mapping[str, str], netrc: str = "") -> str:
    """The script that rewrites addresses by their beginnings; `netrc` is the text of that file."""
    longest_first = sorted(downloads, key=lambda p: len(p.partition("://")[2]), reverse=True)
    # A rule must not see what another one wrote: each puts a number there, and the last rules put the addresses.
    sources = [f"s|{_schemes(prefix, downloads)}|\x01{i}\x01|g" for i, prefix in enumerate(longest_first)]
    sources += [f"s|\x01{i}\x01|{_replacement(downloads[prefix])}|g" for i, prefix in enumerate(longest_first)]
    hosts = {_host(old): _host(new) for old, new in downloads.items()}
    preferences = [
        rf's|^\(Pin: *origin *"\{{0,1\}}\){_pattern(old)}\("\{{0,1\}} *\)$|\1{_replacement(new)}\2|'
        for old, new in hosts.items()
    ]
    return _script(sources, preferences, netrc=netrc)


def for_depot(address: str, *, recording: bool) -> str:
    """The script that gets everything through the depot, a proxy at `http://host:port`."""
    options = {"Acquire::http::Proxy": address, "Acquire::https::Proxy": address, "Acquire::PDiffs": "false"}
    if not recording:
        # A bundle's indices are as old as the bundle; they are signed all the same.
        options["Acquire::Check-Valid-Until"] = "false"
    # Indices that are newer than the bundle's would ask for packages that it lacks.
    forget = FORGET.replace("@WHAT@", f"{LISTS} {ARCHIVES}" if recording else LISTS)
    return _script([TO_PROXY], [], before=forget, options=options)


def _script(
    sources: Sequence[str],
    preferences: Sequence[str],
    *,
    netrc: str = "",
    before: str = "",
    options: Mapping[str, str] | None = None,
) -> str:
    words = "".join(f"-o {shlex.quote(f'{name}={value}')} " for name, value in (options or {}).items())
    parts = {
        "NETRC": netrc.rstrip("\n"),
        "SOURCES": "\n".join([*SLASHES, *sources]),
        "PREFERENCES": "\n".join(preferences),
        "BEFORE": before,
        "OPTIONS": words,
    }
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], WRAPPER)


def _schemes(prefix: str, downloads: Mapping[str, str]) -> str:
    """The pattern of a prefix: for http and https, unless there is one for the other too."""
    scheme, _, rest = prefix.partition("://")
    other = {"http": "https", "https": "http"}[scheme]
    return _pattern(prefix) if f"{other}://{rest}" in downloads else rf"https\{{0,1\}}://{_pattern(rest)}"


def _host(url: str) -> str:
    """Apt's `origin`: the host without port."""
    return urlsplit(url).hostname or ""


def _pattern(text: str) -> str:
    return re.sub(r"([][\\.*^$|])", r"\\\1", text)


def _replacement(text: str) -> str:
    return re.sub(r"([\\&|])", r"\\\1", text)
