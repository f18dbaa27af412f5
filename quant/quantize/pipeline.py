"""The encoding pipeline: a reader thread reads a plan's rows in slabs, all cores encode them, and
the caller writes them.

Rows are processed in the order of the plan. The number of bytes in memory is limited and does not
depend on the model's size.
"""

import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quant.methods import METHODS
from quant.methods.base import RowEncoder
from quant.native import ggml
from quant.native.processors import limit_workers, worker_count
from quant.relative_error import sum_of_squares
from quant.source.source import Weight

if TYPE_CHECKING:
    from quant.native.ggml import U8

SLAB_VALUES = 1 << 24  # values that are read at a time: 32 MiB of BF16
# values in an encoding job: few, so that no core waits long for the last job of a slab
PIECE_VALUES = 1 << 18
# limit of the bytes that are read and not yet written; a single slab may exceed it
MAX_BUFFERED_BYTES = 1 << 28
CHUNK_VALUES = 1 << 16  # values that are decoded to floats at a time; they fit into a core's cache
SAMPLED_ROWS = 32  # number of rows of a tensor on which its error is measured
READ_JOIN_SECONDS = 0.2  # seconds that a failed run waits for a read in progress


class EncodingTask(Protocol):
    """A tensor to encode: the rows of `weight` are converted to type `type`, by the encoder that
    make_encoder() returns.

    The encoder gets `chunk_values` values in one call; 0 means the pipeline's default.
    """

    @property
    def weight(self) -> Weight: ...
    @property
    def type(self) -> str: ...
    @property
    def chunk_values(self) -> int: ...
    def make_encoder(self) -> RowEncoder: ...


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Rows first .. last of task number `index` (from 0), in their new type [rows, row_bytes].

    `signal` is the sum of squares of sampled rows, and `noise` that of their rounding errors; both
    are 0 for rows that are copied. `seconds` is the time of the thread that encoded the rows.
    `ends_slab` means that these are the last rows of a slab. `encoder` is the encoder that chose
    the codes, None for rows that are copied.
    """

    index: int
    first: int
    last: int
    data: "U8"
    signal: float
    noise: float
    seconds: float
    ends_slab: bool
    encoder: RowEncoder | None = None


def encode_rows(
    tasks: Sequence[EncodingTask], threads: int, begin: tuple[int, int] = (0, 0)
) -> Generator[EncodedRows, None, None]:
    """Yield all rows in their new types, in order, starting at `begin` (index of the task, row).
    `threads` 0 uses all cores. Closing the iterator stops the threads.

    An error in a thread is raised here after all rows before it were yielded, so that the reported
    error does not depend on the number of threads. When the iterator is closed, encoders stop after
    about 65,000 values; a read in progress is waited for briefly and then abandoned.
    """
    budget = _ByteBudget(MAX_BUFFERED_BYTES)
    with (
        limit_workers(threads),
        ThreadPoolExecutor(worker_count(), thread_name_prefix="encode") as pool,
    ):
        queue = _JobQueue(budget)
        reader = threading.Thread(
            target=queue.fill, args=(tasks, begin, pool), name="read", daemon=True
        )
        reader.start()
        try:
            for job, nbytes in queue:
                yield job.result()
                # Without this, the rows would stay in memory during the wait for the next ones.
                del job
                budget.release(nbytes)
        finally:
            budget.close()
            pool.shutdown(wait=False, cancel_futures=True)
            reader.join(READ_JOIN_SECONDS)
            for method in METHODS.values():
                method.free_memory()


class _ByteBudget:
    """A limit on the bytes in memory. A slab that is larger than the limit is admitted when no
    other slab is in memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.used, self.closed = limit, 0, False
        self.changed = threading.Condition()

    def acquire(self, nbytes: int) -> bool:
        """Wait until the bytes fit into the limit. Return False if the pipeline was closed."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.closed or not self.used or self.used + nbytes <= self.limit
            )
            self.used += nbytes
            return not self.closed

    def release(self, nbytes: int) -> None:
        """Give back the bytes of a slab that was written."""
        with self.changed:
            self.used -= nbytes
            self.changed.notify()

    def close(self) -> None:
        """Wake up the waiting thread and refuse further slabs."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()


