#!/bin/sh
# STAND-IN for perftest.
set -e
autoreconf --force --install
