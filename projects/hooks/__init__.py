"""The hooks that not every run needs. `trainkit.engine.hooks` has them under their names too."""
