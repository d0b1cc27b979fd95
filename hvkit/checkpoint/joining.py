"""Makes plain files of a sharded checkpoint: those that rank 0 would have written of all ranks.

Tensors that ranks have divided are put together one at a time, in files that are mapped into
memory. So joining needs disk for them, but hardly any memory, however large the model is.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvkit.checkpoint import manifests, rank_states, store
from hvkit.checkpoint.manifests import MANIFEST, DamagedError, Manifest
from hvkit.checkpoint.saved_object import Arrays, write_arrays
from hvkit.checkpoint.sharded import is_sharded, shares_of, states_file
from hvkit.errors import HvkitError

# Bytes from which a tensor is put together in a file.
_LARGE = 1 << 20


def join(source: Path, directory: Path) -> Path:
    """Write the plain files of a sharded checkpoint into a directory of checkpoints.

    Args:
        source: the checkpoint's folder, or a directory, of which the newest one counts.
        directory: another one; created if it is not there.

    Returns:
        The new checkpoint's folder.

    Raises:
        HvkitError: the source is no sharded checkpoint, or damaged, or in the same directory.
        OSError: it cannot be read, or the new one not be written.
    """
    folder = source if store.is_name(source.absolute().name) else _newest(source)
    if folder.absolute().parent == directory.absolute():
        raise HvkitError(f"{directory} holds the checkpoint itself: name another directory")
    try:
        manifest = manifests.read(folder)
        manifests.verify(folder, manifest)
    except DamagedError as error:
        raise HvkitError(f"{folder} is no complete checkpoint: {error}") from error
    if not is_sharded(manifest):
        raise HvkitError(f"{folder} is not sharded: its files are plain ones already")
    serial = store.prepare(directory).serial + 1

    def fill(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            _write(folder, manifest, target, Path(scratch))
        _seal(replace(manifest, serial=serial), target)

    store.write_folder(directory, folder.name, fill)
    return directory / folder.name


def _newest(directory: Path) -> Path:
    """The newest checkpoint of a directory.

    Raises:
        HvkitError: there is none.
    """
    found = [(m.serial, path) for path, m in store.readable(directory, lambda *_: None)]
    if not found:
        raise HvkitError(f"{directory} holds no checkpoint: name a folder such as step-000000100")
    return max(found)[1]


def _write(folder: Path, manifest: Manifest, target: Path, scratch: Path) -> None:
    """Write the plain file of each part, and what differs between ranks."""
    for facts in manifest.parts.values():
        if files := shares_of(folder, facts):
            _join_part(files, target / facts["file"], scratch)
        else:
            shutil.copyfile(folder / facts["file"], target / facts["file"])
    rank_states.save(target / rank_states.FILE, _states(folder, manifest.size))


def _states(folder: Path, size: int) -> Iterator[dict[str, Arrays]]:
    for rank in range(size):
        path = folder / states_file(rank)
        with closing(rank_states.Saved(path, same_size=True, in_round=True)) as saved:
            yield saved.of(0)


def _join_part(files: list[Path], path: Path, scratch: Path) -> None:
    """Write the plain file of a part that ranks have written in parts."""
    import torch

    from hvkit.frameworks.pytorch.model_parallel.shares import SavedState

    made: list[Path] = []

    def new(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        length = shape.numel()
        if length * dtype.itemsize < _LARGE:
            return torch.empty(shape, dtype=dtype)
        made.append(scratch / f"{len(made)}")
        whole: torch.Tensor = torch.from_file(str(made[-1]), shared=True, size=length, dtype=dtype)
        return whole.view(shape)

    state: Any = SavedState(files).plain(new, alias=True)
    if path.suffix == ".npz":
        write_arrays(path, state)
    else:
        with path.open("wb") as file:
            torch.save(state, file)
    for each in made:
        each.unlink()


def _seal(manifest: Manifest, folder: Path) -> None:
    """Flush the files to disk, and add a manifest that lists them."""
    files = sorted(path.name for path in folder.iterdir())
    for file in files:
        store.flush(folder / file)
    facts = {file: manifests.facts_of(folder / file) for file in files}
    parts = {
        name: {key: value for key, value in of.items() if key != "shares"}
        for name, of in manifest.parts.items()
    }
    replace(manifest, files=facts, parts=parts).write(folder)
    store.flush(folder / MANIFEST)
