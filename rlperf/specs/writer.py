"""Files are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rlperf.errors import Problem, SpecError


def write_atomic(path: Path | str, content: str | bytes) -> Path:
    """Write ``content`` to ``path`` through a temporary file beside it and a rename; parents are made."""
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SpecError(Problem(f"cannot be written: {error.strerror or error}", str(target))) from error
    return target


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
