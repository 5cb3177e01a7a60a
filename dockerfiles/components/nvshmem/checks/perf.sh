export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export NVSHMEM_BOOTSTRAP=PMI NVSHMEM_BOOTSTRAP_PMI=PMIX NVSHMEM_SYMMETRIC_SIZE=${NVSHMEM_SYMMETRIC_SIZE:-3G}
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
mpirun --oversubscribe --bind-to none -n "$gpus" nvshmem-perf "$TEST"
