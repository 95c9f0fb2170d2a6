"""Write checkpoints while training goes on: copy the state to host memory, then let a thread write the files.

Each rank has one writer and at most one checkpoint in it: a save waits only if the one before is still being written.
"""

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

MEMORY_SHARE = 0.5  # of the free host memory that the copies of all ranks on a host may take
PATIENCE = 60.0  # seconds that a training which fails waits for the checkpoint in its writer
CGROUP = Path("/sys/fs/cgroup")


class BackgroundWriter:
    """Runs one function at a time in a thread. An error in it is raised by the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._buffers: list[torch.UntypedStorage] = []

    def start(self, write: Callable[[], None]) -> None:
        self.wait()
        # A daemon: rank 0 waits for the files of ranks that may have died.
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the function has ended."""
        if self._thread:
            self._thread.join()
        self.check()

    def check(self) -> None:
        if self._error:
            raise self._error

    def copy(self, state: Any) -> Any | None:
        """A copy of the state in host memory; None if that has too little room. Not while a function runs."""
        tensors = list(_tensors(state))
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        sizes = [storage.nbytes() for storage in storages.values()]
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if sum(sizes) * local_ranks > MEMORY_SHARE * free_memory():
            self._buffers = []
            return None
        if sizes != [buffer.nbytes() for buffer in self._buffers]:  # copying into new memory takes longer
            self._buffers = []
            self._buffers = [torch.UntypedStorage(size) for size in sizes]
        for buffer, storage in zip(self._buffers, storages.values(), strict=True):
            buffer.copy_(storage)
        buffers = dict(zip(storages, self._buffers, strict=True))
        # deepcopy takes these instead of copying the tensors itself.
        copies = {id(tensor): _with_storage(tensor, buffers[tensor.untyped_storage()._cdata]) for tensor in tensors}
        return copy.deepcopy(state, copies)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread:
            self._thread.join(PATIENCE)


def _tensors(state: Any) -> Iterator[Tensor]:
    if isinstance(state, Tensor):
        yield state
    for child in state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ():
        yield from _tensors(child)


def _with_storage(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """The tensor on a copied storage: tensors that shared memory still do, so torch.save writes it once."""
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def free_memory() -> int:
    """Bytes of host memory that can still be used, also inside a container."""
    import psutil

    free = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(stat["inactive_file"]))
    return free
