"""Find a learning rate, the largest batch size, and the trainer in a user's script."""