class _JobQueue:
    """A queue of encoding jobs in order. With each job it has the number of bytes that become free
    when the job's rows are written.
    """

    def __init__(self, budget: _ByteBudget) -> None:
        self.budget = budget
        self.jobs: deque[tuple[Future[EncodedRows], int] | None] = deque()
        self.arrived = threading.Semaphore(0)

    def __iter__(self) -> Iterator[tuple["Future[EncodedRows]", int]]:
        while True:
            self.arrived.acquire()
            entry = self.jobs.popleft()
            if entry is None:
                return
            yield entry
            del entry

    def fill(
        self, tasks: Sequence[EncodingTask], begin: tuple[int, int], pool: ThreadPoolExecutor
    ) -> None:
        """Read slab after slab as memory becomes free, and queue their encoding jobs. Runs in the
        reader thread.
        """
        try:
            tensor_job: _TensorJob | None = None
            for index, first, last in row_slabs([task.weight for task in tasks], *begin):
                if tensor_job is None or tensor_job.index != index:
                    tensor_job = _TensorJob(index, tasks[index])
                if not self._submit_slab(tensor_job, first, last, pool):
                    return
        except BaseException as error:  # noqa: BLE001 (raised again by the iterating thread)
            failed: Future[EncodedRows] = Future()
            failed.set_exception(error)
            self._put((failed, 0))
        self._put(None)

    def _submit_slab(
        self, tensor_job: "_TensorJob", first: int, last: int, pool: ThreadPoolExecutor
    ) -> bool:
        """Read rows first .. last and queue their encoding jobs. Return False if the pipeline was
        closed.
        """
        task, weight = tensor_job.task, tensor_job.task.weight
        new_row_bytes = 0 if task.type == weight.type else ggml.row_bytes(task.type, weight.columns)
        nbytes = (last - first) * (ggml.row_bytes(weight.type, weight.columns) + new_row_bytes)
        if not self.budget.acquire(nbytes):
            return False
        stored = weight.read(first, last)
        step = max(1, max(PIECE_VALUES, task.chunk_values) // weight.columns)
        for at in range(first, last, step):
            end = min(at + step, last)
            job_rows = stored[at - first : end - first]
            if self.budget.closed:
                return False
            job = pool.submit(_encode_rows, tensor_job, at, job_rows, end == last, self.budget)
            self._put((job, nbytes if end == last else 0))
        return True

    def _put(self, entry: tuple["Future[EncodedRows]", int] | None) -> None:
        """Append a job and its bytes, or None for the end of the queue."""
        self.jobs.append(entry)
        self.arrived.release()


class _TensorJob:
    """A tensor that is being encoded. Its encoder is made by the first thread that needs it."""

    def __init__(self, index: int, task: EncodingTask) -> None:
        self.index, self.task = index, task
        self.lock = threading.Lock()
        self.encoder: RowEncoder | None = None

    def shared_encoder(self) -> RowEncoder:
        """Return the tensor's encoder, which all threads share."""
        with self.lock:
            if self.encoder is None:
                self.encoder = self.task.make_encoder()
            return self.encoder


def row_slabs(
    weights: Sequence[Weight], index: int = 0, row: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Yield all slabs as (index of the weight, first row, last row), in the order in which they are
    read, starting at row `row` of weight `index`.
    """
    for at in range(index, len(weights)):
        step = max(1, SLAB_VALUES // weights[at].columns)
        for first in range(row if at == index else 0, weights[at].rows, step):
            yield at, first, min(first + step, weights[at].rows)


def _encode_rows(
    tensor_job: _TensorJob, first: int, stored: "U8", ends_slab: bool, budget: _ByteBudget
) -> EncodedRows:
    """Encode the rows in `stored`, which begin at row `first` of the tensor. Raises CancelledError
    if the pipeline is closed.
    """
    import numpy as np

    started, task, weight = time.perf_counter(), tensor_job.task, tensor_job.task.weight
    index, last = tensor_job.index, first + len(stored)
    if task.type == weight.type:
        stored = np.ascontiguousarray(stored)
        ggml.require_finite(stored, weight.type, label=weight.name)
        return EncodedRows(
            index, first, last, stored, 0.0, 0.0, time.perf_counter() - started, ends_slab
        )
    codes = np.empty((len(stored), ggml.row_bytes(task.type, weight.columns)), np.uint8)
    step, stride = (
        max(1, (task.chunk_values or CHUNK_VALUES) // weight.columns),
        max(1, weight.rows // SAMPLED_ROWS),
    )
    signal, noise, encode = 0.0, 0.0, tensor_job.shared_encoder()
    for at in range(0, len(stored), step):
        if budget.closed:
            raise CancelledError
        floats = ggml.decode(stored[at : at + step], weight.type, weight.columns, label=weight.name)
        blocks = encode(floats, first + at)
        codes[at : at + step] = blocks
        sample = slice(-(first + at) % stride, None, stride)
        if len(exact := floats[sample]):
            decoded = ggml.decode(blocks[sample], task.type, weight.columns, label=weight.name)
            signal, noise = signal + sum_of_squares(exact), noise + sum_of_squares(exact - decoded)
    return EncodedRows(
        index, first, last, codes, signal, noise, time.perf_counter() - started, ends_slab, encode
    )
