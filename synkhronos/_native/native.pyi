"""Types of the compiled core, in the order of its ``*_module.c`` files."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from numpy.typing import DTypeLike, NDArray
from typing_extensions import Self

_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")

# -- threads.c

#: Pointer to the `synkhronos_threads` of threads.h, by which C++ code of other modules uses the threads.
threads: Final[object]

def serve_blas(address: int, n_threads: int, /) -> bool:
    """Run the threads of an OpenBLAS library in this process, until `end_blas`; return whether that is possible.

    Unlike OpenBLAS's own threads, they do not spin while they rest. A forked process uses OpenBLAS's own threads.

    Parameters
    ----------
    address : int
        Address of the library's function ``openblas_set_threads_callback_function``.
    n_threads : int
        The most threads that the library will use.
    """

def use_threads(n: int, is_alone: bool, /) -> None:
    """Set how many threads, of those that `serve_blas` has started, may compute.

    Threads without work spin for 1 ms before they sleep. If ``n`` is 1, they sleep at once.

    Parameters
    ----------
    n : int
    is_alone : bool
        Whether the controller computes alone. Only then, the threads divide products and updates. In a call of all
        ranks, OpenBLAS divides the controller's products as those of the other ranks, so that results are the same.
    """

def end_blas() -> None:
    """End the threads; the libraries use their own again."""

# -- heap_module.c

#: Smallest block of the heap in bytes; smaller allocations go to malloc.
SMALLEST_BLOCK: int

class Heap:
    """Shared heap of one session: memory for arrays that all ranks map at the same address, with one arena per rank.

    Its buffer is the memory of all arenas.

    Parameters
    ----------
    fd : int
        File to map; -1 for private memory. The heap owns it, unless the constructor raises.
    n_ranks, rank : int
        The number of arenas, and the index of this process's own arena.
    size : int
        Bytes of an arena, a multiple of 2 MiB; 0: no memory, and NumPy's default handler allocates.
    keep : int
        Largest number of bytes in freed blocks that this rank caches for reuse.

    Attributes
    ----------
    base : int or None
        Address of the first arena; ``None`` if ranks share no memory.
    short : bool
        Whether more than half of the bytes that `allow` permitted are used.

    Raises
    ------
    OSError
        If the kernel refuses.
    ValueError
        If ``rank``, ``size`` or ``keep`` is invalid.
    """

    base: int | None
    short: bool
    def __init__(self, fd: int, n_ranks: int, rank: int, size: int, keep: int) -> None: ...
    def call(self, function: Callable[[_Argument], _Result], argument: _Argument, /) -> _Result:
        """Call ``function(argument)`` as a command; during the call, NumPy allocates arrays in the heap."""

    def share(self, function: Callable[[_Argument], _Result], argument: _Argument, /) -> _Result:
        """Call ``function(argument)``; processes that this thread forks during the call share the heap as ranks."""

    def take(self, rank: int, /) -> None:
        """Take the arena of ``rank``, in a worker that was just forked. The arena is empty afterwards."""

    def allow(self, n_bytes: int, /) -> None:
        """Set how many more bytes this rank may take from the system, in addition to its cached blocks."""

    def trim(self) -> None:
        """Release all cached blocks."""

    def close(self) -> None:
        """Release the memory of the other ranks, which must have ended, and stop allocating in the heap.

        Memory of this rank's existing arrays is released when they are deleted.
        """

    def private(self, values: Sequence[Any], /) -> list[Any]:
        """Return the values, with copies in place of arrays that are in memory that ranks share."""

    def offset(self, array: NDArray[Any], /) -> int | None:
        """Return an array's offset from `base` in bytes; ``None`` if it is not in memory that ranks share."""

    def counts(self) -> list[tuple[int, int, int]]:
        """Return, for each rank, the bytes in use, the bytes cached, and the peak of the bytes in use."""

    def __buffer__(self, flags: int, /) -> memoryview: ...

