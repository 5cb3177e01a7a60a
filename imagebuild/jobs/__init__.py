"""Benchmarks as Kubernetes and Slurm jobs, put together from facts in `jobs/`."""
