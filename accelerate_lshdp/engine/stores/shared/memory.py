# Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
"""Memory that the ranks of one node map, and sockets by which they wake each other and notice that one has ended.

The memory has no name (memfd): the kernel frees it when the last process that maps it ends, however it ends. Ranks are
connected by Unix sockets. A byte on a socket says "look again"; what there is to see lies in the memory. Waiting this
way takes no time of the processor, which spinning would take from ranks that share it, and a peer that ends, even by a
signal, closes its sockets.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from accelerate_lshdp.runtime.failures import OtherRankError
from accelerate_lshdp.runtime.option_advice import option_advice
from accelerate_lshdp.runtime.topology import Topology


#: Tensors begin at multiples of this many bytes: a cache line.
ALIGNMENT = 64
_CONNECT_SECONDS = 60.0
_HELLO = struct.Struct("=i")


class NodeMemoryError(RuntimeError):
    """The ranks of a node cannot share memory, or one of them has gone."""


class OtherNodeRankError(NodeMemoryError, OtherRankError):
    """Another rank of the node has ended, or has failed."""


def advice_without_memory(topology: Topology) -> str:
    """What to do where the ranks of a node cannot share memory, or not use it, for the end of a sentence."""
    if topology.mixes_devices:  # which can meet nowhere else
        return "train all nodes on devices of one type"
    return f"use {option_advice('intra_node', 'collectives')}"


def require_on_all_ranks(error: str | None, topology: Topology) -> None:
    """Tells all ranks whether this one can use the memory of its node (collective over all ranks of all nodes).

    Args:
        error: what went wrong on this rank, or None.
        topology: nodes and ranks.

    Raises:
        NodeMemoryError: on all ranks, if anything went wrong on one of them.
    """
    # All ranks tell, whatever happened to them: this call is collective.
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    if any(errors):
        raise NodeMemoryError(f"{'; '.join(filter(None, errors))}; or {advice_without_memory(topology)}")


class Layout:
    """Hands out aligned places in a memory that is still to be made, so that one mapping holds everything."""

    def __init__(self) -> None:
        self.bytes = 0

    def place(self, count: int) -> int:
        """Reserves ``count`` bytes and returns their offset, a multiple of ``ALIGNMENT``."""
        offset = self.bytes
        self.bytes += -(-count // ALIGNMENT) * ALIGNMENT
        return offset


class NodeMemory:
    """One piece of memory, mapped by every rank of a node.

    Make it with :meth:`create`.

    Args:
        memory: the mapping.
        descriptor: of the memory; closed with this object.
        peers: connected sockets by local rank.
        local_rank: of this process on its node.
    """

    def __init__(self, memory: mmap.mmap, descriptor: int, peers: dict[int, socket.socket], local_rank: int) -> None:
        self.local_rank = local_rank
        self.size = len(peers) + 1
        self.gone: set[int] = set()
        self._memory = memory
        # Tensors hold this array, and it the mapping: its end can be seen before the memory is gone.
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._peers = peers
        # Sockets that do not block: `wake_peers` must not wait for a peer that does not read, and what `poll` has
        # found may have been read meanwhile.
        self._bell, self._hears = socket.socketpair()
        self._poll = select.poll()
        self._rank_of = {peer.fileno(): rank for rank, peer in peers.items()}
        for listened in (*peers.values(), self._hears):
            listened.setblocking(False)
            self._poll.register(listened, select.POLLIN)
        self._bell.setblocking(False)
        _memories.add(self)

    @staticmethod
    def missing() -> str | None:
        """The reason why ranks cannot share memory on this system, None where they can."""
        if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
            return "shared memory without a name (memfd) exists on Linux only"
        return None

    @classmethod
    def create(cls, topology: Topology, count: int) -> NodeMemory:
        """Makes the memory of this node (collective over all ranks of all nodes); it holds zeros.

        Args:
            topology: nodes and ranks.
            count: bytes.

        Raises:
            NodeMemoryError: on all ranks, if the ranks of any node cannot reach each other or there is no memory.
        """
        if topology.world_size == 1:  # it asks nobody, also where other processes are about something else
            return cls(*_join_alone(count), {}, 0)
        made = listener = error = None
        try:
            listener = _listener(topology.world_size)
        except OSError as caught:
            error = f"rank {topology.rank}: {type(caught).__name__}: {caught}"
        # All ranks tell, whatever happened to them: these calls are collective.
        addresses: list[bytes] = [b""] * topology.world_size
        dist.all_gather_object(addresses, listener.getsockname() if listener is not None else b"")
        if listener is not None:
            with listener:
                try:
                    made = _join(topology, count, listener, addresses)
                except NodeMemoryError as caught:
                    error = f"rank {topology.rank}: {caught}"
        errors: list[str | None] = [None] * topology.world_size
        dist.all_gather_object(errors, error)
        if any(errors):
            if made is not None:
                made.close()
            raise NodeMemoryError(
                f"the ranks of a node cannot share memory ({'; '.join(filter(None, errors))}). They have to be "
                "processes of one user on one machine, in one network namespace, with memory left; or "
                f"{advice_without_memory(topology)}"
            )
        return made

    def tensor(self, offset: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A view of the memory as a tensor; it keeps the memory alive."""
        return _view(self._bytes, offset, shape, dtype)

    def at_end(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when no tensor is in this memory any more, before it is unmapped.

        Neither at exit, nor in processes that are forked later, such as the workers of a loader: a device is used by
        the process that has begun with it.
        """
        process = os.getpid()
        weakref.finalize(self._bytes, lambda: callback() if os.getpid() == process else None).atexit = False

    def whole(self) -> torch.Tensor:
        """All of the memory, as bytes."""
        return self.tensor(0, (len(self._memory),), torch.uint8)

    def own_copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors in this memory as ones that this rank has for itself; nothing is copied until it writes to them.

        No rank may write to the memory from now on.
        """
        # Copy on write: all ranks of the node leave it together, and each would need memory for a whole model. The
        # kernel copies the pages that a rank does write to.
        private = np.frombuffer(
            mmap.mmap(self._descriptor, len(self._memory), access=mmap.ACCESS_COPY), dtype=np.uint8
        )
        return [
            _view(private, t.data_ptr() - self._address, t.shape, t.dtype) if t.is_contiguous() else t.clone()
            for t in tensors
        ]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this memory."""
        return 0 <= tensor.data_ptr() - self._address < len(self._memory)

    def array(self, offset: int, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """A view of the memory as an array."""
        count = int(np.prod(shape))
        return np.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).reshape(shape)

    def wake_peers(self) -> None:
        """Lets ``wait_for_wake`` of all other ranks of the node return."""
        for peer in self._peers.values():
            # A full socket holds bytes that will wake the peer; a broken one is found by `wait_for_wake`; one that
            # this rank has closed was closed with an error that says why.
            with contextlib.suppress(OSError):
                peer.send(b"!")

    def wake_self(self) -> None:
        """Lets this rank's own ``wait_for_wake`` return, in another thread."""
        with contextlib.suppress(OSError):
            self._bell.send(b"!")

    def wait_for_wake(self, seconds: float) -> None:
        """Blocks until another rank calls ``wake_peers``, this one ``wake_self``, a rank ends, or time is over."""
        # All bytes at once: they only say that something has changed, and the table in memory says what. A byte that
        # comes after this read wakes the next call, so no change is missed.
        for descriptor, _ in self._poll.poll(seconds * 1000):
            rank = self._rank_of.get(descriptor)
            source = self._hears if rank is None else self._peers[rank]
            with contextlib.suppress(BlockingIOError):
                try:
                    heard = source.recv(4096)
                except ConnectionResetError:
                    heard = b""
                # The end of a stream: the process has ended, or closed its side after an error. It would be reported
                # in every poll from now on.
                if not heard:
                    self._poll.unregister(descriptor)
                    self.gone.add(rank)

    def close(self) -> None:
        """Ends the connections; tensors keep the memory itself."""
        for end in (*self._peers.values(), self._bell, self._hears):
            end.close()


def _view(memory: np.ndarray, offset: int, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    # frombuffer refuses an empty view. All other tensors hold the mapping, which is undone with the last of them.
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


#: The memories of this process that are in use.
_memories: weakref.WeakSet[NodeMemory] = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes a rank's connections in a process that it has forked (a worker of a loader).

    The child's copies would keep them open after the rank has ended, and its peers would not notice that end.
    """
    for memory in list(_memories):
        memory.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _listener(ranks: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # An abstract address: no file that could be left behind. The kernel chooses a free one.
        listener.bind("")
        listener.listen(ranks)
    except OSError:
        listener.close()
        raise
    return listener


def _make(count: int) -> int:
    """Makes memory without a name, of zeros; returns its descriptor.

    Raises:
        OSError: there is not as much.
    """
    descriptor = os.memfd_create("lshdp", os.MFD_CLOEXEC)
    try:
        # Taken now: a machine without memory says so here, and not by a signal in the middle of training.
        os.posix_fallocate(descriptor, 0, max(count, 1))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _join_alone(count: int) -> tuple[mmap.mmap, int]:
    """Makes and maps the memory of a node that has one rank, in a world of one."""
    try:
        descriptor = _make(count)
        return mmap.mmap(descriptor, max(count, 1)), descriptor
    except (OSError, ValueError) as error:
        raise NodeMemoryError(f"{type(error).__name__}: {error}") from error


def _join(topology: Topology, count: int, listener: socket.socket, addresses: list[bytes]) -> NodeMemory:
    """Connects the ranks of this node with each other; the first one makes the memory and hands it to the others."""
    local_rank = topology.local_rank
    ranks = topology.node_groups[topology.node]
    peers: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _CONNECT_SECONDS
    descriptor = -1
    try:
        if local_rank == 0:
            descriptor = _make(count)
        # Each rank connects to those before it and accepts those after it, so each pair has one connection. A connect
        # succeeds before the other side accepts: all listen by now, as they have exchanged their addresses.
        for other in range(local_rank):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peers[other] = peer
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            peer.connect(addresses[ranks[other]])
            peer.sendall(_HELLO.pack(local_rank))
            if other == 0:
                _, (descriptor, *_), _, _ = socket.recv_fds(peer, 1, 1)
        while len(peers) < len(ranks) - 1:
            listener.settimeout(max(0.1, deadline - time.monotonic()))
            peer, _ = listener.accept()
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            # Any user on the machine can reach an abstract address, and would get the memory's descriptor.
            if _user_of(peer) != os.getuid():
                peer.close()
                continue
            (other,) = _HELLO.unpack(peer.recv(_HELLO.size, socket.MSG_WAITALL))
            peers[other] = peer
            if local_rank == 0:
                socket.send_fds(peer, [b"!"], [descriptor])
        os.set_inheritable(descriptor, False)  # one that came through a socket is; a program started later needs none
        memory = mmap.mmap(descriptor, max(count, 1))
    except (OSError, ValueError, struct.error) as error:
        for peer in peers.values():
            peer.close()
        if descriptor >= 0:
            os.close(descriptor)
        raise NodeMemoryError(f"{type(error).__name__}: {error}") from error
    return NodeMemory(memory, descriptor, peers, local_rank)


def _user_of(peer: socket.socket) -> int:
    """The user who runs the process at the other end."""
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user
