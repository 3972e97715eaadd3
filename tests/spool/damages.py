"""One accident with the files of a folder, chosen at random: a flipped bit, a cut, a file that is gone, doubled or swapped."""

from __future__ import annotations

import random
from pathlib import Path


def damage(rng: random.Random, folder: Path) -> str:
    """What was done to which file."""
    files = [each for each in sorted(folder.iterdir()) if _is_data(each)]
    file, how = rng.choice(files), rng.choice(["flip", "flip", "cut", "gone", "doubled", "swapped"])
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    if how == "flip":
        data[at] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(data[:at])
    elif how == "gone":
        file.unlink()
    else:
        other = rng.choice([each for each in files if each != file])
        if how == "swapped":
            file.write_bytes(other.read_bytes())
        elif file.suffix and rng.randrange(2):  # as a file that was not there
            other = file.with_name(f"{rng.randrange(1, 60):06}{file.suffix}")
        other.write_bytes(data)
        return f"{file.name} {how}: {other.name}"
    return f"{file.name} {how} at {at} of {len(data)}"


def _is_data(file: Path) -> bool:
    return file.suffix in (".sst", ".log") or file.name == "CURRENT" or file.name.startswith("MANIFEST-")
