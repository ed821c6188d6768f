"""Names to things: position schemes and frequency scalings are looked up here, never imported by a configured path."""

import difflib
import inspect
from collections.abc import Callable


def lookup(group: str, registry: dict[str, Callable], given: dict) -> tuple[str, dict]:
    """The name in `given`, and the configuration keys of what it names, with their defaults.

    The keys are the keyword-only arguments of the registered class or function; one without a default has
    inspect.Parameter.empty. Raises ValueError, listing what is known, for a name or a key that is not.
    """
    if not isinstance(given, dict) or "name" not in given:
        raise ValueError(f"{group}={given!r}: must be a mapping with a name out of {', '.join(registry)}")
    name = given["name"]
    if not isinstance(name, str) or name not in registry:
        near = difflib.get_close_matches(str(name), registry, 1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"{group}={name!r}: known names are {', '.join(registry)}{meant}")
    parameters = inspect.signature(registry[name]).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    for key in given:
        if key != "name" and key not in known:
            raise ValueError(f"{group}.{key}: {name} has no such key; it knows {', '.join(known) or 'none'}")
    return name, known
