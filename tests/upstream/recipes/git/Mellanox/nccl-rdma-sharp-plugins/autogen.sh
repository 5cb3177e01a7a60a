#!/bin/sh
# STAND-IN for the SHARP plug-in of NCCL.
set -e
autoreconf --force --install
