#!/bin/bash
# STAND-IN: the same as hpcx-init.sh.
source "$(dirname "${BASH_SOURCE[0]}")/hpcx-init.sh"
