"""Users of trainkit's public API; each folder is a job of its own."""
