"""One command to start training: on one node, over ssh, under Kubernetes, Slurm or MPI."""