def before_fork() -> None:
    """Copy the live blocks before a fork of a process that is not a rank; warn if too little memory is free.

    The child gets these private copies instead of the shared blocks.
    """

def after_fork() -> None:
    """Free the copies after that fork, in the parent."""

# -- sync_module.c

#: Longest time between two checks that the other ranks are alive, in nanoseconds.
POLL_NS: int

# Kinds of counters; see sync.h.
SENT: int
ANSWERED: int
ARRIVED: int

class Sync:
    """One process's view of the counters by which the ranks of a session synchronize; see ``sync.h``.

    Parameters
    ----------
    memory : buffer of at least ``bytes_for(n_ranks)`` bytes
        Shared by all ranks, aligned to 64 bytes, initially all zero.
    n_ranks : int
    rank : int
        The rank of this process, which becomes the controller.
    spin : float
        Seconds to spin before parking; 0 if ranks share cores.

    Attributes
    ----------
    rank : int
        The rank of this process. A forked worker sets it.
    n_ranks : int
    sent : int
        Number of the last message that the controller sent.
    answered, arrived : list of int
        For each rank, the number of the last message that it answered, and the last barrier step at which it arrived.
    aborted : bool
        Whether the abort flag is set.
    """

    rank: int
    n_ranks: int
    sent: int
    answered: list[int]
    arrived: list[int]
    aborted: bool
    def __new__(cls, memory: Any, n_ranks: int, rank: int, spin: float) -> Self: ...
    @staticmethod
    def bytes_for(n_ranks: int) -> int:
        """Return the size of the shared memory in bytes."""

    def post(self, counter: int, value: int) -> None:
        """Set this rank's counter, and wake the ranks that may wait for it."""

    def wait(self, counter: int, value: int, check: Callable[[], None]) -> None:
        """Wait until all counters are at least ``value``.

        The rank sleeps for at most `POLL_NS` at a time. Before each sleep, signal handlers and ``check()`` run; if
        either raises an exception, the wait ends.
        """

    def park(self, counter: int, value: int) -> None:
        """Sleep until all counters are at least ``value``, for at most `POLL_NS`."""

    def set_answered(self, rank: int, number: int) -> None:
        """Set the `ANSWERED` counter of another rank."""

    def restart(self, number: int) -> None:
        """Reset the barrier steps at the start of message ``number``; all ranks call this."""

    def arrive(self) -> int:
        """Arrive at the barrier without waiting; return the barrier step to wait for."""

    def barrier(self, check: Callable[[], None]) -> None:
        """Arrive at the barrier and wait for all ranks, as `wait` does."""

    def abort(self) -> None:
        """Set the abort flag, which ends the waits of all ranks at the barrier."""

    def reset(self) -> None:
        """Clear the abort flag."""

# -- reductions_module.c

class Reduction:
    """Element-wise reduction of as many arrays as there are weights, in their order.

    Parameters
    ----------
    op : {"sum", "prod", "max", "min", "avg"}
    dtype, returned : dtype
        The dtypes of the operands and of the outs. They are equal, except that sums and products of integers and
        booleans may return int64 (uint64 for unsigned integers), and their averages may return float64.
    weights : sequence of float
        Finite and not negative. An operand of weight 0 is left out, including its NaNs. Otherwise weights matter only
        for averages. If all weights are 0, they count as equal.

    Raises
    ------
    TypeError
        If there is no such reduction for these dtypes.
    ValueError
        If a weight is negative or not finite.
    """

    def __init__(self, op: str, dtype: DTypeLike, returned: DTypeLike, weights: Sequence[float]) -> None: ...
    def __call__(self, operands: Sequence[NDArray[Any]], outs: Sequence[NDArray[Any]]) -> None:
        """Reduce the operands, and write the result to each of the outs.

        All arrays must be C-contiguous, in native byte order, and of the same size. An out may be an operand if the
        dtypes are equal, but must not overlap one otherwise. The GIL is released while large arrays are reduced.
        """

