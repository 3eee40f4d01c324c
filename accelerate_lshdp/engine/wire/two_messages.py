# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Reductions that take two messages: compress, send, combine what has come, send, decompress.

The backward goes on meanwhile, so the second message has to be sent beside it, when the first one has arrived. On the
CPU one thread for each reduction does that. It sends second messages in the order of the first ones, and in a process
group of their own, because gloo tells messages of a group apart by their order alone. On devices with streams
everything is queued on a stream at once, and no thread is needed.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from accelerate_lshdp.documents.plan_sections import Communication
from accelerate_lshdp.engine.wire.reduction import GradientReduction, PendingReduction
from accelerate_lshdp.runtime.profiler_labels import label


logger = logging.getLogger(__name__)
#: How long a thread waits for a message before it looks whether the process is about to exit.
_EXIT_CHECK_INTERVAL = timedelta(seconds=0.5)


class LossyBuffer(ABC):
    """The state of one gradient buffer from step to step, and the computations around its two messages.

    All three methods return at once where they start a message. Subclasses keep tensors in ``kept``; they make up the
    state of a checkpoint and are changed in place. It is empty where nothing is kept from step to step.
    """

    kept: dict[str, torch.Tensor]

    @abstractmethod
    def compress(self, buffer: torch.Tensor) -> dist.Work:
        """Starts the first message, made of the gradients in ``buffer`` (1-D) and of what was kept."""

    @abstractmethod
    def combine(self, buffer: torch.Tensor) -> dist.Work | None:
        """Starts the second message, as the first one has arrived. None: the buffer holds its sum already."""

    @abstractmethod
    def decompress(self, buffer: torch.Tensor) -> None:
        """Fills the buffer with the sum, as the second message has arrived."""


class _Pending(PendingReduction):
    """A buffer on the CPU between ``start`` and ``wait``: made by the backward's thread, then the worker's alone."""

    def __init__(self, kept: LossyBuffer, buffer: torch.Tensor, reduction: TwoMessageReduction) -> None:
        self._kept = kept
        self._buffer: torch.Tensor | None = buffer
        # The thread ends with the reduction, and without the thread `wait` would never return.
        self._reduction: TwoMessageReduction | None = reduction
        # In the backward's thread, so that first messages are sent in the order in which buffers are started: gloo
        # matches them by that order alone.
        with label("compress"):
            self.message: dist.Work | None = kept.compress(buffer)
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self.wait_for_end()
        if self._error is not None:
            raise self._error

    def wait_for_end(self) -> None:
        """Waits until nothing works on the buffer any more, whether it holds the sum or not."""
        self._ended.wait()

    def send_second(self) -> None:
        """Sends the second message, as the first one has arrived."""
        with label("combine"):
            self.message = self._kept.combine(self._buffer)
        if self.message is None:
            self._end()

    def finish(self) -> None:
        """Fills the buffer, as the second message has arrived."""
        with label("decompress"):
            self._kept.decompress(self._buffer)
        self._end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        # Not kept alive until the next step; and before the event, after which the next reduction may begin.
        self._buffer = self.message = None
        self._ended.set()
        # After the event: if this is the last reference, the thread ends, and nothing else may be left to do.
        self._reduction = None


class _Streamed(PendingReduction):
    """A buffer on a device with streams: both messages and all computations are queued on one stream at once."""

    def __init__(self, kept: LossyBuffer, buffer: torch.Tensor, stream: torch.Stream) -> None:
        self._device = torch.get_device_module(buffer.device)
        # The gradients in the buffer are still being computed on the current stream.
        stream.wait_stream(self._device.current_stream(buffer.device))
        # `wait` of a collective makes this stream wait, not the host, so nothing here blocks the backward. All buffers
        # of a reduction take the same stream: their scratch tensors and messages are used one after the other.
        with self._device.stream(stream):
            with label("compress"):
                kept.compress(buffer).wait()
            with label("combine"):
                message = kept.combine(buffer)
            if message is not None:
                message.wait()
                with label("decompress"):
                    kept.decompress(buffer)
        # The allocator knows of the stream that the buffer was made on; this one may still work on it when it is
        # dropped.
        buffer.record_stream(stream)
        self._finished = stream.record_event()

    def is_done(self) -> bool:
        return self._finished.query()

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._finished)


class _Exiting(Exception):
    """Raised in the worker's thread when the process is about to exit, so that it leaves whatever it waits for."""


