"""Names and constructor arguments that a config gives."""

import difflib
from collections.abc import Iterable

from trainkit.config.errors import ConfigError


def unknown_name(where: str, name: object, accepts: str, accepted: Iterable[str]) -> ConfigError:
    by_upper = {candidate.upper(): candidate for candidate in accepted}
    nearest = difflib.get_close_matches(str(name).upper(), by_upper, n=1)
    hint = f"did you mean {by_upper[nearest[0]]}? " if nearest else ""
    return ConfigError(f"{where}: unknown {name!r}; {hint}{accepts}: {', '.join(sorted(by_upper.values()))}")