def normalized(weights: Sequence[float]) -> list[float]:
    """Scale weights so that they sum to one.

    If all weights are 0, the shares are equal. Otherwise only a weight of 0 gets a share of 0.
    """

def add_to_sums(sums: NDArray[Any], values: NDArray[Any], weight: float) -> None:
    """Add weighted values to the sums of a running mean.

    For integers and booleans, the sums are pairs of int64, initially 0. The weights are integers, and their total is
    less than 2**62.

    For other dtypes, the sums have the dtype of the values (float32 for float16), initially -0.0. The weights of all
    arrays sum to one. If the sum of two finite terms overflows, rounding is the cause; then it becomes the largest
    finite number, with its sign.
    """

def mean_of_sums(sums: NDArray[Any], total: int, out: NDArray[Any]) -> None:
    """Divide sums of integers by ``total``; write the means, rounded to nearest with ties to even, or as float64."""

# -- collectives_module.c

#: Number of bytes of a rank's staging buffer.
STAGING_BYTES: int

class Collectives:
    """Collectives of the ranks of one node, over shared memory; see ``collectives.h``.

    Parameters
    ----------
    memory : buffer of at least ``bytes_for(n_ranks)`` bytes
        Shared by all ranks, aligned to 64 bytes, initially all zero.
    sync : Sync
        Provides the barriers.
    heap : Heap
        Large arrays in it are reduced in place; other arrays are staged.
    """

    def __init__(self, memory: Any, sync: Sync, heap: Heap) -> None: ...
    @staticmethod
    def bytes_for(n_ranks: int) -> int:
        """Return the size of the shared memory in bytes."""

    def restart(self) -> None:
        """Reset the rounds at the start of a message; all ranks call this."""

    def run(
        self,
        arrays: list[tuple[Any, Any, Any]],
        signature: int,
        check: Callable[[], None],
        wait: Callable[[int], None] | None,
        skip_last_barrier: bool,
        /,
    ) -> bool | None:
        """Run a collective.

        Parameters
        ----------
        arrays : list of (array, out, how)
            C-contiguous arrays. ``out`` receives the result; ``None`` if this rank does not want it. ``how`` is a
            `Reduction`; to gather the array, it is a sequence with each rank's number of elements.
        signature : int
            Must be the same on all ranks.
        check : callable
            ``check()`` raises if a barrier cannot complete any more.
        wait : callable or None
            ``wait(step)`` replaces the built-in wait for all ranks at a barrier step.
        skip_last_barrier : bool
            Return as soon as this rank has done its own part. The results are complete, and other ranks no longer
            access this rank's arrays, when the next collective has passed a barrier.

        Returns
        -------
        bool or None
            Whether any array was reduced or gathered in place. ``None`` if the signatures differ; then no result is
            written.
        """

# -- exchange_module.c

class Piece:
    """Arrays that node leaders exchange together; `Exchange.begin` makes it.

    Attributes
    ----------
    is_complete : bool
        Whether all messages have been sent and received, so that the arrays may be used again.
    has_failed : bool
        Whether this leader or another has failed, so that the result is undefined.
    times : tuple of int
        Nanoseconds of the monotonic clock at which it was begun, and at which it was complete.
    """

    is_complete: bool
    has_failed: bool
    times: tuple[int, int]
    def fail(self) -> None:
        """Send empty messages from now on, because this leader has failed."""

