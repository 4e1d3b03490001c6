"""The folders of the cache directory. Commands import this module without torch and JAX."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str, directory: str | os.PathLike[str] | None) -> Path | None:
    """Returns the folder with this name in the cache directory; None if the cache is off.

    Args:
        name: the folder's name, such as "tuning".
        directory: the cache directory; "" if the cache is off, None for the default directory.

    Raises: RuntimeError if there is no default directory, because the user has no home directory.
    """
    if directory is not None:
        return Path(directory).expanduser().absolute() / name if str(directory) else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dynaxla" / name


def is_known_to_be_empty(folder: Path) -> bool:
    """True if a store in this folder would be empty: the folder has only hidden files, or does not exist and can be created."""
    try:
        return not any(not path.name.startswith(".") for path in folder.iterdir())
    except FileNotFoundError:
        parent = next(path for path in folder.parents if path.exists())
        return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    except OSError:
        return False
