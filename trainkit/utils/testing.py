"""The place of a name that a project has."""

from trainkit.utils.loading import names_on_demand

__getattr__ = names_on_demand(__name__, "reload_lazy_config")