class Exchange:
    """Exchange of arrays between node leaders by non-blocking MPI messages.

    Parameters
    ----------
    handle_bytes : int
        Size of MPI's handles: 4 or 8.
    communicator, byte : int
        Handles of a communicator for these messages only, and of ``MPI_BYTE``.
    functions : tuple of int
        Addresses of ``MPI_Isend``, ``MPI_Irecv``, ``MPI_Test`` and ``MPI_Get_count``.
    """

    def __init__(self, handle_bytes: int, communicator: int, byte: int, functions: tuple[int, ...]) -> None: ...
    def begin(
        self,
        tag: int,
        first_sends: list[tuple[int, NDArray[Any]]],
        first_receives: list[tuple[int, NDArray[Any]]],
        second_sends: list[tuple[int, NDArray[Any]]],
        second_receives: list[tuple[int, NDArray[Any]]],
        reduction: tuple[Any, ...] | None,
        narrowing: tuple[Any, ...] | None,
        has_failed: bool,
        /,
    ) -> Piece:
        """Begin to exchange a piece. It advances in calls of `advance`, and between `poll` and `rest`.

        Parameters
        ----------
        tag : int
            The first of four consecutive tags that the messages have.
        first_sends, first_receives, second_sends, second_receives : list of tuple
            C-contiguous arrays to send and to receive in each step, each with the number of the other leader. Those of
            the second step may be the result of the first.
        reduction : tuple, or None
            ``(reduction, operands, out)``: a `Reduction` of a list of arrays, between the steps; ``None``: there is
            none.
        narrowing : tuple, or None
            ``(got, wide, sent, result, start, is_bfloat16)`` if messages have 16 bits for each float32 number. ``got``
            is widened into ``wide`` before the reduction. Its out, which is ``result[start:start + n]``, is narrowed
            into ``sent``, and ``sent`` is widened into ``result`` at the end.
        has_failed : bool
            Whether this leader has failed, and sends empty messages only.

        Raises
        ------
        TypeError, ValueError
            If arguments do not fit.
        """

    def advance(self) -> bool:
        """Advance all pieces as far as possible without waiting, with the GIL released.

        Returns
        -------
        bool
            Whether all pieces are complete.

        Raises
        ------
        RuntimeError
            If a function of MPI returns an error.
        """

    def poll(self) -> None:
        """Advance all pieces in a thread, until `rest`.

        Raises
        ------
        OSError
            If the thread cannot be started.
        """

    def pause(self) -> None:
        """Have the thread, if any, wait until `resume`, so that this thread may call MPI."""

    def resume(self) -> None:
        """Have the thread, if any, go on after `pause`."""

    def rest(self) -> None:
        """End the thread, if there is one."""

# -- fast_call_module.c

class FastCall:
    """Callable that calls a compiled function, which takes its arguments from cells (lists of one item).

    Parameters
    ----------
    function : callable
        Takes no arguments; returns a list.
    inputs : tuple of (cell, dtype, tuple of bool)
        For each argument: its cell, the dtype that its array must have, and for each axis whether it must have length
        1.
    n_outputs : int
        The number of items, from the start of the returned list, to return.
    cleared : tuple of cells
        Cells that are set to ``None`` after the call.
    updated : tuple of SentValue
        Records for `follow_values` after the call.
    """

    def __new__(
        cls,
        function: Callable[[], list[Any]],
        inputs: tuple[tuple[list[Any], Any, tuple[bool, ...]], ...],
        n_outputs: int,
        cleared: tuple[list[Any], ...],
        updated: tuple[SentValue, ...],
    ) -> Self: ...
    def __call__(self, values: list[Any], /) -> list[Any] | None:
        """Store the values in the cells and call the function.

        Return ``None``, without calling it, if the number of values or one of their types does not match.
        """

class SentValue:
    """Record of the value that the other ranks have of one shared variable.

    Parameters
    ----------
    storage : list
        The storage of the variable's container, a list whose only item is the controller's value.

    Attributes
    ----------
    sent : object
        The controller's value at the time when the other ranks got it. If ``storage`` has another object, the program
        has set the variable since. ``None`` also means that the program has set it.
    stale : object
        A value of the controller's that is valid for all ranks, and that the other ranks do not have yet.
        `synkhronos._graph.IN_WORK` while the controller computes it; ``None`` if the other ranks' values are valid.
    viewed : object
        An array of the controller's that the other ranks view instead of a copy; ``None`` if they have copies.
    """

    storage: Final[list[Any]]
    sent: Any
    stale: Any
    viewed: Any

    def __new__(cls, storage: list[Any]) -> Self: ...

