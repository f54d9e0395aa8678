"""What this project brings to trainkit."""

NAMES = {
    "LazyCall": "trainkit.projects.lazy.config",
    "LazyConfig": "trainkit.projects.lazy.config",
    "instantiate": "trainkit.projects.lazy.config",
    "reload_lazy_config": "trainkit.projects.lazy.config",
    "to_cfg": "trainkit.projects.lazy.config",
    "_convert_target_to_string": "trainkit.projects.lazy.nodes",
    "locate": "trainkit.projects.lazy.nodes",
}
LENDS = {
    "trainkit.config": ["LazyCall", "LazyConfig"],
    "trainkit.utils.registry": ["_convert_target_to_string", "locate"],
    "trainkit.utils.testing": ["reload_lazy_config"],
}
CONFIG_TYPES = {"omegaconf.dictconfig.DictConfig": "to_cfg"}
