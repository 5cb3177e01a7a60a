#!/bin/bash
# STAND-IN for the vendor's script: the same variables in the same orders, written anew for tests.
# As the vendor's, it reads variables that may be unset.
hpcx_here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

hpcx_load() {
  export HPCX_DIR=$hpcx_here
  export HPCX_UCX_DIR=${HPCX_DIR}/ucx
  export HPCX_UCC_DIR=${HPCX_DIR}/ucc
  export HPCX_SHARP_DIR=${HPCX_DIR}/sharp
  export HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR=${HPCX_DIR}/nccl_rdma_sharp_plugin
  export HPCX_NCCL_SPCX_PLUGIN_DIR=${HPCX_DIR}/nccl_spectrum-x_plugin
  export HPCX_HCOLL_DIR=${HPCX_DIR}/hcoll
  if [ "$HPCX_ENABLE_OMPI4" = 1 ]; then
    export HPCX_MPI_DIR=${HPCX_DIR}/ompi4
  else
    export HPCX_MPI_DIR=${HPCX_DIR}/ompi5
  fi
  export HPCX_OSHMEM_DIR=$HPCX_MPI_DIR
  export HPCX_MPI_TESTS_DIR=$HPCX_MPI_DIR/tests
  export HPCX_OSU_DIR=$HPCX_MPI_DIR/tests/osu-micro-benchmarks
  export HPCX_OSU_CUDA_DIR=$HPCX_MPI_DIR/tests/osu-micro-benchmarks-cuda
  export HPCX_IPM_DIR=
  if [ -d "${HPCX_DIR}/clusterkit" ]; then
    export HPCX_CLUSTERKIT_DIR=${HPCX_DIR}/clusterkit
  else
    export HPCX_CLUSTERKIT_DIR=
  fi
  export OMPI_HOME=$HPCX_MPI_DIR MPI_HOME=$HPCX_MPI_DIR OSHMEM_HOME=$HPCX_MPI_DIR OPAL_PREFIX=$HPCX_MPI_DIR

  export OLD_PATH=$PATH OLD_LD_LIBRARY_PATH=$LD_LIBRARY_PATH OLD_LIBRARY_PATH=$LIBRARY_PATH OLD_CPATH=$CPATH
  local clusterkit=${HPCX_CLUSTERKIT_DIR:+$HPCX_CLUSTERKIT_DIR/bin:}
  local net=$HPCX_NCCL_SPCX_PLUGIN_DIR/lib:$HPCX_NCCL_RDMA_SHARP_PLUGIN_DIR/lib
  PATH=$HPCX_SHARP_DIR/bin:$clusterkit$HPCX_HCOLL_DIR/bin:$HPCX_UCC_DIR/bin:$HPCX_UCX_DIR/bin:$HPCX_MPI_DIR/bin:$PATH
  LD_LIBRARY_PATH=$net:$HPCX_UCC_DIR/lib/ucc:$HPCX_UCC_DIR/lib:$HPCX_UCX_DIR/lib/ucx:$HPCX_UCX_DIR/lib:$HPCX_SHARP_DIR/lib:$HPCX_HCOLL_DIR/lib:$HPCX_MPI_DIR/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  LIBRARY_PATH=$net:$HPCX_MPI_DIR/lib:$HPCX_SHARP_DIR/lib:$HPCX_UCC_DIR/lib:$HPCX_UCX_DIR/lib:$HPCX_HCOLL_DIR/lib${LIBRARY_PATH:+:$LIBRARY_PATH}
  CPATH=$HPCX_MPI_DIR/include:$HPCX_UCC_DIR/include:$HPCX_UCX_DIR/include:$HPCX_SHARP_DIR/include:$HPCX_HCOLL_DIR/include${CPATH:+:$CPATH}
  PKG_CONFIG_PATH=$HPCX_HCOLL_DIR/lib/pkgconfig:$HPCX_SHARP_DIR/lib/pkgconfig:$HPCX_UCX_DIR/lib/pkgconfig:$HPCX_MPI_DIR/lib/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}
  export PATH LD_LIBRARY_PATH LIBRARY_PATH CPATH PKG_CONFIG_PATH
}

hpcx_unload() {
  export PATH=$OLD_PATH LD_LIBRARY_PATH=$OLD_LD_LIBRARY_PATH LIBRARY_PATH=$OLD_LIBRARY_PATH CPATH=$OLD_CPATH
  local name
  for name in "${!HPCX_@}" OMPI_HOME MPI_HOME OSHMEM_HOME OPAL_PREFIX PKG_CONFIG_PATH "${!OLD_@}"; do unset "$name"; done
}