def are_of_kinds(values: tuple[Any, ...], kinds: tuple[tuple[tuple[int, ...], Any], ...], /) -> bool:
    """Return whether the values are arrays of these (shape, dtype), which must be the same objects of dtypes."""

def first_set(records: tuple[SentValue, ...], /) -> int:
    """Return the position of the first record of a variable that the program has set; -1 if there is none."""

def follow_values(records: tuple[SentValue, ...], /) -> None:
    """Record that all ranks have set the variables, except for those that the program has set before."""

def set_stale(records: tuple[SentValue, ...], value: Any, /) -> None:
    """Set ``stale`` of all records."""

def note_values(records: tuple[SentValue, ...], are_stale: bool, /) -> None:
    """Record the controller's values as ``sent``, and as ``stale`` if the other ranks have still to get them."""

# -- process_module.c

def die_with(pid: int, by_main_thread: bool, /) -> bool:
    """Have this process killed when another process ends.

    Parameters
    ----------
    pid : int
        The other process, which may be the parent.
    by_main_thread : bool
        Also have this process killed when the thread that forked it ends.

    Returns
    -------
    bool
        Whether the system allows it.
    """

def exit_on_signal(number: int, /) -> None:
    """Have a signal end this process at once with exit code 0, even while it runs C code.

    Parameters
    ----------
    number : int
        The signal's number.
    """

def get_handlers(
    get: Callable[[int], Any], numbers: tuple[int, ...], note: Callable[..., Any], known: dict[int, Any], /
) -> dict[int, Any]: ...
def set_handlers(set: Callable[[int, Any], Any], handlers: dict[int, Any], /) -> list[BaseException]:
    """Set the Python handlers of several signals, even if pending handlers raise exceptions meanwhile.

    C-level handlers stay in place, because other code may have replaced Python's own, as faulthandler does.

    Parameters
    ----------
    set : callable
        ``signal.signal``.
    handlers : dict
        The handlers by signal number.

    Returns
    -------
    list
        The exceptions that pending handlers raised.
    """

def require_frames(n: int, /) -> None:
    """Raise `RecursionError` if fewer than ``n`` frames are left within this thread's recursion limit."""

class Descriptor:
    """Owner of a file descriptor, with the identity of its file: the device and the inode.

    Parameters
    ----------
    fd : int

    Raises
    ------
    OSError
        If the descriptor is not open.
    """

    def __new__(cls, fd: int) -> Self: ...
    def find(self) -> int:
        """Return the descriptor, or -1 if its number now belongs to another file or to none.

        Raises
        ------
        ValueError
            After `close`.
        """

    def close(self) -> None:
        """Close the descriptor, unless its number belongs to another file. Deleting the object does the same."""

# -- module.c

def narrow(values: NDArray[Any], out: NDArray[Any], is_bfloat16: bool, /) -> None:
    """Convert float32 to bfloat16 or float16, as bits in a uint16 array; round to nearest, ties to even."""

def widen(values: NDArray[Any], out: NDArray[Any], is_bfloat16: bool, /) -> None:
    """Convert bfloat16 or float16, as bits in a uint16 array, to float32."""

def hash_blocks(content: Any, numbers: NDArray[Any], key: bytes, out: NDArray[Any], /) -> None:
    """Compute hashes of blocks of memory, with the GIL released.

    Parameters
    ----------
    content : bytes-like
        C-contiguous memory. The last block may be shorter than the others.
    numbers : int64 array
        The numbers, from 0, of the blocks to hash.
    key : bytes
        Random bytes. The block size is their number minus 16, and must be a multiple of 16.
    out : uint64 array of shape (len(numbers), 4)
        Receives the hashes. Two different blocks of the same length have equal hashes with a probability of at most
        2^-128.

    Raises
    ------
    ValueError
        If a block does not exist, or sizes do not match.
    """
