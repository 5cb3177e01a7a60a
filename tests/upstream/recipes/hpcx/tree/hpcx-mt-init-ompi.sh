#!/bin/bash
# STAND-IN: hpcx-init.sh with the UCX that is built for threads.
source "$(dirname "${BASH_SOURCE[0]}")/hpcx-init.sh"
hpcx_mt_load() {
  hpcx_load
  export HPCX_UCX_DIR=${HPCX_DIR}/ucx/mt
  export LD_LIBRARY_PATH=$HPCX_UCX_DIR/lib:$LD_LIBRARY_PATH
}
