"""More samplers for training, and several loaders as one."""
