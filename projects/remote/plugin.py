"""What this project brings to trainkit."""

NAMES = {
    "Mirror": "trainkit.projects.remote.mirror",
    "make_mirror": "trainkit.projects.remote.mirror",
    "CheckpointStore": "trainkit.projects.remote.store",
    "STORE_REGISTRY": "trainkit.projects.remote.store",
    "register_addresses": "trainkit.projects.remote.store",
}
LENDS = {
    "trainkit.checkpoint": ["CheckpointStore", "STORE_REGISTRY"],
    "trainkit.projects.remote": ["CheckpointStore", "Mirror", "STORE_REGISTRY"],
}
