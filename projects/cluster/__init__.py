"""Jobs of SLURM that are started again when their time is over."""
