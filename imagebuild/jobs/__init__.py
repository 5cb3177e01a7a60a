"""Benchmark jobs for Kubernetes and Slurm."""