class _Worker:
    """A thread that sends second messages and decompresses, in the order in which buffers are handed to it.

    It must not be in a collective when the interpreter goes (see ``shutdown``), nor keep the process from exiting
    because another rank is gone. So it waits in short pieces, and ends before the exit.
    """

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._unfinished: deque[_Pending] = deque()
        self._exiting = threading.Event()
        self._thread: threading.Thread | None = None

    def submit(self, pending: _Pending) -> None:
        """Hands over a buffer whose first message has been sent; returns at once."""
        # Not in the constructor: a reduction that is never used (a model that is only evaluated) needs no thread.
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lossy reduction", daemon=True)
            self._thread.start()
        self._arrived.put(pending)

    def stop(self) -> None:
        """Ends the thread, whatever is under way."""
        self._exiting.set()
        self._arrived.put(None)  # wakes a thread that waits for the next buffer
        # The last reference to a reduction may be dropped in the thread itself, which cannot wait for its own end.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        # Whether gradients are recorded is a setting of each thread.
        with torch.no_grad():
            try:
                while True:
                    self._finish_arrived()
                    pending = self._next()
                    if pending is not None:
                        self._attempt(pending, self._send_second)
                    elif self._unfinished:
                        self._attempt(self._unfinished.popleft(), self._finish)
            except _Exiting:
                return

    def _next(self) -> _Pending | None:
        """The next buffer; None if there is none while others are to be finished."""
        # A second message that can be sent comes before one that is to be waited for: other ranks wait for ours.
        try:
            pending = self._arrived.get(block=not self._unfinished)
        except queue.Empty:
            return None
        if self._exiting.is_set():
            raise _Exiting
        return pending

    def _finish_arrived(self) -> None:
        # In the order of sending: buffers are finished as they were started, on all ranks alike.
        while self._unfinished and self._unfinished[0].message.is_completed():
            self._attempt(self._unfinished.popleft(), self._finish)

    def _send_second(self, pending: _Pending) -> None:
        self._wait(pending.message)
        pending.send_second()
        if not pending.is_done():
            self._unfinished.append(pending)

    def _finish(self, pending: _Pending) -> None:
        self._wait(pending.message)
        pending.finish()

    def _attempt(self, pending: _Pending, action: Callable[[_Pending], None]) -> None:
        try:
            action(pending)
        except _Exiting as exiting:
            pending.fail(RuntimeError("the process exits while gradients are being summed"))
            raise exiting
        except Exception as error:  # raised by `wait`, in the thread that waits for the buffer
            pending.fail(error)

    def _wait(self, message: dist.Work) -> None:
        # In short pieces: a thread that is blocked inside of gloo cannot be woken when the process is to exit. gloo's
        # own time-out still ends the collective as a whole.
        while not self._exiting.is_set():
            try:
                message.wait(_EXIT_CHECK_INTERVAL)
                return
            except RuntimeError:
                if message.is_completed():
                    message.wait()  # which raises if the message has failed; else it arrived just after the patience
                    return
        raise _Exiting


class TwoMessageReduction(GradientReduction):
    """Sums buffers in two messages each, and keeps a `LossyBuffer` for every index.

    Args:
        group: the ranks that sum.
        second_group: another group of the same ranks, which nothing else uses.
    """

    takes_two_messages = True

    @classmethod
    def make(
        cls, communication: Communication, group: dist.ProcessGroup, second_group: dist.ProcessGroup | None
    ) -> GradientReduction:
        return cls(group, second_group)

    def __init__(self, group: dist.ProcessGroup, second_group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.second_group = second_group
        self._kept: dict[int, LossyBuffer] = {}
        self._signatures: dict[int, tuple] = {}
        self._under_way: dict[int, PendingReduction] = {}
        self._saved: dict[int, dict[str, torch.Tensor]] = {}
        self._stream: torch.Stream | None = None
        self._worker = _Worker()
        # The thread holds the worker, not this object: when this is dropped, the thread ends. At exit a handler of its
        # own does it, as handlers run in the reverse order of registration: the thread is gone before the handler of
        # `shutdown`, which the accelerator has registered earlier, destroys the groups that the thread uses.
        weakref.finalize(self, self._worker.stop).atexit = False
        atexit.register(_stop, weakref.ref(self._worker))

    @abstractmethod
    def make_buffer(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> LossyBuffer:
        """A new `LossyBuffer` for buffers like this one."""

    def start(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> PendingReduction:
        before = self._under_way.pop(index, None)
        # Of a backward that was given up: it still uses what is kept. On devices the one stream keeps the order.
        if isinstance(before, _Pending):
            before.wait_for_end()
        kept = self._buffer(buffer, index, shapes)
        with torch.no_grad():
            if buffer.device.type == "cpu":
                pending = _Pending(kept, buffer, self)
                self._worker.submit(pending)
            else:
                if self._stream is None:
                    self._stream = torch.get_device_module(buffer.device).Stream(buffer.device)
                pending = _Streamed(kept, buffer, self._stream)
        self._under_way[index] = pending
        return pending

    def _buffer(self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size]) -> LossyBuffer:
        signature = buffer.numel(), buffer.dtype, buffer.device, tuple(shapes)
        if self._signatures.get(index) != signature:
            if index in self._kept and self._kept[index].kept:
                logger.warning(
                    f"{self.name}: gradient buffer {index} has other parameters than before (some were frozen or "
                    "unfrozen), so what was kept for it is dropped: at most one step's rounding errors are lost"
                )
            self._signatures[index] = signature
            self._kept[index] = self.make_buffer(buffer, index, shapes)
            if index in self._saved:
                self._restore(index, self._saved.pop(index))
        return self._kept[index]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has to hold of this rank: tensors by ``<index>.<name>``. Nothing may be under way."""
        # `_saved` are parts of a loaded checkpoint whose buffers have not been started since: they must not be lost.
        kept = {index: buffer.kept for index, buffer in self._kept.items()}
        return {f"{index}.{name}": t for index, k in sorted((self._saved | kept).items()) for name, t in k.items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on with what `state_dict` gave on this rank; buffers that it lacks start anew.

        A buffer gets its part when it is first started, because only then its size is known.
        """
        self._saved.clear()
        self._signatures.clear()
        self._kept.clear()
        for key, tensor in state.items():
            index, _, name = key.partition(".")
            self._saved.setdefault(int(index), {})[name] = tensor

    def _restore(self, index: int, saved: dict[str, torch.Tensor]) -> None:
        kept = self._kept[index].kept
        shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in kept.items()}
        if shapes != {name: (tensor.shape, tensor.dtype) for name, tensor in saved.items()}:
            logger.warning(
                f"{self.name}: the checkpoint's state of gradient buffer {index} is of a buffer with other parameters "
                "(the options of units or buckets differ), so it is dropped: rounding errors start at zero"
            )
            return
        for name, tensor in saved.items():
            kept[name].copy_(tensor)


def _stop(worker: weakref.ref[_Worker]) -> None:
    alive = worker()
    if alive is not None:
        alive.stop()
