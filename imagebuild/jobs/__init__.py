"""Write benchmark jobs for Kubernetes and Slurm."""
