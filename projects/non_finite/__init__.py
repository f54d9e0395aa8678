"""What happens if a gradient is not finite: the update is left out, or every gradient is checked before it."""
